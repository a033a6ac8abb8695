"""The attention half of a block: norm, projections, optional q/k norm, rotary, attention, output projection.

A pure function of its input and its weights (no Parameters inside), so one compiled copy serves every layer.
Legend: N tokens, D hidden, C = heads * head size, K = key/value heads * head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspore import nn

from trainer.models.shapes import attention_shapes

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet


class AttentionLayer(nn.Cell):
    """x_ND -> what attention adds to the residual stream, [N, D].

    Weights arrive in the order of `attention_shapes`.
    """

    def __init__(self, settings: ModelConfig, kernels: KernelSet) -> None:
        super().__init__()
        self.num_weights = len(attention_shapes(settings))
        self.qkv_bias, self.out_bias = settings.qkv_has_bias, settings.attn_proj_has_bias
        self.qk_norm, self.head_size = settings.use_qk_norm, settings.head_size
        self.norm = kernels.rms_norm(settings.hidden_size, settings.rms_norm_eps)
        linear = kernels.linear_bias if self.qkv_bias else kernels.linear
        # One instance for every call site: see trainer/ops/__init__.py.
        self.query, self.key, self.value = linear(), linear(), linear()
        self.out = kernels.linear_bias() if self.out_bias else kernels.linear()
        self.query_norm = kernels.rms_norm(self.head_size, settings.rms_norm_eps)
        self.key_norm = kernels.rms_norm(self.head_size, settings.rms_norm_eps)
        self.query_rotary, self.key_rotary = kernels.rotary(self.head_size), kernels.rotary(self.head_size)
        self.attention = kernels.attention(settings.num_heads, settings.kv_heads, self.head_size)

    def construct(self, x_ND, query_tables, key_tables, mask, dropout, weights):
        q_NC, k_NK, v_NK = self.project(x_ND, query_tables, key_tables, weights)
        return self.project_out(self.attention(q_NC, k_NK, v_NK, mask, dropout), weights)

    def project(self, x_ND, query_tables, key_tables, weights):
        """Rotated queries and keys, and values."""
        y_ND = self.norm(x_ND, weights[0])
        if self.qkv_bias:
            q_NC = self.query(y_ND, weights[1], weights[2])
            k_NK = self.key(y_ND, weights[3], weights[4])
            v_NK = self.value(y_ND, weights[5], weights[6])
        else:
            q_NC, k_NK, v_NK = self.query(y_ND, weights[1]), self.key(y_ND, weights[2]), self.value(y_ND, weights[3])
        if self.qk_norm:
            q_NC = self.query_norm(q_NC.reshape(-1, self.head_size), weights[-2]).reshape(q_NC.shape)
            k_NK = self.key_norm(k_NK.reshape(-1, self.head_size), weights[-1]).reshape(k_NK.shape)
        q_NC = self.query_rotary(q_NC, query_tables[0], query_tables[1])
        return q_NC, self.key_rotary(k_NK, key_tables[0], key_tables[1]), v_NK

    def project_out(self, out_NC, weights):
        first = 7 if self.qkv_bias else 4
        if self.out_bias:
            return self.out(out_NC, weights[first], weights[first + 1])
        return self.out(out_NC, weights[first])
