"""Folders of traces that are damaged, or of runs that cannot be equal, are refused and not taken for equal ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from browser import Browser

from trainer.errors import UserError
from trainer.trace.compare import compare_traces, open_array
from trainer.trace.folder import read_trace
from trainer.trace.record import MANIFEST, PIECES, RANK_FILE, SKETCHES, Key, TraceWriter, write_manifest
from trainer.trace.report import compare_folders, recording_lines
from trainer.trace.sketch import whole_place

SHAPE = (6, 8)
NORM = "model.norm.weight"


def recorded(
    folder: Path, rates: tuple[float, ...] = (0.1, 0.1), ranks: int = 1,
    tensors: Mapping[Key, np.ndarray] | None = None, micro_batches: Sequence[Sequence[str]] = (),
) -> Path:  # fmt: skip
    """Writes the trace of one rank, by default with one tensor in each of two steps; returns its folder.

    Args:
        micro_batches: The sequences of those of the first step.
    """
    facts = {"ranks": ranks, "layers": 1, "summands": 8, "compute_dtype": "float32", "learning_rates": rates}
    folder.mkdir()
    write_manifest(folder, facts)
    writer = TraceWriter(folder, 0, "model.norm.*")
    if tensors is None:
        tensors = {Key(step, "weight", NORM): random_array(SHAPE) for step in (1, 2)}
    for key, array in tensors.items():
        writer.add(key, array, whole_place(array.shape))
    writer.close({"coordinate": {"pipeline": 0, "data": 0}, "micro_batches": [micro_batches] * bool(micro_batches)})
    return folder


def random_array(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compared(right: Path, other: Path) -> tuple[int, list[str]]:
    """Compares two folders; returns the exit code and the lines."""
    lines: list[str] = []
    return compare_folders(right, other, lines.append), lines


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


@pytest.mark.parametrize(
    "wrong", [{"ranks": "1"}, {"layers": None}, {"compute_dtype": "int8"}, {"learning_rates": ["x"]}]
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, wrong: Mapping[str, object]) -> None:
    folder = recorded(tmp_path / "trace")
    facts = json.loads((folder / MANIFEST).read_text())
    write_manifest(folder, facts | wrong)
    with pytest.raises(UserError, match=f"is damaged: {next(iter(wrong))} is missing or wrong"):
        read_trace(folder, "flag --against")


def test_a_damaged_tensor_is_refused(tmp_path: Path) -> None:
    trace = read_trace(recorded(tmp_path / "trace"), "flag --against")
    [piece] = trace.pieces[Key(1, "weight", NORM)]
    assert piece.file is not None and open_array(piece).shape == SHAPE
    piece.file.write_bytes(b"ab")
    with pytest.raises(UserError, match="cannot be read"):
        open_array(piece)


def test_runs_with_other_learning_rates_are_not_compared(tmp_path: Path) -> None:
    both = [recorded(tmp_path / name, rates) for name, rates in (("right", (0.1, 0.1)), ("other", (0.1, 0.2)))]
    with pytest.raises(UserError, match=r"has learning rate 0.2 in step 2, and --output 0.1"):
        compare_traces(*(read_trace(folder, "a test") for folder in both))


def test_tensors_of_other_shapes_are_named_with_both_shapes(tmp_path: Path) -> None:
    right = recorded(tmp_path / "right", tensors={Key(1, "weight", NORM): random_array((6, 8))})
    other = recorded(tmp_path / "other", tensors={Key(1, "weight", NORM): random_array((6, 4))})
    code, lines = compared(right, other)
    assert code == 1
    assert lines[0] == f"first        step 1, weight {NORM}: shapes differ: [6, 4], right is [6, 8]"


def test_steps_that_one_trace_lacks_are_named(tmp_path: Path) -> None:
    long = recorded(tmp_path / "long")
    short = recorded(tmp_path / "short", tensors={Key(1, "weight", NORM): random_array(SHAPE)})
    code, lines = compared(long, short)
    assert code == 0
    assert "not compared steps of the right trace that the other lacks: 2" in lines
    assert "not compared steps of the other trace that the right one lacks: 2" in compared(short, long)[1]


def test_micro_batches_that_one_trace_lacks_are_named(tmp_path: Path) -> None:
    keys = [Key(1, "activation", "model.layers.0", sequence) for sequence in "abc"]
    arrays = {key: random_array(SHAPE, seed) for seed, key in enumerate(keys)}
    right = recorded(tmp_path / "right", tensors=arrays, micro_batches=[["a", "b"], ["c"]])
    arrays = {key: array for key, array in arrays.items() if key.sequence != "c"}
    code, lines = compared(right, recorded(tmp_path / "other", tensors=arrays, micro_batches=[["a", "b"]]))
    assert code == 1
    assert lines[0].startswith("batch        step 1: 2 sequences are in both traces, 3 in the right and 2 in the other")
    assert lines[1].strip() == "only the right trace has these sequences of micro-batches: 2 of rank 0"
    assert lines[2] == (
        "not equal    the batches differ; rounding explains every difference of 1 tensor that both traces have"
    )
    assert "The batches differ" in (right / "report.html").read_text()


def test_a_lost_rank_is_not_the_same_path(tmp_path: Path) -> None:
    right = recorded(tmp_path / "right")
    code, lines = compared(right, recorded(tmp_path / "other", ranks=2))
    assert code == 1
    assert lines[0] == "lost         rank 1 has written nothing"
    assert lines[1].startswith("not equal    records of ranks are lost; rounding explains")


def test_losses_of_two_micro_batches_are_compared_with_that_of_both(tmp_path: Path) -> None:

    def loss(sequences: str, number: float) -> dict[Key, np.ndarray]:
        return {Key(1, "loss", "loss_sum", sequences): np.array([[number]], np.float32)}

    parts = loss("a", 2.0) | loss("b", 3.0)
    right = recorded(tmp_path / "right", tensors=parts)
    sums = {number: loss("a+b", number) for number in (5.0, 5.1)}
    equal, different = (recorded(tmp_path / str(number), tensors=tensors) for number, tensors in sums.items())
    code, lines = compared(right, equal)
    assert (code, lines[0]) == (0, "same path    rounding explains every difference of 1 tensor")
    assert not any(line.startswith("statistics") for line in lines)
    assert compared(right, different)[0] == 1
    with_weight = {Key(1, "weight", NORM): random_array(SHAPE)}
    finer = recorded(tmp_path / "finer", tensors=parts | with_weight)
    coarser = recorded(tmp_path / "coarser", tensors=sums[5.0] | with_weight)
    assert "not compared of other micro-batches in each trace: loss loss_sum" in compared(coarser, finer)[1]


def test_traces_without_a_common_tensor_are_not_equal(tmp_path: Path) -> None:
    other = recorded(tmp_path / "other", tensors={Key(1, "weight", "lm_head.weight"): random_array(SHAPE)})
    with pytest.raises(UserError, match="has no tensor that --output has, too"):
        compared(recorded(tmp_path / "right"), other)


def test_a_recording_says_what_it_has_written(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "right")
    bytes_ = sum(path.stat().st_size for path in (folder / "rank-0").rglob("*.*"))
    assert recording_lines(folder, "model.norm.*") == [
        f"trace        {folder}: 2 tensors, {bytes_ / 1024:.0f} KiB",
        f"full         2 of them in full, in {folder}/rank-*/full",
    ]
    lines = recording_lines(recorded(tmp_path / "other", ranks=2), "")
    assert lines[1] == "elsewhere    other hosts have written rank-1: copy these folders beside the others"


@pytest.mark.slow
def test_a_browser_draws_the_deviations(browser: Browser, tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight")
    keys = [Key(1, "weight", name) for name in names]
    right = recorded(tmp_path / "right", tensors={key: random_array(SHAPE) for key in keys})
    arrays = {key: random_array(SHAPE, seed) for seed, key in enumerate(keys)}
    other = recorded(tmp_path / "<b id=evil>", tensors=arrays)
    assert compared(right, other)[0] == 1
    browser.open((right / "report.html").as_uri())
    assert browser.messages() == []
    assert browser.run("return [...plots].map(plot => plot.data[0])") == [[-1, 0, 1]]
    data = json.loads(browser.run("return document.getElementById('data').textContent"))
    layer, ratio, text = data["lines"][0]["points"][2]
    assert layer == 1 and ratio > 1 and text.startswith("deviation ")
    assert browser.run("return document.querySelectorAll('.beyond').length") == 4 * 2, "the seed of one is the same"
    assert "<b id=evil>" in browser.run("return document.querySelector('h1').textContent")
