"""Values that one key implies for another which the file leaves out; the dumped configuration shows them."""

from __future__ import annotations

import math
from typing import Any

from trainer.config.families import FAMILIES, known_class, layers_with_experts, named_family
from trainer.config.location import SourceLocation
from trainer.config.note import Note
from trainer.config.read.resolve import Resolved
from trainer.config.schema.fields import beside_of, yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig

_MODEL = "model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"
_NOT_SIZES = ("output_router_logits", "num_key_value_heads")
_LENGTH = 4096  # of MindSpore Transformers' models where neither file nor data says otherwise
_MUON = {"momentum": 0.95, "nesterov": True, "betas": [0.95, 0.95], "weight_decay": 0.1}


def apply_derived_defaults(resolved: Resolved) -> None:
    """Completes resolved values in place; values of a wrong type are left for validation to report."""
    _from_family(resolved)
    _from_aliases(resolved)
    _from_flat_yarn(resolved)
    _from_grouped_schedule(resolved)
    _from_sparse_layers(resolved)
    _from_optimizer(resolved)
    _from_records(resolved)


def _section(resolved: Resolved, key: str) -> dict[str, Any]:
    """A section of the file; an empty one when it is absent or not a section."""
    data: Any = resolved.data
    for part in key.split("."):
        if isinstance(data, dict):
            data = data.get(part)
        else:
            data = None
    if isinstance(data, dict):
        return data
    return {}


def _set(resolved: Resolved, key: str, value: Any, because: str) -> None:
    """Sets a key that the file leaves out; its location is that of the key which implies it."""
    data = resolved.data
    *sections, name = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            return
    if name not in data:
        data[name] = value
        place = resolved.positions[because]
        resolved.positions[key] = SourceLocation(place.order, f"{place.text} ({because})")


def _from_records(resolved: Resolved) -> None:
    """Norms of parameters are computed where they are recorded."""
    records = _section(resolved, "monitor_config")
    if records.get("monitor_on") is True and records.get("local_norm_format"):
        _set(resolved, "runner_wrapper.local_norm", True, "monitor_config.local_norm_format")


def _from_family(resolved: Resolved) -> None:
    """Qwen2 has biases on query, key and value, Qwen3 norms on query and key, and so on: their names alone say so."""
    kind = _section(resolved, "model.arch").get("type")
    because = "model.arch.type"
    if kind is None:
        kind, key = named_family(_section(resolved, _MODEL))
        if not kind and _section(resolved, _MODEL).get("multi_latent_attention") is True:
            key = "multi_latent_attention"  # which only one class has
            kind = next(name for name, family in FAMILIES.items() if key in family.model)
        if kind:
            because = f"{_MODEL}.{key}"
            _set(resolved, "model.arch.type", kind, because)
    kind = _canonical_architecture(resolved, kind)
    family = None
    if isinstance(kind, str):
        family = FAMILIES.get(kind)
    for name, value in family.model.items() if family else ():
        _set(resolved, f"{_MODEL}.{name}", value, because)
    for name, field in ModelConfig.model_fields.items():
        one = beside_of(field)
        if one is not None and one.value != field.default and _section(resolved, _MODEL).get(one.other) is True:
            _set(resolved, f"{_MODEL}.{name}", one.value, f"{_MODEL}.{one.other}")
    if _section(resolved, _MODEL).get("multi_latent_attention") is True:
        _from_class(resolved, kind)
    experts = _section(resolved, _EXPERTS)
    for name, value in family.experts.items() if family and experts else ():
        other = {"scoring_func": "use_gating_sigmoid", "aux_loss_factor": "router_aux_loss_coef"}.get(name)
        if other not in experts:  # which says the same in other words
            _set(resolved, f"{_EXPERTS}.{name}", value, because)
    rate = f"{_EXPERTS}.topk_bias_update_rate"
    if family and family.has_default_sizes and experts.get("topk_bias_update_rate"):
        _set(resolved, f"{_EXPERTS}.balance_via_topk_bias", True, rate)  # as in MindSpore Transformers' class
    # Hugging Face's `attention_bias` is one on o_proj too, but for some families; our `qkv_has_bias` is not.
    key = f"{_MODEL}.qkv_has_bias"
    has_output_bias = not kind
    if family:
        has_output_bias = family.has_output_bias
    is_attention_bias = resolved.written.get(key) == f"{_MODEL}.attention_bias"
    if is_attention_bias and has_output_bias and _section(resolved, _MODEL).get("qkv_has_bias") is True:
        _set(resolved, f"{_MODEL}.attn_proj_has_bias", True, key)


