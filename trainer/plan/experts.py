"""What `plan` says about a mixture of experts and multi-token prediction modules, in words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer.config.layer_ranges import layer_text
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import ModelSpec
from trainer.models.spec.shapes import balanced_layers
from trainer.optim.freeze import frozen_names

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.moe import MoEConfig

_POLICIES = {"position": "the last of a micro-batch", "probability": "those with the lowest scores"}


def experts_plan(config: Config) -> dict[str, str]:
    """Lines of the plan's section on experts, by name; empty for a dense model without MTP modules."""
    settings = config.decoder
    if settings.experts is not None:
        found = _experts(config, settings.experts)
    else:
        found = {}
    number = model_spec(settings).mtp_modules
    if number:
        if number == 1:
            modules = "1 module"
        else:
            modules = f"{number} modules"
        kind = ""
        if settings.experts is not None:
            kind = " with experts"
        found["further tokens"] = f"{modules}{kind}, losses times {settings.mtp_loss_factor:g}, in training only"
    return found


def _experts(config: Config, moe: MoEConfig) -> dict[str, str]:
    settings = config.decoder
    router = f"{moe.score_function} scores, {moe.num_experts_chosen} of {moe.expert_num} experts"
    router += ", weights that sum to 1" if moe.norm_topk_prob else ""
    router += "" if moe.routed_scaling_factor == 1 else f", times {moe.routed_scaling_factor:g}"
    found = {"router": router, "experts": f"{moe.expert_num} of width {settings.expert_size}"}
    if moe.n_group and (moe.topk_group or moe.n_group) < moe.n_group:
        found["groups"] = f"a token goes to the best {moe.topk_group} of {moe.n_group} groups"
    if settings.shared_expert_size:
        found["shared expert"] = f"width {settings.shared_expert_size}, for every token"
    layers = [layer for layer in range(settings.num_layers) if settings.is_moe_layer(layer)]
    found["layers"] = f"{layer_text(layers) or 'none'} of {settings.num_layers}"
    if len(layers) < settings.num_layers:
        found["layers"] += f"; the others are dense, of width {settings.ffn_size}"
    if config.trains:
        found["tokens"] = _tokens(config, moe)
    else:
        found["tokens"] = "none is dropped"
    if config.trains:
        found["balance"] = _balance(config, moe)
    return found


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
    if factor:
        parts = [f"{which} times {factor:g}"]
    else:
        parts = []
    if moe.z_loss_factor:
        parts.append(f"z loss times {moe.z_loss_factor:g}")
    if moe.balance_via_topk_bias and moe.topk_bias_update_rate:
        moved = f"moved by {moe.topk_bias_update_rate:g} a step"
        layers = balanced_layers(config.decoder, frozen_names(config))
        if len(layers) < len(config.decoder.moe_layers):
            some = f"{moved} in {layer_text(layers)}, where the router is trained"
            moved = "which stays, as the routers are frozen"
            if layers:
                moved = some
        parts.append(f"an expert bias, {moved}")
    return ", ".join(parts) or "none"


def inactive_weights(spec: ModelSpec) -> int:
    """Returns the weights that do not compute one token in training: of all experts, only the chosen ones do."""
    return sum(
        math.prod(parameter.shape) - layer.active_size(parameter)
        for layer in spec.layers
        for parameter in layer.parameters
    )
