"""`run_trainer.py export`: the weights of a checkpoint as a Hugging Face folder, adapters merged in. No MindSpore."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.checkpoint.adapters import load_initial_weights, merge_adapters
from trainer.checkpoint.hugging_face import (
    CONFIG,
    INDEX,
    class_on_disk,
    folder_files,
    index_json,
    split_into_files,
    write_weights,
)
from trainer.checkpoint.tensor_names import to_disk
from trainer.checkpoint.weights import module_layers
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import class_differences, saved_class
from trainer.errors import UserError
from trainer.models.spec.adapters import adapter_spec
from trainer.models.spec.shapes import adapter_shapes, parameter_shapes
from trainer.monitors import formatting
from trainer.monitors.files import make_folder, write_failure
from trainer.storage.marker import MARKER

if TYPE_CHECKING:
    from trainer.config import Config

SHARD_BYTES = 5_000_000_000
_SUFFIX = ".safetensors"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    tensors: int
    weights: int
    file_bytes: int
    contents: str  # what the weights are, in words
    dtype: str
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = f"{self.tensors} tensors, {self.weights:,} weights in {self.dtype}, {formatting.size(self.file_bytes)}"
        notes = "".join(f"note: {note}\n" for note in self.notes)
        others = [name for name in self.files if name != self.path.name]
        beside = ""
        if others and self.path.suffix == _SUFFIX:
            beside = f"\nbeside it: {', '.join(others)}"
        return f"{notes}wrote {self.path}: {self.contents} ({size}){beside}"


def export(
    config: Config,
    output: Path,
    *,
    merge: bool,
    force: bool = False,
    dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Writes the weights of `load_checkpoint`; `merge` folds the adapters of `adapter_id` in.

    Args:
        output: A folder, which becomes one that transformers loads; or a file that ends in .safetensors, for the
            weights alone.
        force: Replace what is there.
        dtype: One of `trainer.checkpoint.hugging_face.DTYPES`.
        shard_bytes: Weights beyond it are spread over several files; not where `output` is a file.

    Raises:
        UserError: There is nothing to export, the files are there already, weights and model do not fit, or no class
            has a config.json for the model.
        RunError: A file cannot be written.
    """
    if not config.load_checkpoint and config.pretrained_model_dir:
        config = config.model_copy(update={"load_checkpoint": config.pretrained_model_dir})
    is_file = output.suffix == _SUFFIX
    _check(config, output, merge, force)
    weights, contents, notes = _weights(config, merge)
    settings = config.decoder.model_copy(update={"mtp_depth": len(module_layers(weights, config.decoder))})
    if not is_file and config.classifier is None:
        _check_class(config)
    weights = to_disk(weights, class_on_disk(config))
    if is_file:
        files = {output.name: list(weights)}
        more = {}
    else:
        files = split_into_files(weights, shard_bytes, dtype)
        more = folder_files(config, dtype, settings)
    if len(files) > 1:
        more[INDEX] = index_json(files, weights, dtype)
    folder = output
    if is_file:
        folder = output.parent
    make_folder(folder)
    if not is_file:
        for path in _weight_files(folder):  # of an earlier export, with other shards
            path.unlink()
    for name, tensors in files.items():
        arrays = {tensor: weights[tensor] for tensor in tensors}
        _write(folder / name, lambda path, arrays=arrays: write_weights(path, arrays, dtype))
    for name, content in more.items():
        _write(folder / name, lambda path, content=content: path.write_bytes(content))
    count = sum(array.size for array in weights.values())
    size = sum((folder / name).stat().st_size for name in files)
    notes += _class_notes(config, weights) if config.classifier is None else []
    if is_file or len(files) > 1:
        path = output
    else:
        path = output / next(iter(files))
    return Exported(path, len(weights), count, size, contents, dtype, (*files, *more), tuple(notes))


def _weights(config: Config, merge: bool) -> tuple[dict[str, np.ndarray], str, list[str]]:
    """The weights by their names in memory, what they are in words, and notes."""
    notes: list[str] = []
    if merge:
        found = merge_adapters(load_initial_weights(config, notes.append, new_modules=False), config.decoder)
        pairs = len(adapter_shapes(config.decoder)) // 2
        scale = adapter_spec(config.decoder).scale
        base = config.load_checkpoint or "random weights"
        return found, f"{base} with the {pairs} adapters of {config.adapter_id} merged in, times {scale:g}", notes
    found = load_initial_weights(config, notes.append, new_modules=False)
    named = {name: found[name] for name in parameter_shapes(config.network) if name in found}
    return named, f"the weights of {config.load_checkpoint}", notes


def _check_class(config: Config) -> None:
    """Refuses a folder whose config.json would describe another model than the weights are."""
    kind = config.model.arch.type
    if not saved_class(config.decoder, kind):
        others = ", ".join(class_differences(config.decoder, kind))
        rule = f"no class of transformers computes this model; unlike a {kind} it has {others}"
        raise UserError(
            rule, where=config.source.where("model.arch.type"), key="model.arch.type", value=kind,
            fix="write the weights alone: --output model.safetensors",
        )  # fmt: skip


def _class_notes(config: Config, weights: Mapping[str, np.ndarray]) -> Iterator[str]:
    """What to know about the class under which a folder is saved."""
    kind = saved_class(config.decoder, config.model.arch.type)
    asked = config.model.arch.type
    if kind and not FAMILIES[kind].in_transformers:
        yield f"transformers has no class that computes this {kind}: the folder is for this trainer"
    elif kind and kind != asked:
        yield f"saved as {kind}, which in transformers computes what this {asked} does"
    if layers := module_layers(weights, config.decoder):
        yield (f"transformers has no multi-token prediction: it leaves out {len(layers)} of the model's layers, and may"
               " call their weights unexpected")


def _check(config: Config, output: Path, merge: bool, force: bool) -> None:
    where = config.source.where
    if merge and not config.adapter_id:
        raise UserError(
            "there are no adapters to merge", key="--merge", fix="name them: --adapter output/checkpoints"
        )
    if config.adapter_id and not merge:
        raise UserError(
            "adapters are exported only as part of the model",
            where=where("adapter_id"), key="adapter_id", value=config.adapter_id,
            fix="add --merge; their own file for PEFT is adapter_model.safetensors in their checkpoint",
        )  # fmt: skip
    if not merge and not config.load_checkpoint:
        fix = "give --load_checkpoint output/checkpoints"
        raise UserError("export needs weights", where=where("load_checkpoint"), key="load_checkpoint", fix=fix)
    if (output / MARKER).exists():
        rule = "the folder is a checkpoint of a training, and as it is one that transformers loads"
        fix = "name another"
        raise UserError(rule, key="--output", value=str(output), fix=fix)
    if output.suffix == _SUFFIX:
        present = [output]
    else:
        present = [*_weight_files(output), output / CONFIG]
    if not force and (there := [path for path in present if path.exists()]):
        fix = "give another --output, or --force to replace it"
        raise UserError("the file is there already", key="--output", value=str(there[0]), fix=fix)


def _weight_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("model*")) if path.name == INDEX or _WEIGHTS.fullmatch(path.name)]


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """A whole file or none: written beside its place, flushed to the disk, and renamed."""
    unfinished = path.with_name(f".tmp-{path.name}")
    try:
        write(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise write_failure(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
