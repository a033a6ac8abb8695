"""The routed experts of a layer on arrays: from tokens to the weighted sums of their experts, forward and backward.

A thread takes some hundred rows of an expert through its products and the SwiGLU between them, while they are in its
cache. Experts compute in float32, whatever the dtype of other products.

The gates of a token are the weights of its k experts, from the router; `gate` of `ExpertWeights` is the gate projection
of a SwiGLU.

Legend: N tokens, R rows sorted by expert (r of a block), E experts, k experts chosen by each token, D hidden, F width
of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.arrays.memory import (
    combine_expert_rows,
    empty,
    expert_blocks,
    expert_rows,
    gates_of_rows,
    host_threads,
    row_blocks,
    take_tokens,
)
from trainer.arrays.operators import operators
from trainer.arrays.tiles import clamped_swiglu, clamped_swiglu_gradient

if TYPE_CHECKING:
    from collections.abc import Collection

    from trainer.arrays.tiles import Scratch, Tile
    from trainer.ops.routing import Routing

_MOST_ROWS = 1024  # rows that a thread takes at once: products of fewer than some hundred are slower
_SCRATCH_NUMBERS = 1 << 21  # size of a thread's scratch: large models have enough work in fewer rows
_MAX_SEGMENTS = 4  # of one expert's rows, each with its own gradient of the weights


class ExpertWeights(NamedTuple):
    """The stacked weights of some experts: [E, F, D], [E, F, D], [E, D, F]; biases [E, D], [E, F] and [E, F]."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    bias: np.ndarray | None = None
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None


class SavedExperts(NamedTuple):
    """The arrays that the backward pass needs besides the inputs: the products before the SwiGLU, [R, F]."""

    gate_RF: np.ndarray
    up_RF: np.ndarray


class ExpertGradients(NamedTuple):
    """The gradients of tokens, gates and trained weights (by field of `ExpertWeights`)."""

    x_ND: np.ndarray
    gates_Nk: np.ndarray
    weights: dict[str, np.ndarray]


class _Segment(NamedTuple):
    """Rows of one expert, for which one thread computes the gradients; `number` counts the segments of an expert."""

    expert: int
    number: int
    rows: slice


