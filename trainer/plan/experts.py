"""The part of the plan on experts and multi-token prediction modules, in words."""

from __future__ import annotations

import math

from trainer.config import Config
from trainer.config.layer_ranges import layer_text
from trainer.config.schema.moe import MoEConfig
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import ModelSpec
from trainer.models.spec.shapes import balanced_layers
from trainer.optim.freeze import frozen_names

_POLICIES = {"position": "the last of a micro-batch", "probability": "those with the lowest scores"}


def experts_plan(config: Config) -> dict[str, str]:
    """Returns the lines of the plan's section on experts, by name; empty for a dense model without MTP modules."""
    settings = config.decoder
    lines = {}
    kind = ""
    if settings.experts is not None:
        lines = _experts(config, settings.experts)
        kind = " with experts"
    if number := model_spec(settings).mtp_modules:
        modules = "1 module"
        if number > 1:
            modules = f"{number} modules"
        lines["further tokens"] = f"{modules}{kind}, losses times {settings.mtp_loss_factor:g}, in training only"
    return lines


def _experts(config: Config, moe: MoEConfig) -> dict[str, str]:
    settings = config.decoder
    router = f"{moe.score_function} scores, {moe.num_experts_chosen} of {moe.expert_num} experts"
    if moe.norm_topk_prob:
        router += ", weights that sum to 1"
    if moe.routed_scaling_factor != 1:
        router += f", times {moe.routed_scaling_factor:g}"
    lines = {"router": router, "experts": f"{moe.expert_num} of width {settings.expert_size}"}
    if moe.n_group and (moe.topk_group or moe.n_group) < moe.n_group:
        lines["groups"] = f"a token goes to the best {moe.topk_group} of {moe.n_group} groups"
    if settings.shared_expert_size:
        lines["shared expert"] = f"width {settings.shared_expert_size}, for every token"
    layers = [layer for layer in range(settings.num_layers) if settings.is_moe_layer(layer)]
    lines["layers"] = f"{layer_text(layers) or 'none'} of {settings.num_layers}"
    if len(layers) < settings.num_layers:
        lines["layers"] += f"; the others are dense, of width {settings.ffn_size}"
    if config.trains:
        lines["tokens"] = _tokens(config, moe)
        lines["balance"] = _balance(config, moe)
    else:
        lines["tokens"] = "none is dropped"
    return lines


def _tokens(config: Config, moe: MoEConfig) -> str:
    tokens = config.runner_config.batch_size * config.decoder.seq_length
    capacity = moe.capacity(tokens)
    if capacity is None:
        why = "no capacity_factor"
        if moe.use_gmm:
            why = "use_gmm"
        return f"none is dropped ({why})"
    fair = moe.num_experts_chosen * tokens / moe.expert_num
    return (
        f"an expert takes {capacity:,} of a micro-batch's {tokens:,}, {moe.effective_capacity:g} times its share of"
        f" {fair:,.0f}; beyond, {_POLICIES[moe.drop_policy]} are dropped, in training only"
    )


def _balance(config: Config, moe: MoEConfig) -> str:
    factor = config.decoder.balance_factor
    which = "loss"
    if moe.balances_step:
        which = "loss of the whole step"
    parts = []
    if factor:
        parts.append(f"{which} times {factor:g}")
    if moe.z_loss_factor:
        parts.append(f"z loss times {moe.z_loss_factor:g}")
    if moe.balance_via_topk_bias and moe.topk_bias_update_rate:
        moved = f"moved by {moe.topk_bias_update_rate:g} a step"
        layers = balanced_layers(config.decoder, frozen_names(config))
        if len(layers) < len(config.decoder.moe_layers):
            if layers:
                moved = f"{moved} in {layer_text(layers)}, where the router is trained"
            else:
                moved = "which stays, as the routers are frozen"
        parts.append(f"an expert bias, {moved}")
    return ", ".join(parts) or "none"


def inactive_weights(spec: ModelSpec) -> int:
    """Returns the number of expert weights that do not compute a given token, because its router chose other experts.
    """
    return sum(
        math.prod(parameter.shape) - layer.active_size(parameter)
        for layer in spec.layers
        for parameter in layer.parameters
    )
