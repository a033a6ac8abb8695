"""Names of parameters.

The names, and the layout [out, in] of every matrix, are Hugging Face's for Llama, Qwen2, Qwen3, Qwen3-MoE, Glm4Moe and
DeepseekV3. The experts of a layer are stacked, [experts, out, in]: one array to update, to shard and to multiply by; on
disk each expert has separate names. MTP modules follow the last layer, as in DeepSeek-V3's files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The head of a reward model."""
MAPPING_IN = "model.embedding_hidden_mapping_in.weight"
"""From the embedding to the residual stream, where the two differ in width."""
MAPPING_OUT = "model.embedding_hidden_mapping_out.weight"
"""From the residual stream back to the width of the head, before the final norm."""
INPUT_NORM = "input_layernorm.weight"
"""Norm before attention."""
MLP_NORM = "post_attention_layernorm.weight"
"""Norm before the feed-forward layer or the experts."""
POST_ATTENTION_NORM = "post_self_attn_layernorm.weight"
"""Norm of the output of attention."""
POST_MLP_NORM = "post_mlp_layernorm.weight"
"""Norm of the output of the feed-forward layer."""
ROUTER = "mlp.gate.weight"
EXPERT_BIAS = "mlp.gate.e_score_correction_bias"
"""A buffer: it moves against the load of the experts, not by a gradient."""
GATED_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""The matrices of a feed-forward layer; the last one makes its output."""
UNGATED_MLPS = {"up_proj": GATED_MLP[1:], "c_fc": ("mlp.c_fc", "mlp.c_proj")}
"""Those of a feed-forward layer without a gate, as its class has them, by the last part of the first name."""
SINKS = "self_attn.sinks"
"""A score of each head that competes with those of the keys and has no value."""
ROUTER_BIAS = "mlp.gate.bias"
EXPERT_GATE_BIAS = "mlp.experts.gate_proj.bias"
EXPERT_UP_BIAS = "mlp.experts.up_proj.bias"
EXPERT_DOWN_BIAS = "mlp.experts.down_proj.bias"
SHARED_GATE = "mlp.shared_expert_gate.weight"
MTP_WEIGHTS = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
"""Weights of an MTP module that merge the inputs of its layer."""
MTP_NORM = "shared_head.norm.weight"
"""Norm of an MTP module before the head."""


LAYERS = "model.layers."
"""How the full names of all parameters of layers begin."""


def norm_bias(weight: str) -> str:
    """Returns the name of a norm's bias, which only LayerNorm has, by that of its weight."""
    return weight.removesuffix(".weight") + ".bias"


def layer_prefix(layer: int) -> str:
    """Returns the prefix of the full names of a layer's parameters."""
    return f"{LAYERS}{layer}."


def is_buffer(name: str) -> bool:
    """Returns whether a parameter is a buffer: it has no gradient and no optimizer updates it."""
    return name.endswith(EXPERT_BIAS)


def is_expert(name: str) -> bool:
    """Returns whether a parameter holds the stacked experts of a layer, which expert-parallel ranks shard."""
    return ".mlp.experts." in name


def sublayer_of(name: str) -> Literal["attention", "mlp"]:
    """Returns the sublayer of a block that takes a parameter, by its name within the layer."""
    if name.startswith(("self_attn.", "input_layernorm.", POST_ATTENTION_NORM)):
        return "attention"
    return "mlp"


def adapter_names(projection: str) -> tuple[str, str]:
    """Returns the names of the two matrices of a projection's adapter: A [rank, in] and B [out, rank].

    Those of the embedding are A [rank, vocabulary] and B [width, rank]. Hugging Face's PEFT has these names behind a
    prefix, `trainer.checkpoint.adapters.PREFIX`.
    """
    if f"{projection}.weight" == EMBEDDING:
        return f"{projection}.lora_embedding_A", f"{projection}.lora_embedding_B"
    return f"{projection}.lora_A.weight", f"{projection}.lora_B.weight"


def magnitude_name(projection: str) -> str:
    """Returns the name of the magnitudes of a projection with DoRA, [out], as PEFT has it."""
    return f"{projection}.lora_magnitude_vector"


def is_adapter_output(name: str) -> bool:
    """Returns whether a parameter is the matrix B, or the magnitudes, of an adapter."""
    return name.endswith((".lora_B.weight", ".lora_embedding_B", ".lora_magnitude_vector"))


def mask_name(projection: str) -> str:
    """Returns the name of the dropout mask of a projection's adapter."""
    return f"{projection}.lora_dropout"


_MEGATRON = {
    "model.embed_tokens.": "embedding.word_embeddings.", "lm_head.": "output_layer.",
    "model.norm.": "decoder.final_layernorm.", ".self_attn.": ".self_attention.",
    ".q_proj.": ".linear_qkv.", ".k_proj.": ".linear_qkv.", ".v_proj.": ".linear_qkv.", ".o_proj.": ".linear_proj.",
    ".q_a_proj.": ".linear_qkv.", ".kv_a_proj_with_mqa.": ".linear_qkv.", ".q_b_proj.": ".linear_qb.",
    ".kv_b_proj.": ".linear_kvb.", ".q_norm.": ".q_layernorm.", ".k_norm.": ".k_layernorm.",
    ".q_a_layernorm.": ".q_layernorm.", ".kv_a_layernorm.": ".k_layernorm.",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.", ".mlp.gate.": ".mlp.router.",
    ".experts.gate_proj.weight": ".experts.weight1", ".experts.up_proj.weight": ".experts.weight1",
    ".experts.down_proj.weight": ".experts.weight2", ".shared_expert.": ".shared_experts.",
    ".gate_proj.": ".linear_fc1.", ".up_proj.": ".linear_fc1.", ".down_proj.": ".linear_fc2.",
    ".c_fc.": ".linear_fc1.", ".c_proj.": ".linear_fc2.",
    "shared_head.norm.": "final_layernorm.",
}  # fmt: skip
"""Parts of names -> those of MindSpore Transformers' PyNative models (``mindformers/pynative``)."""


def megatron_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the names that parameters have in MindSpore Transformers' PyNative models.

    Matrices that are one matrix there, such as those of query, key and value, have the same name.
    """
    names = list(names)
    modules = [int(name.split(".")[2]) for name in names if name.endswith(MTP_WEIGHTS)]
    megatron = {}
    for name in names:
        translated = _translate(name)
        if translated.startswith("model.layers."):
            layer, rest = translated.removeprefix("model.layers.").split(".", 1)
            translated = f"decoder.layers.{layer}.{rest}"
            if modules and int(layer) >= min(modules):
                if not rest.startswith(("enorm", "hnorm", "eh_proj", "final_layernorm")):
                    rest = f"transformer_layer.{rest}"
                translated = f"mtp.layers.{int(layer) - min(modules)}.{rest}"
        megatron[name] = translated
    return megatron


def megatron_module(projection: str) -> str:
    """Returns the module of a layer that has a matrix in those models: ``self_attention.linear_qkv`` has q_proj."""
    return _translate(f".{projection}.").strip(".")


def _translate(name: str) -> str:
    for old, new in _MEGATRON.items():
        name = name.replace(old, new)
    return name


def has_name(pattern: re.Pattern[str], name: str) -> bool:
    """Returns whether a regular expression finds the name of a parameter, here or in MindSpore Transformers."""
    return any(pattern.search(each) for each in (name, megatron_names([name])[name]))


def starts_with_name(pattern: re.Pattern[str], name: str) -> bool:
    """Returns whether a regular expression matches the beginning of a parameter's name, here or there."""
    return any(pattern.match(each) for each in (name, megatron_names([name])[name]))
