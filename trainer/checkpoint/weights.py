"""Reads weights by name, as float32 arrays, from our checkpoints and Hugging Face's safetensors. No MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import safetensors

from trainer.checkpoint.expert_names import disk_shapes, form_of, from_disk
from trainer.checkpoint.mtp_weights import fix_for, missing_biases, missing_modules, unused_modules
from trainer.checkpoint.store import MARKER, find_checkpoint, read_checkpoint
from trainer.errors import UserError
from trainer.models.init import initial_value
from trainer.models.shapes import EMBEDDING, HEAD, parameter_shapes

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
# A folder with one of them is a checkpoint of this trainer, complete or not.
_OUR_FILES = (MARKER, "state.json", "optimizer.safetensors")
# Tables that older Hugging Face files contain; here they are computed from the configuration.
_BUFFERS = (".rotary_emb.inv_freq",)


def requested_weights(
    config: Config, notice: Callable[[str], None] | None = None, *, new_modules: bool = False
) -> dict[str, np.ndarray] | None:
    """The weights of `load_checkpoint`, checked against the model; None when the key is not set.

    Args:
        config: The whole configuration.
        notice: Called with a sentence about weights that are left out, and about missing ones that start from the seed.
        new_modules: Initialise missing multi-token prediction modules from the seed.

    Raises:
        UserError: The file cannot be read, or belongs to another model.
    """
    if not config.load_checkpoint:
        return None
    path, where = Path(config.load_checkpoint).expanduser(), config.source.where("load_checkpoint")
    weights = read_weights(path, where)
    if config.classifier is not None:
        return fitting_weights(weights, config.network, path, where)
    settings = config.decoder
    unused, *notices = unused_modules(weights, settings)
    findings = [missing_biases(weights, settings), *([missing_modules(weights, settings)] if new_modules else [])]
    absent = {name for names, _ in findings for name in names}
    for text in (*notices, *(text for names, text in findings if names)):
        if text and notice is not None:
            notice(text)
    used = {name: array for name, array in weights.items() if name not in unused}
    found = fitting_weights(used, settings, path, where, absent=absent)
    shapes = parameter_shapes(settings)
    return found | {name: initial_value(name, shapes[name], settings, config.seed) for name in shapes if name in absent}


def fitting_weights(
    weights: Mapping[str, np.ndarray],
    settings: ModelConfig,
    path: Path,
    where: str = "",
    key: str = "load_checkpoint",
    absent: Container[str] = (),
) -> dict[str, np.ndarray]:
    """Checks weights from `read_weights` and returns them by parameter name, with the experts of a layer stacked.

    Args:
        weights: Arrays by their names in the file.
        settings: The model section.
        path, where, key: For messages.
        absent: Parameters that may be missing.

    Raises:
        UserError: They belong to another model.
    """
    shapes = {name: shape for name, shape in parameter_shapes(settings).items() if name not in absent}
    own = {name: array for name, array in weights.items() if not _is_copy(name, weights, settings)}
    check_weights(own, disk_shapes(shapes, form_of(own)), path, where, key, settings)
    return from_disk(own, shapes)


def _is_copy(name: str, weights: Mapping[str, np.ndarray], settings: ModelConfig) -> bool:
    """Whether it is the copy of embedding or head that published multi-token prediction modules contain."""
    for ending, main in ((".embed_tokens.weight", EMBEDDING), (".shared_head.head.weight", HEAD)):
        if name.endswith(ending) and name != main and settings.mtp_depth:
            whole = EMBEDDING if settings.tie_word_embeddings else main
            return whole in weights and np.array_equal(weights[name], weights[whole])
    return False


def read_weights(path: Path, where: str = "") -> dict[str, np.ndarray]:
    """Weights by Hugging Face name.

    Args:
        path: A `.safetensors` file, a folder of them as Hugging Face publishes it, a checkpoint folder of this trainer,
            or a folder of checkpoints (the newest complete one).
        where: Location of the setting, for messages.

    Raises:
        UserError: There are no readable weights.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if files and not any((path / name).exists() for name in _OUR_FILES):
        weights: dict[str, np.ndarray] = {}
        for file in files:
            weights |= read_safetensors(file, where)
        return weights
    try:
        found = find_checkpoint(path)
        if (found / "adapter_model.safetensors").exists():
            rule = "the checkpoint holds adapters, not the weights of a model"
            raise UserError(rule, value=str(found), fix="give it as --adapter_id, and their base as --load_checkpoint")
        return read_checkpoint(found, parts=("model",)).tensors["model"]
    except UserError as error:
        raise error.at(where, "load_checkpoint") from error


def check_weights(
    weights: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
    path: Path,
    where: str = "",
    key: str = "load_checkpoint",
    settings: ModelConfig | None = None,
) -> None:
    """Checks that every parameter is there with its shape; the file may also contain a tied head.

    Args:
        weights: Arrays by their names in the file.
        shapes: The expected names and shapes.
        path, where, key: For messages.
        settings: The model section; None for adapters.

    Raises:
        UserError: Names the first parameter that is missing, unknown or of another shape, and counts the others.
    """
    missing = [name for name in shapes if name not in weights]
    unknown = [name for name in weights if name not in shapes and name != HEAD and not name.endswith(_BUFFERS)]
    other = [name for name in shapes if name in weights and weights[name].shape != tuple(shapes[name])]
    problems = [f"lacks {_first(missing)}"] if missing else []
    if unknown:
        problems.append(f"holds {_first(unknown)}, which this model does not have")
    if other:
        theirs, ours = weights[other[0]].shape, tuple(shapes[other[0]])
        problems.append(f"has {_first(other)} of shape {list(theirs)} where this model has {list(ours)}")
    if problems:
        fix = "" if settings is None or other else fix_for(missing, unknown, settings)
        fix = fix or "use the model_config of the checkpoint (config.yaml beside it), or another checkpoint"
        rule = f"the checkpoint does not fit model.model_config: it {'; it '.join(problems)}"
        raise UserError(rule, where=where, key=key, value=str(path), fix=fix)


def _first(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def read_safetensors(file: Path, where: str, key: str = "load_checkpoint") -> dict[str, np.ndarray]:
    """The arrays of a file by name.

    Raises:
        UserError: The file cannot be read, or has tensors that are not floating-point.
    """
    try:
        entries = safetensors.deserialize(file.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        fix = "name a checkpoint folder or a complete .safetensors file"
        rule = f"not a readable safetensors file ({error})"
        raise UserError(rule, where=where, key=key, value=str(file), fix=fix) from error
    other = [f"{name} is {entry['dtype']}" for name, entry in entries if entry["dtype"] not in ("BF16", *_DTYPES)]
    if other:
        rule = f"weights must be floating-point numbers of 16 to 64 bits; {_first(other)}"
        raise UserError(rule, where=where, key=key, value=str(file), fix="use a checkpoint that is not quantized")
    return {name: _as_float32(entry).reshape(entry["shape"]) for name, entry in entries}


def _as_float32(entry: dict) -> np.ndarray:
    if entry["dtype"] == "BF16":  # numpy has no bfloat16, which is the upper half of a float32
        return (np.frombuffer(entry["data"], np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).astype(np.float32)
