"""Makes the description of a model from its settings, `model_config`.

Other modules read the description instead of the keys that decide it. Building it costs about a millisecond for 61
layers: keep it where it is read for every layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from trainer.config.schema.classifier import ClassifierConfig
from trainer.models.spec.model import (
    AdapterSpec,
    AttentionSpec,
    Init,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    ParameterSpec,
    Role,
    Sharding,
)
from trainer.models.spec.names import (
    EXPERT_BIAS,
    EXPERT_DOWN_BIAS,
    POST_ATTENTION_NORM,
    POST_MLP_NORM,
    ROUTER,
    SHARED_GATE,
    adapter_names,
    sublayer_of,
)

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

_DROPOUT_SITES = ("probabilities", "attention_output", "mlp_output")


def model_spec(settings: ModelConfig) -> ModelSpec:
    """Returns the description of a decoder. Equal layers are one object."""
    layers: dict[tuple[object, ...], LayerSpec] = {}
    of_layers = []
    for layer in range(settings.num_layers + settings.mtp_depth):
        is_mtp = layer >= settings.num_layers
        is_moe = settings.is_moe_layer(layer)
        targets = () if is_mtp else layer_targets(settings, layer)
        kind = (is_mtp, is_moe, settings.has_window(layer), targets)
        if kind not in layers:
            layers[kind] = _layer_spec(settings, layer, targets)
        of_layers.append(layers[kind])
    return ModelSpec(
        vocabulary=settings.vocab_size,
        hidden=settings.hidden_size,
        embedding=settings.embedding_width,
        eps=settings.rms_norm_eps,
        layers=tuple(of_layers),
        mtp_modules=settings.mtp_depth,
        tied=settings.tie_word_embeddings,
        maps_embedding=settings.maps_embedding,
        attention_group=settings.layers_group,
    )


def parameter_specs(settings: ModelConfig | ClassifierConfig) -> dict[str, ParameterSpec]:
    """Returns every parameter of a decoder or a classifier by its full name, in forward order, adapters at the end."""
    if not isinstance(settings, ClassifierConfig):
        return model_spec(settings).parameters()
    specs = []
    for (weight, bias), inp, out in zip(
        classifier_names(settings), settings.sizes, settings.sizes[1:], strict=False
    ):
        specs += [ParameterSpec(weight, (out, inp)), _bias(bias, out)]
    return {spec.name: spec for spec in specs}


def classifier_names(settings: ClassifierConfig) -> list[tuple[str, str]]:
    """Returns weight and bias of each layer, named as in MindSpore's tutorial, where each second cell is a ReLU."""
    prefixes = [f"dense_relu_sequential.{2 * layer}" for layer in range(len(settings.sizes) - 1)]
    return [(f"{prefix}.weight", f"{prefix}.bias") for prefix in prefixes]


def dropout_sites(settings: ModelConfig, layer: int) -> dict[str, int]:
    """Returns the numbers of a layer's dropout masks, of which each names a random stream, whatever the rates are.

    The keys are "probabilities", "attention_output", "mlp_output", then the names of the layer's adapted projections,
    for example "self_attn.q_proj". The sites of adapters follow those of all layers; every projection of every layer
    has one, so that a mask does not depend on which projections are adapted.
    """
    first = layer * len(_DROPOUT_SITES)
    sites = {name: first + number for number, name in enumerate(_DROPOUT_SITES)}
    if layer >= settings.num_layers:
        return sites
    names = list(settings.projections)
    first = (settings.num_layers + settings.mtp_depth) * len(_DROPOUT_SITES) + layer * len(names)
    return sites | {name: first + names.index(name) for name in layer_targets(settings, layer)}


def layer_targets(settings: ModelConfig, layer: int) -> tuple[str, ...]:
    """Returns the projections of a layer that have an adapter, in forward order: experts have none."""
    if settings.pet_config is None:
        return ()
    targets = settings.pet_config.targets(layer, settings.projections)
    return tuple(name for name in targets if sublayer_of(name) == "attention" or not settings.is_moe_layer(layer))


def _layer_spec(settings: ModelConfig, layer: int, targets: tuple[str, ...]) -> LayerSpec:
    """Describes a layer whose adapted projections are `targets`."""
    adapters: dict[str, AdapterSpec] = {}
    if settings.pet_config is not None:
        pet = settings.pet_config
        adapters = {name: AdapterSpec(pet.lora_rank, pet.scale, pet.lora_dropout) for name in targets}
    parameters: list[ParameterSpec] = []
    if layer >= settings.num_layers:
        parameters += _mtp_parameters(settings.hidden_size)
    parameters += attention_parameters(settings)
    mlp: MlpSpec | MoeSpec
    if settings.is_moe_layer(layer):
        mlp = _moe_spec(settings)
        parameters += moe_parameters(settings)
    else:
        mlp = _mlp_spec(settings, adapters)
        parameters += mlp_parameters(settings)
    matrices = {parameter.name: parameter for parameter in parameters}
    for name, adapter in adapters.items():
        parameters += _adapter_parameters(matrices[f"{name}.weight"], name, adapter.rank)
    return LayerSpec(_attention_spec(settings, layer, adapters), mlp, tuple(parameters))


