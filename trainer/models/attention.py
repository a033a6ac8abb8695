"""The attention half of a block: norm, projections, optional q/k norm, rotary, attention, output projection.

A pure function of its input and its weights (no Parameters inside), so one compiled copy serves every layer.
Legend: N tokens, D hidden, C = heads * head size, K = key/value heads * head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import nn

from trainer.models.lora import Projection
from trainer.models.shapes import block_names

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet


class AttentionLayer(nn.Cell):
    """x_ND -> what attention adds to the residual stream, [N, D].

    `weights` is all that the block takes, in the order of `block_names`.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        names = block_names(settings)
        self.qk_norm, self.head_size = settings.use_qk_norm, settings.head_size
        self.norm_weight = names.index("input_layernorm.weight")
        self.norm = kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps)
        # One instance for every call site: see trainer/ops/__init__.py.
        self.query, self.key = (Projection(f"self_attn.{name}_proj", settings, kernels) for name in "qk")
        self.value, self.out = (Projection(f"self_attn.{name}_proj", settings, kernels) for name in "vo")
        if self.qk_norm:
            self.q_norm, self.k_norm = (names.index(f"self_attn.{name}_norm.weight") for name in "qk")
        self.query_norm = kernels.head_norm(self.head_size, settings.rms_norm_eps)
        self.key_norm = kernels.head_norm(self.head_size, settings.rms_norm_eps)
        self.query_rotary, self.key_rotary = (kernels.rotary(self.head_size, settings.rotary_size) for _ in range(2))
        self.attention = kernels.attention(settings.num_heads, settings.kv_heads, self.head_size)

    def construct(self, x_ND, query_tables, key_tables, masks, dropout, weights):
        q_NC, k_NK, v_NK = self.project(x_ND, query_tables, key_tables, weights)
        return self.out(self.attention(q_NC, k_NK, v_NK, masks[0], masks[1], dropout), weights)

    def project(self, x_ND, query_tables, key_tables, weights):
        """Rotated queries and keys, and values."""
        y_ND = self.norm(x_ND, weights[self.norm_weight])
        q_NC, k_NK, v_NK = self.query(y_ND, weights), self.key(y_ND, weights), self.value(y_ND, weights)
        if self.qk_norm:
            q_NC = self.query_norm(q_NC, weights[self.q_norm])
            k_NK = self.key_norm(k_NK, weights[self.k_norm])
        q_NC = self.query_rotary(q_NC, query_tables[0], query_tables[1])
        return q_NC, self.key_rotary(k_NK, key_tables[0], key_tables[1]), v_NK
