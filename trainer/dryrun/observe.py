"""Observes a step: reads by the host, and kernels and collectives in the order of execution."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import mindspore

from trainer.dryrun.process import Collective

_PACKAGE = Path(__file__).resolve().parents[1]
_DRYRUN = str(_PACKAGE / "dryrun")
_READERS = ("asnumpy", "_item", "_tolist", "get_bytes")
"""The methods by which Python reads a tensor; all other methods call one of these."""
_NUMBER = re.compile(r"-op\d+$")
_VARIANT = re.compile("^DistComm|^InnerComm|(IntoTensor|Tensor|Single)(Uneven)?$")
"""The parts of MindSpore's names of functional collectives that are not the name of the collective."""


@contextlib.contextmanager
def host_reads() -> Iterator[dict[str, tuple[int, int]]]:
    """Yields a dict, which at the end contains for each line of this project its number of reads and their bytes."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    reads: dict[str, tuple[int, int]] = {}
    inside = threading.local()  # a reader that calls another one counts once
    originals = {name: getattr(mindspore.Tensor, name) for name in _READERS}

    def counting(original: Callable) -> Callable:
        """Wraps a method of tensors to count its calls and bytes for each line of the program."""
        def read(tensor: mindspore.Tensor, *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "reader", False):
                return original(tensor, *args, **kwargs)
            line = current_project_line()
            counts[line] += 1
            sizes[line] += tensor.size * tensor.itemsize
            inside.reader = True
            try:
                return original(tensor, *args, **kwargs)
            finally:
                inside.reader = False

        return read

    for name, original in originals.items():
        setattr(mindspore.Tensor, name, counting(original))
    try:
        yield reads
    finally:
        for name, original in originals.items():
            setattr(mindspore.Tensor, name, original)
        reads |= {line: (count, sizes[line]) for line, count in counts.most_common()}


def current_project_line() -> str:
    """Returns the innermost line of this project on the calling thread's stack, as trainer/step/clip.py:12."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if line := project_line(frame.f_code.co_filename, frame.f_lineno):
            return line
        frame = frame.f_back
    return "elsewhere"


def project_line(file: str, line: int) -> str:
    """Returns a line as trainer/step/clip.py:12; an empty text outside of this project and in this package."""
    if not file.startswith(str(_PACKAGE)) or file.startswith(_DRYRUN):
        return ""
    return f"{Path(file).relative_to(_PACKAGE.parent)}:{line}"


class ExecutionOrder:
    """Reads MindSpore's record of the kernels that it has started, in a graph or operator by operator.

    In a dry run MindSpore records the order of execution, and writes the record below the working directory when it is
    cleared. The record does not contain kernels of CANN's current library that Python calls operator by operator.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(mindspore.__file__).parent / "lib" / "libmindspore_backend_common.so"))
        tracker = library._ZN9mindspore19ExecuteOrderTracker11GetInstanceEv
        tracker.restype = ctypes.c_void_p
        self._write = library._ZN9mindspore19ExecuteOrderTracker5ClearEv
        self._write.argtypes = [ctypes.c_void_p]
        self._tracker = tracker

    def forget(self) -> None:
        """Clears the record."""
        mindspore.runtime.synchronize()
        self._write(self._tracker())
        for path in Path().glob("**/execute_order/*.csv"):
            path.unlink()

    def read(self) -> tuple[Counter[str], list[Collective]]:
        """Returns how often each operator was started since `forget`, and the collectives in their order."""
        mindspore.runtime.synchronize()
        self._write(self._tracker())
        kernels = (_NUMBER.sub("", row["node_name"].rpartition("/")[2]) for row in _rows("execute_order.csv"))
        return Counter(kernels), [_collective(row) for row in _rows("comm_execute_order.csv")]


def _rows(name: str) -> Iterator[dict[str, str]]:
    for path in Path().glob(f"**/execute_order/{name}"):
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


def _collective(row: Mapping[str, str]) -> Collective:
    side = "input"
    if row["primitive"] == "Receive":
        side = "output"
    ranks = tuple(map(int, row["comm_rank"].split()))
    name = _VARIANT.sub("", row["primitive"])
    return Collective(name, row[f"{side}_type"].lower(), int(row[f"{side}_size"]), ranks)
