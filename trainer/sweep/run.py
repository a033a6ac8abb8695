"""The runs of a sweep as processes: as many at a time as there are jobs, each with its share of the cores.

Every run is an ordinary one, in a folder of its own: a sweep that is called again goes on with those that were stopped
and leaves out those that are finished.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainer.checkpoint.store import newest_complete
from trainer.cli.flags import Arguments, split_arguments
from trainer.config import Override, load_config
from trainer.config.checks.parallel import resolve_for_job
from trainer.config.read.dump import flatten, plain_values
from trainer.device.doctor import memory_left_bytes
from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_SIGINT, EXIT_SIGTERM, UserError
from trainer.launch.processes import kill_group, start_session, worker_cores
from trainer.parallel.world import SINGLE_PROCESS
from trainer.report.record import is_run_folder, read_run
from trainer.run.prepare import PreparedRun, prepare_run
from trainer.sweep.grid import Point, points

if TYPE_CHECKING:
    from trainer.config import Config

_COMMAND = (sys.executable, str(Path(__file__).resolve().parents[2] / "run_trainer.py"))
_LOOK_SECONDS = 0.2
_LOG = "sweep.log"
_MAY_DIFFER = frozenset(("output_dir", "resume_training", "runner_config.stop_step"))
"""Keys with which a run goes on in its folder."""
Tell = Callable[[str], None]


@dataclass
class SweepRun:
    """A run and what has become of it."""

    name: str
    folder: Path
    arguments: list[str]  # of the command line
    is_done: bool = False
    resumes: bool = False
    process: subprocess.Popen | None = None
    place: int = 0  # which share of the cores it has
    began: float = 0.0
    code: int | None = None  # exit code


def prepare_sweep(arguments: Arguments, grids: Sequence[str]) -> tuple[list[SweepRun], Path, str, int]:
    """The runs, the folder of all of them, their device and the memory of the largest in bytes.

    All that can be known before the first one starts is checked.

    Raises:
        UserError: The grid or the settings of any run are wrong, two runs are the same, a folder has another run, or
            the folder of all of them is that of a run.
    """
    found = points(grids, [override.key for override in arguments.overrides])
    base = load_config(arguments.config, arguments.overrides)
    shared = [override for override in arguments.overrides if override.key != "output_dir"]
    own = [flag for override in shared for flag in _as_flag(override, base)]
    root = Path(base.output_dir).expanduser()
    if is_run_folder(root):
        fix = "give the sweep a folder of its own with --output_dir"
        rule = "holds a run, and the runs of a sweep would be mixed with its files"
        raise UserError(rule, where=base.source.where("output_dir"), key="output_dir", value=base.output_dir, fix=fix)
    runs: list[SweepRun] = []
    mistakes: list[str] = []
    configs: dict[str, Config] = {}
    device = ""
    run_bytes = 0
    for point in found:
        folder = root / point.name
        flags = [*own, *point.flags, f"--output_dir={folder}"]
        try:
            config = load_config(arguments.config, split_arguments(flags).overrides)
            _check(config, point, configs)
            prepared = prepare_run(resolve_for_job(config, SINGLE_PROCESS), SINGLE_PROCESS)
            device = prepared.plan.device
            run_bytes = max(run_bytes, prepared.plan.memory_bytes["total"])
            runs.append(_run_in(folder, point, prepared, [f"--config={arguments.config}", *flags]))
        except UserError as error:
            mistakes.append(f"{point.name}: {str(error).rstrip('.')}")
    if mistakes:
        rule = "no run was started, settings are wrong" + "".join(f"\n  {text}" for text in mistakes[:10])
        more = ""
        if len(mistakes) > 10:
            more = f"\n  and {len(mistakes) - 10} more"
        raise UserError(rule + more, where="flag --grid", fix="correct them")
    return runs, root, device, run_bytes


def _as_flag(override: Override, config: Config) -> Iterator[str]:
    """An override as the flag that says the same."""
    if override.texts:
        yield f"--{override.key}={json.dumps(list(override.texts))}"
    elif not override.only_if_present or getattr(config, override.key.partition(".")[0], None) is not None:
        yield f"--{override.key}={override.text}"


def _check(config: Config, point: Point, configs: dict[str, Config]) -> None:
    """Whether a run is a training, and none that an earlier one is already."""
    if not config.trains:
        raise UserError("only a training can be swept", key="run_mode", value=config.run_mode, fix="use run_mode train")
    alike = config.model_copy(update={"output_dir": ""})
    twin = next((name for name, other in configs.items() if other == alike), None)
    if twin is not None:
        raise UserError(f"this run is the same as {twin}", fix="leave one of the two values out")
    configs[point.name] = alike


def _run_in(folder: Path, point: Point, prepared: PreparedRun, arguments: list[str]) -> SweepRun:
    """The run of a folder: a new one, one that goes on, or one that is done."""
    run = SweepRun(point.name, folder, arguments)
    if not is_run_folder(folder):
        return run
    record = read_run(folder)
    wanted = {key: value for key, value in flatten(plain_values(prepared.config)) if key not in _MAY_DIFFER}
    found = {key: value for key, value in record.settings.items() if key not in _MAY_DIFFER}
    other = [key for key in wanted | found if wanted.get(key) != found.get(key)]
    if found and other:
        rule = f"its folder has a run with another {', '.join(other[:5])}"
        raise UserError(rule, key="output_dir", value=str(folder), fix="give the sweep another --output_dir")
    if record.state == "running":
        raise UserError("this run is still running", key="output_dir", value=str(folder), fix="wait for it, or end it")
    run.is_done = record.step >= prepared.plan.steps.last_step or record.outcome == "stopped early"
    run.resumes = not run.is_done and newest_complete(folder / "checkpoints") is not None
    return run


def jobs_for(jobs: int | None, runs: int, device: str, run_bytes: int = 0) -> int:
    """How many runs go at a time: one for each core on a CPU, as far as memory reaches, and one on an Ascend.

    Args:
        run_bytes: Memory of the largest run, as its plan estimates it.

    Raises:
        UserError: It is less than 1, or an Ascend would be shared.
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
        fitting = memory_left_bytes() // run_bytes
    return max(1, min(jobs or min(len(os.sched_getaffinity(0)), fitting), runs))


