"""Values that one key implies for another which the file leaves out; the dumped configuration shows them."""

from __future__ import annotations

from typing import Any

from trainer.config.checks.problem import SourceLocation
from trainer.config.families import FAMILIES, layers_with_experts, named_family
from trainer.config.read.resolve import Resolved

_MODEL = ("model", "model_config")
_EXPERTS = (*_MODEL, "moe_config")
# Keys that say the same in other words.
_SAME_MEANING = {"scoring_func": ("use_gating_sigmoid",)}


def fill_in(found: Resolved) -> None:
    """Completes resolved values in place; values of a wrong type are left for validation to report."""
    _from_family(found)
    _from_attention_bias(found)
    _from_score_function(found)
    _from_sparse_layers(found)
    _from_untied_embeddings(found)
    _from_muon(found)
    _from_optimizer(found)
    _from_top_level_switches(found)


def _section(data: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A section of the file; an empty one when it is absent or not a section."""
    for key in keys:
        data = data[key] if isinstance(data, dict) and key in data else {}
    return data if isinstance(data, dict) else {}


def _from_family(found: Resolved) -> None:
    """Qwen2 has biases on query, key and value, Qwen3 norms on query and key, and so on: their names alone say so."""
    settings, architecture = _section(found.data, *_MODEL), _section(found.data, "model", "arch")
    because = "model.arch.type"
    kind = architecture["type"] if "type" in architecture else None
    if kind is None:
        kind, key = named_family(settings)
        because = f"model.model_config.{key}"
        if not kind:
            return
        _set(found, ("model", "arch", "type"), kind, because)
    if not isinstance(kind, str) or kind not in FAMILIES:
        return
    for name, value in FAMILIES[kind].model.items():
        if name not in settings:
            _set(found, (*_MODEL, name), value, because)
    experts = _section(found.data, *_EXPERTS)
    for name, value in FAMILIES[kind].experts.items() if experts else ():
        if not {name, *_SAME_MEANING.get(name, ())} & experts.keys():
            _set(found, (*_EXPERTS, name), value, because)


def _from_attention_bias(found: Resolved) -> None:
    """Hugging Face's ``attention_bias`` is one on o_proj too, but for some; our ``qkv_has_bias`` is not."""
    settings, architecture = _section(found.data, *_MODEL), _section(found.data, "model", "arch")
    kind, key = architecture["type"] if "type" in architecture else "LlamaForCausalLM", ".".join(_MODEL)
    asked = "qkv_has_bias" in settings and settings["qkv_has_bias"] is True
    asked = asked and found.written.get(f"{key}.qkv_has_bias") == f"{key}.attention_bias"
    if asked and "attn_proj_has_bias" not in settings and isinstance(kind, str) and kind in FAMILIES:
        if FAMILIES[kind].has_output_bias:
            _set(found, (*_MODEL, "attn_proj_has_bias"), True, f"{key}.qkv_has_bias")


def _from_score_function(found: Resolved) -> None:
    """``scoring_func`` says in other words what ``use_gating_sigmoid`` says."""
    experts = _section(found.data, *_EXPERTS)
    if "use_gating_sigmoid" not in experts and "scoring_func" in experts and experts["scoring_func"] == "sigmoid":
        _set(found, (*_EXPERTS, "use_gating_sigmoid"), True, ".".join((*_EXPERTS, "scoring_func")))


def _from_sparse_layers(found: Resolved) -> None:
    """Qwen3-MoE's ``decoder_sparse_step`` and ``mlp_only_layers`` say which layers have experts."""
    experts, settings = _section(found.data, *_EXPERTS), _section(found.data, *_MODEL)
    every = experts["decoder_sparse_step"] if "decoder_sparse_step" in experts else 1
    dense = experts["mlp_only_layers"] if "mlp_only_layers" in experts else None
    layers = settings["num_layers"] if "num_layers" in settings else None
    valid = isinstance(every, int) and every > 0 and isinstance(layers, int) and isinstance(dense, list | None)
    if not valid or "moe_layer_freq" in experts or (every == 1 and not dense):
        return
    key = "mlp_only_layers" if dense else "decoder_sparse_step"
    frequency = layers_with_experts(layers, every, dense or [])
    _set(found, (*_EXPERTS, "moe_layer_freq"), frequency, ".".join((*_EXPERTS, key)))


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
    found.positions[".".join(keys)] = SourceLocation(place.order, f"{place.text} ({because})")
