"""Dropout masks: a pure function of their key, with the right rate and scale, of which any piece can be drawn alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tolerances import HALF_OF_4096

from trainer.arrays.dropout import DropoutSite, LayerDropout
from trainer.ops.dropout import DropoutKey, LocalHeads, draw_mask_bits, dropout_mask, keep_threshold, scores_mask

KEY = DropoutKey(seed=1, rank=0, step=0, micro_batch=0)
SHAPE = (50, 40)


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
            assert abs((flat[first] == np.roll(flat[second], shift)).mean() - 0.5) < HALF_OF_4096


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
    assert mask.dtype == np.float32 and mask.shape == SHAPE
    for site in range(5):
        dropout_mask(KEY, site, (7,), 0.3)
    np.testing.assert_array_equal(dropout_mask(replace(KEY), 5, SHAPE, 0.3), mask)


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 2])
def test_large_seeds_keep_all_their_digits(seed: int) -> None:
    """2**63 - 1 is the largest seed of a configuration."""
    first, second = (dropout_mask(replace(KEY, seed=s), 0, SHAPE, 0.5) for s in (seed, seed + 1))
    assert not np.array_equal(first, second)


def cuts(draw: np.random.Generator, size: int) -> slice:
    """Returns some neighbours of so many, at least one."""
    first, last = sorted(draw.choice(size + 1, 2, replace=False).tolist())
    return slice(first, last)


@pytest.mark.parametrize("rate", [0.0, 1e-9, 0.1, 0.3, 0.5, 0.999, 1 - 2.0**-24])
def test_the_bits_of_any_run_are_those_of_the_whole_mask(rate: float) -> None:
    draw, size = np.random.default_rng(2), 1001
    mask = dropout_mask(KEY, 7, (size,), rate)
    for _ in range(60):
        run = cuts(draw, size)
        bits = draw_mask_bits(KEY, 7, run.start, run.stop - run.start)
        kept = (bits >= keep_threshold(rate)) * np.float32(1 / (1 - rate))
        np.testing.assert_array_equal(kept, mask[run])


@pytest.mark.parametrize("columns", [slice(None), slice(0, 5), slice(5, 12)])
@pytest.mark.parametrize("share", ["all", "rows in order", "rows in runs"])
def test_rows_of_a_layer_are_those_of_the_mask(share: str, columns: slice) -> None:
    """Compares the rows that a rank has, and its columns."""
    draw, key, rows, width = np.random.default_rng(4), replace(KEY, seed=9, step=3), 40, 12
    own = {"all": None, "rows in order": np.arange(11, 29), "rows in runs": np.r_[3:9, 20:21, 30:38, 1:2]}[share]
    site = DropoutSite(6, 0.3, width, columns, own)
    layer = LayerDropout(key, {"mlp_output": site})
    mask = dropout_mask(key, 6, (rows, width), 0.3)[:, columns]
    mask = mask if own is None else mask[own]
    for _ in range(40):
        piece = cuts(draw, len(mask))
        found = layer.rows("mlp_output", piece, mask.shape[1])
        np.testing.assert_array_equal(found, mask[piece])
        assert found.dtype == np.float32 and found.flags.c_contiguous


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(4, 4, 1), (6, 2, 1), (4, 1, 1), (4, 4, 2), (6, 2, 2), (4, 1, 2), (8, 2, 4)]
)
def test_probabilities_of_a_layer_are_those_of_the_mask(heads: int, kv_heads: int, ranks: int) -> None:
    """Any queries, keys and key/value heads, of all heads or of those of a rank; fewer key/value heads than ranks are
    on several of them."""
    draw, sequences, length, groups = np.random.default_rng(5), 3, 8, heads // kv_heads
    shape = (sequences * kv_heads, length * groups, length)
    for rank in range(ranks):
        own = None
        local = LocalHeads(rank, heads, kv_heads, heads // ranks, max(1, kv_heads // ranks))
        kv = local.local_kv_heads
        if ranks > 1:
            own, shape = local, (sequences * kv, length * local.local_heads // kv, length)
        layer, local_groups = LayerDropout(KEY, {}, (2, 0.4), own), local.local_heads // kv
        mask = scores_mask(KEY, 2, shape, 0.4, own).reshape(sequences, kv, length, local_groups, length)
        for _ in range(20):
            sequence = int(draw.integers(sequences))
            queries, keys, some = cuts(draw, length), cuts(draw, length), cuts(draw, local.local_kv_heads)
            place = sequence, queries, some, local.local_kv_heads, local_groups, keys, length
            right = mask[sequence, some, queries, :, keys].transpose(0, 2, 1, 3)
            for keep in (True, False):  # drawn, and read again
                np.testing.assert_array_equal(layer.probabilities(*place, keep), right)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 4, 2), (6, 2, 2), (4, 1, 4), (8, 2, 4)])
def test_heads_of_ranks_are_those_of_the_whole_mask(heads: int, kv_heads: int, ranks: int) -> None:
    """The query heads of all ranks, one after the other, have the mask that one rank draws."""
    sequences, length, groups = 2, 5, heads // kv_heads
    whole = dropout_mask(KEY, 1, (sequences * kv_heads, length * groups, length), 0.4)
    by_head = whole.reshape(sequences, kv_heads, length, groups, length).swapaxes(2, 3)
    by_head = by_head.reshape(sequences, heads, length, length)
    every, kv = slice(0, length), max(1, kv_heads // ranks)
    for rank in range(ranks):
        layer = LayerDropout(KEY, {}, (1, 0.4), LocalHeads(rank, heads, kv_heads, heads // ranks, kv))
        for sequence in range(sequences):
            found = layer.probabilities(sequence, every, slice(0, kv), kv, heads // ranks // kv, every, length, False)
            own = by_head[sequence, rank * heads // ranks : (rank + 1) * heads // ranks]
            np.testing.assert_array_equal(found.reshape(-1, length, length), own)
