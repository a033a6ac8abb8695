"""MindSpore's semi-automatic parallelism: one graph, cut by MindSpore at the strategies that its operators carry.

    AutoParallel( GradientCell( GradAccumulation | Pipeline( LossCell( SemiAutoDecoder ) ) ) )

MindSpore runs this on Ascend and GPU only. What is tested, on a CPU: what is built, in which order and with which
settings; that its numbers are those of a run; and that MindSpore's own parallel pass, which needs no device but the
name of one, cuts it as intended. No run in this mode has been seen on a device.

Legend: B rows, T tokens, N = B * T, d head size.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import JitConfig, Parameter, Tensor, lazy_inline, nn
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters
from mindspore.ops import operations as P
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation, Pipeline

from trainer.config.checks.parallel import degrees_of, shard_threshold_bytes
from trainer.config.checks.problem import raise_problems
from trainer.data.batches.batch import IGNORE_INDEX
from trainer.device.settings import jit_options
from trainer.models.init import initial_value
from trainer.models.rotary import rotary_angles
from trainer.models.shapes import all_shapes
from trainer.ops.kernel_set import load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels
from trainer.optim.freeze import frozen_names, trained_shapes
from trainer.parallel.communicator import check_same_values
from trainer.semi_auto.decoder import SemiAutoDecoder
from trainer.semi_auto.rules import semi_auto_problems
from trainer.semi_auto.shards import Shard, first_holders, gather_whole, region
from trainer.semi_auto.step import GradientCell

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.mesh import Degrees
    from trainer.parallel.world import World

_KIB = 1024


class SemiAuto(NamedTuple):
    """What a training in this mode is made of."""

    network: AutoParallel
    """Around the step; called with the batch of a whole window, see `LossCell`."""
    step: GradientCell
    loss: LossCell
    sum_of_squares: Callable
    """Of a gradient."""


def build_semi_auto(config: Config, world: World, device: str = "Ascend") -> SemiAuto:
    """Builds the network; its weights are zero, or none yet where there are several ranks: see `ShardedParameters`.

    Args:
        config: Of the run.
        world: The job.
        device: Whose kernels are taken.

    Raises:
        UserError: The configuration asks for what this mode cannot do.
    """
    raise_problems(semi_auto_problems(config, world))
    settings, degrees = config.decoder, degrees_of(config, world)
    precision = resolve_precision(settings, config.amp_level, device)
    kernels = load_kernels(select_kernels(settings, device, precision), precision, cut=True)
    # MindSpore says how it cuts a parameter when it compiles: no rank needs room for the whole of it.
    with no_init_parameters() if world.size > 1 else contextlib.nullcontext():
        loss = (StagedLossCell if degrees.pipeline_stage > 1 else LossCell)(config, kernels)
        shard(loss, settings, degrees)
        step = _differentiated(config, loss, _in_micro_batches(config, loss, degrees), world)
    network = AutoParallel(step, parallel_mode="semi_auto")
    network.no_init_parameters_in_compile()
    if world.size > 1:
        network.dataset_strategy("full_batch" if config.parallel.full_batch else "data_parallel")
    if degrees.pipeline_stage > 1:
        network.pipeline(stages=degrees.pipeline_stage)
    if config.parallel.enable_parallel_optimizer:
        network.hsdp(threshold=shard_threshold_bytes(config) // _KIB)
    options = jit_options(config, device)
    if options:
        network.set_jit_config(JitConfig(**options))
    network.set_train()
    return SemiAuto(network, step, loss, kernels.sum_of_squares)


def _in_micro_batches(config: Config, loss: LossCell, degrees: Degrees) -> nn.Cell:
    if degrees.pipeline_stage > 1:
        stage_of = stages(config.decoder.num_layers, degrees.pipeline_stage)
        return Pipeline(loss, config.parallel_config.micro_batch_num, stage_config=stage_of)
    steps = config.runner_config.gradient_accumulation_steps
    return GradAccumulation(loss, steps) if steps > 1 else loss


def _differentiated(config: Config, loss: LossCell, inner: nn.Cell, world: World) -> GradientCell:
    # One rank alone is not cut, so nothing but the gradients holds the sum over the micro-batches.
    aside = inner is not loss and world.size > 1
    return GradientCell(
        inner,
        [loss.by_name[name] for name in trained_shapes(config)],
        summed_aside=aside,
        read_aside=aside and not config.parallel.enable_parallel_optimizer,
    )


def stages(layers: int, number: int) -> dict[str, int]:
    """The stage of each cell of the loss cell: layers in runs of equal length, longer ones first."""
    stage_of = [stage for stage in range(number) for _ in range(layers // number + (stage < layers % number))]
    found = {f"decoder.layers.{layer}": stage for layer, stage in enumerate(stage_of)}
    return {"decoder.embed": 0, **found, "decoder.heads.0": number - 1}


def shard(loss: LossCell, settings: ModelConfig, degrees: Degrees) -> None:
    """Says of every operator where it is cut; MindSpore would cut the others along the batch, over all ranks."""
    data, tensor = degrees.data_parallel, degrees.model_parallel
    vocabulary = tensor if settings.vocab_size % tensor == 0 else 1
    decoder = loss.decoder
    loss.cut(data)
    for layer in (*decoder.layers, *decoder.modules):
        layer.cut(data, tensor)
    # Embedding and head may be one matrix: they are cut alike.
    for part in (decoder.embed, *decoder.merges, *decoder.heads):
        part.cut(data, vocabulary)


class LossCell(nn.Cell):
    """Loss of a batch as this mode cuts it: every input has the batch as its first axis.

    (input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1) -> a scalar to be minimised. `share_B1` is the
    loss scale / the valid tokens of the whole window, on every row. GradAccumulation and Pipeline add the micro-batches
    up without dividing, so their sum is the loss of the window, whatever number of valid tokens each of them has.
    """

    def __init__(self, config: Config, kernels: KernelSet) -> None:
        super().__init__(auto_prefix=False)
        settings = config.decoder
        shapes, frozen = all_shapes(settings), frozen_names(config)
        self.by_name = {
            name: Parameter(initializer("zeros", shape, mstype.float32), name, requires_grad=name not in frozen)
            for name, shape in shapes.items()
        }
        self.depth, self.decoder = settings.mtp_depth, SemiAutoDecoder(settings, kernels, self.by_name)
        cos, sin = rotary_angles(settings, max(settings.seq_length, settings.max_positions))
        self.cos, self.sin = Tensor(cos), Tensor(sin)
        self.tables, self.mask = kernels.tables_in_graph(), kernels.mask_in_graph(settings.seq_length)
        self.reshape, self.cast = P.Reshape(), P.Cast()
        self.differs, self.weigh, self.at_least = P.NotEqual(), P.Mul(), P.Maximum()
        self.slice, self.concat, self.equal, self.select = P.StridedSlice(), P.Concat(1), P.Equal(), P.Select()
        self.clear, self.fill = P.Mul(), P.Add()

    def construct(self, input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1):
        tables, mask = self.tables(self.cos, self.sin, positions_BT), self.mask(segment_ids_BT)
        mtp = ()
        for places in range(1, self.depth + 1):
            same_BT = self.equal(self.shifted(segment_ids_BT, places, -1), segment_ids_BT)
            ahead_BT = self.shifted(labels_BT, places, IGNORE_INDEX)
            ahead_BT = self.select(same_BT, ahead_BT, self.all_alike(ahead_BT, IGNORE_INDEX))
            ids_N = self.reshape(self.shifted(input_ids_BT, places, 0), (-1,))
            mtp += ((ids_N, *self.targets(ahead_BT, share_B1)),)
        ids_N, targets = self.reshape(input_ids_BT, (-1,)), self.targets(labels_BT, share_B1)
        return self.decoder(ids_N, targets, tables + tables, mask, mtp)

    def targets(self, labels_BT, share_B1):
        """Labels, and what the loss of each counts: 0 where there is none."""
        valid_BT = self.cast(self.differs(labels_BT, IGNORE_INDEX), mstype.float32)
        counts_N1 = self.reshape(self.weigh(valid_BT, share_B1), (-1, 1))
        return self.reshape(self.at_least(labels_BT, 0), (-1,)), counts_N1

    def shifted(self, values_BT, places, last):
        """Values so many places further in the row, `last` at its end."""
        rows, length = values_BT.shape
        later_BT = self.slice(values_BT, (0, places), (rows, length), (1, 1))
        first_BT = self.slice(values_BT, (0, 0), (rows, places), (1, 1))
        return self.concat((later_BT, self.all_alike(first_BT, last)))

    def all_alike(self, like_BT, value):
        """An array of one value, which is cut like another."""
        return self.fill(self.clear(like_BT, 0), value)

    def cut(self, data: int) -> None:
        """Over `data` ranks along the batch."""
        row = (data, 1)
        self.tables.cut(data)
        self.mask.cut(data)
        for part in (self.differs, self.at_least, self.clear, self.fill):
            part.shard((row, ()))
        for part in (self.weigh, self.equal, self.concat):
            part.shard((row, row))
        self.slice.shard((row,))
        self.select.shard((row, row, row))


class StagedLossCell(LossCell):
    """`LossCell` for a pipeline, whose micro-batches MindSpore wants to be calls of one graph."""

    @lazy_inline
    def __init__(self, config: Config, kernels: KernelSet) -> None:
        super().__init__(config, kernels)


class ShardedParameters:
    """The weights of a compiled network, of which this rank has parts.

    Args:
        built: The network.
        config: Of the run.
        world: This rank among how many.
        peers: The others.
        shard_of: Number of this rank in a group that shares optimizer state, and how many they are, by its name.
    """

    def __init__(
        self,
        built: SemiAuto,
        config: Config,
        world: World,
        communicator: Communicator,
        shard_of: Callable[[str], tuple[int, int]],
    ) -> None:
        self.config, self.communicator, self.shapes = config, communicator, all_shapes(config.decoder)
        by_name = {parameter.name: parameter for parameter in built.network.get_parameters()}
        if world.size == 1:
            found = {name: Shard((0,) * each.ndim, each.shape) for name, each in by_name.items()}
        else:
            found = {
                name: region(layout, world.rank, shard_of(layout[5]) if layout[5] else (0, 1))
                for name, layout in built.network.parameter_layout_dict.items()
                if name in by_name
            }
        self.regions = {name: found[name] for name in self.shapes if name in found}
        self.own = {name: by_name[name] for name in self.regions}
        # The sums over micro-batches are cut like the weights, but never shared out as optimizer state.
        self.sums = {name: (by_name[name], where.shape) for name, where in found.items() if name not in self.shapes}
        every = [json.loads(data) for data in communicator.gather_bytes(json.dumps(self.regions).encode())]
        others = [{name: Shard(*map(tuple, where)) for name, where in each.items()} for each in every]
        # How many ranks have the same part as this one, and for each part the first rank that has it.
        self.copies = {name: sum(each.get(name) == own for each in others) for name, own in self.regions.items()}
        self.holders = {name: first_holders([each.get(name) for each in others]) for name in self.shapes}

    def start(self, weights: Mapping[str, np.ndarray] | None) -> None:
        """Sets this rank's parts: of given weights, or of those of the run's seed.

        Raises:
            RunError: Other ranks have other values of the same weights.
        """
        settings, seed, sums = self.config.decoder, self.config.seed, {}
        for name, parameter in self.own.items():
            whole = initial_value(name, self.shapes[name], settings, seed) if weights is None else weights[name]
            sums[name] = zlib.crc32(np.ascontiguousarray(whole))
            _set(parameter, self.part(name, whole))
        check_same_values(sums, "weights", self.communicator)
        for total, shape in self.sums.values():
            _set(total, np.zeros(shape, np.float32))

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """This rank's part of a whole array that is cut like this parameter."""
        return self.regions[name].of(whole.reshape(self.shapes[name]))

    def whole(self, names: Iterable[str], parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Puts arrays that are cut like these parameters together, on rank 0; all ranks call it."""
        return gather_whole({name: self.shapes[name] for name in names}, self.holders, parts, self.communicator)

    def squares(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Sums of squares of whole gradients, from those of the parts of all ranks, each part counted once."""
        names = list(trained_shapes(self.config))
        own = [parts[name] / self.copies[name] if name in parts else 0.0 for name in names]
        return dict(zip(names, self.communicator.all_sum(own), strict=True))


def _set(parameter: Parameter, part: np.ndarray) -> None:
    parameter.set_data(Tensor(np.ascontiguousarray(part)), slice_shape=True)
