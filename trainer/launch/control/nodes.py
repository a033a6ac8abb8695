"""The connections between the launchers of several nodes: a failure or a lost connection ends the job on all nodes.

Node 0 listens, the others connect to it, and it forwards what each of them says. Each side sends a heartbeat every
second. The workers communicate with each other, and not here.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import EXIT_BAD_INPUT, EXIT_RUN_FAILED, RunError, UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.control.messages import LONGEST_LINE, NodeMessage, SignedChannel, failure_message
from trainer.launch.control.secret import SECRET_VARIABLE, make_secret, read_secret, secret_of_environment
from trainer.launch.wire import ListeningSocket, scale_timeout

CONTROL_PORT_VARIABLE = "RUN_TRAINER_CONTROL_PORT"
"""Environment variable with the port of node 0's launcher; by default that after `--master_port`."""

_BEAT_SECONDS = 1.0
_CALL_SECONDS = 0.3  # of one try to reach node 0, and until the next
_GOODBYE_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0  # until a node says why it is not connected yet
_MOST_CALLERS = 64
_MOST_WHEN_STARVED = 8  # where the launcher itself would have no file descriptor left
_MOST_NAMED = 20


@dataclass(kw_only=True)
class Nodes:
    """The other nodes of a job as a supervisor sees them. A job on one node has none, and this class is for it.

    Attributes:
        attempt: How often the job has been restarted.
        resume: The checkpoint from which node 0 lets a restarted job continue; empty means as its arguments say.
        connected: Whether the launchers of all nodes are connected, so that the workers may start.
        links: The connections by the numbers of the nodes; any node but 0 has one, to node 0.
    """

    options: LaunchOptions
    attempt: int = 0
    resume: str = ""
    connected: bool = False
    began: float = field(default_factory=time.monotonic)
    links: dict[int, SignedChannel] = field(default_factory=dict)
    _events: list[NodeMessage] = field(default_factory=list)  # for the supervisor
    _sent: set[str] = field(default_factory=set)  # the kinds of messages that all nodes got
    _done: set[int] = field(default_factory=set)  # the other nodes that need not be waited for
    _noted: set[str] = field(default_factory=set)
    _heartbeat: NodeMessage = NodeMessage(kind="beat")  # the next one
    _beat_at: float = 0.0

    @property
    def sources(self) -> list[SignedChannel | socket.socket]:
        """Returns the sockets to wait for."""
        return [link for link in self.links.values() if not link.closed]

    def poll(self, now: float) -> list[NodeMessage]:
        """Sends a heartbeat, and returns what the others sent: notes, moved, failed, stop. It is called a few times a
        second."""
        self._join(now)
        for node, link in list(self.links.items()):
            for message in link.receive():
                self._handle(node, message)
            if link.is_lost(now):
                self._handle(node, NodeMessage(kind="lost"))
        if now >= self._beat_at:
            self._beat_at = now + scale_timeout(_BEAT_SECONDS)
            self.send(self._heartbeat)
            self._heartbeat = NodeMessage(kind="beat")
        events = self._events
        self._events = []
        return events

    def report_progress(self) -> None:
        """Reports with the next heartbeat that a rank of this node got on: ranks of other nodes may wait for it."""
        self._heartbeat = NodeMessage(kind="moved")

    def report_done(self) -> bool:
        """Reports, once, that the workers of this node have ended well; node 0 does so when those of all nodes have.

        Returns whether no other node needs to be waited for.
        """
        finished = self._done >= self.links.keys()
        if (self.options.node_rank or finished) and "done" not in self._sent:
            self.send(NodeMessage(kind="done"))
        return finished

    def send(self, message: NodeMessage, but: int | None = None) -> None:
        """Sends a message to all other nodes `but` one."""
        self._sent.add(message.kind)
        for node, link in self.links.items():
            if node != but:
                link.send(message)

    def note(self, line: str) -> None:
        """Has the supervisor print a line, once."""
        if line not in self._noted:
            self._noted.add(line)
            self._events.append(NodeMessage(kind="note", lines=[line[:LONGEST_LINE]]))

    def close(self) -> None:
        """Closes the connections once the others have received everything."""
        for link in self.links.values():
            link.close_gracefully(_GOODBYE_SECONDS)

    def _join(self, now: float) -> None:
        """Connects nodes."""

    def _handle(self, node: int, message: NodeMessage) -> None:
        """Forwards a message that is for all nodes, and passes it on to the supervisor."""
        if message.kind == "start":
            self.connected = True
            self.note(f"the launchers of all {self.options.nodes} nodes are connected")
        elif message.kind == "done" or (message.kind == "lost" and "stop" in self._sent):
            self._done.add(node)
        elif message.kind == "lost" and node not in self._done:
            self._fail(f"the connection to node {node} is lost")
        elif message.kind == "moved":
            if len(self.links) > 1:
                self.report_progress()
            self._events.append(message)
        elif message.kind == "stop" or (message.kind == "failed" and "failed" not in self._sent):
            self.send(message, but=node)  # the first failure ends the job
            self._events.append(message)

    def _wait(self, now: float, reason: str, failure: str) -> None:
        """Notes what is waited for if that takes long; fails after `cluster_time_out`."""
        if now - self.began > self.options.cluster_time_out:
            self._fail(failure)
        elif now - self.began >= scale_timeout(_PATIENCE_SECONDS):
            self.note(f"waiting for {reason}")

    def _fail(self, reason: str, exit_code: int = EXIT_RUN_FAILED) -> None:
        """Ends the job on all nodes, unless a failure does so already."""
        self._handle(self.options.node_rank, failure_message(exit_code, [f"error: {reason}."]))


