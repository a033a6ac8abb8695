"""Dropout masks: a pure function of their key, with the right rate and scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainer.ops.dropout import DropoutKey, dropout_mask

KEY = DropoutKey(seed=1, rank=0, step=0, micro_batch=0)
SHAPE = (50, 40)


def test_same_key_same_mask() -> None:
    mask = dropout_mask(KEY, 3, SHAPE, 0.1)
    np.testing.assert_array_equal(mask, dropout_mask(replace(KEY), 3, SHAPE, 0.1))
    assert mask.dtype == np.float32 and mask.shape == SHAPE


def test_every_part_of_the_key_matters() -> None:
    """Neighbouring values, and pairs that a careless sum or shift would map to the same stream."""
    names = [
        (KEY, 0), (KEY, 1), (KEY, 256),
        *((replace(KEY, **{part: value}), 0) for part in ("rank", "step", "micro_batch") for value in (1, 2, 256)),
        (replace(KEY, seed=0), 0), (replace(KEY, seed=2), 0), (replace(KEY, seed=257), 0),
        (replace(KEY, step=1, micro_batch=1), 0), (replace(KEY, step=1), 1), (replace(KEY, rank=1, step=1), 0),
    ]
    masks = [dropout_mask(key, site, SHAPE, 0.5).tobytes() for key, site in names]
    assert len(set(masks)) == len(names)


def test_streams_do_not_overlap() -> None:
    """The next step's mask is not a shift of this step's mask: half of all elements agree, as by chance."""
    flat = [dropout_mask(replace(KEY, step=step), 0, (4096,), 0.5) > 0 for step in range(3)]
    for first, second in ((0, 1), (1, 2), (0, 2)):
        for shift in (*range(-8, 9), 64, 256):
            assert abs((flat[first] == np.roll(flat[second], shift)).mean() - 0.5) < 0.05


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_scale(rate: float) -> None:
    mask = dropout_mask(KEY, 0, (1000, 1000), rate)
    assert set(np.unique(mask)) == {np.float32(0), np.float32(1 / (1 - rate))}
    deviation = (rate * (1 - rate) / mask.size) ** 0.5
    assert (mask == 0).mean() == pytest.approx(rate, abs=5 * deviation)
    assert mask.mean() == pytest.approx(1, abs=5 * deviation / (1 - rate))


def test_rate_zero_drops_nothing() -> None:
    np.testing.assert_array_equal(dropout_mask(KEY, 0, SHAPE, 0.0), np.ones(SHAPE, np.float32))


def test_a_larger_mask_does_not_change_with_the_batch_before_it() -> None:
    """Masks come from counters: drawing others first changes nothing."""
    mask = dropout_mask(KEY, 5, SHAPE, 0.3)
    for site in range(5):
        dropout_mask(KEY, site, (7,), 0.3)
    np.testing.assert_array_equal(dropout_mask(KEY, 5, SHAPE, 0.3), mask)


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 2])
def test_large_seeds_keep_all_their_digits(seed: int) -> None:
    """2**63 - 1 is the largest seed of a configuration."""
    first, second = (dropout_mask(replace(KEY, seed=s), 0, SHAPE, 0.5) for s in (seed, seed + 1))
    assert not np.array_equal(first, second)
