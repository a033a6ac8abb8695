"""flash_attention_score and the masks that it takes.

The operator has no CPU kernel; tests/parity/test_ascend_attention.py computes what its documentation describes and
compares it with the plain kernel.

Legend: B sequences of T tokens, N = B * T, H query heads, d width of a head, C = H * d, K = key/value heads * d; with
context parallelism R ranks share each sequence, and h is the size of one of a rank's two chunks of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype
from mindspore.ops import operations as P
from mindspore.ops.auto_generate import FlashAttentionScore

from trainer.models.spec.visibility import visible_keys
from trainer.ops.ascend.dropout import DrawnMask
from trainer.ops.plain import JoinHeads, Sharded, SplitHeads

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig
    from trainer.data.batches.context import ContextShard

_COMPRESSED = 2048
"""The side of a compressed mask, for any number of tokens."""
_MOST_DOCUMENTS = 1024
"""The maximum number of documents of a micro-batch that the operator takes."""
_FULL_MASK = 0
_CAUSAL = 2
_CAUSAL_OF_DOCUMENTS = 3
_BAND = 4
"""Values of sparse_mode: full mask; compressed masks: causal, causal in each document, causal within a window."""


class AttentionMasks:
    """Makes the mask arguments of `Attention` from the document numbers of the tokens.

    With `shard` they are the mask arguments of `GatheredAttention`.
    """

    def __init__(self, settings: ModelConfig, shard: ContextShard | None = None) -> None:
        self.heads = settings.num_heads
        self.length = settings.seq_length
        self.has_dropout = settings.attention_dropout > 0
        self.shard = shard
        self.compressed: Tensor | None = None

    def __call__(self, segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns a mask, True where a query must not see a key, and the ends of the documents or None.

        If every sequence is one document, the mask is the compressed causal one, [2048, 2048], and the ends are None.

        If sequences have several documents, the ends are an int64 tensor with the end of each document among all N
        tokens. To compile few graphs, its size is a power of two: the last end is repeated, which makes empty documents
        (MindSpore Transformers fills up actual_seq_len in the same way).

        The operator does not take ends together with a window or a dropout mask, and at most 1024 of them. In these
        cases, or if the tokens of a document are not neighbours, the mask is [B, 1, T, T] and the ends are None.

        With `shard`, the result is two masks, for the first and the last h tokens of this rank: [B, 1, h, (r+1)*h] and
        [B, 1, h, (2R-r)*h] for rank r. If every sequence is one document, both are the compressed mask.

        Args:
            window: The number of last tokens that each token sees, including itself. Default None: all before it.

        Raises:
            ValueError: The sequences' length is not seq_length, on which `Attention` relies.
        """
        if self.shard is not None:
            return self._chunk_masks(self.shard, segment_ids_BT, window)
        rows, length = segment_ids_BT.shape
        if length != self.length:
            raise ValueError(f"sequences have {length} tokens, but seq_length is {self.length}")
        starts_BT = np.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1] - 1) != 0
        if starts_BT.sum() == rows:
            return self._causal(), None
        starts = np.flatnonzero(starts_BT)
        ends = np.append(starts[1:], rows * length)
        contiguous = all(len(set(ids[at])) == at.sum() for ids, at in zip(segment_ids_BT, starts_BT, strict=True))
        needs_window = window is not None and (ends - starts).max() > window
        if not contiguous or self.has_dropout or needs_window or len(ends) > _MOST_DOCUMENTS:
            tokens = np.arange(length)
            return Tensor(~visible_keys(tokens, tokens, window, segment_ids_BT)[:, None]), None
        padding = (1 << (len(ends) - 1).bit_length()) - len(ends)
        return self._causal(), Tensor(np.pad(ends, (0, padding), mode="edge"), mstype.int64)

    def _chunk_masks(
        self, shard: ContextShard, segment_ids_BT: np.ndarray, window: int | None
    ) -> tuple[Tensor, Tensor]:
        if window is None and (segment_ids_BT == segment_ids_BT[:, :1]).all():
            return self._causal(), self._causal()
        early, late = shard.visible_to_chunks(segment_ids_BT, window)
        return Tensor(~early[:, None]), Tensor(~late[:, None])

    def _causal(self) -> Tensor:
        """Returns the compressed causal mask, one tensor for all batches."""
        if self.compressed is None:
            self.compressed = Tensor(~np.tri(_COMPRESSED, dtype=bool))
        return self.compressed

    def scores_shape(self, rows: int, length: int) -> tuple[int, ...]:
        """Returns the shape of the attention's probabilities, [B, H, T, T]."""
        return rows, self.heads, length, length


def attention_options(settings: ModelConfig, window: int | None) -> dict[str, int | float | None]:
    """Returns the arguments of `Attention` beside its sizes; compressed masks contain neither length nor window."""
    return {"length": settings.seq_length, "rate": settings.attention_dropout, "window": window}


