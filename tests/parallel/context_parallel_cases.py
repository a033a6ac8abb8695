"""What a rank of test_context_parallel.py computes: attention over sequences whose tokens several ranks share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))


from trainer.config.schema.model import ModelConfig  # noqa: E402
from trainer.data.batches.context import SequencePart  # noqa: E402
from trainer.models.recompute import compile_cell  # noqa: E402
from trainer.ops.context import over_context  # noqa: E402
from trainer.ops.dropout import DropoutKey  # noqa: E402
from trainer.ops.kernel_set import load_kernels  # noqa: E402
from trainer.ops.precision import FLOAT32  # noqa: E402
from trainer.ops.select import select_kernels  # noqa: E402
from trainer.parallel.host_group import HostGroup  # noqa: E402

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
    "dropout": Case(documents=True, dropout=True),
}


def segments_of(case: Case) -> np.ndarray:
    """Documents [B, T]: those of the first sequence end within chunks, one of the second is longer than a chunk."""
    segments = np.zeros((ROWS, LENGTH), np.int32)
    if case.documents:
        for row, ends in enumerate(((3, 4, 13, 27), (18,))):
            for end in ends:
                segments[row, end:] += 1
    return segments


def inputs() -> list[np.ndarray]:
    """q, k, v and the gradient of the result, [B, T, heads * size]."""
    draw, sizes = np.random.default_rng(5), (HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * VALUE_SIZE)
    return [draw.normal(size=(ROWS, LENGTH, size)).astype(np.float32) for size in (*sizes, HEADS * VALUE_SIZE)]


def settings() -> ModelConfig:
    return ModelConfig(
        num_heads=HEADS, n_kv_heads=KV_HEADS, hidden_size=HEADS * HEAD_SIZE, num_layers=1, vocab_size=8,
        seq_length=LENGTH, head_dim=HEAD_SIZE, attention_dropout=RATE,
    )  # fmt: skip


class ResultAndGradients(nn.Cell):
    """(dout, q, k, v, masks) -> result and gradients in one graph, as where recomputation computes a block again."""

    def __init__(self, attention: nn.Cell) -> None:
        super().__init__()
        self.attention = attention
        self.gradients = mindspore.value_and_grad(self.product, (1, 2, 3), has_aux=True)

    def product(self, dout, q, k, v, mask, more_mask, dropout):
        out = self.attention(q, k, v, mask, more_mask, dropout)
        return (out * dout).sum(), out

    def construct(self, dout, q, k, v, mask, more_mask, dropout):
        (_, out), gradients = self.gradients(dout, q, k, v, mask, more_mask, dropout)
        return out, *gradients


def on_rank(world: HostGroup) -> dict[tuple[str, int, bool], list[np.ndarray]]:
    """By case, number of ranks and whether in a ring: result and gradients. Two ranks run operator by operator, four
    run one graph. Then a ring of four with a mistake: keys and values go the wrong way round ("direction"), or the
    ranks see all that comes before, also in other documents ("mask")."""
    pairs = world.part([world.rank // 2 * 2, world.rank // 2 * 2 + 1], "pair")
    found = {}
    for group, in_ring in ((pairs, True), (pairs, False), (world, True), (world, False)):
        attention = Attention(group, in_ring, compiled=group is world)
        for name, case in CASES.items():
            if not case.dropout or group is pairs and in_ring:
                found[name, group.size, in_ring] = attention(case)
    attention = Attention(world, True, compiled=False)
    found["mask", world.size, True] = attention(CASES["documents"]._replace(documents=False))
    world.rotate = lambda array, places: HostGroup.rotate(world, array, -places)
    found["direction", world.size, True] = attention(CASES["causal"])
    return found


class Attention:
    """Case -> result and gradients of a rank."""

    def __init__(self, group: HostGroup, in_ring: bool, compiled: bool) -> None:
        plain = load_kernels(select_kernels(settings(), "CPU"), FLOAT32)
        self.part = SequencePart(group.rank, group.size, in_ring)
        self.kernels = over_context(plain, group, self.part, compiled)
        self.masks = self.kernels.attention_masks(settings())
        cell = self.kernels.attention(HEADS, KV_HEADS, HEAD_SIZE, value_size=VALUE_SIZE, scale=SCALE)
        self.run = compile_cell(ResultAndGradients(cell), compiled)

    def __call__(self, case: Case) -> list[np.ndarray]:
        *qkv, dout = (Tensor(self.part.of(each).reshape(-1, each.shape[2])) for each in inputs())
        mask, dropout = self.masks(segments_of(case), case.window), None
        if case.dropout:
            shape = self.masks.scores_shape(ROWS, LENGTH)
            dropout = self.kernels.draw_attention_mask(KEY, SITE, shape, RATE)
        return [each.asnumpy() for each in self.run(dout, *qkv, *mask, dropout)]
