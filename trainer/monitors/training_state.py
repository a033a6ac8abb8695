"""What `monitor_config` records: norms of gradients, optimizer state and weights, and the share of a throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.config.patterns import read_pattern
from trainer.monitors.metrics import Monitor, RunInfo, StepMetrics

if TYPE_CHECKING:
    from trainer.config import Config

LOCAL_NORM = "local_norm"
WEIGHT_NORM = "weight_norm"
OPTIMIZER_NORMS = {"exp_avg": "adam_m_norm", "exp_avg_sq": "adam_v_norm"}
"""Arrays of AdamW -> tags of MindSpore Transformers and fields of metrics.jsonl."""
_FORMATS = {LOCAL_NORM: "local_norm_format", WEIGHT_NORM: "weight_state_format",
            **dict.fromkeys(OPTIMIZER_NORMS.values(), "optimizer_state_format")}  # fmt: skip


class TrainingStateRecords:
    """Which records of a step go where."""

    def __init__(self, config: Config) -> None:
        self._section = section = config.monitor_config
        written = bool(config.tensorboard.tensorboard_dir)
        self._outlets = {name: section.destinations(key) for name, key in _FORMATS.items()}
        if not written:  # as MindSpore Transformers does
            self._outlets = {name: frozenset(["log"] if where else ()) for name, where in self._outlets.items()}
        if section.monitor_on:
            self._baseline = section.throughput_baseline
        else:
            self._baseline = None
        self._samples = 0.0
        patterns = [read_pattern(text) for text in section.patterns]
        self.is_selected: Callable[[str], bool] = lru_cache(maxsize=None)(
            lambda name: any(pattern.search(name) for pattern in patterns) != section.invert
        )

    def goes_to(self, outlet: str) -> bool:
        """Whether anything goes to ``log`` or ``tensorboard``."""
        return self._baseline is not None or any(outlet in where for where in self._outlets.values())

    def is_due(self, step: int) -> bool:
        return self._section.monitor_on and step % self._section.step_interval == 0

    def asks_for(self, name: str) -> bool:
        """Whether a record such as ``weight_norm`` goes anywhere."""
        return bool(self._outlets[name])

    def on_start(self, info: RunInfo) -> None:
        self._samples = info.samples_per_step / info.ranks

    def values(self, metrics: StepMetrics, outlet: str) -> dict[str, float]:
        """The records of a step that go to ``log`` or ``tensorboard``, by tag; none where the step is not due."""
        found: dict[str, float] = {}
        if not self.is_due(metrics.step):
            return found
        for name, where in self._outlets.items():
            value = None
            if outlet in where:
                value = metrics.details.get(name)
            if isinstance(value, Mapping):
                found |= {f"{name}/{each}": norm for each, norm in value.items() if self.is_selected(each)}
            elif value is not None:
                found[name] = value
        if self._baseline is not None and self._samples:
            found["throughput_linearity"] = self._samples / max(metrics.step_seconds, 1e-9) / self._baseline
        return found


class TrainingStateLog(Monitor):
    """Prints what goes to ``log``, in the form of MindSpore Transformers."""

    def __init__(self, state: TrainingStateRecords, write: Callable[[str], None]) -> None:
        self._state = state
        self._write = write

    def on_start(self, info: RunInfo) -> None:
        self._state.on_start(info)

    def on_step(self, metrics: StepMetrics) -> None:
        values = self._state.values(metrics, "log")
        if values:
            place = (f"Epoch:[{metrics.epoch:>3}/{metrics.epochs:>3}], "
                     f"step:[{metrics.step_in_epoch:>5}/{metrics.steps_per_epoch:>5}]")  # fmt: skip
            for tag, value in values.items():
                self._write(f"{place} {tag}: {value:.6g}")
