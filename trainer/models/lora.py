"""Projections, and the low-rank adapters that they may have (Hu et al. 2021, equation 3).

    y = x W^T (+ bias) + lora_alpha / lora_rank * dropout(x) A^T B^T

Automatic differentiation of this is as good as a gradient by hand: `Linear` has one already, the products with A and B
are small, and where W is no trained parameter the product that would be its gradient is never computed.

Legend: N tokens, I/O in and out features, R rank of the adapter: A [R, I], B [O, R].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import Tensor, nn

from trainer.config.schema.adapter import PROJECTIONS
from trainer.models.dropout import DropoutKey, dropout_mask
from trainer.models.shapes import (
    adapted_projections,
    adapter_names,
    attention_shapes,
    block_names,
    dropped_projections,
    layer_targets,
    mask_name,
    mlp_shapes,
)

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet


class Projection(nn.Cell):
    """(x_NI, all weights of the block, in the order of `block_names`) -> y_NO.

    Args:
        name: Name of the projection in the block, for example ``self_attn.q_proj``.
        settings: The model section.
        kernels: The kernels of the device.
    """

    def __init__(self, name: str, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        argnums = {entry: argnum for argnum, entry in enumerate(block_names(settings))}
        self.weight, self.has_bias = argnums[f"{name}.weight"], f"{name}.bias" in argnums
        self.linear = kernels.linear_bias() if self.has_bias else kernels.linear()
        self.has_adapter = name in adapted_projections(settings)
        if self.has_adapter:
            self.a, self.b = (argnums[part] for part in adapter_names(name))
            self.mask = argnums[mask_name(name)] if name in dropped_projections(settings) else None
            self.down, self.up, self.scale = kernels.linear(), kernels.linear(), settings.pet_config.scale

    def construct(self, x_NI, weights):
        if self.has_bias:
            y_NO = self.linear(x_NI, weights[self.weight], weights[self.weight + 1])
        else:
            y_NO = self.linear(x_NI, weights[self.weight])
        if not self.has_adapter or weights[self.a] is None:  # None: adapted in other layers only
            return y_NO
        mask_NI = None if self.mask is None else weights[self.mask]
        x_NR = self.down(x_NI if mask_NI is None else x_NI * mask_NI, weights[self.a])
        # The factor multiplies the smallest of the matrices.
        return y_NO + self.up(x_NR, weights[self.b] * self.scale)


class AdapterMasks:
    """Draws the masks of the adapters' dropout.

    Args:
        settings: The model section.
        first_site: Number of the first dropout site of adapters; every projection of every layer has its own site,
            whether it is adapted or not.
    """

    def __init__(self, settings: ModelConfig, first_site: int) -> None:
        self.settings, self.first_site, self.names = settings, first_site, dropped_projections(settings)
        self.shapes = attention_shapes(settings) | mlp_shapes(settings)

    def __call__(self, key: DropoutKey | None, layer: int, tokens: int) -> list[Tensor | None]:
        """The masks [N, I] of a layer, as `block_names` ends; None where nothing is dropped."""
        if key is None or not self.names:
            return [None] * len(self.names)
        targets, rate = layer_targets(self.settings, layer), self.settings.pet_config.lora_dropout
        sites = {name: self.first_site + layer * len(PROJECTIONS) + number for number, name in enumerate(PROJECTIONS)}
        widths = {name: self.shapes[f"{name}.weight"][1] for name in targets}
        return [
            Tensor(dropout_mask(key, sites[name], (tokens, widths[name]), rate)) if name in targets else None
            for name in self.names
        ]
