"""Which tokens of a sequence a context-parallel rank has, what ranks exchange, and which files it fits."""

from __future__ import annotations

import numpy as np
import pytest
from config_helpers import BASE, load
from thread_ranks import on_groups
from tolerances import FEW_OPERATIONS

from trainer.arrays.attention.context import ContextParallel
from trainer.config.checks.degrees import context_problems
from trainer.data.batches.batch import Batch
from trainer.data.batches.context import ContextShard
from trainer.ops.dropout import DropoutKey, MaskShard, dropout_mask
from trainer.parallel.host_group import CpuGroup


@pytest.mark.parametrize(
    ("ranks", "ulysses"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 3), (4, 4), (4, 2), (6, 3), (6, 2)],
)  # fmt: skip
def test_ranks_share_the_tokens_of_every_sequence(ranks: int, ulysses: int) -> None:
    length = 12 * ranks
    whole = Batch(*np.random.default_rng(ranks).integers(0, 99, (4, 3, length), dtype=np.int32))
    parts = [ContextShard(rank, ranks, ulysses) for rank in range(ranks)]
    for part in parts:  # neighbours have together what a rank of a ring has
        together = np.concatenate([each.positions(length) for each in parts if each.ring == part.ring])
        np.testing.assert_array_equal(together, part.ring.positions(length))
    places = np.concatenate([part.positions(length) for part in parts])
    assert sorted(places) == list(range(length))
    for array in whole:
        cut = [part.select_tokens(array) for part in parts]
        np.testing.assert_array_equal(np.concatenate(cut, 1), array[:, places])
        assert all(each.flags.c_contiguous and each.dtype == np.int32 for each in cut)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_of_a_ring_meets_as_many_keys(ranks: int) -> None:
    length = 8 * ranks
    segments = np.zeros((1, length), np.int32)
    seen = [[each.sum() for each in ContextShard(rank, ranks).visible_to_chunks(segments)] for rank in range(ranks)]
    assert [sum(each) for each in seen] == [length * (length + 1) // 2 // ranks] * ranks


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_sees_what_one_rank_does(ranks: int, window: int | None) -> None:
    length = 8 * ranks
    segments = np.sort(np.random.default_rng(1).integers(0, 4, (2, length), dtype=np.int32))
    apart = np.subtract.outer(np.arange(length), np.arange(length))
    right = (segments[:, :, None] == segments[:, None]) & (apart >= 0) & (apart < (window or length))
    for rank in range(ranks):
        part, found = ContextShard(rank, ranks), np.zeros((2, 4 * 2, length), bool)
        for half, allowed in enumerate(part.visible_to_chunks(segments, window)):
            assert allowed.shape[2] == ((rank + 1) * 4, (2 * ranks - rank) * 4)[half]
            found[:, half * 4 : half * 4 + 4, : allowed.shape[2]] = allowed
        np.testing.assert_array_equal(found, right[:, part.positions(length)])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{context_parallel: 2}", None),
        ("{context_parallel: 2, context_parallel_algo: ulysses_cp}", None),
        ("{context_parallel_algo: hybrid_cp}", None),
        ("{context_parallel: 6}", "context_parallel = 6: seq_length 32 is not divisible by 2 x context_parallel."),
        (
            "{context_parallel: 32}",
            "is not divisible by 2 x context_parallel.\n  Fix: set it to 1, 2, 4, 8 or 16, or seq_length to 64",
        ),
        (
            "{context_parallel: 8, context_parallel_algo: ulysses_cp}",
            "context_parallel = 8: with Ulysses its ranks must share the 4 heads and 4 heads of keys and values."
            "\n  Fix: change it, or use the hybrid method with ulysses_degree_in_cp 1, 2 or 4.",
        ),
        ("{context_parallel: 4, context_parallel_algo: hybrid_cp, ulysses_degree_in_cp: 2}", None),
        ("{context_parallel: 4, context_parallel_algo: hybrid_cp, ulysses_degree_in_cp: 4}", None),
        (
            "{context_parallel: 6, context_parallel_algo: hybrid_cp, ulysses_degree_in_cp: 4}",
            "ulysses_degree_in_cp = 4: must divide context_parallel 6, and that number of ranks must share the 4 heads"
            " and 4 heads of keys and values.\n  Fix: set it to 1 or 2.",
        ),
        (
            "{context_parallel: 12, context_parallel_algo: hybrid_cp, ulysses_degree_in_cp: 2}",
            "context_parallel = 12: seq_length 32 is not divisible by context_parallel."
            "\n  Fix: set it to 1, 2, 4, 8, 16 or 32, or seq_length to 36",
        ),
    ],
)
def test_what_context_parallelism_fits(text: str, rule: str | None) -> None:
    problems = problems_of(text)
    assert len(problems) == (rule is not None) and all(rule in each for each in problems), problems


