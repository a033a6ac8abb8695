"""report.png: the curves of a training, drawn from metrics.jsonl, so that they include earlier runs."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE
from trainer.report.curves import Curves
from trainer.report.record import RunData, clip_norm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_USUAL_PANELS = {"lr": "learning rate", "global_norm": "gradient norm", "input_tokens_per_second": "tokens/s"}
_NOT_DRAWN = frozenset(
    "step epoch loss loss_scale overflow tokens tokens_per_second mfu step_seconds data_wait_seconds "
    "peak_rss_bytes router_entropy".split()
)
# Lists with a number for each MoE layer, a panel each.
_LAYER_PANELS = {DROP_RATE: "drop rate", LOAD_IMBALANCE: "busiest expert / mean"}
_MAX_LEGEND_ENTRIES = 4
# inches: 1600 x 900 pixels; letters of 9 points can still be read in 600 x 400
_WIDTH = 9.6
_HEIGHT = 5.4
_DPI = 1600 / _WIDTH
_MOST_BESIDE = 3  # panels right of the loss; with more it takes a corner of a grid
_TRAIN = "#1f77b4"
_EVAL = "#ff7f0e"
_RESUMED = "#7f56d9"
_SKIPPED = "#d62728"


class Panel(NamedTuple):
    title: str
    fields: list[str]  # of a step


def choose_panels(curves: Curves) -> list[Panel]:
    """The panels below the loss: the usual ones that have numbers, then one for each group of extra fields."""
    usual = [Panel(title, [name]) for name, title in _USUAL_PANELS.items() if curves.has_values(name)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in curves.fields:
        if name not in _USUAL_PANELS and name.partition(".")[0] not in _NOT_DRAWN and curves.has_values(name):
            groups[name.partition(".")[0]].append(name)
    titles = {name: _LAYER_PANELS[name] if name in _LAYER_PANELS else name for name in groups}
    return usual + [Panel(titles[name], names) for name, names in groups.items()]


def draw_report(record: RunData, path: Path) -> bool:
    """Draws ``path`` and replaces it atomically; False where there is nothing to draw.

    Raises OSError where the file cannot be written.
    """
    figure = draw_figure(record)
    if figure is None:
        return False
    unfinished = path.with_name(path.name + ".tmp")
    figure.savefig(unfinished, format="png")
    os.replace(unfinished, path)
    return True


def draw_figure(record: RunData) -> Figure | None:
    """The curves of a run, for a file or a notebook; None where there is nothing to draw."""
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
    """A landscape page with a large panel for the loss, and `count` small ones: beside it, or in a grid whose corner it
    takes. The last one fills its row."""
    if count <= _MOST_BESIDE:
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
    scale = max(columns / 3, 1)  # a wide grid is a larger picture, so that its panels stay as large
    if rows <= 3:
        height = _HEIGHT
    else:
        height = _WIDTH / 1.5
    figure = figure_type(figsize=(_WIDTH * scale, height * scale), layout="constrained", dpi=_DPI)
    cells = figure.add_gridspec(rows, columns, width_ratios=ratios)
    axes = [figure.add_subplot(cells[: large[0], : large[1]])]
    for row, column in free[:count]:
        is_last = len(axes) == count
        axes.append(figure.add_subplot(cells[row, column : columns if is_last else column + 1]))
    spans = [axis.get_subplotspec() for axis in axes]
    tops = {(span.rowspan.start, span.colspan) for span in spans}
    for axis, span in zip(axes, spans, strict=True):
        if (span.rowspan.stop, span.colspan) in tops:  # the panel below has the same steps in the same places
            axis.tick_params(labelbottom=False)
        if span.rowspan.stop == rows:
            axis.set_xlabel("optimizer step", fontsize=9)
    return figure, axes


def style_panels(axes: Sequence[Axes]) -> None:
    """The same steps on all of them, and numbers that are short; called when they are drawn."""
    from matplotlib.ticker import FuncFormatter

    limits = [min(axis.get_xlim()[0] for axis in axes), max(axis.get_xlim()[1] for axis in axes)]
    for axis in axes:
        axis.set_xlim(*limits)  # each with ticks of its own, which depend on its width
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=9)
        for scale in (axis.xaxis, axis.yaxis):  # no common factor in a corner of the panel, where its title is
            scale.set_major_formatter(FuncFormatter(lambda value, at: _tick_text(value)))


def _title(record: RunData) -> str:
    if record.state == "unknown":
        state = ""
    else:
        state = f", {record.state}"
    return picture_text(f"{record.name}{state} at step {record.step:,}")


def picture_text(text: str) -> str:
    """For a picture: a dollar would begin a formula, and the name of a folder may have halves of characters."""
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
        steps = [each.step for each in evaluations]
        losses = [each.loss for each in evaluations]
        few = len(steps) <= 60
        axis.plot(steps, losses, linewidth=1.5, color=_EVAL, marker="o" if few else "", markersize=4, label="eval")
    if best is not None:
        axis.plot([best.step], [best.loss], linestyle="", marker="o", markersize=10, markerfacecolor="none",
                  markeredgecolor=_EVAL, label=f"best eval {best.loss:.4f} at step {best.step:,}")  # fmt: skip
    if record.resumes:
        axis.plot([], [], color=_RESUMED, linestyle=(0, (5, 4)), linewidth=1, label="resumed")
    axis.set_title("loss (nats a token)", fontsize=9, loc="left")
    axis.legend(fontsize=9)


def _draw_clip(axis: Axes, record: RunData) -> None:
    """The norm beyond which a gradient is clipped, where that is near the curve, and the steps that were skipped."""
    limit = clip_norm(record)
    norms = record.metrics.curves.fields["global_norm"]
    if limit is not None and limit <= 3 * max(value for value in norms.highs if not math.isnan(value)):
        axis.axhline(limit, color=_EVAL, linestyle="--", linewidth=1, label=f"clipped at {limit:g}")
    for number, one in enumerate(record.metrics.skipped[:200]):
        axis.axvline(one.step, color=_SKIPPED, linewidth=0.8, label="skipped" if number == 0 else None)
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8)


def smooth(values: Sequence[float], width: float) -> list[float]:
    """Mean over neighbours with the weights of a bell curve, whose standard deviation is `width` points; NaN is left
    out, and stays."""
    import numpy as np

    found = np.asarray(values, float)
    if width < 0.5:
        return found.tolist()
    reach = min(math.ceil(3 * width), len(found) - 1)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    known = ~np.isnan(found)
    # `full`, cut to the middle: `same` has the length of the longer argument.
    middle = slice(reach, reach + len(found))
    sums = np.convolve(np.where(known, found, 0.0), weights, "full")[middle]
    counts = np.convolve(known.astype(float), weights, "full")[middle]
    return np.where(known, sums / np.maximum(counts, 1e-300), np.nan).tolist()


def _draw_panel(axis: Axes, curves: Curves, panel: Panel, layers: Sequence[int] = ()) -> None:
    from matplotlib import colormaps

    count = len(panel.fields)
    named = _named(len(panel.fields))
    for number, name in enumerate(panel.fields):
        # Neighbours look alike, so that the order can be seen.
        if count <= _MAX_LEGEND_ENTRIES:
            style = {}
        else:
            style = {"color": colormaps["viridis"](number / (count - 1))}
        if number in named and count > 1:
            suffix = name.partition(".")[2] or name
            if suffix.isdecimal():
                style["label"] = f"layer {_layer(int(suffix), layers)}"
            else:
                style["label"] = suffix
        axis.plot(curves.steps, curves.means(name), linewidth=1, marker=_marker(curves.steps), **style)
    axis.set_title(panel.title, fontsize=9, loc="left")
    if panel.title == _LAYER_PANELS[DROP_RATE]:
        axis.set_ylim(bottom=0)
    if count > 1:
        axis.legend(fontsize=8, ncols=2, handlelength=1, columnspacing=1)


def _tick_text(value: float) -> str:
    """Short, for numbers of any size: 0.004, 2e-05, 12.5k."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"


def _layer(index: int, layers: Sequence[int]) -> int:
    """The number of a layer with experts, which metrics.jsonl counts from 0."""
    if index < len(layers):
        return layers[index]
    return index


def _named(count: int) -> set[int]:
    """The curves that a legend names: all of a few, else evenly spread ones with the first and the last."""
    entries = min(count, _MAX_LEGEND_ENTRIES)
    return {round(entry * (count - 1) / max(entries - 1, 1)) for entry in range(entries)}


def _marker(steps: Sequence[int]) -> str:
    """Points where there are too few for a line."""
    if len(steps) < 3:
        return "."
    return ""
