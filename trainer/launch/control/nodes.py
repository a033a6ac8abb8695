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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import EXIT_BAD_INPUT, EXIT_RUN_FAILED, RunError, UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.control.messages import NodeMessage, failure_message, note_message
from trainer.launch.control.secret import SECRET_VARIABLE, make_secret, read_secret, secret_file, secret_of_environment
from trainer.launch.control.signed import ControlListener, SignedChannel
from trainer.launch.wire import Lines, scale_timeout

CONTROL_PORT_VARIABLE = "RUN_TRAINER_CONTROL_PORT"
"""Environment variable with the port of node 0's launcher; by default that after the scheduler's."""

LOST_SECONDS = 5.0
_BEAT_SECONDS = 1.0
_CONNECT_SECONDS = 0.3
_RETRY_SECONDS = 0.3
_GOODBYE_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
"""After so long a node says why it is not connected yet."""


@dataclass(kw_only=True)
class Nodes:
    """The other nodes of a job as a supervisor sees them; this base class stands for a job on one node.

    Attributes:
        resume: The checkpoint from which node 0 lets a restarted job continue; empty means as its arguments say.
        connected: Whether the launchers of all nodes are connected, so that the workers may start.
        finished: Whether all nodes that this one has to wait for are done.
    """

    resume: str = ""
    connected: bool = True
    finished: bool = False

    @property
    def sources(self) -> Sequence[Lines | socket.socket]:
        """Returns the sockets to wait for."""
        return ()

    def poll(self, now: float) -> list[NodeMessage]:
        """Sends a heartbeat, and returns what the others sent: notes, moved, failed, stop. It is called a few times a
        second."""
        return []

    def report_progress(self) -> None:
        """Reports with the next heartbeat that a rank of this node makes progress: ranks of other nodes may wait for
        it."""

    def report_failure(self, exit_code: int, lines: list[str]) -> None:
        """Reports that this node's part of the job failed."""

    def send_stop(self, number: int) -> None:
        """Sends a signal for all workers to the other nodes."""

    def report_done(self) -> None:
        """Reports, once, that the workers of this node have ended well."""
        self.finished = True

    def close(self) -> None:
        """Closes the connections once the others have received everything."""


@dataclass
class _Link:
    """The connection to another node, whose nonce and first message were right."""

    channel: SignedChannel
    heard_at: float
    done: bool = False


@dataclass(kw_only=True)
class _LinkedNodes(Nodes):
    """The behaviour that node 0 and the other nodes have in common."""

    options: LaunchOptions
    attempt: int = 0
    connected: bool = False
    began: float = field(default_factory=time.monotonic)
    _links: dict[int, _Link] = field(default_factory=dict)
    _history: list[NodeMessage] = field(default_factory=list)  # for nodes that are linked later
    _beat_at: float = 0.0
    _moved: bool = False  # whether a rank got on since the last heartbeat
    _done: bool = False  # the workers of this node
    _stopping: bool = False
    _over: bool = False  # the job has ended or failed: a connection that ends is no news
    _noted: set[str] = field(default_factory=set)

    @property
    def sources(self) -> list[SignedChannel | socket.socket]:
        return [link.channel for link in self._links.values() if not link.channel.closed]

    def poll(self, now: float) -> list[NodeMessage]:
        """Joins new connections, handles all messages, notices lost nodes and sends a heartbeat when due."""
        events = self._join(now)
        for node, link in self._links.items():
            for message in link.channel.receive():
                link.heard_at = now
                events += self._handle(node, message)
            gone = link.channel.closed or now - link.heard_at > scale_timeout(LOST_SECONDS)
            if gone and self._stopping:  # it was told to end
                link.done = True
            elif gone and not self._over and not link.done:
                events.append(self._fail(f"the connection to node {node} is lost"))
        if now >= self._beat_at:
            self._beat_at = now + scale_timeout(_BEAT_SECONDS)
            heartbeat = NodeMessage(kind="beat")
            if self._moved:
                heartbeat = NodeMessage(kind="moved")
            self._send(heartbeat)
            self._moved = False
        self._check_finished()
        return events

    def _join(self, now: float) -> list[NodeMessage]:
        """Connects nodes; returns events."""
        raise NotImplementedError

    def _link(self, node: int, channel: SignedChannel, now: float) -> None:
        self._links[node] = _Link(channel, now)
        for message in self._history:
            channel.send(message)

    def _handle(self, node: int, message: NodeMessage) -> list[NodeMessage]:
        """Forwards a message that is for all nodes; returns events for the supervisor."""
        if message.kind == "done":
            self._links[node].done = True
        elif message.kind == "start":
            return [self._all_connected()]
        elif message.kind == "moved":
            self._moved = self._moved or len(self._links) > 1
            return [message]
        elif message.kind == "stop" or (message.kind == "failed" and not self._over):  # the first failure ends the job
            self._broadcast(message, but=node)
            return [message]
        return []

    def _wait(self, now: float, waiting: str, failure: str) -> list[NodeMessage]:
        """Reports, once, what is waited for if that takes long; fails after `cluster_time_out`."""
        if now - self.began > self.options.cluster_time_out:
            return [self._fail(failure)]
        if now - self.began < scale_timeout(_PATIENCE_SECONDS) or waiting in self._noted:
            return []
        self._noted.add(waiting)
        return [note_message(waiting)]

    def _all_connected(self) -> NodeMessage:
        self.connected = True
        return note_message(f"the launchers of all {self.options.nodes} nodes are connected")

    def _fail(self, reason: str, exit_code: int = EXIT_RUN_FAILED) -> NodeMessage:
        message = failure_message(exit_code, [f"error: {reason}."])
        self._broadcast(message)
        return message

    def _broadcast(self, message: NodeMessage, but: int | None = None) -> None:
        """Sends a message to all nodes, including those that connect later."""
        self._over = self._over or message.kind == "failed"
        self._stopping = self._stopping or message.kind == "stop"
        self._history.append(message)
        self._send(message, but)

    def _send(self, message: NodeMessage, but: int | None = None) -> None:
        for node, link in self._links.items():
            if node != but:
                link.channel.send(message)

    def _check_finished(self) -> None:
        all_done = self._done and all(link.done for link in self._links.values())
        self.finished = all_done and (self.connected or self._stopping)

    def report_progress(self) -> None:
        self._moved = True

    def report_failure(self, exit_code: int, lines: list[str]) -> None:
        self._broadcast(failure_message(exit_code, lines))

    def send_stop(self, number: int) -> None:
        self._broadcast(NodeMessage(kind="stop", number=number, node=self.options.node_rank))

    def report_done(self) -> None:
        self._done = True
        self._check_finished()

    def close(self) -> None:
        for link in self._links.values():
            link.channel.close_gracefully(_GOODBYE_SECONDS)


