"""Writes MindRecord files of tokens with MindSpore's own writer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_ROWS_OF_A_WRITE = 256


def write_mindrecord(path: Path, rows: Iterable[dict[str, np.ndarray]]) -> int:
    """Writes rows of named int32 arrays, all with the same names, and the index `path`.db; returns their number."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), overwrite=True)
    remaining = iter(rows)
    count = 0
    while part := list(itertools.islice(remaining, _ROWS_OF_A_WRITE)):
        if not count:
            writer.add_schema({name: {"type": "int32", "shape": [-1]} for name in part[0]})
        writer.write_raw_data(part)
        count += len(part)
    writer.commit()
    return count
