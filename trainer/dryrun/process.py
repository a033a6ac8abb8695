"""Runs cases on MindSpore's Ascend backend in a separate process, and returns their measurements. Pure Python.

Loading the backend takes three seconds and a small case one second, so one process runs many cases. The process is one
rank of a job whose other ranks do not exist.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.dryrun.cann_stubs import LIBRARY, build_cann_stubs

CASES = "cases.json"
RESULTS = "results.jsonl"
LOG = "log.txt"
"""Files in the folder that both processes use."""
TRAIN = "trainer.dryrun.tasks:training"

_POLL_SECONDS = 0.05
_LOG_LINES = 20
# Variables of a job: the process is not one of its workers.
_JOB_VARIABLES = ("MS_", "RANK_", "DEVICE_ID", "RUN_TRAINER_", "LD_PRELOAD")

Tell = Callable[[str, str], None]
"""(name of a case, line about its progress) -> None."""


class Case(NamedTuple):
    """A configuration and what a dry run does with it.

    Attributes:
        config: The configuration, as the text of a YAML or JSON file.
        task: The function `module:function` to call with a `trainer.dryrun.measure.CaseRun`.
        steps: The number of steps. The first one compiles, and the last one is measured.
        options: Further options of the task.
    """

    config: str
    task: str = TRAIN
    steps: int = 2
    options: Mapping[str, Any] = {}


class Collective(NamedTuple):
    """A call of a collective of HCCL."""

    name: str
    dtype: str
    bytes: int  # bytes that this rank sends; for a Receive the bytes that it gets
    ranks: tuple[int, ...]  # the ranks of the group


@dataclass(frozen=True)
class CaseFailure:
    """Where and why a case failed."""

    operator: str  # MindSpore's name of the operator; empty if its message names none
    where: str  # the last line of this project on the stack, for example trainer/step/clip.py:12
    message: str
    is_user_error: bool = False  # the configuration is wrong, not the code


@dataclass(frozen=True)
class Measurement:
    """The measurements of a case. Figures of a step are those of the last step.

    Attributes:
        failure: Where and why the case failed; None if it did not.
        host_bytes: Bytes that the host read from the device in the last step.
        host_reads: The number and bytes of these reads for each line of this project.
        legacy: Kernels of CANN's legacy library (ACLOP, GE), with the number of starts in the last step.
        collectives: The collectives of the last step, in the order of execution.
        peak_bytes: The peak of the device memory in use by MindSpore's pool, over all steps.
        found: The result of the task.
    """

    failure: CaseFailure | None = None
    host_bytes: int = 0
    host_reads: dict[str, tuple[int, int]] = field(default_factory=dict)
    legacy: dict[str, int] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    peak_bytes: int = 0
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


def run_cases(
    cases: Mapping[str, Case], ranks: int = 1, rank: int = 0, tell: Tell = lambda name, text: None,
    python: Sequence[str] = (sys.executable,),
) -> dict[str, Measurement]:  # fmt: skip
    """Runs every case as one rank of a job, including those after a failed one.

    If the process dies, the case that it was running has failed, and a new process runs the remaining cases.

    Args:
        tell: Takes lines about the progress.
        python: The beginning of the command that starts the process.

    Raises:
        UserError: There is no compiler for the stubs of CANN's libraries.
        RunError: The stubs cannot be built.
    """
    toolkit = build_cann_stubs()
    measurements: dict[str, Measurement] = {}
    remaining = dict(cases)
    while remaining:
        with tempfile.TemporaryDirectory(prefix="dryrun-") as name:
            measurements |= _run_process(Path(name), remaining, ranks, rank, tell, toolkit, python)
        remaining = {name: case for name, case in remaining.items() if name not in measurements}
    return {name: measurements[name] for name in cases}


def _run_process(
    folder: Path, cases: Mapping[str, Case], ranks: int, rank: int, tell: Tell, toolkit: Path, python: Sequence[str]
) -> dict[str, Measurement]:
    """Returns the measurements of one process; the case during which it died has failed."""
    job = {"ranks": ranks, "rank": rank, "cases": {name: case._asdict() for name, case in cases.items()}}
    (folder / CASES).write_text(json.dumps(job))
    (folder / RESULTS).touch()
    measurements: dict[str, Measurement] = {}
    current: str | None = None
    with (folder / LOG).open("w") as log:
        process = subprocess.Popen(
            [*python, "-m", "trainer.dryrun.worker", str(folder)],
            env=environment(os.environ, toolkit, ranks, rank), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=folder,  # MindSpore writes the order of execution there
        )  # fmt: skip
        try:
            for line in _lines(folder / RESULTS, process):
                event = json.loads(line)
                name = event["case"]
                if "measurement" in event:
                    measurements[name] = _measurement(event["measurement"])
                    current = None
                else:
                    current = name
                    tell(name, event["says"])
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if len(measurements) < len(cases) and current is None:  # it died between two cases, or before the first
        current = next(name for name in cases if name not in measurements)
    if current is not None:
        measurements[current] = Measurement(CaseFailure("", "", _death_message(process.returncode, folder / LOG)))
    return measurements


def environment(variables: Mapping[str, str], toolkit: Path, ranks: int, rank: int) -> dict[str, str]:
    """Returns the environment of a process on the Ascend backend in a dry run, from other `variables`."""
    base = {name: value for name, value in variables.items() if not name.startswith(_JOB_VARIABLES)}
    libraries = toolkit / "lib64"
    package = Path(__file__).resolve().parents[2]
    python_path = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths: dict[str, list[Path | str | None]] = {
        "LD_LIBRARY_PATH": [libraries, variables.get("LD_LIBRARY_PATH")],
        "PYTHONPATH": [toolkit / "python", package, *map(os.path.abspath, python_path)],
    }
    joined = {name: os.pathsep.join(str(part) for part in parts if part) for name, parts in paths.items()}
    return base | joined | {
        "MS_SIMULATION_LEVEL": "1",
        "RANK_SIZE": str(ranks),
        "RANK_ID": str(rank),
        "ASCEND_HOME_PATH": str(toolkit),
        "ASCEND_OPP_PATH": str(toolkit / "opp"),
        "LD_PRELOAD": str(libraries / LIBRARY),
    }  # fmt: skip


def _lines(path: Path, process: subprocess.Popen) -> Iterator[str]:
    """Yields the lines that a process appends to a file, until the process has ended."""
    with path.open() as file:
        incomplete = ""
        while True:
            has_ended = process.poll() is not None
            incomplete += file.read()
            *lines, incomplete = incomplete.split("\n")
            yield from lines
            if has_ended:
                return
            time.sleep(_POLL_SECONDS)


def _measurement(values: Mapping[str, Any]) -> Measurement:
    failure = values["failure"] and CaseFailure(**values["failure"])
    reads = {where: tuple(numbers) for where, numbers in values["host_reads"].items()}
    collectives = [Collective(name, dtype, size, tuple(ranks)) for name, dtype, size, ranks in values["collectives"]]
    return Measurement(**{**values, "failure": failure, "host_reads": reads, "collectives": collectives})


def _death_message(code: int, log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").strip().splitlines()
    end = f"ended with exit code {code}"
    if code < 0:
        end = f"was killed by signal {-code}"
    return "\n".join((f"the process {end}; its last output:", *lines[-_LOG_LINES:]))
