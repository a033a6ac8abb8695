"""The micro-batches of each step, against a simulation step by step of Megatron-LM's rule."""

from __future__ import annotations

import pytest

from trainer.data.batches.step_sizes import StepSizes, step_sizes


def megatrons_batch(start: int, increment: int, samples: int, full: int, consumed: int) -> int:
    """Returns the global batch as LinearBatchSizeCalculator of Megatron-LM has it."""
    if consumed > samples or full == start or samples == 0:
        return full
    per_increment = samples / ((full - start) // increment)
    return start + int(consumed / per_increment) * increment


def simulated(sizes: StepSizes, steps: int) -> list[tuple[int, int]]:
    """Returns the position after each step, and its micro-batches."""
    found = []
    done = 0
    for _ in range(steps):
        batches = sizes.micro_batches
        if sizes.rampup is not None:
            full = sizes.micro_batches * sizes.rows
            batches = megatrons_batch(*sizes.rampup, full, (sizes.done_before + done) * sizes.rows) // sizes.rows
        batches = min(batches, sizes.batches_per_epoch - done % sizes.batches_per_epoch)
        done += batches
        found.append((done, batches))
    return found


CASES = [
    StepSizes(7, 3),
    StepSizes(1000, 16, 4, (16, 4, 200)),
    StepSizes(23, 12, 2, (4, 4, 100)),  # epochs end within the ramp-up
    StepSizes(5, 8, 1, (1, 1, 97)),  # the ramp-up has many epochs of a few steps
    StepSizes(11, 6, 3, (6, 12, 50), done_before=9),
    StepSizes(40, 4, 2, (8, 4, 100)),  # starts with the full batch
    StepSizes(40, 4, 2, (2, 6, 1)),
    StepSizes(3, 64, 1, (1, 7, 3333)),
    StepSizes(9, 2, 1, (1, 1, 0)),
]


@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_sizes_and_counts_are_those_of_a_simulation(sizes: StepSizes) -> None:
    positions = simulated(sizes, 1500)
    done = 0
    for number, (position, batches) in enumerate(positions, 1):
        left = sizes.batches_per_epoch - done % sizes.batches_per_epoch
        assert min(sizes.next_step(done), left) == batches
        assert sizes.batches_of(number) == position
        assert sizes.steps_until(position) == number
        done = position
    starts = [0, *(position for position, _ in positions)]
    full = next(number for number, start in enumerate(starts) if sizes.next_step(start) == sizes.micro_batches)
    assert sizes.first_full_step() == full


def test_counts_of_long_runs_take_no_time() -> None:
    """Counts a ramp-up of 4 levels in 10^11 epochs of 10 sequences: one epoch has 10, 5, 4 and 3 steps in turn."""
    sizes = StepSizes(10, 4, 1, (1, 1, 3 * 10**11))
    assert sizes.steps_until(4 * 10**11) == 10**10 * (10 + 5 + 4 + 3)
    assert sizes.batches_of(10**10 * (10 + 5)) == 2 * 10**11


def test_data_that_begins_anew_does_not_shrink_the_batch() -> None:
    layout = {"batch_size": 2, "ranks": 2, "gradient_accumulation_steps": 4, "rampup_batch_size": [4, 4, 40]}
    before = step_sizes(layout, 100)
    anew = step_sizes(layout, 100, data_from_step=5)
    assert anew.next_step(0) == before.next_step(before.batches_of(5)) > before.next_step(0)
