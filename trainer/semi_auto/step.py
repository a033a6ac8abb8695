"""A training step in MindSpore's semi-automatic mode: one graph computes loss and gradients.

A rank has shards of the weights and gets the gradients of these shards. Norm, clipping, guards and update are those of
explicit mode, for the shards; sums of squares are summed over the ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, nn

from trainer.config.checks.parallel import parallel_degrees
from trainer.data.batches.batch import Batch, padding_batch
from trainer.ops.dropout import DropoutKey, mask_seed
from trainer.ops.measures import metric_functions, read_together
from trainer.ops.routing import RouterRates
from trainer.step.accumulate import RankFlags, StepGradients, count_loss_tokens
from trainer.step.clip import norm_groups
from trainer.step.guards import UpdateGuard
from trainer.step.train_step import CheckpointShard, StepResult, apply_gradients

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.config.schema.runner import RunnerWrapper
    from trainer.models.inputs import LossSums
    from trainer.optim.optimizer import Optimizer
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.world import World
    from trainer.semi_auto.cells import GradientCell
    from trainer.semi_auto.experts import GraphRouters
    from trainer.semi_auto.shards import ShardedParameters


@contextlib.contextmanager
def graph_mode() -> Iterator[None]:
    """Compiles each call of a cell into one graph inside the block; outside cells run operator by operator."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        yield
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


