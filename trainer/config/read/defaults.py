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


def apply_derived_defaults(found: Resolved) -> None:
    """Completes resolved values in place; values of a wrong type are left for validation to report."""
    _from_family(found)
    _from_aliases(found)
    _from_flat_yarn(found)
    _from_grouped_schedule(found)
    _from_sparse_layers(found)
    _from_optimizer(found)
    _from_records(found)


def _section(found: Resolved, key: str) -> dict[str, Any]:
    """A section of the file; an empty one when it is absent or not a section."""
    data: Any = found.data
    for part in key.split("."):
        if isinstance(data, dict):
            data = data.get(part)
        else:
            data = None
    if isinstance(data, dict):
        return data
    return {}


def _set(found: Resolved, key: str, value: Any, because: str) -> None:
    """Sets a key that the file leaves out; its location is that of the key which implies it."""
    data = found.data
    *sections, name = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            return
    if name not in data:
        data[name] = value
        place = found.positions[because]
        found.positions[key] = SourceLocation(place.order, f"{place.text} ({because})")


def _from_records(found: Resolved) -> None:
    """Norms of parameters are computed where they are recorded."""
    records = _section(found, "monitor_config")
    if records.get("monitor_on") is True and records.get("local_norm_format"):
        _set(found, "runner_wrapper.local_norm", True, "monitor_config.local_norm_format")


def _from_family(found: Resolved) -> None:
    """Qwen2 has biases on query, key and value, Qwen3 norms on query and key, and so on: their names alone say so."""
    kind = _section(found, "model.arch").get("type")
    because = "model.arch.type"
    if kind is None:
        kind, key = named_family(_section(found, _MODEL))
        if not kind and _section(found, _MODEL).get("multi_latent_attention") is True:
            key = "multi_latent_attention"  # which only one class has
            kind = next(name for name, family in FAMILIES.items() if key in family.model)
        if kind:
            because = f"{_MODEL}.{key}"
            _set(found, "model.arch.type", kind, because)
    kind = _canonical_architecture(found, kind)
    family = None
    if isinstance(kind, str):
        family = FAMILIES.get(kind)
    for name, value in family.model.items() if family else ():
        _set(found, f"{_MODEL}.{name}", value, because)
    for name, field in ModelConfig.model_fields.items():
        one = beside_of(field)
        if one is not None and one.value != field.default and _section(found, _MODEL).get(one.other) is True:
            _set(found, f"{_MODEL}.{name}", one.value, f"{_MODEL}.{one.other}")
    if _section(found, _MODEL).get("multi_latent_attention") is True:
        _from_class(found, kind)
    experts = _section(found, _EXPERTS)
    for name, value in family.experts.items() if family and experts else ():
        other = {"scoring_func": "use_gating_sigmoid", "aux_loss_factor": "router_aux_loss_coef"}.get(name)
        if other not in experts:  # which says the same in other words
            _set(found, f"{_EXPERTS}.{name}", value, because)
    rate = f"{_EXPERTS}.topk_bias_update_rate"
    if family and family.has_default_sizes and experts.get("topk_bias_update_rate"):
        _set(found, f"{_EXPERTS}.balance_via_topk_bias", True, rate)  # as in MindSpore Transformers' class
    # Hugging Face's `attention_bias` is one on o_proj too, but for some families; our `qkv_has_bias` is not.
    key = f"{_MODEL}.qkv_has_bias"
    asked = _section(found, _MODEL).get("qkv_has_bias") is True and found.written.get(key) == f"{_MODEL}.attention_bias"
    if family:
        has_output_bias = family.has_output_bias
    else:
        has_output_bias = not kind
    if asked and has_output_bias:
        _set(found, f"{_MODEL}.attn_proj_has_bias", True, key)


