"""Fixtures of the tests that start jobs. Tests marked `overlapping` mostly wait for their processes: those of one file
run in threads at the same time, and each is reported separately."""

from __future__ import annotations

import fcntl
import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from launch_helpers import end_all
from msrun_helpers import run_job

_RESULTS = pytest.StashKey[dict[str, Future]]()
_POOLS = pytest.StashKey[list[ThreadPoolExecutor]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "overlapping(count): runs beside the other tests of its file, so many at once")


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """Stops the jobs that a failed test leaves behind."""
    yield
    end_all()


@pytest.fixture(scope="session")
def folder_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Returns a function that gives the folder in which the job of collectives_worker.py on so many ranks left its
    results. One job serves all tests, whichever test process they run in."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(ranks: int) -> Path:
        folder = base / f"ranks-{ranks}"
        with (base / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                worker = Path(__file__).with_name("collectives_worker.py")
                run_job(worker, folder, workers=ranks, folder=folder / "logs", limit_seconds=240)
        return folder

    return folder_of


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("overlapping")
    if marker is None:
        return None
    results = pyfuncitem.session.stash.setdefault(_RESULTS, {})
    if pyfuncitem.nodeid not in results:  # the first one of its file starts all
        pool = ThreadPoolExecutor(*marker.args)
        pyfuncitem.session.stash.setdefault(_POOLS, []).append(pool)
        for number, item in enumerate(pyfuncitem.session.items):
            if item.path == pyfuncitem.path and item.get_closest_marker("overlapping"):
                results[item.nodeid] = pool.submit(_call, item, pyfuncitem.funcargs["tmp_path"] / str(number))
    results[pyfuncitem.nodeid].result()
    return True


def _call(item: pytest.Function, folder: Path) -> None:
    values = {**(item.callspec.params if hasattr(item, "callspec") else {}), "tmp_path": folder}
    folder.mkdir()
    try:
        item.function(**{name: values[name] for name in inspect.signature(item.function).parameters})
    finally:
        end_all()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Cancels jobs that have not begun when a session is interrupted."""
    for pool in session.stash.get(_POOLS, []):
        pool.shutdown(cancel_futures=True)
