"""The decoder: embedding, blocks, head with loss.

A block is compiled once (context.mode 0) and called for every layer with that layer's weights as views: MindSpore
specialises on every Parameter object it is given, so handing over Parameters would compile every layer anew. A view
costs microseconds, copies nothing, and gradients flow through it.

Legend: B rows, T tokens, N = B * T, D hidden, V vocabulary, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import operations as P

from trainer.config.recompute import SUBLAYERS
from trainer.models.attention import AttentionLayer
from trainer.models.dropout import DropoutKey, dropout_mask
from trainer.models.init import initial_value
from trainer.models.inputs import ModelInputs, MtpInputs
from trainer.models.lora import AdapterMasks
from trainer.models.losses import LossSums
from trainer.models.mlp import MlpLayer
from trainer.models.moe import MoeLayer, MoePart, RouterStatistics
from trainer.models.mtp import NORM, WEIGHTS, MergeTokens
from trainer.models.recompute import Differentiable, LayerPart
from trainer.models.shapes import (
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    HEAD,
    all_shapes,
    balanced_layers,
    block_weights,
    half_of,
    is_buffer,
    layer_prefix,
    moe_shapes,
)

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet
    from trainer.ops.routing import RoutingCounts

_DROPOUT_SITES = 3  # per layer: attention probabilities, attention output, feed-forward output


class DropoutMasks(NamedTuple):
    """Masks of one layer; None where the rate is 0."""

    probabilities: Tensor | None
    attention_out: Tensor | None
    mlp_out: Tensor | None


_NO_DROPOUT = DropoutMasks(None, None, None)


class Block(nn.Cell):
    """One decoder block as a pure function of the residual stream, the position tables, the masks and the weights.

    Every tensor is an argument of its own: MindSpore takes a tuple of tensors for a constant and compiles for each
    new one.

    Args:
        settings: The model section.
        kernels: What it is built from.
        part: The whole block, or its attention or feed-forward half, which takes no weights and masks of the other.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, part: str = "block") -> None:
        super().__init__()
        self.has_attention, self.has_mlp = part in ("block", "attention"), part in ("block", "mlp")
        if self.has_attention:
            self.attention, self.add_attention = AttentionLayer(settings, kernels), P.Add()
        if self.has_mlp:
            self.mlp, self.add_mlp = MlpLayer(settings, kernels), P.Add()

    def construct(
        self, x_ND, q_cos, q_sin, k_cos, k_sin, mask, late_mask, drop_attention, drop_out_ND, drop_mlp_ND, *weights
    ):
        if self.has_attention:
            masks = (mask, late_mask)
            added_ND = self.attention(x_ND, (q_cos, q_sin), (k_cos, k_sin), masks, drop_attention, weights)
            x_ND = self.add_attention(x_ND, added_ND if drop_out_ND is None else added_ND * drop_out_ND)
        if self.has_mlp:
            added_ND = self.mlp(x_ND, weights)
            x_ND = self.add_mlp(x_ND, added_ND if drop_mlp_ND is None else added_ND * drop_mlp_ND)
        return x_ND


