"""Queries, keys and values of multi-head latent attention on arrays (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

The formulas are in `trainer.models.latent_attention`. The latent vectors, which all heads share, are computed for the
rows of the residual stream that the rank has. Tensor-parallel ranks gather them, and make their heads from them.

Legend: as in tiles.py; L key_value_rank, P nope_size, R rope_size, H heads, v value size, C = H * (P + R), G columns
that ranks gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.attention.cache import attend_cached
from trainer.arrays.memory import downcast_if_needed, empty, narrow_like, store
from trainer.arrays.sublayer import CpuLinear
from trainer.arrays.tiles import CpuRmsNorm
from trainer.models.spec.model import NormSpec
from trainer.models.spec.names import INPUT_NORM

if TYPE_CHECKING:
    from trainer.arrays.attention.cache import KVCache
    from trainer.arrays.attention.positions import CpuRotary, TokenPositions
    from trainer.arrays.sublayer import SequenceParallelComm
    from trainer.arrays.tiles import Scratch, SublayerCall, Tile
    from trainer.models.spec.model import AttentionSpec

_QUERY_NORM = "self_attn.q_a_layernorm.weight"
_LATENT_NORM = "self_attn.kv_a_layernorm.weight"


def _apply(norm: CpuRmsNorm | None, call: SublayerCall, weight: str, x_nQ: np.ndarray, tile: Tile) -> np.ndarray:
    if norm is None:
        return x_nQ
    return norm.apply(x_nQ, call.weights[weight], tile)


class LatentProjections:
    """Makes queries, keys and values of all heads from latent vectors; has the methods of `HeadProjections`."""

    def __init__(
        self, spec: AttentionSpec, rotary: CpuRotary, scratch: Scratch, tensor: SequenceParallelComm | None
    ) -> None:
        latent = spec.latent
        assert latent is not None  # `CpuAttention` chooses this class by it
        self.rotary = rotary
        self.window = spec.window
        self.scratch = scratch
        self.tensor = tensor
        self.gathers = tensor is not None and tensor.sequence_parallel
        self.heads = spec.heads
        self.value_size = spec.value_size
        self.nope_size = latent.nope_size
        self.rope_size = latent.rope_size
        self.head_size = spec.head_size
        self.rank = latent.key_value_rank
        self.scale = np.float32(spec.scale)
        self.norm = CpuRmsNorm(spec.norm)
        self.latent_norm: CpuRmsNorm | None = None
        if latent.normed:
            self.latent_norm = CpuRmsNorm(NormSpec(latent.eps))
        self.query_norm: CpuRmsNorm | None = None
        self.has_query_latent = latent.query_rank is not None
        self.query_width = spec.hidden
        query_name = "self_attn.q_proj"
        if latent.query_rank is not None:
            self.query_width = latent.query_rank
            query_name = "self_attn.q_b_proj"
            if latent.normed:
                self.query_norm = CpuRmsNorm(NormSpec(latent.eps))

        def linear(name: str) -> CpuLinear:
            """Returns the product with the weight of a projection, and with its adapter if it has one."""
            return CpuLinear(name, spec.adapters.get(name))

        self.query_down = linear("self_attn.q_a_proj")
        self.query = linear(query_name)
        self.down = linear("self_attn.kv_a_proj_with_mqa")
        self.key_value = linear("self_attn.kv_b_proj")

    def forward(
        self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, q_NC: np.ndarray, k_NC: np.ndarray,
        v_NV: np.ndarray,
    ) -> None:  # fmt: skip
        """Writes rotated and scaled queries, rotated keys, and values."""
        dtype = q_NC.dtype
        rotation_N1h = positions.select_rotation(self.window)
        if not self.gathers:

            def compute(tile: Tile) -> None:
                """Computes the queries, keys and values of a tile's tokens."""
                made = self._latents(call, x_ND, tile, dtype)
                self._heads(call, *made, rotation_N1h, q_NC, k_NC, v_NV, tile)

            self.scratch.run(len(x_ND), compute)
            return
        gathered_NG = self._gather(call, x_ND, dtype)

        def compute_heads(tile: Tile) -> None:
            """Computes queries, keys and values from the gathered latent vectors."""
            latents = self._split(gathered_NG[tile.rows])
            self._heads(call, *latents, rotation_N1h, q_NC, k_NC, v_NV, tile)

        self.scratch.run(len(gathered_NG), compute_heads)

    def _latents(
        self, call: SublayerCall, x_ND: np.ndarray, tile: Tile, dtype: type
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns three arrays for a tile: the input of the queries, the latent vector, and the shared key.

        The key is not rotated yet. The arrays have the dtype of the products.
        """
        x_nD = x_ND[tile.rows]
        scale_n = self.norm.scales(x_nD)
        y_nD = tile.take(x_nD.shape[1], dtype)
        self.norm.write(x_nD, call.weights[INPUT_NORM], scale_n, y_nD, tile)
        if call.save:
            call.saved["scale"][tile.rows, 0] = scale_n
        queries_from = y_nD
        if self.has_query_latent:
            if call.save:
                plain_nQ = call.saved["query_latent"][tile.rows]
            else:
                plain_nQ = tile.take(self.query_width, dtype)
            self.query_down.forward(call, y_nD, plain_nQ, tile)
            queries_from = _apply(self.query_norm, call, _QUERY_NORM, plain_nQ, tile)
        down = tile.take(self.rank + self.rope_size, dtype)
        self.down.forward(call, y_nD, down, tile)
        plain_nL = tile.take(self.rank, dtype)
        if call.save:
            plain_nL = call.saved["latent"][tile.rows]
        plain_nL[...] = down[:, : self.rank]
        latent_nL = _apply(self.latent_norm, call, _LATENT_NORM, plain_nL, tile)
        return queries_from, latent_nL, down[:, self.rank :]

    def _gather(self, call: SublayerCall, x_ND: np.ndarray, dtype: type) -> np.ndarray:
        """Returns the results of `_latents` for the rows of all ranks, [N, G]."""
        assert self.tensor is not None
        local_nG = empty(len(x_ND), self.query_width + self.rank + self.rope_size, dtype=dtype)

        def compute(tile: Tile) -> None:
            """Writes the latent vectors of a tile of this rank's tokens."""
            for part_nX, made_nX in zip(
                self._split(local_nG[tile.rows]), self._latents(call, x_ND, tile, dtype), strict=True
            ):
                part_nX[...] = made_nX

        self.scratch.run(len(x_ND), compute)
        gathered_NG = self.tensor.gather_tokens(local_nG)
        if call.save:
            call.saved["normed"] = gathered_NG
        return gathered_NG

    def _split(self, x_NG: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns views of the columns of gathered rows: the three results of `_latents`."""
        end = self.query_width + self.rank
        return x_NG[:, : self.query_width], x_NG[:, self.query_width : end], x_NG[:, end:]

    def _heads(
        self, call: SublayerCall, queries_from: np.ndarray, latent_nL: np.ndarray, key_nR: np.ndarray,
        rotation_N1h: np.ndarray, q_NC: np.ndarray, k_NC: np.ndarray, v_NV: np.ndarray, tile: Tile,
    ) -> None:  # fmt: skip
        rotation_n1h = rotation_N1h[tile.rows]
        q_nC = q_NC[tile.rows]
        downcast_if_needed(self._queries(call, queries_from, rotation_n1h, q_nC, tile), q_nC)
        key_nR = tile.cast(self._rotated_key(key_nR, rotation_n1h, tile), q_nC.dtype)
        both = tile.take(self.heads * (self.nope_size + self.value_size), q_nC.dtype)
        self.key_value.forward(call, latent_nL, both, tile)
        both = self._by_head(both)
        keys = self._by_head(k_NC[tile.rows])
        keys[..., : self.nope_size] = both[..., : self.nope_size]
        keys[..., self.nope_size :] = key_nR[:, None]
        self._by_head(v_NV[tile.rows])[...] = both[..., self.nope_size :]

    def _queries(
        self, call: SublayerCall, queries_from: np.ndarray, rotation_n1h: np.ndarray, out_nC: np.ndarray, tile: Tile
    ) -> np.ndarray:
        """Returns rotated and scaled queries in float32, in `out_nC` if it is float32."""
        wide_nC = tile.float32_like(out_nC)
        self.query.forward(call, queries_from, wide_nC, tile)
        self.rotary.apply(self._by_head(wide_nC)[..., self.nope_size :], rotation_n1h)
        wide_nC *= self.scale
        return wide_nC

    def _rotated_key(self, key_nR: np.ndarray, rotation_n1h: np.ndarray, tile: Tile) -> np.ndarray:
        """Returns the rotated key that all heads share, float32."""
        wide_nR = tile.take(self.rope_size)
        wide_nR[...] = tile.to_float32(np.ascontiguousarray(key_nR))
        self.rotary.apply(wide_nR[:, None], rotation_n1h)
        return wide_nR

    def attend_cached(
        self, call: SublayerCall, x_ND: np.ndarray, rotation_N1h: np.ndarray, layer: int, cache: KVCache,
        mask: np.ndarray | None, tile: Tile,
    ) -> np.ndarray:  # fmt: skip
        """Returns the results of the heads for new tokens, [N, V], over the cache, to which it adds these tokens.

        The cache holds only latent vectors and rotated keys. Keys and values of the cached tokens are never made:
        q_nope W_k c = (q_nope W_k) c, so the latent vectors serve as one key of all heads, and W_v multiplies their
        weighted sum (DeepSeek-V2, section 2.1.2).
        """
        queries_from, latent_nL, key_nR = self._latents(call, x_ND, tile, np.float32)
        tokens = len(x_ND)
        q_NC = self._queries(call, queries_from, rotation_N1h, tile.take(self.heads * self.head_size), tile)
        matrix = self._by_head(call.weights[self.key_value.weight].T).transpose(1, 2, 0)
        plain, rotated = np.split(self._by_head(q_NC), [self.nope_size], axis=2)
        absorbed = (plain.transpose(1, 0, 2) @ matrix[:, : self.nope_size]).transpose(1, 0, 2)
        queries = np.concatenate((absorbed, rotated), 2).reshape(tokens, -1)
        rotated_key_nR = self._rotated_key(key_nR, rotation_N1h, tile)
        latents, keys = cache.update(layer, (latent_nL, rotated_key_nR))
        sums = attend_cached(queries, np.concatenate((latents, keys), -1), latents, mask)
        sums = sums.reshape(tokens, self.heads, self.rank).transpose(1, 0, 2)
        values = sums @ matrix[:, self.nope_size :].transpose(0, 2, 1)
        return values.transpose(1, 0, 2).reshape(tokens, -1)

    def _by_head(self, x_nC: np.ndarray) -> np.ndarray:
        return x_nC.reshape(len(x_nC), self.heads, -1)

    def backward(
        self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, grads: Sequence[np.ndarray],
        grad_ND: np.ndarray, out_ND: np.ndarray,
    ) -> None:  # fmt: skip
        """Writes the gradient of x to `out_ND` and adds those of the weights.

        Args:
            grads: Gradients of queries, keys and values; overwritten.
            grad_ND: Gradient of the residual stream after the sublayer.
        """
        dtype = call.saved["q"].dtype
        pass_ = _LatentBackward(self, call, x_ND, grads[0], dtype)
        if self.tensor is None:

            def compute(tile: Tile) -> None:
                """Computes the gradient of x for a tile, from its heads back to its rows."""
                latents = pass_.recompute_inputs(tile)
                grad_nG = tile.take(self.query_width + self.rank + self.rope_size)
                pass_.backward_heads(positions, grads, latents[:2], grad_nG, tile)
                pass_.backward_latents(grad_nG, latents[2], grad_ND, out_ND, tile)

            self.scratch.run(len(x_ND), compute)
        else:
            gathered_NG = call.saved.get("normed")  # None where ranks have all rows of the residual stream
            grad_NG = empty(len(grads[0]), self.query_width + self.rank + self.rope_size)

            def compute_heads(tile: Tile) -> None:
                """Computes the gradients of a tile's latent vectors."""
                if gathered_NG is None:
                    latents = pass_.recompute_inputs(tile)
                else:
                    latents = self._split(gathered_NG[tile.rows])
                pass_.backward_heads(positions, grads, latents[:2], grad_NG[tile.rows], tile)

            def compute_latents(tile: Tile) -> None:
                """Computes the gradient of x for a tile from the summed gradients of its latent vectors."""
                latents = pass_.recompute_inputs(tile)
                pass_.backward_latents(sums_nG[tile.rows], latents[2], grad_ND, out_ND, tile)

            self.scratch.run(len(grad_NG), compute_heads)
            sums_nG = self.tensor.reduce_partial(grad_NG)
            self.scratch.run(len(x_ND), compute_latents)
        pass_.add_gradients()


class _LatentBackward:
    """One backward pass. It keeps the inputs and gradients of the four matrices, [N, ...], for their gradients."""

    def __init__(
        self, of: LatentProjections, call: SublayerCall, x_ND: np.ndarray, grad_q_NC: np.ndarray, dtype: type
    ) -> None:
        self.of = of
        self.call = call
        self.x_ND = x_ND
        rows = len(grad_q_NC)
        stream = len(x_ND)
        self.y_ND = empty(*x_ND.shape, dtype=dtype)
        self.down_grad = empty(stream, of.rank + of.rope_size, dtype=dtype)
        self.key_value_grad = empty(rows, of.heads * (of.nope_size + of.value_size), dtype=dtype)
        self.query_grad = narrow_like(grad_q_NC, dtype)
        self.latent_NL = empty(rows, of.rank, dtype=dtype)
        self.queries_from = self.y_ND
        if of.has_query_latent or of.gathers:
            self.queries_from = empty(rows, of.query_width, dtype=dtype)
        self.query_down_grad: np.ndarray | None = None
        if of.has_query_latent:
            self.query_down_grad = empty(stream, of.query_width, dtype=dtype)

    def recompute_inputs(self, tile: Tile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Recomputes three arrays for a tile: the input of the queries, the latent vector, and the normed residual
        stream."""
        of = self.of
        call = self.call
        y_nD = self.y_ND[tile.rows]
        scale_n = call.saved["scale"][tile.rows, 0]
        of.norm.write(self.x_ND[tile.rows], call.weights[INPUT_NORM], scale_n, y_nD, tile)
        queries_from = y_nD
        if of.has_query_latent:
            queries_from = _apply(of.query_norm, call, _QUERY_NORM, call.saved["query_latent"][tile.rows], tile)
        latent_nL = _apply(of.latent_norm, call, _LATENT_NORM, call.saved["latent"][tile.rows], tile)
        return queries_from, latent_nL, y_nD

    def backward_heads(
        self, positions: TokenPositions, grads: Sequence[np.ndarray], latents: Sequence[np.ndarray],
        grad_nG: np.ndarray, tile: Tile,
    ) -> None:  # fmt: skip
        """Writes the gradients of the inputs of the heads, and keeps arrays for those of q_b_proj and kv_b_proj."""
        of = self.of
        call = self.call
        rotation_n1h = positions.select_rotation(of.window)[tile.rows].conj()
        of_queries, of_latent, of_key = of._split(grad_nG)
        grad_q_nC, grad_k_nC, grad_v_nV = (grad[tile.rows] for grad in grads)
        grad_q_nC *= of.scale
        of.rotary.apply(of._by_head(grad_q_nC)[..., of.nope_size :], rotation_n1h)
        factor_nC = downcast_if_needed(grad_q_nC, self.query_grad[tile.rows])
        made_from, latent_nL = latents
        if self.queries_from is not self.y_ND:
            self.queries_from[tile.rows] = made_from
        self.latent_NL[tile.rows] = latent_nL
        low_Rn = of.query.backward(call, factor_nC, of_queries, tile)
        of.query.add_adapter_gradients(call, low_Rn, factor_nC, made_from, tile)
        of_keys = of._by_head(grad_k_nC)
        wide = tile.take(self.key_value_grad.shape[1])
        of._by_head(wide)[..., : of.nope_size] = of_keys[..., : of.nope_size]
        of._by_head(wide)[..., of.nope_size :] = of._by_head(grad_v_nV)
        both = self.key_value_grad[tile.rows]
        store(wide, both)
        low_Rn = of.key_value.backward(call, both, of_latent, tile)
        of.key_value.add_adapter_gradients(call, low_Rn, both, latent_nL, tile)
        of_key_nR = of_keys[..., of.nope_size :].sum(1)
        of.rotary.apply(of_key_nR[:, None], rotation_n1h)
        of_key[...] = of_key_nR

    def backward_latents(
        self, grad_nG: np.ndarray, y_nD: np.ndarray, grad_ND: np.ndarray, out_ND: np.ndarray, tile: Tile
    ) -> None:
        """Writes the gradient of x, and keeps arrays for the gradients of q_a_proj and kv_a_proj_with_mqa."""
        of = self.of
        call = self.call
        of_queries, of_latent, of_key = of._split(grad_nG)
        out_nD = out_ND[tile.rows]
        if not of.has_query_latent:
            out_nD[...] = of_queries
        else:
            factor_nQ = self._through_norm(of.query_norm, _QUERY_NORM, "query_latent", of_queries, tile)
            assert self.query_down_grad is not None
            narrow_nQ = self.query_down_grad[tile.rows]
            store(factor_nQ, narrow_nQ)
            low_Rn = of.query_down.backward(call, narrow_nQ, out_nD, tile)
            of.query_down.add_adapter_gradients(call, low_Rn, narrow_nQ, y_nD, tile)
        down = tile.take(of.rank + of.rope_size)
        down[:, : of.rank] = self._through_norm(of.latent_norm, _LATENT_NORM, "latent", of_latent, tile)
        down[:, of.rank :] = of_key
        narrow_down = self.down_grad[tile.rows]
        store(down, narrow_down)
        low_Rn = of.down.backward(call, narrow_down, out_nD, tile, accumulate=True)
        of.down.add_adapter_gradients(call, low_Rn, narrow_down, y_nD, tile)
        of.norm.backward(call, INPUT_NORM, self.x_ND[tile.rows], out_nD, tile, call.saved["scale"][tile.rows, 0])
        out_nD += grad_ND[tile.rows]

    def _through_norm(
        self, norm: CpuRmsNorm | None, weight: str, saved: str, grad_nQ: np.ndarray, tile: Tile
    ) -> np.ndarray:
        """Returns the gradient of latent vectors before their norm, if they have one."""
        if norm is None:
            return grad_nQ
        input_grad_nQ = tile.take(grad_nQ.shape[1])
        input_grad_nQ[...] = grad_nQ
        norm.backward(self.call, weight, self.call.saved[saved][tile.rows], input_grad_nQ, tile)
        return input_grad_nQ

    def add_gradients(self) -> None:
        """Adds the gradients of the four matrices."""
        of = self.of
        call = self.call
        of.query.add_gradients(call, self.query_grad, self.queries_from)
        of.key_value.add_gradients(call, self.key_value_grad, self.latent_NL)
        of.down.add_gradients(call, self.down_grad, self.y_ND)
        if self.query_down_grad is not None:
            of.query_down.add_gradients(call, self.query_down_grad, self.y_ND)