@functools.lru_cache
def network_of(address: str) -> str:
    """Returns the network in which one caller can have all addresses: its address for IPv4, the /64 for IPv6."""
    if ":" in address:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    return address


@dataclass(kw_only=True)
class NodeServer(Nodes):
    """The other nodes as node 0 sees them."""

    listening: ListeningSocket
    secret: bytes
    secret_path: Path  # where it makes a file with the secret, unless the environment has one
    _callers: dict[SignedChannel, str] = field(default_factory=dict)  # with their addresses, until they say hello

    @property
    def sources(self) -> list[SignedChannel | socket.socket]:
        return [*super().sources, *self.listening.sources, *self._callers]

    def _join(self, now: float) -> None:
        """Accepts the nodes that call, drops strangers, and notes which nodes are missing."""
        for connection, address in self.listening.accept(_MOST_CALLERS):
            self._callers[SignedChannel(connection, self.secret, called=True)] = address[0]
        for caller in list(self._callers):
            messages = caller.receive()
            if messages and messages[0].kind == "hello":
                del self._callers[caller]
                self._accept(caller, *messages)
            elif messages or caller.is_lost(now):
                self._drop(caller)
        most = _MOST_CALLERS
        if self.listening.starved:
            most = _MOST_WHEN_STARVED
        while len(self._callers) > most:
            # One of the network with most callers, and one without a nonce first: a flood keeps no other network out.
            counts = Counter(map(network_of, self._callers.values()))
            keep = {each: (-counts[network_of(address)], each.has_nonce) for each, address in self._callers.items()}
            self._drop(min(keep, key=keep.__getitem__))
        if missing := ", ".join(str(node) for node in range(1, self.options.nodes) if node not in self.links):
            reason = f"the launcher of node {missing}; the workers start once all are there"
            self._wait(now, reason, f"node {missing} did not connect")

    def _drop(self, caller: SignedChannel) -> None:
        caller.close()
        address = self._callers.pop(caller)
        if len(self._noted) < _MOST_NAMED:
            what = "called the control port without the secret of this job; its connections are dropped"
            self.note(f"note: {address} {what}")

    def _accept(self, caller: SignedChannel, hello: NodeMessage, *more: NodeMessage) -> None:
        """Accepts a node of the job with the checkpoint to continue from; tells any other caller why it is refused."""
        node = hello.node
        nodes = self.options.nodes
        workers = self.options.worker_num
        attempts = f"it has started the job again {hello.attempt} times, and node 0 {self.attempt} times"
        refusals = {
            "has not ended its own workers of the start before yet": hello.attempt > self.attempt,
            f"node_rank is {node}, and node 0 expects 1 to {nodes - 1}": not 0 < node < nodes,
            f"worker_num is {hello.worker_num} there and {workers} on node 0": hello.worker_num != workers,
            attempts: hello.attempt < self.attempt,
            f"another launcher is node {node} already": node in self.links,
        }
        if reasons := [reason for reason, applies in refusals.items() if applies]:
            caller.send(NodeMessage(kind="refused", attempt=self.attempt, lines=reasons))
            caller.close()
            return
        caller.send(NodeMessage(kind="welcome", lines=[self.resume]))
        self.links[node] = caller
        for message in more:
            self._handle(node, message)
        if len(self.links) == nodes - 1:
            self.send(NodeMessage(kind="start"))
            self._handle(0, NodeMessage(kind="start"))

    def close(self) -> None:
        """Closes the port and the connections, and removes the file with the secret."""
        self.listening.close()
        for caller in self._callers:
            caller.close()
        super().close()
        self.secret_path.unlink(missing_ok=True)


