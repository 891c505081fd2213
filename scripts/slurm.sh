#!/usr/bin/env bash
# Example: one run on several machines under Slurm, which goes on where it was when the job is pre-empted or out of time.
#
#   sbatch [--nodes=4 ...] scripts/slurm.sh --track medium [flags]    from the clone; the flags go to train_gpt.py
#
# Every machine needs a clone at this path, or all of them share one. Environment and data are made before the machines
# meet, and a shared clone must have them already: ./run.sh --track medium --dry-run, once, on a machine with network.
# Logs and checkpoints are written by the first machine, where the next job must find them: share them or come back.
# Slurm sends the signal to all processes; they save within seconds, and torchrun grants them thirty. For pre-emption
# the partition's GraceTime must be as long. To name a network: sbatch --export=ALL,NCCL_SOCKET_IFNAME=eth1 ...
#SBATCH --job-name=speedrun
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@60
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this script with sbatch}"

was_interrupted() { # whether the run that began after file $1 was ended by a signal, and so can go on
    [[ ! logs/registry.jsonl -ot $1 ]] && tail -n 1 logs/registry.jsonl | grep -q '"status": "interrupted"'
}

began=$(mktemp)
trap 'rm -f "$began"' EXIT
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR NNODES=$SLURM_JOB_NUM_NODES MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

status=0
# A machine that ends early must not take away from the first the time to save.
# shellcheck disable=SC2016  # expanded on each machine
srun --kill-on-bad-exit=0 --wait=0 bash -c 'NODE_RANK=$SLURM_NODEID exec ./run.sh "$@"' run.sh --resume auto "$@" ||
    status=$?
if ((status)) && was_interrupted "$began"; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
