"""Summaries of tensors: statistics, a checksum and a sketch, from which deviations follow without the tensors.

A sketch is a linear map from an array to a few numbers (a CountSketch; Charikar, Chen and Farach-Colton 2002). Each row
and column of the unsharded array has a bucket and a random sign, which depend on the size of the axis alone. An element
is added to the bucket of both, times both signs. So the squared norm of the difference of two sketches is an unbiased
estimate of that of the arrays, and the sketches of shards add up to that of the whole array. The rows and the columns
are cut into `CELLS` ranges each, as `shard_range` cuts them, and each pair of ranges has a sketch of its own: the
numbers of one rank can be compared where another record has no shards.

Legend: R rows, C columns of the unsharded array; r rows, c columns of a shard.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.parallel.sharding import ShardSpec, shard_range
from trainer.storage.bfloat16 import as_float32

CELLS = 8
BUCKETS = 8
_GROUPS = CELLS * BUCKETS
SKETCH_SIZE = CELLS * CELLS * BUCKETS
_CHUNK = 1 << 21  # numbers that are in memory at once


class Place(NamedTuple):
    """Which numbers of an unsharded matrix a rank has.

    Attributes:
        shape: R and C. A vector is one column; a stack of matrices has them one below the other.
        rows: Ranges of rows, ascending.
    """

    shape: tuple[int, int]
    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]

    @property
    def size(self) -> int:
        """Returns how many numbers these are."""
        return sum(stop - start for start, stop in self.rows) * (self.columns[1] - self.columns[0])

    @property
    def is_whole(self) -> bool:
        """Returns whether these are all numbers of the matrix."""
        return self.size == math.prod(self.shape)

    def row_indices(self) -> np.ndarray:
        """Returns the indices of the rows: int64 [r]."""
        return np.concatenate([np.arange(*each) for each in self.rows])

    def covered_cells(self) -> np.ndarray:
        """Returns which cells have numbers of this place only: bool [CELLS, CELLS]."""
        rows = np.zeros(CELLS, bool)
        for each in self.rows:
            rows |= _covered(self.shape[0], each)
        return np.logical_and.outer(rows, _covered(self.shape[1], self.columns))


def whole_place(shape: Sequence[int]) -> Place:
    """Returns the place of an unsharded array."""
    rows, columns = matrix_shape(shape)
    return Place((rows, columns), ((0, rows),), (0, columns))


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the rows and columns that stand for an array of any shape."""
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


def place_of_shard(spec: ShardSpec) -> Place:
    """Returns the place of a shard of a parameter, which is sharded along one axis, whole rows or columns of it."""
    shape = spec.global_shape
    start, local = spec.shard
    rows, columns = matrix_shape(shape)
    if len(shape) < 2:
        first = sum(start)  # a scalar has no axis
        return Place((rows, 1), ((first, first + math.prod(local)),), (0, 1))
    inner = math.prod(shape[1:-1])
    first = start[0] * inner
    return Place((rows, columns), ((first, first + local[0] * inner),), (start[-1], start[-1] + local[-1]))


