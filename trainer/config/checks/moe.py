"""Rules about mixtures of experts, multi-token prediction and the callbacks that watch them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainer.config.checks.problem import Problem
from trainer.config.schema.callbacks import MoEDropRate, TopkBiasBalance
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.root import Config

_MODEL = "model.model_config"
_KEY = f"{_MODEL}.moe_config"
_Report = Callable[..., Problem]


def moe_problems(config: Config, report: _Report) -> Iterator[Problem]:
    """What a mixture and the multi-token prediction modules say against themselves."""
    decoder, moe = config.decoder, config.decoder.moe_config
    if decoder.mtp_depth >= decoder.seq_length:
        yield report(
            f"{_MODEL}.mtp_depth",
            decoder.mtp_depth,
            f"a row of {decoder.seq_length} tokens (seq_length) has none so far ahead",
            "use 1",
        )
    if moe is None:
        return
    yield from _routing(moe, report, config.source.where)
    yield from _groups(moe, report)
    yield from _layers(config, moe, report)
    if moe.expert_num > 1:
        yield from _dropping(moe, report)
        yield from _not_built(config, moe, report)


def _routing(moe: MoEConfig, report: _Report, where: Callable[[str], str]) -> Iterator[Problem]:
    experts = moe.expert_num
    if moe.num_experts_chosen > experts:
        yield report(
            f"{_KEY}.num_experts_chosen",
            moe.num_experts_chosen,
            f"a token cannot go to more experts than there are ({experts})",
            f"set it to at most {experts}",
        )
    if moe.capacity_factor is not None and moe.capacity_factor <= 0 and moe.capacity_factor != -1:
        yield report(
            f"{_KEY}.capacity_factor",
            moe.capacity_factor,
            "must be greater than 0, or -1 for no bound",
            "use 1.1 or -1",
        )
    if moe.scoring_func is not None and moe.use_gating_sigmoid and moe.scoring_func != "sigmoid":
        yield report(
            f"{_KEY}.scoring_func", moe.scoring_func, "contradicts use_gating_sigmoid = True", "remove one of the two"
        )
    if moe.scoring_func == "sigmoid" and not moe.use_gating_sigmoid and where(f"{_KEY}.use_gating_sigmoid"):
        yield report(
            f"{_KEY}.use_gating_sigmoid",
            False,
            f"contradicts scoring_func = sigmoid ({where(f'{_KEY}.scoring_func')})",
            "remove one of the two",
        )
    if moe.aux_loss_factors is not None and len(moe.aux_loss_factors) != len(moe.aux_loss_types or []):
        yield report(
            f"{_KEY}.aux_loss_factors",
            moe.aux_loss_factors,
            f"needs one factor for each of aux_loss_types ({len(moe.aux_loss_types or [])})",
            "give both lists the same length",
        )


def _groups(moe: MoEConfig, report: _Report) -> Iterator[Problem]:
    groups, chosen = moe.n_group or 0, moe.topk_group or 0
    if groups and moe.expert_num % groups:
        yield report(
            f"{_KEY}.n_group",
            groups,
            f"must divide the experts ({moe.expert_num})",
            "choose a divisor, or leave it out",
        )
        return
    if chosen and not groups:
        yield report(
            f"{_KEY}.topk_group", chosen, "needs n_group: there are no groups", "set n_group, or leave both out"
        )
    if groups > 1 and moe.topk_method == "greedy":
        yield report(
            f"{_KEY}.topk_method", "greedy", f"chooses without groups, and n_group is {groups}", "remove one of the two"
        )
    if groups and chosen > groups:
        yield report(
            f"{_KEY}.topk_group", chosen, f"a token cannot go to more groups than there are ({groups})", "lower it"
        )
    elif groups and chosen and moe.num_experts_chosen > chosen * (moe.expert_num // groups):
        yield report(
            f"{_KEY}.num_experts_chosen",
            moe.num_experts_chosen,
            f"{chosen} groups of {moe.expert_num // groups} experts have fewer",
            "lower it, or raise topk_group",
        )


def _layers(config: Config, moe: MoEConfig, report: _Report) -> Iterator[Problem]:
    layers, dense, every = config.decoder.num_layers, moe.first_k_dense_replace, moe.moe_layer_freq
    if dense is not None and dense > layers:
        yield report(
            f"{_KEY}.first_k_dense_replace",
            dense,
            f"must be at most num_layers ({layers})",
            f"set it to {layers} or less",
        )
        return
    if isinstance(every, list) and len(every) != layers:
        yield report(
            f"{_KEY}.moe_layer_freq",
            every,
            f"a list needs one number for each of the {layers} layers",
            "give that many, or one number",
        )
        return
    if every == 0 or isinstance(every, int) and every < 0 or isinstance(every, list) and set(every) - {0, 1}:
        rule = "a list holds 0 and 1" if isinstance(every, list) else "must be at least 1"
        yield report(f"{_KEY}.moe_layer_freq", every, rule, "write 1 for experts in every layer")
        return
    if moe.expert_num > 1 and not config.decoder.moe_layers:
        # Qwen3-MoE's keys are what was written where they give moe_layer_freq its value.
        name = "mlp_only_layers" if moe.mlp_only_layers else "moe_layer_freq"
        name = "decoder_sparse_step" if moe.decoder_sparse_step > 1 else name
        beside = f"beside first_k_dense_replace = {dense} it " if dense else ""
        name, beside = ("first_k_dense_replace", "") if dense == layers else (name, beside)
        fix = "leave layers out of it" if name == "mlp_only_layers" else "lower it"
        rule = f"{beside}leaves no layer with experts"
        yield report(f"{_KEY}.{name}", getattr(moe, name), rule, f"{fix}, or write expert_num: 1")


def _dropping(moe: MoEConfig, report: _Report) -> Iterator[Problem]:
    """Settings that drop tokens beside one that computes all."""
    policy = moe.moe_token_drop_policy
    if moe.use_gmm:
        for name, value in (("enable_sdrop", moe.enable_sdrop), ("moe_token_drop_policy", policy)):
            if value:
                yield report(
                    f"{_KEY}.{name}",
                    value,
                    "is about dropping tokens, and use_gmm = True computes every one of them",
                    "remove one of the two",
                )
    elif policy is False and moe.room is not None:
        yield report(
            f"{_KEY}.moe_token_drop_policy",
            False,
            f"says that nothing is dropped, and the capacity factor is {moe.room:g}",
            "write capacity_factor: -1, or position or probability here",
        )


def _not_built(config: Config, moe: MoEConfig, report: _Report) -> Iterator[Problem]:
    """What would change the numbers and is not there."""
    types, factors = moe.aux_loss_types or [], moe.aux_loss_factors or []
    if types and (types != ["expert"] or factors != [moe.aux_loss_factor]):
        name = "aux_loss_types" if types != ["expert"] else "aux_loss_factors"
        wanted = f"{factors[types.index('expert')]:g}" if "expert" in types[: len(factors)] else "0.05"
        yield report(
            f"{_KEY}.{name}",
            getattr(moe, name),
            f"not yet supported: there is one balance loss, of the experts, times aux_loss_factor"
            f" ({moe.aux_loss_factor:g})",
            f"write aux_loss_factor: {wanted}, and leave both lists out",
        )
    balancing = moe.moe_router_load_balancing_type
    if balancing not in ("aux_loss", "seq_aux_loss") and not (balancing == "none" and moe.aux_loss_factor == 0):
        fix = "write aux_loss_factor: 0" if balancing == "none" else "use seq_aux_loss, the balance loss of each row"
        rule = "contradicts aux_loss_factor" if balancing == "none" else "not yet supported"
        yield report(f"{_KEY}.moe_router_load_balancing_type", balancing, rule, fix)
    if config.decoder.mlp_has_bias:
        yield report(
            f"{_MODEL}.mlp_has_bias", True, "not yet supported beside experts, which have no biases", "leave it out"
        )


def callback_problems(config: Config, report: _Report) -> Iterator[Problem]:
    """Two callbacks of one type, and callbacks that describe another model."""
    first: dict[str, int] = {}
    for number, callback in enumerate(config.callbacks):
        if callback.type in first:
            where = config.source.where(f"callbacks.{first[callback.type]}")
            yield report(
                f"callbacks.{number}.type",
                callback.type,
                f"this callback is there already ({where})",
                "keep one of the two",
            )
        first.setdefault(callback.type, number)
        if isinstance(callback, (MoEDropRate, TopkBiasBalance)) and _describes_model(config):
            yield from _same_model(config, callback, f"callbacks.{number}", report)


def _describes_model(config: Config) -> bool:
    """False for a file without a model, such as one section copied from documentation."""
    return bool(config.source.where(f"{_MODEL}.num_layers"))


def _same_model(
    config: Config, callback: MoEDropRate | TopkBiasBalance, key: str, report: _Report
) -> Iterator[Problem]:
    decoder, moe = config.decoder, config.decoder.moe_config or MoEConfig()
    no_section = decoder.moe_config is None and bool(config.source.where(_KEY))  # null was written
    model: dict[str, tuple[Any, str]] = {
        "expert_num": (moe.expert_num, _KEY if no_section else f"{_KEY}.expert_num"),
        "num_layers": (decoder.num_layers, f"{_MODEL}.num_layers"),
        "mtp_depth": (decoder.mtp_depth, f"{_MODEL}.mtp_depth"),
    }
    if moe.expert_num > 1:
        model |= {
            name: (getattr(moe, name), f"{_KEY}.{name}") for name in ("balance_via_topk_bias", "topk_bias_update_rate")
        }
        # Without experts, or where all tokens are computed, the factor says nothing.
        if not moe.use_gmm or moe.capacity_factor is not None:
            model["capacity_factor"] = (_capacity_factor(moe), f"{_KEY}.capacity_factor")
    for name in sorted(model.keys() & type(callback).model_fields.keys()):
        (value, model_key), said = model[name], getattr(callback, name)
        if said is None or said == value or (name == "capacity_factor" and said == -1 and value is None):
            continue
        where, section = config.source.where(model_key), model_key.rsplit(".", 1)[0]
        if model_key == _KEY:
            shown, section = f"null ({where}): a dense model", _KEY
        else:
            shown = f"{'null, no bound' if value is None else value}{f' ({where})' if where else ', its default'}"
        yield report(
            f"{key}.{name}",
            said,
            f"disagrees with {config.source.name(model_key)} = {shown}",
            f"remove it here: the callback asks the model; or write {name}: {said} in {section}",
        )


def _capacity_factor(moe: MoEConfig) -> float | None:
    """What the section says of it, None for no bound."""
    factor = moe.room if moe.capacity_factor is None else moe.capacity_factor
    return None if factor == -1 else factor


def watches_drop_rate(config: Config) -> bool:
    """Whether the share of dropped tokens is reported: asked for in the model's section or by the callback."""
    moe = config.decoder.experts
    asked = any(isinstance(callback, MoEDropRate) for callback in config.callbacks)
    return moe is not None and (moe.callback_moe_droprate or asked)


