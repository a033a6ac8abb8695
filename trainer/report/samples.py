"""Reads texts of a run's model for its report: samples of the training, or predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.input_files import read_bytes
from trainer.monitors.jsonl import SAMPLES_FILE

PREDICTIONS_FILE = "predictions.jsonl"


def read_report_samples(folder: Path, max_characters: int) -> tuple[str, list[list[str]]]:
    """Returns a title, and for each sample a heading, the prompt and the continuation.

    The samples are the first and the last of the training; without any the first two predictions. The list is empty
    if the run has neither.

    Args:
        max_characters: Longer prompts and continuations are cut.
    """
    if records := list(_records(folder / SAMPLES_FILE)):
        shown = records[:1] + records[1:][-1:]
        samples = [[f"after step {record.get('step', 0)}", *_texts(record, max_characters)] for record in shown]
        return "text of the model", samples
    predictions = list(_records(folder / PREDICTIONS_FILE))[:2]
    samples = [
        [f"prediction {number}", *_texts(record, max_characters)] for number, record in enumerate(predictions, start=1)
    ]
    return "predictions", samples


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = read_bytes(path).decode("utf-8", errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("text"), str):
            yield record


def _texts(record: dict[str, Any], max_characters: int) -> list[str]:
    prompt = record.get("prompt")
    messages = record.get("messages")
    if prompt is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        prompt = messages[-1].get("content")
    if not isinstance(prompt, str):
        prompt = ""
    return [_shorten(prompt, max_characters), _shorten(record["text"], max_characters)]


def _shorten(text: str, max_characters: int) -> str:
    text = text.encode("utf-8", "replace").decode()  # JSON may have lone surrogates
    if len(text) <= max_characters:
        return text
    return text[:max_characters] + " ..."
