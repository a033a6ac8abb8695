"""Loading modules and building the schema, without looking for garbage among what stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Python's cyclic collector is off: it would go through many thousands of new objects, of which none is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # the first collection would go through all that was loaded
            gc.enable()
