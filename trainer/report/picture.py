"""Draws report.png: the curves of a training from metrics.jsonl, with those of earlier starts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.monitors.files import atomic_file
from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE
from trainer.report.curves import Curves
from trainer.report.record import RunData, clip_norm, loss_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

USUAL_PANELS = {"lr": "learning rate", "global_norm": "gradient norm", "input_tokens_per_second": "tokens/s"}
_NOT_DRAWN = frozenset(
    "step epoch loss loss_scale overflow tokens tokens_per_second mfu step_seconds data_wait_seconds "
    "peak_rss_bytes router_entropy".split()
)
# Lists with a number per MoE layer, each with a panel.
_LAYER_PANELS = {DROP_RATE: "drop rate", LOAD_IMBALANCE: "busiest expert / mean"}
_MAX_LEGEND_ENTRIES = 4
# Inches: 1600 x 900 pixels, in which letters of 9 points can be read even at 600 x 400.
_WIDTH = 9.6
_HEIGHT = 5.4
_DPI = 1600 / _WIDTH
_MAX_PANELS_BESIDE = 3  # right of the loss; with more panels the loss takes a corner of a grid
_TRAIN = "#1f77b4"
_EVAL = "#ff7f0e"
_RESUMED = "#7f56d9"
_SKIPPED = "#d62728"


class Panel(NamedTuple):
    """A panel of the picture, with the fields of a step that it shows."""

    title: str
    fields: list[str]


def choose_panels(curves: Curves) -> list[Panel]:
    """Returns the panels apart from the loss: the usual ones that have numbers, then one per group of extra fields."""
    usual = [Panel(title, [name]) for name, title in USUAL_PANELS.items() if curves.has_values(name)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in curves.fields:
        if name not in USUAL_PANELS and name.partition(".")[0] not in _NOT_DRAWN and curves.has_values(name):
            groups[name.partition(".")[0]].append(name)
    return usual + [Panel(_LAYER_PANELS.get(name, name), names) for name, names in groups.items()]


def draw_report(record: RunData, path: Path) -> bool:
    """Draws the curves into ``path``, which it replaces atomically; returns False if there is nothing to draw.

    Raises OSError if the file cannot be written.
    """
    figure = draw_figure(record)
    if figure is None:
        return False
    save_figure(figure, path)
    return True


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG and moves it into place. Raises OSError if it cannot be written."""
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png")


def draw_figure(record: RunData) -> Figure | None:
    """Returns the curves of a run as a figure, for a file or a notebook; None if there is nothing to draw."""
    curves = record.metrics.curves
    if not curves.steps and not record.metrics.evaluations:
        return None
    # Not pyplot, which keeps a global figure and looks for a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = choose_panels(curves)
    figure, axes = panel_grid(Figure, len(shown))
    FigureCanvasAgg(figure)
    _draw_loss(axes[0], record)
    for axis, panel in zip(axes[1:], shown, strict=True):
        _draw_panel(axis, curves, panel, record.moe_layers)
        if panel.fields == ["global_norm"]:
            _draw_clip(axis, record)
    style_panels(axes)
    for axis in axes:
        for step in record.resumes:
            axis.axvline(step, color=_RESUMED, linestyle=(0, (5, 4)), linewidth=1)
    figure.suptitle(_title(record), fontsize=10)
    return figure


def panel_grid(figure_type: type[Figure], count: int) -> tuple[Figure, list[Axes]]:
    """Returns a landscape figure and its panels: a large one for the loss, then `count` small ones.

    The small panels are beside the large one, or in a grid of which it takes a corner. The last one fills its row.
    """
    if count <= _MAX_PANELS_BESIDE:
        rows = max(count, 1)
        columns = 1 + bool(count)
        large = (max(count, 1), 1)
        ratios: list[float] = [1.5, 1.0][:columns]
    else:
        rows = 4
        if count <= 5:
            rows = 3
        columns = max(3, math.ceil((count + 4) / rows))
        large = (2, 2)
        ratios = [1.0] * columns
    free = [(row, column) for row in range(rows) for column in range(columns) if row >= large[0] or column >= large[1]]
    scale = max(columns / 3, 1)  # a wide grid makes a larger picture, so that its panels keep their size
    height = _HEIGHT
    if rows > 3:
        height = _WIDTH / 1.5
    figure = figure_type(figsize=(_WIDTH * scale, height * scale), layout="constrained", dpi=_DPI)
    cells = figure.add_gridspec(rows, columns, width_ratios=ratios)
    places = [cells[: large[0], : large[1]], *(cells[row, column] for row, column in free[: count - 1])]
    if count:
        row, column = free[count - 1]
        places.append(cells[row, column:])
    axes = [figure.add_subplot(place) for place in places]
    tops = {(place.rowspan.start, place.colspan) for place in places}
    for axis, place in zip(axes, places, strict=True):
        if (place.rowspan.stop, place.colspan) in tops:  # the panel below has the same steps in the same places
            axis.tick_params(labelbottom=False)
        if place.is_last_row():
            axis.set_xlabel("optimizer step", fontsize=9)
    return figure, axes


def style_panels(axes: Sequence[Axes]) -> None:
    """Gives all panels the same range of steps and short numbers; called when the curves are drawn."""
    from matplotlib.ticker import FuncFormatter

    limits = [min(axis.get_xlim()[0] for axis in axes), max(axis.get_xlim()[1] for axis in axes)]
    for axis in axes:
        axis.set_xlim(*limits)  # the ticks depend on the width of each panel
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=9)
        for scale in (axis.xaxis, axis.yaxis):  # matplotlib would put a common factor where the title is
            scale.set_major_formatter(FuncFormatter(lambda value, position: _tick_text(value)))


