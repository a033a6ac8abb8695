"""MindSpore's semi-automatic parallelism: one graph, which MindSpore shards by the strategies of its operators.

    AutoParallel( GradientCell( GradAccumulation | Pipeline( LossCell( SemiAutoDecoder ) | ImageLossCell ) ) )

MindSpore runs this on Ascend and GPU only. What is tested, on a CPU: what is built, in which order and with which
settings; that its numbers are those of a run; and that MindSpore's own parallel pass, which needs no device but the
name of one, shards it as intended. No run in this mode has been seen on a device.

Legend: B sequences, T tokens, N = B * T, d head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mindspore import JitConfig, Parameter, Tensor, lazy_inline, nn
from mindspore import dtype as mstype
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters
from mindspore.ops import operations as P
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import GradAccumulation, Pipeline

from trainer.config.checks.parallel import parallel_degrees, shard_threshold_bytes, zero_level
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
from trainer.ops.ascend.kernels import RmsNorm, SeparateNorm
from trainer.ops.kernel_set import InDtype, load_kernels
from trainer.ops.plain import shard_operators
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels
from trainer.optim.freeze import trained_shapes
from trainer.parallel.world import World, world_of
from trainer.semi_auto.cells import GradientCell, SemiAuto
from trainer.semi_auto.classifier import ImageLossCell, LazyImageLossCell
from trainer.semi_auto.decoder import SemiAutoDecoder
from trainer.semi_auto.experts import ExpertCells, expert_cells
from trainer.semi_auto.positions import AttentionMask, RotaryTables
from trainer.semi_auto.rules import semi_auto_notes, semi_auto_problems, speed_up_file
from trainer.semi_auto.step import uses_dropout

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.mesh import Degrees

_KIB = 1024
_BATCH_INPUTS = 5
_IMAGE_INPUTS = 3
"""How many inputs a loss cell has without the seeds of dropout masks: see `LossCell` and `ImageLossCell`."""


def build_semi_auto(config: Config, world: World, device: str = "Ascend") -> SemiAuto:
    """Builds the network; its weights are zero, or none yet where there are several ranks: see `ShardedParameters`.

    Raises:
        UserError: The configuration asks for what this mode cannot do.
    """
    raise_problems(semi_auto_problems(config, world))
    degrees = parallel_degrees(config, world)
    steps = config.runner_config.gradient_accumulation_steps
    # MindSpore shards a parameter when it compiles: before that no rank allocates it, and after that only its shard.
    with no_init_parameters() if world.size > 1 else contextlib.nullcontext():
        inner = loss = (_decoder if config.classifier is None else _classifier)(config, world, device)
        if degrees.pipeline_stage > 1:
            inner = Pipeline(loss, config.parallel_config.micro_batch_num, stage_config=stages(config))
        elif steps > 1:
            inner = GradAccumulation(loss, steps)
        # A single rank is not sharded, so nothing but the gradients holds the sum over the micro-batches.
        aside = inner is not loss and world.size > 1
        step = GradientCell(
            inner,
            [loss.by_name[name] for name in differentiated_names(config)],
            accumulates_in_graph=aside,
            uses_sums=aside and not config.parallel.enable_parallel_optimizer,
        )
    network = AutoParallel(step, parallel_mode="semi_auto")
    network.no_init_parameters_in_compile()
    set_parallelism(network, config, world)
    options = jit_options(config, device)
    if options:
        network.set_jit_config(JitConfig(**options))
    network.set_train()
    return SemiAuto(network, step, loss)


def _classifier(config: Config, world: World, device: str) -> ImageLossCell:
    """The loss cell of images, sharded."""
    degrees = parallel_degrees(config, world)
    kernels = load_kernels((), is_sharded=True)
    loss = (LazyImageLossCell if _calls_one_graph(config, degrees) else ImageLossCell)(config, kernels)
    loss.shard_over(degrees.data_parallel)
    return loss


def _decoder(config: Config, world: World, device: str) -> LossCell:
    """The loss cell of a decoder, with strategies, recomputation and groups of gradients."""
    settings = config.decoder
    degrees = parallel_degrees(config, world)
    precision = resolve_precision(settings, config.amp_level, device)
    choices = select_kernels(settings, device, precision)
    kernels = load_kernels(choices, precision, is_sharded=True)
    fused = {choice.kernel for choice in choices if choice.fused}
    if "rms_norm" in fused and any(recomputed_parts(config)):
        inside = getattr(mstype, precision.norm.dtype)
        outside = kernels.compute_dtype

        def separate_norm(size: int, eps: float) -> nn.Cell:
            return InDtype(SeparateNorm(RmsNorm(size, eps, is_sharded=True), outside), inside, outside)

        kernels = replace(kernels, rms_norm=separate_norm)
    tables = RotaryTables("rotary_embedding" in fused, getattr(mstype, precision.rotary.dtype))
    windows = [None, *([settings.sliding_window] if settings.window_layers else [])]
    masks = [AttentionMask("attention" in fused, settings.seq_length, window) for window in windows]
    experts = expert_cells(config, world, kernels, load_kernels(choices, precision))
    kind = LazyLossCell if _calls_one_graph(config, degrees) else LossCell
    loss = kind(config, kernels, tables, masks, experts, staged=degrees.pipeline_stage > 1)
    set_strategies(loss, settings, degrees, sequence=config.parallel_config.use_seq_parallel)
    set_recomputation(loss, config)
    set_fusion(loss, config, degrees)
    return loss


def set_parallelism(network: AutoParallel, config: Config, world: World, *, trains: bool = True) -> None:
    """What the sections `parallel` and `parallel_config` say of the whole graph; an evaluation does not train."""
    parallel = config.parallel
    degrees = parallel_degrees(config, world)
    if world.size > 1:
        inputs = _BATCH_INPUTS if config.classifier is None else _IMAGE_INPUTS
        rows = ((degrees.data_parallel, 1),) * (inputs + (uses_dropout(config.decoder) and trains))
        network.dataset_strategy("full_batch" if parallel.full_batch else rows)
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
    """The stage of each cell of the loss cell; multi-token prediction modules are on the last one."""
    spec = model_spec(config.decoder)
    last = config.parallel_config.pipeline_stage - 1
    layers = {layer: stage for stage, own in enumerate(stage_layers(config)) for layer in own}
    layers |= dict.fromkeys(spec.module_layers, last)
    found = {f"decoder.layers.{layer}": stage for layer, stage in sorted(layers.items())}
    found |= {"decoder.embed": 0} | ({"decoder.matrix": 0} if spec.tied else {})
    for module in range(spec.mtp_modules):
        found |= {f"decoder.mtp_embeds.{module}": 0, f"decoder.merges.{module}": last}
    return found | {f"decoder.heads.{head}": last for head in range(spec.mtp_modules + 1)}


def differentiated_names(config: Config) -> list[str]:
    """The weights whose gradient the graph gives: the trained ones, and in a pipeline one of each stage without any.

    MindSpore 2.10 compiles no stage in which nothing is trained ("should has at least 1 trainable parameter"): the
    stage after it would hand a gradient to nobody. The gradient of that weight, a norm of its last layer, is not used.
    """
    names = list(trained_shapes(config))
    if config.classifier is not None:
        return names
    layers_of_stages = stage_layers(config)
    last = len(layers_of_stages) - 1
    for stage, layers in enumerate(layers_of_stages):
        prefixes = (*map(layer_prefix, layers), *((EMBEDDING, MAPPING_IN) if stage == 0 else ()))
        # The last stage has everything else: head, final norm and multi-token prediction modules.
        others = {name for other in layers_of_stages[:last] for name in map(layer_prefix, other)}
        others = (*others, EMBEDDING, MAPPING_IN)
        is_own = [name.startswith(prefixes) or stage == last and not name.startswith(others) for name in names]
        if layers and not any(is_own):
            names.append(f"{layer_prefix(max(layers))}post_attention_layernorm.weight")
    return names


def set_strategies(loss: LossCell, settings: ModelConfig, degrees: Degrees, *, sequence: bool = False) -> None:
    """Gives every operator its strategy: without one MindSpore shards it along the batch, over all ranks.

    With `sequence` the tensor-parallel ranks share the tokens of the residual stream and its norms.
    """
    data = degrees.data_parallel
    tensor = degrees.model_parallel
    vocabulary = tensor if settings.vocab_size % tensor == 0 else 1
    tokens = data * tensor if sequence else data
    decoder = loss.decoder
    loss.shard_over(data)
    for layer in decoder.layers:
        layer.shard_over(data, tensor, tokens)
    if decoder.group_weights is not None:
        decoder.group_weights.shard_over(data)
    # Embedding and head may be one matrix, so they are sharded alike.
    matrix = [decoder.matrix] if decoder.hands_on else []
    for part in (decoder.embed, *decoder.mtp_embeds, *matrix, *decoder.merges, *decoder.heads):
        part.shard_over(data, vocabulary, tokens)


def set_recomputation(loss: LossCell, config: Config) -> None:
    """Marks what the backward pass computes again, and which communication of it."""
    section = config.recompute_config
    layers = loss.decoder.layers
    staged = isinstance(loss, LazyLossCell)
    parts = recomputed_parts(config)
    # Multi-token prediction modules recompute what the last layer recomputes, as in explicit mode.
    modules = len(layers) - len(parts)
    for layer, part in zip(layers, parts + parts[-1:] * modules, strict=True):
        if part:
            has_experts = part == "mlp" and layer.experts is not None
            cell = layer if part == "block" else layer.experts if has_experts else getattr(layer.block, part)
            if staged and part != "block" and not has_experts:
                _recompute_operators(cell)
                continue
            cell.recompute(
                mp_comm_recompute=section.mp_comm_recompute,
                recompute_slice_activation=section.recompute_slice_activation,
            )
    for number in comm_recompute_layers(config):
        block = layers[number].block
        experts = layers[number].experts
        for norm in (block.attention.norm, block.mlp.norm if experts is None else experts.router.norm):
            norm._mp_comm_recompute(True)  # of the communication that follows its operators


def _recompute_operators(cell: nn.Cell) -> None:
    """As `Cell.recompute` for a cell that gets its weights as arguments, whose layouts MindSpore 2.10 then does not
    find in a pipeline ("tensor_layout is null")."""
    for _, part in cell.cells_and_names():
        for operator in part._primitives.values():
            operator.recompute()


def set_fusion(loss: LossCell, config: Config, degrees: Degrees) -> None:
    """Numbers the groups of layers whose gradients MindSpore may sum in one collective, as MindSpore Transformers."""
    layers = loss.decoder.layers
    size = max((len(layers) + 1) // config.parallel_config.gradient_aggregation_group, 1)
    for number, layer in enumerate(layers):
        layer.set_comm_fusion(number // size + 1 if degrees.pipeline_stage == 1 else 2)


class LossCell(nn.Cell):
    """Loss of a batch in the form that this mode can shard: every input has the batch as its first axis.

    (input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1) -> a scalar to be minimised. `share_B1` is the
    loss scale / the valid tokens of the whole window, on every row. GradAccumulation and Pipeline add the micro-batches
    up without dividing, so their sum is the loss of the window, whatever number of valid tokens each of them has. The
    cells `tables` and `masks` make rotary tables and attention masks from positions and segments: a causal mask, and
    one with the window of a model that has one. A model with dropout gets the seeds_B1 of its masks too, those of
    `MaskSeeds`.
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
        self.slice = P.StridedSlice()
        self.concat = P.Concat(1)
        self.equal = P.Equal()
        self.select = P.Select()
        self.clear = P.Mul()
        self.fill = P.Add()
        self.share = P.ReduceMean(keep_dims=True)
        self.has_experts = experts is not None

    def construct(self, input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1, *seeds):
        batch = input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1
        return self.sum_of_losses(*batch, self.depth, seeds[0] if len(seeds) > 0 else None)

    def evaluated(self, *batch):
        """The sum of the main model's losses."""
        return self.sum_of_losses(*batch, 0)

    def sum_of_losses(self, input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1, modules, seeds_B1=None):
        """With the losses of so many multi-token prediction modules."""
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
            counted = self.reshape(valid_BT, (-1, 1)), self.share(share_B1, 0)
        return self.decoder(ids_N, targets, tables + tables, masks, mtp, counted, seeds_B1)

    def targets(self, labels_BT, share_B1):
        """Labels, and what the loss of each counts: 0 where there is none."""
        valid_BT = self.cast(self.differs(labels_BT, IGNORE_INDEX), mstype.float32)
        counts_N1 = self.reshape(self.weigh(valid_BT, share_B1), (-1, 1))
        return self.reshape(self.at_least(labels_BT, 0), (-1,)), counts_N1

    def shifted(self, values_BT, offset, last):
        """The values `offset` positions later in each sequence, `last` at its end."""
        rows, length = values_BT.shape
        later_BT = self.slice(values_BT, (0, offset), (rows, length), (1, 1))
        first_BT = self.slice(values_BT, (0, 0), (rows, offset), (1, 1))
        return self.concat((later_BT, self.all_alike(first_BT, last)))

    def all_alike(self, like_BT, value):
        """An array of one value, sharded like another array."""
        return self.fill(self.clear(like_BT, 0), value)

    def shard_over(self, data: int) -> None:
        """Shards the batch over `data` ranks."""
        for part in (self.tables, *self.masks):
            part.shard_over(data)
        axes = {
            "differs at_least clear fill": "d.,", "weigh equal concat": "d.,d.", "slice share": "d.",
            "select": "d.,d.,d.",
        }  # fmt: skip
        shard_operators(self, axes, d=data)


