"""The control port: launchers of several nodes talk over real sockets within this process."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ports import free_port
from pydantic import ValidationError

from trainer.errors import RunError, UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.command import worker_specs
from trainer.launch.control.messages import NodeMessage, SignedChannel, failure_message
from trainer.launch.control.nodes import NodeClient, NodeServer, connect_nodes, network_of
from trainer.launch.control.secret import make_secret, read_secret
from trainer.launch.job import job_files
from trainer.launch.terminal import printable

SECRET = "a secret for tests alone"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_TRAINER_SECRET", SECRET)
    monkeypatch.setattr("trainer.launch.control.nodes._GOODBYE_SECONDS", 0.01)  # both ends are in this thread


@pytest.fixture
def options() -> LaunchOptions:
    """Returns the options of node 0 of two."""
    return LaunchOptions(worker_num=4, local_worker_num=2, master_port=free_port())


@pytest.fixture
def hub(options: LaunchOptions, tmp_path: Path) -> Iterator[NodeServer]:
    made = connect_nodes(options, tmp_path)
    yield made
    made.close()


def spoke(options: LaunchOptions, folder: Path, attempt: int = 0) -> NodeClient:
    return connect_nodes(replace(options, node_rank=1), folder, attempt)


def talk(*nodes: NodeServer | NodeClient, until: str, now: float | None = None) -> list[NodeMessage]:
    """Polls the nodes until one of them says `until`; all events."""
    events: list[NodeMessage] = []
    deadline = time.monotonic() + 20
    while not any(until in line for event in events for line in (*event.lines, event.kind)):
        assert time.monotonic() < deadline, events
        for node in nodes:
            events += node.poll(time.monotonic() if now is None else now)
        time.sleep(0.002)
    return events


def test_nodes_that_know_the_secret_understand_each_other(
    hub: NodeServer, options: LaunchOptions, tmp_path: Path
) -> None:
    other = spoke(options, tmp_path)
    talk(hub, other, until="connected to the launcher of node 0")
    assert hub.connected
    while not other.connected:
        talk(other, until="the launchers of all 2 nodes are connected")
    other.send(NodeMessage(kind="stop", number=signal.SIGINT, node=1))
    (event,) = (event for event in talk(hub, until="stop") if event.kind == "stop")
    assert (event.number, event.node) == (signal.SIGINT, 1)
    hub.send(failure_message(7, ["\x1b[31mred\x1b[0m\x07 \u202eturned\x9b1m\ttab\r\n", "x" * 5000, *["more"] * 200]))
    (event,) = (event for event in talk(other, until="failed") if event.kind == "failed")
    assert event.number == 7 and event.lines[0] == "red turned1m tab  " and event.lines[1] == "x" * 2000
    assert len(event.lines) == 100
    other.send(failure_message(8, ["a consequence"]))
    other.send(NodeMessage(kind="stop", number=signal.SIGTERM, node=1))
    assert "failed" not in [event.kind for event in talk(hub, until="stop")]
    other.close()


def test_workers_start_once_all_nodes_are_connected(options: LaunchOptions, tmp_path: Path) -> None:
    three = replace(options, worker_num=6)
    hub, one, two = (connect_nodes(replace(three, node_rank=node), tmp_path) for node in range(3))
    talk(hub, one, until="connected to the launcher of node 0")
    hub.began -= 60
    (note,) = talk(hub, until="waiting for")
    assert note.lines == ["waiting for the launcher of node 2; the workers start once all are there"]
    assert not one.poll(time.monotonic()) and not hub.connected and not one.connected
    talk(hub, two, until="all 3 nodes are connected")
    for spoke in (one, two):
        while not spoke.connected:
            spoke.poll(time.monotonic())
    assert hub.connected
    later = time.monotonic() + 2
    one.report_progress()  # a rank of node 1 gets on, while those of node 2 wait for it
    for sender, receiver in ((one, hub), (hub, two)):
        sender.poll(later)
        assert talk(receiver, until="moved", now=later)[-1].kind == "moved"
    assert not any(event.kind == "moved" for node in (hub, two) for event in node.poll(later + 2))
    for each in (one, two, hub):
        each.close()


def test_it_listens_where_master_addr_points_and_nowhere_else(hub: NodeServer, options: LaunchOptions) -> None:
    (listening,) = hub.sources
    assert listening.getsockname() == ("127.0.0.1", options.master_port + 1)
    with pytest.raises(OSError):  # the other addresses of this machine are free
        socket.create_connection(("127.0.0.2", options.master_port + 1), 1)


def test_a_name_that_other_machines_cannot_reach_is_told(options: LaunchOptions, tmp_path: Path) -> None:
    named = connect_nodes(replace(options, master_addr="localhost", master_port=free_port()), tmp_path)
    assert "note: localhost is" in talk(named, until="which other machines cannot reach")[0].lines[0]
    named.close()


def test_a_node_that_starts_again_waits_for_node_0_to_do_so(
    hub: NodeServer, options: LaunchOptions, tmp_path: Path
) -> None:
    other = spoke(options, tmp_path)
    talk(hub, other, until="connected to the launcher of node 0")
    other.send(failure_message(7, ["rank 3 failed"]))
    talk(hub, until="failed")
    other.close()
    again = spoke(options, tmp_path, attempt=1)  # while the workers of node 0 still save
    again.began -= 60
    (note,) = talk(hub, again, until="waiting for node 0")
    assert "has not ended its own workers of the start before yet" in note.lines[0]
    hub.close()
    hub_again = connect_nodes(options, tmp_path, attempt=1, resume="step-00000005")
    events = talk(hub_again, again, until="connected to the launcher of node 0")
    assert again.resume == "step-00000005" and {event.kind for event in events} == {"note"}
    late = spoke(options, tmp_path)
    assert "has started the job again 0 times, and node 0 1 times" in talk(hub_again, late, until="failed")[-1].lines[0]
    for each in (late, again, hub_again):
        each.close()


def heard(hub: NodeServer, data: bytes, now: float) -> bytes:
    """Returns the answer to a stranger that sends this."""
    with socket.create_connection(("127.0.0.1", hub.options.master_port + 1)) as stranger:
        stranger.setblocking(False)
        answer, deadline = b"", time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                data = data[stranger.send(data[: 1 << 14]) :] if data else data
                answer += (received := stranger.recv(1 << 12))
                if not received:
                    return answer
            except BlockingIOError:
                pass
            except ConnectionError:
                return answer
            EVENTS.extend(hub.poll(now))
        raise AssertionError("it was not dropped")


EVENTS: list[NodeMessage] = []
HELLO = b"run_trainer-4 " + b"0" * 32 + b"\n"
FORGED = b"0" * 64 + b' {"kind":"hello","node":1,"worker_num":4,"attempt":0}\n'


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000 + b"\n",
        b"x" * 3_000_000,
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"node": 1, "worker_num": 4}\n{"failed": 0, "lines": []}\n{"stop": 9}\n',
        HELLO + FORGED,
        HELLO + FORGED[65:],
        HELLO + b"\n" * 1000,
        HELLO * 2,
        b"\xff\x00\n",
    ],
    ids=["brackets", "one long line", "a browser", "messages of old", "forged", "unsigned", "empty", "twice", "bytes"],
)
def test_a_stranger_is_dropped_and_named_once(
    hub: NodeServer, options: LaunchOptions, tmp_path: Path, data: bytes
) -> None:
    EVENTS.clear()
    for _ in range(3):
        answer = heard(hub, data, time.monotonic())
        assert answer == b"" or (answer.startswith(b"run_trainer-4 ") and answer.count(b"\n") == 1), "it learns nothing"
    while not EVENTS:
        EVENTS.extend(hub.poll(time.monotonic()))
    assert [event.kind for event in EVENTS] == ["note"] and "127.0.0.1 called the control port" in EVENTS[0].lines[0]
    other = spoke(options, tmp_path)
    talk(hub, other, until="connected to the launcher of node 0")
    other.close()


def test_who_says_nothing_is_dropped_after_some_seconds(hub: NodeServer) -> None:
    EVENTS.clear()
    now = time.monotonic()
    with socket.create_connection(("127.0.0.1", hub.options.master_port + 1)) as silent:
        while len(hub.sources) < 2:
            hub.poll(now)
        assert not hub.poll(now + 4) and hub.poll(now + 6)
        assert silent.recv(1 << 10).startswith(b"run_trainer-4 ") and not silent.recv(1 << 10)


def test_of_very_many_callers_the_last_are_kept(hub: NodeServer, options: LaunchOptions, tmp_path: Path) -> None:
    callers = [socket.create_connection(("127.0.0.1", hub.options.master_port + 1)) for _ in range(150)]
    other = spoke(options, tmp_path)
    talk(hub, other, until="connected to the launcher of node 0")
    assert len(hub.sources) < 70
    for each in callers:
        each.close()
    other.close()


def test_a_flood_from_one_address_keeps_no_other_one_out(hub: NodeServer, options: LaunchOptions) -> None:
    """A node's first words may take a while. Those who flood even send a nonce, as a node does."""
    port = options.master_port + 1
    callers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    slow = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
    callers += [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for each in callers:
        each.sendall(HELLO)
    for _ in range(8):
        hub.poll(time.monotonic())
    assert len(hub.sources) == 65
    channel = SignedChannel(slow, SECRET.encode(), called=False)
    channel.send(NodeMessage(kind="hello", node=1, worker_num=4))
    while not hub.connected:
        assert not channel.closed
        hub.poll(time.monotonic())
        channel.receive()
    for each in callers:
        each.close()
    channel.close()


def test_networks_of_callers() -> None:
    addresses = ("10.0.0.1", "fe80::1:2%eth0", "2001:db8::1", "2001:db8::2")
    assert [network_of(address) for address in addresses] == ["10.0.0.1", "fe80::/64", "2001:db8::/64", "2001:db8::/64"]


def test_a_lack_of_file_descriptors_is_no_failure(hub: NodeServer, options: LaunchOptions, tmp_path: Path) -> None:
    callers = [socket.create_connection(("127.0.0.1", options.master_port + 1)) for _ in range(40)]
    other = spoke(options, tmp_path)
    other.poll(time.monotonic())
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, before[1]))
    try:
        assert not [event for event in hub.poll(time.monotonic()) if event.kind == "failed"]
        assert hub.listening.starved and not hub.listening.sources, "it would not wait for them"
        os.close(os.dup(0))  # the launcher has some left for itself
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    talk(hub, other, until="connected to the launcher of node 0")
    for each in (*callers, other):
        each.close()


