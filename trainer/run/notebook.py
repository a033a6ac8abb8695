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
from dataclasses import dataclass
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
    """Trains like the command line with this file and these flags, shows the progress, and returns the run.

    Interrupting the kernel ends the run after the current step with a checkpoint, as Ctrl-C does; a second interrupt
    raises a KeyboardInterrupt. `resume_training=True` continues from that checkpoint.

    Args:
        config: A YAML file, its content as a mapping, or the result of `load_config`.
        flags: Flags by their names on the command line; a dotted key as `**{"optimizer.eps": 1e-6}`.

    Raises:
        UserError: Bad input.
        RunError: The run failed.
    """
    from trainer.device.stop_signals import signals_in_a_thread
    from trainer.run.loop import run

    if not isinstance(config, (str, os.PathLike, Mapping, Config)):
        rule = "must be a YAML file, its content as a mapping, or the result of load_config"
        fix = 'write train("configs/quickstart.yaml")'
        raise UserError(rule, where="train", key="config", value=config, fix=fix)
    loaded = _load(config, flags)
    if not loaded.trains:
        where = loaded.source.where("run_mode")
        fix = "set run_mode to train or finetune; to predict, call load(FOLDER).generate(TEXT)"
        raise UserError("must be train or finetune", where=where, key="run_mode", value=loaded.run_mode, fix=fix)
    monitor = _SummaryMonitor()
    with signals_in_a_thread():
        exit_code = run(loaded, [monitor])
    return Run(Path(loaded.output_dir).expanduser(), exit_code, monitor.summary)


def load(folder: str | os.PathLike[str]) -> Run:
    """Returns the run of an output folder, finished or not.

    Raises:
        UserError: The folder has no run.
    """
    path = None
    if isinstance(folder, (str, os.PathLike)):
        path = Path(folder).expanduser()
    if path is None or not is_run_folder(path):
        fix = 'give the output_dir of a training: load("output/quickstart")'
        value: object = folder
        if path is not None:
            value = str(folder)
        raise UserError("is not the folder of a run", where="load", key="folder", value=value, fix=fix)
    return Run(path)


class _SummaryMonitor(Monitor):
    summary: RunSummary | None = None

    def close(self, summary: RunSummary | None) -> None:
        self.summary = summary


