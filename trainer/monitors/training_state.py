"""Selects the records of `monitor_config`: norms of gradients, optimizer state and weights, logits and throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from trainer.config import Config
from trainer.config.checks.qk_clip import logit_interval
from trainer.config.patterns import read_pattern
from trainer.models.spec.names import has_name
from trainer.monitors.metrics import Monitor, StepMetrics
from trainer.monitors.tracking import flat_numbers

LOCAL_NORM = "local_norm"
MAX_LOGIT = "max_attention_logit"
WEIGHT_NORM = "weight_norm"
OPTIMIZER_NORMS = {"exp_avg": "adam_m_norm", "exp_avg_sq": "adam_v_norm"}
"""Optimizer state of AdamW -> tags of MindSpore Transformers, which are also the fields of metrics.jsonl."""
_FORMATS = {LOCAL_NORM: "local_norm_format", WEIGHT_NORM: "weight_state_format",
            MAX_LOGIT: "max_attention_logit_format",
            **dict.fromkeys(OPTIMIZER_NORMS.values(), "optimizer_state_format")}  # fmt: skip


class TrainingStateRecords:
    """Decides which records of a step are written, and whether to the log or to TensorBoard.

    Args:
        ranks: Of the job, for the throughput of one.
    """

    def __init__(self, config: Config, ranks: int = 1) -> None:
        section = config.monitor_config
        self._section = section
        self._destinations = {name: section.destinations(key) for name, key in _FORMATS.items()}
        if not config.tensorboard.tensorboard_dir:  # as in MindSpore Transformers, the log gets all records
            for name, destinations in self._destinations.items():
                if destinations:
                    self._destinations[name] = frozenset(["log"])
        self._baseline = None
        if section.monitor_on:
            self._baseline = section.throughput_baseline
        self._ranks = ranks
        self._logit_interval = logit_interval(config)
        patterns = [read_pattern(text) for text in section.patterns]
        self.is_selected: Callable[[str], bool] = lru_cache(maxsize=None)(
            lambda name: any(has_name(pattern, name) for pattern in patterns) != section.invert
        )

    def has_records(self, destination: str) -> bool:
        """Returns whether any record is written to ``log`` or ``tensorboard``."""
        return self._baseline is not None or any(destination in each for each in self._destinations.values())

    def is_due(self, step: int) -> bool:
        """Returns whether the records of this step are written."""
        return self._section.monitor_on and step % self._section.step_interval == 0

    def records_logits(self, step: int) -> bool:
        """Returns whether the largest attention logits of this step are written, for a callback or this section."""
        is_for_callback = self._logit_interval > 0 and step % self._logit_interval == 0
        return is_for_callback or (self.is_due(step) and self.is_requested(MAX_LOGIT))

    def is_requested(self, name: str) -> bool:
        """Returns whether a record such as ``weight_norm`` is written anywhere."""
        return bool(self._destinations[name])

    def values(self, metrics: StepMetrics, destination: str) -> dict[str, float]:
        """Returns the records of a step for ``log`` or ``tensorboard``, by tag; none if the step is not due."""
        if not self.is_due(metrics.step):
            return {}
        values: dict[str, Any] = {}
        for name, destinations in self._destinations.items():
            value = None
            if destination in destinations:
                value = metrics.details.get(name)
            if isinstance(value, Mapping):
                values |= {f"{name}/{key}": norm for key, norm in value.items() if self.is_selected(key)}
            elif isinstance(value, list):
                values |= flat_numbers({name: value})
            elif value is not None:
                values[name] = value
        if self._baseline is not None and metrics.samples:
            samples_per_second = metrics.samples / self._ranks / max(metrics.step_seconds, 1e-9)
            values["throughput_linearity"] = samples_per_second / self._baseline
        return values


class TrainingStateLog(Monitor):
    """Prints the records for the log, in the format of MindSpore Transformers."""

    def __init__(self, state: TrainingStateRecords, write: Callable[[str], None]) -> None:
        self._state = state
        self._write = write

    def on_step(self, metrics: StepMetrics) -> None:
        if values := self._state.values(metrics, "log"):
            place = (f"Epoch:[{metrics.epoch:>3}/{metrics.epochs:>3}], "
                     f"step:[{metrics.step_in_epoch:>5}/{metrics.steps_per_epoch:>5}]")  # fmt: skip
            for tag, value in values.items():
                self._write(f"{place} {tag}: {value:.6g}")
