"""What several files of unit tests start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import MISSING, Browser, open_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Provides one window for all tests: each opens its own page."""
    if MISSING:
        pytest.skip(MISSING)
    with open_browser(tmp_path_factory.mktemp("profile")) as found:
        yield found
