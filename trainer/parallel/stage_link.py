"""Tensors between the stages of a pipeline: on CPUs over sockets of their own, on devices by MindSpore's collectives.

On a CPU a stage sends without waiting: a thread for each other stage writes what is queued for it, while this stage
computes or waits for another one. So no order of sends and receives can block the stages in a circle, and what a stage
needs is under way as soon as it exists. The threads know bytes alone: MindSpore computes in one thread only.

A device waits in a transfer until the other one has come to its end of it. So that no stages wait for each other in a
circle, each direction between two stages has a group, and with it a stream, of its own: there a tensor that is sent
waits for its receiver, while the stage computes on. Within a direction tensors are received in the order in which they
are sent. So a schedule has no other waits than on CPUs.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
from typing import Any

import numpy as np
from mindspore import Tensor

from trainer.parallel.collectives import DeviceGroup, start_receive, start_send
from trainer.parallel.connections import connect, connection_lost
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.schedule import directions

_HEADER = struct.Struct("<4sqq")  # dtype, rows, columns
_CONNECT_SECONDS = 60


class StageLink:
    """Carries matrices between the stages of a pipeline; from each stage they come in the order of its sends.

    Args:
        group: One rank of each stage, in the order of stages; all of them make their links at the same time.
    """

    def __init__(self, group: CpuGroup, on_one_host: bool = True) -> None:
        # Its threads send while others compute, which two ends of one memory would have to agree about.
        found = connect(group.rank, group.size, group.gather_bytes, on_one_host, _CONNECT_SECONDS, memory=False)
        self.stage = group.rank
        self.sockets = found.sockets
        for each in self.sockets.values():
            each.setblocking(True)
        self.senders = {stage: _Sender(self.stage, stage, one) for stage, one in self.sockets.items()}

    def send(self, stage: int, tensor: Tensor) -> None:
        """Queues [rows, columns]; does not wait until the other stage takes it.

        Raises:
            RunError: The other stage has ended.
        """
        self.send_array(stage, tensor.asnumpy(), tensor)

    def send_array(self, stage: int, array: np.ndarray, owner: Tensor | None = None) -> None:
        """As `send`; the array must not change until it is sent. `owner` is the tensor whose memory it is."""
        self.senders[stage].put(array, owner)

    def receive(self, stage: int, tokens: int) -> Tensor:
        """Waits until the other stage has sent the rows of so many tokens; they say their number themselves.

        Raises:
            RunError: It has ended.
        """
        return Tensor.from_numpy(self.receive_array(stage))

    def receive_array(self, stage: int) -> np.ndarray:
        """As `receive`."""
        dtype, *shape = _HEADER.unpack(self._bytes(stage, bytearray(_HEADER.size)))
        array = np.empty(shape, np.dtype(dtype.rstrip(b"\0").decode()))
        self._bytes(stage, array.reshape(-1).view(np.uint8))
        return array

    def _bytes(self, stage: int, buffer: bytearray | np.ndarray) -> bytearray | np.ndarray:
        left = memoryview(buffer)
        while left:
            try:
                count = self.sockets[stage].recv_into(left)
            except OSError:
                count = 0
            if not count:
                raise connection_lost(f"stage {self.stage} of the pipeline lost its connection to stage {stage}")
            left = left[count:]
        return buffer

    def close(self) -> None:
        """Sends what is queued, and ends."""
        for sender in self.senders.values():
            sender.end()
        for connection in self.sockets.values():
            connection.close()


class _Sender:
    """Writes to one stage in a thread of its own."""

    def __init__(self, stage: int, to: int, connection: socket.socket) -> None:
        self.stage = stage
        self.to = to
        self.connection = connection
        self.queue: queue.SimpleQueue[tuple[Tensor | None, np.ndarray] | None] = queue.SimpleQueue()
        self.lost = False
        self.thread = threading.Thread(target=self._run, name=f"pipeline sender to stage {to}", daemon=True)
        self.thread.start()

    def put(self, array: np.ndarray, owner: Tensor | None) -> None:
        if self.lost:
            raise connection_lost(f"stage {self.stage} of the pipeline lost its connection to stage {self.to}")
        self.queue.put((owner, np.ascontiguousarray(array)))

    def end(self) -> None:
        self.queue.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            _, array = item
            header = _HEADER.pack(array.dtype.str[1:].encode(), *array.shape)
            try:
                self.connection.sendall(header)
                self.connection.sendall(array.reshape(-1).view(np.uint8))
            except OSError:
                self.lost = True
                return
            del item, array


class DeviceLink:
    """As `StageLink` on devices, for the float32 rows of the residual stream and their gradients.

    Args:
        group: One rank of each stage, in the order of stages; all of them make their links at the same time.
        width: Numbers of a row.
        shares: Ranks of a stage that share the rows of a token group; see `TensorParallel.sequence_parallel`.
    """

    def __init__(self, group: DeviceGroup, chunks: int, width: int, shares: int = 1) -> None:
        self.stage = group.rank
        self.width = width
        self.shares = shares
        self.groups: dict[tuple[int, int], DeviceGroup] = {}
        self.sends: list[Any] = []
        for sender, taker in directions(group.size, chunks):
            if self.stage in (sender, taker):
                pair = group.ranks[sender], group.ranks[taker]
                self.groups[sender, taker] = group.new_subgroup(sorted(pair), "rank-{}-to-{}".format(*pair))

    def send(self, stage: int, tensor: Tensor) -> None:
        """Dispatches the transfer; neither the host nor what is computed next waits for it."""
        group = self.groups[self.stage, stage]
        self.sends.append(start_send(tensor, group, 1 - group.rank).handle)

    def receive(self, stage: int, tokens: int) -> Tensor:
        """The rows of so many tokens; what is computed next waits for them on the device, the host does not."""
        group = self.groups[stage, self.stage]
        return start_receive((tokens // self.shares, self.width), group, 1 - group.rank).wait()

    def end_sends(self) -> None:
        """What is computed next waits until all is sent. For the end of a window, when no stage needs more of this one:
        MindSpore forbids to drop the handle of a transfer that nothing has waited for."""
        for handle in self.sends:
            handle.wait()
        self.sends.clear()
