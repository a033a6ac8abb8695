"""Dropout masks drawn on an Ascend: uint8 with a bit for each number, or float32 factors 0 and 1 / (1 - rate).

A graph that MindSpore shards draws the masks itself, each rank for its shard: MindSpore has no sharding rule for masks.

Legend: as in trainer/ops/plain.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from mindspore import Layout, Tensor, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import DropoutDoMaskExt, DropoutGenMaskExt

from trainer.ops.dropout import DropoutKey, LocalHeads, MaskShard, mask_seed

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

Axis: TypeAlias = str | tuple[str, ...]

_SEEDS_OF_A_RANK = 1 << 40
"""The distance between the seeds of two tensor-parallel ranks. The seeds of a micro-batch's masks are consecutive."""


class Dropout(nn.Cell):
    """(x, mask of `draw_mask`) -> 0 where the mask drops, and x / (1 - rate) elsewhere."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.apply = DropoutDoMaskExt()
        self.apply_to_grad = DropoutDoMaskExt()

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.apply(x, mask, self.rate)

    # MindSpore 2.10 has no gradient of this operator.
    def bprop(self, x: Tensor, mask: Tensor, out: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return self.apply_to_grad(grad, mask, self.rate), ops.zeros(mask.shape, mask.dtype)


def mask_bytes(shape: tuple[int, ...]) -> int:
    """Returns the size of a mask that `draw_mask` draws for an array of this shape."""
    return -(-math.prod(shape) // 128) * 16


def draw_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, shard: MaskShard | None = None
) -> Tensor:
    """Draws a mask on the device: uint8 with a bit for each number, filled up to a multiple of 128 bits.

    The operator counts from its seed, so the same key gives the same bits. Each shard of a mask has its own seed, so
    the shards differ from the mask that a single rank draws.
    """
    if shard is None:
        return draw_bits(Tensor(mask_seed(key, site), mstype.int64), shape, rate)
    return draw_bits(Tensor(mask_seed(key, site, 1 + shard.number), mstype.int64), shard.local_shape(shape), rate)


def draw_bits(seed: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
    """Draws the bits of a mask, like `draw_mask`, from a seed in an int64 tensor without axes."""
    return DropoutGenMaskExt()(shape, rate, seed, Tensor(0, mstype.int64), mstype.bfloat16)


def draw_attention_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, local: LocalHeads | None = None
) -> Tensor:
    """Draws the dropout mask of flash_attention_score, uint8 [B, H, T, T / 8]."""
    return _draw_scores_mask(key, site, shape, rate, local).reshape(*shape[:-1], -1)


def draw_factors(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, local: LocalHeads | None = None
) -> Tensor:
    """Draws the dropout mask of the plain attention on the device: float32, 0 or 1 / (1 - rate)."""
    return DropoutDoMaskExt()(ops.ones(shape, mstype.float32), _draw_scores_mask(key, site, shape, rate, local), rate)


def _draw_scores_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, local: LocalHeads | None
) -> Tensor:
    """Draws the bits for probabilities of this shape: those of one rank's heads, or of all."""
    if local is None:
        return draw_mask(key, site, shape, rate)
    return draw_mask(key, site, shape, rate, MaskShard(local.number, (slice(None),) * len(shape)))


class _PerRankFunction(nn.Cell):
    """A function that each rank computes for its shard, with another seed for each shard.

    seeds_B1 of a micro-batch, int64, is equal for all sequences of a data-parallel rank and differs between these
    ranks. The tensor-parallel ranks of a data-parallel rank add a multiple of their number.
    """

    def __init__(self) -> None:
        super().__init__(auto_prefix=False)
        self.rank_S = Tensor(np.zeros(1, np.int64))
        self.is_shared = False
        self.morph = P.Morph(self.compute, self.infer_shape, self.infer_dtype).add_prim_attr("self_define_shard", True)

    def seed(self, seeds_B1: Tensor, rank_S: Tensor) -> Tensor:
        """Returns the seed of this rank's shard."""
        # An index would be a StridedSlice, which is a legacy kernel.
        seed = mint.narrow(seeds_B1, 0, 0, 1).reshape(())
        return seed + rank_S.reshape(()) * _SEEDS_OF_A_RANK if self.is_shared else seed

    def set_layouts(self, data: int, tensor: int, inputs: Sequence[Sequence[Axis]], output: Sequence[Axis]) -> None:
        """Shards the function over `data` x `tensor` ranks.

        Args:
            inputs: The layouts of the inputs before the seeds. For each axis "data", "tensor", both, or "None".
            output: The layout of the result.
        """
        layout = Layout((data, tensor), ("data", "tensor"))
        self.rank_S = Tensor(np.arange(tensor, dtype=np.int64))
        self.is_shared = "tensor" in str(output)
        input_layouts = *(layout(*axes) for axes in inputs), layout("data", "None"), layout("tensor")
        self.morph.shard(in_strategy=input_layouts, out_strategy=(layout(*output),))