def _attention_spec(settings: ModelConfig, layer: int, adapters: Mapping[str, AdapterSpec]) -> AttentionSpec:
    latent = None
    if settings.multi_latent_attention:
        latent = LatentSpec(
            query_rank=settings.q_lora_rank,
            key_value_rank=settings.kv_lora_rank,
            nope_size=settings.qk_nope_head_dim,
            rope_size=settings.qk_rope_head_dim,
        )
    return AttentionSpec(
        hidden=settings.hidden_size,
        heads=settings.num_heads,
        kv_heads=settings.kv_heads,
        head_size=settings.head_size,
        value_size=settings.value_size,
        scale=settings.attention_scale,
        eps=settings.rms_norm_eps,
        rotary_size=settings.rotary_size,
        rotary_interleaved=settings.rope_interleave,
        window=settings.sliding_window if settings.has_window(layer) else None,
        head_norm=settings.use_qk_norm and latent is None,
        post_norm=settings.post_self_attn_layernorm and latent is None,
        latent=latent,
        dropout=settings.attention_dropout,
        output_dropout=settings.hidden_dropout,
        adapters={name: adapter for name, adapter in adapters.items() if sublayer_of(name) == "attention"},
    )


def _mlp_spec(settings: ModelConfig, adapters: Mapping[str, AdapterSpec]) -> MlpSpec:
    return MlpSpec(
        hidden=settings.hidden_size,
        width=settings.ffn_size,
        eps=settings.rms_norm_eps,
        post_norm=settings.post_mlp_layernorm,
        output_dropout=settings.hidden_dropout,
        adapters={name: adapter for name, adapter in adapters.items() if sublayer_of(name) == "mlp"},
    )


def _moe_spec(settings: ModelConfig) -> MoeSpec:
    moe = settings.experts
    return MoeSpec(
        hidden=settings.hidden_size,
        eps=settings.rms_norm_eps,
        experts=moe.expert_num,
        chosen=moe.num_experts_chosen,
        width=settings.expert_size,
        shared_width=settings.shared_expert_size,
        shared_gate=settings.has_shared_gate,
        down_bias=settings.down_has_bias,
        expert_bias=moe.has_expert_bias,
        output_dropout=settings.hidden_dropout,
    )


def attention_parameters(settings: ModelConfig) -> list[ParameterSpec]:
    """Returns the parameters of the attention sublayer of any layer, norm first, without adapters."""
    spec = _attention_spec(settings, 0, {})
    if spec.latent is not None:
        return list(_latent_attention_parameters(settings, spec, spec.latent))
    return list(_grouped_attention_parameters(settings, spec))


def mlp_parameters(settings: ModelConfig) -> list[ParameterSpec]:
    """Returns the parameters of the feed-forward sublayer of a layer without experts, norm first, without adapters."""
    spec = _mlp_spec(settings, {})
    parameters = [_norm("post_attention_layernorm.weight", spec.hidden)]
    parameters += _linear("mlp.gate_proj", spec.width, spec.hidden, settings.mlp_has_bias, "column")
    parameters += _linear("mlp.up_proj", spec.width, spec.hidden, settings.mlp_has_bias, "column")
    parameters += _linear("mlp.down_proj", spec.hidden, spec.width, settings.down_has_bias, "row", "residual")
    if spec.post_norm:
        parameters.append(_norm(POST_MLP_NORM, spec.hidden))
    return parameters


