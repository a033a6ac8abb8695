"""Reports what a recording has written, and compares two folders: the command `trace`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, UserError
from trainer.monitors.formatting import size
from trainer.trace.compare import compare_traces
from trainer.trace.folder import read_trace
from trainer.trace.message import comparison_lines
from trainer.trace.msprobe import is_msprobe_dump, read_dump, scale_gradients
from trainer.trace.page import write_page
from trainer.trace.record import RANK_FILE, rank_folders, read_manifest

_SAME_SCALE = 0.01


def check_folders(right: Path, other: Path) -> None:
    """Checks that two folders can be compared, before `right` is recorded.

    Raises:
        UserError: They are one folder, or `other` is neither a trace nor a dump.
    """
    if right.resolve() == other.resolve():
        fix = "name the folder of another record"
        raise UserError("is the folder of --output", where="flag --against", value=str(other), fix=fix)
    if not is_msprobe_dump(other):
        read_manifest(other, "flag --against")


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
    if comparison.is_same_path:
        return EXIT_OK
    return EXIT_RUN_FAILED


def recording_lines(output: Path, pattern: str) -> list[str]:
    """Returns what a recording has written, as far as it is on this machine.

    Args:
        pattern: See `TraceWriter`.
    """
    ranks = read_manifest(output, "flag --output")["ranks"]
    folders = rank_folders(output)
    facts = [json.loads((path / RANK_FILE).read_text(encoding="utf-8")) for path in folders.values()]
    files = (file for path in folders.values() for file in path.rglob("*") if file.is_file())
    bytes_ = sum(file.stat().st_size for file in files)
    tensors = sum(each["pieces"] for each in facts)
    lines = [f"trace        {output}: {ranks} ranks, {tensors:,} tensors and shards of tensors, {size(bytes_)}"]
    if ranks == 1:
        lines = [f"trace        {output}: {tensors:,} tensors, {size(bytes_)}"]
    if pattern:
        number = sum(each["full"] for each in facts)
        lines.append(f"full         {number:,} of them in full, in {output / 'rank-*' / 'full'}")
    if missing := [rank for rank in range(ranks) if rank not in folders]:
        names = ", ".join(f"rank-{rank}" for rank in missing)
        lines.append(f"elsewhere    other hosts have written {names}: copy these folders beside the others")
    return lines
