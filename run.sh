#!/usr/bin/env bash
# One command from a fresh clone to a result. Flags that name files are read from this folder.
#
#   ./run.sh [flags]        train: every flag goes to train_gpt.py, ./run.sh --help lists them
#   ./run.sh test [args]    ruff, mypy, then pytest with these arguments
#
# Environment, all optional:
#   PYTHON                  the interpreter that .venv is made with, 3.11 or newer (default python3)
#   NPROC                   processes on this machine (default: one per visible GPU, one where there is none)
#   NNODES NODE_RANK MASTER_ADDR MASTER_PORT    several machines: the same command on each, port 29500 by default.
#                           They share no files: each has its environment and data, NODE_RANK=0 writes logs and
#                           checkpoints. Once ready they wait ten minutes for each other.
#   NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME       the network interface (of ip -br addr) through which ranks on GPUs and
#                           on CPUs talk, where a machine has several: that with the address on MASTER_ADDR's network
#   SHARDS                  FineWeb training shards to have on disk (default: what the track needs)
#
# .venv and the data are made once and made again only when something they depend on has changed. Exit codes: those of
# train_gpt.py (torchrun turns every failure into 1), those of pytest, or 2 when nothing could be started.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}") # on its own line: a failure must end the script, not leave it elsewhere
cd "$here"

readonly VENV=.venv VENV_PYTHON=.venv/bin/python INSTALL_LOG=.venv/install.log
readonly UNFINISHED=.venv/unfinished # there while .venv is being changed; left over, it tells of an install cut short
readonly NEEDED_MB=2000              # the CPU build unpacks to 1.3 GB; archives and caches pass through the disk too
readonly FINEWEB=data/fineweb10B

background="" # a process to end with this script: started with &, it does not hear Ctrl-C
trap '[[ -z $background ]] || kill "$background" 2>/dev/null || true' EXIT

stop() {
    printf 'run.sh: %s\n' "$*" >&2
    exit 2
}

require_count() { # require_count NAME VALUE
    [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || stop "$1='$2' is not a number; give a whole number from 1, or unset $1"
}

check_settings() {
    local nodes=${NNODES:-1}
    require_count NPROC "${NPROC:-1}"
    require_count NNODES "$nodes"
    require_count SHARDS "${SHARDS:-1}"
    ((nodes > 1)) || return 0
    [[ ${NODE_RANK:-} =~ ^(0|[1-9][0-9]{0,5})$ && $NODE_RANK -lt $nodes ]] ||
        stop "NODE_RANK='${NODE_RANK:-}' is not a rank; with NNODES=$nodes give each machine one of 0 to $((nodes - 1))"
    [[ -n ${MASTER_ADDR:-} ]] || stop "NNODES=$nodes needs MASTER_ADDR, the address of the machine of NODE_RANK=0"
    require_count MASTER_PORT "${MASTER_PORT:-29500}"
    ((${MASTER_PORT:-29500} < 65536)) || stop "MASTER_PORT='$MASTER_PORT' is not a port; give one of 1024 to 65535"
}

# Environment ----------------------------------------------------------------------------------------------------------

patiently() { # patiently LABEL LOG COMMAND...: the output goes to LOG, its last line to the terminal every few seconds
    local label=$1 log=$2 started=$SECONDS shown=0 line
    shift 2
    echo "$label"
    "$@" >"$log" 2>&1 &
    background=$!
    while kill -0 "$background" 2>/dev/null; do
        sleep 0.1
        ((SECONDS - started >= shown + 5)) || continue
        shown=$((SECONDS - started))
        read -r line < <(tail -n 1 "$log") || true
        printf '  %3d s  %s\n' "$shown" "${line:0:100}"
    done
    local ended=$background status=0
    background=""
    wait "$ended" || status=$?
    return "$status"
}

checksum() {
    if command -v sha256sum >/dev/null; then sha256sum <"$1"; else shasum -a 256 <"$1"; fi
}

pins() { # what an install of requirements file $1 depends on
    echo "$("${PYTHON:-$VENV_PYTHON}" -V 2>&1) $(checksum "$1")"
}

venv_is_usable() {
    local version
    [[ ! -e $UNFINISHED ]] && version=$("$VENV_PYTHON" -V 2>/dev/null) || return 1
    [[ -z ${PYTHON:-} || $("$PYTHON" -V 2>&1) == "$version" ]]
}

check_disk() {
    local free_mb
    free_mb=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
    ((free_mb >= NEEDED_MB)) ||
        stop "only $free_mb MB are free under $PWD but the environment needs $NEEDED_MB (a CUDA build more): make room"
}

make_venv() {
    local python=${PYTHON:-python3} version
    version=$("$python" -V 2>/dev/null) ||
        stop "cannot run $python; install Python 3.11 or newer, or name one: PYTHON=/path/to/python3 ./run.sh"
    [[ $version =~ ^Python\ 3\.([0-9]+) && ${BASH_REMATCH[1]} -ge 11 ]] ||
        stop "$python is $version and 3.11 or newer is needed; name a newer one: PYTHON=/path/to/python3 ./run.sh"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        stop "$python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
    { rm -rf "$VENV" && mkdir "$VENV" && touch "$UNFINISHED"; } 2>/dev/null ||
        stop "cannot write $PWD/$VENV; make the folder writable or clone into another one"
    patiently "making $VENV with $version" "$INSTALL_LOG" "$python" -m venv "$VENV" ||
        stop "$python -m venv failed: $(tail -n 1 "$INSTALL_LOG") (log $INSTALL_LOG)"
}

explain_pip_failure() { # explain_pip_failure FILE STATUS
    ((${2} > 128)) || rm -f "$UNFINISHED" # pip was not killed: what it had finished is whole
    if grep -q 'No space left on device' "$INSTALL_LOG"; then
        stop "the disk is full, pip could not install $1; make room and start again (log $INSTALL_LOG)"
    elif grep -Eq 'Connection|connection|name resolution|timed out' "$INSTALL_LOG"; then
        stop "pip could not reach its package index to install $1; check the network and start again (log $INSTALL_LOG)"
    fi
    stop "pip could not install $1: $(tail -n 1 "$INSTALL_LOG") (log $INSTALL_LOG)"
}

install() { # bring .venv to the pins of requirements file $1, unless they are what was last installed
    local stamp=$VENV/$1.installed
    [[ -e $UNFINISHED || $(cat "$stamp" 2>/dev/null) != "$(pins "$1")" ]] || return 0
    check_disk
    venv_is_usable || make_venv
    touch "$UNFINISHED" 2>/dev/null ||
        stop "cannot write $PWD/$VENV; make the folder writable or clone into another one"
    patiently "installing $1 (a minute or more, log $INSTALL_LOG)" "$INSTALL_LOG" \
        "$VENV_PYTHON" -m pip install --no-input --disable-pip-version-check --progress-bar off -r "$1" ||
        explain_pip_failure "$1" $?
    pins "$1" >"$stamp"
    rm "$UNFINISHED"
}

# Data -----------------------------------------------------------------------------------------------------------------

track=tiny trains=yes makes_data=yes # what the flags say; set by read_flags

read_flags() {
    local previous="" argument
    for argument in "$@"; do
        [[ $previous != --track ]] || track=$argument
        case $argument in
            --track=*) track=${argument#*=} ;;
            --data-dir | --data-dir=*) makes_data="" ;;
            -h | --help | --print-config) trains="" makes_data="" ;; # print something and train nothing
        esac
        previous=$argument
    done
}

