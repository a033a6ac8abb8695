"""Rules about adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trainer.config.checks.problem import Problem, nearest
from trainer.config.schema.adapter import PROJECTIONS
from trainer.config.schema.root import Config

_KEY = "model.model_config.pet_config"
_INSTEAD = "name matrices of the attention: write '.*q_proj|.*k_proj|.*v_proj|.*o_proj'"
_NAMES_OF_EXPERTS = (
    "mlp.gate", *(f"mlp.{kind}.{name}_proj" for kind in ("experts", "experts.0", "shared_experts")
                  for name in ("gate", "up", "down")),
)  # fmt: skip


def adapter_problems(config: Config, report: Callable[..., Problem]) -> Iterator[Problem]:
    """Targets that are no regular expression or match nothing, and adapters without the section that describes them."""
    adapters = config.decoder.pet_config
    if adapters is None:
        if config.adapter_id:
            yield report(
                "adapter_id",
                config.adapter_id,
                "adapters need model.model_config.pet_config, which is absent",
                "write pet_config with the lora_rank, lora_alpha and target_modules that they were trained with",
            )
        return
    key, targets = f"{_KEY}.target_modules", adapters.target_modules
    try:
        matches = [(layer, name) for layer in range(config.decoder.num_layers) for name in adapters.targets(layer)]
    except re.error as error:
        yield report(
            key, targets, f"is not a regular expression: {error}", "write one such as '.*q_proj|.*v_proj', in quotes"
        )
        return
    if not matches and _targets_experts(config):
        yield report(key, targets, "matches only matrices of experts, which take no adapters", _INSTEAD)
    elif not matches:
        yield report(key, targets, "matches none of the model's matrices", _nearest_targets(targets))
    elif len(_in_experts(config)) == len(matches):
        yield report(key, targets, "matches only matrices of experts, which take no adapters", _INSTEAD)


def _targets_experts(config: Config) -> bool:
    """Whether the targets match a name that only the router or an expert has."""
    decoder = config.decoder
    layers = [layer for layer in range(decoder.num_layers) if decoder.is_moe_layer(layer)]
    names = [f"model.layers.{layer}.{name}" for layer in layers for name in _NAMES_OF_EXPERTS]
    return any(re.fullmatch(decoder.pet_config.target_modules, name) for name in names)


def _in_experts(config: Config) -> list[tuple[int, str]]:
    """Layers and projections that are targets and stand in experts."""
    decoder = config.decoder
    layers = [layer for layer in range(decoder.num_layers) if decoder.is_moe_layer(layer)]
    return [(layer, name) for layer in layers for name in decoder.pet_config.targets(layer) if name.startswith("mlp.")]


def _nearest_targets(targets: str) -> str:
    """Names that were probably meant, one for each alternative of the expression."""
    ours = [name.split(".")[-1] for name in PROJECTIONS]
    names = [*ours, *(name.split(".")[-1] for name in PROJECTIONS.values())]
    parts = [re.sub(r"\W+", ".", part).split(".")[-1] for part in targets.split("|")]
    # `query` is nearest to nothing by its letters alone; its first letter says q_proj.
    guesses = [nearest(part, names) or next((name for name in ours if part[:1] == name[0]), "") for part in parts]
    found = list(dict.fromkeys(guess for guess in guesses if guess))
    written = "|".join(f".*{name}" for name in found)
    return f"{f'write {written}; ' if found else ''}their names end in {', '.join(names[:-1])} or {names[-1]}"


def adapter_notices(config: Config) -> Iterator[str]:
    """What a reader of the file might not expect of adapters."""
    if config.decoder.pet_config is None or not config.trains:
        return
    if _in_experts(config):
        names = ", ".join(dict.fromkeys(name.split(".")[-1] for _, name in _in_experts(config)))
        yield f"{_KEY}.target_modules: {names} of layers with experts get no adapters: experts take none"
    elif _targets_experts(config):
        yield f"{_KEY}.target_modules: routers and experts get no adapters: they take none"
    if not config.load_checkpoint:
        yield f"{_KEY}: the adapters train on top of random weights, as load_checkpoint names no base model"
