"""MindSpore's semi-automatic parallelism: one graph, which MindSpore shards by the strategies of its operators.

    AutoParallel( GradientCell( GradAccumulation | Pipeline( LossCell( SemiAutoDecoder ) ) ) )

MindSpore runs this on Ascend and GPU only. Tests on a CPU check the order of the cells and their settings, compare the
numbers with those of explicit mode, and check the shards that MindSpore's parallel pass makes, which needs only the
name of a device. This mode has never run on a device.

Legend: B sequences, T tokens, N = B * T, d head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspore import JitConfig, Parameter, Tensor, lazy_inline, nn
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import MeanExt, SplitWithSize
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation, Pipeline

from trainer.config.checks.parallel import (
    micro_batches_per_step,
    parallel_degrees,
    shard_threshold_bytes,
    zero_level,
)
from trainer.config.checks.problem import raise_problems
from trainer.config.layer_ranges import layer_text
from trainer.config.recompute import comm_recompute_layers, recompute_text, recomputed_parts
from trainer.config.stages import stage_layers
from trainer.data.batches.batch import IGNORE_INDEX
from trainer.device.settings import jit_options
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import EMBEDDING, MAPPING_IN, is_buffer, layer_prefix
from trainer.models.spec.rotary import rotary_angles
from trainer.models.spec.shapes import all_shapes
from trainer.ops.kernel_set import load_kernels
from trainer.ops.plain import shard_operators
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels
from trainer.optim.freeze import trained_shapes
from trainer.parallel.world import World, world_of
from trainer.semi_auto.cells import GradientCell, SemiAuto
from trainer.semi_auto.decoder import SemiAutoDecoder
from trainer.semi_auto.experts import ExpertCells, expert_cells
from trainer.semi_auto.positions import AttentionMask, RotaryTables
from trainer.semi_auto.rules import (
    calls_one_graph,
    semi_auto_notes,
    semi_auto_problems,
    speed_up_file,
    uses_dropout,
)
from trainer.semi_auto.step import passes_own_rows

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.mesh import Degrees

_KIB = 1024
_BATCH_INPUTS = 5
"""The number of inputs of `LossCell`, without the seeds of dropout masks."""


def build_semi_auto(config: Config, world: World, device: str = "Ascend") -> SemiAuto:
    """Builds the cells of a training. The weights are zero, or with several ranks not yet allocated.

    Raises:
        UserError: The configuration requests a feature that this mode does not support.
    """
    raise_problems(semi_auto_problems(config, world))
    degrees = parallel_degrees(config, world)
    steps = config.runner_config.gradient_accumulation_steps
    # MindSpore shards a parameter when it compiles: a rank allocates nothing before, and only its shard after that.
    allocation = contextlib.nullcontext()
    if world.size > 1:
        allocation = no_init_parameters()
    with allocation:
        inner = loss = _loss_cell(config, world, device)
        if degrees.pipeline_stage > 1:
            inner = Pipeline(loss, config.parallel_config.micro_batch_num, stage_config=stages(config))
        elif steps > 1:
            inner = GradAccumulation(loss, steps)
        # A single rank is not sharded: its gradients are already the sums over the micro-batches.
        accumulates_in_graph = inner is not loss and world.size > 1
        step = GradientCell(
            inner,
            [loss.by_name[name] for name in differentiated_names(config)],
            accumulates_in_graph=accumulates_in_graph,
            uses_sums=accumulates_in_graph and not config.parallel.enable_parallel_optimizer,
        )
    network = AutoParallel(step, parallel_mode="semi_auto")
    network.no_init_parameters_in_compile()
    set_parallelism(network, config, world)
    options = jit_options(config, device)
    if options:
        network.set_jit_config(JitConfig(**options))
    network.set_train()
    return SemiAuto(network, step, loss)


def _loss_cell(config: Config, world: World, device: str) -> LossCell:
    """Builds the loss cell, with strategies, recomputation and groups of gradients."""
    settings = config.decoder
    degrees = parallel_degrees(config, world)
    precision = resolve_precision(settings, config.amp_level, device)
    choices = select_kernels(settings, device, precision)
    kernels = load_kernels(choices, precision, is_sharded=True, recomputes_norms=any(recomputed_parts(config)))
    fused = {choice.kernel for choice in choices if choice.fused}
    tables = RotaryTables("rotary_embedding" in fused, getattr(mstype, precision.rotary.dtype))
    windows: list[int | None] = [None]
    if settings.window_layers:
        windows.append(settings.sliding_window)
    masks = [AttentionMask("attention" in fused, settings.seq_length, window) for window in windows]
    experts = expert_cells(config, world, kernels, load_kernels(choices, precision))
    cell_class = LossCell
    if calls_one_graph(config):
        cell_class = LazyLossCell
    loss = cell_class(config, kernels, tables, masks, experts, staged=degrees.pipeline_stage > 1)
    set_strategies(loss, settings, degrees, sequence=config.parallel_config.use_seq_parallel)
    set_recomputation(loss, config)
    set_fusion(loss, config, degrees)
    return loss


def set_parallelism(network: AutoParallel, config: Config, world: World, *, trains: bool = True) -> None:
    """Applies the sections `parallel` and `parallel_config` to the graph of a training, or of an evaluation."""
    parallel = config.parallel
    degrees = parallel_degrees(config, world)
    if world.size > 1:
        inputs = _BATCH_INPUTS
        if trains and uses_dropout(config.decoder):
            inputs += 1
        micro_batches = 1
        if trains:
            micro_batches = micro_batches_per_step(config, degrees)
        strategy: str | tuple = "full_batch"
        if passes_own_rows(config, micro_batches):
            strategy = ((degrees.data_parallel, 1),) * inputs
        network.dataset_strategy(strategy)
    if degrees.pipeline_stage > 1:
        order = parallel.pipeline_config
        network.pipeline(
            stages=degrees.pipeline_stage, interleave=order.pipeline_interleave, scheduler=order.pipeline_scheduler
        )
    if parallel.enable_parallel_optimizer:
        section = parallel.parallel_optimizer_config
        network.hsdp(section.optimizer_weight_shard_size, shard_threshold_bytes(config) // _KIB, zero_level(config))
    if parallel.comm_fusion is not None:
        network.comm_fusion(parallel.comm_fusion)
    if parallel.force_fp32_communication:
        network.enable_fp32_communication()
    speed_up = speed_up_file(config)
    if speed_up is not None and speed_up.is_file():  # the audit builds the network of a file for another machine
        network.transformer_opt(str(speed_up))


def stages(config: Config) -> dict[str, int]:
    """Returns the pipeline stage of each cell of the loss cell; MTP modules are on the last stage."""
    spec = model_spec(config.decoder)
    last = config.parallel_config.pipeline_stage - 1
    layers = {layer: stage for stage, numbers in enumerate(stage_layers(config)) for layer in numbers}
    layers |= dict.fromkeys(spec.module_layers, last)
    stage_by_cell = {f"decoder.layers.{layer}": stage for layer, stage in sorted(layers.items())}
    stage_by_cell["decoder.embed"] = 0
    if spec.tied:
        stage_by_cell["decoder.matrix"] = 0
    for module in range(spec.mtp_modules):
        stage_by_cell |= {f"decoder.mtp_embeds.{module}": 0, f"decoder.merges.{module}": last}
    return stage_by_cell | {f"decoder.heads.{head}": last for head in range(spec.mtp_modules + 1)}


def differentiated_names(config: Config) -> list[str]:
    """Returns the weights whose gradients the graph computes.

    These are the trainable weights, and in a pipeline one weight for each stage with layers and without trainable
    weights: the last norm of its last layer, whose gradient is not used. MindSpore 2.10 does not compile such a stage
    without a gradient ("should has at least 1 trainable parameter"), because no cell would receive the gradient from
    the next stage.
    """
    names = list(trained_shapes(config))
    layers_of_stages = stage_layers(config)
    last = len(layers_of_stages) - 1
    for stage, layers in enumerate(layers_of_stages):
        prefixes = tuple(map(layer_prefix, layers))
        if stage == 0:
            prefixes += (EMBEDDING, MAPPING_IN)
        has_trainable = any(name.startswith(prefixes) for name in names)
        if stage == last:
            # The last stage also has the head, the final norm and MTP modules: all that no other stage has.
            others = [layer_prefix(layer) for stage_of_others in layers_of_stages[:last] for layer in stage_of_others]
            others += [EMBEDDING, MAPPING_IN]
            has_trainable = has_trainable or not all(name.startswith(tuple(others)) for name in names)
        if layers and not has_trainable:
            layer = max(layers)
            parameters = model_spec(config.decoder).layers[layer].parameters
            *_, norm = (layer_prefix(layer) + each.name for each in parameters if each.role == "norm")
            names.append(norm)
    return names


def set_strategies(loss: LossCell, settings: ModelConfig, degrees: Degrees, *, sequence: bool = False) -> None:
    """Sets the strategy of every operator: without one, MindSpore shards it along the batch over all ranks.

    With `sequence` (sequence parallelism), tensor-parallel ranks shard the tokens of the residual stream and its norms.
    """
    data = degrees.data_parallel
    tensor = degrees.model_parallel
    vocabulary = 1
    if settings.vocab_size % tensor == 0:
        vocabulary = tensor
    tokens = data
    if sequence:
        tokens = data * tensor
    decoder = loss.decoder
    decoder.scale_embedding.shard(((tokens, 1), ()))
    loss.shard_over(data)
    for layer in decoder.layers:
        layer.shard_over(data, tensor, tokens)
    if decoder.group_weights is not None:
        decoder.group_weights.shard_over(data)
    # Embedding and head may be one matrix, so they are sharded alike.
    cells = [decoder.embed, *decoder.mtp_embeds, *decoder.merges, *decoder.heads]
    if decoder.passes_matrix:
        cells.append(decoder.matrix)
    for cell in cells:
        cell.shard_over(data, vocabulary, tokens)


def set_recomputation(loss: LossCell, config: Config) -> None:
    """Marks the cells that the backward pass recomputes, and the communication that it repeats."""
    section = config.recompute_config
    layers = loss.decoder.layers
    for layer, part in zip(layers, recomputed_parts(config), strict=True):
        if not part:
            continue
        if part == "block":
            cell = layer
        elif part == "mlp" and layer.experts is not None:
            cell = layer.experts
        else:
            cell = getattr(layer.block, part)
            if isinstance(loss, LazyLossCell):
                _recompute_operators(cell)
                continue
        cell.recompute(
            mp_comm_recompute=section.mp_comm_recompute,
            recompute_slice_activation=section.recompute_slice_activation,
        )
    for number in comm_recompute_layers(config):
        layer = layers[number]
        mlp_norm = layer.block.mlp.norm if layer.experts is None else layer.experts.router.norm
        for norm in (layer.block.attention.norm, mlp_norm):
            norm._mp_comm_recompute(True)  # the communication that follows the norm's operators


def _recompute_operators(cell: nn.Cell) -> None:
    """Marks the operators of a cell that gets its weights as arguments for recomputation.

    `Cell.recompute` fails in a pipeline: MindSpore 2.10 does not find the layouts of the weights ("tensor_layout is
    null").
    """
    for _, part in cell.cells_and_names():
        for operator in part._primitives.values():
            operator.recompute()


def set_fusion(loss: LossCell, config: Config, degrees: Degrees) -> None:
    """Numbers the groups of layers whose gradients MindSpore may sum in one collective, as MindSpore Transformers does.
    """
    layers = loss.decoder.layers
    size = max((len(layers) + 1) // config.parallel_config.gradient_aggregation_group, 1)
    for number, layer in enumerate(layers):
        group = 2
        if degrees.pipeline_stage == 1:
            group = number // size + 1
        layer.set_comm_fusion(group)


class LossCell(nn.Cell):
    """(input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1[, seeds_B1]) -> the scalar loss to minimise.

    Every input has the batch as its first axis, which MindSpore can shard. `share_B1` repeats for every sequence the
    loss scale divided by the number of loss tokens of the step. GradAccumulation and Pipeline sum the micro-batches, so
    the result is the mean over the loss tokens of the step. A model with dropout also gets the seeds of `MaskSeeds`.

    Args:
        tables: Makes the rotary tables from the positions.
        masks: Make the attention masks from the segments: a causal one, and if layers have a window one with it.
        experts: The cells of the experts; None for a dense model.
        staged: Whether the cell is in a pipeline.
    """

    def __init__(
        self,
        config: Config,
        kernels: KernelSet,
        tables: RotaryTables,
        masks: Sequence[AttentionMask],
        experts: ExpertCells | None,
        *,
        staged: bool = False,
    ) -> None:
        super().__init__(auto_prefix=False)
        settings = config.decoder
        shapes = all_shapes(settings)
        differentiated = differentiated_names(config)
        self.by_name = {
            name: Parameter(
                initializer("zeros", shape, mstype.float32),
                name,
                requires_grad=name in differentiated,
                parallel_optimizer=not is_buffer(name),
            )
            for name, shape in shapes.items()
        }
        self.depth = model_spec(settings).mtp_modules
        self.decoder = SemiAutoDecoder(settings, kernels, self.by_name, experts, staged=staged)
        cos, sin = rotary_angles(settings, max(settings.seq_length, settings.max_positions))
        self.cos = Tensor(cos)
        self.sin = Tensor(sin)
        self.tables = tables
        self.masks = nn.CellList(list(masks))
        self.reshape = P.Reshape()
        self.cast = P.Cast()
        self.differs = P.NotEqual()
        self.weigh = P.Mul()
        self.at_least = P.Maximum()
        self.cut = SplitWithSize()
        self.concat = P.Concat(1)
        self.equal = P.Equal()
        self.select = P.Select()
        self.clear = P.Mul()
        self.fill = P.Add()
        self.share = MeanExt()
        self.has_experts = experts is not None

    def construct(
        self,
        input_ids_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        segment_ids_BT: Tensor,
        share_B1: Tensor,
        *seeds: Tensor,
    ) -> Tensor:
        batch = input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1
        return self.sum_of_losses(*batch, self.depth, seeds[0] if len(seeds) > 0 else None)

    def evaluated(
        self, input_ids_BT: Tensor, labels_BT: Tensor, positions_BT: Tensor, segment_ids_BT: Tensor, share_B1: Tensor
    ) -> Tensor:
        """Returns the sum of the main model's losses."""
        return self.sum_of_losses(input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1, 0)

    def sum_of_losses(
        self,
        input_ids_BT: Tensor,
        labels_BT: Tensor,
        positions_BT: Tensor,
        segment_ids_BT: Tensor,
        share_B1: Tensor,
        modules: int,
        seeds_B1: Tensor | None = None,
    ) -> Tensor:
        """Returns the sum of the losses of the main model and of the first `modules` MTP modules."""
        tables = self.tables(self.cos, self.sin, positions_BT)
        masks = ()
        mtp = ()
        for mask in self.masks:
            masks += (mask(segment_ids_BT),)
        for offset in range(1, modules + 1):
            same_BT = self.equal(self.shifted(segment_ids_BT, offset, -1), segment_ids_BT)
            ahead_BT = self.shifted(labels_BT, offset, IGNORE_INDEX)
            ahead_BT = self.select(same_BT, ahead_BT, self.all_alike(ahead_BT, IGNORE_INDEX))
            ids_N = self.reshape(self.shifted(input_ids_BT, offset, 0), (-1,))
            mtp += ((ids_N, *self.targets(ahead_BT, share_B1)),)
        ids_N = self.reshape(input_ids_BT, (-1,))
        targets = self.targets(labels_BT, share_B1)
        counted = None
        if self.has_experts and self.training:
            valid_BT = self.cast(self.differs(labels_BT, IGNORE_INDEX), mstype.float32)
            counted = self.reshape(valid_BT, (-1, 1)), self.share(share_B1, (0,), True)
        return self.decoder(ids_N, targets, tables + tables, masks, mtp, counted, seeds_B1)

    def targets(self, labels_BT: Tensor, share_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Returns labels_N, and the weight of each label's loss, 0 for a masked label, [N, 1]."""
        valid_BT = self.cast(self.differs(labels_BT, IGNORE_INDEX), mstype.float32)
        counts_N1 = self.reshape(self.weigh(valid_BT, share_B1), (-1, 1))
        return self.reshape(self.at_least(labels_BT, 0), (-1,)), counts_N1

    def shifted(self, values_BT: Tensor, offset: int, last: int) -> Tensor:
        """Returns the values `offset` positions later in each sequence, filled up with `last` at its end."""
        first_BT, later_BT = self.cut(values_BT, (offset, values_BT.shape[1] - offset), 1)
        return self.concat((later_BT, self.all_alike(first_BT, last)))

    def all_alike(self, like_BT: Tensor, value: int) -> Tensor:
        """Returns an array filled with one value, sharded like another array."""
        return self.fill(self.clear(like_BT, 0), value)

    def shard_over(self, data: int) -> None:
        """Shards the batch over `data` ranks."""
        for part in (self.tables, *self.masks):
            part.shard_over(data)
        axes = {
            "differs at_least clear fill": "d.,", "weigh equal concat": "d.,d.", "cut share": "d.",
            "select": "d.,d.,d.",
        }  # fmt: skip
        shard_operators(self, axes, d=data)


class LazyLossCell(LossCell):
    """A `LossCell` whose micro-batches call one graph, which MindSpore inlines late."""

    __init__ = lazy_inline(LossCell.__init__)


def semi_auto_rows(config: Config, world: World) -> list[tuple[str, str]]:
    """Returns the audit's table of this mode: the cells from outer to inner, their settings, stages and strategies.

    The cells are built as for a training. A single process stands for the number of ranks of the parallel degrees.

    Raises:
        UserError: The configuration requests a feature that this mode does not support.
    """
    if world.size == 1:
        world = world_of(parallel_degrees(config, world).ranks)
    built = build_semi_auto(config, world)
    network = built.network
    loss = built.loss
    cells = [built.network]
    while cells[-1] is not loss:
        cells.append(cells[-1].network)
    mode = f"{network._parallel_mode}, {network._pipeline_stages} pipeline stage(s)"
    if network._pipeline_stages > 1 and network._pipeline_interleave:
        mode += f", interleaved {network._pipeline_scheduler}"
    elif network._pipeline_stages > 1:
        mode += f", {network._pipeline_scheduler}"
    batch = "its part of the batch"
    if network._full_batch:
        batch = "the whole batch"
    state = "whole on every rank"
    if network._enable_parallel_optimizer:
        threshold = network._parallel_optimizer_threshold
        state = f"shared by data-parallel ranks (hsdp, {zero_level(config)}), of parameters from {threshold} KiB"
    rows = [
        ("network", " ( ".join(_name(cell) for cell in cells) + " )" * (len(cells) - 1)),
        ("mode", mode),
        ("data of a rank", batch),
        ("optimizer", config.optimizer.type),
        ("optimizer state", state),
        ("weights", f"{len(loss.by_name)}, allocated once MindSpore has sharded them (no_init_parameters)"),
    ]
    if config.parallel_config.use_seq_parallel:
        rows.append(("tokens are shared", "by tensor-parallel ranks too (sequence parallelism)"))
    recomputed = recompute_text(recomputed_parts(config))
    if recomputed:
        rows.append(("recompute", recomputed))
    return [*rows, *_stages(loss), *_strategies(loss), *(("note", note) for note in semi_auto_notes(config))]


def _name(cell: nn.Cell) -> str:
    micro_batches = getattr(cell, "micro_size", None)
    if micro_batches:
        return f"{type(cell).__name__}, {micro_batches} micro-batches"
    return type(cell).__name__


def _stages(loss: LossCell) -> list[tuple[str, str]]:
    """Returns the layers of each pipeline stage; nothing without a pipeline."""
    layers_by_stage: dict[int, set[int]] = {}
    for number, layer in enumerate(loss.decoder.layers):
        layers_by_stage.setdefault(getattr(layer, "pipeline_stage", -1), set()).add(number)
    if len(layers_by_stage) < 2:
        return []
    return [(f"stage {stage}", layer_text(layers)) for stage, layers in sorted(layers_by_stage.items())]


def _strategies(loss: LossCell) -> list[tuple[str, str]]:
    """Returns the strategy of each matrix product of the first layer; all layers have the same."""
    rows = []
    for name, cell in loss.decoder.layers[0].cells_and_names():
        strategy = getattr(getattr(cell, "product", None), "in_strategy", None)
        if strategy:
            projection = name.removeprefix("block.").partition(".linear")[0]
            rows.append((projection, f"input {strategy[0]}, weight {strategy[1]}"))
    return rows
