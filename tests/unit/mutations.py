"""Mutations of JSON for tests: of its values and of its text."""

from __future__ import annotations

import random

ODD = [
    None, True, -1, 0, 2**63, 10**300, 1.5, float("nan"), float("inf"), "", "x", "\0", "../x", [], {}, [[]], {"a": {}},
    "é" * 300, -(2**70),
]  # fmt: skip


def mutate(draw: random.Random, value: object, names: list[str]) -> object:
    """Returns a copy with one value replaced, removed, added or moved, somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.15:
            return {name: each for name, each in value.items() if name != key}
        if kind < 0.25:
            return value | {draw.choice(["", "z", *names]): draw.choice(ODD)}
        return value | {key: mutate(draw, value[key], names)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        return [mutate(draw, value[0], names), *value[1:]] if draw.random() < 0.7 else value * 2
    return draw.choice(ODD)


def mutated_text(draw: random.Random, text: str) -> bytes:
    """Returns the text of a JSON file with bytes changed, cut off, or numbers and nesting without bounds."""
    kind = draw.randrange(6)
    position = draw.randrange(len(text))
    if kind == 0:
        return text[:position].encode()
    if kind == 1:
        return text[:position].encode() + bytes([draw.randrange(256)]) + text[position + 1 :].encode()
    digits = [place for place, letter in enumerate(text) if letter.isdigit()] or range(len(text))
    place = draw.choice(digits)
    odd = ["1e999", "9" * 5000, "[" * 100_000, '{"a":' * 5000, "-0", "1E5", "NaN", "Infinity", '"\\ud800"']
    return (text[:place] + draw.choice(odd) + text[place + 1 :]).encode()
