"""Rotary tables and attention masks in a graph that MindSpore shards, made from the positions of a batch.

Legend: B sequences of T tokens, P positions, d width of a head.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.models.spec.visibility import visible_keys
from trainer.ops.plain import Sharded


class RotaryTables(Sharded):
    """(cos_Pd, sin_Pd of all positions, positions_BT) -> cos and sin [B, T, 1, d], rounded to `dtype`.

    They have this dtype for the fused operator, and float32 for the plain one.
    """

    axes: ClassVar = {"gather": "..,d."}

    def __init__(self, fused: bool, dtype: mstype.Type) -> None:
        super().__init__(auto_prefix=False)
        self.fused = fused
        self.dtype = dtype
        self.gather = P.Gather()
        self.reshape = P.Reshape()
        self.cast = P.Cast()

    def construct(self, cos_Pd: Tensor, sin_Pd: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        return self.look_up(cos_Pd, positions_BT), self.look_up(sin_Pd, positions_BT)

    def look_up(self, table_Pd: Tensor, positions_BT: Tensor) -> Tensor:
        """Returns the rows of a table at these positions, [B, T, 1, d]."""
        rows, length = positions_BT.shape
        table_Pd = self.cast(table_Pd, self.dtype)
        table_BTd = self.gather(table_Pd if self.fused else self.cast(table_Pd, mstype.float32), positions_BT, 0)
        return self.reshape(table_BTd, (rows, length, 1, table_Pd.shape[1]))


class AttentionMask(Sharded):
    """segment_ids_BT -> attention mask [B, 1, T, T].

    For the fused operator it is True where a query must not see a key. Otherwise it is a float32 bias: 0 or the
    smallest number. A token sees the last `window` tokens, including itself. Default None: all tokens before it.
    """

    axes: ClassVar = {"differs": "d...,d...", "either": "d...,....", "bias": "d...,"}

    def __init__(self, fused: bool, length: int, window: int | None = None) -> None:
        super().__init__(auto_prefix=False)
        self.fused = fused
        self.length = length
        tokens = np.arange(length)
        self.hidden_11TT = Tensor(~visible_keys(tokens, tokens, window)[None, None])
        self.reshape = P.Reshape()
        self.differs = P.NotEqual()
        self.either = P.LogicalOr()
        self.cast = P.Cast()
        self.bias = P.Mul()
        self.least = float(np.finfo(np.float32).min)

    def construct(self, segment_ids_BT: Tensor) -> Tensor:
        rows, length = segment_ids_BT.shape
        other_B1TT = self.differs(
            self.reshape(segment_ids_BT, (rows, 1, length, 1)), self.reshape(segment_ids_BT, (rows, 1, 1, length))
        )
        hidden_B1TT = self.either(other_B1TT, self.hidden_11TT)
        return hidden_B1TT if self.fused else self.bias(self.cast(hidden_B1TT, mstype.float32), self.least)