def test_what_was_said_once_cannot_be_said_again(hub: NodeServer, options: LaunchOptions, tmp_path: Path) -> None:
    """All that a node sent, recorded on its way, is worth nothing on another connection, nor on its own."""
    recorded = b""
    with socket.create_server(("127.0.0.1", 0)) as between:
        other = spoke(options, tmp_path)
        other.address = between.getsockname()
        other.poll(time.monotonic())
        left, _ = between.accept()
    with left, socket.create_connection(("127.0.0.1", options.master_port + 1)) as right:
        left.setblocking(False)
        right.setblocking(False)
        while not other.connected:
            for nodes in (hub, other):
                nodes.poll(time.monotonic())
            recorded += (said := received(left))
            right.send(said)
            left.send(received(right))
        assert heard(hub, recorded, time.monotonic()).count(b"\n") <= 1
        right.send(recorded.splitlines(keepends=True)[-1])  # as if the node had said its last words twice
        assert "the connection to node 1 is lost" in talk(hub, until="failed")[-1].lines[0]
    other.close()


def received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 12)
    except BlockingIOError:
        return b""


def test_another_secret_is_not_taken(
    hub: NodeServer, options: LaunchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_TRAINER_SECRET", SECRET + "!")
    other = spoke(options, tmp_path)
    here, other.address = other.address, ("127.0.0.1", free_port())
    other.began -= 60
    assert "does not answer" in talk(other, until="waiting for node 0")[-1].lines[0]
    other.address = here
    note = talk(hub, other, until="waiting for node 0")[-1].lines[0]
    assert "does not accept this node's secret: RUN_TRAINER_SECRET must be the same" in note
    assert not hub.connected and not other.connected
    other.close()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "failed", "number": 0, "lines": []},
        {"kind": "failed", "number": 256, "lines": []},
        {"kind": "failed", "number": True, "lines": []},
        {"kind": "failed", "number": 1, "lines": "text"},
        {"kind": "failed", "number": 1, "lines": ["x" * 2001]},
        {"kind": "failed", "number": 1, "lines": ["x"] * 101},
        {"kind": "stop", "number": 9, "node": 1},
        {"kind": "stop", "number": "15", "node": 1},
        {"kind": "hello", "node": -1, "worker_num": 4, "attempt": 0},
        {"kind": "hello", "node": 1, "worker_num": 4, "attempt": 0, "more": 1},
        {"kind": "hello", "node": 1_000_001},
        {"kind": "beat", "since": 1},
        {"kind": "other"},
        {},
        [],
        None,
    ],
)
def test_no_other_shape_is_a_message(message: object) -> None:
    with pytest.raises(ValidationError):
        NodeMessage.model_validate_json(json.dumps(message))


