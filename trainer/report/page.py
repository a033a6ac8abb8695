"""report.html: one file without any other, whose script draws the data of a run that stands in it as JSON.

Names and texts of a run are data: they never become markup or script, and the page's policy lets no other script run
and nothing be loaded from a network.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer import __version__
from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE
from trainer.report.curves import Curves
from trainer.report.record import RunData, clip_norm
from trainer.report.samples import read_report_samples

_PAGE = Path(__file__).parent / "page"
MOST_POINTS = 512  # of a curve with extremes; one of a short run, which has none, may have twice as many
_MOST_CELLS = 12_000  # of a heat map
_MOST_EVALUATIONS = 400
_MOST_PAUSES = 300
_MOST_SKIPPED = 200
_MOST_CHECKPOINTS = 40
_MOST_CHARTS = 14
_MOST_TEXT = 4000  # characters of a sample or of a setting
_FIRST_CHARTS = ("lr", "global_norm", "input_tokens_per_second", "peak_rss_bytes")
_NO_CHART = frozenset(
    ("loss", "tokens", "tokens_per_second", "step_seconds", "data_wait_seconds", "loss_scale")
)
_HEAT_MAPS = {DROP_RATE: "drop rate of each layer", LOAD_IMBALANCE: "load of the busiest expert / mean, of each layer"}


def report_html(data: dict[str, Any]) -> str:
    """The page of a run, for what `report_data` gives."""
    reloads = data["state"] == "running" and data["interval"] > 0
    return assemble(data["title"], data, "report.js", max(data["interval"], 2) if reloads else None)


def assemble(title: str, data: dict[str, Any], script_name: str, reload_seconds: float | None = None) -> str:
    """Returns a page that holds everything it needs.

    Args:
        data: Given to the script as JSON, in the element with the id ``data``.
        script_name: A file of the folder ``page``; with the charts it is the page's only script.
        reload_seconds: After so many the browser reads the file again.
    """
    script = "".join(map(_asset, ("uplot/uPlot.iife.min.js", "charts.js", script_name)))
    style = _asset("uplot/uPlot.min.css") + _asset("style.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    refresh = ""
    if reload_seconds:
        refresh = f'<meta http-equiv="refresh" content="{reload_seconds:g}">\n'
    parts = {
        "refresh": refresh,
        "title": html.escape(valid(title)),
        "policy": policy,
        "style": style,
        "script": script,
        "data": as_json(data),
    }
    # In one pass: a text of the run that looks like a placeholder stays as it is.
    return re.sub(r"@(\w+)@", lambda found: parts[found[1]], _asset("frame.html"))


def as_json(data: Any) -> str:
    """JSON that may stand in an element of a page: no character of it can end the element or begin another one."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _asset(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """As a page's policy names the scripts that may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def valid(text: str) -> str:
    """Without halves of characters, which the name of a folder may have."""
    return text.encode("utf-8", "replace").decode()


