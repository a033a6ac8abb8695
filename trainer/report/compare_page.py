"""The curves of several runs in one picture, and in one self-contained page: without scripts and without a network."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.monitors.files import write_text
from trainer.report.compare import Comparison, Rows, sections

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#78716c")
_PANELS = (("loss", "loss (nats a token)"), ("lr", "learning rate"), ("global_norm", "gradient norm"),
           ("input_tokens_per_second", "tokens/s"))  # fmt: skip
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 860, 260, 64, 28
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --paper: #fff; --line: #d4d4d8 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e7; --paper: #18181b; --line: #3f3f46 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 920px;
       margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
td, th { border-bottom: 1px solid var(--line); padding: 4px 10px; text-align: left; vertical-align: top }
svg { width: 100%; height: auto } svg text { fill: var(--ink); font-size: 12px }
svg path { fill: none; stroke-width: 1.6 } .grid { stroke: var(--line) }
.key span { display: inline-block; width: 22px; height: 3px; margin: 0 6px 4px 16px }
"""


class Curve(NamedTuple):
    name: str
    colour: str
    steps: Sequence[int]
    values: Sequence[float]
    is_eval: bool = False


def curves_of(comparison: Comparison, field: str) -> list[Curve]:
    """The curves of a field, a run each; evaluations beside the loss."""
    found = []
    for number, (name, record) in enumerate(zip(comparison.names, comparison.records, strict=True)):
        colour, curves = _COLOURS[number % len(_COLOURS)], record.curves
        if curves.has_values(field):
            found.append(Curve(name, colour, curves.steps, curves.means(field)))
        if field == "loss" and record.evaluations:
            steps = [each.step for each in record.evaluations]
            found.append(Curve(f"{name}, eval", colour, steps, [each.loss for each in record.evaluations], True))
    return found


def draw(comparison: Comparison, path: Path) -> None:
    """Writes the picture. Raises OSError where it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [(title, found) for field, title in _PANELS if (found := curves_of(comparison, field))]
    figure = Figure(figsize=(10, 3.4 + 2.2 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [2] + [1] * (len(shown) - 1)
    axes = figure.subplots(max(len(shown), 1), 1, sharex=True, squeeze=False, height_ratios=heights or [1])[:, 0]
    for axis, (title, found) in zip(axes, shown, strict=False):
        for curve in found:
            style = {"linestyle": "--", "marker": "o", "markersize": 4} if curve.is_eval else {"alpha": 0.85}
            marker = {"marker": "."} if len(curve.steps) < 3 and not curve.is_eval else {}
            axis.plot(curve.steps, curve.values, color=curve.colour, linewidth=1.3, label=curve.name, **style, **marker)
        axis.set_ylabel(title)
        axis.grid(alpha=0.3)
    figure.suptitle(" / ".join(comparison.names) if len(comparison.names) < 4 else f"{len(comparison.names)} runs")
    if shown:
        axes[0].legend(fontsize="small", ncols=2 if len(shown[0][1]) > 6 else 1)
    axes[-1].set_xlabel("optimizer step")
    figure.align_ylabels(axes)
    unfinished = path.with_name(path.name + ".tmp")
    figure.savefig(unfinished, format="png", dpi=110)
    os.replace(unfinished, path)


def write_page(comparison: Comparison, path: Path, loss: float | None = None) -> None:
    """Writes the page. Raises RunError where it cannot be written."""
    names, parts = comparison.names, []
    key = "".join(f'<span style="background:{_COLOURS[number % len(_COLOURS)]}"></span>{html.escape(name)}'
                  for number, name in enumerate(names))  # fmt: skip
    for field, title in _PANELS:
        found = curves_of(comparison, field)
        if found:
            parts.append(f"<h2>{html.escape(title)}</h2>{_chart(found)}")
    tables = [f"<h2>{html.escape(title.capitalize())}</h2>{_table(rows)}" for title, rows in sections(comparison, loss)]
    title = html.escape(f"Comparison of {len(names)} runs")
    write_text(path, (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>{tables[0]}"
        f'<p class="key">{key}</p>{"".join(parts)}{"".join(tables[1:])}</html>\n'
    ))  # fmt: skip


def _table(rows: Rows) -> str:
    header, *body = rows
    lines = [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in body]
    head = f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in header)}</tr>" if any(header) else ""
    return f"<table>{head}{''.join(lines)}</table>"


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two others: 3 to 10 multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(power * factor for factor in (0.2, 0.5, 1.0) if (high - low) / (power * factor) < 6 or factor == 1.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)]


def _chart(curves: Sequence[Curve]) -> str:
    """An SVG picture: a path for each curve, with its name and last value where the pointer rests on it."""
    finite = [value for curve in curves for value in curve.values if math.isfinite(value)]
    steps = [step for curve in curves for step in curve.steps]
    if not finite:
        return ""
    low, high, first, last = min(finite), max(finite), min(steps), max(steps)
    high = high if high > low else low + (abs(low) or 1.0)
    last = max(last, first + 1)

    def place(step: int, value: float) -> str:
        x = _LEFT + (_WIDTH - _LEFT - 8) * (step - first) / (last - first)
        y = 8 + (_HEIGHT - _BOTTOM - 8) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for value in _ticks(low, high):
        x, y = place(first, value).split(",")
        lines.append(f'<line class="grid" x1="{x}" y1="{y}" x2="{_WIDTH - 8}" y2="{y}"/>'
                     f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.4g}</text>')  # fmt: skip
    for step in filter(float.is_integer, _ticks(first, last)):
        x = place(int(step), low).split(",")[0]
        lines.append(f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="middle">{step:.0f}</text>')
    for curve in curves:
        points = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if math.isfinite(value)]
        path = " L".join(place(step, value) for step, value in points)
        style = ' stroke-dasharray="6 4"' if curve.is_eval else ""
        told = f"{curve.name}: {points[-1][1]:.5g} at step {points[-1][0]}" if points else curve.name
        lines.append(f'<path d="M{path}" stroke="{curve.colour}"{style}><title>{html.escape(told)}</title></path>')
        marked = points if curve.is_eval or len(points) == 1 else ()
        for step, value in marked:
            x, y = place(step, value).split(",")
            lines.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{curve.colour}">'
                         f"<title>{html.escape(curve.name)}: {value:.5g} at step {step}</title></circle>")  # fmt: skip
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(lines)}</svg>'
