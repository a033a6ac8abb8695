"""The small indexed token files that Megatron-LM's golden samples are made of, and what is asked of them."""

from __future__ import annotations

from typing import Any

import numpy as np

EOD, PAD = 7, 121
DOCUMENTS = {"a": (40, 300), "b": (11, 70_000), "c": (23, 300)}
"""Name of a data set -> number of documents, size of the vocabulary."""


def documents_of(name: str) -> list[np.ndarray]:
    """Returns documents of 1 to 33 tokens, each with the token `EOD` at its end: int64 [tokens]."""
    count, vocab_size = DOCUMENTS[name]
    start, found = 1_000 * ord(name), []
    for number in range(count):
        places = np.arange(1 + (number * 13 + ord(name)) % 33, dtype=np.int64)
        tokens = (start + number * 7919 + places * 104_729) % (vocab_size - 10) + 10
        tokens[-1] = EOD
        found.append(tokens)
    return found


def _case(sizes: list[int | None], *data_path: str, phase: str = "train", **config: Any) -> dict[str, Any]:
    settings = {"seed": 1234, "seq_length": 16, "split": "1, 0, 0", "data_path": list(data_path)}
    return {"sizes": sizes, "phase": phase, "config": settings | config}


CASES: dict[str, dict[str, Any]] = {
    "one pass": _case([None, None, None], "a"),
    "fewer samples than a pass": _case([20, 0, 0], "a"),
    "three passes, the last shuffled with the others": _case([120, 0, 0], "a"),
    "three passes, the last alone": _case([90, 0, 0], "a", seed=5),
    "a split": _case([30, 9, 4], "a", split="6, 3, 1"),
    "a split, validation": _case([30, 9, 4], "a", split="6, 3, 1", phase="valid"),
    "a split, test": _case([30, 9, 4], "a", split="6, 3, 1", phase="test"),
    "a short last sample": _case(
        [None, None, None], "c", split="1, 1", phase="valid", drop_last_partial_validation_sequence=False
    ),
    "samples without a token more": _case([40, 0, 0], "c", add_extra_token_to_sequence=False),
    "one path with a weight": _case([50, 0, 0], "1", "b"),
    "a blend": _case([100, 0, 0], "0.3", "a", "0.5", "b", "0.2", "c"),
    "a blend of equal weights": _case([61, 0, 0], "1", "a", "1", "b", "1", "c"),
    "a blend, validation": _case([50, 20, 0], "3", "a", "7", "c", split="70,20,10", phase="valid"),
    "a blend without weights": _case([None, None, None], "a", "b", "c"),
    "a blend without weights, with a size": _case([50, 0, 0], "a", "b", "c"),
    "positions start again": _case([30, 0, 0], "a", eod=EOD, reset_position_ids=True),
    "documents apart": _case([30, 0, 0], "a", eod=EOD, reset_attention_mask=True),
    "everything at the end of a document": _case(
        [30, 0, 0], "a", eod=EOD, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True
    ),
    "no loss on padding": _case([30, 0, 0], "a", eod=EOD, pad=PAD),
}
