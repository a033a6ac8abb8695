"""Writes report.html, which shows how far a run left the right path: a chart of the deviation by layer, and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer import __version__
from trainer.input_files import replace_surrogates
from trainer.monitors.files import write_text
from trainer.report.page import assemble_page
from trainer.trace.compare import Comparison
from trainer.trace.message import verdict

PAGE = "report.html"
_LINES = {"weight": "weights", "activation": "activations", "activation gradient": "activation gradients",
          "gradient": "gradients of weights"}  # fmt: skip
_SMALLEST = 1e-4  # of the bound
_ROWS = 200


def write_page(comparison: Comparison, folder: Path) -> Path:
    """Writes report.html into a folder and returns its path."""
    path = folder / PAGE
    write_text(path, assemble_page("trace", page_data(comparison), "trace.js"))
    return path


def page_data(comparison: Comparison) -> dict[str, Any]:
    """Returns what the page shows, as plain values.

    A line has for each layer the largest deviation of its tensors relative to what rounding explains, and both in
    words. The embedding is layer -1, the head the one behind the last layer.
    """
    head = comparison.rounding.layers
    lines: dict[str, dict[int, tuple[float, float]]] = {}
    for row in comparison.rows:
        layer = row.layer
        if layer is None:
            layer = head
            if row.key.name.startswith("model.embed_tokens"):
                layer = -1
        points = lines.setdefault(row.key.kind, {})
        points[layer] = max(points.get(layer, (0.0, 0.0)), (row.deviation / row.bound, row.deviation))
    rows = comparison.differing or sorted(comparison.rows, key=lambda row: row.deviation / row.bound, reverse=True)
    sentence = verdict(comparison)
    return {
        "title": replace_surrogates(str(comparison.other.folder)),
        "right": replace_surrogates(str(comparison.right.folder)),
        "verdict": f"{sentence[0].upper()}{sentence[1:]}.",
        "head": head,
        "range": [_SMALLEST, 1 / _SMALLEST],
        "lines": [{
            "label": _LINES[kind],
            "points": [
                (layer, min(max(ratio, _SMALLEST), 1 / _SMALLEST), f"deviation {off:.2e}, {ratio:.2g} of the bound")
                for layer, (ratio, off) in sorted(points.items())
            ],
        } for kind, points in lines.items() if kind in _LINES],
        "rows": [
            [row.is_beyond, f"step {row.key.step}, {row.key.kind} {row.key.name}", row.lost or f"{row.deviation:.2e}",
             f"{row.bound:.2e}", ", ".join(map(str, row.ranks or row.holders))]
            for row in rows[:_ROWS]
        ],
        "left_out": max(0, len(rows) - _ROWS),
        "version": __version__,
    }  # fmt: skip
