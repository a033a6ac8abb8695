#!/usr/bin/env python3
"""Makes tests/golden/families.json: what transformers says about model families, for tests without transformers.

    torch-env/bin/python scripts/make_families.py            # writes the file, as make_golden.py does
    torch-env/bin/python scripts/make_families.py --check    # compares, writes nothing; exit code 1 on a difference

- ``defaults``: what each class that the trainer knows takes for keys that a config.json leaves out.
- ``others``: config.json of tiny models of families that the trainer does not know.
- ``balance``: the balance loss of transformers for router logits [layers, tokens, experts].
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "tests" / "golden" / "families.json"
KNOWN = (
    "llama", "smollm3", "granite", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gemma", "gemma2", "gemma3_text",
    "granitemoe", "granitemoeshared", "gpt_oss", "mixtral", "olmoe",
    "qwen2_moe", "qwen3_moe", "glm4_moe", "glm", "glm4",
    "phi3",
    "seed_oss", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense",
    "deepseek_v3", "deepseek_v2", "dots1", "starcoder2", "stablelm", "cohere", "cohere2", "exaone4", "helium", "arcee",
    "nemotron", "jais2", "glm4_moe_lite",
)  # fmt: skip
TINY = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
        "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "olmo": {},
    "qwen3_next": {},
}  # fmt: skip
# Not facts about a family.
LEFT_OUT = ("id2label", "label2id", "transformers_version")
LAYERS, TOKENS, EXPERTS, CHOSEN = 3, 12, 4, 2


def config_json(config: Any, *, every: bool = False) -> dict[str, Any]:
    found = json.loads(config.to_json_string(use_diff=not every))
    return {key: value for key, value in found.items() if key not in LEFT_OUT}


def defaults(model_type: str) -> dict[str, Any]:
    """Returns all keys of the class, those of rope_parameters under the names of older versions."""
    base = config_json(transformers.PretrainedConfig(), every=True)
    found = config_json(CONFIG_MAPPING[model_type](), every=True)
    rope = found.pop("rope_parameters")
    rope = rope.get("full_attention", rope)  # of layers without a sliding window
    scaling = {}
    if rope["rope_type"] != "default":
        scaling = {"rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"}}
    rope = {key: rope[key] for key in ("partial_rotary_factor", "rope_theta") if key in rope} | scaling
    kept = {key: value for key, value in found.items() if key not in base or base[key] != value}
    if "moe_layer_end_index" in kept:  # -1: the class counts the layers
        kept["moe_layer_end_index"] = CONFIG_MAPPING[model_type].moe_layer_end_index
    if "mlp_layer_types" in kept:
        kept["mlp_layer_types"] = None
    return {**kept, **rope, "layer_types": None, "model_type": model_type}


def other(model_type: str) -> dict[str, Any]:
    config = CONFIG_MAPPING[model_type](**TINY, **OTHERS[model_type])
    return {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]], **config_json(config)}


def balance() -> dict[str, Any]:
    logits_LNE = np.random.RandomState(3).standard_normal((LAYERS, TOKENS, EXPERTS)).round(3)

    def loss(layers: np.ndarray) -> float:
        logits = tuple(map(torch.from_numpy, layers.astype(np.float32)))
        return round(float(load_balancing_loss_func(logits, EXPERTS, CHOSEN)), 6)

    alike = np.repeat(logits_LNE[:1], LAYERS, 0)
    return {"num_experts_per_tok": CHOSEN, "logits": logits_LNE.tolist(), "loss": loss(logits_LNE),
            "loss_of_first_layer_in_all": loss(alike)}


def facts() -> dict[str, Any]:
    names = {kind: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] for kind in KNOWN}
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "defaults": {names[kind]: defaults(kind) for kind in KNOWN},
        "others": {kind: other(kind) for kind in OTHERS},
        "balance": balance(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the file and write nothing")
    made = facts()
    if not parser.parse_args().check:
        FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
        print(FILE)
        return 0
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    differing = [key for key in made if key != "versions" and json.loads(json.dumps(made[key])) != stored.get(key)]
    print(f"{FILE}: {'differs in ' + ', '.join(differing) if differing else 'as made now'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
