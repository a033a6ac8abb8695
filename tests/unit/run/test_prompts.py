"""Prompts of run_mode predict: what a line of a file is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from config_helpers import BASE, failure, load

from trainer.errors import UserError
from trainer.run.predict import read_prompts


def test_only_a_line_feed_ends_a_line(tmp_path: Path):
    texts = ["one\u2028still one", "two\x0b and \x85"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts))
    prompts = read_prompts(load(BASE, "run_mode=predict", f"predict_data={path}"))
    assert [(prompt.text, prompt.where) for prompt in prompts] == [
        (text, f"{path}:{number}") for number, text in enumerate(texts, start=1)
    ]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_pipe_is_neither_waited_for_nor_a_prompt(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="the file of prompts cannot be read .*a pipe, a socket or a device"):
        read_prompts(load(BASE, "run_mode=predict", f"predict_data={tmp_path / name}"))


def test_a_file_that_is_not_there_is_no_prompt(tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("one\n")

    def message(*texts: str) -> str:
        names = ", ".join(json.dumps(text) for text in texts)
        return failure(lambda: read_prompts(load(BASE, "run_mode=predict", f"predict_data=[{names}]")))

    assert f"you probably mean {tmp_path / 'prompts.txt'}" in message(str(tmp_path / "promts.txt"))
    assert "the file does not exist" in message("nowhere.txt") and "does not exist" in message("no where.jsonl")
    assert "a file of prompts stands alone" in message(str(tmp_path / "prompts.txt"), "one")
    prompts = read_prompts(load(BASE, "run_mode=predict", 'predict_data=["open notes.txt", "one"]'))
    assert [prompt.text for prompt in prompts] == ["open notes.txt", "one"]
