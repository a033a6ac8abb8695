"""report.png: the curves of a training, drawn from metrics.jsonl, so that they include earlier runs."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.monitors.jsonl import read_records
from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE, Monitor, RunSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAN = math.nan
_USUAL_PANELS = {"lr": "learning rate", "global_norm": "gradient norm", "tokens_per_second": "tokens/s"}
_NOT_DRAWN = frozenset(
    "step epoch loss loss_scale overflow tokens input_tokens_per_second step_seconds data_wait_seconds "
    "peak_rss_bytes".split()
)
# Lists with a number for each MoE layer, a panel each.
_LAYER_PANELS = {DROP_RATE: "drop rate", LOAD_IMBALANCE: "busiest expert / mean"}
_MAX_POINTS = 4000  # more than the columns of a picture
_MAX_LEGEND_ENTRIES = 8


class Panel(NamedTuple):
    title: str
    fields: list[str]  # of a step


@dataclass
class Curves:
    """The content of metrics.jsonl: a list for each field, with NaN where a step lacks it."""

    steps: list[int] = field(default_factory=list)
    fields: dict[str, list[float]] = field(default_factory=dict)
    eval_steps: list[int] = field(default_factory=list)
    eval_losses: list[float] = field(default_factory=list)

    def has_values(self, name: str) -> bool:
        """Whether a field has any number."""
        return any(not math.isnan(value) for value in self.fields.get(name, ()))

    def panels(self) -> list[Panel]:
        """The panels below the loss: the usual ones that have numbers, then one for each group of extra fields."""
        usual = [Panel(title, [name]) for name, title in _USUAL_PANELS.items() if self.has_values(name)]
        groups: dict[str, list[str]] = defaultdict(list)
        for name in self.fields:
            if name not in _USUAL_PANELS and name not in _NOT_DRAWN and self.has_values(name):
                groups[name.partition(".")[0]].append(name)
        titles = {name: _LAYER_PANELS[name] if name in _LAYER_PANELS else name for name in groups}
        return usual + [Panel(titles[name], names) for name, names in groups.items()]


class ReportMonitor(Monitor):
    """Draws the report at the end of a run. A failure becomes a notice, because the training itself has succeeded."""

    def __init__(
        self, metrics_path: Path, report_path: Path, notice: Callable[[str], None], layers: Sequence[int] = ()
    ) -> None:
        self._metrics_path, self._report_path, self._notice, self._layers = metrics_path, report_path, notice, layers

    def close(self, summary: RunSummary | None) -> None:
        try:
            draw_report(self._metrics_path, self._report_path, self._layers)
        except Exception as error:  # no error of a drawing library may fail a finished run
            self._notice(f"report {self._report_path} was not drawn: {type(error).__name__}: {error}")


def read_curves(path: Path, layers: Sequence[int] = ()) -> Curves:
    """Reads a metrics file: at most a few thousand steps, evenly spaced, and every evaluation.

    A list over MoE layers becomes one field for each layer; `layers` are their numbers.
    """
    with path.open("rb") as lines:
        line_count = sum(1 for _ in lines)
    stride = -(-line_count // _MAX_POINTS) or 1
    curves = Curves()
    steps_seen = 0
    for record in read_records(path):
        if "eval_loss" in record:
            curves.eval_steps.append(record["step"])
            curves.eval_losses.append(_number(record["eval_loss"]))
            continue
        if "loss" not in record:  # of a restart, or of the end of a run
            continue
        steps_seen += 1
        if (steps_seen - 1) % stride == 0:
            _add_step(curves, record, layers)
    return curves


def _add_step(curves: Curves, record: dict[str, object], layers: Sequence[int]) -> None:
    """Adds a step's fields, where each list becomes fields such as ``drop_rate.layer 3``."""
    fields: dict[str, object] = {}
    for name, value in record.items():
        if name in _LAYER_PANELS and isinstance(value, list):
            numbers = layers if len(layers) == len(value) else range(len(value))
            fields |= {f"{name}.layer {layer}": number for layer, number in zip(numbers, value, strict=True)}
        else:
            fields[name] = value
    for name in fields:
        if name not in curves.fields:
            curves.fields[name] = [_NAN] * len(curves.steps)
    curves.steps.append(record["step"])
    for name, values in curves.fields.items():
        values.append(_number(fields[name]) if name in fields else _NAN)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else _NAN


def draw_report(metrics_path: Path, report_path: Path, layers: Sequence[int] = ()) -> bool:
    """Draws ``report_path`` from ``metrics_path`` and replaces it atomically; False where there is nothing to draw.

    `layers` are the numbers of the MoE layers. Raises OSError where a file cannot be read or written.
    """
    if not metrics_path.exists():
        return False
    curves = read_curves(metrics_path, layers)
    if not curves.steps and not curves.eval_steps:
        return False
    # Not pyplot, which keeps a global figure and looks for a window system.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = curves.panels()
    figure = Figure(figsize=(9, 4 + 2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [2] + [1] * len(panels)
    axes = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    _draw_loss(axes[0], curves)
    for axis, panel in zip(axes[1:], panels, strict=True):
        _draw_panel(axis, curves, panel)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.align_ylabels(axes)
    axes[-1].set_xlabel("optimizer step")
    unfinished = report_path.with_name(report_path.name + ".tmp")
    figure.savefig(unfinished, format="png", dpi=110)
    os.replace(unfinished, report_path)
    return True


def _draw_loss(axis: Axes, curves: Curves) -> None:
    if curves.has_values("loss"):
        axis.plot(curves.steps, curves.fields["loss"], linewidth=1, label="train", marker=_marker(curves.steps))
    if curves.eval_steps:
        axis.plot(curves.eval_steps, curves.eval_losses, linewidth=1.5, marker="o", markersize=4, label="eval")
    axis.set_ylabel("loss (nats a token)")
    axis.legend()


def _draw_panel(axis: Axes, curves: Curves, panel: Panel) -> None:
    from matplotlib import colormaps

    count, named = len(panel.fields), _named(len(panel.fields))
    for number, name in enumerate(panel.fields):
        # Neighbours look alike, so that the order can be seen.
        style = {} if count <= _MAX_LEGEND_ENTRIES else {"color": colormaps["viridis"](number / (count - 1))}
        if number in named:
            style["label"] = name.partition(".")[2] or name
        axis.plot(curves.steps, curves.fields[name], linewidth=1, marker=_marker(curves.steps), **style)
    axis.set_ylabel(panel.title)
    if panel.title == _LAYER_PANELS[DROP_RATE]:
        axis.set_ylim(bottom=0)
    if count > 1:
        axis.legend(fontsize="x-small", ncols=4)


def _named(count: int) -> set[int]:
    """The curves that a legend names: all of a few, else evenly spread ones with the first and the last."""
    entries = min(count, _MAX_LEGEND_ENTRIES)
    return {round(entry * (count - 1) / max(entries - 1, 1)) for entry in range(entries)}


def _marker(steps: list[int]) -> str:
    """Points where there are too few for a line."""
    return "." if len(steps) < 3 else ""