def moe_notices(config: Config) -> Iterator[str]:
    """What works, but other than a reader of the file might expect."""
    decoder, written = config.decoder, config.decoder.moe_config
    if decoder.mtp_depth == 0 and decoder.mtp_loss_factor != ModelConfig.model_fields["mtp_loss_factor"].default:
        yield f"{_called(config, f'{_MODEL}.mtp_loss_factor')}: not used, mtp_depth is 0"
    if decoder.experts is None:
        if written is not None and written != MoEConfig():
            yield "moe_config: changes nothing, expert_num is 1: a dense model"
        for number, callback in enumerate(config.callbacks):
            if isinstance(callback, MoEDropRate):
                yield f"callbacks.{number} MoEDropRateCallback: reports nothing, the model is dense"
        return
    yield from _capacity_notices(config, decoder.experts)
    yield from _product_notices(config, decoder.experts)
    yield from _balance_notices(decoder.experts)
    if config.trains:
        yield from _drop_rate_notices(config, decoder.experts)


def _capacity_notices(config: Config, moe: MoEConfig) -> Iterator[str]:
    if moe.room is not None:
        if config.do_eval or not config.trains:
            yield (
                f"moe_config: capacity_factor {moe.room:g} drops tokens in training only: evaluation and prediction"
                " compute every one of them"
            )
        return
    if moe.use_gmm and moe.capacity_factor not in (None, -1):
        yield f"moe_config.capacity_factor {moe.capacity_factor:g}: not used, use_gmm computes every token"
    unused = ["enable_sdrop"] * moe.enable_sdrop + ["moe_token_drop_policy"] * bool(moe.moe_token_drop_policy)
    if unused:
        bound = "null" if moe.capacity_factor is None else f"{moe.capacity_factor:g}"
        keys = ", ".join(_called(config, f"{_KEY}.{name}") for name in unused)
        yield f"{keys}: not used, capacity_factor {bound} sets no bound"


