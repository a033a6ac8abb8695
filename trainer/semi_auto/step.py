"""A training step whose loss and gradients come from one graph, for MindSpore's semi-automatic mode.

A rank has shards of the weights and gets the gradients of these shards. Norm, clipping, guards and update are those of
the explicit mode, applied to the shards; sums of squares are added up over the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, nn

from trainer.config.checks.parallel import parallel_degrees
from trainer.config.schema.classifier import ClassifierConfig
from trainer.data.batches.batch import Batch, padding_batch
from trainer.data.source.mnist import ImageBatch, padding_images
from trainer.models.classifier import ImageInputBuilder
from trainer.models.spec.adapters import adapter_spec
from trainer.ops.dropout import DropoutKey, mask_seed
from trainer.ops.measures import metric_functions, read_together
from trainer.ops.routing import RouterRates
from trainer.step.accumulate import RankFlags, StepGradients, count_loss_tokens
from trainer.step.clip import norm_groups
from trainer.step.guards import UpdateGuard
from trainer.step.train_step import CheckpointShard, StepResult, apply_gradients

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig, RunnerWrapper
    from trainer.models.inputs import LossSums
    from trainer.optim.optimizer import Optimizer
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.world import World
    from trainer.semi_auto.cells import GradientCell
    from trainer.semi_auto.experts import GraphRouters
    from trainer.semi_auto.shards import ShardedParameters


@contextlib.contextmanager
def graph_mode() -> Iterator[None]:
    """Compiles each call of a cell into one graph while the block lasts; elsewhere cells run operator by operator."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        yield
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def uses_dropout(settings: ModelConfig) -> bool:
    """Whether a training draws dropout masks."""
    adapter = adapter_spec(settings)
    of_adapters = 0
    if adapter is not None:
        of_adapters = adapter.dropout
    return bool(settings.hidden_dropout or settings.attention_dropout or of_adapters)


