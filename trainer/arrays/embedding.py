"""The embedding of tokens, its mapping, and the merge of an MTP module, on arrays, forward and backward.

Where tensor-parallel ranks shard the vocabulary, each looks up its tokens, and they add up the rows.

Legend: N tokens, V vocabulary of this rank, E width of the embedding, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.memory import empty
from trainer.arrays.onednn import operators
from trainer.arrays.tiles import RmsNorm, WeightGradients
from trainer.models.spec.names import EMBEDDING, MAPPING_IN
from trainer.parallel.sharding import range_of_rank

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mindspore import Tensor

    from trainer.arrays.tiles import Arrays, Gradients, Scratch, Tile
    from trainer.parallel.tensor import TensorParallel

_FEW_TIMES = 8  # that a token of a batch comes


def embedding_rows(weight_VE: np.ndarray, ids_N: np.ndarray, out_NE: np.ndarray) -> None:
    """Writes the rows of the tokens, which the matrix has."""
    np.take(weight_VE, ids_N, axis=0, out=out_NE, mode="clip")  # other modes copy `out`


def embedding_gradient(shape: tuple[int, int], ids_N: np.ndarray, grad_NE: np.ndarray) -> Tensor:
    """Returns the gradient of the matrix, [V, E]: the sums over each token's rows, in their order."""
    result, out_VE = empty(*shape)
    out_VE[...] = 0
    order_N = np.argsort(ids_N, kind="stable")
    ids, first, counts = np.unique(ids_N[order_N], return_index=True, return_counts=True)
    out_VE[ids] = grad_NE[order_N[first]]
    # Most tokens come a few times: the second time of each of them, then the third. np.add.reduceat takes 20 times as
    # long.
    for time in range(1, min(_FEW_TIMES, counts.max(initial=0))):
        again = np.flatnonzero(counts > time)
        out_VE[ids[again]] += grad_NE[order_N[first[again] + time]]
    for place in np.flatnonzero(counts > _FEW_TIMES):
        left_n = order_N[first[place] + _FEW_TIMES : first[place] + counts[place]]
        out_VE[ids[place]] += grad_NE[left_n].sum(0)
    return result


