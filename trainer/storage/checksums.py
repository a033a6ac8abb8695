"""Checksums of files: BLAKE2b of blocks, computed in threads, so that several cores keep up with a fast disk.

A file's checksum is BLAKE2b over the digests of its blocks, one after the other. Each digest has 128 bits, which finds
every error of a disk or a copy; it is no protection against a person who can also write the checksum.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 16
DIGEST_PATTERN = r"^[0-9a-f]{32}$"
_MOST_THREADS = 8


def digest(*pieces: bytes | memoryview) -> bytes:
    """BLAKE2b of the pieces, one after the other; Python's lock is free meanwhile."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in pieces:
        found.update(piece)
    return found.digest()


def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), thread_name_prefix="checksum")


class RunningChecksum:
    """The checksum of bytes that are given in order while they are written; use it in a `with`.

    It keeps what it is given until a thread has read it, at most a few blocks behind.
    """

    def __init__(self) -> None:
        self._pool, self._digests = threads(), []
        self._pieces: list[memoryview] = []
        self._left = BLOCK_BYTES  # of the current block
        self._pending: deque[Future[bytes]] = deque()

    def __enter__(self) -> RunningChecksum:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, data: bytes | memoryview) -> None:
        """`data` must not change before `hexdigest`."""
        view = memoryview(data)
        while len(view) >= self._left:
            self._pieces.append(view[: self._left])
            view = view[self._left :]
            self._submit()
        if len(view):
            self._pieces.append(view)
            self._left -= len(view)

    def hexdigest(self) -> str:
        """Of all that was added, after which nothing may be."""
        if self._pieces:
            self._submit()
        while self._pending:
            self._digests.append(self._pending.popleft().result())
        return digest(*self._digests).hex()

    def _submit(self) -> None:
        self._pending.append(self._pool.submit(digest, *self._pieces))
        self._pieces, self._left = [], BLOCK_BYTES
        while len(self._pending) > 2 * _MOST_THREADS:
            self._digests.append(self._pending.popleft().result())


def checksum_of_bytes(content: bytes) -> str:
    """The checksum that a file with this content has."""
    blocks = (content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES))
    return digest(*map(digest, blocks)).hex()


def checksum_of_file(path: Path) -> str:
    """The checksum of a file, read in threads.

    Raises:
        OSError: It cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size

        def block(start: int) -> bytes:
            return digest(_read_whole(descriptor, min(BLOCK_BYTES, size - start), start))

        if size <= BLOCK_BYTES:
            return digest(block(0)).hex() if size else digest().hex()
        with threads() as pool:
            return digest(*pool.map(block, range(0, size, BLOCK_BYTES))).hex()
    finally:
        os.close(descriptor)


def _read_whole(descriptor: int, size: int, start: int) -> bytes:
    """The bytes at `start`; fewer only where the file has become shorter."""
    parts: list[bytes] = []
    while size > 0 and (part := os.pread(descriptor, size, start)):
        parts.append(part)
        size, start = size - len(part), start + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


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
        return digest(self._content[start : start + self.PAGE_BYTES].data) == self._digests[page].tobytes()


def page_digests(path: Path) -> Iterator[bytes]:
    """The digests of a file's pages, for `PageChecks`."""
    with path.open("rb") as file:
        while page := file.read(PageChecks.PAGE_BYTES):
            yield digest(page)
