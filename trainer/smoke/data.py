"""The data of a smoke run: the first rows of what is here, and for what is not, files of the same form (`rows`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.config.schema.data import EVAL, TRAIN, HuggingFaceLoader, MegatronLoader
from trainer.smoke.changes import Change, Setup, changed
from trainer.smoke.model import seq_length, small_vocabulary
from trainer.smoke.training import batch_size, rows_of_a_step

TOKEN_FILES = ("MindDataset", "BlendedMegatronDatasetDataLoader")
_MODEL = "model.model_config"
_ABSENT = "not here: synthetic rows of the same form"


def sections_read(config: Config) -> list[str]:
    """The data sets that the smoke run reads."""
    return [TRAIN, *([EVAL] if _evaluates(config) and config.eval_dataset is not None else [])]


def _evaluates(config: Config) -> bool:
    """Whether the file evaluates, or has the data for it."""
    evaluation = config.eval_dataset
    return config.do_eval or (evaluation is not None and evaluation.data_loader.support == "supported")


def vocabulary(config: Config, setup: Setup) -> int:
    """Tokens of the small model's vocabulary: all there are, where real ones are read."""
    if config.classifier is not None:
        return config.decoder.vocab_size
    for section in sections_read(config):
        loader = getattr(config, section).data_loader
        real = loader.type in TOKEN_FILES and section not in setup.missing
        if real or (loader.reads_text and _has_tokenizer(config, section)):
            return config.decoder.vocab_size
    return small_vocabulary(config)


def _has_tokenizer(config: Config, section: str) -> bool:
    tokenizer = getattr(config, section).tokenizer
    return tokenizer.type == "huggingface" and Path(tokenizer.path).expanduser().exists()


def data_changes(config: Config, setup: Setup, vocab_size: int) -> Iterator[Change]:
    """Where the data comes from, how many rows of it are read, and ids of special tokens within the vocabulary."""
    evaluates = _evaluates(config)
    if evaluates:
        yield from changed(config, "do_eval", after=True, why="the file has an eval_dataset")
        if config.eval_step_interval > 0:
            yield from changed(config, "eval_step_interval", setup.steps, "after the last step")
        source = TRAIN
        if config.eval_dataset is not None:
            source = EVAL
        yield from changed(config, f"{source}.max_batches", 1, "one batch is evaluated")
    elif config.eval_dataset is not None:
        yield Change(EVAL, config.eval_dataset.data_loader.type, None, "not read: do_eval is False")
    rows = {TRAIN: setup.steps * rows_of_a_step(config, setup), EVAL: batch_size(config) * setup.ranks}
    for section in sections_read(config):
        yield from _section(config, setup, section, rows[section])
    if evaluates and config.eval_dataset is not None and config.eval_dataset.batch_size is not None:
        yield from changed(config, f"{EVAL}.batch_size", min(config.eval_dataset.batch_size, batch_size(config)))
    yield from _special_ids(config, vocab_size)


def _section(config: Config, setup: Setup, section: str, rows: int) -> Iterator[Change]:
    wanted = getattr(config, section)
    key = f"{section}.data_loader"
    loader = wanted.data_loader
    if section == TRAIN and wanted.held_out and loader.type == "SyntheticDataset":
        rows += 1 + round(wanted.held_out * rows)
    limit = "enough for a batch"
    if section == TRAIN:
        limit = f"enough for {setup.steps} steps"
    yield from changed(config, f"{key}.num_samples", min(loader.num_samples or rows, rows), limit)
    if isinstance(loader, MegatronLoader):
        sizes = [rows if size is None or size else 0 for size in loader.sizes]
        yield from changed(config, f"{key}.sizes", sizes, limit)
        if loader.config.seq_length is not None:
            yield from changed(config, f"{key}.config.seq_length", seq_length(config), f"that of {_MODEL}")
    folder = setup.folder / "data" / section
    if section in setup.missing or section in setup.large:
        yield from _replaced(config, key, folder, _ABSENT if section in setup.missing else "its first records")
        yield from changed(config, f"{section}.cache_dir", str(setup.folder / "data" / "tokens"))
    elif loader.type == "MindDataset":
        why = f"its first rows, of {seq_length(config)} tokens each"
        yield from _mindrecord(config, key, folder, why)
    tokenizer = wanted.tokenizer
    if tokenizer.type == "huggingface" and not _has_tokenizer(config, section):
        why = "not here: a token is a byte"
        yield from changed(config, f"{section}.tokenizer.path", "", why)
        yield from changed(config, f"{section}.tokenizer.type", "bytes", why)
    template = wanted.chat_template
    if "/" in template and not Path(template).expanduser().exists():
        yield from changed(config, f"{section}.chat_template", "", "not here: ChatML")


