"""Weights & Biases, MLflow and SwanLab, each through its own package and the environment variables that it reads.

Where to send to, and whether to send at all, is theirs to say: WANDB_MODE=offline, MLFLOW_TRACKING_URI,
SWANLAB_MODE=offline. A resumed run goes on in the run that the first one made there, whose name is in output_dir, in
the file trackers/wandb and so on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.read.dump import flatten, plain_values
from trainer.monitors.files import write_text
from trainer.monitors.metrics import EvalMetrics, Monitor, RunInfo, StepMetrics
from trainer.monitors.tensorboard import TensorBoard
from trainer.monitors.tracking import TrackerMonitor, eval_numbers, step_numbers, wait_numbers

if TYPE_CHECKING:
    from trainer.config import Config

_PROJECT = "run_trainer"
# of a request of MLflow; characters
_MOST_PARAMETERS = 100
_LONGEST_PARAMETER = 500


class _Service:
    """What the three share; each is a `Tracker`."""

    name = ""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layers = config.decoder.moe_layers
        self.folder = Path()

    def start(self, info: RunInfo) -> None:
        self.folder = info.output_dir.absolute()
        known = ""
        with contextlib.suppress(OSError, ValueError):
            known = ""
            if info.start_step:
                known = self._name_file().read_text(encoding="utf-8").strip()
        self.open(self.folder.name, known)

    def open(self, title: str, known: str) -> None:
        """Begins a run of this title, or goes on with the run that is `known` there."""
        raise NotImplementedError

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def remember(self, name: str) -> None:
        path = self._name_file()
        path.parent.mkdir(exist_ok=True)
        write_text(path, f"{name}\n")

    def _name_file(self) -> Path:
        return self.folder / "trackers" / self.name

    def step(self, metrics: StepMetrics) -> None:
        self.log(step_numbers(metrics, self.layers), metrics.step)

    def evaluation(self, metrics: EvalMetrics) -> None:
        self.log(eval_numbers(metrics), metrics.step)

    def wait(self, record: Mapping[str, float]) -> None:
        self.log(wait_numbers(record), int(record["step"]))

    def flush(self) -> None:
        """The packages send by themselves."""


class Wandb(_Service):
    """https://docs.wandb.ai: project run_trainer, or WANDB_PROJECT."""

    name = "wandb"

    def open(self, title: str, known: str) -> None:
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            raise RuntimeError("there is no API key: call `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        name = known or secrets.token_hex(4)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT), name=os.environ.get("WANDB_NAME", title), id=name,
            resume="allow" if known else None, dir=str(self.folder), config=plain_values(self.config),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self.remember(name)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self, outcome: str) -> None:
        self.run.finish(exit_code=int(outcome == "failed"))


class Mlflow(_Service):
    """https://mlflow.org: experiment run_trainer, or MLFLOW_EXPERIMENT_NAME."""

    name = "mlflow"

    def open(self, title: str, known: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client = MlflowClient()
        self.metric = Metric
        if known:
            self.run = known
            self.client.update_run(known, status="RUNNING")
            return
        wanted = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self.client.get_experiment_by_name(wanted)
        if found:
            experiment = found.experiment_id
        else:
            experiment = self.client.create_experiment(wanted)
        self.run = self.client.create_run(experiment, run_name=os.environ.get("MLFLOW_RUN_NAME", title)).info.run_id
        self.remember(self.run)
        keys = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in flatten(plain_values(self.config))]
        for first in range(0, len(keys), _MOST_PARAMETERS):
            self.client.log_batch(self.run, params=keys[first : first + _MOST_PARAMETERS])

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self.client.log_batch(self.run, [self.metric(name, value, now, step) for name, value in numbers.items()])

    def close(self, outcome: str) -> None:
        if outcome == "failed":
            status = "FAILED"
        else:
            status = "FINISHED"
            if outcome.startswith("stopped by"):
                status = "KILLED"
        self.client.set_terminated(self.run, status)


class SwanLab(_Service):
    """https://docs.swanlab.cn: project run_trainer, or SWANLAB_PROJ_NAME."""

    name = "swanlab"

    def open(self, title: str, known: str) -> None:
        import swanlab

        mode = os.environ.get("SWANLAB_MODE", "online")
        if known and mode in ("online", "cloud"):
            resumes = {"id": known, "resume": "allow"}
        else:
            resumes = {}
        self.run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", _PROJECT), name=os.environ.get("SWANLAB_EXP_NAME", title),
            mode=mode, log_dir=os.environ.get("SWANLAB_LOG_DIR", str(self.folder / "swanlog")),
            config=plain_values(self.config), reinit=True, **resumes,
            settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
        )  # fmt: skip
        self.remember(str(self.run.id))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self, outcome: str) -> None:
        state = "success"
        if outcome == "failed":
            state = "crashed"
        self.run.finish(state, **({"error": outcome} if outcome == "failed" else {}))


SERVICES = {service.name: service for service in (Wandb, Mlflow, SwanLab)}


def tracker_monitors(config: Config, note: Callable[[str], None]) -> list[Monitor]:
    """Returns the monitors of all trackers that a configuration asks for, whose packages are imported when a run
    starts, and only then."""
    monitors: list[Monitor] = []
    if config.tensorboard.tensorboard_dir:
        every = config.tensorboard.log_interval
        monitors.append(TrackerMonitor("TensorBoard", functools.partial(TensorBoard, config), note, every))
    for name in config.tracker_names or ():
        monitors.append(TrackerMonitor(name, functools.partial(SERVICES[name], config), note))
    return monitors
