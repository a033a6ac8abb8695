"""Memory for large arrays that a later array takes again.

NumPy gives the memory of a large array back to the system, which makes and clears new pages for the next one: with them
a product takes a tenth longer. MindSpore's pool keeps memory, but a tensor of it takes 60 us, because MindSpore's code
is in no cache, and the other threads wait: two percent of a step.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import mmap
import threading
from collections import deque

import numpy as np

_CHUNK = 1 << 28  # bytes that the system is asked for at least: it makes only the pages that are used
_ALIGNED = 512  # bytes


class _Block:
    """The memory of one array; the array and its views keep it and the arena alive."""

    __slots__ = ("__array_interface__", "arena", "size", "start")

    def __init__(self, arena: Arena, start: int, size: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.arena = arena
        self.start = start
        self.size = size
        self.__array_interface__ = {"data": (start, False), "shape": shape, "typestr": dtype.str, "version": 3}

    def __del__(self) -> None:
        # The garbage collector may run this anywhere, even inside `Arena.empty`: it takes no lock.
        self.arena.ended.append((self.start, self.size))


class Arena:
    """Makes arrays in the smallest free block that has room for them; free blocks that touch become one.

    Source: Knuth 1997, The Art of Computer Programming, volume 1, section 2.5 (best fit).

    Args:
        size: Bytes of address space to begin with. If they are enough, the largest block is the one that nothing has
            touched, and freed memory is taken before it (`trainer.device.pool`).
    """

    def __init__(self, size: int = 0) -> None:
        self.least_chunk = max(size, _CHUNK)
        self.by_size: list[tuple[int, int]] = []  # (size, start) of the free blocks, sorted
        self.sizes: dict[int, int] = {}  # of the free blocks, by start
        self.starts: dict[int, int] = {}  # of the free blocks, by end
        self.ended: deque[tuple[int, int]] = deque()  # (start, size) of blocks whose arrays are gone
        self.chunks: list[mmap.mmap] = []
        self.lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an uninitialised array of at least one element. Several threads may call it.

        Raises:
            OSError: The system has no memory left.
        """
        size = -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED
        with self.lock:
            while self.ended:
                self._free(*self.ended.popleft())
            start = self._take(size)
        return np.asarray(_Block(self, start, size, shape, dtype))

    def _take(self, size: int) -> int:
        """Returns the start of a block of this size, which is no longer free."""
        place = bisect.bisect_left(self.by_size, (size, 0))
        if place == len(self.by_size):
            self._add_chunk(max(size, self.least_chunk))
            self.least_chunk = _CHUNK
            return self._take(size)
        available, start = self.by_size[place]
        self._remove(start, available)
        if available > size:
            self._insert(start + size, available - size)
        return start

    def _free(self, start: int, size: int) -> None:
        """Adds a block to the free ones, together with those before and after it."""
        if (following := self.sizes.get(start + size)) is not None:
            self._remove(start + size, following)
            size += following
        if (before := self.starts.get(start)) is not None:
            self._remove(before, start - before)
            size += start - before
            start = before
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self.by_size, (size, start))
        self.sizes[start] = size
        self.starts[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self.by_size[bisect.bisect_left(self.by_size, (size, start))]
        del self.sizes[start]
        del self.starts[start + size]

    def _add_chunk(self, size: int) -> None:
        """Takes memory from the system, in huge pages where it has them: they cost few page faults."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        chunk = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # Linux without huge pages
                chunk.madvise(mmap.MADV_HUGEPAGE)
        self.chunks.append(chunk)
        self._free(np.frombuffer(chunk, np.uint8).ctypes.data, size)
