"""Trainings on preferences of TRL, for scripts/golden_preferences.py and the tests. Needs numpy only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden_files
import numpy as np
from golden_scores_cases import write_reward_model

PATH = golden_files.GOLDEN_FOLDER / "preferences.json"
MODEL = "model_llama"
"""The golden model that is trained, and that a reward model begins with."""
STEPS = 3
LEARNING_RATE = 0.003
BETAS = (0.9, 0.95)
EPSILON = 1e-5
WEIGHT_DECAY = 0.1
CLIP = 0.5
"""Below the norm of some gradients."""
SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.3},
    "ipo": {"beta": 0.4},
    "simpo": {"beta": 2.0, "gamma": 0.7},
    "orpo": {"beta": 0.5},
    "kto": {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6},
    "reward": {},
}
"""The section `loss` of each type."""
PAD, END = "<pad>", "</s>"
_WORDS = [PAD, "<s>", END, *(f"w{number}" for number in range(3, 64))]


def _text(*numbers: int) -> str:
    return "".join(f" w{number}" for number in numbers)


PAIRS: list[dict[str, Any]] = [
    {"prompt": "w7 w9 w30", "chosen": _text(11, 12, 40), "rejected": _text(13), "margin": 0.5},
    {"prompt": "w8", "chosen": _text(14), "rejected": _text(15, 16, 17, 18, 19), "margin": 0.0},
    {"prompt": "w10 w9", "chosen": _text(20, 21), "rejected": _text(22, 23), "margin": 0.25},
    {"prompt": "w50 w51 w52 w53", "chosen": _text(24, 25, 26, 27), "rejected": _text(28, 29, 24), "margin": 0.0},
]
LABELLED: list[dict[str, Any]] = [
    {"prompt": "w7 w9 w30", "completion": _text(11, 12, 40), "label": True},
    {"prompt": "w8", "completion": _text(15, 16, 17), "label": True},
    {"prompt": "w10 w9", "completion": _text(20, 21), "label": True},
    # TRL gives the first prompt the last answer, the trainer the second one: they are equal.
    {"prompt": "w50 w51 w52 w53", "completion": _text(15, 16, 17), "label": False},
]


def records_of(kind: str) -> list[dict[str, Any]]:
    """Returns the records, which are one batch."""
    if kind == "kto":
        return LABELLED
    return PAIRS


def tokenizer_json() -> str:
    """Returns the file of a tokenizer with a token for each word."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return json.dumps({
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": _WORDS.index(word), "content": word} | special for word in (PAD, END)],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: place for place, word in enumerate(_WORDS)}, "unk_token": PAD},
    })


def write_model(kind: str, folder: Path) -> None:
    """Writes the model that a training begins with as a folder of Hugging Face, with its tokenizer."""
    if kind == "reward":
        write_reward_model(MODEL, folder)
    else:
        case = golden_files.load_model_case(MODEL)
        golden_files.write_folder(folder, case.metadata["config_as_saved"], case.weights)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    names = {"eos_token": END, "pad_token": PAD, "add_bos_token": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def load_results() -> dict[str, dict[str, list[float]]]:
    """Returns the numbers of the steps of each type by their names in TRL, with `loss` and `grad_norm`."""
    results: dict[str, dict[str, list[float]]] = json.loads(PATH.read_text())["types"]
    return results


def numbers_of(results: dict[str, dict[str, list[float]]]) -> np.ndarray:
    """Returns all numbers in one row."""
    return np.concatenate([values for by_name in results.values() for values in by_name.values()])
