"""Builds the kernels from their choices (`select.py`) and dtypes (`precision.py`), plain and fused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mindspore import dtype as mstype
from mindspore import nn
from mindspore.ops import operations as P

from trainer.ops import plain, plain_moe
from trainer.ops.ascend import attention as ascend_attention
from trainer.ops.ascend import dropout as ascend_dropout
from trainer.ops.ascend import kernels as ascend
from trainer.ops.ascend import loss as ascend_loss
from trainer.ops.ascend import moe as moe_ascend
from trainer.ops.precision import FLOAT32, Precision
from trainer.ops.select import KernelChoice
from trainer.ops.vocabulary import VocabShardRows

if TYPE_CHECKING:
    from trainer.config import ModelConfig

MakeCell = Callable[..., nn.Cell]


class InDtype(nn.Cell):
    """A kernel in a dtype of its own: kernel(inputs as `inside`) as `outside`. The kernel takes tensors only.

    The automatic gradient of a cast brings a gradient back to the dtype of the cast's input, so the gradient of a
    float32 weight is float32 whatever the kernel computes in. With `first`, only the first input is cast.
    """

    def __init__(self, kernel: nn.Cell, inside: mstype.Type, outside: mstype.Type, *, first: bool = False) -> None:
        super().__init__()
        self.kernel = kernel
        self.inside = inside
        self.outside = outside
        self.first = first
        self.cast = P.Cast()

    def construct(self, *tensors):
        if self.first:
            result = self.kernel(self.cast(tensors[0], self.inside), *tensors[1:])
        else:
            result = self.kernel(*[self.cast(tensor, self.inside) for tensor in tensors])
        return self.cast(result, self.outside)

    def shard_over(self, *degrees: int, **named: int) -> None:
        """Shards the kernel, where it is one of semi-automatic mode. Casts follow their inputs."""
        self.kernel.shard_over(*degrees, **named)


def rounded(kernel: nn.Cell, inside: mstype.Type, outside: mstype.Type, *, first: bool = False) -> nn.Cell:
    """kernel(inputs rounded to `inside`) in float32, the result rounded to `inside` and cast to `outside`.

    What a fused operator does with half-precision inputs: its arithmetic is float32. On a CPU it is also the faster
    way by far: there element-wise operators take 20 to 30 times as long in float16 as in float32, a cast 3 times.
    """
    return InDtype(InDtype(kernel, mstype.float32, inside, first=first), inside, outside, first=first)


@dataclass(frozen=True)
class KernelSet:
    """The kernels that a model is built from. Cells are made: one instance for every call site.

    `compute_dtype` is the dtype in which kernels hand their results to each other.
    """

    linear: MakeCell
    rms_norm: MakeCell
    head_norm: MakeCell
    rotary: MakeCell
    swiglu: MakeCell
    attention: MakeCell
    cross_entropy: MakeCell
    piecewise_loss: MakeCell | None
    router_linear: MakeCell
    route: MakeCell
    grouped_matmul: MakeCell
    permute: MakeCell
    unpermute: MakeCell
    gather_rows: Callable
    vocabulary_rows: MakeCell
    one_hot: MakeCell
    split_heads: MakeCell
    join_heads: MakeCell
    write_rows: Callable
    rotary_tables: Callable
    attention_masks: Callable
    attention_options: Callable
    dropout: MakeCell
    draw_mask: Callable
    draw_attention_mask: Callable
    cached_mask: Callable
    cached_attention: Callable
    compute_dtype: mstype.Type = mstype.float32
    host_layers: bool = False
    """Whether a decoder computes whole layers on arrays (`trainer.arrays`) in the place of these kernels."""
    host_dtype: str = "float32"
    """Dtype of the products of these layers."""

    def window(self, settings: ModelConfig, layer: int) -> int | None:
        """The window that the attention of a layer must know; None where it has none or the mask has it."""
        knows = self.attention_options is ascend_attention.attention_options and settings.has_window(layer)
        return settings.sliding_window if knows else None

    def mask_form(self, shape: tuple[int, ...], of_scores: bool = False) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of what `draw_mask`, or `draw_attention_mask`, draws for numbers of this shape."""
        draw = self.draw_attention_mask if of_scores else self.draw_mask
        if draw is ascend_dropout.draw_mask:
            return (ascend_dropout.mask_bytes(shape),), "uint8"
        if draw is ascend_dropout.draw_attention_mask:
            return (*shape[:-1], shape[-1] // 8), "uint8"
        return shape, "float32"


def load_kernels(
    choices: Sequence[KernelChoice],
    precision: Precision = FLOAT32,
    *,
    is_sharded: bool = False,
    host_layers: bool = False,
) -> KernelSet:
    """The chosen kernels, each in its dtype. Without half precision no kernel contains a cast.

    Args:
        is_sharded: Whether MindSpore shards the graph that they are for.
        host_layers: Whether native layers compute in the place of these kernels, see `trainer.ops.select.on_arrays`.
    """
    fused = {choice.kernel for choice in choices if choice.fused}  # none for a classifier
    # A dense model has no choices for experts either, and makes none of their kernels.
    experts = moe_ascend if "grouped_matmul" in fused else plain_moe
    sorting = moe_ascend.FusedPermute, moe_ascend.FusedUnpermute
    if "token_permute" not in fused:
        sorting = experts.Permute, experts.Unpermute
    # A CPU has no cells in bfloat16: beside layers on arrays that multiply in it they are float32.
    own_of = FLOAT32 if precision.by else precision
    dtypes = own_of.compute, own_of.norm, own_of.softmax, own_of.rotary
    compute, norm, softmax, rotary = (getattr(mstype, part.dtype) for part in dtypes)

    on_ascend = "rms_norm" in fused  # it is fused on every Ascend
    drawing = ascend_dropout if on_ascend else plain
    if "attention" in fused:
        attention = ascend_attention
        draw_attention_mask = ascend_dropout.draw_attention_mask
        attention_options = attention.sharded_attention_options if is_sharded else attention.attention_options
    else:
        attention = plain
        draw_attention_mask = drawing.draw_factors
        attention_options = ascend_dropout.plain_attention_options if is_sharded else plain.attention_options

    product = partial(_product, compute=compute)
    part = partial(_part, fused, compute=compute)
    if not on_ascend:
        rms_norm = part("rms_norm", "RmsNorm", norm)
    elif is_sharded:
        rms_norm = partial(_sharded_norm, inside=norm, outside=compute)
    else:
        rms_norm = partial(ascend.RmsNorm, inside=norm, outside=compute)
    gather_rows = ascend.gather_rows if on_ascend else plain.gather_rows
    return KernelSet(
        linear=product(plain.Linear),
        rms_norm=rms_norm,
        head_norm=lambda size, eps: plain.HeadNorm(rms_norm(size, eps), size),
        rotary=part("rotary_embedding", "Rotary", rotary, first=True),
        swiglu=part("swiglu", "SwiGLU", compute),
        attention=partial(attention.Attention, dtype=compute, softmax_dtype=softmax),
        cross_entropy=partial(plain.CrossEntropy, dtype=compute),
        piecewise_loss=partial(ascend_loss.PiecewiseCrossEntropy, dtype=compute) if on_ascend else None,
        router_linear=plain.Linear,
        route=experts.Route,
        grouped_matmul=experts.GroupedMatmul,
        permute=sorting[0],
        unpermute=sorting[1],
        gather_rows=gather_rows,
        vocabulary_rows=partial(VocabShardRows, gather_rows=gather_rows),
        one_hot=plain.OneHot,
        split_heads=plain.SplitHeads,
        join_heads=plain.JoinHeads,
        write_rows=ascend.write_rows if on_ascend else plain.write_rows,
        rotary_tables=partial(plain.rotary_tables, dtype=rotary, fused="rotary_embedding" in fused),
        attention_masks=attention.AttentionMasks,
        attention_options=attention_options,
        dropout=ascend_dropout.ShardedDropout if is_sharded else drawing.Dropout,
        draw_mask=drawing.draw_mask,
        draw_attention_mask=draw_attention_mask,
        cached_mask=plain.cached_mask,
        cached_attention=partial(plain.cached_attention, softmax_dtype=softmax),
        compute_dtype=compute,
        host_layers=host_layers,
        host_dtype=precision.compute.dtype if host_layers else "float32",
    )


def _product(kernel: MakeCell, compute: mstype.Type) -> MakeCell:
    """A product in the dtype of products."""
    return kernel if compute == mstype.float32 else lambda: InDtype(kernel(), compute, compute)


def _sharded_norm(size: int, eps: float, inside: mstype.Type, outside: mstype.Type) -> nn.Cell:
    """An Ascend's norm in a graph that MindSpore shards."""
    norm = ascend.RmsNorm(size, eps, is_sharded=True)
    return norm if inside == outside == mstype.float32 else InDtype(norm, inside, outside)


def _part(
    fused: Collection[str], kernel: str, name: str, inside: mstype.Type, *, compute: mstype.Type, first: bool = False
) -> MakeCell:
    """What is no product: half precision where a fused operator takes it, else float32 between rounded values."""
    make = getattr(ascend if kernel in fused else plain, name)
    if inside == compute == mstype.float32:
        return make
    wrap = InDtype if kernel in fused or inside == mstype.float32 else rounded
    return lambda *sizes: wrap(make(*sizes), inside, compute, first=first)
