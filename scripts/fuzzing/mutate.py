"""Mutations of text, bytes and JSON values: what files look like that are cut, edited by hand or made to do harm."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NUMBERS = (
    0, 1, -1, 2, 7, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**40,
    0.5, -0.5, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
STRINGS = (
    "", " ", "a", "\0", "a\0b", "\ud800", "\x1b[2J", "\n", "\t", "é", "\U0001d518", "\u202e", "null", "true", "1", "-1",
    "1e999", "nan", "~", "~nosuchuser", "~nosuchuser/x", "x" * 300, "/".join(["y"] * 3000), "../" * 40, "/dev/zero",
    "/dev/null", "/proc/self/mem", "/nowhere/at/all", "(a+)+$", "((a|a)*)*b", "*" * 60, "[", "{", "%s", "{x}", "<<",
    "*x", "&x", "!x", "$(reboot)", "a.b.c", "-", "--seed", "stdlib", "z" * 5000,
)  # fmt: skip


def nested(rng: random.Random) -> Any:
    """Returns a list or mapping inside itself, up to 300 levels deep."""
    value: Any = rng.choice(NUMBERS[:5])
    for _ in range(rng.choice((3, 60, 70, 300))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def odd_value(rng: random.Random, deep: bool = True) -> Any:
    """Returns a value that a field probably must not have."""
    kind = rng.choices(("number", "string", "bool", "none", "list", "dict", "nested"), (6, 5, 1, 1, *[deep] * 3))[0]
    if kind == "number":
        return rng.choice(NUMBERS)
    if kind == "string":
        return rng.choice(STRINGS)
    if kind == "nested":
        return nested(rng)
    if kind == "list":
        return [odd_value(rng, False) for _ in range(rng.choice((0, 1, 2, 200)))]
    if kind == "dict":
        return {rng.choice(STRINGS): odd_value(rng, False) for _ in range(rng.choice((0, 1, 2)))}
    return rng.random() < 0.5 if kind == "bool" else None


def _places(value: Any, path: tuple = ()) -> list[tuple]:
    """Yields the path of each value below one."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, one in below for found in ((*path, key), *_places(one, (*path, key)))]


def changed_json(value: Any, rng: random.Random) -> Any:
    """Returns a copy with a value replaced, removed, added, doubled or moved."""
    value = copy.deepcopy(value)
    places = _places(value)
    if not places or rng.random() < 0.03:
        return odd_value(rng)
    # Shallow places first: a large vocabulary would otherwise take all mutations.
    path = min((rng.choice(places) for _ in range(rng.choice((1, 2, 4)))), key=len)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, how = path[-1], rng.random()
    if how < 0.6:
        parent[key] = odd_value(rng)
    elif how < 0.75:
        del parent[key]
    elif how < 0.85 and isinstance(parent[key], int | float):
        parent[key] = parent[key] + rng.choice((1, -1, 0.5, 2**40, -parent[key]))
    elif isinstance(parent, dict):
        parent[rng.choice(STRINGS) if rng.random() < 0.5 else f"{key}_"] = parent.pop(key)
    else:
        parent.insert(key, copy.deepcopy(parent[key]))
    return value


