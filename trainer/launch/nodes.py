"""The connections between the launchers of several nodes: a failure or a lost connection ends the job on all nodes.

Node 0 listens, the others connect to it, and it forwards what each of them says. Each side sends a heartbeat every
second. The workers communicate through MindSpore's cluster, and not here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainer.errors import EXIT_RUN_FAILED, UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.wire import Channel, Listener, Message, scaled

CONTROL_PORT_VARIABLE = "RUN_TRAINER_CONTROL_PORT"
"""Environment variable with the port of node 0's launcher; by default that after the scheduler's."""

LOST_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_CONNECT_SECONDS = 0.3
_RETRY_SECONDS = 0.3
_GOODBYE_SECONDS = 1.0
_DELIVERY_SECONDS = 10.0


class Event(NamedTuple):
    """What another node says, or what happens to it."""

    kind: Literal["failed", "stop", "note"]  # failed: its part of the job failed, or it is lost
    number: int  # the exit code, or the signal for all workers
    lines: list[str]  # to print


@dataclass
class _Peer:
    """A connected node."""

    channel: Channel
    heard_at: float
    done: bool = False


@dataclass
class Hub:
    """The other nodes, seen from node 0; in a job on one node there are none, and no listener."""

    listener: Listener | None
    options: LaunchOptions
    began: float = field(default_factory=time.monotonic)
    own_done: bool = False
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _history: list[Message] = field(default_factory=list)  # for nodes that connect later
    _beat_at: float = 0.0
    _stopping: bool = False
    _over: bool = False

    @property
    def sources(self) -> list[Channel | socket.socket]:
        """The sockets to wait for."""
        connected = [peer.channel for peer in self._peers.values() if not peer.channel.closed]
        return [*connected, *(self.listener.sources if self.listener else [])]

    @property
    def finished(self) -> bool:
        """Whether all nodes are done."""
        all_done = all(peer.done for peer in self._peers.values())
        return self.own_done and all_done and (self._complete or self._stopping)

    @property
    def _complete(self) -> bool:
        return len(self._peers) == self.options.nodes - 1

    def poll(self, now: float) -> list[Event]:
        """Sends a heartbeat and receives what the others sent. To be called a few times a second."""
        events = []
        for channel, message in self.listener.accept() if self.listener else ():
            if self._register(channel, message, now) and self._complete:
                note = f"the launchers of all {self.options.nodes} nodes are connected"
                events.append(Event("note", 0, [note]))
        for node, peer in list(self._peers.items()):
            for message in peer.channel.receive():
                peer.heard_at = now
                events += self._handle(node, peer, message)
            gone = peer.channel.closed or now - peer.heard_at > scaled(LOST_SECONDS)
            if gone and self._stopping:  # it was told to end
                peer.done = True
            elif gone and not self._over and not peer.done:
                events.append(self._lost(f"the connection to node {node} is lost"))
        if now - self.began > self.options.cluster_time_out and not self._complete and not self._over:
            missing = [str(node) for node in range(1, self.options.nodes) if node not in self._peers]
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

    def _register(self, channel: Channel, message: Message, now: float) -> bool:
        """Whether this is a node of the job; otherwise it is told why not."""
        node, workers = message.get("node"), message.get("worker_num")
        nodes, worker_num = self.options.nodes, self.options.worker_num
        if not isinstance(node, int) or not 0 < node < nodes:
            channel.send({"refused": f"node_rank is {node}, and node 0 expects 1 to {nodes - 1}"})
        elif workers != worker_num:
            channel.send({"refused": f"worker_num is {workers} there and {worker_num} on node 0"})
        elif node in self._peers:
            channel.send({"refused": f"another launcher is node {node} already"})
        else:
            self._peers[node] = _Peer(channel, now)
            for each in ({"welcome": True}, *self._history):
                channel.send(each)
            return True
        channel.close()
        return False

    def _handle(self, node: int, peer: _Peer, message: Message) -> list[Event]:
        peer.done = peer.done or bool(message.get("done"))
        event = _event(message)
        if event is None:
            return []
        self._stopping = self._stopping or event.kind == "stop"
        self._broadcast(message, but=node)
        return [event]

    def _lost(self, reason: str) -> Event:
        event = Event("failed", EXIT_RUN_FAILED, [f"error: {reason}."])
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
        """Tells the others that this node's part of the job failed."""
        self._broadcast({"failed": exit_code, "lines": lines})

    def stop(self, number: int) -> None:
        """Tells the others of a signal for all workers."""
        self._stopping = True
        self._broadcast({"stop": number})

    def done(self) -> None:
        """Tells the others that the workers of this node have ended well."""
        self.own_done = True
        self._announce_end()

    def close(self) -> None:
        """Ends the connections once the others have received everything."""
        if self.listener is not None:
            self.listener.close()
        for peer in self._peers.values():
            peer.channel.close_gracefully(_GOODBYE_SECONDS)


@dataclass
class Spoke:
    """The other nodes, seen from any but node 0: through node 0, whose launcher is at `address`. Methods: see `Hub`."""

    address: tuple[str, int]
    options: LaunchOptions
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
        if now - self.began > self.options.cluster_time_out:
            host, port = self.address
            return [self._lost(f"no launcher of node 0 answers at {host}, port {port}")]
        if now >= self._next_at:
            self._next_at = now + _RETRY_SECONDS
            with contextlib.suppress(OSError):
                self._channel = Channel(socket.create_connection(self.address, _CONNECT_SECONDS))
                self._channel.send({"node": self.options.node_rank, "worker_num": self.options.worker_num})
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
        return Event("failed", EXIT_RUN_FAILED, [f"error: {reason}."])

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
        """Delivers first, for some seconds, a failure from before node 0 was there."""
        deadline = time.monotonic() + scaled(_DELIVERY_SECONDS)
        while any("failed" in message for message in self._unsent) and time.monotonic() < deadline:
            self._exchange(time.monotonic())
            time.sleep(0.05)
        if self._channel is not None:
            self._channel.close_gracefully(_GOODBYE_SECONDS)


def _event(message: Message) -> Event | None:
    """What a message means to a supervisor; None for those among launchers only, and for nonsense."""
    lines = [str(line) for line in message.get("lines", [])] if isinstance(message.get("lines", []), list) else []
    for kind in ("failed", "stop"):
        if isinstance(message.get(kind), int):
            return Event(kind, message[kind], lines)
    return None


def connect_nodes(options: LaunchOptions) -> Hub | Spoke:
    """The other nodes of a job.

    Raises:
        UserError: The control port is no number, or this is node 0 and cannot listen there.
    """
    string = os.environ.get(CONTROL_PORT_VARIABLE, "")
    if string and not string.isdecimal():
        raise UserError("must be the number of a port", key=CONTROL_PORT_VARIABLE, value=string, fix="write 8119")
    control_port = int(string) if string else options.master_port + 1
    if options.nodes == 1:
        return Hub(None, options)
    if options.node_rank:
        return Spoke((options.master_addr.strip("[]"), control_port), options)
    listener = socket.socket(socket.AF_INET6 if ":" in options.master_addr else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", control_port))
        return Hub(Listener(listener), options)
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(
            f"the launchers of the other nodes cannot call there: {error}",
            key=CONTROL_PORT_VARIABLE,
            value=control_port,
            fix="free it, set this variable to another port on all nodes, or give another master_port: "
            "it is the one after that",
        ) from None
