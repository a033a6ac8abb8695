"""Context parallelism on an Ascend, without one: flash_attention_score is as documented, and each rank of a sequence
gets what a gather would give it. The exported graph shows that MindSpore infers it with its gradient."""

from __future__ import annotations

from pathlib import Path

import mindspore
import numpy as np
import pytest
from documented_operators import flash_attention_score
from exported_graphs import export
from mindspore import Tensor, mint, nn, ops
from numpy_kernels import distance
from tolerances import ATTENTION_BFLOAT16

from trainer.config.schema.model import ModelConfig
from trainer.data.batches.context import ContextShard
from trainer.ops import plain as plain_kernels
from trainer.ops.ascend import context
from trainer.ops.ascend.attention import AttentionMasks

ROWS, TOKENS, HEADS, KV_HEADS, SIZE, RANKS = 2, 16, 4, 2, 16, 2
SETTINGS = ModelConfig(hidden_size=HEADS * SIZE, num_heads=HEADS, n_kv_heads=KV_HEADS, num_layers=1, vocab_size=8,
                       seq_length=TOKENS)  # fmt: skip
ONE, PACKED = np.zeros((ROWS, TOKENS), np.int32), np.array([[0] * 5 + [1] * 11, [0] * 16], np.int32)


def as_documented(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, *, attn_mask: Tensor, scalar_value: float,
    input_layout: str, sparse_mode: int,
) -> Tensor:  # fmt: skip
    """Computes attention as documented: layout BSH, True discards, mode 3 ends the triangle at the last query and
    key."""
    assert input_layout == "BSH" and {query.dtype, key.dtype, value.dtype} == {mindspore.bfloat16}
    (rows, queries, _), keys = query.shape, key.shape[1]
    if sparse_mode == 3:
        np.testing.assert_array_equal(attn_mask.asnumpy(), ~np.tri(2048, dtype=bool))
        hidden = ~np.tri(queries, keys, keys - queries, dtype=bool)
    else:
        assert sparse_mode == 0 and attn_mask.shape == (rows, 1, queries, keys)
        hidden = attn_mask.asnumpy()
    q, k, v = (x.astype(mindspore.float32).asnumpy() for x in (query, key, value))
    return Tensor(flash_attention_score(q, k, v, head_num, hidden, scalar_value)).astype(query.dtype)


def index_select(x: Tensor, axis: int, index: Tensor) -> Tensor:
    return Tensor(np.take(x.astype(mindspore.float32).asnumpy(), index.asnumpy(), axis)).astype(x.dtype)


class SliceExt:
    def __call__(self, input: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
        return mint.narrow(input, dim, start, end - start)


def kernel(part: ContextShard, gather) -> context.GatheredAttention:
    return context.GatheredAttention(HEADS, KV_HEADS, SIZE, length=TOKENS, shard=part, gather=gather)


@pytest.mark.parametrize(("segments", "window"), [(ONE, None), (PACKED, None), (ONE, 3)])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_computes_its_tokens(
    segments: np.ndarray, window: int | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context.ops, "flash_attention_score", as_documented)
    monkeypatch.setattr(context.mint, "index_select", index_select)
    monkeypatch.setattr(context, "SliceExt", SliceExt)
    draw = np.random.default_rng(2)
    qkv = [draw.normal(size=(ROWS, TOKENS, heads * SIZE)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    parts = [ContextShard(each, RANKS) for each in range(RANKS)]
    own = [[Tensor(part.select_tokens(x).reshape(-1, x.shape[2])) for x in qkv] for part in parts]
    every = ops.concat([ops.concat((k, v), -1) for _, k, v in own]).astype(mindspore.bfloat16)
    masks = AttentionMasks(SETTINGS, parts[rank])(segments, window)
    ours = kernel(parts[rank], lambda: lambda x: every)(*own[rank], *masks, None).asnumpy()
    plain = plain_kernels.Attention(HEADS, KV_HEADS, SIZE)
    flat = [Tensor(x.reshape(-1, x.shape[2])) for x in qkv]
    right = plain(*flat, *plain_kernels.AttentionMasks(SETTINGS)(segments, window), None).asnumpy()
    right = parts[rank].select_tokens(right.reshape(ROWS, TOKENS, -1)).reshape(ours.shape)
    assert distance(ours, right) < ATTENTION_BFLOAT16


class _Gradients(nn.Cell):
    def __init__(self, attention: nn.Cell) -> None:
        super().__init__()
        self.gradients = ops.GradOperation(get_all=True)(attention)

    def construct(self, q, k, v, mask, late_mask):
        return self.gradients(q, k, v, mask, late_mask, None)[:3]


def _twice(x: Tensor) -> Tensor:
    return ops.concat((x, x))


@pytest.mark.parametrize("segments", [ONE, PACKED], ids=["one", "packed"])
def test_the_front_end_infers_the_graph(segments: np.ndarray, tmp_path: Path) -> None:
    part = ContextShard(1, RANKS)
    masks = AttentionMasks(SETTINGS, part)(segments)
    tokens = ROWS * TOKENS // RANKS
    inputs = [Tensor(np.ones((tokens, heads * SIZE), np.float32)) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    graph = export(_Gradients(kernel(part, lambda: _twice)), [*inputs, *masks], tmp_path / "graph")
    assert graph.operators["FlashAttentionScore"] == graph.operators["FlashAttentionScoreGrad"] == 2
