"""The description of a decoder: parameters, layers, the embedding and the head, as plain values.

`trainer.models.spec.build` makes these values from `model_config`; cells, native CPU layers, the layout over ranks,
initial values, checkpoints and the plan read them. Layers that compute the same have equal `LayerSpec`s, which are one
object.

Legend: D hidden, H query heads, K key/value heads, d head size, F width of a feed-forward layer, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from trainer.models.spec.names import (
    EMBEDDING,
    FINAL_NORM,
    GATED_MLP,
    HEAD,
    INPUT_NORM,
    MAPPING_IN,
    MAPPING_OUT,
    MLP_NORM,
    SCORE,
    adapter_names,
    layer_prefix,
    norm_bias,
)
from trainer.parallel.sharding import shard_range

if TYPE_CHECKING:
    from trainer.config.schema.model import Activation

Sharding: TypeAlias = Literal["replicated", "column", "kv_column", "row", "vocabulary", "expert", "partial"]
"""How tensor-parallel (or for "expert" expert-parallel) ranks shard a parameter: not at all; by its outputs; by its
outputs where key/value heads may be replicated; by its inputs; by the vocabulary; by its stack of experts. A "partial"
parameter is replicated, but each rank computes only a part of its gradient."""
Init: TypeAlias = Literal[
    "normal", "residual", "ones", "zeros", "lora_a", "lora_b", "lora_embedding_b", "lora_magnitude"
]
"""Initial value; "residual" is normal, scaled down with the depth of the model."""
Role: TypeAlias = Literal["embedding", "matrix", "norm", "bias", "router", "buffer", "adapter"]


class ParameterSpec(NamedTuple):
    """One parameter. Its name is the one within the layer for a parameter of a layer, otherwise the full name."""

    name: str
    shape: tuple[int, ...]
    sharding: Sharding = "replicated"
    init: Init = "normal"
    role: Role = "matrix"

    def tensor_shards(self, ranks: int, kv_heads: int) -> tuple[int, int]:
        """Returns the number of shards over `ranks` tensor-parallel ranks, and the sharded dimension.

        With fewer key/value heads than ranks, neighbouring ranks have the same head.
        """
        if self.sharding == "row":
            return ranks, 1
        if self.sharding == "kv_column":
            return min(ranks, kv_heads), 0
        if self.sharding in ("column", "vocabulary"):
            return ranks, 0
        return 1, 0

    def local(self, ranks: int, kv_heads: int) -> ParameterSpec:
        """Returns the shard of a layer's parameter that each of `ranks` tensor-parallel ranks has."""
        shards, dimension = self.tensor_shards(ranks, kv_heads)
        shape = list(self.shape)
        shape[dimension] //= shards
        return self._replace(shape=tuple(shape))


class NormSpec(NamedTuple):
    """A norm of rows: x / sqrt(mean(x^2) + eps) * (offset + weight) + bias.

    Attributes:
        offset: 1 where weights are zero-centered, else 0.
        centers: It takes x without the mean of the row: LayerNorm. Otherwise RMSNorm.
        has_bias: There is a bias.
    """

    eps: float
    offset: float = 0.0
    centers: bool = False
    has_bias: bool = False

    @property
    def rms(self) -> NormSpec:
        """Returns the norm of queries and keys, and of the outputs of sublayers: RMSNorm in every model."""
        return NormSpec(self.eps, self.offset)

    def parameters(self, name: str, size: int, sharding: Sharding = "replicated") -> Iterator[ParameterSpec]:
        """Yields the weight, which has this name, and the bias."""
        yield ParameterSpec(name, (size,), sharding, "ones", "norm")
        if self.has_bias:
            yield ParameterSpec(norm_bias(name), (size,), sharding, "zeros", "bias")


class AdapterSpec(NamedTuple):
    """A low-rank adapter of a matrix: y += scale * dropout(x) A^T B^T (Hu et al. 2021, equation 3)."""

    rank: int
    scale: float
    dropout: float = 0.0
    a_std: float | None = None
    """Standard deviation of A's initial values; None where they are uniform."""
    b_std: float = 0.0
    has_magnitude: bool = False
    """DoRA: the rows of W + scale B A are scaled to the lengths of a trained vector."""