@dataclass(kw_only=True)
class NodeServer(_LinkedNodes):
    """The other nodes as node 0 sees them."""

    listener: ControlListener
    notes: list[NodeMessage] = field(default_factory=list)  # to print first
    secret_path: Path | None = None  # the file that it made, and removes

    @property
    def sources(self) -> list[SignedChannel | socket.socket]:
        return [*super().sources, *self.listener.sources]

    def _join(self, now: float) -> list[NodeMessage]:
        events = self.notes
        self.notes = []
        callers, strangers = self.listener.accept(now)
        for address in strangers:
            what = "called the control port without the secret of this job; its connections are dropped"
            events.append(note_message(f"note: {address} {what}"))
        for channel, hello in callers:
            answer = self._answer(hello)
            channel.send(answer)
            if answer.kind != "welcome":
                channel.close()
                continue
            self._link(hello.node, channel, now)
            if len(self._links) == self.options.nodes - 1:
                self._send(NodeMessage(kind="start"))
                events.append(self._all_connected())
        if not self.connected and not self._over:
            missing = ", ".join(str(node) for node in range(1, self.options.nodes) if node not in self._links)
            waiting = f"waiting for the launcher of node {missing}; the workers start once all are there"
            events += self._wait(now, waiting, f"node {missing} did not connect")
        return events

    def _answer(self, hello: NodeMessage) -> NodeMessage:
        """Returns a welcome for a node of the job, and for any other the reason of the refusal."""
        nodes = self.options.nodes
        if hello.attempt > self.attempt:  # a failure ended its workers sooner than those of this node
            return NodeMessage(kind="later", lines=["has not ended its own workers of the start before yet"])
        if not 0 < hello.node < nodes:
            reason = f"node_rank is {hello.node}, and node 0 expects 1 to {nodes - 1}"
        elif hello.worker_num != self.options.worker_num:
            reason = f"worker_num is {hello.worker_num} there and {self.options.worker_num} on node 0"
        elif hello.attempt < self.attempt:
            reason = f"it has started the job again {hello.attempt} times, and node 0 {self.attempt} times"
        elif hello.node in self._links:
            reason = f"another launcher is node {hello.node} already"
        else:
            return NodeMessage(kind="welcome", lines=[self.resume])
        return NodeMessage(kind="refused", lines=[reason])

    def _check_finished(self) -> None:
        """Tells the others when all nodes are done: a node whose connection just ends would count node 0 as lost."""
        super()._check_finished()
        if self.finished and not self._over:
            self._over = True
            self._send(NodeMessage(kind="done"))

    def close(self) -> None:
        """Closes the port and the connections, and removes the secret if this node made it."""
        self.listener.close()
        super().close()
        if self.secret_path is not None:
            self.secret_path.unlink(missing_ok=True)


