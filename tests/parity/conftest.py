"""Parity tests compute as a run does: with the threads that a run sets up, which are several times faster."""

import pytest

from trainer.device.threads import set_up_cpu_threads


@pytest.fixture(scope="session", autouse=True)
def cpu_threads() -> None:
    set_up_cpu_threads()
