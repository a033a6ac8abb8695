"""Hugging Face's model families: what the name of one implies, and what a config.json says against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from trainer.config.checks.problem import Problem
from trainer.config.schema.root import Config

_MODEL = "model.model_config"
_EXPERTS = f"{_MODEL}.moe_config"


class Family(NamedTuple):
    """What follows from the name alone; everything else is a key of config.json."""

    model_type: str
    """Its name in config.json."""
    model: dict[str, Any]
    """Keys of ``model_config``."""
    experts: dict[str, Any]
    """Keys of ``moe_config``."""
    is_mixture: bool = False
    has_choice_bias: bool = False
    """Whether Hugging Face's class has `e_score_correction_bias`."""
    has_output_bias: bool = False
    """Whether attention_bias there means one on o_proj too."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama", {}, {}, has_output_bias=True),
    "Qwen2ForCausalLM": Family("qwen2", {"qkv_has_bias": True}, {}),
    "Qwen3ForCausalLM": Family("qwen3", {"use_qk_norm": True}, {}, has_output_bias=True),
    "MixtralForCausalLM": Family("mixtral", {}, {}, is_mixture=True),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", {"use_qk_norm": True}, {}, is_mixture=True, has_output_bias=True),
    # Balanced by the bias on the choice instead of a loss: "no auxiliary loss" is what noaux means.
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        {"rotary_pct": 0.5},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "aux_loss_factor": 0.0},
        is_mixture=True,
        has_choice_bias=True,
    ),
}
"""By ``model.arch.type``, which is Hugging Face's class."""


def named_family(settings: dict[str, Any]) -> tuple[str, str]:
    """The family that a ``model_config`` names, and the key that does; empty where it names none that we know.

    Args:
        settings: The section as the file has it.
    """
    found = settings["architectures"] if "architectures" in settings else None
    for name in found if isinstance(found, list) else [found]:
        if isinstance(name, str) and name in FAMILIES:
            return name, "architectures"
    kind = settings["model_type"] if "model_type" in settings else None
    for name, family in FAMILIES.items():
        if family.model_type == kind:
            return name, "model_type"
    return "", ""


def layers_with_experts(layers: int, every: int, dense: list[int]) -> list[int]:
    """``moe_layer_freq`` of Qwen3-MoE's decoder_sparse_step and mlp_only_layers, as Hugging Face reads the two."""
    return [int((layer + 1) % every == 0 and layer not in dense) for layer in range(layers)]


def family_problems(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    """A family named twice and differently, a mixture without experts, and layers described twice."""
    decoder, kind = config.decoder, config.model.arch.type
    told, key = named_family({"architectures": decoder.architectures, "model_type": decoder.model_type})
    if told and told != kind:
        yield report(
            f"{_MODEL}.{key}",
            getattr(decoder, key),
            f"contradicts model.arch.type = {kind}",
            f"write model.arch.type: {told}, or remove this key",
        )
    elif FAMILIES[kind].is_mixture and decoder.moe_config is None and config.source.where(_EXPERTS):
        yield report(
            _EXPERTS,
            None,
            f"{kind} has experts, and this leaves none",
            "leave it out, or write a dense model.arch.type",
        )
    elif FAMILIES[kind].is_mixture and decoder.experts is None:
        written = decoder.moe_config is not None and config.source.where(f"{_EXPERTS}.expert_num")
        yield report(
            f"{_EXPERTS}.expert_num" if written else "model.arch.type",
            1 if written else kind,
            f"{kind} has experts, and this model none",
            "write moe_config.expert_num and num_experts_chosen, or a dense model.arch.type",
        )
    yield from _layers(config, report)


def _layers(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    decoder, moe = config.decoder, config.decoder.moe_config
    if moe is None:
        return
    dense, layers = moe.mlp_only_layers or [], decoder.num_layers
    outside = [layer for layer in dense if not 0 <= layer < layers]
    if outside:
        yield report(
            f"{_EXPERTS}.mlp_only_layers",
            outside[0],
            f"there is no such layer: they are 0 to {layers - 1}",
            "remove it, or correct num_layers",
        )
        return
    if (moe.decoder_sparse_step, dense) == (1, []):
        return
    wanted = layers_with_experts(layers, moe.decoder_sparse_step, dense)
    if moe.moe_layer_freq != wanted:
        key = "mlp_only_layers" if dense else "decoder_sparse_step"
        yield report(
            f"{_EXPERTS}.{key}",
            getattr(moe, key),
            f"disagrees with moe_layer_freq = {moe.moe_layer_freq}: it means {wanted}",
            "remove one of the two",
        )


def family_notices(config: Config) -> Iterator[str]:
    """Where a config.json of Hugging Face trains differently there."""
    decoder, moe = config.decoder, config.decoder.experts
    for name in ("architectures", "model_type"):
        value = getattr(decoder, name)
        if value and not named_family({name: value})[0]:
            yield f"model_config.{name} {value}: not a family that is known here; taken as {config.model.arch.type}"
    if moe is not None and moe.output_router_logits is False and moe.aux_loss_factor and config.trains:
        yield (
            f"output_router_logits False: Hugging Face then leaves the balance loss out; here aux_loss_factor"
            f" {moe.aux_loss_factor:g} adds it (write aux_loss_factor: 0 to leave it out)"
        )
