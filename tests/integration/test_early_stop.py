"""A run that EarlyStop ends, and the best checkpoint that it keeps: the same whether it was interrupted or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import arrays_of, assert_same_bits, column, eval_records, figures, train, train_and_read

from trainer.checkpoint.store import complete_checkpoints, find_checkpoint

pytestmark = pytest.mark.slow

# At this learning rate the eval loss falls at first and rises later.
CHANGES = {
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 0.1},
    "runner_config": {"batch_size": 4, "epochs": 10},
    "do_eval": True,
    "eval_step_interval": 3,
    "callbacks": [
        {"type": "CheckpointMonitor", "save_checkpoint_steps": 5, "keep_checkpoint_max": 1, "keep_best": 1},
        {"type": "EarlyStop", "patience": 2, "min_delta": 0.01},
    ],
}


@pytest.fixture(scope="module")
def ended(home: Path, path: Path) -> tuple[Path, str]:
    return train_and_read(path, output_dir=home / "ended")


def best_step(output: Path) -> int:
    return min(eval_records(output), key=lambda record: record["eval_loss"])["step"]


def test_the_run_ends_where_the_loss_no_longer_falls_and_says_why(ended: tuple[Path, str]) -> None:
    output, printed = ended
    losses = column(eval_records(output), "eval_loss")
    improved = 0
    for number, loss in enumerate(losses):
        if loss < losses[improved] - 0.01:
            improved = number
    assert 0 < improved == len(losses) - 3  # two evaluations followed the last one that improved
    last = 3 * len(losses)
    reason = f"early stop at step {last}: the loss of the last 2 evaluations did not fall below {losses[improved]:.4f}"
    assert printed.count(reason) == 1 and f"stopped early at step {last} of" in printed


def test_the_best_and_the_last_checkpoint_are_kept(ended: tuple[Path, str], path: Path, home: Path) -> None:
    output, _ = ended
    best, last = best_step(output), eval_records(output)[-1]["step"]
    folder = output / "checkpoints"
    assert best < last
    assert sorted(found.name for found in folder.iterdir()) == ["best", f"step-{best:08d}", f"step-{last:08d}"]
    assert find_checkpoint(folder / "best") == folder / f"step-{best:08d}"
    found = train(path, output_dir=home / "evaluated", run_mode="eval", load_checkpoint=folder / "best")
    lowest = min(column(eval_records(output), "eval_loss"))
    assert f'"loss": {lowest}' in (found / "eval.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("stop_step", [3, 7])  # at a scheduled evaluation, and with one of its own between two
def test_resumed_equals_never_stopped(ended: tuple[Path, str], path: Path, home: Path, stop_step: int) -> None:
    whole, _ = ended
    output = train(path, output_dir=home / f"from{stop_step}", runner_config__stop_step=stop_step)
    last = eval_records(whole)[-1]["step"]
    while complete_checkpoints(output / "checkpoints")[-1].name < f"step-{last:08d}":
        stop_step += 8
        train(path, output_dir=output, resume_training=True, runner_config__stop_step=min(stop_step, last + 20))
    assert figures(output) == figures(whole)
    assert_same_bits(arrays_of(output), arrays_of(whole))


def test_an_evaluation_that_a_signal_prevented_is_made_up_for(
    ended: tuple[Path, str], path: Path, home: Path
) -> None:
    whole, _ = ended
    output = train(path, output_dir=home / "late", runner_config__stop_step=3, do_eval=False, callbacks="[]")
    train(path, output_dir=output, resume_training=True)
    assert [(r["step"], r["eval_loss"]) for r in eval_records(output)] == [
        (r["step"], r["eval_loss"]) for r in eval_records(whole)
    ]
    assert_same_bits(arrays_of(output), arrays_of(whole))


def test_an_ended_run_stays_ended_until_it_gets_more_patience(ended: tuple[Path, str], path: Path, home: Path) -> None:
    output, _ = ended
    steps = len(figures(output))
    _, printed = train_and_read(path, output_dir=output, resume_training=True)
    assert "nothing to do: early stop at step" in printed and len(figures(output)) == steps
    more = {"callbacks__1__patience": 3, "callbacks__1__min_delta": 5}
    other, printed = train_and_read(
        path, output_dir=home / "more", resume_training=True, load_checkpoint=output / "checkpoints", **more
    )
    assert f"the best checkpoint so far (step {best_step(output)}, eval loss " in printed
    assert f"early stop at step {steps + 3}: the loss of the last 3 evaluations" in printed
    assert find_checkpoint(other / "checkpoints" / "best").parent == other / "checkpoints"
