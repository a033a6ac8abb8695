"""Hugging Face's model families: what the name of one implies, and what a config.json says against it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Family(NamedTuple):
    """What follows from the name alone; everything else is a key of config.json."""

    model_type: str
    """Its name in config.json."""
    model: dict[str, Any]
    """Keys of ``model_config``."""
    experts: dict[str, Any]
    """Keys of ``moe_config``."""
    is_mixture: bool = False
    may_be_mixture: bool = False
    """Whether a model of it is dense or has experts, as its keys say."""
    has_expert_bias: bool = False
    """Whether Hugging Face's class has `e_score_correction_bias`."""
    has_output_bias: bool = False
    """Whether attention_bias there means one on o_proj too."""
    has_default_sizes: bool = False
    """Whether a YAML may leave out sizes, which are those of the class then: there is one well-known model of it."""
    joins_gate_up: bool = False
    """Whether Hugging Face's class has gate_proj and up_proj as one matrix, gate_up_proj."""
    in_transformers: bool = True
    """Whether transformers has the class."""
    other_names: tuple[str, ...] = ()
    """Other classes and model types that mean the same."""


_GLM = {"rotary_pct": 0.5, "rope_interleave": True, "qkv_has_bias": True}

FAMILIES = {
    "LlamaForCausalLM": Family("llama", {}, {}, has_output_bias=True),
    "Qwen2ForCausalLM": Family("qwen2", {"qkv_has_bias": True}, {}),
    "Qwen3ForCausalLM": Family("qwen3", {"use_qk_norm": True}, {}, has_output_bias=True),
    "MistralForCausalLM": Family("mistral", {}, {}),
    "MixtralForCausalLM": Family("mixtral", {}, {}, is_mixture=True),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", {"qkv_has_bias": True}, {"use_shared_expert_gating": True, "norm_topk_prob": False},
        is_mixture=True,
    ),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", {"use_qk_norm": True}, {}, is_mixture=True, has_output_bias=True),
    # Balanced by the expert bias instead of a loss: "no auxiliary loss" is what noaux means.
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        {"rotary_pct": 0.5},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_factor": 0.0},
        is_mixture=True,
        has_expert_bias=True,
    ),
    "GlmForCausalLM": Family("glm", _GLM, {}, joins_gate_up=True),
    "Glm4ForCausalLM": Family(
        "glm4", {**_GLM, "post_self_attn_layernorm": True, "post_mlp_layernorm": True}, {}, joins_gate_up=True
    ),
    "ChatGLM2ForConditionalGeneration": Family(
        "chatglm", _GLM, {}, in_transformers=False,
        other_names=("ChatGLMModel", "ChatGLMForConditionalGeneration", "glm2"),
    ),
    "TelechatForCausalLM": Family(
        "telechat", {"attn_proj_has_bias": True, "mlp_down_has_bias": True, "initializer_range": 0.0048}, {},
        may_be_mixture=True, in_transformers=False,
        other_names=("ParallelTelechatForCausalLM", "Telechat2ForCausalLM"),
    ),
    "TeleChat3ForCausalLM": Family(
        "telechat3", {}, {}, in_transformers=False, other_names=("Telechat3ForCausalLM",)
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        {"multi_latent_attention": True, "rope_interleave": True},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_factor": 0.0},
        is_mixture=True,
        has_expert_bias=True,
        has_output_bias=True,
        has_default_sizes=True,
        other_names=("TeleChat3MoeForCausalLM", "telechat3_moe"),
    ),
}  # fmt: skip
"""By ``model.arch.type``, which is Hugging Face's class, or MindSpore Transformers' where transformers has none."""

CONFIG_CLASSES = ("LlamaConfig", "Qwen2Config", "ChatGLM2Config", "TelechatConfig", "DeepseekV3Config")
"""MindSpore Transformers' configuration classes of models that are built in."""


def known_class(name: Any) -> str:
    """The class of `FAMILIES` of this name or another name; empty where there is none."""
    others = (kind for kind, family in FAMILIES.items() if name in family.other_names)
    return name if isinstance(name, str) and name in FAMILIES else next(others, "")


def named_family(settings: dict[str, Any]) -> tuple[str, str]:
    """The family that a ``model_config`` names, and the key that does; empty where it names none that we know."""
    found = settings.get("architectures")
    for name in found if isinstance(found, list) else [found]:
        if kind := known_class(name):
            return kind, "architectures"
    kind = settings.get("model_type")
    for name, family in FAMILIES.items():
        if kind is not None and kind in (family.model_type, *family.other_names):
            return name, "model_type"
    return "", ""


def layers_with_experts(layers: int, every: int, dense: list[int]) -> list[int]:
    """``moe_layer_freq`` of Qwen3-MoE's decoder_sparse_step and mlp_only_layers, as Hugging Face reads the two."""
    return [int((layer + 1) % every == 0 and layer not in dense) for layer in range(layers)]