def _canonical_architecture(found: Resolved, kind: Any) -> Any:
    """The class of `FAMILIES` for one of its other names, and for TeleChat3, which an older file calls TeleChat."""
    settings = _section(found, _MODEL)
    usual = known_class(kind) or kind
    if usual == "TelechatForCausalLM" and str(settings.get("net_name", "")).startswith("telechat3"):
        usual = "TeleChat3ForCausalLM"
        _set(found, f"{_MODEL}.attn_proj_has_bias", True, f"{_MODEL}.net_name")
        if settings.get("embedding_size") not in (None, 1) and settings["net_name"] != "telechat3_36b":
            _set(found, f"{_MODEL}.tie_word_embeddings", True, f"{_MODEL}.net_name")  # as in its code
    if usual != kind:
        found.data["model"]["arch"]["type"] = usual
    return usual


def _from_class(found: Resolved, kind: Any) -> None:
    """Takes sizes that a file leaves out from its class, as MindSpore Transformers does, unless they contradict it."""
    settings = _section(found, _MODEL)
    if not isinstance(kind, str) or kind not in FAMILIES or not FAMILIES[kind].has_default_sizes:
        return
    longest = settings.get("max_position_embeddings") or _LENGTH
    if isinstance(longest, int):
        _set(found, f"{_MODEL}.seq_length", min(_LENGTH, longest), "model.arch.type")
    for name, value in FAMILIES[kind].defaults.items():
        own = yaml_names(ModelConfig).get(name)
        if own:
            key = f"{_MODEL}.{own}"
        else:
            key = f"{_EXPERTS}.{yaml_names(MoEConfig)[name]}"
        if value is not None and name not in _NOT_SIZES and _fits(name, value, settings):
            _set(found, key, value, "model.arch.type")


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


def _from_aliases(found: Resolved) -> None:
    """Keys that mean the same as another key, under another name or in another place."""
    if _section(found, _EXPERTS).get("scoring_func") == "sigmoid":
        _set(found, f"{_EXPERTS}.use_gating_sigmoid", True, f"{_EXPERTS}.scoring_func")
    settings = _section(found, _MODEL)
    heads = f"{_MODEL}.n_kv_heads"
    if settings.get("multi_query_attention") is False and found.written.get(heads) == f"{_MODEL}.multi_query_group_num":
        settings["n_kv_heads"] = None
    because = f"{_MODEL}.mlp_has_bias"
    if settings.get("mlp_has_bias") is True and found.written.get(because) == f"{_MODEL}.add_bias_linear":
        # Megatron-LM's key means every matrix of a layer.
        _set(found, f"{_MODEL}.attn_proj_has_bias", True, because)
        settings.pop("qkv_has_bias", None)
        _set(found, f"{_MODEL}.qkv_has_bias", True, because)
    untied = _section(found, _MODEL).get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        _set(found, f"{_MODEL}.tie_word_embeddings", not untied, f"{_MODEL}.untie_embeddings_and_output_weights")
    kinds, factors = (_section(found, _EXPERTS).get(f"aux_loss_{name}") for name in ("types", "factors"))
    if kinds == ["expert"] and isinstance(factors, list) and len(factors) == 1:
        _set(found, f"{_EXPERTS}.aux_loss_factor", factors[0], f"{_EXPERTS}.aux_loss_factors")
    if found.data.get("run_mode") == "predict_with_train_model":  # prediction always uses the trained model
        found.data["run_mode"] = "predict"
    name = "use_skip_data_by_global_norm"  # older files write it at the top level
    if name in found.data:
        _set(found, f"runner_wrapper.{name}", found.data[name], name)


