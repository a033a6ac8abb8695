#!/usr/bin/env bash
# Checks everything: sets up .venv with what the tests need, then ruff, flake8, mypy and all tests (tests/run_suite.py).
# The last line sums up: "N passed, N failed, N skipped"; any failure ends with an exit code that is not zero.
#
#   bash scripts/test.sh [arguments of pytest]       for example: bash scripts/test.sh tests/unit -k schedule
#
# PYTHON=/path/to/python chooses the interpreter.

set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bash "$root/scripts/setup_env.sh" test
cd "$root"
export PATH="$root/.venv/bin:$PATH"

python -m ruff check .
python -m flake8 .
python -m mypy
if [ $# -eq 0 ]; then
    exec python tests/run_suite.py
fi
# A file of tests stays in one process: it shares its compiled models.
python -m pytest -n auto --maxprocesses 4 --dist loadfile --durations=15 "$@"
