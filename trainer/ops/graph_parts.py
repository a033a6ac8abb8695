"""Parts that one whole graph needs in the place of what a run does on the host, or writes gradients for.

Legend: as in reference.py.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P


class RotaryTables(nn.Cell):
    """(cos_Nd, sin_Nd) -> tables of one kernel's layout, as `rotary_tables` of its room makes them on the host."""

    def __init__(self, fused: bool, dtype: mstype.Type, heads: int) -> None:
        super().__init__(auto_prefix=False)
        self.fused, self.dtype, self.heads = fused, dtype, heads

    def construct(self, cos_Nd, sin_Nd):
        return self.table(cos_Nd), self.table(sin_Nd)

    def table(self, table_Nd):
        table_Nd = table_Nd.astype(self.dtype)
        if self.fused:
            return table_Nd.reshape(1, table_Nd.shape[0], 1, -1)
        return ops.tile(table_Nd.astype(mstype.float32), (1, self.heads))


class AttentionMask(nn.Cell):
    """segment_ids_BT -> the masks of one kernel's layout, as `attention_mask` of its room makes them on the host."""

    def __init__(self, fused: bool, length: int, heads: int, kv_heads: int) -> None:
        super().__init__(auto_prefix=False)
        self.fused, self.length, self.kv_heads, self.group = fused, length, kv_heads, heads // kv_heads
        self.causal_1TT = Tensor(np.tri(length, dtype=bool)[None])

    def construct(self, segment_ids_BT):
        same_BTT = segment_ids_BT.expand_dims(2) == segment_ids_BT.expand_dims(1)
        allowed_BTT = ops.logical_and(same_BTT, self.causal_1TT)
        if self.fused:
            return ops.logical_not(allowed_BTT).expand_dims(1), None
        half = self.length // 2
        if self.length % 2:
            return self.bias(allowed_BTT), None
        return self.bias(allowed_BTT[:, :half, :half]), self.bias(allowed_BTT[:, half:, :])

    def bias(self, allowed_BQS):
        rows, queries, keys = allowed_BQS.shape
        bias_BQS = ops.logical_not(allowed_BQS).astype(mstype.float32) * float(np.finfo(np.float32).min)
        bias = ops.tile(bias_BQS.reshape(rows, 1, queries, 1, keys), (1, self.kv_heads, 1, self.group, 1))
        return bias.reshape(rows * self.kv_heads, queries * self.group, keys)


class ShardedLinear(nn.Cell):
    """As `reference.Linear`, with MindSpore's own gradient: a graph that is cut derives the cuts of the backward pass
    from those of the forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.product = P.MatMul(transpose_b=True)

    def construct(self, x_NI, weight_OI):
        return self.product(x_NI, weight_OI)

    def cut(self, data: int, columns: int = 1, rows: int = 1) -> None:
        """Over `data` ranks along N, and over others along the weight's O (`columns`) or I (`rows`)."""
        self.product.shard(((data, rows), (columns, rows)))


class ShardedLinearBias(nn.Cell):
    """As `reference.LinearBias`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias_add = ShardedLinear(), P.BiasAdd()

    def construct(self, x_NI, weight_OI, bias_O):
        return self.bias_add(self.linear(x_NI, weight_OI), bias_O)

    def cut(self, data: int, columns: int = 1, rows: int = 1) -> None:
        """As `ShardedLinear.cut`."""
        self.linear.cut(data, columns, rows)
        self.bias_add.shard(((data, columns), (columns,)))
