"""flash_attention_score and the loss in chunks without an Ascend: what the operators do is written down here in numpy,
as MindSpore documents them, and compared with the reference kernels.

Which graphs MindSpore's Ascend backend makes of them is seen in its dry-run (tests/ascend).
"""

from __future__ import annotations

import json
from functools import partial

import mindspore
import numpy as np
import pytest
from mindspore import Tensor
from numpy_kernels import distance, standard_normal
from tolerances import ATTENTION_BFLOAT16, FLOAT16_SUMS, OPERATOR, SEVERAL_OPERATORS

from trainer.config import parse_config
from trainer.config.schema.model import ModelConfig
from trainer.ops import plain as plain_kernels
from trainer.ops.ascend import attention as ascend
from trainer.ops.ascend import loss as ascend_loss
from trainer.ops.dropout import DropoutKey, dropout_mask, mask_seed
from trainer.ops.vocabulary import CrossEntropy, VocabShard

ROWS, TOKENS, HEADS, SIZE = 2, 16, 4, 16
N = ROWS * TOKENS
RANDOM = np.random.default_rng(7)
normal = partial(standard_normal, RANDOM)
ONE = np.zeros((ROWS, TOKENS), np.int32)
PACKED = np.array([[0] * 5 + [1] * 7 + [2] * 4, [4] * 16], np.int32)
APART = np.array([[0] * 5 + [1] * 7 + [0] * 4, [4] * 16], np.int32)
CAUSAL, CAUSAL_OF_DOCUMENTS, BAND = 2, 3, 4


def settings_of(**changes) -> ModelConfig:
    sizes = {
        "hidden_size": HEADS * SIZE, "num_heads": HEADS, "n_kv_heads": 2, "seq_length": TOKENS,
        "use_flash_attention": True, "compute_dtype": "bfloat16",
    }
    return parse_config("ascend", json.dumps({"model": {"model_config": sizes | changes}})).decoder


