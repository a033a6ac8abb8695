"""Tensors between the stages of a pipeline on devices, by MindSpore's isend and irecv.

A device waits in a transfer until the other one has come to its end of it. So that no stages wait for each other in a
circle, each direction between two stages has a group, and with it a stream, of its own: there a tensor that is sent
waits for its receiver, while the stage computes on. Within a direction tensors are received in the order in which they
are sent. `trainer.parallel.schedule` then has no more waits than with messages that are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.parallel.collectives import DeviceGroup, start_receive, start_send
from trainer.parallel.schedule import directions

if TYPE_CHECKING:
    from mindspore import Tensor


class DeviceLink:
    """As `trainer.parallel.stage_link.StageLink`, for the float32 rows of the residual stream and their gradients.

    Args:
        group: One rank of each stage, in the order of stages; all of them make their links at the same time.
        width: Numbers of a row.
        shares: Ranks of a stage that share the rows of a token group; see `TensorParallel.shares_rows`.
    """

    def __init__(self, group: DeviceGroup, chunks: int, width: int, shares: int = 1) -> None:
        self.stage, self.width, self.shares = group.rank, width, shares
        self.groups: dict[tuple[int, int], DeviceGroup] = {}
        self.sends: list[Any] = []
        for sender, taker in directions(group.size, chunks):
            if self.stage in (sender, taker):
                pair = group.ranks[sender], group.ranks[taker]
                self.groups[sender, taker] = group.part(sorted(pair), "rank-{}-to-{}".format(*pair))

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
