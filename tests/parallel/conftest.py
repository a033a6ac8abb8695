"""What the tests of jobs share."""

from collections.abc import Iterator

import pytest
from launch_helpers import end_all


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """A test that fails leaves no job behind."""
    yield
    end_all()