def sharded_attention_options(settings: ModelConfig, window: int | None) -> dict[str, int | float | DrawnMask]:
    """Returns the arguments of `Attention` beside its sizes, for a graph that MindSpore shards.

    The graph draws the dropout masks itself, and the attention mask contains the window.
    """
    draw = DrawnMask(settings, bits=True)
    return {"length": settings.seq_length, "rate": settings.attention_dropout, "draw": draw}


class Attention(Sharded):
    """flash_attention_score, with the masks of `AttentionMasks` and a dropout mask.

    The operator takes only float16 and bfloat16, and always computes its softmax in float32, not in `softmax_dtype`.
    Queries, keys and values are cast to `dtype`, and the result to the dtype of the queries. The operator takes values
    as wide as the queries: narrower values are filled up with zeros, and the result is cut. A graph that MindSpore
    shards uses only full masks.

    Args:
        length: T, which a compressed mask does not contain.
        rate: Share of the probabilities that a dropout mask drops.
        window: The number of last tokens that a token sees with a compressed mask. Default None: all before it.
        draw: Makes the dropout mask from `dropout`. Default None: `dropout` is the mask.
    """

    axes: ClassVar = {
        "full": "d.t,d.t,d.t,d...", "full_drop": "d.t,d.t,d.t,dt..,d...", "repeat": "dt.",
    }  # fmt: skip

    def __init__(
        self, heads: int, kv_heads: int, head_size: int, dtype: mstype.Type = mstype.bfloat16,
        softmax_dtype: mstype.Type = mstype.float32, value_size: int | None = None, scale: float | None = None, *,
        length: int, rate: float = 0.0, window: int | None = None, draw: DrawnMask | None = None,
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

        def flash(keep: float = 1.0, **options: Any) -> FlashAttentionScore:
            factor = head_size**-0.5 if scale is None else scale
            return FlashAttentionScore(heads, keep, factor, **{"input_layout": "BSH", **options})

        compressed: dict[str, Any] = {"sparse_mode": _CAUSAL}
        if window is not None:
            compressed = {"sparse_mode": _BAND, "pre_tokens": window - 1, "next_tokens": 0}
        self.full = flash()
        self.full_drop = flash(1.0 - rate)
        self.compressed = flash(**compressed)
        self.compressed_drop = flash(1.0 - rate, **compressed)
        self.documents = flash(input_layout="TND", sparse_mode=_CAUSAL_OF_DOCUMENTS, next_tokens=0)

    def construct(
        self, q_NC: Tensor, k_NK: Tensor, v_NK: Tensor, mask: Tensor, ends: Tensor | None, dropout: Tensor | None
    ) -> Tensor:
        """Casts q, k and v, widens the values if needed, and attends within documents or sequences."""
        if self.missing:
            zeros_NKw = self.repeat(self.cast(self.zeros_11w, v_NK.dtype), (v_NK.shape[0], self.kv_heads, 1))
            v_NK = self.fill_up(v_NK, self.reshape(zeros_NKw, (v_NK.shape[0], self.kv_heads * self.missing)))
        q = self.cast(q_NC, self.dtype)
        k = self.cast(k_NK, self.dtype)
        v = self.cast(v_NK, self.dtype)
        if ends is None:
            out = self.attend_in_sequences(q, k, v, mask, dropout)
        else:
            out = self.attend_in_documents(q, k, v, mask, ends)
        out_NC = self.cast(self.reshape(out, q_NC.shape), q_NC.dtype)
        return self.cut(out_NC)[0] if self.missing else out_NC

    def attend_in_sequences(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, dropout: Tensor | None) -> Tensor:
        """Computes attention within each sequence, [B, T, C]."""
        q = self.split(q)
        k = self.split(k)
        v = self.split(v)
        is_full = mask.ndim == 4
        if dropout is None:
            flash = self.full if is_full else self.compressed
            return flash(q, k, v, None, None, None, mask, None)[3]
        flash = self.full_drop if is_full else self.compressed_drop
        drop_mask = dropout if self.draw is None else self.draw(dropout)
        return flash(q, k, v, None, drop_mask, None, mask, None)[3]

    def attend_in_documents(self, q_NC: Tensor, k_NK: Tensor, v_NK: Tensor, mask: Tensor, ends: Tensor) -> Tensor:
        """Computes attention within each document, [N, H, d]; all documents follow each other (layout TND)."""
        q = self.reshape(q_NC, (-1, self.heads, self.head_size))
        k, v = (self.reshape(x, (-1, self.kv_heads, self.head_size)) for x in (k_NK, v_NK))
        return self.documents(q, k, v, None, None, None, mask, None, ends, ends)[3]

    def split(self, x_NC: Tensor) -> Tensor:
        """Reshapes [N, C] to [B, T, C]."""
        return self.reshape(x_NC, (x_NC.shape[0] // self.length, self.length, x_NC.shape[1]))

    def shard_over(self, data: int, tensor: int = 1) -> None:
        """Shards the batch over `data` ranks and heads over `tensor` ranks."""
        super().shard_over(data, tensor)
        assert self.draw is not None, "the options of a sharded graph"
        for cell in (self.draw, self.fill_up, self.cut):
            cell.shard_over(data, tensor)
