"""Writes synthetic data for a smoke run in place of missing data: small files for the file's own loader.

Tokens are drawn with a fixed seed, texts from a few words; a document ends with the end token of the file.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import Config
from trainer.config.schema.data import HuggingFaceLoader, MegatronLoader, SftLoader
from trainer.config.schema.runner import LossConfig
from trainer.data.source.compression import open_content
from trainer.data.source.files import RECORDS
from trainer.data.source.find import find_sources, record_columns
from trainer.data.source.huggingface import handler_steps
from trainer.data.source.indexed import write_indexed
from trainer.data.source.records import read_records

_SEED = 1
_DOCUMENTS = 256
_LARGE_BYTES = 16 << 20
_FIRST_BYTES = 1 << 20
_FIRST_RECORDS = 500
_WORDS = "the cat sat on a mat and saw dogs run over hills while rain fell down for an hour".split()
_FORMS = ("messages", "conversations", "instruction", "prompt", "text")
_OTHER_FIELDS = {"input": "", "system": "", "history": [], "margin": 0.5, "weight": 1.0}
"""Values of fields that `columns` may name beside those of a form; others are null."""
_BYTES_A_TOKEN = {"bytes": 2, "huggingface": 8}
"""More than the bytes of a token of the synthetic text, so that there are enough sequences."""


def write_synthetic_data(config: Config, section: str) -> None:
    """Writes the files that a section of the smoke configuration names.

    Raises:
        OSError: They cannot be written.
    """
    loader = getattr(config, section).data_loader
    draw = random.Random(_SEED)
    if loader.type == "MindDataset":
        drawn = _drawn_rows(config, loader.num_samples or 1)
        write_tokens(config, section, drawn, drawn[:, 1:])
    elif isinstance(loader, MegatronLoader):
        for prefix in _prefixes(loader):
            _folder(Path(prefix))
            write_indexed(Path(prefix), _documents(config, loader), config.decoder.vocab_size)
    elif loader.reads_images:
        from trainer.data.source.images import write_random_images

        write_random_images(config, Path(loader.dataset_dir), loader.num_samples or 1, _SEED)
    else:
        rows = loader.num_samples or 1
        for path in _text_files(loader):
            _folder(path)
            tokenizers = {config.train_dataset.tokenizer.type, getattr(config, section).tokenizer.type}
            needed = (rows + 2) * config.decoder.seq_length * max(_BYTES_A_TOKEN[name] for name in tokenizers)
            texts = _records(config, section, rows, needed, draw)
            if path.suffix == ".txt":
                texts = _texts(needed, draw)
            path.write_text("".join(texts), encoding="utf-8")


def is_large(config: Config, section: str) -> bool:
    """Returns whether the text of a section is too much to tokenize it for a few steps.

    Raises:
        UserError: Its files cannot be read.
    """
    return sum(file.size_bytes for source, _ in find_sources(config, section) for file in source.files) > _LARGE_BYTES


def write_first_records(config: Config, smoke_config: Config, section: str) -> None:
    """Writes the first records of each source of the file's own text to the paths of the smoke configuration.

    Raises:
        UserError: Its files cannot be read.
    """
    paths = _text_files(getattr(smoke_config, section).data_loader)
    for (source, _), path in zip(find_sources(config, section), paths, strict=True):
        _folder(path)
        if source.kind != RECORDS:
            with open_content(source, source.files[0]) as opened:
                path.write_text(opened.stream.read(_FIRST_BYTES).decode("utf-8", "ignore"), encoding="utf-8")
            continue
        records = (record for file in source.files for record in read_records(source, file))
        lines = (json.dumps(record.fields, default=str) + "\n" for record in itertools.islice(records, _FIRST_RECORDS))
        path.write_text("".join(lines), encoding="utf-8")


def write_tokens(config: Config, section: str, tokens_RS: np.ndarray, labels_RT: np.ndarray) -> None:
    """Writes rows as a MindRecord file with the columns that the section reads.

    Args:
        tokens_RS: R rows of T + 1 tokens, T tokens of a sequence: the last is a label.
        labels_RT: The next tokens, or -100 for no loss.
    """
    from trainer.run.mindrecord import write_mindrecord

    data = getattr(config, section)
    names = data.input_columns or ["input_ids", "labels"]
    keys = data.construct_args_key or []
    roles = [*keys[: len(names)], *names[len(keys) :]]
    has_labels = any(role in ("labels", "target_ids") for role in roles)
    length = labels_RT.shape[1]
    half = -(-length // 2)
    mask_T = np.ones(length)
    if config.decoder.eod_reset:  # two documents
        mask_T = np.arange(length) // half * half

    def columns(tokens_S: np.ndarray, labels_T: np.ndarray) -> dict[str, np.ndarray]:
        inputs = tokens_S
        if has_labels:
            inputs = tokens_S[:-1]
        arrays = {"input_ids": inputs, "labels": labels_T, "target_ids": labels_T,
                  "attention_mask": mask_T, "loss_mask": np.ones(length), "position_ids": np.arange(length)}
        return {name: arrays[role].astype(np.int32) for name, role in zip(names, roles, strict=True) if role in arrays}

    path = Path(data.data_loader.dataset_dir)
    _folder(path)
    write_mindrecord(path, map(columns, tokens_RS, labels_RT))


def _folder(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)


def _drawn_rows(config: Config, rows: int) -> np.ndarray:
    """Returns random tokens, int [R, T + 1], with some ends of documents; R is larger than the rows that are read."""
    size = config.decoder.seq_length + 1
    drawn = np.random.RandomState(_SEED).randint(0, config.decoder.vocab_size, (2 * rows + 2, size))
    end = config.decoder.eos_token_id
    if isinstance(end, list):
        end = end[0]
    if end is not None and end < config.decoder.vocab_size:
        drawn[:, size // 2] = end
    return drawn


def _prefixes(loader: MegatronLoader) -> Iterator[str]:
    """Yields the common path of the two files of each data set."""
    settings = loader.config
    values = [loader.dataset_dir, settings.data_path, settings.train_data_path, settings.valid_data_path,
              settings.test_data_path]
    for value in values:
        items = value or []
        if isinstance(items, str):
            items = [items]
        yield from (str(item) for item in items if "/" in str(item))


def _documents(config: Config, loader: MegatronLoader) -> Iterator[np.ndarray]:
    state = np.random.RandomState(_SEED)
    vocab_size = config.decoder.vocab_size
    for length in state.randint(4, config.decoder.seq_length + 1, _DOCUMENTS):
        tokens = state.randint(0, vocab_size, length)
        if 0 <= loader.config.eod < vocab_size:
            tokens[-1] = loader.config.eod
        yield tokens


def _text_files(loader: Any) -> list[Path]:
    if isinstance(loader, HuggingFaceLoader):
        return [Path(str(loader.data_files))]
    return [Path(source.path) for source in loader.sources] or [Path(loader.dataset_dir)]


def _sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(_WORDS, k=words))


def _texts(needed_bytes: int, draw: random.Random) -> Iterator[str]:
    """Yields lines of text."""
    size = 0
    while size < needed_bytes:
        line = _sentence(draw, 12) + "\n"
        size += len(line)
        yield line


def _records(config: Config, section: str, rows: int, needed_bytes: int, draw: random.Random) -> Iterator[str]:
    """Yields JSON lines in the form that the section's keys and the loss describe."""
    form = _form(config, section)
    columns = _column_names(getattr(config, section).data_loader)
    size = 0
    for number in itertools.count():
        if number >= 4 * rows + 16 and size >= needed_bytes:
            return
        question = _sentence(draw, 6)
        answer = _sentence(draw, draw.randint(4, 12))
        size += len(question) + len(answer)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        forms: dict[str, dict[str, Any]] = {
            "messages": {"messages": messages},
            "conversations": {"conversations": turns},
            "instruction": {"instruction": question, "input": "", "output": answer},
            "prompt": {"prompt": question, "completion": answer},
            "text": {"text": f"{question} {answer}"},
        }
        fields = forms[form]
        if config.loss is not None:
            fields = _answers(config.loss, form, columns, question, answer, f"{_sentence(draw, 4)} instead")
        record = {columns.get(name, name): value for name, value in fields.items()}
        for name, column in columns.items():
            record.setdefault(column, _OTHER_FIELDS.get(name))
        yield json.dumps(record) + "\n"