def row_ranges(indices: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Returns ascending indices as ranges."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(indices, breaks) if len(part))


def cell_bounds(size: int) -> np.ndarray:
    """Returns where the cells of an axis begin, and its end: int64 [CELLS + 1]."""
    return np.array([shard_range(size, cell, CELLS).start for cell in range(CELLS)] + [size])


def _covered(size: int, each: tuple[int, int]) -> np.ndarray:
    bounds = cell_bounds(size)
    return (bounds[:-1] >= each[0]) & (bounds[1:] <= each[1]) & (bounds[1:] > bounds[:-1])


@dataclass(frozen=True)
class Summary:
    """What is known about the numbers of a tensor.

    Attributes:
        norm: The L2 norm; NaN where a number is not finite.
        checksum: CRC-32 of the numbers in float32; None where several shards were joined, or it is not known.
        sketch: float64 [CELLS, CELLS, BUCKETS]; None where it is not known.
    """

    size: int
    largest: float
    smallest: float
    mean: float
    norm: float
    checksum: int | None = None
    sketch: np.ndarray | None = None

    @property
    def is_finite(self) -> bool:
        """Returns whether all numbers are finite."""
        return math.isfinite(self.norm)


@functools.lru_cache(maxsize=256)
def _axis(size: int, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the group (cell and bucket) and the sign of each index of an axis. The stream of MT19937 is frozen."""
    random = np.random.RandomState((2 * size + axis) % (1 << 32))
    groups = (np.searchsorted(cell_bounds(size), np.arange(size), "right") - 1) * BUCKETS
    groups += random.randint(0, BUCKETS, size)
    return groups, random.randint(0, 2, size) * 2.0 - 1.0


def summarize(array: np.ndarray, place: Place) -> Summary:
    """Returns the summary of a shard, which is read in chunks: it may be larger than memory.

    Args:
        array: Numbers [r, c]; uint16 stands for bfloat16.
    """
    rows, row_signs = (each[place.row_indices()] for each in _axis(place.shape[0], 0))
    columns, column_signs = (each[slice(*place.columns)] for each in _axis(place.shape[1], 1))
    partial_GC = np.zeros((_GROUPS, len(columns)))
    checksum = 0
    largest = -math.inf
    smallest = math.inf
    total = 0.0
    squares = 0.0
    step = max(1, _CHUNK // max(1, len(columns)))
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), step):
            chunk = slice(start, min(start + step, len(rows)))
            numbers_rC = as_numbers(array[chunk])
            checksum = zlib.crc32(np.ascontiguousarray(numbers_rC).data, checksum)
            wide_rC = numbers_rC.astype(np.float64)
            largest = max(largest, float(wide_rC.max()))
            smallest = min(smallest, float(wide_rC.min()))
            total += float(wide_rC.sum())
            squares += float(np.vdot(wide_rC, wide_rC))
            order = np.argsort(rows[chunk], kind="stable")
            groups, starts = np.unique(rows[chunk][order], return_index=True)
            wide_rC *= row_signs[chunk, None]
            partial_GC[groups] += np.add.reduceat(wide_rC[order], starts, axis=0)
        signs_CG = np.zeros((len(columns), _GROUPS))
        signs_CG[np.arange(len(columns)), columns] = column_signs
        sketch = _fold(partial_GC @ signs_CG)
    norm = math.nan
    if math.isfinite(squares):
        norm = math.sqrt(squares)
    return Summary(place.size, largest, smallest, total / max(1, place.size), norm, checksum, sketch)


def as_numbers(array: np.ndarray) -> np.ndarray:
    """Returns numbers in float32; uint16 stands for bfloat16."""
    if array.dtype == np.uint16:
        return as_float32(np.asarray(array))
    return np.asarray(array, np.float32)


def _fold(groups_GG: np.ndarray) -> np.ndarray:
    """Returns the sketch from sums by the groups of rows and of columns: their buckets are added."""
    by_bucket = groups_GG.reshape(CELLS, BUCKETS, CELLS, BUCKETS)
    sketch = np.zeros((CELLS, CELLS, BUCKETS))
    for row_bucket in range(BUCKETS):
        for column_bucket in range(BUCKETS):
            bucket = (row_bucket + column_bucket) % BUCKETS
            sketch[:, :, bucket] += by_bucket[:, row_bucket, :, column_bucket]
    return sketch


def join_summaries(parts: Sequence[Summary]) -> Summary:
    """Returns the summary of a tensor from those of its parts, each number once."""
    if len(parts) == 1:
        return parts[0]
    size = sum(part.size for part in parts)
    sketch = None
    sketches = [part.sketch for part in parts if part.sketch is not None]
    if len(sketches) == len(parts):
        sketch = np.sum(sketches, axis=0)
    return Summary(
        size,
        max(part.largest for part in parts),
        min(part.smallest for part in parts),
        sum(part.mean * part.size for part in parts) / max(1, size),
        math.sqrt(sum(part.norm**2 for part in parts)),
        None,
        sketch,
    )


def deviation(ours: Summary, theirs: Summary, cells: np.ndarray | None = None) -> float:
    """Returns the norm of the difference of two tensors relative to the larger norm.

    Estimated from the sketches; without them a lower bound from the statistics, see `statistics_deviation`.

    Args:
        cells: Compare these cells only, bool [CELLS, CELLS]; both need sketches.
    """
    if cells is None and ours.checksum is not None and ours.checksum == theirs.checksum:
        return 0.0
    if not (ours.is_finite and theirs.is_finite):
        return math.inf
    if ours.sketch is None or theirs.sketch is None:
        return statistics_deviation(ours, theirs)
    norm = max(ours.norm, theirs.norm)
    a = ours.sketch
    b = theirs.sketch
    if cells is not None:
        a = a[cells]
        b = b[cells]
        norm = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    if not norm:
        return 0.0
    return float(np.linalg.norm(a - b)) / norm


def statistics_deviation(ours: Summary, theirs: Summary) -> float:
    """Returns a lower bound of the relative deviation of two tensors of n numbers, from their statistics.

    With d the difference: | |a| - |b| | <= |d| and sqrt(n) |mean a - mean b| <= |d|. The largest and the smallest
    number are not looked at: they depend on a single number, which rounding may change by far more than the norm.
    """
    norm = max(ours.norm, theirs.norm)
    if not norm:
        return 0.0
    of_norms = abs(ours.norm - theirs.norm)
    of_means = abs(ours.mean - theirs.mean) * math.sqrt(ours.size)
    return max(of_norms, of_means) / norm
