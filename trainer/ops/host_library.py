"""The oneDNN library that MindSpore brings along, and what it computes on this processor. Without MindSpore."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Literal, NamedTuple

_VERSION = (3, 10)  # the interface that `trainer.arrays.onednn` calls is that of these releases
# dnnl_cpu_isa_t: sets of instructions, each with the bits of those that it contains.
_AVX512 = 0x27
_BFLOAT16 = 0xE7


class OneDnn(NamedTuple):
    """The library, and what it is; or None, and why there is none."""

    library: ctypes.CDLL | None
    text: str


@functools.cache
def find_onednn() -> OneDnn:
    """Loads it, in a hundredth of a second."""
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        return OneDnn(None, "MindSpore is not installed")
    path = Path(spec.origin).parent / "lib" / "libdnnl.so.3"
    try:
        found = ctypes.CDLL(str(path))
        found.dnnl_version.restype = ctypes.POINTER(ctypes.c_int * 3)
        version = tuple(found.dnnl_version().contents)
        for name in ("dnnl_threadpool_interop_stream_create", "dnnl_threadpool_interop_sgemm"):
            getattr(found, name)  # built with other threads, it does not have them
    except OSError:
        return OneDnn(None, f"MindSpore's {path.name} cannot be loaded")
    except AttributeError:
        return OneDnn(None, f"MindSpore's {path.name} has another interface")
    name = f"oneDNN {'.'.join(map(str, version))}"
    if version[:2] != _VERSION:
        return OneDnn(None, f"MindSpore brings {name} instead of {'.'.join(map(str, _VERSION))}")
    return OneDnn(found, f"MindSpore's {name}")


def library() -> ctypes.CDLL | None:
    """oneDNN; None where it is missing or of another version."""
    return find_onednn().library


def has_bfloat16_casts() -> bool:
    """Whether oneDNN casts between float32 and bfloat16 with vector instructions; otherwise one number at a time."""
    return _has(_AVX512)


def bfloat16_products() -> Literal["oneDNN", "emulated", ""]:
    """Who multiplies numbers in bfloat16: oneDNN, or where the processor has no instructions for it its float32
    products of rounded numbers; empty where there is no library."""
    if library() is None:
        return ""
    if _has(_BFLOAT16):
        return "oneDNN"
    return "emulated"


def _has(instructions: int) -> bool:
    found = library()
    return found is not None and found.dnnl_get_effective_cpu_isa() & instructions == instructions
