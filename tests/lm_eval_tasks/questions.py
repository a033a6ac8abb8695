"""The data of the task files beside this: five questions about short sentences."""

from __future__ import annotations

from typing import Any

import datasets

_QUESTIONS = (
    ("the cat sat on", ["a mat", "a hill", "it"], 0),
    ("dogs run over", ["hills", "a mat and a cat"], 0),
    ("rain fell down for an", ["hour", "hill and a hill"], 0),
    ("", ["the cat", "rain fell"], 1),
    ("saw dogs run over hills while rain fell down for an hour and a mat and a cat and dogs and", ["rain", "hills"], 1),
)


def load(**_: Any) -> dict[str, datasets.Dataset]:
    records = [{"text": text, "answers": answers, "best": best} for text, answers, best in _QUESTIONS]
    return {"test": datasets.Dataset.from_list(records)}
