#!/usr/bin/env python3
"""Prints docs/flags.md: the named flags of the command line, and every key of the configuration.

    python scripts/make_flags.py > docs/flags.md

The text is that of the flags' help (trainer/cli/flags.py) and of the schema's descriptions (trainer/config/schema).
tests/unit/test_docs.py fails while the committed page differs from this output.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainer.cli.flags import PANELS  # noqa: E402
from trainer.config import json_schema  # noqa: E402
from trainer.config.schema.fields import Section  # noqa: E402

Described = dict[str, Any]
"""A section or a property in the JSON Schema."""

INTRODUCTION = """\
# Flags and keys

This page lists every command, named flag and key of the configuration.
It is generated: `python scripts/make_flags.py > docs/flags.md`.

```text
run_trainer.py [train]  --config FILE [flags]
run_trainer.py plan     --config FILE [flags] [--ranks N] [--local_ranks N] [--audit ascend] [--verbose] [--json]
run_trainer.py smoke    --config FILE [flags] [--ranks N] [--steps N] [--json]
run_trainer.py chat     CHECKPOINT [--config FILE] [flags]
run_trainer.py data     --config FILE [flags] [--rows N] [--json]
run_trainer.py sweep    --config FILE --grid KEY=V,V [--grid ...] [--jobs N] [flags]
run_trainer.py compare  RUN RUN... [--loss X] [--exact] [--output DIR] [--json]
run_trainer.py runs     [DIR] [--json]
run_trainer.py launch   [options] --config FILE [flags]
run_trainer.py status   DIR [--json]
run_trainer.py stop     DIR
run_trainer.py verify   DIR [--json]
run_trainer.py export   --config FILE --output PATH [--adapter DIR --merge] [--force] [flags]
run_trainer.py doctor   [--output_dir DIR] [--deep] [--json]
run_trainer.py schema
```

`--help` after a command describes it. The options of `launch` are on the page [launch](launch.md#options-of-launch).
"""
NAMED = """\
## Named flags

Each named flag sets one key. Dashes and underscores are interchangeable. Every other key is a flag by its dotted name:
[configuration](configuration.md#every-key-is-a-flag)."""
KEYS = """\
## Keys

The keys of the YAML file by section, without those that [have no effect](#ignored-and-unsupported-keys).
`--SECTION.KEY VALUE` sets a key from the command line. A section that is a list has an index:
`--callbacks.0.per_print_times 5`."""
UNSUPPORTED = """\
## Ignored and unsupported keys

Files of MindSpore Transformers contain these keys. If its value differs from the default, an ignored key gives a note,
and a key that is not supported yet an error."""
_ANOTHER = "Another name of "


def page() -> str:
    """The whole of docs/flags.md."""
    named = []
    for panel, flags in PANELS.items():
        rows = [f"| `--{flag.name}` | `{flag.key}` | {cell(flag.help)} |" for flag in flags]
        named += ["", f"### {panel}", "", "| flag | key | meaning |", "|---|---|---|", *rows]
    schema = json_schema()
    acting, unsupported = [], []
    supports = {kind.__name__: (kind.support, kind.support_reason) for kind in subclasses(Section)}
    for name, paths, section in sections(schema):
        title = ", ".join(f"`{path}`" for path in paths if path) or "Top level"
        types = types_of(section)
        support, reason = supports.get(name, ("supported", ""))
        if support != "supported":
            names = [f"{paths[0]}: {kind}" for kind in types.split(", ")] if types else [paths[0]]
            unsupported += [(key, support, reason) for key in names]
            continue
        rows, others = rows_of(section, paths[0])
        if rows:
            heading = f"### {title}: {types}" if types else f"### {title}"
            acting += ["", heading, "", "| key | meaning |", "|---|---|", *rows]
        unsupported += others
    tables = [*table(unsupported, "ignored"), *table(unsupported, "not_yet")]
    parts = [INTRODUCTION, NAMED, *named, "", KEYS, *acting, "", UNSUPPORTED, *tables]
    return "\n".join(parts) + "\n"


def subclasses(kind: type[Section]) -> list[type[Section]]:
    """All classes below a class."""
    return [found for below in kind.__subclasses__() for found in (below, *subclasses(below))]


def sections(schema: Described) -> list[tuple[str, list[str], Described]]:
    """Every section of the schema once: its class, the paths that lead to it, and what it holds."""
    definitions = schema["$defs"]
    paths: dict[str, list[str]] = {}

    def walk(section: Described, path: str) -> None:
        for key, described in section["properties"].items():
            if described.get("description", "").startswith(_ANOTHER):
                continue
            below = f"{path}.{key}" if path else key
            for name in references(described):
                seen = paths.setdefault(name, [])
                if below not in seen:
                    seen.append(below)
                if len(seen) == 1:
                    walk(definitions[name], below)

    walk(schema, "")
    return [("", [""], schema), *((name, found, definitions[name]) for name, found in paths.items())]


def references(described: Any) -> list[str]:
    """The names of the sections that a property may hold."""
    if isinstance(described, list):
        return [name for item in described for name in references(item)]
    if not isinstance(described, dict):
        return []
    if "$ref" in described:
        return [described["$ref"].removeprefix("#/$defs/")]
    return [name for word in ("anyOf", "oneOf", "items") if word in described for name in references(described[word])]


def types_of(section: Described) -> str:
    """The values of `type` that select this section in its family; empty if it has no family."""
    described = section["properties"].get("type", {})
    names = [described["const"]] if "const" in described else described.get("enum", [])
    return ", ".join(names)


def rows_of(section: Described, path: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The rows of a section's table; of its keys that do not act: key, "ignored" or "not_yet", and reason."""
    properties = section["properties"]
    acting, others = [], []
    for key, described in properties.items():
        text = described.get("description", "")
        if text.startswith(_ANOTHER):
            continue
        if "x-support" in described:
            others.append((f"{path}{'.' if path else ''}{key}", described["x-support"], described["x-reason"]))
            continue
        start = re.compile(rf"{_ANOTHER}{key}\.( |$)")
        names = [name for name, other in properties.items() if start.match(other.get("description", ""))]
        also = f" Also: {', '.join(f'`{name}`' for name in names)}." if names else ""
        acting.append(f"| `{key}` | {cell(text)}{also} |")
    return acting, others


def table(unsupported: list[tuple[str, str, str]], wanted: str) -> list[str]:
    """One row a reason, with all keys that do not act for it."""
    keys: dict[str, list[str]] = {}
    for key, support, reason in unsupported:
        if support == wanted:
            keys.setdefault(reason, []).append(f"`{key}`")
    head = {"ignored": "ignored", "not_yet": "not supported yet"}[wanted]
    rows = [f"| {', '.join(names)} | {cell(reason)} |" for reason, names in keys.items()]
    return ["", f"| {head} | reason |", "|---|---|", *rows]


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("``", "`").replace("|", "\\|").replace("<", "&lt;").strip()


if __name__ == "__main__":
    sys.stdout.write(page())
