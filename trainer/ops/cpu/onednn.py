"""Matrix products and row-wise functions of arrays through the oneDNN library that MindSpore brings along.

oneDNN's products are faster than those of NumPy's library, add to what is there at no cost, and take bfloat16; its
softmax takes a third of NumPy's time. The library is called through its C interface (`dnnl.h` of version 3.10), in the
thread of the caller. Without the library, or with another version of it, NumPy computes the same.

Arrays may be views: one of the last two axes of a matrix must be dense, as it is in a transposed one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

_VERSION = (3, 10)  # the interface below is that of these releases
# Enumerations of dnnl_types.h.
_CPU, _FLOAT32 = 1, 3
_FORWARD = 64
_SOFTMAX, _SWISH = 0x30000, 0x2C
_SRC, _WEIGHTS, _DST, _DIFF_SRC, _DIFF_DST = 1, 33, 17, 129, 145


class Operators(Protocol):
    """Functions of float32 arrays; each writes to its last array. Of one thread."""

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
        """out = a b, or with `accumulate` out += a b; [..., M, K] times [..., K, N], the first axes alike."""

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
        np.divide(x, _one_plus_exp(x), out=out)

    def silu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        sigmoid = np.reciprocal(_one_plus_exp(x))
        np.multiply(grad, sigmoid * (1 + x * (1 - sigmoid)), out=out)


def _one_plus_exp(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # exp(-x) = inf: silu is 0
        return 1 + np.exp(-x)


@functools.cache
def _array_of(kind: type, number: int) -> type:
    """ctypes forgets an array type that nobody uses, and makes it anew: a type is garbage that only Python's collector
    finds."""
    return kind * number


class _Argument(ctypes.Structure):
    _fields_ = (("place", ctypes.c_int), ("memory", ctypes.c_void_p))


class _Primitive:
    """A oneDNN primitive with the memory objects of its arguments, whose addresses are set for each call."""

    def __init__(
        self, library: ctypes.CDLL, primitive: ctypes.c_void_p, memories: Sequence[tuple[int, ctypes.c_void_p]]
    ) -> None:
        self.primitive, self.number = primitive, len(memories)
        self.memories = [memory for _, memory in memories]
        self.arguments = _array_of(_Argument, len(memories))(*(_Argument(place, memory) for place, memory in memories))
        self.set_address, self.execute = library.dnnl_memory_set_data_handle, library.dnnl_primitive_execute

    def run(self, stream: ctypes.c_void_p, *arrays: np.ndarray) -> None:
        for memory, array in zip(self.memories, arrays, strict=True):
            self.set_address(memory, ctypes.c_void_p(array.__array_interface__["data"][0]))
        _check(self.execute(self.primitive, stream, self.number, self.arguments))


class OneDnnOperators:
    """`Operators` in oneDNN. Primitives are made once for each shape and layout."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.engine, self.stream = library, ctypes.c_void_p(), ctypes.c_void_p()
        _check(library.dnnl_engine_create(ctypes.byref(self.engine), _CPU, ctypes.c_size_t(0)))
        # Without a thread pool of oneDNN's interface the caller's thread computes.
        _check(library.dnnl_threadpool_interop_stream_create(ctypes.byref(self.stream), self.engine, None))
        self.made: dict[tuple, _Primitive] = {}

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, accumulate: bool = False) -> None:
        if not a.size or not b.size:
            NumpyOperators().matmul(a, b, out, accumulate)
            return
        key = (a.shape, a.strides, b.shape, b.strides, out.strides, accumulate)
        if (primitive := self.made.get(key)) is None:
            descriptions = [self._description(array) for array in (a, b, out)]
            primitive = self.made[key] = self._make(
                "matmul_primitive_desc_create", (descriptions[0], descriptions[1], None, descriptions[2]),
                self._sum() if accumulate else None, zip((_SRC, _WEIGHTS, _DST), descriptions, strict=True),
            )  # fmt: skip
        primitive.run(self.stream, a, b, out)

    def softmax(self, x: np.ndarray, out: np.ndarray) -> None:
        key = ("softmax", x.shape, x.strides, out.strides)
        if (primitive := self.made.get(key)) is None:
            source, result = self._description(x), self._description(out)
            primitive = self.made[key] = self._make(
                "softmax_forward_primitive_desc_create", (_FORWARD, _SOFTMAX, source, result, x.ndim - 1), None,
                ((_SRC, source), (_DST, result)),
            )  # fmt: skip
        primitive.run(self.stream, x, out)

    def softmax_gradient(self, y: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        key = ("softmax_gradient", y.shape, y.strides, grad.strides, out.strides)
        if (primitive := self.made.get(key)) is None:
            result, of_result, of_source = (self._description(array) for array in (y, grad, out))
            forward = self._kind("softmax_forward_primitive_desc_create",
                                 (_FORWARD, _SOFTMAX, result, result, y.ndim - 1), None)  # fmt: skip
            primitive = self.made[key] = self._make(
                "softmax_backward_primitive_desc_create",
                (_SOFTMAX, of_source, of_result, result, y.ndim - 1, forward), None,
                ((_DST, result), (_DIFF_DST, of_result), (_DIFF_SRC, of_source)),
            )  # fmt: skip
        primitive.run(self.stream, y, grad, out)

    def silu(self, x: np.ndarray, out: np.ndarray) -> None:
        key = ("silu", x.shape, x.strides, out.strides)
        if (primitive := self.made.get(key)) is None:
            source, result = self._description(x), self._description(out)
            primitive = self.made[key] = self._make(
                "eltwise_forward_primitive_desc_create", (_FORWARD, _SWISH, source, result, *_SWISH_FACTORS), None,
                ((_SRC, source), (_DST, result)),
            )  # fmt: skip
        primitive.run(self.stream, x, out)

    def silu_gradient(self, x: np.ndarray, grad: np.ndarray, out: np.ndarray) -> None:
        key = ("silu_gradient", x.shape, x.strides, grad.strides, out.strides)
        if (primitive := self.made.get(key)) is None:
            source, of_result, of_source = (self._description(array) for array in (x, grad, out))
            forward = self._kind("eltwise_forward_primitive_desc_create",
                                 (_FORWARD, _SWISH, source, source, *_SWISH_FACTORS), None)  # fmt: skip
            primitive = self.made[key] = self._make(
                "eltwise_backward_primitive_desc_create",
                (_SWISH, of_source, of_result, source, *_SWISH_FACTORS, forward), None,
                ((_SRC, source), (_DIFF_DST, of_result), (_DIFF_SRC, of_source)),
            )  # fmt: skip
        primitive.run(self.stream, x, grad, out)

    def _description(self, array: np.ndarray) -> ctypes.c_void_p:
        dims = _array_of(ctypes.c_int64, array.ndim)
        made, strides = ctypes.c_void_p(), [stride // array.itemsize for stride in array.strides]
        _check(self.library.dnnl_memory_desc_create_with_strides(
            ctypes.byref(made), array.ndim, dims(*array.shape), _FLOAT32, dims(*strides)))  # fmt: skip
        return made

    def _sum(self) -> ctypes.c_void_p:
        """Attributes of a primitive that adds its result to what is there."""
        after, attributes = ctypes.c_void_p(), ctypes.c_void_p()
        _check(self.library.dnnl_post_ops_create(ctypes.byref(after)))
        _check(self.library.dnnl_post_ops_append_sum(after, ctypes.c_float(1), 0, 0))
        _check(self.library.dnnl_primitive_attr_create(ctypes.byref(attributes)))
        _check(self.library.dnnl_primitive_attr_set_post_ops(attributes, after))
        return attributes

    def _kind(self, create: str, arguments: Sequence, attributes: ctypes.c_void_p | None) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        function = getattr(self.library, f"dnnl_{create}")
        _check(function(ctypes.byref(made), self.engine, *arguments, attributes))
        return made

    def _make(self, create: str, arguments: Sequence, attributes: ctypes.c_void_p | None, places) -> _Primitive:
        kind, made, memories = self._kind(create, arguments, attributes), ctypes.c_void_p(), []
        _check(self.library.dnnl_primitive_create(ctypes.byref(made), kind))
        for place, description in places:
            memory = ctypes.c_void_p()
            _check(self.library.dnnl_memory_create(ctypes.byref(memory), description, self.engine, None))
            memories.append((place, memory))
        return _Primitive(self.library, made, memories)


_SWISH_FACTORS = ctypes.c_float(1), ctypes.c_float(0)  # x sigmoid(1 x)


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"oneDNN: status {status}")  # see dnnl_status_t
