"""Model families of Hugging Face: one record has all facts about a family.

Readers and writers of config.json, derived defaults, the names of tensors on disk and configuration errors use it.
`trainer.config.family` says in which file a record is. `scripts/make_families.py` asks transformers for the defaults,
which a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.family.dense import DENSE
from trainer.config.family.elsewhere import ELSEWHERE
from trainer.config.family.layer_norm import LAYER_NORM
from trainer.config.family.mixtures import MIXTURES
from trainer.config.family.record import Family, SourceClass

FAMILIES: dict[str, Family] = {**DENSE, **LAYER_NORM, **MIXTURES, **ELSEWHERE}
"""Families by ``model.arch.type``: Hugging Face's class, or MindSpore Transformers' if transformers has none."""


def source_class(architecture: str, settings: Mapping[str, Any]) -> SourceClass | None:
    """Returns the class of MindSpore Transformers that reads a ``model_config``; None if its file is not for it.

    Newer classes are selected by ``model_type``, older ones by ``type``; ``model.arch.type`` selects none.
    """
    for candidate in FAMILIES[architecture].source_classes:
        if candidate.model_type:
            if settings.get("model_type") == candidate.model_type:
                return candidate
        elif settings.get("type") == candidate.name:
            return candidate
    return None


def has_latent_attention(architecture: str, settings: Mapping[str, Any]) -> bool:
    """Returns whether a ``model_config`` of a family has multi-head latent attention."""
    key = "multi_latent_attention"
    return settings.get(key, FAMILIES[architecture].model.get(key)) is True


def known_class(name: Any) -> str:
    """Returns the class of `FAMILIES` with this name or other name; empty if there is none."""
    return next((known for known, family in FAMILIES.items() if name in (known, *family.other_names)), "")


def named_family(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the known family that a ``model_config`` names and the key that names it; both empty if there is none."""
    names = settings.get("architectures")
    if not isinstance(names, list):
        names = [names]
    for name in names:
        if architecture := known_class(name):
            return architecture, "architectures"
    model_type = settings.get("model_type")
    for name, family in FAMILIES.items():
        if model_type is not None and model_type in (family.model_type, *family.other_names):
            return name, "model_type"
    return "", ""


def known_families() -> str:
    """Lists all of `FAMILIES` for a message."""
    return ", ".join(f"{name} ({family.model_type})" for name, family in FAMILIES.items())