@dataclass(kw_only=True)
class NodeClient(Nodes):
    """The other nodes as any node but 0 sees them: through node 0, whose launcher is at `address`."""

    address: tuple[str, int]
    secret: bytes
    secret_path: Path  # the file that node 0 makes; for the case that the secret is empty
    _is_welcome: bool = False  # node 0 has accepted this node
    _why_not: str = ""  # after a call: not connected because node 0 is or does that
    _call_at: float = 0.0

    def _join(self, now: float) -> None:
        """Calls node 0 until it accepts this node."""
        if self._why_not and not self.links:
            place = f"{self.address[0]}, port {self.address[1]}, {self._why_not}"
            self._why_not = ""
            self._wait(now, f"node 0: {place}", f"no connection to the launcher of node 0: {place}")
        if self.links or now < self._call_at or "failed" in self._sent:
            return
        self._call_at = now + _CALL_SECONDS
        node = self.options.node_rank
        hello = NodeMessage(kind="hello", node=node, worker_num=self.options.worker_num, attempt=self.attempt)
        reason = "has made no file with the secret of the job in a folder that this node sees"
        self._why_not = f"{reason}; {SECRET_VARIABLE}, the same on all nodes, takes its place"
        try:
            secret = self.secret or read_secret(self.secret_path)
            if secret is not None:
                self._why_not = "does not answer"
                connection = socket.create_connection(self.address, _CALL_SECONDS)
                self._why_not = ""
                self.links[0] = SignedChannel(connection, secret, called=False)
                self.links[0].send(hello)
        except RunError as error:
            self._fail(str(error).removesuffix("."))
        except OSError:
            pass  # it is called again

    def _handle(self, node: int, message: NodeMessage) -> None:
        """Handles the answer of node 0 to the call, too."""
        if message.kind == "welcome":
            self.resume = message.lines[0]
            self._is_welcome = True
            self.note("connected to the launcher of node 0")
        elif message.kind == "refused" and message.attempt < self.attempt:
            self._why_not = message.lines[0]  # and node 0 closes the connection
        elif message.kind == "refused":
            self._fail(f"node 0 rejected this node: {message.lines[0]}", EXIT_BAD_INPUT)
        elif message.kind == "lost" and not self._is_welcome:
            channel = self.links.pop(node)
            channel.close()
            if not self._why_not and channel.has_nonce:
                self._why_not = f"does not accept this node's secret: {SECRET_VARIABLE} must be the same on all nodes"
            self._why_not = self._why_not or "is not the launcher of a job"  # or node 0 has just gone again
        else:
            super()._handle(node, message)


def connect_nodes(options: LaunchOptions, shared: Path, attempt: int = 0, resume: str = "") -> Nodes:
    """Returns the other nodes of a job with several.

    Args:
        shared: A folder that all nodes share, for the secret if the environment has none.
        attempt: How often the job has been restarted.
        resume: On node 0, the checkpoint from which all nodes continue.

    Raises:
        UserError: The control port is not a port, or node 0 cannot listen there or write the secret.
    """
    assert options.master_port is not None  # `launch` chooses one for several nodes
    string = os.environ.get(CONTROL_PORT_VARIABLE) or str(options.master_port + 1)
    if not string.isdecimal() or not 0 < int(string) < 1 << 16:
        raise UserError("must be the number of a port", key=CONTROL_PORT_VARIABLE, value=string, fix="write 8119")
    host = options.master_addr.strip("[]")
    port = int(string)
    secret = secret_of_environment()
    path = shared.expanduser().absolute() / f".launchers-{port}.secret"
    if options.node_rank:
        return NodeClient(options=options, attempt=attempt, address=(host, port), secret=secret, secret_path=path)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address, family=family)
    except OSError as error:
        if os.environ.get(CONTROL_PORT_VARIABLE):
            rule = f"the launchers of the other nodes cannot call there: {error}"
            fix = "free it, or set this variable to another port on all nodes"
            raise UserError(rule, key=CONTROL_PORT_VARIABLE, value=port, fix=fix) from None
        rule = f"the launchers of the other nodes cannot call at the next port, {port}: {error}"
        fix = f"free it, give another master_port, or set {CONTROL_PORT_VARIABLE} to another port on all nodes"
        raise UserError(rule, key="master_port", value=options.master_port, fix=fix) from None
    server = NodeServer(
        options=options,
        attempt=attempt,
        resume=resume,
        listening=ListeningSocket(listening),
        secret=secret or make_secret(path),
        secret_path=path,
    )
    here = listening.getsockname()[0]
    if ipaddress.ip_address(here.partition("%")[0]).is_loopback and host != here:
        server.note(f"note: {host} is {here} on this machine, which other machines cannot reach: give its address")
    return server
