"""Collectives of NumPy arrays over sockets, with threads as ranks, against NumPy."""

from __future__ import annotations

import mmap
import socket
import time

import numpy as np
import pytest
from thread_ranks import ThreadRank, on_groups, on_ranks

from trainer.errors import RunError
from trainer.parallel import connections
from trainer.parallel.connections import Connections
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.sharding import shard_range


def arrays_of(ranks: int, shape: tuple[int, ...], dtype: type = np.float32) -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [np.asarray(draw.normal(size=shape) * 100).astype(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (300, 301)], ids=str)  # the last one is summed in parts
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_gathers_and_broadcasts(ranks: int, shape: tuple[int, ...], dtype: type) -> None:
    given = arrays_of(ranks, shape, dtype)

    def work(group: CpuGroup) -> list[np.ndarray]:
        own = given[group.rank]
        sums = [group.all_reduce(own), group.all_gather(own), group.broadcast(own, ranks - 1)]
        into = own.copy(), np.empty_like(own)
        same = [group.all_reduce_into(into[0], into[0]), group.all_reduce_into(own, into[1])]
        assert all(ours is given for ours, given in zip(same, into, strict=True))
        return [*sums, *same]

    total = given[0].astype(np.float32 if dtype is np.float16 else dtype)
    for each in given[1:]:
        total += each  # in the order of the ranks, float16 in float32
    for found in on_groups(ranks, work):
        expected = [total.astype(dtype), np.stack(given), given[-1], *[total.astype(dtype)] * 2]
        for ours, right in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, right)
            assert ours.dtype == dtype


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter_gives_each_rank_its_rows(ranks: int) -> None:
    given = arrays_of(ranks, (ranks * 4, 5))
    odd = [array.reshape(-1)[:-1] for array in given]  # ranges of unequal length

    def work(group: CpuGroup) -> tuple[np.ndarray, list[np.ndarray]]:
        own = group.reduce_scatter_range(odd[group.rank])
        flats = [np.full(size, np.nan, np.float32) for size in (odd[0].size, ranks + 1)]
        for flat, part in zip(flats, (own, group.rank), strict=True):
            flat[shard_range(flat.size, group.rank, ranks)] = part
        group.complete_ranges(flats)
        return group.reduce_scatter(given[group.rank]), flats

    total = given[0].copy()
    for each in given[1:]:
        total += each
    found = on_groups(ranks, work)
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in found]), total)
    for _, (sums, numbers) in found:
        np.testing.assert_array_equal(sums, total.reshape(-1)[:-1])
        assert numbers.tolist() == sorted(numbers) and set(numbers) == set(range(ranks))


def test_an_all_to_all_with_unequal_parts_and_none() -> None:
    rows = [[3, 0, 2], [1, 4, 0], [0, 0, 5]]  # from rank, to rank
    sent = [[np.full((count, 2), 10 * source + to) for to, count in enumerate(counts)] for source, counts in
            enumerate(rows)]  # fmt: skip

    def work(group: CpuGroup) -> list[np.ndarray]:
        return group.all_to_all(sent[group.rank], [(rows[source][group.rank], 2) for source in range(3)])

    for rank, found in enumerate(on_groups(3, work)):
        for source, ours in enumerate(found):
            np.testing.assert_array_equal(ours, sent[source][rank])


def test_a_group_of_some_ranks_leaves_the_others_alone() -> None:
    def work(group: CpuGroup) -> float:
        pair = group.new_subgroup([0, 2] if group.rank % 2 == 0 else [1, 3])
        total = pair.all_reduce(np.array([float(group.rank)]))
        if group.rank in (0, 3):  # a message of 4 MB, more than a socket holds
            sent = np.full(1 << 20, 7.0 - group.rank, np.float32)
            assert (group.new_subgroup([0, 3]).broadcast(sent, 0) == 7).all()
        return float(total[0])

    assert on_groups(4, work) == [2.0, 4.0, 2.0, 4.0]


