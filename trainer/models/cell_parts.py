"""The parts of a decoder as MindSpore cells: compiled for an Ascend, operator by operator in context.mode 1 on a CPU.

A block is compiled once (context.mode 0) and called for every layer with views of that layer's weights: MindSpore
specialises on every Parameter object, so with Parameters it would compile every layer anew. A view costs microseconds,
copies nothing, and gradients flow through it.

Legend: B sequences, T tokens, N = B * T, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

from trainer.config.recompute import SUBLAYERS
from trainer.models.block import MTP_NORM, MTP_WEIGHTS, Block, EmbeddingMapping, EmbeddingRows, Head, MtpMerge
from trainer.models.compute_weights import ModelParams
from trainer.models.dropout import AdapterMasks, DropoutShards
from trainer.models.inputs import DecoderCall, ModelInputs, MtpInputs
from trainer.models.moe import MoeFunction, MoeLayer
from trainer.models.recompute import Compiled, Differentiable, LayerFunction, compile_cell
from trainer.models.spec.adapters import adapter_factors, merged_matrix
from trainer.models.spec.build import dropout_sites, model_spec
from trainer.models.spec.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    MAPPING_IN,
    MAPPING_OUT,
    norm_bias,
    sublayer_of,
)
from trainer.models.spec.shapes import (
    block_weights,
    moe_shapes,
)
from trainer.ops.vocabulary import VocabShard
from trainer.parallel.collectives import AllGather
from trainer.parallel.sharding import shard_range

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig
    from trainer.models.inputs import PredictionCall
    from trainer.ops.dropout import DropoutKey, LocalHeads, MaskShard
    from trainer.ops.kernel_set import KernelSet
    from trainer.parallel.tensor import RankModelShard, TensorParallel


_CACHED_MULTIPLE = 32  # of the length that a prediction's attention sees: few shapes occur


class DropoutMasks(NamedTuple):
    """Masks of one layer; None where the rate is 0."""

    probabilities: Tensor | None
    attention_out: Tensor | None
    mlp_out: Tensor | None


_NO_DROPOUT = DropoutMasks(None, None, None)


class CellParts:
    """Embedding, layers, merges and heads of a decoder, which `DecoderForward` calls.

    Args:
        compiled: Compile the block and the head (context.mode 0), or run operator by operator (mode 1).
        recomputed: For each layer, including those of MTP modules, what the backward pass recomputes: "block",
            "attention", "mlp" or "".
        trained: Full names of the trained weights, of all stages of a pipeline.
    """

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, weights: ModelParams, compiled: Compiled,
        recomputed: Sequence[str], trained: Collection[str], dropout: DropoutShards, shard: RankModelShard | None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.kernels = kernels
        self.compute_weights = weights
        self.masks = dropout
        if shard is None:
            self.tensor = None
        else:
            self.tensor = shard.tensor
        part = _vocab_shard(settings.vocab_size, self.tensor)
        self.spec = model_spec(settings)
        layers = range(len(self.spec.layers))
        self.layer_weights = [self._parameters(layer, block_weights(settings)) for layer in layers]
        self.adapter_masks = AdapterMasks(settings, kernels, dropout)
        outer = (EMBEDDING, FINAL_NORM, norm_bias(FINAL_NORM))
        self.embedding, self.final_norm, self.final_bias = map(weights.main_params.get, outer)
        self.head_weight = weights.get(EMBEDDING if self.spec.tied else HEAD)
        self.block = Block(settings, kernels, tensor=self.tensor)
        self.unrotated_block = self.block
        if settings.unrotated_layers:
            self.unrotated_block = Block(settings, kernels, tensor=self.tensor, is_rotated=False)
        self.head = Head(settings, kernels, self.tensor)
        self.head_product = kernels.linear()
        self.moe: MoeLayer | None = None
        if settings.moe_layers:
            self.moe = MoeLayer(settings, kernels, compiled, shard)
        self.layers = self._layers(recomputed, compiled, trained)
        modules = self.spec.module_layers
        self.norms = [self.final_norm, *(self._parameters(layer, [MTP_NORM])[0] for layer in modules)]
        self.merge_weights = [self._parameters(layer, MTP_WEIGHTS) for layer in modules]
        self.mapping_in, self.mapping_out = map(weights.get, (MAPPING_IN, MAPPING_OUT))
        self.embedding_rows = Differentiable(EmbeddingRows(kernels, self.tensor, part), compiled).plain
        self.map_embedding = Differentiable(EmbeddingMapping(kernels), compiled).plain
        if self.final_norm is not None:
            self.head_loss = self._head_loss(compiled, part)
        if modules:
            self.merge = Differentiable(MtpMerge(settings, kernels), compiled).plain

    def _head_loss(self, compiled: Compiled, part: VocabShard | None) -> Callable:
        """Returns the function (x_ND, norm, weight, labels, valid, mapping, norm's bias) -> sum of token losses.

        The last two may be left out.
        """
        # By argument number after x_ND.
        weights = {0: self.final_norm, 1: self.head_weight, 4: self.mapping_out, 5: self.final_bias}
        frozen = {argnum for argnum, weight in weights.items() if weight is not None and not weight.requires_grad}
        if any(norm is not None and norm.requires_grad for norm in self.norms):
            frozen.discard(0)  # the heads of MTP modules are this function with norms of their own
        if _module(HEAD) in self.spec.adapters:
            frozen.discard(1)  # the adapter has its gradient from that of the merged matrix
        if self.kernels.chunked_loss is None:
            return Differentiable(self.head, compiled).stop_gradients_at(tuple(sorted(frozen)))
        compiles = partial(compile_cell, compiled=compiled)
        cap = self.settings.final_logit_softcapping
        loss = self.kernels.chunked_loss(compiles, trained=1 not in frozen, shard=part, cap=cap)
        # The norm takes arguments 0, 4 and 5 of the head.
        argnums = tuple(norm_argnum for norm_argnum, argnum in enumerate((0, 4, 5)) if argnum in frozen)
        normed = Differentiable(self.head.normed, compiled).stop_gradients_at(argnums)

        def head_loss(
            x_ND: Tensor, norm_E: Tensor, weight_VE: Tensor, labels_N: Tensor, valid_N1: Tensor, *others: Tensor | None
        ) -> Tensor:
            """Returns the sum of the losses over the loss tokens."""
            return loss(normed(x_ND, norm_E, *others), weight_VE, labels_N, valid_N1)

        return head_loss

    def _layers(
        self, recomputed: Sequence[str], compiled: Compiled, trained: Collection[str]
    ) -> list[dict[str, LayerFunction | MoeFunction]]:
        """Returns the parts of each layer, in order: the block, or its sublayers where one of them is recomputed.

        An MoE layer has the parts "attention" and "experts". A layer of another pipeline stage has none.
        """
        settings = self.settings
        kernels = self.kernels

        @functools.cache
        def function(name: str, window: int | None, is_rotated: bool) -> Differentiable:
            """Returns the block, or one of its sublayers, for a window, with or without rotary positions."""
            if name == "block" and window is None and is_rotated:
                return Differentiable(self.block, compiled)
            return Differentiable(Block(settings, kernels, name, window, self.tensor, is_rotated), compiled)

        first = self.spec.first_reached(trained)
        layers: list[dict[str, LayerFunction | MoeFunction]] = []
        for layer, (again, weights) in enumerate(zip(recomputed, self.layer_weights, strict=True)):
            parts: dict[str, LayerFunction | MoeFunction] = {}
            layers.append(parts)
            if all(weight is None for weight in weights):
                continue
            is_moe = settings.is_moe_layer(layer)
            reached = layer >= first
            sublayers: tuple[str, ...] = ("block",)
            if is_moe:
                sublayers = ("attention",)
            elif again in SUBLAYERS and reached:
                sublayers = SUBLAYERS
            for name in sublayers:
                window = None
                is_rotated = True
                if name != "mlp":
                    window = kernels.window(settings, layer)
                    is_rotated = self.spec.layers[layer].attention.is_rotated
                used = [
                    weight if name in ("block", sublayer_of(weight_name)) else None
                    for weight_name, weight in zip(block_weights(settings), weights, strict=True)
                ]
                recomputes = again == name or (is_moe and again == "block")
                parts[name] = LayerFunction(
                    function(name, window, is_rotated), used, reached=reached, recomputed=recomputes
                )
            if is_moe:
                assert self.moe is not None and settings.experts is not None
                parts["experts"] = MoeFunction(
                    self.moe, layer, self._parameters(layer, moe_shapes(settings)), settings.experts.capacity,
                    reached=reached, recomputed=again in ("block", "mlp"),
                )  # fmt: skip
        return layers

    def _parameters(self, layer: int, names: Iterable[str]) -> list[Parameter | None]:
        """Returns the parameters of a layer with these names; None for those that only other layers have."""
        return [self.compute_weights.get(self.spec.parameter_name(layer, name)) for name in names]

    def run_embedding(self, ids_N: Tensor, call: DecoderCall | None = None) -> Tensor:
        """Returns the residual stream of tokens, [N, D]; `call` is None in a prediction."""
        look_up = self.embedding_rows
        if call is None and self.tensor is None:
            look_up = self.kernels.gather_rows  # uncompiled: each length of a prompt is a new shape
        x_NE = look_up(self._with_adapter(EMBEDDING, self.embedding), ids_N)
        if self.mapping_in is None:
            return x_NE
        return self.map_embedding(x_NE, _view(self.mapping_in))

    def run_merge(self, module: int, x_ND: Tensor, call: DecoderCall) -> Tensor:
        """Returns the input of the block of an MTP module, [N, D]."""
        embedded_ND = self.run_embedding(call.inputs.mtp[module].ids_N, call)
        weights = self.norms[module], *self.merge_weights[module]
        return self.merge(embedded_ND, x_ND, *map(_view, weights))

    def run_layer(self, number: int, x_ND: Tensor, call: DecoderCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the residual stream after a layer, and the auxiliary loss and z-loss of its router, if it has one."""
        inputs, dropout, statistics, observer, _ = call
        aux_loss = z_loss = None
        if observer is not None:
            x_ND = observer.stream(number, "input", x_ND)
        for name, part in self.layers[number].items():
            if isinstance(part, MoeFunction):
                x_ND, aux_loss, z_loss = part(
                    x_ND,
                    inputs.sequence_weights,
                    lambda: self._dropout_masks(dropout, number, inputs, "mlp").mlp_out,
                    statistics,
                )
            else:
                x_ND = part(x_ND, partial(self._constants, name, number, inputs, dropout))
            if observer is not None:
                x_ND = observer.stream(number, name, x_ND)
        return x_ND, aux_loss, z_loss

    def run_head(self, number: int, x_ND: Tensor, call: DecoderCall) -> Tensor:
        """Returns the sum of token losses of the main model (number 0) or of the MTP module `number - 1`."""
        labels: ModelInputs | MtpInputs = call.inputs
        if number:
            labels = call.inputs.mtp[number - 1]
        matrix_VE = self._with_adapter(HEAD, self.head_weight)
        arguments = [_view(self.norms[number]), matrix_VE, labels.labels_N, labels.valid_N1]
        if self.final_bias is not None:
            arguments += [_view(self.mapping_out), _view(self.final_bias)]
        elif self.mapping_out is not None:
            arguments.append(_view(self.mapping_out))
        loss = self.head_loss(x_ND, *arguments)
        if call.observer is not None:
            call.observer.loss(number, loss)
        return loss

    def _with_adapter(self, name: str, matrix: Parameter) -> Tensor:
        """Returns the embedding or the head with its adapter merged in; without one a view."""
        adapter = self.spec.adapters.get(_module(name))
        if adapter is None:
            return _view(matrix)
        a_RE, b_VR = adapter_factors(self.compute_weights.main_params, _module(name))
        return merged_matrix(matrix, a_RE, b_VR, adapter.scale).astype(matrix.dtype)

    def _constants(self, part: str, layer: int, inputs: ModelInputs, dropout: DropoutKey | None) -> tuple[tuple, list]:
        """Returns the arguments of a part of a layer before its weights, and those after them."""
        dropout_masks = self._dropout_masks(dropout, layer, inputs, part)
        adapter_masks = [
            adapter_mask if part in ("block", sublayer_of(name)) else None
            for name, adapter_mask in zip(
                self.adapter_masks.names, self.adapter_masks(dropout, layer, inputs), strict=True
            )
        ]
        mask = inputs.mask
        tables = inputs.tables
        if self.settings.has_window(layer):
            assert inputs.window_mask is not None and inputs.window_tables is not None
            mask = inputs.window_mask
            tables = inputs.window_tables
        return (*tables, *mask, *dropout_masks), adapter_masks

    def _dropout_masks(self, key: DropoutKey | None, layer: int, inputs: ModelInputs, part: str) -> DropoutMasks:
        hidden = self.settings.hidden_dropout
        attention = self.settings.attention_dropout
        if key is None or (hidden == 0 and attention == 0):
            return _NO_DROPOUT
        sites = dropout_sites(self.settings, layer)
        rows = self.masks.rows(inputs)
        stream = self.masks.tokens(inputs), self.settings.hidden_size

        def mask(
            draw: Callable, sublayer: str, site: str, shape: tuple[int, ...], rate: float,
            shard: MaskShard | LocalHeads | None,
        ) -> Tensor | None:  # fmt: skip
            """Draws the mask of a place, or returns None without dropout there."""
            if rate > 0 and part in ("block", sublayer):
                return draw(key, sites[site], shape, rate, shard)
            return None

        heads = self.masks.heads
        draw_scores = self.kernels.draw_attention_mask
        return DropoutMasks(
            mask(draw_scores, "attention", "probabilities", inputs.scores_shape, attention, heads),
            mask(self.kernels.draw_mask, "attention", "attention_output", stream, hidden, rows),
            mask(self.kernels.draw_mask, "mlp", "mlp_output", stream, hidden, rows),
        )

    def logits(self, x_ND: Tensor) -> Tensor:
        """Returns the logits of a residual stream after the last layer, [N, V], of all ranks."""
        normed_NE = self.head.normed(x_ND, self.final_norm, self.mapping_out, self.final_bias)
        matrix_VE = self._with_adapter(HEAD, self.head_weight)
        logits_NV = self.head_product(normed_NE, matrix_VE).astype(mstype.float32)
        if self.head.cap is not None:
            logits_NV = self.head.cap(logits_NV)
        if self.tensor is None:
            return logits_NV
        return AllGather(self.tensor.group)(logits_NV.T).T

    # Prediction.

    def logits_of_rows(self, x_nD: np.ndarray) -> np.ndarray:
        """Returns the logits of some rows of a residual stream after the last layer, [n, V]."""
        return self.logits(Tensor(x_nD)).asnumpy()

    def new_cache(self, rows: int, tokens: int) -> CellCache:
        """Returns an empty cache for `rows` sequences of `tokens` tokens."""
        attention = self.spec.layers[0].attention
        if self.tensor is not None:
            attention = attention.local(self.tensor.group.size)
        layers = self.spec.num_layers
        widths = attention.cache_widths
        return CellCache(layers, widths, self.kernels, rows, self.cached_length(tokens))

    def cached_length(self, positions: int) -> int:
        """Returns how many cached positions attention reads if a query sees `positions` of them."""
        return -(-positions // _CACHED_MULTIPLE) * _CACHED_MULTIPLE

    def cached_mask(self, visible_BQS: np.ndarray) -> Tensor:
        """Returns the term that attention adds to its scores, from which keys each query sees."""
        return self.kernels.cached_mask(visible_BQS)

    def embed_tokens(self, ids_N: np.ndarray) -> Tensor:
        """Returns the residual stream of tokens, [N, D]."""
        return self.run_embedding(Tensor(ids_N))

    def predict_layers(self, layers: Sequence[int], x_ND: Tensor, call: PredictionCall) -> Tensor:
        """Returns the residual stream [N, D] after consecutive layers, for new tokens of a prediction."""
        for layer in layers:
            attention = self.block.attention
            if not self.spec.layers[layer].attention.rotary_size:
                attention = self.unrotated_block.attention
            weights = [*self.layer_weights[layer], *([None] * len(self.adapter_masks.names))]
            has_window = self.settings.has_window(layer)
            tables = call.tables[0]
            if has_window:
                tables = call.tables[-1]
            q_NC, *new = attention.project(x_ND, tables[0:2], tables[2:4], weights)
            cached = call.cache.update(layer, new)
            mask = call.masks[has_window]
            input_ND = x_ND
            x_ND = x_ND + attention.attend_over_cache(self.kernels.cached_attention, q_NC, cached, mask, weights)
            experts = self.layers[layer].get("experts")
            if isinstance(experts, MoeFunction):
                x_ND = experts(x_ND)[0]
            elif self.settings.parallel_attn:
                x_ND = x_ND + self.block.mlp(input_ND, weights)
            else:
                x_ND = x_ND + self.block.mlp(x_ND, weights)
        return x_ND

    def predict_logits(self, x_ND: Tensor, ends_B: np.ndarray) -> np.ndarray:
        """Returns the logits [B, V] after the tokens in the rows `ends_B`."""
        return self.logits(self.kernels.gather_rows(x_ND, Tensor(ends_B))).asnumpy()


class CellCache:
    """The KV cache of a prediction: two tensors of each layer, [B * S, width], which are written in place.

    `AttentionSpec.cache_widths` has their widths: keys and values, or with MLA latent vectors and rotated keys.
    """

    def __init__(self, layers: int, widths: Sequence[int], kernels: KernelSet, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self.write = kernels.write_rows

        def empty(name: str, width: int) -> Parameter:
            zeros = Tensor(np.zeros((rows * capacity, width), np.float32), kernels.compute_dtype)
            return Parameter(zeros, name=name, requires_grad=False)

        self.layers = [
            tuple(empty(f"cache.{layer}.{number}", width) for number, width in enumerate(widths))
            for layer in range(layers)
        ]
        self.index = Tensor(np.zeros(1, np.int32))
        self.cached = 0

    def set_positions(self, positions_BQ: np.ndarray, cached: int) -> None:
        """Sets where the next calls of `update` write, and how many positions they return."""
        offsets = np.arange(self.rows)[:, None] * self.capacity
        self.index = Tensor((offsets + positions_BQ).reshape(-1).astype(np.int32))
        self.cached = cached

    def update(self, layer: int, new: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Writes the two tensors of a layer for new tokens; returns those of all cached tokens, [B, S, width]."""
        for store, rows in zip(self.layers[layer], new, strict=True):
            self.write(store, self.index, rows)
        first, second = (store.reshape(self.rows, self.capacity, -1) for store in self.layers[layer])
        return first[:, : self.cached], second[:, : self.cached]


def _vocab_shard(vocabulary: int, tensor: TensorParallel | None) -> VocabShard | None:
    """Returns the shard of a vocabulary of `vocabulary` tokens that the rank has; None without tensor parallelism."""
    if tensor is None:
        return None
    group = tensor.group
    first = shard_range(vocabulary, group.rank, group.size).start
    return VocabShard(group.rank, group.size, first, AllGather(group))


def _module(weight: str) -> str:
    """Returns the name of the module that has a weight."""
    return weight.removesuffix(".weight")


def _view(parameter: Parameter | None) -> Tensor | None:
    if parameter is None:
        return None
    return parameter.view(parameter.shape)