class ShardedDropout(_PerRankFunction):
    """(x_NC, seeds_B1) -> 0 where the drawn mask drops, and x_NC / (1 - rate) elsewhere."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.drop = Dropout(rate)

    def construct(self, x_NC: Tensor, seeds_B1: Tensor) -> Tensor:
        return self.morph(x_NC, seeds_B1, self.rank_S)

    def compute(self, x_NC: Tensor, seeds_B1: Tensor, rank_S: Tensor) -> Tensor:
        """Computes this rank's shard of the result."""
        return self.drop(x_NC, draw_bits(self.seed(seeds_B1, rank_S), x_NC.shape, self.rate))

    def infer_shape(self, x: list[int], seeds: list[int], ranks: list[int]) -> list[int]:
        """Returns the shape of the result."""
        return x

    def infer_dtype(self, x: mstype.Type, seeds: mstype.Type, ranks: mstype.Type) -> mstype.Type:
        """Returns the dtype of the result."""
        return x

    def shard_over(self, data: int, tensor: int, rows: str = "data", columns: str = "None") -> None:
        """Shards x_NC over `data` x `tensor` ranks.

        Args:
            rows: The ranks that shard N: "data", or with sequence parallelism "all".
            columns: The ranks that shard C: "tensor" or "None".
        """
        row_axis: Axis = rows
        if rows == "all":
            row_axis = ("data", "tensor")
        self.set_layouts(data, tensor, [(row_axis, columns)], (row_axis, columns))


class DrawnMask(_PerRankFunction):
    """seeds_B1 -> the dropout mask of the attention's probabilities.

    With `bits` it is the mask of the fused operator, uint8 [B, H, T, T / 8]. Otherwise it has the factors of the plain
    kernel, 0 or 1 / (1 - rate), float32 [B, K, T*G, T].
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

    def construct(self, seeds_B1: Tensor) -> Tensor:
        return self.morph(seeds_B1, self.rank_S)

    def compute(self, seeds_B1: Tensor, rank_S: Tensor) -> Tensor:
        """Computes this rank's shard of the mask."""
        shape = (seeds_B1.shape[0], self.shape[0] // self.ranks, *self.shape[1:])
        mask = draw_bits(self.seed(seeds_B1, rank_S), shape, self.rate)
        if self.bits:
            return mask.reshape((*shape[:3], self.shape[2] // 8))
        return self.drop(ops.ones(shape, mstype.float32), mask)

    def infer_shape(self, seeds: list[int], ranks: list[int]) -> list[int]:
        """Returns the shape of the mask."""
        if self.bits:
            return [seeds[0], *self.shape[:2], self.shape[2] // 8]
        return [seeds[0], *self.shape]

    def infer_dtype(self, seeds: mstype.Type, ranks: mstype.Type) -> mstype.Type:
        """Returns the dtype of the mask."""
        return mstype.uint8 if self.bits else mstype.float32

    def shard_over(self, data: int, tensor: int) -> None:
        """Shards sequences over `data` ranks and heads over `tensor` ranks."""
        self.ranks = tensor
        self.set_layouts(data, tensor, [], ("data", "tensor", "None", "None"))


def plain_attention_options(settings: ModelConfig, window: int | None) -> dict[str, Any]:
    """Returns the arguments of `plain.Attention` beside its sizes, for a graph that MindSpore shards.

    The graph draws the dropout masks itself, and the attention bias contains the window.
    """
    return {"draw": DrawnMask(settings, bits=False)}
