"""Draws how far a run left the right path: report.html, one page with a chart of the deviation by layer and a table."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from trainer.monitors.files import write_text
from trainer.trace.compare import Comparison, deviation_by_layer
from trainer.trace.message import verdict

PAGE = "report.html"
_SERIES = {"weight": "weights", "activation": "activations", "activation gradient": "activation gradients",
           "gradient": "gradients of weights"}  # fmt: skip
_COLOURS = ("#78716c", "#2563eb", "#059669", "#d97706")
_WIDTH = 900
_HEIGHT = 360
_LEFT = 70
_BOTTOM = 40
_SMALLEST = 1e-4  # of the bound
_ROWS = 200
_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color-scheme:light dark}"
    "table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:left;border-bottom:1px solid #8884}"
    ".beyond{color:#dc2626}svg{max-width:100%;height:auto}text{fill:currentColor;font-size:12px}"
)


def write_page(comparison: Comparison, folder: Path) -> Path:
    """Writes report.html into a folder and returns its path."""
    sentence = verdict(comparison)
    sentence = f"{sentence[0].upper()}{sentence[1:]}."
    other = html.escape(str(comparison.other.folder))
    right = html.escape(str(comparison.right.folder))
    page = (
        f"<!doctype html><meta charset='utf-8'><title>trace</title><style>{_STYLE}</style>"
        f"<h1>{other}</h1><p>compared with {right}</p><p><b>{html.escape(sentence)}</b></p>"
        f"{draw_layers(comparison)}{_table(comparison)}"
    )
    path = folder / PAGE
    write_text(path, page + "\n")
    return path


def draw_layers(comparison: Comparison) -> str:
    """Returns an SVG: for each layer the largest deviation of its tensors, relative to what rounding explains."""
    series = deviation_by_layer(comparison, _SERIES)
    layers = [layer for points in series.values() for layer, _, _ in points]
    if not layers:
        return ""
    first = min(layers)
    last = max(layers)
    head = comparison.rounding.layers
    largest = max((min(ratio, 1 / _SMALLEST) for points in series.values() for _, ratio, _ in points), default=1.0)
    top = max(1.0, math.ceil(math.log10(max(largest, 1.0)) + 0.5))
    bottom = math.log10(_SMALLEST)

    def x_of(layer: int) -> float:
        """Returns the place of a layer from the left."""
        return _LEFT + (_WIDTH - _LEFT - 20) * (layer - first + 0.5) / (last - first + 1)

    def y_of(ratio: float) -> float:
        """Returns the place of a deviation from the top; those outside of the chart are on its edge."""
        height = math.log10(min(max(ratio, _SMALLEST), 10**top))
        return 20 + (_HEIGHT - _BOTTOM - 20) * (top - height) / (top - bottom)

    parts = [f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='deviation by layer'>"]
    for power in range(int(bottom), int(top) + 1):
        y = y_of(10.0**power)
        style = "stroke='#8884'"
        if power == 0:
            style = "stroke='#dc2626' stroke-dasharray='6 4'"
        parts.append(f"<line x1='{_LEFT}' x2='{_WIDTH - 20}' y1='{y:.1f}' y2='{y:.1f}' {style}/>")
        parts.append(f"<text x='{_LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>1e{power}</text>")
    step = max(1, (last - first + 1) // 16)
    for layer in range(first, last + 1, step):
        label = _label(layer, head)
        parts.append(f"<text x='{x_of(layer):.1f}' y='{_HEIGHT - 18}' text-anchor='middle'>{label}</text>")
    for (name, points), colour in zip(series.items(), _COLOURS, strict=False):
        line = " ".join(f"{x_of(layer):.1f},{y_of(ratio):.1f}" for layer, ratio, _ in points)
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'/>")
        for layer, ratio, deviation in points:
            measured = f"deviation {deviation:.2e}, {ratio:.2g} of the bound"
            title = html.escape(f"{name}, layer {_label(layer, head)}: {measured}")
            place = f"cx='{x_of(layer):.1f}' cy='{y_of(ratio):.1f}'"
            parts.append(f"<circle {place} r='4' fill='{colour}'><title>{title}</title></circle>")
    for number, name in enumerate(series):
        parts.append(f"<text x='{_LEFT + 10 + 180 * number}' y='14' style='fill:{_COLOURS[number]}'>{name}</text>")
    caption = "largest deviation of a layer, relative to what rounding explains (dashed: 1)"
    parts.append(f"<text x='{_LEFT}' y='{_HEIGHT - 2}'>{caption}</text></svg>")
    return "".join(parts)


def _label(layer: int, head: int) -> str:
    """Returns the label of a layer; before and behind the layers are the embedding and the head."""
    if layer < 0:
        return "embedding"
    if layer == head:
        return "head"
    return str(layer)


def _table(comparison: Comparison) -> str:
    cells = ["<table><tr><th>tensor</th><th>deviation</th><th>bound</th><th>ranks</th></tr>"]
    rows: Sequence = comparison.differing or sorted(
        comparison.rows, key=lambda row: row.deviation / row.bound, reverse=True
    )
    for row in rows[:_ROWS]:
        name = html.escape(f"step {row.key.step}, {row.key.kind} {row.key.name}")
        mark = ""
        if row.is_beyond:
            mark = " class='beyond'"
        ranks = ", ".join(map(str, row.ranks or row.holders))
        measured = html.escape(row.lost) or f"{row.deviation:.2e}"
        cells.append(f"<tr{mark}><td>{name}</td><td>{measured}</td><td>{row.bound:.2e}</td><td>{ranks}</td></tr>")
    cells.append("</table>")
    if len(rows) > _ROWS:
        cells.append(f"<p>and {len(rows) - _ROWS} more</p>")
    return "".join(cells)
