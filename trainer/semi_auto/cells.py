"""The cells around the loss of a training in semi-automatic mode, and all of them as one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mindspore
from mindspore import Parameter, ParameterTuple, nn, ops
from mindspore.parallel.auto_parallel import AutoParallel


class GradientCell(nn.Cell):
    """(batch of the loss cell) -> (loss, gradients), or where they are in `sums` (loss, 0).

    Args:
        network: Computes the loss of a whole window.
        accumulates_in_graph: MindSpore sums the gradients of the micro-batches in its own parameters, `accu_grads.*`.
        uses_sums: These sums are the gradients. If the optimizer state is sharded they are not: MindSpore returns
            this rank's shards of the sums.
    """

    def __init__(
        self, network: nn.Cell, weights: Sequence[Parameter], *, accumulates_in_graph: bool, uses_sums: bool
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights = ParameterTuple(weights)
        self.accumulates_in_graph = accumulates_in_graph
        self.uses_sums = uses_sums
        self.differentiated = mindspore.value_and_grad(network, None, self.weights)
        self.sums = self.weights.clone("accu_grads", init="zeros") if accumulates_in_graph else ()

    def construct(self, *batch):
        loss, gradients = self.differentiated(*batch)
        if not self.accumulates_in_graph:
            return loss, gradients
        # In both cases the graph must hold these parameters: MindSpore finds them by name.
        sums = ops.depend(self.sums, gradients)
        if self.uses_sums:  # a graph that returned them would copy them
            return ops.depend(loss, sums), 0
        return loss, ops.depend(gradients, sums)


class SemiAuto(NamedTuple):
    """The cells of a training in this mode."""

    network: AutoParallel
    """Around the step; called with the batch of a whole window, see `LossCell`."""
    step: GradientCell
    loss: nn.Cell
    """A `LossCell` or an `ImageLossCell`."""