def test_messages_arrive_as_they_were_sent() -> None:
    message = failure_message(137, ["größe", "\\ud800 and 漢字"])
    assert NodeMessage.model_validate_json(message.model_dump_json(exclude_defaults=True)) == message
    for data in (b"[" * 200_000, b'{"kind": 1e999}', b"\xff"):
        with pytest.raises(ValidationError):
            NodeMessage.model_validate_json(data)


def test_a_launcher_does_not_take_its_own_words_for_those_of_another() -> None:
    """A stranger that knows no secret sends back all that it receives: both nonces and all contents are the same."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = SignedChannel(ours, SECRET.encode(), called=False)
        channel.send(NodeMessage(kind="beat"))
        for _ in range(2):  # the nonce, then the signed heartbeat
            assert not channel.closed
            theirs.sendall(theirs.recv(1 << 12))
            assert channel.receive() == []
        assert channel.has_nonce and channel.closed


def test_control_characters_are_not_shown() -> None:
    assert printable("\x1b]0;title\x07\x1b[2Jclear\x1b(0\x9d\x85 \u2066x\u2069\u2028y\tz\x00") == "clear  x y z"
    assert printable("größe 漢字 🙂 \ufffd") == "größe 漢字 🙂 \ufffd"


# ---- the secret ------------------------------------------------------------------------------------------------------


def test_without_one_node_0_makes_a_file_for_this_user_alone(
    options: LaunchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUN_TRAINER_SECRET")
    shared = tmp_path / "shared"
    other = spoke(options, shared)  # a node need not wait for node 0 to start
    assert other.poll(time.monotonic()) == []
    first = connect_nodes(options, shared)
    (path,) = shared.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and len(read_secret(path)) == 64
    talk(first, other, until="connected to the launcher of node 0")
    for each in (other, first):
        each.close()
    assert not path.exists()
    other = spoke(options, shared)
    other.began -= 60
    assert "RUN_TRAINER_SECRET" in talk(other, until="has made no file with the secret")[-1].lines[0]


def test_a_file_that_others_could_read_or_make_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    assert read_secret(path) is None and read_secret(path / "below") is None
    assert make_secret(path) == read_secret(path)
    path.chmod(0o640)
    with pytest.raises(RunError, match="no file of this user alone"):
        read_secret(path)
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    with pytest.raises(RunError, match="cannot be read"):
        read_secret(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(RunError, match="no file of this user alone"):
        read_secret(path)
    with pytest.raises(UserError, match="RUN_TRAINER_SECRET"):
        make_secret(path / "below")
    folder = tmp_path / "folder"
    (folder / ".launchers-1.secret").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot be written there"):
        make_secret(folder / ".launchers-1.secret")
    assert len(list(folder.iterdir())) == 1, "nothing unfinished is left"


@pytest.mark.parametrize("port", ["99999", "0", "a port"])
def test_a_control_port_that_cannot_be_is_refused(
    options: LaunchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: str
) -> None:
    """The system would take the rest of a division by 65536."""
    monkeypatch.setenv("RUN_TRAINER_CONTROL_PORT", port)
    for node in range(2):
        with pytest.raises(UserError, match="must be the number of a port"):
            connect_nodes(replace(options, node_rank=node), tmp_path)


def test_a_signal_right_behind_the_first_words_is_heard(hub: NodeServer, options: LaunchOptions) -> None:
    channel = SignedChannel(socket.create_connection(("127.0.0.1", options.master_port + 1)), SECRET.encode(), False)
    channel.send(NodeMessage(kind="hello", node=1, worker_num=4))
    channel.send(NodeMessage(kind="stop", number=signal.SIGTERM, node=1))
    while not channel.has_nonce:
        hub.poll(time.monotonic())
        channel.receive()
    assert talk(hub, until="stop")[-1].number == signal.SIGTERM
    channel.close()


def test_a_short_secret_is_none(options: LaunchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_TRAINER_SECRET", "guess me")
    with pytest.raises(UserError, match="at least 16 characters") as caught:
        connect_nodes(options, tmp_path)
    assert "guess me" not in str(caught.value)


@pytest.mark.parametrize("own", ["", "45"])
def test_mindspore_waits_an_hour_for_heartbeats_or_as_long_as_the_user_says(
    options: LaunchOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.delenv("MS_NODE_TIMEOUT", raising=False)
    if own:
        monkeypatch.setenv("MS_NODE_TIMEOUT", own)
    for spec in worker_specs(options, job_files(tmp_path, 0, 2)).values():
        assert spec["environment"]["MS_NODE_TIMEOUT"] == (own or "3600")
        assert "MS_DISABLE_HEARTBEAT" not in spec["environment"]


@pytest.mark.parametrize(("device", "schedulers"), [("CPU", 0), ("Ascend", 1), ("", 1)])
def test_only_workers_on_a_cpu_need_no_scheduler(
    options: LaunchOptions, tmp_path: Path, device: str, schedulers: int
) -> None:
    specs = worker_specs(options, job_files(tmp_path, 0, 2), device=device)
    assert len(specs) == len(options.ranks) + schedulers and (None in specs) == bool(schedulers)


def test_workers_do_not_get_it(options: LaunchOptions, tmp_path: Path) -> None:
    for spec in worker_specs(options, job_files(tmp_path, 0, 2)).values():
        assert "RUN_TRAINER_SECRET" in spec["unset"] and "RUN_TRAINER_SECRET" not in spec["environment"]
