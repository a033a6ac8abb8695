"""Describes the sublayers of a layer and their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from trainer.models.spec.model import (
    AdapterSpec,
    AttentionSpec,
    Init,
    LatentSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    ParameterSpec,
    Sharding,
)
from trainer.models.spec.names import (
    EXPERT_BIAS,
    EXPERT_DOWN_BIAS,
    EXPERT_GATE_BIAS,
    EXPERT_UP_BIAS,
    GATED_MLP,
    INPUT_NORM,
    MLP_NORM,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    ROUTER,
    ROUTER_BIAS,
    SHARED_GATE,
    SINKS,
    UNGATED_MLPS,
    sublayer_of,
)

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig
    from trainer.config.schema.moe import MoEConfig

Adapters: TypeAlias = Mapping[str, AdapterSpec]
"""Adapters by the name of the matrix within the layer."""


def latent_spec(settings: ModelConfig) -> LatentSpec | None:
    """Returns the sizes of multi-head latent attention; None where the model has another attention."""
    if not settings.multi_latent_attention:
        return None
    return LatentSpec(
        query_rank=settings.q_lora_rank,
        key_value_rank=settings.kv_lora_rank,
        nope_size=settings.qk_nope_head_dim,
        rope_size=settings.qk_rope_head_dim,
        normed=settings.use_qk_norm,
    )


def norm_spec(settings: ModelConfig) -> NormSpec:
    """Returns the norms of the residual stream."""
    centers = settings.centers_norms
    return NormSpec(settings.rms_norm_eps, settings.norm_offset, centers, centers and settings.norm_has_bias)


def attention_spec(settings: ModelConfig, layer: int = 0, adapters: Adapters = MappingProxyType({})) -> AttentionSpec:
    """Returns the attention sublayer of a layer; of the adapters it takes those of its matrices."""
    latent = latent_spec(settings)
    value_size = settings.head_size
    if latent is not None:
        value_size = settings.v_head_dim
    window = None
    if settings.has_window(layer):
        window = settings.sliding_window
    rotary_size = settings.rotary_size
    if not settings.has_rotary(layer) and settings.position_embedding_type != "none":
        rotary_size = 0
    return AttentionSpec(
        hidden=settings.hidden_size,
        heads=settings.num_heads,
        kv_heads=settings.kv_heads,
        head_size=settings.head_size,
        value_size=value_size,
        scale=_score_scale(settings),
        norm=norm_spec(settings),
        rotary_size=rotary_size,
        rotary_interleaved=settings.rope_interleave,
        score_cap=settings.attn_logit_softcapping,
        sinks=settings.attention_sinks,
        window=window,
        head_norm=settings.use_qk_norm and latent is None,
        norms_all_heads=settings.use_qk_norm and settings.qk_norm_all_heads,
        norms_rotated=settings.use_qk_norm and settings.qk_norm_after_rotary,
        pre_norm=settings.input_norms,
        post_norm=settings.post_self_attn_layernorm and latent is None,
        latent=latent,
        dropout=settings.attention_dropout,
        output_dropout=settings.hidden_dropout,
        output_scale=settings.residual_multiplier,
        adapters={name: adapter for name, adapter in adapters.items() if sublayer_of(name) == "attention"},
    )


def _score_scale(settings: ModelConfig) -> float:
    """Returns the factor on the products of queries and keys.

    With latent attention, the square of yarn's factor for mscale_all_dim multiplies it (transformers' DeepseekV3):
    elsewhere cosines and sines have this factor, but here they rotate only a part of a head.
    """
    scaling = settings.rope_scaling
    if settings.softmax_scale is not None:
        return settings.softmax_scale
    scale = settings.head_size**-0.5
    if latent_spec(settings) is None or scaling is None or scaling.rope_type == "default":
        return scale
    return scale * scaling.mscale_of(scaling.mscale_all_dim or 0.0) ** 2


def mlp_spec(settings: ModelConfig, adapters: Adapters = MappingProxyType({})) -> MlpSpec:
    """Returns the feed-forward sublayer of a dense layer; of the adapters it takes those of its matrices."""
    matrices: tuple[str, ...] = GATED_MLP
    if not settings.gated_linear_unit:
        matrices = UNGATED_MLPS[settings.mlp_names]
    return MlpSpec(
        hidden=settings.hidden_size,
        width=settings.ffn_size,
        norm=norm_spec(settings),
        pre_norm=settings.input_norms,
        post_norm=settings.post_mlp_layernorm,
        output_dropout=settings.hidden_dropout,
        output_scale=settings.residual_multiplier,
        matrices=matrices,
        activation=settings.activation,
        is_parallel=settings.parallel_attn,
        adapters={name: adapter for name, adapter in adapters.items() if sublayer_of(name) == "mlp"},
    )


def moe_spec(settings: ModelConfig) -> MoeSpec:
    """Returns the feed-forward sublayer of an MoE layer."""
    moe = moe_config(settings)
    return MoeSpec(
        hidden=settings.hidden_size,
        norm=norm_spec(settings),
        experts=moe.expert_num,
        chosen=moe.num_experts_chosen,
        width=settings.expert_size,
        shared_width=settings.shared_expert_size,
        shared_gate=settings.has_shared_gate,
        down_bias=settings.down_has_bias or moe.moe_mlp_has_bias,
        biases=moe.moe_mlp_has_bias,
        router_bias=moe.moe_router_has_bias,
        swiglu_limit=moe.swiglu_limit,
        swiglu_alpha=moe.swiglu_alpha,
        expert_bias=moe.has_expert_bias,
        output_dropout=settings.hidden_dropout,
        output_scale=settings.residual_multiplier,
    )


def moe_config(settings: ModelConfig) -> MoEConfig:
    """Returns the section that configures the experts of a model with MoE layers."""
    assert settings.experts is not None
    return settings.experts


def attention_parameters(settings: ModelConfig) -> list[ParameterSpec]:
    """Returns the parameters of the attention sublayer of a layer, norm first, without adapters."""
    spec = attention_spec(settings)
    if spec.latent is not None:
        return list(_latent_attention_parameters(settings, spec, spec.latent))
    return list(_grouped_attention_parameters(settings, spec))


def mlp_parameters(settings: ModelConfig) -> list[ParameterSpec]:
    """Returns the parameters of the feed-forward sublayer of a dense layer, norm first, without adapters."""
    spec = mlp_spec(settings)
    parameters: list[ParameterSpec] = []
    if spec.pre_norm and not spec.is_parallel:
        parameters += spec.norm.parameters(MLP_NORM, spec.hidden)
    *inner, output = spec.matrices
    for name in inner:
        parameters += _linear(name, spec.width, spec.hidden, settings.mlp_has_bias, "column")
    parameters += _linear(output, spec.hidden, spec.width, settings.down_has_bias, "row", "residual")
    if spec.post_norm:
        parameters.append(_norm(POST_MLP_NORM, spec.hidden))
    return parameters


def moe_parameters(settings: ModelConfig) -> list[ParameterSpec]:
    """Returns the parameters of the feed-forward sublayer of an MoE layer: norm, router, experts, shared experts, gate.

    The ranks of a tensor-parallel group share the tokens for the experts, so each computes a part of the gradients of
    norm, router and gate.
    """
    spec = moe_spec(settings)
    hidden = spec.hidden
    experts = (spec.experts, spec.width, hidden)
    shared = (spec.shared_width, hidden)
    parameters = [
        _norm("post_attention_layernorm.weight", hidden, "partial"),
        ParameterSpec(ROUTER, (spec.experts, hidden), "partial", role="router"),
    ]
    if spec.router_bias:
        parameters.append(ParameterSpec(ROUTER_BIAS, (spec.experts,), "partial", "zeros", "bias"))
    if spec.expert_bias:
        parameters.append(ParameterSpec(EXPERT_BIAS, (spec.experts,), init="zeros", role="buffer"))
    parameters += [
        ParameterSpec("mlp.experts.gate_proj.weight", experts, "expert"),
        ParameterSpec("mlp.experts.up_proj.weight", experts, "expert"),
        ParameterSpec("mlp.experts.down_proj.weight", (spec.experts, hidden, spec.width), "expert", "residual"),
    ]
    if spec.down_bias:
        parameters.append(ParameterSpec(EXPERT_DOWN_BIAS, (spec.experts, hidden), "expert", "zeros", "bias"))
    if spec.biases:
        for name in (EXPERT_GATE_BIAS, EXPERT_UP_BIAS):
            parameters.append(ParameterSpec(name, (spec.experts, spec.width), "expert", "zeros", "bias"))
    if spec.shared_width:
        parameters += [
            ParameterSpec("mlp.shared_experts.gate_proj.weight", shared, "column"),
            ParameterSpec("mlp.shared_experts.up_proj.weight", shared, "column"),
            ParameterSpec("mlp.shared_experts.down_proj.weight", (hidden, spec.shared_width), "row", "residual"),
        ]
    if spec.shared_gate:
        parameters.append(ParameterSpec(SHARED_GATE, (1, hidden), "partial", role="router"))
    return parameters


def _grouped_attention_parameters(settings: ModelConfig, spec: AttentionSpec) -> Iterator[ParameterSpec]:
    hidden = spec.hidden
    queries = spec.heads * spec.head_size
    keys = spec.kv_heads * spec.head_size
    if spec.pre_norm:
        yield from spec.norm.parameters(INPUT_NORM, hidden)
    yield from _linear("self_attn.q_proj", queries, hidden, settings.qkv_has_bias, "column")
    yield from _linear("self_attn.k_proj", keys, hidden, settings.qkv_has_bias, "kv_column")
    yield from _linear("self_attn.v_proj", keys, hidden, settings.qkv_has_bias, "kv_column")
    yield from _linear("self_attn.o_proj", hidden, queries, settings.attn_proj_has_bias, "row", "residual")
    if spec.sinks:
        yield ParameterSpec(SINKS, (spec.heads,), "column", role="bias")
    if spec.head_norm:
        # A rank norms the heads that it computes.
        for name, width in zip("qk", spec.norm_widths, strict=True):
            yield _norm(f"self_attn.{name}_norm.weight", width, "partial")
    if spec.post_norm:
        yield _norm(POST_ATTENTION_NORM, hidden)


def _latent_attention_parameters(
    settings: ModelConfig, spec: AttentionSpec, latent: LatentSpec
) -> Iterator[ParameterSpec]:
    """Yields the parameters of multi-head latent attention (DeepSeek-V2, section 2.1), with DeepSeek's names.

    The rows of a head in q_b_proj (or q_proj) make the part of its query without positions, then the rotated part. In
    kv_b_proj they make its key, then its value. kv_a_proj_with_mqa makes the latent vector, then the shared key.
    """
    hidden = spec.hidden
    queries = spec.heads * spec.head_size
    keys_and_values = spec.heads * (latent.nope_size + spec.value_size)
    rank = latent.key_value_rank
    bias = settings.qkv_has_bias
    yield _norm("input_layernorm.weight", hidden)
    if latent.query_rank is None:
        yield ParameterSpec("self_attn.q_proj.weight", (queries, hidden), "column")
    else:
        yield from _linear("self_attn.q_a_proj", latent.query_rank, hidden, bias, "replicated")
        if latent.normed:
            yield _norm("self_attn.q_a_layernorm.weight", latent.query_rank)
        yield ParameterSpec("self_attn.q_b_proj.weight", (queries, latent.query_rank), "column")
    yield from _linear("self_attn.kv_a_proj_with_mqa", rank + latent.rope_size, hidden, bias, "replicated")
    if latent.normed:
        yield _norm("self_attn.kv_a_layernorm.weight", rank)
    yield ParameterSpec("self_attn.kv_b_proj.weight", (keys_and_values, rank), "column")
    values = spec.heads * spec.value_size
    yield from _linear("self_attn.o_proj", hidden, values, settings.attn_proj_has_bias, "row", "residual")


def mtp_parameters(hidden: int) -> list[ParameterSpec]:
    """Returns the parameters that an MTP module has besides those of a layer."""
    return [
        _norm("enorm.weight", hidden),
        _norm("hnorm.weight", hidden),
        ParameterSpec("eh_proj.weight", (hidden, 2 * hidden)),
        _norm("shared_head.norm.weight", hidden),
    ]


def _linear(
    name: str, outputs: int, inputs: int, has_bias: bool, sharding: Sharding, init: Init = "normal"
) -> Iterator[ParameterSpec]:
    """Yields the weight of a matrix and its bias, which is replicated if the matrix is sharded by inputs."""
    yield ParameterSpec(f"{name}.weight", (outputs, inputs), sharding, init)
    if has_bias:
        if sharding == "row":
            sharding = "replicated"
        yield ParameterSpec(f"{name}.bias", (outputs,), sharding, "zeros", "bias")


def _norm(name: str, size: int, sharding: Sharding = "replicated") -> ParameterSpec:
    return ParameterSpec(name, (size,), sharding, "ones", "norm")
