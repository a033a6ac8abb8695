"""Two launchers that are two nodes of one job, both on this host, with workers that stand in for the real ones."""

from __future__ import annotations

import contextlib
import signal
import socket
import stat
import time
from pathlib import Path

import pytest
from launch_helpers import LIMIT_SECONDS, MSRUN, REPOSITORY, WORKER, Launcher, python_program
from ports import free_port

from trainer.errors import EXIT_BAD_INPUT, EXIT_HANG
from trainer.launch.control.messages import LOST_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.overlapping(5), pytest.mark.xdist_group(__name__)]

ALL = range(4)


def start_node(
    folder: Path, node: int, port: int, *words: object, workers: int = 4, forked: bool = True, **more: str
) -> Launcher:
    """Returns a launcher with msrun_launcher.sh's nine arguments; the nodes share the folder of logs."""
    own = folder / f"node-{node}"
    own.mkdir()
    order = " ".join([str(WORKER), *map(str, words)])
    numbers = [workers, 2, "127.0.0.1", port, node, folder / "logs", "True", 60]
    script = str(REPOSITORY / "scripts" / "msrun_launcher.sh")
    command = ["bash", script, order, *map(str, numbers)]
    environment = {"RUN_TRAINER_MSRUN": str(MSRUN), "PYTHON": python_program(forked), **more}
    return Launcher(own, command, environment)


def start_both(folder: Path, *words: object, forked: bool = True, **more: str) -> tuple[Launcher, Launcher]:
    port = free_port()
    first, second = (start_node(folder, node, port, *words, forked=forked, **more) for node in range(2))
    return first, second


def log(folder: Path, rank: int) -> str:
    path = folder / "logs" / f"rank-{rank}.log"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def wait_for_step(launcher: Launcher, folder: Path, step: int) -> None:
    launcher.wait_until(lambda: "all 2 nodes are connected" in launcher.errors)
    launcher.wait_until(lambda: all(f"did step {step}\n" in log(folder, rank) for rank in ALL))


def test_both_end_well_together(tmp_path: Path) -> None:
    first, second = start_both(tmp_path, 10, "0@10:exit=0", forked=False)
    assert [second.end(), first.end()] == [0, 0]
    assert [f"rank {rank} did step" in log(tmp_path, rank) for rank in ALL] == [True] * 4
    assert '"RANK_ID": "3"' in log(tmp_path, 3) and '"RUN_TRAINER_LOCAL_SIZE": "2"' in log(tmp_path, 3)
    assert {"job-node-0", "job-node-1"} <= {path.name for path in (tmp_path / "logs").iterdir()}


def test_a_failure_on_one_ends_both(tmp_path: Path) -> None:
    first, second = start_both(tmp_path, 1000, f"3@3:after={tmp_path}/all-run", "3@3:exit=7")
    wait_for_step(first, tmp_path, 2)
    (tmp_path / "all-run").touch()
    assert [first.end_soon(), second.end_soon()] == [7, 7]
    assert "rank 3 failed first: exit code 7" in first.errors and "something bad happened" in first.errors
    assert "The workers of this node ended because of that" in first.errors
    assert "Ended because of that: rank 2" in second.errors
    assert all("saved after SIGTERM" in log(tmp_path, rank) for rank in (0, 1, 2))


def test_both_start_again_together(tmp_path: Path) -> None:
    """The workers of node 1 end first, so it calls while node 0 still ends its own."""
    first, second = start_both(tmp_path, 6, "3@3:first=7", "0@1:slow=3", "--max_restarts=1")
    assert [first.end(), second.end()] == [0, 0]
    assert all("restart 1 of 1" in each.errors for each in (first, second))
    assert first.errors.count("the launchers of all 2 nodes are connected") == 2
    assert all(log(tmp_path, rank).endswith("did step 6\n") for rank in ALL)


