"""Default values that depend on other keys of the file; the dumped configuration shows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

from trainer.config.checks.parallel import SEMI_AUTO
from trainer.config.checks.problem import problem_at
from trainer.config.families import FAMILIES, known_class, named_family, source_class
from trainer.config.family.record import Family, SourceClass
from trainer.config.layer_types import alternating_layer_types, layers_with_experts, window_layer_types
from trainer.config.location import NO_LOCATION, SourceLocation
from trainer.config.note import Note
from trainer.config.read.resolve import Resolved
from trainer.config.schema.fields import LAYERS, Section, fields_by_yaml_name, yaml_names
from trainer.config.schema.model import LATENT_SIZES, ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.system import ParallelMode
from trainer.errors import value_text

_MODEL = "model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"
_NOT_SIZES = ("output_router_logits", "num_key_value_heads")
_LENGTH = 4096  # the longest context of DeepSeek-V3 in its training
_NO_FAMILY = Family("", {}, has_output_bias=True)
"""That of a file without a class."""
_MODES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("context", "mode", {"GRAPH_MODE": 0, "PYNATIVE_MODE": 1}),
    ("parallel", "parallel_mode", {"MANUAL_PARALLEL": 0, **{mode.upper(): mode for mode in get_args(ParallelMode)}}),
)
"""Sections, keys, and MindSpore's names of their values -> the values here."""
_MUON: dict[str, Any] = {"momentum": 0.95, "nesterov": True, "betas": [0.95, 0.95], "weight_decay": 0.1}


def apply_derived_defaults(resolved: Resolved, *, is_complete: bool = False) -> None:
    """Adds derived defaults to resolved values in place; validation reports values of a wrong type later.

    A complete configuration, which `dump_config` wrote, lacks only keys that are null: no class has defaults for them.
    """
    _apply_family(resolved, is_complete)
    _apply_aliases(resolved)
    _apply_flat_yarn(resolved)
    _apply_long_rope(resolved)
    _apply_window_size(resolved, is_complete)
    _apply_grouped_schedule(resolved)
    _apply_sparse_layers(resolved)
    _apply_optimizer(resolved)
    records = resolved.section("monitor_config")
    if records.get("monitor_on") is True and records.get("local_norm_format"):
        _set_default(resolved, "runner_wrapper.local_norm", True, "monitor_config.local_norm_format")
    if resolved.section("loss").get("type") == "reward":
        _set_default(resolved, f"{_MODEL}.num_labels", 1, "loss.type")
    if not is_complete:
        _apply_sharded_experts(resolved)


def _set_default(resolved: Resolved, key: str, value: Any, because: str) -> bool:
    """Sets a key that the file leaves out, with the location of the key that implies it; returns whether it did so."""
    data = resolved.data
    *sections, name = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            return False
    if name in data:
        return False
    data[name] = value
    place = resolved.positions[because]
    resolved.positions[key] = SourceLocation(place.order, f"{place.text} ({place.key or because})")
    return True


def _imply(resolved: Resolved, key: str, value: Any, because: str) -> None:
    """Sets a key to what another key of the file means; a problem if the file has another value of it."""
    section, _, name = key.rpartition(".")
    known = resolved.value(key)
    if known is None:
        resolved.section(section).pop(name, None)
    if not _set_default(resolved, key, value, because) and known != value and not _is_of_folder(resolved, because):
        _add_disagreement(resolved, because, key, f": it means {value_text(value)}")


def _is_of_folder(resolved: Resolved, key: str) -> bool:
    """Returns whether a key comes from a model folder, whose keys the file may replace."""
    folder = resolved.data.get("pretrained_model_dir")
    return isinstance(folder, str) and resolved.positions[key].text.startswith(f"{Path(folder).expanduser()}/")


def _add_disagreement(resolved: Resolved, key: str, other: str, meaning: str = "") -> None:
    """Adds the problem of a key with another value than a key with the same meaning."""
    place = resolved.positions[key]
    written = value_text(resolved.value(other))
    rule = f"disagrees with {other.rpartition('.')[2]} = {written} ({resolved.positions[other].text}){meaning}"
    problem = problem_at(place, place.key or key, rule, "remove one of the two", resolved.value(key))
    resolved.problems.append(problem)


