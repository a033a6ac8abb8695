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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from trainer.arrays.numpy_operators import BFLOAT16, NUMPY_OPERATORS, NumpyOperators
from trainer.ops.host_library import bfloat16_products, has_avx512

# Enumerations of dnnl_types.h.
_CPU = 1
_DTYPES = {np.dtype(np.float32): 3, np.dtype(BFLOAT16): 2}
_FORWARD = 64
_SOFTMAX = 0x30000
_SWISH = 0x2C
_CONFLICT = 512  # numbers between rows that compete for the lines of a cache
_WIDE = 32  # rows and columns of a product that does not only wait for memory
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
    _fields_ = (("place", ctypes.c_int), ("memory", ctypes.c_void_p))


class _Primitive:
    """A oneDNN primitive with the memory objects of its arguments, whose addresses are set for each call."""

    def __init__(
        self, library: ctypes.CDLL, primitive: ctypes.c_void_p, memories: Sequence[tuple[int, ctypes.c_void_p]]
    ) -> None:
        self.library = library
        self.primitive = primitive
        self.memories = [memory for _, memory in memories]
        arguments = [_Argument(place, memory) for place, memory in memories]
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
        self.engine = ctypes.c_void_p()
        self.stream = ctypes.c_void_p()
        _check(library.dnnl_engine_create(ctypes.byref(self.engine), _CPU, ctypes.c_size_t(0)))
        # Without a thread pool of oneDNN's interface the caller's thread computes.
        _check(library.dnnl_threadpool_interop_stream_create(ctypes.byref(self.stream), self.engine, None))
        self.made: dict[tuple, _Primitive] = {}
        self.gemm = {np.dtype(np.float32): _gemm(library, "sgemm"),
                     np.dtype(BFLOAT16): _gemm(library, "gemm_bf16bf16f32")}  # fmt: skip
        self.emulates = bfloat16_products() == "emulated"
        self.has_avx512 = has_avx512()
        self.wide = [np.empty(0, np.float32)] * 3

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
        """Multiplies with oneDNN's gemm or a cached primitive; emulated half precision goes through float32."""
        result = out
        if a.dtype == np.float16 or (a.dtype == BFLOAT16 and self.emulates):
            if out.dtype != np.float32:
                result = self._wide(2, out)
            a = self._widened(0, a)
            b = self._widened(1, b)
        # Primitives, unlike gemm, write bfloat16 and take several matrices at once: between two calls a thread would
        # wait for Python's lock. They misread views with an axis of length 1 (oneDNN 3.10).
        multiply = self._product
        if (a.ndim > 2 or result.dtype == BFLOAT16) and min(*a.shape[-2:], b.shape[-1]) > 1 and a.size:
            multiply = self._primitive_product
        elif result.dtype != np.float32:
            result = self._wide(2, out)
        multiply(a, b, result, accumulate)
        if result is not out:
            self.cast(result, out)

    def _product(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        rows, inner = a.shape[-2:]
        columns = b.shape[-1]
        beta = float(accumulate)
        way_a, step_a = _layout(a)
        way_b, step_b = _layout(b)
        if not (rows and inner and columns) or (not self.has_avx512 and _conflicts(a, way_a, step_a, b, way_b, step_b)):
            NUMPY_OPERATORS.matmul(a, b, out, accumulate)
            return
        step = _layout(out)[1]
        at_a = address(a)
        at_b = address(b)
        at_out = address(out)
        multiply = self.gemm[a.dtype]
        matrices = 1
        if a.ndim == 3:
            matrices = len(a)
        for place in range(matrices):
            if place:
                at_a = at_a + a.strides[0]
                at_b = at_b + b.strides[0]
                at_out = at_out + out.strides[0]
            status = multiply(way_a, way_b, rows, columns, inner, 1.0, at_a, step_a, at_b, step_b, beta, at_out, step,
                              None)  # fmt: skip
            _check(status)

    def _primitive_product(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool) -> None:
        key = ("matmul", a.dtype, a.shape, a.strides, b.shape, b.strides, out.dtype, out.strides, accumulate)
        if (primitive := self.made.get(key)) is None:
            source, weights, result = (self._description(array) for array in (a, b, out))
            attributes = None
            if accumulate:
                attributes = self._sum()
            primitive = self._make(
                key, "matmul", (source, weights, None, result),
                ((_SRC, source), (_WEIGHTS, weights), (_DST, result)), attributes,
            )  # fmt: skip
        primitive.run(self.stream, a, b, out)

    def cast(self, x: np.ndarray, out: np.ndarray) -> None:
        """Casts with a cached reorder primitive, or with NumPy where oneDNN lacks the dtype."""
        if not self.has_avx512 or not x.size or np.float16 in (x.dtype, out.dtype):
            NUMPY_OPERATORS.cast(x, out)
            return
        key = ("cast", x.dtype, x.shape, x.strides, out.strides)
        if (primitive := self.made.get(key)) is None:
            source = self._description(x)
            result = self._description(out)
            kind = ctypes.c_void_p()
            _check(self.library.dnnl_reorder_primitive_desc_create(
                ctypes.byref(kind), source, self.engine, result, self.engine, None))  # fmt: skip
            primitive = self._keep(key, kind, ((_SRC, source), (_DST, result)))
        primitive.run(self.stream, x, out)

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        """Computes the softmax with a cached primitive, or with NumPy where oneDNN lacks the dtype."""
        if out.dtype == np.float16 or (not self.has_avx512 and out.dtype == BFLOAT16):
            NUMPY_OPERATORS.softmax(x, out)
            return
        key = ("softmax", x.shape, x.strides, out.dtype, out.strides)
        if (primitive := self.made.get(key)) is None:
            source = self._description(x)
            result = self._description(out)
            primitive = self._make(
                key, "softmax_forward", (_FORWARD, _SOFTMAX, source, result, x.ndim - 1),
                ((_SRC, source), (_DST, result)),
            )  # fmt: skip
        primitive.run(self.stream, x, out)

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        """Computes the gradient with a cached primitive, or with NumPy where oneDNN is slow or lacks the dtype."""
        if out.dtype == np.float16 or not self.has_avx512:
            NUMPY_OPERATORS.softmax_gradient(y, grad, out)
            return
        key = ("softmax_gradient", y.shape, y.strides, grad.strides, out.dtype, out.strides)
        if (primitive := self.made.get(key)) is None:
            result, of_result, of_source = (self._description(array) for array in (y, grad, out))
            forward = self._kind("softmax_forward", (_FORWARD, _SOFTMAX, result, result, y.ndim - 1))
            primitive = self._make(
                key, "softmax_backward", (_SOFTMAX, of_source, of_result, result, y.ndim - 1, forward),
                ((_DST, result), (_DIFF_DST, of_result), (_DIFF_SRC, of_source)),
            )  # fmt: skip
            self.library.dnnl_primitive_desc_destroy(forward)
        primitive.run(self.stream, y, grad, out)

    def silu(self, x: np.ndarray, out: np.ndarray) -> None:
        self._run_blocks("silu", self._make_silu, x, out)

    def silu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        self._run_blocks("silu_gradient", self._make_silu_gradient, x, grad, out)

    def _run_blocks(self, name: str, make: Callable[[tuple, ctypes.c_void_p], _Primitive], *arrays: np.ndarray) -> None:
        for blocks in _fixed_blocks(*arrays):
            size = blocks[0].size
            if size < _BLOCK_SIZES[-1]:
                getattr(NUMPY_OPERATORS, name)(*blocks)
                continue
            if (primitive := self.made.get((name, size))) is None:
                primitive = make((name, size), self._description(blocks[0]))
            primitive.run(self.stream, *blocks)

    def _make_silu(self, key: tuple, numbers: ctypes.c_void_p) -> _Primitive:
        arguments = _FORWARD, _SWISH, numbers, numbers, *_SWISH_FACTORS
        return self._make(key, "eltwise_forward", arguments, ((_SRC, numbers), (_DST, numbers)))

    def _make_silu_gradient(self, key: tuple, numbers: ctypes.c_void_p) -> _Primitive:
        forward = self._kind("eltwise_forward", (_FORWARD, _SWISH, numbers, numbers, *_SWISH_FACTORS))
        primitive = self._make(
            key, "eltwise_backward", (_SWISH, numbers, numbers, numbers, *_SWISH_FACTORS, forward),
            ((_SRC, numbers), (_DIFF_DST, numbers), (_DIFF_SRC, numbers)),
        )  # fmt: skip
        self.library.dnnl_primitive_desc_destroy(forward)
        return primitive

    def _description(self, array: np.ndarray) -> ctypes.c_void_p:
        dims = _array_type(ctypes.c_int64, array.ndim)
        made = ctypes.c_void_p()
        strides = [stride // array.itemsize for stride in array.strides]
        _check(self.library.dnnl_memory_desc_create_with_strides(
            ctypes.byref(made), array.ndim, dims(*array.shape), _DTYPES[array.dtype], dims(*strides)))  # fmt: skip
        return made

    def _wide(self, place: int, array: np.ndarray) -> np.ndarray:
        """Returns scratch memory for an array in float32, with its shape."""
        if self.wide[place].size < array.size:
            self.wide[place] = np.empty(array.size, np.float32)
        return self.wide[place][: array.size].reshape(array.shape)

    def _widened(self, place: int, array: np.ndarray) -> np.ndarray:
        """Returns a narrow array in float32, dense along the same axis."""
        if array.strides[-1] != array.itemsize and array.shape[-1] > 1:
            return self._widened(place, array.swapaxes(-1, -2)).swapaxes(-1, -2)
        wide = self._wide(place, array)
        self.cast(array, wide)
        return wide

    def _sum(self) -> ctypes.c_void_p:
        """Returns the attributes of a primitive that adds its result to its output."""
        after = ctypes.c_void_p()
        attributes = ctypes.c_void_p()
        _check(self.library.dnnl_post_ops_create(ctypes.byref(after)))
        _check(self.library.dnnl_post_ops_append_sum(after, ctypes.c_float(1), 0, 0))
        _check(self.library.dnnl_primitive_attr_create(ctypes.byref(attributes)))
        _check(self.library.dnnl_primitive_attr_set_post_ops(attributes, after))
        self.library.dnnl_post_ops_destroy(after)
        return attributes

    def _kind(self, name: str, arguments: Sequence, attributes: ctypes.c_void_p | None = None) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        create = getattr(self.library, f"dnnl_{name}_primitive_desc_create")
        _check(create(ctypes.byref(made), self.engine, *arguments, attributes))
        if attributes is not None:
            self.library.dnnl_primitive_attr_destroy(attributes)
        return made

    def _make(
        self, key: tuple, name: str, arguments: Sequence, places: Sequence[tuple[int, ctypes.c_void_p]],
        attributes: ctypes.c_void_p | None = None,
    ) -> _Primitive:  # fmt: skip
        """Makes and keeps a primitive; frees its attributes and the descriptions of its arguments, `places`."""
        return self._keep(key, self._kind(name, arguments, attributes), places)

    def _keep(
        self, key: tuple, kind: ctypes.c_void_p, places: Sequence[tuple[int, ctypes.c_void_p]]
    ) -> _Primitive:
        """Makes and keeps the primitive of a descriptor; frees it and the descriptions of its arguments, `places`."""
        if len(self.made) == _MAX_PRIMITIVES:
            for primitive in self.made.values():
                primitive.close()
            self.made.clear()
        made = ctypes.c_void_p()
        memories = []
        _check(self.library.dnnl_primitive_create(ctypes.byref(made), kind))
        self.library.dnnl_primitive_desc_destroy(kind)
        for place, description in places:
            memory = ctypes.c_void_p()
            _check(self.library.dnnl_memory_create(ctypes.byref(memory), description, self.engine, None))
            memories.append((place, memory))
        for address in {description.value for _, description in places}:
            self.library.dnnl_memory_desc_destroy(ctypes.c_void_p(address))
        self.made[key] = _Primitive(self.library, made, memories)
        return self.made[key]


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


def _layout(matrix: np.ndarray) -> tuple[bytes, int]:
    """Returns b"T" for a transposed matrix and b"N" for another one, and the distance of its stored rows."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.strides[-2:]
    if column_stride == matrix.itemsize or columns == 1:
        return b"N", max(row_stride // matrix.itemsize, columns)  # the stride of an axis of length 1 says nothing
    return b"T", max(column_stride // matrix.itemsize, rows)


def _conflicts(a: np.ndarray, way_a: bytes, step_a: int, b: np.ndarray, way_b: bytes, step_b: int) -> bool:
    """Returns whether oneDNN's product a b without AVX-512 loses its speed because rows compete for cache lines.

    With at most some 380 rows it reads the matrices in place: rows that are a multiple of 2 KiB apart then lie in the
    same few lines of a cache, and the product takes up to 2.5 times as long as NumPy's, which copies them first. With
    both matrices transposed or b alone it reads along the stored rows, and is never slow.
    """
    if a.dtype != np.float32 or way_b == b"T" or min(*a.shape[-2:], b.shape[-1]) < _WIDE:
        return False
    return step_b % _CONFLICT == 0 or (way_a == b"T" and step_a % _CONFLICT == 0)


DATA = object.__basicsize__
"""Where an array's object has the address of its first number, in bytes from the object."""


def address(array: np.ndarray) -> int:
    """Returns the address of the first number of an array.

    It is the first field of numpy/ndarraytypes.h's PyArrayObject_fields, behind the header of all Python objects.
    NumPy's attributes for it take five times as long, as long as a small product.
    """
    return ctypes.c_void_p.from_address(id(array) + DATA).value or 0


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
