"""Builds the kernels, plain or fused, from their choices (`select.py`) and dtypes (`precision.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mindspore import Tensor, nn
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import SiLU

from trainer.ops import plain, plain_moe
from trainer.ops.ascend import attention as ascend_attention
from trainer.ops.ascend import dropout as ascend_dropout
from trainer.ops.ascend import kernels as ascend
from trainer.ops.ascend import loss as ascend_loss
from trainer.ops.ascend import moe as moe_ascend
from trainer.ops.precision import FLOAT32, Precision
from trainer.ops.select import KernelChoice
from trainer.ops.vocabulary import CrossEntropy, VocabShardRows

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

MakeCell = Callable[..., nn.Cell]


class ReluSquared(nn.Cell):
    """x -> relu(x)^2 (So et al. 2021, Primer, section 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = P.ReLU()
        self.multiply = P.Mul()

    def construct(self, x_NF: Tensor) -> Tensor:
        """Returns the activation in the dtype of x."""
        return self.multiply(self.relu(x_NF), x_NF)


_ACTIVATIONS: dict[str, Callable[[], nn.Cell]] = {"silu": SiLU, "gelu_pytorch_tanh": P.GeLU, "relu2": ReluSquared}


class InDtype(nn.Cell):
    """Casts the inputs of a kernel to `inside`, and its result to `outside`. The kernel takes only tensors.

    The automatic gradient of a cast has the dtype of the cast's input. So a float32 weight gets a float32 gradient,
    whatever dtype the kernel computes in. With `first`, only the first input is cast.
    """

    def __init__(self, kernel: nn.Cell, inside: mstype.Type, outside: mstype.Type, *, first: bool = False) -> None:
        super().__init__()
        self.kernel = kernel
        self.inside = inside
        self.outside = outside
        self.first = first
        self.cast = P.Cast()

    def construct(self, *tensors: Tensor) -> Tensor:
        """Runs the kernel between the casts."""
        if self.first:
            result = self.kernel(self.cast(tensors[0], self.inside), *tensors[1:])
        else:
            result = self.kernel(*[self.cast(tensor, self.inside) for tensor in tensors])
        return self.cast(result, self.outside)

    def shard_over(self, *degrees: int, **named: int) -> None:
        """Shards the kernel, in semi-automatic mode. Casts are sharded like their inputs."""
        self.kernel.shard_over(*degrees, **named)


def round_kernel(kernel: nn.Cell, inside: mstype.Type, outside: mstype.Type, *, first: bool = False) -> nn.Cell:
    """Returns a kernel that rounds its inputs and its result to `inside` and computes in float32 in between.

    The result is cast to `outside`. Fused operators compute in this way with half-precision inputs. On a CPU it is also
    much faster: element-wise operators take 20 to 30 times as long in float16 as in float32, casts 3 times.
    """
    return InDtype(InDtype(kernel, mstype.float32, inside, first=first), inside, outside, first=first)


@dataclass(frozen=True)
class KernelSet:
    """The kernels of a model. Fields with cells are functions that make one, because each call site needs an instance.

    `compute_dtype` is the dtype of the values that kernels pass to each other.
    """

    linear: MakeCell
    rms_norm: MakeCell
    head_norm: MakeCell
    rotary: MakeCell
    gated: MakeCell
    attention: MakeCell
    cross_entropy: MakeCell
    soft_cap: MakeCell
    chunked_loss: MakeCell | None
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
    """Whether native CPU layers (`trainer.arrays`) compute a decoder instead of these kernels."""
    host_dtype: str = "float32"
    """Dtype of the matrix products of native CPU layers."""

    def window(self, settings: ModelConfig, layer: int) -> int | None:
        """Returns the `window` argument of a layer's attention; None if it has no window or the mask contains it."""
        needs_window = self.attention_options is ascend_attention.attention_options and settings.has_window(layer)
        if needs_window:
            return settings.sliding_window
        return None

    def mask_form(self, shape: tuple[int, ...], of_scores: bool = False) -> tuple[tuple[int, ...], str]:
        """Returns shape and dtype of the dropout mask for an array of this shape.

        With `of_scores` it is the mask of `draw_attention_mask`, otherwise that of `draw_mask`.
        """
        draw = self.draw_mask
        if of_scores:
            draw = self.draw_attention_mask
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
    recomputes_norms: bool = False,
    host_layers: bool = False,
) -> KernelSet:
    """Returns the chosen kernels, each in its dtype. Without half precision no kernel contains a cast.

    Args:
        choices: The result of `select_kernels`; none without a decoder.
        is_sharded: Whether the kernels are for a graph that MindSpore shards.
        recomputes_norms: Whether this graph may recompute the norms of the residual stream.
        host_layers: Whether native CPU layers compute instead of these kernels; see `trainer.ops.select.on_arrays`.
    """
    fused = {choice.kernel for choice in choices if choice.fused}
    host_dtype = "float32"
    if host_layers:
        host_dtype = precision.compute.dtype
    # The array engine multiplies in half precision, but a CPU has no such cells: they compute in float32.
    if precision.by:
        precision = FLOAT32
    parts = (precision.compute, precision.norm, precision.softmax, precision.rotary)
    compute, norm, softmax, rotary = (getattr(mstype, part.dtype) for part in parts)

    on_ascend = "rms_norm" in fused  # it is fused on every Ascend
    rows: ModuleType = plain
    dropout: ModuleType = plain
    chunked_loss = None
    if on_ascend:
        rows = ascend
        dropout = ascend_dropout
        chunked_loss = partial(ascend_loss.ChunkedCrossEntropy, dtype=compute)
    attention: ModuleType = plain
    draw_attention_mask = dropout.draw_factors
    if "attention" in fused:
        attention = ascend_attention
        draw_attention_mask = ascend_dropout.draw_attention_mask

    elementwise = partial(_elementwise, fused, compute=compute)
    norm_of_heads: MakeCell = elementwise("rms_norm", "RmsNorm", norm)
    rms_norm = norm_of_heads
    if on_ascend:
        make_norm = partial(_ascend_norm, inside=norm, outside=compute, is_sharded=is_sharded)
        norm_of_heads = make_norm
        rms_norm = partial(make_norm, is_recomputed=recomputes_norms)
    linear: MakeCell = plain.Linear
    if compute != mstype.float32:
        linear = partial(_linear_in, compute)
    return KernelSet(
        linear=linear,
        rms_norm=rms_norm,
        head_norm=lambda size, eps: plain.HeadNorm(norm_of_heads(size, eps), size),
        rotary=elementwise("rotary_embedding", "Rotary", rotary, first=True),
        gated=partial(_gated, elementwise, compute, is_sharded, "swiglu" in fused),
        attention=partial(attention.Attention, dtype=compute, softmax_dtype=softmax),
        cross_entropy=partial(CrossEntropy, dtype=compute),
        soft_cap=rows.SoftCap,
        chunked_loss=chunked_loss,
        router_linear=plain.Linear,
        **_expert_kernels(fused),
        gather_rows=rows.gather_rows,
        vocabulary_rows=partial(VocabShardRows, gather_rows=rows.gather_rows),
        one_hot=plain_moe.OneHot,
        split_heads=plain.SplitHeads,
        join_heads=plain.JoinHeads,
        write_rows=rows.write_rows,
        rotary_tables=partial(plain.rotary_tables, dtype=rotary, fused="rotary_embedding" in fused),
        attention_masks=attention.AttentionMasks,
        attention_options=_attention_options("attention" in fused, is_sharded),
        dropout=ascend_dropout.ShardedDropout if is_sharded else dropout.Dropout,
        draw_mask=dropout.draw_mask,
        draw_attention_mask=draw_attention_mask,
        cached_mask=plain.cached_mask,
        cached_attention=partial(plain.cached_attention, softmax_dtype=softmax),
        compute_dtype=compute,
        host_layers=host_layers,
        host_dtype=host_dtype,
    )


