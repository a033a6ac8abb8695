"""The tokenizers of a teacher and of the training data are the same, whatever program has written them."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from trainer.checkpoint.hugging_face import folder_files
from trainer.config import parse_config
from trainer.data.teacher import vocabulary_difference
from trainer.data.tokens.tokenizer import ByteTokenizer


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ({"a": 0, "b": 1}, {"b": 1, "a": 0}, ""),
        ({"a": 0, "b": 1}, {"a": 0}, "the teacher's lacks 'b', whose id is 1"),
        ({"a": 0}, {"a": 0, "c": 1}, "only the teacher's has 'c', with id 1"),
        ({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 2, "c": 1},
         "the id of 'b' is 1, and the teacher's is 2 (and 1 more)"),
    ],
)  # fmt: skip
def test_the_first_token_that_differs_is_named(ours: dict[str, int], theirs: dict[str, int], text: str) -> None:
    assert vocabulary_difference(ours, theirs) == text


def test_bytes_have_the_vocabulary_that_is_exported() -> None:
    config = parse_config("bytes", json.dumps({"model": {"model_config": {"vocab_size": 257, "seq_length": 8}}}))
    exported = Tokenizer.from_str(folder_files(config)["tokenizer.json"].decode())
    assert vocabulary_difference(ByteTokenizer().vocabulary(), exported.get_vocab()) == ""
    assert sorted(ByteTokenizer().vocabulary().values()) == list(range(257))
