"""Titled tables as text: in a terminal's width, or as whole lines for a file and a pipe."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Rows: TypeAlias = list[tuple[str, ...]]
Section: TypeAlias = tuple[str, Rows]
"""A title, and rows of cells of which the first is the header."""


def sections_text(sections: list[Section]) -> str:
    """Formats titled tables as aligned plain text without folding lines."""
    lines = []
    for title, rows in sections:
        name, bracket, more = title.partition(" (")
        lines.append(name.upper() + bracket + more)
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            if line:
                lines.append(f"  {line}")
        lines.append("")
    return "\n".join(lines)


def print_sections(sections: list[Section]) -> None:
    """Prints titled tables: folded to the width of a terminal, as whole lines into a file or pipe."""
    _print(sections, lambda console, rows: console.print(_table(rows)))


def print_fitting(sections: list[Section], left_out_first: Sequence[str] = ()) -> None:
    """Prints titled tables without folding their cells.

    A table that is wider than the terminal loses columns of `left_out_first`, as many as needed. If it is still too
    wide, each row becomes a list.
    """

    def show(console: Console, rows: Rows) -> None:
        fitting, left_out = _fitting(rows, left_out_first, console.width)
        if fitting:
            console.print(_table(fitting))
            if left_out:
                text = f"left out, the terminal is narrow: {', '.join(left_out)}"
                console.print(text, style="dim", markup=False, highlight=False)
            return
        for row in rows[1:]:
            console.print(_as_list(rows[0], row, console.width), markup=False, highlight=False, soft_wrap=True)

    _print(sections, show)


def _print(sections: list[Section], show: Callable[[Console, Rows], None]) -> None:
    if not sys.stdout.isatty():
        print(sections_text(sections))
        return
    from rich.console import Console

    console = Console()
    for title, rows in sections:
        console.print(title, style="bold", markup=False, highlight=False)
        show(console, rows)
        console.print()


def _as_list(header: tuple[str, ...], row: tuple[str, ...], width: int) -> str:
    """Returns a row as lines: its first cell, and the others below it, with their names if there are several.

    A cell that is too wide beside its name gets lines of its own, without broken words.
    """
    names: tuple[str, ...] = ("",)
    if len(row) > 2:
        names = header[1:]
    longest = max(map(len, names))
    lines = [row[0]]
    for name, cell in zip(names, row[1:], strict=True):
        line = f"  {cell}"
        if name:
            line = f"  {name:<{longest}}  {cell}"
        if len(line) <= width:
            lines.append(line)
            continue
        if name:
            lines.append(f"  {name}")
        words = textwrap.wrap(cell, max(width - 4, 1), break_long_words=False, break_on_hyphens=False)
        lines += [f"    {part}" for part in words]
    return "\n".join(lines)


def _fitting(rows: Rows, left_out_first: Sequence[str], width: int) -> tuple[Rows, list[str]]:
    """Returns the columns that fit and the names of the others; no rows if the table is too wide without all of them.
    """
    removable = [name for name in left_out_first if name in rows[0]]
    for number in range(len(removable) + 1):
        left_out = removable[:number]
        columns = [column for column, name in enumerate(rows[0]) if name not in left_out]
        widths = [max(len(row[column]) for row in rows) for column in columns]
        if sum(widths) + 2 * (len(widths) - 1) <= width:
            return [tuple(row[column] for column in columns) for row in rows], left_out
    return [], []


def _table(rows: Rows) -> Table:
    from rich.table import Table
    from rich.text import Text

    header, *body = rows
    table = Table(box=None, pad_edge=False, show_header=any(header))
    for name in header:
        table.add_column(name, overflow="fold")
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    return table
