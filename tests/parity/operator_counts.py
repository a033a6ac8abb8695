"""How many operators of each kind something runs, by MindSpore's own profiler: exact, however busy the machine is."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import mindspore
from mindspore.profiler import ProfilerActivity, tensorboard_trace_handler


def operator_counts(run: Callable[[], object], folder: Path) -> Counter[str]:
    """Counts by operator, for example ``MatMul``; `run` is called once before, so that nothing is compiled then.

    Args:
        run: What to count in; it must wait for its results.
        folder: Where the profiler may write.
    """
    run()
    handler = tensorboard_trace_handler(str(folder))
    with mindspore.profiler.profile(activities=[ProfilerActivity.CPU], on_trace_ready=handler):
        run()
    (table,) = folder.glob("*/FRAMEWORK/cpu_op_type_info_0.csv")
    with table.open(encoding="utf-8") as file:
        return Counter({row["op_type"]: int(float(row["type_occurrences"])) for row in csv.DictReader(file)})
