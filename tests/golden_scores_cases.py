"""Reward models with the weights of golden models, for scripts/golden_scores.py and the tests. Needs numpy only."""

from __future__ import annotations

import json
from pathlib import Path

import golden_files
import numpy as np

from trainer.config.families import FAMILIES

PATH = golden_files.GOLDEN_FOLDER / "scores.json"
NAMES = (
    "model_llama", "model_qwen2", "model_qwen3", "model_mistral", "model_glm", "model_glm4", "family_smollm3",
    "family_olmo2", "family_olmo3", "family_gemma", "family_gemma2", "family_phi3_short", "family_seed_oss",
    "family_hunyuan_v1_dense",
)  # fmt: skip
"""A golden model of each family whose reward models transformers has a class for."""
DOCUMENTS = ((3, 1, 4, 1, 5, 9, 2, 6), (2, 7, 1), (8, 2, 8, 1, 8, 2))
"""Tokens, without the padding token 0."""


def write_reward_model(name: str, folder: Path) -> None:
    """Writes a golden model with a drawn score head as a folder of Hugging Face."""
    case = golden_files.load_model_case(name)
    described = dict(case.metadata["config_as_saved"])
    kind = next(name for name, family in FAMILIES.items() if family.model_type == described["model_type"])
    described |= {"architectures": [kind.replace("ForCausalLM", "ForSequenceClassification")], "pad_token_id": 0}
    described |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    weights = {each: array for each, array in case.weights.items() if each != "lm_head.weight"}
    width = len(weights["model.norm.weight"])
    weights["score.weight"] = np.random.default_rng(11).normal(size=(1, width)).astype(np.float32)
    golden_files.write_folder(folder, described, weights)


def load_scores() -> dict[str, list[float]]:
    """Returns the scores of `DOCUMENTS` by the name of the golden model."""
    scores: dict[str, list[float]] = json.loads(PATH.read_text())["scores"]
    return scores