@pytest.mark.parametrize("on_one_host", [True, False], ids=["unix", "tcp"])
def test_bytes_of_any_length_arrive(on_one_host: bool) -> None:
    texts = [b"", b"first" * 100_000, b"x"]
    assert on_groups(3, lambda group: group.gather_bytes(texts[group.rank]), on_one_host) == [texts] * 3


def test_a_rank_that_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_NOTE_SECONDS", 0.0)

    def work(group: CpuGroup) -> None:
        if group.rank == 1:
            group.connections.close()
        else:
            with pytest.raises(RunError, match="rank 0 lost its connection to rank 1, which has ended"):
                group.all_reduce(np.ones(3))

    on_groups(2, work)


def test_a_stranger_does_not_become_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that does not know the key is dropped, while the ranks wait for each other."""
    strangers = []
    accept = socket.socket.listen

    def call_first(listening: socket.socket, backlog: int) -> None:
        accept(listening, backlog)
        if listening.family == socket.AF_INET:
            stranger = socket.create_connection(listening.getsockname())
            stranger.sendall((1).to_bytes(4, "big") + bytes(32))
            strangers.append(stranger)

    monkeypatch.setattr(socket.socket, "listen", call_first)
    assert on_groups(2, lambda group: int(group.all_reduce(np.array([1]))[0]), on_one_host=False) == [2, 2]
    assert len(strangers) >= 2
    for each in strangers:
        each.close()


@pytest.mark.parametrize("shares_memory", [False, True], ids=["socket", "memory"])
def test_connections_need_no_order_of_sending(shares_memory: bool) -> None:
    """Both ranks send more than a socket or a ring holds before either has received, in messages of many lengths."""
    ends, memory = socket.socketpair(), mmap.mmap(-1, 1 << 16) if shares_memory else None
    draw = np.random.default_rng(5)
    data = [[draw.bytes(length) for length in (8 << 20, 1, 0, 12_345, 1 << 15, 9_999, 77_777)] for _ in range(2)]

    def work(rank: ThreadRank) -> list[bytes]:
        other, memories = 1 - rank.rank, None if memory is None else {1 - rank.rank: memory}
        own, found = Connections(rank.rank, {other: ends[rank.rank]}, memories), []
        for number, part in enumerate(data[rank.rank]):
            if number == 3 and rank.rank:
                time.sleep(0.05)  # the other one is ahead: what it has sent waits
            found.append(bytearray(len(data[other][number])))
            if number % 2:
                own.exchange({other: [memoryview(part)]}, {})
                own.exchange({}, {other: [memoryview(found[-1])]})
            else:
                own.exchange({other: [memoryview(part)]}, {other: [memoryview(found[-1])]})
        return [bytes(each) for each in found]

    assert on_ranks(2, work) == [data[1], data[0]]


def test_the_other_end_of_shared_memory_is_told_when_this_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has sent before arrives; then the wait ends with an error, also where the ring is full."""
    monkeypatch.setattr(connections, "_NOTE_SECONDS", 0.0)
    ends, memory = socket.socketpair(), mmap.mmap(-1, 1 << 13)
    first, second = (Connections(rank, {1 - rank: ends[rank]}, {1 - rank: memory}) for rank in range(2))
    first.exchange({1: [memoryview(b"last words")]}, {})
    first.close()
    found = bytearray(10)
    second.exchange({}, {0: [memoryview(found)]})
    assert found == b"last words"
    with pytest.raises(RunError, match="rank 1 lost its connection to rank 0"):
        second.exchange({}, {0: [memoryview(found)]})
    with pytest.raises(RunError, match="rank 1 lost its connection to rank 0"):
        second.exchange({0: [memoryview(bytes(1 << 14))]}, {})


def test_without_shared_memory_of_the_system_the_sockets_carry_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_new_memory", lambda: None)

    def work(group: CpuGroup) -> tuple[float, int]:
        return float(group.all_reduce(np.ones(100_000)).sum()), len(group.connections.memories)

    assert on_groups(3, work) == [(300_000.0, 0)] * 3
