"""MindSpore's semi-automatic parallelism: one graph, cut by MindSpore at the strategies that its operators carry.

    AutoParallel( GradAccumulation | Pipeline ( LossCell ( WholeDecoder ) ) )

MindSpore compiles this for Ascend and GPU only: what is tested, on a CPU, is what is built, in which order and with
which settings, and that the loss is that of a run. No run in this mode has been seen on a device.

Legend: B rows, T tokens, N = B * T, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.common.initializer import Initializer, initializer
from mindspore.experimental import optim
from mindspore.nn.utils import no_init_parameters
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation, Pipeline

from trainer.config.parallel_rules import (
    degrees_of,
    fit_problems,
    semi_auto_notices,
    semi_auto_problems,
    shard_threshold_bytes,
)
from trainer.config.problems import raise_problems
from trainer.data.batch import IGNORE_INDEX
from trainer.models.init import initial_value
from trainer.models.rotary import rotary_angles
from trainer.models.shapes import all_shapes, is_buffer
from trainer.models.whole_graph import WholeDecoder, weight_names
from trainer.ops.cast import InDtype
from trainer.ops.kernel_set import load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels
from trainer.optim.freeze import frozen_names, trained_shapes
from trainer.optim.groups import parameter_groups

if TYPE_CHECKING:
    from trainer.config import Config, ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.mesh import Degrees
    from trainer.parallel.world import World

_KIB = 1024


class SemiAuto(NamedTuple):
    """What a training in this mode is made of."""

    network: AutoParallel
    """Around the loss cell; called with the global batch of `LossCell`."""
    optimizer: optim.Optimizer
    notices: tuple[str, ...]
    """What of the configuration has no effect here."""


def build_semi_auto(config: Config, world: World, device: str = "Ascend") -> SemiAuto:
    """Builds network and optimizer; no weight is drawn before MindSpore compiles.

    Args:
        config: Of the run.
        world: The job.
        device: Whose kernels are taken.

    Raises:
        UserError: The configuration asks for what this mode cannot do.
    """
    raise_problems(list(semi_auto_problems(config)) or fit_problems(config, world))
    settings, degrees = config.decoder, degrees_of(config, world)
    precision = resolve_precision(settings, config.amp_level, device)
    kernels = load_kernels(select_kernels(settings, device, precision), precision, sharded=True)
    with no_init_parameters():
        loss = LossCell(config, kernels)
        optimizer = _optimizer(config, loss)
    shard(loss.decoder, degrees)
    return SemiAuto(_wrapped(config, loss, degrees), optimizer, tuple(semi_auto_notices(config)))


def _wrapped(config: Config, loss: LossCell, degrees: Degrees) -> AutoParallel:
    section, inner = config.parallel_config, loss
    steps = config.runner_config.gradient_accumulation_steps
    if degrees.pipeline_stage > 1:
        inner = Pipeline(loss, section.micro_batch_num, stage_config=stages(config.decoder, degrees.pipeline_stage))
    elif steps > 1:
        inner = GradAccumulation(loss, steps)
    network = AutoParallel(inner, parallel_mode="semi_auto")
    network.dataset_strategy("full_batch" if config.parallel.full_batch else "data_parallel")
    if degrees.pipeline_stage > 1:
        network.pipeline(stages=degrees.pipeline_stage)
    if config.parallel.enable_parallel_optimizer:
        network.hsdp(threshold=shard_threshold_bytes(config) // _KIB)
    return network


def stages(settings: ModelConfig, number: int) -> dict[str, int]:
    """The stage of each cell of the loss cell: layers in runs of equal length, longer ones first; the head is last."""
    depth = settings.num_layers + settings.mtp_depth
    stage_of = [stage for stage in range(number) for _ in range(depth // number + (stage < depth % number))]
    found = {f"decoder.layers.{layer}": stage_of[layer] for layer in range(settings.num_layers)}
    for module in range(settings.mtp_depth):
        stage = stage_of[settings.num_layers + module]
        found |= {f"decoder.{name}.{module}": stage for name in ("merges", "modules", "heads")}
    return found | {"decoder.head": stage_of[settings.num_layers - 1] if settings.mtp_depth else number - 1}


def shard(decoder: WholeDecoder, degrees: Degrees) -> None:
    """Cuts the products of every layer as Megatron-LM does (Shoeybi et al. 2019, section 3): the first of a pair along
    its outputs, the second along its inputs. Experts and all other operators are cut along the batch, which MindSpore
    does where no strategy is written.
    """
    data, tensor = degrees.data_parallel, degrees.model_parallel
    for layer in (*decoder.layers, *decoder.modules):
        attention = layer.block.attention
        first, second = [attention.query, attention.key, attention.value], [attention.out]
        if layer.block.has_mlp:
            first, second = [*first, layer.block.mlp.gate, layer.block.mlp.up], [*second, layer.block.mlp.down]
        for projection in first:
            _product(projection).cut(data, columns=tensor)
        for projection in second:
            _product(projection).cut(data, rows=tensor)


def _product(projection: nn.Cell) -> nn.Cell:
    """Without the casts that may stand around it."""
    linear = projection.linear
    return linear.kernel if isinstance(linear, InDtype) else linear


class LossCell(nn.Cell):
    """Loss of a batch as this mode cuts it: every input has the batch as its first axis.

    (input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1) -> a scalar to be minimised. `share_B1` is 1 /
    the valid tokens of the whole window, on every row. GradAccumulation and Pipeline add the micro-batches up without
    dividing, so their sum is the loss of the window, whatever number of valid tokens each of them has.
    """

    def __init__(self, config: Config, kernels: KernelSet) -> None:
        super().__init__(auto_prefix=False)
        settings = config.decoder
        self.depth, self.length, self.experts = settings.mtp_depth, settings.seq_length, settings.experts is not None
        self.chosen = settings.experts.num_experts_chosen if self.experts else 1
        rows = config.runner_config.batch_size
        if config.parallel_config.pipeline_stage > 1:
            rows //= config.parallel_config.micro_batch_num
        self.decoder = WholeDecoder(settings, kernels, rows * settings.seq_length)
        self.no_masks = tuple((None, None, None) for _ in self.decoder.numbers)
        cos, sin = rotary_angles(settings, max(settings.seq_length, settings.max_positions))
        self.cos, self.sin = Tensor(cos), Tensor(sin)
        heads, kv_heads = settings.num_heads, settings.kv_heads
        self.query_tables, self.key_tables = kernels.tables_in_graph(heads), kernels.tables_in_graph(kv_heads)
        self.mask = kernels.mask_in_graph(settings.seq_length, heads, kv_heads)
        shapes, frozen = all_shapes(settings), frozen_names(config)
        self.by_name = {
            name: Parameter(
                initializer(FromSeed(name, settings, config.seed), shape, mstype.float32),
                name,
                requires_grad=name not in frozen and not is_buffer(name),
            )
            for name, shape in shapes.items()
        }
        self.parameters = ParameterTuple(tuple(self.by_name.values()))
        places, names = list(shapes), weight_names(settings, self.decoder.numbers, shapes)
        self.places = tuple(tuple(-1 if name is None else places.index(name) for name in group) for group in names)

    def construct(self, input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1):
        positions_N = positions_BT.reshape(-1)
        cos_Nd, sin_Nd = ops.gather(self.cos, positions_N, 0), ops.gather(self.sin, positions_N, 0)
        tables = self.query_tables(cos_Nd, sin_Nd) + self.key_tables(cos_Nd, sin_Nd)
        labels_N, valid_N1 = self.valid(labels_BT)
        shares = self.shares(labels_BT) if self.experts else ()
        further = ()
        for places in range(1, self.depth + 1):
            same_BT = self.shifted(segment_ids_BT, places, -1) == segment_ids_BT
            ahead_BT = ops.select(same_BT, self.shifted(labels_BT, places, IGNORE_INDEX), self.ignored(labels_BT))
            further += ((self.shifted(input_ids_BT, places, 0).reshape(-1), *self.valid(ahead_BT)),)
        inputs = (input_ids_BT.reshape(-1), labels_N, valid_N1)
        mask = self.mask(segment_ids_BT)
        total = self.decoder(inputs, tables, mask, shares, further, self.no_masks, self.weights())
        return total * share_B1.max()

    def weights(self):
        """As `WholeDecoder` takes them."""
        groups = ()
        for places in self.places:
            group = ()
            for place in places:
                group += (None if place < 0 else self.parameters[place],)
            groups += (group,)
        return groups

    def valid(self, labels_BT):
        labels_N = labels_BT.reshape(-1)
        valid_N = labels_N != IGNORE_INDEX
        return ops.select(valid_N, labels_N, ops.zeros_like(labels_N)), valid_N.astype(mstype.float32).reshape(-1, 1)

    def shares(self, labels_BT):
        """Of `RowShares` those that `WholeDecoder` takes."""
        rows = labels_BT.shape[0]
        mean_BN = ops.tile(ops.eye(rows, rows, mstype.float32).expand_dims(2), (1, 1, self.length)) / self.length
        mean_BR = ops.tile(mean_BN.expand_dims(3), (1, 1, 1, self.chosen)).reshape(rows, -1)
        tokens_B1 = (labels_BT != IGNORE_INDEX).astype(mstype.float32).sum(1).reshape(-1, 1)
        return mean_BN.reshape(rows, -1), mean_BR, tokens_B1

    def shifted(self, values_BT, places, last):
        """Values so many places further in the row, `last` at its end."""
        end = ops.full_like(values_BT[:, :places], last)
        return ops.concat((values_BT[:, places:], end), 1)

    def ignored(self, labels_BT):
        return ops.full_like(labels_BT, IGNORE_INDEX)


class FromSeed(Initializer):
    """The run's own initial value of a parameter, drawn when MindSpore asks for it; of a cut one, of its own shape."""

    def __init__(self, name: str, settings: ModelConfig, seed: int) -> None:
        super().__init__()
        self.name, self.settings, self.own_seed = name, settings, seed

    def _initialize(self, arr: np.ndarray) -> None:
        arr[:] = initial_value(self.name, tuple(arr.shape), self.settings, self.own_seed)


def _optimizer(config: Config, loss: LossCell) -> optim.Optimizer:
    """AdamW or SGD with the parameter groups of a run; the learning rate is set before each step."""
    settings, shapes = config.optimizer, trained_shapes(config)
    groups = [
        {"params": [loss.by_name[name] for name in group.parameters], "weight_decay": group.weight_decay}
        for group in parameter_groups(shapes, settings.weight_decay, settings.type)
        if group.parameters
    ]
    if settings.type == "SGD":
        return optim.SGD(groups, lr=0.0, momentum=settings.momentum, nesterov=settings.nesterov)
    return optim.AdamW(groups, lr=0.0, betas=tuple(settings.betas), eps=settings.eps)