def _apply_sharded_experts(resolved: Resolved) -> None:
    """Multiplies expert_parallel by the ranks that shard each expert in MindSpore Transformers: here they are whole.

    Its legacy classes shard experts over model_parallel, too, unless expert_model_parallel says otherwise.
    """
    degrees = resolved.section("parallel_config")
    key = "parallel_config.expert_parallel"
    because = "parallel_config.expert_model_parallel"
    shards = degrees.get("expert_model_parallel")
    if shards is None and _is_legacy(resolved):
        because = "parallel_config.model_parallel"
        shards = degrees.get("model_parallel")
    names = ("expert_parallel", "data_parallel", "model_parallel", "context_parallel")
    numbers: list[Any] = [degrees.get(name, 1) for name in names]
    numbers += [shards, resolved.section(_EXPERTS).get("expert_num")]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return
    degrees["expert_model_parallel"] = 1
    written, *ranks_of_stage, shards, experts = numbers
    ranks = math.gcd(written * shards, experts, math.prod(ranks_of_stage))
    if ranks <= written:
        return
    degrees.pop("expert_parallel", None)
    place = resolved.positions.get(key)
    _set_default(resolved, key, ranks, because)
    if place is not None:
        resolved.positions[key] = place._replace(value=written)
    text = (f"{key} {written}: taken as {ranks}, because MindSpore Transformers also shards each expert over {shards}"
            f" ranks ({because}); here all of them have whole experts")  # fmt: skip
    resolved.notes.append(Note(text, "parallel"))


def _is_legacy(resolved: Resolved) -> bool:
    """Returns whether a file trains one of MindSpore Transformers' legacy classes in semi-automatic mode."""
    is_semi_auto = resolved.value("parallel.parallel_mode") in SEMI_AUTO
    trains = resolved.data.get("run_mode", "train") in ("train", "finetune")
    name = resolved.value("model.arch.type")
    is_class = "model.arch.type" in resolved.positions and name in ("LlamaForCausalLM", "TelechatForCausalLM")
    return is_semi_auto and trains and is_class and resolved.data.get("use_legacy") is not False


def _apply_family(resolved: Resolved, is_complete: bool) -> None:
    """Sets the keys that the name of a family implies: Qwen2 has biases on query, key and value, for example."""
    architecture = resolved.section("model.arch").get("type")
    because = "model.arch.type"
    if architecture is None:
        architecture, key = named_family(resolved.section(_MODEL))
        if not architecture and (key := _latent_attention_key(resolved)):
            architecture = next(name for name, family in FAMILIES.items() if "multi_latent_attention" in family.model)
        if architecture:
            because = f"{_MODEL}.{key}"
            _set_default(resolved, "model.arch.type", architecture, because)
    architecture = _canonical_architecture(resolved, architecture)
    family = FAMILIES.get(str(architecture), _NO_FAMILY)
    has_source_class = family is not _NO_FAMILY and not is_complete and _apply_source_class(resolved, architecture)
    biased = f"{_MODEL}.qkv_has_bias"  # Hugging Face's attention_bias also means the bias on o_proj
    is_attention_bias = resolved.name_in_file(biased) == "attention_bias" and type(resolved.value(biased)) is bool
    if family.has_output_bias and is_attention_bias:
        _set_default(resolved, f"{_MODEL}.attn_proj_has_bias", resolved.value(biased), biased)
    implied = dict(family.model)
    if resolved.section(_MODEL).get("sliding_window"):
        implied |= family.model_with_window
    for name, value in implied.items():
        _set_default(resolved, f"{_MODEL}.{name}", value, because)
    _alternate_windows(resolved, family, because)
    width = resolved.section(_MODEL).get("hidden_size")
    if family.scales_embeddings and isinstance(width, int) and width > 0:
        _set_default(resolved, f"{_MODEL}.embedding_multiplier", math.sqrt(width), because)
    if resolved.section(_MODEL).get("multi_latent_attention") is True:
        _set_default(resolved, f"{_MODEL}.use_qk_norm", True, f"{_MODEL}.multi_latent_attention")  # as in DeepSeek-V3
    if not is_complete and not has_source_class:
        _released_sizes(resolved, family)
    _family_experts(resolved, family, because)


def _number_of_layers(settings: Mapping[str, Any]) -> int | None:
    """Returns the layers of a model, by default those of the schema; None for a number that is an error later."""
    layers = settings.get("num_layers", ModelConfig.model_fields["num_layers"].default)
    if type(layers) is int and 1 <= layers <= LAYERS:
        return layers
    return None


