"""The connections between the launchers of several nodes: a failure or a lost connection ends the job on all nodes.

Node 0 listens, the others connect to it, and it forwards what each of them says. Each side sends a heartbeat every
second. The workers communicate through MindSpore's cluster, and not here.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import EXIT_BAD_INPUT, EXIT_RUN_FAILED, RunError, UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.control.interface import Event, Nodes
from trainer.launch.control.messages import (
    Beat,
    Done,
    Failed,
    Finished,
    Hello,
    Message,
    Refused,
    Start,
    Stop,
    Welcome,
    failed,
)
from trainer.launch.control.secret import SECRET_VARIABLE, given_secret, make_secret, read_secret, secret_file
from trainer.launch.control.signed import ControlListener, SignedChannel
from trainer.launch.wire import scaled

CONTROL_PORT_VARIABLE = "RUN_TRAINER_CONTROL_PORT"
"""Environment variable with the port of node 0's launcher; by default that after the scheduler's."""

LOST_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_CONNECT_SECONDS = 0.3
_RETRY_SECONDS = 0.3
_GOODBYE_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
"""After so long a node says why it is not connected yet."""


@dataclass
class _Peer:
    """A connected node."""

    channel: SignedChannel
    heard_at: float
    done: bool = False


@dataclass
class Hub:
    """The other nodes, seen from node 0. Methods: see `Nodes`."""

    listener: ControlListener
    options: LaunchOptions
    attempt: int = 0
    resume: str = ""
    notes: list[str] = field(default_factory=list)  # to print first
    secret_path: Path | None = None  # the file that it made, and removes
    began: float = field(default_factory=time.monotonic)
    own_done: bool = False
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _history: list[Message] = field(default_factory=list)  # for nodes that connect later
    _beat_at: float = 0.0
    _moved: bool = False  # any rank of any node, since the last heartbeat
    _stopping: bool = False
    _over: bool = False
    _told: bool = False

    @property
    def sources(self) -> list[SignedChannel | socket.socket]:
        connected = [peer.channel for peer in self._peers.values() if not peer.channel.closed]
        return [*connected, *self.listener.sources]

    @property
    def finished(self) -> bool:
        all_done = all(peer.done for peer in self._peers.values())
        return self.own_done and all_done and (self.connected or self._stopping)

    @property
    def connected(self) -> bool:
        return len(self._peers) == self.options.nodes - 1

    def poll(self, now: float) -> list[Event]:
        events = [Event("note", 0, [note]) for note in self.notes]
        self.notes = []
        callers, strangers = self.listener.accept(now)
        for address in strangers:
            what = "called the control port without the secret of this job; its connections are dropped"
            events.append(Event("note", 0, [f"note: {address} {what}"]))
        for channel, hello in callers:
            if self._register(channel, hello, now) and self.connected:
                events.append(_all_connected(self.options))
                self._send(Start())
        for node, peer in list(self._peers.items()):
            for message in peer.channel.receive():
                peer.heard_at = now
                events += self._handle(node, peer, message)
            gone = peer.channel.closed or now - peer.heard_at > scaled(LOST_SECONDS)
            if gone and self._stopping:  # it was told to end
                peer.done = True
            elif gone and not self._over and not peer.done:
                events.append(self._lost(f"the connection to node {node} is lost"))
        if not self.connected and not self._over:
            events += self._missing(now)
        if now >= self._beat_at:
            self._beat_at = now + scaled(_BEAT_SECONDS)
            self._send(Beat(moved=self._moved))
            self._moved = False
        self._announce_end()
        return events

    def _missing(self, now: float) -> list[Event]:
        """Names the nodes that have not called: once when that takes long, and when it takes too long."""
        missing = ", ".join(str(node) for node in range(1, self.options.nodes) if node not in self._peers)
        if now - self.began > self.options.cluster_time_out:
            return [self._lost(f"no launcher called from node {missing}")]
        if self._told or now - self.began < scaled(_PATIENCE_SECONDS):
            return []
        self._told = True
        return [Event("note", 0, [f"waiting for the launcher of node {missing}; the workers start once all are there"])]

    def _announce_end(self) -> None:
        """Tells the others when all nodes are done: one whose connection just ends takes node 0 for lost."""
        if self.finished and not self._over:
            self._over = True
            self._send(Finished())

    def _register(self, channel: SignedChannel, hello: Hello, now: float) -> bool:
        """Whether this is a node of the job; otherwise it is told why not."""
        nodes, worker_num = self.options.nodes, self.options.worker_num
        if not 0 < hello.node < nodes:
            reason = f"node_rank is {hello.node}, and node 0 expects 1 to {nodes - 1}"
        elif hello.worker_num != worker_num:
            reason = f"worker_num is {hello.worker_num} there and {worker_num} on node 0"
        elif hello.attempt > self.attempt:  # a failure ended its workers sooner than those of this node
            channel.send(Refused(reason="has not ended its own workers of the start before yet", for_now=True))
            channel.close()
            return False
        elif hello.attempt < self.attempt:
            reason = f"it has started the job again {hello.attempt} times, and node 0 {self.attempt} times"
        elif hello.node in self._peers:
            reason = f"another launcher is node {hello.node} already"
        else:
            self._peers[hello.node] = _Peer(channel, now)
            for each in (Welcome(resume=self.resume), *self._history):
                channel.send(each)
            return True
        channel.send(Refused(reason=reason))
        channel.close()
        return False

    def _handle(self, node: int, peer: _Peer, message: Message) -> list[Event]:
        peer.done = peer.done or isinstance(message, Done)
        event = _event(message)
        if event is None:
            return []
        if event.kind == "moved":
            self._moved = True
            return [event]
        self._stopping = self._stopping or event.kind == "stop"
        self._broadcast(message, but=node)
        return [event]

    def _lost(self, reason: str) -> Event:
        event = Event("failed", EXIT_RUN_FAILED, [f"error: {reason}."])
        self.failed(event.number, event.lines)
        return event

    def _broadcast(self, message: Message, but: int | None = None) -> None:
        """Sends to all, also to those that connect later."""
        self._over = self._over or isinstance(message, Failed)
        self._history.append(message)
        self._send(message, but)

    def _send(self, message: Message, but: int | None = None) -> None:
        for node, peer in self._peers.items():
            if node != but:
                peer.channel.send(message)

    def moved(self) -> None:
        self._moved = True

    def failed(self, exit_code: int, lines: list[str]) -> None:
        self._broadcast(failed(exit_code, lines))

    def stop(self, number: int) -> None:
        self._stopping = True
        self._broadcast(Stop(number=number, node=0))

    def done(self) -> None:
        self.own_done = True
        self._announce_end()

    def close(self) -> None:
        self.listener.close()
        for peer in self._peers.values():
            peer.channel.close_gracefully(_GOODBYE_SECONDS)
        if self.secret_path is not None:
            self.secret_path.unlink(missing_ok=True)


@dataclass
class Spoke:
    """The other nodes, seen from any but node 0: through that, whose launcher is at `address`. Methods: see `Nodes`."""

    address: tuple[str, int]
    options: LaunchOptions
    secret: Callable[[], bytes | None]  # None while node 0 has not made it
    attempt: int = 0
    resume: str = ""
    connected: bool = False  # to all nodes
    began: float = field(default_factory=time.monotonic)
    _channel: SignedChannel | None = None
    _heard_at: float = 0.0
    _next_at: float = 0.0
    _welcome: bool = False  # to node 0
    _trouble: str = ""  # why it is not connected yet
    _told: set[str] = field(default_factory=set)
    _unsent: list[Message] = field(default_factory=list)
    _moved: bool = False  # a rank of this node, since the last heartbeat
    _finished: bool = False
    _stopping: bool = False
    _over: bool = False

    @property
    def finished(self) -> bool:
        return self._finished or (self._stopping and not self._welcome)

    @property
    def sources(self) -> list[SignedChannel | socket.socket]:
        return [] if self._channel is None or self._channel.closed else [self._channel]

    def poll(self, now: float) -> list[Event]:
        if self._over:
            return []
        if self._channel is None:
            return self._connect(now)
        events = []
        for message in self._channel.receive():
            self._heard_at = now
            if isinstance(message, Refused) and message.for_now:
                self._call_again(now, message.reason)
                return events
            events += self._handle(message)
        if (self._channel.closed or now - self._heard_at > scaled(LOST_SECONDS)) and not self._over:
            if self._stopping:
                self._finished = True
            elif self._welcome:
                events.append(self._lost("the connection to node 0 is lost"))
            else:  # something else listens there, or node 0 has just gone again
                secret = f"does not accept this node's secret: {SECRET_VARIABLE} must be the same on all nodes"
                self._call_again(now, secret if self._channel.greeted else "is not the launcher of a job")
        elif now >= self._next_at:
            self._next_at = now + scaled(_BEAT_SECONDS)
            self._send(Beat(moved=self._moved))
            self._moved = False
        return events

    def _call_again(self, now: float, trouble: str) -> None:
        self._trouble = trouble
        self._channel.close()
        self._channel, self._next_at = None, now + _RETRY_SECONDS

    def _connect(self, now: float) -> list[Event]:
        host, port = self.address
        if now - self.began > self.options.cluster_time_out:
            return [self._lost(f"no connection to the launcher of node 0: {host}, port {port}, {self._trouble}")]
        if now >= self._next_at:
            self._next_at = now + _RETRY_SECONDS
            try:
                secret = self.secret()
            except RunError as error:
                return [self._lost(str(error).removesuffix("."))]
            if secret is None:
                self._trouble = "has made no file with the secret of the job in a folder that this node sees"
                self._trouble += f"; {SECRET_VARIABLE}, the same on all nodes, takes its place"
            else:
                try:
                    connection = socket.create_connection(self.address, _CONNECT_SECONDS)
                except OSError:
                    self._trouble = "does not answer"
                else:
                    self._channel = SignedChannel(connection, secret, called=False)
                    options = self.options
                    hello = Hello(node=options.node_rank, worker_num=options.worker_num, attempt=self.attempt)
                    self._channel.send(hello)
                    self._heard_at = now
        if self._trouble and self._trouble not in self._told and now - self.began > scaled(_PATIENCE_SECONDS):
            self._told.add(self._trouble)
            return [Event("note", 0, [f"waiting for node 0: {host}, port {port}, {self._trouble}"])]
        return []

    def _handle(self, message: Message) -> list[Event]:
        if isinstance(message, Welcome):
            self._welcome, self.resume = True, message.resume
            for unsent in self._unsent:
                self._send(unsent)
            self._unsent.clear()
            return [Event("note", 0, ["connected to the launcher of node 0"])]
        if isinstance(message, Start):
            self.connected = True
            return [_all_connected(self.options)]
        if isinstance(message, Finished):
            self._finished = self._over = True
        if isinstance(message, Refused):
            return [self._lost(f"node 0 does not take this node in: {message.reason}", EXIT_BAD_INPUT)]
        event = _event(message)
        if event is None:
            return []
        self._over = self._over or event.kind == "failed"
        self._stopping = self._stopping or event.kind == "stop"
        return [event]

    def _lost(self, reason: str, exit_code: int = EXIT_RUN_FAILED) -> Event:
        self._over = True
        return Event("failed", exit_code, [f"error: {reason}."])

    def _send(self, message: Message) -> None:
        if self._channel is not None and self._welcome:
            self._channel.send(message)
        elif not isinstance(message, Beat):
            self._unsent.append(message)

    def moved(self) -> None:
        self._moved = True

    def failed(self, exit_code: int, lines: list[str]) -> None:
        self._over = True
        self._send(failed(exit_code, lines))

    def stop(self, number: int) -> None:
        self._stopping = True
        self._send(Stop(number=number, node=self.options.node_rank))

    def done(self) -> None:
        self._send(Done())

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close_gracefully(_GOODBYE_SECONDS)


def _all_connected(options: LaunchOptions) -> Event:
    return Event("note", 0, [f"the launchers of all {options.nodes} nodes are connected"])


def _event(message: Message) -> Event | None:
    """What a message means to a supervisor; None for those among launchers only."""
    if isinstance(message, Failed):
        return Event("failed", message.exit_code, message.lines)
    if isinstance(message, Beat):
        return Event("moved", 0, []) if message.moved else None
    return Event("stop", message.number, [f"node {message.node}"]) if isinstance(message, Stop) else None


def connect_nodes(options: LaunchOptions, shared: Path, attempt: int = 0, resume: str = "") -> Nodes:
    """The other nodes of a job with several.

    Args:
        shared: A folder that all nodes share, for the secret where the environment has none.
        attempt: How often the job has been started again.
        resume: Node 0: the checkpoint from which all go on.

    Raises:
        UserError: The control port is no number, or this is node 0 and cannot listen there, or write the secret.
    """
    string = os.environ.get(CONTROL_PORT_VARIABLE, "")
    if string and not string.isdecimal():
        raise UserError("must be the number of a port", key=CONTROL_PORT_VARIABLE, value=string, fix="write 8119")
    port = int(string) if string else options.master_port + 1
    host, secret, path = options.master_addr.strip("[]"), given_secret(), secret_file(shared, port)
    if options.node_rank:
        find = functools.partial(read_secret, path) if secret is None else lambda: secret
        return Spoke((host, port), options, find, attempt)
    listening = _listen(host, port)
    try:
        listener = ControlListener(listening, make_secret(path) if secret is None else secret)
    except UserError:
        listening.close()
        raise
    made, address = path if secret is None else None, listening.getsockname()[0]
    notes = []
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback and host != address:
        notes = [f"note: {host} is {address} on this machine, which other machines cannot reach: give its address"]
    return Hub(listener, options, attempt, resume, notes, made)


def _listen(host: str, port: int) -> socket.socket:
    """A socket on the address that the name of node 0 means, and on no other one of this machine."""
    listening = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except (OSError, OverflowError) as error:
        if listening is not None:
            listening.close()
        raise UserError(
            f"the launchers of the other nodes cannot call there: {error}",
            key=CONTROL_PORT_VARIABLE,
            value=port,
            fix="free it, set this variable to another port on all nodes, or give another master_port: "
            "it is the one after that",
        ) from None
    return listening
