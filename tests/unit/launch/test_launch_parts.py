"""The parts of the launcher that need no job: ports, processes, messages, logs, heartbeats, the folder of a job."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.errors import EXIT_HANG, RunError, UserError
from trainer.launch import heartbeat
from trainer.launch.arguments import LaunchOptions
from trainer.launch.job import (
    ProcessExit,
    decide_outcome,
    describe_exit_code,
    failure_lines,
    job_files,
    new_state,
    prepare_job_folder,
    read_job_state,
    shell_code,
    write_job_state,
)
from trainer.launch.msrun import listen_error, pick_free_port
from trainer.launch.pool import WorkerHandle, WorkerPool
from trainer.launch.processes import Identity, catches, identity, is_alive, send_signal, worker_cores
from trainer.launch.terminal import LogTail, PlainText, Screen, WorkerTerminal, last_lines, tail_file
from trainer.launch.wire import Channel, Lines, ListeningSocket

CHATTER = (
    b"[WARNING] DISTRIBUTED(28967,7f2bd89ebb80,python):2026-11-21-16:00:49.022.095 "
    b"[mindspore/ccsrc/cluster/topology/compute_graph_node.cc:201] Register] Failed to connect\n"
)

# ---- ports -----------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_not_free() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert listen_error("127.0.0.1", port) == listen_error("", port) == errno.EADDRINUSE
    assert listen_error("127.0.0.1", port) == 0
    assert listen_error("[::1]", port) == listen_error("::1", port)
    assert listen_error("192.0.2.1", pick_free_port()) == errno.EADDRNOTAVAIL  # an address for documentation


def test_picked_ports_are_free_and_differ() -> None:
    ports = {pick_free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 15 and all(not listen_error("", port) and 20_000 <= port for port in ports)


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.launch.msrun.listen_error", lambda host, port: errno.EADDRINUSE)
    with pytest.raises(RunError, match="no free port"):
        pick_free_port()


# ---- processes -------------------------------------------------------------------------------------------------------


def test_a_process_is_its_number_and_its_start() -> None:
    me = identity(os.getpid())
    assert me is not None and is_alive(me)
    assert not is_alive(Identity(me.pid, me.start + 1)) and not send_signal(Identity(me.pid, me.start + 1), 9)
    child = subprocess.Popen(["sleep", "60"])
    known = identity(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(known)  # dead, though not reaped
    child.wait()
    assert identity(child.pid) is None and not send_signal(known, signal.SIGTERM)


def test_whether_a_signal_has_a_handler() -> None:
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    try:
        assert catches(os.getpid(), signal.SIGALRM) and not catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not catches(2**22 + 1, signal.SIGINT)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 16])
def test_shares_of_cores_are_fair(count: int, workers: int) -> None:
    cores = [3 * core for core in range(count)]
    shares = [worker_cores(cores, place, workers) for place in range(workers)]
    used = [sum(core in share for share in shares) for core in cores]
    assert max(used) - min(used) <= (0 if workers <= count else 1)
    sizes = {len(share) for share in shares}
    assert max(sizes) - min(sizes) <= 1 and min(sizes) == max(1, count // workers)


# ---- messages --------------------------------------------------------------------------------------------------------


def test_messages_arrive_whole_whatever_the_pieces() -> None:
    left, right = socket.socketpair()
    channel = Channel(right)
    assert channel.receive() == []
    left.sendall(b'{"a": "\\udc')
    assert channel.receive() == []
    left.sendall(b'ff"}\nnonsense\n[1]\n{"b": 2}\n')
    assert channel.receive() == [{"a": "\udcff"}, {"b": 2}]
    left.close()
    assert channel.receive() == [] and channel.closed
    channel.send({"c": 3})  # to nobody


def test_a_line_without_end_closes_the_channel() -> None:
    left, right = socket.socketpair()
    channel = Lines(right, max_line_bytes=1 << 16)
    for _ in range(65):
        assert not channel.closed
        left.send(b"x" * 1024)
        assert channel.receive_lines() == []
    assert channel.closed


def test_who_does_not_read_counts_as_gone() -> None:
    left, right = socket.socketpair()
    channel = Channel(left)
    for _ in range(100_000):
        channel.send({"text": "x" * 1000})
        if channel.closed:
            break
    assert channel.closed
    right.close()


# ---- the workers as the launcher sees them ---------------------------------------------------------------------------


def pool_of(tmp_path: Path, ranks: int) -> tuple[WorkerPool, list[Channel]]:
    """Returns a pool whose agents are the other ends of the channels; nothing runs."""
    listener = ListeningSocket(socket.create_server(("127.0.0.1", 0)))
    pool = WorkerPool({rank: WorkerHandle(rank) for rank in range(ranks)}, WorkerHandle(None), listener, {}, tmp_path)
    agents = []
    for worker in pool.workers.values():
        left, right = socket.socketpair()
        worker.channel = Channel(left)
        agents.append(Channel(right))
    return pool, agents


def test_an_agent_that_was_killed_died_before_anybody_could_tell_of_it(tmp_path: Path) -> None:
    """Rank 0 announces its failure, a consequence, before the launcher looks at the connection of rank 1's agent."""
    pool, agents = pool_of(tmp_path, 2)
    pool.poll()
    agents[1].close()
    heartbeat.announcement_file(tmp_path, 0, "failed").write_text(json.dumps([1, time.monotonic()]))
    agents[0].send({"ended": 1, "at_seconds": time.monotonic()})
    pool.poll()
    outcome = decide_outcome([worker.end for worker in pool.workers.values()], None)
    assert (outcome.first.rank, outcome.exit_code) == (1, 137)
    pool.listener.close()