class FlashAttentionAsDocumented:
    """Layouts BSH and TND; True in the mask discards; a compressed mask is [2048, 2048]; no float32."""

    def __init__(
        self, head_num: int, keep_prob: float, scale_value: float, pre_tokens: int = 2147483647,
        next_tokens: int = 2147483647, *, input_layout: str, sparse_mode: int = 0,
    ) -> None:  # fmt: skip
        self.heads, self.keep, self.scale, self.layout = head_num, keep_prob, scale_value, input_layout
        self.mode, self.before, self.after = sparse_mode, pre_tokens, next_tokens

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, real_shift: None, drop_mask: Tensor | None,
        padding_mask: None, attn_mask: Tensor, prefix: None, *ends: Tensor,
    ) -> tuple[None, None, None, Tensor]:  # fmt: skip
        assert attn_mask.dtype == mindspore.bool_
        assert {query.dtype, key.dtype, value.dtype} in ({mindspore.float16}, {mindspore.bfloat16})
        assert (self.keep == 1.0) == (drop_mask is None)
        q, k, v = (x.astype(mindspore.float32).asnumpy() for x in (query, key, value))
        if self.layout == "TND":
            assert self.mode == CAUSAL_OF_DOCUMENTS and self.after == 0 and drop_mask is None
            out = self.of_documents(q, k, v, *(each.asnumpy() for each in ends))
        else:
            assert self.layout == "BSH" and not ends
            out = self.of_rows(q, k, v, attn_mask.asnumpy(), drop_mask)
        return None, None, None, Tensor(out.reshape(query.shape)).astype(query.dtype)

    def of_documents(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, ends: np.ndarray, of_keys: np.ndarray):
        assert ends.dtype == np.int64 and len(ends) <= 1024 and (np.diff(ends) >= 0).all() and ends[-1] == len(q)
        np.testing.assert_array_equal(of_keys, ends)
        return np.concatenate([
            attend(*(x[None, first:last] for x in (q, k, v)), ~np.tri(last - first, dtype=bool), self.scale)[0]
            for first, last in zip((0, *ends[:-1]), ends, strict=True)
        ])  # fmt: skip

    def of_rows(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, drop_mask: Tensor | None):
        rows, length = q.shape[:2]
        q, k, v = (x.reshape(rows, length, -1, q.shape[2] // self.heads) for x in (q, k, v))
        if self.mode == 0:
            assert mask.shape == (rows, 1, length, length)
            hidden = mask
        else:
            np.testing.assert_array_equal(mask, ~np.tri(2048, dtype=bool))
            hidden = ~np.tri(length, dtype=bool)
            if self.mode == BAND:
                distance_TT = np.arange(length)[:, None] - np.arange(length)
                hidden = (distance_TT > self.before) | (-distance_TT > self.after)
            else:
                assert self.mode == CAUSAL
        kept = 1.0
        if drop_mask is not None:
            assert drop_mask.dtype == mindspore.uint8 and drop_mask.shape == (rows, self.heads, length, length // 8)
            kept = np.unpackbits(drop_mask.asnumpy(), axis=-1, bitorder="little") / self.keep
        return attend(q, k, v, hidden, self.scale, kept)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, hidden: np.ndarray, scale: float, kept=1.0) -> np.ndarray:
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bqhd,bshd->bhqs", q, k) * scale
    scores[np.broadcast_to(hidden, scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
    weights = weights / weights.sum(-1, keepdims=True) * kept
    return np.einsum("bhqs,bshd->bqhd", weights, v)


def both(settings: ModelConfig, segments: np.ndarray, window: int | None, values: int, drops: bool = False) -> tuple:
    """Returns the fused kernel's result and the reference's, and the masks of the former."""
    sizes, latent = (HEADS, settings.kv_heads, SIZE), {"value_size": values, "scale": 0.4} if values < SIZE else {}
    fused = ascend.Attention(*sizes, **latent, **ascend.attention_options(settings, window))
    masks, plain_masks = (room.AttentionMasks(settings)(segments, window) for room in (ascend, plain_kernels))
    kv_heads = settings.kv_heads
    arrays = [Tensor(normal(N, width)) for width in (HEADS * SIZE, kv_heads * SIZE, kv_heads * values)]
    bits = keep = None
    if drops:
        shape_BHTT = ascend.AttentionMasks(settings).scores_shape(ROWS, TOKENS)
        keep_BHTT = dropout_mask(DropoutKey(1, 0, 0, 0), 0, shape_BHTT, settings.attention_dropout)
        bits = Tensor(np.packbits(keep_BHTT > 0, axis=-1, bitorder="little"))
        keep = keep_BHTT.reshape(ROWS, kv_heads, -1, TOKENS, TOKENS).swapaxes(2, 3)  # query heads of a group, by token
        shape = plain_kernels.AttentionMasks(settings).scores_shape(ROWS, TOKENS)
        keep = Tensor(np.ascontiguousarray(keep).reshape(shape))
    plain = plain_kernels.Attention(*sizes, **latent)
    return fused(*arrays, *masks, bits), plain(*arrays, *plain_masks, keep), masks


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("segments", [ONE, PACKED, APART], ids=["one", "packed", "apart"])
@pytest.mark.parametrize("values", [SIZE, SIZE - 4])
def test_documented_operator_computes_what_the_reference_does(
    segments: np.ndarray, window: int | None, kv_heads: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend, "FlashAttentionScore", FlashAttentionAsDocumented)
    ours, right, _ = both(settings_of(n_kv_heads=kv_heads), segments, window, values)
    assert ours.dtype == right.dtype == mindspore.float32
    assert distance(ours.asnumpy(), right.asnumpy()) < ATTENTION_BFLOAT16


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segments", [ONE, PACKED], ids=["one", "packed"])
def test_dropout_inside_the_operator(
    segments: np.ndarray, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend, "FlashAttentionScore", FlashAttentionAsDocumented)
    ours, right, _ = both(settings_of(attention_dropout=0.25), segments, window, SIZE, drops=True)
    assert distance(ours.asnumpy(), right.asnumpy()) < ATTENTION_BFLOAT16


@pytest.mark.parametrize(
    ("segments", "window", "dropout", "mask", "ends"),
    [
        (ONE, None, 0.0, (2048, 2048), None),
        (ONE, 3, 0.1, (2048, 2048), None),
        (PACKED, None, 0.0, (2048, 2048), [5, 12, 16, 32]),
        (PACKED, 16, 0.0, (2048, 2048), [5, 12, 16, 32]),  # no document is longer than the window
        (np.array([[0] * 5 + [1] * 11, [4] * 16]), None, 0.0, (2048, 2048), [5, 16, 32, 32]),  # a power of two
        (PACKED, 15, 0.0, (ROWS, 1, TOKENS, TOKENS), None),
        (PACKED, None, 0.1, (ROWS, 1, TOKENS, TOKENS), None),
        (APART, None, 0.0, (ROWS, 1, TOKENS, TOKENS), None),
    ],
)
def test_a_whole_mask_is_made_only_where_it_must_be(
    segments: np.ndarray, window: int | None, dropout: float, mask: tuple[int, ...], ends: list[int] | None
) -> None:
    found = ascend.AttentionMasks(settings_of(attention_dropout=dropout))(segments, window)
    assert found[0].shape == mask
    assert (found[1] is None) if ends is None else found[1].asnumpy().tolist() == ends


def test_more_documents_than_the_operator_takes_get_a_whole_mask() -> None:
    masks = ascend.AttentionMasks(settings_of(seq_length=2048))
    many = np.minimum(np.arange(2048), 1024)[None]
    mask, ends = masks(many)
    right = (many[:, :, None] == many[:, None]) & np.tri(2048, dtype=bool)
    assert ends is None and np.array_equal(mask.asnumpy(), ~right[:, None])
    assert len(masks(np.minimum(np.arange(2048), 1023)[None])[1].asnumpy()) == 1024
    with pytest.raises(ValueError, match="seq_length is 2048"):
        masks(ONE)


def test_every_mask_has_a_seed_of_its_own() -> None:
    keys = [DropoutKey(seed, rank, step, number) for seed in (1, 2**40) for rank in (0, 1)
            for step in (0, 1) for number in (0, 1)]  # fmt: skip
    seeds = [mask_seed(key, site) for key in keys for site in range(3)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [mask_seed(key, site) for key in keys for site in range(3)]


class LogSumExp:
    def __call__(self, input: Tensor, dim: tuple[int, ...], keepdim: bool) -> Tensor:
        values = input.asnumpy()
        top = values.max(dim, keepdims=True)
        return Tensor(top + np.log(np.exp(values - top).sum(dim, keepdims=keepdim)))


class ScatterAddExt:
    def __call__(self, input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
        values = input.asnumpy().copy()
        assert dim == 1 and index.dtype == mindspore.int64 and index.shape == src.shape == (len(values), 1)
        np.add.at(values, (np.arange(len(values)), index.asnumpy()[:, 0]), src.asnumpy()[:, 0])
        return Tensor(values)


@pytest.mark.parametrize("dtype", [mindspore.float32, mindspore.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [300, 256, 50])
def test_loss_in_chunks_is_the_loss(dtype, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a loss scale that keeps the smallest gradients of float16 above zero, in chunks of 128 columns."""
    monkeypatch.setattr(ascend_loss, "LogSumExp", LogSumExp)
    monkeypatch.setattr(ascend_loss, "ScatterAddExt", ScatterAddExt)
    monkeypatch.setattr(ascend_loss, "_CHUNK_LOGITS", 128 * N)
    labels, valid = RANDOM.integers(0, vocabulary, N).astype(np.int32), np.ones((N, 1), np.float32)
    labels[:3], valid[:3] = 0, 0
    arrays = [Tensor(normal(N, 8)), Tensor(normal(vocabulary, 8))]
    found = []
    in_chunks = ascend_loss.ChunkedCrossEntropy(lambda cell: cell, True, dtype)
    for kernel in (CrossEntropy(vocabulary, dtype), in_chunks):
        of = mindspore.value_and_grad(lambda x, w, run=kernel: run(x, w, Tensor(labels), Tensor(valid)) * 1e-2, (0, 1))
        loss, gradients = of(*arrays)
        found.append([loss.asnumpy(), *(gradient.asnumpy() for gradient in gradients)])
    limit = OPERATOR if dtype == mindspore.float32 else FLOAT16_SUMS
    for right, ours in zip(*found, strict=True):
        assert right.dtype == ours.dtype and distance(ours, right) < limit


def test_the_loss_of_ranks_with_parts_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank is run twice: what a rank gives to the gather is known after its first time."""
    monkeypatch.setattr(ascend_loss, "LogSumExp", LogSumExp)
    monkeypatch.setattr(ascend_loss, "ScatterAddExt", ScatterAddExt)
    monkeypatch.setattr(ascend_loss, "_CHUNK_LOGITS", 128 * N)
    vocabulary, firsts = 500, (0, 170, 335, 500)
    labels, valid = RANDOM.integers(0, vocabulary, N).astype(np.int32), np.ones((N, 1), np.float32)
    labels[:4], valid[0] = (0, 169, 170, 499), 0
    x, weight = Tensor(normal(N, 8)), normal(vocabulary, 8) * 30  # sums of exp(logit) would overflow

    def loss_of(kernel, rows: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        of = mindspore.value_and_grad(lambda x, w: kernel(x, w, Tensor(labels), Tensor(valid)), (0, 1))
        loss, gradients = of(x, Tensor(rows))
        return loss.asnumpy(), [gradient.asnumpy() for gradient in gradients]

    given: list[Tensor] = [Tensor(np.zeros((2, N), np.float32))] * 3

    def rank_loss(rank: int) -> tuple[np.ndarray, list[np.ndarray]]:
        def gather(own: Tensor) -> Tensor:
            given[rank] = Tensor(own.asnumpy())
            return mindspore.ops.concat(given)

        part = VocabShard(rank, 3, firsts[rank], gather)
        kernel = ascend_loss.ChunkedCrossEntropy(lambda cell: cell, True, shard=part)
        return loss_of(kernel, weight[firsts[rank] : firsts[rank + 1]])

    loss, (grad_x, grad_weight) = loss_of(CrossEntropy(vocabulary), weight)
    of_ranks = [[rank_loss(rank) for rank in range(3)] for _ in range(2)][1]
    assert all(distance(each, loss) < OPERATOR for each, _ in of_ranks)
    assert distance(sum(gradients[0] for _, gradients in of_ranks), grad_x) < SEVERAL_OPERATORS
    assert distance(np.concatenate([gradients[1] for _, gradients in of_ranks]), grad_weight) < SEVERAL_OPERATORS


def test_a_frozen_head_has_no_gradient_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_loss, "LogSumExp", LogSumExp)
    monkeypatch.setattr(ascend_loss, "ScatterAddExt", ScatterAddExt)
    labels, valid = Tensor(np.zeros(N, np.int32)), Tensor(np.ones((N, 1), np.float32))
    kernel = ascend_loss.ChunkedCrossEntropy(lambda cell: cell, False)
    arrays = Tensor(normal(N, 8)), Tensor(normal(9, 8))
    gradients = mindspore.grad(lambda x, w: kernel(x, w, labels, valid), (0, 1))(*arrays)
    assert np.abs(gradients[0].asnumpy()).min() > 0 and not gradients[1].asnumpy().any()
