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
# Exit codes: those of train_gpt.py (torchrun makes every failure 1) or pytest; 2: no environment.
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
    fi
    echo "installing $1, a minute or more; torch's own wheel for Linux brings CUDA, several GB:"
    echo "PIP_INDEX_URL or PIP_EXTRA_INDEX_URL may name an index with a smaller build, for CPUs"
    # --no-compile: Python compiles what it imports, an eighth of what pip would spend 17 s on.
    "$VENV_PYTHON" -m pip install --quiet --no-input --no-compile --disable-pip-version-check \
        -r "$1" ||
        stop "pip could not install $1, for the reason above; fix it and start again"
    cp "$1" ".venv/$1"
}

prepare() { # prepare TRACK: environment and large data; train_gpt.py builds the text of the others
    if command -v flock >/dev/null; then flock 9; fi # another start of this clone may be at it
    install requirements.txt
    case $1 in
        short) fetch 9 0 ;;
        steps) fetch 18 0-1 ;;
    esac
} 9<. # the lock ends with the function

fetch() { # fetch COUNT TENS: FineWeb's validation shard and the training shards with these tens
    local folder=data/fineweb10B held
    held=$(compgen -G "$folder/fineweb_train_*.bin" | wc -l) || true
    if [[ -e $folder/fineweb_val_000000.bin ]] && ((held >= $1)); then return; fi
    echo "fetching at least $1 training shards of 0.2 GB; start again after an interruption"
    echo "what a run takes then, in time, memory and dollars: docs/running.md"
    # The revision is a commit, which no hub can change; the trainer checks every token.
    HF_HUB_DISABLE_IMPLICIT_TOKEN=1 "$VENV_PYTHON" -m huggingface_hub.cli.hf download \
        kjj0/fineweb10B-gpt2 --repo-type dataset --local-dir "$folder" \
        --revision 889765ea1f903759787add96995d81171b632d0c \
        --include "fineweb_val_*" --include "fineweb_train_0000[$2]?.bin"
}

train() {
    local track="" data=yes previous="" argument processes options=(--standalone)
    for argument in "$@"; do
        [[ $previous != --track ]] || track=$argument
        case $argument in
            --track=*) track=${argument#*=} ;;
            --data-dir*) data="" ;;
            -h | --help | --print-config) data="" NPROC=1 ;;
        esac
        previous=$argument
    done
    [[ $track ]] || set -- --track tiny "$@"
    track=${track:-tiny}
    prepare "${data:+$track}"
    processes=${NPROC:-1}
    if [[ -z ${NPROC:-} && $track != tiny && $track != small ]]; then # these have few rows a step
        processes=$("$VENV_PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')
    fi
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
    prepare ""
    install requirements-dev.txt
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
