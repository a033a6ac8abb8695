"""report.png: the curves of a training, drawn from metrics.jsonl, so that they include earlier runs."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE
from trainer.report.curves import Curves
from trainer.report.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_USUAL_PANELS = {"lr": "learning rate", "global_norm": "gradient norm", "tokens_per_second": "tokens/s"}
_NOT_DRAWN = frozenset(
    "step epoch loss loss_scale overflow tokens input_tokens_per_second mfu step_seconds data_wait_seconds "
    "peak_rss_bytes router_entropy".split()
)
# Lists with a number for each MoE layer, a panel each.
_LAYER_PANELS = {DROP_RATE: "drop rate", LOAD_IMBALANCE: "busiest expert / mean"}
_MAX_LEGEND_ENTRIES = 8


class Panel(NamedTuple):
    title: str
    fields: list[str]  # of a step


def panels(curves: Curves) -> list[Panel]:
    """The panels below the loss: the usual ones that have numbers, then one for each group of extra fields."""
    usual = [Panel(title, [name]) for name, title in _USUAL_PANELS.items() if curves.has_values(name)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in curves.fields:
        if name not in _USUAL_PANELS and name.partition(".")[0] not in _NOT_DRAWN and curves.has_values(name):
            groups[name.partition(".")[0]].append(name)
    titles = {name: _LAYER_PANELS[name] if name in _LAYER_PANELS else name for name in groups}
    return usual + [Panel(titles[name], names) for name, names in groups.items()]


def draw_report(record: RunRecord, path: Path) -> bool:
    """Draws ``path`` and replaces it atomically; False where there is nothing to draw.

    Raises OSError where the file cannot be written.
    """
    figure = draw_figure(record)
    if figure is None:
        return False
    unfinished = path.with_name(path.name + ".tmp")
    figure.savefig(unfinished, format="png", dpi=110)
    os.replace(unfinished, path)
    return True


def draw_figure(record: RunRecord) -> Figure | None:
    """The curves of a run, for a file or a notebook; None where there is nothing to draw."""
    curves = record.curves
    if not curves.steps and not record.evaluations:
        return None
    # Not pyplot, which keeps a global figure and looks for a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = panels(curves)
    figure = Figure(figsize=(9, 4 + 2 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [2] + [1] * len(shown)
    axes = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    _draw_loss(axes[0], record)
    for axis, panel in zip(axes[1:], shown, strict=True):
        _draw_panel(axis, curves, panel, record.moe_layers)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.align_ylabels(axes)
    axes[-1].set_xlabel("optimizer step")
    return figure


def _draw_loss(axis: Axes, record: RunRecord) -> None:
    curves, evaluations = record.curves, record.evaluations
    if curves.has_values("loss"):
        axis.plot(curves.steps, curves.means("loss"), linewidth=1, label="train", marker=_marker(curves.steps))
    if evaluations:
        steps, losses = [each.step for each in evaluations], [each.loss for each in evaluations]
        axis.plot(steps, losses, linewidth=1.5, marker="o", markersize=4, label="eval")
    axis.set_ylabel("loss (nats a token)")
    axis.legend()


def _draw_panel(axis: Axes, curves: Curves, panel: Panel, layers: Sequence[int] = ()) -> None:
    from matplotlib import colormaps

    count, named = len(panel.fields), _named(len(panel.fields))
    for number, name in enumerate(panel.fields):
        # Neighbours look alike, so that the order can be seen.
        style = {} if count <= _MAX_LEGEND_ENTRIES else {"color": colormaps["viridis"](number / (count - 1))}
        if number in named:
            suffix = name.partition(".")[2] or name
            style["label"] = f"layer {_layer(int(suffix), layers)}" if suffix.isdecimal() else suffix
        axis.plot(curves.steps, curves.means(name), linewidth=1, marker=_marker(curves.steps), **style)
    axis.set_ylabel(panel.title)
    if panel.title == _LAYER_PANELS[DROP_RATE]:
        axis.set_ylim(bottom=0)
    if count > 1:
        axis.legend(fontsize="x-small", ncols=4)


def _layer(index: int, layers: Sequence[int]) -> int:
    """The number of a layer with experts, which metrics.jsonl counts from 0."""
    return layers[index] if index < len(layers) else index


def _named(count: int) -> set[int]:
    """The curves that a legend names: all of a few, else evenly spread ones with the first and the last."""
    entries = min(count, _MAX_LEGEND_ENTRIES)
    return {round(entry * (count - 1) / max(entries - 1, 1)) for entry in range(entries)}


def _marker(steps: Sequence[int]) -> str:
    """Points where there are too few for a line."""
    return "." if len(steps) < 3 else ""
