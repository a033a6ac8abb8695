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
from trainer.models.decoder import DropoutParts  # noqa: E402
from trainer.models.recompute import compile_cell  # noqa: E402
from trainer.ops.context import over_context  # noqa: E402
from trainer.ops.dropout import DropoutKey  # noqa: E402
from trainer.ops.kernel_set import load_kernels  # noqa: E402
from trainer.ops.precision import FLOAT32  # noqa: E402
from trainer.ops.select import select_kernels  # noqa: E402
from trainer.parallel.host_group import HostGroup  # noqa: E402
from trainer.parallel.mesh import Degrees, build_mesh  # noqa: E402
from trainer.parallel.process_groups import process_groups  # noqa: E402
from trainer.parallel.tensor import ModelShard  # noqa: E402

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


def runs(case: Case, size: int, ulysses: int) -> bool:
    """Each case that has a graph of its own costs a compilation."""
    return case.dropout if (size, ulysses) == (4, 2) else not case.dropout or (size, ulysses) == (2, 1)


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
    """By case, number of ranks and how many of them exchange heads: result and gradients. A ring of pairs runs one
    graph, the others operator by operator. Then a ring of four with a mistake: keys and values go the wrong way round
    ("direction"), or the ranks see all that comes before, also in other documents ("mask")."""
    found = {}
    for size, ulysses in LAYOUTS:
        attention = Attention(world, size, ulysses, compiled=1 < ulysses < size)
        for name, case in CASES.items():
            if runs(case, size, ulysses):
                found[name, size, ulysses] = attention(case)
    attention = Attention(world, RANKS, 1, compiled=False)
    found["mask", RANKS, 1] = attention(CASES["documents"]._replace(documents=False))
    rotate = HostGroup.rotate
    HostGroup.rotate = lambda group, array, places: rotate(group, array, -places)
    found["direction", RANKS, 1] = attention(CASES["causal"])
    HostGroup.rotate = rotate
    return found


class Attention:
    """Case -> result and gradients of a rank."""

    def __init__(self, world: HostGroup, size: int, ulysses: int, compiled: bool) -> None:
        degrees = Degrees(data_parallel=world.size // size, context_parallel=size)
        groups = process_groups(world, build_mesh(degrees, world.size), ulysses=ulysses)
        plain = load_kernels(select_kernels(settings(), "CPU"), FLOAT32, is_compiled_on_cpu=True)
        self.part = SequencePart(groups.cp.rank, size, ulysses)
        self.kernels = over_context(plain, groups, self.part, compiled)
        self.heads = DropoutParts(settings(), ModelShard(None, None, tokens=self.part)).heads
        self.masks = self.kernels.attention_masks(settings())
        cell = self.kernels.attention(HEADS, KV_HEADS, HEAD_SIZE, value_size=VALUE_SIZE, scale=SCALE)
        self.run = compile_cell(ResultAndGradients(cell), compiled)

    def __call__(self, case: Case) -> list[np.ndarray]:
        *qkv, dout = (Tensor(self.part.of(each).reshape(-1, each.shape[2])) for each in inputs())
        mask, dropout = self.masks(segments_of(case), case.window), None
        if case.dropout:
            shape = self.masks.scores_shape(ROWS, LENGTH)
            dropout = self.kernels.draw_attention_mask(KEY, SITE, shape, RATE, self.heads)
        return [each.asnumpy() for each in self.run(dout, *qkv, *mask, dropout)]