def test_workers_of_nodes_with_different_secrets_never_start(tmp_path: Path) -> None:
    """Ranks would train together: what they meet through asks for no secret."""
    port = free_port()
    both = [
        start_node(tmp_path, node, port, 5, RUN_TRAINER_SECRET=str(node) * 16, RUN_TRAINER_TIME_SCALE="0.2")
        for node in range(2)
    ]
    both[0].wait_until(lambda: "without the secret of this job" in both[0].errors)
    both[1].wait_until(lambda: "does not accept this node's secret" in both[1].errors)
    for launcher in both:
        launcher.process.terminate()
        assert launcher.end() == 143
    assert not list((tmp_path / "logs").glob("rank-*.log"))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_lost_node_ends_the_other(tmp_path: Path, killed: int) -> None:
    both = start_both(tmp_path, 1000)
    wait_for_step(both[0], tmp_path, 2)
    both[killed].process.kill()
    both[killed].process.wait()
    began = time.monotonic()
    assert both[1 - killed].end() == 1
    both[killed].wait_until(lambda: not both[killed].family())
    assert time.monotonic() - began < LIMIT_SECONDS
    assert f"the connection to node {killed} is lost" in both[1 - killed].errors


def test_a_silent_node_counts_as_lost(tmp_path: Path) -> None:
    first, second = start_both(tmp_path, 1000, forked=False, RUN_TRAINER_TIME_SCALE="0.5")
    wait_for_step(first, tmp_path, 2)
    second.process.send_signal(signal.SIGSTOP)  # as when a cable is cut: no word, and no end either
    began = time.monotonic()
    try:
        assert first.end() == 1
    finally:
        second.process.send_signal(signal.SIGCONT)
    assert LOST_SECONDS / 2 - 1 < time.monotonic() - began < LIMIT_SECONDS
    assert second.end() == 1
    assert "the connection to node 1 is lost" in first.errors


@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_reaches_all_workers(tmp_path: Path, told: int) -> None:
    both = start_both(tmp_path, 1000)
    wait_for_step(both[0], tmp_path, 2)
    both[told].process.terminate()
    assert [launcher.end() for launcher in both] == [143, 143]
    assert f"SIGTERM, which node {told} received: the workers finish" in both[1 - told].errors
    assert all(log(tmp_path, rank).endswith("saved after SIGTERM\n") for rank in ALL)


def test_a_hang_shows_the_stacks_of_both(tmp_path: Path) -> None:
    hangs = [f"{rank}@3:hang" for rank in ALL]
    first, second = start_both(tmp_path, 1000, *hangs, "--hang_timeout=2", RUN_TRAINER_TIME_SCALE="0.5")
    assert [first.end(), second.end()] == [EXIT_HANG, EXIT_HANG]
    assert all("in wait_for_ever" in log(tmp_path, rank) for rank in ALL)


def test_nodes_that_do_not_fit_are_told(tmp_path: Path) -> None:
    port = free_port()
    first = start_node(tmp_path, 0, port, 1000)
    second = start_node(tmp_path, 1, port, 1000, workers=6)
    assert second.end() == EXIT_BAD_INPUT
    assert "node 0 rejected this node: worker_num is 6 there and 4 on node 0" in second.errors
    first.process.terminate()
    assert first.end() == 143


def test_a_stranger_on_the_control_port_does_no_harm(tmp_path: Path) -> None:
    """Neither before the other node calls nor in a running job. Nothing of the secret is left."""
    port, go_on = free_port(), tmp_path / "go-on"
    first = start_node(tmp_path, 0, port, 40, f"0@5:after={go_on}")
    first.wait_until(lambda: "launching" in first.errors)
    (secret,) = (tmp_path / "logs").glob(".*.secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    strange = (b"GET / HTTP/1.1\r\n\r\n[1]\n", b"[" * 200_000 + b"\n", b'{"node": 1, "worker_num": 4}\n{"stop": 9}\n')
    ask(port + 1, strange)
    second = start_node(tmp_path, 1, port, 40)
    wait_for_step(first, tmp_path, 2)
    ask(port + 1, strange)
    go_on.touch()
    assert [first.end(), second.end()] == [0, 0]
    assert first.errors.count("127.0.0.1 called the control port without the secret of this job") == 1
    assert not secret.exists()


def ask(port: int, lines: tuple[bytes, ...]) -> None:
    for line in lines:
        with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(OSError):
            stranger.sendall(line)
            while stranger.recv(1 << 10):
                pass


def test_a_control_port_in_use_is_bad_input(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as other:
        other.bind(("", port + 1))
        other.listen()
        first = start_node(tmp_path, 0, port, 5)
        assert first.end() == EXIT_BAD_INPUT
    assert "RUN_TRAINER_CONTROL_PORT" in first.errors and not (tmp_path / "logs" / "job-node-0").exists()
