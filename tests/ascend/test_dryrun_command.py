"""`plan --dryrun ascend` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ascend_cases import DENSE

from trainer.cli import main as cli
from trainer.dryrun import report


def run_plan(tmp_path: Path, capsys: pytest.CaptureFixture, *flags: str) -> tuple[int, str, str]:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(DENSE))
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "--dryrun", "ascend", "--mode", "1", "--config", str(file), *flags])
    out = capsys.readouterr()
    return end.value.code, out.out, out.err


def test_a_file_as_a_rank_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, out, errors = run_plan(tmp_path, capsys, "--use_parallel", "True", "--ranks", "8", "--rank", "5", "--json")
    found = json.loads(out)
    assert code == 0 and found["failure"] is None and (found["rank"], found["ranks"]) == (5, 8)
    assert found["found"]["updated"] and 0 < found["host_bytes"] < 100_000
    assert {each[0] for each in found["collectives"]} == {"AllReduce"}
    assert 0 < found["peak_bytes"] and 0 < found["planned_bytes"]
    assert "step 2 of 2" in errors, "progress"


def test_a_step_that_does_not_fit_into_the_device(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    big = ("--model.model_config.vocab_size", "4000000", "--model.model_config.hidden_size", "4096")
    code, out, errors = run_plan(tmp_path, capsys, *big, "--json")
    found = json.loads(out)
    assert code == 1 and found["exceeds_memory"] and found["failure"] is None
    assert "a device would run out of memory: this rank needs" in errors and "of 60.00 GiB" in errors
    assert found["found"]["parameters"] > 3e10, "more than the memory of a machine holds"


def test_a_machine_without_memory_is_refused_with_the_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "available_memory_bytes", lambda: 1 << 30)
    code, _, errors = run_plan(tmp_path, capsys)
    assert code == 2 and "about 1.50 GiB" in errors and "1.00 GiB left" in errors and "num_layers" in errors
