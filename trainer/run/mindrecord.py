"""Writes MindRecord files of tokens with MindSpore's writer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_ROWS_PER_WRITE = 256


def write_mindrecord(path: Path, rows: Iterable[dict[str, np.ndarray]]) -> int:
    """Writes rows of named int32 arrays to `path` and an index to `path`.db; returns the number of rows.

    All rows have the same names.
    """
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), overwrite=True)
    remaining = iter(rows)
    count = 0
    while chunk := list(itertools.islice(remaining, _ROWS_PER_WRITE)):
        if not count:
            writer.add_schema({name: {"type": "int32", "shape": [-1]} for name in chunk[0]})
        writer.write_raw_data(chunk)
        count += len(chunk)
    writer.commit()
    return count