class _Stop:
    """Hands SIGINT and SIGTERM on to the runs, each time one comes: the first lets a run save, the second ends it."""

    def __init__(self) -> None:
        self.number = 0
        self.count = 0
        self.before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1

    def close(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def execute(runs: Sequence[SweepRun], jobs: int, tell: Tell) -> int:
    """Does the runs that are not done; a failing one is told and the others go on.

    Returns:
        Exit code: 0; 1 where a run failed; 130 or 143 where a signal ended the sweep, whose runs have saved.
    """
    waiting = [run for run in runs if not run.is_done]
    going = []
    for run in runs:
        if run.is_done:
            tell(f"{run.name}: is finished already")
    cores = sorted(os.sched_getaffinity(0))
    stop = _Stop()
    handed_on = 0
    try:
        while going or (waiting and not stop.number):
            while waiting and len(going) < jobs and not stop.number:
                taken = {run.place for run in going}
                place = next(number for number in range(jobs) if number not in taken)
                going.append(_start(waiting.pop(0), place, worker_cores(cores, place, jobs), tell))
            if stop.count > handed_on:
                handed_on = stop.count
                for run in going:
                    run.process.send_signal(stop.number)
            for run in [each for each in going if each.process.poll() is not None]:
                going.remove(run)
                _ended(run, tell)
            time.sleep(_LOOK_SECONDS)
    finally:
        for run in going:
            kill_group(run.process.pid)
        stop.close()
    if stop.number:
        for run in waiting:
            tell(f"{run.name}: was not started; the same command goes on with it")
        if stop.number == signal.SIGINT:
            return EXIT_SIGINT
        return EXIT_SIGTERM
    if any(run.code for run in runs):
        return EXIT_RUN_FAILED
    return EXIT_OK


def _start(run: SweepRun, place: int, cores: Sequence[int], tell: Tell) -> SweepRun:
    """Starts a process on these cores, which it inherits from this one."""
    run.place = place
    run.folder.mkdir(parents=True, exist_ok=True)
    command = [*_COMMAND, *run.arguments, *(["--resume_training=True"] if run.resumes else [])]
    all_cores = os.sched_getaffinity(0)
    run.began = time.monotonic()
    os.sched_setaffinity(0, cores)
    try:
        with (run.folder / _LOG).open("wb") as log:
            run.process = start_session(command, os.environ, log)
    finally:
        os.sched_setaffinity(0, all_cores)
    if len(cores) == 1:
        shared = f"core {cores[0]}"
    else:
        shared = f"cores {cores[0]} to {cores[-1]}"
    tell(f"{run.name}: {'resumes' if run.resumes else 'begins'} on {shared}")
    return run


def _ended(run: SweepRun, tell: Tell) -> None:
    run.code = run.process.returncode
    seconds = time.monotonic() - run.began
    if run.code == EXIT_OK:
        tell(f"{run.name}: finished in {seconds:.0f} s")
    elif run.code in (EXIT_SIGINT, EXIT_SIGTERM):
        saved = newest_complete(run.folder / "checkpoints")
        tell(f"{run.name}: stopped, {f'its newest checkpoint is {saved.name}' if saved else 'without a checkpoint'}")
    else:
        lines = (run.folder / _LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("error: ")] or lines[-1:] or [f"exit code {run.code}"]
        tell(f"{run.name}: failed: {errors[-1].removeprefix('error: ')} (see {run.folder / _LOG})")
