"""Sends numbers to Weights & Biases, MLflow and SwanLab through their packages.

Their environment variables select the server, and whether anything is sent: WANDB_MODE=offline, MLFLOW_TRACKING_URI,
SWANLAB_MODE=offline. A resumed run continues the service's run, whose id is in output_dir/trackers/wandb, mlflow or
swanlab.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.config.read.dump import flatten, plain_values
from trainer.input_files import read_bytes
from trainer.monitors.files import write_text
from trainer.monitors.metrics import Monitor, RunInfo, final_state
from trainer.monitors.tensorboard import TensorBoard
from trainer.monitors.tracking import Tracker, TrackerMonitor

_PROJECT = "run_trainer"
_MLFLOW_MAX_PARAMETERS = 100  # in one request
_MLFLOW_MAX_METRICS = 1000
_MLFLOW_MAX_CHARACTERS = 500  # of one parameter


class _Service(Tracker):
    """The base of the three trackers."""

    name = ""
    run: Any  # as the service's package has it

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layers = config.decoder.moe_layers
        self.folder = Path()

    def start(self, info: RunInfo) -> None:
        """Opens a new run of the service, or the one that a resumed run continues."""
        self.folder = info.output_dir.absolute()
        run_id = ""
        if info.start_step:
            with contextlib.suppress(OSError, ValueError):
                run_id = read_bytes(self._id_file()).decode("utf-8").strip()
        self.open(self.folder.name, run_id)

    def open(self, title: str, run_id: str) -> None:
        """Opens the run with this id; without an id a new run with this title."""
        raise NotImplementedError

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Sends the numbers of a step."""
        self.run.log(dict(numbers), step=step)

    def save_id(self, run_id: str) -> None:
        """Saves the id of the run, for a run that resumes this one."""
        path = self._id_file()
        path.parent.mkdir(exist_ok=True)
        write_text(path, f"{run_id}\n")

    def _id_file(self) -> Path:
        return self.folder / "trackers" / self.name


class Wandb(_Service):
    """Weights & Biases (https://docs.wandb.ai): project run_trainer, or WANDB_PROJECT."""

    name = "wandb"

    def open(self, title: str, run_id: str) -> None:
        """Opens a run, see `_Service.open`."""
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            raise RuntimeError("there is no API key: call `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline")
        resume = None
        if run_id:
            resume = "allow"
        run_id = run_id or secrets.token_hex(4)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT), name=os.environ.get("WANDB_NAME", title), id=run_id,
            resume=resume, dir=str(self.folder), config=plain_values(self.config),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        self.save_id(run_id)

    def close(self, outcome: str) -> None:
        """Ends the run of the service; wandb ends one that is interrupted with 255, which its server calls killed."""
        self.run.finish(exit_code={"finished": 0, "stopped": 255, "failed": 1}[final_state(outcome)])


class Mlflow(_Service):
    """MLflow (https://mlflow.org): experiment run_trainer, or MLFLOW_EXPERIMENT_NAME."""

    name = "mlflow"

    def open(self, title: str, run_id: str) -> None:
        """Opens a run, see `_Service.open`."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client = MlflowClient()
        self.metric = Metric
        if run_id:
            self.run = run_id
            self.client.update_run(run_id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        if experiment := self.client.get_experiment_by_name(name):
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self.client.create_experiment(name)
        self.run = self.client.create_run(experiment_id, run_name=os.environ.get("MLFLOW_RUN_NAME", title)).info.run_id
        self.save_id(self.run)
        keys = [Param(key, str(value)[:_MLFLOW_MAX_CHARACTERS]) for key, value in flatten(plain_values(self.config))]
        for first in range(0, len(keys), _MLFLOW_MAX_PARAMETERS):
            self.client.log_batch(self.run, params=keys[first : first + _MLFLOW_MAX_PARAMETERS])

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Sends the numbers of a step."""
        now = int(1000 * time.time())
        metrics = [self.metric(name, value, now, step) for name, value in numbers.items()]
        for first in range(0, len(metrics), _MLFLOW_MAX_METRICS):
            self.client.log_batch(self.run, metrics[first : first + _MLFLOW_MAX_METRICS])

    def close(self, outcome: str) -> None:
        """Ends the run of the service."""
        status = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[final_state(outcome)]
        self.client.set_terminated(self.run, status)


class SwanLab(_Service):
    """SwanLab (https://docs.swanlab.cn): project run_trainer, or SWANLAB_PROJ_NAME."""

    name = "swanlab"

    def open(self, title: str, run_id: str) -> None:
        """Opens a run, see `_Service.open`."""
        import swanlab

        mode = os.environ.get("SWANLAB_MODE", "online")
        resume = {}
        if run_id and mode in ("online", "cloud"):
            resume = {"id": run_id, "resume": "allow"}
        self.run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", _PROJECT), name=os.environ.get("SWANLAB_EXP_NAME", title),
            mode=mode, log_dir=os.environ.get("SWANLAB_LOG_DIR", str(self.folder / "swanlog")),
            config=plain_values(self.config), reinit=True, **resume,
            settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
        )  # fmt: skip
        self.save_id(str(self.run.id))

    def close(self, outcome: str) -> None:
        """Ends the run of the service."""
        state = final_state(outcome)
        if state == "finished":
            self.run.finish("success")
        else:
            self.run.finish({"stopped": "aborted", "failed": "crashed"}[state], error=outcome)


SERVICES = {service.name: service for service in (Wandb, Mlflow, SwanLab)}


def tracker_monitors(config: Config, note: Callable[[str], None]) -> list[Monitor]:
    """Returns the monitors of all trackers that a configuration requests.

    Their packages are imported when the run starts. `note` shows the user a note.
    """
    monitors: list[Monitor] = []
    if config.tensorboard.tensorboard_dir:
        every = config.tensorboard.log_interval
        monitors.append(TrackerMonitor("TensorBoard", functools.partial(TensorBoard, config), note, every))
    for name in config.tracker_names or ():
        monitors.append(TrackerMonitor(name, functools.partial(SERVICES[name], config), note))
    return monitors
