"""What a case is measured with, in the process of the dry run."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import mindspore

from trainer.dryrun.observe import ExecutionOrder, host_reads, project_line
from trainer.dryrun.process import CaseFailure
from trainer.errors import TrainerError, UserError
from trainer.monitors.formatting import size

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.parallel.world import World

_OPERATORS = (
    r"[Pp]rimitive\[(\w+)\]", r"[Ff]or (?:primitive|operator|Operator)? ?['\[](\w+)['\]]", r"[Oo]perator\[(\w+)\]",
    r"[Kk]ernel\[(\w+)\]", r"[Uu]nsupported op \[(\w+)\]", r"op(?:erator)? name:? ?\[?'?(\w+)",
)  # fmt: skip


class CaseRun:
    """A case in this process: its configuration, and the measuring of its steps.

    Args:
        libraries: The stand-ins for CANN's, which note legacy kernels.
        say: Is given a line about the progress.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        steps: int,
        options: Mapping[str, Any],
        say: Callable[[str], None],
        libraries: ctypes.CDLL,
    ) -> None:
        self.config = config
        self.world = world
        self.steps = steps
        self.options = options
        self.say = say
        self.libraries = libraries
        self.reads = {}
        self.collectives = []
        self.base_bytes = 0
        self.order = ExecutionOrder()
        self.kernels = {}

    def measured_steps(self, step: Callable[[int], None]) -> None:
        """Calls `step` with the numbers of the steps; the last one is measured."""
        for number in range(self.steps):
            self.say(f"step {number + 1} of {self.steps}")
            with self.measured():
                step(number)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """A step: of its reads and collectives the last one's count."""
        self.order.forget()
        with host_reads() as self.reads:
            yield
        self.kernels, self.collectives = self.order.read()

    def legacy_kernels(self) -> dict[str, int]:
        """Those of the last step: the libraries note the name of a kernel when it is first prepared."""
        self.libraries.dry_run_kernels.restype = ctypes.c_char_p
        legacy = set(self.libraries.dry_run_kernels().decode().splitlines())
        return {name: count for name, count in sorted(self.kernels.items()) if name in legacy}

    def results(self) -> dict[str, Any]:
        """The fields of a `Measurement` that are known here."""
        return {
            "host_bytes": sum(size for _, size in self.reads.values()),
            "host_reads": self.reads,
            "legacy": self.legacy_kernels(),
            "collectives": self.collectives,
            "peak_bytes": mindspore.runtime.max_memory_allocated() - self.base_bytes,
        }

    def start(self) -> None:
        """Forgets what was measured before, and gives back its memory."""
        gc.collect()
        mindspore.runtime.empty_cache()
        mindspore.runtime.reset_peak_memory_stats()
        self.base_bytes = mindspore.runtime.memory_allocated()


def failure_of(error: Exception) -> CaseFailure:
    """What a message of MindSpore, and its stack, say of an error."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = (project_line(frame.filename, frame.lineno) for frame in frames)
    text = str(error).strip() or type(error).__name__
    names = (found[1] for pattern in _OPERATORS if (found := re.search(pattern, text)))
    if isinstance(error, TrainerError):
        message = text
    else:
        message = f"{type(error).__name__}: {_first_lines(text)}"
    return CaseFailure(next(names, ""), next(filter(None, places), ""), message, isinstance(error, UserError))


def _first_lines(text: str) -> str:
    """A message of MindSpore without its lines of dashes and the stack of C++ at its end."""
    text = text.partition("- C++ Call Stack")[0]
    lines = [line for line in text.splitlines() if line.strip(" -")]
    if "Unknown Error" in text:  # MindSpore's words where it finds no memory for a tensor
        taken = size(mindspore.runtime.memory_allocated())
        lines.append(f"probably the device's memory is full: {taken} of its 60 GiB are taken")
    return "\n".join(lines[:8])