def test_a_sign_of_the_start_is_none_of_a_step(tmp_path: Path) -> None:
    """So the limit for the start goes on while text is tokenized; afterwards that between steps counts."""
    pool, _ = pool_of(tmp_path, 2)
    for worker in pool.workers.values():
        worker.process = Identity(os.getpid(), 0)
    found = []
    for rank, text in ((0, None), (1, "-"), (1, "-"), (0, "7"), (1, "-")):
        if text is not None:
            heartbeat.beat_file(tmp_path, rank).write_text(f"{text:<20}\n")
        found.append((pool.read_files(), pool.stepped))
        time.sleep(0.01)
    assert found == [(False, False), (True, False), (True, False), (True, True), (True, True)]
    assert not pool.read_files()
    pool.listener.close()


def test_what_not_even_sigkill_ends_is_left_behind(tmp_path: Path) -> None:
    pool, agents = pool_of(tmp_path, 2)
    agents[0].send({"ended": 0, "at_seconds": time.monotonic()})
    pool.poll()
    assert not pool.has_ended
    pool.ending_since = time.monotonic()
    pool.give_up()
    assert pool.has_ended and pool.workers[1].end.by_launcher
    assert "does not react to SIGKILL" in pool.workers[1].end.why and pool.workers[0].end.exit_code == 0
    pool.listener.close()


# ---- logs ------------------------------------------------------------------------------------------------------------


def test_a_log_is_followed_without_chatter(tmp_path: Path) -> None:
    log, terminal = tmp_path / "rank-0.log", io.BytesIO()
    follower = LogTail(tail_file(log), terminal)
    shown = b""
    for piece in (b"", b"one\n" + CHATTER[:30], CHATTER[30:] + b"tw", b"o\n[0/3]", b" x\n\rstep 1", b"\rstep 2\n"):
        with log.open("ab") as file:
            file.write(piece)
        shown += follower.new_text()
    assert shown == b"one\ntwo\n[0/3] x\n\rstep 1\rstep 2\n"
    follower.copy(shown)
    assert terminal.getvalue() == shown