class CpuExperts:
    """Computes the sum over a token's experts e of its gate for e times (down_e(silu(gate_e(x)) * up_e(x)) + bias_e).

    An expert without rows costs nothing, and its gradients are zero. Rows after those of the last expert are unused.

    Args:
        clamp: The limit and the slope of `clamped_swiglu`, which replaces silu(gate) * up; None: SwiGLU.
    """

    def __init__(self, scratch: Scratch, clamp: tuple[float, float] | None = None) -> None:
        self.scratch = scratch
        self.clamp = clamp

    def forward(
        self, x_ND: np.ndarray, gates_Nk: np.ndarray, weights: ExpertWeights, routing: Routing
    ) -> tuple[np.ndarray, SavedExperts]:
        """Returns the sums, [N, D], and the saved arrays for `backward`; `routing` has arrays."""
        num_rows = len(routing.token_R)
        width = weights.gate.shape[1]
        out_ND = empty(*x_ND.shape)
        computed = int(routing.counts_E.sum())
        saved = SavedExperts(empty(computed, width), empty(computed, width))
        y_RD = empty(num_rows, x_ND.shape[1])
        y_RD[computed:] = 0
        gate_R = gates_of_rows(gates_Nk, routing.row_Nk, num_rows)

        def compute(block: tuple[int, slice], thread: int) -> None:
            expert, rows = block
            run = operators()
            tile = self.scratch.tile(rows, thread)
            x_rD = tile.take(x_ND.shape[1])
            inner_rF = tile.take(width)
            take_tokens(x_ND, routing.token_R[rows], x_rD)
            run.matmul(x_rD, weights.gate[expert].T, saved.gate_RF[rows])
            run.matmul(x_rD, weights.up[expert].T, saved.up_RF[rows])
            self._activate(weights, expert, saved.gate_RF[rows], saved.up_RF[rows], inner_rF)
            inner_rF *= gate_R[rows, None]
            run.matmul(inner_rF, weights.down[expert].T, y_RD[rows])
            if weights.bias is not None:
                y_RD[rows] += gate_R[rows, None] * weights.bias[expert]

        blocks = expert_blocks(routing.counts_E, _most_rows(weights))
        host_threads().run(blocks, compute, lambda block: block[1].stop - block[1].start)
        combine_expert_rows(y_RD, routing.row_Nk, None, out_ND)
        return out_ND, saved

    def predict(
        self, x_ND: np.ndarray, gates_Nk: np.ndarray, weights: ExpertWeights, routing: Routing, thread: int
    ) -> np.ndarray:
        """Returns the sums of few tokens, [N, D], expert by expert; threads share only large products."""
        rows_RD = np.zeros((len(routing.token_R), x_ND.shape[1]), np.float32)
        width = weights.gate.shape[1]
        for expert, rows in expert_rows(routing.counts_E):
            tile = self.scratch.tile(rows, thread)
            x_rD = tile.take(x_ND.shape[1])
            inner_rF = tile.take(width)
            up_rF = tile.take(width)
            take_tokens(x_ND, routing.token_R[rows], x_rD)
            tile.project(x_rD, weights.gate[expert], inner_rF)
            tile.project(x_rD, weights.up[expert], up_rF)
            self._activate(weights, expert, inner_rF, up_rF, inner_rF)
            tile.project(inner_rF, weights.down[expert], rows_RD[rows])
            if weights.bias is not None:
                rows_RD[rows] += weights.bias[expert]
        return (rows_RD[routing.row_Nk] * gates_Nk[..., None]).sum(1)

    def _activate(
        self, weights: ExpertWeights, expert: int, gate_rF: np.ndarray, up_rF: np.ndarray, out_rF: np.ndarray
    ) -> None:
        """Adds the biases of an expert to its products, and writes SwiGLU's result to `out_rF`, which may be gate."""
        if weights.gate_bias is not None and weights.up_bias is not None:
            gate_rF += weights.gate_bias[expert]
            up_rF += weights.up_bias[expert]
        if self.clamp is None:
            operators().gated(gate_rF, up_rF, out_rF)
        else:
            clamped_swiglu(gate_rF, up_rF, out_rF, *self.clamp)

    def backward(
        self, x_ND: np.ndarray, gates_Nk: np.ndarray, weights: ExpertWeights, routing: Routing, saved: SavedExperts,
        grad_ND: np.ndarray, trained: Collection[str],
    ) -> ExpertGradients:  # fmt: skip
        """Returns the gradients; `trained` has fields of `ExpertWeights`. Overwrites `saved`."""
        num_rows = len(routing.token_R)
        hidden = x_ND.shape[1]
        width = weights.gate.shape[1]
        grad_x_ND = empty(*x_ND.shape)
        grad_rows_RD = empty(num_rows, hidden)
        grad_rows_RD[int(routing.counts_E.sum()) :] = 0
        gate_R = gates_of_rows(gates_Nk, routing.row_Nk, num_rows)
        grad_gate_R = np.zeros(num_rows, np.float32)
        sums = {
            name: _SegmentSums(routing.counts_E, array.shape[1:])
            for name, array in weights._asdict().items()
            if array is not None and name in trained
        }
        most = _most_rows(weights)

        def compute(segment: _Segment, thread: int) -> None:
            """Computes the gradients of some rows of one expert, block by block."""
            expert = segment.expert
            run = operators()
            for rows in row_blocks(segment.rows, most):
                tile = self.scratch.tile(rows, thread)
                x_rD = tile.take(hidden)
                grad_rD = tile.take(hidden)
                grad_inner_rF = tile.take(width)
                inner_rF = tile.take(width)
                take_tokens(x_ND, routing.token_R[rows], x_rD)
                take_tokens(grad_ND, routing.token_R[rows], grad_rD)
                run.matmul(grad_rD, weights.down[expert], grad_inner_rF)
                grad_gate_rF = saved.gate_RF[rows]
                grad_up_rF = saved.up_RF[rows]
                grad_gate_R[rows] = _weighted_swiglu_gradient(
                    grad_gate_rF, grad_up_rF, inner_rF, grad_inner_rF, gate_R[rows], tile, self.clamp
                )
                if weights.bias is not None:
                    grad_gate_R[rows] += grad_rD @ weights.bias[expert]
                run.matmul(grad_gate_rF, weights.gate[expert], grad_rows_RD[rows])
                run.matmul(grad_up_rF, weights.up[expert], grad_rows_RD[rows], True)
                for name, left, right in (
                    ("gate", grad_gate_rF, x_rD), ("up", grad_up_rF, x_rD), ("down", grad_rD, inner_rF),
                ):  # fmt: skip
                    if name in sums:
                        sums[name].add_product(segment, rows, left, right)
                if "bias" in sums:
                    sums["bias"].add(segment, rows, gate_R[rows] @ grad_rD)
                for name, grad_rF in (("gate_bias", grad_gate_rF), ("up_bias", grad_up_rF)):
                    if name in sums:
                        sums[name].add(segment, rows, grad_rF.sum(0))

        host_threads().run(_segments(routing.counts_E), compute, lambda segment: segment.rows.stop - segment.rows.start)
        combine_expert_rows(grad_rows_RD, routing.row_Nk, None, grad_x_ND)
        weight_gradients = {name: segment_sums.total() for name, segment_sums in sums.items()}
        return ExpertGradients(grad_x_ND, grad_gate_R[routing.row_Nk], weight_gradients)