class LatentSpec(NamedTuple):
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1)."""

    query_rank: int | None
    """Width of the latent vector of queries; None: the queries come from the hidden state."""
    key_value_rank: int
    """Width of the latent vector of keys and values."""
    nope_size: int
    """Width of the part of a query or key that is not rotated."""
    rope_size: int
    """Width of the rotated part, whose key all heads share."""
    normed: bool = True
    """Whether latent vectors are normed before the matrices that take them."""
    eps: float = 1e-6
    """Epsilon of the norms of latent vectors, which in transformers and in DeepSeek's code does not depend on the
    epsilon of the other norms."""

    @property
    def down_size(self) -> int:
        """Returns the width of the down-projections together, from which all heads are computed."""
        return (self.query_rank or 0) + self.key_value_rank + self.rope_size


@dataclass(frozen=True)
class AttentionSpec:
    """The attention sublayer of a layer.

    Attributes:
        head_size, value_size: Widths of a query or key, and of a value, of one head.
        scale: Factor on the scores before the softmax.
        sinks: Each head has a learned score without a key, which takes its part of the softmax (gpt-oss).
        score_cap: Scores s become cap * tanh(s / cap) (Gemma-2); None: they stay.
        window: Tokens that a query sees, including its token; None: all tokens up to its token.
        rotary_size: How many numbers of a head, or with `latent` of its rotated part, are rotated; 0 in a layer without
            rotary positions. Where no layer has them, the angles of all positions are 0 instead.
        rotary_interleaved: Rotates neighbouring numbers instead of the two halves.
        head_norm: Queries and keys of each head are normed before they are rotated.
        norms_all_heads: With `head_norm`: the heads are normed together, not each.
        norms_rotated: With `head_norm`: queries and keys are normed after they are rotated (Hunyuan).
        pre_norm: The input is normed.
        post_norm: The output is normed before it is added to the residual stream.
        norm: The kind of the norms.
        dropout: Dropout rate of the attention probabilities.
        output_dropout: Dropout rate of the output, before it is added to the residual stream.
        output_scale: Factor on the output, after norm and dropout.
        adapters: By the name of the matrix, for example "self_attn.q_proj".
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    scale: float
    norm: NormSpec
    rotary_size: int
    rotary_interleaved: bool = False
    score_cap: float | None = None
    sinks: bool = False
    window: int | None = None
    head_norm: bool = False
    norms_all_heads: bool = False
    norms_rotated: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    latent: LatentSpec | None = None
    dropout: float = 0.0
    output_dropout: float = 0.0
    output_scale: float = 1.0
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict, hash=False)

    def local(self, ranks: int) -> AttentionSpec:
        """Returns the attention of each of `ranks` tensor-parallel ranks, which has some of the heads."""
        return replace(self, heads=self.heads // ranks, kv_heads=max(1, self.kv_heads // ranks))

    @property
    def is_rotated(self) -> bool:
        """Returns whether the layer has rotary positions."""
        return self.rotary_size > 0

    @property
    def norm_widths(self) -> tuple[int, int]:
        """Returns how many numbers of queries, and of keys, are normed together."""
        if self.norms_all_heads:
            return self.heads * self.head_size, self.kv_heads * self.head_size
        return self.head_size, self.head_size

    @property
    def changes_output(self) -> bool:
        """Returns whether the output is normed, dropped or scaled before it is added to the residual stream."""
        return self.post_norm or self.output_dropout > 0 or self.output_scale != 1

    @property
    def gathered_width(self) -> int:
        """Returns the columns that tensor-parallel ranks gather before the matrices that they shard."""
        if self.latent is None:
            return self.hidden
        if self.latent.query_rank is None:
            return self.hidden + self.latent.down_size
        return self.latent.down_size

    @property
    def shared_kv_heads(self) -> int | None:
        """Returns the key/value heads, each of which several tensor-parallel ranks may have.

        Returns None with `latent`: there each query head has a key/value head.
        """
        if self.latent is not None:
            return None
        return self.kv_heads

    @property
    def cache_heads(self) -> int:
        """Returns the heads of the KV cache: the key/value heads, or 1 for latent vectors, which all heads share."""
        if self.latent is not None:
            return 1
        return self.kv_heads

    @property
    def cache_widths(self) -> tuple[int, int]:
        """Returns the widths of a token in the KV cache: of keys and values, or of latent vector and shared key."""
        if self.latent is not None:
            return self.latent.key_value_rank, self.latent.rope_size
        return self.kv_heads * self.head_size, self.kv_heads * self.value_size


@dataclass(frozen=True)
class MlpSpec:
    """A feed-forward sublayer: W_down (act(W_gate x) * W_up x), or without a gate W_down act(W_up x).

    Attributes:
        matrices: The names of the matrices within the layer, in forward order.
        activation: act.
        is_parallel: It takes what attention takes, the norm of the layer's input, and adds to what attention leaves.
        norm, pre_norm, post_norm, output_dropout, output_scale, adapters: As in `AttentionSpec`.
    """

    hidden: int
    width: int
    norm: NormSpec
    pre_norm: bool = True
    post_norm: bool = False
    output_dropout: float = 0.0
    output_scale: float = 1.0
    matrices: tuple[str, ...] = GATED_MLP
    activation: Activation = "silu"
    is_parallel: bool = False
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict, hash=False)

    @property
    def changes_output(self) -> bool:
        """Returns whether the output is normed, dropped or scaled before it is added to the residual stream."""
        return self.post_norm or self.output_dropout > 0 or self.output_scale != 1

    @property
    def norm_name(self) -> str:
        """Returns the name, within the layer, of the weight of the norm before the sublayer."""
        if self.is_parallel:
            return INPUT_NORM
        return MLP_NORM

    @property
    def has_gate(self) -> bool:
        """Returns whether there is a W_gate."""
        return len(self.matrices) == len(GATED_MLP)

    def local(self, ranks: int) -> MlpSpec:
        """Returns the sublayer of each of `ranks` tensor-parallel ranks, which has some of the columns."""
        return replace(self, width=self.width // ranks)


@dataclass(frozen=True)
class MoeSpec:
    """The feed-forward sublayer of an MoE layer.

    Attributes:
        experts, chosen: How many experts the sublayer has, and how many a token takes.
        width: Width of an expert.
        shared_width: Width of the shared experts together; 0: there are none.
        shared_gate: The output of the shared experts is multiplied by a sigmoid gate.
        down_bias: The output of each expert has a bias.
        biases: Gate and up of each expert have biases, too.
        router_bias: The router's logits have a bias.
        swiglu_limit, swiglu_alpha: See `trainer.arrays.tiles.clamped_swiglu`; None: the activation is SwiGLU.
        expert_bias: The router has an expert bias for load balancing.
        output_scale: Factor on the output, after dropout.
    """

    hidden: int
    norm: NormSpec
    experts: int
    chosen: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    down_bias: bool = False
    expert_bias: bool = False
    output_dropout: float = 0.0
    output_scale: float = 1.0
    biases: bool = False
    router_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    def local(self, ranks: int) -> MoeSpec:
        """Returns the sublayer of each of `ranks` tensor-parallel ranks, which has columns of the shared experts."""
        return replace(self, shared_width=self.shared_width // ranks)


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the decoder, or of an MTP module.

    Attributes:
        parameters: In forward order, adapters at the end, with names within the layer. The layer of an MTP module
            begins with the parameters that merge its inputs and the norm before its head.
    """

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    parameters: tuple[ParameterSpec, ...]

    @property
    def is_moe(self) -> bool:
        """Whether this is an MoE layer."""
        return isinstance(self.mlp, MoeSpec)

    @property
    def adapters(self) -> Mapping[str, AdapterSpec]:
        """Returns the adapters of both sublayers by the names of their matrices; experts have none."""
        if isinstance(self.mlp, MoeSpec):
            return self.attention.adapters
        return {**self.attention.adapters, **self.mlp.adapters}

    def local(self, ranks: int) -> LayerSpec:
        """Returns the layer of each of `ranks` tensor-parallel ranks."""
        kv_heads = self.attention.kv_heads
        parameters = tuple(parameter.local(ranks, kv_heads) for parameter in self.parameters)
        return LayerSpec(self.attention.local(ranks), self.mlp.local(ranks), parameters)

    def active_size(self, parameter: ParameterSpec) -> int:
        """Returns how many elements of a parameter compute one token: those of the chosen experts, or else all."""
        size = math.prod(parameter.shape)
        if isinstance(self.mlp, MoeSpec) and parameter.sharding == "expert":
            return size * self.mlp.chosen // self.mlp.experts
        return size


@dataclass(frozen=True)
class ModelSpec:
    """A decoder.

    Attributes:
        embedding: Width of the embedding and of the head; `hidden` unless matrices map between the two.
        layers: The layers; the last `mtp_modules` are those of the MTP modules. Equal layers are one object.
        norm: The norm before the head. Those of the MTP modules have its epsilon.
        tied: The head is the embedding.
        has_score: The head gives a score instead of logits.
        maps_embedding: A matrix maps the embedding to the residual stream, another one the residual stream to the head.
        attention_group: How many consecutive layers share the attention parameters of the first of them.
        adapters, adapter_parameters: Those of the embedding ("model.embed_tokens") and of the head ("lm_head").
    """

    vocabulary: int
    hidden: int
    embedding: int
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    mtp_modules: int = 0
    tied: bool = False
    has_score: bool = False
    maps_embedding: bool = False
    attention_group: int = 1
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict, hash=False)
    adapter_parameters: tuple[ParameterSpec, ...] = ()

    @property
    def num_layers(self) -> int:
        """Returns the number of layers without those of the MTP modules."""
        return len(self.layers) - self.mtp_modules

    @property
    def head(self) -> str:
        """Returns the name of the head's matrix."""
        if self.has_score:
            return SCORE
        if self.tied:
            return EMBEDDING
        return HEAD

    @property
    def module_layers(self) -> range:
        """Returns the numbers of the layers of the MTP modules."""
        return range(self.num_layers, len(self.layers))

    def local(self, ranks: int, rank: int = 0) -> ModelSpec:
        """Returns the local model of one of `ranks` tensor-parallel ranks.

        It has the rank's heads, columns of feed-forward layers and shared experts, and shard of the vocabulary.
        """
        if ranks == 1:
            return self
        local = {layer: layer.local(ranks) for layer in self.layers}
        vocabulary = shard_range(self.vocabulary, rank, ranks)
        layers = tuple(local[layer] for layer in self.layers)
        return replace(self, vocabulary=vocabulary.stop - vocabulary.start, layers=layers)

    def parameter_name(self, layer: int, name: str) -> str:
        """Returns the full name of a parameter of a layer, which may be in another layer (see `attention_group`)."""
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
        """Returns the first layer with a backward pass if these weights are trained.

        Returns -1 if the gradient goes on to the embedding, and the number of layers if no layer has a backward pass.
        An MTP module takes the output of the norm before it.
        """
        if not {EMBEDDING, MAPPING_IN, *adapter_names(EMBEDDING.removesuffix(".weight"))}.isdisjoint(trained):
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
        specs += self.norm.parameters(FINAL_NORM, self.embedding)
        if self.has_score:
            specs.append(ParameterSpec(SCORE, (1, self.embedding)))
        elif not self.tied:
            specs.append(ParameterSpec(HEAD, (self.vocabulary, self.embedding), "vocabulary"))
        for layer in range(self.num_layers, len(self.layers)):
            specs += self.layer_parameters(layer).values()
        specs += self.adapter_parameters
        specs.sort(key=lambda spec: spec.role == "adapter")
        return {spec.name: spec for spec in specs}
