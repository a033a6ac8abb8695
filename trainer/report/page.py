"""Writes report.html: one self-contained file, whose script draws the data of a run from JSON in the page.

Names and texts of a run are data and never become markup or script. The page's security policy forbids other scripts
and everything from a network.
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
from trainer.input_files import read_bytes, replace_surrogates
from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE
from trainer.report.curves import Curves
from trainer.report.record import RunData, clip_norm, loss_title
from trainer.report.samples import read_report_samples

_PAGE = Path(__file__).parent / "page"
MAX_POINTS = 512  # of a curve with extremes; a curve of a short run has none, and at most twice as many points
_MAX_CELLS = 12_000  # of a heat map
_MAX_EVALUATIONS = 400
_MAX_PAUSES = 300
_MAX_SKIPPED = 200
_MAX_CHECKPOINTS = 40
_MAX_CHARTS = 14
_MAX_CHARACTERS = 4000  # characters of a sample or of a setting
_FIRST_CHARTS = ("lr", "global_norm", "input_tokens_per_second", "peak_rss_bytes")
_NO_CHART = frozenset(("loss", "tokens", "tokens_per_second", "step_seconds", "data_wait_seconds", "loss_scale"))
_HEAT_MAPS = {DROP_RATE: "drop rate of each layer", LOAD_IMBALANCE: "load of the busiest expert / mean, of each layer"}


def report_html(data: dict[str, Any]) -> str:
    """Returns the page of a run.

    Args:
        data: The result of `report_data`.
    """
    reload_seconds = None
    if data["state"] == "running" and data["interval"] > 0:
        reload_seconds = max(data["interval"], 2)
    return assemble_page(data["title"], data, "report.js", reload_seconds)


def assemble_page(title: str, data: dict[str, Any], script_name: str, reload_seconds: float | None = None) -> str:
    """Returns a self-contained page.

    Args:
        data: The script reads it as JSON from the element with the id ``data``.
        script_name: A file of the folder ``page``. The page's only scripts are this one, charts.js and uPlot.
        reload_seconds: The browser loads the file again after this time; None: never.
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
        "title": html.escape(replace_surrogates(title)),
        "policy": policy,
        "style": style,
        "script": script,
        "data": embeddable_json(data),
    }
    # In one pass: a text of the run that looks like a placeholder stays as it is.
    return re.sub(r"@(\w+)@", lambda match: parts[match[1]], _asset("frame.html"))