def _gated(
    elementwise: Callable[..., MakeCell], inside: mstype.Type, is_sharded: bool, is_fused: bool, activation: str
) -> nn.Cell:
    """Returns the kernel between the matrices of a feed-forward layer. GELU is approximated by tanh, as P.GeLU is.

    In a graph that MindSpore shards, it derives the gradient: it would recompute the inputs of a gradient that is
    written by hand before the backward pass, those of all layers at once.
    """
    if activation == "silu" and is_sharded and is_fused:
        return elementwise("swiglu", "ShardedSwiGLU", inside)()
    if activation == "silu" and not is_sharded:
        return elementwise("swiglu", "SwiGLU", inside)()
    return elementwise("gated", "Gated", inside)(_ACTIVATIONS[activation]())


def _expert_kernels(fused: Collection[str]) -> dict[str, Any]:
    """Returns the kernels of experts; a dense model, which has no choices for them, uses none."""
    experts: ModuleType = plain_moe
    if "grouped_matmul" in fused:
        experts = moe_ascend
    permute = experts.Permute
    unpermute = experts.Unpermute
    if "token_permute" in fused:
        permute = moe_ascend.FusedPermute
        unpermute = moe_ascend.FusedUnpermute
    return {
        "route": experts.Route, "grouped_matmul": experts.GroupedMatmul, "permute": permute, "unpermute": unpermute,
    }  # fmt: skip


def _attention_options(is_fused: bool, is_sharded: bool) -> Callable:
    """Returns the function that makes the arguments of `Attention` beside its sizes."""
    if is_fused and is_sharded:
        return ascend_attention.sharded_attention_options
    if is_fused:
        return ascend_attention.attention_options
    if is_sharded:
        return ascend_dropout.plain_attention_options
    return plain.attention_options


def _linear_in(dtype: mstype.Type) -> nn.Cell:
    """Returns a `Linear` that multiplies in this dtype."""
    return InDtype(plain.Linear(), dtype, dtype)


def _ascend_norm(
    size: int, eps: float, *, inside: mstype.Type, outside: mstype.Type, is_sharded: bool, is_recomputed: bool = False
) -> nn.Cell:
    """Returns an Ascend's norm that computes in `inside` and gives `outside`."""
    if not is_sharded:
        return ascend.RmsNorm(size, eps, inside, outside)
    norm = ascend.RmsNorm(size, eps, outside=outside, is_sharded=True, is_recomputed=is_recomputed)
    if inside == outside == mstype.float32:
        return norm
    return InDtype(norm, inside, outside)


def _elementwise(
    fused: Collection[str], kernel: str, name: str, inside: mstype.Type, *, compute: mstype.Type, first: bool = False
) -> MakeCell:
    """Returns what makes the kernel `name`, which is not a matrix product.

    A fused operator takes half precision; a plain kernel computes in float32 between rounded values.
    """
    make = getattr(ascend if kernel in fused else plain, name)
    if inside == compute == mstype.float32:
        return make
    wrap: Callable[..., nn.Cell] = round_kernel
    if kernel in fused or inside == mstype.float32:
        wrap = InDtype
    return lambda *sizes: wrap(make(*sizes), inside, compute, first=first)
