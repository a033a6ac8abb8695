"""Sweeps of real runs: a failing one, going on after Ctrl-C, and what is refused before the first run starts."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from fork_server import FORKED, ensure_server
from run_helpers import PROGRAM, step_records, write_config

from trainer.cli.main import dispatch
from trainer.errors import UserError
from trainer.report.record import read_run


@pytest.fixture(autouse=True)
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_server()
    monkeypatch.setattr("trainer.sweep.run._COMMAND", (sys.executable, str(FORKED), str(PROGRAM)))


def sweep(home: Path, name: str, *arguments: str) -> int:
    config = write_config(home / name, home / "data", {"runner_config.stop_step": 3})
    return dispatch(["sweep", "--config", str(config), "--output_dir", str(home / name / "runs"), *arguments])


@pytest.mark.slow
def test_a_failing_run_is_named_and_the_others_go_on(home: Path, capsys: pytest.CaptureFixture):
    grid = ("--grid", "learning_rate=1e-3,1e30", "--jobs", "2")
    assert sweep(home, "failing", *grid) == 1
    printed, folder = capsys.readouterr().out, home / "failing" / "runs"
    assert "learning_rate=1e30: failed: step 2" in printed and "learning_rate=1e-3: finished in " in printed
    assert len(step_records(folder / "learning_rate=1e-3")) == 3
    assert "learning_rate=1e30" in (folder / "compare.html").read_text() and (folder / "compare.png").exists()
    for told in (printed, (folder / "compare.html").read_text()):  # no two runs have the same settings
        assert "configuration" in told.lower() and "first difference" not in told.lower()
    mistake = "learning_rate=1e-3: .*its folder has a run with another (.|\n)*seed"
    with pytest.raises(UserError, match=mistake):
        sweep(home, "failing", *grid, "--seed", "9")
    before = (folder / "learning_rate=1e-3" / "metrics.jsonl").stat().st_mtime_ns
    assert sweep(home, "failing", "--grid", "learning_rate=1e-3") == 0
    assert "is finished already" in capsys.readouterr().out
    assert (folder / "learning_rate=1e-3" / "metrics.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_ctrl_c_stops_all_runs_with_checkpoints_and_the_sweep_goes_on(home: Path, capsys: pytest.CaptureFixture):
    folder, pid = home / "stopped" / "runs", os.getpid()

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        files = [folder / f"seed={seed}" / "metrics.jsonl" for seed in (1, 2)]
        while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in files):
            time.sleep(0.05)
        os.kill(pid, signal.SIGINT)

    long = ("--grid", "seed=1,2,3", "--jobs", "2", "--runner_config.epochs", "1000")
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert sweep(home, "stopped", *long, "--stop_step", "0") == 130
    thread.join()
    printed = capsys.readouterr().out
    assert len(re.findall(r"stopped, its newest checkpoint is step-\d+", printed)) == 2
    assert not (folder / "seed=3").exists()
    assert "seed=3: was not started; the same command goes on with it" in printed
    done = {seed: read_run(folder / f"seed={seed}").checkpoints[-1].step for seed in (1, 2)}
    last = max(done.values()) + 1
    assert sweep(home, "stopped", *long, "--stop_step", str(last)) == 0
    printed = capsys.readouterr().out
    assert "seed=1: resumes on core" in printed and "seed=3: begins" in printed
    for seed in (1, 2, 3):
        assert [record["step"] for record in step_records(folder / f"seed={seed}")] == list(range(1, last + 1))


def test_the_folder_of_a_run_is_no_folder_of_a_sweep(home: Path):
    (home / "taken" / "runs").mkdir(parents=True)
    (home / "taken" / "runs" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds a run(.|\n)*give the sweep a folder of its own"):
        sweep(home, "taken", "--grid", "seed=1,2")
    with pytest.raises(UserError, match="is within the folder of a run (.|\n)*give the sweep a folder of its own"):
        sweep(home, "taken/runs/below", "--grid", "seed=1,2")
    assert not (home / "taken" / "runs" / "below" / "runs").exists()
    point = home / "free" / "runs" / "seed=1"
    point.mkdir(parents=True)
    for name, text in (("metrics.jsonl", ""), ("config.yaml", "a: [")):
        (point / name).write_text(text)
    with pytest.raises(UserError, match="seed=1: (.|\n)*a run whose config.yaml cannot be read"):
        sweep(home, "free", "--grid", "seed=1,2")
    assert sorted(os.listdir(point)) == ["config.yaml", "metrics.jsonl"] and os.listdir(point.parent) == ["seed=1"]


@pytest.mark.parametrize(
    ("grid", "part"),
    [
        ("seed=1,x", "seed=x: .*must be an integer"),
        ("optimizer.eps=1e-8,0.00000001", "eps=0.00000001: this run is the same as eps=1e-8"),
        ("model.model_config.num_heads=2,5", "num_heads=5: (.|\n)*must divide hidden_size"),
        ("train_dataset_dir=DATA,/nope", "the path does not exist"),
    ],
)
def test_a_wrong_value_is_found_before_the_first_run(home: Path, grid: str, part: str):
    with pytest.raises(UserError, match=part):
        sweep(home, "wrong", "--grid", grid.replace("DATA", str(home / "data")))
    assert not (home / "wrong" / "runs").exists()
