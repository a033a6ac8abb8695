"""Models that teach each other, for scripts/golden_distillation.py, which needs numpy only, and the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import golden_files
import numpy as np

PATH = golden_files.GOLDEN_FOLDER / "distillation.json"


class DistillationCase(NamedTuple):
    """A student, with the batch of its golden case, and a teacher of another family."""

    student: str
    teacher: str
    temperature: float
    alpha: float


CASES = (
    DistillationCase("model_qwen3_packed", "model_llama", 2.0, 0.5),
    DistillationCase("family_gemma2", "family_granitemoe", 1.0, 0.9),
    DistillationCase("model_llama", "model_glm4", 4.0, 1.0),
    DistillationCase("family_olmo3", "family_olmoe", 3.0, 0.7),
)
"""The student has packed documents; capped logits, and a teacher that scales its own; a prompt whose labels do not
count; a teacher with experts."""


def write_model(name: str, folder: Path) -> golden_files.ModelCase:
    """Writes a golden model as a folder of Hugging Face."""
    case = golden_files.load_model_case(name)
    golden_files.write_folder(folder, case.metadata["config_as_saved"], case.weights)
    return case


def write_drawn_model(folder: Path, seed: int, **sizes: Any) -> Path:
    """Writes a Llama with the weights that a run draws from a seed as a folder of Hugging Face."""
    from decoder_settings import decoder_settings

    from trainer.checkpoint.weights import from_seed
    from trainer.config.hugging_face import config_json
    from trainer.models.spec.shapes import parameter_specs
    from trainer.parallel.sharding import full_shard_spec

    settings = decoder_settings(**sizes)
    drawn = from_seed(parameter_specs(settings).values(), settings, seed)
    weights = {name: array.read(full_shard_spec(array.shape)) for name, array in drawn.items()}
    golden_files.write_folder(folder, config_json(settings, "LlamaForCausalLM"), weights)
    return folder


def summary(gradient: np.ndarray) -> list[float]:
    """Returns the norm of a gradient and its product with waves: every element has its own factor."""
    waves = golden_files.golden_gradient(0, 0, gradient.shape).astype(np.float64) / 10
    wide = gradient.astype(np.float64)
    return [float(np.sqrt((wide**2).sum())), float((wide * waves).sum())]


def load_results() -> list[dict[str, Any]]:
    """Returns loss, kl, total and the summaries of all gradients of each case."""
    results: list[dict[str, Any]] = json.loads(PATH.read_text())["cases"]
    return results
