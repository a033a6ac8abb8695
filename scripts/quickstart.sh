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

# Flags may have changed the output folder and the model: the config.yaml in it has the settings of this training.
folder="$(python run_trainer.py plan --json --config configs/quickstart.yaml "$@" |
    python -c 'import json, sys; print(json.load(sys.stdin)["output_dir"])')"
show python run_trainer.py --config "$folder/config.yaml" --run_mode predict \
    --load_checkpoint "$folder/checkpoints" --predict_data 'def ' 'import ' 'class '
