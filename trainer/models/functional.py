"""The decoder's loss as one function of its inputs and weights, which one graph can hold.

A run compiles one block and calls it for every layer from a Python loop (`decoder.py`). The audit of Ascend's
operators, which needs a whole graph, gets the same cells here, wired in the same order; a test holds both to the same
numbers.

Nothing of a graph can be decided on the host, so the experts' routing must be in the graph too (`use_gmm` on Ascend).

Legend: as in decoder.py; E experts, k chosen for a token, R sorted assignments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mindspore import nn, ops

from trainer.models.decoder import Block, Head
from trainer.models.moe import MoeLayer
from trainer.models.mtp import NORM, WEIGHTS, MergeTokens
from trainer.models.shapes import (
    EMBEDDING,
    EXPERT_BIAS,
    FINAL_NORM,
    HEAD,
    block_weights,
    half_of,
    layer_prefix,
    moe_shapes,
)

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet


class FunctionalDecoder(nn.Cell):
    """What `Decoder` computes in a training, as one function.

    Args:
        settings: The model section.
        kernels: What it is built from.
        tokens: N of a micro-batch, which the experts' capacity comes from.
        layers: Numbers of the layers that it has, multi-token prediction modules included (they follow the last layer);
            None: all.
    """

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, tokens: int, layers: Sequence[int] | None = None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.numbers = list(range(settings.num_layers + settings.mtp_depth)) if layers is None else list(layers)
        made = [Layer(settings, kernels, layer, tokens) for layer in self.numbers]
        main = sum(number < settings.num_layers for number in self.numbers)
        self.head = Head(settings, kernels)
        self.layers, self.modules = nn.CellList(made[:main]), nn.CellList(made[main:])
        self.merges = nn.CellList([MergeTokens(settings, kernels) for _ in made[main:]])
        self.heads = nn.CellList([Head(settings, kernels) for _ in made[main:]])
        moe = settings.experts
        self.balance_factor, self.z_factor = (moe.aux_loss_factor, moe.z_loss_factor) if moe else (0.0, 0.0)
        self.mtp_factor = settings.mtp_loss_factor / max(1, settings.mtp_depth)

    def construct(self, inputs, tables, mask, shares, mtp, dropped, weights):
        """The loss that is minimised: a sum, to be divided by the valid tokens of the window.

        Args:
            inputs: ids_N, labels_N, valid_N1 of `ModelInputs`.
            tables, mask: Of `ModelInputs`.
            shares: mean_BN, mean_BR, tokens_B1 of its `SequenceWeights`; empty for a dense model.
            further: For each module that there is the three tensors of its `MtpInputs`.
            dropped: For each layer three dropout masks, None where nothing is dropped, and those of its adapters.
            weights: As `weight_names` says: first embedding, final norm and head, then a tuple for each layer.
        """
        embedding_VD, norm_D, head_VD = weights[0]
        ids_N, labels_N, valid_N1 = inputs
        x_ND = ops.gather(embedding_VD, ids_N, 0)
        balance, z, place = 0.0, 0.0, 1
        for layer in self.layers:
            x_ND, added, added_z = layer(x_ND, tables, mask, shares, valid_N1, dropped[place - 1], weights[place])
            balance, z, place = balance + added, z + added_z, place + 1
        total = self.head(x_ND, norm_D, head_VD, labels_N, valid_N1)
        for module in range(len(self.modules)):
            own, (mtp_ids_N, labels_N, further_N1) = weights[place], mtp[module]
            embedded_ND = ops.gather(embedding_VD, mtp_ids_N, 0)
            x_ND = self.merges[module](embedded_ND, x_ND, norm_D, own[0], own[1], own[2])
            norm_D = own[3]
            x_ND, added, added_z = self.modules[module](
                x_ND, tables, mask, shares, valid_N1, dropped[place - 1], own[4:]
            )
            balance, z, place = balance + added, z + added_z, place + 1
            total = total + self.heads[module](x_ND, norm_D, head_VD, labels_N, further_N1) * self.mtp_factor
        if self.balance_factor:
            total = total + balance * self.balance_factor
        if self.z_factor:
            total = total + z * self.z_factor
        return total


def weight_names(settings: ModelConfig, layers: Sequence[int], known: Sequence[str]) -> list[list[str | None]]:
    """Names of the parameters in the order that `FunctionalDecoder` takes them in, a list for each tuple of them.

    Args:
        settings: The model section.
        layers: Numbers of its layers.
        known: All parameters of the model; in the place of an adapter that is not among them stands None.
    """
    head = EMBEDDING if settings.tie_word_embeddings else HEAD
    names: list[list[str | None]] = [[EMBEDDING, FINAL_NORM, head]]
    for layer in layers:
        own = [*WEIGHTS, NORM] if layer >= settings.num_layers else []
        block = block_weights(settings)
        if settings.is_moe_layer(layer):
            block = [name if half_of(name) == "attention" else "" for name in block] + list(moe_shapes(settings))
        full = (layer_prefix(layer) + name for name in own + block)
        names.append([name if name in known else None for name in full])
    return names


class Layer(nn.Cell):
    """One layer: a block, or the attention half of one and its experts.

    (x_ND, tables, mask, shares, valid_N1, masks of its dropout, weights) -> x_ND, balance and z loss.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, layer: int, tokens: int) -> None:
        super().__init__()
        self.has_experts, self.block_size = settings.is_moe_layer(layer), len(block_weights(settings))
        self.block = Block(settings, kernels, "attention" if self.has_experts else "block")
        self.experts = Experts(settings, kernels, tokens) if self.has_experts else None

    def construct(self, x_ND, tables, mask, shares, valid_N1, dropped, weights):
        own = weights[: self.block_size]
        if not self.has_experts:
            x_ND = self.block(x_ND, *tables, *mask, dropped[0], dropped[1], dropped[2], *own, *dropped[3:])
            return x_ND, 0.0, 0.0
        x_ND = self.block(x_ND, *tables, *mask, dropped[0], dropped[1], None, *own, *dropped[3:])
        return self.experts(x_ND, shares, valid_N1, dropped[2], weights[self.block_size :])