def _canonical_architecture(resolved: Resolved, kind: Any) -> Any:
    """The class of `FAMILIES` for one of its other names, and for TeleChat3, which an older file calls TeleChat."""
    settings = _section(resolved, _MODEL)
    usual = known_class(kind) or kind
    if usual == "TelechatForCausalLM" and str(settings.get("net_name", "")).startswith("telechat3"):
        usual = "TeleChat3ForCausalLM"
        _set(resolved, f"{_MODEL}.attn_proj_has_bias", True, f"{_MODEL}.net_name")
        if settings.get("embedding_size") not in (None, 1) and settings["net_name"] != "telechat3_36b":
            _set(resolved, f"{_MODEL}.tie_word_embeddings", True, f"{_MODEL}.net_name")  # as in its code
    if usual != kind:
        resolved.data["model"]["arch"]["type"] = usual
    return usual


def _from_class(resolved: Resolved, kind: Any) -> None:
    """Takes sizes that a file leaves out from its class, as MindSpore Transformers does, unless they contradict it."""
    settings = _section(resolved, _MODEL)
    if not isinstance(kind, str) or kind not in FAMILIES or not FAMILIES[kind].has_default_sizes:
        return
    longest = settings.get("max_position_embeddings") or _LENGTH
    if isinstance(longest, int):
        _set(resolved, f"{_MODEL}.seq_length", min(_LENGTH, longest), "model.arch.type")
    for name, value in FAMILIES[kind].defaults.items():
        own = yaml_names(ModelConfig).get(name)
        if own:
            key = f"{_MODEL}.{own}"
        else:
            key = f"{_EXPERTS}.{yaml_names(MoEConfig)[name]}"
        if value is not None and name not in _NOT_SIZES and _fits(name, value, settings):
            _set(resolved, key, value, "model.arch.type")


def _fits(name: str, value: Any, settings: dict[str, Any]) -> bool:
    """Whether a size of the class does not contradict what the file says."""
    if isinstance(settings.get("moe_config"), dict):
        moe = settings.get("moe_config")
    else:
        moe = {}
    experts = moe.get("expert_num")
    groups = moe.get("n_group")
    layers = settings.get("num_layers")
    if name == "num_experts_per_tok":
        return not isinstance(experts, int) or experts >= value
    if name == "n_group":
        return isinstance(experts, int) and experts % value == 0 and experts > value
    if name == "topk_group":
        return isinstance(groups, int) and groups >= value
    return name != "first_k_dense_replace" or not isinstance(layers, int) or layers > value


def _from_aliases(resolved: Resolved) -> None:
    """Keys that mean the same as another key, under another name or in another place."""
    if _section(resolved, _EXPERTS).get("scoring_func") == "sigmoid":
        _set(resolved, f"{_EXPERTS}.use_gating_sigmoid", True, f"{_EXPERTS}.scoring_func")
    settings = _section(resolved, _MODEL)
    heads = f"{_MODEL}.n_kv_heads"
    is_group_number = resolved.written.get(heads) == f"{_MODEL}.multi_query_group_num"
    if settings.get("multi_query_attention") is False and is_group_number:
        settings["n_kv_heads"] = None
    because = f"{_MODEL}.mlp_has_bias"
    if settings.get("mlp_has_bias") is True and resolved.written.get(because) == f"{_MODEL}.add_bias_linear":
        # Megatron-LM's key means every matrix of a layer.
        _set(resolved, f"{_MODEL}.attn_proj_has_bias", True, because)
        settings.pop("qkv_has_bias", None)
        _set(resolved, f"{_MODEL}.qkv_has_bias", True, because)
    untied = _section(resolved, _MODEL).get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        _set(resolved, f"{_MODEL}.tie_word_embeddings", not untied, f"{_MODEL}.untie_embeddings_and_output_weights")
    kinds, factors = (_section(resolved, _EXPERTS).get(f"aux_loss_{name}") for name in ("types", "factors"))
    if kinds == ["expert"] and isinstance(factors, list) and len(factors) == 1:
        _set(resolved, f"{_EXPERTS}.aux_loss_factor", factors[0], f"{_EXPERTS}.aux_loss_factors")
    if resolved.data.get("run_mode") == "predict_with_train_model":  # prediction always uses the trained model
        resolved.data["run_mode"] = "predict"
    name = "use_skip_data_by_global_norm"  # older files write it at the top level
    if name in resolved.data:
        _set(resolved, f"runner_wrapper.{name}", resolved.data[name], name)


