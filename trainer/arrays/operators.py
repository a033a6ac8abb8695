"""The operators of the calling thread: compiled ones and oneDNN's where the machine has them, otherwise NumPy's."""

from __future__ import annotations

import threading

from trainer.arrays.compiled.build import find_library
from trainer.arrays.compiled.operators import CompiledOperators
from trainer.arrays.numpy_operators import NUMPY_OPERATORS, NumpyOperators
from trainer.arrays.onednn import OneDnnOperators
from trainer.ops.host_library import library

_THREAD = threading.local()
_ONE_COMPILES = threading.Lock()


def operators() -> NumpyOperators:
    """Returns the operators of the calling thread: threads must not share oneDNN's engines and streams."""
    if not hasattr(_THREAD, "operators"):
        _THREAD.operators = _make_operators()
    return _THREAD.operators


def _make_operators() -> NumpyOperators:
    onednn = library()
    if onednn is None:
        return NUMPY_OPERATORS
    with _ONE_COMPILES:
        compiled = find_library().library
    if compiled is None:
        return OneDnnOperators(onednn)
    return CompiledOperators(onednn, compiled)
