"""Checksums of files (XXH3 with 128 bits, the hash of xxHash, which is faster than any disk), and files on the disk.

`xxhsum -H2` prints the same checksums. They find every error of a disk or a copy. They do not protect against a person
who can also write the checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

DIGEST_BYTES = 16
DIGEST_PATTERN = r"^[0-9a-f]{32}$"
_BLOCK_BYTES = 1 << 20


def flush_to_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum_of_bytes(content: bytes) -> str:
    """Returns the checksum of a file with this content."""
    return xxhash.xxh3_128_hexdigest(content)


def checksum_of_file(path: Path) -> str:
    """Reads a file and returns its checksum.

    Raises:
        OSError: It cannot be read.
    """
    checksum = xxhash.xxh3_128()
    buffer = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(memoryview(buffer)[:count])
    return checksum.hexdigest()


class PageChecks:
    """Checks each page of a memory-mapped file once, before it is first used.

    Args:
        content: The file, uint8 [bytes].
        digests: The expected digests of its pages, uint8 [pages, DIGEST_BYTES], as `page_digests` computes them.
    """

    PAGE_BYTES = 64 << 10

    def __init__(self, content: np.ndarray, digests: np.ndarray) -> None:
        self._content = content
        self._digests = digests
        self._is_checked = np.zeros(len(digests), bool)

    @classmethod
    def count_pages(cls, size: int) -> int:
        """Returns the number of pages of a file of `size` bytes."""
        return -(-size // cls.PAGE_BYTES)

    def first_damaged_byte(self, starts: np.ndarray, ends: np.ndarray) -> int | None:
        """Returns the first byte of the first damaged page in these ranges of bytes, or None if all are intact."""
        first = starts // self.PAGE_BYTES
        last = -(-ends // self.PAGE_BYTES)
        # Almost always everything is checked already. A short range is, if both of its ends are.
        if self._is_checked[first].all() and self._is_checked[last - 1].all() and (last - first <= 2).all():
            return None
        for begin, end in zip(first.tolist(), last.tolist(), strict=True):
            for page in range(begin, end):
                if not self._is_checked[page] and not self._is_intact(page):
                    return page * self.PAGE_BYTES
                self._is_checked[page] = True
        return None

    def _is_intact(self, page: int) -> bool:
        start = page * self.PAGE_BYTES
        content = self._content[start : start + self.PAGE_BYTES].data
        return xxhash.xxh3_128_digest(content) == self._digests[page].tobytes()


def page_digests(path: Path) -> Iterator[bytes]:
    """Computes the digest of each page of a file, for `PageChecks`."""
    with path.open("rb") as file:
        while page := file.read(PageChecks.PAGE_BYTES):
            yield xxhash.xxh3_128_digest(page)
