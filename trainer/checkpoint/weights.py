"""Weights from a file: a checkpoint of this trainer or Hugging Face safetensors, as float32 arrays by name. No MindSpore."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors

from trainer.checkpoint.store import find_checkpoint, read_checkpoint
from trainer.errors import UserError

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def read_weights(path: Path, where: str = "") -> dict[str, np.ndarray]:
    """Weights by Hugging Face name.

    Args:
        path: A `.safetensors` file, a folder of them as Hugging Face publishes it, a checkpoint folder of this trainer, or a
            folder of checkpoints (the newest complete one).
        where: Where the path was set, for messages.

    Raises:
        UserError: Nothing readable there.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if path.is_file() or (files and not (path / "state.json").exists()):
        weights: dict[str, np.ndarray] = {}
        for file in files:
            weights |= _read_safetensors(file, where)
        return weights
    return read_checkpoint(find_checkpoint(path), parts=("model",)).tensors["model"]


def check_weights(
    weights: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], path: Path, where: str = ""
) -> None:
    """Every parameter is there and has its shape; a tied head may lie in the file as well.

    Raises:
        UserError: Names the first parameter that is missing, unknown or of another shape, and counts the others.
    """
    missing = [name for name in shapes if name not in weights]
    unknown = [name for name in weights if name not in shapes and name != "lm_head.weight"]
    other = [name for name in shapes if name in weights and weights[name].shape != tuple(shapes[name])]
    problems = [f"lacks {_first(missing)}" if missing else "", f"holds {_first(unknown)} unknown here" if unknown else ""]
    if other:
        theirs, ours = weights[other[0]].shape, tuple(shapes[other[0]])
        problems.append(f"has {_first(other)} of shape {list(theirs)} where this model has {list(ours)}")
    if any(problems):
        raise UserError(
            f"the checkpoint does not fit model.model_config: it {'; it '.join(filter(None, problems))}",
            where=where,
            key="load_checkpoint",
            value=str(path),
            fix="use the model_config that the checkpoint was trained with (config.yaml beside it), or another checkpoint",
        )


def _first(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _read_safetensors(file: Path, where: str) -> dict[str, np.ndarray]:
    try:
        entries = safetensors.deserialize(file.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"not a readable safetensors file ({error})",
            where=where,
            key="load_checkpoint",
            value=str(file),
            fix="name a checkpoint folder or a complete .safetensors file",
        ) from error
    return {name: _as_float32(entry).reshape(entry["shape"]) for name, entry in entries}


def _as_float32(entry: dict) -> np.ndarray:
    if entry["dtype"] == "BF16":  # numpy has no bfloat16: it is the upper half of a float32
        return (np.frombuffer(entry["data"], np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(entry["data"], _DTYPES.get(entry["dtype"], np.float32)).astype(np.float32)
