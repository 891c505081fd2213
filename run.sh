#!/usr/bin/env bash
# One command from a fresh clone to a result.
#
#   ./run.sh [flags]        train the track `tiny`, or another --track; --help lists all flags
#   ./run.sh test [args]    ruff, mypy and pytest, without the tests marked slow
#
# Environment, all optional:
#   PYTHON                  interpreter that makes .venv, 3.11 or newer (default python3)
#   NPROC                   processes on this machine (default: one a GPU; tiny and small take one)
#
# Exit codes: those of train_gpt.py (torchrun makes every failure 1) or pytest; 2: it cannot start.
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")"

readonly VENV_PYTHON=.venv/bin/python

stop() {
    printf 'run.sh: %s\n' "$*" >&2
    exit 2
}

install() { # install the requirements in $1 into .venv; .venv/$1 holds those installed last
    local python=${PYTHON:-python3}
    if [[ -x $VENV_PYTHON ]] && cmp -s "$1" ".venv/$1"; then return; fi
    if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        "$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
            stop "$python is not Python 3.11 or newer with venv (Debian: python3-venv); set PYTHON"
        "$python" -m venv --clear .venv || stop "cannot make $PWD/.venv"
    elif PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS="" \
        "$VENV_PYTHON" -m pip install --no-index -r "$1" >/dev/null 2>&1; then
        cp "$1" ".venv/$1" # pip had nowhere to look, so all is there: say nothing
        return
    fi
    echo "installing $1 into $PWD/.venv, a minute or more. It takes 1 GB of disk with a torch for"
    echo "CPUs and several with the one for CUDA, which PyPI has for Linux. PIP_INDEX_URL or"
    echo "PIP_EXTRA_INDEX_URL may name an index with the smaller one, HTTPS_PROXY a proxy."
    # --no-compile: Python compiles what it imports, an eighth of what pip would spend 17 s on.
    "$VENV_PYTHON" -m pip install --no-input --no-compile --disable-pip-version-check \
        --timeout 15 --retries 2 -r "$1" ||
        stop "pip could not install $1, for the reason above. (from versions: none) means that no" \
            "index answered: set HTTPS_PROXY or PIP_INDEX_URL. Then start again"
    cp "$1" ".venv/$1"
}

alone() { # run a command while no other start of this clone runs one
    if command -v flock >/dev/null; then flock 9; fi
    "$@"
} 9<. # the lock ends with the function

fetch() { # fetch COUNT: of FineWeb's shards the one for validation and the first COUNT for training
    local folder=data/fineweb10B missing=() name shard
    for ((shard = 0; shard <= $1; shard++)); do
        printf -v name 'fineweb_train_%06d.bin' "$shard"
        ((shard)) || name=fineweb_val_000000.bin
        [[ -s $folder/$name ]] || missing+=("$name")
    done
    ((${#missing[@]})) || return 0
    echo "fetching ${#missing[@]} files of 0.2 GB into $folder; an interrupted start continues"
    echo "(--dry-run measures a run's time and memory without them)"
    # The revision is a commit, which no hub can change; the trainer checks every token.
    HF_HUB_DISABLE_IMPLICIT_TOKEN=1 "$VENV_PYTHON" -m huggingface_hub.cli.hf download \
        kjj0/fineweb10B-gpt2 "${missing[@]}" --repo-type dataset --local-dir "$folder" \
        --revision 889765ea1f903759787add96995d81171b632d0c ||
        stop "FineWeb's shards could not be fetched, for the reason above. HTTPS_PROXY names a" \
            "proxy, HF_ENDPOINT a mirror of huggingface.co. Without network, put these files" \
            "into $folder, or give their folder as --data-dir: ${missing[*]}"
}

train() {
    # torchrun would look up the name of this host, which not every network resolves.
    local track="" data=fetch device="" previous="" argument processes=1
    local options=(--standalone --local-addr 127.0.0.1)
    for argument in "$@"; do
        [[ $previous != --track ]] || track=$argument
        [[ $previous != --device ]] || device=$argument
        case $argument in
            --track=*) track=${argument#*=} ;;
            --data-dir*) data=own ;;
            --dry-run*) [[ $data == own ]] || data=random ;;
            --device=*) device=${argument#*=} ;;
            -h | --help | --print-config) data=own NPROC=1 ;;
        esac
        previous=$argument
    done
    [[ $track ]] || set -- --track tiny "$@"
    track=${track:-tiny}
    alone install requirements.txt
    if [[ $track == short || $track == steps ]]; then # the others have few rows a step
        processes=$("$VENV_PYTHON" -c 'import torch; print(torch.cuda.device_count())')
        if ((processes == 0)) && [[ $data != own && $device != cpu && $device != mps ]]; then
            [[ $data != random ]] || stop "--dry-run of --track $track times a GPU, and" \
                "torch finds none here: nothing was fetched. docs/running.md has the memory that" \
                "it needs; --dry-run --device cpu times the CPU"
            stop "--track $track is for GPUs, and torch finds none here: nothing was fetched." \
                "Any machine runs --track small. To train on the CPU all the same: --device cpu"
        fi
        case $data,$track in
            fetch,short) alone fetch 9 ;;
            fetch,steps) alone fetch 18 ;;
        esac
    fi
    processes=${NPROC:-$processes}
    [[ $processes =~ ^[0-9]+$ ]] || stop "NPROC is $processes: it must be a number"
    ((processes > 1)) || exec "$VENV_PYTHON" train_gpt.py "$@"
    # Left to itself, torchrun would handle the hangup that nohup has it ignore, and end the run.
    [[ -z $(trap -p HUP) ]] || options+=(--signals-to-handle SIGTERM,SIGINT,SIGQUIT)
    # A stopped run saves first; after 30 s, its default, torchrun would kill a slow save.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
    exec "$VENV_PYTHON" -m torch.distributed.run "${options[@]}" --nproc_per_node "$processes" \
        train_gpt.py "$@"
}

check_code() { # pytest comes last, so that its closing line ends the output
    local status=0
    unset PYTHONDONTWRITEBYTECODE # each of the many processes would compile torch's source anew
    alone install requirements.txt
    alone install requirements-dev.txt
    "$VENV_PYTHON" -m ruff check || status=1
    "$VENV_PYTHON" -m mypy || status=1
    echo "tests marked slow are left out: $VENV_PYTHON -m pytest -m slow runs them"
    # The tests of one file share what they set up, so they stay in one process.
    "$VENV_PYTHON" -m pytest -m 'not slow' --numprocesses 2 --dist loadfile "$@" || status=$?
    exit "$status"
}

case ${1:-} in
    test) check_code "${@:2}" ;;
    -* | "") train "$@" ;;
    *) stop "$1 is not a command: ./run.sh test runs the tests, flags of a run begin with --" ;;
esac
