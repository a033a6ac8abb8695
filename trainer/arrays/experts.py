"""The experts of a layer as one reference kernel, for float32: from tokens to the weighted sums of their experts.

As a chain of kernels (permute, three grouped products with a SwiGLU between them, unpermute) every result goes through
memory, which costs half as much as the products. Here a thread takes some hundred rows through all of it, forwards and
backwards, while they are in its cache.

Legend: as in moe.py; F width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from mindspore import Parameter, Tensor, nn

from trainer.arrays.memory import (
    Scratch,
    add_rows,
    empty,
    expert_parts,
    expert_rows,
    host_threads,
    on_host,
    parts,
    take_tokens,
)
from trainer.arrays.onednn import operators
from trainer.ops.routing import Routing

_MOST_ROWS = 1024  # rows that a thread takes at once: products of fewer than some hundred are slower
_SCRATCH_NUMBERS = 1 << 21  # size of a thread's scratch: large models have enough work in fewer rows
_MOST_SEGMENTS = 4  # parts of one expert's rows, each with its own gradient of the weights


class CpuExperts:
    """(x_ND, gates_Nk, gate_EFD, up_EFD, down_EDF, routing) -> out_ND.

    out is the sum over a token's experts e of its gate for e times down_e(silu(gate_e(x)) * up_e(x)): the same as
    Permute, GroupedMatmul, SwiGLU and Unpermute one after the other. What GroupedMatmul says of experts without rows
    and of parameters holds here too.
    """

    def __init__(self) -> None:
        self.scratch = Scratch(host_threads().threads)

    def __call__(
        self, x_ND: Tensor, gates_Nk: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, routing: Routing
    ) -> Tensor:
        weights = (gate_EFD, up_EFD, down_EDF)
        trained = [not isinstance(weight, Parameter) or weight.requires_grad for weight in weights]
        return _ExpertsCall(routing, trained, self.scratch)(x_ND, gates_Nk, *weights)


class _ExpertsCall(nn.Cell):
    """One call, which keeps the products before the SwiGLU for its backward pass."""

    def __init__(self, routing: Routing, trained: list[bool], scratch: Scratch) -> None:
        super().__init__(auto_prefix=False)
        self.trained, self.scratch = trained, scratch
        # Tensors if the routing was decided in a graph.
        self.row_Nk, self.token_R, self.counts_E = map(np.asarray, (routing.row_Nk, routing.token_R, routing.counts_E))
        self.rows = int(self.counts_E.sum())  # those after them belong to no expert
        self.gate_RF = self.up_RF = None

    def construct(self, x_ND, gates_Nk, gate_EFD, up_EFD, down_EDF):
        x, gate, up, down = map(on_host, (x_ND, gate_EFD, up_EFD, down_EDF))
        (result, out), size, threads = empty(*x.shape), (len(self.token_R), gate.shape[1]), host_threads()
        (_, self.gate_RF), (_, self.up_RF), (_, y) = empty(*size), empty(*size), empty(size[0], x.shape[1])
        gate_R = self.gate_of_rows(gates_Nk)
        y[self.rows :] = 0

        def compute(part: tuple[int, slice], thread: int) -> None:
            expert, rows = part
            run = operators()
            x_rD, inner = self.scratch.take(thread, rows, x.shape[1], size[1])
            take_tokens(x, self.token_R[rows], x_rD)
            run.matmul(x_rD, gate[expert].T, self.gate_RF[rows])
            run.matmul(x_rD, up[expert].T, self.up_RF[rows])
            run.silu(self.gate_RF[rows], inner)
            inner *= self.up_RF[rows]
            inner *= gate_R[rows, None]
            run.matmul(inner, down[expert].T, y[rows])

        threads.run(expert_parts(self.counts_E, self.most_rows(gate)), compute)
        add_rows(y, self.row_Nk, None, out)
        return result

    def most_rows(self, gate_EFD: np.ndarray) -> int:
        return max(1, min(_MOST_ROWS, _SCRATCH_NUMBERS // (3 * sum(gate_EFD.shape[1:]))))

    def gate_of_rows(self, gates_Nk: Tensor) -> np.ndarray:
        gate_R = np.zeros(len(self.token_R), np.float32)
        gate_R[self.row_Nk] = on_host(gates_Nk)
        return gate_R

    def bprop(self, x_ND, gates_Nk, gate_EFD, up_EFD, down_EDF, out, grad_ND):
        x, gate, up, down, grad = map(on_host, (x_ND, gate_EFD, up_EFD, down_EDF, grad_ND))
        (result, grad_x), (_, grad_rows) = empty(*x.shape), empty(len(self.token_R), x.shape[1])
        gate_R, grad_gate_R = self.gate_of_rows(gates_Nk), np.zeros(len(self.token_R), np.float32)
        grad_rows[self.rows :] = 0
        threads, shapes = host_threads(), [weight.shape[1:] for weight in (gate, up, down)]
        (width, hidden), most = shapes[0], self.most_rows(gate)
        widths = (hidden, hidden, width, width, width)
        weights = [
            _WeightGradient(self.counts_E, shape) if trained else None
            for shape, trained in zip(shapes, self.trained, strict=True)
        ]

        def compute(segment: tuple[int, int, slice], thread: int) -> None:
            expert, _, every = segment
            run = operators()
            for rows in parts(every, most):
                x_rD, grad_rD, grad_inner, inner, work = self.scratch.take(thread, rows, *widths)
                take_tokens(x, self.token_R[rows], x_rD)
                take_tokens(grad, self.token_R[rows], grad_rD)
                run.matmul(grad_rD, down[expert], grad_inner)
                grad_gate, grad_up = self.gate_RF[rows], self.up_RF[rows]
                _swiglu_gradient(grad_gate, grad_up, inner, grad_inner, work, gate_R[rows], grad_gate_R[rows])
                run.matmul(grad_gate, gate[expert], grad_rows[rows])
                run.matmul(grad_up, up[expert], grad_rows[rows], True)
                pairs = ((grad_gate, x_rD), (grad_up, x_rD), (grad_rD, inner))
                for weight, pair in zip(weights, pairs, strict=True):
                    if weight is not None:
                        weight.add(segment, rows, *pair)

        threads.run(_segments(self.counts_E), compute)
        self.gate_RF = self.up_RF = None
        add_rows(grad_rows, self.row_Nk, None, grad_x)
        found = [None if weight is None else weight.total() for weight in weights]
        return result, Tensor.from_numpy(grad_gate_R[self.row_Nk]), *found


class _WeightGradient:
    """The gradient of all experts' weights, added up segment by segment: the same bits for any number of threads."""

    def __init__(self, counts_E: np.ndarray, shape: tuple[int, int]) -> None:
        self.tensor, self.array = empty(len(counts_E), *shape)
        self.array[counts_E == 0] = 0
        self.other_segments: dict[tuple[int, int], np.ndarray] = {}

    def add(self, segment: tuple[int, int, slice], rows: slice, left: np.ndarray, right: np.ndarray) -> None:
        """Adds left.T @ right of some of the segment's rows."""
        expert, number, every = segment
        is_first = rows.start == every.start
        if number and is_first:
            self.other_segments[expert, number] = np.empty(self.array.shape[1:], np.float32)
        operators().matmul(left.T, right, self.of_segment(expert, number), not is_first)

    def of_segment(self, expert: int, number: int) -> np.ndarray:
        return self.other_segments[expert, number] if number else self.array[expert]

    def total(self) -> Tensor:
        for (expert, _), part in sorted(self.other_segments.items(), key=lambda item: item[0]):
            self.array[expert] += part
        return self.tensor


