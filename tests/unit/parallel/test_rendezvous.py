"""The rendezvous of ranks, with threads as ranks: at a Unix socket and at a port."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest
from ports import free_port

from trainer.errors import RunError, UserError
from trainer.parallel.connections import Rendezvous
from trainer.parallel.world import RENDEZVOUS_VARIABLE, is_scheduler, longest_join_seconds, rendezvous_address

LIMIT_SECONDS = 20


@pytest.fixture(params=["socket", "port"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "port":
        return f"127.0.0.1:{free_port()}"
    return str(tmp_path / "rendezvous")


def meet(rank: int, ranks: int, address: str, rounds: int = 1, limit_seconds: float = LIMIT_SECONDS) -> list:
    """Returns what each share gives this rank."""
    with closing(Rendezvous(rank, ranks, address, limit_seconds)) as rendezvous:
        return [rendezvous.share(b"%d of %d" % (number, rank)) for number in range(rounds)]


def every(rounds: int, ranks: int) -> list[list[bytes]]:
    return [[b"%d of %d" % (number, rank) for rank in range(ranks)] for number in range(rounds)]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_rank_gets_the_bytes_of_all_in_order(address: str, ranks: int) -> None:
    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(lambda rank: meet(rank, ranks, address, rounds=3), range(ranks)))
    assert found == [every(3, ranks)] * ranks


def test_ranks_meet_again_at_the_same_address(address: str) -> None:
    """As in a process that trains twice: one rank may come back before rank 0 has left."""

    def twenty_times(rank: int) -> list:
        return [meet(rank, 3, address) for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(twenty_times, range(3))) == [[every(1, 3)] * 20] * 3


def test_others_that_connect_are_dropped(tmp_path: Path) -> None:
    address = str(tmp_path / "rendezvous")
    hello = struct.Struct("<16sII")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, 0, 2, address)
        for said in (b"GET / HTTP/1.1\r\nHost: ", hello.pack(b"run_trainer 9", 1, 2), b""):
            with reach(address) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                assert not stranger.recv(1)
        for wrong in (hello.pack(b"run_trainer 1", 0, 2), hello.pack(b"run_trainer 1", 1, 3)):
            with reach(address) as other:
                other.sendall(wrong)
                assert other.recv(1) == b"-"
        assert meet(1, 2, address) == first.result(LIMIT_SECONDS) == every(1, 2)


def reach(address: str) -> socket.socket:
    """Connects to a Unix socket that a thread is about to make."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(LIMIT_SECONDS)
            connection.connect(address)
            return connection
        except OSError:
            connection.close()


def test_a_second_process_of_a_rank_is_told(address: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(meet, 1, 3, address) for _ in range(2)]
        first = pool.submit(meet, 0, 3, address)
        (refused,), _ = wait(others, LIMIT_SECONDS, FIRST_COMPLETED)
        with pytest.raises(RunError, match="has another rank 1 already"):
            refused.result()
        assert meet(2, 3, address) == first.result(LIMIT_SECONDS) == every(1, 3)


def test_who_is_missing_is_named_after_the_time_limit(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.parallel.connections._NOTE_SECONDS", 0.0)
    ranks = 4
    with ThreadPoolExecutor(ranks) as pool:
        waiting = [pool.submit(meet, rank, ranks, address, limit_seconds=0.5) for rank in (0, 2)]
        with pytest.raises(RunError, match="waited 0.5 s for other ranks; these have not come: 1, 3"):
            waiting[0].result(LIMIT_SECONDS)
        with pytest.raises(RunError):
            waiting[1].result(LIMIT_SECONDS)


def test_rank_0_that_does_not_come_is_named_after_the_time_limit(address: str) -> None:
    with pytest.raises(RunError, match="rank 1 cannot join the 2 ranks of the job: no answer of rank 0 at"):
        meet(1, 2, address, limit_seconds=0.2)


def test_an_address_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(RunError, match=f"rank 0 cannot listen at 127.0.0.1:{port}, where"):
            meet(0, 2, f"127.0.0.1:{port}")


def test_a_rank_that_ends_while_they_join_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.parallel.connections._NOTE_SECONDS", 0.0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, 0, 2, address)
        Rendezvous(1, 2, address, LIMIT_SECONDS).close()
        with pytest.raises(RunError, match="rank 0 lost rank 1 while the ranks joined"):
            first.result(LIMIT_SECONDS)


def test_the_address_is_the_launchers_or_that_of_msruns_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RENDEZVOUS_VARIABLE, raising=False)
    monkeypatch.setenv("MS_SCHED_HOST", "10.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", "9000")
    assert rendezvous_address() == "10.0.0.1:9000"
    monkeypatch.setenv("MS_SCHED_PORT", "any")
    with pytest.raises(UserError, match="MS_SCHED_PORT"):
        rendezvous_address()
    monkeypatch.setenv(RENDEZVOUS_VARIABLE, "/tmp/folder/rendezvous")
    assert rendezvous_address() == "/tmp/folder/rendezvous"


def test_what_msrun_says_about_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_TOPO_TIMEOUT", raising=False)
    assert longest_join_seconds() == 1800
    monkeypatch.setenv("MS_TOPO_TIMEOUT", "7200")
    assert longest_join_seconds() == 7200
    monkeypatch.setenv("MS_TOPO_TIMEOUT", "soon")
    with pytest.raises(UserError, match="must be an integer"):
        longest_join_seconds()
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    assert not is_scheduler()
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    assert is_scheduler()
