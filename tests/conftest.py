"""Its presence puts this folder on the import path, so that every test may import the helpers beside it."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def settled_heap() -> Iterator[None]:
    """What a file of tests leaves behind stays to the end (MindSpore keeps every function that it has compiled): the
    garbage collector need not look at it again and again."""
    yield
    gc.collect()
    gc.freeze()
