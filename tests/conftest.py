"""Its presence puts this folder on the import path, so that every test may import the helpers beside it."""

import gc
import os
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """Binds each of several test processes to one core: MindSpore's threads poll, and two processes on the same
    cores make each other many times slower."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_finish() -> None:
    """Freezes what the imports made, because MindSpore collects garbage with every function that it compiles."""
    settle_heap()
    gc.set_threshold(20_000, 20, 20)


def settle_heap() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def settled_heap() -> Iterator[None]:
    """Freezes what a file of tests leaves behind, so that the garbage collector does not look at it again: MindSpore
    keeps every function that it has compiled."""
    yield
    settle_heap()