def moe_parameters(settings: ModelConfig) -> list[ParameterSpec]:
    """Returns the parameters of a layer's mixture of experts: norm, router, stacked experts, shared experts, gate.

    The ranks of a tensor-parallel group share the tokens for the experts, so what is next to the router has a part of
    its gradient on each.
    """
    spec = _moe_spec(settings)
    hidden = spec.hidden
    experts = (spec.experts, spec.width, hidden)
    shared = (spec.shared_width, hidden)
    parameters = [
        _norm("post_attention_layernorm.weight", hidden, "partial"),
        ParameterSpec(ROUTER, (spec.experts, hidden), "partial", role="router"),
    ]
    if spec.expert_bias:
        parameters.append(ParameterSpec(EXPERT_BIAS, (spec.experts,), init="zeros", role="buffer"))
    parameters += [
        ParameterSpec("mlp.experts.gate_proj.weight", experts, "expert"),
        ParameterSpec("mlp.experts.up_proj.weight", experts, "expert"),
        ParameterSpec("mlp.experts.down_proj.weight", (spec.experts, hidden, spec.width), "expert", "residual"),
    ]
    if spec.down_bias:
        parameters.append(ParameterSpec(EXPERT_DOWN_BIAS, (spec.experts, hidden), "expert", "zeros", "bias"))
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
    yield _norm("input_layernorm.weight", hidden)
    yield from _linear("self_attn.q_proj", queries, hidden, settings.qkv_has_bias, "column")
    yield from _linear("self_attn.k_proj", keys, hidden, settings.qkv_has_bias, "kv_column")
    yield from _linear("self_attn.v_proj", keys, hidden, settings.qkv_has_bias, "kv_column")
    yield from _linear("self_attn.o_proj", hidden, queries, settings.attn_proj_has_bias, "row", "residual")
    if spec.head_norm:
        # A rank norms the heads that it computes.
        yield _norm("self_attn.q_norm.weight", spec.head_size, "partial")
        yield _norm("self_attn.k_norm.weight", spec.head_size, "partial")
    if spec.post_norm:
        yield _norm(POST_ATTENTION_NORM, hidden)


def _latent_attention_parameters(
    settings: ModelConfig, spec: AttentionSpec, latent: LatentSpec
) -> Iterator[ParameterSpec]:
    """Yields those of multi-head latent attention (DeepSeek-V2, section 2.1), with DeepSeek's names.

    A head's rows of q_b_proj (or q_proj) make the part of its query without positions, then the rotated part; those of
    kv_b_proj its key, then its value. kv_a_proj_with_mqa makes the latent vector, then the key that all heads share.
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
        yield _norm("self_attn.q_a_layernorm.weight", latent.query_rank)
        yield ParameterSpec("self_attn.q_b_proj.weight", (queries, latent.query_rank), "column")
    yield from _linear("self_attn.kv_a_proj_with_mqa", rank + latent.rope_size, hidden, bias, "replicated")
    yield _norm("self_attn.kv_a_layernorm.weight", rank)
    yield ParameterSpec("self_attn.kv_b_proj.weight", (keys_and_values, rank), "column")
    values = spec.heads * spec.value_size
    yield from _linear("self_attn.o_proj", hidden, values, settings.attn_proj_has_bias, "row", "residual")


def _mtp_parameters(hidden: int) -> Iterator[ParameterSpec]:
    """Yields what a multi-token prediction module has besides a layer."""
    yield _norm("enorm.weight", hidden)
    yield _norm("hnorm.weight", hidden)
    yield ParameterSpec("eh_proj.weight", (hidden, 2 * hidden))
    yield _norm("shared_head.norm.weight", hidden)


def _adapter_parameters(matrix: ParameterSpec, name: str, rank: int) -> Iterator[ParameterSpec]:
    """Yields A and B of the adapter of a matrix. Next to outputs or inputs that ranks share, one of the two is sharded
    as the matrix, and the ranks have a part of the other's gradient each."""
    outputs, inputs = matrix.shape
    down, up = adapter_names(name)
    sharding_of_down: Sharding = matrix.sharding
    sharding_of_up: Sharding = matrix.sharding
    if matrix.sharding in ("column", "kv_column"):
        sharding_of_down = "partial"
    elif matrix.sharding == "row":
        sharding_of_up = "partial"
    yield ParameterSpec(down, (rank, inputs), sharding_of_down, "lora_a", "adapter")
    yield ParameterSpec(up, (outputs, rank), sharding_of_up, "zeros", "adapter")


def _linear(
    name: str, outputs: int, inputs: int, has_bias: bool, sharding: Sharding, init: Init = "normal"
) -> Iterator[ParameterSpec]:
    """Yields the weight of a matrix and its bias, which ranks shard by outputs or not at all."""
    yield ParameterSpec(f"{name}.weight", (outputs, inputs), sharding, init)
    if has_bias:
        yield _bias(f"{name}.bias", outputs, "replicated" if sharding == "row" else sharding)


def _bias(name: str, size: int, sharding: Sharding = "replicated") -> ParameterSpec:
    role: Role = "bias"
    return ParameterSpec(name, (size,), sharding, "zeros", role)


def _norm(name: str, size: int, sharding: Sharding = "replicated") -> ParameterSpec:
    return ParameterSpec(name, (size,), sharding, "ones", "norm")
