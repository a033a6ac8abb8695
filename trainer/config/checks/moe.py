"""Rules about mixtures of experts and the callbacks that monitor them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.config.checks.problem import ConfigError, problem
from trainer.config.schema.callbacks import MoEDropRate, TopkBiasBalance
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.root import Config
from trainer.errors import value_text

_MODEL = "model.model_config"
_KEY = f"{_MODEL}.moe_config"
_REMOVE_ONE = "remove one of the two"


def moe_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for keys of moe_config that contradict each other."""
    moe = config.decoder.moe_config
    if moe is None:
        return
    yield from _routing(config, moe)
    yield from _groups(config, moe)
    if moe.expert_num > 1:
        yield from _dropping(config, moe)
        yield from _shared_experts(config, moe)


def _routing(config: Config, moe: MoEConfig) -> Iterator[ConfigError]:
    if moe.num_experts_chosen > moe.expert_num:
        rule = f"a token cannot go to more experts than there are ({moe.expert_num})"
        yield problem(config, f"{_KEY}.num_experts_chosen", rule, f"set it to at most {moe.expert_num}")
    if moe.capacity_factor is not None and moe.capacity_factor <= 0 and moe.capacity_factor != -1:
        yield problem(config, f"{_KEY}.capacity_factor", "must be greater than 0, or -1 for no bound", "use 1.1 or -1")
    if moe.router_aux_loss_coef is not None and moe.aux_loss_factor not in (None, moe.router_aux_loss_coef):
        rule = f"cannot be combined with aux_loss_factor = {moe.aux_loss_factor:g}"
        yield problem(config, f"{_KEY}.router_aux_loss_coef", rule, _REMOVE_ONE)
    kinds = len(moe.aux_loss_types or [])
    if moe.aux_loss_factors is not None and len(moe.aux_loss_factors) != kinds:
        yield problem(config, f"{_KEY}.aux_loss_factors", f"needs one factor for each of aux_loss_types ({kinds})",
                      "give both lists the same length")