class MaskSeeds(NamedTuple):
    """The seeds of dropout masks, from the run's seed and the numbers of micro-batches and data-parallel ranks."""

    seed: int
    micro_batches: int
    ranks: int

    def for_rows(self, step: int, rows: int) -> np.ndarray:
        """Returns the seeds of all sequences of a step, int64 [rows, 1], below 2^61.

        A layer adds the number of its mask, and a tensor-parallel rank a multiple of its number.
        """
        keys = [
            DropoutKey(self.seed, rank, step, number)
            for number in range(self.micro_batches)
            for rank in range(self.ranks)
        ]
        seeds = np.array([mask_seed(key, 0) >> 2 for key in keys], np.int64)
        return np.repeat(seeds, rows // len(keys))[:, None]


class GraphBatch(NamedTuple):
    """Makes the input of the graph for a step: all micro-batches in one batch, padded with sequences without labels."""

    rows: int
    settings: ModelConfig
    local_rows: slice | np.ndarray = slice(None)
    """The sequences that this rank passes to the graph; see `passes_own_rows`."""
    mask_seeds: MaskSeeds | None = None
    """The seeds of a model with dropout."""

    def tensors(self, micro_batches: Sequence[Batch], share: float, step: int = 0) -> list[Tensor]:
        """Returns the inputs of the loss cell for a step (from 0), with `share` repeated for every sequence."""
        missing = self.rows - sum(len(batch.labels) for batch in micro_batches)
        batches = (*micro_batches, padding_batch(missing, self.settings.seq_length))
        arrays = [np.concatenate(pieces) for pieces in zip(*batches, strict=True)]
        arrays.append(np.full((self.rows, 1), share, np.float32))
        if self.mask_seeds is not None:
            arrays.append(self.mask_seeds.for_rows(step, self.rows))
        return [Tensor(np.ascontiguousarray(array[self.local_rows])) for array in arrays]


def passes_own_rows(config: Config, micro_batches: int) -> bool:
    """Returns whether a rank passes the graph only the sequences of its data-parallel rank, in the order of the batch.

    Of the whole batch MindSpore would cut them with StridedSlice, a legacy kernel. It also cuts micro-batches with it,
    and gathers the sequences of all ranks before, so `full_batch` decides there.
    """
    return micro_batches == 1 or not config.parallel.full_batch


def local_rows(config: Config, world: World, rows: int, micro_batches: int) -> slice | np.ndarray:
    """Returns the sequences of a step that a rank passes to the graph: its part of every micro-batch."""
    degrees = parallel_degrees(config, world)
    if not passes_own_rows(config, micro_batches):
        return slice(None)
    # Ranks of a stage are numbered by data-parallel rank first.
    place = world.rank // degrees.model_parallel % degrees.data_parallel
    return np.arange(rows).reshape(micro_batches, degrees.data_parallel, -1)[:, place].reshape(-1)


class GraphStep:
    """A `TrainStep` whose loss and gradients come from one graph; of the losses, the graph returns only the total.

    Args:
        network: The `GradientCell` inside MindSpore's wrappers.
        cell: The `GradientCell`.
        optimizer: Updates this rank's shards.
        schedule: Learning rate of update number `n`, from 0.
        batch: Makes the input of the graph from the micro-batches of all ranks.
        parameters: The parameters and shards of this rank.
        model: Evaluates a batch: batch -> the sum of the losses of its tokens.
        reports_loss: Whether this rank has the loss.
        routers: The routers of a model with experts. Default None: a dense model.
        stop_at_bad_loss: Whether a loss that is not finite ends the run, see `TrainStep`.
    """

    pipeline = None  # MindSpore executes the pipeline's schedule
    computes_together = True
    """Whether all ranks compute each batch of an evaluation together."""

    def __init__(
        self,
        network: nn.Cell,
        cell: GradientCell,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        wrapper: RunnerWrapper,
        *,
        batch: GraphBatch,
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
        self.batch = batch
        self.parameters = parameters
        self.norm_groups = norm_groups(parameters.trained, wrapper, optimizer.group_of)
        self.communicator = communicator
        self.reports_loss = reports_loss
        self.routers = routers
        self.model = model
        self.guards = UpdateGuard(wrapper, stop_at_bad_loss)
        sums = {total.name.removeprefix("accu_grads."): total for total in cell.sums}
        self.sums = {name: sums[name] for name in sums if name in parameters.local}  # the rest belongs to other stages

    def __call__(self, micro_batches: Sequence[Batch], rank_flags: RankFlags | None = None) -> StepResult:
        """Does a step. All ranks get the same micro-batches, and each passes its own sequences to the graph."""
        lr = self.schedule(self.optimizer.updates)
        scale = self.guards.scale
        gradients = self.differentiate(micro_batches, scale, rank_flags)
        result = apply_gradients(gradients, lr, self.optimizer, self.wrapper, self.guards)
        if gradients.gradients is not None:
            for total in self.sums.values():
                total.zero_()
        if self.routers is not None and gradients.routing is not None:
            if result.updated:
                self.routers.update_bias(gradients.routing)
            self.routers.clear()
        return result

    def build_inputs(self, batch: Batch) -> Batch:
        """Returns the batch unchanged: `model` selects this rank's sequences."""
        return batch

    def differentiate(
        self, micro_batches: Sequence[Batch], scale: float, rank_flags: RankFlags | None
    ) -> StepGradients:
        """Computes the loss of the step, and the gradients of this rank's shards times the loss scale."""
        tokens = sum(count_loss_tokens(batch) for batch in micro_batches)
        if tokens == 0:
            return StepGradients(0.0, 0, 0, None)
        with graph_mode():
            loss, gradients = self.network(*self.batch.tensors(micro_batches, scale / tokens, self.optimizer.updates))
        if self.cell.uses_sums:
            by_name = self.sums
        else:
            by_name = self._by_name(gradients)
        ordered = [by_name[name] for name in self.optimizer.parameters]
        # In a pipeline only the ranks of the last stage have the loss.
        local_loss = [0.0, 0.0]
        if self.reports_loss:
            local_loss = [metric_functions().keep_scalar(loss), 1.0]
        squares = self.parameters.squares(list(self.optimizer.parameters), metric_functions().squares(ordered))
        local_flags = []
        if rank_flags is not None:
            local_flags.append(np.array(rank_flags(), np.float64))
        total, count, squares, *flags = self.communicator.all_reduce([*local_loss, squares, *local_flags])
        groups = self.norm_groups
        sums = metric_functions().square_sums(squares, list(groups.groups.values()), bool(groups.per_gradient))
        routing = None
        rates = []
        if self.routers is not None:
            routing = self.routers.counts()
            rates.append(metric_functions().router_rates(routing))
        total, count, sums, *others = read_together([total, count, sums, *rates, *flags])
        router_rates = None
        if routing is not None:
            router_rates = RouterRates(routing.layers, *others[0])
        all_flags = None
        if rank_flags is not None:
            all_flags = others[-1].tolist()
        return StepGradients(
            float(total) / max(float(count), 1) / scale,
            tokens,
            0,  # micro-batches without labels are not skipped
            ordered,
            norms=groups.norms(sums),
            routing=routing,
            router_rates=router_rates,
            rank_flags=all_flags,
        )

    def _by_name(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the gradients by the names of their weights.

        In a pipeline, MindSpore omits the weights of other stages and keeps the order of the rest.
        """
        shapes = {weight.name: weight.shape for weight in self.cell.weights if weight.name in self.parameters.local}
        assert list(shapes.values()) == [gradient.shape for gradient in gradients], "not the gradients of this rank"
        return dict(zip(shapes, gradients, strict=True))

    def load_optimizer(self, arrays: Mapping[str, np.ndarray], updates: int) -> None:
        """Sets the optimizer state of this rank from unsharded arrays, and the number of updates."""
        shards = {}
        for key, array in arrays.items():
            name = key.split(".", 1)[1]
            if name in self.parameters.local:
                shards[key] = self.parameters.local_shard(name, array)
        self.optimizer.load_state(shards, updates)

    def state_dict_shard(self) -> CheckpointShard:
        """Returns weights and optimizer state for a checkpoint. Rank 0 gathers the arrays, one after the other."""
        shards = {name: each.asnumpy() for name, each in self.parameters.local.items()}
        weights = self.parameters.gather(self.parameters.shapes, shards)
        state = self.optimizer.state_arrays()
        optimizer: dict[str, np.ndarray] = {}
        for kind in self.optimizer.state:
            shards = {name: state[f"{kind}.{name}"] for name in self.optimizer.parameters}
            unsharded = self.parameters.gather(self.optimizer.group_of, shards)
            optimizer |= {f"{kind}.{name}": array for name, array in unsharded.items()}
        return CheckpointShard(weights, optimizer, self.optimizer.updates)

    def state(self) -> dict:
        """Returns the state of the guards, for a checkpoint."""
        return self.guards.state()

    def load_state(self, state: Mapping) -> None:
        """Restores the result of `state`."""
        self.guards.load_state(state)
