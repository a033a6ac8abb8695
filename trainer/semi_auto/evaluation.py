"""Evaluation in semi-automatic mode: a graph of the forward pass alone, with the weights of the training."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel

from trainer.config.checks.parallel import parallel_degrees
from trainer.models.inputs import LossSums
from trainer.semi_auto.network import set_parallelism
from trainer.semi_auto.step import GraphBatch, graph_mode, local_rows

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data.batches.batch import Batch
    from trainer.parallel.world import World
    from trainer.semi_auto.classifier import ImageLossCell
    from trainer.semi_auto.network import LossCell


class MainLoss(nn.Cell):
    """(batch of the loss cell) -> what its `evaluated` says: losses without multi-token prediction modules."""

    def __init__(self, loss: LossCell | ImageLossCell) -> None:
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(self, *batch):
        return self.loss.evaluated(*batch)


class GraphEvaluator:
    """batch -> the sum of its losses; of a classifier its correct labels too. All ranks call it with the same batch.

    The graph is compiled at the first call, for the rows of that batch; a shorter one is padded.

    Args:
        loss: Of a compiled training.
    """

    def __init__(self, loss: LossCell | ImageLossCell, config: Config, world: World) -> None:
        self.loss = loss
        self.config = config
        self.world = world
        self.degrees = parallel_degrees(config, world)
        self.window: GraphBatch | None = None

    @cached_property
    def network(self) -> AutoParallel:
        """Built at the first call: `set_train(False)` reaches the cells that it shares with the training."""
        network = AutoParallel(MainLoss(self.loss), parallel_mode="semi_auto")
        network.no_init_parameters_in_compile()
        set_parallelism(network, self.config, self.world, trains=False)
        network.set_train(False)
        return network

    def __call__(self, batch: Batch) -> LossSums:
        if self.window is None:
            data = self.degrees.data_parallel
            rows = -(-len(batch.labels) // data) * data
            self.window = GraphBatch(rows, self.config.network, local_rows(self.config, self.world, rows, 1))
        with graph_mode():
            found = self.network(*self.window.tensors([batch], 1.0))
        if self.config.classifier is not None:
            loss, correct = found
            return LossSums(loss, loss, correct=correct)
        stages = self.degrees.pipeline_stage
        total = contribution_to_mean(found, self.world.rank // (self.world.size // stages), stages)
        return LossSums(total, total)


def contribution_to_mean(loss: Tensor, stage: int, stages: int) -> Tensor:
    """What a rank of a stage adds to the mean over all ranks, which is to be the loss.

    In a pipeline only the ranks of the last stage have the loss; what the others get has no meaning and may be NaN.
    """
    if stage != stages - 1:
        return Tensor(np.float32(0))
    return loss if stages == 1 else Tensor(np.float32(loss.asnumpy() * stages))