def json_bytes(value: Any, rng: random.Random) -> bytes:
    """Returns the text of a mutated value, sometimes with broken syntax."""
    text = json.dumps(changed_json(value, rng))
    how = rng.random()
    if how < 0.6:
        return text.encode("utf-8", "surrogatepass")
    if how < 0.65:
        depth = rng.choice((100, 2000, 100_000))
        return (rng.choice("[{") + '"a":' * (rng.random() < 0.5)).encode() * depth
    if how < 0.7:
        return text.replace("1", rng.choice(("1e999", "1" * 5000, "-0", "01", "1.", "+1")), 1).encode()
    if how < 0.75 and text.startswith("{") and len(text) > 2:
        return ("{" + text[1:-1] + ", " + text[1:]).encode("utf-8", "surrogatepass")  # each key twice
    return changed_bytes(text.encode("utf-8", "surrogatepass"), rng)


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Returns a copy with bytes flipped, cut off, inserted or repeated."""
    how, at = rng.randrange(8), rng.randrange(len(content) + 1)
    if how == 0:
        return content[:at]
    if how == 1:
        return content[:at] + bytes(rng.randrange(256) for _ in range(rng.choice((1, 3, 20)))) + content[at:]
    if how == 2:
        return content[:at] + content[at + rng.choice((1, 8, 100)) :]
    if how == 3:
        return content + rng.choice((b"\0", b"\n", b"}", content[-50:], b"\0" * 5000))
    if how == 4:
        return rng.choice((b"", b"\0", b"\n", b"\xff\xfe", b"\xef\xbb\xbf" + content, content[::-1], b"\0" * 4096))
    if how == 5:
        page = at - at % 64
        return content[:page] + bytes(len(content[page : page + 64])) + content[page + 64 :]
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 4))):
        if found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


_LINES = (
    "<<: *a", "<<: [*a, *a]", "a: &a {<<: *a}", "a: &a [*a]", "x: !!python/object:os.system 1", "x: !t {a: 1}", "...",
    "---", "--- !!map", "%YAML 1.1", "? [a, b]", "? a", "- 1", "\t- 1", "x: |", "x: >-", "'", '"', "x: \"\\UFFFFFFFF\"",
    'x: "\\0"', "[" * 900, "x: " + "{a: " * 900, "x: 1" + "0" * 4000, "x: 1e999", "x: 0x" + "f" * 400, "&a x: *a",
    "\x85x: 1", "\u2028x: 1", "x: @", "x: `", "x: %", "seed: .nan", "seed: 08", "seed: 1_0", "seed: !!str 1", "*a : 1",
    "context: &c {mode: 0}", "context: *c", "seed: &s 1", "epochs: *s", "model:", "model: []", "callbacks: {}",
)  # fmt: skip


def changed_lines(text: str, rng: random.Random) -> str:
    """Returns a YAML text with lines removed, doubled, moved, inserted or changed."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        how = rng.randrange(9)
        if how == 0:
            del lines[at : at + rng.choice((1, 3))]
        elif how == 1:
            lines.insert(at, lines[rng.randrange(len(lines))] if lines else "")
        elif how == 2:
            lines[at] = " " * rng.choice((1, 2, 3)) + lines[at] if rng.random() < 0.5 else lines[at][1:]
        elif how == 3:
            lines.insert(at, " " * rng.choice((0, 2, 4)) + rng.choice(_LINES))
        elif how == 4 and ":" in lines[at]:
            value = yaml_scalar(odd_value(rng)) if rng.random() < 0.9 else rng.choice(STRINGS)
            lines[at] = f"{lines[at].split(':')[0]}: {value}"
        elif how == 5 and ":" in lines[at]:
            name, _, rest = lines[at].partition(":")
            lines[at] = f"{name}: {rng.choice(('&a ', '*a ', '!t ', '!!str ', '!!map ', '| ', '[', '{', '? '))}{rest}"
        elif how == 6:
            column = rng.randrange(len(lines[at]) + 1)
            added = rng.choice("\0\x07\t:#&*!|>'\"%@`{}[],?-\ufeff\ud800é\n")
            lines[at] = lines[at][:column] + added + lines[at][column:]
        elif how == 7:
            name, colon, rest = lines[at].partition(":")
            lines[at] = name.replace(name.strip() or "a", rng.choice(STRINGS[:20]), 1) + colon + rest
        else:
            lines = lines * rng.choice((1, 2, 30)) if len(lines) < 300 else lines[: at + 1]
        lines = lines or [""]
    return "\n".join(lines)


def yaml_scalar(value: Any) -> str:
    """Returns a value in flow style; JSON is YAML except for infinite numbers and NaN."""
    return json.dumps(value).replace("-Infinity", "-.inf").replace("Infinity", ".inf").replace("NaN", ".nan")