def _most_rows(weights: ExpertWeights) -> int:
    """Returns how many rows a thread takes at once: its three arrays of each width fit its scratch."""
    return max(1, min(_MOST_ROWS, _SCRATCH_NUMBERS // (3 * sum(weights.gate.shape[1:]))))


class _SegmentSums:
    """Adds up the gradient of one stacked weight by segments, with the same bits for any number of threads.

    The first segment of an expert adds to the gradient itself; `total` adds the sums of the others in order.
    """

    def __init__(self, counts_E: np.ndarray, shape: tuple[int, ...]) -> None:
        self.array = empty(len(counts_E), *shape)
        self.array[counts_E == 0] = 0
        self.other_segments: dict[tuple[int, int], np.ndarray] = {}

    def add_product(self, segment: _Segment, rows: slice, left: np.ndarray, right: np.ndarray) -> None:
        """Adds left.T @ right of some of the segment's rows."""
        operators().matmul(left.T, right, self._sum_of(segment, rows), rows.start != segment.rows.start)

    def add(self, segment: _Segment, rows: slice, value: np.ndarray) -> None:
        """Adds a value of some of the segment's rows."""
        total = self._sum_of(segment, rows)
        if rows.start == segment.rows.start:
            total[...] = value
        else:
            total += value

    def _sum_of(self, segment: _Segment, rows: slice) -> np.ndarray:
        if segment.number == 0:
            return self.array[segment.expert]
        if rows.start == segment.rows.start:
            self.other_segments[segment[:2]] = np.empty(self.array.shape[1:], np.float32)
        return self.other_segments[segment[:2]]

    def total(self) -> np.ndarray:
        """Returns the gradient of the stacked weight: the sums of all segments."""
        for (expert, _), part in sorted(self.other_segments.items(), key=lambda item: item[0]):
            self.array[expert] += part
        return self.array


def _segments(counts_E: np.ndarray) -> Iterator[_Segment]:
    """Yields the segments of each expert; an expert with many rows has several, so that threads share its work."""
    for expert, rows in expert_rows(counts_E):
        size = rows.stop - rows.start
        segments = min(_MAX_SEGMENTS, -(-size // _MOST_ROWS))
        for number in range(segments):
            first = rows.start + size * number // segments
            last = rows.start + size * (number + 1) // segments
            yield _Segment(expert, number, slice(first, last))


def _weighted_swiglu_gradient(
    gate_rF: np.ndarray, up_rF: np.ndarray, inner_rF: np.ndarray, grad_rF: np.ndarray, weight_r: np.ndarray, tile: Tile,
    clamp: tuple[float, float] | None,
) -> np.ndarray:  # fmt: skip
    """Computes the gradients of weight_r * silu(gate) * up, and returns the gradient of the factor of each row.

    With `clamp`, `clamped_swiglu` replaces silu(gate) * up.

    Args:
        gate_rF, up_rF: Replaced by their gradients.
        inner_rF: Receives the input of the next product.
        grad_rF: Gradient of `inner_rF`.
    """
    if clamp is None:
        work_rF = tile.take(gate_rF.shape[1])
        return operators().weighted_gated_gradient(gate_rF, up_rF, grad_rF, inner_rF, work_rF, weight_r)
    clamped_swiglu(gate_rF, up_rF, inner_rF, *clamp)
    clamped_swiglu_gradient(gate_rF, up_rF, grad_rF, *clamp)
    grad_weight_r = np.einsum("rf,rf->r", inner_rF, grad_rF)
    for array_rF in (inner_rF, gate_rF, up_rF):
        array_rF *= weight_r[:, None]
    return grad_weight_r
