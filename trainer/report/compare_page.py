"""Draws the curves of several runs: a picture, and a self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from trainer import __version__
from trainer.input_files import replace_surrogates
from trainer.monitors.files import write_text
from trainer.report.compare import RunComparison, comparison_tables
from trainer.report.page import MAX_POINTS, assemble_page, round_digits
from trainer.report.picture import USUAL_PANELS, panel_grid, picture_text, save_figure, style_panels
from trainer.report.record import loss_title

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#65a30d", "#78716c")
"""The colours of the page are in page/style.css, for light and dark."""
_MAX_LEGEND_RUNS = 30  # a legend of more runs would hide the curves


class Curve(NamedTuple):
    """The curve of a field of a run.

    Attributes:
        run: The number of the run in the comparison.
    """

    run: int
    steps: Sequence[int]
    values: Sequence[float]
    is_eval: bool = False


def _panels(comparison: RunComparison) -> list[tuple[str, str]]:
    """Returns the fields that are drawn, with their titles; that of the loss names each kind of loss of the runs."""
    titles = dict.fromkeys(loss_title(record.config) for record in comparison.records)
    return [("loss", " / ".join(titles)), *USUAL_PANELS.items()]


def _field_curves(comparison: RunComparison, field: str) -> list[Curve]:
    """Returns the curves of a field, one for each run; for the loss also the evaluations."""
    found = []
    for number, record in enumerate(comparison.records):
        curves = record.metrics.curves.downsampled(MAX_POINTS)
        if curves.has_values(field):
            found.append(Curve(number, curves.steps, curves.means(field)))
        evaluations = record.metrics.evaluations
        if field == "loss" and evaluations:
            steps = [evaluation.step for evaluation in evaluations]
            found.append(Curve(number, steps, [evaluation.loss for evaluation in evaluations], is_eval=True))
    return found


def draw_comparison(comparison: RunComparison, path: Path) -> None:
    """Writes the picture. Raises OSError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [picture_text(name) for name in comparison.names]
    shown = [(title, curves) for field, title in _panels(comparison) if (curves := _field_curves(comparison, field))]
    figure, axes = panel_grid(Figure, max(len(shown) - 1, 0))
    FigureCanvasAgg(figure)
    for axis, (title, curves) in zip(axes, shown, strict=False):
        last_eval = next((curve for curve in reversed(curves) if curve.is_eval), None)
        for curve in curves:
            style: dict[str, Any] = {"color": _COLOURS[curve.run % len(_COLOURS)], "linewidth": 1.3}
            if curve.is_eval:
                style |= {"linestyle": "--", "marker": "o", "markersize": 4}
                if curve is last_eval:  # one entry of the legend stands for the evaluations of all runs
                    style["label"] = "eval"
            else:
                style |= {"alpha": 0.85, "label": names[curve.run]}
                if len(curve.steps) < 3:
                    style["marker"] = "."
            axis.plot(curve.steps, curve.values, **style)
        axis.set_title(title, fontsize=9, loc="left")
    if shown and len(names) <= 10:
        axes[0].legend(fontsize=8)
    elif shown and len(names) <= _MAX_LEGEND_RUNS:
        axes[0].legend(fontsize=6, ncols=2)
    style_panels(axes)
    title = f"{len(names)} runs"
    if sum(map(len, names)) < 80:
        title = " / ".join(names)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path)


def write_comparison(comparison: RunComparison, path: Path, loss: float | None = None) -> None:
    """Writes the page. Raises RunError if it cannot be written."""
    data = _page_data(comparison, loss)
    write_text(path, assemble_page(data["title"], data, "compare.js"))


def _page_data(comparison: RunComparison, loss: float | None = None) -> dict[str, Any]:
    """Returns what the page shows, as plain values."""
    charts: list[dict[str, Any]] = []
    for field, title in _panels(comparison):
        lines = [
            {"run": curve.run, "steps": list(curve.steps), "values": [round_digits(value) for value in curve.values],
             "is_eval": curve.is_eval}
            for curve in _field_curves(comparison, field)
        ]  # fmt: skip
        if lines:
            charts.append({"title": title, "is_loss": field == "loss", "is_rate": field == "lr", "lines": lines})
    steps = [step for chart in charts for line in chart["lines"] for step in line["steps"]]
    tables = []
    for title, (header, *rows) in comparison_tables(comparison, loss):
        valid_header, *valid_rows = [[replace_surrogates(cell) for cell in row] for row in (header, *rows)]
        tables.append({"title": title, "header": valid_header, "rows": valid_rows})
    return {
        "title": f"Comparison of {len(comparison.names)} runs",
        "names": [replace_surrogates(name) for name in comparison.names],
        "domain": [min(steps, default=0), max(steps, default=1)],
        "charts": charts,
        "tables": tables,
        "version": __version__,
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z"),
    }