def _from_flat_yarn(found: Resolved) -> None:
    """MindSpore Transformers writes yarn beside position_embedding_type; its formula has 1 and 0 for unset mscales.

    With multi_latent_attention it has 0.707 for both. Keys of a yarn in rope_scaling, as a model folder has it, stay.
    """
    settings = _section(found, _MODEL)
    because = f"{_MODEL}.position_embedding_type"
    key = next((key for key in ("rotary_scaling_factor", "scaling_factor") if key in settings), "")
    factor = settings.get(key)
    if settings.get("position_embedding_type") != "yarn" or isinstance(factor, dict) or not key:
        return
    whole = settings.pop("rope_scaling", None)
    if not (isinstance(whole, dict) and whole.get("rope_type") == "yarn"):
        whole = {}
    _set(found, f"{_MODEL}.rope_scaling", {**whole, "rope_type": "yarn", "factor": factor}, because)
    names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    for name in (name for name in names if settings.get(name) is not None):
        settings["rope_scaling"].pop(name, None)
        _set(found, f"{_MODEL}.rope_scaling.{name}", settings[name], f"{_MODEL}.{name}")
    if settings.get("multi_latent_attention"):
        unset = (0.707, 0.707)
    else:
        unset = (1.0, 0.0)
    scales = [settings.get(name, default) for name, default in zip(names[2:], unset, strict=True)]
    numbers = all(isinstance(value, int | float) for value in (factor, *scales))
    if not whole and settings.get("multi_latent_attention"):
        for name, value in zip(names[2:], scales, strict=True):
            _set(found, f"{_MODEL}.rope_scaling.{name}", value, because)
    elif not whole and not all(scales) and numbers and factor >= 1:
        of, to = (0.1 * scale * math.log(factor) + 1 for scale in scales)
        _set(found, f"{_MODEL}.rope_scaling.attention_factor", of / to, because)
    for name in (key, *names, "position_embedding_type"):  # rope_scaling says it now
        settings.pop(name, None)


def _from_grouped_schedule(found: Resolved) -> None:
    """``grouped_lr_schedule`` whose groups all have the default schedule is that schedule."""
    key = "grouped_lr_schedule"
    grouped = _section(found, key)
    default = grouped.get("default")
    others = grouped.get("grouped") or []
    if not isinstance(default, dict) or not isinstance(others, list) or found.data.get("lr_schedule"):
        return
    plain = [{name: value for name, value in other.items() if name != "params"} for other in others]
    if any(other != default for other in plain):
        return  # which is an error: not yet supported
    del found.data[key]
    found.data.pop("lr_schedule", None)
    found.positions["lr_schedule"] = found.positions[key]
    for name, value in default.items():
        _set(found, f"lr_schedule.{name}", value, key)
    text = f"{found.positions[key].text}: {key}: all its groups have the default schedule: lr_schedule"
    found.notes.append(Note(text, "ignored"))


def _from_sparse_layers(found: Resolved) -> None:
    """Qwen3-MoE's ``decoder_sparse_step`` and ``mlp_only_layers`` say which layers have experts."""
    experts = _section(found, _EXPERTS)
    layers = _section(found, _MODEL).get("num_layers")
    every = experts.get("decoder_sparse_step", 1)
    dense = experts.get("mlp_only_layers")
    valid = isinstance(every, int) and every > 0 and isinstance(layers, int) and isinstance(dense, list | None)
    if valid and (every != 1 or dense):
        because = f"{_EXPERTS}.{'mlp_only_layers' if dense else 'decoder_sparse_step'}"
        _set(found, f"{_EXPERTS}.moe_layer_freq", layers_with_experts(layers, every, dense or []), because)


def _from_optimizer(found: Resolved) -> None:
    """Muon has MindSpore Transformers' defaults; a learning rate is the peak of the schedule, or constant without."""
    optimizer = _section(found, "optimizer")
    schedule = _section(found, "lr_schedule")
    for name, value in _MUON.items() if optimizer.get("type") == "Muon" else ():
        _set(found, f"optimizer.{name}", list(value) if isinstance(value, list) else value, "optimizer.type")
    rate = optimizer.get("learning_rate")
    because = "optimizer.learning_rate"
    if rate is None or isinstance(rate, bool):
        return
    if not schedule and "lr_schedule" not in found.positions:
        _set(found, "lr_schedule.type", "ConstantWarmUpLR", because)
    name = "learning_rate"
    if str(schedule.get("type", "")).startswith("CosineAnnealing"):
        name = "base_lr"
    _set(found, f"lr_schedule.{name}", rate, because)
