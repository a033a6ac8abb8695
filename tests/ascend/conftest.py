"""Runs cases on MindSpore's own Ascend backend in its dry run: all cases of a file and a rank in one process.

A test file declares its cases in a dict `CASES`, name -> `ascend_cases.OnAscend`, and its tests ask the fixture
`bench` for the measurement of a name. The first one that asks has all cases of that rank run: loading the backend takes
three seconds, a case about one. Files do not share a process: a legacy kernel is prepared, and seen, once in each.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ascend_cases import OnAscend

from trainer.dryrun.process import Measurement, run_cases
from trainer.dryrun.stand_ins import missing_compiler

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = missing_compiler()
    for item in items:
        if missing and _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Callable[[str], Measurement]:
    """Name of a case of this file -> its measurement."""
    cases: dict[str, OnAscend] = request.module.CASES
    measured: dict[str, Measurement] = {}

    def measurement(name: str) -> Measurement:
        if name not in measured:
            _, ranks, rank, _ = own = cases[name]
            measured.update(run_cases({each: on.case for each, on in cases.items() if on[1:] == own[1:]}, ranks, rank))
        return measured[name]

    return measurement