def _alternate_windows(resolved: Resolved, family: Family, because: str) -> None:
    """Sets the layer_types of sliding_window_pattern, or of a family, in a model with a sliding window without them."""
    settings = resolved.section(_MODEL)
    layers = _number_of_layers(settings)
    period = family.full_attention_period
    pattern = settings.get("sliding_window_pattern")
    if type(pattern) is int and pattern > 0:
        del settings["sliding_window_pattern"]
        period = pattern
        because = f"{_MODEL}.sliding_window_pattern"
    elif isinstance(pattern, str) and settings.get("layer_types"):  # EXAONE 4 has LLLG
        del settings["sliding_window_pattern"]
    if not period or not settings.get("sliding_window") or layers is None:
        return
    if settings.get("layer_types") is None and settings.get("use_sliding_window") is None:
        settings.pop("layer_types", None)
        types = alternating_layer_types(layers, period)
        _set_default(resolved, f"{_MODEL}.layer_types", types, because)


def _latent_attention_key(resolved: Resolved) -> str:
    """Returns the key by which a file without a class asks for multi-head latent attention; empty if it does not."""
    settings = resolved.section(_MODEL)
    key = "multi_latent_attention"
    if key in settings:
        return key * (settings[key] is True)
    key = next((name for name in LATENT_SIZES if settings.get(name) is not None), "")
    if key:
        place = resolved.positions[f"{_MODEL}.{key}"]
        text = f"{place.key or key} {settings[key]} ({place.text}): only latent attention has it, that of DeepSeek-V3"
        resolved.notes.append(Note(text))
    return key


def _family_experts(resolved: Resolved, family: Family, because: str) -> None:
    """Sets the keys of moe_config that a family implies, if the file has the section."""
    experts = resolved.section(_EXPERTS)
    if not experts:
        return
    for name, value in family.experts.items():
        equivalent = {
            "scoring_func": "use_gating_sigmoid", "aux_loss_factor": "router_aux_loss_coef",
            "topk_method": "balance_via_topk_bias", "first_k_dense_replace": "mlp_layer_types",
        }.get(name)  # fmt: skip
        if equivalent not in experts:
            _set_default(resolved, f"{_EXPERTS}.{name}", value, because)
    if "multi_latent_attention" in family.model and experts.get("topk_bias_update_rate"):
        rate = f"{_EXPERTS}.topk_bias_update_rate"
        _set_default(resolved, f"{_EXPERTS}.balance_via_topk_bias", True, rate)  # as MindSpore Transformers' class does


def _canonical_architecture(resolved: Resolved, architecture: Any) -> Any:
    """Replaces another name of a class by its name in `FAMILIES`; older files of TeleChat3 call it TeleChat."""
    settings = resolved.section(_MODEL)
    canonical = known_class(architecture) or architecture
    if canonical == "TelechatForCausalLM" and str(settings.get("net_name", "")).startswith("telechat3"):
        canonical = "TeleChat3ForCausalLM"
        _set_default(resolved, f"{_MODEL}.attn_proj_has_bias", True, f"{_MODEL}.net_name")
        if settings.get("embedding_size") not in (None, 1) and settings["net_name"] != "telechat3_36b":
            _set_default(resolved, f"{_MODEL}.tie_word_embeddings", True, f"{_MODEL}.net_name")  # as its code does
    if canonical != architecture:
        resolved.data["model"]["arch"]["type"] = canonical
    return canonical


def _apply_source_class(resolved: Resolved, architecture: str) -> bool:
    """Sets keys that the file leaves out to the defaults of MindSpore Transformers' class, if the file names one.

    Returns:
        Whether it names one. A model folder has the defaults of Hugging Face instead.
    """
    settings = resolved.section(_MODEL)
    known = source_class(architecture, settings)
    if known is None or resolved.data.get("pretrained_model_dir"):
        return False
    defaults = dict(known.defaults)
    because = f"{_MODEL}.type"
    if known.model_type:
        defaults = {**FAMILIES[architecture].defaults, **known.defaults}
        because = f"{_MODEL}.model_type"
    for name in (*known.unread, "output_router_logits"):
        defaults.pop(name, None)
    place = resolved.positions[because].text
    if defaults.get("kv_lora_rank"):
        del defaults["num_key_value_heads"]  # without effect
        _note_latent_differences(resolved, place, known)
    used = _set_class_defaults(resolved, defaults, because, known.name, implied=FAMILIES[architecture].model)
    if used:
        text = f"{place}: not in the file, so as in MindSpore Transformers' {known.name}: {', '.join(used)}"
        resolved.notes.append(text)
    return True


