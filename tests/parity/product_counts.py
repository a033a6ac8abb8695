"""How many matrix products native layers compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer.arrays.numpy_operators import NumpyOperators
from trainer.arrays.onednn import OneDnnOperators


def product_counts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Returns what counts the products of a run; parts of one product, which several threads take, count each."""
    counted: list[int] = []
    for kind in (OneDnnOperators, NumpyOperators):

        def multiply(self: object, *arguments: object, plain: Callable = kind.matmul) -> None:
            counted.append(1)
            plain(self, *arguments)

        monkeypatch.setattr(kind, "matmul", multiply)

    def count(run: Callable[[], object]) -> int:
        counted.clear()
        run()
        return len(counted)

    return count
