"""Builds the data set of a BlendedMegatronDatasetDataLoader, whose keys have their meaning of Megatron-LM."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.config.checks.problem import data_error
from trainer.data.batches.megatron import EodMasking, MegatronDataset, SampleOrder, blending_order
from trainer.data.source.indexed import IndexedTokens, Location, open_indexed

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.data import MegatronConfig, MegatronLoader

_PHASES = ("train", "valid", "test")
_PHASE_OF = {"train_dataset": "train", "eval_dataset": "valid"}
_PHASE_KEYS = ("train_data_path", "valid_data_path", "test_data_path")
_SURPLUS = 0.005
"""The fraction of samples that each file of a blend makes beyond its weight, as in Megatron-LM."""


class _Blend(NamedTuple):
    """The files that a section reads."""

    location: Location
    prefixes: list[str]
    weights: list[float] | None
    is_for_phase: bool  # the files belong to one phase, which reads all of their documents


def build_megatron(config: Config, section: str) -> MegatronDataset:
    """Opens the files of a section and makes the order of their samples.

    Raises:
        UserError: No files are named, or one of them is missing or damaged. Or a sample has another length than the
            model's sequences, the phase has no documents or samples, or keys contradict each other.
    """
    loader: MegatronLoader = getattr(config, section).data_loader
    settings = loader.config
    phase = loader.phase or _PHASE_OF[section]
    blend = _blend(config, section, phase)
    _check(config, section)
    share = (0.0, 1.0)
    if not blend.is_for_phase and settings.split is not None:
        share = _share(config, section, phase)
    size = None
    if len(loader.sizes) > _PHASES.index(phase):
        size = loader.sizes[_PHASES.index(phase)]
    if size is not None and size < 1:
        fix = "write how many samples an epoch has, or null for as many as the documents fill once"
        rule = f"{section} reads {phase}, and that has no samples"
        raise data_error(config, f"{section}.data_loader.sizes", rule, fix)
    if size is None and blend.weights is not None and len(blend.prefixes) > 1:
        rule = "files with weights need a number of samples"
        fix = "write sizes: [samples of an epoch, 0, 0]"
        raise data_error(config, f"{section}.data_loader.sizes", rule, fix)
    files = [open_indexed(prefix, blend.location) for prefix in blend.prefixes]
    documents = [_documents(config, section, file, share, phase) for file in files]
    keep_partial = phase == "valid" and not settings.drop_last_partial_validation_sequence

    def order(number: int, samples: int | None) -> SampleOrder:
        """Returns the order of the samples of one file."""
        return SampleOrder(
            files[number], documents[number], config.decoder.seq_length, samples, settings.seed,
            extra=int(settings.add_extra_token_to_sequence), keep_partial=keep_partial,
        )  # fmt: skip

    parts, sources = _order_samples(blend, size, order)
    available = parts[0].num_samples
    if sources is not None:
        available = len(sources)
    number = min(count for count in (available, size, loader.num_samples) if count is not None)
    if not number:
        rule = f"the documents of {phase} do not fill one sample of {config.decoder.seq_length} tokens"
        raise data_error(config, blend.location.key, rule, "use more data, or write sizes: documents then repeat")
    masking = EodMasking(
        settings.eod, settings.pad, settings.eod_mask_loss, settings.reset_position_ids,
        settings.create_compressed_eod_mask or settings.reset_attention_mask,
    )  # fmt: skip
    order_settings = f"{settings.seed} {config.decoder.seq_length} {documents} {size} {blend.weights} {keep_partial} "
    order_settings += f"{settings.add_extra_token_to_sequence}"
    dataset = MegatronDataset(parts, sources, blend.weights, number, masking, config.decoder.vocab_size, order_settings)
    if dataset.min_token_id < 0 and dataset.min_token_id != settings.pad:
        rule = f"the files contain token id {dataset.min_token_id}"
        raise data_error(config, f"{section}.data_loader.config.pad", rule, "set it to that token, if it is padding")
    return dataset


def _order_samples(
    blend: _Blend, size: int | None, order: Callable[[int, int | None], SampleOrder]
) -> tuple[list[SampleOrder], np.ndarray | None]:
    """Returns the samples of each file, and the file of each place of a blend; None if there is only one file.

    Args:
        size: The samples of an epoch; None: the documents are read once.
        order: Makes the order of samples of a file, by its number and the least number of samples.
    """
    numbers = range(len(blend.prefixes))
    if len(numbers) == 1 and (blend.weights is None or blend.is_for_phase):
        return [order(0, size)], None
    if blend.weights is None:
        parts = [order(number, None) for number in numbers]
        counts = [part.num_samples for part in parts]
        total = sum(counts)
        shares = [count / max(total, 1) for count in counts]
        return parts, blending_order(shares, min(size or total, total), counts)
    assert size is not None, "a blend with weights has a size"
    weights = _normalized(blend.weights)
    targets = [math.ceil(size * weight) for weight in weights]
    parts = [order(number, math.ceil(targets[number] * (1 + _SURPLUS))) for number in numbers]
    # Megatron-LM divides by the sum twice, which may change the last bit.
    return parts, blending_order(_normalized(weights), sum(targets))


def _normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def _blend(config: Config, section: str, phase: str) -> _Blend:
    """Finds the files of a phase, with their weights."""
    loader: MegatronLoader = getattr(config, section).data_loader
    prefix = f"{section}.data_loader"
    phase_keys = [name for name in _PHASE_KEYS if getattr(loader.config, name)]
    phase_key = _PHASE_KEYS[_PHASES.index(phase)]
    shared = [key for key, value in (("dataset_dir", loader.dataset_dir), ("config.data_path", loader.config.data_path))
              if value]
    if len(shared) > 1 or (shared and phase_keys):
        others = ", ".join([*shared[1:], *phase_keys])
        raise data_error(config, f"{prefix}.{shared[0]}", f"{others} names files too", "remove one")
    if phase_keys:
        key = f"config.{phase_key}"
        if phase_key not in phase_keys:
            rule = f"{section} reads {phase}, and only {', '.join(phase_keys)} is set"
            raise data_error(config, f"{prefix}.{key}", rule, f"set {key}, or {prefix}.phase")
        if loader.config.split is not None:
            rule = f"it divides the documents of data_path, and {phase_keys[0]} is set"
            fix = "remove it"
            raise data_error(config, f"{prefix}.config.split", rule, fix)
    elif shared:
        key = shared[0]
    else:
        rule = "it names no files"
        fix = "name the common path of a .bin and an .idx file: data_path: ['1', path]"
        raise data_error(config, f"{prefix}.config.data_path", rule, fix)
    key = f"{prefix}.{key}"
    value = loader.dataset_dir
    if not key.endswith("dataset_dir"):
        value = getattr(loader.config, key.split(".")[-1])
    if isinstance(value, str):
        value = [value]
    prefixes, weights = _split_pairs(config, key, value)
    return _Blend(Location(config.source.name(key), config.source.where(key)), prefixes, weights, bool(phase_keys))


def _split_pairs(config: Config, key: str, items: Sequence[str | int | float]) -> tuple[list[str], list[float] | None]:
    """Splits [weight, path, weight, path] or [path, path] into paths and weights; None without weights."""
    words = [str(item).strip() for item in items]
    weights: list[float | None] = []
    if len(words) % 2 == 0:
        weights = [_number(word) for word in words[::2]]
    if not weights or all(weight is None for weight in weights):
        return [_prefix(word) for word in words], None
    if any(weight is None or not 0 < weight < math.inf for weight in weights):
        rule = "weights and paths alternate, and a weight is a number above 0"
        raise data_error(config, key, rule, "write [weight, path, weight, path], or paths alone")
    return [_prefix(word) for word in words[1::2]], [weight for weight in weights if weight is not None]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _prefix(path: str) -> str:
    """Returns the common path of the two files, which may be given as the name of one of them."""
    if path.endswith((".bin", ".idx")):
        return path[:-4]
    return path


def _share(config: Config, section: str, phase: str) -> tuple[float, float]:
    """Returns where the documents of a phase begin and end, as fractions of all documents."""
    text = getattr(config, section).data_loader.config.split
    key = f"{section}.data_loader.config.split"
    fix = 'write three shares, as "969, 30, 1"'
    try:
        shares = [float(word) for word in re.findall(r"[.0-9]+", text)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not sum(shares) or re.sub(r"[.0-9,\s]", "", text):
        raise data_error(config, key, "split must list one to three numbers: training, validation and test", fix)
    edges = [0.0]
    for share in _normalized(shares + [0.0] * (3 - len(shares))):
        edges.append(edges[-1] + share)
    number = _PHASES.index(phase)
    if edges[number] >= edges[number + 1]:
        raise data_error(config, key, f"{section} reads {phase}, and that has no share", fix)
    return edges[number], edges[number + 1]


def _documents(
    config: Config, section: str, file: IndexedTokens, share: tuple[float, float], phase: str
) -> tuple[int, int]:
    begin, end = (int(round(edge * float(len(file.lengths)))) for edge in share)
    if begin == end or int(file.lengths[begin:end].sum(dtype=np.int64)) < 2:
        count = f"{end - begin} of the {len(file.lengths):,} documents of {file.prefix}"
        rule = f"{phase} has {count}, with less than 2 tokens"
        key = f"{section}.data_loader.config.split"
        raise data_error(config, key, rule, f"give {phase} a larger share, or use more data")
    return begin, end


def _check(config: Config, section: str) -> None:
    """Raises an error if keys contradict each other or the model."""
    prefix = f"{section}.data_loader.config"
    settings: MegatronConfig = getattr(config, section).data_loader.config
    length = config.decoder.seq_length
    if settings.seq_length not in (None, length):
        rule = f"must equal model.model_config.seq_length ({length})"
        raise data_error(config, f"{prefix}.seq_length", rule, f"set it to {length}, or leave it out")
    resets = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "create_compressed_eod_mask")
    acting = next((name for name in resets if getattr(settings, name)), None)
    if acting is not None and settings.eod < 0:
        rule = "it acts at the token that ends a document, and eod is not set"
        fix = "set eod to that token"
        raise data_error(config, f"{prefix}.{acting}", rule, fix)
    if settings.eod >= 0 and settings.eod == settings.pad:
        rule = "it is the token eod too, and the model would see no end of a document"
        raise data_error(config, f"{prefix}.pad", rule, "write -1, which is what Megatron-LM takes then")
    made = settings.create_attention_mask or settings.create_compressed_eod_mask
    if settings.reset_attention_mask and not made:
        rule = "it changes a mask that create_attention_mask: false does not make, and would have no effect"
        fix = "set create_attention_mask or create_compressed_eod_mask to true, or this to false"
        raise data_error(config, f"{prefix}.reset_attention_mask", rule, fix)
    if getattr(config, section).held_out:
        fix = "write an eval_dataset, and set data_loader.config.split"
        rule = "is not supported with BlendedMegatronDatasetDataLoader"
        raise data_error(config, f"{section}.held_out", rule, fix)
