"""Loads the oneDNN library of the installed MindSpore, without importing MindSpore."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Literal, NamedTuple

_VERSION = (3, 10)  # releases with the interface that `trainer.arrays.onednn` calls
# dnnl_cpu_isa_t: the value of an instruction set includes the bits of the sets that it contains.
_AVX2 = 0x7
_AVX512 = 0x27
_BFLOAT16 = 0xE7


class OneDnn(NamedTuple):
    """The library and its name; or None and the reason why it cannot be used."""

    library: ctypes.CDLL | None
    text: str


@functools.cache
def find_onednn() -> OneDnn:
    """Loads oneDNN, which takes a hundredth of a second; later calls return the same value."""
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        return OneDnn(None, "MindSpore is not installed")
    path = Path(spec.origin).parent / "lib" / "libdnnl.so.3"
    try:
        onednn = ctypes.CDLL(str(path))
        onednn.dnnl_version.restype = ctypes.POINTER(ctypes.c_int * 3)
        version = tuple(onednn.dnnl_version().contents)
        for name in ("dnnl_threadpool_interop_stream_create", "dnnl_threadpool_interop_sgemm"):
            getattr(onednn, name)  # missing in a build with another threading runtime
    except OSError:
        return OneDnn(None, f"MindSpore's {path.name} cannot be loaded")
    except AttributeError:
        return OneDnn(None, f"MindSpore's {path.name} has another interface")
    name = f"oneDNN {'.'.join(map(str, version))}"
    if version[:2] != _VERSION:
        return OneDnn(None, f"MindSpore brings {name} instead of {'.'.join(map(str, _VERSION))}")
    return OneDnn(onednn, f"MindSpore's {name}")


def library() -> ctypes.CDLL | None:
    """Returns oneDNN; None if it is missing or has another version."""
    return find_onednn().library


def has_avx512() -> bool:
    """Returns whether oneDNN computes with AVX-512.

    Without it, oneDNN 3.10 casts to bfloat16 and computes gradients of a softmax number by number, and some of its
    products take up to three times as long (`trainer.arrays.onednn`).
    """
    return _has_instructions(_AVX512)


def has_avx2() -> bool:
    """Returns whether oneDNN computes with AVX2."""
    return _has_instructions(_AVX2)


def bfloat16_products() -> Literal["oneDNN", "emulated", ""]:
    """Returns how bfloat16 matrices are multiplied on this processor.

    "oneDNN": with bfloat16 instructions. "emulated": with float32 products of rounded numbers, because the processor
    has no such instructions. An empty text: oneDNN is missing.
    """
    if library() is None:
        return ""
    if _has_instructions(_BFLOAT16):
        return "oneDNN"
    return "emulated"


def _has_instructions(instructions: int) -> bool:
    onednn = library()
    return onednn is not None and onednn.dnnl_get_effective_cpu_isa() & instructions == instructions
