"""Attention over sequences whose tokens several ranks share, against the formula for whole sequences in float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from context_parallel_cases import (
    CASES,
    HEAD_SIZE,
    HEADS,
    KEY,
    KV_HEADS,
    LAYOUTS,
    LENGTH,
    RANKS,
    RATE,
    ROWS,
    SCALE,
    SITE,
    VALUE_SIZE,
    inputs,
    segments_of,
)
from rank_job import on_rank_processes
from tolerances import rounding_limit

from trainer.data.batches.context import ContextShard
from trainer.ops.dropout import dropout_mask

_FORWARD = HEAD_SIZE + LENGTH + 8 + LENGTH  # scores, softmax with its merge, values
_LIMITS = (rounding_limit(_FORWARD), *[rounding_limit(2 * _FORWARD + LENGTH * HEADS // KV_HEADS)] * 3)
"""Of the result, and of the gradients: a softmax's own is a difference, and a key's is summed over queries and heads.
"""


@pytest.fixture(scope="module")
def found() -> list[dict]:
    return on_rank_processes(RANKS, "context_parallel_cases:on_rank")


@functools.cache
def right(name: str) -> list[np.ndarray]:
    """Returns result and gradients of q, k and v for whole sequences, [B, T, heads * size]."""
    case, group = CASES[name], HEADS // KV_HEADS
    q, k, v, dout = (
        each.astype(np.float64).reshape(ROWS, LENGTH, KV_HEADS, -1, size).transpose(0, 2, 3, 1, 4)
        for each, size in zip(inputs(), (HEAD_SIZE, HEAD_SIZE, VALUE_SIZE, VALUE_SIZE), strict=True)
    )  # [B, K, heads of queries of a key or 1, T, size]
    segments, before = segments_of(case), np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH))
    seen = (segments[:, :, None] == segments[:, None]) & (before >= 0) & (before < (case.window or LENGTH))
    scores = np.where(seen[:, None, None], SCALE * q @ k.swapaxes(-1, -2), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    kept = np.ones_like(p)
    if case.dropout:
        mask = dropout_mask(KEY, SITE, (ROWS * KV_HEADS, LENGTH * group, LENGTH), RATE)
        kept = mask.reshape(ROWS, KV_HEADS, LENGTH, group, LENGTH).swapaxes(2, 3)
    dp = kept * (dout @ v.swapaxes(-1, -2))
    ds = SCALE * p * (dp - (p * dp).sum(-1, keepdims=True))
    of_k, of_v = ds.swapaxes(-1, -2) @ q, (p * kept).swapaxes(-1, -2) @ dout
    results = (p * kept) @ v, ds @ k, of_k.sum(2, keepdims=True), of_v.sum(2, keepdims=True)
    return [each.transpose(0, 3, 1, 2, 4).reshape(ROWS, LENGTH, -1) for each in results]


@pytest.mark.parametrize(
    ("name", "size", "ulysses"),
    [(name, *layout) for layout in LAYOUTS for name in CASES],
)
def test_ranks_compute_what_one_rank_does(found: list[dict], name: str, size: int, ulysses: int) -> None:
    assert max(errors(found, name, size, ulysses)) < 1


@pytest.mark.parametrize(("wrong", "name"), [("order", "causal"), ("sum", "causal"), ("mask", "documents")])
def test_mistakes_are_found(found: list[dict], wrong: str, name: str) -> None:
    found = [{(name, RANKS, 1): of_rank[wrong, RANKS, 1]} for of_rank in found]
    assert max(errors(found, name, RANKS, 1)) > 1000


def errors(found: list[dict], name: str, size: int, ulysses: int) -> list[float]:
    """Returns the largest errors of the result and of the gradients on any rank, as multiples of the rounding limit."""
    worst = []
    for rank, of_rank in enumerate(found):
        part = ContextShard(rank % size, size, ulysses)
        wanted = [part.select_tokens(each) for each in right(name)]
        pairs = zip(of_rank[name, size, ulysses], wanted, _LIMITS, strict=True)
        worst.append([np.abs(ours.reshape(whole.shape) - whole).max() / np.abs(whole).max() / limit for
                      ours, whole, limit in pairs])  # fmt: skip
    return np.max(worst, 0).tolist()
