"""flash_attention_score, and the masks and dropout masks that it takes.

It has no CPU kernel; tests/parity/test_ascend_attention.py compares what its documentation says with the reference.

Legend: B sequences of T tokens, N = B * T, H query heads, d width of a head, C = H * d, K = key/value heads * d.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Tensor, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate import DropoutDoMaskExt, DropoutGenMaskExt

from trainer.ops.dropout import DropoutKey, MaskPart, OwnHeads, mask_seed

if TYPE_CHECKING:
    from trainer.config import ModelConfig

_COMPRESSED = 2048
"""The side of a compressed mask, whatever the number of tokens."""
_MOST_DOCUMENTS = 1024
"""Documents that the operator takes in a micro-batch."""
_GIVEN, _CAUSAL, _CAUSAL_OF_DOCUMENTS, _BAND = 0, 2, 3, 4
"""sparse_mode: the mask as it is given; compressed: causal, causal in each document, causal within a window."""


class AttentionMasks:
    """Makes the mask arguments of `Attention` from the documents that the tokens belong to."""

    def __init__(self, settings: ModelConfig) -> None:
        self.heads, self.length, self.drops = settings.num_heads, settings.seq_length, settings.attention_dropout > 0
        self.compressed = None

    def __call__(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[Tensor, Tensor | None]:
        """A mask, True where a position must not be seen, and where each document ends.

        The mask is the compressed causal one, [2048, 2048], and the ends are None where every sequence is one document.
        Where they are not, an int64 tensor has the end of each document among all N tokens; its size is a power of two,
        so that few graphs are compiled, and the end of the last is repeated (empty documents; MindSpore Transformers
        fills up its actual_seq_len in the same way).

        The operator takes ends neither with a window nor with dropout of a fixed shape, and no more than 1024. There,
        and where the tokens of a document are not neighbours, the mask is a whole one, [B, 1, T, T], and the ends are
        None.

        Args:
            window: Tokens that each token sees, itself included. Default None: all before it.

        Raises:
            ValueError: Sequences have another length than seq_length, which `Attention` relies on.
        """
        rows, length = segment_ids_BT.shape
        if length != self.length:
            raise ValueError(f"sequences have {length} tokens, but seq_length is {self.length}")
        starts_BT = np.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1] - 1) != 0
        if starts_BT.sum() == rows:
            return self.causal(), None
        starts = np.flatnonzero(starts_BT)
        ends = np.append(starts[1:], rows * length)
        apart = all(len(set(row[begin])) == begin.sum() for row, begin in zip(segment_ids_BT, starts_BT, strict=True))
        too_long = window is not None and (ends - starts).max() > window
        if not apart or self.drops or too_long or len(ends) > _MOST_DOCUMENTS:
            allowed_BTT = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & np.tri(length, dtype=bool)
            if window is not None:
                allowed_BTT &= ~np.tri(length, k=-window, dtype=bool)
            return Tensor(~allowed_BTT[:, None]), None
        padding = (1 << (len(ends) - 1).bit_length()) - len(ends)
        return self.causal(), Tensor(np.pad(ends, (0, padding), mode="edge"), mstype.int64)

    def causal(self) -> Tensor:
        """The compressed causal mask, the same for every batch."""
        if self.compressed is None:
            self.compressed = Tensor(~np.tri(_COMPRESSED, dtype=bool))
        return self.compressed

    def scores_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Shape of the attention's probabilities."""
        return rows, self.heads, length, length


def attention_options(settings: ModelConfig, window: int | None) -> dict[str, int | float | None]:
    """What the operator must know beside its sizes: a mask of a fixed size tells neither length nor window."""
    return {"length": settings.seq_length, "rate": settings.attention_dropout, "window": window}


