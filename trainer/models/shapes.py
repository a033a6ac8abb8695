"""Names and shapes of the parameters of a decoder and its adapters, and of a classifier.

Pure Python: `plan` counts weights with it.

The names are Hugging Face's for Llama, Qwen2, Qwen3, Qwen3-MoE, Glm4Moe and DeepseekV3, and so is the layout [out, in]
of every matrix. The experts of a layer are stacked, [experts, out, in]: one array to update, to shard and to multiply
by; on disk each has its own name. Multi-token prediction modules follow the last layer, as in DeepSeek-V3's files.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from trainer.config.schema.classifier import ClassifierConfig

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
MAPPING_IN, MAPPING_OUT = (f"model.embedding_hidden_mapping_{way}.weight" for way in ("in", "out"))
"""From the embedding to the residual stream, and back before the final norm, where the two differ in width."""
POST_ATTENTION_NORM, POST_MLP_NORM = "post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"
"""Norms after a sublayer, of what it adds to the residual stream."""
ROUTER = "mlp.gate.weight"
EXPERT_BIAS = "mlp.gate.e_score_correction_bias"
"""A buffer: it moves against the load of the experts, not by a gradient."""
EXPERT_DOWN_BIAS = "mlp.experts.down_proj.bias"
SHARED_GATE = "mlp.shared_expert_gate.weight"


def attention_shapes(settings: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one block's attention, norm first, in the order in which the block takes them."""
    if settings.multi_latent_attention:
        return _latent_attention_shapes(settings)
    hidden, queries = settings.hidden_size, settings.num_heads * settings.head_size
    keys = settings.kv_heads * settings.head_size
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes |= _linear(f"self_attn.{name}", out, hidden, settings.qkv_has_bias)
    shapes |= _linear("self_attn.o_proj", hidden, queries, settings.attn_proj_has_bias)
    if settings.use_qk_norm:
        shapes |= {f"self_attn.{name}.weight": (settings.head_size,) for name in ("q_norm", "k_norm")}
    if settings.post_self_attn_layernorm:
        shapes[POST_ATTENTION_NORM] = (hidden,)
    return shapes


