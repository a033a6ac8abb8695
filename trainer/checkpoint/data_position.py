"""Where a training stands in its data, when it goes on with other ranks or other batches. Pure Python.

An epoch goes through its rows in an order of its own, the same for any number of ranks, and a step takes the next
`batch_size` x `gradient_accumulation_steps` x ranks of them. As long as that product stays, a step remains a step, and
a training goes on with exactly the row that comes next: none twice, none never.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.errors import UserError

BATCH_KEYS = ("batch_size", "gradient_accumulation_steps", "ranks")
"""What of a data layout says which rows a step takes; the rest of it must stay as it is."""


def batch_now(batch: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """The micro-batch of an epoch to go on with.

    Args:
        batch: Micro-batches of the epoch that were done.
        before, now: The data layout of the run that did them and of the one that goes on; see `BATCH_KEYS`. Their other
            keys agree.

    Raises:
        UserError: A step would take more or fewer rows, an epoch would have another number of steps, or the place is
            in the middle of a batch.
    """
    changes = ", ".join(f"{key} was {before[key]} and is {now[key]}" for key in BATCH_KEYS if before[key] != now[key])
    rows_before, rows_now = _rows_of_step(before), _rows_of_step(now)
    if rows_before != rows_now:
        rule = f"a step took {rows_before} rows and would take {rows_now}, so another step would be next: {changes}"
        raise UserError(rule, fix=f"{_same_rows(rows_before, now)}, or {_FROM_BEGINNING}")
    if "rows" in before and "rows" in now and _steps_of_epoch(before) != _steps_of_epoch(now):
        was, is_now = _steps_of_epoch(before), _steps_of_epoch(now)
        rule = f"an epoch of {now['rows']} rows had {was} steps and would have {is_now}: {changes}"
        raise UserError(rule, fix=f"change batch_size rather than gradient_accumulation_steps, or {_FROM_BEGINNING}")
    rows, left = divmod(batch * before["batch_size"] * before["ranks"], now["batch_size"] * now["ranks"])
    if left:
        rule = f"the checkpoint stands in the middle of a micro-batch of all ranks: {changes}"
        raise UserError(rule, fix=f"go on with the batch_size and ranks of that run, or {_FROM_BEGINNING}")
    return rows


_FROM_BEGINNING = "--ignore_data_skip to start the data from its beginning"


def _rows_of_step(layout: Mapping[str, Any]) -> int:
    return layout["batch_size"] * layout["gradient_accumulation_steps"] * layout["ranks"]


def _steps_of_epoch(layout: Mapping[str, Any]) -> int:
    batches, left = divmod(layout["rows"], layout["batch_size"] * layout["ranks"])
    batches += bool(left and not layout["drop_remainder"])
    return -(-batches // layout["gradient_accumulation_steps"])


def _same_rows(rows: int, now: Mapping[str, Any]) -> str:
    """How this number of ranks could take so many rows."""
    ranks = now["ranks"]
    if rows % ranks:
        return f"start a number of ranks that divides {rows}"
    return f"choose batch_size x gradient_accumulation_steps = {rows // ranks} for {ranks} rank{'s' * (ranks > 1)}"
