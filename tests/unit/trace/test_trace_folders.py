"""Folders of traces that are damaged, or of runs that cannot be equal, are refused and not taken for equal ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainer.errors import UserError
from trainer.trace.compare import compare_traces, open_array
from trainer.trace.folder import read_trace
from trainer.trace.record import PIECES, RANK_FILE, SKETCHES, Key, TraceWriter, write_manifest
from trainer.trace.sketch import whole_place

SHAPE = (6, 8)


def recorded(folder: Path, rates: tuple[float, ...] = (0.1, 0.1)) -> Path:
    """Writes the trace of two steps of one rank, with one tensor each; returns its folder."""
    facts = {"ranks": 1, "layers": 1, "summands": 8, "compute_dtype": "float32", "learning_rates": rates}
    folder.mkdir()
    write_manifest(folder, facts)
    writer = TraceWriter(folder, 0, "model.norm.*")
    array = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    for step in (1, 2):
        writer.add(Key(step, "weight", "model.norm.weight"), array, whole_place(SHAPE))
    writer.close({"coordinate": {"pipeline": 0, "data": 0}, "micro_batches": []})
    return folder


def test_equal_traces_are_equal(tmp_path: Path) -> None:
    both = [read_trace(recorded(tmp_path / name), "a test") for name in ("right", "other")]
    comparison = compare_traces(*both)
    assert len(comparison.rows) == 2 and not comparison.differing


def cut_lines(path: Path) -> None:
    lines = (path / PIECES).read_text().splitlines(keepends=True)
    (path / PIECES).write_text(lines[0])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a line is no JSON": lambda path: (path / PIECES).write_text("garbage\n"),
    "a line has no shape": lambda path: (path / PIECES).write_text("{}\n"),
    "lines are missing": cut_lines,
    "sketches are missing": lambda path: (path / SKETCHES).unlink(),
    "the rank is no JSON": lambda path: (path / RANK_FILE).write_text("x"),
    "the rank has no place": lambda path: (path / RANK_FILE).write_text('{"pieces": 2}'),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_trace_is_refused(tmp_path: Path, name: str) -> None:
    folder = recorded(tmp_path / "trace")
    DAMAGES[name](folder / "rank-0")
    with pytest.raises(UserError, match="is damaged"):
        read_trace(folder, "flag --against")


def test_a_damaged_tensor_is_refused(tmp_path: Path) -> None:
    trace = read_trace(recorded(tmp_path / "trace"), "flag --against")
    [piece] = trace.pieces[Key(1, "weight", "model.norm.weight")]
    assert piece.file is not None and open_array(piece).shape == SHAPE
    piece.file.write_bytes(b"ab")
    with pytest.raises(UserError, match="cannot be read"):
        open_array(piece)


def test_runs_with_other_learning_rates_are_not_compared(tmp_path: Path) -> None:
    both = [recorded(tmp_path / name, rates) for name, rates in (("right", (0.1, 0.1)), ("other", (0.1, 0.2)))]
    with pytest.raises(UserError, match=r"has learning rate 0.2 in step 2, and --output 0.1"):
        compare_traces(*(read_trace(folder, "a test") for folder in both))
