"""Cells that are alike are compiled once a process, whichever model has them: compiling is most of what tests cost.

A compiled cell is a pure function, weights are its arguments, so models of the same shape may share it as the layers of
one model do. What tells cells apart is all that they hold; a cell with anything that is not described here is compiled
by itself. Models that freeze different weights share nothing: MindSpore keeps with a compiled function which of its
arguments needed a gradient at the first call, and others get zeros later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from trainer.models import moe, recompute
from trainer.models.decoder import Decoder

_OF_EVERY_CELL = frozenset(vars(nn.Cell()))


class NotDescribedError(Exception):
    """A cell holds something that cannot be compared."""


def description(value: Any) -> Any:
    """What a cell computes, as a value that is equal for cells that compute the same."""
    if value is None or isinstance(value, bool | int | float | str):
        return type(value), value
    if isinstance(value, tuple | list):
        return tuple(description(item) for item in value)
    if isinstance(value, nn.Cell):
        return _of_cell(value)
    if isinstance(value, Tensor) and not isinstance(value, mindspore.Parameter):
        array = value.asnumpy()
        return str(value.dtype), array.shape, array.tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, ops.Primitive):
        return type(value), repr(value)
    if isinstance(value, ops.GradOperation):
        return value.get_all, value.get_by_list, value.sens_param
    if isinstance(value, mindspore.dtype.Type):
        return str(value)
    if isinstance(value, FunctionType) and value.__qualname__ == value.__name__ != "<lambda>":
        return value.__module__, value.__name__  # of a module, so it holds nothing
    raise NotDescribedError(type(value).__name__)


def _of_cell(cell: nn.Cell) -> tuple:
    if cell._params:
        raise NotDescribedError("a cell with parameters of its own")
    kind = type(cell)
    own = {name: value for name, value in vars(cell).items() if name not in _OF_EVERY_CELL and name not in cell._cells}
    held = tuple((name, description(value)) for name, value in sorted(own.items()))
    cells = tuple((name, description(inner)) for name, inner in cell._cells.items())
    return kind, kind.construct, getattr(kind, "bprop", None), held, cells


class SharedCompilation:
    """`compile_cell` that returns what it made before for a cell that is alike, while a decoder is built."""

    def __init__(self, compile_cell: Callable) -> None:
        self.original, self.made = compile_cell, {}
        self.model: Any = None
        """What cells of the decoder that is being built share; None: no decoder is, and nothing is shared."""

    def compile_cell(self, cell: nn.Cell, compiled: Any) -> Callable:
        if not compiled or self.model is None:
            return self.original(cell, compiled)
        try:
            key = self.model, description(cell), repr(compiled)
        except NotDescribedError:
            return self.original(cell, compiled)
        if key not in self.made:
            self.made[key] = self.original(cell, compiled)
        return self.made[key]

    def building(self, build: Callable) -> Callable:
        """`Decoder.__init__`, whose cells are shared with decoders that freeze and recompute the same."""

        def init(model: Decoder, *arguments: Any, **how: Any) -> None:
            self.model = frozenset(how.get("frozen", ())), tuple(how.get("recomputed", ()))
            try:
                build(model, *arguments, **how)
            finally:
                self.model = None

        return init


@contextmanager
def shared_compiled_cells() -> Iterator[None]:
    shared = SharedCompilation(recompute.compile_cell)
    with pytest.MonkeyPatch.context() as patch:
        for module in (recompute, moe):
            patch.setattr(module, "compile_cell", shared.compile_cell)
        patch.setattr(Decoder, "__init__", shared.building(Decoder.__init__))
        yield
