#!/usr/bin/env bash
# From a fresh clone to generated text: sets up .venv, trains configs/quickstart.yaml, then continues three prompts.
#
#   bash scripts/quickstart.sh [flags of run_trainer.py for the training]
#
# The first call downloads MindSpore; later ones need no network. PYTHON=/path/to/python chooses the interpreter.

set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bash "$root/scripts/setup_env.sh" run
cd "$root"
export PATH="$root/.venv/bin:$PATH"

show() {
    printf '\n$%s\n' "$(printf ' %q' "$@")"
    "$@"
}

show python run_trainer.py --config configs/quickstart.yaml "$@"

# The flags may have changed the folder, and the model: its config.yaml has all that this training was told.
folder="$(python run_trainer.py plan --json --config configs/quickstart.yaml "$@" |
    python -c 'import json, sys; print(json.load(sys.stdin)["output_dir"])')"
show python run_trainer.py --config "$folder/config.yaml" --run_mode predict \
    --load_checkpoint "$folder/checkpoints" --predict_data 'def ' 'import ' 'class '
