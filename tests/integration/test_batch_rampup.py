"""A global batch that grows: the steps that `plan` announces, killed within the growth and resumed bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_helpers import assert_same_run, column, config_of, kill_after, step_records, train, write_config

from trainer.checkpoint.store import newest_complete
from trainer.cli.main import dispatch
from trainer.run.prepare import build_plan

pytestmark = pytest.mark.slow

STEPS = 24
# 1 to 8 micro-batches; the ramp-up ends in the third epoch of 14 micro-batches.
CHANGES = {
    "runner_config": {
        "batch_size": 4, "epochs": 5000, "gradient_accumulation_steps": 8, "rampup_batch_size": [4, 4, 130],
    },
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 2, "keep_checkpoint_max": 2}],
}  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(home: Path) -> Path:
    return train(write_config(home / "quiet", home / "data", CHANGES), runner_config__stop_step=STEPS)


def test_the_steps_are_those_of_the_plan(home: Path, uninterrupted: Path) -> None:
    steps = build_plan(config_of(home / "quiet" / "run.yaml")).steps
    records = step_records(uninterrupted)
    batches = column(records, "global_batch_size")
    done = 0
    for record, sequences in zip(records, batches, strict=True):
        left = steps.sizes.batches_per_epoch - done % steps.sizes.batches_per_epoch
        assert sequences == 4 * min(left, steps.sizes.next_step(done)), record["step"]
        assert record["epoch"] == done // steps.sizes.batches_per_epoch + 1
        done += sequences // 4
    first = steps.sizes.first_full_step()
    assert batches[:2] == [4, 4] and max(batches) == 32 and 32 not in batches[:first]
    assert sum(batches[:first]) >= 130 > sum(batches[: first - 1])
    assert records[first - 1]["epoch"] > 1


def test_killed_in_the_ramp_up_and_resumed_equals_never_stopped(home: Path, uninterrupted: Path) -> None:
    path = write_config(home / "killed", home / "data", CHANGES)
    output = kill_after(path, steps=5)
    assert newest_complete(output / "checkpoints") is not None
    train(path, resume_training=True, runner_config__stop_step=STEPS)
    assert_same_run(output, uninterrupted)


def test_another_beginning_of_the_data_continues_the_growth(home: Path, uninterrupted: Path) -> None:
    path = write_config(home / "anew", home / "data", CHANGES)
    output = train(path, runner_config__stop_step=6)
    train(path, resume_training=True, ignore_data_skip=True, runner_config__stop_step=8)
    train(path, resume_training=True, runner_config__stop_step=10)  # its checkpoint is consistent
    batches = column(step_records(output), "global_batch_size")
    assert batches[:7] == column(step_records(uninterrupted), "global_batch_size")[:7]
    assert min(batches[6:]) > 4


def test_the_plan_says_it(home: Path, uninterrupted: Path, capsys: pytest.CaptureFixture) -> None:
    path = home / "quiet" / "run.yaml"
    assert dispatch(["plan", "--config", str(path)]) == 0
    first = build_plan(config_of(path)).steps.sizes.first_full_step()
    batches = column(step_records(uninterrupted), "global_batch_size")
    told = f"from 4 sequences by 4 to 32, full from step {first + 1} on, after {sum(batches[:first])} sequences"
    assert told in capsys.readouterr().out
    assert dispatch(["plan", "--config", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]["sizes"]["rampup"] == [4, 4, 130]
