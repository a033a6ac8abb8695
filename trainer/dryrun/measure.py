"""Measures a case in the process of the dry run."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mindspore

from trainer.config import Config
from trainer.dryrun.observe import ExecutionOrder, host_reads, project_line
from trainer.dryrun.process import CaseFailure, Collective
from trainer.errors import TrainerError, UserError
from trainer.monitors.formatting import size
from trainer.parallel.world import World

_OPERATORS = (
    r"[Pp]rimitive\[(\w+)\]", r"[Ff]or (?:primitive|operator|Operator)? ?['\[](\w+)['\]]", r"[Oo]perator\[(\w+)\]",
    r"[Kk]ernel\[(\w+)\]", r"[Uu]nsupported op \[(\w+)\]", r"op(?:erator)? name:? ?\[?'?(\w+)",
)  # fmt: skip


@dataclass
class CaseRun:
    """Runs a case in this process and measures its steps.

    Attributes:
        say: Takes a line about the progress.
        libraries: The stubs of CANN's libraries, which record legacy kernels.
    """

    config: Config
    world: World
    steps: int
    options: Mapping[str, Any]
    say: Callable[[str], None]
    libraries: ctypes.CDLL
    reads: dict[str, tuple[int, int]] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    base_bytes: int = 0
    order: ExecutionOrder = field(default_factory=ExecutionOrder)
    kernels: Counter[str] = field(default_factory=Counter)

    def measured_steps(self, step: Callable[[int], None]) -> None:
        """Calls `step` with the number of each step. The results are those of the last step."""
        for number in range(self.steps):
            self.say(f"step {number + 1} of {self.steps}")
            with self.measured():
                step(number)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the code inside as a step; it replaces the results of the step before."""
        self.order.forget()
        with host_reads() as self.reads:
            yield
        self.kernels, self.collectives = self.order.read()

    def legacy_kernels(self) -> dict[str, int]:
        """Returns the legacy kernels that the last step started, with their counts.

        The stubs record the name of a legacy kernel when it is first prepared.
        """
        self.libraries.dry_run_kernels.restype = ctypes.c_char_p
        legacy = set(self.libraries.dry_run_kernels().decode().splitlines())
        return {name: count for name, count in sorted(self.kernels.items()) if name in legacy}

    def results(self) -> dict[str, Any]:
        """Returns the fields of `Measurement` that this object measures."""
        return {
            "host_bytes": sum(size for _, size in self.reads.values()),
            "host_reads": self.reads,
            "legacy": self.legacy_kernels(),
            "collectives": self.collectives,
            "peak_bytes": mindspore.runtime.max_memory_allocated() - self.base_bytes,
        }

    def start(self) -> None:
        """Frees memory of earlier cases and starts the measurement of peak memory."""
        gc.collect()
        mindspore.runtime.empty_cache()
        mindspore.runtime.reset_peak_memory_stats()
        self.base_bytes = mindspore.runtime.memory_allocated()


def describe_failure(error: Exception) -> CaseFailure:
    """Describes an error by its message, the operator that the message names, and the line of this project."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = (project_line(frame.filename, frame.lineno or 0) for frame in frames)
    text = str(error).strip() or type(error).__name__
    matches = (re.search(pattern, text) for pattern in _OPERATORS)
    names = (match[1] for match in matches if match)
    message = text
    if not isinstance(error, TrainerError):
        message = f"{type(error).__name__}: {_first_lines(text)}"
    return CaseFailure(next(names, ""), next(filter(None, lines), ""), message, isinstance(error, UserError))


def _first_lines(text: str) -> str:
    """Returns the first lines of MindSpore's message, without lines of dashes and the C++ stack at its end."""
    text = text.partition("- C++ Call Stack")[0]
    lines = [line for line in text.splitlines() if line.strip(" -")]
    if "Unknown Error" in text:  # MindSpore's message if it cannot allocate a tensor
        taken = size(mindspore.runtime.memory_allocated())
        lines.append(f"probably the device's memory is full: {taken} of its 60 GiB are taken")
    return "\n".join(lines[:8])