def _title(record: RunData) -> str:
    state = ""
    if record.state != "unknown":
        state = f", {record.state}"
    return picture_text(f"{record.name}{state} at step {record.step:,}")


def picture_text(text: str) -> str:
    """Escapes text for a picture: a dollar would begin a formula, and a folder's name may have lone surrogates."""
    return text.replace("$", r"\$").encode("utf-8", "replace").decode()


def _draw_loss(axis: Axes, record: RunData) -> None:
    curves = record.metrics.curves
    evaluations = record.metrics.evaluations
    best = record.metrics.best
    if curves.has_values("loss"):
        series = curves.fields["loss"]
        steps = curves.steps
        if curves.stride > 1:
            axis.fill_between(steps, series.lows, series.highs, color=_TRAIN, alpha=0.2, linewidth=0)
        if len(steps) > 2:
            axis.plot(steps, series.means, linewidth=0.8, color=_TRAIN, alpha=0.35)
        line = smooth(series.means, len(steps) / 70)
        axis.plot(steps, line, linewidth=1.6, color=_TRAIN, label="train, smoothed", marker=_marker(steps))
    if evaluations:
        steps = [evaluation.step for evaluation in evaluations]
        losses = [evaluation.loss for evaluation in evaluations]
        marker = ""
        if len(steps) <= 60:
            marker = "o"
        axis.plot(steps, losses, linewidth=1.5, color=_EVAL, marker=marker, markersize=4, label="eval")
    if best is not None:
        axis.plot([best.step], [best.loss], linestyle="", marker="o", markersize=10, markerfacecolor="none",
                  markeredgecolor=_EVAL, label=f"best eval {best.loss:.4f} at step {best.step:,}")  # fmt: skip
    if record.resumes:
        axis.plot([], [], color=_RESUMED, linestyle=(0, (5, 4)), linewidth=1, label="resumed")
    axis.set_title(loss_title(record.config), fontsize=9, loc="left")
    axis.legend(fontsize=9)


def _draw_clip(axis: Axes, record: RunData) -> None:
    """Draws the largest gradient norm after clipping, if that is near the curve, and the skipped steps."""
    limit = clip_norm(record)
    norms = record.metrics.curves.fields["global_norm"]
    if limit is not None and limit <= 3 * max(value for value in norms.highs if not math.isnan(value)):
        axis.axhline(limit, color=_EVAL, linestyle="--", linewidth=1, label=f"clipped at {limit:g}")
    label: str | None = "skipped"
    for skipped in record.metrics.skipped[:200]:
        axis.axvline(skipped.step, color=_SKIPPED, linewidth=0.8, label=label)
        label = None
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)


def smooth(values: Sequence[float], width: float) -> list[float]:
    """Smooths a curve with Gaussian weights, whose standard deviation is `width` points; ignores and keeps NaN."""
    import numpy as np

    curve = np.asarray(values, float)
    if width < 0.5:
        return curve.tolist()
    reach = min(math.ceil(3 * width), len(curve) - 1)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    known = ~np.isnan(curve)
    # Not mode "same", whose result has the length of the longer argument.
    middle = slice(reach, reach + len(curve))
    sums = np.convolve(np.where(known, curve, 0.0), weights, "full")[middle]
    counts = np.convolve(known.astype(float), weights, "full")[middle]
    return np.where(known, sums / np.maximum(counts, 1e-300), np.nan).tolist()


def _draw_panel(axis: Axes, curves: Curves, panel: Panel, layers: Sequence[int] = ()) -> None:
    from matplotlib import colormaps

    count = len(panel.fields)
    labelled = _labelled_curves(count)
    for number, name in enumerate(panel.fields):
        style: dict[str, Any] = {}
        if count > _MAX_LEGEND_ENTRIES:  # neighbours have similar colours, which show the order
            style["color"] = colormaps["viridis"](number / (count - 1))
        if number in labelled and count > 1:
            suffix = name.partition(".")[2] or name
            if suffix.isdecimal():
                style["label"] = f"layer {dict(enumerate(layers)).get(int(suffix), suffix)}"
            else:
                style["label"] = suffix
        axis.plot(curves.steps, curves.means(name), linewidth=1, marker=_marker(curves.steps), **style)
    axis.set_title(panel.title, fontsize=9, loc="left")
    if panel.title == _LAYER_PANELS[DROP_RATE]:
        axis.set_ylim(bottom=0)
    if count > 1:
        axis.legend(fontsize=8, ncols=2, handlelength=1, columnspacing=1)


def _tick_text(value: float) -> str:
    """Formats a number of any size in few characters: 0.004, 2e-05, 12.5k."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def _labelled_curves(count: int) -> set[int]:
    """Returns the curves that a legend names: all of a few, else evenly spread ones with the first and the last."""
    entries = min(count, _MAX_LEGEND_ENTRIES)
    return {round(entry * (count - 1) / max(entries - 1, 1)) for entry in range(entries)}


def _marker(steps: Sequence[int]) -> str:
    """Returns the marker of points that are too few for a line; empty for more points."""
    if len(steps) < 3:
        return "."
    return ""
