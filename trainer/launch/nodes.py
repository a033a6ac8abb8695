"""The launchers of several nodes among themselves: a failure anywhere, or a lost connection, ends the job everywhere.

Node 0 listens; the others connect to it, and it forwards what each of them says. Every second each side sends a
heartbeat. Workers do not talk to other nodes here: they have MindSpore's cluster for that.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainer.errors import EXIT_RUN_FAILED, UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.wire import Channel, Message, scaled

CONTROL_PORT_VARIABLE = "RUN_TRAINER_CONTROL_PORT"
"""Environment variable with the port of node 0's launcher; by default that after the scheduler's."""

LOST_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_CONNECT_SECONDS = 0.3
_RETRY_SECONDS = 0.3
_GOODBYE_SECONDS = 1.0
_DELIVERY_SECONDS = 10.0


class Event(NamedTuple):
    """Something that another node says, or that is found out about it.

    Attributes:
        kind: ``failed``: its part of the job failed, or it is lost; ``stop``: a signal for all workers; ``note``.
        number: The exit code, or the signal.
        lines: What the user should know.
    """

    kind: Literal["failed", "stop", "note"]
    number: int
    lines: list[str]


class Nodes:
    """The other nodes of a job as the supervisor of one knows them; as it is, those of a job on one node: none.

    Attributes:
        sources: The sockets to wait for.
        finished: Whether all nodes are done.
    """

    sources: Sequence[Channel | socket.socket] = ()
    finished = True

    def poll(self, now: float) -> list[Event]:
        """Sends a heartbeat and receives what the others sent. To be called a few times a second."""
        return []

    def failed(self, exit_code: int, lines: list[str]) -> None:
        """Tells the others that this node's part of the job failed."""

    def stop(self, number: int) -> None:
        """Tells the others of a signal for all workers."""

    def done(self) -> None:
        """Tells the others that the workers of this node have ended well."""

    def close(self) -> None:
        """Ends the connections once the others have received everything."""


@dataclass
class _Peer:
    """A connected node."""

    channel: Channel
    heard_at: float
    done: bool = False


