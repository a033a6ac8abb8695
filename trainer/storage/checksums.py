"""Checksums of files: XXH3 with 128 bits, the hash of xxHash, which is faster than any disk.

`xxhsum -H2` prints the same. It finds every error of a disk or a copy; it is no protection against a person who can
also write the checksum.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

DIGEST_BYTES = 16
DIGEST_PATTERN = r"^[0-9a-f]{32}$"
_BLOCK_BYTES = 1 << 20
_THREADS = 4  # a disk of a server answers several requests at once

PART_BYTES = 64 << 20
"""A larger file has a checksum for each of its parts of this size, too: ranks check some of them each."""


class FileChecksum(NamedTuple):
    """Of a whole file, and of its parts where it is larger than one."""

    whole: str
    parts: Sequence[str] = ()


class RunningChecksum:
    """The checksum of a file whose bytes are given one after the other."""

    def __init__(self) -> None:
        self._whole, self._part, self._left = xxhash.xxh3_128(), xxhash.xxh3_128(), PART_BYTES
        self._parts: list[str] = []

    def update(self, data: bytes | memoryview) -> None:
        self._whole.update(data)
        view = memoryview(data)
        while len(view):
            if not self._left:
                self._end_part()
            own = view[: self._left]
            self._part.update(own)
            self._left -= len(own)
            view = view[len(own) :]

    def result(self) -> FileChecksum:
        return FileChecksum(self._whole.hexdigest(), (*self._parts, self._part.hexdigest()) if self._parts else ())

    def _end_part(self) -> None:
        self._parts.append(self._part.hexdigest())
        self._part, self._left = xxhash.xxh3_128(), PART_BYTES


def checksum_of_bytes(content: bytes) -> str:
    """The checksum that a file with this content has."""
    return xxhash.xxh3_128_hexdigest(content)


def parts_of_size(size: int) -> int:
    """How many parts a file of `size` bytes has."""
    return max(1, -(-size // PART_BYTES))


def checksum_of_file(path: Path, part: int | None = None) -> str:
    """The checksum of a file, or of one of its parts.

    Raises:
        OSError: It cannot be read.
    """
    found = xxhash.xxh3_128()
    if part is None:
        read_blocks(path, found.update)
    else:
        read_blocks(path, found.update, part * PART_BYTES, (part + 1) * PART_BYTES)
    return found.hexdigest()


def read_blocks(path: Path, take: Callable[[memoryview], None], start: int = 0, stop: int | None = None) -> None:
    """Gives a file's bytes from `start` to `stop`, or to its end, block by block; threads read a few blocks ahead.

    Raises:
        OSError: It cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        end = size if stop is None else min(size, stop)
        if end - start <= _BLOCK_BYTES:
            take(_read_block(descriptor, start, bytearray(max(0, end - start))))
            return
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="checksum") as pool:
            free = [bytearray(_BLOCK_BYTES) for _ in range(2 * _THREADS)]
            reading: deque = deque()
            for at in range(start, end, _BLOCK_BYTES):
                if not free:
                    future, buffer = reading.popleft()
                    take(future.result())
                    free.append(buffer)
                buffer = free.pop()
                reading.append((pool.submit(_read_block, descriptor, at, memoryview(buffer)[: end - at]), buffer))
            for future, _ in reading:
                take(future.result())
    finally:
        os.close(descriptor)


def _read_block(descriptor: int, start: int, buffer: bytearray | memoryview) -> memoryview:
    """Fills the buffer with the bytes at `start`; returns those that the file has."""
    view, filled = memoryview(buffer), 0
    while filled < len(view) and (count := os.preadv(descriptor, [view[filled:]], start + filled)):
        filled += count
    return view[:filled]


class PageChecks:
    """Digests of the pages of a memory-mapped file, each of which is checked once, before it is first used.

    Args:
        content: uint8 [bytes], the file.
        digests: uint8 [pages, DIGEST_BYTES], see `page_digests`.
    """

    PAGE_BYTES = 64 << 10

    def __init__(self, content: np.ndarray, digests: np.ndarray) -> None:
        self._content, self._digests = content, digests
        self._is_checked = np.zeros(len(digests), bool)

    @classmethod
    def count(cls, size: int) -> int:
        """Pages of a file of `size` bytes."""
        return -(-size // cls.PAGE_BYTES)

    def damaged(self, starts: np.ndarray, ends: np.ndarray) -> int | None:
        """The first byte of a damaged page among these ranges of bytes; None where all are whole."""
        first, last = starts // self.PAGE_BYTES, -(-ends // self.PAGE_BYTES)
        # Almost always everything is checked already: a look at both ends of the ranges, which are short, says so.
        if self._is_checked[first].all() and self._is_checked[last - 1].all() and (last - first <= 2).all():
            return None
        for begin, end in zip(first.tolist(), last.tolist(), strict=True):
            for page in range(begin, end):
                if not self._is_checked[page] and not self._is_whole(page):
                    return page * self.PAGE_BYTES
                self._is_checked[page] = True
        return None

    def _is_whole(self, page: int) -> bool:
        start = page * self.PAGE_BYTES
        return xxhash.xxh3_128_digest(self._content[start : start + self.PAGE_BYTES]) == self._digests[page].tobytes()


def page_digests(path: Path) -> Iterator[bytes]:
    """The digests of a file's pages, for `PageChecks`."""
    with path.open("rb") as file:
        while page := file.read(PageChecks.PAGE_BYTES):
            yield xxhash.xxh3_128_digest(page)
