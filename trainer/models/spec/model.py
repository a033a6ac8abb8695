"""What a decoder consists of: parameters, layers, the embedding and the head, as plain values.

`trainer.models.spec.build` makes these values from `model_config`; cells, native CPU layers, the layout over ranks,
initial values, checkpoints and the plan read them. Layers that compute the same have equal `LayerSpec`s, which are one
object.

Legend: D hidden, H query heads, K key/value heads, d head size, F width of a feed-forward layer, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD, MAPPING_IN, MAPPING_OUT, layer_prefix
from trainer.parallel.sharding import shard_range

Sharding: TypeAlias = Literal["replicated", "column", "kv_column", "row", "vocabulary", "expert", "partial"]
"""How tensor-parallel (or for "expert" expert-parallel) ranks shard a parameter: not; by its outputs; by its outputs
where key/value heads may be replicated; by its inputs; by the vocabulary; by its stack of experts. Ranks that hold a
"partial" parameter are replicas, but each computes only a part of its gradient."""
Init: TypeAlias = Literal["normal", "residual", "ones", "zeros", "lora_a"]
"""Initial value; "residual" is normal, scaled down with the depth of the model."""
Role: TypeAlias = Literal["embedding", "matrix", "norm", "bias", "router", "buffer", "adapter"]


class ParameterSpec(NamedTuple):
    """One parameter, of a layer by its name within the layer, otherwise by its full name."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding = "replicated"
    init: Init = "normal"
    role: Role = "matrix"

    def tensor_shards(self, ranks: int, kv_heads: int) -> tuple[int, int]:
        """Returns into how many shards so many tensor-parallel ranks cut it, and along which dimension. Where there are
        fewer heads of keys and values than ranks, neighbouring ranks hold the same head."""
        if self.sharding == "row":
            return ranks, 1
        if self.sharding == "kv_column":
            return min(ranks, kv_heads), 0
        return (ranks if self.sharding in ("column", "vocabulary") else 1), 0

    def local(self, ranks: int, kv_heads: int) -> ParameterSpec:
        """Returns what each of so many tensor-parallel ranks holds of a parameter of a layer."""
        shards, dimension = self.tensor_shards(ranks, kv_heads)
        shape = list(self.shape)
        shape[dimension] //= shards
        return self._replace(shape=tuple(shape))


class AdapterSpec(NamedTuple):
    """A low-rank adapter of a matrix: y += scale * dropout(x) A^T B^T (Hu et al. 2021, equation 3)."""

    rank: int
    scale: float
    dropout: float = 0.0


