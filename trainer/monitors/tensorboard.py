"""TensorBoard's event files, with the tags of MindSpore Transformers (mindformers/core/callback, MFLossMonitor and
TrainingStateMonitor), so that its runs and ours share charts.

A step is one record with all of its values, and one more over the samples seen so far: a record for each value, as
SummaryWriter writes them, takes several times as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.monitors.metrics import DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY, EvalMetrics, RunInfo, StepMetrics
from trainer.monitors.tracking import eval_numbers, numbers_of, wait_numbers
from trainer.monitors.training_state import TrainingStateRecords

if TYPE_CHECKING:
    from trainer.config import Config

_LOSSES = {"aux_loss": "load-balancing-loss", "mtp_loss": "mtp-loss", "z_loss": "z-loss"}
_OF_LAYERS = (DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY)
_SECONDS_OF_A_DAY = 86_400


class TensorBoard:
    """A `Tracker` that writes ``tensorboard_dir/rank_0/events.out.tfevents...``.

    A new training in a folder with files of another one shows its own steps only: a mark tells TensorBoard to leave out
    what was written before. A resumed run repeats at most steps that an earlier one has written, with the same numbers;
    a mark would take the values over samples too, whose numbers are larger than those of steps.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._section = config.tensorboard
        self._state = TrainingStateRecords(config)
        self._layers = config.decoder.moe_layers
        # messages, and what writes them
        self._waiting = 0
        self._event = None
        self._summary = None
        self._writer = None
        self._info: RunInfo | None = None

    def start(self, info: RunInfo) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        folder = Path(self._section.tensorboard_dir).expanduser() / "rank_0"
        folder.mkdir(parents=True, exist_ok=True)
        self._info = info
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._writer = EventsWriter(str(folder / "events"))
        self._state.on_start(info)
        if info.start_step == 0:
            self._write(0, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        self._write_text(self._config)
        self.flush()

    def step(self, metrics: StepMetrics) -> None:
        main, others = step_tags(metrics, self._config, self._info)
        of_layers = {name: metrics.details[name] for name in _OF_LAYERS if name in metrics.details}
        others |= numbers_of(of_layers, self._layers) | self._state.values(metrics, "tensorboard")
        self._scalars(metrics.step, main | others)
        if self._info.samples_per_step:
            over_samples = {f"{tag} vs samples": value for tag, value in main.items()}
            self._scalars(metrics.step * self._info.samples_per_step, over_samples)

    def evaluation(self, metrics: EvalMetrics) -> None:
        found = eval_numbers(metrics)
        self._scalars(metrics.step, {name.replace("_", "-"): value for name, value in found.items()})

    def wait(self, record: Mapping[str, float]) -> None:
        values = wait_numbers(record)
        self._scalars(int(record["step"]), {name.replace("_", "-"): value for name, value in values.items()})

    def flush(self) -> None:
        self._waiting = 0
        self._writer.flush()

    def close(self, outcome: str) -> None:
        self._writer.close()

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        found = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(step, summary=self._summary(value=found))

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._waiting += 1
        if self._waiting >= self._section.tensorboard_queue_size:
            self.flush()

    def _write_text(self, config: Config) -> None:
        """The resolved configuration, a page for each section, as TensorBoard's text plugin reads it."""
        from tensorboardX.summary import text

        from trainer.config.read.dump import dump_values, plain_values

        for key, value in plain_values(config).items():
            if isinstance(value, (dict, list)):
                page = dump_values({key: value}, "")
            else:
                page = str(value)
            shown = page
            if isinstance(value, (dict, list)):
                shown = f"```\n{page}```"
            self._write(1, summary=text(key, shown))


def step_tags(metrics: StepMetrics, config: Config, info: RunInfo) -> tuple[dict[str, float], dict[str, float]]:
    """The values of a step by tag: those that are also shown over samples, and the others."""
    section = config.tensorboard
    seconds = max(metrics.step_seconds, 1e-9)
    main = {"learning-rate": metrics.lr, "batch-size": float(info.samples_per_step), "loss": metrics.loss}
    if metrics.global_norm is not None:
        main["grad-norm"] = metrics.global_norm
    if section.log_loss_scale_to_tensorboard:
        main["loss-scale"] = metrics.loss_scale
    others: dict[str, float] = {}
    if section.log_timers_to_tensorboard:
        samples = info.samples_per_step / seconds
        main |= {"iteration-time": 1000 * seconds, "throughput": samples / info.ranks}  # ms; samples/s on a device
        others |= {
            "B-samples-per-day": samples * _SECONDS_OF_A_DAY / 1e9,
            "model-flops-throughput-per-npu": info.flops_per_step / seconds / info.ranks / 1e12,  # TFLOP/s
            "tokens-per-second": metrics.input_tokens_per_second,
            "data-wait-time": 1000 * metrics.data_wait_seconds,
        }
    if metrics.extra:
        others["lm-loss"] = metrics.loss
        others |= {_LOSSES.get(name, name): value for name, value in metrics.extra.items()}
    return main, {tag: value for tag, value in others.items() if not math.isnan(value)}