def report_data(record: RunData, interval: float = 0.0) -> dict[str, Any]:
    """What the page of a run shows, as plain values; `interval` is the number of seconds after which it is written
    again."""
    metrics = record.metrics
    curves = metrics.curves
    if curves.stride > 1 and len(curves.steps) > MOST_POINTS:
        curves = curves.halved()
    config = record.config
    pauses = _fewer(metrics.pauses, _MOST_PAUSES, lambda pause: pause.seconds)
    best = metrics.best
    evaluations = _spread(metrics.evaluations, _MOST_EVALUATIONS, keep=best)
    by_kind = {kind: sum(one.seconds for one in metrics.pauses if one.kind == kind) for kind in
               ("evaluation", "sampling", "checkpoint")}  # fmt: skip
    training = 0.0
    if curves.seconds:
        training = curves.seconds[-1]
    waited = min(metrics.data_wait_seconds, training)
    samples_title, samples = read_report_samples(record.folder, _MOST_TEXT)
    now = datetime.now().astimezone()
    return {
        "title": record.name,
        "state": record.state,
        "outcome": record.outcome,
        "step": record.step,
        "last_step": record.last_step,
        "left_seconds": _left_seconds(record, by_kind),
        "labels": config.network.labels_text if config is not None else "tokens",
        "model": _model_text(record),
        "tokens": curves.tokens[-1] if curves.tokens else 0,
        "seconds": rounded(training + sum(by_kind.values())),
        "starts": len(record.starts),
        "input_tokens_per_second": rounded(metrics.rate("input_tokens_per_second")),
        "peak_bytes": record.peak_rss_bytes,
        "curves": _curve_data(curves),
        "charts": _charts(curves),
        "evaluations": [[one.step, rounded(one.loss, 6), rounded(one.seconds, 3), rounded(one.accuracy)]
                        for one in evaluations],
        "best": evaluations.index(best) if best is not None else None,
        "clip": clip_norm(record),
        "skipped": [[one.step, one.reason[:200]] for one in _spread(metrics.skipped, _MOST_SKIPPED)],
        "skipped_count": len(metrics.skipped),
        "pauses": [[one.step, one.kind, rounded(one.seconds, 3)] for one in pauses],
        "time": [rounded(part) for part in (training - waited, waited, *by_kind.values())],
        "resumes": list(record.resumes),
        "heat": [_heat_map(curves, name, record.moe_layers) for name in _HEAT_MAPS if f"{name}.0" in curves.fields],
        "checkpoints": _checkpoints(record),
        "samples_title": samples_title,
        "samples": samples,
        "facts": _facts(record),
        "settings": [[key, _setting_text(value)] for key, value in record.changed().items() if key != "output_dir"],
        "settings_title": "settings that are not the defaults" if config is not None else "settings",
        "notes": [valid(note) for note in record.notes],
        "version": __version__,
        "written": now.strftime("%Y-%m-%d %H:%M:%S %z"),
        "written_at": now.timestamp(),
        "interval": interval,
    }  # fmt: skip


def _curve_data(curves: Curves) -> dict[str, Any]:
    """The curves that are drawn; extremes only where a point stands for several steps and the chart shows them."""
    fields: dict[str, dict[str, list[float | None]]] = {}
    for name in ("loss", *_charts(curves)):
        if not curves.has_values(name):
            continue
        series = curves.fields[name]
        # Of a process the highest memory so far never falls, and a mean over steps would be below it.
        if name == "peak_rss_bytes":
            values = series.highs
        else:
            values = series.means
        fields[name] = {"mean": [rounded(value) for value in values]}
        if curves.stride > 1 and name in ("loss", "global_norm", "input_tokens_per_second"):
            fields[name]["low"] = [rounded(value, 4) for value in series.lows]
            fields[name]["high"] = [rounded(value, 4) for value in series.highs]
    return {"steps": curves.steps, "stride": curves.stride, "fields": fields}


def _charts(curves: Curves) -> list[str]:
    """The fields that have a chart of their own beside the loss."""
    usual = [name for name in _FIRST_CHARTS if curves.has_values(name)]
    others = [name for name in curves.fields if name not in _FIRST_CHARTS and name not in _NO_CHART
              and "." not in name and curves.has_values(name)]  # fmt: skip
    scale = curves.fields.get("loss_scale")
    if scale is not None and scale.has_values and min(_finite(scale.lows)) != max(_finite(scale.highs)):
        others.append("loss_scale")
    return [*usual, *others][:_MOST_CHARTS]


def _heat_map(curves: Curves, name: str, layers: Sequence[int]) -> dict[str, Any]:
    """A row for each layer with experts; columns are thinned so that the map is no larger than a curve or two."""
    rows = sum(1 for field in curves.fields if field.startswith(f"{name}."))
    while len(curves.steps) * rows > _MOST_CELLS and len(curves.steps) > 1:
        curves = curves.halved()
    values = [[rounded(value, 3) for value in curves.means(f"{name}.{row}")] for row in range(rows)]
    shown = [value for row in values for value in row if value is not None]
    low = 1.0
    if name == DROP_RATE:
        low = 0.0
    return {
        "title": _HEAT_MAPS[name],
        "percent": name == DROP_RATE,
        "layers": list(layers) if len(layers) == rows else list(range(rows)),
        "x": curves.steps,
        "rows": values,
        "low": low,
        "high": max(shown, default=low) if max(shown, default=low) > low else low + 0.01,
    }


