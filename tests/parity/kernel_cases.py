"""Inputs for test_kernels.py: every kernel on small arrays, and what it should compute, said in two ways.

`kernels` are the plain ones, or those that a CPU compiles. Legend: as in trainer/ops/plain.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy_kernels
from mindspore import Tensor, nn, ops

from trainer.ops import plain as plain_kernels
from trainer.ops.dropout import DropoutKey, dropout_mask
from trainer.ops.vocabulary import CrossEntropy

ROWS, TOKENS, HEADS, SIZE = 2, 6, 4, 4
N, HIDDEN, WIDTH, VOCABULARY, EPS = ROWS * TOKENS, 6, 9, 11, 1e-5

RANDOM = np.random.default_rng(20)
normal = partial(numpy_kernels.standard_normal, RANDOM)
CAUSAL = np.broadcast_to(np.tri(TOKENS, dtype=bool), (ROWS, TOKENS, TOKENS))
SEGMENTS = np.array([[0, 0, 1, 1, 1, 1], [0, 1, 2, 2, 3, 3]])
PACKED = CAUSAL & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])


class Case(NamedTuple):
    """One kernel on one set of inputs.

    `cell(*arrays, *rest)` should equal `right(*arrays)`, which is numpy in float64, and `plain(*arrays)`, which is
    MindSpore with automatic gradients.
    """

    cell: Callable[[], nn.Cell]
    arrays: list[np.ndarray]
    rest: list[Tensor | None]
    right: Callable[..., np.ndarray]
    plain: Callable[..., Tensor]


def attention_masks(kernels: ModuleType, allowed_BTT: np.ndarray, kv_heads: int) -> tuple[Tensor, Tensor | None]:
    """Returns the two masks that `Attention` takes, of what each query may see."""
    return Tensor(kernels.attention_bias(allowed_BTT)[:, None]), None


def linear_case(kernels: ModuleType, width: int) -> Case:
    return Case(
        kernels.Linear, [normal(N, HIDDEN), normal(width, HIDDEN)], [], numpy_kernels.linear,
        lambda x, weight: ops.matmul(x, weight.T),
    )


def linear_bias_case(kernels: ModuleType) -> Case:
    return Case(
        kernels.Linear, [normal(N, HIDDEN), normal(WIDTH, HIDDEN), normal(WIDTH)], [], numpy_kernels.linear,
        lambda x, weight, bias: ops.matmul(x, weight.T) + bias,
    )


def rms_norm_case(kernels: ModuleType) -> Case:
    x_ND = normal(N, HIDDEN) * np.float32(3)
    x_ND[0] *= 1e-3  # eps is felt
    return Case(
        lambda: kernels.RmsNorm(HIDDEN, EPS), [x_ND, normal(HIDDEN)], [],
        lambda x, weight: numpy_kernels.rms_norm(x, weight, EPS),
        lambda x, weight: x * ops.rsqrt(ops.mean(x * x, -1, True) + EPS) * weight,
    )


def rotary_case(kernels: ModuleType, rotated: int = SIZE, interleaved: bool = False) -> Case:
    half_Nd = RANDOM.uniform(0, 7, (N, rotated // 2))
    angles_Nd = np.repeat(half_Nd, 2, -1) if interleaved else np.concatenate([half_Nd, half_Nd], -1)
    cos_Nd, sin_Nd = np.cos(angles_Nd).astype(np.float32), np.sin(angles_Nd).astype(np.float32)
    rest = ((0, 0), (0, SIZE - rotated))
    tables = kernels.rotary_tables(np.pad(cos_Nd, rest, constant_values=1), np.pad(sin_Nd, rest))

    def plain(x: Tensor) -> Tensor:
        x_NHd = x.reshape(N, HEADS, SIZE)
        if interleaved:
            first, second = x_NHd[..., 0:rotated:2], x_NHd[..., 1:rotated:2]
            turned_NHd = ops.stack((-second, first), -1).reshape(N, HEADS, rotated)
        else:
            first, second = x_NHd[..., : rotated // 2], x_NHd[..., rotated // 2 : rotated]
            turned_NHd = ops.concat((-second, first), -1)
        out_NHd = x_NHd[..., :rotated] * Tensor(cos_Nd[:, None]) + turned_NHd * Tensor(sin_Nd[:, None])
        parts = (out_NHd, x_NHd[..., rotated:]) if rotated < SIZE else (out_NHd,)
        return ops.concat(parts, -1).reshape(x.shape)

    return Case(
        lambda: kernels.Rotary(SIZE, rotated, interleaved), [normal(N, HEADS * SIZE)], list(tables),
        lambda x: numpy_kernels.rotary(
            x, cos_Nd.astype(np.float64), sin_Nd.astype(np.float64), SIZE, interleaved=interleaved
        ),
        plain,
    )


def swiglu_case(kernels: ModuleType) -> Case:
    return Case(
        kernels.SwiGLU, [normal(N, WIDTH) * np.float32(4), normal(N, WIDTH)], [], numpy_kernels.swiglu,
        lambda gate, up: gate * ops.sigmoid(gate) * up,
    )


def attention_case(
    kernels: ModuleType, kv_heads: int, allowed: np.ndarray = CAUSAL, rate: float = 0.0, values: int = SIZE,
    scale: float = SIZE**-0.5,
) -> Case:  # fmt: skip
    arrays = [normal(N, HEADS * SIZE), normal(N, kv_heads * SIZE), normal(N, kv_heads * values)]
    masks, groups = attention_masks(kernels, allowed, kv_heads), HEADS // kv_heads
    shape = (ROWS * kv_heads, TOKENS * groups, TOKENS)  # the query heads of a group one below the other
    keep = dropout_mask(DropoutKey(1, 0, 0, 0), 0, shape, rate) if rate else None
    keep_BHQS = None
    if keep is not None:
        keep_BKTGS = keep.reshape(ROWS, kv_heads, TOKENS, groups, TOKENS)
        keep_BHQS = np.ascontiguousarray(keep_BKTGS.swapaxes(2, 3)).reshape(ROWS, HEADS, TOKENS, TOKENS)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            ops.transpose(x.reshape(ROWS, TOKENS, -1, size), (0, 2, 1, 3))
            for x, size in ((q, SIZE), (k, SIZE), (v, values))
        )
        k, v = (ops.repeat_interleave(x, HEADS // kv_heads, 1) for x in (k, v))
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * scale
        probabilities = ops.softmax(ops.masked_fill(scores, Tensor(~allowed[:, None]), -1e30), -1)
        if keep is not None:
            probabilities = probabilities * Tensor(keep_BHQS)
        return ops.transpose(ops.matmul(probabilities, v), (0, 2, 1, 3)).reshape(N, -1)

    return Case(
        lambda: kernels.Attention(HEADS, kv_heads, SIZE, value_size=values, scale=scale), arrays,
        [*masks, None if keep is None else Tensor(keep)],
        lambda q, k, v: numpy_kernels.attention(q, k, v, allowed, SIZE, keep_BHQS, scale), plain,
    )


def cross_entropy_case() -> Case:
    labels = RANDOM.integers(0, VOCABULARY, N).astype(np.int32)
    valid = np.ones(N, bool)
    valid[[0, 3, 9]], labels[[0, 3, 9]] = False, 0  # as InputBuilder marks a label without loss
    return Case(
        lambda: CrossEntropy(VOCABULARY), [normal(N, HIDDEN), normal(VOCABULARY, HIDDEN)],
        [Tensor(labels), Tensor(valid[:, None].astype(np.float32))],
        lambda x, weight: numpy_kernels.cross_entropy(x, weight, labels, valid),
        lambda x, weight: ops.cross_entropy(
            ops.matmul(x, weight.T), Tensor(np.where(valid, labels, -100).astype(np.int32)), reduction="sum"
        ),
    )


def cases_of(kernels: ModuleType) -> dict[str, Case]:
    """Returns the cases of one set of kernels, by name."""
    return {
        "linear": linear_case(kernels, WIDTH),
        "linear_wide": linear_case(kernels, 5 * HIDDEN + 1),  # the other form of the weight's gradient
        "linear_bias": linear_bias_case(kernels),
        "rms_norm": rms_norm_case(kernels),
        "rotary": rotary_case(kernels),
        "rotary_of_half_a_head": rotary_case(kernels, SIZE // 2),
        "rotary_of_neighbours_in_half_a_head": rotary_case(kernels, SIZE // 2, interleaved=True),
        "swiglu": swiglu_case(kernels),
        "attention": attention_case(kernels, HEADS),
        "attention_grouped": attention_case(kernels, 2),
        "attention_one_kv_head": attention_case(kernels, 1, PACKED),
        "attention_packed": attention_case(kernels, 2, PACKED),
        "attention_dropout": attention_case(kernels, HEADS, CAUSAL, 0.3),
        "attention_packed_dropout": attention_case(kernels, 2, PACKED, 0.3),
        "attention_narrow_values": attention_case(kernels, HEADS, PACKED, 0.3, SIZE - 1, 0.4),
        "cross_entropy": cross_entropy_case(),
    }


CASES = cases_of(plain_kernels)
