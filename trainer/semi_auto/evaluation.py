"""Evaluation in semi-automatic mode: a graph of the forward pass, with the weights of the training."""

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
    from trainer.semi_auto.network import LossCell


class MainLoss(nn.Cell):
    """(batch of the loss cell) -> the result of its `evaluated`: the losses without MTP modules."""

    def __init__(self, loss: LossCell) -> None:
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(self, *batch: Tensor) -> Tensor:
        return self.loss.evaluated(*batch)


class GraphEvaluator:
    """batch -> the sum of its losses.

    All ranks call it with the same batch. The first call compiles the graph for the number of sequences of its batch;
    shorter batches are padded.

    Args:
        loss: The loss cell of a compiled training.
    """

    def __init__(self, loss: LossCell, config: Config, world: World) -> None:
        self.loss = loss
        self.config = config
        self.world = world
        self.degrees = parallel_degrees(config, world)
        self.batch: GraphBatch | None = None

    @cached_property
    def network(self) -> AutoParallel:
        """Returns the graph. The first call builds it, because `set_train(False)` also changes the training's cells."""
        network = AutoParallel(MainLoss(self.loss), parallel_mode="semi_auto")
        network.no_init_parameters_in_compile()
        set_parallelism(network, self.config, self.world, trains=False)
        network.set_train(False)
        return network

    def __call__(self, batch: Batch) -> LossSums:
        if self.batch is None:
            data = self.degrees.data_parallel
            rows = -(-len(batch.labels) // data) * data
            self.batch = GraphBatch(rows, self.config.decoder, local_rows(self.config, self.world, rows, 1))
        with graph_mode():
            result = self.network(*self.batch.tensors([batch], 1.0))
        stages = self.degrees.pipeline_stage
        total = contribution_to_mean(result, self.world.rank // (self.world.size // stages), stages)
        return LossSums(total, total)


def contribution_to_mean(loss: Tensor, stage: int, stages: int) -> Tensor:
    """Returns the number whose mean over all ranks is the loss.

    In a pipeline, only the ranks of the last stage have the loss; the result of the graph on other ranks may be NaN.
    """
    if stages == 1:
        return loss
    if stage != stages - 1:
        return Tensor(np.float32(0))
    return Tensor(np.float32(loss.asnumpy() * stages))
