"""Reads a run folder as one value: its configuration, curves, starts and checkpoints."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from trainer.checkpoint.store import BEST, complete_checkpoints, read_marker, resolve_best_link
from trainer.config import Config, load_config
from trainer.config.read.dump import flatten
from trainer.config.read.nodes import plain
from trainer.config.read.yaml_reader import parse_document, read_text
from trainer.config.schema.fields import Section
from trainer.errors import UserError
from trainer.monitors.metrics import final_state
from trainer.report.curves import Metrics, MetricsReader
from trainer.report.starts import RUN_FILE, RunStart, read_starts
from trainer.storage.marker import MARKER

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
State = Literal["running", "finished", "stopped", "failed", "unknown"]
_SILENT_SECONDS = 600.0
"""A run on another machine counts as failed after this time without a new line in metrics.jsonl."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of a run.

    Attributes:
        saved: The time of the save, as a Unix time in seconds.
        eval_loss: The loss of the evaluation after the same step; None without one.
        is_best: Whether ``checkpoints/best`` points to it.
    """

    path: Path
    step: int
    saved: float
    size_bytes: int
    eval_loss: float | None
    is_best: bool


@dataclass(frozen=True)
class RunData:
    """The content of a run folder.

    Attributes:
        config: The resolved configuration; None if config.yaml is missing or this version cannot read it.
        settings: The values of config.yaml by dotted keys: ``{"optimizer.eps": 1e-08, "callbacks.0.type": ...}``.
        starts: The starts of the training, in order; empty if an earlier version wrote the folder.
        metrics: The content of metrics.jsonl.
        resumes: The steps after which another process continued the training, ascending.
        checkpoints: The complete checkpoints that still exist, by step.
        outcome: How the last start ended, in words; empty while it runs.
        updated: When metrics.jsonl last grew, as a Unix time in seconds; 0 if it is missing.
        notes: Damaged parts of the files that were skipped, with file and line.
    """

    folder: Path
    config: Config | None
    settings: dict[str, Any]
    starts: tuple[RunStart, ...]
    metrics: Metrics
    resumes: tuple[int, ...]
    checkpoints: tuple[SavedCheckpoint, ...]
    state: State
    outcome: str
    updated: float
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Returns the name of the folder."""
        return self.folder.resolve().name

    @property
    def step(self) -> int:
        """Returns the number of optimizer steps."""
        return self.metrics.last_step

    @property
    def last_step(self) -> int:
        """Returns the step after which the run ends, by its last start; without a start the newest step."""
        if self.starts:
            return self.starts[-1].last_step
        return self.step

    @property
    def start_time(self) -> datetime | None:
        """Returns the time of the first start; None if it is unknown."""
        if self.starts:
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(self.starts[0].began)
        return None

    @property
    def peak_rss_bytes(self) -> int | None:
        """Returns the highest resident memory of rank 0 in bytes, also after the last step; None if it is unknown."""
        peaks = [start.peak_rss_bytes for start in self.starts if start.peak_rss_bytes]
        steps = self.metrics.curves.fields.get("peak_rss_bytes")
        if steps is not None:
            peaks += [int(high) for high in steps.highs if not math.isnan(high)]
        return max(peaks, default=None)

    @property
    def moe_layers(self) -> list[int]:
        """Returns the numbers of the MoE layers; ``drop_rate.0`` is the drop rate of the first of them."""
        if self.config is not None:
            return list(self.config.decoder.moe_layers)
        return []

    def changed(self) -> dict[str, Any]:
        """Returns the settings that differ from the defaults, by dotted key; all settings if they are unknown."""
        if self.config is not None:
            return dict(_changed(self.config))
        return dict(self.settings)


