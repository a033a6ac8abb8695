"""Merges the weights of several models of one shape into a folder: `run_trainer.py merge`. Without MindSpore.

One tensor of each model is in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np

from trainer.checkpoint.hugging_face import CONFIG, GENERATION, TOKENIZER_FILES, split_into_files
from trainer.checkpoint.store import errors_at, find_checkpoint, first_of
from trainer.checkpoint.weights import read_weights
from trainer.convert.merge_methods import linear, slerp, task_arithmetic, ties
from trainer.errors import UserError
from trainer.monitors import formatting
from trainer.monitors.files import make_folder
from trainer.parallel.sharding import ShardSpec
from trainer.run.export import SHARD_BYTES, check_output, exported_file, write_weight_files
from trainer.storage.interleaved_experts import QUANTIZED
from trainer.storage.tensor_file import LazyArray, read_shard

Method: TypeAlias = Literal["linear", "slerp", "task_arithmetic", "ties"]
METHODS: tuple[str, ...] = get_args(Method)
_NEEDS_BASE = ("task_arithmetic", "ties")
_COPIED = (CONFIG, GENERATION, *TOKENIZER_FILES)


@dataclass(frozen=True)
class MergeOptions:
    """What to merge, and how.

    Attributes:
        models: Folders or files of weights.
        base: The weights from which task arithmetic and TIES take differences.
        weights: One for each model; empty: 1 for each.
        t: SLERP: 0 is the first model, 1 the second.
        scale: Task arithmetic and TIES: the factor on the merged difference.
        density: TIES: the share of the numbers of a difference that is kept.
    """

    models: tuple[Path, ...]
    output: Path
    method: Method = "linear"
    base: Path | None = None
    weights: tuple[float, ...] = ()
    t: float = 0.5
    scale: float = 1.0
    density: float = 0.2
    dtype: str = "float32"
    force: bool = False


def merge(options: MergeOptions) -> str:
    """Writes the merged weights as a Hugging Face folder, with the other files of the first model.

    Returns:
        A line about what was written.

    Raises:
        UserError: The models do not fit together, an option does not fit the method, or the folder exists.
        RunError: A file cannot be written.
    """
    _check(options)
    with errors_at("argument MODEL", ""):
        sources = [read_weights(path) for path in options.models]
    base = None
    compared = list(zip(options.models, sources, strict=True))
    if options.base is not None:
        with errors_at("flag --base", ""):
            base = read_weights(options.base)
        compared.append((options.base, base))
    for path, source in compared:
        _compare(options.models[0], sources[0], path, source)
    merged = {
        name: LazyArray(array.shape, partial(_read_part, options, sources, base, name))
        for name, array in sources[0].items()
    }
    files = split_into_files(merged, SHARD_BYTES, options.dtype)
    make_folder(options.output)
    write_weight_files(options.output, files, merged, options.dtype)
    copied = list(_copy_other_files(options.models[0], options.output))
    size = sum((options.output / name).stat().st_size for name in files)
    missing = ""
    if CONFIG not in copied:
        missing = "; the first model has no config.json"
    count = f"{len(options.models)} models by {options.method}"
    return f"wrote {options.output}: {count}, {len(merged)} tensors, {formatting.size(size)}{missing}"


def _read_part(
    options: MergeOptions, sources: Sequence[Mapping[str, LazyArray]], base: Mapping[str, LazyArray] | None, name: str,
    spec: ShardSpec,
) -> np.ndarray:  # fmt: skip
    """Computes a tensor of the merged model, and returns a part of it."""
    return read_shard(_merge_tensor(options, sources, base, name), spec)


def _merge_tensor(
    options: MergeOptions, sources: Sequence[Mapping[str, LazyArray]], base: Mapping[str, LazyArray] | None, name: str
) -> np.ndarray:
    """Computes a tensor of the merged model."""
    arrays = [np.asarray(source[name], np.float32) for source in sources]
    weights = options.weights or (1.0,) * len(arrays)
    if options.method == "linear":
        return linear(arrays, weights)
    if options.method == "slerp":
        return slerp(arrays[0], arrays[1], options.t)
    assert base is not None, "`_check` refuses these methods without a base"
    base_array = np.asarray(base[name], np.float32)
    if options.method == "task_arithmetic":
        return task_arithmetic(base_array, arrays, weights, options.scale)
    return ties(base_array, arrays, weights, options.scale, options.density)


def _check(options: MergeOptions) -> None:
    """Raises a UserError for options that do not fit together."""
    method = options.method
    if len(options.models) < 2 and method not in _NEEDS_BASE:
        raise UserError("at least two models are needed", key="MODEL", fix="name two folders of weights")
    if method == "slerp" and len(options.models) != 2:
        count = str(len(options.models))
        raise UserError("SLERP interpolates between two models", key="MODEL", value=count, fix="name two folders")
    if method in _NEEDS_BASE and options.base is None:
        rule = f"{method} needs the model from which the others were trained"
        raise UserError(rule, key="--base", fix="add --base with its folder")
    if method not in _NEEDS_BASE and options.base is not None:
        fix = f"leave it out, or use --method {' or '.join(_NEEDS_BASE)}"
        raise UserError(f"{method} has no base", key="--base", value=str(options.base), fix=fix)
    if options.weights and (len(options.weights) != len(options.models) or method == "slerp"):
        rule = f"there are {len(options.models)} models and {len(options.weights)} weights"
        fix = "write --weight once for each model"
        if method == "slerp":
            rule = "SLERP has no weights"
            fix = "write --t: 0 is the first model, 1 the second"
        raise UserError(rule, key="--weight", value=" ".join(map(str, options.weights)), fix=fix)
    if method == "linear" and options.weights and abs(sum(options.weights)) < 1e-8:
        values = " ".join(map(str, options.weights))
        raise UserError("the weights sum to 0", key="--weight", value=values, fix="write weights of another sum")
    check_output(options.output, options.force)


def _compare(first: Path, expected: Mapping[str, LazyArray], path: Path, tensors: Mapping[str, LazyArray]) -> None:
    """Raises a UserError if a model has other tensors than the first one, or tensors of codes instead of numbers."""
    if codes := [name for name in tensors if name.endswith(QUANTIZED)]:
        rule = f"its experts are quantized, and their codes have no mean: {first_of(codes)}"
        raise UserError(rule, key="MODEL", value=str(path), fix="write them as numbers: run_trainer.py export")
    for name in (*expected, *tensors):
        if name not in tensors:
            rule = f"it lacks {name}, which {first} has"
        elif name not in expected:
            rule = f"it has {name}, which {first} lacks"
        elif tensors[name].shape != expected[name].shape:
            shapes = list(tensors[name].shape), list(expected[name].shape)
            rule = f"its {name} has the shape {shapes[0]}, that of {first} has {shapes[1]}"
        else:
            continue
        raise UserError(rule, key="MODEL", value=str(path), fix="merge models of one size, with the same tensor names")


def _copy_other_files(model: Path, output: Path) -> Iterator[str]:
    """Copies config.json, the tokenizer and so on of a model; yields their names."""
    folder = model
    if model.is_file():
        folder = model.parent
    elif not (model / CONFIG).exists() and not any(model.glob("*.safetensors")):
        folder = find_checkpoint(model)
    for name in _COPIED:
        if (folder / name).is_file():
            with exported_file(output / name) as path:
                shutil.copyfile(folder / name, path)
            yield name
