"""The decoder: embedding, blocks, head with loss.

A block is compiled once (context.mode 0) and called for every layer with that layer's weights as views: MindSpore
specialises on every Parameter object it is given, so handing over Parameters would compile every layer anew. A view
costs microseconds, copies nothing, and gradients flow through it.

Legend: B rows, T tokens, N = B * T, D hidden, V vocabulary, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import mindspore
from mindspore import Parameter, Tensor, nn, ops

from trainer.models.attention import AttentionLayer
from trainer.models.dropout import DropoutKey, dropout_mask
from trainer.models.init import initial_value
from trainer.models.inputs import ModelInputs
from trainer.models.lora import AdapterMasks
from trainer.models.mlp import MlpLayer
from trainer.models.shapes import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    all_shapes,
    block_weights,
    layer_prefix,
)

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet

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
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.attention, self.mlp = AttentionLayer(settings, kernels), MlpLayer(settings, kernels)

    def construct(self, x_ND, q_cos, q_sin, k_cos, k_sin, mask, drop_attention, drop_out_ND, drop_mlp_ND, *weights):
        q_tables, k_tables = (q_cos, q_sin), (k_cos, k_sin)
        added_ND = self.attention(x_ND, q_tables, k_tables, mask, drop_attention, weights)
        x_ND = x_ND + (added_ND if drop_out_ND is None else added_ND * drop_out_ND)
        added_ND = self.mlp(x_ND, weights)
        return x_ND + (added_ND if drop_mlp_ND is None else added_ND * drop_mlp_ND)


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

    Parameters are named as in Hugging Face's files; `parameters_by_name` maps them, those of adapters at the end.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet, *, seed: int, compiled: bool = True) -> None:
        super().__init__(auto_prefix=False)
        self.settings, self.kernels = settings, kernels
        self.parameters_by_name = {
            name: Parameter(Tensor(initial_value(name, shape, settings, seed)), name=name)
            for name, shape in all_shapes(settings).items()
        }
        self.layer_weights = [self._of_layer(layer) for layer in range(settings.num_layers)]
        self.adapter_masks = AdapterMasks(settings, first_site=settings.num_layers * _DROPOUT_SITES)
        self.embedding, self.final_norm = self.parameters_by_name[EMBEDDING], self.parameters_by_name[FINAL_NORM]
        self.head_weight = self.embedding if settings.tie_word_embeddings else self.parameters_by_name[HEAD]
        self.block, self.head = Block(settings, kernels), Head(settings, kernels)
        self.run_block = mindspore.jit(self.block.construct) if compiled else self.block
        self.run_head = mindspore.jit(self.head.construct) if compiled else self.head

    def _of_layer(self, layer: int) -> list[Parameter | None]:
        """What the block takes of a layer, in the order of `block_weights`; None for adapters that only others have."""
        names = [layer_prefix(layer) + name for name in block_weights(self.settings)]
        return [self.parameters_by_name[name] if name in self.parameters_by_name else None for name in names]

    def construct(self, inputs: ModelInputs, dropout: DropoutKey | None = None) -> Tensor:
        """Sum of the token losses over the valid labels (not divided by anything), a float32 scalar.

        Args:
            inputs: One micro-batch, see `trainer.models.inputs`.
            dropout: Names the masks; None (evaluation) or rates of 0 drop nothing.
        """
        x_ND = self.hidden_states(inputs, dropout)
        return self.run_head(x_ND, _view(self.final_norm), _view(self.head_weight), inputs.labels_N, inputs.valid_N1)

    def hidden_states(self, inputs: ModelInputs, dropout: DropoutKey | None = None) -> Tensor:
        """The residual stream after the last block, before the final norm: [N, D]."""
        x_ND = ops.gather(_view(self.embedding), inputs.ids_N, 0)
        for layer, weights in enumerate(self.layer_weights):
            masks = self._dropout_masks(dropout, layer, inputs)
            views = (None if weight is None else _view(weight) for weight in weights)
            adapter_masks = self.adapter_masks(dropout, layer, inputs.ids_N.shape[0])
            x_ND = self.run_block(x_ND, *inputs.tables, inputs.mask, *masks, *views, *adapter_masks)
        return x_ND

    def logits(self, inputs: ModelInputs) -> Tensor:
        """Logits of every token, [N, V]; for evaluation and tests, not for training."""
        x_ND = self.head.norm(self.hidden_states(inputs), self.final_norm)
        return self.kernels.logits(x_ND, self.head_weight)

    def _dropout_masks(self, key: DropoutKey | None, layer: int, inputs: ModelInputs) -> DropoutMasks:
        hidden, attention = self.settings.hidden_dropout, self.settings.attention_dropout
        if key is None or (hidden == 0 and attention == 0):
            return _NO_DROPOUT
        first = layer * _DROPOUT_SITES
        stream = (inputs.ids_N.shape[0], self.settings.hidden_size)

        def mask(place: int, shape: tuple[int, ...], rate: float) -> Tensor | None:
            return Tensor(dropout_mask(key, first + place, shape, rate)) if rate > 0 else None

        return DropoutMasks(
            mask(0, tuple(inputs.mask.shape), attention), mask(1, stream, hidden), mask(2, stream, hidden)
        )


def _view(parameter: Parameter) -> Tensor:
    return parameter.view(parameter.shape)