class RunReader:
    """Reads a run folder repeatedly while the run goes on; reads each line of metrics.jsonl once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = MetricsReader(folder / METRICS_FILE)
        self._config_stamp: tuple[int, int] | None = None
        self._config: tuple[Config | None, dict[str, Any], str] = (None, {}, "")

    def read(self) -> RunData:
        """Returns the content of the folder now. `metrics` is the same object until the file is replaced.

        A file that cannot be read becomes a note.
        """
        starts, starts_note = read_starts(self.folder)
        metrics = self._metrics.read()
        config, settings, config_note = self._read_config()
        updated = _modified(self.folder / METRICS_FILE)
        state, outcome = _state(starts, updated)
        metrics_notes = _metrics_notes(self.folder / METRICS_FILE, self._metrics, starts, state != "running")
        return RunData(
            folder=self.folder,
            config=config,
            settings=settings,
            starts=starts,
            metrics=metrics,
            resumes=_resumes(starts, metrics),
            checkpoints=_checkpoints(self.folder / "checkpoints", metrics),
            state=state,
            outcome=outcome,
            updated=updated,
            notes=tuple(filter(None, (config_note, starts_note, *metrics_notes))),
        )

    def _read_config(self) -> tuple[Config | None, dict[str, Any], str]:
        path = self.folder / CONFIG_FILE
        try:
            status = path.stat()
        except FileNotFoundError:
            return None, {}, ""
        except OSError as error:
            return None, {}, f"{path}: cannot be read: {error.strerror}; the run is shown without its settings"
        if (status.st_mtime_ns, status.st_ino) != self._config_stamp:
            self._config_stamp = status.st_mtime_ns, status.st_ino
            self._config = _read_config(path)
        return self._config


def read_run(folder: Path) -> RunData:
    """Returns the content of a run folder; a file that cannot be read becomes a note."""
    return RunReader(folder).read()


def is_run_folder(folder: Path) -> bool:
    """Returns whether a folder is the output folder of a training that has started."""
    return (folder / METRICS_FILE).is_file() or (folder / RUN_FILE).is_file()


def _read_config(path: Path) -> tuple[Config | None, dict[str, Any], str]:
    """Returns the configuration, its values as written, and a note if the file cannot be read."""
    settings: dict[str, Any] = {}
    try:
        settings = dict(flatten(plain(parse_document(str(path), read_text(str(path)))[0])))
        return load_config(str(path)), settings, ""
    except UserError as error:  # damaged, of another version, or for a model folder that is missing
        reason = next((line for line in str(error).splitlines() if str(path) in line), f"{path}: {error.rule}")
        consequence = "the run is shown without its settings"
        if settings:
            consequence = "its settings are shown as they are written"
        return None, settings, f"{reason.strip().rstrip('.')}; {consequence}"


def _metrics_notes(path: Path, reader: MetricsReader, starts: tuple[RunStart, ...], has_ended: bool) -> Iterator[str]:
    """Yields what is damaged in the metrics; of a run that has ended also whether steps that it did are missing."""
    metrics = reader.metrics
    if len(metrics.damaged) == 1:
        yield f"{path}:{metrics.damaged[0]}: the line is damaged and was skipped"
    elif metrics.damaged:
        yield f"{path}:{metrics.damaged[0]}: {len(metrics.damaged)} damaged lines were skipped, this is the first one"
    end_step = max((start.end_step for start in starts), default=0)
    if reader.problem:
        yield f"{path}: cannot be read: {reader.problem}; the run is shown without its steps"
    elif has_ended and metrics.last_step < end_step:
        yield f"{path}: ends at step {metrics.last_step}, but the run ended at step {end_step}"
    elif has_ended and reader.is_cut:
        yield f"{path}: the last line is cut short and was skipped"


def _changed(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the keys whose values differ from the defaults of the schema, with their values."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = prefix + (field.alias or name)
        if isinstance(value, Section):
            yield from _changed(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(item, Section) for item in value):
            for number, item in enumerate(value):
                yield from _changed(item, f"{key}.{number}.")
        elif value != field.get_default(call_default_factory=True):
            yield key, value


def loss_title(config: Config | None) -> str:
    """Returns the title of a chart of the loss, with its unit."""
    if config is None:
        return "loss (nats a token)"
    if config.preferences is not None:
        return f"{config.preferences.type} loss (mean of the {config.preferences.unit}s)"
    return f"loss (nats a {config.network.labels_text.removesuffix('s')})"


def clip_norm(record: RunData) -> float | None:
    """Returns the largest gradient norm after clipping; None unless the global norm is clipped."""
    if record.config is None:
        return None
    wrapper = record.config.runner_wrapper
    if wrapper.use_clip_grad and wrapper.clip_type == "norm" and not wrapper.clip_by_group:
        return wrapper.max_grad_norm
    return None


def _resumes(starts: tuple[RunStart, ...], metrics: Metrics) -> tuple[int, ...]:
    """Returns the steps after which the training was resumed.

    A start from an earlier step has removed all later steps, and the resumes between them.
    """
    start_steps = [start.step for start in starts]
    if not starts:
        start_steps = [int(restart["step"]) for restart in metrics.restarts]
    resumes: list[int] = []
    for step in start_steps:
        resumes = [earlier for earlier in resumes if earlier < step]
        if step > 0:
            resumes.append(step)
    return tuple(resumes)


def _state(starts: tuple[RunStart, ...], updated: float) -> tuple[State, str]:
    """Returns the state of a run and the outcome of its last start."""
    if not starts:
        return "unknown", ""
    last = starts[-1]
    if last.outcome:
        return final_state(last.outcome), last.outcome
    is_alive = last.is_alive
    if is_alive is None:
        is_alive = time.time() - updated < _SILENT_SECONDS
    if is_alive:
        return "running", ""
    return "failed", "failed: the process ended without a word"


def _checkpoints(folder: Path, metrics: Metrics) -> tuple[SavedCheckpoint, ...]:
    losses = {evaluation.step: evaluation.loss for evaluation in metrics.evaluations}
    best = resolve_best_link(folder / BEST)
    checkpoints = []
    for path in complete_checkpoints(folder):
        marker = read_marker(path)
        if marker is not None:  # None if the checkpoint was removed in between
            size = sum(marker.file_bytes.values())
            loss = losses.get(marker.step)
            saved = _modified(path / MARKER)
            checkpoints.append(SavedCheckpoint(path, marker.step, saved, size, loss, path.name == best.name))
    return tuple(sorted(checkpoints, key=lambda checkpoint: checkpoint.step))


def _modified(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
