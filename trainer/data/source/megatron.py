"""From the keys of a BlendedMegatronDatasetDataLoader to its data set; they mean what they mean in Megatron-LM."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.config.checks.problem import data_error
from trainer.data.batches.megatron import EodMasking, MegatronDataset, SampleOrder, blending_order, exhaustive_order
from trainer.data.source.indexed import IndexedTokens, Location, open_indexed

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.data import MegatronConfig, MegatronLoader

_PHASES = ("train", "valid", "test")
_OWN_KEYS = ("train_data_path", "valid_data_path", "test_data_path")
_SURPLUS = 0.005
"""How many more samples of each file of a blend are made than its weight asks for, as in Megatron-LM."""


class _Blend(NamedTuple):
    """The files that a section reads."""

    location: Location
    prefixes: list[str]
    weights: list[float] | None
    own: bool  # of this phase alone: read whole


def build_megatron(config: Config, section: str) -> MegatronDataset:
    """Opens the files of a section and makes the order of their samples.

    Raises:
        UserError: No files are named, one of them is missing or damaged (see `open_indexed`), a sample has another
            length than the model's sequences, the phase has no documents or no samples, or keys contradict each other.
    """
    loader: MegatronLoader = getattr(config, section).data_loader
    settings = loader.config
    phase = loader.phase or ("train" if section == "train_dataset" else "valid")
    blend = _blend(config, section, phase)
    _check(config, section)
    if blend.own or settings.split is None:
        share = (0.0, 1.0)
    else:
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
        return SampleOrder(
            files[number], documents[number], config.decoder.seq_length, samples, settings.seed,
            extra=int(settings.add_extra_token_to_sequence), keep_partial=keep_partial,
        )  # fmt: skip

    parts, sources = _ordered(blend, size, order)
    if sources is not None:
        found = len(sources)
    else:
        found = parts[0].num_samples
    number = min(count for count in (found, size, loader.num_samples) if count is not None)
    if not number:
        rule = f"the documents of {phase} do not fill one sample of {config.decoder.seq_length} tokens"
        raise data_error(config, blend.location.key, rule, "use more data, or write sizes: documents then repeat")
    masking = EodMasking(
        settings.eod, settings.pad, settings.eod_mask_loss, settings.reset_position_ids,
        settings.create_compressed_eod_mask or settings.reset_attention_mask,
    )  # fmt: skip
    told = f"{settings.seed} {config.decoder.seq_length} {documents} {size} {blend.weights} {keep_partial} "
    told += f"{settings.add_extra_token_to_sequence}"
    dataset = MegatronDataset(parts, sources, blend.weights, number, masking, config.decoder.vocab_size, told)
    if dataset.least_token_id < 0 and dataset.least_token_id != settings.pad:
        rule = f"the files hold token id {dataset.least_token_id}"
        raise data_error(config, f"{section}.data_loader.config.pad", rule, "set it to that token, if it is padding")
    return dataset


def _ordered(blend: _Blend, size: int | None, order) -> tuple[list[SampleOrder], np.ndarray | None]:
    """The samples of each file, and the file of each place of a blend; None where there is only one file."""
    everything = range(len(blend.prefixes))
    if len(everything) == 1 and (blend.weights is None or blend.own):
        return [order(0, size)], None
    if blend.weights is None:
        parts = [order(number, None) for number in everything]
        counts = [part.num_samples for part in parts]
        if size is None:
            return parts, exhaustive_order(counts)
        return parts, blending_order(_normalized(counts), min(size, sum(counts)))
    assert size is not None, "a blend with weights has a size"
    weights = _normalized(blend.weights)
    targets = [math.ceil(size * weight) for weight in weights]
    parts = [order(number, math.ceil(targets[number] * (1 + _SURPLUS))) for number in everything]
    # Megatron-LM divides by the sum twice, which may change the last bit.
    return parts, blending_order(_normalized(weights), sum(targets))


def _normalized(weights: Sequence[float]) -> list[float]:
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def _blend(config: Config, section: str, phase: str) -> _Blend:
    """The files of a phase with their weights."""
    loader: MegatronLoader = getattr(config, section).data_loader
    prefix = f"{section}.data_loader"
    own_keys = [name for name in _OWN_KEYS if getattr(loader.config, name)]
    own_key = _OWN_KEYS[_PHASES.index(phase)]
    shared = [key for key, value in (("dataset_dir", loader.dataset_dir), ("config.data_path", loader.config.data_path))
              if value]
    if len(shared) > 1 or (shared and own_keys):
        others = ", ".join([*shared[1:], *own_keys])
        raise data_error(config, f"{prefix}.{shared[0]}", f"{others} names files too", "remove one")
    if own_keys:
        key = f"config.{own_key}"
        if own_key not in own_keys:
            rule = f"{section} reads {phase}, and only {', '.join(own_keys)} is set"
            raise data_error(config, f"{prefix}.{key}", rule, f"set {key}, or {prefix}.phase")
        if loader.config.split is not None:
            rule = f"it divides the documents of data_path, and {own_keys[0]} is set"
            fix = "remove it"
            raise data_error(config, f"{prefix}.config.split", rule, fix)
    elif shared:
        key = shared[0]
    else:
        rule = "it names no files"
        fix = "name the common path of a .bin and an .idx file: data_path: ['1', path]"
        raise data_error(config, f"{prefix}.config.data_path", rule, fix)
    key = f"{prefix}.{key}"
    if key.endswith("dataset_dir"):
        value = loader.dataset_dir
    else:
        value = getattr(loader.config, key.split(".")[-1])
    prefixes, weights = _paired(config, key, [value] if isinstance(value, str) else value)
    return _Blend(Location(config.source.name(key), config.source.where(key)), prefixes, weights, bool(own_keys))


def _paired(config: Config, key: str, items: list[str | int | float]) -> tuple[list[str], list[float] | None]:
    """Paths, and weights where they stand before them."""
    words = [str(item).strip() for item in items]
    if len(words) % 2 == 0:
        weights = [_number(word) for word in words[::2]]
    else:
        weights = []
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
    """The common path of the two files; the name of one of them says it too."""
    if path.endswith((".bin", ".idx")):
        return path[:-4]
    return path


def _share(config: Config, section: str, phase: str) -> tuple[float, float]:
    """Where the documents of a phase begin and end, as fractions of all."""
    text = getattr(config, section).data_loader.config.split
    key = f"{section}.data_loader.config.split"
    fix = 'write three shares, as "969, 30, 1"'
    try:
        shares = [float(word) for word in re.findall(r"[.0-9]+", text)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not sum(shares) or re.sub(r"[.0-9,\s]", "", text):
        raise data_error(config, key, "shares of training, validation and test are up to three numbers", fix)
    edges = [0.0]
    for share in _normalized(shares + [0.0] * (3 - len(shares))):
        edges.append(edges[-1] + share)
    found = edges[_PHASES.index(phase)], edges[_PHASES.index(phase) + 1]
    if found[0] >= found[1]:
        raise data_error(config, key, f"{section} reads {phase}, and that has no share", fix)
    return found


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
    """Raises an error where keys contradict each other or the model."""
    prefix = f"{section}.data_loader.config"
    settings: MegatronConfig = getattr(config, section).data_loader.config
    length = config.decoder.seq_length
    if settings.seq_length not in (None, length):
        rule = f"a sample has as many tokens as a sequence of the model, and model.model_config.seq_length is {length}"
        raise data_error(config, f"{prefix}.seq_length", rule, f"set it to {length}, or leave it out")
    resets = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "create_compressed_eod_mask")
    acting = next((name for name in resets if getattr(settings, name)), None)
    if acting is not None and settings.eod < 0:
        rule = "it acts at the token that ends a document, and eod does not name it"
        fix = "set eod to that token"
        raise data_error(config, f"{prefix}.{acting}", rule, fix)
    if settings.eod >= 0 and settings.eod == settings.pad:
        rule = "it is the token eod too, and the model would see no end of a document"
        raise data_error(config, f"{prefix}.pad", rule, "write -1, which is what Megatron-LM takes then")
    made = settings.create_attention_mask or settings.create_compressed_eod_mask
    if settings.reset_attention_mask and not made:
        rule = "it changes a mask that create_attention_mask: False does not make, and would have no effect"
        fix = "set create_attention_mask or create_compressed_eod_mask to True, or this to False"
        raise data_error(config, f"{prefix}.reset_attention_mask", rule, fix)
    if getattr(config, section).held_out:
        fix = "write an eval_dataset, and give valid a share in config.split"
        raise data_error(config, f"{section}.held_out", "the order of samples is Megatron-LM's, of all documents", fix)
