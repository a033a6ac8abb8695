"""The embedding of tokens, its mapping, and the merge of an MTP module, on arrays, forward and backward.

Where tensor-parallel ranks shard the vocabulary, each looks up its tokens, and they add up the rows.

Legend: N tokens, V vocabulary of this rank, E width of the embedding, D hidden, R rank of an adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.memory import empty, store
from trainer.arrays.operators import operators
from trainer.arrays.stored import StoredMatrix
from trainer.arrays.sublayer import CpuLinear
from trainer.arrays.tiles import CpuRmsNorm
from trainer.models.spec.names import EMBEDDING, MAPPING_IN, adapter_names
from trainer.parallel.sharding import shard_range

if TYPE_CHECKING:
    from trainer.arrays.tiles import Arrays, Gradients, Scratch, SublayerCall, Tile
    from trainer.models.spec.model import AdapterSpec, NormSpec
    from trainer.parallel.tensor import TensorParallel

_FEW_TIMES = 8  # that a token of a batch comes


def embedding_rows(weight_VE: np.ndarray | StoredMatrix, ids_N: np.ndarray, out_NE: np.ndarray) -> None:
    """Writes the rows of the tokens; the matrix has all of them."""
    if isinstance(weight_VE, StoredMatrix):
        weight_VE.look_up(ids_N, out_NE)
        return
    np.take(weight_VE, ids_N, axis=0, out=out_NE, mode="clip")  # other modes copy `out`


def add_embedding_gradient(total_VE: np.ndarray, ids_N: np.ndarray, grad_NE: np.ndarray) -> None:
    """Adds the gradient of the matrix to `total_VE`: the sums over each token's rows, in their order."""
    order_N = np.argsort(ids_N, kind="stable")
    ids_U, first_U, counts_U = np.unique(ids_N[order_N], return_index=True, return_counts=True)
    sums_UE = grad_NE[order_N[first_U]]
    # Most tokens come a few times: this adds the second row of each token, then the third. np.add.reduceat would take
    # 20 times as long.
    for time in range(1, min(_FEW_TIMES, counts_U.max(initial=0))):
        again = np.flatnonzero(counts_U > time)
        sums_UE[again] += grad_NE[order_N[first_U[again] + time]]
    for place in np.flatnonzero(counts_U > _FEW_TIMES):
        remaining_n = order_N[first_U[place] + _FEW_TIMES : first_U[place] + counts_U[place]]
        sums_UE[place] += grad_NE[remaining_n].sum(0)
    total_VE[ids_U] += sums_UE


def embedding_gradient(shape: tuple[int, ...], ids_N: np.ndarray, grad_NE: np.ndarray) -> np.ndarray:
    """Returns the gradient of a matrix of this shape, [V, E]."""
    out_VE = empty(*shape)
    out_VE[...] = 0
    add_embedding_gradient(out_VE, ids_N, grad_NE)
    return out_VE


