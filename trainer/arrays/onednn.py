"""Matrix products and row-wise functions of arrays through the oneDNN library of MindSpore.

oneDNN's products are faster than those of NumPy's library, accumulate at no cost, and take bfloat16; its softmax takes
a third of NumPy's time. The library is called through its C interface (`dnnl.h` of version 3.10), in the thread of the
caller. Without the library, or with another version of it, NumPy computes the same functions.

Arrays are float32. Where a function says so, they may be narrow: float16, or uint16 that holds bfloat16. Products of
narrow arrays are summed in float32. For float16, and for bfloat16 on a processor without bfloat16 instructions, the
float32 product is used: its products of numbers are exact, and only the order of the sums differs. Rounding is to
nearest, ties to even.

Matrices may be views if one of their last two axes is dense, as in a transposed matrix. Products with float32 results
need no preparation for a shape. For the other functions oneDNN compiles code for each shape, which takes a millisecond
and is kept: callers use few shapes, and blocks of fixed sizes where shapes depend on the data.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from trainer.arrays.addresses import address
from trainer.arrays.numpy_operators import BFLOAT16, NUMPY_OPERATORS, NumpyOperators
from trainer.ops.host_library import bfloat16_products, has_avx512

# Enumerations of dnnl_types.h.
_CPU = 1
_DTYPES = {np.dtype(np.float32): 3, np.dtype(BFLOAT16): 2}
_FORWARD = 64
_SOFTMAX = 0x30000
_SWISH = 0x2C
_CONFLICT = 512  # elements between rows that compete for the lines of a cache
LEAST_SIZE = 32  # rows and columns of a product that does not only wait for memory
_SRC = 1
_WEIGHTS = 33
_DST = 17
_DIFF_SRC = 129
_DIFF_DST = 145


@functools.cache
def _array_type(element: Any, size: int) -> Any:
    """Returns a ctypes array type and keeps it: ctypes makes an unused type anew, which is cyclic garbage."""
    return element * size


_BLOCK_SIZES = tuple(1 << bits for bits in range(16, 7, -1))
"""Sizes of the blocks that an element-wise primitive takes, largest first; NumPy takes the remainder."""
_MAX_PRIMITIVES = 512  # that a thread keeps


class _Argument(ctypes.Structure):
    _fields_ = (("index", ctypes.c_int), ("memory", ctypes.c_void_p))


class _Primitive:
    """A oneDNN primitive with the memory objects of its arguments, whose addresses are set for each call."""

    def __init__(
        self, library: ctypes.CDLL, primitive: ctypes.c_void_p, memories: Mapping[int, ctypes.c_void_p]
    ) -> None:
        self.library = library
        self.primitive = primitive
        self.memories = list(memories.values())
        arguments = [_Argument(index, memory) for index, memory in memories.items()]
        self.arguments = _array_type(_Argument, len(memories))(*arguments)
        self.set_address = library.dnnl_memory_set_data_handle
        self.execute = library.dnnl_primitive_execute

    def run(self, stream: ctypes.c_void_p, *arrays: np.ndarray) -> None:
        """Executes the primitive on these arrays, in the order of its arguments."""
        for memory, array in zip(self.memories, arrays, strict=True):
            self.set_address(memory, ctypes.c_void_p(address(array)))
        _check(self.execute(self.primitive, stream, len(self.memories), self.arguments))

    def close(self) -> None:
        """Frees the primitive and its memory objects."""
        self.library.dnnl_primitive_destroy(self.primitive)
        for memory in self.memories:
            self.library.dnnl_memory_destroy(memory)


class OneDnnOperators(NumpyOperators):
    """Functions in oneDNN, and in NumPy what oneDNN lacks."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.engine = self._create("dnnl_engine_create", _CPU, ctypes.c_size_t(0))
        # Without a thread pool of oneDNN's interface the caller's thread computes.
        self.stream = self._create("dnnl_threadpool_interop_stream_create", self.engine, None)
        self.primitives: dict[tuple, _Primitive] = {}
        self.gemm = {np.dtype(np.float32): _gemm(library, "sgemm"),
                     np.dtype(BFLOAT16): _gemm(library, "gemm_bf16bf16f32")}  # fmt: skip
        self.emulates = bfloat16_products() == "emulated"
        self.has_avx512 = has_avx512()
        self.buffers = [np.empty(0, np.float32)] * 3

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
        """Multiplies with oneDNN's gemm or a cached primitive; emulated half precision goes through float32."""
        if not a.size or not b.size:
            NUMPY_OPERATORS.matmul(a, b, out, accumulate)
            return
        result = out
        if a.dtype == np.float16 or (a.dtype == BFLOAT16 and self.emulates):
            if out.dtype != np.float32:
                result = self._float32_buffer(2, out)
            a = self._to_float32(0, a)
            b = self._to_float32(1, b)
        # Primitives, unlike gemm, write bfloat16 and take several matrices at once: between two calls a thread would
        # wait for Python's lock. They misread views with an axis of length 1 (oneDNN 3.10).
        multiply = self._product
        if (a.ndim > 2 or result.dtype == BFLOAT16) and min(*a.shape[-2:], b.shape[-1]) > 1:
            multiply = self._primitive_product
        elif result.dtype != np.float32:
            result = self._float32_buffer(2, out)
        multiply(a, b, result, accumulate)
        if result is not out:
            self.cast(result, out)

    def _product(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        rows, inner = a.shape[-2:]
        columns = b.shape[-1]
        order_a, step_a = layout(a)
        order_b, step_b = layout(b)
        if not self.has_avx512 and conflicts(a, order_a, step_a, b, order_b, step_b):
            NUMPY_OPERATORS.matmul(a, b, out, accumulate)
            return
        step = layout(out)[1]
        at_a = address(a)
        at_b = address(b)
        at_out = address(out)
        multiply = self.gemm[a.dtype]
        for number in range(math.prod(a.shape[:-2])):
            _check(multiply(
                order_a, order_b, rows, columns, inner, 1.0, at_a + number * a.strides[0], step_a,
                at_b + number * b.strides[0], step_b, float(accumulate), at_out + number * out.strides[0], step, None,
            ))  # fmt: skip

    def _primitive_product(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        key = ("matmul", a.dtype, a.shape, a.strides, b.shape, b.strides, out.dtype, out.strides, accumulate)
        if (primitive := self.primitives.get(key)) is None:
            source, weights, result = (self._memory_desc(array) for array in (a, b, out))
            attributes = None
            if accumulate:
                attributes = self._sum_attributes()
            descriptor = self._descriptor("matmul", source, weights, None, result, attributes)
            if attributes is not None:
                self.library.dnnl_primitive_attr_destroy(attributes)
            primitive = self._keep(key, descriptor, {_SRC: source, _WEIGHTS: weights, _DST: result})
        primitive.run(self.stream, a, b, out)

    def cast(self, x: np.ndarray, out: np.ndarray) -> None:
        """Casts with a cached reorder primitive, or with NumPy where oneDNN lacks the dtype."""
        if not self.has_avx512 or not x.size or np.float16 in (x.dtype, out.dtype):
            NUMPY_OPERATORS.cast(x, out)
            return
        key = ("cast", x.dtype, x.shape, x.strides, out.strides)
        if (primitive := self.primitives.get(key)) is None:
            source = self._memory_desc(x)
            result = self._memory_desc(out)
            descriptor = self._create(
                "dnnl_reorder_primitive_desc_create", source, self.engine, result, self.engine, None
            )
            primitive = self._keep(key, descriptor, {_SRC: source, _DST: result})
        primitive.run(self.stream, x, out)

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        """Computes the softmax with a cached primitive, or with NumPy where oneDNN lacks the dtype."""
        if out.dtype == np.float16 or (not self.has_avx512 and out.dtype == BFLOAT16):
            NUMPY_OPERATORS.softmax(x, out)
            return
        key = ("softmax", x.shape, x.strides, out.dtype, out.strides)
        if (primitive := self.primitives.get(key)) is None:
            source = self._memory_desc(x)
            result = self._memory_desc(out)
            descriptor = self._descriptor("softmax_forward", _FORWARD, _SOFTMAX, source, result, x.ndim - 1, None)
            primitive = self._keep(key, descriptor, {_SRC: source, _DST: result})
        primitive.run(self.stream, x, out)

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        """Computes the gradient with a cached primitive, or with NumPy where oneDNN is slow or lacks the dtype."""
        if out.dtype == np.float16 or not self.has_avx512:
            NUMPY_OPERATORS.softmax_gradient(y, grad, out)
            return
        key = ("softmax_gradient", y.shape, y.strides, grad.strides, out.dtype, out.strides)
        if (primitive := self.primitives.get(key)) is None:
            result, of_result, of_source = (self._memory_desc(array) for array in (y, grad, out))
            axis = y.ndim - 1
            forward = self._descriptor("softmax_forward", _FORWARD, _SOFTMAX, result, result, axis, None)
            descriptor = self._descriptor(
                "softmax_backward", _SOFTMAX, of_source, of_result, result, axis, forward, None
            )
            self.library.dnnl_primitive_desc_destroy(forward)
            primitive = self._keep(key, descriptor, {_DST: result, _DIFF_DST: of_result, _DIFF_SRC: of_source})
        primitive.run(self.stream, y, grad, out)

    def silu(self, x: np.ndarray, out: np.ndarray) -> None:
        self._run_blocks("silu", x, out)

    def silu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        self._run_blocks("silu_gradient", x, grad, out)

    def _run_blocks(self, name: str, *arrays: np.ndarray) -> None:
        """Computes `silu` or `silu_gradient` in blocks of fixed sizes, and the remainder with NumPy."""
        for blocks in _fixed_blocks(*arrays):
            size = blocks[0].size
            if size < _BLOCK_SIZES[-1]:
                getattr(NUMPY_OPERATORS, name)(*blocks)
                continue
            if (primitive := self.primitives.get((name, size))) is None:
                primitive = self._silu_primitive(name, self._memory_desc(blocks[0]), size)
            primitive.run(self.stream, *blocks)

    def _silu_primitive(self, name: str, block: ctypes.c_void_p, size: int) -> _Primitive:
        """Returns the primitive of `silu` or `silu_gradient`; all its arguments are blocks of one description."""
        forward = self._descriptor("eltwise_forward", _FORWARD, _SWISH, block, block, *_SWISH_FACTORS, None)
        if name == "silu":
            return self._keep((name, size), forward, {_SRC: block, _DST: block})
        backward = self._descriptor("eltwise_backward", _SWISH, block, block, block, *_SWISH_FACTORS, forward, None)
        self.library.dnnl_primitive_desc_destroy(forward)
        return self._keep((name, size), backward, {_SRC: block, _DIFF_DST: block, _DIFF_SRC: block})

    def _float32_buffer(self, number: int, array: np.ndarray) -> np.ndarray:
        """Returns one of the three float32 buffers for an array, with its shape."""
        if self.buffers[number].size < array.size:
            self.buffers[number] = np.empty(array.size, np.float32)
        return self.buffers[number][: array.size].reshape(array.shape)

    def _to_float32(self, number: int, array: np.ndarray) -> np.ndarray:
        """Returns a narrow array in a float32 buffer, dense along the same axis."""
        if array.strides[-1] != array.itemsize and array.shape[-1] > 1:
            return self._to_float32(number, array.swapaxes(-1, -2)).swapaxes(-1, -2)
        buffer = self._float32_buffer(number, array)
        self.cast(array, buffer)
        return buffer

    def _create(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """Returns the object that a function of oneDNN creates."""
        created = ctypes.c_void_p()
        _check(getattr(self.library, function)(ctypes.byref(created), *arguments))
        return created

    def _memory_desc(self, array: np.ndarray) -> ctypes.c_void_p:
        """Returns the description of an array: shape, dtype and strides."""
        dims = _array_type(ctypes.c_int64, array.ndim)
        strides = [stride // array.itemsize for stride in array.strides]
        return self._create(
            "dnnl_memory_desc_create_with_strides", array.ndim, dims(*array.shape), _DTYPES[array.dtype], dims(*strides)
        )

    def _sum_attributes(self) -> ctypes.c_void_p:
        """Returns the attributes of a primitive that adds its result to its output."""
        post_ops = self._create("dnnl_post_ops_create")
        _check(self.library.dnnl_post_ops_append_sum(post_ops, ctypes.c_float(1), 0, 0))
        attributes = self._create("dnnl_primitive_attr_create")
        _check(self.library.dnnl_primitive_attr_set_post_ops(attributes, post_ops))
        self.library.dnnl_post_ops_destroy(post_ops)
        return attributes

    def _descriptor(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Returns the descriptor of a primitive; the last argument has its attributes."""
        return self._create(f"dnnl_{name}_primitive_desc_create", self.engine, *arguments)

    def _keep(
        self, key: tuple, descriptor: ctypes.c_void_p, memory_descs: Mapping[int, ctypes.c_void_p]
    ) -> _Primitive:
        """Creates and keeps the primitive of a descriptor; frees it and the descriptions of the arguments."""
        if len(self.primitives) == _MAX_PRIMITIVES:
            for primitive in self.primitives.values():
                primitive.close()
            self.primitives.clear()
        created = self._create("dnnl_primitive_create", descriptor)
        self.library.dnnl_primitive_desc_destroy(descriptor)
        memories = {
            index: self._create("dnnl_memory_create", memory_desc, self.engine, None)
            for index, memory_desc in memory_descs.items()
        }
        for pointer in {memory_desc.value for memory_desc in memory_descs.values()}:
            self.library.dnnl_memory_desc_destroy(ctypes.c_void_p(pointer))
        self.primitives[key] = _Primitive(self.library, created, memories)
        return self.primitives[key]


_SWISH_FACTORS = ctypes.c_float(1), ctypes.c_float(0)  # x sigmoid(1 x)


def _gemm(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    """Returns the function out = alpha a b + beta out for row-major matrices, which runs in the caller's thread."""
    size = ctypes.c_int64
    number = ctypes.c_float
    address = ctypes.c_void_p
    function = getattr(library, f"dnnl_threadpool_interop_{name}")
    function.argtypes = (
        *(ctypes.c_char,) * 2, *(size,) * 3, number, address, size, address, size, number, address, size, address,
    )  # fmt: skip
    return function


def layout(matrix: np.ndarray) -> tuple[bytes, int]:
    """Returns b"T" for a transposed matrix and b"N" for another one, and the distance of its stored rows."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.strides[-2:]
    if column_stride == matrix.itemsize or columns == 1:
        return b"N", max(row_stride // matrix.itemsize, columns)  # the stride of an axis of length 1 says nothing
    return b"T", max(column_stride // matrix.itemsize, rows)


def conflicts(a: np.ndarray, order_a: bytes, step_a: int, b: np.ndarray, order_b: bytes, step_b: int) -> bool:
    """Returns whether oneDNN's product a b without AVX-512 loses its speed because rows compete for cache lines.

    With at most some 380 rows it reads the matrices in place: rows that are a multiple of 2 KiB apart then lie in the
    same few lines of a cache, and the product takes up to 2.5 times as long as NumPy's, which copies them first. With
    both matrices transposed or b alone it reads along the stored rows, and is never slow.
    """
    if a.dtype != np.float32 or order_b == b"T" or min(*a.shape[-2:], b.shape[-1]) < LEAST_SIZE:
        return False
    return step_b % _CONFLICT == 0 or (order_a == b"T" and step_a % _CONFLICT == 0)


def _fixed_blocks(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields contiguous arrays of equal size in blocks of `_BLOCK_SIZES`, and the remainder."""
    flat = [array.reshape(-1) for array in arrays]
    start = 0
    end = flat[0].size
    while start < end:
        size = next((size for size in _BLOCK_SIZES if size <= end - start), end - start)
        yield tuple(array[start : start + size] for array in flat)
        start += size


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"oneDNN: status {status}")  # see dnnl_status_t
