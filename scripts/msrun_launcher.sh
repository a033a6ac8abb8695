#!/usr/bin/env bash
# Runs the trainer on several devices, with the arguments of MindSpore Transformers' script of this name:
#
#   bash scripts/msrun_launcher.sh "run_trainer.py --config FILE [flags]" [WORKER_NUM]
#   bash scripts/msrun_launcher.sh "..." WORKER_NUM MASTER_PORT LOG_DIR JOIN CLUSTER_TIME_OUT
#   bash scripts/msrun_launcher.sh "..." WORKER_NUM LOCAL_WORKER MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR JOIN CLUSTER_TIME_OUT
#
# By default 8 workers start on this machine, and JOIN is False: the job runs in the background. The first argument is
# split into words as a shell does (quotes work), but no shell runs anything in it.
#
# PYTHON=/path/to/python chooses the interpreter; otherwise that of an active environment, .venv, or PATH. Also used:
# MF_LOG_SUFFIX (end of the log folder's name), PLOG_REDICT_TO_OUTPUT=True (Ascend's logs into output/plog).

set -euo pipefail

case "${1:-}" in
-h | --help)
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

python="${PYTHON:-}"
if [ -z "$python" ] && [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x "$root/.venv/bin/python" ]; then
    python="$root/.venv/bin/python"
fi
if [ -z "$python" ]; then
    python="$(command -v python || command -v python3)"
fi

redirect="${PLOG_REDICT_TO_OUTPUT:-${PLOG_REDIRECT_TO_OUTPUT:-False}}"
if [ "$redirect" != False ]; then
    export ASCEND_PROCESS_LOG_PATH="$PWD/output/plog${MF_LOG_SUFFIX:+_$MF_LOG_SUFFIX}"
fi

exec "$python" "$root/run_trainer.py" launch --positional "$@"