class CpuEmbedding:
    """Looks tokens up.

    Args:
        tensor: The tensor-parallel ranks, which shard the vocabulary; None: this rank has all of it.
        vocabulary: Size of the vocabulary of all ranks; not needed without `tensor`.
        adapter: Adds scale B A[:, token] to each row (Hu et al. 2021, equation 3); not with `tensor`.
    """

    def __init__(
        self, tensor: TensorParallel | None = None, vocabulary: int = 0, adapter: AdapterSpec | None = None
    ) -> None:
        self.tensor = tensor
        self.adapter = adapter
        self.lora_a, self.lora_b = adapter_names(EMBEDDING.removesuffix(".weight"))
        self.first_token = 0
        if tensor is not None:
            self.first_token = shard_range(vocabulary, tensor.group.rank, tensor.group.size).start

    def forward(self, call: SublayerCall, ids_N: np.ndarray) -> np.ndarray:
        """Returns the embeddings, [N, E]; with sequence parallelism only of this rank's rows."""
        return self.look_up(call.weights, ids_N, empty(len(ids_N), call.weights[EMBEDDING].shape[1]))

    def look_up(self, weights: Arrays, ids_N: np.ndarray, out_NE: np.ndarray) -> np.ndarray:
        """Returns the embeddings in `out_NE`, or with sequence parallelism those of this rank's rows in a new array."""
        weight_VE = weights[EMBEDDING]
        if self.tensor is None:
            embedding_rows(weight_VE, ids_N, out_NE)
            if self.adapter is not None:
                operators().matmul(self._low_rank(weights, ids_N), weights[self.lora_b].T, out_NE, True)
            return out_NE
        place_N, inside_N = self._local(ids_N, len(weight_VE))
        embedding_rows(weight_VE, place_N, out_NE)
        out_NE *= inside_N[:, None]
        return self.tensor.reduce_partial(out_NE)

    def _low_rank(self, weights: Arrays, ids_N: np.ndarray) -> np.ndarray:
        """Returns scale A[:, token] of each token, [N, R]."""
        assert self.adapter is not None
        return np.take(weights[self.lora_a], ids_N, axis=1, mode="clip").T * np.float32(self.adapter.scale)

    def backward(self, call: SublayerCall, ids_N: np.ndarray, grad_NE: np.ndarray) -> tuple[Gradients]:
        """Returns the gradients of the matrix and its adapter; token ids have no gradient."""
        if self.adapter is not None:
            return (self._adapter_gradients(call, ids_N, grad_NE),)
        shape = call.weights[EMBEDDING].shape
        if self.tensor is not None:
            grad_NE = self.tensor.gather_tokens(grad_NE)
            place_N, inside_N = self._local(ids_N, shape[0])
            ids_N = place_N[inside_N]
            grad_NE = grad_NE[inside_N]
        # The head may have the same matrix, whose gradient is there already.
        total_VE = call.gradients.totals.get(EMBEDDING)
        if total_VE is None:
            total_VE = embedding_gradient(shape, ids_N, grad_NE)
        else:
            add_embedding_gradient(total_VE, ids_N, grad_NE)
        return ({EMBEDDING: total_VE},)

    def _adapter_gradients(self, call: SublayerCall, ids_N: np.ndarray, grad_NE: np.ndarray) -> Gradients:
        """Returns the gradients of the trained ones of the matrix, A and B."""
        assert self.adapter is not None
        weights = call.weights
        gradients: Gradients = {}
        if call.gradients.needs(EMBEDDING):
            gradients[EMBEDDING] = embedding_gradient(weights[EMBEDDING].shape, ids_N, grad_NE)
        if call.gradients.needs(self.lora_a):
            grad_NR = np.empty((len(ids_N), self.adapter.rank), np.float32)
            operators().matmul(grad_NE, weights[self.lora_b], grad_NR)
            grad_NR *= np.float32(self.adapter.scale)
            rank, tokens = weights[self.lora_a].shape
            gradients[self.lora_a] = empty(rank, tokens)
            gradients[self.lora_a][...] = embedding_gradient((tokens, rank), ids_N, grad_NR).T
        if call.gradients.needs(self.lora_b):
            gradients[self.lora_b] = empty(*weights[self.lora_b].shape)
            operators().matmul(grad_NE.T, self._low_rank(weights, ids_N), gradients[self.lora_b])
        return gradients

    def _local(self, ids_N: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids in this rank's vocabulary, 0 for tokens of other ranks, and which tokens it has."""
        place_N = ids_N - self.first_token
        inside_N = (place_N >= 0) & (place_N < size)
        return place_N * inside_N, inside_N


class CpuMapping:
    """Maps embeddings of another width to the residual stream."""

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.linear = CpuLinear("mapping", weight=MAPPING_IN)

    def forward(self, call: SublayerCall, x_NE: np.ndarray) -> np.ndarray:
        """Returns the residual stream, [N, D]."""
        out_ND = empty(len(x_NE), len(call.weights[MAPPING_IN]))
        self.map_rows(call, x_NE, out_ND)
        return out_ND

    def map_rows(self, call: SublayerCall, x_NE: np.ndarray, out_ND: np.ndarray) -> None:
        """Writes the residual stream to `out_ND`."""
        dtype = call.weights[MAPPING_IN].dtype

        def compute(tile: Tile) -> None:
            """Multiplies the rows of a tile by the matrix."""
            self.linear.forward(call, tile.cast(x_NE[tile.rows], dtype), out_ND[tile.rows], tile)

        self.scratch.run(len(x_NE), compute)

    def backward(self, call: SublayerCall, x_NE: np.ndarray, grad_ND: np.ndarray) -> tuple[np.ndarray, Gradients]:
        """Returns the gradients of the embeddings and, if it is trained, of the matrix."""
        out_NE = empty(*x_NE.shape)
        self.linear.backward_rows(call, grad_ND, x_NE, out_NE, self.scratch)
        return out_NE, call.gradients.compute()


class CpuMerge:
    """Makes the input of an MTP module's layer: W [norm(embedding of a later token); norm(final norm(hidden state))].

    `trainer.models.block` has the formulas. The weights are "norm", that of the final norm, and `MTP_WEIGHTS`.
    """

    def __init__(self, hidden: int, norm: NormSpec, scratch: Scratch) -> None:
        self.norm = CpuRmsNorm(norm)
        self.hidden = hidden
        self.scratch = scratch
        self.linear = CpuLinear("eh_proj")

    def forward(self, call: SublayerCall, embedded_ND: np.ndarray, x_ND: np.ndarray) -> np.ndarray:
        """Returns the input of the layer, [N, D]."""
        out_ND = empty(*x_ND.shape)
        dtype = call.weights[self.linear.weight].dtype

        def compute(tile: Tile) -> None:
            """Multiplies the joined rows of a tile, [n, 2 D], by the projection."""
            both_nC = tile.cast(self._both(call.weights, embedded_ND, x_ND, tile), dtype)
            self.linear.forward(call, both_nC, out_ND[tile.rows], tile)

        self.scratch.run(len(x_ND), compute)
        return out_ND

    def _both(self, weights: Arrays, embedded_ND: np.ndarray, x_ND: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns the input of the matrix for the rows of a tile, [n, 2 D]."""
        both_nC = tile.take(2 * self.hidden)
        both_nC[:, : self.hidden] = self.norm.apply(embedded_ND[tile.rows], weights["enorm.weight"], tile)
        final_nD = self.norm.apply(x_ND[tile.rows], weights["norm"], tile)
        both_nC[:, self.hidden :] = self.norm.apply(final_nD, weights["hnorm.weight"], tile)
        return both_nC

    def backward(
        self, call: SublayerCall, embedded_ND: np.ndarray, x_ND: np.ndarray, grad_ND: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Gradients]:
        """Returns the gradients of the embeddings, of the hidden states and of the trained weights."""
        dtype = call.weights[self.linear.weight].dtype
        embedded_grad_ND = empty(*x_ND.shape)
        x_grad_ND = empty(*x_ND.shape)
        both_NC = empty(len(x_ND), 2 * self.hidden, dtype=dtype)
        factor_ND = empty(*grad_ND.shape, dtype=dtype)

        def compute(tile: Tile) -> None:
            """Computes the gradients of the embeddings and of x for a tile, through their norms."""
            store(self._both(call.weights, embedded_ND, x_ND, tile), both_NC[tile.rows])
            store(grad_ND[tile.rows], factor_ND[tile.rows])
            grad_nC = tile.take(2 * self.hidden)
            self.linear.backward(call, factor_ND[tile.rows], grad_nC, tile)
            embedded_grad_nD = embedded_grad_ND[tile.rows]
            x_grad_nD = x_grad_ND[tile.rows]
            embedded_grad_nD[...] = grad_nC[:, : self.hidden]
            self.norm.backward(call, "enorm.weight", embedded_ND[tile.rows], embedded_grad_nD, tile)
            x_grad_nD[...] = grad_nC[:, self.hidden :]
            final_nD = self.norm.apply(x_ND[tile.rows], call.weights["norm"], tile)
            self.norm.backward(call, "hnorm.weight", final_nD, x_grad_nD, tile)
            self.norm.backward(call, "norm", x_ND[tile.rows], x_grad_nD, tile)

        self.scratch.run(len(x_ND), compute)
        self.linear.add_gradients(call, factor_ND, both_NC)
        return embedded_grad_ND, x_grad_ND, call.gradients.compute()