class Head(nn.Cell):
    """Final norm, output projection and cross entropy: (x_ND, norm_D, weight_VD, labels_N, valid_N1) -> loss sum."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.norm = kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps)
        self.cross_entropy = kernels.cross_entropy()

    def construct(self, x_ND, norm_D, weight_VD, labels_N, valid_N1):
        return self.cross_entropy(self.norm(x_ND, norm_D), weight_VD, labels_N, valid_N1)


class Decoder(nn.Cell):
    """A Llama/Qwen style decoder.

    Args:
        settings: The model section.
        kernels: What it is built from.
        seed: Of the initial weights.
        compiled: Compile the block and the head (context.mode 0), or run operator by operator (mode 1).
        frozen: Names of parameters that are not trained: no gradient of them is computed. The bias of a frozen router's
            choice stays as well.
        recomputed: For each layer what of it the backward pass computes again: "block", "attention", "mlp" or "" for
            nothing, which is also what an empty sequence says.

    Parameters are named as in Hugging Face's files; `parameters_by_name` maps them, those of adapters at the end.
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
    ) -> None:
        super().__init__(auto_prefix=False)
        self.settings, self.kernels = settings, kernels
        self.parameters_by_name = {
            name: Parameter(
                Tensor(initial_value(name, shape, settings, seed)),
                name,
                requires_grad=name not in frozen and not is_buffer(name),
            )
            for name, shape in all_shapes(settings).items()
        }
        self.balanced_layers = balanced_layers(settings, frozen)
        depth = settings.num_layers + settings.mtp_depth
        self.layer_weights = [self._of_layer(layer) for layer in range(depth)]
        self.adapter_masks = AdapterMasks(settings, first_site=depth * _DROPOUT_SITES)
        self.embedding, self.final_norm = self.parameters_by_name[EMBEDDING], self.parameters_by_name[FINAL_NORM]
        self.head_weight = self.embedding if settings.tie_word_embeddings else self.parameters_by_name[HEAD]
        self.block, self.head = Block(settings, kernels), Head(settings, kernels)
        self.moe = MoeLayer(settings, kernels, compiled) if settings.moe_layers else None
        # Multi-token prediction modules do as the last layer does.
        again = list(recomputed) or [""] * settings.num_layers
        self.layers = self._layers(again + again[-1:] * settings.mtp_depth, compiled)
        of_head = enumerate((self.final_norm, self.head_weight))
        frozen_places = tuple(place for place, weight in of_head if not weight.requires_grad)
        self.run_head = Differentiable(self.head, compiled).stopped_at(frozen_places)
        self.merge = Differentiable(MergeTokens(settings, kernels), compiled).plain if settings.mtp_depth else None

    @property
    def trained_parameters(self) -> dict[str, Parameter]:
        """What an optimizer updates, by name."""
        return {name: parameter for name, parameter in self.parameters_by_name.items() if parameter.requires_grad}

    def _layers(self, recomputed: Sequence[str], compiled: bool) -> list[dict[str, LayerPart | MoePart]]:
        """For each layer its parts, in order: the block as one, or in halves where one of them is computed again.

        A layer with experts is its attention half and, in place of the feed-forward half, its experts.
        """
        functions = {"block": Differentiable(self.block, compiled)}
        for half in SUBLAYERS if self.moe is not None or set(SUBLAYERS) & set(recomputed) else ():
            functions[half] = Differentiable(Block(self.settings, self.kernels, half), compiled)
        # A gradient flows through a layer when something in it or below it is trained.
        reached, layers = self.embedding.requires_grad, []
        for layer, (again, weights) in enumerate(zip(recomputed, self.layer_weights, strict=True)):
            experts = self._experts_of_layer(layer) if self.settings.is_moe_layer(layer) else None
            reached = reached or any(one is not None and one.requires_grad for one in (*weights, *(experts or ())))
            parts: dict[str, LayerPart | MoePart] = {}
            sublayers = ("attention",) if experts else SUBLAYERS if again in SUBLAYERS and reached else ("block",)
            for name in sublayers:
                own, redone = self._of_part(name, weights), again == name or (experts is not None and again == "block")
                parts[name] = LayerPart(functions[name], own, reached=reached, recomputed=redone)
            if experts:
                redone = again in ("block", "mlp")
                parts["experts"] = MoePart(self.moe, layer, experts, reached=reached, recomputed=redone)
            layers.append(parts)
        return layers

    def _experts_of_layer(self, layer: int) -> list[Parameter]:
        return [self.parameters_by_name[layer_prefix(layer) + name] for name in moe_shapes(self.settings)]

    def _of_part(self, part: str, weights: list[Parameter | None]) -> list[Parameter | None]:
        """The weights that a part takes; None in the places of the others."""
        named = zip(block_weights(self.settings), weights, strict=True)
        return [weight if part in ("block", half_of(name)) else None for name, weight in named]

    def _of_layer(self, layer: int) -> list[Parameter | None]:
        """What the block takes of a layer, in the order of `block_weights`; None for adapters that only others have."""
        names = [layer_prefix(layer) + name for name in block_weights(self.settings)]
        return [self.parameters_by_name[name] if name in self.parameters_by_name else None for name in names]

    def construct(
        self, inputs: ModelInputs, dropout: DropoutKey | None = None, statistics: RouterStatistics | None = None
    ) -> LossSums:
        """Sums of losses over the valid labels, not divided by anything.

        Args:
            inputs: One micro-batch, see `trainer.models.inputs`.
            dropout: Names the masks; None (evaluation) or rates of 0 drop nothing.
            tally: A training's: takes what routers say, and has tokens beyond the experts' capacity dropped and the
                multi-token prediction modules run. None: evaluation.
        """
        x_ND = self.hidden_states(inputs, dropout, statistics)
        head_weight = _view(self.head_weight)
        tokens = self.run_head(x_ND, _view(self.final_norm), head_weight, inputs.labels_N, inputs.valid_N1)
        if statistics is None or not (self.settings.experts or self.settings.mtp_depth):
            return LossSums(tokens, tokens)
        mtp = self._mtp_losses(x_ND, inputs, dropout, statistics) if self.settings.mtp_depth else None
        total = tokens
        if mtp is not None:
            total = total + mtp * (self.settings.mtp_loss_factor / self.settings.mtp_depth)
        moe = self.settings.experts
        if moe is not None and moe.aux_loss_factor:
            total = total + statistics.balance * moe.aux_loss_factor
        if moe is not None and moe.z_loss_factor:
            total = total + statistics.z * moe.z_loss_factor
        return LossSums(total, tokens, statistics.balance, statistics.z, mtp)

    def hidden_states(
        self, inputs: ModelInputs, dropout: DropoutKey | None = None, statistics: RouterStatistics | None = None
    ) -> Tensor:
        """The residual stream after the last block, before the final norm: [N, D]."""
        x_ND = ops.gather(_view(self.embedding), inputs.ids_N, 0)
        for layer, parts in enumerate(self.layers[: self.settings.num_layers]):
            x_ND = self._run_layer(layer, parts, x_ND, inputs, dropout, statistics)
        return x_ND

    def _run_layer(
        self,
        layer: int,
        parts: Mapping[str, LayerPart | MoePart],
        x_ND: Tensor,
        inputs: ModelInputs,
        dropout: DropoutKey | None,
        statistics: RouterStatistics | None,
    ) -> Tensor:
        for name, part in parts.items():
            if name == "experts":
                x_ND = part(x_ND, lambda: self._dropout_masks(dropout, layer, inputs, "mlp").mlp_out, statistics)
            else:
                x_ND = part(x_ND, partial(self._constants, name, layer, inputs, dropout))
        return x_ND

    def _mtp_losses(
        self, x_ND: Tensor, inputs: ModelInputs, dropout: DropoutKey | None, statistics: RouterStatistics
    ) -> Tensor:
        """Sum of the token losses of all multi-token prediction modules, see `trainer.models.mtp`."""
        total, final_norm = None, _view(self.final_norm)
        for layer, mtp in enumerate(inputs.mtp, self.settings.num_layers):
            x_ND = self._merged(x_ND, final_norm, mtp, layer)
            x_ND = self._run_layer(layer, self.layers[layer], x_ND, inputs, dropout, statistics)
            final_norm = _view(self.parameters_by_name[layer_prefix(layer) + NORM])
            loss = self.run_head(x_ND, final_norm, _view(self.head_weight), mtp.labels_N, mtp.valid_N1)
            total = loss if total is None else total + loss
        return total

    def _merged(self, x_ND: Tensor, final_norm: Tensor, mtp: MtpInputs, layer: int) -> Tensor:
        embedded_ND = ops.gather(_view(self.embedding), mtp.ids_N, 0)
        weights = (_view(self.parameters_by_name[layer_prefix(layer) + name]) for name in WEIGHTS)
        return self.merge(embedded_ND, x_ND, final_norm, *weights)

    def _constants(self, part: str, layer: int, inputs: ModelInputs, dropout: DropoutKey | None) -> tuple[tuple, list]:
        """What a part of a layer takes before and after its weights; a function of its arguments, masks included."""
        masks = self._dropout_masks(dropout, layer, inputs, part)
        adapters = zip(self.adapter_masks.names, self.adapter_masks(dropout, layer, inputs.ids_N.shape[0]), strict=True)
        own = [adapter_mask if part in ("block", half_of(name)) else None for name, adapter_mask in adapters]
        return (*inputs.tables, *inputs.mask, *masks), own

    def balance_choices(self, counts: RoutingCounts | None) -> None:
        """Moves the bias of each router's choice against the load of its experts, after an optimizer step.

        DeepSeek-V3, section 2.1.2: up by a fixed amount for an expert with less than the mean load, down with more.
        It is a part of the router: where that is frozen, so is the bias.

        Args:
            counts: Of the whole window, over all ranks.
        """
        moe = self.settings.experts
        if counts is None or not (moe.balance_via_topk_bias and moe.topk_bias_update_rate):
            return
        for layer, requested_E in zip(counts.layers, counts.requested, strict=True):
            if layer not in self.balanced_layers:
                continue
            bias_E = self.parameters_by_name[layer_prefix(layer) + EXPERT_BIAS]
            step_E = np.sign(requested_E.mean() - requested_E) * moe.topk_bias_update_rate
            bias_E.set_data(Tensor((bias_E.asnumpy() + step_E).astype(np.float32)))

    def logits(self, inputs: ModelInputs) -> Tensor:
        """Logits of every token, [N, V]; for evaluation and tests, not for training."""
        x_ND = self.head.norm(self.hidden_states(inputs), self.final_norm)
        return self.kernels.logits(x_ND, self.head_weight)

    def _dropout_masks(self, key: DropoutKey | None, layer: int, inputs: ModelInputs, part: str) -> DropoutMasks:
        hidden, attention = self.settings.hidden_dropout, self.settings.attention_dropout
        if key is None or (hidden == 0 and attention == 0):
            return _NO_DROPOUT
        first = layer * _DROPOUT_SITES
        stream = (inputs.ids_N.shape[0], self.settings.hidden_size)

        def mask(half: str, place: int, shape: tuple[int, ...], rate: float) -> Tensor | None:
            drops = rate > 0 and part in ("block", half)
            return Tensor(dropout_mask(key, first + place, shape, rate)) if drops else None

        return DropoutMasks(
            mask("attention", 0, inputs.scores_shape, attention),
            mask("attention", 1, stream, hidden),
            mask("mlp", 2, stream, hidden),
        )


def _view(parameter: Parameter) -> Tensor:
    return parameter.view(parameter.shape)
