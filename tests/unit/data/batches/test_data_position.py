"""Resuming in the middle of an epoch with another number of ranks: every sequence once, or an error with its reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from test_data_loader import NumberedSequences

from trainer.checkpoint.state import resumed_batch
from trainer.data.batches.loader import BatchLoader
from trainer.errors import UserError


def layout(batch_size: int, accumulation: int, ranks: int, **more: Any) -> dict[str, Any]:
    return {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "ranks": ranks} | more


def steps(settings: dict[str, Any], rows: int, first: int = 0, last: int | None = None) -> list[list[int]]:
    """Returns the sequences that each step of an epoch takes on all ranks together, in order, without padding."""
    epochs = []
    for rank in range(settings["ranks"]):
        loader = BatchLoader(
            NumberedSequences(rows), batch_size=settings["batch_size"], shuffle=True, seed=3, prefetch_size=1,
            drop_remainder=settings["drop_remainder"], rank=rank, ranks=settings["ranks"],
        )  # fmt: skip
        batches = list(itertools.islice(loader.epoch(1, first), last))
        epochs.append(
            [[row for row, label in zip(b.input_ids[:, 0], b.labels[:, 0], strict=True) if label >= 0] for b in batches]
        )
    by_batch = [[int(row) for rank in batch for row in rank] for batch in zip(*epochs, strict=True)]
    window = settings["gradient_accumulation_steps"]
    return [sum(by_batch[at : at + window], []) for at in range(0, len(by_batch), window)]


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("rows", [96, 100])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 1, 8), (8, 1, 1)),
        ((8, 1, 1), (1, 1, 8)),
        ((2, 1, 4), (1, 1, 8)),
        ((1, 2, 4), (2, 2, 2)),
        ((2, 4, 1), (2, 1, 4)),
    ],
)
def test_a_resumed_run_takes_the_next_sequence(before: tuple, after: tuple, rows: int, drop_remainder: bool) -> None:
    was, is_now = (layout(*each, drop_remainder=drop_remainder, rows=rows) for each in (before, after))
    whole = steps(is_now, rows)
    done = 5 * was["gradient_accumulation_steps"]  # micro-batches of five steps
    taken = steps(was, rows, 0, done)
    if len(steps(was, rows)) != len(whole):
        with pytest.raises(UserError, match="sequences had 1. steps and would have 1."):
            resumed_batch(done, was, is_now)
        return
    resumed = steps(is_now, rows, resumed_batch(done, was, is_now))
    # Within a step the order of the ranks' sequences may differ; only which sequences a step has matters.
    assert [sorted(step) for step in (*taken, *resumed)] == [sorted(step) for step in whole]


def test_the_same_layout_continues_at_the_same_batch() -> None:
    same = layout(2, 3, 4)
    assert resumed_batch(7, same, same) == 7


def test_a_step_of_another_size_is_an_error_with_settings_that_fit() -> None:
    with pytest.raises(UserError) as caught:
        resumed_batch(4, layout(1, 1, 8), layout(1, 1, 2))
    message = str(caught.value)
    assert "a step took 8 sequences and would take 2" in message and "ranks was 8 and is 2" in message
    assert "choose batch_size x gradient_accumulation_steps = 4 for 2 ranks, or --ignore_data_skip" in message
    with pytest.raises(UserError, match="a number of ranks that divides 8"):
        resumed_batch(4, layout(1, 1, 8), layout(1, 1, 3))


def test_another_number_of_steps_per_epoch_is_an_error() -> None:
    """100 sequences are 12 steps of 8 ranks, which drop 4, and 13 steps of one rank that accumulates."""
    more = {"rows": 100, "drop_remainder": True}
    with pytest.raises(UserError) as caught:
        resumed_batch(4, layout(1, 1, 8, **more), layout(1, 8, 1, **more))
    assert "an epoch of 100 sequences had 12 steps and would have 13" in str(caught.value)
    assert "Fix: change batch_size rather than gradient_accumulation_steps" in str(caught.value)
    assert resumed_batch(4, layout(1, 1, 8, **more), layout(8, 1, 1, **more)) == 4


def test_a_position_inside_a_micro_batch_is_an_error() -> None:
    with pytest.raises(UserError, match="in the middle of a micro-batch of all ranks: batch_size was 2 and is 4"):
        resumed_batch(3, layout(2, 2, 1), layout(4, 1, 1))
