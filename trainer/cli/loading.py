"""Loads modules and builds the schema without garbage collections."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disables Python's cyclic collector, which would inspect many thousands of new objects that are not garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # the first collection would go through all that was loaded
            gc.enable()
