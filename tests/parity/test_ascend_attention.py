"""flash_attention_score and the loss in chunks without an Ascend: what the kernels make of the operators as documented
is compared with the reference kernels.

Which graphs MindSpore's Ascend backend makes of them is seen in its dry-run (tests/ascend).
"""

from __future__ import annotations

from functools import partial

import mindspore
import numpy as np
import pytest
from decoder_settings import decoder_settings
from documented_operators import FlashAttentionScore
from mindspore import Tensor
from numpy_kernels import distance, standard_normal
from tolerances import ATTENTION_BFLOAT16, FLOAT16_SUMS, OPERATOR, SEVERAL_OPERATORS

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
settings_of = partial(
    decoder_settings, hidden_size=HEADS * SIZE, num_heads=HEADS, n_kv_heads=2, seq_length=TOKENS,
    use_flash_attention=True, compute_dtype="bfloat16",
)  # fmt: skip


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
    monkeypatch.setattr(ascend, "FlashAttentionScore", FlashAttentionScore)
    ours, right, _ = both(settings_of(n_kv_heads=kv_heads), segments, window, values)
    assert ours.dtype == right.dtype == mindspore.float32
    assert distance(ours.asnumpy(), right.asnumpy()) < ATTENTION_BFLOAT16


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("segments", [ONE, PACKED], ids=["one", "packed"])
def test_dropout_inside_the_operator(
    segments: np.ndarray, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend, "FlashAttentionScore", FlashAttentionScore)
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


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes losses in chunks of 128 columns with operators as documented."""
    monkeypatch.setattr(ascend_loss, "LogSumExp", LogSumExp)
    monkeypatch.setattr(ascend_loss, "ScatterAddExt", ScatterAddExt)
    monkeypatch.setattr(ascend_loss, "_CHUNK_LOGITS", 128 * N)


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
def test_loss_in_chunks_is_the_loss(dtype, vocabulary: int, chunks: None) -> None:
    """With a loss scale that keeps the smallest gradients of float16 above zero."""
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


def test_the_loss_of_ranks_with_parts_of_the_vocabulary(chunks: None) -> None:
    """Each rank is run twice: what a rank gives to the gather is known after its first time."""
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


def test_a_frozen_head_has_no_gradient_in_chunks(chunks: None) -> None:
    labels, valid = Tensor(np.zeros(N, np.int32)), Tensor(np.ones((N, 1), np.float32))
    kernel = ascend_loss.ChunkedCrossEntropy(lambda cell: cell, False)
    arrays = Tensor(normal(N, 8)), Tensor(normal(9, 8))
    gradients = mindspore.grad(lambda x, w: kernel(x, w, labels, valid), (0, 1))(*arrays)
    assert np.abs(gradients[0].asnumpy()).min() > 0 and not gradients[1].asnumpy().any()
