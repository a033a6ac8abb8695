"""What every file of integration tests may start from."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_helpers import train, write_config, write_corpus

_BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""Before any test."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for all that the tests of a file write, with a corpus in `data`."""
    folder = tmp_path_factory.mktemp("home")
    write_corpus(folder / "data")
    return folder


@pytest.fixture(scope="module")
def path(home: Path, request: pytest.FixtureRequest) -> Path:
    """Returns the configuration of a file of tests, with its `CHANGES`."""
    return write_config(home / "config", home / "data", request.module.CHANGES)


@pytest.fixture(scope="module")
def whole(home: Path, path: Path) -> Path:
    """Trains without interruption."""
    return train(path, output_dir=home / "whole")


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restores the signals that a command blocks in this process: the processes of later tests would inherit them."""
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, _BLOCKED)