def _product_notices(config: Config, moe: MoEConfig) -> Iterator[str]:
    unused = [name for name in ("enable_gmm_safe_tokens", "use_fused_ops_permute") if getattr(moe, name)]
    if unused and not moe.use_gmm:
        keys = ", ".join(_called(config, f"{_KEY}.{name}") for name in unused)
        yield f"{keys}: not used, use_gmm is False"


def _called(config: Config, key: str) -> str:
    """Section and key as they were written."""
    return ".".join(config.source.name(key).split(".")[-2:])


def _balance_notices(moe: MoEConfig) -> Iterator[str]:
    rate = moe.topk_bias_update_rate
    if rate and not moe.balance_via_topk_bias:
        yield f"moe_config.topk_bias_update_rate {rate:g}: not used, balance_via_topk_bias is False"
    if moe.balance_via_topk_bias and not rate:
        yield "moe_config.balance_via_topk_bias: the bias stays where it is, topk_bias_update_rate is 0"


def _drop_rate_notices(config: Config, moe: MoEConfig) -> Iterator[str]:
    if not watches_drop_rate(config):
        return
    number = next((n for n, callback in enumerate(config.callbacks) if isinstance(callback, MoEDropRate)), None)
    if number is None:
        factor = "null" if _capacity_factor(moe) is None else f"{_capacity_factor(moe):g}"
        yield (
            "moe_config.callback_moe_droprate: there is no callback MoEDropRateCallback; assumed the model's"
            f" expert_num {moe.expert_num}, capacity_factor {factor}, num_layers {config.decoder.num_layers},"
            f" mtp_depth {config.decoder.mtp_depth}"
        )
    elif not moe.callback_moe_droprate:
        where = config.source.where(f"{_KEY}.callback_moe_droprate")
        if where:
            yield f"callback_moe_droprate ({where}) is False, but MoEDropRateCallback is there: rates are logged"
        else:
            yield f"callbacks.{number} MoEDropRateCallback: callback_moe_droprate is not in moe_config; assumed True"
    if moe.room is None:
        why = "use_gmm computes every token" if moe.use_gmm else "no capacity_factor bounds what an expert takes"
        yield f"the drop rate will be 0.00000 in every layer: {why}"
