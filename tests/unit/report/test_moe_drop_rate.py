"""The drop rate: counted, printed in MindSpore Transformers' form, kept for each layer and drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from monitor_helpers import run_info, step_metrics
from test_report_picture import colours, picture, write_metrics

from trainer.monitors.console import ProgressMonitor, console_monitor, log_file_monitor
from trainer.monitors.formatting import drop_rate_lines
from trainer.monitors.jsonl import JsonlMonitor
from trainer.monitors.live import LiveState, TerminalLine
from trainer.monitors.metrics import routing_details
from trainer.ops.routing import RoutingCounts
from trainer.report.curves import Curves, MetricsReader
from trainer.report.picture import Panel, _draw_panel, choose_panels, draw_report
from trainer.report.record import read_run

# Layers 1 and 2 and an MTP module, of 4 experts: nothing dropped, 3 of 12 dropped, all at one expert.
COUNTS = RoutingCounts(
    layers=(1, 2, 4),
    kept=np.array([[3, 3, 3, 3], [4, 4, 1, 0], [3, 0, 0, 0]]),
    requested=np.array([[3, 3, 3, 3], [6, 5, 1, 0], [12, 0, 0, 0]]),
    entropy_sum=np.array([12 * math.log(4), 12 * 0.5, 0.0]),
)


def test_the_fields_of_a_step() -> None:
    details = routing_details(COUNTS)
    assert details == {
        "drop_rate": [0.0, 0.25, 0.75],
        "load_imbalance": [1.0, 2.0, 4.0],
        "router_entropy": [pytest.approx(math.log(4)), 0.5, 0.0],
    }
    json.dumps(details)


def test_the_lines_have_mindspore_transformers_form() -> None:
    assert drop_rate_lines(step_metrics(1, details=routing_details(COUNTS)), COUNTS.layers) == [
        "layer: 1, drop_rate: 0.00000",
        "layer: 2, drop_rate: 0.25000",
        "layer: 4, drop_rate: 0.75000",
    ]
    assert drop_rate_lines(step_metrics(1), COUNTS.layers) == [], "a step that saw no token"


def steps_of_lines(text: str) -> list[int]:
    """Returns the number of drop-rate lines after each line of a step."""
    found: list[int] = []
    for line in text.splitlines():
        if "| loss" in line or "loss: " in line:
            found.append(0)
        elif "drop_rate: " in line:
            found[-1] += 1
    return found


@pytest.mark.parametrize("log_format", ["plain", "mindformers"])
def test_console_and_log_print_them_at_the_interval_of_steps(
    log_format: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    log = tmp_path / "rank-0.log"
    for monitor in (console_monitor(log_format, 2, moe_layers=COUNTS.layers), log_file_monitor(log, 2, COUNTS.layers)):
        monitor.on_start(run_info(total_steps=5, last_step=5))
        for step in range(1, 6):
            # A step that overflowed has its line out of turn, without the layers.
            changes = {"overflow": step == 3, "extra": {"aux_loss": 1.0625}, "details": routing_details(COUNTS)}
            monitor.on_step(step_metrics(step, **changes))
        monitor.close(None)
    printed = capsys.readouterr().out
    assert steps_of_lines(printed) == steps_of_lines(log.read_text()) == [3, 3, 0, 3, 3]
    assert ("aux_loss 1.062" if log_format == "plain" else ", aux_loss: 1.062500 }") in printed


def test_the_live_line_has_them_above() -> None:
    from io import StringIO

    from rich.console import Console

    console, state = Console(file=StringIO(), force_terminal=True, width=200), LiveState()
    monitor = ProgressMonitor(TerminalLine(console, state), 2, COUNTS.layers)
    monitor.on_start(run_info(total_steps=4, last_step=4))
    for step in range(1, 5):
        extra, details = {"aux_loss": 1.0625, "mtp_loss": 5.5}, routing_details(COUNTS)
        monitor.on_step(step_metrics(step, extra=extra, details=details))
    monitor.close(None)
    assert "aux_loss 1.062" in console.file.getvalue() and "mtp_loss 5.5" in console.file.getvalue()
    assert console.file.getvalue().count("layer: 2, drop_rate: 0.25000") == 3


def test_metrics_have_a_list_and_the_report_a_panel(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = JsonlMonitor(path)
    monitor.on_start(run_info(output_dir=tmp_path))
    for step in (1, 2):
        monitor.on_step(step_metrics(step, extra={"aux_loss": 1.5}, details=routing_details(COUNTS)))
    monitor.close(None)
    record = json.loads(path.read_text().splitlines()[0])
    assert (record["aux_loss"], record["drop_rate"]) == (1.5, [0.0, 0.25, 0.75])
    curves = MetricsReader(path).read().curves
    shown = {panel.title: panel.fields for panel in choose_panels(curves)}
    assert shown["drop rate"] == ["drop_rate.0", "drop_rate.1", "drop_rate.2"]
    assert shown["busiest expert / mean"] == ["load_imbalance.0", "load_imbalance.1", "load_imbalance.2"]
    assert shown["aux_loss"] == ["aux_loss"] and "router_entropy" not in shown
    assert list(curves.means("drop_rate.1")) == [0.25, 0.25]


def test_the_picture_has_panels_of_the_layers(tmp_path: Path) -> None:
    dense, experts = tmp_path / "dense", tmp_path / "experts"
    for folder, details in ((dense, {}), (experts, routing_details(COUNTS))):
        folder.mkdir()
        write_metrics(folder / "metrics.jsonl", 20, **details)
        assert draw_report(read_run(folder), folder / "report.png")
    # The colour of the second line of a panel; an antialiased third one may leave no pixel of its own.
    third = 0x2CA02C
    assert third in colours(picture(experts / "report.png")) and third not in colours(picture(dense / "report.png"))


@pytest.mark.parametrize(("layers", "named"), [(1, 0), (4, 4), (8, 4), (60, 4)])
def test_a_panel_of_many_layers_draws_all_and_names_a_few(layers: int, named: int) -> None:
    from matplotlib.figure import Figure

    names = [f"drop_rate.{layer}" for layer in range(layers)]
    curves = Curves()
    for step, rate in ((1, 0.5), (2, 0.4)):
        curves.add({"step": step, "drop_rate": [rate] * layers})
    axis = Figure().subplots()
    _draw_panel(axis, curves, Panel("drop rate", names))
    assert len(axis.lines) == layers and axis.get_ylim()[0] == 0
    texts = [] if axis.get_legend() is None else [text.get_text() for text in axis.get_legend().get_texts()]
    assert len(texts) == named
    if named:
        assert (texts[0], texts[-1]) == ("layer 0", f"layer {layers - 1}")
    colours = {str(line.get_color()) for line in axis.lines}
    assert len(colours) == layers
