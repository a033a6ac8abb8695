#!/usr/bin/env python3
"""What watching a run costs: lines, metrics.jsonl, TensorBoard's files and report.html, without the training.

Started by `benchmark.py targets`. All monitors of a run with experts get so many made-up steps; then report.html is
written, as it is every `report_interval` seconds. CPU time of the training's thread and of all others is told apart,
because the monitors' own threads compute beside the step. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from trainer.config import Override, load_config  # noqa: E402
from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE, RunInfo, StepMetrics, Totals  # noqa: E402
from trainer.parallel.world import SINGLE_PROCESS  # noqa: E402
from trainer.report.page import report_data, report_html  # noqa: E402
from trainer.report.record import RunReader  # noqa: E402
from trainer.run.loop import make_monitors  # noqa: E402

_STEPS, _NEW_STEPS, _LAYERS = 20_000, 60, 24


def watching_costs(folder: Path) -> dict[str, float]:
    """Returns the CPU seconds of a step in the training's thread and in others, and of writing report.html."""
    layers = [Override("model.model_config.num_layers", str(_LAYERS)), Override("output_dir", str(folder))]
    files = Override("tensorboard", f"{{tensorboard_dir: {folder}}}")
    quiet = [Override("report", "False"), Override("log_format", "plain")]
    config = load_config(str(ROOT / "configs" / "moe_tiny.yaml"), [*layers, files, *quiet])
    (folder / "config.yaml").write_text("{}")
    monitors, total = [Totals(), *make_monitors(config, folder, SINGLE_PROCESS, "CPU")], _STEPS + _NEW_STEPS
    for monitor in monitors:
        monitor.on_start(RunInfo(folder, total, total))
    began, reader = (time.thread_time(), time.process_time()), RunReader(folder)

    def tell(steps: range) -> None:
        for step in steps:
            of_layers = {name: [step % 7 / 7] * _LAYERS for name in (DROP_RATE, LOAD_IMBALANCE)}
            metrics = StepMetrics(step, total, 1, 1, step, total, 1 + 1 / step, 1e-3, 1.0, 1.0, False, 2048, 4e3, 4e3,
                                  0.5, 0.0, 10**9, details=of_layers)  # fmt: skip
            for monitor in monitors:
                monitor.on_step(metrics)

    tell(range(1, _STEPS + 1))
    own = time.thread_time() - began[0]
    reader.read()  # what earlier writings have read
    tell(range(_STEPS + 1, total + 1))
    for monitor in monitors:
        monitor.close(None)  # waits for what other threads still write
    now = time.thread_time(), time.process_time()
    others = (now[1] - began[1]) - (now[0] - began[0])
    report_html(report_data(reader.read(), 30.0))
    return {"own": own / _STEPS, "others": others / total, "report": time.thread_time() - now[0]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        sys.stdout, shown = open("/dev/null", "w"), sys.stdout
        print(json.dumps(watching_costs(Path(name))), file=shown)
