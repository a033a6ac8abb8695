"""Matrices in few bytes: bfloat16, int8 and NF4, with the numbers of blocks scaled by their largest absolute value.

A matrix is quantized flattened, in blocks of 64 numbers (Dettmers et al. 2023, QLoRA, section 3; blocks as in
bitsandbytes). With c the largest absolute value of a block, its numbers x become

=========  ======================================  =============================================  ===============
dtype      a number in memory                      is read as                                     bytes a number
=========  ======================================  =============================================  ===============
bfloat16   the upper half of the float32 number    that half                                      2
int8       round(127 x / c)                        that integer times c / 127                     1.06
nf4        the nearest of 16 quantiles of a        the quantile times c                           0.52
           normal distribution to x / c, 4 bits
=========  ======================================  =============================================  ===============

The c of NF4 are quantized themselves (double quantization): less their mean, in blocks of 256, to the nearest of 256
numbers with 8 bits, whose distances grow with their size. Quantized numbers are read as float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.storage.base_dtypes import BLOCK, SCALE_BLOCK, BaseDtype
from trainer.storage.bfloat16 import as_bfloat16

_CHUNK = 1 << 16  # numbers that are quantized or read at a time, a multiple of both blocks
_LEVELS = 127  # of int8, on each side of 0

NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""The values of NF4: those of QLoRA's appendix E."""


