"""A run folder as one value: the configuration, the curves, and what else its files tell."""

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
from trainer.report.curves import Metrics, MetricsReader
from trainer.report.starts import RUN_FILE, RunStart, read_starts
from trainer.storage.marker import MARKER

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
State = Literal["running", "finished", "stopped", "failed", "unknown"]
_SILENT_SECONDS = 600.0
"""A run on another machine that has written nothing for so long is taken to be gone."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of a run.

    Attributes:
        saved: When, as a Unix time in seconds.
        eval_loss: Of the evaluation after the same step; None without one.
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
    """What the files of a run folder tell.

    Attributes:
        config: The resolved configuration; None where config.yaml is missing or this version does not read it.
        settings: The same as it is written, by dotted keys: ``{"optimizer.eps": 1e-08, "callbacks.0.type": ...}``.
        starts: Of the training, in order; empty where an earlier version wrote the folder.
        metrics: The content of metrics.jsonl.
        resumes: The steps after which the training went on in another process, ascending.
        checkpoints: The complete ones that are still there, by step.
        outcome: How the last start ended, in words; empty while it runs.
        updated: When metrics.jsonl last grew, as a Unix time in seconds; 0 without one.
        notes: What is damaged in the files, with file and line, and is left out therefore.
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
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.metrics.last_step

    @property
    def last_step(self) -> int:
        """The step after which the run ends, as its last start knew it; the last one done where that is unknown."""
        if self.starts:
            return self.starts[-1].last_step
        return self.step

    @property
    def began(self) -> datetime | None:
        """When the first start was."""
        with contextlib.suppress(ValueError):
            if self.starts:
                return datetime.fromisoformat(self.starts[0].began)
            return None
        return None

    @property
    def peak_rss_bytes(self) -> int | None:
        """Highest resident memory of rank 0, what came after the last step included; None where it is not known."""
        steps = self.metrics.curves.fields.get("peak_rss_bytes")
        ends = [start.peak_rss_bytes for start in self.starts if start.peak_rss_bytes]
        known = ends
        if steps is not None:
            known = [*ends, *(int(high) for high in steps.highs if not math.isnan(high))]
        return max(known, default=None)

    @property
    def moe_layers(self) -> list[int]:
        """Numbers of the layers with experts, which ``drop_rate.0`` and the others count from 0."""
        if self.config is not None:
            return list(self.config.decoder.moe_layers)
        return []

    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults, by dotted key."""
        if self.config is not None:
            return dict(_changed(self.config))
        return dict(self.settings)


class RunReader:
    """Reads a run folder, again and again while the run goes on: of metrics.jsonl only what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics = MetricsReader(folder / METRICS_FILE)
        self._config_stamp: tuple[int, int] | None = None
        self._config: tuple[Config | None, dict[str, Any], str] = (None, {}, "")

    def read(self) -> RunData:
        """What the folder tells now. `metrics` is the same object every time.

        Raises:
            OSError: metrics.jsonl is there and cannot be read.
        """
        starts, starts_note = read_starts(self.folder)
        metrics = self._metrics.read()
        config, settings, config_note = self._read_config()
        notes = config_note, starts_note, _metrics_note(self.folder / METRICS_FILE, metrics)
        updated = _modified(self.folder / METRICS_FILE)
        state, outcome = _state(starts, updated)
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
            notes=tuple(filter(None, notes)),
        )

    def _read_config(self) -> tuple[Config | None, dict[str, Any], str]:
        path = self.folder / CONFIG_FILE
        try:
            status = path.stat()
        except OSError:
            return None, {}, ""
        if (status.st_mtime_ns, status.st_ino) != self._config_stamp:
            self._config_stamp = status.st_mtime_ns, status.st_ino
            self._config = _read_config(path)
        return self._config


def read_run(folder: Path) -> RunData:
    """What a run folder tells. Raises OSError where metrics.jsonl is there and cannot be read."""
    return RunReader(folder).read()


def is_run_folder(folder: Path) -> bool:
    """Whether a training has begun there."""
    return (folder / METRICS_FILE).is_file() or (folder / RUN_FILE).is_file()


def _read_config(path: Path) -> tuple[Config | None, dict[str, Any], str]:
    """The configuration, the same as it is written, and what is wrong with it."""
    settings: dict[str, Any] = {}
    try:
        settings = dict(flatten(plain(parse_document(str(path), read_text(str(path)))[0])))
        return load_config(str(path)), settings, ""
    except UserError as error:  # damaged, of another version, or for a model folder that is gone
        told = next((line for line in str(error).splitlines() if str(path) in line), f"{path}: {error.rule}")
        without = "the run is shown without its settings"
        if settings:
            without = "its settings are shown as they are written"
        return None, settings, f"{told.strip().rstrip('.')}; {without}"


def _metrics_note(path: Path, metrics: Metrics) -> str:
    if not metrics.damaged:
        return ""
    more = len(metrics.damaged) - 1
    others = ""
    if more:
        others = f", and {more} more {'lines are' if more > 1 else 'line is'} not"
    return f"{path}:{metrics.damaged[0]}: the line is no record of a step{others}; left out"


def _changed(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys whose values are not those that the schema declares as defaults."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = prefix + (field.alias or name)
        if isinstance(value, Section):
            yield from _changed(value, f"{key}.")
        elif isinstance(value, list) and any(isinstance(each, Section) for each in value):
            for number, each in enumerate(value):
                yield from _changed(each, f"{key}.{number}.")
        elif value != field.get_default(call_default_factory=True):
            yield key, value


def clip_norm(record: RunData) -> float | None:
    """The largest norm of a gradient after clipping; None where another rule clips, or none."""
    if record.config is None:
        return None
    wrapper = record.config.runner_wrapper
    clips = wrapper.use_clip_grad and wrapper.clip_type == "norm" and not wrapper.clip_by_group
    if clips:
        return wrapper.max_grad_norm
    return None


def _resumes(starts: tuple[RunStart, ...], metrics: Metrics) -> tuple[int, ...]:
    """A start from an earlier step has cut off what came after it, the marks of resuming there included."""
    steps: list[int] = []
    for step in [start.step for start in starts] or [int(restart["step"]) for restart in metrics.restarts]:
        steps = [each for each in steps if each < step] + [step] * (step > 0)
    return tuple(steps)


def _state(starts: tuple[RunStart, ...], updated: float) -> tuple[State, str]:
    if not starts:
        return "unknown", ""
    last = starts[-1]
    if last.outcome:
        kind = last.outcome.partition(" ")[0].rstrip(":")
        if last.outcome == "stopped early" or kind == "finished":
            return "finished", last.outcome
        return ("stopped" if kind == "stopped" else "failed"), last.outcome
    is_alive = last.is_alive
    if is_alive is None:
        is_alive = time.time() - updated < _SILENT_SECONDS
    if is_alive:
        return ("running", "")
    return ("failed", "failed: the process ended without a word")


def _checkpoints(folder: Path, metrics: Metrics) -> tuple[SavedCheckpoint, ...]:
    losses = {each.step: each.loss for each in metrics.evaluations}
    best = resolve_best_link(folder / BEST)
    found = []
    for path in complete_checkpoints(folder):
        marker = read_marker(path)
        if marker is not None:  # it was not removed in between
            size = sum(marker.file_bytes.values())
            loss = losses.get(marker.step)
            saved = _modified(path / MARKER)
            found.append(SavedCheckpoint(path, marker.step, saved, size, loss, path.name == best.name))
    return tuple(sorted(found, key=lambda each: each.step))


def _modified(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