@dataclass
class Hub(Nodes):
    """The other nodes as node 0 knows them.

    Attributes:
        timeout_seconds: How long it waits for the other nodes to connect.
    """

    listener: socket.socket
    nodes: int
    worker_num: int
    timeout_seconds: float
    began: float = field(default_factory=time.monotonic)
    own_done: bool = False
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _unidentified: list[Channel] = field(default_factory=list)
    _history: list[Message] = field(default_factory=list)  # for nodes that connect later
    _beat_at: float = 0.0
    _stopping: bool = False
    _over: bool = False

    @property
    def sources(self) -> list[Channel | socket.socket]:
        connected = [peer.channel for peer in self._peers.values() if not peer.channel.closed]
        return [self.listener, *connected, *self._unidentified]

    @property
    def finished(self) -> bool:
        all_here = len(self._peers) == self.nodes - 1 or self._stopping
        return self.own_done and all_here and all(peer.done for peer in self._peers.values())

    def poll(self, now: float) -> list[Event]:
        events = self._accept(now)
        for node, peer in list(self._peers.items()):
            for message in peer.channel.receive():
                peer.heard_at = now
                events += self._handle(node, peer, message)
            gone = peer.channel.closed or now - peer.heard_at > scaled(LOST_SECONDS)
            if gone and self._stopping:  # it was told to end
                peer.done = True
            elif gone and not self._over and not peer.done:
                events.append(self._lost(f"the connection to node {node} is lost"))
        if now - self.began > self.timeout_seconds and len(self._peers) < self.nodes - 1 and not self._over:
            missing = [str(node) for node in range(1, self.nodes) if node not in self._peers]
            events.append(self._lost(f"no launcher called from node {', '.join(missing)}"))
        if now >= self._beat_at:
            self._beat_at = now + scaled(_BEAT_SECONDS)
            self._send({"beat": True})
        self._announce_end()
        return events

    def _announce_end(self) -> None:
        """Tells the others when all nodes are done: one whose connection just ends takes node 0 for lost."""
        if self.finished and not self._over:
            self._over = True
            self._send({"finished": True})

    def _accept(self, now: float) -> list[Event]:
        before = len(self._peers)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._unidentified.append(Channel(self.listener.accept()[0]))
        for channel in list(self._unidentified):
            messages = channel.receive()
            if messages or channel.closed:
                self._unidentified.remove(channel)
            if messages:
                self._register(channel, messages[0], now)
        complete = before < len(self._peers) == self.nodes - 1
        return [Event("note", 0, [f"the launchers of all {self.nodes} nodes are connected"])] if complete else []

    def _register(self, channel: Channel, message: Message, now: float) -> None:
        node, workers = message.get("node"), message.get("worker_num")
        if not isinstance(node, int) or not 0 < node < self.nodes:
            channel.send({"refused": f"node_rank is {node}, and node 0 expects 1 to {self.nodes - 1}"})
        elif workers != self.worker_num:
            channel.send({"refused": f"worker_num is {workers} there and {self.worker_num} on node 0"})
        elif node in self._peers:
            channel.send({"refused": f"another launcher is node {node} already"})
        else:
            self._peers[node] = _Peer(channel, now)
            for each in ({"welcome": True}, *self._history):
                channel.send(each)
            return
        channel.close()

    def _handle(self, node: int, peer: _Peer, message: Message) -> list[Event]:
        peer.done = peer.done or bool(message.get("done"))
        event = _event(message)
        if event is None:
            return []
        self._stopping = self._stopping or event.kind == "stop"
        self._broadcast(message, but=node)
        return [event]

    def _lost(self, reason: str) -> Event:
        event = _lost_event(reason)
        self.failed(event.number, event.lines)
        return event

    def _broadcast(self, message: Message, but: int | None = None) -> None:
        """Sends to all, also to those that connect later."""
        self._over = self._over or "failed" in message
        self._history.append(message)
        self._send(message, but)

    def _send(self, message: Message, but: int | None = None) -> None:
        for node, peer in self._peers.items():
            if node != but:
                peer.channel.send(message)

    def failed(self, exit_code: int, lines: list[str]) -> None:
        self._broadcast({"failed": exit_code, "lines": lines})

    def stop(self, number: int) -> None:
        self._stopping = True
        self._broadcast({"stop": number})

    def done(self) -> None:
        self.own_done = True
        self._announce_end()

    def close(self) -> None:
        self.listener.close()
        for peer in self._peers.values():
            peer.channel.close_gracefully(_GOODBYE_SECONDS)


