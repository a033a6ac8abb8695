#!/usr/bin/env bash
# Smokes the training files that changed, for continuous integration: action.yml and the examples of docs/ci.md run it
# in the repository that has the files. Exit code: 0, 1 if a file failed, 2 if a file is wrong.
#
#   AGAINST=origin/main bash scripts/ci_smoke.sh
#
# AGAINST  the commit or branch to compare with; default: HEAD~1
# FILES    files and folders, separated by spaces; default: those that changed since AGAINST
# FLAGS    further flags of smoke
# REPORTS  the folder of smoke.xml (JUnit) and smoke.md; default: smoke-reports
# PYTHON   a Python with the packages; default: that of scripts/setup_env.sh

set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
against="${AGAINST:-HEAD~1}"
reports="${REPORTS:-smoke-reports}"
python="${PYTHON:-$root/.venv/bin/python}"

# A checkout of one commit, or of one branch, does not have the other version.
if ! git cat-file -e "$against^{commit}" 2>/dev/null; then
    depth=()
    if [ "$(git rev-parse --is-shallow-repository)" = true ]; then depth=(--depth=1); fi
    git fetch --quiet ${depth[@]+"${depth[@]}"} origin "${against#origin/}"
    if ! git cat-file -e "$against^{commit}" 2>/dev/null; then against=FETCH_HEAD; fi
fi
mkdir -p "$reports"
code=0
# FILES and FLAGS are words.
# shellcheck disable=SC2086
"$python" "$root/run_trainer.py" smoke ${FILES:-} --against "$against" --output_dir "$reports/runs" \
    --junit "$reports/smoke.xml" --summary "$reports/smoke.md" ${FLAGS:-} || code=$?
rm -rf "$reports/runs"
if [ -n "${GITHUB_STEP_SUMMARY:-}" ] && [ -f "$reports/smoke.md" ]; then
    cat "$reports/smoke.md" >>"$GITHUB_STEP_SUMMARY"
fi
exit "$code"
