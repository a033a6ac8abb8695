"""The decoder: embedding, blocks, head with loss, in one wiring for every mode and with the parts of explicit mode.

A block is compiled once (context.mode 0) and called for every layer with that layer's weights as views: MindSpore
specialises on every Parameter object it is given, so handing over Parameters would compile every layer anew. A view
costs microseconds, copies nothing, and gradients flow through it. Where a CPU computes whole layers on arrays
(`trainer.arrays.cells`), their parts take the place of the compiled ones.

Legend: B sequences, T tokens, N = B * T, D hidden, V vocabulary, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mindspore import Parameter, Tensor, nn

from trainer.arrays.cells import HostBlock, HostEmbedding, HostHeadPart, HostLayerPart
from trainer.config.recompute import SUBLAYERS
from trainer.data.batches.context import SequencePart
from trainer.models.block import MTP_NORM, MTP_WEIGHTS, Block, EmbeddingMapping, EmbeddingRows, Head, MergeTokens
from trainer.models.compute_weights import ComputeWeights
from trainer.models.init import initial_value
from trainer.models.inputs import LossSums, ModelInputs
from trainer.models.moe import MoeLayer, MoePart, RouterStatistics
from trainer.models.recompute import Differentiable, LayerPart, compile_cell
from trainer.models.spec.build import dropout_sites
from trainer.models.spec.names import (
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    HEAD,
    MAPPING_IN,
    MAPPING_OUT,
    layer_prefix,
    sublayer_of,
)
from trainer.models.spec.shapes import (
    attention_shapes,
    balanced_layers,
    block_weights,
    dropped_projections,
    mlp_shapes,
    moe_shapes,
    parameter_name,
    parameter_specs,
)
from trainer.ops.dropout import MaskPart, OwnHeads
from trainer.ops.measures import device_measures
from trainer.ops.vocabulary import VocabularyPart
from trainer.parallel.collectives import AllGather
from trainer.parallel.layout import local_settings
from trainer.parallel.sharding import range_of_rank

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.dropout import DropoutKey
    from trainer.ops.kernel_set import KernelSet
    from trainer.ops.routing import RoutingCounts
    from trainer.parallel.tensor import ModelShard, TensorParallel


class DropoutMasks(NamedTuple):
    """Masks of one layer; None where the rate is 0."""

    probabilities: Tensor | None
    attention_out: Tensor | None
    mlp_out: Tensor | None


_NO_DROPOUT = DropoutMasks(None, None, None)


class DecoderWiring(nn.Cell):
    """The order of a decoder's parts: embedding, layers, head, multi-token prediction modules, total loss.

    It is the same for a run in explicit mode (`Decoder`), for the exported graphs of the audit and for semi-automatic
    mode. Each of them supplies the parts and says why they must differ. `call` is what its parts need of one call:

    run_embedding(ids_N, call) -> x_ND
    run_layer(number, x_ND, call) -> x_ND, auxiliary loss and z loss of its router (None in a dense layer)
    run_merge(module, x_ND, call) -> x_ND, the input of the block of a multi-token prediction module
    run_head(number, x_ND, call) -> sum of token losses; 0 is the main model, `module + 1` a module

    The layers of the modules follow the main model's. Graphs are made of this code too, so it is what their compiler
    can read.
    """

    def __init__(self, settings: ModelConfig, num_layers: int, mtp_modules: int) -> None:
        super().__init__(auto_prefix=False)
        moe = settings.experts
        self.num_layers, self.mtp_modules = num_layers, mtp_modules
        self.mtp_factor = settings.mtp_loss_factor / max(1, settings.mtp_depth)
        self.aux_factor, self.z_factor = settings.balance_factor, moe.z_loss_factor if moe else 0.0

    def losses(self, ids_N, mtp_modules, call):
        """The fields of `LossSums` but the last, with as many of the modules as are wanted."""
        x_ND, losses = self.run_main(ids_N, call)
        return self.end(x_ND, losses, mtp_modules, call)

    def end(self, x_ND, losses, mtp_modules, call):
        """`losses` from the results of `run_main` on."""
        tokens, mtp = self.run_head(0, x_ND, call), None
        for module in range(mtp_modules):
            x_ND = self.run_merge(module, x_ND, call)
            x_ND, losses = self.add_layer(self.num_layers + module, x_ND, losses, call)
            mtp = _sum(mtp, self.run_head(module + 1, x_ND, call))
        total = tokens
        if mtp is not None:
            total = total + mtp * self.mtp_factor
        return self.with_routers(total, losses), tokens, losses[0], losses[1], mtp

    def with_routers(self, total, losses):
        """A loss, or None, and what is minimised of the sums of both router losses."""
        aux_loss, z_loss = losses
        if aux_loss is not None and self.aux_factor:
            total = _sum(total, aux_loss * self.aux_factor)
        if z_loss is not None and self.z_factor:
            total = _sum(total, z_loss * self.z_factor)
        return total

    def run_main(self, ids_N, call):
        """The residual stream after the last block, before the final norm, and the sums of both router losses."""
        x_ND, losses = self.run_embedding(ids_N, call), (None, None)
        for layer in range(self.num_layers):
            x_ND, losses = self.add_layer(layer, x_ND, losses, call)
        return x_ND, losses

    def add_layer(self, number, x_ND, losses, call):
        """`run_layer`, and the sums of both router losses with those of this layer."""
        x_ND, aux_loss, z_loss = self.run_layer(number, x_ND, call)
        return x_ND, (_sum(losses[0], aux_loss), _sum(losses[1], z_loss))


def _sum(total, added):
    if added is None:
        return total
    return added if total is None else total + added


class DecoderCall(NamedTuple):
    """What the parts of `Decoder` need of one call."""

    inputs: ModelInputs
    dropout: DropoutKey | None = None
    statistics: RouterStatistics | None = None


class Decoder(DecoderWiring):
    """A Llama/Qwen style decoder in explicit mode: compiled blocks, called one after the other.

    Args:
        compiled: Compile the block and the head (context.mode 0), or run operator by operator (mode 1).
        frozen: Names of parameters that are not trained: no gradient of them is computed. The expert bias of a frozen
            router stays as it is, too.
        recomputed: For each layer what the backward pass recomputes: "block", "attention", "mlp" or "" for nothing. An
            empty sequence means nothing in all layers.
        shard: What this rank has of the model, and the ranks that it computes the rest with; None: the whole model. A
            stage of a pipeline calls the parts of the decoder itself.

    Parameters have Hugging Face's names; `parameters_by_name` maps them, those of adapters at the end. `settings` are
    those that this rank computes with, see `local_settings`.
    """

    def __init__(
        self,
        settings: ModelConfig,
        kernels: KernelSet,
        *,
        seed: int,
        compiled: bool = True,
        frozen: Collection[str] = (),
        recomputed: Sequence[str] = (),
        shard: ModelShard | None = None,
    ) -> None:
        super().__init__(settings, settings.num_layers, settings.mtp_depth)
        self.shard, self.tensor = shard, None if shard is None else shard.tensor
        specs = parameter_specs(settings)
        self.parameters_by_name = {
            name: Parameter(
                Tensor(initial_value(parameter, settings, seed, None if shard is None else shard.part(name))),
                name,
                requires_grad=name not in frozen and parameter.role != "buffer",
            )
            for name, parameter in specs.items()
            if shard is None or shard.holds(name)
        }
        self.masks = DropoutParts(settings, shard)
        part = _vocabulary_part(settings, self.tensor)
        if self.tensor is not None:
            settings = local_settings(settings, self.tensor.group.size, self.tensor.group.rank)
        self.settings, self.kernels = settings, kernels
        experts_take_copies = kernels.cpu_router is None
        # The multi-token prediction modules use these of the main model again.
        shared = (HEAD, MAPPING_IN, MAPPING_OUT) if settings.mtp_depth else ()
        self.compute_weights = ComputeWeights(
            self.parameters_by_name, kernels.compute_dtype, specs, experts=experts_take_copies, shared=shared
        )
        trained = {name for name, parameter in specs.items() if name not in frozen and parameter.role != "buffer"}
        self.balanced_layers = balanced_layers(settings, frozen)
        depth = settings.num_layers + settings.mtp_depth
        self.layer_weights = [self._parameters(layer, block_weights(settings)) for layer in range(depth)]
        self.adapter_masks = AdapterMasks(settings, kernels, self.masks)
        self.embedding, self.final_norm = map(self.parameters_by_name.get, (EMBEDDING, FINAL_NORM))
        self.head_weight = self.compute_weights.get(EMBEDDING if settings.tie_word_embeddings else HEAD)
        whole = kernels.host_layers and self.tensor is None  # a rank's part of the vocabulary is compiled
        self.host_block = HostBlock(settings, kernels.host_dtype, self.tensor) if kernels.host_layers else None
        self.host_head = HostHeadPart(settings, kernels.host_dtype) if whole else None
        self.block = Block(settings, kernels, tensor=self.tensor)
        self.head = Head(settings, kernels, self.tensor, part)
        self.moe = MoeLayer(settings, kernels, compiled, shard) if settings.moe_layers else None
        # Multi-token prediction modules recompute what the last layer recomputes.
        again = list(recomputed) or [""] * settings.num_layers
        self.layers = self._layers(again + again[-1:] * settings.mtp_depth, compiled, trained)
        modules = range(settings.num_layers, depth)
        self.norms = [self.final_norm, *(self._parameters(layer, [MTP_NORM])[0] for layer in modules)]
        self.merge_weights = [self._parameters(layer, MTP_WEIGHTS) for layer in modules]
        self.mapping_in, self.mapping_out = map(self.compute_weights.get, (MAPPING_IN, MAPPING_OUT))
        self.embedding_rows = Differentiable(EmbeddingRows(kernels, self.tensor, part), compiled).plain
        self.map_embedding = Differentiable(EmbeddingMapping(kernels), compiled).plain
        self.head_loss = self._head_loss(compiled, part) if self.final_norm is not None else None
        self.merge = Differentiable(MergeTokens(settings, kernels), compiled).plain if settings.mtp_depth else None

    def _head_loss(self, compiled: bool, part: VocabularyPart | None) -> Callable:
        """(x_ND, norm, weight, labels, valid, mapping or nothing) -> sum of token losses."""
        # Number of an argument after x_ND -> weight.
        of_head = {0: self.final_norm, 1: self.head_weight, 4: self.mapping_out}
        frozen = {argnum for argnum, one in of_head.items() if one is not None and not one.requires_grad}
        if self.kernels.piecewise_loss is None:
            return Differentiable(self.head, compiled).stopped_at(tuple(sorted(frozen)))
        compiles = partial(compile_cell, compiled=compiled)
        loss = self.kernels.piecewise_loss(compiles, trained=1 not in frozen, part=part)
        # The same without the head's weight, the labels and what they count.
        argnums = tuple(here for here, argnum in enumerate((0, 4)) if argnum in frozen)
        normed = Differentiable(self.head.normed, compiled).stopped_at(argnums)

        def head_loss(x_ND, norm_E, weight_VE, labels_N, valid_N1, *mapping):
            return loss(normed(x_ND, norm_E, *mapping), weight_VE, labels_N, valid_N1)

        return head_loss

    @property
    def trained_parameters(self) -> dict[str, Parameter]:
        """The parameters that an optimizer updates, by name."""
        return {name: parameter for name, parameter in self.parameters_by_name.items() if parameter.requires_grad}

    def _layers(
        self, recomputed: Sequence[str], compiled: bool, trained: Collection[str]
    ) -> list[dict[str, HostLayerPart | LayerPart | MoePart]]:
        """For each layer its parts, in order: the whole block, or its sublayers where one of them is recomputed.

        A layer with experts has its attention sublayer and, in the place of the feed-forward sublayer, its experts. A
        layer that another rank has is empty here, but a gradient may flow through it.
        """
        settings, kernels = self.settings, self.kernels

        @functools.cache
        def function(name: str, window: int | None) -> Differentiable:
            is_own = name == "block" and window is None
            block = self.block if is_own else Block(settings, kernels, name, window, self.tensor)
            return Differentiable(block, compiled)

        # A gradient flows through a layer if a weight in it or in a layer before it is trained.
        reached, layers = EMBEDDING in trained or MAPPING_IN in trained, []
        for layer, (again, weights) in enumerate(zip(recomputed, self.layer_weights, strict=True)):
            experts = self._parameters(layer, moe_shapes(self.settings)) if self.settings.is_moe_layer(layer) else ()
            names = (*block_weights(settings), *(moe_shapes(settings) if experts else ()))
            reached = reached or any(parameter_name(settings, layer, name) in trained for name in names)
            parts: dict[str, HostLayerPart | LayerPart | MoePart] = {}
            if all(weight is None for weight in weights):
                layers.append(parts)
                continue
            sublayers = ("attention",) if experts else SUBLAYERS if again in SUBLAYERS and reached else ("block",)
            for name in sublayers:
                named = zip(block_weights(self.settings), weights, strict=True)
                own = [weight if name in ("block", sublayer_of(each)) else None for each, weight in named]
                redone = again == name or (bool(experts) and again == "block")
                if self.host_block is not None:
                    names = zip(block_weights(settings), own, strict=True)
                    parts[name] = HostLayerPart(
                        self.host_block, name, {each: weight for each, weight in names if weight is not None},
                        windowed=settings.has_window(layer), recomputed=redone or not reached,
                    )  # fmt: skip
                    continue
                one = function(name, None if name == "mlp" else kernels.window(settings, layer))
                parts[name] = LayerPart(one, own, reached=reached, recomputed=redone)
            if experts:
                redone = again in ("block", "mlp")
                capacity = self.settings.experts.capacity
                parts["experts"] = MoePart(self.moe, layer, experts, capacity, reached=reached, recomputed=redone)
            layers.append(parts)
        return layers

    def _parameters(self, layer: int, names: Iterable[str]) -> list[Parameter | None]:
        """Parameters of a layer; None for those that only other layers have."""
        return [self.compute_weights.get(parameter_name(self.settings, layer, name)) for name in names]

    def construct(
        self, inputs: ModelInputs, dropout: DropoutKey | None = None, statistics: RouterStatistics | None = None
    ) -> LossSums:
        """Sums of losses over the valid labels, not divided by anything.

        Args:
            inputs: One micro-batch, see `trainer.models.inputs`.
            dropout: Names the masks; None (evaluation) or rates of 0 drop nothing.
            statistics: Given in a training: it records what routers decide; tokens beyond the experts' capacity are
                dropped and the multi-token prediction modules run. None: evaluation.
        """
        modules = 0 if statistics is None else self.mtp_modules
        return LossSums(*self.losses(inputs.ids_N, modules, DecoderCall(inputs, dropout, statistics)))

    # The parts: compiled functions, which are called with views of the weights.

    def run_embedding(self, ids_N: Tensor, call: DecoderCall | None = None) -> Tensor:
        # A prediction (no call) has a new shape for each length of a prompt: nothing to compile for.
        whole = call is None and self.tensor is None
        look_up = self.kernels.gather_rows if whole else self.embedding_rows
        around, embedding, mapping = self.compute_weights.around, self.embedding, self.mapping_in
        if self.kernels.host_layers and self.tensor is None:
            return around((embedding,), ids_N, lambda ids_N: HostEmbedding(ids_N)(embedding))
        x_NE = around((embedding,), ids_N, lambda ids_N: look_up(_view(embedding), ids_N))
        return x_NE if mapping is None else around((mapping,), x_NE, lambda x: self.map_embedding(x, _view(mapping)))

    def run_layer(self, number: int, x_ND: Tensor, call: DecoderCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
        weights = [weight for part in self.layers[number].values() for weight in part.weights]
        return self.compute_weights.around(weights, x_ND, lambda x_ND: self._layer(number, x_ND, call))

    def run_merge(self, module: int, x_ND: Tensor, call: DecoderCall) -> Tensor:
        embedded_ND = self.run_embedding(call.inputs.mtp[module].ids_N, call)
        weights = self.norms[module], *self.merge_weights[module]
        return self.compute_weights.around(
            weights, x_ND, lambda x_ND: self.merge(embedded_ND, x_ND, *map(_view, weights))
        )

    def run_head(self, number: int, x_ND: Tensor, call: DecoderCall) -> Tensor:
        weights = self.norms[number], self.head_weight, self.mapping_out
        return self.compute_weights.around(weights, x_ND, lambda x_ND: self._head(number, x_ND, call))

    def _layer(self, number: int, x_ND: Tensor, call: DecoderCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
        inputs, dropout, statistics = call
        aux_loss = z_loss = None
        for name, part in self.layers[number].items():
            if name == "experts":
                x_ND, aux_loss, z_loss = part(
                    x_ND,
                    inputs.sequence_weights,
                    lambda: self._dropout_masks(dropout, number, inputs, "mlp").mlp_out,
                    statistics,
                )
            elif isinstance(part, HostLayerPart):
                x_ND = part(x_ND, inputs.positions, statistics is not None)
            else:
                x_ND = part(x_ND, partial(self._constants, name, number, inputs, dropout))
        return x_ND, aux_loss, z_loss

    def _head(self, number: int, x_ND: Tensor, call: DecoderCall) -> Tensor:
        labels = call.inputs.mtp[number - 1] if number else call.inputs
        if self.host_head is not None:
            return self.host_head(x_ND, self.norms[number], self.head_weight, labels, call.statistics is not None)
        weights = _view(self.norms[number]), _view(self.head_weight)
        mapping = () if self.mapping_out is None else (_view(self.mapping_out),)
        return self.head_loss(x_ND, *weights, labels.labels_N, labels.valid_N1, *mapping)

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """The residual stream after the last block, before the final norm, without dropout: [N, D]."""
        return self.run_main(inputs.ids_N, DecoderCall(inputs))[0]

    def _constants(self, part: str, layer: int, inputs: ModelInputs, dropout: DropoutKey | None) -> tuple[tuple, list]:
        """The arguments of a part of a layer before and after its weights; the same for the same arguments."""
        masks = self._dropout_masks(dropout, layer, inputs, part)
        adapters = zip(self.adapter_masks.names, self.adapter_masks(dropout, layer, inputs), strict=True)
        own = [adapter_mask if part in ("block", sublayer_of(name)) else None for name, adapter_mask in adapters]
        mask = inputs.window_mask if self.settings.has_window(layer) else inputs.mask
        return (*inputs.tables, *mask, *masks), own

    def update_expert_bias(self, counts: RoutingCounts | None) -> None:
        """Moves each router's expert bias against the load of its experts, after an optimizer step.

        DeepSeek-V3, section 2.1.2: up by a fixed amount for an expert with less than the mean load, down with more.
        `counts` are those of the whole window, over all ranks. The bias of a frozen router is frozen too.
        """
        for layer, requested_E in zip(counts.layers, counts.requested, strict=True) if counts is not None else ():
            bias_E = self.parameters_by_name.get(layer_prefix(layer) + EXPERT_BIAS)
            if layer in self.balanced_layers and bias_E is not None:
                device_measures().move_bias(bias_E, requested_E, self.settings.experts.topk_bias_update_rate)

    def logits(self, inputs: ModelInputs) -> Tensor:
        """Logits of every token, [N, V]; for evaluation and tests, not for training."""
        return self.logits_of(self.hidden_states(inputs))

    def logits_of(self, x_ND: Tensor) -> Tensor:
        """Logits of a residual stream after the last block."""
        logits_NV = self.kernels.logits(self.head.normed(x_ND, self.final_norm, self.mapping_out), self.head_weight)
        if self.tensor is None:
            return logits_NV
        return AllGather(self.tensor.group, compiled=False)(logits_NV.T).T

    def _dropout_masks(self, key: DropoutKey | None, layer: int, inputs: ModelInputs, part: str) -> DropoutMasks:
        hidden, attention = self.settings.hidden_dropout, self.settings.attention_dropout
        if key is None or (hidden == 0 and attention == 0):
            return _NO_DROPOUT
        sites, rows = dropout_sites(self.settings, layer), self.masks.rows(inputs)
        stream = self.masks.tokens(inputs), self.settings.hidden_size

        def mask(draw: Callable, sublayer: str, site: str, shape: tuple[int, ...], rate: float, own) -> Tensor | None:
            drops = rate > 0 and part in ("block", sublayer)
            return draw(key, sites[site], shape, rate, own) if drops else None

        heads, draw_scores = self.masks.heads, self.kernels.draw_attention_mask
        return DropoutMasks(
            mask(draw_scores, "attention", "probabilities", inputs.scores_shape, attention, heads),
            mask(self.kernels.draw_mask, "attention", "attention_output", stream, hidden, rows),
            mask(self.kernels.draw_mask, "mlp", "mlp_output", stream, hidden, rows),
        )


class DropoutParts:
    """Which parts of the dropout masks of the whole model, for whole sequences, a rank draws.

    Attributes:
        heads: For masks of probabilities; None: all.
        ranks: Those that share the columns of a matrix.
    """

    def __init__(self, settings: ModelConfig, shard: ModelShard | None) -> None:
        self.tensor, self.sequence = (None, SequencePart(0, 1)) if shard is None else (shard.tensor, shard.tokens)
        self.rank, self.ranks = (0, 1) if self.tensor is None else (self.tensor.group.rank, self.tensor.group.size)
        sharing = self.sequence.ulysses  # divides the heads of a rank once more
        self.heads = None
        if self.ranks * sharing > 1:
            own, number = local_settings(settings, self.ranks), self.rank * sharing + self.sequence.rank % sharing
            heads, kv_heads = own.num_heads // sharing, max(1, own.kv_heads // sharing)
            self.heads = OwnHeads(number, settings.num_heads, settings.kv_heads, heads, kv_heads)

    def tokens(self, inputs: ModelInputs) -> int:
        """Tokens of the micro-batch, those of other ranks included."""
        return inputs.ids_N.shape[0] * self.sequence.ranks

    def rows(self, inputs: ModelInputs) -> MaskPart | None:
        """The part of a mask of the residual stream."""
        if self.tensor is None or not self.tensor.shares_rows:
            return self.whole_rows(inputs)
        own = self.tensor.rows(inputs.ids_N.shape[0])
        rows = own if inputs.rows is None else inputs.rows[own]
        return MaskPart(self._number(self.rank), (rows, slice(None)))

    def columns(self, inputs: ModelInputs, width: int) -> MaskPart | None:
        """The part of a mask of what is cut by columns; `width` is that of the whole."""
        return self._part(inputs, slice(None) if self.tensor is None else self.tensor.columns(width), self.rank)

    def whole_rows(self, inputs: ModelInputs) -> MaskPart | None:
        """The part of a mask of what each tensor-parallel rank has whole."""
        return self._part(inputs, slice(None), 0)

    def _part(self, inputs: ModelInputs, columns: slice, tensor_rank: int) -> MaskPart | None:
        if inputs.rows is None and columns == slice(None):
            return None
        return MaskPart(self._number(tensor_rank), (slice(None) if inputs.rows is None else inputs.rows, columns))

    def _number(self, tensor_rank: int) -> int:
        return self.sequence.rank * self.ranks + tensor_rank


class AdapterMasks:
    """Draws the masks of the adapters' dropout."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, parts: DropoutParts) -> None:
        self.settings, self.names, self.draw = settings, dropped_projections(settings), kernels.draw_mask
        self.parts = parts
        self.shapes = attention_shapes(settings) | mlp_shapes(settings)

    def __call__(self, key: DropoutKey | None, layer: int, inputs: ModelInputs) -> list[Tensor | None]:
        """The masks of [N, I] numbers of a layer, as `block_names` ends; None where nothing is dropped."""
        if key is None or not self.names:
            return [None] * len(self.names)
        rate, sites = self.settings.pet_config.lora_dropout, dropout_sites(self.settings, layer)
        masks: list[Tensor | None] = []
        for name in self.names:
            mask = None
            if name in sites:
                width = self.shapes[f"{name}.weight"][1]
                mask = self.draw(key, sites[name], *self._part(name, inputs, width, rate))
            masks.append(mask)
        return masks

    def _part(
        self, name: str, inputs: ModelInputs, width: int, rate: float
    ) -> tuple[tuple[int, int], float, MaskPart | None]:
        """Shape and rate of the whole mask of a projection's input of so many columns, and the part of it."""
        if name.endswith(("o_proj", "down_proj")):
            width *= self.parts.ranks
            part = self.parts.columns(inputs, width)
        else:
            of_rows = name.endswith(("q_a_proj", "kv_a_proj_with_mqa"))
            part = self.parts.rows(inputs) if of_rows else self.parts.whole_rows(inputs)
        return (self.parts.tokens(inputs), width), rate, part


def _vocabulary_part(settings: ModelConfig, tensor: TensorParallel | None) -> VocabularyPart | None:
    """The part of the model's vocabulary that a rank has."""
    if tensor is None:
        return None
    group = tensor.group
    first = range_of_rank(settings.vocab_size, group.rank, group.size).start
    return VocabularyPart(group.rank, group.size, first, AllGather(group))


def _view(parameter: Parameter) -> Tensor:
    return parameter.view(parameter.shape)
