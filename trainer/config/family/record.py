"""The record of a model family: the facts that follow from its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

Windows = Literal["", "every", "listed", "other"]
"""Layers with a sliding window: none, all, those of max_window_layers or layer_types ("listed"), or other layers than
these keys mean for Qwen2, which is not supported ("other")."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
"""The types of rope_scaling that most classes accept."""


class ExpertNames(NamedTuple):
    """Names of the tensors of an MoE layer: one tensor for each expert and matrix, or two that stack all experts."""

    module: str = "mlp"
    """The module with router and experts."""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The matrices of an expert. If `is_stacked`: the tensors of gate and up, which are one, and of down."""
    router: str = "gate"
    bias: str = "mlp.gate.e_score_correction_bias"
    bias_is_row: bool = False
    """Whether the expert bias is a matrix of one row, [1, E]."""
    is_stacked: bool = False
    """One tensor has gate above up of each expert, [E, 2F, D], and another one has down, [E, D, F]."""


class SourceClass(NamedTuple):
    """A class of MindSpore Transformers for the configuration of models of a family."""

    name: str
    model_type: str
    """The value of ``model_type`` that selects it; empty for an older class, which ``type`` names."""
    defaults: Mapping[str, Any]
    """Its defaults: of an older class, those that differ from the schema's; of another, from `Family.defaults`."""
    unread: tuple[str, ...] = ()
    """Keys of Hugging Face's class that it drops."""
    differences: Mapping[str, str] = {}
    """Keys -> how models of files without them differ from those here. In the newer schema they are then False."""


class Family(NamedTuple):
    """The facts that follow from the name of a family. Other facts about a model are keys of its config.json."""

    model_type: str
    """Its name in config.json."""
    defaults: Mapping[str, Any]
    """All keys that its class reads, with their defaults: those of transformers, or, for a class that transformers
    lacks, those of the code that is published with the weights."""
    model: Mapping[str, Any] = {}
    """Keys of ``model_config`` that the name implies."""
    experts: Mapping[str, Any] = {}
    """Keys of ``moe_config`` that the name implies."""
    optional_experts: tuple[str, ...] = ()
    """Keys that only the config.json of a model with experts has, in a family with dense models."""
    renamed_keys: Mapping[str, str] = {}
    """Keys of a published config.json that mean something else in other families -> the key with this meaning."""
    written: Mapping[str, Callable[[Any], Any]] = {}
    """Functions of the ``ModelConfig`` for keys that are written differently than in other families."""
    windows: Windows = ""
    full_attention_period: int = 0
    """Which layers have no sliding window where layer_types does not say it: every Nth; 0: see `windows`."""
    model_with_window: Mapping[str, Any] = {}
    """Keys of ``model_config`` that the name implies where a model has a sliding window."""
    rope_types: tuple[str, ...] = ()
    """The types of rope_scaling that its class accepts, if not `ROPE_TYPES`."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the root of their width."""
    has_output_bias: bool = False
    """Whether its attention_bias also means a bias on o_proj."""
    in_transformers: bool = True
    """Whether transformers has the class."""
    saved_as: str = ""
    """For a class that transformers lacks: its class that computes the same."""
    other_names: tuple[str, ...] = ()
    """Other classes and model types that mean the same."""
    source_classes: tuple[SourceClass, ...] = ()
    """MindSpore Transformers' classes of its configuration."""
    tensor_names: Mapping[str, str] = {}
    """Parts of tensor names in memory -> on disk, if they differ; they are replaced in this order."""
    joined_tensors: Mapping[str, tuple[str, ...]] = {}
    """Fused matrices on disk -> the matrices in them, each above the next."""
    expert_names: ExpertNames = ExpertNames()
    interleaves_experts: bool = False
    """Whether its files have the experts as `trainer.storage.interleaved_experts` describes."""
    published_names: Mapping[str, str] = {}
    """Parts of names in files whose names begin with "transformer." -> in memory, or of a fused matrix.
    Such names are read and never written."""

    @property
    def is_mixture(self) -> bool:
        """Returns whether every model of the family has experts."""
        return not self.defaults.keys().isdisjoint(("num_experts_per_tok", "moe_k"))

    def accepts_scaling(self, rope_type: str) -> bool:
        """Returns whether its class has this type of rope_scaling; dynamic is that with alpha."""
        return rope_type in (self.rope_types or ROPE_TYPES)
