"""Memory of large arrays (`trainer.arrays.arena`)."""

from __future__ import annotations

import gc
import random
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from trainer.arrays.arena import Arena

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
BYTES = 1 << 26
FLOAT32 = np.dtype(np.float32)
SHAPE = 300, 200


def start_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.skipif(
    not MODES.exists() or "[never]" in MODES.read_text(), reason="this system has no transparent huge pages"
)
def test_a_large_array_costs_few_page_faults() -> None:
    array = Arena().empty((BYTES // 4,), FLOAT32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    array.fill(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < BYTES // resource.getpagesize() // 2


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_an_array_has_the_shape_and_the_dtype(dtype: type) -> None:
    array = Arena().empty((3, 5, 7), np.dtype(dtype))
    assert array.shape == (3, 5, 7) and array.dtype == dtype
    assert array.flags.c_contiguous and array.flags.writeable and not start_of(array) % 512


def test_the_next_array_has_the_memory_of_one_that_is_gone() -> None:
    arena = Arena()
    first = arena.empty(SHAPE, FLOAT32)
    second = arena.empty(SHAPE, FLOAT32)
    start = start_of(first)
    assert not np.shares_memory(first, second)
    del first
    assert start_of(arena.empty(SHAPE, FLOAT32)) == start


def test_a_view_keeps_the_memory_of_its_array() -> None:
    arena = Arena()
    array = arena.empty(SHAPE, FLOAT32)
    array.fill(3)
    view = array.reshape(-1)[7:900:2].view(np.uint32)
    start = start_of(array)
    del array
    gc.collect()
    others = [arena.empty(SHAPE, FLOAT32) for _ in range(3)]
    for other in others:
        other.fill(4)
    assert (view.view(np.float32) == 3).all()
    del view
    assert start_of(arena.empty(SHAPE, FLOAT32)) == start


def test_neighbours_that_are_gone_make_room_for_a_larger_array() -> None:
    arena = Arena()
    arrays = [arena.empty((1 << 18,), FLOAT32) for _ in range(5)]
    starts = [start_of(array) for array in arrays]
    for gone in (1, 3, 2):
        arrays[gone] = arrays[0]
    larger = arena.empty((3 << 18,), FLOAT32)
    assert start_of(larger) == starts[1] and len(arena.chunks) == 1


def test_the_smallest_block_that_has_room_is_taken() -> None:
    arena = Arena()
    arrays = [arena.empty((size,), FLOAT32) for size in (9000, 200, 5000, 200, 7000, 200)]
    starts = [start_of(array) for array in arrays]
    for gone in (0, 2, 4):
        arrays[gone] = arrays[1]
    assert start_of(arena.empty((4990,), FLOAT32)) == starts[2]


def test_arrays_that_come_and_go_take_no_more_memory_and_share_none() -> None:
    """A thousand arrays of random sizes, in two threads: each keeps its numbers until its end."""
    arena = Arena()
    wrong = []

    def work(thread: int) -> None:
        draw = random.Random(thread)
        kept: list[tuple[int, np.ndarray]] = []
        for number in range(500):
            array = arena.empty((draw.randrange(1, 1 << 17),), FLOAT32)
            array.fill(1000 * thread + number)
            kept.append((1000 * thread + number, array))
            if len(kept) > 20:
                value, array = kept.pop(draw.randrange(len(kept)))
                wrong.extend(array[array != value])

    threads = [threading.Thread(target=work, args=(thread,)) for thread in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    everything = arena.empty((1 << 26,), FLOAT32)  # a chunk: all blocks are free again, and one
    assert len(arena.chunks) == 1 and everything.nbytes == 1 << 28


def test_freed_memory_is_taken_before_what_nothing_has_touched() -> None:
    """In one block of address space, unlike in chunks: an array that fits into both would take the smaller one."""
    arena = Arena(1 << 31)
    arrays = [arena.empty((size,), FLOAT32) for size in (250 << 18, 100 << 18, 1)]
    start = start_of(arrays[1])
    arrays[1] = arrays[2]
    assert start_of(arena.empty((20 << 18,), FLOAT32)) == start and len(arena.chunks) == 1


def test_more_than_a_chunk_has_memory_of_its_own() -> None:
    arena = Arena()
    arrays = [arena.empty((1 << 26,), FLOAT32) for _ in range(2)]
    assert len(arena.chunks) == 2 and not np.shares_memory(*arrays)