def _groups(config: Config, moe: MoEConfig) -> Iterator[ConfigError]:
    groups = moe.n_group or 0
    chosen = moe.topk_group or 0
    if groups and moe.expert_num % groups:
        yield problem(config, f"{_KEY}.n_group", f"must divide the experts ({moe.expert_num})",
                      "choose a divisor, or leave it out")
        return
    if chosen and not groups:
        yield problem(config, f"{_KEY}.topk_group", "needs n_group: there are no groups",
                      "set n_group, or leave both out")
    if groups > 1 and moe.topk_method == "greedy":
        yield problem(config, f"{_KEY}.topk_method", f"uses no groups, and n_group is {groups}", _REMOVE_ONE)
    if groups and chosen > groups:
        rule = f"a token cannot go to more groups than there are ({groups})"
        yield problem(config, f"{_KEY}.topk_group", rule, "lower it")
    elif groups and chosen and moe.num_experts_chosen > chosen * (moe.expert_num // groups):
        rule = f"{chosen} groups of {moe.expert_num // groups} experts have fewer"
        yield problem(config, f"{_KEY}.num_experts_chosen", rule, "lower it, or raise topk_group")


def moe_layer_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors about the layers with experts."""
    moe = config.decoder.moe_config
    layers = config.decoder.num_layers
    if moe is None:
        return
    dense = moe.first_k_dense_replace
    frequency = moe.moe_layer_freq
    key = f"{_KEY}.moe_layer_freq"
    if dense is not None and dense > layers:
        rule = f"must be at most num_layers ({layers})"
        yield problem(config, f"{_KEY}.first_k_dense_replace", rule, f"set it to {layers} or less")
    elif isinstance(frequency, list) and len(frequency) != layers:
        rule = f"a list needs one number for each of the {layers} layers"
        yield problem(config, key, rule, "give that many, or one number")
    elif isinstance(frequency, list) and set(frequency) - {0, 1}:
        yield problem(config, key, "a list may have only 0 and 1", "write 1 for experts in every layer")
    elif isinstance(frequency, int) and frequency < 1:
        yield problem(config, key, "must be at least 1", "write 1 for experts in every layer")
    elif moe.expert_num > 1 and not config.decoder.moe_layers:
        yield _no_moe_layer(config, moe)


def _no_moe_layer(config: Config, moe: MoEConfig) -> ConfigError:
    """Returns the error for a mixture of experts whose keys leave no layer with experts."""
    dense = moe.first_k_dense_replace
    # Qwen3-MoE's keys, where written, have given moe_layer_freq its value.
    reasons = {
        "first_k_dense_replace": dense == config.decoder.num_layers,
        "moe_layer_end_index": moe.moe_layer_end_index >= 0,
        "decoder_sparse_step": moe.decoder_sparse_step > 1,
        "mlp_only_layers": moe.mlp_only_layers,
    }
    name = next((name for name, is_reason in reasons.items() if is_reason), "moe_layer_freq")
    rule = "leaves no layer with experts"
    if dense and name != "first_k_dense_replace":
        rule += f", with first_k_dense_replace = {dense}"
    fix = {"moe_layer_end_index": "raise it", "mlp_only_layers": "leave layers out of it"}.get(name, "lower it")
    return problem(config, f"{_KEY}.{name}", rule, f"{fix}, or write expert_num: 1")


def _dropping(config: Config, moe: MoEConfig) -> Iterator[ConfigError]:
    """Yields an error where one key forbids dropping tokens and another one sets a capacity."""
    if moe.moe_token_drop_policy is False and moe.effective_capacity is not None:
        rule = f"means that no token is dropped, but the capacity factor is {moe.effective_capacity:g}"
        fix = "write capacity_factor: -1, or position or probability here"
        yield problem(config, f"{_KEY}.moe_token_drop_policy", rule, fix)


def balance_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors about auxiliary losses that would change the results and are not supported."""
    moe = config.decoder.experts
    if moe is None:
        return
    factor = config.decoder.balance_factor
    types = moe.aux_loss_types or []
    factors = moe.aux_loss_factors or []
    if types and (types != ["expert"] or factors != [factor]):
        name = "aux_loss_factors"
        if types != ["expert"]:
            name = "aux_loss_types"
        expert_factor = "0.05"
        if "expert" in types[: len(factors)]:
            expert_factor = f"{factors[types.index('expert')]:g}"
        rule = f"not yet supported: the only auxiliary loss is that of experts, times aux_loss_factor ({factor:g})"
        fix = f"write aux_loss_factor: {expert_factor}, and leave both lists out"
        yield problem(config, f"{_KEY}.{name}", rule, fix)
    degrees = config.parallel_config
    has_sequence = config.runner_config.batch_size == degrees.model_parallel == degrees.context_parallel == 1
    balancing = moe.moe_router_load_balancing_type
    key = f"{_KEY}.moe_router_load_balancing_type"
    if balancing == "sinkhorn":
        fix = "use seq_aux_loss, the auxiliary loss of each sequence, which gives other results"
        yield problem(config, key, "not yet supported", fix)
    elif balancing == "sub_seq_aux_loss" and factor and not has_sequence:
        rule = (
            "not yet supported: it is the loss of a rank's tokens of a micro-batch, which is that of each sequence only"
            " with batch_size, model_parallel and context_parallel 1"
        )
        yield problem(config, key, rule, "write seq_aux_loss, the loss of each sequence, or aux_loss_factor: 0")
    elif balancing == "none" and factor:
        yield problem(config, key, "contradicts aux_loss_factor", "write aux_loss_factor: 0")


def _shared_experts(config: Config, moe: MoEConfig) -> Iterator[ConfigError]:
    if moe.use_shared_expert_gating and not config.decoder.shared_expert_size:
        yield problem(config, f"{_KEY}.use_shared_expert_gating", "requires shared experts, and the model has none",
                      "write shared_expert_num, or leave it out")
    if config.decoder.shared_expert_size:
        used = {"moe_mlp_has_bias": moe.moe_mlp_has_bias, "swiglu_limit": moe.swiglu_limit is not None}
        for name in (name for name, is_used in used.items() if is_used):
            yield problem(config, f"{_KEY}.{name}", "not yet supported with shared experts", "leave one of them out")


def callback_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for two callbacks of one type, and for callbacks that describe another model."""
    first: dict[str, int] = {}
    # A file without a model is a section copied from documentation.
    has_model = bool(config.source.where(f"{_MODEL}.num_layers"))
    for number, callback in enumerate(config.callbacks):
        if callback.type in first:
            rule = f"this callback is already listed ({config.source.where(f'callbacks.{first[callback.type]}')})"
            yield problem(config, f"callbacks.{number}.type", rule, "keep one of the two")
        first.setdefault(callback.type, number)
        if isinstance(callback, (MoEDropRate, TopkBiasBalance)) and has_model:
            yield from _same_model(config, callback, f"callbacks.{number}")


def watched_keys(config: Config) -> dict[str, tuple[Any, str]]:
    """Returns, for each key of the model that a callback may repeat, the model's value and its dotted key."""
    decoder = config.decoder
    moe = config.decoder.moe_config or MoEConfig()
    expert_key = f"{_KEY}.expert_num"
    if decoder.moe_config is None and config.source.where(_KEY):  # null was written
        expert_key = _KEY
    model: dict[str, tuple[Any, str]] = {
        "expert_num": (moe.expert_num, expert_key),
        "num_layers": (decoder.num_layers, f"{_MODEL}.num_layers"),
        "mtp_depth": (decoder.mtp_depth, f"{_MODEL}.mtp_depth"),
    }
    if moe.expert_num > 1:
        for name in ("balance_via_topk_bias", "topk_bias_update_rate"):
            model[name] = (getattr(moe, name), f"{_KEY}.{name}")
        # Without experts, or if no token is dropped, the factor has no effect.
        if not moe.use_gmm or moe.capacity_factor is not None:
            model["capacity_factor"] = (capacity_factor(moe), f"{_KEY}.capacity_factor")
    return model


def _same_model(config: Config, callback: MoEDropRate | TopkBiasBalance, key: str) -> Iterator[ConfigError]:
    model = watched_keys(config)
    for name in sorted(model.keys() & type(callback).model_fields.keys()):
        value, model_key = model[name]
        repeated = getattr(callback, name)
        if repeated is None or repeated == value:
            continue
        if name == "capacity_factor" and repeated == -1 and value is None:
            continue
        section = model_key.rsplit(".", 1)[0]
        if model_key == _KEY:
            section = _KEY
        rule = f"disagrees with {config.source.name(model_key)} = {_model_value(config, model_key, value)}"
        fix = f"remove it here: the callback takes the model's value; or write {name}: {repeated} in {section}"
        yield problem(config, f"{key}.{name}", rule, fix)


def _model_value(config: Config, key: str, value: Any) -> str:
    """Returns a value of the model with its location, for a message."""
    where = config.source.where(key)
    if key == _KEY:
        return f"null ({where}): a dense model"
    if value is None:
        value = "null, no limit"
    if where:
        return f"{value_text(value)} ({where})"
    return f"{value_text(value)}, its default"


def capacity_factor(moe: MoEConfig) -> float | None:
    """Returns the capacity factor that the section asks for; None for no limit."""
    if moe.capacity_factor is None:
        return moe.effective_capacity
    if moe.capacity_factor == -1:
        return None
    return moe.capacity_factor


def watches_drop_rate(config: Config) -> bool:
    """Returns whether the share of dropped tokens is reported, by a key of moe_config or by the callback."""
    moe = config.decoder.experts
    has_callback = any(isinstance(callback, MoEDropRate) for callback in config.callbacks)
    return moe is not None and (moe.callback_moe_droprate or has_callback)