fetch_fineweb() { # fetch_fineweb SHARDS: about three quarters of a shard's tokens are trained on, cut documents lose the rest
    local shards=${SHARDS:-$1} held
    held=$(compgen -G "$FINEWEB/fineweb_train_*.bin" | wc -l) || true
    [[ -e $FINEWEB/fineweb_val_000000.bin ]] && ((held >= shards)) && return
    echo "downloading FineWeb: $shards training shards and the validation shard, about $(((shards + 5) / 5)) GB in all"
    "$VENV_PYTHON" -m data.cached_fineweb "$shards"
}

prepare_data() { # a track that does not exist is left to train_gpt.py to explain
    [[ $makes_data ]] || return 0
    case $track in
        tiny) [[ -e data/corpus/corpus.json ]] || "$VENV_PYTHON" -m data.corpus ;;
        short) fetch_fineweb 9 ;;
        medium) fetch_fineweb 36 ;;
        steps) fetch_fineweb 18 ;;
    esac
}

# The two jobs ---------------------------------------------------------------------------------------------------------

gpu_count() {
    local gpus visible
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || true
    visible=$(awk -F , '{ print NF }' <<<"${CUDA_VISIBLE_DEVICES-}")
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]] && ((visible < gpus)); then gpus=$visible; fi
    echo "$gpus"
}

process_count() {
    local processes
    if [[ $track == tiny ]]; then # its batch is four rows: small enough for one process, whatever the GPUs
        processes=${NPROC:-1}
    else
        processes=${NPROC:-$(gpu_count)}
    fi
    echo $((processes > 1 ? processes : 1))
}

train() {
    local processes nodes=${NNODES:-1} cores machines=(--standalone)
    [[ $trains ]] || exec "$VENV_PYTHON" train_gpt.py "$@"
    processes=$(process_count)
    if ((processes * nodes == 1)); then exec "$VENV_PYTHON" train_gpt.py "$@"; fi
    if ((nodes > 1)); then
        machines=(--nnodes "$nodes" --node_rank "$NODE_RANK"
            --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
    fi
    if [[ -z ${OMP_NUM_THREADS:-} ]]; then # processes that share the cores must not each start a thread on all of them
        cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
        export OMP_NUM_THREADS=$((cores > processes ? cores / processes : 1))
    fi
    exec "$VENV_PYTHON" -m torch.distributed.run "${machines[@]}" --nproc_per_node "$processes" train_gpt.py "$@"
}

check_code() { # pytest comes last, so that its closing line ends the output; an earlier fault still fails the whole
    local status=0
    "$VENV_PYTHON" -m ruff check || status=1
    patiently "checking types (half a minute the first time)" "$VENV/mypy.log" "$VENV_PYTHON" -m mypy || status=1
    cat "$VENV/mypy.log"
    ((status == 0)) || echo "run.sh: the faults above fail this check, whatever the tests say" >&2
    "$VENV_PYTHON" -m pytest --numprocesses 2 --dist loadfile "$@" || status=$? # a file's tests share what they set up
    exit "$status"
}

main() {
    export RUN_STARTED=${EPOCHSECONDS:-} # from here the trainer counts the seconds to its first step; empty in old bash
    if [[ ${1:-} == test ]]; then
        install requirements.txt
        install requirements-dev.txt
        check_code "${@:2}"
    fi
    check_settings
    read_flags "$@"
    install requirements.txt
    prepare_data
    train "$@"
}

main "$@"
