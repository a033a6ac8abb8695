"""Translates multi-head latent attention: norms and scale as MindSpore Transformers' classes have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainer.config.checks.problem import problem_at
from trainer.config.families import has_latent_attention, named_family
from trainer.config.family.record import SourceClass
from trainer.config.pynative.translation import Translation
from trainer.config.read.relocate import parent
from trainer.config.schema.fields import yaml_names
from trainer.config.schema.model import LATENT_SIZES, ModelConfig

_MODEL = "model.model_config"
_FACTORS = ("rotary_scaling_factor", "scaling_factor")
_SCALE_KEYS = (*_FACTORS, "mscale", "mscale_all_dim")
_DEFAULTS = {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
"""The defaults of its MLATransformerConfig."""


def asks_for_latent_attention(settings: Mapping[str, Any]) -> bool:
    """Returns whether a section ``model`` is that of multi-head latent attention."""
    family, _ = named_family(settings)
    if family:
        return has_latent_attention(family, settings)
    if "multi_latent_attention" in settings:
        return settings["multi_latent_attention"] is True
    return any(settings.get(name) is not None for name in LATENT_SIZES)


def set_latent_attention(work: Translation, known: SourceClass) -> None:
    """Sets norms and scale of latent attention where a file leaves them out.

    Its latent vectors have norms only with qk_layernorm. Even without yarn the scale is
    (0.1 mscale ln(rotary_scaling_factor) + 1)^2 / sqrt(width of a query) (softmax_scale of its MultiLatentAttention).
    """
    names = yaml_names(ModelConfig)
    written = {names.get(name, name): value for name, value in work.values["model"].items()}
    settings = {name: value for name, value in written.items() if value is not None}
    source = f"of MindSpore Transformers' {known.name}"
    entries = work.table("model").explicit
    place = entries["model_type"].place
    for key in known.differences.keys() - written.keys():
        work.set_key(f"{_MODEL}.{key}", False, "model", place=place._replace(key="model.qk_layernorm"))
        text = f"the file has no qk_layernorm, so the latent vectors {source} have no norms"
        work.notes.append(f"{place.text}: {text}; the released DeepSeek-V3 has them: write qk_layernorm: true")
    scaling = settings.get("rope_scaling", {})
    if not isinstance(scaling, dict):
        return  # an error follows
    values: dict[str, Any] = {name: settings.get(name, default) for name, default in _DEFAULTS.items()}
    values["factor"] = next((settings[name] for name in _FACTORS if name in settings), values["factor"])
    values |= {name: scaling[name] for name in _DEFAULTS if scaling.get(name) is not None}
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")
    width: Any = [settings.get(name, ModelConfig.model_fields[name].default) for name in parts]
    if not all(type(value) in (int, float) for value in (*values.values(), *width)) or sum(width) <= 0:
        return  # an error follows
    if "yarn" in (settings.get("position_embedding_type"), scaling.get("type"), scaling.get("rope_type")):
        if not scaling and settings.keys().isdisjoint(_FACTORS):
            work.set_key(f"{_MODEL}.rotary_scaling_factor", values["factor"], "model", place=place)
        if values["mscale"] != values["mscale_all_dim"]:
            rule = f"is not mscale_all_dim {values['mscale_all_dim']}: rotary angles {source} grow then, not yet here"
            where = next(entries[name].place for name in ("mscale", "rope_scaling", "model_type") if name in entries)
            work.problems.append(problem_at(where, "mscale", rule, "write one number for both", values["mscale"]))
        for name in ("mscale", "mscale_all_dim"):
            if scaling and name not in scaling:
                work.set_key(f"{_MODEL}.rope_scaling.{name}", values[name], "model", place=place)
        return
    for name in _SCALE_KEYS:
        parent(work.root, f"{_MODEL}.{name}", place).explicit.pop(name, None)
    if values["factor"] > 1:
        root = 0.1 * values["mscale"] * math.log(values["factor"]) + 1
        factor = root * root  # a power would raise an error where it is too large
        work.set_key(f"{_MODEL}.softmax_scale", factor / math.sqrt(sum(width)), "model", place=place)
        text = f"the scale of the attention {source} has the factor {factor:.4g}"
        work.notes.append(f"{place.text}: {text}, (0.1 mscale ln(rotary_scaling_factor) + 1)^2, even without yarn")
