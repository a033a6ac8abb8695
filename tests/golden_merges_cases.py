"""Tensors that mergekit merges, for scripts/golden_merges.py and the tests. Needs numpy only."""

from __future__ import annotations

import json
from typing import NamedTuple

import golden_files
import numpy as np

PATH = golden_files.GOLDEN_FOLDER / "merges.json"
_RANDOM = np.random.RandomState(3)  # a stream that numpy promises never to change
BASE = _RANDOM.standard_normal((7, 11)).astype(np.float32)
MODELS = [BASE + _RANDOM.standard_normal(BASE.shape).astype(np.float32) * np.float32(0.3) for _ in range(3)]


class MergeCase(NamedTuple):
    """A merge of the first models; slerp has `t`, task_arithmetic and ties take differences from `BASE`."""

    method: str
    weights: tuple[float, ...] = ()
    t: float = 0.5
    scale: float = 1.0
    density: float = 1.0


CASES = (
    MergeCase("linear", (1.0, 1.0, 1.0)),
    MergeCase("linear", (0.5, 1.25, 0.3)),
    MergeCase("slerp", t=0.25),
    MergeCase("slerp", t=1.0),
    MergeCase("task_arithmetic", (0.5, 1.25, 0.3), scale=0.7),
    MergeCase("ties", (1.0, 1.0, 1.0), density=0.2),
    MergeCase("ties", (0.5, 1.25, -0.3), scale=0.7, density=0.6),
)


def load_results() -> list[list[float]]:
    """Returns the `golden_distillation_cases.summary` of the merged tensor of each case."""
    merged: list[list[float]] = json.loads(PATH.read_text())["merged"]
    return merged