class CpuEmbedding:
    """Looks tokens up.

    Args:
        vocabulary: Tokens of all ranks; of one process the matrix tells.
    """

    def __init__(self, tensor: TensorParallel | None = None, vocabulary: int = 0) -> None:
        self.tensor = tensor
        self.first_token = 0
        if tensor is not None:
            self.first_token = range_of_rank(vocabulary, tensor.group.rank, tensor.group.size).start

    def forward(self, weights: Arrays, ids_N: np.ndarray) -> Tensor:
        """Returns the embeddings, [N, E]; with sequence parallelism those of the rows that this rank has."""
        result, out_NE = empty(len(ids_N), weights[EMBEDDING].shape[1])
        rows_NE = self.look_up(weights, ids_N, out_NE)
        if rows_NE is not out_NE:
            result, out_NE = empty(*rows_NE.shape)
            out_NE[...] = rows_NE
        return result

    def look_up(self, weights: Arrays, ids_N: np.ndarray, out_NE: np.ndarray) -> np.ndarray:
        """Returns the embeddings, as `forward`: in `out_NE`, or with sequence parallelism in memory of their own."""
        weight_VE = weights[EMBEDDING]
        if self.tensor is None:
            embedding_rows(weight_VE, ids_N, out_NE)
            return out_NE
        place_N, inside_N = self._local(ids_N, len(weight_VE))
        embedding_rows(weight_VE, place_N, out_NE)
        out_NE *= inside_N[:, None]
        return self.tensor.collect(out_NE)

    def backward(self, weights: Arrays, ids_N: np.ndarray, grad_NE: np.ndarray) -> Gradients:
        """Returns the gradient of the matrix."""
        shape = weights[EMBEDDING].shape
        if self.tensor is None:
            return {EMBEDDING: embedding_gradient(shape, ids_N, grad_NE)}
        grad_NE = self.tensor.gather(grad_NE)
        place_N, inside_N = self._local(ids_N, shape[0])
        return {EMBEDDING: embedding_gradient(shape, place_N[inside_N], grad_NE[inside_N])}

    def _local(self, ids_N: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns places in this rank's vocabulary, 0 for tokens of other ranks, and which tokens it has."""
        place_N = ids_N - self.first_token
        inside_N = (place_N >= 0) & (place_N < size)
        return place_N * inside_N, inside_N


class CpuMapping:
    """Maps embeddings of another width to the residual stream."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch

    def forward(self, weights: Arrays, x_NE: np.ndarray) -> Tensor:
        """Returns the residual stream, [N, D]."""
        result, out_ND = empty(len(x_NE), len(weights[MAPPING_IN]))
        self.map_rows(weights, x_NE, out_ND)
        return result

    def map_rows(self, weights: Arrays, x_NE: np.ndarray, out_ND: np.ndarray) -> None:
        """Writes the residual stream to `out_ND`."""
        mapping_DE = weights[MAPPING_IN]
        self.scratch.run(
            len(x_NE),
            lambda tile: tile.project(tile.narrowed(x_NE[tile.rows], mapping_DE.dtype), mapping_DE, out_ND[tile.rows]),
        )

    def backward(
        self, weights: Arrays, x_NE: np.ndarray, grad_ND: np.ndarray, trained: Iterable[str]
    ) -> tuple[Tensor, Gradients]:
        """Returns the gradients of the embeddings and of the matrix, where it is trained."""
        gradients = WeightGradients(trained)
        mapping_DE = weights[MAPPING_IN]
        dtype = mapping_DE.dtype
        result, out_NE = empty(*x_NE.shape)
        factor_ND = empty(*grad_ND.shape, dtype=dtype)[1]
        narrow_NE = empty(*x_NE.shape, dtype=dtype)[1]

        def compute(tile: Tile) -> None:
            factor_ND[tile.rows] = tile.narrowed(grad_ND[tile.rows], dtype)
            narrow_NE[tile.rows] = tile.narrowed(x_NE[tile.rows], dtype)
            operators().matmul(factor_ND[tile.rows], mapping_DE, out_NE[tile.rows])

        self.scratch.run(len(grad_ND), compute)
        gradients.add(MAPPING_IN, factor_ND, narrow_NE)
        return result, gradients.compute()


class CpuMerge:
    """The input of an MTP module's layer: W [norm(embedding of a later token); norm(final norm(hidden state))], see
    `trainer.models.block`. The weights are "norm", that of the final norm, and `MTP_WEIGHTS`."""

    def __init__(self, hidden: int, eps: float, scratch: Scratch) -> None:
        self.norm = RmsNorm(hidden, eps)
        self.hidden = hidden
        self.scratch = scratch

    def forward(self, weights: Arrays, embedded_ND: np.ndarray, x_ND: np.ndarray) -> Tensor:
        """Returns the input of the layer, [N, D]."""
        result, out_ND = empty(*x_ND.shape)
        matrix_DC = weights["eh_proj.weight"]

        def compute(tile: Tile) -> None:
            both_nC = self._both(weights, embedded_ND, x_ND, tile)
            operators().matmul(tile.narrowed(both_nC, matrix_DC.dtype), matrix_DC.T, out_ND[tile.rows])

        self.scratch.run(len(x_ND), compute)
        return result

    def _both(self, weights: Arrays, embedded_ND: np.ndarray, x_ND: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns what the matrix multiplies, [n, 2 D]."""
        both_nC = tile.take(2 * self.hidden)
        both_nC[:, : self.hidden] = self._normed(embedded_ND[tile.rows], weights["enorm.weight"], tile)
        final_nD = self._normed(x_ND[tile.rows], weights["norm"], tile)
        both_nC[:, self.hidden :] = self._normed(final_nD, weights["hnorm.weight"], tile)
        return both_nC

    def _normed(self, x_nD: np.ndarray, weight_D: np.ndarray, tile: Tile) -> np.ndarray:
        out_nD = tile.take(self.hidden)
        self.norm(x_nD, weight_D, self.norm.scales(x_nD), out_nD)
        return out_nD

    def backward(
        self, weights: Arrays, embedded_ND: np.ndarray, x_ND: np.ndarray, grad_ND: np.ndarray, trained: Iterable[str]
    ) -> tuple[Tensor, Tensor, Gradients]:
        """Returns the gradients of the embeddings, of the hidden states and of the trained weights."""
        gradients = WeightGradients(trained)
        matrix_DC = weights["eh_proj.weight"]
        dtype = matrix_DC.dtype
        of_embedded, of_embedded_ND = empty(*x_ND.shape)
        of_x, of_x_ND = empty(*x_ND.shape)
        both_NC = empty(len(x_ND), 2 * self.hidden, dtype=dtype)[1]
        factor_ND = empty(*grad_ND.shape, dtype=dtype)[1]

        def through(name: str, x_nD: np.ndarray, grad_nD: np.ndarray, tile: Tile) -> None:
            work_nD = tile.take(self.hidden)
            scale_n = self.norm.scales(x_nD)
            gradients.add_tile(name, tile, self.norm.gradient(x_nD, weights[name], scale_n, grad_nD, work_nD))

        def compute(tile: Tile) -> None:
            both_NC[tile.rows] = tile.narrowed(self._both(weights, embedded_ND, x_ND, tile), dtype)
            factor_ND[tile.rows] = tile.narrowed(grad_ND[tile.rows], dtype)
            grad_nC = tile.take(2 * self.hidden)
            operators().matmul(factor_ND[tile.rows], matrix_DC, grad_nC)
            of_embedded_nD, of_x_nD = of_embedded_ND[tile.rows], of_x_ND[tile.rows]
            of_embedded_nD[...] = grad_nC[:, : self.hidden]
            through("enorm.weight", embedded_ND[tile.rows], of_embedded_nD, tile)
            of_x_nD[...] = grad_nC[:, self.hidden :]
            through("hnorm.weight", self._normed(x_ND[tile.rows], weights["norm"], tile), of_x_nD, tile)
            through("norm", x_ND[tile.rows], of_x_nD, tile)

        self.scratch.run(len(x_ND), compute)
        gradients.add("eh_proj.weight", factor_ND, both_NC)
        return of_embedded, of_x, gradients.compute()