class Attention(nn.Cell):
    """flash_attention_score, with masks of `AttentionMasks` and a dropout mask of `attention_dropout`.

    The operator takes float16 and bfloat16 only and computes its softmax in float32 whatever `softmax_dtype` says.
    Queries, keys and values of another dtype than `dtype` are cast, and the result comes back in that of the queries.
    It takes values as wide as the queries: narrower ones are filled up with zeros, and the result is cut.

    Args:
        length: T, which a compressed mask does not tell.
        rate: Part of the probabilities that a dropout mask drops.
        window: As of `AttentionMasks`.
    """

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.bfloat16, softmax_dtype=mstype.float32,
        value_size: int | None = None, scale: float | None = None, length: int | None = None, rate: float = 0.0,
        window: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.head_size, self.dtype = heads, kv_heads, head_size, dtype
        self.value_size, self.scale = value_size or head_size, head_size**-0.5 if scale is None else scale
        self.length, self.keep, self.window = length, 1.0 - rate, window

    def construct(self, q_NC, k_NK, v_NK, mask, ends, dropout):
        missing = self.head_size - self.value_size
        if missing:
            v_NKd = v_NK.reshape(v_NK.shape[0], -1, self.value_size)
            zeros = ops.zeros((v_NKd.shape[0], v_NKd.shape[1], missing), v_NK.dtype)
            v_NK = ops.concat((v_NKd, zeros), -1).reshape(v_NK.shape[0], -1)
        if ends is None:
            out = self.over_rows(q_NC, k_NK, v_NK, mask, dropout)
        else:
            out = self.over_documents(q_NC, k_NK, v_NK, mask, ends)
        if missing:
            out = mint.narrow(out.reshape(q_NC.shape[0], self.heads, self.head_size), 2, 0, self.value_size)
        return out.reshape(q_NC.shape[0], self.heads * self.value_size).astype(q_NC.dtype)

    def over_rows(self, q_NC, k_NK, v_NK, mask, dropout):
        """Every sequence on its own."""
        q, k, v = (x.reshape(-1, self.length, x.shape[-1]).astype(self.dtype) for x in (q_NC, k_NK, v_NK))
        mode, before, after = _GIVEN, 2147483647, 2147483647
        if mask.ndim == 2:
            mode = _CAUSAL
            if self.window is not None:
                mode, before, after = _BAND, self.window - 1, 0
        return ops.flash_attention_score(
            q, k, v, self.heads, attn_mask=mask, scalar_value=self.scale, input_layout="BSH", sparse_mode=mode,
            pre_tokens=before, next_tokens=after, drop_mask=dropout, keep_prob=1.0 if dropout is None else self.keep,
        )  # fmt: skip

    def over_documents(self, q_NC, k_NK, v_NK, mask, ends):
        """Every document on its own; all documents one after the other (layout TND)."""
        q = q_NC.reshape(-1, self.heads, self.head_size).astype(self.dtype)
        k, v = (x.reshape(-1, self.kv_heads, self.head_size).astype(self.dtype) for x in (k_NK, v_NK))
        return ops.flash_attention_score(
            q, k, v, self.heads, attn_mask=mask, actual_seq_qlen=ends, actual_seq_kvlen=ends, scalar_value=self.scale,
            input_layout="TND", sparse_mode=_CAUSAL_OF_DOCUMENTS, next_tokens=0,
        )  # fmt: skip


class Dropout(nn.Cell):
    """(x, a mask of `draw_mask`) -> x, 0 where the mask drops and times 1 / (1 - rate) elsewhere."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.apply, self.apply_to_grad = rate, DropoutDoMaskExt(), DropoutDoMaskExt()

    def construct(self, x, mask):
        return self.apply(x, mask, self.rate)

    def bprop(self, x, mask, out, grad):  # MindSpore 2.10 has none for this operator
        return self.apply_to_grad(grad, mask, self.rate), ops.zeros(mask.shape, mask.dtype)


def mask_bytes(shape: tuple[int, ...]) -> int:
    """Size of a mask that `draw_mask` draws."""
    return -(-math.prod(shape) // 128) * 16


def draw_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, part: MaskPart | None = None
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
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: OwnHeads | None = None
) -> Tensor:
    """The dropout mask that the operator takes, uint8 [B, H, T, T / 8]."""
    return _draw_scores_mask(key, site, shape, rate, own).reshape(*shape[:-1], -1)


def draw_factors(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: OwnHeads | None = None
) -> Tensor:
    """A mask drawn on the device as the reference attention takes it: float32, 0 or 1 / (1 - rate)."""
    return DropoutDoMaskExt()(ops.ones(shape, mstype.float32), _draw_scores_mask(key, site, shape, rate, own), rate)


def _draw_scores_mask(
    key: DropoutKey, site: int, shape: tuple[int, ...], rate: float, own: OwnHeads | None
) -> Tensor:
    """The mask of the probabilities of a rank's heads, which have this shape."""
    part = None if own is None else MaskPart(own.number, (slice(None),) * len(shape))
    return draw_mask(key, site, shape, rate, part)
