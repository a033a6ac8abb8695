"""Compares the tokenizer of a distillation's teacher with that of the training data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.checks.problem import problem
from trainer.config.schema.data import EVAL, TRAIN
from trainer.data.datasets import find_tokenizer
from trainer.data.tokens.tokenizer import load_tokenizer
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config

_KEY = "loss.teacher"


def check_teacher_tokenizer(config: Config) -> Iterator[str]:
    """Yields a note if the tokenizers of teacher and training data cannot be compared.

    Raises:
        UserError: They give a token different ids; or one cannot be read.
    """
    teacher = config.teacher
    if teacher is None:
        return
    folder = Path(teacher.load_checkpoint).expanduser()
    section = TRAIN
    if config.run_mode == "eval" and config.eval_dataset is not None:
        section = EVAL
    data = getattr(config, section)
    unknown = ""
    if not (folder / "tokenizer.json").exists():
        unknown = "its folder has no tokenizer.json"
    elif not data.data_loader.reads_text and data.tokenizer.type == "bytes":
        unknown = "the data are tokens of an unknown tokenizer"
    if unknown:
        yield f"{_KEY}: {unknown}: only the sizes of the vocabularies are compared"
        return
    try:
        theirs = load_tokenizer(teacher, TRAIN).vocabulary()
    except UserError as error:
        raise error.with_location(config.source.where(_KEY), _KEY) from error
    if difference := vocabulary_difference(find_tokenizer(config, section).vocabulary(), theirs):
        fix = "name a teacher with the tokenizer of the data"
        raise problem(config, _KEY, f"has another tokenizer than {section}: {difference}", fix).error


def vocabulary_difference(ours: dict[str, int], theirs: dict[str, int]) -> str:
    """Describes the first token, by id, that two tokenizers do not share; empty if there is none."""
    tokens = {token for token, _ in ours.items() ^ theirs.items()}
    if not tokens:
        return ""
    token = min(tokens, key=lambda token: (min(ours.get(token, len(ours)), theirs.get(token, len(theirs))), token))
    more = ""
    if len(tokens) > 1:
        more = f" (and {len(tokens) - 1:,} more)"
    if token not in theirs:
        return f"the teacher's lacks {token!r}, whose id is {ours[token]}{more}"
    if token not in ours:
        return f"only the teacher's has {token!r}, with id {theirs[token]}{more}"
    return f"the id of {token!r} is {ours[token]}, and the teacher's is {theirs[token]}{more}"
