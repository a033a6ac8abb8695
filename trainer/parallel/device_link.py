"""Tensors between the stages of a pipeline on devices, by MindSpore's isend and irecv.

A device waits in a transfer until the other one has come to its end of it. So that no stages wait for each other in a
circle, each direction between two stages has a group, and with it a stream, of its own: there a tensor that is sent
waits for its receiver, while the stage computes on. Within a direction tensors are received in the order in which they
are sent. `trainer.parallel.schedule` then has no more waits than with messages that are stored.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, mint, ops
from mindspore import dtype as mstype

from trainer.parallel.collectives import DeviceGroup
from trainer.parallel.schedule import directions


class DeviceLink:
    """As `trainer.parallel.stage_link.StageLink`, for the float32 rows of the residual stream and their gradients.

    Args:
        group: One rank of each stage, in the order of stages; all of them make their links at the same time.
        width: Numbers of a row.
        shares: Ranks of a stage that share the rows of a token group; see `TensorParallel.shares_rows`.
    """

    def __init__(self, group: DeviceGroup, chunks: int, width: int, shares: int = 1) -> None:
        self.ranks, self.stage, self.width, self.shares = group.ranks, group.rank, width, shares
        self.names: dict[tuple[int, int], str] = {}
        self.sends: list[Any] = []
        for sender, taker in directions(group.size, chunks):
            if self.stage in (sender, taker):
                pair = self.ranks[sender], self.ranks[taker]
                name = "rank-{}-to-{}".format(*pair)
                group.part(sorted(pair), name)
                self.names[sender, taker] = name

    def send(self, stage: int, tensor: Tensor) -> None:
        """Dispatches the transfer; neither the host nor what is computed next waits for it."""
        self.sends.append(ops.communication.isend(tensor, self.ranks[stage], group=self.names[self.stage, stage]))

    def receive(self, stage: int, tokens: int) -> Tensor:
        """The rows of so many tokens; what is computed next waits for them on the device, the host does not."""
        rows = mint.empty((tokens // self.shares, self.width), dtype=mstype.float32)
        ops.communication.irecv(rows, self.ranks[stage], group=self.names[stage, self.stage]).wait()
        return rows

    def end_sends(self) -> None:
        """What is computed next waits until all is sent. For the end of a window, when no stage needs more of this one:
        MindSpore forbids to drop the handle of a transfer that nothing has waited for."""
        for handle in self.sends:
            handle.wait()
        self.sends.clear()