@pytest.mark.parametrize("ulysses", [1, 2])
def test_ranks_drop_what_one_rank_drops(ulysses: int) -> None:
    key, shape = DropoutKey(1, 0, 2, 3), (2 * 8, 6)
    whole, found = dropout_mask(key, 4, shape, 0.3), np.full(shape, np.nan)
    for rank in range(2):
        rows = ContextShard(rank, 2, ulysses).rows(2, 8)
        for number, columns in enumerate((slice(0, 3), slice(3, 6))):
            part = MaskShard(2 * rank + number, (rows, columns))
            found[rows, columns] = own = dropout_mask(key, 4, shape, 0.3, part)
            assert own.shape == part.local_shape(shape)
    assert np.array_equal(found, whole)


def problems_of(text: str, *overrides: str) -> list[str]:
    config = load(f"{BASE}parallel_config: {text}\n", *overrides)
    return [str(each.error) for each in context_problems(config)]


@pytest.mark.parametrize(("ranks", "ulysses"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_what_ranks_exchange(ranks: int, ulysses: int, kv_heads: int) -> None:
    """Heads for tokens and back, then keys of all tokens and the sums of their gradients; several ranks have the same
    heads of keys where there are fewer heads than ranks."""
    sequences, length, size, draw = 2, 16, 3, np.random.default_rng(6)
    whole_BTC = draw.normal(size=(sequences, length, kv_heads * size)).astype(np.float32)
    copies = max(1, ulysses // kv_heads)

    def work(world: CpuGroup) -> None:
        part, place = ContextShard(world.rank, ranks, ulysses), world.rank % ulysses
        ring, sharing = None, None
        if ulysses < ranks:
            ring = world.new_subgroup(range(place, ranks, ulysses))
        if ulysses > 1:
            sharing = world.new_subgroup(range(world.rank - place, world.rank - place + ulysses))
        context = ContextParallel(part, ring, sharing)
        local_kv = max(1, kv_heads // ulysses)
        assert context.local_heads(4, kv_heads) == (4 // ulysses, local_kv)
        own_NC = part.select_tokens(whole_BTC).reshape(-1, kv_heads * size)
        first = place * kv_heads // ulysses * size
        heads_BTc = whole_BTC[..., first : first + local_kv * size]
        heads = context.to_heads(own_NC, kv_heads, sequences)
        np.testing.assert_array_equal(heads, part.ring.select_tokens(heads_BTc).reshape(heads.shape))
        np.testing.assert_array_equal(context.to_tokens(heads, kv_heads, sequences), copies * own_NC)
        keys = np.empty((sequences * length, local_kv * size), np.float32)
        context.gather_keys(heads, keys, sequences)
        np.testing.assert_array_equal(keys, heads_BTc.reshape(keys.shape))
        members = ranks // ulysses
        sums = context.reduce_keys(keys * np.float32(1 + part.ring.rank), sequences)
        np.testing.assert_allclose(sums, heads * (members * (members + 1) // 2), rtol=FEW_OPERATIONS)

    on_groups(ranks, work)
