"""Rules about mixtures of experts and the callback that watches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainer.config.callback_schema import MoEDropRate
from trainer.config.moe_schema import MoEConfig
from trainer.config.problems import Problem
from trainer.config.schema import Config

_KEY = "model.model_config.moe_config"
_Report = Callable[..., Problem]


def moe_problems(config: Config, report: _Report) -> Iterator[Problem]:
    """A mixture is checked completely, and then it is not yet supported."""
    moe = config.decoder.moe_config
    if moe is None:
        return
    found = [*_routing(moe, report), *_groups(moe, report), *_layers(config, moe, report)]
    yield from found
    if moe.expert_num > 1 and not found:
        yield report(f"{_KEY}.expert_num", moe.expert_num, "not yet supported", moe.support_reason)


def _routing(moe: MoEConfig, report: _Report) -> Iterator[Problem]:
    experts = moe.expert_num
    if moe.num_experts_chosen > experts:
        yield report(
            f"{_KEY}.num_experts_chosen",
            moe.num_experts_chosen,
            f"a token cannot go to more experts than there are ({experts})",
            f"set it to at most {experts}",
        )
    if moe.capacity_factor <= 0 and moe.capacity_factor != -1:
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
    layers, dense = config.decoder.num_layers, moe.first_k_dense_replace
    if dense is not None and dense > layers:
        yield report(
            f"{_KEY}.first_k_dense_replace",
            dense,
            f"must be at most num_layers ({layers})",
            f"set it to {layers} or less",
        )
    if isinstance(moe.moe_layer_freq, list) and len(moe.moe_layer_freq) != layers:
        yield report(
            f"{_KEY}.moe_layer_freq",
            moe.moe_layer_freq,
            f"a list needs one number for each of the {layers} layers",
            "give that many, or one number",
        )


def callback_problems(config: Config, report: _Report) -> Iterator[Problem]:
    """Two callbacks of one type, and a MoEDropRateCallback that describes another model."""
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
        if isinstance(callback, MoEDropRate) and _describes_model(config):
            yield from _same_model(config, callback, f"callbacks.{number}", report)


def _describes_model(config: Config) -> bool:
    """False for a file without a model, such as one section copied from documentation."""
    return bool(config.source.where("model.model_config.num_layers"))


def _same_model(config: Config, callback: MoEDropRate, key: str, report: _Report) -> Iterator[Problem]:
    decoder, moe = config.decoder, config.decoder.moe_config or MoEConfig()
    model = {
        "expert_num": (moe.expert_num, f"{_KEY}.expert_num"),
        "capacity_factor": (moe.capacity_factor, f"{_KEY}.capacity_factor"),
        "num_layers": (decoder.num_layers, "model.model_config.num_layers"),
        "mtp_depth": (decoder.mtp_depth, "model.model_config.mtp_depth"),
    }
    for name, (value, model_key) in model.items():
        said = getattr(callback, name)
        if said is not None and said != value:
            where = config.source.where(model_key)
            yield report(
                f"{key}.{name}",
                said,
                f"disagrees with {model_key} = {value}{f' ({where})' if where else ', its default'}",
                "remove it here: the callback asks the model",
            )


def moe_notices(config: Config) -> Iterator[str]:
    """Keys about experts in a file whose model has none."""
    moe = config.decoder.moe_config
    if moe is not None and moe.expert_num == 1 and moe != MoEConfig():
        yield "moe_config: changes nothing, expert_num is 1: a dense model"
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, MoEDropRate) and (moe is None or moe.expert_num == 1):
            yield f"callbacks.{number} MoEDropRateCallback: reports nothing, the model is dense"
