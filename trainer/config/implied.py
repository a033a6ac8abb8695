"""Values that one key implies for another which the file leaves out; the dumped configuration shows them."""

from __future__ import annotations

from typing import Any

from trainer.config.problems import Place
from trainer.config.resolve import Resolved

_MODEL = ("model", "model_config")


def fill_in(found: Resolved) -> None:
    """Completes resolved values in place; values of a wrong type are left for validation to report."""
    _from_architecture(found)
    _from_untied_embeddings(found)
    _from_muon(found)
    _from_optimizer(found)
    _from_top_level_switches(found)


def _section(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A section of the file; an empty one when it is absent or not a section."""
    for key in keys:
        data = data[key] if isinstance(data, dict) and key in data else {}
    return data if isinstance(data, dict) else {}


def _from_architecture(found: Resolved) -> None:
    """Qwen2 has biases on query, key and value, Qwen3 norms on query and key: their names alone say so."""
    architecture = _section(found.data, "model", "arch")
    kind = architecture["type"] if "type" in architecture else None
    implied = {"Qwen2ForCausalLM": "qkv_has_bias", "Qwen3ForCausalLM": "use_qk_norm"}
    if not isinstance(kind, str) or kind not in implied or implied[kind] in _section(found.data, *_MODEL):
        return
    _set(found, (*_MODEL, implied[kind]), True, "model.arch.type")


def _from_untied_embeddings(found: Resolved) -> None:
    """Megatron's ``untie_embeddings_and_output_weights`` is the opposite of ``tie_word_embeddings``."""
    settings = _section(found.data, *_MODEL)
    untied = (
        settings["untie_embeddings_and_output_weights"] if "untie_embeddings_and_output_weights" in settings else None
    )
    if isinstance(untied, bool) and "tie_word_embeddings" not in settings:
        key = "model.model_config.untie_embeddings_and_output_weights"
        _set(found, (*_MODEL, "tie_word_embeddings"), not untied, key)


def _from_muon(found: Resolved) -> None:
    """Muon has defaults of its own, those of MindSpore Transformers."""
    optimizer = _section(found.data, "optimizer")
    if "type" not in optimizer or optimizer["type"] != "Muon":
        return
    defaults = {"momentum": 0.95, "nesterov": True, "betas": [0.95, 0.95], "weight_decay": 0.1}
    for name, value in defaults.items():
        if name not in optimizer:
            _set(found, ("optimizer", name), value, "optimizer.type")


def _from_optimizer(found: Resolved) -> None:
    """``optimizer.learning_rate`` without a schedule is a constant one; with a schedule it is its peak."""
    optimizer = _section(found.data, "optimizer")
    rate = optimizer["learning_rate"] if "learning_rate" in optimizer else None
    if rate is None or isinstance(rate, bool):
        return
    schedule = _section(found.data, "lr_schedule")
    if not schedule and "lr_schedule" not in found.positions:
        _set(found, ("lr_schedule", "type"), "ConstantWarmUpLR", "optimizer.learning_rate")
    name = "base_lr" if "type" in schedule and str(schedule["type"]).startswith("CosineAnnealing") else "learning_rate"
    if name not in schedule:
        _set(found, ("lr_schedule", name), rate, "optimizer.learning_rate")


def _from_top_level_switches(found: Resolved) -> None:
    """Older files write a switch of the wrapper at the top level."""
    name = "use_skip_data_by_global_norm"
    if name in found.data and name not in _section(found.data, "runner_wrapper"):
        _set(found, ("runner_wrapper", name), found.data[name], name)


def _set(found: Resolved, keys: tuple[str, ...], value: Any, because: str) -> None:
    data = found.data
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            return
    data[keys[-1]] = value
    place = found.positions[because]
    found.positions[".".join(keys)] = Place(place.order, f"{place.text} ({because})")