class LazyLossCell(LossCell):
    """`LossCell` whose micro-batches are calls of one graph, which is inlined late."""

    @lazy_inline
    def __init__(self, config, kernels, tables, masks, experts, *, staged) -> None:
        super().__init__(config, kernels, tables, masks, experts, staged=staged)


def _calls_one_graph(config: Config, degrees: Degrees) -> bool:
    """Where MindSpore asks for it: in a pipeline, and to share the sums of gradients over micro-batches."""
    shares = config.parallel.enable_parallel_optimizer and zero_level(config) != "level1"
    return degrees.pipeline_stage > 1 or (shares and config.runner_config.gradient_accumulation_steps > 1)


def semi_auto_rows(config: Config, world: World) -> list[tuple[str, str]]:
    """What the audit shows of this mode: the cells from outer to inner, their settings, stages and strategies.

    It is built as for a training; a single process stands for as many ranks as the degrees ask for.

    Raises:
        UserError: The configuration asks for what this mode cannot do.
    """
    built = build_semi_auto(config, world if world.size > 1 else world_of(parallel_degrees(config, world).ranks))
    network = built.network
    loss = built.loss
    cells = [built.network]
    while cells[-1] is not loss:
        cells.append(cells[-1].network)
    shared = network._enable_parallel_optimizer
    interleaved = network._pipeline_interleave
    threshold = (
        f"shared by data-parallel ranks (hsdp, {zero_level(config)}), of parameters from"
        f" {network._parallel_optimizer_threshold} KB"
    )
    order = f", {'interleaved ' if interleaved else ''}{network._pipeline_scheduler}"
    again = recompute_text(recomputed_parts(config))
    sequence = "by tensor-parallel ranks too (sequence parallelism)" if config.parallel_config.use_seq_parallel else ""
    rows = [
        ("network", " ( ".join(_name(cell) for cell in cells) + " )" * (len(cells) - 1)),
        ("mode", f"{network._parallel_mode}, {network._pipeline_stages} pipeline stage(s)"
         + (order if network._pipeline_stages > 1 else "")),
        ("data of a rank", "the whole batch" if network._full_batch else "its part of the batch"),
        ("optimizer", config.optimizer.type),
        ("optimizer state", threshold if shared else "whole on every rank"),
        ("weights", f"{len(loss.by_name)}, allocated once MindSpore has sharded them (no_init_parameters)"),
    ]
    rows += [("tokens are shared", sequence)] if sequence else []
    rows += [("activations", again)] if again else []
    return [*rows, *_stages(loss), *_strategies(loss), *(("note", note) for note in semi_auto_notes(config))]


def _name(cell: nn.Cell) -> str:
    micro_batches = getattr(cell, "micro_size", None)
    return type(cell).__name__ + (f", {micro_batches} micro-batches" if micro_batches else "")


def _stages(loss: LossCell) -> list[tuple[str, str]]:
    """Layers by the stage of a pipeline; nothing without one."""
    decoder = loss.decoder
    found = {}
    for number, layer in enumerate(decoder.layers):
        found.setdefault(getattr(layer, "pipeline_stage", None), set()).add(number)
    if len(found) < 2:
        return []
    return [(f"stage {stage}", layer_text(layers)) for stage, layers in sorted(found.items())]


def _strategies(loss: LossCell) -> list[tuple[str, str]]:
    """The strategy of each matrix product of the first layer, which is the same in all layers."""
    found = []
    for name, cell in loss.decoder.layers[0].cells_and_names():
        strategy = getattr(getattr(cell, "product", None), "in_strategy", None)
        if strategy:
            projection = name.removeprefix("block.").partition(".linear")[0]
            found.append((projection, f"input {strategy[0]}, weight {strategy[1]}"))
    return found