@dataclass
class Spoke(Nodes):
    """The other nodes as any but node 0 knows them: through node 0.

    Attributes:
        address: Of node 0's launcher.
        node: The number of this node.
        timeout_seconds: How long it tries to connect.
    """

    address: tuple[str, int]
    node: int
    worker_num: int
    timeout_seconds: float
    began: float = field(default_factory=time.monotonic)
    _channel: Channel | None = None
    _welcome: bool = False
    _heard_at: float = 0.0
    _next_at: float = 0.0
    _unsent: list[Message] = field(default_factory=list)
    _finished: bool = False
    _stopping: bool = False
    _over: bool = False

    @property
    def finished(self) -> bool:
        return self._finished or (self._stopping and not self._welcome)

    @property
    def sources(self) -> list[Channel | socket.socket]:
        return [] if self._channel is None or self._channel.closed else [self._channel]

    def poll(self, now: float) -> list[Event]:
        return [] if self._over else self._exchange(now)

    def _exchange(self, now: float) -> list[Event]:
        if self._channel is None:
            return self._connect(now)
        events = []
        for message in self._channel.receive():
            self._heard_at = now
            events += self._handle(message)
        if (self._channel.closed or now - self._heard_at > scaled(LOST_SECONDS)) and not self._over:
            if self._stopping:
                self._finished = True
            elif self._welcome:
                events.append(self._lost("the connection to node 0 is lost"))
            else:  # something else listens there, or node 0 has just gone again
                self._channel.close()
                self._channel, self._next_at = None, now + _RETRY_SECONDS
        elif now >= self._next_at:
            self._next_at = now + scaled(_BEAT_SECONDS)
            self._send({"beat": True})
        return events

    def _connect(self, now: float) -> list[Event]:
        if now - self.began > self.timeout_seconds:
            host, port = self.address
            return [self._lost(f"no launcher of node 0 answers at {host}, port {port}")]
        if now >= self._next_at:
            self._next_at = now + _RETRY_SECONDS
            with contextlib.suppress(OSError):
                self._channel = Channel(socket.create_connection(self.address, _CONNECT_SECONDS))
                self._channel.send({"node": self.node, "worker_num": self.worker_num})
                self._heard_at = now
        return []

    def _handle(self, message: Message) -> list[Event]:
        if message.get("welcome"):
            self._welcome = True
            for unsent in self._unsent:
                self._send(unsent)
            self._unsent.clear()
            return [Event("note", 0, ["connected to the launcher of node 0"])]
        if message.get("finished"):
            self._finished = self._over = True
        if "refused" in message:
            return [self._lost(f"node 0 does not take this node in: {message['refused']}")]
        event = _event(message)
        if event is None:
            return []
        self._over = self._over or event.kind == "failed"
        self._stopping = self._stopping or event.kind == "stop"
        return [event]

    def _lost(self, reason: str) -> Event:
        self._over = True
        return _lost_event(reason)

    def _send(self, message: Message) -> None:
        if self._channel is not None and self._welcome:
            self._channel.send(message)
        elif "beat" not in message:
            self._unsent.append(message)

    def failed(self, exit_code: int, lines: list[str]) -> None:
        self._over = True
        self._send({"failed": exit_code, "lines": lines})

    def stop(self, number: int) -> None:
        self._stopping = True
        self._send({"stop": number})

    def done(self) -> None:
        self._send({"done": True})

    def close(self) -> None:
        """Node 0 still learns of a failure from before it was there."""
        deadline = time.monotonic() + scaled(_DELIVERY_SECONDS)
        while any("failed" in message for message in self._unsent) and time.monotonic() < deadline:
            self._exchange(time.monotonic())
            time.sleep(0.05)
        if self._channel is not None:
            self._channel.close_gracefully(_GOODBYE_SECONDS)


def _lost_event(reason: str) -> Event:
    return Event("failed", EXIT_RUN_FAILED, [f"error: {reason}."])


def _event(message: Message) -> Event | None:
    """What a message means to a supervisor; None for those among launchers only, and for nonsense."""
    lines = [str(line) for line in message.get("lines", [])] if isinstance(message.get("lines", []), list) else []
    for kind in ("failed", "stop"):
        if isinstance(message.get(kind), int):
            return Event(kind, message[kind], lines)
    return None


def connect_nodes(options: LaunchOptions, control_port: int) -> Nodes:
    """The other nodes of a job, whose node 0 listens at a port.

    Raises:
        UserError: This is node 0 and cannot listen there.
    """
    if options.nodes == 1:
        return Nodes()
    if options.node_rank:
        address = (options.master_addr.strip("[]"), control_port)
        return Spoke(address, options.node_rank, options.worker_num, options.cluster_time_out)
    listener = socket.socket(socket.AF_INET6 if ":" in options.master_addr else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", control_port))
        listener.listen()
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"the launchers of the other nodes cannot call there: {error}",
            key=CONTROL_PORT_VARIABLE,
            value=control_port,
            fix="free it, set this variable to another port on all nodes, or give another master_port: "
            "it is the one after that",
        ) from None
    listener.setblocking(False)
    return Hub(listener, options.nodes, options.worker_num, options.cluster_time_out)
