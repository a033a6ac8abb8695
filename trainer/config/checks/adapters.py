"""Rules and notes about low-rank adapters: which matrices they are for, and the files that they start from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from trainer.config.checks.problem import ConfigError, nearest, problem
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import saved_class
from trainer.config.patterns import PatternError, read_pattern
from trainer.config.schema.adapter import PetConfig
from trainer.config.schema.root import Config
from trainer.input_files import missing_path_reason
from trainer.models.spec.adapters import projections
from trainer.models.spec.sublayers import latent_spec

SECTION = "model.model_config.pet_config"
"""The section of the file that describes the adapters."""
_TARGETS = f"{SECTION}.target_modules"
_NAMES_OF_EXPERTS = (
    "mlp.gate", *(f"mlp.{kind}.{name}_proj" for kind in ("experts", "experts.0", "shared_experts")
                  for name in ("gate", "up", "down")),
)  # fmt: skip
_OF_OTHER_ATTENTION = {f"self_attn.{letter}_proj": f"attention.w{letter}" for letter in "qkv"}
"""Matrices that latent attention may lack."""


def adapter_problems(config: Config) -> Iterator[ConfigError]:
    """Yields targets that are no regular expression or match nothing, and adapters without their section."""
    decoder = config.decoder
    adapters = config.decoder.pet_config
    if adapters is None:
        if config.adapter_id:
            fix = "write pet_config with the lora_rank, lora_alpha and target_modules that they were trained with"
            yield problem(config, "adapter_id", f"adapters need {SECTION}, which is absent", fix)
        return
    ours = projections(decoder)
    layers = range(decoder.num_layers)
    try:
        matches = _targets(adapters, layers, ours)
    except PatternError as error:
        yield problem(config, _TARGETS, str(error), "write one such as '.*q_proj|.*v_proj', in quotes")
        return
    if not matches and not _targets_experts(config):
        fix = _nearest_targets(adapters.target_modules, ours)
        yield problem(config, _TARGETS, "matches none of the model's matrices", fix)
    elif latent_spec(decoder) is not None and (lost := _targets_elsewhere(adapters, layers, ours)):
        rule = f"multi-head latent attention has no matrix for {', '.join(lost)}"
        yield problem(config, _TARGETS, rule, f"name others: {_names_text(ours)}")
    elif len(_targets_in_experts(config)) == len(matches):
        fix = "name matrices of the attention: write '.*q_proj|.*k_proj|.*v_proj|.*o_proj'"
        yield problem(config, _TARGETS, "matches only matrices of experts, which take no adapters", fix)


def adapter_file_problems(config: Config) -> Iterator[ConfigError]:
    """Yields adapters that are not there, or that a run without a training needs."""
    path = config.adapter_id
    if path and not os.path.exists(os.path.expanduser(path)):
        fix = "name a folder with adapter_model.safetensors, or the checkpoints of a training with pet_config"
        rule = f"the path {missing_path_reason(os.path.expanduser(path))}"
        yield problem(config, "adapter_id", rule, fix)._replace(is_absent=True)
    elif not config.trains and config.has_adapters and not path:
        fix = "give --adapter_id output/checkpoints, or leave pet_config out for the base model alone"
        rule = f"run_mode {config.run_mode} with pet_config needs adapters"
        yield problem(config, "adapter_id", rule, fix, because="run_mode")


def adapter_notes(config: Config) -> Iterator[str]:
    """Yields which targets get no adapters, and what a reader may not expect of those that there are."""
    decoder = config.decoder
    adapters = config.decoder.pet_config
    if adapters is None or not config.trains:
        return
    names = ", ".join(dict.fromkeys(name.split(".")[-1] for name in _targets_in_experts(config)))
    if names:
        yield f"{_TARGETS}: {names} of layers with experts get no adapters: experts take none"
    elif _targets_experts(config):
        yield f"{_TARGETS}: routers and experts get no adapters: they take none"
    kind = saved_class(decoder, config.model.arch.type)
    adapted = _targets(adapters, range(decoder.num_layers), projections(decoder))
    for matrices in FAMILIES[kind].joined_tensors.values() if kind else ():
        if not set(adapted).isdisjoint(matrices):
            names = " and ".join(name.split(".")[-1] for name in matrices)
            yield (f"{_TARGETS}: PEFT cannot load adapters of {names}, which are one matrix in transformers' {kind}:"
                   " `export --merge` writes the whole model")
    if not config.load_checkpoint:
        yield f"{SECTION}: the adapters train on top of random weights, as load_checkpoint names no base model"


def _targets(adapters: PetConfig, layers: Sequence[int], names: Mapping[str, str]) -> list[str]:
    """Returns those of the matrices `names` that have an adapter, one for each layer."""
    return [name for layer in layers for name in adapters.targets(layer, names)]


def _layers_with_experts(config: Config) -> list[int]:
    return [layer for layer in config.decoder.moe_layers if layer < config.decoder.num_layers]


def _targets_experts(config: Config) -> bool:
    """Returns whether the targets match a name that only the router or an expert has."""
    names = [f"model.layers.{layer}.{name}" for layer in _layers_with_experts(config) for name in _NAMES_OF_EXPERTS]
    pattern = read_pattern(config.decoder.pet_config.target_modules)
    return any(pattern.fullmatch(name) for name in names)


def _targets_in_experts(config: Config) -> list[str]:
    """Returns the projections of experts that are targets, one for each layer that has them."""
    names = _targets(config.decoder.pet_config, _layers_with_experts(config), projections(config.decoder))
    return [name for name in names if name.startswith("mlp.")]


def _targets_elsewhere(adapters: PetConfig, layers: Sequence[int], ours: Mapping[str, str]) -> list[str]:
    """Returns the alternatives of the targets that name matrices of other attention alone, such as .*k_proj."""
    found = []
    for part in adapters.target_modules.split("|") if "(" not in adapters.target_modules else ():
        alone = adapters.model_copy(update={"target_modules": part})
        try:
            is_elsewhere = _targets(alone, layers, _OF_OTHER_ATTENTION) and not _targets(alone, layers, ours)
        except PatternError:  # a | within brackets
            return []
        if is_elsewhere:
            found.append(part)
    return found


def _names_text(ours: Mapping[str, str]) -> str:
    names = _last_words(ours)
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _last_words(ours: Mapping[str, str]) -> list[str]:
    return [name.split(".")[-1] for name in (*ours, *ours.values())]


def _nearest_targets(targets: str, ours: Mapping[str, str]) -> str:
    """Returns the names that were probably meant, one for each alternative of the expression."""
    last_words = _last_words(ours)
    parts = [re.sub(r"\W+", ".", part).split(".")[-1] for part in targets.split("|")]
    # `query` is nearest to nothing by its letters alone; its first letter says q_proj.
    guesses = [
        nearest(part, last_words) or next((name for name in last_words[: len(ours)] if part[:1] == name[0]), "")
        for part in parts
    ]
    found = list(dict.fromkeys(guess for guess in guesses if guess))
    written = "|".join(f".*{name}" for name in found)
    return f"{f'write {written}; ' if found else ''}their names end in {_names_text(ours)}"
