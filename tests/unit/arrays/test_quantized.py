"""Codecs of matrices in few bytes, against formulas of the papers in NumPy and against numbers of bitsandbytes."""

from __future__ import annotations

import numpy as np
import pytest
from golden_files import load_adapter_case
from tolerances import FEW_OPERATIONS, U_BFLOAT16, U

from trainer.arrays.numpy_operators import BFLOAT16
from trainer.arrays.stored import StoredMatrix, stored_operands
from trainer.arrays.tiles import Scratch
from trainer.storage.base_dtypes import BLOCK, SCALE_BLOCK, bytes_of
from trainer.storage.bfloat16 import as_bfloat16, as_float32
from trainer.storage.quantized import NF4, dynamic_values, quantize, quantize_dynamic

SHAPES = [(3, 64), (5, 37), (1, 1), (2, 3, 80), (70, 256)]
DTYPES = ["bfloat16", "int8", "nf4"]


def drawn(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    """Returns normal numbers; the first block is all zeros and the last one is large."""
    numbers = np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)
    flat = numbers.reshape(-1)
    if flat.size > 2 * BLOCK:
        flat[:BLOCK] = 0
        flat[-5:] *= 1000
    return numbers


def blocks_of(flat: np.ndarray, size: int = BLOCK) -> list[np.ndarray]:
    return [flat[first : first + size] for first in range(0, flat.size, size)]


def expected_int8(matrix: np.ndarray) -> np.ndarray:
    """Returns round(127 x / c) c / 127 with the largest absolute value c of each block."""
    result = []
    for block in blocks_of(matrix.reshape(-1)):
        largest = np.abs(block).max()
        inverse = np.float32(1) / largest if largest else np.float32(0)
        result.append(np.rint(block * inverse * np.float32(127)) * (largest / np.float32(127)))
    return np.concatenate(result).reshape(matrix.shape)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_without_an_inverse_are_zero(dtype: str) -> None:
    found = np.asarray(quantize(np.full((2, BLOCK), 1e-40, np.float32), dtype))
    assert np.abs(found).max() < np.finfo(np.float32).tiny


def nearest(values: np.ndarray, number: np.float32) -> int:
    return int(np.argmin(np.abs(values.astype(np.float64) - np.float64(number))))


def expected_nf4(matrix: np.ndarray) -> np.ndarray:
    """Returns q(x / c) c' (QLoRA, section 3): c' is the mean of the c plus q8((c - mean) / C) C in blocks of 256."""
    blocks = blocks_of(matrix.reshape(-1))
    largest = np.array([np.abs(block).max() for block in blocks])
    mean = largest.mean(dtype=np.float32)
    scales: list[np.float32] = []
    for of_scales in blocks_of(largest - mean, SCALE_BLOCK):
        most = np.abs(of_scales).max()
        inverse = np.float32(1) / most if most else np.float32(0)
        scales += [dynamic_values()[nearest(dynamic_values(), one * inverse)] * most + mean for one in of_scales]
    result = []
    for block, c, scale in zip(blocks, largest, scales, strict=True):
        inverse = np.float32(1) / c if c else np.float32(0)
        result += [NF4[nearest(NF4, one * inverse)] * scale for one in block]
    return np.array(result, np.float32).reshape(matrix.shape)


