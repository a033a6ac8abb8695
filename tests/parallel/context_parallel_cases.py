"""What a rank of test_context_parallel.py computes: attention over sequences whose tokens several ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import numpy as np

from trainer.arrays.attention.context import ContextParallel
from trainer.arrays.attention.positions import TokenPositions, query_blocks
from trainer.arrays.attention.sublayer import CpuAttention
from trainer.arrays.dropout import LayerDropout
from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.config.schema.model import ModelConfig
from trainer.data.batches.context import ContextShard
from trainer.models.dropout import DropoutShards
from trainer.models.spec.model import AttentionSpec, NormSpec
from trainer.ops.dropout import DropoutKey
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.mesh import Degrees, build_mesh
from trainer.parallel.process_groups import process_groups
from trainer.parallel.tensor import RankModelShard

RANKS, ROWS, LENGTH, HEADS, KV_HEADS, HEAD_SIZE, VALUE_SIZE = 4, 2, 32, 8, 2, 6, 4
SCALE, RATE, KEY, SITE = 0.5, 0.3, DropoutKey(1, 0, 2, 3), 4


class Case(NamedTuple):
    documents: bool = False
    window: int | None = None
    dropout: bool = False


CASES = {
    "causal": Case(),
    "documents": Case(documents=True),
    "window": Case(documents=True, window=5),
    "dropout": Case(documents=True, window=9, dropout=True),
}


LAYOUTS = ((2, 1), (2, 2), (4, 1), (4, 4), (4, 2))
"""Number of ranks, and how many of them exchange heads: a ring, Ulysses attention, or both."""


def segments_of(case: Case) -> np.ndarray:
    """Returns documents [B, T]: those of the first sequence end within chunks, one of the second is longer than a
    chunk."""
    segments = np.zeros((ROWS, LENGTH), np.int32)
    if case.documents:
        for row, ends in enumerate(((3, 4, 13, 27), (18,))):
            for end in ends:
                segments[row, end:] += 1
    return segments


def inputs() -> list[np.ndarray]:
    """Returns q, k, v and the gradient of the result, [B, T, heads * size]."""
    draw, sizes = np.random.default_rng(5), (HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * VALUE_SIZE)
    return [draw.normal(size=(ROWS, LENGTH, size)).astype(np.float32) for size in (*sizes, HEADS * VALUE_SIZE)]


def settings() -> ModelConfig:
    return ModelConfig(
        num_heads=HEADS, n_kv_heads=KV_HEADS, hidden_size=HEADS * HEAD_SIZE, num_layers=1, vocab_size=8,
        seq_length=LENGTH, head_dim=HEAD_SIZE, attention_dropout=RATE,
    )  # fmt: skip


class Given:
    """In the place of projections: queries, keys and values as they are given; keeps their gradients."""

    def __init__(self, queries_keys_values: Sequence[np.ndarray]) -> None:
        self.inputs = queries_keys_values
        self.gradients: list[np.ndarray] = []

    def forward(self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, *out: np.ndarray) -> None:
        for array, given, factor in zip(out, self.inputs, (SCALE, 1, 1), strict=True):
            array[...] = given * np.float32(factor)

    def backward(
        self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, grads: Sequence[np.ndarray],
        grad_ND: np.ndarray, out_ND: np.ndarray,
    ) -> None:  # fmt: skip
        self.gradients = [grad * np.float32(factor) for grad, factor in zip(grads, (SCALE, 1, 1), strict=True)]


def on_rank(world: CpuGroup) -> dict[tuple[str, int, int], list[np.ndarray]]:
    """Returns result and gradients by case, number of ranks and how many of them exchange heads. Groups of four
    ranks also make a mistake: they exchange the keys of two ranks ("order"), a rank takes the gradients of its
    queries only ("sum"), or ranks see all earlier tokens, also of other documents ("mask")."""
    found = {
        (name, *layout): attend(world, case, *layout) for layout in LAYOUTS for name, case in CASES.items()
    }
    found["mask", RANKS, 1] = attend(world, CASES["documents"]._replace(documents=False), RANKS, 1)
    gather = CpuGroup.all_gather
    with mock.patch.object(CpuGroup, "all_gather", lambda group, array: gather(group, array)[::-1]):
        found["order", RANKS, 1] = attend(world, CASES["causal"], RANKS, 1)
    with mock.patch.object(CpuGroup, "reduce_scatter", lambda group, array: np.split(array, RANKS)[group.rank]):
        found["sum", RANKS, 1] = attend(world, CASES["causal"], RANKS, 1)
    return found


def attend(world: CpuGroup, case: Case, size: int, ulysses: int) -> list[np.ndarray]:
    """Returns result and gradients of a rank: those of the attention sublayer, whose output projection changes
    nothing."""
    degrees = Degrees(data_parallel=world.size // size, context_parallel=size)
    groups = process_groups(world, build_mesh(degrees, world.size), ulysses=ulysses)
    part = ContextShard(groups.cp.rank, size, ulysses)
    hidden = HEADS * VALUE_SIZE
    spec = AttentionSpec(
        hidden, HEADS, KV_HEADS, HEAD_SIZE, VALUE_SIZE, SCALE, NormSpec(1e-6), HEAD_SIZE, window=case.window,
        dropout=RATE if case.dropout else 0.0,
    )  # fmt: skip
    sublayer = CpuAttention(spec, Scratch(), context=ContextParallel(part, groups.ring, groups.ulysses))
    *queries_keys_values, dout_NV = (part.select_tokens(each).reshape(-1, each.shape[2]) for each in inputs())
    sublayer.projections = given = Given(queries_keys_values)
    segments = segments_of(case)
    blocks = query_blocks(segments, shard=part.ring)
    windows = query_blocks(segments, window=case.window, shard=part.ring)
    tokens = len(dout_NV)
    positions = TokenPositions(np.ones((tokens, 1, HEAD_SIZE // 2), np.complex64), blocks, windows)
    dropout = None
    if case.dropout:
        heads = DropoutShards(settings(), RankModelShard(None, None, tokens=part)).heads
        dropout = LayerDropout(KEY, {}, (SITE, RATE), heads)
    weights = {"self_attn.o_proj.weight": np.eye(hidden, dtype=np.float32)}
    x_ND = np.zeros((tokens, hidden), np.float32)
    call = SublayerCall(weights, dropout=dropout)
    out_ND = sublayer.forward(call, x_ND, positions).copy()
    call = SublayerCall(weights, dropout=dropout, saved=call.saved)
    sublayer.backward(call, x_ND, positions, dout_NV)
    return [out_ND, *given.gradients]
