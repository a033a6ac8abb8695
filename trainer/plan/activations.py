"""Activation memory of a rank whose layers are native (`trainer.arrays`).

What a layer keeps is counted from the list that it allocates from, `trainer.models.spec.saved`; what a backward pass
allocates besides is counted here.

Legend: N tokens of a micro-batch, D hidden, E width of the head, V vocabulary of the rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trainer.config import Config
from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.parallel import parallel_degrees
from trainer.config.recompute import recomputed_parts
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec
from trainer.models.spec.names import layer_prefix
from trainer.models.spec.saved import (
    HEAD_ROWS,
    RowKind,
    SavedArray,
    attention_inputs,
    attention_saved,
    logit_rows,
    mlp_saved,
    moe_saved,
)
from trainer.models.spec.shapes import base_dtypes
from trainer.optim.freeze import trained_shapes
from trainer.parallel.world import World
from trainer.plan.division import RankParams, micro_batch_tokens

_WIDE = 4  # bytes of float32


class SublayerBytes(NamedTuple):
    """Bytes of a sublayer or a layer.

    Attributes:
        kept: From forward to backward pass, its input included.
        working: What the backward pass allocates besides, without gradients of weights.
    """

    kept: int
    working: int


class ActivationMemory:
    """Activations of one micro-batch on a rank, in bytes.

    Args:
        params: The parameters and layers of the rank.
        narrow: Bytes of a number that a product takes.
    """

    def __init__(self, config: Config, world: World, params: RankParams, narrow: int) -> None:
        degrees = parallel_degrees(config, world)
        self.config = config
        self.params = params
        self.narrow = narrow
        self.rounded = 0
        """Bytes of the rounded copy of a float32 number; 0 where products take float32."""
        if narrow < _WIDE:
            self.rounded = narrow
        self.holds_few_bytes = bool(base_dtypes(config.decoder))
        self.spec: ModelSpec = model_spec(config.decoder).local(params.tensor)
        self.is_tensor_parallel = params.tensor > 1
        self.shares_rows = self.is_tensor_parallel and config.parallel_config.use_seq_parallel
        self.is_context_parallel = degrees.context_parallel > 1
        self.ulysses = ulysses_degree(config)
        self.expert_ranks = degrees.expert_parallel
        moe = config.decoder.experts
        tokens = micro_batch_tokens(config, degrees)
        routed = tokens // params.tensor
        stream_rows = tokens
        if self.shares_rows:
            stream_rows = routed
        expert_rows = 0
        if moe is not None:
            expert_rows = routed * moe.num_experts_chosen
        self.rows: dict[RowKind, int] = {
            "stream": stream_rows,
            "tokens": tokens,
            "queries": tokens * self.ulysses,
            "keys": tokens * degrees.context_parallel,
            "routed": routed,
            "experts": expert_rows,
        }
        self.stream = _WIDE * self.spec.hidden * self.rows["stream"]
        """Bytes of the residual stream."""

    def training_peak(self, gradients: Mapping[str, int]) -> int:
        """Returns the peak of a training step beyond all gradients.

        Where gradients appear while activations are freed, those that do not exist yet are subtracted.

        Args:
            gradients: Bytes of the gradients that appear layer by layer, by the names of their weights.
        """
        spec = self.spec
        passes = self.params.passes
        again = recomputed_parts(self.config)
        first = spec.first_reached(trained_shapes(self.config))
        layers = {number: self.layer(spec.layers[number], again[number]) for number in passes if number >= first}
        kept = sum(one.kept * passes[number] for number, one in layers.items())
        later_gradients = sum(gradients.values())
        peak = 0
        if self.params.has_head:
            modules = spec.mtp_modules
            matrix = _WIDE * spec.vocabulary * spec.embedding
            # Of each head its input and the gradient; of a module the embeddings that it merges, too.
            kept += modules * (3 * self.stream + matrix)
            peak = kept + self.head(trains=True) - later_gradients
        for number in sorted(layers, reverse=True):
            later_gradients -= sum(size for name, size in gradients.items() if name.startswith(layer_prefix(number)))
            peak = max(peak, kept + layers[number].working - later_gradients)
            kept -= layers[number].kept * passes[number]
        # The gradient of the embedding: that of its rows, and these in another order.
        return max(peak, kept + 2 * self.stream)

    def evaluation_peak(self) -> int:
        """Returns the peak of a forward pass that saves nothing."""
        peaks = [self.head(trains=False)]
        for layer in set(self.spec.layers):
            peaks.append(self._attention_kept(layer.attention))
            if layer.is_moe:
                peaks.append(self.mlp(layer).kept + _WIDE * self.spec.hidden * self.rows["experts"])
        return max(peaks) + self.stream

    def layer(self, layer: LayerSpec, recomputed: str) -> SublayerBytes:
        """Returns the bytes of a layer.

        Args:
            recomputed: What its backward pass recomputes: "block", "attention", "mlp" or nothing ("").
        """
        sublayers = {"attention": self.attention(layer), "mlp": self.mlp(layer)}
        if recomputed == "block" and not layer.is_moe:  # its sublayers are one part, of which the input is kept
            kept = sum(one.kept for one in sublayers.values())
            most = max(one.working for one in sublayers.values())
            return SublayerBytes(self.stream, kept - self.stream + most)
        kept = 0
        working = 0
        for name, one in sublayers.items():
            remains = one.kept
            if recomputed in ("block", name):
                remains = self.stream
            kept += remains
            working = max(working, one.working + one.kept - remains)
        return SublayerBytes(kept, working)

    def attention(self, layer: LayerSpec) -> SublayerBytes:
        """Returns the bytes of an attention sublayer, as `trainer.arrays.attention.sublayer` allocates them."""
        spec = layer.attention
        tokens = self.rows["tokens"]
        saved = {one.name: one for one in self._attention_saved(spec)}
        inputs = list(attention_inputs(spec, self.ulysses))
        of_heads = sum(one.width * self.rows[one.rows] for one in inputs)
        working = self._dense_working(spec, layer) + self.narrow * saved["heads"].width * tokens
        working += _WIDE * of_heads + self._bytes(one for one in inputs if one.name not in saved)  # computed again
        if not layer.is_moe:  # what the feed-forward sublayer of the same part returned
            working += self.stream
        if self.is_context_parallel:  # what is exchanged
            working += _WIDE * of_heads
        if spec.latent is None:
            working += self.rounded * of_heads
        else:
            # Inputs and gradients of the matrices that make and take latent vectors.
            latent = spec.latent
            shared = latent.key_value_rank + latent.rope_size
            width = shared + latent.key_value_rank + spec.heads * (latent.nope_size + spec.value_size)
            if latent.query_rank is not None:
                width += 2 * latent.query_rank
            elif self.shares_rows:
                width += spec.hidden
            working += tokens * (self.narrow * width + self.rounded * spec.heads * spec.head_size)
            if self.is_tensor_parallel:
                working += _WIDE * tokens * ((latent.query_rank or spec.hidden) + shared)
        kept = self._attention_kept(spec)
        if spec.dropout:  # a bit for each probability of the keys that a query sees, about half of all
            kept += spec.heads * tokens * self.config.decoder.seq_length // 16
        return SublayerBytes(kept, working)

    def mlp(self, layer: LayerSpec) -> SublayerBytes:
        """Returns the bytes of a feed-forward sublayer, dense or with experts."""
        spec = layer.mlp
        if not isinstance(spec, MlpSpec):
            return self._experts(spec)
        kept = self._bytes(mlp_saved(spec, self.shares_rows))
        if not spec.is_parallel:  # attention keeps the input of both
            kept += self.stream
        return SublayerBytes(kept, self._dense_working(spec, layer) + self.narrow * spec.width * self.rows["tokens"])

    def _experts(self, spec: MoeSpec) -> SublayerBytes:
        moe = self.config.decoder.experts
        assert moe is not None  # the layer has experts
        gathers = self.expert_ranks > 1 and moe.moe_token_dispatcher_type == "allgather"
        kept = self._bytes(moe_saved(spec, self.is_tensor_parallel, gathers, self.expert_ranks))
        # Gradients of the input, by each sum, and of the rows of the experts, which ranks exchange; the SwiGLU.
        exchanges = 1
        if self.expert_ranks > 1:
            exchanges = 3
        working = _WIDE * spec.hidden * (2 * self.rows["routed"] + exchanges * self.rows["experts"])
        working += 2 * self.stream + self.narrow * spec.shared_width * self.rows["tokens"]
        return SublayerBytes(self.stream + kept, working)

    def _dense_working(self, spec: AttentionSpec | MlpSpec, layer: LayerSpec) -> int:
        """Returns the bytes that the backward passes of attention and dense feed-forward sublayers both need.

        They are the gradients of the residual stream after and before them, the normed input, and rounded copies.
        """
        row = spec.hidden * self.rows["tokens"]
        working = 2 * self.stream + (self.narrow + self.rounded) * row
        if spec.changes_output:
            working += self.stream
        if self.is_tensor_parallel:  # what the ranks sum
            working += _WIDE * row
        if self.shares_rows:  # what they gather
            working += _WIDE * row
        return working + self.rounded * sum(math.prod(one.shape) for one in layer.parameters if len(one.shape) == 2)

    def head(self, trains: bool) -> int:
        """Returns the bytes of the head: its input, the normed rows and their gradient, and the logits of some rows."""
        spec = self.spec
        tokens = self.rows["tokens"]
        if spec.has_score:  # the normed rows, and their gradient
            return self.stream + max(_WIDE * spec.embedding * tokens * (1 + trains), self.stream)
        rows = logit_rows(tokens, spec.vocabulary)
        logits = _WIDE * rows * spec.vocabulary
        logits += self.rounded * spec.embedding * rows  # what their product takes
        if not self.holds_few_bytes:
            logits += self.rounded * spec.embedding * spec.vocabulary
        elif not self.rounded:
            logits += _WIDE * spec.embedding * min(spec.vocabulary, HEAD_ROWS)
        normed = _WIDE * spec.embedding * tokens
        if trains:
            logits += self.rounded * spec.vocabulary * rows
            normed += _WIDE * spec.embedding * tokens
        return self.stream + normed + max(logits, self.stream)

    def taught_rows(self) -> int:
        """Returns the bytes of a teacher while the student's head runs.

        They are the normed rows, and in float32 the logits of some rows: its own, and those of the student at the
        temperature.
        """
        spec = self.spec
        tokens = self.rows["tokens"]
        tiles = 2 * _WIDE * logit_rows(tokens, spec.vocabulary) * spec.vocabulary
        return tiles + (_WIDE + self.rounded) * spec.embedding * tokens

    def _attention_kept(self, spec: AttentionSpec) -> int:
        return self.stream + self._bytes(self._attention_saved(spec))

    def _attention_saved(self, spec: AttentionSpec) -> Iterable[SavedArray]:
        return attention_saved(spec, self.shares_rows, self.ulysses, self.is_context_parallel)

    def _bytes(self, arrays: Iterable[SavedArray]) -> int:
        return sum(self.rows[one.rows] * one.width * (self.narrow if one.narrow else _WIDE) for one in arrays)