def _note_latent_differences(resolved: Resolved, place: str, known: SourceClass) -> None:
    """Adds notes where a file has other multi-head latent attention in MindSpore Transformers than here.

    A file of this schema may have the keys of a published config.json, whose model is meant then.
    """
    settings = resolved.section(_MODEL)
    source = f"{place}: MindSpore Transformers' {known.name}"
    resolved.notes += [f"{source} {text}" for key, text in known.differences.items() if key not in settings]
    is_plain = settings.get("position_embedding_type", "rope") == "rope" and settings.get("rope_scaling") is None
    if is_plain and settings.get("softmax_scale") is None:
        text = f"{source} multiplies the scale of attention by (0.1 mscale ln(rotary_scaling_factor) + 1)^2 even"
        resolved.notes.append(f"{text} without yarn, by default 1.59; here it does not: write softmax_scale")


def _released_sizes(resolved: Resolved, family: Family) -> None:
    """Sets sizes that a file with multi-head latent attention leaves out to those of the family's released model.

    A model folder has all sizes; a null among them is a value. One that is elsewhere has given none.
    """
    settings = resolved.section(_MODEL)
    folder = resolved.data.get("pretrained_model_dir")
    if isinstance(folder, str) and Path(folder).expanduser().is_dir():
        return
    if settings.get("multi_latent_attention") is not True or "multi_latent_attention" not in family.model:
        return
    sizes = {name: value for name, value in family.defaults.items() if name not in _NOT_SIZES}
    _set_class_defaults(resolved, {"seq_length": _LENGTH, **sizes}, "model.arch.type")


def _set_class_defaults(
    resolved: Resolved, defaults: dict[str, Any], because: str, source: str = "", implied: Mapping[str, Any] = {}
) -> list[str]:
    """Sets those defaults of a class that fit the keys of the file; returns texts of those that change the model.

    Args:
        source: MindSpore Transformers' class, for messages.
        implied: Keys of ``model_config`` that the family implies, which no text names.
    """
    used = []
    place = resolved.positions[because]
    settings = resolved.section(_MODEL)
    longest = settings.get("max_position_embeddings")
    for name, value in defaults.items():
        if name == "seq_length" and isinstance(longest, int):
            value = min(value, longest)
        path = _EXPERTS
        kind: type[Section] = MoEConfig
        if name in yaml_names(ModelConfig):
            path = _MODEL
            kind = ModelConfig
        main = yaml_names(kind)[name]
        key = f"{path}.{main}"
        if value is None or not _fits(name, value, settings) or not _set_default(resolved, key, value, because):
            continue
        if source:
            section = place.key.rpartition(".")[0]
            text = f"{place.text} (default of {source})"
            resolved.positions[key] = SourceLocation(place.order, text, f"{section}.{name}".lstrip("."))
        if value not in (fields_by_yaml_name(kind)[main].default, implied.get(main)):
            used.append(f"{name} {value_text(value)}")
    return used


def _fits(name: str, value: Any, settings: dict[str, Any]) -> bool:
    """Returns whether a default of a class agrees with the keys that the file has."""
    moe = settings.get("moe_config")
    if not isinstance(moe, dict):
        moe = {}
    experts = moe.get("expert_num")
    groups = moe.get("n_group")
    layers = settings.get("num_layers")
    vocabulary = settings.get("vocab_size")
    rules: dict[str, Callable[[], bool]] = {
        "moe_router_bias_update_rate": lambda: moe.get("balance_via_topk_bias") is True,
        "moe_aux_loss_coeff": lambda: "router_aux_loss_coef" not in moe,
        "moe_router_load_balancing_type": lambda: bool(moe.get("aux_loss_factor")),
        "pad_token_id": lambda: not isinstance(vocabulary, int) or vocabulary > value,
        "num_experts_per_tok": lambda: not isinstance(experts, int) or experts >= value,
        "n_group": lambda: isinstance(experts, int) and experts % value == 0 and experts > value,
        "topk_group": lambda: isinstance(groups, int) and groups >= value,
        "first_k_dense_replace": lambda: not isinstance(layers, int) or layers > value,
    }
    return name not in rules or rules[name]()


