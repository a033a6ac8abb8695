"""Compares two folders: the command `trace --against`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.errors import EXIT_OK, EXIT_RUN_FAILED
from trainer.trace.compare import compare_traces
from trainer.trace.folder import read_trace
from trainer.trace.message import comparison_lines
from trainer.trace.msprobe import is_msprobe_dump, read_dump, scale_gradients
from trainer.trace.page import write_page

_SAME_SCALE = 0.01


def compare_folders(right: Path, other: Path, write: Callable[[str], None]) -> int:
    """Compares two folders and writes what differs; returns the exit code: 1 where rounding does not explain it."""
    trace = read_trace(right, "flag --output")
    if is_msprobe_dump(other):
        other = read_dump(other, trace)
        factor = scale_gradients(other, trace)
        if factor is not None and abs(factor - 1) > _SAME_SCALE:
            write(f"gradients    those of the dump are {factor:.6g} times the right ones; compared without this factor")
    else:
        other = read_trace(other, "flag --against")
    comparison = compare_traces(trace, other)
    for line in comparison_lines(comparison):
        write(line)
    write(f"picture      {write_page(comparison, right)}")
    if comparison.differing or comparison.batches or comparison.other.lost or comparison.right.lost:
        return EXIT_RUN_FAILED
    return EXIT_OK
