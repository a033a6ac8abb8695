"""The data of a smoke run: the first rows of existing data, and synthetic data of the same form for missing data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.config.schema.data import EVAL, TRAIN, HuggingFaceLoader, MegatronLoader, SftLoader
from trainer.smoke.changes import NewValue, Setup
from trainer.smoke.model import SMALL_VOCABULARY, seq_length
from trainer.smoke.training import micro_batches, smoke_batch_size

TOKEN_FILES = ("MindDataset", "BlendedMegatronDatasetDataLoader")
_MODEL = "model.model_config"
_ABSENT = "not here: synthetic rows of the same form"


def sections_read(config: Config) -> list[str]:
    """Returns the data set sections that the smoke run reads."""
    if _evaluates(config) and config.eval_dataset is not None:
        return [TRAIN, EVAL]
    return [TRAIN]


def _evaluates(config: Config) -> bool:
    """Returns whether the file evaluates, or has the data to do it."""
    evaluation = config.eval_dataset
    return config.do_eval or (evaluation is not None and evaluation.data_loader.support == "supported")


def vocabulary(config: Config, setup: Setup) -> int:
    """Returns the vocabulary size of the small model: that of the file if real tokens are read."""
    for section in sections_read(config):
        loader = getattr(config, section).data_loader
        real = loader.type in TOKEN_FILES and section not in setup.missing
        if real or (loader.reads_text and _has_tokenizer(config, section)):
            return config.decoder.vocab_size
    return min(config.decoder.vocab_size, SMALL_VOCABULARY)


def _has_tokenizer(config: Config, section: str) -> bool:
    tokenizer = getattr(config, section).tokenizer
    return tokenizer.type == "huggingface" and Path(tokenizer.path).expanduser().exists()


def data_changes(config: Config, setup: Setup, vocab_size: int) -> Iterator[NewValue]:
    """Yields the changes of data paths, of the number of rows, and of special token ids beyond the vocabulary."""
    evaluates = _evaluates(config)
    if evaluates:
        yield NewValue("do_eval", after=True, why="the file has an eval_dataset")
        if config.eval_step_interval > 0:
            yield NewValue("eval_step_interval", setup.steps, "after the last step")
        source = TRAIN
        if config.eval_dataset is not None:
            source = EVAL
        yield NewValue(f"{source}.max_batches", 1, "one batch is evaluated")
    elif config.eval_dataset is not None:
        yield NewValue(EVAL, None, "not read: do_eval is false", config.eval_dataset.data_loader.type)
    micro_batch = smoke_batch_size(config)
    sequences_of_step = micro_batch * micro_batches(config) * setup.layout.degrees.data_parallel
    rows = {TRAIN: setup.steps * sequences_of_step, EVAL: micro_batch * setup.ranks}
    for section in sections_read(config):
        yield from _section_changes(config, setup, section, rows[section])
    if evaluates and config.eval_dataset is not None and config.eval_dataset.batch_size is not None:
        size = min(config.eval_dataset.batch_size, smoke_batch_size(config))
        yield NewValue(f"{EVAL}.batch_size", size)
    yield from _special_ids(config, vocab_size)


def _section_changes(config: Config, setup: Setup, section: str, rows: int) -> Iterator[NewValue]:
    data = getattr(config, section)
    key = f"{section}.data_loader"
    loader = data.data_loader
    if section == TRAIN and data.held_out and loader.type == "SyntheticDataset":
        rows += 1 + round(data.held_out * rows)
    limit = "enough for a batch"
    if section == TRAIN:
        limit = f"enough for {setup.steps} steps"
    samples = rows
    if section not in setup.missing and loader.type != "SyntheticDataset":  # existing data keeps its limit
        samples = min(loader.num_samples or rows, rows)
    yield NewValue(f"{key}.num_samples", samples, limit)
    if config.preferences is not None:
        yield NewValue(f"{section}.overlong", "drop", "longer pairs do not fit")
    if isinstance(loader, MegatronLoader):
        sizes = [rows * (size != 0) for size in loader.sizes]
        yield NewValue(f"{key}.sizes", sizes, limit)
        if loader.config.seq_length is not None:
            yield NewValue(f"{key}.config.seq_length", seq_length(config), f"that of {_MODEL}")
    folder = setup.folder / "data" / section
    if section in setup.missing or section in setup.large:
        why = "its first records"
        if section in setup.missing:
            why = _ABSENT
        yield from _file_changes(config, key, folder, why)
        yield NewValue(f"{section}.cache_dir", str(setup.folder / "data" / "tokens"))
    elif loader.type == "MindDataset":
        yield from _mindrecord(config, key, folder, f"its first rows, of {seq_length(config)} tokens each")
    tokenizer = data.tokenizer
    if tokenizer.type == "huggingface" and not _has_tokenizer(config, section):
        why = "not here: a token is a byte"
        yield NewValue(f"{section}.tokenizer.path", "", why)
        yield NewValue(f"{section}.tokenizer.type", "bytes", why)
    template = data.chat_template
    if "/" in template and not Path(template).expanduser().exists():
        yield NewValue(f"{section}.chat_template", "", "not here: ChatML")


def _file_changes(config: Config, key: str, folder: Path, why: str) -> Iterator[NewValue]:
    """Yields the paths at which `synthetic_data` writes its files."""
    section = key.split(".")[0]
    loader = getattr(config, section).data_loader
    if loader.type == "MindDataset":
        yield from _mindrecord(config, key, folder, why)
    elif isinstance(loader, MegatronLoader):
        yield from _megatron(config, key, loader, folder)
    elif isinstance(loader, HuggingFaceLoader):
        name = loader.split or {TRAIN: "train", EVAL: "validation"}[section]
        shown = loader.data_files or loader.dataset_dir or loader.path
        yield NewValue(f"{key}.data_files", str(folder / f"{name}.json"), why, shown)
        yield NewValue(f"{key}.path", "json")
        yield NewValue(f"{key}.data_dir", None)
        yield NewValue(f"{key}.dataset_dir", "")
        yield from _handlers(config, key)
    elif loader.reads_images:
        yield NewValue(f"{key}.dataset_dir", str(folder), why)
    else:
        ending = "jsonl"
        if loader.type == "TextDataset":
            ending = "txt"
        for number, _ in enumerate(loader.sources):
            yield NewValue(f"{key}.sources.{number}.path", str(folder / f"{number}.{ending}"), why)
        if not loader.sources:
            yield NewValue(f"{key}.dataset_dir", str(folder / f"rows.{ending}"), why)
        if isinstance(loader, SftLoader):
            yield NewValue(f"{key}.tokenizer", None)


def _mindrecord(config: Config, key: str, folder: Path, why: str) -> Iterator[NewValue]:
    files = getattr(config, key.split(".")[0]).data_loader.dataset_files
    yield NewValue(f"{key}.dataset_dir", str(folder / "rows.mindrecord"), why, files or ...)
    if files:
        yield NewValue(f"{key}.dataset_files", None)


def _megatron(config: Config, key: str, loader: MegatronLoader, folder: Path) -> Iterator[NewValue]:
    names = [name for name in ("train_data_path", "valid_data_path", "test_data_path", "data_path")
             if getattr(loader.config, name)]
    if loader.dataset_dir or not names:
        yield NewValue(f"{key}.dataset_dir", str(folder / "0"), _ABSENT)
    for name in names:
        items = getattr(loader.config, name)
        if isinstance(items, str):
            items = [items]
        has_weights = len(items) % 2 == 0 and _is_number(items[0])
        paths = list(items)
        for number, _ in enumerate(items):
            if number % 2 or not has_weights:
                paths[number] = str(folder / f"{name}-{number}")
        yield NewValue(f"{key}.config.{name}", paths, _ABSENT)


def _is_number(item: str | int | float) -> bool:
    try:
        return float(item) > 0
    except ValueError:
        return False


def _handlers(config: Config, key: str) -> Iterator[NewValue]:
    """Yields the processing steps without the tokenizers that they name."""
    handler = getattr(config, key.split(".")[0]).data_loader.handler
    if isinstance(handler, list):
        steps: Any = [_without_tokenizer(step) for step in handler]
    else:
        steps = {name: _without_tokenizer(step or {}) for name, step in handler.items()}
    yield NewValue(f"{key}.handler", steps)


def _without_tokenizer(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "tokenizer"}


def _special_ids(config: Config, vocab_size: int) -> Iterator[NewValue]:
    """Yields smaller ids for special tokens beyond the vocabulary; the byte tokenizer has special tokens of its own."""
    decoder = config.decoder
    train = config.train_dataset
    names = [f"{_MODEL}.{name}" for name in ("eos_token_id", "bos_token_id", "pad_token_id")]
    if train.data_loader.reads_text and not _has_tokenizer(config, TRAIN):
        if train.tokenizer.type == "huggingface" or vocab_size < decoder.vocab_size:
            for key in names:
                yield NewValue(key, None, "the tokenizer of bytes has its own")
        names = []
    keys = {key: getattr(decoder, key.split(".")[-1]) for key in names}
    for section in sections_read(config):
        data = getattr(config, section)
        keys[f"{section}.eod_token_id"] = data.eod_token_id
        if isinstance(data.data_loader, MegatronLoader):
            for name in ("eod", "pad"):
                keys[f"{section}.data_loader.config.{name}"] = getattr(data.data_loader.config, name)
    ids: set[int] = set()
    for value in keys.values():
        if isinstance(value, list):
            ids |= set(value)
        elif value is not None:
            ids.add(value)
    beyond = sorted(each for each in ids if each >= vocab_size)
    moved = {each: vocab_size - len(beyond) + place for place, each in enumerate(beyond)}
    for key, value in keys.items():
        if isinstance(value, list):
            after = [moved.get(each, each) for each in value]
        else:
            after = moved.get(value, value)
        yield NewValue(key, after, f"within the vocabulary of {vocab_size}")
