#!/usr/bin/env python3
"""Makes tests/golden/peft_modules.json: names and shapes of the matrices of each family's layers that PEFT can adapt.

    torch-env/bin/python scripts/golden_modules.py           # writes the file
    torch-env/bin/python scripts/golden_modules.py --check   # compares; exit code 1 on a difference

The models are those of scripts/golden_families.py, the environment is that of make_golden.py with peft. A test compares
the names and shapes of the trainer's adapters.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import peft
import transformers
from golden_families import FAMILY_CASES
from golden_models import build_model
from torch.nn import Linear

FILE = Path(__file__).resolve().parent.parent / "tests/golden/peft_modules.json"
PREFIX = "base_model.model."
LAYERS = "model.layers."
A, B = ".lora_A.weight", ".lora_B.weight"


def modules_of(name: str) -> list[dict[str, list[int]]]:
    """Returns, for each layer, the names in it of the linear modules, as PEFT saves their adapters -> their shapes.

    In a model with experts PEFT 0.21 takes the names of a dense layer's matrices for those of experts.
    """
    base = build_model(FAMILY_CASES[name], name, {})
    linear = [each for each, module in base.named_modules() if isinstance(module, Linear) and each.startswith(LAYERS)]
    model = peft.get_peft_model(base, peft.LoraConfig(r=1, target_modules=linear, task_type="CAUSAL_LM"))
    shapes = {each: list(array.shape) for each, array in peft.get_peft_model_state_dict(model).items()}
    layers: list[dict[str, list[int]]] = [{} for _ in range(base.config.num_hidden_layers)]
    for a in sorted(each for each in shapes if each.endswith(A) and ".experts" not in each):
        layer, _, module = a.removeprefix(PREFIX + LAYERS).removesuffix(A).partition(".")
        layers[int(layer)][module] = [shapes[a.replace(A, B)][0], shapes[a][1]]
    return layers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = {f"family_{name}": modules_of(name) for name in FAMILY_CASES}
    lines = ",\n".join(f' "{name}": {json.dumps(layers, separators=(",", ":"))}' for name, layers in made.items())
    versions = json.dumps({"peft": peft.__version__, "transformers": transformers.__version__})
    text = f'{{"versions": {versions}, "modules": {{\n{lines}\n}}}}\n'
    if not check:
        FILE.write_text(text)
        return 0
    known = json.loads(FILE.read_text())["modules"]
    differing = [name for name in made if made[name] != known.get(name)]
    print(f"{FILE}: {'differs in ' + ', '.join(differing) if differing else 'as made now'}")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