def _apply_aliases(resolved: Resolved) -> None:
    """Sets keys that another key of the file implies: another name, place or form of the same setting."""
    scoring = resolved.section(_EXPERTS).get("scoring_func")
    if scoring in ("softmax", "sigmoid"):
        _imply(resolved, f"{_EXPERTS}.use_gating_sigmoid", scoring == "sigmoid", f"{_EXPERTS}.scoring_func")
    settings = resolved.section(_MODEL)
    heads = f"{_MODEL}.n_kv_heads"
    is_group_number = resolved.name_in_file(heads) in ("multi_query_group_num", "")
    if settings.get("multi_query_attention") is False and is_group_number:
        settings["n_kv_heads"] = None
    _apply_rotated_layers(resolved)
    divisor = settings.get("query_pre_attn_scalar")
    # The schema refuses other values.
    if isinstance(divisor, int | float) and type(divisor) is not bool and 0 < divisor < math.inf:
        _imply(resolved, f"{_MODEL}.softmax_scale", divisor**-0.5, f"{_MODEL}.query_pre_attn_scalar")
        del settings["query_pre_attn_scalar"]
    uses_bias = settings.get("use_bias")
    for name in ("qkv_has_bias", "attn_proj_has_bias", "mlp_has_bias"):
        if isinstance(uses_bias, bool):
            _set_default(resolved, f"{_MODEL}.{name}", uses_bias, f"{_MODEL}.use_bias")
    because = f"{_MODEL}.mlp_has_bias"
    if settings.get("mlp_has_bias") is True and resolved.name_in_file(because) == "add_bias_linear":
        # Megatron-LM's key is about all matrices of a layer.
        _set_default(resolved, f"{_MODEL}.attn_proj_has_bias", True, because)
        settings.pop("qkv_has_bias", None)
        _set_default(resolved, f"{_MODEL}.qkv_has_bias", True, because)
    untie_key = f"{_MODEL}.untie_embeddings_and_output_weights"
    untied = resolved.section(_MODEL).get("untie_embeddings_and_output_weights")
    if isinstance(untied, bool):
        _imply(resolved, f"{_MODEL}.tie_word_embeddings", not untied, untie_key)
    types, factors = (resolved.section(_EXPERTS).get(f"aux_loss_{name}") for name in ("types", "factors"))
    if types == ["expert"] and isinstance(factors, list) and len(factors) == 1:
        _set_default(resolved, f"{_EXPERTS}.aux_loss_factor", factors[0], f"{_EXPERTS}.aux_loss_factors")
    if resolved.data.get("run_mode") == "predict_with_train_model":  # prediction always uses the trained model
        resolved.data["run_mode"] = "predict"
    if resolved.data.get("output_dir") == "":
        del resolved.data["output_dir"]
    for section, name, modes in _MODES:
        keys = resolved.section(section)
        if str(keys.get(name)) in modes:
            keys[name] = modes[keys[name]]
    name = "use_skip_data_by_global_norm"  # older files write it at the top level
    key = f"runner_wrapper.{name}"
    if name in resolved.data and not _set_default(resolved, key, resolved.data[name], name):
        if resolved.data[name] is True and resolved.value(key) is False:
            _add_disagreement(resolved, name, key)


def _apply_rotated_layers(resolved: Resolved) -> None:
    """Sets nope_layers from SmolLM3's no_rope_layers. Either wins over the interval of a family or a config.json."""
    settings = resolved.section(_MODEL)
    rotated: Any = settings.get("no_rope_layers")
    # The schema refuses other values.
    is_list = isinstance(rotated, list) and len(rotated) == _number_of_layers(settings)
    if is_list and all(type(each) is int and each in (0, 1) for each in rotated):
        layers = [layer for layer, has_rotary in enumerate(rotated) if has_rotary == 0]
        _imply(resolved, f"{_MODEL}.nope_layers", layers, f"{_MODEL}.no_rope_layers")
        del settings["no_rope_layers"]
    is_interval_written = resolved.name_in_file(f"{_MODEL}.nope_layer_interval") == "nope_layer_interval"
    if settings.get("nope_layers") is not None and not is_interval_written:
        settings["nope_layer_interval"] = None