def embeddable_json(data: Any) -> str:
    """Returns JSON for an element of a page: it has no character that could end the element or begin another one."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@functools.cache
def _asset(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Returns the digest by which a page's security policy allows a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def report_data(record: RunData, interval: float = 0.0) -> dict[str, Any]:
    """Returns what the page of a run shows, as plain values.

    Args:
        interval: The page of a running training is written again after this number of seconds; 0: only at its end.
    """
    metrics = record.metrics
    curves = metrics.curves.downsampled(MAX_POINTS)
    config = record.config
    longest = sorted(range(len(metrics.pauses)), key=lambda place: metrics.pauses[place].seconds)[-_MAX_PAUSES:]
    best = metrics.best
    evaluations = _thin(metrics.evaluations, _MAX_EVALUATIONS, keep=best)
    by_kind = dict.fromkeys(("evaluation", "sampling", "checkpoint"), 0.0)
    for pause in metrics.pauses:
        by_kind[pause.kind] += pause.seconds
    training = (curves.seconds or [0.0])[-1]
    waited = min(metrics.data_wait_seconds, training)
    samples_title, samples = read_report_samples(record.folder, _MAX_CHARACTERS)
    now = datetime.now().astimezone()
    labels = "tokens"
    settings_title = "settings"
    if config is not None:
        labels = config.network.labels_text
        settings_title = "settings that are not the defaults"
    return {
        "title": record.name,
        "state": record.state,
        "outcome": record.outcome,
        "step": record.step,
        "last_step": record.last_step,
        "left_seconds": _remaining_seconds(record, by_kind),
        "labels": labels,
        "loss_title": loss_title(config),
        "model": _model_text(record),
        "tokens": (curves.tokens or [0])[-1],
        "seconds": round_digits(training + sum(by_kind.values())),
        "starts": len(record.starts),
        "input_tokens_per_second": round_digits(metrics.rate("input_tokens_per_second")),
        "peak_bytes": record.peak_rss_bytes,
        "curves": _curve_data(curves),
        "charts": _charts(curves),
        "evaluations": [[one.step, round_digits(one.loss, 6), round_digits(one.seconds, 3), round_digits(one.accuracy),
                         round_digits(one.margin)] for one in evaluations],
        "best": best and evaluations.index(best),
        "clip": clip_norm(record),
        "skipped": [[one.step, one.reason[:200]] for one in _thin(metrics.skipped, _MAX_SKIPPED)],
        "skipped_count": len(metrics.skipped),
        "pauses": [[one.step, one.kind, round_digits(one.seconds, 3)]
                   for one in (metrics.pauses[place] for place in sorted(longest))],
        "time": [round_digits(part) for part in (training - waited, waited, *by_kind.values())],
        "resumes": list(record.resumes),
        "heat": [_heat_map(curves, name, record.moe_layers) for name in _HEAT_MAPS if f"{name}.0" in curves.fields],
        "checkpoints": _checkpoints(record),
        "samples_title": samples_title,
        "samples": samples,
        "facts": _facts(record),
        "settings": [[key, _setting_text(value)] for key, value in record.changed().items() if key != "output_dir"],
        "settings_title": settings_title,
        "notes": [replace_surrogates(note) for note in record.notes],
        "version": __version__,
        "written": now.strftime("%Y-%m-%d %H:%M:%S %z"),
        "written_at": now.timestamp(),
        "interval": interval,
    }  # fmt: skip


def _curve_data(curves: Curves) -> dict[str, Any]:
    """Returns the curves of the charts, some with minima and maxima if a point stands for several steps."""
    fields: dict[str, dict[str, list[float | None]]] = {}
    for name in ("loss", *_charts(curves)):
        if not curves.has_values(name):
            continue
        series = curves.fields[name]
        values = series.means
        if name == "peak_rss_bytes":  # a highest value so far, which a mean would lower
            values = series.highs
        fields[name] = {"mean": [round_digits(value) for value in values]}
        if curves.stride > 1 and name in ("loss", "global_norm", "input_tokens_per_second"):
            fields[name]["low"] = [round_digits(value, 4) for value in series.lows]
            fields[name]["high"] = [round_digits(value, 4) for value in series.highs]
    return {"steps": curves.steps, "stride": curves.stride, "fields": fields}


def _charts(curves: Curves) -> list[str]:
    """Returns the fields, apart from the loss, that have a chart."""
    usual = [name for name in _FIRST_CHARTS if curves.has_values(name)]
    others = [name for name in curves.fields if name not in _FIRST_CHARTS and name not in _NO_CHART
              and "." not in name and curves.has_values(name)]  # fmt: skip
    scale = curves.fields.get("loss_scale")
    if scale is not None and scale.has_values and min(_finite(scale.lows)) != max(_finite(scale.highs)):
        others.append("loss_scale")
    return [*usual, *others][:_MAX_CHARTS]


def _heat_map(curves: Curves, name: str, layers: Sequence[int]) -> dict[str, Any]:
    """Returns a map with a row per MoE layer. Columns are thinned, so that it is not larger than a curve or two."""
    rows = sum(1 for field in curves.fields if field.startswith(f"{name}."))
    while len(curves.steps) * rows > _MAX_CELLS and len(curves.steps) > 1:
        curves = curves.halve()
    values = [[round_digits(value, 3) for value in curves.means(f"{name}.{row}")] for row in range(rows)]
    shown = [value for row in values for value in row if value is not None]
    low = float(name != DROP_RATE)  # of a load over the mean: 1
    high = max(shown, default=low)
    if high <= low:
        high = low + 0.01
    layer_numbers = list(range(rows))
    if len(layers) == rows:
        layer_numbers = list(layers)
    return {
        "title": _HEAT_MAPS[name],
        "percent": name == DROP_RATE,
        "layers": layer_numbers,
        "x": curves.steps,
        "rows": values,
        "low": low,
        "high": high,
    }


def _checkpoints(record: RunData) -> list[list[Any]]:
    """Returns the newest checkpoints, the newest first, and the best one last if it is older."""
    newest = record.checkpoints[-_MAX_CHECKPOINTS:]
    older_best = tuple(each for each in record.checkpoints if each.is_best and each not in newest)
    return [
        [each.step, datetime.fromtimestamp(each.saved).astimezone().strftime("%Y-%m-%d %H:%M:%S"), each.size_bytes,
         round_digits(each.eval_loss, 6), each.is_best]
        for each in reversed(older_best + newest)
    ]  # fmt: skip


def _model_text(record: RunData) -> str:
    """Returns the class of the model and its number of weights, which plan.txt has."""
    if record.config is None:
        return ""
    text = record.config.model.arch.type
    try:
        plan = read_bytes(record.folder / "plan.txt").decode("utf-8", errors="replace")
    except OSError:
        return text
    if weights := re.search(r"^  weights +([\d,]+)", plan, re.MULTILINE):
        return f"{text}, {weights[1]} weights"
    return text


def _facts(record: RunData) -> list[list[Any]]:
    """Returns rows about the starts of the run and the machine: name, value, and whether the value is code."""
    facts: list[list[Any]] = [["folder", str(record.folder.resolve()), True]]
    for number, start in enumerate(record.starts, start=1):
        name = f"start {number}"
        if len(record.starts) == 1:
            name = "started"
        parts = [_date(start.began)]
        if start.resumed_from:
            parts.append(f"from {Path(start.resumed_from).name}")
        if start.ended:
            parts += [f"{start.outcome or 'no end was written'} at step {start.end_step}", _date(start.ended)]
        elif record.state != "running" or number < len(record.starts):
            parts.append("no end was written")
        facts.append([name, ", ".join(parts), False])
    if not record.starts:
        return facts
    last = record.starts[-1]
    device = last.device
    if last.processor:
        device = f"{last.device} ({last.processor})"
    facts += [
        ["command", shlex.join(last.command), True],
        ["device", device, False],
        ["ranks", str(last.ranks), False],
        ["host", last.host, False],
        ["versions", ", ".join(f"{name} {version}" for name, version in last.versions.items()), False],
    ]
    if last.commit:
        facts.append(["commit", last.commit, True])
    for restart in record.metrics.restarts:
        facts.append(["restart", f"after step {restart['step']}: {restart.get('reason', '')}"[:300], False])
    return [[name, replace_surrogates(value), is_code] for name, value, is_code in facts]


def _date(text: str) -> str:
    return text.replace("T", " ")[:19]


def _setting_text(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = json.dumps(value)
    if len(text) > 300:
        text = text[:300] + " ..."
    return replace_surrogates(text)


def _remaining_seconds(record: RunData, pauses: dict[str, float]) -> float | None:
    """Returns the estimated seconds until the last step, with pauses; None unless the run is running."""
    recent = _finite(record.metrics.curves.means("step_seconds")[-20:])
    if record.state != "running" or not recent or record.last_step <= record.step:
        return None
    done = record.step - (record.metrics.first_step or 1) + 1
    step_seconds = statistics.median(recent) + sum(pauses.values()) / max(done, 1)
    return round_digits((record.last_step - record.step) * step_seconds)


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def round_digits(value: float | None, digits: int = 5) -> float | int | None:
    """Rounds to this number of significant digits; returns None for a number that is not finite, which JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.{digits}g}")
    if number.is_integer() and abs(number) < 1e15:
        return int(number)
    return number


def _thin(values: Sequence[Any], limit: int, keep: Any = None) -> list[Any]:
    """Returns at most `limit` values, evenly spread, with the first and the last, and in addition `keep`."""
    if len(values) <= limit:
        return list(values)
    places = {round(number * (len(values) - 1) / (limit - 1)) for number in range(limit)}
    if keep is not None:
        places.add(values.index(keep))
    return [values[place] for place in sorted(places)]
