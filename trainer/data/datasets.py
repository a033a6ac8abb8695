"""Builds the data sets of a run from its configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from trainer.config.checks.problem import data_error
from trainer.config.schema.data import EVAL, TRAIN
from trainer.data.batches import split
from trainer.data.batches.batch import AnyBatch, Batch, PairBatch, WeightedBatch
from trainer.data.batches.blend import BlendedDataset
from trainer.data.batches.packing import (
    FittedSpans,
    PackedDataset,
    RecordForm,
    SequenceDataset,
    TokenDataset,
    pairs_of_documents,
    truncate_or_drop,
)
from trainer.data.batches.split import DocumentSpans
from trainer.data.source.files import RECORDS, DataSource
from trainer.data.source.find import find_sources
from trainer.data.source.samples import SkippedRecords, read_samples
from trainer.data.source.synthetic import SyntheticDataset
from trainer.data.tokens.cache import OnNote, find_token_file
from trainer.data.tokens.chat_template import load_chat_template, resolve_train_on
from trainer.data.tokens.token_file import Progress, TokenCache, TokenFile
from trainer.data.tokens.tokenizer import Tokenizer, load_tokenizer
from trainer.errors import UserError
from trainer.input_files import unwritable_reason
from trainer.storage.cache_folder import user_cache

if TYPE_CHECKING:
    from trainer.config import Config


def build_datasets(
    config: Config, progress: Progress | None = None, note: OnNote | None = None
) -> tuple[SequenceDataset, SequenceDataset | None]:
    """Builds the data sets of a training run; this is slow only if the token file is not in the cache.

    Args:
        progress: Called with (bytes done, bytes of the source) while a token file is built.
        note: Called with a sentence if the data differ from what was requested.

    Returns:
        The training data, and the data for evaluation or None. The latter are ``eval_dataset`` if the run evaluates, or
        the documents held out of ``train_dataset`` if there is no ``eval_dataset``.

    Raises:
        UserError: Files or the tokenizer are missing or damaged. Or a sequence is longer than the data, a batch is
            larger than the data set, or a token is beyond the model's vocabulary.
        RunError: The disk is full, or the data change while they are read.
    """
    train, held_out = build_train_dataset(config, progress, note)
    if config.eval_dataset is None:
        return train, held_out
    if not config.do_eval and config.run_mode != "eval":
        return train, None
    return train, _build_eval(config, progress, note)


def build_train_dataset(
    config: Config, progress: Progress | None = None, note: OnNote | None = None
) -> tuple[SequenceDataset, SequenceDataset | None]:
    """Builds the training data, and the documents held out of it (None without ``held_out``)."""
    train, held_out = _build_section(config, TRAIN, progress, note)
    _check_sizes(config, TRAIN, train)
    return train, held_out


def build_eval_dataset(
    config: Config, progress: Progress | None = None, note: OnNote | None = None
) -> SequenceDataset | None:
    """Builds the data of an evaluation; returns None without ``eval_dataset`` and held-out documents."""
    if config.eval_dataset is not None:
        return _build_eval(config, progress, note)
    if not config.train_dataset.held_out:
        return None
    return _build_section(config, TRAIN, progress, note)[1]


def check_tokenizer(config: Config, section: str) -> None:
    """Checks that the model has embeddings for all tokens of a section's tokenizer, if the data are text.

    Raises:
        UserError: The vocabulary is too small, or the tokenizer cannot be read.
    """
    if getattr(config, section).data_loader.reads_text:
        tokens = find_tokenizer(config, section).vocab_size
        _check_vocabulary(config, f"the tokenizer has {tokens} tokens", tokens)


def data_layout(config: Config, data: SequenceDataset, ranks: int) -> dict[str, Any]:
    """Returns the settings that decide what a position in the training data means."""
    train = config.train_dataset
    runner = config.runner_config
    optional: dict[str, Any] = {}
    if runner.rampup_batch_size is not None:
        optional["rampup_batch_size"] = runner.rampup_batch_size
    if getattr(data, "record_form", ""):
        optional["record_form"] = data.record_form
    return optional | {
        "seed": config.seed,
        "batch_size": runner.batch_size,
        "gradient_accumulation_steps": runner.gradient_accumulation_steps,
        "ranks": ranks,
        "seq_length": config.network.labels_per_sequence,
        "shuffle": train.data_loader.shuffle,
        "drop_remainder": train.drop_remainder,
        "held_out": train.held_out,
        "rows": data.num_sequences,
        "content": data.content,
    }


def batch_size(config: Config, section: str) -> int:
    """Returns the number of sequences in a micro-batch of a section."""
    size = getattr(config, section).batch_size
    if section == EVAL and size is not None:
        return size
    return config.runner_config.batch_size


def _build_eval(config: Config, progress: Progress | None, note: OnNote | None) -> SequenceDataset:
    dataset, _ = _build_section(config, EVAL, progress, note)
    _check_sizes(config, EVAL, dataset)
    return dataset


def _build_section(
    config: Config, section: str, progress: Progress | None, note: OnNote | None
) -> tuple[SequenceDataset, SequenceDataset | None]:
    """Builds the data set of a section, and the data set held out of ``train_dataset`` if requested."""
    loader = getattr(config, section).data_loader
    if loader.type == "SyntheticDataset":
        return _synthetic(config, section)
    if loader.reads_images:
        from trainer.data.source.images import build_images

        return cast(SequenceDataset, build_images(config, section)), None  # its batches are images
    if loader.type == "BlendedMegatronDatasetDataLoader":
        from trainer.data.source.megatron import build_megatron

        dataset = build_megatron(config, section)
        _check_vocabulary(config, f"the data contain token id {dataset.max_token_id}", dataset.max_token_id + 1)
        return dataset, None
    if loader.type == "MindDataset":
        from trainer.data.batches.mindrecord import build_mindrecord

        return build_mindrecord(config, section)
    opened = open_token_files(config, section, progress, note)
    if len(opened) == 1:
        source, _, file = opened[0]
        parts = _build_source(config, section, source, file, loader.num_samples, note)
    else:
        built = [_build_source(config, section, source, file, None, note) for source, _, file in opened]
        parts = _blend(config, section, [(source, weight) for source, weight, _ in opened], built, note)
    parts[0].record_form = _record_form([(source, file) for source, _, file in opened])
    return parts


def _record_form(opened: Sequence[tuple[DataSource, TokenFile]]) -> RecordForm:
    """Returns how the records of token files became text; the first record of a file stands for all without a chat."""
    if any(file.meta.num_rendered for _, file in opened):
        return "chat"
    for source, file in opened:
        if file.meta.num_conversations:
            first = next(read_samples(source, SkippedRecords()), None)
            if first is not None and first[0].messages is not None and first[0].text:
                return "alpaca"
    return "text"


def open_token_files(
    config: Config, section: str, progress: Progress | None = None, note: OnNote | None = None
) -> list[tuple[DataSource, float, TokenFile]]:
    """Opens the token file of each source of a section of text or records, with the weight of the source.

    The arguments are those of `build_datasets`.

    Raises:
        UserError: Files or the tokenizer are missing or damaged, or a token is beyond the model's vocabulary.
        RunError: The disk is full, or the data change while they are read.
    """
    tokenizer = find_tokenizer(config, section)
    cache = find_cache(config, section)
    _tell(_cache_notes(config, section), note)
    _check_vocabulary(config, f"the tokenizer has {tokenizer.vocab_size} tokens", tokenizer.vocab_size)
    sources = find_sources(config, section)
    opened = []
    template = None
    if sources[0][0].kind == RECORDS:
        template = load_chat_template(config, section, tokenizer)
    train_on = resolve_train_on(config, section)
    num_rendered = 0
    for source, weight in sources:
        _tell(source.notes, note)
        token_file = find_token_file(
            source, tokenizer, cache, template=template, train_on=train_on, progress=progress, note=note
        )
        num_rendered += token_file.meta.num_rendered
        opened.append((source, weight, token_file))
    if template is not None and num_rendered:
        _tell(template.notes, note)
    return opened


def _tell(sentences: Sequence[str], note: OnNote | None) -> None:
    if note is not None:
        for sentence in sentences:
            note(sentence)


def _build_source(
    config: Config, section: str, source: DataSource, token_file: TokenFile, limit: int | None, note: OnNote | None
) -> tuple[SequenceDataset, SequenceDataset | None]:
    """Packs the documents of a source into at most `limit` sequences, and its held-out documents likewise."""
    settings = getattr(config, section)
    seq_length = config.decoder.seq_length
    pairs = config.preferences is not None
    packing: Literal["whole", "cut", "none"] = settings.packing or "cut"
    if not settings.packing and (pairs or token_file.meta.num_conversations):
        packing = "whole"
    documents = split.all_documents(token_file.offsets)
    if pairs:
        documents = pairs_of_documents(documents)
    held_out = None
    fitted = None
    if packing == "cut" and settings.overlong != "truncate" and note is not None:
        note(f"{source.name} is cut every {seq_length} tokens: {section}.overlong = {settings.overlong} has no effect.")
    if packing != "cut":
        fitted = _truncate_or_drop(config, section, documents, source, note)
        documents = fitted.spans
    if section == TRAIN and settings.held_out:
        documents, held_out = _hold_out(config, documents, packing, note)

    def dataset_of(spans: DocumentSpans, keep_tail: bool, limit: int | None, kind: type[AnyBatch]) -> SequenceDataset:
        """Returns the documents as running text, or packed, as the configuration says."""
        if packing == "cut":
            return TokenDataset(token_file, spans, seq_length, keep_tail=keep_tail, limit=limit, kind=kind)
        return PackedDataset(token_file, spans, seq_length, packing=packing, limit=limit, fitted=fitted, kind=kind)

    kind: type[AnyBatch] = Batch
    if pairs:
        kind = PairBatch
    train_kind = kind
    if section == TRAIN and settings.has_weights:  # evaluations ignore weights
        train_kind = WeightedBatch
    dataset = dataset_of(documents, not settings.drop_remainder, limit, train_kind)
    if held_out is None:
        return dataset, None
    # Held-out text is short, and an evaluation reads it once: it includes every token.
    return dataset, dataset_of(held_out, True, None, kind)


def _blend(
    config: Config, section: str, sources: Sequence[tuple[DataSource, float]],
    built: Sequence[tuple[SequenceDataset, SequenceDataset | None]], note: OnNote | None,
) -> tuple[SequenceDataset, SequenceDataset | None]:  # fmt: skip
    """Blends the data sets of several sources by weight; an evaluation reads each of their sequences once."""
    names = [source.name for source, _ in sources]
    weights = [weight for _, weight in sources]
    if section == EVAL and len(set(weights)) > 1 and note is not None:
        note("eval_dataset: source weights are ignored; an evaluation reads every sequence once.")
    limit = getattr(config, section).data_loader.num_samples
    train_weights = None
    if section == TRAIN:
        train_weights = weights
    blended = BlendedDataset([data for data, _ in built], names, train_weights, limit)
    for number, share in enumerate(blended.shares):
        key = f"{section}.data_loader.sources.{number}"
        if not share.sequences:
            rule = f"the source does not fill one sequence of {blended.seq_length} tokens"
            fix = "remove it, or set a smaller model.model_config.seq_length"
            raise data_error(config, f"{key}.path", rule, fix)
        if section == TRAIN and not share.epoch_sequences:
            rule = f"this weight gives {share.name} none of the {blended.num_sequences} sequences of an epoch"
            raise data_error(config, f"{key}.weight", rule, "raise it, or remove the source")
    held_out = [data for _, data in built if data is not None]
    if not held_out:
        return blended, None
    return blended, BlendedDataset(held_out, names, None)


def _truncate_or_drop(
    config: Config, section: str, samples: DocumentSpans, source: DataSource, note: OnNote | None
) -> FittedSpans:
    """Truncates or drops samples that are longer than a sequence, or raises an error, as `overlong` says."""
    overlong = getattr(config, section).overlong
    seq_length = config.decoder.seq_length
    is_long = samples.lengths > seq_length
    first = int(is_long.argmax())
    loss = config.preferences

    def fail(rule: str, fix: str) -> UserError:
        """Makes the error for the key `overlong`."""
        fix = f"set it to {fix}, or a larger model.model_config.seq_length"
        return data_error(config, f"{section}.overlong", rule, fix)

    if loss is not None and overlong == "truncate" and is_long.any():
        both = ""
        if loss.answers == "labels":
            both = " with the answer to another prompt"
        tokens = f"has {samples.lengths[first]} tokens{both}, and a sequence {seq_length}"
        unit = loss.unit
        raise fail(f"a {unit} stays whole in a sequence; {unit} {first + 1} of {source.name} {tokens}", "drop")
    if overlong == "error" and is_long.any():
        rule = f"sample {first + 1} of {source.name} has {samples.lengths[first]} tokens, and a sequence {seq_length}"
        raise fail(rule, "truncate or drop")
    fitted = truncate_or_drop(samples, seq_length, overlong)
    if not len(fitted.spans.lengths):
        rule = f"all {fitted.dropped} samples of {source.name} are longer than a sequence of {seq_length} tokens"
        raise fail(rule, "truncate")
    if note is not None and (fitted.truncated or fitted.dropped):
        result = "truncated: they lose the beginning of their prompt"
        if fitted.dropped:
            result = "dropped"
        count = f"{fitted.dropped or fitted.truncated:,} of {len(samples.lengths):,} samples"
        note(f"{count} of {source.name} are longer than a sequence ({seq_length} tokens) and are {result}.")
    return fitted


def _hold_out(
    config: Config, documents: DocumentSpans, packing: str, note: OnNote | None
) -> tuple[DocumentSpans, DocumentSpans]:
    """Splits the documents of ``train_dataset`` into (training, held out)."""
    fraction = config.train_dataset.held_out
    if packing != "cut" and len(documents.lengths) < 2:
        rule = "samples are not divided, and there is only one"
        fix = f"remove it, use more data, or set {TRAIN}.packing to cut"
        raise data_error(config, f"{TRAIN}.held_out", rule, fix)
    train, held_out = split.hold_out(documents, fraction, config.seed)
    held_out_tokens = int(held_out.lengths.sum())
    actual = held_out_tokens / (held_out_tokens + int(train.lengths.sum()))
    if note is not None and not fraction / 1.5 <= actual <= fraction * 1.5:
        note(f"Whole documents are held out: {actual:.1%} of all tokens instead of held_out = {fraction:.1%}.")
    return train, held_out


def _synthetic(config: Config, section: str) -> tuple[SequenceDataset, SequenceDataset | None]:
    """Numbers the sequences of a seed: training data from 0 on, then held-out data, then ``eval_dataset``."""
    settings = getattr(config, section)
    size = settings.data_loader.num_samples
    held_out_size = 0
    if size is None:
        key = f"{section}.data_loader.num_samples"
        fix = f"set {key} to the number of sequences of an epoch"
        raise data_error(config, key, "SyntheticDataset needs a number of sequences", fix)
    if section == TRAIN and settings.held_out and size > 1:
        held_out_size = min(max(round(settings.held_out * size), 1), size - 1)
    size -= held_out_size
    sizes = config.decoder.seq_length, config.decoder.vocab_size, config.seed
    first = 0
    if section == EVAL and config.train_dataset.data_loader.type == "SyntheticDataset":
        first = config.train_dataset.data_loader.num_samples or 0
    dataset = SyntheticDataset(size, *sizes, first=first)
    if not held_out_size:
        return dataset, None
    return dataset, SyntheticDataset(held_out_size, *sizes, first=size)


def find_cache(config: Config, section: str) -> TokenCache:
    """Returns the folder of token files; the default of eval_dataset is that of train_dataset.

    The default of both is in the user's cache, or in `output_dir` if the user's cache cannot be made.
    """
    owner = TRAIN
    if getattr(config, section).cache_dir is not None:
        owner = section
    key = f"{owner}.cache_dir"
    folder = getattr(config, owner).cache_dir
    if folder is None:
        folder = user_cache() / "tokens"
        if _missing_cache_reason():
            folder = Path(config.output_dir) / "tokens"
    return TokenCache(Path(os.path.expanduser(folder)), key, config.source.where(key))


def _missing_cache_reason() -> str:
    """Returns why the user's cache is not there and cannot be made; empty if it can be used."""
    folder = user_cache() / "tokens"
    if folder.is_dir():
        return ""
    return unwritable_reason(next(path for path in folder.absolute().parents if path.exists()))


