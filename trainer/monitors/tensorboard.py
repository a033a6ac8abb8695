"""Writes TensorBoard's event files.

The tags are those of MindSpore Transformers (mindformers/core/callback, MFLossMonitor and TrainingStateMonitor), so
that runs of both programs share charts. A step is one record with all values, and one record over the number of
samples. A record for each value, as SummaryWriter writes them, takes several times as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY, RunInfo, StepMetrics
from trainer.monitors.tracking import Tracker, flat_numbers
from trainer.monitors.training_state import MAX_LOGIT, TrainingStateRecords

_LOSSES = {"aux_loss": "load-balancing-loss", "mtp_loss": "mtp-loss", "z_loss": "z-loss"}
_LAYER_FIELDS = (DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY, MAX_LOGIT)
_SECONDS_PER_DAY = 86_400


class TensorBoard(Tracker):
    """Writes ``tensorboard_dir/rank_0/events.out.tfevents...``.

    A new training in a folder with older files shows nothing but its steps: a START record tells TensorBoard to hide
    what was written before. A resumed run writes no START record. It may repeat steps with the same numbers, and the
    record would hide values over samples, whose numbers are larger than those of steps.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._section = config.tensorboard
        self.layers = config.decoder.moe_layers
        self._waiting = 0  # records since the last flush
        self._event: Any = None  # the classes and the writer of tensorboardX
        self._summary: Any = None
        self._writer: Any = None
        self._ranks = 1

    def start(self, info: RunInfo) -> None:
        """Opens a new event file."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        folder = Path(self._section.tensorboard_dir or "").expanduser() / "rank_0"
        folder.mkdir(parents=True, exist_ok=True)
        self._ranks = info.ranks
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = EventsWriter(str(folder / "events"))
        self._state = TrainingStateRecords(self._config, info.ranks)
        if info.start_step == 0:
            self._write(0, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        self._write_text(self._config)
        self.flush()

    def step(self, metrics: StepMetrics) -> None:
        """Writes the values of a step over steps and over samples."""
        main, others = step_tags(metrics, self._config, self._ranks)
        per_layer = {name: metrics.details[name] for name in _LAYER_FIELDS if name in metrics.details}
        others |= flat_numbers(per_layer, self.layers) | self._state.values(metrics, "tensorboard")
        self._scalars(metrics.step, main | others)
        if metrics.samples:
            over_samples = {f"{tag} vs samples": value for tag, value in main.items()}
            self._scalars(metrics.samples_seen, over_samples)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Writes the numbers of an evaluation or of a pause."""
        self._scalars(step, {name.replace("_", "-"): value for name, value in numbers.items()})

    def flush(self) -> None:
        """Writes buffered records to the disk."""
        self._waiting = 0
        self._writer.flush()

    def close(self, outcome: str) -> None:
        """Closes the event file."""
        self._writer.close()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step, summary=self._summary(value=scalars))

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._waiting += 1
        if self._waiting >= self._section.tensorboard_queue_size:
            self.flush()

    def _write_text(self, config: Config) -> None:
        """Writes the resolved configuration for TensorBoard's text plugin, a page for each section."""
        from tensorboardX.summary import text

        from trainer.config.read.dump import dump_values, plain_values

        for key, value in plain_values(config).items():
            page = str(value)
            if isinstance(value, (dict, list)):
                yaml_text = dump_values({key: value}, "")
                page = f"```\n{yaml_text}```"
            self._write(1, summary=text(key, page))


def step_tags(metrics: StepMetrics, config: Config, ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the values of a step by tag: first those that are also written over samples, then the others."""
    section = config.tensorboard
    seconds = max(metrics.step_seconds, 1e-9)
    main = {"learning-rate": metrics.lr, "batch-size": float(metrics.samples), "loss": metrics.loss}
    if metrics.global_norm is not None:
        main["grad-norm"] = metrics.global_norm
    if section.log_loss_scale_to_tensorboard:
        main["loss-scale"] = metrics.loss_scale
    others: dict[str, float] = {}
    if section.log_timers_to_tensorboard:
        samples = metrics.samples / seconds
        main |= {"iteration-time": 1000 * seconds, "throughput": samples / ranks}  # ms; samples/s on a device
        others |= {
            "B-samples-per-day": samples * _SECONDS_PER_DAY / 1e9,
            "model-flops-throughput-per-npu": metrics.flops_per_second / ranks / 1e12,  # TFLOP/s
            "tokens-per-second": metrics.input_tokens_per_second,
            "data-wait-time": 1000 * metrics.data_wait_seconds,
        }
    if metrics.extra:
        others["lm-loss"] = metrics.loss
        others |= {_LOSSES.get(name, name): value for name, value in metrics.extra.items()}
    return main, {tag: value for tag, value in others.items() if not math.isnan(value)}
