"""Evaluation in semi-automatic mode: a graph of the forward pass alone, with the weights of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, nn
from mindspore.parallel.auto_parallel import AutoParallel

from trainer.config.checks.parallel import degrees_of
from trainer.models.inputs import LossSums
from trainer.semi_auto.network import set_parallelism
from trainer.semi_auto.step import Window, graph_mode, own_rows

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data.batches.batch import Batch
    from trainer.parallel.world import World
    from trainer.semi_auto.network import LossCell


class MainLoss(nn.Cell):
    """(batch of the loss cell) -> the sum of the main model's losses, without multi-token prediction modules."""

    def __init__(self, loss: LossCell) -> None:
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(self, input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1):
        return self.loss.sum_of_losses(input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1, 0)


class GraphEvaluator:
    """batch -> the sum of the losses of its tokens. All ranks call it together, with the same batch.

    The graph is compiled at the first call, for the rows of that batch; a shorter one is padded.

    Args:
        loss: Of a compiled training.
    """

    def __init__(self, loss: LossCell, config: Config, world: World) -> None:
        self.config, self.world, self.degrees = config, world, degrees_of(config, world)
        self.network = AutoParallel(MainLoss(loss), parallel_mode="semi_auto")
        self.network.no_init_parameters_in_compile()
        set_parallelism(self.network, config, world)
        self.network.set_train(False)
        self.window: Window | None = None

    def __call__(self, batch: Batch) -> LossSums:
        if self.window is None:
            data = self.degrees.data_parallel
            rows = -(-len(batch.labels) // data) * data
            self.window = Window(rows, batch.labels.shape[1], own_rows(self.config, self.world, rows, 1))
        with graph_mode():
            loss = self.network(*self.window.tensors([batch], 1.0))
        # In a pipeline only the ranks of the last stage have the loss; the mean over all ranks is to be the loss.
        stages, stage_ranks = self.degrees.pipeline_stage, self.world.size // self.degrees.pipeline_stage
        share = stages if self.world.rank // stage_ranks == stages - 1 else 0.0
        total = Tensor(np.float32(loss.asnumpy() * share)) if share != 1 else loss
        return LossSums(total, total)
