"""Where the tokens of a batch stand: who sees whom, and the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from trainer.arrays.memory import parts

if TYPE_CHECKING:
    from mindspore import Tensor

    from trainer.config import ModelConfig

Weights: TypeAlias = Mapping[str, np.ndarray]
"""Those of a block, by their names in it."""
Gradients: TypeAlias = "dict[str, Tensor]"
"""Of the weights that are trained."""

_QUERIES = 128  # of a block: half of what is computed on the diagonal is masked
_KEYS = 64  # a block's keys begin at a multiple of this: softmax is compiled for each number of keys
_CACHE_LINE = 16  # numbers
_TURNED = "self_attn.q_", "self_attn.k_"  # names of what makes queries and keys begin so


class QueryBlock(NamedTuple):
    """Queries of one sequence that follow each other, and the keys that some of them see, as rows of the batch."""

    queries: slice
    keys: slice
    masked: int
    """The key, counted from the first, from which `bias_QM` is added to the scores."""
    bias_QM: np.ndarray
    """0 where the query sees the key."""


@dataclass(frozen=True)
class TokenPositions:
    """Where the tokens of a batch stand.

    Attributes:
        turn_N1h: Of the rotary embedding: cos + i sin of the angle of each pair, complex, [N, 1, rotated size / 2].
        blocks: The query blocks of each sequence, and those for layers with a sliding window.
    """

    turn_N1h: np.ndarray
    blocks: tuple[tuple[QueryBlock, ...], ...]
    window_blocks: tuple[tuple[QueryBlock, ...], ...] | None = None


def query_blocks(segment_ids_BT: np.ndarray, window: int | None = None) -> tuple[tuple[QueryBlock, ...], ...]:
    """Blocks of each sequence: causal, within a document, and with `window` within so many tokens."""
    length = segment_ids_BT.shape[1]
    return tuple(
        tuple(_block(segments_T, row * length, queries, window) for queries in parts(slice(0, length), _QUERIES))
        for row, segments_T in enumerate(segment_ids_BT)
    )


def _block(segments_T: np.ndarray, start: int, queries: slice, window: int | None) -> QueryBlock:
    query_Q1, key_1S = np.arange(queries.start, queries.stop)[:, None], np.arange(queries.stop)[None]
    sees_QS = (segments_T[queries, None] == segments_T[None, : queries.stop]) & (key_1S <= query_Q1)
    if window is not None:
        sees_QS &= key_1S > query_Q1 - window
    first = int(sees_QS.any(0).argmax()) // _KEYS * _KEYS
    sees_QS = sees_QS[:, first:]
    everywhere_S = sees_QS.all(0)
    masked = 0 if not everywhere_S[0] else len(everywhere_S) if everywhere_S.all() else int(everywhere_S.argmin())
    masked -= masked % _CACHE_LINE  # an addition that begins there takes a third of the time
    bias_QM = np.where(sees_QS[:, masked:], np.float32(0), np.finfo(np.float32).min)
    own = slice(start + queries.start, start + queries.stop)
    return QueryBlock(own, slice(start + first, start + queries.stop), masked, bias_QM)


class Rotary:
    """The rotation of every pair of a head's first numbers (Su et al. 2021, equation 34): numbers i and i + half, or
    with `rope_interleave` neighbours.

    Neighbours are turned as one complex number, which takes a tenth of the time. So queries and keys of the other kind
    of models are computed in another order, `paired`: a score is a sum over all numbers of a head, in any order.
    """

    def __init__(self, settings: ModelConfig) -> None:
        self.head_size, self.half, self.order_d = settings.head_size, settings.rotary_size // 2, None
        self.first = slice(0, 2 * self.half, 2) if settings.rope_interleave else slice(self.half)
        if not settings.rope_interleave:
            order_d = np.arange(self.head_size)
            order_d[: 2 * self.half] = order_d[: 2 * self.half].reshape(2, -1).T.reshape(-1)
            self.order_d = order_d

    def table(self, cos_Nd: np.ndarray, sin_Nd: np.ndarray) -> np.ndarray:
        """What `turn` multiplies with; both numbers of a pair have the same angle."""
        return (cos_Nd + 1j * sin_Nd)[:, None, self.first].astype(np.complex64)

    def turn(self, x_nC: np.ndarray, turn_n1h: np.ndarray, back: bool = False) -> None:
        """In place; `back` turns the other way, which is the gradient."""
        pairs = x_nC.reshape(len(x_nC), -1, self.head_size)[..., : 2 * self.half].view(np.complex64)
        pairs *= turn_n1h.conj() if back else turn_n1h

    def paired(self, weights: Weights) -> Weights:
        """The weights that make queries and keys with both numbers of a pair beside each other."""
        if self.order_d is None:
            return weights
        return {**weights, **{name: self._by_head(weights[name])[:, self.order_d].reshape(weights[name].shape)
                              for name in weights if name.startswith(_TURNED)}}  # fmt: skip

    def unpaired(self, gradients: Gradients) -> Gradients:
        """The gradients of those weights, in the order of the model."""
        for name in gradients if self.order_d is not None else ():
            if name.startswith(_TURNED):
                by_head = self._by_head(gradients[name].asnumpy())
                by_head[:, self.order_d] = by_head.copy()
        return gradients

    def _by_head(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, self.head_size, *array.shape[1:])
