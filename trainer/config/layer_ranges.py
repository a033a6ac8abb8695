"""Layers as people write them: ``3``, ``"0-3"``, ``"0-3, 8"``, or a list of these. Both ends of a range count."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


class LayerError(ValueError):
    """What is wrong with a choice of layers, as a sentence without its full stop."""


def layer_numbers(written: Any, num_layers: int, modules: int = 0) -> list[int]:
    """The layers that were meant, in order, from 0.

    Args:
        written: An integer, a string, or a list of them.
        num_layers: Layers of the model.
        modules: Multi-token prediction modules, which count on after the last layer.

    Raises:
        LayerError: It names no layers, or layers that the model does not have.
    """
    if isinstance(written, list):
        parts = written
    else:
        parts = [written]
    numbers = {number for part in parts for number in _numbers(part)}
    beyond = sorted(number for number in numbers if not 0 <= number < num_layers + modules)
    if beyond:
        rule = f"there is no layer {beyond[-1]}: the model's layers are {all_layers(num_layers)}"
        kind = "modules"
        if modules == 1:
            kind = "module"
        mtp = layer_text(range(num_layers, num_layers + modules)).removeprefix("layers ").removeprefix("layer ")
        raise LayerError(f"{rule}, and its multi-token prediction {kind} (mtp_depth) {mtp}" if modules else rule)
    if not numbers:
        raise LayerError("it names no layer")
    return sorted(numbers)


def _numbers(part: Any) -> Iterable[int]:
    if isinstance(part, int) and not isinstance(part, bool):
        return [part]
    if isinstance(part, list):
        raise LayerError(f"{part} is a list in the list: one list numbers all layers of the model, pipeline or not")
    if not isinstance(part, str):
        raise LayerError(f"{part!r} is no layer: write a number such as 3 or a range such as 0-3")
    numbers: list[int] = []
    for piece in part.split(","):
        found = _RANGE.fullmatch(piece.strip())
        if not found:
            raise LayerError(f"{part!r} is no layer: write a number such as 3 or a range such as 0-3")
        first = int(found[1])
        last = int(found[2] or found[1])
        if last < first:
            raise LayerError(f"the range {piece.strip()} ends before it begins")
        # A range far beyond any model is not worth its memory: its ends say what is wrong with it.
        numbers += range(first, last + 1) if last - first < 100_000 else (first, last)
    return numbers


def all_layers(num_layers: int) -> str:
    """``0 to 3``, or ``0`` for a single one."""
    if num_layers > 1:
        return f"0 to {num_layers - 1}"
    return "0"


def layer_text(layers: Iterable[int]) -> str:
    """The layers as they would be written: ``layer 3``, ``layers 0-3, 8``."""
    numbers = sorted(layers)
    spans: list[list[int]] = []
    for layer in numbers:
        if spans and layer == spans[-1][-1] + 1:
            spans[-1][1:] = [layer]
        else:
            spans.append([layer])
    return f"layer{'s' if len(numbers) > 1 else ''} {', '.join('-'.join(map(str, span)) for span in spans)}"
