"""Going on in the middle of an epoch with another number of ranks: every row once, or an error that says why not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from test_data_loader import NumberedRows

from trainer.checkpoint.data_position import batch_now
from trainer.data.batches.sampler import BatchLoader
from trainer.errors import UserError


def layout(batch_size: int, accumulation: int, ranks: int, **more: Any) -> dict[str, Any]:
    return {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "ranks": ranks} | more


def steps(place: dict[str, Any], rows: int, first: int = 0, last: int | None = None) -> list[list[int]]:
    """The rows that each step of an epoch takes on all ranks together, in order; padding left out."""
    epochs = []
    for rank in range(place["ranks"]):
        loader = BatchLoader(
            NumberedRows(rows), batch_size=place["batch_size"], shuffle=True, seed=3, prefetch_size=1,
            drop_remainder=place["drop_remainder"], rank=rank, ranks=place["ranks"],
        )  # fmt: skip
        batches = list(itertools.islice(loader.epoch(1, first), last))
        epochs.append(
            [[row for row, label in zip(b.input_ids[:, 0], b.labels[:, 0], strict=True) if label >= 0] for b in batches]
        )
    by_batch = [[int(row) for rank in batch for row in rank] for batch in zip(*epochs, strict=True)]
    window = place["gradient_accumulation_steps"]
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
def test_a_training_goes_on_with_the_next_row(before: tuple, after: tuple, rows: int, drop_remainder: bool) -> None:
    was, is_now = (layout(*each, drop_remainder=drop_remainder, rows=rows) for each in (before, after))
    whole = steps(is_now, rows)
    done = 5 * was["gradient_accumulation_steps"]  # micro-batches of five steps
    taken = steps(was, rows, 0, done)
    if len(steps(was, rows)) != len(whole):
        with pytest.raises(UserError, match="rows had 1. steps and would have 1."):
            batch_now(done, was, is_now)
        return
    goes_on = steps(is_now, rows, batch_now(done, was, is_now))
    # Within a step the ranks' rows may come in another order; which rows a step has is all that counts.
    assert [sorted(step) for step in (*taken, *goes_on)] == [sorted(step) for step in whole]


def test_the_same_layout_goes_on_where_it_was() -> None:
    same = layout(2, 3, 4)
    assert batch_now(7, same, same) == 7


def test_a_step_of_other_rows_is_refused_with_settings_that_fit() -> None:
    with pytest.raises(UserError) as caught:
        batch_now(4, layout(1, 1, 8), layout(1, 1, 2))
    message = str(caught.value)
    assert "a step took 8 rows and would take 2" in message and "ranks was 8 and is 2" in message
    assert "choose batch_size x gradient_accumulation_steps = 4 for 2 ranks, or --ignore_data_skip" in message
    with pytest.raises(UserError, match="a number of ranks that divides 8"):
        batch_now(4, layout(1, 1, 8), layout(1, 1, 3))


def test_an_epoch_of_other_steps_is_refused() -> None:
    """100 rows are 12 steps of 8 ranks, which drop 4 rows, and 13 of one that accumulates."""
    more = {"rows": 100, "drop_remainder": True}
    with pytest.raises(UserError) as caught:
        batch_now(4, layout(1, 1, 8, **more), layout(1, 8, 1, **more))
    assert "an epoch of 100 rows had 12 steps and would have 13" in str(caught.value)
    assert "Fix: change batch_size rather than gradient_accumulation_steps" in str(caught.value)
    assert batch_now(4, layout(1, 1, 8, **more), layout(8, 1, 1, **more)) == 4


def test_a_place_inside_a_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match="in the middle of a micro-batch of all ranks: batch_size was 2 and is 4"):
        batch_now(3, layout(2, 2, 1), layout(4, 1, 1))
