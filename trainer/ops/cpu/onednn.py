"""Matrix products and row-wise functions of arrays through the oneDNN library that MindSpore brings along.

oneDNN's products are faster than those of NumPy's library, add to what is there at no cost, and take bfloat16; its
softmax takes a third of NumPy's time. The library is called through its C interface (`dnnl.h` of version 3.10), in the
thread of the caller. Without the library, or with another version of it, NumPy computes the same.

Matrices may be views: one of their last two axes must be dense, as it is in a transposed one. Products take any shape
at once. For the other functions oneDNN compiles code for each shape, which takes a millisecond and stays: they are made
for few shapes, and where these depend on the data, for parts of fixed sizes.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

_VERSION = (3, 10)  # the interface below is that of these releases
# Enumerations of dnnl_types.h.
_CPU, _FLOAT32 = 1, 3
_FORWARD = 64
_SOFTMAX, _SWISH = 0x30000, 0x2C
_SRC, _DST, _DIFF_SRC, _DIFF_DST = 1, 17, 129, 145


class Operators(Protocol):
    """Functions of float32 arrays; each writes to its last array. Of one thread.

    The arrays of `silu` and `silu_gradient` are contiguous.
    """

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
        """out = a b, or with `accumulate` out += a b: [M, K] times [K, N], or [P, M, K] times [P, K, N]."""

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        """Over the last axis; `out` may be x."""

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        """y (grad - sum(grad y)): of a softmax with result y; `out` may be `grad`."""

    def silu(self, x: np.ndarray, out: np.ndarray) -> None:
        """x / (1 + exp(-x)); `out` may be x."""

    def silu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        """grad (s + x s (1 - s)) with s = 1 / (1 + exp(-x)); `out` may be `grad` or x."""


_OF_THREAD = threading.local()


def operators() -> Operators:
    """Those of the calling thread: oneDNN's engines and streams are not to be shared between threads."""
    if not hasattr(_OF_THREAD, "operators"):
        found = library()
        _OF_THREAD.operators = NumpyOperators() if found is None else OneDnnOperators(found)
    return _OF_THREAD.operators


@functools.cache
def library() -> ctypes.CDLL | None:
    """The oneDNN that MindSpore brings along; None where it is missing or of another version."""
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        return None
    try:
        found = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libdnnl.so.3"))
        found.dnnl_version.restype = ctypes.POINTER(ctypes.c_int * 3)
        version = found.dnnl_version().contents
        found.dnnl_threadpool_interop_stream_create  # noqa: B018  built with other threads, it has none
    except (OSError, AttributeError):
        return None
    return found if tuple(version)[:2] == _VERSION else None


class NumpyOperators:
    """`Operators` in NumPy."""

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
        if accumulate:
            out += np.matmul(a, b)
        else:
            np.matmul(a, b, out=out)

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        np.subtract(x, x.max(-1, keepdims=True), out=out)
        np.exp(out, out=out)
        out /= out.sum(-1, keepdims=True)

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        sums = np.einsum("...i,...i->...", y, grad)[..., None]
        np.subtract(grad, sums, out=out)
        out *= y

    def silu(self, x: np.ndarray, out: np.ndarray) -> None:
        np.divide(x, 1 + np.exp(-x), out=out)  # exp(-x) = inf: silu is 0

    def silu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        sigmoid = 1 / (1 + np.exp(-x))
        np.multiply(grad, sigmoid * (1 + x * (1 - sigmoid)), out=out)


@functools.cache
def _array_of(kind: type, number: int) -> type:
    """ctypes forgets an array type that nobody uses, and makes it anew: a type is garbage that only Python's collector
    finds."""
    return kind * number


_PARTS = tuple(1 << bits for bits in range(16, 7, -1))
"""Numbers that an element-wise primitive takes, largest first; NumPy takes what remains."""
_MOST_PRIMITIVES = 512  # that a thread keeps


class _Argument(ctypes.Structure):
    _fields_ = (("place", ctypes.c_int), ("memory", ctypes.c_void_p))


class _Primitive:
    """A oneDNN primitive with the memory objects of its arguments, whose addresses are set for each call."""

    def __init__(
        self, library: ctypes.CDLL, primitive: ctypes.c_void_p, memories: Sequence[tuple[int, ctypes.c_void_p]]
    ) -> None:
        self.library, self.primitive, self.memories = library, primitive, [memory for _, memory in memories]
        self.arguments = _array_of(_Argument, len(memories))(*(_Argument(place, memory) for place, memory in memories))
        self.set_address, self.execute = library.dnnl_memory_set_data_handle, library.dnnl_primitive_execute

    def run(self, stream: ctypes.c_void_p, *arrays: np.ndarray) -> None:
        for memory, array in zip(self.memories, arrays, strict=True):
            self.set_address(memory, ctypes.c_void_p(_address(array)))
        _check(self.execute(self.primitive, stream, len(self.memories), self.arguments))

    def close(self) -> None:
        self.library.dnnl_primitive_destroy(self.primitive)
        for memory in self.memories:
            self.library.dnnl_memory_destroy(memory)