class MaskSeeds(NamedTuple):
    """What the seeds of dropout masks follow from: the run's seed, micro-batches of a step, data-parallel ranks."""

    seed: int
    micro_batches: int
    ranks: int

    def for_rows(self, step: int, rows: int) -> np.ndarray:
        """int64 [rows, 1], below 2^61: a layer adds the number of its mask, a tensor-parallel rank its own number."""
        keys = [
            DropoutKey(self.seed, rank, step, number)
            for number in range(self.micro_batches)
            for rank in range(self.ranks)
        ]
        seeds = np.array([mask_seed(key, 0) >> 2 for key in keys], np.int64)
        return np.repeat(seeds, rows // len(keys))[:, None]


class GraphBatch(NamedTuple):
    """The batch of a step: all micro-batches stacked, padded with sequences without labels."""

    rows: int
    settings: ModelConfig | ClassifierConfig
    local_rows: slice | np.ndarray = slice(None)
    """The rows that this rank passes to the graph: all, or with `full_batch: False` those of its data-parallel rank."""
    mask_seeds: MaskSeeds | None = None
    """Of a model with dropout."""

    def padding(self, size: int) -> Batch | ImageBatch:
        """So many rows without labels."""
        if isinstance(self.settings, ClassifierConfig):
            return padding_images(size, self.settings.pixels)
        return padding_batch(size, self.settings.seq_length)

    def tensors(self, micro_batches: Sequence[Batch | ImageBatch], share: float, step: int = 0) -> list[Tensor]:
        """The inputs of the loss cell of a step (from 0), with `share` repeated for every row."""
        filled = (*micro_batches, self.padding(self.rows - sum(len(batch.labels) for batch in micro_batches)))
        if isinstance(self.settings, ClassifierConfig):
            filled = map(ImageInputBuilder(self.settings).arrays, filled)
        arrays = [np.concatenate(parts) for parts in zip(*filled, strict=True)]
        arrays.append(np.full((self.rows, 1), share, np.float32))
        if self.mask_seeds is not None:
            arrays.append(self.mask_seeds.for_rows(step, self.rows))
        return [Tensor(np.ascontiguousarray(array[self.local_rows])) for array in arrays]


def local_rows(config: Config, world: World, rows: int, micro_batches: int) -> slice | np.ndarray:
    """Returns `GraphBatch.local_rows`: the part of every micro-batch that a rank passes to the graph."""
    degrees = parallel_degrees(config, world)
    if config.parallel.full_batch:
        return slice(None)
    # Ranks of a stage are numbered by data-parallel rank first.
    place = world.rank // degrees.model_parallel % degrees.data_parallel
    return np.arange(rows).reshape(micro_batches, degrees.data_parallel, -1)[:, place].reshape(-1)


class GraphStep:
    """`TrainStep` with loss and gradients from one graph, which returns the minimised loss alone.

    Args:
        network: The `GradientCell` with MindSpore's wrappers around it.
        optimizer: Updates this rank's shards.
        schedule: Learning rate of update number `n`, from 0.
        window: Shape of the batch of a step, all micro-batches and ranks together.
        model: For evaluations: batch -> the sum of the losses of its tokens.
        reports_loss: Whether this rank has the loss.
        routers: Of the layers with experts; None for a dense model.
        stop_at_bad_loss: As in `TrainStep`.
    """

    pipeline = None  # MindSpore has the schedule
    computes_together = True
    """Every rank computes each batch of an evaluation, together with all others."""

    def __init__(
        self,
        network: nn.Cell,
        cell: GradientCell,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        wrapper: RunnerWrapper,
        *,
        window: GraphBatch,
        parameters: ShardedParameters,
        communicator: Communicator,
        model: Callable[[Batch], LossSums] | None = None,
        reports_loss: bool = True,
        routers: GraphRouters | None = None,
        stop_at_bad_loss: bool = False,
    ) -> None:
        self.network = network
        self.cell = cell
        self.optimizer = optimizer
        self.schedule = schedule
        self.wrapper = wrapper
        self.window = window
        self.parameters = parameters
        self.communicator = communicator
        self.reports_loss = reports_loss
        self.routers = routers
        self.model = model
        self.guards = UpdateGuard(wrapper, stop_at_bad_loss)
        sums = {total.name.removeprefix("accu_grads."): total for total in cell.sums}
        self.sums = {name: sums[name] for name in sums if name in parameters.local}  # others are of other stages

    def __call__(self, micro_batches: Sequence[Batch], rank_flags: RankFlags | None = None) -> StepResult:
        """As `TrainStep`; all ranks get the same micro-batches, and each passes its own rows to the graph."""
        lr = self.schedule(self.optimizer.updates)
        scale = self.guards.scale
        window = self.differentiate(micro_batches, scale, rank_flags)
        result = apply_gradients(window, lr, self.optimizer, self.wrapper, self.guards)
        for total in self.sums.values() if window.gradients is not None else ():
            total.zero_()
        if self.routers is not None and window.routing is not None:
            if result.updated:
                self.routers.update_bias(window.routing)
            self.routers.clear()
        return result

    def build_inputs(self, batch: Batch) -> Batch:
        """What `model` takes: it cuts the batch itself."""
        return batch

    def differentiate(
        self, micro_batches: Sequence[Batch], scale: float, rank_flags: RankFlags | None
    ) -> StepGradients:
        """Loss of the window, and the gradients of this rank's shards times the loss scale."""
        tokens = sum(count_loss_tokens(batch) for batch in micro_batches)
        if tokens == 0:
            return StepGradients(0.0, 0, 0, None)
        with graph_mode():
            loss, gradients = self.network(*self.window.tensors(micro_batches, scale / tokens, self.optimizer.updates))
        if self.cell.uses_sums:
            by_name = self.sums
        else:
            by_name = self.by_name(gradients)
        own = [by_name[name] for name in self.optimizer.parameters]
        # In a pipeline only the ranks of the last stage have the loss.
        if self.reports_loss:
            own_loss = [metric_functions().keep_scalar(loss), 1.0]
        else:
            own_loss = [0.0, 0.0]
        squares = self.parameters.squares(list(self.optimizer.parameters), metric_functions().squares(own))
        if rank_flags is None:
            own_votes = []
        else:
            own_votes = [np.array(rank_flags(), np.float64)]
        total, count, squares, *all_votes = self.communicator.all_reduce([*own_loss, squares, *own_votes])
        groups = norm_groups(self.parameters.trained, self.wrapper, self.optimizer.group_of)
        sums = metric_functions().square_sums(squares, list(groups.groups.values()), groups.each)
        if self.routers is None:
            routing = None
        else:
            routing = self.routers.counts()
        if routing is None:
            rates = []
        else:
            rates = [metric_functions().router_rates(routing)]
        total, count, sums, *others = read_together([total, count, sums, *rates, *all_votes])
        return StepGradients(
            float(total) / max(float(count), 1) / scale,
            tokens,
            0,  # a micro-batch without labels is not left out
            own,
            norms=groups.norms(sums),
            routing=routing,
            router_rates=None if routing is None else RouterRates(routing.layers, *others[0]),
            rank_flags=None if rank_flags is None else others[-1],
        )

    def by_name(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """The gradients by the names of their weights.

        Of a pipeline's weights MindSpore leaves out those of other stages, and keeps the order of the rest.
        """
        own = {weight.name: weight.shape for weight in self.cell.weights if weight.name in self.parameters.local}
        assert list(own.values()) == [gradient.shape for gradient in gradients], "not the gradients of this rank"
        return dict(zip(own, gradients, strict=True))

    def load_optimizer(self, arrays: Mapping[str, np.ndarray], updates: int) -> None:
        """As `TrainStep.load_optimizer`."""
        named = ((key, key.split(".", 1)[1]) for key in arrays)
        own = self.parameters.local
        part = self.parameters.part
        self.optimizer.load_state({key: part(name, arrays[key]) for key, name in named if name in own}, updates)

    def state_dict_shard(self) -> CheckpointShard:
        """As `TrainStep.state_dict_shard`; rank 0 gathers the arrays, one after the other."""
        own = {name: each.asnumpy() for name, each in self.parameters.local.items()}
        weights = self.parameters.gather(self.parameters.shapes, own)
        state = self.optimizer.state_arrays()
        found = {}
        for kind in self.optimizer.state:
            parts = {name: state[f"{kind}.{name}"] for name in self.optimizer.parameters}
            whole = self.parameters.gather(self.optimizer.group_of, parts)
            found |= {f"{kind}.{name}": array for name, array in whole.items()}
        return CheckpointShard(weights, found, self.optimizer.updates)

    def state(self) -> dict:
        """As `TrainStep.state`."""
        return self.guards.state()

    def load_state(self, state: Mapping) -> None:
        """As `TrainStep.load_state`."""
        self.guards.load_state(state)
