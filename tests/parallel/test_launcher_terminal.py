"""A launcher on a terminal: what is waited for, the progress of rank 0 as it draws it, the launcher's own lines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from launch_helpers import MSRUN, PROGRAM

pytestmark = pytest.mark.slow

WORKER = """
import os, sys, time
rank, size = os.environ["RANK_ID"], os.get_terminal_size if sys.stdout.isatty() else None
time.sleep(0.5)
print(f"rank {rank}", size() if size else "no terminal", flush=True)
if rank == "0":
    deadline = time.monotonic() + 30
    while size().columns != 70 and time.monotonic() < deadline:
        print("\\r\\x1b[2Kstep", time.monotonic(), end="", flush=True)
        time.sleep(0.05)
    print(f"\\r\\x1b[2Know {size()}")
    print("\\x1b[?25l\\x1b[31mlast\\x1b[0m", end="")
"""


def set_size(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))


def test_rank_0_draws_its_progress(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    master, slave = pty.openpty()
    set_size(slave, 90)
    process = subprocess.Popen(
        [sys.executable, PROGRAM, "launch", "--nproc", "2", "--log_dir", "logs", "--script", "worker.py"],
        cwd=tmp_path,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "RUN_TRAINER_MSRUN": str(MSRUN)},
    )
    os.set_blocking(master, False)
    seen, told, deadline = b"", False, time.monotonic() + 60
    try:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                seen += os.read(master, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
            if seen.count(b"step") > 3 and not told:
                told = True
                set_size(slave, 70)
                process.send_signal(signal.SIGWINCH)  # as the terminal does for its foreground processes
    finally:
        process.kill()
    assert process.wait() == 0
    with contextlib.suppress(BlockingIOError):
        seen += os.read(master, 1 << 16)
    text = seen.decode()
    assert "\r\x1b[Kstarting the workers: 0 of 2 run" in text
    assert "2 workers load MindSpore and find each other" in text
    assert "rank 0 os.terminal_size(columns=90, lines=30)" in text and "now os.terminal_size(columns=70" in text
    assert text.count("\x1b[2Kstep") > 3 and "\x1b[31mlast" in text and "\r\r\n" not in text
    assert text.rstrip().endswith("\x1b[?25h")  # a worker that hid the cursor does not take it along
    assert "rank 1" not in text
    # The logs have what stayed on the screen.
    lines = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    sizes = [f"os.terminal_size(columns={columns}, lines=30)" for columns in (90, 70)]
    assert lines == [f"rank 0 {sizes[0]}", f"now {sizes[1]}", "last"]
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "rank 1 no terminal\n"
