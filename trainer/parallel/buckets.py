"""How arrays are put together, or cut, to travel in pieces of a handy size. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar


class Sized(Protocol):
    """An array or tensor."""

    size: int


Array = TypeVar("Array", bound=Sized)
FLOAT32_BYTES = 4


class Piece(NamedTuple):
    """A range of an array, and the range of a chunk where it travels."""

    array: int
    """Its number."""
    source: slice
    """In the flattened array."""
    place: slice
    """In the chunk."""


def buckets(arrays: Sequence[Array], bucket_bytes: int) -> Iterator[list[Array]]:
    """Cuts a sequence of arrays into runs of up to so many bytes in float32; a larger array is a run of its own."""
    bucket, used = [], 0
    for array in arrays:
        size = FLOAT32_BYTES * array.size
        if bucket and used + size > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(array)
        used += size
    if bucket:
        yield bucket


def chunks(ranges: Sequence[slice], length: int, count: int) -> list[list[Piece]]:
    """Cuts ranges of arrays, one behind the other, into chunks of `length` numbers.

    Args:
        ranges: One of each array, with start and stop.
        length: Of every chunk; the last ones may stay partly or wholly empty.
        count: Number of chunks, enough for all ranges together.
    """
    found: list[list[Piece]] = [[] for _ in range(count)]
    at = 0  # position among all numbers
    for array, each in enumerate(ranges):
        start = each.start
        while start < each.stop:
            chunk, place = divmod(at, length)
            taken = min(each.stop - start, length - place)
            found[chunk].append(Piece(array, slice(start, start + taken), slice(place, place + taken)))
            start, at = start + taken, at + taken
    return found
