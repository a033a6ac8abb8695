"""QK-clip: shrinks the queries and keys of heads whose attention logits grew too large (Kimi K2, arXiv 2507.20534).

Legend: H heads of the model, h of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from mindspore import Parameter

from trainer.models.spec.model import AttentionSpec
from trainer.models.spec.names import layer_prefix
from trainer.parallel.sharding import ShardSpec

if TYPE_CHECKING:
    from trainer.parallel.collectives import ProcessGroup


LocalHeads: TypeAlias = Mapping[int, tuple[int, int]]
"""The first head of a rank and the number of its heads, by layer; without the layers that the rank does not have."""


def query_projection(attention: AttentionSpec) -> str:
    """Returns the name of the matrix that computes the queries of all heads."""
    if attention.latent is not None and attention.latent.query_rank is not None:
        return "q_b_proj"
    return "q_proj"


def local_heads(
    attention: AttentionSpec, layers: int, names: Collection[str], spec_of: Callable[[str], ShardSpec]
) -> LocalHeads:
    """Returns the heads of which a rank has weights.

    Args:
        names: The parameters of this rank.
        spec_of: Returns the shard of a parameter that this rank has.
    """
    heads = {}
    for layer in range(layers):
        name = f"{layer_prefix(layer)}self_attn.{query_projection(attention)}.weight"
        if name in names:
            shard = spec_of(name).shard
            heads[layer] = shard.start[0] // attention.head_size, shard.shape[0] // attention.head_size
    return heads


def exchanged_heads(heads: LocalHeads, ulysses: ProcessGroup) -> LocalHeads:
    """Returns the heads of one of the ranks that exchange heads for tokens (Ulysses), of which all have weights."""
    rank = ulysses.rank
    size = ulysses.size
    return {layer: (first + rank * (number // size), number // size) for layer, (first, number) in heads.items()}


class MaxLogits:
    """The largest attention logit of each head in a step, at least 0, as attention adds it.

    Args:
        heads: The first head whose logits this rank computes and the number of these heads, by layer.
        shape: Layers and heads of the model, those of all ranks.
        gather: Gathers the bytes of all ranks.
    """

    def __init__(self, heads: LocalHeads, shape: tuple[int, int], gather: Callable[[bytes], list[bytes]]) -> None:
        self.first = {layer: first for layer, (first, _) in heads.items()}
        self.local = {layer: np.zeros(number, np.float32) for layer, (_, number) in heads.items()}
        self.shape = shape
        self.gather = gather

    def start(self) -> None:
        """Begins a step."""
        for logits_h in self.local.values():
            logits_h[...] = 0

    def reduce_max(self) -> np.ndarray:
        """Returns the largest logits of all layers and heads over the ranks, float32 [layers, H]; ranks call it
        together."""
        logits_LH = np.zeros(self.shape, np.float32)
        for layer, logits_h in self.local.items():
            logits_LH[layer, self.first[layer] : self.first[layer] + len(logits_h)] = logits_h
        gathered = self.gather(logits_LH.tobytes())
        return np.max([np.frombuffer(data, np.float32).reshape(self.shape) for data in gathered], axis=0)


class QkClip:
    """Scales the weights of heads with a logit S above `threshold`, by gamma = threshold / S (algorithm 1 there).

    The parts of queries and keys that are not rotated are scaled by sqrt(gamma) each, the rotated queries by gamma. The
    rotated key, which all heads share, stays. So each logit of the head is scaled by gamma.

    Args:
        heads: Those of which this rank has weights, see `local_heads`.
        parameters: The float32 weights of this rank by name; their memory is written.
        ranges: The range of a flattened parameter that this rank updates, where ranks shard the weights.
    """

    def __init__(
        self, threshold: float, attention: AttentionSpec, heads: LocalHeads, parameters: Mapping[str, Parameter],
        ranges: Mapping[str, slice],
    ) -> None:  # fmt: skip
        assert attention.latent is not None, "the configuration clips latent attention only"
        self.threshold = threshold
        self.latent = attention.latent
        self.value_size = attention.value_size
        self.query = query_projection(attention)
        self.heads = heads
        self.parameters = parameters
        self.ranges = ranges

    def clip(self, logits_LH: np.ndarray) -> int:
        """Scales the weights of this rank; returns the number of clipped heads of the model."""
        gamma_LH = self.threshold / np.maximum(logits_LH.astype(np.float64), self.threshold)
        for layer, (first, number) in self.heads.items():
            gamma_h = gamma_LH[layer, first : first + number]
            if (gamma_h < 1).any():
                prefix = f"{layer_prefix(layer)}self_attn."
                self._scale(f"{prefix}{self.query}.weight", gamma_h, self.latent.rope_size, gamma_h)
                self._scale(f"{prefix}kv_b_proj.weight", gamma_h, self.value_size, np.ones(number))
        return int((gamma_LH < 1).sum())

    def _scale(self, name: str, gamma_h: np.ndarray, size: int, factor_h: np.ndarray) -> None:
        """Multiplies the first rows of each head, not rotated, by sqrt(gamma), and the other `size` by `factor_h`."""
        by_head = [np.sqrt(gamma_h)] * self.latent.nope_size + [factor_h] * size
        rows = np.stack(by_head, 1).reshape(-1).astype(np.float32)
        matrix = self.parameters[name].asnumpy()
        if name not in self.ranges:
            matrix *= rows[:, None]
            return
        local_range = self.ranges[name]
        matrix.reshape(-1)[local_range] *= np.repeat(rows, matrix.shape[1])[local_range]
