"""Compiles the C files of this folder for this processor, once for each version of it, and loads the library."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from trainer.ops.host_library import has_avx2, has_avx512
from trainer.storage.cache_folder import build_once, user_cache
from trainer.storage.compiler import find_compiler

FOLDER = Path(__file__).parent
SOURCES = tuple(FOLDER / name for name in ("rowwise.c", "attention.c", "products.c", "prediction.c"))
HEADERS = tuple(FOLDER / name for name in ("vectors.h", "panels.h"))
FLAGS = ("-O3", "-fno-math-errno", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512")
AVX2 = ("-mavx2", "-mfma")
_TIMEOUT_SECONDS = 60


class CompiledLibrary(NamedTuple):
    """The library and its compiler, or None and the reason why there is none."""

    library: ctypes.CDLL | None
    text: str


@functools.cache
def find_library() -> CompiledLibrary:
    """Loads the library, and compiles it first where the user's cache lacks it, in a second.

    Without a compiler, or if it fails, NumPy and oneDNN compute the same functions more slowly.
    """
    compiler = find_compiler()
    if not compiler:
        return CompiledLibrary(None, "there is no C compiler")
    flags = (*FLAGS, *_instructions())
    digest = hashlib.sha256(" ".join((*compiler, *flags, platform.machine())).encode())
    for path in (*SOURCES, *HEADERS):
        digest.update(path.read_bytes())
    name = f"functions-{digest.hexdigest()[:16]}.so"
    try:
        return CompiledLibrary(_load_or_build(name, [*compiler, *flags]), f"compiled with {compiler[0]}")
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return CompiledLibrary(None, f"{compiler[0]} cannot compile the C functions of {FOLDER}: {error}")


def _instructions() -> tuple[str, ...]:
    """Returns the compiler's flags for the instructions that oneDNN uses, too."""
    if has_avx512():
        return AVX512
    if has_avx2():
        return AVX2
    return ()


def _load_or_build(name: str, command: list[str]) -> ctypes.CDLL:
    """Returns the library from the user's cache; builds it there first, or in a temporary folder.

    Raises:
        OSError: The library cannot be loaded, or no folder can be written.
        RuntimeError: The compiler fails.
        subprocess.SubprocessError: The compiler does not end.
    """
    target = user_cache() / name
    try:
        build_once(target, lambda path: compile_library(path, command))
        return ctypes.CDLL(str(target))
    except OSError:
        # There is no home, it cannot be written, or the file is damaged: the library lives as long as the process, and
        # the next process builds the file again.
        with contextlib.suppress(OSError):
            target.unlink()
        with tempfile.TemporaryDirectory(prefix="functions-") as building:
            target = Path(building) / name
            compile_library(target, command)
            return ctypes.CDLL(str(target))


def compile_library(path: Path, command: list[str]) -> None:
    """Compiles the library to `path`.

    Raises:
        RuntimeError: The compiler fails.
    """
    arguments = [*command, "-o", str(path), *map(str, SOURCES), "-lm"]
    result = subprocess.run(
        arguments, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_SECONDS
    )
    if result.returncode:
        lines = result.stderr.splitlines() or [f"exit code {result.returncode}"]
        raise RuntimeError(next((line for line in lines if "error" in line), lines[0]))
