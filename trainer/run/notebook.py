"""Training from Python, for notebooks: `from trainer import train, load`.

    run = train("configs/quickstart.yaml", stop_step=50)
    run.metrics[-1]["loss"]

Errors are the exceptions of `trainer.errors`, with the text that the command line prints; nothing ends the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.store import newest_complete
from trainer.cli.flags import split_arguments
from trainer.config import Config, Override, load_config, parse_config
from trainer.errors import UserError
from trainer.monitors.jsonl import read_metrics_records
from trainer.monitors.metrics import Monitor, RunSummary
from trainer.report.record import CONFIG_FILE, METRICS_FILE, RunData, is_run_folder, read_run

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


def train(config: str | os.PathLike[str] | Mapping[str, Any] | Config, **flags: object) -> Run:
    """Trains as the command line does with this file and these flags, and shows the progress.

    Interrupting the kernel ends the run after the current step with a checkpoint, as Ctrl-C does; a second interrupt is
    a KeyboardInterrupt. `resume_training=True` goes on from there.

    Args:
        config: A YAML file, its content as a mapping, or a configuration that `load_config` gave.
        flags: By the names that they have on the command line; a dotted key as `**{"optimizer.eps": 1e-6}`.

    Raises:
        UserError: Bad input.
        RunError: The run failed.
    """
    from trainer.device.stop_signals import signals_in_a_thread
    from trainer.run.loop import run

    if not isinstance(config, (str, os.PathLike, Mapping, Config)):
        rule = "must be a YAML file, its content as a mapping, or what load_config gave"
        fix = 'write train("configs/quickstart.yaml")'
        raise UserError(rule, where="train", key="config", value=config, fix=fix)
    loaded = _configuration(config, flags)
    if not loaded.trains:
        fix = "set run_mode to train or finetune; load(FOLDER).generate(TEXT) predicts"
        raise UserError("is no training", where=loaded.source.where("run_mode"), key="run_mode", value=loaded.run_mode,
                        fix=fix)  # fmt: skip
    kept = _SummaryMonitor()
    with signals_in_a_thread():
        exit_code = run(loaded, [kept])
    return Run(Path(loaded.output_dir).expanduser(), exit_code, kept.summary)


def load(folder: str | os.PathLike[str]) -> Run:
    """A run by its output folder, finished or not.

    Raises:
        UserError: No training has begun there.
    """
    path = None
    if isinstance(folder, (str, os.PathLike)):
        path = Path(folder).expanduser()
    if path is None or not is_run_folder(path):
        fix = 'give the output_dir of a training: load("output/quickstart")'
        raise UserError("is no folder of a run", where="load", key="folder", value=_shown(folder), fix=fix)
    return Run(path)


class _SummaryMonitor(Monitor):
    summary: RunSummary | None = None

    def close(self, summary: RunSummary | None) -> None:
        self.summary = summary


class Run:
    """A training by its output folder. What it tells is read anew each time, so that it follows a run that goes on.

    Attributes:
        folder: The output folder.
        exit_code: Of the command line: 0, or 130 after an interrupt; 0 where `load` found the run.
        summary: Of the last lines; None where `load` found the run, and where there was nothing to do.
    """

    def __init__(self, folder: Path, exit_code: int = 0, summary: RunSummary | None = None) -> None:
        self.folder = folder
        self.exit_code = exit_code
        self.summary = summary

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The steps: the lines of metrics.jsonl with a loss, see docs/output.md; earlier starts included."""
        return [record for record in self._records() if "loss" in record]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Its lines with an `eval_loss`."""
        return [record for record in self._records() if "eval_loss" in record]

    def _records(self) -> list[dict[str, Any]]:
        path = self.folder / METRICS_FILE
        if path.exists():
            return list(read_metrics_records(path))
        return []

    @property
    def record(self) -> RunData:
        """All that the folder tells: configuration, curves, starts, checkpoints."""
        return read_run(self.folder)

    @property
    def checkpoint(self) -> Path | None:
        """The newest complete one."""
        return newest_complete(self.folder / "checkpoints")

    def frame(self) -> pandas.DataFrame:
        """`metrics` as a table of pandas by step, with the columns of `evaluations`.

        Raises:
            UserError: pandas is not installed.
        """
        pandas = _imported("pandas", "run.metrics is the same as a list")
        steps, evaluations = (pandas.DataFrame(rows) for rows in (self.metrics, self.evaluations))
        if evaluations.empty or steps.empty:
            found = evaluations
            if evaluations.empty:
                found = steps
            if not found.empty:
                return found.set_index("step")
            return found
        return steps.set_index("step").join(evaluations.drop(columns="epoch").set_index("step"), how="outer")

    def plot(self) -> Figure:
        """The curves of report.png as a figure of matplotlib, which a notebook shows.

        Raises:
            UserError: matplotlib is not installed, or the run has done no step.
        """
        _imported("matplotlib", "run.metrics has the numbers")
        from trainer.report.picture import draw_figure

        figure = draw_figure(self.record)
        if figure is None:
            rule = "has no step to draw"
            fix = "let it do at least one"
            raise UserError(rule, where="run.plot", key="folder", value=str(self.folder), fix=fix)
        figure._repr_png_ = functools.partial(_png, figure)  # a kernel shows it, also without %matplotlib
        return figure

    def generate(self, prompts: str | Sequence[str], **flags: object) -> Any:
        """What the model of the newest checkpoint adds to a prompt, or to each of several: a text, or a list of them.

        Args:
            flags: As of `train`, for example `max_new_tokens=40`, `do_sample=True`, `chat=True`, or another
                `load_checkpoint`.

        Raises:
            UserError: There is no checkpoint, or a prompt is no text, empty or too long.
            KeyboardInterrupt: The kernel was interrupted.
        """
        from trainer.run.predict import continue_texts

        if isinstance(prompts, str):
            texts = [prompts]
        else:
            if isinstance(prompts, Sequence):
                texts = list(prompts)
            else:
                texts = []
        if not texts or not all(isinstance(text, str) for text in texts):
            rule = "must be a text, or a list of texts"
            fix = 'write run.generate("Once upon")'
            raise UserError(rule, where="generate", key="prompts", value=prompts, fix=fix)
        source = {"run_mode": "predict", "load_checkpoint": str(self.folder / "checkpoints"), "resume_training": False}
        given = Override("predict_data", "", "generate", texts=tuple(texts))
        found = continue_texts(_configuration(self.folder / CONFIG_FILE, {**source, **flags}, [given]), texts)
        if isinstance(prompts, str):
            return found[0]
        return found

    def __repr__(self) -> str:
        record = self.record
        return f"run {self.folder}: {record.outcome or record.state} at step {record.step} of {record.last_step}"


def _configuration(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    flags: Mapping[str, object],
    more: Sequence[Override] = (),
) -> Config:
    arguments = [word for name, value in flags.items() for word in _words(name, value)]
    overrides = [*split_arguments(arguments).overrides, *more]
    if isinstance(config, Config):
        if overrides:
            fix = "give the file, or give the flags to load_config"
            raise UserError("a configuration that is loaded takes no flags", where=overrides[0].source, fix=fix)
        return config
    if isinstance(config, Mapping):
        return parse_config("config", json.dumps(config, default=str), overrides)  # JSON is YAML
    return load_config(os.fspath(config), overrides)


def _shown(path: object) -> object:
    if isinstance(path, os.PathLike):
        return os.fspath(path)
    return path


def _words(name: str, value: object) -> list[str]:
    """A flag as the command line has it."""
    if isinstance(value, (list, tuple)) and name == "predict_data":
        return [f"--{name}", *map(str, value)]
    if value is None:
        return [f"--{name}=null"]
    return [f"--{name}={json.dumps(value) if isinstance(value, (list, tuple, dict)) else value}"]


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return file.getvalue()


def _imported(package: str, instead: str) -> Any:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(package)
    fix = f"pip install {package}; {instead}"
    raise UserError(f"{package} is not installed", where="notebook", key=package, fix=fix)
