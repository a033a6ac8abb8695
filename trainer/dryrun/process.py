"""Runs cases on the dry Ascend backend in a process of their own, and returns what was measured. Pure Python.

Loading the backend takes three seconds and a small case one, so one process runs many cases, all as the same rank: a
process is one rank of one job. No other rank of the job exists.
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

from trainer.dryrun.stand_ins import LIBRARY, stand_ins

CASES = "cases.json"
RESULTS = "results.jsonl"
LOG = "log.txt"
"""Files of the folder that the two processes share."""
TRAIN = "trainer.dryrun.tasks:train"

_POLL_SECONDS = 0.05
_LOG_LINES = 20
# Variables of a job: this process is none of its workers.
_OF_A_JOB = ("MS_", "RANK_", "DEVICE_ID", "RUN_TRAINER_", "LD_PRELOAD")

Tell = Callable[[str, str], None]
"""Is given the name of a case and a line about its progress."""


class Case(NamedTuple):
    """What to try.

    Attributes:
        config: The configuration, as the text of a YAML or JSON file.
        task: What to do with it: `module:function`, called with a `trainer.dryrun.measure.CaseRun`.
        steps: How many steps; a step compiles in the first one and is measured in the last one.
        options: More arguments of the task.
    """

    config: str
    task: str = TRAIN
    steps: int = 2
    options: Mapping[str, Any] = {}


class Collective(NamedTuple):
    """A call of a collective of HCCL."""

    name: str
    dtype: str
    bytes: int  # that this rank gives; for a Receive those it gets
    ranks: tuple[int, ...]  # of the group


@dataclass(frozen=True)
class CaseFailure:
    """Where a case failed."""

    operator: str  # MindSpore's name of the operator; empty where its message names none
    where: str  # the last line of this project on the stack, as trainer/step/clip.py:12
    message: str
    is_user_error: bool = False  # the configuration is wrong, not the code


@dataclass(frozen=True)
class Measurement:
    """What was seen of a case. Figures of a step are those of the last one.

    Attributes:
        host_bytes: Bytes that the host read from the device in the last step.
        host_reads: These reads, by the line of this project: how many, and their bytes.
        legacy: Kernels of CANN's legacy library (ACLOP, GE) by name, and how often the last step starts one.
        collectives: Of the last step, in the order of execution.
        peak_bytes: Largest device memory that MindSpore's pool had in use, over all steps.
        found: What the task returned.
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
    cases: Mapping[str, Case],
    ranks: int = 1,
    rank: int = 0,
    tell: Tell = lambda name, text: None,
    python: Sequence[str] = (sys.executable,),
) -> dict[str, Measurement]:
    """Runs every case as one rank of a job, whatever became of the others. `python` begins the command of a process.

    A process that dies counts as the failure of the case that it was at; a new one runs those that are left.

    Raises:
        UserError, RunError: As of `stand_ins`.
    """
    toolkit = stand_ins()
    found = {}
    left = dict(cases)
    while left:
        with tempfile.TemporaryDirectory(prefix="dryrun-") as name:
            done, current = _run_process(Path(name), left, ranks, rank, tell, toolkit, python)
        found |= done
        left = {name: case for name, case in left.items() if name not in found}
        assert current is None or current in found
    return {name: found[name] for name in cases}


def _run_process(
    folder: Path, cases: Mapping[str, Case], ranks: int, rank: int, tell: Tell, toolkit: Path, python: Sequence[str]
) -> tuple[dict[str, Measurement], str | None]:
    """What one process measured, and the case that it died of."""
    job = {"ranks": ranks, "rank": rank, "cases": {name: case._asdict() for name, case in cases.items()}}
    (folder / CASES).write_text(json.dumps(job))
    (folder / RESULTS).touch()
    found = {}
    current = None
    with (folder / LOG).open("w") as log:
        process = subprocess.Popen(
            [*python, "-m", "trainer.dryrun.worker", str(folder)],
            env=environment(os.environ, toolkit, ranks, rank), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=folder,  # MindSpore writes the order of execution there
        )  # fmt: skip
        try:
            for line in _lines(folder / RESULTS, process):
                event = json.loads(line)
                current = event["case"]
                if "measurement" in event:
                    found[current] = _measurement(event["measurement"])
                    current = None
                else:
                    tell(current, event["says"])
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if len(found) < len(cases) and current is None:  # it died between two cases, or before the first
        current = next(name for name in cases if name not in found)
    if current is not None:
        found[current] = Measurement(CaseFailure("", "", _why_dead(process.returncode, folder / LOG)))
    return found, current


def environment(given: Mapping[str, str], toolkit: Path, ranks: int, rank: int) -> dict[str, str]:
    """The environment of a process on the dry Ascend backend."""
    kept = {name: value for name, value in given.items() if not name.startswith(_OF_A_JOB)}
    libraries = toolkit / "lib64"
    package = Path(__file__).resolve().parents[2]
    paths = {
        "LD_LIBRARY_PATH": [libraries, given.get("LD_LIBRARY_PATH")],
        "PYTHONPATH": [toolkit / "python", package, *map(os.path.abspath, _entries(given.get("PYTHONPATH")))],
    }
    joined = {name: os.pathsep.join(str(part) for part in parts if part) for name, parts in paths.items()}
    return kept | joined | {
        "MS_SIMULATION_LEVEL": "1",
        "RANK_SIZE": str(ranks),
        "RANK_ID": str(rank),
        "ASCEND_HOME_PATH": str(toolkit),
        "ASCEND_OPP_PATH": str(toolkit / "opp"),
        "LD_PRELOAD": str(libraries / LIBRARY),
    }  # fmt: skip


def _entries(paths: str | None) -> list[str]:
    return [path for path in (paths or "").split(os.pathsep) if path]


def _lines(path: Path, process: subprocess.Popen) -> Iterator[str]:
    """The lines that a process appends to a file, until it has ended."""
    with path.open() as file:
        held = ""
        while True:
            ended = process.poll() is not None
            held += file.read()
            *lines, held = held.split("\n")
            yield from lines
            if ended:
                return
            time.sleep(_POLL_SECONDS)


def _measurement(values: Mapping[str, Any]) -> Measurement:
    failure = values["failure"] and CaseFailure(**values["failure"])
    reads = {where: tuple(numbers) for where, numbers in values["host_reads"].items()}
    collectives = [Collective(*each[:3], tuple(each[3])) for each in values["collectives"]]
    return Measurement(**{**values, "failure": failure, "host_reads": reads, "collectives": collectives})


def _why_dead(code: int, log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").strip().splitlines()
    if code < 0:
        ended = f"was killed by signal {-code}"
    else:
        ended = f"ended with exit code {code}"
    return "\n".join((f"the process {ended}; the last it said:", *lines[-_LOG_LINES:]))