@dataclass(kw_only=True)
class NodeClient(_LinkedNodes):
    """The other nodes as any node but 0 sees them: through node 0, whose launcher is at `address`."""

    address: tuple[str, int]
    secret: Callable[[], bytes | None]  # None while node 0 has not made it
    _channel: SignedChannel | None = None  # to node 0, which has not answered yet
    _called_at: float = 0.0
    _call_at: float = 0.0

    @property
    def sources(self) -> list[SignedChannel | socket.socket]:
        if self._channel is None or self._channel.closed:
            return super().sources
        return [self._channel]

    def _join(self, now: float) -> list[NodeMessage]:
        if self._links or self._over:
            return []
        if self._channel is not None:
            return self._hear(self._channel, now)
        if now < self._call_at:
            return []
        try:
            return self._call(now)
        except RunError as error:
            return [self._fail(str(error).removesuffix("."))]
        except OSError:
            return self._call_later(now, "does not answer")

    def _call(self, now: float) -> list[NodeMessage]:
        secret = self.secret()
        if secret is None:
            reason = "has made no file with the secret of the job in a folder that this node sees"
            return self._call_later(now, f"{reason}; {SECRET_VARIABLE}, the same on all nodes, takes its place")
        self._channel = SignedChannel(socket.create_connection(self.address, _CONNECT_SECONDS), secret, called=False)
        self._called_at = now
        options = self.options
        hello = NodeMessage(kind="hello", node=options.node_rank, worker_num=options.worker_num, attempt=self.attempt)
        self._channel.send(hello)
        return []

    def _call_later(self, now: float, reason: str) -> list[NodeMessage]:
        self._call_at = now + _RETRY_SECONDS
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        place = f"{self.address[0]}, port {self.address[1]}, {reason}"
        return self._wait(now, f"waiting for node 0: {place}", f"no connection to the launcher of node 0: {place}")

    def _hear(self, channel: SignedChannel, now: float) -> list[NodeMessage]:
        """Handles the answer of node 0 to a call, and the messages that came with it."""
        events = []
        for message in channel.receive():
            if self._links:
                events += self._handle(0, message)
            elif message.kind == "welcome":
                self.resume = message.lines[0]
                self._channel = None
                self._link(0, channel, now)
                events.append(note_message("connected to the launcher of node 0"))
            elif message.kind == "later":
                return self._call_later(now, message.lines[0])
            elif message.kind == "refused":
                return [self._fail(f"node 0 rejected this node: {message.lines[0]}", EXIT_BAD_INPUT)]
        if self._links or not (channel.closed or now - self._called_at > scale_timeout(LOST_SECONDS)):
            return events
        if channel.greeted:
            reason = f"does not accept this node's secret: {SECRET_VARIABLE} must be the same on all nodes"
            return self._call_later(now, reason)
        return self._call_later(now, "is not the launcher of a job")  # or node 0 has just gone again

    def report_done(self) -> None:
        if not self._done:
            self._broadcast(NodeMessage(kind="done"))
        super().report_done()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        super().close()


def connect_nodes(options: LaunchOptions, shared: Path, attempt: int = 0, resume: str = "") -> Nodes:
    """Returns the other nodes of a job with several.

    Args:
        shared: A folder that all nodes share, for the secret if the environment has none.
        attempt: How often the job has been restarted.
        resume: On node 0, the checkpoint from which all nodes continue.

    Raises:
        UserError: The control port is not a number, or node 0 cannot listen there or write the secret.
    """
    string = os.environ.get(CONTROL_PORT_VARIABLE, "")
    if string and not string.isdecimal():
        raise UserError("must be the number of a port", key=CONTROL_PORT_VARIABLE, value=string, fix="write 8119")
    if string:
        port = int(string)
    else:
        assert options.master_port is not None  # `launch` chooses one for several nodes
        port = options.master_port + 1
    host = options.master_addr.strip("[]")
    secret = secret_of_environment()
    path = secret_file(shared, port)
    if options.node_rank:
        find: Callable[[], bytes | None] = lambda: secret  # noqa: E731
        if secret is None:
            find = functools.partial(read_secret, path)
        return NodeClient(address=(host, port), options=options, secret=find, attempt=attempt)
    listening = _listen(host, port)
    secret_path = None
    if secret is None:
        secret_path = path
        try:
            secret = make_secret(path)
        except UserError:
            listening.close()
            raise
    listener = ControlListener(listening, secret)
    server = NodeServer(listener=listener, options=options, attempt=attempt, resume=resume, secret_path=secret_path)
    address = listening.getsockname()[0]
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback and host != address:
        why = f"{host} is {address} on this machine, which other machines cannot reach: give its address"
        server.notes = [note_message(f"note: {why}")]
    return server


def _listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens only at the address to which the name of node 0 resolves."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family)
    except (OSError, OverflowError) as error:
        rule = f"the launchers of the other nodes cannot call there: {error}"
        fix = "free it, set this variable to another port on all nodes, or give another master_port: it is the next one"
        raise UserError(rule, key=CONTROL_PORT_VARIABLE, value=port, fix=fix) from None