def _apply_flat_yarn(resolved: Resolved) -> None:
    """Moves MindSpore Transformers' flat keys of yarn (position_embedding_type, scaling_factor ...) into rope_scaling.

    Unset mscale and mscale_all_dim are 1 and 0 in its formula, and 0.707 both with multi_latent_attention. Keys of
    a yarn that is already in rope_scaling, as in a model folder, stay.
    """
    settings = resolved.section(_MODEL)
    because = f"{_MODEL}.position_embedding_type"
    key = next((key for key in ("rotary_scaling_factor", "scaling_factor") if key in settings), "")
    factor = settings.get(key)
    if settings.get("position_embedding_type") != "yarn" or isinstance(factor, dict) or not key:
        return
    existing = settings.get("rope_scaling")
    if isinstance(existing, dict) and not _is_of_folder(resolved, f"{_MODEL}.rope_scaling"):
        for name, value in (("rope_type", "yarn"), ("factor", factor)):
            if existing.get(name, value) != value:
                _add_disagreement(resolved, f"{_MODEL}.{key}", f"{_MODEL}.rope_scaling.{name}")
                return
    settings.pop("rope_scaling", None)
    if not isinstance(existing, dict) or existing.get("rope_type") != "yarn":
        existing = {}
    _set_default(resolved, f"{_MODEL}.rope_scaling", {**existing, "rope_type": "yarn", "factor": factor}, because)
    names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")
    for name in (name for name in names if settings.get(name) is not None):
        settings["rope_scaling"].pop(name, None)
        _set_default(resolved, f"{_MODEL}.rope_scaling.{name}", settings[name], f"{_MODEL}.{name}")
    scales = [settings.get("mscale", 1.0), settings.get("mscale_all_dim", 0.0)]
    are_numbers = all(isinstance(value, int | float) for value in scales)
    if not existing and settings.get("multi_latent_attention"):
        for name in ("mscale", "mscale_all_dim"):
            _set_default(resolved, f"{_MODEL}.rope_scaling.{name}", settings.get(name, 0.707), because)
    elif not existing and not all(scales) and are_numbers and isinstance(factor, int | float) and factor >= 1:
        numerator, denominator = (0.1 * scale * math.log(factor) + 1 for scale in scales)
        _set_default(resolved, f"{_MODEL}.rope_scaling.attention_factor", numerator / denominator, because)
    for name in (key, *names, "position_embedding_type"):  # rope_scaling replaces them
        settings.pop(name, None)


def _apply_long_rope(resolved: Resolved) -> None:
    """Completes a rope_scaling of LongRoPE, which has short and long factors.

    Phi-3's files have its trained length beside it, and may call it su or yarn, as Phi3Config of transformers may.
    """
    settings = resolved.section(_MODEL)
    scaling = settings.get("rope_scaling")
    key = "original_max_position_embeddings"
    trained = None
    if resolved.value("model.arch.type") == "Phi3ForCausalLM":
        trained = settings.pop(key, None)
    if not isinstance(scaling, dict) or scaling.get("short_factor") is None:
        return
    because = f"{_MODEL}.rope_scaling"
    if scaling.get("rope_type") in (None, "su", "yarn"):
        scaling["rope_type"] = "longrope"
    if trained is not None:
        scaling[key] = trained
    longest = settings.get("max_position_embeddings")
    trained = scaling.get(key)
    if isinstance(longest, int) and isinstance(trained, int) and longest >= trained > 0:
        _set_default(resolved, f"{because}.factor", longest / trained, because)


def _apply_window_size(resolved: Resolved, is_complete: bool) -> None:
    """Sets sliding_window and layer_types from MindSpore Transformers' window_size and window_attn_skip_freq."""
    settings = resolved.section(_MODEL)
    window = settings.get("window_size")
    if not isinstance(window, list) or len(window) != 2 or not all(type(size) is int for size in window):
        return  # none, or an error follows
    if window[0] >= 0 or (window[0] == -1 and settings.get("sliding_window")):
        _imply(resolved, f"{_MODEL}.sliding_window", window[0] + 1, f"{_MODEL}.window_size")
    layers = _number_of_layers(settings)
    if settings.get("window_attn_skip_freq") is None or layers is None or window[0] < 0:
        return
    frequency = settings["window_attn_skip_freq"]
    types = window_layer_types(layers, frequency)
    if not is_complete:  # an older run may have taken layer 0 as it is written
        _imply(resolved, f"{_MODEL}.layer_types", types, f"{_MODEL}.window_attn_skip_freq")
    if frequency == 2 or (isinstance(frequency, list) and frequency[:1] != frequency[1:2]):
        place = resolved.positions[f"{_MODEL}.window_attn_skip_freq"]
        resolved.notes.append(f"{place.text}: {place.key}: layer 0 is like layer 1, as in MindSpore Transformers")


