"""Watches what a step does that MindSpore does not count: reads by the host, collectives."""

from __future__ import annotations

import contextlib
import csv
import importlib
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mindspore

from trainer.dryrun.process import Collective

_PACKAGE = Path(__file__).resolve().parents[1]
_OWN = str(_PACKAGE / "dryrun")
_READERS = ("asnumpy", "_item", "_tolist", "get_bytes")
"""The methods of a tensor through which Python reads it: all others call one of these."""
_PRIMITIVES = frozenset((
    "AllReduce", "AllGather", "ReduceScatter", "Broadcast", "AlltoAll", "AlltoAllV", "Send", "Receive", "Reduce",
    "Barrier", "NeighborExchange", "CollectiveScatter", "CollectiveGather",
))  # fmt: skip
_FUNCTION = re.compile(r"(?:dist|inner)_comm_(\w+?)(?:_into_tensor|_tensor|_single|_uneven)*_op")
"""The functions that MindSpore's functional collectives call, in a module of its own."""
_FUNCTIONS_IN = "mindspore.ops.function.comm_func"
_GRAPH_FILES = "rank_*/execute_order/comm_execute_order.csv"
"""Where MindSpore writes the collectives of each graph that it compiles, below the working directory."""


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
        if where := ours(frame.f_code.co_filename, frame.f_lineno):
            return where
        frame = frame.f_back
    return "elsewhere"


def ours(file: str, line: int) -> str:
    if not file.startswith(str(_PACKAGE)) or file.startswith(_OWN):
        return ""
    return f"{Path(file).relative_to(_PACKAGE.parent)}:{line}"


@contextlib.contextmanager
def collectives_called() -> Iterator[list[Collective]]:
    """Fills the yielded list with the collectives that Python calls; those within graphs are in `graph_collectives`."""
    found: list[Collective] = []
    functions, primitives = importlib.import_module(_FUNCTIONS_IN), importlib.import_module("mindspore.ops.primitive")
    kept = {name: function for name, function in vars(functions).items() if _FUNCTION.fullmatch(name)}
    run_operator = primitives._run_op

    def noted(name: str, function: Callable) -> Callable:
        def call(*args: Any, **more: Any) -> Any:
            # Of two tensors the first one takes the result.
            given = [each for each in args if isinstance(each, mindspore.Tensor)]
            found.append(_collective(name, given[-1:]))
            return function(*args, **more)

        return call

    def run(primitive: Any, name: str, args: tuple[Any, ...]) -> Any:
        if name in _PRIMITIVES:
            given = args[0] if args and isinstance(args[0], (tuple, list)) else args
            found.append(_collective(name, [each for each in given if isinstance(each, mindspore.Tensor)]))
        return run_operator(primitive, name, args)

    for name, function in kept.items():
        words = _FUNCTION.fullmatch(name)[1].split("_")
        setattr(functions, name, noted("".join(word.capitalize() for word in words), function))
    primitives._run_op = run
    try:
        yield found
    finally:
        primitives._run_op = run_operator
        for name, function in kept.items():
            setattr(functions, name, function)


def _collective(name: str, given: list[mindspore.Tensor]) -> Collective:
    dtype = str(given[0].dtype).lower() if given else ""
    return Collective(name, dtype, sum(tensor.size * tensor.itemsize for tensor in given))


def graph_collectives() -> list[Collective]:
    """The collectives of all graphs that this process has compiled, in the order of their execution."""
    rows = (row for path in sorted(Path().glob(_GRAPH_FILES)) for row in csv.DictReader(path.open()))
    sizes = ((row, "output" if row["primitive"] == "Receive" else "input") for row in rows)
    return [Collective(row["primitive"], row[f"{end}_type"].lower(), int(row[f"{end}_size"])) for row, end in sizes]