def _segments(counts_E: np.ndarray) -> Iterator[tuple[int, int, slice]]:
    """Experts, the number of the segment, and its rows: so many that an expert with most of the rows has work for
    several threads."""
    for expert, rows in expert_rows(counts_E):
        size = rows.stop - rows.start
        number = min(_MOST_SEGMENTS, -(-size // _MOST_ROWS))
        for segment in range(number):
            first, last = (rows.start + size * place // number for place in (segment, segment + 1))
            yield expert, segment, slice(first, last)


def _swiglu_gradient(
    gate: np.ndarray,
    up: np.ndarray,
    inner: np.ndarray,
    grad: np.ndarray,
    work: np.ndarray,
    weight_r: np.ndarray,
    grad_weight_r: np.ndarray,
) -> None:
    """Backward through weight_r * silu(gate) * up.

    Args:
        gate, up: Replaced by their gradients.
        inner: Receives the input of the next product.
        grad: Gradient of `inner`; overwritten, as `work` is.
        weight_r, grad_weight_r: A factor for each row; receives the gradient of the factor.
    """
    run = operators()
    run.silu(gate, work)
    np.multiply(work, up, out=inner)  # without the factor
    np.einsum("rf,rf->r", inner, grad, out=grad_weight_r)
    inner *= weight_r[:, None]
    grad *= weight_r[:, None]
    up *= grad
    run.silu_gradient(gate, up, gate)
    np.multiply(grad, work, out=up)