def _apply_grouped_schedule(resolved: Resolved) -> None:
    """Replaces a ``grouped_lr_schedule`` whose groups all have the default schedule by lr_schedule."""
    key = "grouped_lr_schedule"
    grouped = resolved.section(key)
    default = grouped.get("default")
    others = grouped.get("grouped") or []
    if not isinstance(default, dict) or not isinstance(others, list) or resolved.data.get("lr_schedule"):
        return
    if any(not isinstance(other, dict) or {**other, "params": 0} != {**default, "params": 0} for other in others):
        return  # an error follows: not yet supported
    del resolved.data[key]
    resolved.data.pop("lr_schedule", None)
    resolved.positions["lr_schedule"] = resolved.positions[key]
    for name, value in default.items():
        _set_default(resolved, f"lr_schedule.{name}", value, key)
    text = f"{resolved.positions[key].text}: {key}: all its groups have the default schedule: lr_schedule"
    resolved.notes.append(Note(text, "ignored"))


def _apply_sparse_layers(resolved: Resolved) -> None:
    """Sets moe_layer_freq from ``mlp_layer_types``, or Qwen3-MoE's ``decoder_sparse_step`` and ``mlp_only_layers``."""
    experts = resolved.section(_EXPERTS)
    layers = _number_of_layers(resolved.section(_MODEL))
    types = experts.get("mlp_layer_types")
    if isinstance(types, list) and len(types) == layers and {"dense", "sparse"}.issuperset(map(str, types)):
        frequency = [int(kind == "sparse") for kind in types]
        _imply(resolved, f"{_EXPERTS}.moe_layer_freq", frequency, f"{_EXPERTS}.mlp_layer_types")
        del experts["mlp_layer_types"]
    step = experts.get("decoder_sparse_step", 1)
    dense = experts.get("mlp_only_layers")
    if not isinstance(step, int) or step < 1 or layers is None or not isinstance(dense, list | None):
        return
    because = f"{_EXPERTS}.decoder_sparse_step"
    if dense:
        because = f"{_EXPERTS}.mlp_only_layers"
    if step != 1 or (dense and all(layer in range(layers) for layer in dense)):  # else an error follows
        _imply(resolved, f"{_EXPERTS}.moe_layer_freq", layers_with_experts(layers, step, dense or []), because)


def _apply_optimizer(resolved: Resolved) -> None:
    """Sets Muon's defaults, and the schedule's peak to optimizer.learning_rate; without a schedule it is constant."""
    optimizer = resolved.section("optimizer")
    schedule = resolved.section("lr_schedule")
    if optimizer.get("type") == "Muon":
        for name, value in deepcopy(_MUON).items():
            _set_default(resolved, f"optimizer.{name}", value, "optimizer.type")
        betas = resolved.section("optimizer")["betas"]
        for number, value in enumerate(_MUON["betas"]):  # beta1 alone leaves the other one to the schema
            if resolved.positions.get(f"optimizer.betas.{number}") == NO_LOCATION:
                betas[number] = value
        if not resolved.section(_MODEL).get("multi_latent_attention") and "qk_clip_threshold" not in optimizer:
            _set_default(resolved, "optimizer.qk_clip_enabled", False, "optimizer.type")
    rate = optimizer.get("learning_rate")
    because = "optimizer.learning_rate"
    if rate is None or isinstance(rate, bool):
        return
    if not schedule:
        _set_default(resolved, "lr_schedule.type", "ConstantWarmUpLR", because)
    name = "learning_rate"
    if str(schedule.get("type", "")).startswith("CosineAnnealing"):
        name = "base_lr"
    _set_default(resolved, f"lr_schedule.{name}", rate, because)
