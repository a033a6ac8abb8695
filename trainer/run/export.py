"""Exports the weights of a checkpoint as a Hugging Face folder or one safetensors file, without MindSpore."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.checkpoint.adapters import PART, base_of_adapters, load_initial_weights, merge_adapters
from trainer.checkpoint.hugging_face import (
    CONFIG,
    class_on_disk,
    folder_files,
    index_json,
    score_padding,
    split_into_files,
    tokenizer_of,
    trained_path,
    trained_template,
    write_weights,
)
from trainer.checkpoint.json_models import record_form_of
from trainer.checkpoint.store import INDEX, find_checkpoint
from trainer.checkpoint.tensor_names import to_disk
from trainer.checkpoint.weights import module_layers
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import class_differences, has_sequence_classifier, saved_class, sequence_classifier
from trainer.errors import UserError
from trainer.input_files import require_new
from trainer.models.spec.adapters import adapted_matrices, factors_text
from trainer.models.spec.shapes import parameter_shapes
from trainer.monitors import formatting
from trainer.monitors.files import atomic_file, make_folder, write_failure
from trainer.storage.marker import MARKER

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data.batches.packing import RecordForm
    from trainer.storage.tensor_file import ArrayOrLazyArray

SHARD_BYTES = 5_000_000_000
_SUFFIX = ".safetensors"
_ADAPTERS = f"{PART}.safetensors"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class ExportResult:
    """The files that were written.

    Attributes:
        weights: The number of weights in all tensors.
        file_bytes: The bytes of the safetensors files.
        description: The origin of the weights, in words.
        files: The names of all files, config.json and the tokenizer included.
    """

    path: Path
    tensors: int
    weights: int
    file_bytes: int
    description: str
    dtype: str
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = f"{self.tensors} tensors, {self.weights:,} weights in {self.dtype}, {formatting.size(self.file_bytes)}"
        notes = "".join(f"note: {note}\n" for note in self.notes)
        others = [name for name in self.files if name != self.path.name]
        others_text = ""
        if others and self.path.suffix == _SUFFIX:
            others_text = f"\nbeside it: {', '.join(others)}"
        return f"{notes}wrote {self.path}: {self.description} ({size}){others_text}"


def export(
    config: Config, output: Path, *, merge: bool, force: bool = False, dtype: str = "float32",
    shard_bytes: int = SHARD_BYTES,
) -> ExportResult:  # fmt: skip
    """Writes the weights of `load_checkpoint`.

    Args:
        output: A folder that transformers will load, or a file that ends in .safetensors, for nothing but the weights.
        merge: Whether to merge the adapters of `adapter_id` into the weights.
        force: Whether to replace files that exist.
        dtype: One of `trainer.checkpoint.hugging_face.DTYPES`.
        shard_bytes: A folder with more bytes of weights gets several files.

    Raises:
        UserError: There is nothing to export, the files exist already, the weights do not fit the model, or
            transformers has no class for the model.
        RunError: A file cannot be written.
    """
    if not config.load_checkpoint and config.pretrained_model_dir:
        config = config.model_copy(update={"load_checkpoint": config.pretrained_model_dir})
    is_file = output.suffix == _SUFFIX
    _check(config, output, merge, force)
    weights, description, notes = _load_weights(config, merge)
    settings = config.decoder.model_copy(update={"mtp_depth": len(module_layers(weights, config.decoder))})
    if not is_file and config.is_decoder:
        _check_class(config)
    weights = to_disk(weights, class_on_disk(config))
    folder = output
    files = {output.name: list(weights)}
    other_files: dict[str, bytes] = {}
    if is_file:
        folder = output.parent
    else:
        files = split_into_files(weights, shard_bytes, dtype)
        form = record_form_of(trained_path(config))
        other_files = folder_files(config, dtype, settings, form)
        if other_files:
            notes += _template_notes(config, form)
    make_folder(folder)
    if is_file:
        _write_shards(folder, files, weights, dtype)
        written = [*files]
    else:
        written = write_weight_files(folder, files, weights, dtype)
    for name, content in other_files.items():
        with exported_file(folder / name) as path:
            path.write_bytes(content)
    notes += _class_notes(config, weights)
    path = output
    if not is_file and len(files) == 1:
        path = output / next(iter(files))
    return ExportResult(
        path=path,
        tensors=len(weights),
        weights=sum(array.size for array in weights.values()),
        file_bytes=sum((folder / name).stat().st_size for name in files),
        description=description,
        dtype=dtype,
        files=(*written, *other_files),
        notes=tuple(notes),
    )


def _load_weights(config: Config, merge: bool) -> tuple[dict[str, np.ndarray], str, list[str]]:
    """Returns the weights by their names in memory, their origin in words, and notes."""
    notes: list[str] = []
    weights = load_initial_weights(config, notes.append, new_modules=False, averages=config.use_ema)
    assert weights is not None, "`_check` refuses an export without weights"
    which = "weights"
    if config.use_ema:
        which = "moving averages of the weights"
    if merge:
        pairs = len(list(adapted_matrices(config.decoder)))
        factor = factors_text(config.decoder)
        base = config.load_checkpoint or "random weights"
        adapters = f"the {pairs} adapters of {config.adapter_id}"
        if config.use_ema:
            adapters = f"the moving averages of {adapters}"
        description = f"{base} with {adapters} merged in, times {factor}"
        return merge_adapters(weights, config.decoder), description, notes
    if config.has_adapters:
        trained = find_adapters(config.output_dir) or "DIR"
        notes.append(f"these are the weights without adapters; --adapter {trained} --merge adds them")
    used = {name: weights[name] for name in parameter_shapes(config.network) if name in weights}
    return used, f"the {which} of {config.load_checkpoint}", notes


def _check_class(config: Config) -> None:
    """Raises a UserError if no class of transformers computes the model, or finds the last token of an answer."""
    key = "model.arch.type"
    kind = config.model.arch.type
    saved_as = saved_class(config.decoder, kind)
    rule = ""
    if not saved_as:
        others = ", ".join(class_differences(config.decoder, kind))
        rule = f"no class of transformers computes this model; unlike a {kind} it has {others}"
    elif config.decoder.num_labels and not has_sequence_classifier(saved_as):
        rule = f"transformers has no class for a reward model of this family ({sequence_classifier(saved_as)})"
    if rule:
        fix = "write the weights alone: --output model.safetensors"
        raise UserError(rule, where=config.source.where(key), key=key, value=kind, fix=fix)
    if config.decoder.num_labels and score_padding(config, tokenizer_of(config)) is None:
        key = "train_dataset.tokenizer.path"
        rule = "the tokenizer has no padding token, with which transformers finds the last token of an answer"
        fix = "add pad_token to its tokenizer_config.json: a token that ends no answer"
        tokenizer = config.train_dataset.tokenizer.path
        raise UserError(rule, where=config.source.where(key), key=key, value=tokenizer, fix=fix)


def _template_notes(config: Config, form: RecordForm | None) -> Iterator[str]:
    """Yields a note if the folder has a tokenizer without a chat template."""
    tokenizer = tokenizer_of(config)
    if tokenizer is None or trained_template(config, tokenizer, form) is not None:
        return
    reason = "nothing says with which one the weights were trained; train_dataset.chat_template names it"
    if form == "text":
        reason = "the training wrote its records as text"
    yield f"the folder has no chat template: the tokenizer has none, and {reason}"


def _class_notes(config: Config, weights: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yields notes about the class under which a folder is saved."""
    kind = saved_class(config.decoder, config.model.arch.type)
    configured = config.model.arch.type
    if kind and not FAMILIES[kind].in_transformers:
        yield f"transformers has no class that computes this {kind}: the folder is for this trainer"
    elif kind and kind != configured:
        yield f"saved as {kind}, which in transformers computes what this {configured} does"
    if layers := module_layers(weights, config.decoder):
        yield (f"transformers has no multi-token prediction: it leaves out {len(layers)} of the model's layers, and may"
               " call their weights unexpected")


