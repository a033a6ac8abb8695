"""The curves of several runs in one picture, and in one self-contained page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainer import __version__
from trainer.monitors.files import write_text
from trainer.report.compare import Comparison, comparison_tables
from trainer.report.page import MOST_POINTS, assemble, rounded, valid
from trainer.report.picture import panel_grid, picture_text, style_panels

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#78716c")
"""Those of the page are in page/style.css, for light and dark."""
_PANELS = (("loss", "loss (nats a token)"), ("lr", "learning rate"), ("global_norm", "gradient norm"),
           ("input_tokens_per_second", "tokens/s"))  # fmt: skip


_MOST_NAMED = 30  # runs in the legend of the picture; more would hide the curves


class Curve(NamedTuple):
    """A field of a run.

    Attributes:
        run: Its number in the comparison.
    """

    run: int
    steps: Sequence[int]
    values: Sequence[float]
    is_eval: bool = False


def curves_of(comparison: Comparison, field: str) -> list[Curve]:
    """The curves of a field, a run each; evaluations beside the loss."""
    found = []
    for number, record in enumerate(comparison.records):
        curves = record.metrics.curves
        if curves.stride > 1 and len(curves.steps) > MOST_POINTS:
            curves = curves.halved()
        if curves.has_values(field):
            found.append(Curve(number, curves.steps, curves.means(field)))
        if field == "loss" and record.metrics.evaluations:
            steps = [each.step for each in record.metrics.evaluations]
            found.append(Curve(number, steps, [each.loss for each in record.metrics.evaluations], True))
    return found


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Writes the picture. Raises OSError where it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [picture_text(name) for name in comparison.names]
    shown = [(title, found) for field, title in _PANELS if (found := curves_of(comparison, field))]
    figure, axes = panel_grid(Figure, max(len(shown) - 1, 0))
    FigureCanvasAgg(figure)
    for axis, (title, found) in zip(axes, shown, strict=False):
        last_eval = next((curve for curve in reversed(found) if curve.is_eval), None)
        for curve in found:
            if curve.is_eval:
                style = {"linestyle": "--", "marker": "o", "markersize": 4}
            else:
                style = {"alpha": 0.85}
            if len(curve.steps) < 3 and not curve.is_eval:
                marker = {"marker": "."}
            else:
                marker = {}
            # Evaluations have the colour of their run: one entry of the legend stands for all.
            if not curve.is_eval:
                label = names[curve.run]
            else:
                label = None
                if curve is last_eval:
                    label = "eval"
            colour = _COLOURS[curve.run % len(_COLOURS)]
            axis.plot(curve.steps, curve.values, color=colour, linewidth=1.3, label=label, **style, **marker)
        axis.set_title(title, fontsize=9, loc="left")
    if shown and len(names) <= _MOST_NAMED:
        axes[0].legend(fontsize=8 if len(names) <= 10 else 6, ncols=1 + (len(names) > 10))
    style_panels(axes)
    figure.suptitle(" / ".join(names) if sum(map(len, names)) < 80 else f"{len(names)} runs", fontsize=10)
    unfinished = path.with_name(path.name + ".tmp")
    figure.savefig(unfinished, format="png")
    os.replace(unfinished, path)


def write_page(comparison: Comparison, path: Path, loss: float | None = None) -> None:
    """Writes the page. Raises RunError where it cannot be written."""
    data = page_data(comparison, loss)
    write_text(path, assemble(data["title"], data, "compare.js"))


def page_data(comparison: Comparison, loss: float | None = None) -> dict[str, Any]:
    """What the page shows, as plain values."""
    charts = []
    for field, title in _PANELS:
        lines = [
            {"run": curve.run, "steps": list(curve.steps), "values": [rounded(value) for value in curve.values],
             "is_eval": curve.is_eval}
            for curve in curves_of(comparison, field)
        ]  # fmt: skip
        if lines:
            charts.append({"title": title, "is_loss": field == "loss", "is_rate": field == "lr", "lines": lines})
    steps = [step for chart in charts for line in chart["lines"] for step in line["steps"]]
    tables = [
        {"title": title, "header": list(map(valid, header)), "rows": [list(map(valid, row)) for row in rows]}
        for title, (header, *rows) in comparison_tables(comparison, loss)
    ]  # fmt: skip
    return {
        "title": f"Comparison of {len(comparison.names)} runs",
        "names": [valid(name) for name in comparison.names],
        "domain": [min(steps, default=0), max(steps, default=1)],
        "charts": charts,
        "tables": tables,
        "version": __version__,
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z"),
    }