@dataclass(frozen=True)
class QuantizedArray:
    """A matrix, or stacked matrices, in few bytes.

    Attributes:
        codes: The numbers, flat: uint16 (bfloat16), int8, or uint8 with two numbers of NF4, the first in the upper
            half.
        scales: The c of the blocks: c / 127 in float32 of int8, uint8 of NF4; empty of bfloat16.
        scales_of_scales: Of NF4: float32, one for `SCALE_BLOCK` of `scales`.
        mean: Of NF4: the mean of the c.
    """

    dtype: BaseDtype
    shape: tuple[int, ...]
    codes: np.ndarray
    scales: np.ndarray
    scales_of_scales: np.ndarray
    mean: np.float32

    @property
    def size(self) -> int:
        """Returns how many numbers the matrix has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the bytes in memory."""
        return sum(array.nbytes for array in self.arrays())

    def arrays(self) -> Iterator[np.ndarray]:
        """Yields the arrays that hold the numbers."""
        yield from (self.codes, self.scales, self.scales_of_scales)

    def read(self, first: int, out: np.ndarray) -> None:
        """Writes the numbers from place `first` of the flattened matrix, a multiple of `BLOCK`, to a flat array."""
        numbers = slice(first, first + out.size)
        if self.dtype == "bfloat16":
            np.left_shift(self.codes[numbers], 16, out=out.view(np.uint32), dtype=np.uint32)
            return
        if self.dtype == "int8":
            out[...] = self.codes[numbers]
        else:
            _look_up_pairs(self.codes[first // 2 : -(-numbers.stop // 2)], out)
        _scale_blocks(out, self.read_scales(slice(first // BLOCK, -(-numbers.stop // BLOCK))))

    def read_scales(self, blocks: slice) -> np.ndarray:
        """Returns the float32 numbers that some blocks are multiplied by."""
        if self.dtype == "int8":
            return self.scales[blocks]
        of_scales = self.scales_of_scales[np.arange(blocks.start, blocks.stop) // SCALE_BLOCK]
        return dynamic_values()[self.scales[blocks]] * of_scales + self.mean

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        numbers = np.empty(self.size, np.float32)
        self.read(0, numbers)
        return numbers.reshape(self.shape).astype(dtype or np.float32, copy=False)


def quantize(array: np.ndarray, dtype: BaseDtype) -> QuantizedArray:
    """Returns an array of float32 numbers in few bytes, rounded to the nearest that the dtype has."""
    flat = np.ascontiguousarray(array, np.float32).reshape(-1)
    none = np.empty(0, np.float32)
    if dtype == "bfloat16":
        codes = np.empty(flat.size, np.uint16)
        for part in _chunks(flat.size):
            codes[part] = as_bfloat16(flat[part])
        return QuantizedArray(dtype, array.shape, codes, none, none, np.float32(0))
    largest = np.empty(-(-flat.size // BLOCK), np.float32)
    for part in _chunks(flat.size):
        largest[part.start // BLOCK : -(-part.stop // BLOCK)] = _largest(flat[part], BLOCK)
    if dtype == "int8":
        codes = np.empty(flat.size, np.int8)
        for part, blocks in _scaled_chunks(flat, largest):
            codes[part] = np.rint(blocks * np.float32(_LEVELS))
        return QuantizedArray(dtype, array.shape, codes, largest / np.float32(_LEVELS), none, np.float32(0))
    codes = np.empty(-(-flat.size // 2), np.uint8)
    for part, blocks in _scaled_chunks(flat, largest):
        codes[part.start // 2 : -(-part.stop // 2)] = _pairs(_nearest_of_few(NF4, blocks))
    mean = largest.mean(dtype=np.float32)
    scales, scales_of_scales = quantize_dynamic(largest - mean)
    return QuantizedArray(dtype, array.shape, codes, scales, scales_of_scales, mean)


class FrozenMatrix:
    """A matrix of a frozen base model, in the place of a parameter of MindSpore; only native CPU layers read it.

    Args:
        draw: Returns the float32 numbers that the matrix has until `set`; called when they are first needed.
    """

    requires_grad = False

    def __init__(self, name: str, shape: tuple[int, ...], dtype: BaseDtype, draw: Callable[[], np.ndarray]) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.draw = draw
        self._numbers: QuantizedArray | None = None

    @property
    def size(self) -> int:
        """Returns how many numbers the matrix has."""
        return math.prod(self.shape)

    @property
    def numbers(self) -> QuantizedArray:
        """Returns the matrix in few bytes."""
        if self._numbers is None:
            self._numbers = quantize(self.draw(), self.dtype)
        return self._numbers

    def set(self, numbers: QuantizedArray | np.ndarray) -> None:
        """Takes other numbers, which are quantized if they are float32."""
        if isinstance(numbers, np.ndarray):
            numbers = quantize(numbers, self.dtype)
        self._numbers = numbers

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numbers, dtype)


def quantize_dynamic(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns places in `dynamic_values` of numbers in blocks of 256, and the largest absolute value of each block."""
    largest = _largest(numbers, SCALE_BLOCK)
    scaled = _multiply_blocks(numbers, _inverse(largest), SCALE_BLOCK)
    return _nearest(dynamic_values(), scaled), largest


@functools.cache
def dynamic_values() -> np.ndarray:
    """Returns the 256 float32 numbers of 8 bits in ascending order (Dettmers 2015, 8-bit approximations, section 2).

    Each sign has 7 powers of ten, from 1e-6 to 1. The one with exponent -e is followed by 2^(6 - e) means of an even
    division of [0.1, 1]. There are also 0 and 1.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = np.linspace(0.1, 1, (1 << exponent) + 1)
        means = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (exponent - 6)
        values += [*means, *-means]
    return np.sort(np.array(values)).astype(np.float32)


def _chunks(size: int) -> Iterator[slice]:
    for first in range(0, size, _CHUNK):
        yield slice(first, min(size, first + _CHUNK))


def _scaled_chunks(flat: np.ndarray, largest: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields chunks of numbers, each divided by the largest of its block."""
    for part in _chunks(flat.size):
        inverse = _inverse(largest[part.start // BLOCK : -(-part.stop // BLOCK)])
        yield part, _multiply_blocks(flat[part], inverse, BLOCK)


def _largest(flat: np.ndarray, block: int) -> np.ndarray:
    """Returns the largest absolute value of each block; the last block may be shorter."""
    return np.maximum.reduceat(np.abs(flat), np.arange(0, flat.size, block))


def _inverse(largest: np.ndarray) -> np.ndarray:
    """Returns 1 / c, and 0 for blocks of zeros, or of numbers so small that float32 has no inverse of them."""
    return np.divide(1, largest, out=np.zeros_like(largest), where=largest >= np.finfo(np.float32).tiny)


def _multiply_blocks(flat: np.ndarray, factors: np.ndarray, block: int) -> np.ndarray:
    return flat * np.repeat(factors, block)[: flat.size]


def _scale_blocks(out: np.ndarray, scales: np.ndarray) -> None:
    """Multiplies blocks of `BLOCK` numbers in place; the last one may be shorter."""
    full = out.size // BLOCK
    blocks = out[: full * BLOCK].reshape(full, BLOCK)
    blocks *= scales[:full, None]
    out[full * BLOCK :] *= scales[full:].sum()


def _nearest(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the place of the nearest of ascending values, of two equally near ones the smaller, as uint8."""
    return np.searchsorted(_middles(values), numbers).astype(np.uint8)


def _nearest_of_few(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns what `_nearest` does; for 16 values in a tenth of its time."""
    places = np.zeros(numbers.shape, np.uint8)
    for middle in _middles(values):
        places += numbers > middle
    return places


def _middles(values: np.ndarray) -> np.ndarray:
    return (values[1:] + values[:-1]) / 2


def _pairs(places: np.ndarray) -> np.ndarray:
    """Returns two places of 4 bits in a byte, the first one in the upper half; a missing one is 0."""
    if places.size % 2:
        places = np.append(places, np.uint8(0))
    return places[0::2] << 4 | places[1::2]


@functools.cache
def _values_of_two_bytes() -> np.ndarray:
    """Returns the four values of NF4 of each uint16, as one number of 16 bytes: a look-up then costs a fourth."""
    both = np.arange(1 << 16, dtype=np.uint16)
    first, second = (both.view(np.uint8).reshape(-1, 2)[:, place] for place in (0, 1))
    values = np.stack([NF4[first >> 4], NF4[first & 15], NF4[second >> 4], NF4[second & 15]], axis=1)
    return values.view(np.complex128).reshape(-1)


def _look_up_pairs(codes: np.ndarray, out: np.ndarray) -> None:
    """Writes the values of NF4 of codes to a flat float32 array of at most two numbers a byte."""
    four = out.size // 4
    places = codes[: 2 * four].view(np.uint16).astype(np.intp)
    np.take(_values_of_two_bytes(), places, out=out[: 4 * four].view(np.complex128), mode="clip")  # others copy `out`
    rest = codes[2 * four :]
    if rest.size:
        values = np.stack([NF4[rest >> 4], NF4[rest & 15]], axis=1).reshape(-1)
        out[4 * four :] = values[: out.size - 4 * four]