EXPECTED = {
    "bfloat16": lambda matrix: as_float32(as_bfloat16(matrix)), "int8": expected_int8, "nf4": expected_nf4
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_the_formulas(shape: tuple[int, ...], dtype: str) -> None:
    matrix = drawn(shape)
    numbers = quantize(matrix, dtype)
    assert numbers.shape == shape and numbers.size == matrix.size
    assert numbers.nbytes == bytes_of(matrix.size, dtype)
    expected = EXPECTED[dtype](matrix)
    np.testing.assert_array_equal(np.asarray(numbers), expected)
    found = stored_operands({"wide": (numbers, np.float32), "narrow": (numbers, BFLOAT16)}, (), Scratch())
    np.testing.assert_array_equal(found["wide"], expected)
    np.testing.assert_array_equal(as_float32(found["narrow"]), as_float32(as_bfloat16(expected)))
    if matrix.size > 2 * BLOCK:
        part = np.empty(matrix.size - 2 * BLOCK - 1, np.float32)
        numbers.read(BLOCK, part)
        np.testing.assert_array_equal(part, expected.reshape(-1)[BLOCK:][: part.size])


def test_rounding_errors_are_at_most_half_a_distance() -> None:
    matrix = drawn((64, 256), seed=2)
    flat = matrix.reshape(-1, BLOCK)
    largest = np.abs(flat).max(1, keepdims=True)
    assert (np.abs(np.asarray(quantize(matrix, "bfloat16")) - matrix) <= U_BFLOAT16 * np.abs(matrix)).all()
    int8 = np.asarray(quantize(matrix, "int8")).reshape(flat.shape)
    assert (np.abs(int8 - flat) <= largest / 254 + FEW_OPERATIONS * largest).all()
    # NF4: half of its widest distance, and the scale's own error: half of the widest distance of 8 bits.
    nf4 = np.asarray(quantize(matrix, "nf4")).reshape(flat.shape)
    of_scale = np.abs(largest - largest.mean()).max() * np.diff(dynamic_values()).max() / 2
    assert (np.abs(nf4 - flat) <= largest * np.diff(NF4).max() / 2 + of_scale + FEW_OPERATIONS).all()


def test_double_quantization_is_undone_by_its_values() -> None:
    scales = np.random.default_rng(3).normal(0, 1, 2 * SCALE_BLOCK + 7).astype(np.float32)
    codes, largest = quantize_dynamic(scales)
    assert codes.dtype == np.uint8 and largest.shape == (3,)
    back = dynamic_values()[codes] * np.repeat(largest, SCALE_BLOCK)[: scales.size]
    assert np.abs(back - scales).max() <= np.diff(dynamic_values()).max() / 2 * largest.max()
    assert np.unique(dynamic_values()).size == 256 and dynamic_values()[0] > -1 == -dynamic_values()[-1]


def test_nf4_is_that_of_bitsandbytes() -> None:
    """Its search of the nearest of 256 values is approximate: some of its scales have a neighbour that is farther."""
    stored = load_adapter_case("quantized_nf4").stored
    np.testing.assert_array_equal(NF4, stored["values"])
    assert np.abs(dynamic_values() - stored["dynamic_values"]).max() <= 2 * U
    ours = quantize(stored["sample"], "nf4")
    np.testing.assert_array_equal(ours.codes, stored["codes.sample"])
    np.testing.assert_allclose(ours.mean, stored["mean.sample"][0], rtol=FEW_OPERATIONS)
    np.testing.assert_allclose(ours.scales_of_scales, stored["scales_of_scales.sample"], rtol=FEW_OPERATIONS)
    difference = ours.scales.astype(int) - stored["scales.sample"]
    assert difference.size > SCALE_BLOCK
    assert np.abs(difference).max() <= 1 and np.count_nonzero(difference) < 0.1 * difference.size


def test_rows_of_a_stored_matrix() -> None:
    matrix = drawn((300, 24))
    numbers = quantize(matrix, "bfloat16")
    rounded = as_float32(as_bfloat16(matrix))
    stored = stored_operands({"head": (numbers, np.float32)}, ("head",), Scratch())["head"]
    assert isinstance(stored, StoredMatrix) and stored.shape == (300, 24) and len(stored) == 300
    np.testing.assert_array_equal(stored.read_rows(slice(7, 100)), rounded[7:100])
    many = np.empty((200, 24), np.float32)
    stored.decompress_rows(slice(100, 300), many)
    np.testing.assert_array_equal(many, rounded[100:])
    places = np.array([5, 299, 0, 5])
    out = np.empty((4, 24), np.float32)
    stored.look_up(places, out)
    np.testing.assert_array_equal(out, rounded[places])
    half = StoredMatrix(numbers, np.float16)
    few = np.empty((6, 24), np.float16)
    half.decompress_rows(slice(3, 9), few)
    np.testing.assert_array_equal(few, rounded[3:9].astype(np.float16))
    assert stored_operands({"head": (numbers, BFLOAT16)}, (), Scratch())["head"].base is numbers.codes  # no copy
