"""What every file of integration tests may start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled_cells import shared_compiled_cells
from run_helpers import write_corpus


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Runs in this process share what they compile; a run in a process of its own compiles for itself."""
    with shared_compiled_cells():
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all that the tests of a file write, with a corpus in `data`."""
    folder = tmp_path_factory.mktemp("home")
    write_corpus(folder / "data")
    return folder