class LatentSpec(NamedTuple):
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1)."""

    query_rank: int | None
    """Width of the latent vector that queries are made from; None: they are made from the hidden state."""
    key_value_rank: int
    nope_size: int
    """Width of the part of a query or key without positions."""
    rope_size: int
    """Width of the rotated part, whose key all heads share."""
    eps: float = 1e-6
    """Epsilon of the norms of latent vectors: transformers' and DeepSeek's own code has it whatever that of the other
    norms is."""

    @property
    def down_size(self) -> int:
        """How many numbers of a token the down-projections make, of which all heads are made."""
        return (self.query_rank or 0) + self.key_value_rank + self.rope_size


@dataclass(frozen=True)
class AttentionSpec:
    """The attention sublayer of a layer.

    Attributes:
        head_size, value_size: Widths of a query or key, and of a value, of one head.
        scale: Factor on the scores before the softmax.
        window: Tokens that a query sees, itself included; None: all before it.
        rotary_size: How many numbers of a head, or with `latent` of its rotated part, are rotated.
        rotary_interleaved: Rotates neighbouring numbers instead of the two halves.
        head_norm: Queries and keys of each head are normed before they are rotated.
        post_norm: The output is normed before it is added to the residual stream.
        eps: Epsilon of the norms.
        dropout: Rate of the attention probabilities.
        output_dropout: Rate of what is added to the residual stream.
        adapters: By the name of the matrix, for example "self_attn.q_proj".
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    scale: float
    eps: float
    rotary_size: int
    rotary_interleaved: bool = False
    window: int | None = None
    head_norm: bool = False
    post_norm: bool = False
    latent: LatentSpec | None = None
    dropout: float = 0.0
    output_dropout: float = 0.0
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict, hash=False)

    def local(self, ranks: int) -> AttentionSpec:
        """Returns the attention of each of so many tensor-parallel ranks: some of the heads."""
        return replace(self, heads=self.heads // ranks, kv_heads=max(1, self.kv_heads // ranks))

    @property
    def gathered_width(self) -> int:
        """Columns that tensor-parallel ranks exchange before the matrices which they shard."""
        if self.latent is None:
            return self.hidden
        if self.latent.query_rank is None:
            return self.hidden + self.latent.down_size
        return self.latent.down_size

    @property
    def shared_kv_heads(self) -> int | None:
        """Heads of keys and values, each of which several tensor-parallel ranks may hold; None with `latent`, which has
        one for each query head."""
        if self.latent is not None:
            return None
        return self.kv_heads

    @property
    def cache_heads(self) -> int:
        """Heads of what prediction keeps: all heads share one latent vector."""
        if self.latent is not None:
            return 1
        return self.kv_heads

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Numbers of a token that prediction keeps: keys and values, or the latent vector and the key of all heads."""
        if self.latent is not None:
            return self.latent.key_value_rank, self.latent.rope_size
        return self.kv_heads * self.head_size, self.kv_heads * self.value_size


@dataclass(frozen=True)
class MlpSpec:
    """A gated feed-forward sublayer: W_down (silu(W_gate x) * W_up x). Attributes as in `AttentionSpec`."""

    hidden: int
    width: int
    eps: float
    post_norm: bool = False
    output_dropout: float = 0.0
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict, hash=False)

    def local(self, ranks: int) -> MlpSpec:
        """Returns the sublayer of each of so many tensor-parallel ranks: some of the columns."""
        return replace(self, width=self.width // ranks)


@dataclass(frozen=True)
class MoeSpec:
    """A feed-forward sublayer with experts.

    Attributes:
        width: Width of an expert.
        shared_width: Width of the shared experts together; 0: there are none.
        shared_gate: The output of the shared experts is multiplied by a sigmoid gate.
        down_bias: The output of each expert has a bias.
        expert_bias: The router has a bias of each expert for load balancing.
    """

    hidden: int
    eps: float
    experts: int
    chosen: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    down_bias: bool = False
    expert_bias: bool = False
    output_dropout: float = 0.0

    def local(self, ranks: int) -> MoeSpec:
        """Returns the sublayer of each of so many tensor-parallel ranks: some of the columns of the shared experts."""
        return replace(self, shared_width=self.shared_width // ranks)


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the decoder, or of an MTP module.

    Attributes:
        parameters: In forward order, by their names within the layer; the adapters' at the end. A multi-token
            prediction module has those that merge its inputs, and the norm before its head, first.
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    parameters: tuple[ParameterSpec, ...]

    @property
    def is_moe(self) -> bool:
        """Whether the feed-forward sublayer has experts."""
        return isinstance(self.mlp, MoeSpec)

    @property
    def adapters(self) -> Mapping[str, AdapterSpec]:
        """The adapters of both sublayers by the names of their matrices: experts have none."""
        if isinstance(self.mlp, MoeSpec):
            return self.attention.adapters
        return {**self.attention.adapters, **self.mlp.adapters}

    def local(self, ranks: int) -> LayerSpec:
        """Returns the layer of each of so many tensor-parallel ranks."""
        kv_heads = self.attention.kv_heads
        parameters = tuple(parameter.local(ranks, kv_heads) for parameter in self.parameters)
        return LayerSpec(self.attention.local(ranks), self.mlp.local(ranks), parameters)

    def active_size(self, parameter: ParameterSpec) -> int:
        """Returns how many numbers of a parameter compute one token: of the experts those of the chosen ones."""
        size = math.prod(parameter.shape)
        if isinstance(self.mlp, MoeSpec) and parameter.sharding == "expert":
            return size * self.mlp.chosen // self.mlp.experts
        return size


@dataclass(frozen=True)
class ModelSpec:
    """A decoder.

    Attributes:
        embedding: Width of the embedding and of the head; `hidden` unless matrices map between the two.
        layers: The layers, then those of the MTP modules, of which the last `mtp_modules` are. Equal layers are one
            object.
        eps: Epsilon of the norm before the head and of those of the MTP modules.
        tied: The head is the embedding.
        maps_embedding: Matrices map the embedding to the residual stream, and that to what the head multiplies.
        attention_group: So many layers, one after the other, have the parameters of the first one's attention.
    """

    vocabulary: int
    hidden: int
    embedding: int
    eps: float
    layers: tuple[LayerSpec, ...]
    mtp_modules: int = 0
    tied: bool = False
    maps_embedding: bool = False
    attention_group: int = 1

    @property
    def num_layers(self) -> int:
        """Layers without those of the MTP modules."""
        return len(self.layers) - self.mtp_modules

    @property
    def module_layers(self) -> range:
        """The layers of the MTP modules, by their numbers."""
        return range(self.num_layers, len(self.layers))

    def local(self, ranks: int, rank: int = 0) -> ModelSpec:
        """Returns the model that one of so many tensor-parallel ranks computes with: its heads, its columns of
        feed-forward layers and shared experts, its shard of the vocabulary."""
        if ranks == 1:
            return self
        local = {layer: layer.local(ranks) for layer in self.layers}
        vocabulary = shard_range(self.vocabulary, rank, ranks)
        layers = tuple(local[layer] for layer in self.layers)
        return replace(self, vocabulary=vocabulary.stop - vocabulary.start, layers=layers)

    def parameter_name(self, layer: int, name: str) -> str:
        """Returns the full name of a parameter of a layer, which may be one of another layer (`attention_group`)."""
        if name.startswith("self_attn.") and layer < self.num_layers:
            layer -= layer % self.attention_group
        return layer_prefix(layer) + name

    def layer_parameters(self, layer: int) -> dict[str, ParameterSpec]:
        """Returns the parameters that a layer uses by their full names, in forward order."""
        specs = {}
        for parameter in self.layers[layer].parameters:
            name = self.parameter_name(layer, parameter.name)
            specs[name] = ParameterSpec(name, *parameter[1:])
        return specs

    def first_reached(self, trained: Collection[str]) -> int:
        """Returns the first layer with a backward pass where these weights are trained, -1 where the gradient goes on
        to the embedding, and the number of layers where none has one. A module merges what the norm before it makes."""
        if EMBEDDING in trained or MAPPING_IN in trained:
            return -1
        for layer in range(len(self.layers)):
            if layer == self.num_layers and FINAL_NORM in trained:
                return layer
            if not self.layer_parameters(layer).keys().isdisjoint(trained):
                return layer
        return len(self.layers)

    def parameters(self) -> dict[str, ParameterSpec]:
        """Returns every parameter by its full name, in forward order; adapters follow all others."""
        specs = [ParameterSpec(EMBEDDING, (self.vocabulary, self.embedding), "vocabulary", role="embedding")]
        if self.maps_embedding:
            specs.append(ParameterSpec(MAPPING_IN, (self.hidden, self.embedding)))
        for layer in range(self.num_layers):
            specs += self.layer_parameters(layer).values()
        if self.maps_embedding:
            specs.append(ParameterSpec(MAPPING_OUT, (self.embedding, self.hidden)))
        specs.append(ParameterSpec(FINAL_NORM, (self.embedding,), init="ones", role="norm"))
        if not self.tied:
            specs.append(ParameterSpec(HEAD, (self.vocabulary, self.embedding), "vocabulary"))
        for layer in range(self.num_layers, len(self.layers)):
            specs += self.layer_parameters(layer).values()
        specs.sort(key=lambda spec: spec.role == "adapter")
        return {spec.name: spec for spec in specs}
