"""Texts of a run's model, for its report: what it generated while it trained, else what it predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLES_FILE = "samples.jsonl"
PREDICTIONS_FILE = "predictions.jsonl"


def read_report_samples(folder: Path, most_characters: int) -> tuple[str, list[list[str]]]:
    """A title, and for each sample a heading, the prompt and its continuation: the first and the last of the training,
    else the first two predictions. Empty where there is neither."""
    found = list(_records(folder / SAMPLES_FILE))
    if found:
        if len(found) < 2:
            ends = found
        else:
            ends = [found[0], found[-1]]
        return "text of the model", [
            [f"after step {one.get('step', 0)}", *_texts(one, most_characters)] for one in ends
        ]
    predicted = list(_records(folder / PREDICTIONS_FILE))[:2]
    return "predictions", [
        [f"prediction {number}", *_texts(one, most_characters)] for number, one in enumerate(predicted, start=1)
    ]


def _records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("text"), str):
            yield record


def _texts(record: dict[str, Any], most: int) -> list[str]:
    prompt = record.get("prompt")
    messages = record.get("messages")
    if prompt is None and isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        prompt = messages[-1].get("content")
    return [_short(prompt if isinstance(prompt, str) else "", most), _short(record["text"], most)]


def _short(text: str, most: int) -> str:
    text = text.encode("utf-8", "replace").decode()  # halves of characters, which JSON may hold
    if len(text) <= most:
        return text
    return text[:most] + " ..."
