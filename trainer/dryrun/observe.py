"""Watches what a step does: reads by the host, kernels and collectives in the order of execution."""

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

import mindspore

from trainer.dryrun.process import Collective

_PACKAGE = Path(__file__).resolve().parents[1]
_OWN = str(_PACKAGE / "dryrun")
_READERS = ("asnumpy", "_item", "_tolist", "get_bytes")
"""The methods of a tensor through which Python reads it: all others call one of these."""
_NUMBER = re.compile(r"-op\d+$")
_VARIANT = re.compile("^DistComm|^InnerComm|(IntoTensor|Tensor|Single)(Uneven)?$")
"""What MindSpore's names of functional collectives have beside the name of the collective."""


@contextlib.contextmanager
def host_reads() -> Iterator[dict[str, tuple[int, int]]]:
    """Fills the yielded dict: for each line of this project how often it reads a tensor, and how many bytes."""
    counts = Counter()
    sizes = Counter()
    found = {}
    inside = threading.local()  # a reader that calls another one reads once
    originals = {name: getattr(mindspore.Tensor, name) for name in _READERS}

    def counting(original: Callable) -> Callable:
        def read(tensor: mindspore.Tensor, *args, **more):
            if getattr(inside, "reader", False):
                return original(tensor, *args, **more)
            where = current_project_line()
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


def current_project_line() -> str:
    """The innermost line of this project, as trainer/step/clip.py:12, that the calling thread is at."""
    frame = sys._getframe(1)
    while frame is not None:
        if where := project_line(frame.f_code.co_filename, frame.f_lineno):
            return where
        frame = frame.f_back
    return "elsewhere"


def project_line(file: str, line: int) -> str:
    if not file.startswith(str(_PACKAGE)) or file.startswith(_OWN):
        return ""
    return f"{Path(file).relative_to(_PACKAGE.parent)}:{line}"


class ExecutionOrder:
    """What MindSpore notes of every kernel that it starts operator by operator or in a graph, up to now.

    It collects the order of execution in a dry run, and writes it below the working directory when it forgets it.
    Kernels of CANN's current library that Python calls operator by operator are not in it.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(str(Path(mindspore.__file__).parent / "lib" / "libmindspore_backend_common.so"))
        tracker = library._ZN9mindspore19ExecuteOrderTracker11GetInstanceEv
        tracker.restype = ctypes.c_void_p
        self._write = library._ZN9mindspore19ExecuteOrderTracker5ClearEv
        self._write.argtypes = [ctypes.c_void_p]
        self._tracker = tracker

    def forget(self) -> None:
        """Begins anew."""
        mindspore.runtime.synchronize()
        self._write(self._tracker())
        for path in Path().glob("**/execute_order/*.csv"):
            path.unlink()

    def read(self) -> tuple[Counter[str], list[Collective]]:
        """How often each operator was started since `forget`, and the collectives in their order."""
        mindspore.runtime.synchronize()
        self._write(self._tracker())
        kernels = (_NUMBER.sub("", row["node_name"].rpartition("/")[2]) for row in _rows("execute_order.csv"))
        return Counter(kernels), [_collective(row) for row in _rows("comm_execute_order.csv")]


def _rows(name: str) -> Iterator[dict[str, str]]:
    for path in Path().glob(f"**/execute_order/{name}"):
        with path.open(newline="") as file:
            yield from csv.DictReader(file)


def _collective(row: Mapping[str, str]) -> Collective:
    end = "input"
    if row["primitive"] == "Receive":
        end = "output"
    ranks = tuple(map(int, row["comm_rank"].split()))
    name = _VARIANT.sub("", row["primitive"])
    return Collective(name, row[f"{end}_type"].lower(), int(row[f"{end}_size"]), ranks)
