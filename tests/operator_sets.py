"""The sets of functions that layers call: NumPy's, and those compiled for each kind of processor."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path

import pytest

from trainer.arrays.compiled import build
from trainer.arrays.compiled.build import find_library
from trainer.arrays.compiled.operators import CompiledOperators
from trainer.arrays.numpy_operators import NUMPY_OPERATORS, NumpyOperators
from trainer.arrays.onednn import OneDnnOperators
from trainer.ops.host_library import has_avx2, library
from trainer.storage.compiler import find_compiler


def _compiled(flags: tuple[str, ...] | None) -> NumpyOperators | None:
    """Returns the operators of a library with the instructions of these flags; None: those of this processor."""
    onednn = library()
    if onednn is None or not find_compiler():
        return None
    if flags is None:
        compiled = find_library().library
        assert compiled is not None, find_library().text
    else:
        with tempfile.TemporaryDirectory() as folder:
            command = [*find_compiler(), *build.FLAGS, *flags]
            path = Path(folder) / "functions.so"
            build.compile_library(path, command)
            compiled = ctypes.CDLL(str(path))
    return CompiledOperators(onednn, compiled)


RUNS = {"numpy": NUMPY_OPERATORS, "this processor": _compiled(None), "any processor": _compiled(())}
if has_avx2():
    RUNS["AVX2"] = _compiled(build.AVX2)
    if isinstance(RUNS["AVX2"], OneDnnOperators):
        RUNS["AVX2"].has_avx512 = False
RUNS = {name: run for name, run in RUNS.items() if run is not None}
EACH = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
COMPILED = {name: run for name, run in RUNS.items() if isinstance(run, CompiledOperators)}
EACH_COMPILED = pytest.mark.parametrize("run", COMPILED.values(), ids=COMPILED)
