#!/usr/bin/env bash
# What this machine's GPU shows: its tests, its kernels' accuracy and rates, benchmarks, and one short training.
#
#   scripts/gpu_check.sh [STAGE...]     of tests, kernels, bench and train; all of them by default
#
# Each has eight minutes, from a cold cache; no network is needed, as data are random tokens: speed does not depend on
# them. Figures go to records/benchmarks/DATE_GPU.json and a page beside it, to which later stages of the day are added.
# Environment: PYTHON, an interpreter that has the requirements (default python3); GPU_CHECK_RESULTS, another folder for
# the figures; GPU_CHECK_DEVICE=cpu, everything on the CPU at toy sizes, to try the script. Exit codes: 0, 1 when
# something failed (the rest is tried nevertheless), 2 when nothing could be started.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly STAGE_SECONDS=480 PYTHON=${PYTHON:-python3}
date=$(date -u +%F) work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT; trap 'exit 130' INT

stop() {
    printf 'gpu_check.sh: %s\n' "$*" >&2
    exit 2
}

run() { # run NAME COMMAND...: a part of the stage; what it says, and how it ended, is kept for the report
    local name=$1 began=$SECONDS left=$((ends - SECONDS)) status=0 words
    words=${*:2}
    words=${words//"$PYTHON"/python}
    words=${words//"$work"/TMP}
    echo "$stage: $words"
    timeout --foreground -k 20 $((left > 1 ? left : 1)) "${@:2}" >"$folder/$name.out" 2>"$folder/$name.err" || status=$?
    printf '%s\t%s\t%s\t%s\n' "$name" "$status" $((SECONDS - began)) "$words" >>"$folder/ran"
    ((status == 0)) || tail -n 5 "$folder/$name.out" "$folder/$name.err" >&2
}

shards() { # once: of every track, some tokens more frequent than others, in documents of 600 on average
    [[ -e $work/tiny ]] || run shards "$PYTHON" - "${tokens[@]}" <<'END'
import sys
from pathlib import Path

import numpy as np

from data.shards import write_shard

random = np.random.default_rng(0)
for folder, bos, *counts in zip(*[iter(sys.argv[1:])] * 4, strict=True):
    Path(folder).mkdir(exist_ok=True)
    for kind, count in zip(("train", "val"), map(int, counts), strict=True):
        tokens = (int(bos) * random.random(count) ** 3).astype(np.uint16)
        tokens[random.random(count) < 1 / 600] = tokens[0] = bos
        write_shard(Path(folder, f"random_{kind}_000000.bin"), tokens)
END
}

tests() {
    run gpu "$PYTHON" -m pytest -p no:cacheprovider -m gpu "$tests"
}

kernels() {
    run accuracy "$PYTHON" -m pytest -p no:cacheprovider -m gpu -k "kernels or attention or head" "$tests"
    run quality "$PYTHON" scripts/optim_quality.py --sizes "$size" --backends "${backends[@]}" --json "$folder/quality.json"
    run rates "$PYTHON" scripts/bench_optim.py --sets "${sets[0]}" --json "$folder/rates.json"
}

bench() {
    shards
    run short "$PYTHON" scripts/bench_step.py --json --overhead --rounds "$rounds" --steps 4 -- "${short[@]}"
    run tiny "$PYTHON" scripts/bench_step.py --json --overhead --rounds "$rounds" -- "${tiny[@]}"
    run optimizers "$PYTHON" scripts/bench_optim.py --sets "${sets[@]}" --json "$folder/optimizers.json"
}

train() {
    shards
    local folders=(--log-dir "$work/logs" --checkpoint-dir "$work/checkpoints")
    run tiny "$PYTHON" train_gpt.py "${tiny[@]}" "${folders[@]}"
    run short "$PYTHON" train_gpt.py "${short[@]}" "${folders[@]}"
}

tests=tests sets=(short gpt2s tiny) backends=(plain gram triton) size=768x3072 rounds=3
tokens=("$work/short" 50256 12000000 1100000 "$work/tiny" 1023 1000000 300000) # folder, BOS, to train and validate on
short=(--track short --data-dir "$work/short" --val-tokens 1048576 --steps 40 --extension 4)
tiny=(--track tiny --data-dir "$work/tiny" --val-sha256= --steps 60)
if [[ ${GPU_CHECK_DEVICE:-} == cpu ]]; then
    tests=tests/test_kernels.py sets=(toy) backends=(plain gram) size=8x8 rounds=1
    tokens=("$work/short" 511 99000 1000 "$work/tiny" 511 99000 1000)
    toy=(--device cpu --compile off --layers tiny --dim 32 --head-dim 16 --vocab-size 512 --bos 511 --windows 3 --steps 12
        --sequence 128 --batch-tokens 256 --micro-batch 256 --val-sequence 128 --val-batch 256 --val-tokens 256)
    short+=("${toy[@]}") tiny+=("${toy[@]}")
else
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        stop "$PYTHON has no torch that finds a GPU. GPU_CHECK_DEVICE=cpu tries the script without one."
fi
(($#)) || set -- tests kernels bench train
for stage in "$@"; do
    [[ $stage =~ ^(tests|kernels|bench|train)$ ]] || stop "no stage '$stage'; there are tests, kernels, bench and train"
done
results=${GPU_CHECK_RESULTS:-records/benchmarks} failed=""
mkdir -p "$results" && [[ -w $results ]] || stop "cannot write into $results; name another folder in GPU_CHECK_RESULTS"
for stage in "$@"; do
    folder=$work/$stage-figures ends=$((SECONDS + STAGE_SECONDS))
    mkdir -p "$folder"
    "$stage"
    "$PYTHON" scripts/gpu_report.py "$results" "$date" "$folder" || failed+=" $stage"
done
[[ -z $failed ]] || { echo "gpu_check.sh: failed:$failed" >&2 && exit 1; }