def _check(config: Config, output: Path, merge: bool, force: bool) -> None:
    """Raises a UserError if there is nothing to export, or a file exists already."""
    where = config.source.where
    if merge and not config.adapter_id:
        raise UserError("there are no adapters to merge", key="--merge", fix="name them: --adapter output/checkpoints")
    for key in ("load_checkpoint", "adapter_id"):
        name = getattr(config, key) or ""
        folder = find_adapters(name)
        if folder is not None and (key == "load_checkpoint" or not merge):
            rule = f"adapters are exported as part of a model, and {folder} has adapters alone"
            fix = _export_commands(config, name, folder, output)
            raise UserError(rule, where=where(key), key=key, value=name, fix=fix)
    if not merge and not config.load_checkpoint:
        fix = "give --load_checkpoint output/checkpoints"
        raise UserError("export needs weights", where=where("load_checkpoint"), key="load_checkpoint", fix=fix)
    check_output(output, force)


def find_adapters(name: str) -> Path | None:
    """Returns the folder with the adapters that a path names; None for a path of other weights, or without weights.

    Args:
        name: A checkpoint, a folder of checkpoints, the output folder that has them, or a folder of PEFT.
    """
    path = Path(name).expanduser()
    if not name or not path.is_dir():
        return None
    if not (path / _ADAPTERS).is_file():
        try:
            path = find_checkpoint(path)
        except UserError:
            return None
    if (path / _ADAPTERS).is_file():
        return path
    return None


