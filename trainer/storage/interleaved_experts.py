"""The experts of gpt-oss on disk: stacked, with columns of gate and up in turns, and perhaps quantized in MXFP4.

====================================  ====================================================================
on disk                               in files of one tensor an expert
====================================  ====================================================================
mlp.experts.gate_up_proj [E, D, 2F]   mlp.experts.{e}.gate_proj.weight [F, D] are the even columns,
                                      mlp.experts.{e}.up_proj.weight [F, D] the odd ones
mlp.experts.down_proj [E, F, D]       mlp.experts.{e}.down_proj.weight [D, F]
mlp.experts.gate_up_proj_bias         mlp.experts.{e}.gate_proj.bias and up_proj.bias [F]
[E, 2F], down_proj_bias [E, D]        mlp.experts.{e}.down_proj.bias [D]
*_blocks [E, out, G, 16] of bytes,    the matrices, transposed, in groups of 32 numbers along a row (Open Compute
*_scales [E, out, G]                  Project 2023, Microscaling Formats, section 5.3)
====================================  ====================================================================

Each byte has two numbers of four bits, the lower half first; a scale is the exponent of 2 plus 127.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from trainer.parallel.sharding import Shard
from trainer.storage.tensor_file import ArrayOrLazyArray, LazyArray, box_array

_NAME = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_AXES = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}
_MARKS = (".mlp.experts.gate_up_proj_bias", ".mlp.experts.gate_up_proj_blocks")
_GROUP = 32
_EXPONENT_OF_ONE = 127
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
QUANTIZED = ("_blocks", "_scales")
"""The ends of the names of tensors of bytes."""


def split_interleaved_experts(weights: Mapping[str, ArrayOrLazyArray]) -> dict[str, ArrayOrLazyArray]:
    """Returns the tensors of a file with those of gpt-oss's experts as one tensor for each expert and matrix.

    Tensors that do not have the shapes of such experts are kept as they are: no model has a place for them.
    """
    if not any(name.endswith(_MARKS) for name in weights):
        return dict(weights)
    tensors: dict[str, ArrayOrLazyArray] = {}
    for name, array in weights.items():
        match = _NAME.fullmatch(name)
        scales = weights.get(name.removesuffix("_blocks") + "_scales")
        has_scales = scales is not None and array.shape == (*scales.shape, _GROUP // 2)
        if match is None or array.ndim != _AXES[match[3]] or (match[3] == "_blocks" and not has_scales):
            tensors[name] = array
            continue
        prefix, matrix, kind = match.groups()
        if kind == "_scales":
            continue
        for expert in range(array.shape[0]):
            ending = "weight"
            if kind == "_bias":
                ending = "bias"
                joined = _bias(array, expert)
            elif kind == "_blocks":
                assert scales is not None
                joined = _quantized(array, scales, expert)
            else:
                joined = _transposed(array, expert)
            parts: dict[str, LazyArray] = {"down_proj": joined}
            if matrix == "gate_up_proj":
                parts = {"gate_proj": joined[0::2], "up_proj": joined[1::2]}
            tensors |= {f"{prefix}{expert}.{part}.{ending}": one for part, one in parts.items()}
    return tensors


def join_interleaved_experts(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors of gpt-oss's files from those with one tensor for each expert and matrix."""
    result = {name: array for name, array in tensors.items() if ".mlp.experts." not in name}
    for first in [name for name in tensors if name.endswith(".mlp.experts.0.gate_proj.weight")]:
        prefix = first.removesuffix("0.gate_proj.weight")
        count = sum(name.startswith(prefix) and name.endswith(".gate_proj.weight") for name in tensors)

        def stack(matrix: str, kind: str, prefix: str = prefix, count: int = count) -> np.ndarray:
            """Returns one matrix or bias of all experts."""
            return np.stack([tensors[f"{prefix}{expert}.{matrix}.{kind}"] for expert in range(count)])

        gate_up_EDF2 = np.stack([stack("gate_proj", "weight"), stack("up_proj", "weight")], -1).transpose(0, 2, 1, 3)
        result[f"{prefix}gate_up_proj"] = gate_up_EDF2.reshape(*gate_up_EDF2.shape[:2], -1)
        result[f"{prefix}down_proj"] = np.ascontiguousarray(stack("down_proj", "weight").swapaxes(1, 2))
        gate_up_EF2 = np.stack([stack("gate_proj", "bias"), stack("up_proj", "bias")], -1)
        result[f"{prefix}gate_up_proj_bias"] = gate_up_EF2.reshape(count, -1)
        result[f"{prefix}down_proj_bias"] = stack("down_proj", "bias")
    return result


def _bias(array: ArrayOrLazyArray, expert: int) -> LazyArray:
    return _lazy(array.shape[1:], lambda rows: np.asarray(array[expert : expert + 1, rows])[0])


def _transposed(array: ArrayOrLazyArray, expert: int) -> LazyArray:
    """Returns the matrix of an expert, [outputs, inputs], from those of all, [experts, inputs, outputs]."""
    return _lazy(array.shape[:0:-1], lambda rows, columns: np.asarray(array[expert : expert + 1, columns, rows])[0].T)


def _quantized(blocks: ArrayOrLazyArray, scales: ArrayOrLazyArray, expert: int) -> LazyArray:
    """Returns the matrix of an expert, [outputs, inputs]."""

    def read(rows: slice, columns: slice) -> np.ndarray:
        """Dequantizes the groups around these numbers."""
        groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
        bytes_RG16 = np.asarray(blocks[expert : expert + 1, rows, groups])[0].astype(np.uint8)
        exponents_RG = np.asarray(scales[expert : expert + 1, rows, groups])[0].astype(np.int32) - _EXPONENT_OF_ONE
        numbers = np.stack([_FP4[bytes_RG16 & 15], _FP4[bytes_RG16 >> 4]], -1)
        wide_RG32 = np.ldexp(numbers.reshape(*exponents_RG.shape, _GROUP), exponents_RG[..., None])
        first = columns.start - groups.start * _GROUP
        return wide_RG32.reshape(len(wide_RG32), -1)[:, first : first + columns.stop - columns.start]

    return _lazy((scales.shape[1], scales.shape[2] * _GROUP), read)


def _lazy(shape: tuple[int, ...], read: Callable[..., np.ndarray]) -> LazyArray:
    """Returns a lazy array from a function that reads ranges of its axes."""

    def read_box(box: Shard) -> np.ndarray:
        """Reads a box as float32."""
        return np.asarray(read(*box.slices), np.float32)

    return box_array(shape, read_box)
