"""What every file of integration tests may start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import write_corpus


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder for all that the tests of a file write, with a corpus in `data`."""
    folder = tmp_path_factory.mktemp("home")
    write_corpus(folder / "data")
    return folder
