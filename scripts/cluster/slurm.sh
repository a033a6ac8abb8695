#!/usr/bin/env bash
# One job on several nodes of a Slurm cluster. Submit it in the repository's folder, which all nodes see:
#
#   sbatch --nodes=4 scripts/cluster/slurm.sh "run_trainer.py --config configs/quickstart.yaml"
#
# It starts scripts/msrun_launcher.sh once on each node, with nine arguments. Environment variables: WORKERS_PER_NODE
# (ranks on a node, default 8), MASTER_PORT (the scheduler's, default derived from the job id), CLUSTER_TIME_OUT (how
# many seconds the nodes wait for each other, default 600), PYTHON (default .venv's). Logs: output/msrun_log/slurm-JOB.
#
#SBATCH --job-name=run_trainer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --output=slurm-%j.out
# Two minutes before the time limit the ranks are told to save a checkpoint and end.
#SBATCH --signal=TERM@120

set -euo pipefail

if [ $# -ne 1 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
    echo 'usage: sbatch --nodes=2 scripts/cluster/slurm.sh "run_trainer.py --config FILE [flags]"' >&2
    exit 2
fi

# Slurm runs a copy of this file, from another folder.
root="${SLURM_SUBMIT_DIR:-$PWD}"
launcher="$root/scripts/msrun_launcher.sh"
if [ ! -f "$launcher" ]; then
    echo "error: there is no $launcher: run sbatch in the repository's folder" >&2
    exit 2
fi

nodes="$SLURM_JOB_NUM_NODES"
workers_per_node="${WORKERS_PER_NODE:-8}"
# Even: the launchers of the nodes talk on the port after it.
master_port="${MASTER_PORT:-$((20000 + 2 * (SLURM_JOB_ID % 5000)))}"
cluster_time_out="${CLUSTER_TIME_OUT:-600}"
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
master_addr="${hosts%%$'\n'*}"

# Since 22.05 srun does not take this over from sbatch.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-}"
[ -n "$SRUN_CPUS_PER_TASK" ] || unset SRUN_CPUS_PER_TASK

# By it the launchers know each other. Slurm hands its environment on to srun's tasks; the workers do not get this one.
RUN_TRAINER_SECRET="${RUN_TRAINER_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
export RUN_TRAINER_SECRET

# The node's number is only known on the node. A node that fails ends the others itself; --wait is for one that cannot.
# shellcheck disable=SC2016
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --wait=120 \
    bash -c 'exec bash "$1" "$2" "$3" "$4" "$5" "$6" "$SLURM_NODEID" "$7" True "$8"' node \
    "$launcher" "$1" "$((nodes * workers_per_node))" "$workers_per_node" "$master_addr" "$master_port" \
    "output/msrun_log/slurm-$SLURM_JOB_ID" "$cluster_time_out"
