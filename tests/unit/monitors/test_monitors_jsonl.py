"""metrics.jsonl: its lines, and that a resumed run has each step once."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from trainer.errors import RunError
from trainer.monitors import jsonl
from trainer.monitors.jsonl import JsonlMonitor, read_metrics_records
from trainer.monitors.metrics import EvalMetrics, RunInfo, StepMetrics, Totals
from trainer.report.curves import MetricsReader


def step_metrics(step: int, **changes) -> StepMetrics:
    values = {
        "step": step, "last_step": 10, "epoch": 1, "epochs": 2, "step_in_epoch": step, "steps_per_epoch": 5,
        "loss": 5.5 - step, "lr": 5e-5, "global_norm": 0.5, "loss_scale": 1.0, "overflow": False, "tokens": 100,
        "tokens_per_second": 200.0, "input_tokens_per_second": 256.0, "step_seconds": 0.5, "data_wait_seconds": 0.25,
        "peak_rss_bytes": 1 << 20,
    }
    return StepMetrics(**{**values, **changes})


def run_steps(path: Path, start_step: int, last_step: int, *, eval_at: int = 0, close: bool = True) -> JsonlMonitor:
    monitor = JsonlMonitor(path)
    monitor.on_start(RunInfo(path.parent, total_steps=10, last_step=10, start_step=start_step))
    for step in range(start_step + 1, last_step + 1):
        monitor.on_step(step_metrics(step))
        if step == eval_at:
            monitor.on_eval(EvalMetrics(step, 1, 2.0, math.exp(2.0), 64, 0.1))
    if close:
        monitor.close(None)
    return monitor


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_fields_of_a_step_and_of_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = run_steps(path, 0, 0, close=False)
    monitor.on_step(step_metrics(1, extra={"drop_rate.layer_0": 0.25}))
    monitor.on_eval(EvalMetrics(step=1, epoch=1, loss=2.0, perplexity=7.4, tokens=64, seconds=0.1))
    first, second = path.read_text().splitlines()  # before it is closed: a killed run leaves all its steps
    assert json.loads(first) == {
        "step": 1, "epoch": 1, "loss": 4.5, "lr": 5e-5, "global_norm": 0.5, "loss_scale": 1.0, "overflow": False,
        "tokens": 100, "tokens_per_second": 200.0, "input_tokens_per_second": 256.0, "step_seconds": 0.5,
        "data_wait_seconds": 0.25, "peak_rss_bytes": 1 << 20, "drop_rate.layer_0": 0.25,
    }
    assert json.loads(second) == {
        "step": 1, "epoch": 1, "eval_loss": 2.0, "eval_perplexity": 7.4, "eval_tokens": 64, "eval_seconds": 0.1,
    }
    monitor.close(None)


def test_the_wait_for_the_last_checkpoint_has_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    totals, monitor = Totals(), run_steps(path, 0, 3, close=False)
    totals.on_step(step_metrics(3))
    monitor.close(totals.summary("finished", {}, 1.5))
    *_, last = read_metrics_records(path)
    assert last == {"step": 3, "save_wait_seconds": 1.5}
    curves = MetricsReader(path).read().curves
    assert curves.steps == [1, 2, 3] and "save_wait_seconds" not in curves.fields
    run_steps(path, 3, 4)
    assert steps_of(path) == [1, 2, 3, 3, 4]
    run_steps(path, 2, 3)
    assert steps_of(path) == [1, 2, 3]


def test_numbers_that_are_not_finite_are_null_and_the_json_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = run_steps(path, 0, 0, close=False)
    monitor.on_step(step_metrics(1, loss=math.nan, global_norm=math.inf, overflow=True, extra={"z": -math.inf}))
    details = {"local_norm": {"a": math.nan, "b": 2.0}, "router_entropy": [0.5, math.inf]}
    monitor.on_step(step_metrics(2, global_norm=None, details=details))
    monitor.on_eval(EvalMetrics(2, 1, math.nan, math.inf, 64, 0.1))
    monitor.close(None)
    first, second, third = (json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines())
    assert first["loss"] is None and first["global_norm"] is None and first["z"] is None and first["overflow"] is True
    assert second["global_norm"] is None and second["loss"] == 3.5
    assert second["local_norm"] == {"a": None, "b": 2.0} and second["router_entropy"] == [0.5, None]
    assert third["eval_loss"] is None and third["eval_perplexity"] is None


def refuse(constant: str) -> None:
    pytest.fail(f"{constant} is not JSON")


def test_floats_return_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = run_steps(path, 0, 0, close=False)
    monitor.on_step(step_metrics(1, loss=0.1 + 0.2, lr=1e-323))
    monitor.close(None)
    (record,) = read_metrics_records(path)
    assert record["loss"] == 0.1 + 0.2 and record["lr"] == 1e-323


def test_resuming_removes_later_lines_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_steps(path, 0, 7, eval_at=4)
    run_steps(path, 4, 6)
    assert steps_of(path) == [1, 2, 3, 4, 4, 5, 6]  # step 4 and its evaluation
    before = path.read_bytes()
    run_steps(path, 6, 6)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run_steps(path, 0, 3)
    for torn in (b'{"step": 4, "lo', b'{"step": 4}', b'\xff\xfe\n', b"[1]\n", b'{"step": 1%s}\n' % (400 * b"0")):
        content = path.read_bytes()
        path.write_bytes(content + torn)
        assert [record["step"] for record in read_metrics_records(path)] == [1, 2, 3]
        run_steps(path, 3, 3)
        assert path.read_bytes() == content


def test_an_interrupted_cut_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    run_steps(path, 0, 5)
    before = path.read_bytes()

    def die(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        run_steps(path, 2, 2)
    assert path.read_bytes() == before
    monkeypatch.undo()
    run_steps(path, 2, 3)
    assert steps_of(path) == [1, 2, 3]


def test_resuming_into_a_new_folder_starts_a_file(tmp_path: Path) -> None:
    run_steps(tmp_path / "new" / "metrics.jsonl", 4, 5)
    assert steps_of(tmp_path / "new" / "metrics.jsonl") == [5]


def test_a_new_run_keeps_the_metrics_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for last_step in (1, 2, 3):
        run_steps(path, 0, last_step)
    assert steps_of(path) == [1, 2, 3]
    assert steps_of(tmp_path / "metrics-1.jsonl") == [1]
    assert steps_of(tmp_path / "metrics-2.jsonl") == [1, 2]


def test_an_evaluation_alone_writes_no_file(tmp_path: Path) -> None:
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    monitor.on_eval(EvalMetrics(0, 1, 2.0, 7.4, 64, 0.1))
    monitor.close(None)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "metrics.jsonl" / "x").touch()
    with pytest.raises(RunError, match="metrics cannot be written: .*\n  Fix: free space"):
        run_steps(tmp_path / "metrics.jsonl", 4, 5)


def test_a_full_disk_ends_the_run_with_the_files_name(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    try:
        monitor.on_start(RunInfo(tmp_path, total_steps=1000, last_step=1000))
        with pytest.raises(RunError, match=r"metrics file = .*metrics\.jsonl.*No space left on device"):
            for step in range(1, 1000):
                monitor.on_step(step_metrics(step))
        monitor.close(None)
        assert next(read_metrics_records(tmp_path / "metrics.jsonl"))["step"] == 1
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_putting_aside_leaves_an_empty_file_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert jsonl.rename_old_metrics(tmp_path / "metrics.jsonl") is None
    assert jsonl.rename_old_metrics(tmp_path / "missing.jsonl") is None
