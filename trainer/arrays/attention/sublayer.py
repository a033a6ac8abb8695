"""The attention sublayer of a decoder layer: x + W_o attention(norm(x)), forward and backward.

Threads take tiles of rows through norm, projections and rotary embedding, then query blocks through attention, output
projection and residual stream. Each tensor-parallel rank computes some of the heads; context-parallel ranks have some
of the queries or of the heads (`trainer.arrays.attention.context`).

Legend: as in tiles.py and blocks.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer.arrays.attention.blocks import BlockAttention
from trainer.arrays.attention.cache import KVCache, attend_cached
from trainer.arrays.attention.latent import LatentProjections
from trainer.arrays.attention.positions import CpuRotary
from trainer.arrays.memory import (
    downcast_if_needed,
    empty,
    host_threads,
    narrow_like,
    part_of,
    upcast_if_needed,
)
from trainer.arrays.sublayer import CpuLinear, NormedInput, SublayerOutput, allocate
from trainer.arrays.tiles import CpuRmsNorm
from trainer.models.spec.names import INPUT_NORM, POST_ATTENTION_NORM, SINKS
from trainer.models.spec.saved import attention_inputs, attention_saved

if TYPE_CHECKING:
    from trainer.arrays.attention.context import ContextParallel
    from trainer.arrays.attention.positions import SequenceBlocks, TokenPositions
    from trainer.arrays.sublayer import SequenceParallelComm
    from trainer.arrays.tiles import Gradients, Scratch, SublayerCall, Tile
    from trainer.models.spec.model import AttentionSpec

_MIN_TASKS = 8  # of a backward pass, which threads take one after the other


class HeadProjections:
    """Queries, keys and values of all heads: norm, projections, norms of the heads, rotary embedding, scale."""

    def __init__(
        self, spec: AttentionSpec, rotary: CpuRotary, scratch: Scratch, tensor: SequenceParallelComm | None
    ) -> None:
        self.rotary = rotary
        self.window = spec.window
        self.scratch = scratch
        self.head_size = spec.head_size
        self.widths = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
        self.scale = np.float32(spec.scale)
        self.cap = spec.score_cap
        norm = None
        if spec.pre_norm:
            norm = CpuRmsNorm(spec.norm)
        self.input = NormedInput(norm, INPUT_NORM, scratch, tensor)
        names = [f"self_attn.{name}_proj" for name in "qkv"]
        self.linears = [CpuLinear(name, spec.adapters.get(name)) for name in names]
        self.norm_widths = dict(zip("qk", spec.norm_widths, strict=True))
        self.norms_rotated = spec.norms_rotated
        self.head_norms: dict[str, CpuRmsNorm] = {}
        if spec.head_norm:
            self.head_norms = {name: CpuRmsNorm(spec.norm.rms) for name in self.norm_widths}

    def forward(
        self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, q_NC: np.ndarray, k_NK: np.ndarray,
        v_NK: np.ndarray,
    ) -> None:  # fmt: skip
        """Writes rotated and scaled queries, rotated keys, and values."""
        rows = self.input.begin_forward(call, x_ND, q_NC.dtype)
        rotation_N1h = positions.select_rotation(self.window)
        self.scratch.run(rows, lambda tile: self.compute(call, x_ND, rotation_N1h, q_NC, k_NK, v_NK, tile))

    def compute(
        self, call: SublayerCall, x_ND: np.ndarray, rotation_N1h: np.ndarray, q_NC: np.ndarray, k_NK: np.ndarray,
        v_NK: np.ndarray, tile: Tile,
    ) -> None:  # fmt: skip
        """Writes queries, keys and values for a tile."""
        y_nD = self.input.forward(call, x_ND, tile, q_NC.dtype)
        rotation_n1h = rotation_N1h[tile.rows]
        self._rotated(call, "q", y_nD, q_NC[tile.rows], rotation_n1h, tile)
        self._rotated(call, "k", y_nD, k_NK[tile.rows], rotation_n1h, tile)
        self.linears[2].forward(call, y_nD, v_NK[tile.rows], tile)

    def _rotated(
        self, call: SublayerCall, name: str, y_nD: np.ndarray, out_nC: np.ndarray, rotation_n1h: np.ndarray, tile: Tile
    ) -> None:
        linear = self.linears["qkv".index(name)]
        wide_nC = tile.float32_like(out_nC)
        if name not in self.head_norms:
            linear.forward(call, y_nD, wide_nC, tile)
        else:
            plain_nC = out_nC
            if call.saved:
                plain_nC = call.saved[f"plain_{name}"][tile.rows]
            linear.forward(call, y_nD, plain_nC, tile)
            x_nC = upcast_if_needed(plain_nC, wide_nC)
            if self.norms_rotated:
                self.rotary.apply(x_nC.reshape(tile.size, -1, self.head_size), rotation_n1h)
                downcast_if_needed(x_nC, plain_nC)
            self._norm_heads(call, name, x_nC, wide_nC)
        self._rotate(name, wide_nC, out_nC, rotation_n1h, tile)

    def _norm_heads(self, call: SublayerCall, name: str, x_nC: np.ndarray, wide_nC: np.ndarray) -> None:
        """Writes normed heads to `wide_nC`, which may be x; both are float32."""
        norm = self.head_norms[name]
        width = self.norm_widths[name]
        x, out = (array.reshape(-1, width) for array in (x_nC, wide_nC))
        norm(x, call.weights[f"self_attn.{name}_norm.weight"], norm.scales(x), out)

    def _rotate(self, name: str, wide_nC: np.ndarray, out_nC: np.ndarray, rotation_n1h: np.ndarray, tile: Tile) -> None:
        """Rotates and scales the float32 heads of a tile, and writes them to `out_nC`."""
        if not self.norms_rotated:
            self.rotary.apply(wide_nC.reshape(tile.size, -1, self.head_size), rotation_n1h)
        if name == "q":
            wide_nC *= self.scale
        downcast_if_needed(wide_nC, out_nC)

    def recompute(
        self, call: SublayerCall, positions: TokenPositions, q_NC: np.ndarray, k_NK: np.ndarray
    ) -> None:
        """Writes the queries and keys of the forward pass, from those that it has saved before their norm."""
        rotation_N1h = positions.select_rotation(self.window)

        def compute(tile: Tile) -> None:
            """Norms and rotates the heads of a tile again."""
            for name, out_NC in (("q", q_NC), ("k", k_NK)):
                out_nC = out_NC[tile.rows]
                plain_nC = call.saved[f"plain_{name}"][tile.rows]
                wide_nC = tile.float32_like(out_nC)
                self._norm_heads(call, name, upcast_if_needed(plain_nC, wide_nC), wide_nC)
                self._rotate(name, wide_nC, out_nC, rotation_N1h[tile.rows], tile)

        self.scratch.run(len(q_NC), compute)

    def attend_cached(
        self, call: SublayerCall, x_ND: np.ndarray, rotation_N1h: np.ndarray, layer: int, cache: KVCache,
        mask: np.ndarray | None, tile: Tile,
    ) -> np.ndarray:  # fmt: skip
        """Returns the results of the heads for new tokens, [N, C], over the cache, to which it adds these tokens."""
        q_NC = tile.take(self.widths[0])
        k_NK = tile.take(self.widths[1])
        v_NK = tile.take(self.widths[1])
        self.compute(call, x_ND, rotation_N1h, q_NC, k_NK, v_NK, tile)
        keys, values = cache.update(layer, (k_NK, v_NK))
        return attend_cached(q_NC, keys, values, mask, self.cap, call.weights.get(SINKS))

    def backward(
        self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, grads: Sequence[np.ndarray],
        grad_ND: np.ndarray, out_ND: np.ndarray,
    ) -> None:  # fmt: skip
        """Writes the gradient of x to `out_ND` and adds those of the weights.

        Args:
            grads: Gradients of queries, keys and values; overwritten.
            grad_ND: Gradient of the residual stream after the sublayer.
        """
        dtype = call.saved["v"].dtype
        rotation_N1h = positions.select_rotation(self.window)
        y_ND, into_ND = self.input.begin_backward(call, x_ND, out_ND, dtype, self.linears)
        narrow = [narrow_like(grad, dtype) for grad in grads]  # the gradients in the dtype of the products

        def compute(tile: Tile) -> None:
            tile_grads = [grad[tile.rows] for grad in grads]
            tile_grads[0][...] *= self.scale
            rotation_n1h = rotation_N1h[tile.rows].conj()
            for name, grad_nC in zip("qk", tile_grads, strict=False):
                if self.norms_rotated:
                    self._head_norm_gradient(call, name, grad_nC, tile)
                self.rotary.apply(grad_nC.reshape(tile.size, -1, self.head_size), rotation_n1h)
                if self.head_norms and not self.norms_rotated:
                    self._head_norm_gradient(call, name, grad_nC, tile)
            into_nD = part_of(into_ND, tile.rows)
            y_nD = self.input.recompute_input(call, x_ND, y_ND, tile, dtype, self.linears)
            for place, (linear, grad_nC, narrow_NC) in enumerate(zip(self.linears, tile_grads, narrow, strict=True)):
                factor_nC = downcast_if_needed(grad_nC, narrow_NC[tile.rows])
                low_Rn = linear.backward(call, factor_nC, into_nD, tile, accumulate=place > 0)
                linear.add_adapter_gradients(call, low_Rn, factor_nC, y_nD, tile)
            if into_nD is not None:
                self.input.backward(call, x_ND, grad_ND, tile, out_ND)

        self.scratch.run(len(grads[0]), compute)
        self.input.end_backward(call, x_ND, grad_ND, into_ND, out_ND)
        for linear, grad_NC, factor_NC in zip(self.linears, grads, narrow, strict=True):
            linear.add_gradients(call, factor_NC, y_ND, grad_NC)

    def _head_norm_gradient(self, call: SublayerCall, name: str, grad_nC: np.ndarray, tile: Tile) -> None:
        """Replaces the gradient of normed heads by that of the heads."""
        norm = self.head_norms[name]
        key = f"self_attn.{name}_norm.weight"
        rows = (-1, self.norm_widths[name])
        x = tile.to_float32(call.saved[f"plain_{name}"][tile.rows]).reshape(rows)
        grad = grad_nC.reshape(rows)
        work = tile.take(grad_nC.shape[1]).reshape(rows)
        weight_grad_d = norm.gradient(x, call.weights[key], norm.scales(x), grad, work)
        call.gradients.add_tile(key, tile, weight_grad_d)


class CpuAttention:
    """x + output(attention(projections(norm(x)))) of the layers with one `AttentionSpec`.

    Args:
        spec: With the heads of this rank.
        tensor: The tensor-parallel ranks; None: this rank has all heads.
        context: The context-parallel ranks; None: this rank has all tokens.
    """

    def __init__(
        self, spec: AttentionSpec, scratch: Scratch, tensor: SequenceParallelComm | None = None,
        context: ContextParallel | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.scratch = scratch
        self.gathers = tensor is not None and tensor.sequence_parallel
        self.context = context
        self.rotary = CpuRotary(spec)
        self.projections: HeadProjections | LatentProjections
        if spec.latent is None:
            self.projections = HeadProjections(spec, self.rotary, scratch, tensor)
        else:
            self.projections = LatentProjections(spec, self.rotary, scratch, tensor)
        heads = spec.heads, spec.kv_heads
        if context is not None:
            heads = context.local_heads(*heads)
        self.attention = BlockAttention(spec, *heads)
        self.output = SublayerOutput(
            CpuLinear("self_attn.o_proj", spec.adapters.get("self_attn.o_proj")), spec, scratch, tensor,
            norm_name=POST_ATTENTION_NORM, site="attention_output",
        )  # fmt: skip

    @property
    def ulysses(self) -> int:
        """Returns how many ranks exchange heads for tokens."""
        return self.spec.heads // (self.attention.kv_heads * self.attention.groups)

    def forward(self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions) -> np.ndarray:
        """Returns the residual stream after the sublayer."""
        dtype = call.weights[self.output.linear.weight].dtype
        tokens = len(positions.rotation_N1h)
        sequences = positions.select_blocks(self.spec.window)
        arrays = self._allocate(call, len(x_ND), tokens, sequences, dtype)
        out_ND = empty(*x_ND.shape)
        if self.context is None:
            self.projections.forward(call, x_ND, positions, arrays["q"], arrays["k"], arrays["v"])
        else:
            self._exchanged_projections(self.context, call, x_ND, positions, arrays, len(sequences))
        heads_NV = arrays["heads"]
        if self.ulysses > 1:
            heads_NV = empty(len(arrays["q"]), self.attention.width, dtype=dtype)
        self.output.begin_forward(call, x_ND, tokens)

        tasks = [(sequence, block) for sequence in sequences for block in sequence.blocks]
        max_logits = None
        if call.max_logits is not None:
            max_logits = np.zeros((len(tasks), self.attention.kv_heads, self.attention.groups), np.float32)
        sinks_KG = self._sinks(call)

        def attend(number: int, thread: int) -> None:
            """Computes the attention of a block of queries, then their output projection."""
            sequence, block = tasks[number]
            tile = self.scratch.tile(block.queries, thread)
            inputs = arrays["q"], arrays["k"], arrays["v"]
            self.attention.forward(
                sequence, block, *inputs, heads_NV, tile, call.dropout, call.save, part_of(max_logits, number), sinks_KG
            )
            if self.ulysses == 1:
                self.output.forward(call, x_ND, heads_NV[tile.rows], out_ND, tile)

        def count_keys(number: int) -> int:
            """Returns the number of keys of a block of queries."""
            keys = tasks[number][1].keys
            return keys.stop - keys.start

        host_threads().run(range(len(tasks)), attend, count_keys)
        if max_logits is not None and call.max_logits is not None:
            np.maximum(call.max_logits, max_logits.max(0).reshape(-1), out=call.max_logits)
        if self.context is not None and self.ulysses > 1:
            local_NV = arrays["heads"]
            local_NV[...] = self.context.to_tokens(heads_NV, self.spec.heads, len(sequences))
            self.scratch.run(
                tokens, lambda tile: self.output.forward(call, x_ND, local_NV[tile.rows], out_ND, tile)
            )
        self.output.end_forward(call, x_ND, out_ND)
        return out_ND

    def _allocate(
        self, call: SublayerCall, stream: int, tokens: int, sequences: Sequence[SequenceBlocks], dtype: type
    ) -> dict[str, np.ndarray]:
        """Allocates queries, keys, values and the results of the heads; fills `call.saved` if the call saves."""
        keys = sum(sequence.keys.stop - sequence.keys.start for sequence in sequences)
        rows = {"stream": stream, "tokens": tokens, "queries": tokens * self.ulysses, "keys": keys}
        descriptions = attention_saved(self.spec, self.gathers, self.ulysses, self.context is not None)
        saved = {array.name: array for array in descriptions}
        inputs = list(attention_inputs(self.spec, self.ulysses))
        if call.save:
            saved.pop("normed", None)  # `gather_tokens` allocates it
            call.saved = allocate(saved.values(), rows, dtype)
            return self._inputs_beside(call.saved, dtype) | call.saved
        # The results of a block's heads overwrite its queries if both have the same shape.
        if self.spec.value_size != self.spec.head_size or self.ulysses > 1:
            inputs.append(saved["heads"])
        arrays = allocate(inputs, rows, dtype)
        return {"heads": arrays["q"], **arrays}

    def _inputs_beside(self, saved: Mapping[str, np.ndarray], dtype: type) -> dict[str, np.ndarray]:
        """Allocates those of queries and keys that are not saved, for the pass of a part."""
        inputs = (array for array in attention_inputs(self.spec) if array.name not in saved)
        return {array.name: self.scratch.take_for_part(len(saved["v"]), array.width, dtype=dtype) for array in inputs}

    def _inputs(self, call: SublayerCall, positions: TokenPositions) -> dict[str, np.ndarray]:
        """Returns queries, keys and values of the forward pass, of which some may be computed again."""
        again = self._inputs_beside(call.saved, call.saved["v"].dtype.type)
        if again:
            assert isinstance(self.projections, HeadProjections)
            self.projections.recompute(call, positions, again["q"], again["k"])
        return call.saved | again

    def _exchanged_projections(
        self, context: ContextParallel, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions,
        arrays: dict[str, np.ndarray], sequences: int,
    ) -> None:  # fmt: skip
        """Fills queries, keys and values for the attention of this rank, with those of context-parallel ranks."""
        spec = self.spec
        widths = spec.heads * spec.head_size, spec.kv_heads * spec.head_size, spec.kv_heads * spec.value_size
        local = [empty(len(positions.rotation_N1h), width, dtype=arrays["q"].dtype) for width in widths]
        self.projections.forward(call, x_ND, positions, local[0], local[1], local[2])
        arrays["q"][...] = context.to_heads(local[0], spec.heads, sequences)
        for name, x_NK in zip("kv", local[1:], strict=True):
            context.gather_keys(context.to_heads(x_NK, spec.kv_heads, sequences), arrays[name], sequences)

    def predict(
        self, call: SublayerCall, x_ND: np.ndarray, rotation_N1h: np.ndarray, layer: int, cache: KVCache,
        mask: np.ndarray | None, tile: Tile,
    ) -> np.ndarray:  # fmt: skip
        """Returns the residual stream after the sublayer for new tokens, whose queries see the cache of a layer."""
        heads_NV = self.projections.attend_cached(call, x_ND, rotation_N1h, layer, cache, mask, tile)
        out_ND = np.empty_like(x_ND)
        self.output.begin_forward(call, x_ND, len(x_ND))
        self.output.forward(call, x_ND, heads_NV, out_ND, tile)
        self.output.end_forward(call, x_ND, out_ND)
        return out_ND

    def backward(
        self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, grad_ND: np.ndarray
    ) -> tuple[np.ndarray, Gradients]:
        """Returns the gradients of x and of the trained weights; overwrites `call.saved`."""
        saved = call.saved
        context = self.context
        sequences = positions.select_blocks(self.spec.window)
        out_ND = empty(*x_ND.shape)
        grad_heads_NV = empty(*saved["heads"].shape, dtype=saved["heads"].dtype)
        self._output_gradients(call, grad_ND, grad_heads_NV)
        if context is not None:
            grad_heads_NV = context.to_heads(grad_heads_NV, self.spec.heads, len(sequences))
        inputs = self._inputs(call, positions)
        grads = [empty(*inputs[name].shape) for name in "qkv"]
        sinks_KG = self._sinks(call)
        tasks = list(self.attention.tasks(sequences, _MIN_TASKS))
        sink_grads = None
        if sinks_KG is not None:
            sink_grads = np.zeros((len(tasks), *sinks_KG.shape), np.float32)  # in the order of the tasks: equal bits

        def attend(number: int, thread: int) -> None:
            """Computes the gradients of queries, keys and values for some heads of a sequence."""
            sequence, heads = tasks[number]
            tile = self.scratch.tile(sequence.keys, thread)
            self.attention.backward(
                sequence, heads, inputs["q"], inputs["k"], inputs["v"], grad_heads_NV, grads[0], grads[1], grads[2],
                tile, call.dropout, sinks_KG, part_of(sink_grads, number),
            )  # fmt: skip

        host_threads().run(range(len(tasks)), attend)
        if sink_grads is not None and call.gradients.needs(SINKS):
            self._add_sink_gradients(call, sink_grads.sum(0).reshape(-1))
        if context is not None:
            grads[0] = context.to_tokens(grads[0], self.spec.heads, len(sequences))
            for place in (1, 2):
                local_MK = context.reduce_keys(grads[place], len(sequences))
                grads[place] = context.to_tokens(local_MK, self.spec.kv_heads, len(sequences))
        self.projections.backward(call, x_ND, positions, grads, grad_ND, out_ND)
        return out_ND, call.gradients.compute()

    def _sinks(self, call: SublayerCall) -> np.ndarray | None:
        """Returns the sinks of the heads whose attention this rank computes, [K, G]; None without sinks."""
        sinks_H = call.weights.get(SINKS)
        if sinks_H is None:
            return None
        return sinks_H[self._attended_heads()].reshape(self.attention.kv_heads, -1)

    def _attended_heads(self) -> slice:
        """Returns the heads whose attention this rank computes, among those that it projects."""
        heads = self.attention.kv_heads * self.attention.groups
        first = 0
        if self.context is not None and self.context.ulysses is not None:
            first = self.context.ulysses.rank * heads
        return slice(first, first + heads)

    def _add_sink_gradients(self, call: SublayerCall, grad_h: np.ndarray) -> None:
        """Adds the gradients of the sinks; those of heads of other ranks are 0."""
        grad_H = np.zeros(self.spec.heads, np.float32)
        grad_H[self._attended_heads()] = grad_h
        call.gradients.arrays[SINKS] = grad_H

    def _output_gradients(self, call: SublayerCall, grad_ND: np.ndarray, grad_heads_NV: np.ndarray) -> None:
        """Writes the gradients of the heads' results, and adds those of the output projection and its norm."""
        heads_NV = call.saved["heads"]
        grad = self.output.begin_backward(call, grad_ND, heads_NV.dtype)

        def compute(tile: Tile) -> None:
            """Computes the gradients of a tile's heads and of the output projection's adapter."""
            low_Rn = self.output.backward(call, grad, grad_heads_NV[tile.rows], tile)
            factor_nD = grad.factor_ND[tile.rows]
            self.output.linear.add_adapter_gradients(call, low_Rn, factor_nD, heads_NV[tile.rows], tile)

        self.scratch.run(len(heads_NV), compute)
        self.output.end_backward(call, grad, heads_NV)
