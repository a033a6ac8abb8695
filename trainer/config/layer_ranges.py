"""Reads and writes layers as ``3``, ``"0-3"``, ``"0-3, 8"``, or a list of these. Ranges include both ends."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from trainer.errors import shorten_repr, value_text

_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


class LayerError(ValueError):
    """A choice of layers that is wrong; its text is the reason, as a sentence without its full stop."""


def layer_numbers(written: Any, num_layers: int, modules: int = 0) -> list[int]:
    """Returns the chosen layers in ascending order, from 0.

    Args:
        written: An integer, a string, or a list of them.
        num_layers: Layers of the model.
        modules: Multi-token prediction modules; their numbers follow those of the layers.

    Raises:
        LayerError: It names no layers, or layers that the model does not have.
    """
    parts = [written]
    if isinstance(written, list):
        parts = written
    numbers = {number for part in parts for number in _numbers(part)}
    beyond = sorted(number for number in numbers if not 0 <= number < num_layers + modules)
    if beyond:
        rule = f"there is no layer {beyond[-1]}: the model's layers are {all_layers(num_layers)}"
        if modules == 1:
            rule += f", and its multi-token prediction module (mtp_depth) {num_layers}"
        elif modules:
            last = num_layers + modules - 1
            rule += f", and its multi-token prediction modules (mtp_depth) {num_layers}-{last}"
        raise LayerError(rule)
    if not numbers:
        raise LayerError("it names no layer")
    return sorted(numbers)


def _numbers(part: Any) -> Iterable[int]:
    if isinstance(part, int) and not isinstance(part, bool):
        return [part]
    if isinstance(part, list):
        raise LayerError(f"{value_text(part)} is a list in a list: write one list with the layers of the model")
    numbers: list[int] = []
    for piece in str(part).split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is None or not isinstance(part, str):
            raise LayerError(f"{shorten_repr(part)} is not a layer: write a number such as 3 or a range such as 0-3")
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise LayerError(f"the range {piece.strip()} ends before it begins")
        if last - first < 100_000:
            numbers += range(first, last + 1)
        else:  # far beyond any model: the ends suffice for an error, and save memory
            numbers += (first, last)
    return numbers


def all_layers(num_layers: int) -> str:
    """Returns all layers for a message: ``0 to 3``, or ``0`` for a single layer."""
    if num_layers > 1:
        return f"0 to {num_layers - 1}"
    return "0"


def layer_text(layers: Iterable[int]) -> str:
    """Returns layers as text: ``layer 3``, ``layers 0-3, 8``."""
    numbers = sorted(layers)
    ranges: list[list[int]] = []
    for layer in numbers:
        if ranges and layer == ranges[-1][-1] + 1:
            ranges[-1][1:] = [layer]
        else:
            ranges.append([layer])
    noun = "layer"
    if len(numbers) > 1:
        noun = "layers"
    return f"{noun} {', '.join('-'.join(map(str, ends)) for ends in ranges)}"
