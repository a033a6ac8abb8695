"""The runs of a sweep as processes: as many at a time as there are jobs, each with its share of the cores.

Every run is an ordinary one in a folder of its own. A sweep that is started again resumes runs that were stopped and
skips those that are finished.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainer.checkpoint.store import newest_complete
from trainer.cli.flags import Arguments, split_arguments
from trainer.config import load_config
from trainer.config.checks.parallel import resolve_for_job
from trainer.config.read.dump import flatten, plain_values
from trainer.device.doctor import available_memory_bytes
from trainer.device.stop_signals import EXIT_CODES
from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, UserError
from trainer.launch.processes import run_side_by_side, start_session
from trainer.parallel.world import SINGLE_PROCESS
from trainer.report.record import is_run_folder, read_run
from trainer.run.prepare import PreparedRun, prepare_run
from trainer.sweep.grid import SweepPoint, points

if TYPE_CHECKING:
    from trainer.config import Config

_COMMAND = (sys.executable, str(Path(__file__).resolve().parents[2] / "run_trainer.py"))
_LOG = "sweep.log"
_MAY_DIFFER = frozenset(("output_dir", "resume_training", "runner_config.stop_step"))
"""Keys with which a run goes on in its folder."""
ReportProgress = Callable[[str], None]


@dataclass
class SweepRun:
    """A run of a sweep and its state."""

    name: str
    folder: Path
    arguments: list[str]  # of the command line
    is_done: bool = False
    resumes: bool = False
    code: int | None = None  # exit code


def prepare_sweep(arguments: Arguments, grids: Sequence[str]) -> tuple[list[SweepRun], Path, str, int]:
    """Returns the runs, their common folder, their device, and the memory of the largest run in bytes.

    Everything that is known before the first run starts is checked.

    Raises:
        UserError: The grid or the settings of a run are wrong, two runs are the same, a folder has another run, or
            the common folder is that of a run.
    """
    assert arguments.config is not None  # the command has checked it
    combinations = points(grids, [override.key for override in arguments.overrides])
    base = load_config(arguments.config, arguments.overrides)
    shared_flags = [
        each.flag for each in arguments.overrides if each.key != "output_dir"
        and (not each.only_if_present or getattr(base, each.key.partition(".")[0], None) is not None)
    ]  # fmt: skip
    root = Path(base.output_dir).expanduser()
    place = root.resolve()
    if taken := next((folder for folder in (place, *place.parents) if is_run_folder(folder)), None):
        fix = "give the sweep a folder of its own with --output_dir"
        rule = "holds a run, and the runs of a sweep would be mixed with its files"
        if taken != place:
            rule = f"is within the folder of a run ({taken}), whose files the sweep would be mixed with"
        raise UserError(rule, where=base.source.where("output_dir"), key="output_dir", value=base.output_dir, fix=fix)
    runs: list[SweepRun] = []
    problems: list[str] = []
    configs: dict[str, Config] = {}
    device = ""
    run_bytes = 0
    for point in combinations:
        folder = root / point.name
        flags = [*shared_flags, *point.flags, f"--output_dir={folder}"]
        try:
            config = load_config(arguments.config, split_arguments(flags).overrides)
            _check(config, point, configs)
            prepared = prepare_run(resolve_for_job(config, SINGLE_PROCESS), SINGLE_PROCESS)
            device = prepared.plan.device
            run_bytes = max(run_bytes, prepared.plan.memory_bytes["total"])
            runs.append(_classify_run(folder, point, prepared, [f"--config={arguments.config}", *flags]))
        except UserError as error:
            problems.append(f"{point.name}: {str(error).rstrip('.')}")
    if problems:
        lines = [f"no run was started: {len(problems)} of {len(combinations)} combinations are invalid", *problems[:10]]
        if len(problems) > 10:
            lines.append(f"and {len(problems) - 10} more")
        raise UserError("\n  ".join(lines), where="flag --grid", fix="correct them")
    return runs, root, device, run_bytes


def _check(config: Config, point: SweepPoint, configs: dict[str, Config]) -> None:
    """Checks that a run is a training and differs from all earlier ones."""
    if not config.trains:
        raise UserError("only a training can be swept", key="run_mode", value=config.run_mode, fix="use run_mode train")
    alike = config.model_copy(update={"output_dir": ""})
    twin = next((name for name, other in configs.items() if other == alike), None)
    if twin is not None:
        raise UserError(f"this run is the same as {twin}", fix="leave one of the two values out")
    configs[point.name] = alike


def _classify_run(folder: Path, point: SweepPoint, prepared: PreparedRun, arguments: list[str]) -> SweepRun:
    """Returns the run of a folder: a new one, one to resume, or one that is finished."""
    run = SweepRun(point.name, folder, arguments)
    if not is_run_folder(folder):
        return run
    record = read_run(folder)
    settings = {key: value for key, value in flatten(plain_values(prepared.config)) if key not in _MAY_DIFFER}
    recorded = {key: value for key, value in record.settings.items() if key not in _MAY_DIFFER}
    differing = [key for key in settings | recorded if settings.get(key) != recorded.get(key)]
    if differing:
        rule = f"its folder has a run with another {', '.join(differing[:5])}"
        if not recorded:
            rule = "its folder has a run whose config.yaml cannot be read, so it may be another one"
        raise UserError(rule, key="output_dir", value=str(folder), fix="give the sweep another --output_dir")
    if record.state == "running":
        raise UserError("this run is still running", key="output_dir", value=str(folder), fix="wait for it, or end it")
    run.is_done = record.step >= prepared.plan.steps.last_step or record.outcome == "stopped early"
    run.resumes = not run.is_done and newest_complete(folder / "checkpoints") is not None
    return run


def jobs_for(jobs: int | None, runs: int, device: str, run_bytes: int = 0) -> int:
    """Returns the number of runs at a time: on a CPU one per core as far as memory allows, on an Ascend one.

    Args:
        run_bytes: Memory of the largest run, as its plan estimates it.

    Raises:
        UserError: `jobs` is less than 1, or several runs would share an Ascend.
    """
    if jobs is not None and jobs < 1:
        raise UserError("must be at least 1", where="flag --jobs", key="--jobs", value=jobs, fix="write --jobs 2")
    if device != "CPU":
        if jobs not in (None, 1):
            rule = "the runs of a sweep would share one device"
            raise UserError(rule, where="flag --jobs", key="--jobs", value=jobs, fix="leave it out")
        return 1
    fitting = runs
    if run_bytes:
        fitting = available_memory_bytes() // run_bytes
    return max(1, min(jobs or min(len(os.sched_getaffinity(0)), fitting), runs))


class _Stop:
    """Forwards SIGINT and SIGTERM to the runs: the first lets a run save, the second ends it."""

    def __init__(self) -> None:
        self.number = 0
        self.waiting = 0  # signals that are not forwarded yet
        self.before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.waiting += 1

    def forward(self, running: list[subprocess.Popen]) -> bool:
        """Forwards what has come; returns whether no signal ever came, so that further runs may start."""
        if self.waiting:
            self.waiting = 0
            for process in running:
                process.send_signal(self.number)
        return not self.number

    def close(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


def run_sweep(runs: Sequence[SweepRun], jobs: int, report_progress: ReportProgress) -> int:
    """Does the runs that are not finished; if one fails, it is reported and the others go on.

    Returns the exit code: 0, 1 if a run failed, or 130 or 143 if a signal stopped the sweep, whose runs have saved.
    """
    unfinished = [run for run in runs if not run.is_done]
    for run in runs:
        if run.is_done:
            report_progress(f"{run.name}: is finished already")

    def start(run: SweepRun, cores: Sequence[int]) -> subprocess.Popen:
        """Starts the process of a run."""
        run.folder.mkdir(parents=True, exist_ok=True)
        command = [*_COMMAND, *run.arguments]
        verb = "begins"
        if run.resumes:
            command.append("--resume_training=true")
            verb = "resumes"
        with (run.folder / _LOG).open("wb") as log:
            process = start_session(command, os.environ, log)
        where = f"core {cores[0]}"
        if len(cores) > 1:
            where = f"cores {cores[0]} to {cores[-1]}"
        report_progress(f"{run.name}: {verb} on {where}")
        return process

    stop = _Stop()
    try:
        with contextlib.closing(run_side_by_side(unfinished, jobs, start, stop.forward)) as ended:
            for run, run.code, seconds in ended:
                report_progress(f"{run.name}: {_end_text(run, seconds)}")
    finally:
        stop.close()
    if stop.number:
        for run in unfinished:
            if run.code is None:
                report_progress(f"{run.name}: was not started; the same command goes on with it")
        return EXIT_CODES[signal.Signals(stop.number)]
    if any(run.code for run in runs):
        return EXIT_RUN_FAILED
    return EXIT_OK


def _end_text(run: SweepRun, seconds: float) -> str:
    if run.code == EXIT_OK:
        return f"finished in {seconds:.0f} s"
    if run.code in EXIT_CODES.values():
        saved = newest_complete(run.folder / "checkpoints")
        if saved:
            return f"stopped, its newest checkpoint is {saved.name}"
        return "stopped, without a checkpoint"
    lines = (run.folder / _LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")] or lines[-1:] or [f"exit code {run.code}"]
    if run.code is not None and run.code < 0:
        errors = [f"ended by {signal.Signals(-run.code).name}"]
    return f"failed: {errors[-1].removeprefix('error: ')} (see {run.folder / _LOG})"