def _from_flat_yarn(resolved: Resolved) -> None:
    """MindSpore Transformers writes yarn beside position_embedding_type; its formula has 1 and 0 for unset mscales.

    With multi_latent_attention it has 0.707 for both. Keys of a yarn in rope_scaling, as a model folder has it, stay.
    """
    settings = _section(resolved, _MODEL)
    because = f"{_MODEL}.position_embedding_type"
    key = next((key for key in ("rotary_scaling_factor", "scaling_factor") if key in settings), "")
    factor = settings.get(key)
    if settings.get("position_embedding_type") != "yarn" or isinstance(factor, dict) or not key:
        return
    whole = settings.pop("rope_scaling", None)
    if not (isinstance(whole, dict) and whole.get("rope_type") == "yarn"):
        whole = {}
    _set(resolved, f"{_MODEL}.rope_scaling", {**whole, "rope_type": "yarn", "factor": factor}, because)
    names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    for name in (name for name in names if settings.get(name) is not None):
        settings["rope_scaling"].pop(name, None)
        _set(resolved, f"{_MODEL}.rope_scaling.{name}", settings[name], f"{_MODEL}.{name}")
    if settings.get("multi_latent_attention"):
        unset = (0.707, 0.707)
    else:
        unset = (1.0, 0.0)
    scales = [settings.get(name, default) for name, default in zip(names[2:], unset, strict=True)]
    numbers = all(isinstance(value, int | float) for value in (factor, *scales))
    if not whole and settings.get("multi_latent_attention"):
        for name, value in zip(names[2:], scales, strict=True):
            _set(resolved, f"{_MODEL}.rope_scaling.{name}", value, because)
    elif not whole and not all(scales) and numbers and factor >= 1:
        of, to = (0.1 * scale * math.log(factor) + 1 for scale in scales)
        _set(resolved, f"{_MODEL}.rope_scaling.attention_factor", of / to, because)
    for name in (key, *names, "position_embedding_type"):  # rope_scaling says it now
        settings.pop(name, None)


def _from_grouped_schedule(resolved: Resolved) -> None:
    """``grouped_lr_schedule`` whose groups all have the default schedule is that schedule."""
    key = "grouped_lr_schedule"
    grouped = _section(resolved, key)
    default = grouped.get("default")
    others = grouped.get("grouped") or []
    if not isinstance(default, dict) or not isinstance(others, list) or resolved.data.get("lr_schedule"):
        return
    plain = [{name: value for name, value in other.items() if name != "params"} for other in others]
    if any(other != default for other in plain):
        return  # which is an error: not yet supported
    del resolved.data[key]
    resolved.data.pop("lr_schedule", None)
    resolved.positions["lr_schedule"] = resolved.positions[key]
    for name, value in default.items():
        _set(resolved, f"lr_schedule.{name}", value, key)
    text = f"{resolved.positions[key].text}: {key}: all its groups have the default schedule: lr_schedule"
    resolved.notes.append(Note(text, "ignored"))


def _from_sparse_layers(resolved: Resolved) -> None:
    """Qwen3-MoE's ``decoder_sparse_step`` and ``mlp_only_layers`` say which layers have experts."""
    experts = _section(resolved, _EXPERTS)
    layers = _section(resolved, _MODEL).get("num_layers")
    every = experts.get("decoder_sparse_step", 1)
    dense = experts.get("mlp_only_layers")
    valid = isinstance(every, int) and every > 0 and isinstance(layers, int) and isinstance(dense, list | None)
    if valid and (every != 1 or dense):
        because = f"{_EXPERTS}.{'mlp_only_layers' if dense else 'decoder_sparse_step'}"
        _set(resolved, f"{_EXPERTS}.moe_layer_freq", layers_with_experts(layers, every, dense or []), because)


def _from_optimizer(resolved: Resolved) -> None:
    """Muon has MindSpore Transformers' defaults; a learning rate is the peak of the schedule, or constant without."""
    optimizer = _section(resolved, "optimizer")
    schedule = _section(resolved, "lr_schedule")
    for name, value in _MUON.items() if optimizer.get("type") == "Muon" else ():
        _set(resolved, f"optimizer.{name}", list(value) if isinstance(value, list) else value, "optimizer.type")
    rate = optimizer.get("learning_rate")
    because = "optimizer.learning_rate"
    if rate is None or isinstance(rate, bool):
        return
    if not schedule and "lr_schedule" not in resolved.positions:
        _set(resolved, "lr_schedule.type", "ConstantWarmUpLR", because)
    name = "learning_rate"
    if str(schedule.get("type", "")).startswith("CosineAnnealing"):
        name = "base_lr"
    _set(resolved, f"lr_schedule.{name}", rate, because)
