"""Sends tensors between the stages of a pipeline: on CPUs over sockets, on devices by MindSpore's collectives.

On a CPU a stage sends without waiting: a thread for each other stage writes what is queued for it, while this stage
computes or waits. So no order of sends and receives can deadlock the stages, and a tensor travels as soon as it exists.
The threads handle bytes only: MindSpore computes in one thread.

On a device a transfer waits until the other stage starts its end of it. To avoid deadlocks, each direction between two
stages has a separate group and thus a separate stream: a sent tensor waits there for its receiver, while the stage goes
on computing. Within a direction tensors are received in the order in which they are sent. So stages wait in a schedule
only where they wait on CPUs.
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
    """Sends matrices between the stages of a pipeline on CPUs; they arrive in the order in which a stage sends them.

    Args:
        group: One rank of each stage, in the order of stages; all of them must make their links at the same time.
    """

    def __init__(self, group: CpuGroup, on_one_host: bool = True) -> None:
        # Sockets only: its threads send while the other stage computes, and shared memory needs both ends.
        connections = connect(group.rank, group.size, group.gather_bytes, on_one_host, _CONNECT_SECONDS, memory=False)
        self.stage = group.rank
        self.sockets = connections.sockets
        for each in self.sockets.values():
            each.setblocking(True)
        self.senders = {stage: _Sender(self.stage, stage, one) for stage, one in self.sockets.items()}

    def send(self, stage: int, tensor: Tensor) -> None:
        """Queues [rows, columns] for another stage and does not wait until it is received.

        Raises:
            RunError: The other stage has ended.
        """
        self.send_array(stage, tensor.asnumpy(), tensor)

    def send_array(self, stage: int, array: np.ndarray, owner: Tensor | None = None) -> None:
        """Queues an array for another stage; it must not change until it is sent.

        Args:
            owner: The tensor whose memory the array is.
        """
        self.senders[stage].put(array, owner)

    def receive(self, stage: int, tokens: int) -> Tensor:
        """Waits for the next tensor of another stage; its header tells its shape, so that `tokens` is not used.

        Raises:
            RunError: The other stage has ended.
        """
        return Tensor.from_numpy(self.receive_array(stage))

    def receive_array(self, stage: int) -> np.ndarray:
        """Waits for the next array of another stage.

        Raises:
            RunError: The other stage has ended.
        """
        header = bytearray(_HEADER.size)
        self._fill(stage, memoryview(header))
        dtype, *shape = _HEADER.unpack(header)
        array = np.empty(shape, np.dtype(dtype.rstrip(b"\0").decode()))
        self._fill(stage, array.reshape(-1).view(np.uint8).data)
        return array

    def _fill(self, stage: int, buffer: memoryview) -> None:
        """Receives bytes of another stage until the buffer is full."""
        while buffer:
            try:
                count = self.sockets[stage].recv_into(buffer)
            except OSError:
                count = 0
            if not count:
                raise connection_lost(f"stage {self.stage} of the pipeline lost its connection to stage {stage}")
            buffer = buffer[count:]

    def close(self) -> None:
        """Sends what is queued, then closes the connections."""
        for sender in self.senders.values():
            sender.close()
        for connection in self.sockets.values():
            connection.close()


class _Sender:
    """A thread that writes to one stage."""

    def __init__(self, stage: int, to: int, connection: socket.socket) -> None:
        self.stage = stage
        self.to = to
        self.connection = connection
        self.queue: queue.SimpleQueue[tuple[Tensor | None, np.ndarray] | None] = queue.SimpleQueue()
        self.lost = False
        self.thread = threading.Thread(target=self._run, name=f"pipeline sender to stage {to}", daemon=True)
        self.thread.start()

    def put(self, array: np.ndarray, owner: Tensor | None) -> None:
        """Queues an array; raises a RunError if the other stage has ended."""
        if self.lost:
            raise connection_lost(f"stage {self.stage} of the pipeline lost its connection to stage {self.to}")
        self.queue.put((owner, np.ascontiguousarray(array)))

    def close(self) -> None:
        """Waits until all queued arrays are sent, and ends the thread."""
        self.queue.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            _, array = item
            header = _HEADER.pack(array.dtype.str[1:].encode(), *array.shape)
            try:
                self.connection.sendall(header)
                self.connection.sendall(array.reshape(-1).view(np.uint8).data)
            except OSError:
                self.lost = True
                return
            del item, array


class DeviceLink:
    """Sends float32 rows of the residual stream and their gradients between the stages of a pipeline on devices.

    Args:
        group: One rank of each stage, in the order of stages; all of them must make their links at the same time.
        width: Numbers of a row.
        shares: Ranks of a stage that shard the tokens of a micro-batch; see `TensorParallel.sequence_parallel`.
    """

    def __init__(self, group: DeviceGroup, chunks: int, width: int, shares: int = 1) -> None:
        self.stage = group.rank
        self.width = width
        self.shares = shares
        self.groups: dict[tuple[int, int], DeviceGroup] = {}
        self.sends: list[Any] = []
        for sender, receiver in directions(group.size, chunks):
            if self.stage in (sender, receiver):
                pair = group.ranks[sender], group.ranks[receiver]
                self.groups[sender, receiver] = group.new_subgroup(sorted(pair), "rank-{}-to-{}".format(*pair))

    def send(self, stage: int, tensor: Tensor) -> None:
        """Starts the transfer; neither the host nor the operators dispatched next wait for it."""
        group = self.groups[self.stage, stage]
        self.sends.append(start_send(tensor, group, 1 - group.rank).handle)

    def receive(self, stage: int, tokens: int) -> Tensor:
        """Receives the rows of so many tokens; the operators dispatched next wait for them, the host does not."""
        group = self.groups[stage, self.stage]
        return start_receive((tokens // self.shares, self.width), group, 1 - group.rank).wait()

    def wait_for_sends(self) -> None:
        """Makes the operators dispatched next wait until everything is sent; called at the end of a step.

        MindSpore forbids to drop the handle of a transfer that nothing has waited for.
        """
        for handle in self.sends:
            handle.wait()
        self.sends.clear()