def _checkpoints(record: RunData) -> list[list[Any]]:
    found = record.checkpoints[-_MOST_CHECKPOINTS:]
    found = tuple(one for one in record.checkpoints if one.is_best and one not in found) + found
    return [
        [one.step, datetime.fromtimestamp(one.saved).astimezone().strftime("%Y-%m-%d %H:%M:%S"), one.size_bytes,
         rounded(one.eval_loss, 6), one.is_best]
        for one in reversed(found)
    ]  # fmt: skip


def _model_text(record: RunData) -> str:
    """Class and size of the model; the number of weights is in the plan."""
    if record.config is None:
        return ""
    text = record.config.model.arch.type
    try:
        plan = (record.folder / "plan.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return text
    weights = re.search(r"^  weights +([\d,]+)", plan, re.MULTILINE)
    if weights:
        return f"{text}, {weights[1]} weights"
    return text


def _facts(record: RunData) -> list[list[Any]]:
    """What was run, where and by what: name, value, and whether it is code."""
    found: list[list[Any]] = [["folder", str(record.folder.resolve()), True]]
    for number, start in enumerate(record.starts, start=1):
        if len(record.starts) == 1:
            name = "started"
        else:
            name = f"start {number}"
        parts = [_date(start.began)]
        parts += [f"from {Path(start.resumed_from).name}"] if start.resumed_from else []
        if start.ended:
            parts += [f"{start.outcome or 'no end was written'} at step {start.end_step}", _date(start.ended)]
        elif record.state != "running" or number < len(record.starts):
            parts.append("no end was written")
        found.append([name, ", ".join(parts), False])
    if not record.starts:
        return found
    last = record.starts[-1]
    found += [
        ["command", shlex.join(last.command), True],
        ["device", f"{last.device} ({last.processor})" if last.processor else last.device, False],
        ["ranks", str(last.ranks), False],
        ["host", last.host, False],
        ["versions", ", ".join(f"{name} {version}" for name, version in last.versions.items()), False],
    ]
    if last.commit:
        found.append(["commit", last.commit, True])
    for restart in record.metrics.restarts:
        found.append(["restart", f"after step {restart['step']}: {restart.get('reason', '')}"[:300], False])
    return [[name, valid(value), is_code] for name, value, is_code in found]


def _date(text: str) -> str:
    return text.replace("T", " ")[:19]


def _setting_text(value: Any) -> str:
    if isinstance(value, str):
        text = value
    else:
        if isinstance(value, float):
            text = f"{value:g}"
        else:
            text = json.dumps(value)
    return valid(text if len(text) <= 300 else text[:300] + " ...")


def _left_seconds(record: RunData, pauses: dict[str, float]) -> float | None:
    """Seconds until the last step, pauses included, from the latest steps."""
    recent = _finite(record.metrics.curves.means("step_seconds")[-20:])
    if record.state != "running" or not recent or record.last_step <= record.step:
        return None
    done = record.step - (record.metrics.first_step or 1) + 1
    step_seconds = statistics.median(recent) + sum(pauses.values()) / max(done, 1)
    return rounded((record.last_step - record.step) * step_seconds)


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def rounded(value: float | None, digits: int = 5) -> float | int | None:
    """With so many digits; None for a number that is not finite, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    found = float(f"{value:.{digits}g}")
    if found.is_integer() and abs(found) < 1e15:
        return int(found)
    return found


def _spread(values: Sequence[Any], most: int, keep: Any = None) -> list[Any]:
    """At most so many, evenly spread, with the first, the last, and `keep`."""
    if len(values) <= most:
        return list(values)
    kept = {round(number * (len(values) - 1) / (most - 1)) for number in range(most)}
    kept |= set() if keep is None else {values.index(keep)}
    return [values[at] for at in sorted(kept)]


def _fewer(values: Sequence[Any], most: int, size: Any) -> list[Any]:
    """The largest ones, in order."""
    if len(values) <= most:
        return list(values)
    kept = sorted(range(len(values)), key=lambda at: size(values[at]))[-most:]
    return [values[at] for at in sorted(kept)]
