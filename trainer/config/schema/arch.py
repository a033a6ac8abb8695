"""The model: YAML ``model``, a decoder or a classifier."""

# No `from __future__ import annotations`: pydantic would have to compile every annotation's text at start-up.
from typing import Literal

from trainer.config.schema.classifier import ClassifierConfig
from trainer.config.schema.fields import Section, section, setting
from trainer.config.schema.model import ModelConfig


class ArchConfig(Section):
    """Which model (YAML ``model.arch``)."""

    type: Literal[
        "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM",
        "Glm4MoeForCausalLM", "MlpClassifier",
    ] = setting(
        "LlamaForCausalLM",
        "Model class; Qwen2 implies qkv_has_bias, Qwen3 and Qwen3-MoE use_qk_norm, Glm4Moe rotary_pct 0.5 and a sigmoid"
        " router with a bias on the choice; MlpClassifier is no decoder: it classifies images. Default:"
        " model_config.architectures, else LlamaForCausalLM.",
    )  # fmt: skip


class ModelSection(Section):
    """The model (YAML ``model``)."""

    arch: ArchConfig = section(ArchConfig, "Which model.")
    settings: ModelConfig = section(ModelConfig, "Its sizes and options.", alias="model_config")
    classifier: ClassifierConfig | None = setting(
        None, "Sizes of an MlpClassifier, in place of model_config. Default null: those of its section.")