def _replaced(config: Config, key: str, folder: Path, why: str) -> Iterator[Change]:
    """The places of the files of `rows`."""
    section = key.split(".")[0]
    loader = getattr(config, section).data_loader
    if loader.type == "MindDataset":
        yield from _mindrecord(config, key, folder, why)
    elif isinstance(loader, MegatronLoader):
        yield from _megatron(config, key, loader, folder)
    elif isinstance(loader, HuggingFaceLoader):
        name = loader.split or {TRAIN: "train", EVAL: "validation"}[section]
        shown = loader.data_files or loader.dataset_dir or loader.path
        yield Change(f"{key}.data_files", shown, str(folder / f"{name}.json"), why)
        yield from changed(config, f"{key}.path", "json")
        yield from changed(config, f"{key}.data_dir", None)
        yield from changed(config, f"{key}.dataset_dir", "")
        yield from _handlers(config, key)
    elif loader.type == "MnistDataset":
        yield from changed(config, f"{key}.dataset_dir", str(folder), why)
    else:
        ending = "jsonl"
        if loader.type == "TextDataset":
            ending = "txt"
        for number, _ in enumerate(loader.sources):
            yield from changed(config, f"{key}.sources.{number}.path", str(folder / f"{number}.{ending}"), why)
        if not loader.sources:
            yield from changed(config, f"{key}.dataset_dir", str(folder / f"rows.{ending}"), why)


def _mindrecord(config: Config, key: str, folder: Path, why: str) -> Iterator[Change]:
    files = getattr(config, key.split(".")[0]).data_loader.dataset_files
    change = list(changed(config, f"{key}.dataset_dir", str(folder / "rows.mindrecord"), why))
    yield from (change[0]._replace(before=files), *changed(config, f"{key}.dataset_files", None)) if files else change


def _megatron(config: Config, key: str, loader: MegatronLoader, folder: Path) -> Iterator[Change]:
    names = [name for name in ("train_data_path", "valid_data_path", "test_data_path", "data_path")
             if getattr(loader.config, name)]
    if loader.dataset_dir or not names:
        yield from changed(config, f"{key}.dataset_dir", str(folder / "0"), _ABSENT)
    for name in names:
        written = getattr(loader.config, name)
        items = written
        if isinstance(written, str):
            items = [written]
        step = 1
        if len(items) % 2 == 0 and _is_number(items[0]):
            step = 2
        paths = [str(folder / f"{name}-{number}") if step == 1 or number % 2 else item
                 for number, item in enumerate(items)]
        yield from changed(config, f"{key}.config.{name}", paths, _ABSENT)


def _is_number(item: str | int | float) -> bool:
    try:
        return float(item) > 0
    except ValueError:
        return False


def _handlers(config: Config, key: str) -> Iterator[Change]:
    """Steps of processing without the tokenizers that they name."""
    handler = getattr(config, key.split(".")[0]).data_loader.handler
    if isinstance(handler, list):
        steps: Any = [_without_tokenizer(step) for step in handler]
    else:
        steps = {name: _without_tokenizer(step or {}) for name, step in handler.items()}
    yield from changed(config, f"{key}.handler", steps)


def _without_tokenizer(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name != "tokenizer"}


def _special_ids(config: Config, vocab_size: int) -> Iterator[Change]:
    """Each id beyond the vocabulary becomes one of its last; where bytes are read, the byte tokenizer has its own."""
    if config.classifier is not None:
        return
    decoder = config.decoder
    own = config.train_dataset
    names = [f"{_MODEL}.{name}" for name in ("eos_token_id", "bos_token_id", "pad_token_id")]
    if own.data_loader.reads_text and not _has_tokenizer(config, TRAIN):
        for key in names if own.tokenizer.type == "huggingface" or vocab_size < decoder.vocab_size else ():
            yield from changed(config, key, None, "the tokenizer of bytes has its own")
        names = []
    keys = {key: getattr(decoder, key.split(".")[-1]) for key in names}
    for section in sections_read(config):
        wanted = getattr(config, section)
        keys[f"{section}.eod_token_id"] = wanted.eod_token_id
        if isinstance(wanted.data_loader, MegatronLoader):
            keys |= {f"{section}.data_loader.config.{name}": getattr(wanted.data_loader.config, name)
                     for name in ("eod", "pad")}
    values = [value for value in keys.values() if value is not None]
    ids = sorted({each for value in values for each in (value if isinstance(value, list) else [value])})
    beyond = [each for each in ids if each >= vocab_size]
    moved = {each: vocab_size - len(beyond) + place for place, each in enumerate(beyond)}
    for key, value in keys.items():
        if isinstance(value, list):
            after = [moved.get(each, each) for each in value]
        else:
            after = moved.get(value, value)
        yield from changed(config, key, after, f"within the vocabulary of {vocab_size}")