def _latent_attention_shapes(settings: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Multi-head latent attention's (DeepSeek-V2, section 2.1), with DeepSeek's names.

    A head's rows of q_b_proj (or q_proj) make the part of its query without positions, then the rotated part; those of
    kv_b_proj its key, then its value. kv_a_proj_with_mqa makes the latent vector, then the key that all heads share.
    """
    hidden, heads, latent = settings.hidden_size, settings.num_heads, settings.kv_lora_rank
    queries, bias = heads * settings.head_size, settings.qkv_has_bias
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if settings.q_lora_rank is None:
        shapes["self_attn.q_proj.weight"] = (queries, hidden)
    else:
        shapes |= _linear("self_attn.q_a_proj", settings.q_lora_rank, hidden, bias)
        shapes["self_attn.q_a_layernorm.weight"] = (settings.q_lora_rank,)
        shapes["self_attn.q_b_proj.weight"] = (queries, settings.q_lora_rank)
    shapes |= _linear("self_attn.kv_a_proj_with_mqa", latent + settings.qk_rope_head_dim, hidden, bias)
    shapes["self_attn.kv_a_layernorm.weight"] = (latent,)
    shapes["self_attn.kv_b_proj.weight"] = (heads * (settings.qk_nope_head_dim + settings.v_head_dim), latent)
    return shapes | _linear("self_attn.o_proj", hidden, heads * settings.v_head_dim, settings.attn_proj_has_bias)


def mlp_shapes(settings: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one block's feed-forward layer, norm first, in the order in which the block takes them."""
    hidden, width, bias = settings.hidden_size, settings.ffn_size, settings.mlp_has_bias
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    for name in ("gate_proj", "up_proj"):
        shapes |= _linear(f"mlp.{name}", width, hidden, bias)
    shapes |= _linear("mlp.down_proj", hidden, width, settings.down_has_bias)
    if settings.post_mlp_layernorm:
        shapes[POST_MLP_NORM] = (hidden,)
    return shapes


def moe_shapes(settings: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one layer's mixture of experts, norm first: router, stacked experts, shared experts with their
    gate."""
    moe, hidden = settings.experts, settings.hidden_size
    width, shared = settings.expert_size, settings.shared_expert_size
    shapes: dict[str, tuple[int, ...]] = {"post_attention_layernorm.weight": (hidden,)}
    shapes[ROUTER] = (moe.expert_num, hidden)
    if moe.has_expert_bias:
        shapes[EXPERT_BIAS] = (moe.expert_num,)
    sizes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    shapes |= {f"mlp.experts.{name}.weight": (moe.expert_num, *size) for name, size in sizes.items()}
    if settings.down_has_bias:
        shapes[EXPERT_DOWN_BIAS] = (moe.expert_num, hidden)
    if shared:
        sizes = {"gate_proj": (shared, hidden), "up_proj": (shared, hidden), "down_proj": (hidden, shared)}
        shapes |= {f"mlp.shared_experts.{name}.weight": size for name, size in sizes.items()}
    if settings.has_shared_gate:
        shapes[SHARED_GATE] = (1, hidden)
    return shapes


def _layer_shapes(settings: ModelConfig) -> list[dict[str, tuple[int, ...]]]:
    """Parameters of each layer, then of each multi-token prediction module, by full names, without adapters."""
    kinds: dict[tuple[bool, bool], dict[str, tuple[int, ...]]] = {}  # the layers of a kind are alike
    layers = []
    for layer in range(settings.num_layers + settings.mtp_depth):
        kind = layer >= settings.num_layers, settings.is_moe_layer(layer)
        if kind not in kinds:
            kinds[kind] = _block_shapes(settings, *kind)
        prefix, shapes = layer_prefix(layer), kinds[kind]
        if not parameter_name(settings, layer, "self_attn.").startswith(prefix):  # it is in another layer of the group
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("self_attn.")}
        layers.append({prefix + name: shape for name, shape in shapes.items()})
    return layers


def _block_shapes(settings: ModelConfig, is_mtp: bool, is_moe: bool) -> dict[str, tuple[int, ...]]:
    shapes, hidden = {}, settings.hidden_size
    if is_mtp:
        shapes = {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "eh_proj.weight": (hidden, 2 * hidden)}
        shapes["shared_head.norm.weight"] = (hidden,)
    return shapes | attention_shapes(settings) | (moe_shapes(settings) if is_moe else mlp_shapes(settings))


def parameter_name(settings: ModelConfig, layer: int, name: str) -> str:
    """Full name of a parameter of a layer; layers of a group have those of attention in common (layers_group)."""
    if name.startswith("self_attn.") and layer < settings.num_layers:
        layer -= layer % settings.layers_group
    return layer_prefix(layer) + name


def is_buffer(name: str) -> bool:
    """Whether the parameter is a buffer: no gradient of it is computed and no optimizer updates it."""
    return name.endswith(EXPERT_BIAS)


def balanced_layers(settings: ModelConfig, frozen: Collection[str]) -> list[int]:
    """The layers whose expert bias is updated: those whose router and bias are not frozen."""
    moe = settings.experts
    if moe is None or not (moe.balance_via_topk_bias and moe.topk_bias_update_rate):
        return []
    parts = ROUTER, EXPERT_BIAS
    return [n for n in settings.moe_layers if not any(layer_prefix(n) + part in frozen for part in parts)]


def all_shapes(settings: ModelConfig | ClassifierConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter: the model's, then the adapters'."""
    return parameter_shapes(settings) | adapter_shapes(settings)


def adapter_shapes(settings: ModelConfig | ClassifierConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the adapters by its full name, in forward order; empty without `pet_config`.

    The names are those of Hugging Face's PEFT without their first part, `trainer.checkpoint.adapters.PREFIX`.
    """
    if settings.pet_config is None:
        return {}
    matrices, rank = attention_shapes(settings) | mlp_shapes(settings), settings.pet_config.lora_rank
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(settings.num_layers):
        for name in layer_targets(settings, layer):
            out, inp = matrices[f"{name}.weight"]
            down, up = (layer_prefix(layer) + part for part in adapter_names(name))
            shapes |= {down: (rank, inp), up: (out, rank)}
    return shapes


def layer_targets(settings: ModelConfig, layer: int) -> list[str]:
    """The projections of a layer that have an adapter: experts have none."""
    targets = settings.pet_config.targets(layer, settings.projections)
    return [name for name in targets if sublayer_of(name) == "attention" or not settings.is_moe_layer(layer)]


def adapter_names(projection: str) -> tuple[str, str]:
    """Names of the two matrices of a projection's adapter: A [rank, in] and B [out, rank]."""
    return f"{projection}.lora_A.weight", f"{projection}.lora_B.weight"


def adapted_projections(settings: ModelConfig) -> tuple[str, ...]:
    """The projections that have an adapter in some layer, in forward order."""
    if settings.pet_config is None:
        return ()
    found = {name for layer in range(settings.num_layers) for name in layer_targets(settings, layer)}
    return tuple(name for name in settings.projections if name in found)


def dropped_projections(settings: ModelConfig) -> tuple[str, ...]:
    """The projections whose adapters have dropout, in forward order."""
    drops = settings.pet_config is not None and settings.pet_config.lora_dropout > 0
    return adapted_projections(settings) if drops else ()


def block_names(settings: ModelConfig) -> list[str]:
    """The arguments of a block in order: its weights, then its adapters, then the masks of their dropout."""
    return [*block_weights(settings), *(mask_name(name) for name in dropped_projections(settings))]


def block_weights(settings: ModelConfig) -> list[str]:
    """The parameters among `block_names`."""
    adapters = [part for name in adapted_projections(settings) for part in adapter_names(name)]
    return [*attention_shapes(settings), *mlp_shapes(settings), *adapters]


def sublayer_of(name: str) -> str:
    """The sublayer of a block, "attention" or "mlp", that takes a parameter of this name."""
    return "attention" if name.startswith(("self_attn.", "input_layernorm.", POST_ATTENTION_NORM)) else "mlp"


def mask_name(projection: str) -> str:
    """Name of the dropout mask of a projection's adapter, in `block_names`."""
    return f"{projection}.lora_dropout"


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def classifier_names(settings: ClassifierConfig) -> list[tuple[str, str]]:
    """Weight and bias of each layer, named as in MindSpore's tutorial, where each second cell is a ReLU."""
    prefixes = [f"dense_relu_sequential.{2 * layer}" for layer in range(len(settings.sizes) - 1)]
    return [(f"{prefix}.weight", f"{prefix}.bias") for prefix in prefixes]


def parameter_shapes(settings: ModelConfig | ClassifierConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model by its full name, in forward order; without those of adapters."""
    if isinstance(settings, ClassifierConfig):
        sizes = zip(classifier_names(settings), settings.sizes, settings.sizes[1:], strict=False)
        return {name: size for names, i, o in sizes for name, size in zip(names, ((o, i), (o,)), strict=True)}
    width, hidden = settings.embedding_width, settings.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (settings.vocab_size, width)}
    if settings.maps_embedding:
        shapes[MAPPING_IN] = (hidden, width)
    layers = _layer_shapes(settings)
    for of_layer in layers[: settings.num_layers]:
        shapes |= of_layer
    if settings.maps_embedding:
        shapes[MAPPING_OUT] = (width, hidden)
    shapes[FINAL_NORM] = (width,)
    if not settings.tie_word_embeddings:
        shapes[HEAD] = (settings.vocab_size, width)
    for of_module in layers[settings.num_layers :]:
        shapes |= of_module
    return shapes


def _linear(name: str, out: int, inp: int, bias: bool) -> dict[str, tuple[int, ...]]:
    weight = {f"{name}.weight": (out, inp)}
    return weight | {f"{name}.bias": (out,)} if bias else weight
