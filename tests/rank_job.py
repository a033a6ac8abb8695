"""Runs a function on N ranks that are forked processes, which meet in a folder: no msrun.

    results = on_rank_processes(4, "layout_cases:losses", {"tensor": 2})

calls ``losses(group, {"tensor": 2})`` of the module layout_cases on each of 4 processes with the group of all of them.
Together they cost about a second, where msrun alone takes five. An error of one rank is the test's, with its log.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fork_server import FORKED, ensure_server

TESTS = Path(__file__).resolve().parent
_LIMIT_SECONDS = 240


class RankEnd(NamedTuple):
    """How a rank ended: its exit code, what it wrote, and its result, None after a failure."""

    code: int
    log: str
    result: Any


def on_rank_processes(ranks: int, function: str, *arguments: Any, limit_seconds: float = _LIMIT_SECONDS) -> list[Any]:
    """Returns the results of all ranks, in order; for the arguments see `run_ranks`.

    Raises:
        AssertionError: A rank failed or took too long; the message has what each rank wrote.
    """
    ends = run_ranks(ranks, function, *arguments, limit_seconds=limit_seconds)
    written = "\n".join(f"--- rank {rank}\n{end.log[-6000:]}" for rank, end in enumerate(ends))
    codes = [end.code for end in ends]
    assert codes == [0] * ranks, f"exit codes {codes}\n{written}"
    return [end.result for end in ends]


def run_ranks(ranks: int, function: str, *arguments: Any, limit_seconds: float = _LIMIT_SECONDS) -> list[RankEnd]:
    """Runs a function on ranks and returns how each ended, in order.

    Args:
        function: "module:function", of a module beside the calling test or in tests/; it gets the group of all ranks
            (`trainer.parallel.host_group.CpuGroup`) and the arguments, which JSON can hold. Its result is pickled.
    """
    ensure_server()
    paths = [str(TESTS.parent), *dict.fromkeys(path for path in sys.path if path.startswith(str(TESTS)))]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        files = [Path(folder) / f"rank-{rank}" for rank in range(ranks)]
        processes = []
        for rank, file in enumerate(files):
            given = json.dumps([rank, ranks, str(folder), function, arguments])
            with open(f"{file}.log", "wb") as log:
                command = [sys.executable, str(FORKED), __file__, given]
                environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "DEVICE_ID": str(rank)}
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        deadline = time.monotonic() + limit_seconds
        codes = [_end(process, deadline) for process in processes]
        logs = [Path(f"{file}.log").read_text() for file in files]
        results = [pickle.loads(file.read_bytes()) if code == 0 else None
                   for code, file in zip(codes, files, strict=True)]  # fmt: skip
    return list(map(RankEnd, codes, logs, results))


def _end(process: subprocess.Popen, deadline: float) -> int:
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main(rank: int, ranks: int, folder: str, function: str, arguments: Sequence[Any]) -> None:
    from msrun_helpers import take_a_core

    take_a_core()
    assert "mindspore" in sys.modules, "the fork server is for processes that need not import it"
    import mindspore

    from trainer.device.threads import set_up_cpu_threads
    from trainer.parallel.connections import Rendezvous, connect
    from trainer.parallel.host_group import CpuGroup

    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    mindspore.set_device("CPU")
    set_up_cpu_threads()
    with contextlib.closing(Rendezvous(rank, ranks, f"{folder}/rendezvous", 60)) as rendezvous:
        connections = connect(rank, ranks, rendezvous.share, True, 60)
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(CpuGroup(connections, range(ranks)), *arguments)
    (Path(folder) / f"rank-{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
