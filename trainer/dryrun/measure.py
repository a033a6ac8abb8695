"""What a case is measured with, in the process of the dry run."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore

from trainer.dryrun.process import Collective, Failure
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.parallel.world import World

_PACKAGE = Path(__file__).resolve().parents[1]
_OWN = str(_PACKAGE / "dryrun")
_READERS = ("asnumpy", "_item", "_tolist", "get_bytes")
"""The methods of a tensor through which Python reads it: all others call one of these."""
_OPERATORS = (
    r"[Pp]rimitive\[(\w+)\]", r"[Ff]or (?:primitive|operator|Operator)? ?['\[](\w+)['\]]", r"[Oo]perator\[(\w+)\]",
    r"[Kk]ernel\[(\w+)\]", r"[Uu]nsupported op \[(\w+)\]", r"op(?:erator)? name:? ?\[?'?(\w+)",
)  # fmt: skip


class Run:
    """A case in this process: its configuration, and the measuring of its steps.

    Args:
        libraries: The stand-ins for CANN's, which note what is called.
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
        self.config, self.world, self.steps, self.options, self.say = config, world, steps, options, say
        self.libraries, self.reads, self.collectives, self.base_bytes = libraries, {}, [], 0

    def measured_steps(self, step: Callable[[int], None]) -> None:
        """Calls `step` with the numbers of the steps; the last one is measured."""
        for number in range(self.steps):
            self.say(f"step {number + 1} of {self.steps}")
            with self.measured():
                step(number)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """A step: of its reads and collectives the last one's count."""
        before = len(self.notes("collective"))
        with host_reads() as reads:
            yield
        mindspore.runtime.synchronize()
        noted = self.notes("collective")[before:]
        self.reads, self.collectives = reads, [Collective(name, dtype, int(size)) for name, dtype, size in noted]

    def notes(self, kind: str) -> list[tuple[str, ...]]:
        """What the libraries noted of a kind, see `native/stand_ins.cc`."""
        self.libraries.dry_run_notes.restype = ctypes.c_char_p
        lines = self.libraries.dry_run_notes().decode().splitlines()
        return [tuple(rest.split()) for given, _, rest in (line.partition(" ") for line in lines) if given == kind]

    def results(self) -> dict[str, Any]:
        """The fields of a `Measurement` that are known here."""
        return {
            "host_bytes": sum(size for _, size in self.reads.values()),
            "host_reads": self.reads,
            "legacy": {name: int(count) for name, count in self.notes("aclop")},
            "collectives": self.collectives,
            "peak_bytes": mindspore.runtime.max_memory_allocated() - self.base_bytes,
        }

    def start(self) -> None:
        """Forgets what was measured before, and gives back its memory."""
        gc.collect()
        mindspore.runtime.empty_cache()
        mindspore.runtime.reset_peak_memory_stats()
        self.base_bytes = mindspore.runtime.memory_allocated()
        self.libraries.dry_run_forget()


@contextlib.contextmanager
def host_reads() -> Iterator[dict[str, tuple[int, int]]]:
    """Fills the yielded dict: for each line of this project how often it reads a tensor, and how many bytes."""
    counts, sizes, found = Counter(), Counter(), {}
    inside = threading.local()  # a reader that calls another one reads once
    originals = {name: getattr(mindspore.Tensor, name) for name in _READERS}

    def counting(original: Callable) -> Callable:
        def read(tensor: mindspore.Tensor, *args, **more):
            if getattr(inside, "reader", False):
                return original(tensor, *args, **more)
            where = line_of_ours()
            counts[where] += 1
            sizes[where] += tensor.size * tensor.itemsize
            inside.reader = True
            try:
                return original(tensor, *args, **more)
            finally:
                inside.reader = False

        return read

    for name, original in originals.items():
        setattr(mindspore.Tensor, name, counting(original))
    try:
        yield found
    finally:
        for name, original in originals.items():
            setattr(mindspore.Tensor, name, original)
        found |= {where: (count, sizes[where]) for where, count in counts.most_common()}


def line_of_ours() -> str:
    """The innermost line of this project, as trainer/step/clip.py:12, that the calling thread is at."""
    frame = sys._getframe(1)
    while frame is not None:
        if where := _ours(frame.f_code.co_filename, frame.f_lineno):
            return where
        frame = frame.f_back
    return "elsewhere"


def _ours(file: str, line: int) -> str:
    if not file.startswith(str(_PACKAGE)) or file.startswith(_OWN):
        return ""
    return f"{Path(file).relative_to(_PACKAGE.parent)}:{line}"


def failure_of(error: Exception) -> Failure:
    """What a message of MindSpore, and its stack, say of an error."""
    places = (_ours(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__)))
    text = str(error).strip() or type(error).__name__
    names = (found[1] for pattern in _OPERATORS if (found := re.search(pattern, text)))
    message = text if isinstance(error, UserError) else f"{type(error).__name__}: {_first_lines(text)}"
    return Failure(next(names, ""), next(filter(None, places), ""), message, isinstance(error, UserError))


def _first_lines(text: str) -> str:
    """A message of MindSpore without its stacks of C++ and Python, which come below a line of dashes."""
    lines = [line for line in text.partition("\n----")[0].splitlines() if line.strip()]
    return "\n".join(lines[:6])
