"""What the ranks of scripts/check_kills.py do: a run of theirs saves after each step, and is killed within a save."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import mindspore

from trainer.checkpoint import saver
from trainer.config import Override, load_config
from trainer.parallel.collectives import ProcessGroup
from trainer.run import session
from trainer.run.loop import run


class CallCount:
    """A profile function of Python: counts the beginnings and ends of calls, and does something at one of them."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.count = 0
        self.at = at
        self.act = act

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self.count += 1
        if self.count == self.at:
            self.act()


def trained(group: ProcessGroup, config: str, resume: bool, killer: int, at: int, killed: list[int]) -> int:
    """Trains as the command line does, with these ranks in the place of MindSpore's.

    Args:
        config: A YAML file. The ranks write their process ids beside it.
        killer: The rank that kills some ranks, itself among them.
        at: The beginning or end of a call in its saves at which it does so, from 1; 0: never.
        killed: The ranks that are killed.

    Returns:
        The beginnings and ends of calls in the saves of this rank.
    """
    path = Path(config)
    (path.parent / f"pid-{group.rank}").write_text(str(os.getpid()))
    if group.size > 1:
        os.environ |= {"MS_WORKER_NUM": str(group.size), "RANK_ID": str(group.rank)}

    def kill() -> None:
        for rank in [rank for rank in killed if rank != group.rank]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int((path.parent / f"pid-{rank}").read_text()), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    count = CallCount(at if group.rank == killer else 0, kill)
    save = saver._Thread.run

    def counted(thread: saver._Thread) -> None:
        sys.setprofile(count)
        try:
            save(thread)
        finally:
            sys.setprofile(None)

    ready = mock.patch.object(session, "set_up_device", lambda *_: mindspore.set_context(mode=mindspore.PYNATIVE_MODE))
    connected = mock.patch.object(session, "init_process_group", lambda _: group)
    with ready, connected, mock.patch.object(saver._Thread, "run", counted):
        flags = [Override("resume_training", "True", "flag --resume_training")] if resume else []
        assert run(load_config(config, flags)) == 0
    return count.count