def _cache_notes(config: Config, section: str) -> list[str]:
    """Returns a note if token files are not in the user's cache although no other folder is named."""
    names_none = getattr(config, section).cache_dir is None and getattr(config, TRAIN).cache_dir is None
    if names_none and (reason := _missing_cache_reason()):
        return [f"token files are in {find_cache(config, section).path}: {user_cache()} cannot be made ({reason})"]
    return []


def find_tokenizer(config: Config, section: str) -> Tokenizer:
    """Loads a section's tokenizer; in ``eval_dataset`` the default, `bytes`, means the one of ``train_dataset``."""
    if section == TRAIN or getattr(config, section).tokenizer.type == "bytes":
        return load_tokenizer(config, TRAIN)
    tokenizer = load_tokenizer(config, section)
    if config.run_mode == "eval" or tokenizer.fingerprint == load_tokenizer(config, TRAIN).fingerprint:
        return tokenizer
    rule = "a model must be evaluated with the tokenizer of its training, and train_dataset.tokenizer is another one"
    fix = "leave eval_dataset.tokenizer out, which then is train_dataset.tokenizer"
    raise data_error(config, "eval_dataset.tokenizer.path", rule, fix)


def _check_vocabulary(config: Config, what: str, tokens: int) -> None:
    """Checks that the model has embeddings for `tokens` tokens, even if the data do not use all of them."""
    vocab_size = config.decoder.vocab_size
    if tokens > vocab_size:
        rule = f"{what}, beyond the model's vocabulary of {vocab_size}"
        fix = f"set it to at least {tokens}, or use the model's own tokenizer"
        raise data_error(config, "model.model_config.vocab_size", rule, fix)


def _check_sizes(config: Config, section: str, dataset: SequenceDataset) -> None:
    """Checks that running text fills a sequence, and the sequences a batch."""
    settings = getattr(config, section)
    seq_length = config.decoder.seq_length
    num_sequences = dataset.num_sequences
    is_cut = dataset.packing is not None and dataset.packing.packing == "cut"
    if is_cut and dataset.num_tokens <= seq_length:
        needed = f"a sequence takes {seq_length + 1} tokens (one more for the last label)"
        rule = f"{needed}, and {section} has {dataset.num_tokens}"
        fix = f"set it to at most {max(dataset.num_tokens - 1, 1)}, or use more data"
        raise data_error(config, "model.model_config.seq_length", rule, fix)
    size = batch_size(config, section)
    if settings.drop_remainder and num_sequences < size:
        key = "runner_config.batch_size"
        if section == EVAL and settings.batch_size is not None:
            key = f"{EVAL}.batch_size"
        rule = f"{section} has {num_sequences} {config.network.sequences_text}, fewer than one batch"
        fix = f"set it to at most {num_sequences}, or {section}.drop_remainder to false, or use more data"
        raise data_error(config, key, rule, fix)
