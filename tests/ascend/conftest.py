"""Runs cases on MindSpore's own Ascend backend in its dry run: all cases of a file and a rank in one process.

A test file declares its cases in a dict `CASES`, name -> `ascend_cases.OnAscend`, and its tests ask the fixture
`bench` for the measurement of a name. The first one that asks has all cases of that rank run: loading the backend takes
a second, a case about one. Files do not share a process: a legacy kernel is prepared, and seen, once in each. The
processes are forked from one that has imported MindSpore in the backend's environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ascend_cases import OnAscend
from fork_server import FORKED, start_server

from trainer.dryrun.cann_stubs import build_cann_stubs, missing_compiler
from trainer.dryrun.process import Measurement, environment, run_cases

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = missing_compiler()
    for item in items:
        if missing and _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def python() -> tuple[str, ...]:
    """Returns the start of the command of a dry run."""
    return sys.executable, str(FORKED), "at", start_server(environment(os.environ, build_cann_stubs(), 1, 0))


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, python: tuple[str, ...]) -> Callable[[str], Measurement]:
    """Returns the function that measures a case of this file by its name."""
    cases: dict[str, OnAscend] = request.module.CASES
    measured: dict[str, Measurement] = {}

    def measurement(name: str) -> Measurement:
        if name not in measured:
            _, ranks, rank, _ = own = cases[name]
            alike = {each: on.case for each, on in cases.items() if on[1:] == own[1:]}
            measured.update(run_cases(alike, ranks, rank, python=python))
        return measured[name]

    return measurement