class Experts(nn.Cell):
    """`MoeLayer.train` with the routing in the graph: (x_ND, shares, valid_N1, mask, weights) -> x_ND, balance, z."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, tokens: int) -> None:
        super().__init__()
        layer, moe, names = MoeLayer(settings, kernels, compiled=False), settings.experts, list(moe_shapes(settings))
        self.capacity, self.drop_policy = moe.capacity(tokens), moe.drop_policy
        self.router, self.gates, self.losses = layer.router, layer.gates, layer.losses
        self.route, self.permute = layer.route.core, layer.dispatcher.permute.core
        self.unpermute = layer.dispatcher.unpermute.core
        self.gate, self.up, self.down, self.swiglu = layer.gate, layer.up, layer.down, layer.swiglu
        self.has_bias, self.has_shared = EXPERT_BIAS in names, layer.has_shared
        self.first = names.index("mlp.experts.gate_proj.weight")
        self.shared = layer.shared

    def construct(self, x_ND, shares, valid_N1, dropped_ND, weights):
        y_ND, logits_NE, scores_NE = self.router(x_ND, weights[0], weights[1])
        bias_E = weights[2] if self.has_bias else None
        routing = self.route(scores_NE, bias_E, self.capacity, self.drop_policy)
        experts_Nk, row_Nk, token_R, counts_E = routing[0], routing[1], routing[2], routing[3]
        gates_Nk = self.gates(scores_NE, experts_Nk)
        gate_EFD, up_EFD, down_EDF = weights[self.first], weights[self.first + 1], weights[self.first + 2]
        rows_RD = self.permute(y_ND, token_R, row_Nk)
        inner_RF = self.swiglu(self.gate(rows_RD, gate_EFD, counts_E), self.up(rows_RD, up_EFD, counts_E))
        added_ND = self.unpermute(self.down(inner_RF, down_EDF, counts_E), gates_Nk, token_R, row_Nk)
        if self.has_shared:
            added_ND = added_ND + self.shared(y_ND, *weights[self.first + 3 : self.first + 6])
        balance, z = self.losses(logits_NE, scores_NE, experts_Nk, *shares, valid_N1)
        return x_ND + (added_ND if dropped_ND is None else added_ND * dropped_ND), balance, z
