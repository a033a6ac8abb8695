"""Attention of query blocks whose numbers of keys differ (`trainer.arrays.attention.blocks`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from decoder_settings import decoder_settings
from tolerances import rounding_limit

from trainer.arrays.attention.blocks import BlockAttention
from trainer.arrays.attention.positions import query_blocks
from trainer.arrays.tiles import Scratch
from trainer.models.spec.sublayers import attention_spec

HEADS, SIZE = 2, 4
MODEL = {"num_heads": HEADS, "hidden_size": HEADS * SIZE, "attention_sinks": True, "vocab_size": 16, "num_layers": 1}


def results(documents: Sequence[int], q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """Returns the results of the heads, and the gradients of queries, keys, values and sinks for a gradient of 1."""
    attention = BlockAttention(attention_spec(decoder_settings(**MODEL)), HEADS, HEADS)
    (sequence,) = query_blocks(np.repeat(np.arange(len(documents)), documents)[None])
    out, *grads = (np.zeros_like(q) for _ in range(4))
    sinks, grad_sinks = np.full((HEADS, 1), 0.5, np.float32), np.zeros((HEADS, 1), np.float32)
    scratch = Scratch()
    for block in sequence.blocks:
        attention.forward(sequence, block, q, k, v, out, scratch.tile(sequence.keys, 0), None, sinks_KG=sinks)
    tile = scratch.tile(sequence.keys, 0)
    attention.backward(
        sequence, slice(0, HEADS), q, k, v, np.ones_like(q), grads[0], grads[1], grads[2], tile, None, sinks, grad_sinks
    )
    return [out, *grads, grad_sinks]


def test_with_sinks_the_block_with_most_keys_need_not_need_most_memory() -> None:
    """With these documents the last block has the most scores, but more queries, each with a sink, are in another."""
    documents = [100, 382]
    random = np.random.default_rng(5)
    inputs = [random.standard_normal((sum(documents), HEADS * SIZE)).astype(np.float32) for _ in "qkv"]
    *packed, packed_sinks = results(documents, *inputs)
    apart = [results([size], *(x[first : first + size] for x in inputs)) for first, size in ((0, 100), (100, 382))]
    limit = rounding_limit(sum(documents), scale=np.abs(inputs).max() ** 2)
    for place, array in enumerate(packed):
        np.testing.assert_allclose(array, np.concatenate([each[place] for each in apart]), atol=limit)
    np.testing.assert_allclose(packed_sinks, apart[0][-1] + apart[1][-1], atol=limit * sum(documents))


def test_the_blocks_of_a_sequence_share_their_scratch_memory() -> None:
    """A thread keeps the memory that a task took: taken anew for each block, it would grow with their number."""
    model = {**MODEL, "attention_sinks": False}
    attention = BlockAttention(attention_spec(decoder_settings(**model)), HEADS, HEADS)
    (sequence,) = query_blocks(np.zeros((1, 1000), np.int32))
    arrays = [np.ones((1000, HEADS * SIZE), np.float32) for _ in range(7)]
    scratch = Scratch()
    used = []
    for blocks in (sequence.blocks[-1:], sequence.blocks):
        tile = scratch.tile(sequence.keys, 0)
        attention.backward(sequence._replace(blocks=blocks), slice(0, HEADS), *arrays, tile, None)
        used.append(tile.memory.used)
    assert len(sequence.blocks) == 8 and used[0] == used[1]