def _export_commands(config: Config, name: str, folder: Path, output: Path) -> str:
    """Returns the commands that export the adapters `name` in `folder`: merged into their base model, and alone."""
    base = config.load_checkpoint
    if not base or base == name:
        base = base_of_adapters(folder)
    weights = ""
    if base:
        weights = f" --load_checkpoint {base}"
    command = f"export --config {config.source.path}{weights} --adapter {name} --merge --output {output}"
    return f"merge them: {command}; or copy them, as PEFT loads them: cp -r {folder} {output.with_suffix('')}"


def check_output(output: Path, force: bool) -> None:
    """Raises a UserError if weights must not be written to a folder or file: it is a checkpoint, or exists already."""
    if (output / MARKER).exists():
        rule = "the folder is a checkpoint of a training, which transformers can load as it is"
        fix = "name another folder"
        raise UserError(rule, key="--output", value=str(output), fix=fix)
    if output.suffix == _SUFFIX:
        present = [output]
    else:
        present = [*weight_files(output), output / CONFIG]
    for path in present:
        require_new(path, "--output", force)


def write_weight_files(
    folder: Path, files: Mapping[str, list[str]], weights: Mapping[str, ArrayOrLazyArray], dtype: str
) -> list[str]:
    """Writes the weights of a folder and, for several files, their index; then removes those of an earlier export.

    Nothing is removed before all is written: the weights may be read from files of the folder, and if the disk is full
    the earlier file is still there.

    Args:
        files: The names of the tensors in each file, from `split_into_files`.

    Returns:
        The names of the files that were written.

    Raises:
        RunError: A file cannot be written.
    """
    _write_shards(folder, files, weights, dtype)
    written = [*files]
    if len(files) > 1:
        with exported_file(folder / INDEX) as path:
            path.write_bytes(index_json(files, weights, dtype))
        written.append(INDEX)
    for path in weight_files(folder):
        if path.name not in written:
            path.unlink()
    return written


def _write_shards(
    folder: Path, files: Mapping[str, list[str]], weights: Mapping[str, ArrayOrLazyArray], dtype: str
) -> None:
    for name, tensors in files.items():
        with exported_file(folder / name) as path:
            write_weights(path, {tensor: weights[tensor] for tensor in tensors}, dtype)


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a folder in which `export` writes weights, with their index."""
    return [path for path in sorted(folder.glob("model*")) if path.name == INDEX or _WEIGHTS.fullmatch(path.name)]


@contextlib.contextmanager
def exported_file(path: Path) -> Iterator[Path]:
    """Yields where to write a file of an export, which is flushed to the disk and then in its place.

    Raises:
        RunError: It cannot be written.
    """
    try:
        with atomic_file(path, flushed=True) as unfinished:
            yield unfinished
    except OSError as error:
        raise write_failure(path, error) from error