class OneDnnOperators:
    """`Operators` in oneDNN."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.engine, self.stream = library, ctypes.c_void_p(), ctypes.c_void_p()
        _check(library.dnnl_engine_create(ctypes.byref(self.engine), _CPU, ctypes.c_size_t(0)))
        # Without a thread pool of oneDNN's interface the caller's thread computes.
        _check(library.dnnl_threadpool_interop_stream_create(ctypes.byref(self.stream), self.engine, None))
        self.made: dict[tuple, _Primitive] = {}
        self.sgemm = _sgemm(library)

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
        (rows, inner), columns, beta = a.shape[-2:], b.shape[-1], 1.0 if accumulate else 0.0
        if not (rows and inner and columns):
            NumpyOperators().matmul(a, b, out, accumulate)
            return
        (way_a, step_a), (way_b, step_b), step = _layout(a), _layout(b), _layout(out)[1]
        at_a, at_b, at_out = _address(a), _address(b), _address(out)
        for place in range(1 if a.ndim == 2 else len(a)):
            if place:
                at_a, at_b, at_out = at_a + a.strides[0], at_b + b.strides[0], at_out + out.strides[0]
            status = self.sgemm(way_a, way_b, rows, columns, inner, 1.0, at_a, step_a, at_b, step_b, beta, at_out,
                                step, None)  # fmt: skip
            _check(status)

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        key = ("softmax", x.shape, x.strides, out.strides)
        if (primitive := self.made.get(key)) is None:
            source, result = self._description(x), self._description(out)
            primitive = self._make(
                key, "softmax_forward", (_FORWARD, _SOFTMAX, source, result, x.ndim - 1),
                ((_SRC, source), (_DST, result)),
            )  # fmt: skip
        primitive.run(self.stream, x, out)

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        key = ("softmax_gradient", y.shape, y.strides, grad.strides, out.strides)
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
        for parts in _fixed_parts(x, out):
            size = parts[0].size
            if size < _PARTS[-1]:
                NumpyOperators().silu(*parts)
                continue
            if (primitive := self.made.get(("silu", size))) is None:
                numbers = self._description(parts[0])
                primitive = self._make(
                    ("silu", size), "eltwise_forward", (_FORWARD, _SWISH, numbers, numbers, *_SWISH_FACTORS),
                    ((_SRC, numbers), (_DST, numbers)),
                )  # fmt: skip
            primitive.run(self.stream, *parts)

    def silu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        for parts in _fixed_parts(x, grad, out):
            size = parts[0].size
            if size < _PARTS[-1]:
                NumpyOperators().silu_gradient(*parts)
                continue
            if (primitive := self.made.get(("silu_gradient", size))) is None:
                numbers = self._description(parts[0])
                forward = self._kind("eltwise_forward", (_FORWARD, _SWISH, numbers, numbers, *_SWISH_FACTORS))
                primitive = self._make(
                    ("silu_gradient", size), "eltwise_backward",
                    (_SWISH, numbers, numbers, numbers, *_SWISH_FACTORS, forward),
                    ((_SRC, numbers), (_DIFF_DST, numbers), (_DIFF_SRC, numbers)),
                )  # fmt: skip
                self.library.dnnl_primitive_desc_destroy(forward)
            primitive.run(self.stream, *parts)

    def _description(self, array: np.ndarray) -> ctypes.c_void_p:
        dims = _array_of(ctypes.c_int64, array.ndim)
        made, strides = ctypes.c_void_p(), [stride // array.itemsize for stride in array.strides]
        _check(self.library.dnnl_memory_desc_create_with_strides(
            ctypes.byref(made), array.ndim, dims(*array.shape), _FLOAT32, dims(*strides)))  # fmt: skip
        return made

    def _kind(self, name: str, arguments: Sequence) -> ctypes.c_void_p:
        made, create = ctypes.c_void_p(), getattr(self.library, f"dnnl_{name}_primitive_desc_create")
        _check(create(ctypes.byref(made), self.engine, *arguments, None))
        return made

    def _make(
        self, key: tuple, name: str, arguments: Sequence, places: Sequence[tuple[int, ctypes.c_void_p]]
    ) -> _Primitive:
        """Makes a primitive and keeps it; `places` are its arguments, with descriptions that are used up."""
        if len(self.made) == _MOST_PRIMITIVES:
            for primitive in self.made.values():
                primitive.close()
            self.made.clear()
        kind, made, memories = self._kind(name, arguments), ctypes.c_void_p(), []
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


def _sgemm(library: ctypes.CDLL) -> ctypes._CFuncPtr:
    """out = alpha a b + beta out in the thread of the caller, for matrices that are stored by rows."""
    size, number, address = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    found = library.dnnl_threadpool_interop_sgemm
    found.argtypes = (
        *(ctypes.c_char,) * 2, *(size,) * 3, number, address, size, address, size, number, address, size, address,
    )  # fmt: skip
    return found


def _layout(matrix: np.ndarray) -> tuple[bytes, int]:
    """Whether a matrix is the transposed one of what is stored, and the numbers from one stored row to the next."""
    (rows, columns), (of_row, of_column) = matrix.shape[-2:], matrix.strides[-2:]
    if of_column == matrix.itemsize or columns == 1:
        return b"N", max(of_row // matrix.itemsize, columns)  # the stride of an axis of length 1 says nothing
    return b"T", max(of_column // matrix.itemsize, rows)


def _address(array: np.ndarray) -> int:
    """Of the first number. It is the first field of numpy/ndarraytypes.h's PyArrayObject_fields, after the head that
    all objects of Python have; the attributes that tell it take five times as long, as long as a small product."""
    return ctypes.c_void_p.from_address(id(array) + object.__basicsize__).value or 0


def _fixed_parts(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Contiguous arrays of equal size in parts of `_PARTS`, and what remains."""
    flat = [array.reshape(-1) for array in arrays]
    start, end = 0, flat[0].size
    while start < end:
        size = next((size for size in _PARTS if size <= end - start), end - start)
        yield tuple(array[start : start + size] for array in flat)
        start += size


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"oneDNN: status {status}")  # see dnnl_status_t
