"""Position in the data of a run that resumes with other ranks or other batches. No MindSpore.

Each epoch has its own order of sequences, the same for any number of ranks, and a step takes the next `batch_size` x
`gradient_accumulation_steps` x ranks of them. As long as that product stays the same, a step means the same sequences,
and the run continues with exactly the next one: no sequence is repeated or left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.data.batches.sampler import optimizer_steps
from trainer.errors import UserError

BATCH_KEYS = ("batch_size", "gradient_accumulation_steps", "ranks")
"""The keys of a data layout that may change; all other keys must stay."""


def resumed_batch(batch: int, before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    """The micro-batch of the epoch to continue with.

    Args:
        batch: Micro-batches of the epoch that were done.
        before, now: The data layouts of the saved run and of the resumed run; they differ in `BATCH_KEYS` at most.

    Raises:
        UserError: A step would take another number of sequences, an epoch would have another number of steps, or the
            position is in the middle of a batch.
    """
    changes = ", ".join(f"{key} was {before[key]} and is {now[key]}" for key in BATCH_KEYS if before[key] != now[key])
    size_before, size_now = _step_size(before), _step_size(now)
    if size_before != size_now:
        rule = f"a step took {size_before} sequences and would take {size_now}: {changes}"
        raise UserError(rule, fix=f"{_same_step_size(size_before, now)}, or {_FROM_BEGINNING}")
    if "rows" in before and "rows" in now and _steps_of_epoch(before) != _steps_of_epoch(now):
        was, is_now = _steps_of_epoch(before), _steps_of_epoch(now)
        rule = f"an epoch of {now['rows']} sequences had {was} steps and would have {is_now}: {changes}"
        raise UserError(rule, fix=f"change batch_size rather than gradient_accumulation_steps, or {_FROM_BEGINNING}")
    batches, left = divmod(batch * before["batch_size"] * before["ranks"], now["batch_size"] * now["ranks"])
    if left:
        rule = f"the checkpoint is in the middle of a micro-batch of all ranks: {changes}"
        raise UserError(rule, fix=f"use the batch_size and ranks of that run, or {_FROM_BEGINNING}")
    return batches


_FROM_BEGINNING = "--ignore_data_skip to start the data from its beginning"


def _step_size(layout: Mapping[str, Any]) -> int:
    return layout["batch_size"] * layout["gradient_accumulation_steps"] * layout["ranks"]


def _steps_of_epoch(layout: Mapping[str, Any]) -> int:
    batches, left = divmod(layout["rows"], layout["batch_size"] * layout["ranks"])
    batches += bool(left and not layout["drop_remainder"])
    return optimizer_steps(batches, layout["gradient_accumulation_steps"])


def _same_step_size(size: int, now: Mapping[str, Any]) -> str:
    """How this number of ranks could take so many sequences a step."""
    ranks = now["ranks"]
    if size % ranks:
        return f"start a number of ranks that divides {size}"
    return f"choose batch_size x gradient_accumulation_steps = {size // ranks} for {ranks} rank{'s' * (ranks > 1)}"