def test_following_ends_quietly_when_nobody_reads(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    follower = LogTail(tail_file(tmp_path / "absent"), os.fdopen(writer, "wb", buffering=0))
    assert follower.new_text() == b""
    follower.copy(b"x")
    assert follower.broken
    follower.copy(b"y")


def test_all_output_is_shown_at_the_end_of_a_worker(tmp_path: Path, capsysbinary) -> None:
    log, terminal = tmp_path / "rank-0.log", io.BytesIO()
    text = 30_000 * (99 * b"x" + b"\n") + b"[last] without an end"
    log.write_bytes(text)
    screen = Screen(LogTail(tail_file(log), terminal))
    screen.update(1, 1, 0.0, quiet=True)
    screen.close()
    assert terminal.getvalue() == text and capsysbinary.readouterr() == (b"", b"")


def test_a_worker_that_prints_without_end_leaves_its_agent_time(tmp_path: Path, monkeypatch) -> None:
    log = (tmp_path / "rank-0.log").open("ab", buffering=0)
    terminal = WorkerTerminal(log, str(tmp_path / "absent"), (80, 24))
    reads = iter(10_000 * [b"more\n"])
    monkeypatch.setattr(os, "read", lambda descriptor, size: next(reads))
    assert terminal.pump()
    monkeypatch.undo()
    os.close(terminal.slave)
    terminal.close()


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
def test_what_a_terminal_shows_in_the_end(piece: int) -> None:
    drawn = (
        b"\x1b]0;title\x07\x1b[1mbold\x1b(B\x1b[m text\r\n"
        b"\x1b[01m\x1b[Ka.c:\x1b[m\x1b[K error\x1b[0K\r\nold\x1b[1Knew\n"
        b"\x1b[?25l\r\x1b[2Kstep 1\r\x1b[2Kstep 2\r\x1b[2Knote: \xc3\xbc\r\n\r\x1b[2Kstep 3\r\x1b[2Kstep 4\x1b[?25h"
    )
    plain, text = PlainText(), b""
    for begin in range(0, len(drawn), piece):
        text += plain.feed(drawn[begin : begin + piece])
    assert text + plain.flush() == "bold text\na.c: error\nnew\nnote: ü\nstep 4\n".encode()
    assert plain.flush() == b""


def test_last_lines_are_the_telling_ones(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"first\n\nstep 1\rstep 2\r\nValueError: \xff\n" + 50 * CHATTER)
    assert last_lines(log) == ["first", "step 2", "ValueError: \ufffd"]
    assert last_lines(log, 1) == ["ValueError: \ufffd"]
    assert last_lines(tmp_path / "absent") == []
    log.write_bytes(3 * CHATTER)
    assert last_lines(log, 2) == []


# ---- outcomes --------------------------------------------------------------------------------------------------------


def test_exit_codes_in_words() -> None:
    assert (shell_code(-9), shell_code(7)) == (137, 7)
    assert describe_exit_code(137) == "ended by SIGKILL"
    assert describe_exit_code(7) == "exit code 7"
    assert describe_exit_code(255) == "exit code 255"


def test_the_first_failure_is_the_outcome() -> None:
    by_launcher = ProcessExit(2, 143, 2.5, by_launcher=True)
    ends = [ProcessExit(0, 1, 3.0), ProcessExit(1, 7, 2.0), by_launcher, ProcessExit(3, 0, 1.0)]
    outcome = decide_outcome(ends, None)
    assert outcome.exit_code == 7 and outcome.first is ends[1] and outcome.others == [ends[2], ends[0]]
    text = "\n".join(failure_lines(outcome, None, 12))
    assert "rank 1 failed first: exit code 7, 12 s after" in text
    assert "rank 0 (exit code 1), rank 2 (ended by SIGTERM)" in text
    assert "signal" not in text
    by_others = "\n".join(failure_lines(decide_outcome([ProcessExit(0, 143, 3.0)], None), None, 12))
    assert "No launcher sent that signal" in by_others


@pytest.mark.parametrize(
    ("said", "whose"),
    [
        ("The total number of timed out node is 2. Timed out node list is: [const vector]{0, 1}, worker 0 is the first"
         " one timed out, please check its log.\n- C++ Call Stack: (For framework developers)", " of rank 0 and 1"),
        ("RuntimeError: The state of the cluster is error, total nodes num: 2, abnormal nodes num: 2", ""),
    ],
)  # fmt: skip
def test_a_heartbeat_that_mindspore_missed_is_told_in_plain_words(tmp_path: Path, said: str, whose: str) -> None:
    log = tmp_path / "scheduler.log"
    log.write_text(f"{said}\nmindspore/ccsrc/cluster/topology/meta_server_node.cc:554 UpdateTopoState\n")
    lines = failure_lines(decide_outcome([ProcessExit(None, 1, 3.0)], None), log, 135)
    assert lines[:2] == ["error: the scheduler failed first: exit code 1, 135 s after the start.", f"  Log: {log}"]
    assert lines[2].startswith(f"  MindSpore's scheduler got no heartbeat{whose} in time: the machine was suspended")
    assert lines[3].startswith("  Fix: continue with --resume_training.") and len(lines) == 4


@pytest.mark.parametrize(
    ("codes", "stopped_by", "hang", "expected"),
    [
        ([0, 0], None, "", 0),
        ([143, 143], 15, "", 143),
        ([130, 0], 2, "", 130),
        ([0, 0], 15, "", 0),  # they were done when the signal came
        ([143, 1], 15, "", 1),  # one failed to save
        ([], 15, "", 143),  # before any started
        ([137, 137], None, "no step was finished for 600 s", EXIT_HANG),
    ],
)
def test_exit_codes_of_jobs(codes: list[int], stopped_by: int | None, hang: str, expected: int) -> None:
    ends = [ProcessExit(rank, code, float(rank)) for rank, code in enumerate(codes)]
    assert decide_outcome(ends, stopped_by, hang).exit_code == expected


def test_what_the_launcher_ended_did_not_fail_first() -> None:
    ends = [ProcessExit(0, 137, 1.0, by_launcher=True), ProcessExit(1, 137, 2.0, by_launcher=True)]
    assert decide_outcome(ends, 2).exit_code == 130
    outcome = decide_outcome(ends, None)
    assert (outcome.exit_code, outcome.first) == (1, None)


# ---- the folder of a job ---------------------------------------------------------------------------------------------


def test_files_of_earlier_jobs_get_one_number(tmp_path: Path) -> None:
    files = job_files(tmp_path, 0, 1)
    for name in ("rank-0.log", "rank-5.log", "rank-1.4.log", "other.log", "job.2"):
        (tmp_path / name).touch()
    files.folder.mkdir()
    prepare_job_folder(files, range(2), is_single_node=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["job", "job.2", "job.5", "other.log", "rank-0.5.log", "rank-1.4.log", "rank-5.5.log"]


def test_nodes_that_share_a_folder_leave_each_others_files(tmp_path: Path) -> None:
    first, second = job_files(tmp_path, 0, 2), job_files(tmp_path, 1, 2)
    prepare_job_folder(first, range(0, 2), is_single_node=False)
    first.log(1).touch()
    second.log(2).touch()
    prepare_job_folder(second, range(2, 4), is_single_node=False)
    assert {path.name for path in tmp_path.iterdir()} == {"job-node-0", "job-node-1", "rank-1.log", "rank-2.1.log"}


def test_state_is_written_and_read(tmp_path: Path) -> None:
    files = job_files(tmp_path, 0, 1)
    assert read_job_state(files.folder) is None
    prepare_job_folder(files, range(2), is_single_node=True)
    state = new_state(LaunchOptions(2, 2), files)
    write_job_state(files, state)
    assert read_job_state(files.folder) == state
    heartbeat.beat_file(files.folder, 1).write_text("12   \n")
    assert read_job_state(files.folder).workers[1].step == 12
    with pytest.raises(UserError, match=f"a job is running with this folder .*{os.getpid()}"):
        prepare_job_folder(files, range(2), is_single_node=True)
    written = (files.folder / "state.json").read_text()
    whole = json.loads(written)
    for name, value in (("launcher", ["x", 1]), ("launcher", [1]), ("workers", [[]]), ("workers", 1), ("began", "now")):
        (files.folder / "state.json").write_text(json.dumps({**whole, name: value}))
        assert read_job_state(files.folder) is None, name
    for text in ("{", "[1]", "", "[" * 100_000, '{"workers":' * 10_000, "1e999"):
        (files.folder / "state.json").write_text(text)
        assert read_job_state(files.folder) is None, text[:10]
    for pid in (-1, 0, 2**40, 2**70):
        (files.folder / "state.json").write_text(json.dumps({**whole, "launcher": [pid, 1.0]}))
        found = read_job_state(files.folder)
        assert found is None or not is_alive(found.launcher), pid


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        prepare_job_folder(job_files(tmp_path / "file" / "logs", 0, 1), range(2), is_single_node=True)


def test_descendants_whose_parent_ends_during_the_look_are_killed_too():
    """psutil then misses them for once: an empty list is not the end while the system knows of a child."""
    program = """
import subprocess, sys
from unittest import mock
import psutil
from trainer.launch.processes import adopt_orphans, end_children

adopt_orphans()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
real, looks = psutil.Process.children, []

def children(process, recursive=False):
    looks.append(recursive)
    return [] if len(looks) == 1 else real(process, recursive=recursive)

with mock.patch.object(psutil.Process, "children", children):
    end_children()
sys.exit(0 if len(looks) > 1 and not psutil.pid_exists(child.pid) else 1)
"""
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=False).returncode == 0


# ---- heartbeats ------------------------------------------------------------------------------------------------------

_WORKER = """
import os, signal, sys, time
from trainer.launch import heartbeat
heartbeat.start()
heartbeat.beat(7)
if len(sys.argv) > 1:
    heartbeat.announce_failure(3)
    os.kill(os.getpid(), signal.SIGUSR1)
"""


def run_worker(*words: str, **environment: str) -> subprocess.CompletedProcess:
    root = str(Path(__file__).resolve().parents[3])
    return subprocess.run(
        [sys.executable, "-c", _WORKER, *words],
        env={"PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_worker_of_a_job_tells_what_it_does(tmp_path: Path) -> None:
    before = time.monotonic()
    done = run_worker("fail", RUN_TRAINER_JOB=str(tmp_path), RANK_ID="3")
    assert done.returncode == 0 and "most recent call first" in done.stderr
    assert heartbeat.beat_file(tmp_path, 3).read_text().strip() == "7"
    failure = heartbeat.read_announcement(tmp_path, 3, "failed")
    assert failure.number == 3 and before < failure.at_seconds < time.monotonic()


def test_outside_a_job_nothing_happens(tmp_path: Path) -> None:
    assert run_worker().returncode == 0
    assert run_worker("fail").returncode == -signal.SIGUSR1  # nothing was registered
    done = run_worker(RUN_TRAINER_JOB=str(tmp_path / "absent"))  # a folder that is gone does not end a run
    assert done.returncode == 0 and not done.stderr


def test_an_announcement_imports_nothing(tmp_path: Path) -> None:
    """A signal handler announces: it may interrupt any import, and its own import of the same module would fail."""
    program = (
        "import signal, sys\n"
        "from trainer.launch import heartbeat\n"
        "before = set(sys.modules)\n"
        "heartbeat.announce_signal(signal.SIGTERM)\n"
        "print(sorted(set(sys.modules) - before))"
    )
    environment = os.environ | {heartbeat.JOB_VARIABLE: str(tmp_path)}
    command = [sys.executable, "-c", program]
    folder = Path(__file__).parents[3]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert [path.name for path in tmp_path.iterdir()]