@dataclass(repr=False, eq=False)
class Run:
    """A training, by its output folder.

    Each property reads the files again, so that it follows a run that goes on.

    Attributes:
        folder: The output folder.
        exit_code: The exit code of the command line: 0, or 130 after an interrupt. 0 for a run that `load` returned.
        summary: The summary at the end of `train`; None for a run that `load` returned, and if no step was due.
    """

    folder: Path
    exit_code: int = 0
    summary: RunSummary | None = None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Returns the steps of all starts: the lines of metrics.jsonl with a loss, see docs/output.md."""
        return [record for record in self._records() if "loss" in record]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Returns the evaluations: the lines of metrics.jsonl with an `eval_loss`."""
        return [record for record in self._records() if "eval_loss" in record]

    def _records(self) -> list[dict[str, Any]]:
        path = self.folder / METRICS_FILE
        if path.exists():
            return list(read_metrics_records(path))
        return []

    @property
    def record(self) -> RunData:
        """Returns the content of the folder: configuration, curves, starts, checkpoints."""
        return read_run(self.folder)

    @property
    def checkpoint(self) -> Path | None:
        """Returns the newest complete checkpoint; None if there is none."""
        return newest_complete(self.folder / "checkpoints")

    def frame(self) -> pandas.DataFrame:
        """Returns `metrics` and `evaluations` as one pandas table, indexed by step.

        Raises:
            UserError: pandas is not installed.
        """
        pandas = _import_package("pandas", "run.metrics has the same values as a list")
        tables = [pandas.DataFrame(rows).set_index("step") for rows in (self.metrics, self.evaluations) if rows]
        if len(tables) == 2:
            return tables[0].join(tables[1].drop(columns="epoch"), how="outer")
        return next(iter(tables), pandas.DataFrame())

    def plot(self) -> Figure:
        """Returns the curves of report.png as a figure of matplotlib, which a notebook shows.

        Raises:
            UserError: matplotlib is not installed, or the run has done no step.
        """
        _import_package("matplotlib", "run.metrics has the numbers")
        from trainer.report.picture import draw_figure

        figure = draw_figure(self.record)
        if figure is None:
            rule = "the run has no step to draw"
            fix = "train at least one step"
            raise UserError(rule, where="run.plot", key="folder", value=str(self.folder), fix=fix)
        # A kernel calls this method to show the figure, also without %matplotlib.
        setattr(figure, "_repr_png_", functools.partial(_png, figure))  # noqa: B010 (the class declares no such field)
        return figure

    def generate(self, prompts: str | Sequence[str], **flags: object) -> Any:
        """Returns what the model of the newest checkpoint adds to a prompt: a text, or a list of them for several.

        Args:
            flags: Flags as in `train`, for example `max_new_tokens=40`, `do_sample=True`, `chat=True`, or another
                `load_checkpoint`.

        Raises:
            UserError: There is no checkpoint, or a prompt is not a text, empty or too long.
            KeyboardInterrupt: The kernel was interrupted.
        """
        from trainer.run.predict import continue_texts

        texts: list[Any] = []
        if isinstance(prompts, str):
            texts = [prompts]
        elif isinstance(prompts, Sequence):
            texts = list(prompts)
        if not texts or not all(isinstance(text, str) for text in texts):
            rule = "must be a text, or a list of texts"
            fix = 'write run.generate("Once upon")'
            raise UserError(rule, where="generate", key="prompts", value=prompts, fix=fix)
        settings: dict[str, object] = {
            "run_mode": "predict",
            "load_checkpoint": str(self.folder / "checkpoints"),
            "resume_training": False,
        }
        prompt_override = Override("predict_data", "", "generate", texts=tuple(texts))
        config = _load(self.folder / CONFIG_FILE, {**settings, **flags}, [prompt_override])
        continuations = continue_texts(config, texts)
        if isinstance(prompts, str):
            return continuations[0]
        return continuations

    def __repr__(self) -> str:
        record = self.record
        return f"run {self.folder}: {record.outcome or record.state} at step {record.step} of {record.last_step}"


def _load(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    flags: Mapping[str, object],
    extra_overrides: Sequence[Override] = (),
) -> Config:
    arguments = [word for name, value in flags.items() for word in _flag_words(name, value)]
    overrides = [*split_arguments(arguments).overrides, *extra_overrides]
    if isinstance(config, Config):
        if overrides:
            fix = "give the file, or give the flags to load_config"
            raise UserError("a loaded configuration takes no flags", where=overrides[0].source, fix=fix)
        return config
    if isinstance(config, Mapping):
        return parse_config("config", json.dumps(config, default=_as_json), overrides)  # JSON is YAML
    return load_config(os.fspath(config), overrides)


def _flag_words(name: str, value: object) -> list[str]:
    """Returns the words of a flag on the command line."""
    if isinstance(value, (list, tuple)) and name == "predict_data":
        return [f"--{name}", *map(str, value)]
    if value is None:
        return [f"--{name}=null"]
    if isinstance(value, (list, tuple, Mapping)) or hasattr(value, "tolist"):
        return [f"--{name}={json.dumps(value, default=_as_json)}"]
    return [f"--{name}={value}"]


def _as_json(value: Any) -> Any:
    """Returns a value of a type that JSON lacks: a mapping of any kind, NumPy's numbers and arrays; of others the text.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    return file.getvalue()


def _import_package(package: str, alternative: str) -> Any:
    """Imports a package, or raises a UserError that names an alternative to it."""
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(package)
    fix = f"pip install {package}; {alternative}"
    raise UserError(f"{package} is not installed", where="notebook", key=package, fix=fix)
