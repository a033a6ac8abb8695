"""Dropout masks drawn on an Ascend: uint8, a bit for each number, or as factors 0 and 1 / (1 - rate).

A graph that MindSpore shards draws them itself, each rank for its shard: MindSpore has no sharding rule of a mask.

Legend: as in trainer/ops/plain.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Layout, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import DropoutDoMaskExt, DropoutGenMaskExt

from trainer.ops.dropout import DropoutKey, LocalHeads, MaskShard, mask_seed

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_APART = 1 << 40
"""Between the seeds of two ranks of a tensor-parallel group; those of a micro-batch's masks follow each other."""


class Dropout(nn.Cell):
    """(x, a mask of `draw_mask`) -> x, 0 where the mask drops and times 1 / (1 - rate) elsewhere."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.apply = DropoutDoMaskExt()
        self.apply_to_grad = DropoutDoMaskExt()

    def construct(self, x, mask):
        return self.apply(x, mask, self.rate)

    def bprop(self, x, mask, out, grad):  # MindSpore 2.10 has none for this operator
        return self.apply_to_grad(grad, mask, self.rate), ops.zeros(mask.shape, mask.dtype)


def mask_bytes(shape: tuple[int, ...]) -> int:
    """Size of a mask that `draw_mask` draws."""
    return -(-math.prod(shape) // 128) * 16


def draw_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, part: MaskShard | None = None
) -> Tensor:
    """A mask drawn on the device: uint8, a bit for each number, filled up to a multiple of 128 bits.

    The operator draws from counters that begin with its seed, so the same key gives the same bits. Each part of a mask
    has a seed of its own: together they are not the bits of the whole.
    """
    if part is None:
        return draw_bits(Tensor(mask_seed(key, site), mstype.int64), shape, rate)
    return draw_bits(Tensor(mask_seed(key, site, 1 + part.number), mstype.int64), part.of(shape), rate)


def draw_bits(seed: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
    """As `draw_mask`, from a seed that is a tensor: an int64 scalar."""
    return DropoutGenMaskExt()(shape, rate, seed, Tensor(0, mstype.int64), mstype.bfloat16)


def draw_attention_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: LocalHeads | None = None
) -> Tensor:
    """The dropout mask that the operator takes, uint8 [B, H, T, T / 8]."""
    return _draw_scores_mask(key, site, shape, rate, own).reshape(*shape[:-1], -1)


def draw_factors(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: LocalHeads | None = None
) -> Tensor:
    """A mask drawn on the device as the reference attention takes it: float32, 0 or 1 / (1 - rate)."""
    return DropoutDoMaskExt()(ops.ones(shape, mstype.float32), _draw_scores_mask(key, site, shape, rate, own), rate)


def _draw_scores_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: LocalHeads | None
) -> Tensor:
    """The mask of the probabilities of a rank's heads, which have this shape."""
    part = None if own is None else MaskShard(own.number, (slice(None),) * len(shape))
    return draw_mask(key, site, shape, rate, part)


class _OfRank(nn.Cell):
    """A function that each rank computes for its own part, with a seed that differs where the parts do.

    The seeds_B1 of a micro-batch, int64, are the same for all rows of a data-parallel rank and differ between such
    ranks; those of the ranks that share its numbers follow from their number in the tensor-parallel group.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.place_S = Tensor(np.zeros(1, np.int64))
        self.is_shared = False
        self.morph = P.Morph(self.compute, self.infer_shape, self.infer_dtype).add_prim_attr("self_define_shard", True)

    def seed(self, seeds_B1, place_S):
        own = seeds_B1[0, 0]
        return own + place_S[0] * _APART if self.is_shared else own

    def shard_as(self, data: int, tensor: int, inputs: Sequence[Sequence[str]], output: Sequence[str]) -> None:
        """Inputs before the seeds, and the output: the axes "data", "tensor", both ("data", "tensor"), or "None"."""
        layout = Layout((data, tensor), ("data", "tensor"))
        self.place_S = Tensor(np.arange(tensor, dtype=np.int64))
        self.is_shared = "tensor" in str(output)
        given = *(layout(*axes) for axes in inputs), layout("data", "None"), layout("tensor")
        self.morph.shard(in_strategy=given, out_strategy=(layout(*output),))


class ShardedDropout(_OfRank):
    """(x_NC, seeds_B1) -> x_NC, 0 where a mask drops and times 1 / (1 - rate) elsewhere."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.drop = Dropout(rate)

    def construct(self, x_NC, seeds_B1):
        return self.morph(x_NC, seeds_B1, self.place_S)

    def compute(self, x_NC, seeds_B1, place_S):
        return self.drop(x_NC, draw_bits(self.seed(seeds_B1, place_S), x_NC.shape, self.rate))

    def infer_shape(self, x_NC, seeds_B1, place_S):
        return x_NC

    def infer_dtype(self, x_NC, seeds_B1, place_S):
        return x_NC

    def shard_over(self, data: int, tensor: int, rows: str = "data", columns: str = "None") -> None:
        """Rows over "data", or with sequence parallelism over "all" ranks; columns over "tensor" or "None"."""
        axes = ("data", "tensor") if rows == "all" else rows, columns
        self.shard_as(data, tensor, [axes], axes)


class DrawnMask(_OfRank):
    """seeds_B1 -> the dropout mask of the attention's probabilities.

    For the fused operator bits, uint8 [B, H, T, T / 8]; else factors, 0 or 1 / (1 - rate), float32 [B, K, T*G, T].
    """

    def __init__(self, settings: ModelConfig, *, bits: bool) -> None:
        super().__init__()
        length = settings.seq_length
        heads = settings.num_heads
        kv_heads = settings.kv_heads
        self.shape = (heads, length, length) if bits else (kv_heads, length * (heads // kv_heads), length)
        self.bits = bits
        self.rate = settings.attention_dropout
        self.ranks = 1
        self.drop = Dropout(self.rate)

    def construct(self, seeds_B1):
        return self.morph(seeds_B1, self.place_S)

    def compute(self, seeds_B1, place_S):
        shape = (seeds_B1.shape[0], self.shape[0] // self.ranks, *self.shape[1:])
        mask = draw_bits(self.seed(seeds_B1, place_S), shape, self.rate)
        if self.bits:
            return mask.reshape((*shape[:3], self.shape[2] // 8))
        return self.drop(ops.ones(shape, mstype.float32), mask)

    def infer_shape(self, seeds, place):
        if self.bits:
            return [seeds[0], *self.shape[:2], self.shape[2] // 8]
        return [seeds[0], *self.shape]

    def infer_dtype(self, seeds, place):
        return mstype.uint8 if self.bits else mstype.float32

    def shard_over(self, data: int, tensor: int) -> None:
        self.ranks = tensor
        self.shard_as(data, tensor, [], ("data", "tensor", "None", "None"))


def plain_attention_options(settings: ModelConfig, window: int | None) -> dict[str, Any]:
    """Returns what `plain.Attention` must know beside its sizes: what draws dropout masks. Its bias has the window."""
    return {"draw": DrawnMask(settings, bits=False)}
