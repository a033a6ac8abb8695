"""flash_attention_score and the masks that it takes.

It has no CPU kernel; tests/parity/test_ascend_attention.py compares what its documentation says with the reference.

Legend: B sequences of T tokens, N = B * T, H query heads, d width of a head, C = H * d, K = key/value heads * d; with
context parallelism R ranks share each sequence, and h tokens are one of the two chunks that a rank has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import FlashAttentionScore

from trainer.models.spec.visibility import visible_keys
from trainer.ops.ascend.dropout import DrawnMask
from trainer.ops.plain import JoinHeads, Sharded, SplitHeads

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.data.batches.context import ContextShard

_COMPRESSED = 2048
"""The side of a compressed mask, whatever the number of tokens."""
_MOST_DOCUMENTS = 1024
"""Documents that the operator takes in a micro-batch."""
_GIVEN = 0
_CAUSAL = 2
_CAUSAL_OF_DOCUMENTS = 3
_BAND = 4
"""sparse_mode: the mask as it is given; compressed: causal, causal in each document, causal within a window."""


class AttentionMasks:
    """Makes the mask arguments of `Attention`, or with `part` of `GatheredAttention`, from the tokens' documents."""

    def __init__(self, settings: ModelConfig, part: ContextShard | None = None) -> None:
        self.heads = settings.num_heads
        self.length = settings.seq_length
        self.drops = settings.attention_dropout > 0
        self.part = part
        self.compressed = None

    def __call__(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns a mask, True where a position must not be seen, and where each document ends.

        The mask is the compressed causal one, [2048, 2048], and the ends are None where every sequence is one document.
        Where they are not, an int64 tensor has the end of each document among all N tokens; its size is a power of two,
        so that few graphs are compiled, and the end of the last is repeated (empty documents; MindSpore Transformers
        fills up its actual_seq_len in the same way).

        The operator takes ends neither with a window nor with dropout of a fixed shape, and no more than 1024. There,
        and where the tokens of a document are not neighbours, the mask is a whole one, [B, 1, T, T], and the ends are
        None. With `part` there are two masks, see `of_part`.

        Args:
            window: Tokens that each token sees, itself included. Default None: all before it.

        Raises:
            ValueError: Sequences have another length than seq_length, which `Attention` relies on.
        """
        if self.part is not None:
            return self.of_part(segment_ids_BT, window)
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
            tokens = np.arange(length)
            return Tensor(~visible_keys(tokens, tokens, window, segment_ids_BT)[:, None]), None
        padding = (1 << (len(ends) - 1).bit_length()) - len(ends)
        return self.causal(), Tensor(np.pad(ends, (0, padding), mode="edge"), mstype.int64)

    def of_part(self, segment_ids_BT: np.ndarray, window: int | None) -> tuple[Tensor, Tensor]:
        """Returns the masks of a rank's first and last h tokens.

        Where every sequence is one document, twice the compressed mask; else [B, 1, h, (r+1)*h] and
        [B, 1, h, (2R-r)*h].
        """
        if window is None and (segment_ids_BT == segment_ids_BT[:, :1]).all():
            return self.causal(), self.causal()
        early, late = self.part.allowed(segment_ids_BT, window)
        return Tensor(~early[:, None]), Tensor(~late[:, None])

    def causal(self) -> Tensor:
        """Returns the compressed causal mask, the same for every batch."""
        if self.compressed is None:
            self.compressed = Tensor(~np.tri(_COMPRESSED, dtype=bool))
        return self.compressed

    def scores_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Returns the shape of the attention's probabilities, those of whole sequences."""
        return rows, self.heads, length, length


def attention_options(settings: ModelConfig, window: int | None) -> dict[str, int | float | None]:
    """Returns what the operator must know beside its sizes: a mask of a fixed size tells neither length nor window."""
    return {"length": settings.seq_length, "rate": settings.attention_dropout, "window": window}


def sharded_attention_options(settings: ModelConfig, window: int | None) -> dict[str, int | float | DrawnMask]:
    """Returns the same for a graph that MindSpore shards: it draws dropout masks, and the mask has the window."""
    draw = DrawnMask(settings, bits=True)
    return {"length": settings.seq_length, "rate": settings.attention_dropout, "draw": draw}


class Attention(Sharded):
    """flash_attention_score, with masks of `AttentionMasks` and a dropout mask of `attention_dropout`.

    The operator takes float16 and bfloat16 only and computes its softmax in float32 whatever `softmax_dtype` says.
    Queries, keys and values of another dtype than `dtype` are cast, and the result comes back in that of the queries.
    It takes values as wide as the queries: narrower ones are filled up with zeros, and the result is cut. A graph that
    MindSpore shards has whole masks alone.

    Args:
        length: T, which a compressed mask does not tell.
        rate: Part of the probabilities that a dropout mask drops.
        window: As of `AttentionMasks`.
        draw: Makes the dropout mask of what `dropout` is. Default None: it is the mask.
    """

    axes: ClassVar = {
        "given": "d.t,d.t,d.t,d...", "given_drop": "d.t,d.t,d.t,dt..,d...", "repeat": "dt.",
    }  # fmt: skip

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype=mstype.bfloat16, softmax_dtype=mstype.float32,
        value_size: int | None = None, scale: float | None = None, *, length: int, rate: float = 0.0,
        window: int | None = None, draw: DrawnMask | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_size = head_size
        self.dtype = dtype
        self.length = length
        self.draw = draw
        self.reshape = P.Reshape()
        self.cast = P.Cast()
        self.repeat = P.Tile()
        value_size = value_size or head_size
        self.missing = head_size - value_size
        self.zeros_11w = Tensor(np.zeros((1, 1, self.missing), np.float32)) if self.missing else None
        self.fill_up = JoinHeads(kv_heads)
        self.cut = SplitHeads(heads, value_size)

        def flash(keep: float = 1.0, **options: int | str) -> FlashAttentionScore:
            factor = head_size**-0.5 if scale is None else scale
            return FlashAttentionScore(heads, keep, factor, **{"input_layout": "BSH", **options})

        compressed = {"sparse_mode": _CAUSAL}
        if window is not None:
            compressed = {"sparse_mode": _BAND, "pre_tokens": window - 1, "next_tokens": 0}
        self.given = flash()
        self.given_drop = flash(1.0 - rate)
        self.compressed = flash(**compressed)
        self.compressed_drop = flash(1.0 - rate, **compressed)
        self.documents = flash(input_layout="TND", sparse_mode=_CAUSAL_OF_DOCUMENTS, next_tokens=0)

    def construct(self, q_NC, k_NK, v_NK, mask, ends, dropout):
        if self.missing:
            zeros_NKw = self.repeat(self.cast(self.zeros_11w, v_NK.dtype), (v_NK.shape[0], self.kv_heads, 1))
            v_NK = self.fill_up(v_NK, self.reshape(zeros_NKw, (v_NK.shape[0], self.kv_heads * self.missing)))
        q = self.cast(q_NC, self.dtype)
        k = self.cast(k_NK, self.dtype)
        v = self.cast(v_NK, self.dtype)
        if ends is None:
            out = self.over_rows(q, k, v, mask, dropout)
        else:
            out = self.over_documents(q, k, v, mask, ends)
        out_NC = self.cast(self.reshape(out, q_NC.shape), q_NC.dtype)
        return self.cut(out_NC)[0] if self.missing else out_NC

    def over_rows(self, q, k, v, mask, dropout):
        """Every sequence by itself."""
        q = self.split(q)
        k = self.split(k)
        v = self.split(v)
        is_whole = mask.ndim == 4
        if dropout is None:
            flash = self.given if is_whole else self.compressed
            return flash(q, k, v, None, None, None, mask, None)[3]
        flash = self.given_drop if is_whole else self.compressed_drop
        drawn = dropout if self.draw is None else self.draw(dropout)
        return flash(q, k, v, None, drawn, None, mask, None)[3]

    def over_documents(self, q_NC, k_NK, v_NK, mask, ends):
        """Every document by itself; all documents one after the other (layout TND)."""
        q = self.reshape(q_NC, (-1, self.heads, self.head_size))
        k, v = (self.reshape(x, (-1, self.kv_heads, self.head_size)) for x in (k_NK, v_NK))
        return self.documents(q, k, v, None, None, None, mask, None, ends, ends)[3]

    def split(self, x_NC):
        return self.reshape(x_NC, (x_NC.shape[0] // self.length, self.length, x_NC.shape[1]))

    def shard_over(self, data: int, tensor: int) -> None:
        super().shard_over(data, tensor)
        for part in (self.draw, self.fill_up, self.cut):
            part.shard_over(data, tensor)
