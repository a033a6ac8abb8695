"""The order of sequences, ranks, resuming, the last batch and the background thread."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from trainer.data.batches.batch import IGNORE_INDEX, Batch, padding_batch
from trainer.data.batches.loader import BatchLoader, epoch_order
from trainer.data.source.synthetic import SyntheticDataset
from trainer.errors import UserError


class NumberedSequences:
    """Rows that hold nothing but their own number; remembers which were asked for."""

    seq_length = 3
    max_token_id = 10**6
    num_documents = 1

    def __init__(self, num_sequences: int, fail_at: int | None = None) -> None:
        self.num_sequences = num_sequences
        self.num_tokens = 3 * num_sequences
        self.fail_at = fail_at
        self.asked: list[list[int]] = []

    def padding(self, size: int) -> Batch:
        return padding_batch(size, self.seq_length)

    def batch(self, indices) -> Batch:
        self.asked.append(np.asarray(indices).tolist())
        if self.fail_at is not None and len(self.asked) > self.fail_at:
            raise OSError("the disk fell out")
        column = np.repeat(np.asarray(indices, np.int32)[:, None], 3, axis=1)
        return Batch(column, column, column, column)


def loader_of(dataset, **changes) -> BatchLoader:
    settings = {"batch_size": 4, "shuffle": True, "seed": 1, "drop_remainder": True, "prefetch_size": 2, **changes}
    return BatchLoader(dataset, **settings)


def numbers(batches) -> list[list[int]]:
    return [batch.input_ids[:, 0].tolist() for batch in batches]


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batch-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert prefetch_threads() == []


def test_an_epoch_takes_every_sequence_once():
    loader = loader_of(NumberedSequences(20))
    assert loader.batches_per_epoch == 5
    batches = numbers(loader.epoch(0))
    assert sorted(sum(batches, [])) == list(range(20)) and sum(batches, []) != list(range(20))


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return numbers(loader_of(NumberedSequences(20), seed=seed).epoch(epoch))

    assert order(1, 0) == order(1, 0)
    assert len({str(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6
    assert (
        epoch_order(NumberedSequences(20), shuffle=True, seed=2**70 + 1, epoch=0).tolist()
        == epoch_order(NumberedSequences(20), shuffle=True, seed=2**70 % 2**64 + 1, epoch=0).tolist()
    ), "any seed will do"


def philox(key: tuple[int, int], counter: list[int]) -> list[int]:
    """Computes one block of Philox4x64-10, written out from the paper (Salmon et al., 2011)."""
    low, high = key
    a, b, c, d = counter
    for _ in range(10):
        left, right = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = right >> 64 ^ b ^ low, right % 2**64, left >> 64 ^ d ^ high, left % 2**64
        low, high = (low + 0x9E3779B97F4A7C15) % 2**64, (high + 0xBB67AE8584CAA73B) % 2**64
    return [a, b, c, d]


@pytest.mark.parametrize(("seed", "epoch"), [(1, 0), (1, 1), (2**63 + 5, 7)])
def test_the_order_stays_the_same_in_every_version(seed, epoch):
    """A checkpoint stores only a position in the order: another order would repeat and lose sequences on resuming."""
    order_stream = 2
    blocks = [philox((seed, order_stream), [block, epoch, 0, 0]) for block in range(1, 4)]
    bits = sum(blocks, [])[:10]
    dataset = NumberedSequences(10)
    assert epoch_order(dataset, shuffle=True, seed=seed, epoch=epoch).tolist() == sorted(
        range(10), key=bits.__getitem__
    )


def test_without_shuffling_sequences_keep_their_order():
    loader = loader_of(NumberedSequences(8), shuffle=False)
    assert numbers(loader.epoch(0)) == numbers(loader.epoch(1)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("start", [0, 1, 3, 5])
def test_resuming_in_the_second_epoch_gives_the_same_batches_and_reads_no_others(start):
    dataset = NumberedSequences(20)
    every = numbers(loader_of(NumberedSequences(20)).epoch(1))
    assert numbers(loader_of(dataset).epoch(1, start)) == every[start:]
    assert dataset.asked == every[start:]


def test_resuming_real_data_gives_the_same_arrays():
    def loader():
        return loader_of(SyntheticDataset(22, 16, 100, seed=3), drop_remainder=False)

    first = list(loader().epoch(1))
    again = list(loader().epoch(1, 2))
    assert len(first) == 6 and len(again) == 4
    for left, right in zip(first[2:], again, strict=True):
        assert all((a == b).all() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("num_sequences", [24, 25, 29, 35])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_every_batch(ranks, num_sequences, drop_remainder):
    settings = {"drop_remainder": drop_remainder, "ranks": ranks}
    parts = [list(loader_of(NumberedSequences(num_sequences), **settings, rank=rank).epoch(0)) for rank in range(ranks)]
    alone = loader_of(NumberedSequences(num_sequences), drop_remainder=drop_remainder, batch_size=4 * ranks)
    whole = list(alone.epoch(0))
    assert {len(part) for part in parts} == {len(whole)}
    for index, batch in enumerate(whole):
        joined = [np.concatenate(arrays) for arrays in zip(*(part[index] for part in parts), strict=True)]
        assert all((a == b).all() for a, b in zip(joined, batch, strict=True))
    seen = [int(row) for part in parts for batch in part for row in batch.labels[:, 0] if row != IGNORE_INDEX]
    assert len(seen) == len(set(seen))
    assert len(seen) == (num_sequences // (4 * ranks) * 4 * ranks if drop_remainder else num_sequences)


def test_the_last_batch_is_filled_up_with_padding_without_loss():
    loader = loader_of(SyntheticDataset(5, 6, 100, seed=1), drop_remainder=False, shuffle=False)
    assert loader.batches_per_epoch == 2
    last = list(loader.epoch(0))[1]
    assert all(array.shape == (4, 6) and array.dtype == np.int32 and array.flags.c_contiguous for array in last)
    assert (last.labels[0] != IGNORE_INDEX).all() and (last.labels[1:] == IGNORE_INDEX).all()
    assert not last.input_ids[1:].any() and (last.positions == np.arange(6)).all() and not last.segment_ids.any()


@pytest.mark.parametrize(("ranks", "words"), [(1, "3 sequences do not fill one batch"), (2, "for each of 2 ranks")])
def test_a_data_set_without_one_batch_is_an_error(ranks, words):
    with pytest.raises(UserError, match=words) as caught:
        loader_of(NumberedSequences(3), ranks=ranks)
    assert "batch_size = 4" in str(caught.value) and "Fix: " in str(caught.value)
    assert loader_of(NumberedSequences(3), drop_remainder=False, ranks=ranks).batches_per_epoch == 1


# The thread


def test_nothing_is_read_before_the_first_batch():
    dataset = NumberedSequences(20)
    batches = loader_of(dataset).epoch(0)
    time.sleep(0.05)
    assert dataset.asked == [] and prefetch_threads() == []
    batches.close()


@pytest.mark.parametrize("prefetch_size", [1, 2, 4])
def test_only_so_many_batches_are_prepared_ahead(prefetch_size):
    dataset = NumberedSequences(400)
    batches = loader_of(dataset, prefetch_size=prefetch_size).epoch(0)
    next(batches)
    deadline = time.monotonic() + 5
    while len(dataset.asked) < prefetch_size + 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    # One is out, `prefetch_size` wait, and one is in the thread's hand.
    assert len(dataset.asked) == prefetch_size + 2
    batches.close()


@pytest.mark.parametrize("taken", [1, 2, 5])
@pytest.mark.parametrize("prefetch_size", [1, 3])
def test_closing_ends_the_thread(taken, prefetch_size):
    for _ in range(50):
        batches = loader_of(NumberedSequences(20), prefetch_size=prefetch_size).epoch(0)
        for _ in range(taken):
            next(batches)
        batches.close()
        assert prefetch_threads() == []


def test_leaving_a_loop_ends_the_thread():
    for _ in loader_of(NumberedSequences(400)).epoch(0):
        break
    gc.collect()
    assert prefetch_threads() == []


def test_an_error_in_the_thread_is_raised_at_its_batch():
    batches = loader_of(NumberedSequences(20, fail_at=2)).epoch(0)
    next(batches)
    next(batches)
    with pytest.raises(OSError, match="the disk fell out") as caught:
        next(batches)
    assert any(entry.name == "batch" for entry in caught.traceback), "the traceback leads to where it happened"
    assert prefetch_threads() == []
    with pytest.raises(StopIteration):
        next(batches)


def test_epochs_can_overlap():
    loader = loader_of(NumberedSequences(20))
    first, second = loader.epoch(0), loader.epoch(1)
    mixed = [batch for pair in zip(first, second, strict=True) for batch in pair]
    assert numbers(mixed[::2]) == numbers(loader.epoch(0)) and numbers(mixed[1::2]) == numbers(loader.epoch(1))
