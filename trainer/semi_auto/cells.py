"""The cell that differentiates the loss in semi-automatic mode, and all cells of a training as one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mindspore
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.parallel.auto_parallel import AutoParallel


class GradientCell(nn.Cell):
    """(batch of the loss cell) -> (loss, gradients), or (loss, 0) if the gradients are in `sums`.

    Args:
        network: Computes the loss of the whole batch of a step.
        accumulates_in_graph: Whether MindSpore sums the gradients of the micro-batches in parameters `accu_grads.*`.
        uses_sums: Whether these sums are the gradients. With a sharded optimizer state they are not: MindSpore returns
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

    def construct(self, *batch: Tensor) -> tuple:
        """Returns the loss, and the gradients unless they are in `sums`."""
        loss, gradients = self.differentiated(*batch)
        if not self.accumulates_in_graph:
            return loss, gradients
        # The graph must contain these parameters in both cases: MindSpore finds them by name.
        sums = ops.depend(self.sums, gradients)
        if self.uses_sums:  # returning them would copy them
            return ops.depend(loss, sums), 0
        return loss, ops.depend(gradients, sums)


class SemiAuto(NamedTuple):
    """The cells of a training in this mode."""

    network: AutoParallel
    """The outermost cell; its arguments are those of `LossCell`, for the whole batch of a step."""
    step: GradientCell
    loss: nn.Cell
    """The `LossCell`."""