def _answers(
    loss: LossConfig, form: str, columns: Mapping[str, str], question: str, answer: str, other: str
) -> dict[str, Any]:
    """Returns a record of answers that a loss compares or judges: two of them, or one with a label.

    Args:
        form: That of a record without this loss.
        columns: Our names of fields -> the columns of the file.
        other: Another answer.
    """
    prompt: dict[str, Any] = {"prompt": f"{question} "}
    answers: list[Any] = [answer, other]
    if form in ("messages", "conversations"):
        name = "prompt"
        if form in columns and loss.answers != "labels":
            name = form
        prompt = {name: [{"role": "user", "content": question}]}
        answers = [[{"role": "assistant", "content": text}] for text in answers]
    elif form == "instruction" and loss.answers != "labels":
        prompt = {"instruction": question, "input": ""}
    if loss.answers == "labels":
        is_desirable = len(question) % 2 == 0
        return {**prompt, "completion": answers[not is_desirable], "label": is_desirable}
    return {**prompt, "chosen": answers[0], "rejected": answers[1]}


def _column_names(loader: Any) -> dict[str, str]:
    """Maps our name of a field to the file's column that contains it."""
    columns = record_columns(loader)
    for kind, step in handler_steps(getattr(loader, "handler", [])):
        if kind == "rename_column":
            columns[step.get("new_column_name", "")] = step.get("original_column_name", "")
    return columns


def _form(config: Config, section: str) -> str:
    """Returns the form of a record: that of a handler or of the named columns; or messages in a finetuning, or text."""
    loader = getattr(config, section).data_loader
    if any(kind == "AlpacaInstructDataHandler" for kind, _ in handler_steps(getattr(loader, "handler", []))):
        return "instruction"
    if isinstance(loader, SftLoader) and loader.holds_chats:
        return "conversations"
    if isinstance(loader, SftLoader) and loader.dataset_name in ("alpaca", "multi-instruct-dyn"):
        return "instruction"
    named = _column_names(loader)
    for form in _FORMS:
        if form in named or (form == "instruction" and "output" in named):
            return form
    data = getattr(config, section)
    if config.run_mode == "finetune" or data.chat_template or data.train_on:
        return "messages"
    return "text"
