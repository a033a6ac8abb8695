"""Rules and notes about low-rank adapters: which matrices they are for, and the files that they start from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from trainer.config.checks.problem import ConfigError, nearest, one_of, problem
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
_EXPERT_MODULES = (
    "mlp.gate", *(f"mlp.{part}.{name}_proj" for part in ("experts", "experts.0", "shared_experts")
                  for name in ("gate", "up", "down")),
)  # fmt: skip
_PLAIN_ATTENTION = {f"self_attn.{letter}_proj": f"attention.w{letter}" for letter in "qkv"}
"""Matrices of plain attention; multi-head latent attention may lack them."""


def adapter_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for target_modules that are invalid or match no matrix, and for adapters without pet_config."""
    decoder = config.decoder
    adapters = config.decoder.pet_config
    if adapters is None:
        if config.adapter_id:
            fix = "write pet_config with the lora_rank, lora_alpha and target_modules that they were trained with"
            yield problem(config, "adapter_id", f"adapters need {SECTION}, which is absent", fix)
        return
    modules = projections(decoder)
    layers = range(decoder.num_layers)
    try:
        matches = _targets(adapters, layers, modules)
    except PatternError as error:
        yield problem(config, _TARGETS, str(error), "write one such as '.*q_proj|.*v_proj', in quotes")
        return
    if not matches and not _targets_experts(config, adapters):
        fix = _nearest_targets(adapters.target_modules, modules)
        yield problem(config, _TARGETS, "matches none of the model's matrices", fix)
    elif latent_spec(decoder) is not None and (missing := _plain_attention_targets(adapters, layers, modules)):
        rule = f"multi-head latent attention has no module that matches {', '.join(missing)}"
        yield problem(config, _TARGETS, rule, f"name others: {_names_text(modules)}")
    elif len(_targets_in_experts(config, adapters)) == len(matches):
        fix = "name matrices of the attention: write '.*q_proj|.*k_proj|.*v_proj|.*o_proj'"
        yield problem(config, _TARGETS, "matches only weights of experts, where LoRA is not supported", fix)


def adapter_file_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for adapters whose path does not exist, and for a run without training that names no adapters."""
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
    """Yields notes about targets without adapters, adapters that PEFT cannot load, and random base weights."""
    adapters = config.decoder.pet_config
    if adapters is None or not config.trains:
        return
    names = ", ".join(dict.fromkeys(name.split(".")[-1] for name in _targets_in_experts(config, adapters)))
    if names:
        yield f"{_TARGETS}: {names} of MoE layers get no adapters: LoRA on experts is not supported"
    elif _targets_experts(config, adapters):
        yield f"{_TARGETS}: routers and experts get no adapters: LoRA on them is not supported"
    yield from _peft_notes(config, adapters)
    if not config.load_checkpoint:
        yield f"{SECTION}: load_checkpoint is not set, so the adapters are trained on random base weights"


def _peft_notes(config: Config, adapters: PetConfig) -> Iterator[str]:
    """Yields a note for adapted matrices that are fused in transformers' class of the model."""
    decoder = config.decoder
    architecture = saved_class(decoder, config.model.arch.type)
    if not architecture:
        return
    adapted = _targets(adapters, range(decoder.num_layers), projections(decoder))
    for matrices in FAMILIES[architecture].joined_tensors.values():
        if not set(adapted).isdisjoint(matrices):
            names = " and ".join(name.split(".")[-1] for name in matrices)
            yield (f"{_TARGETS}: PEFT cannot load adapters of {names}, which are one matrix in transformers'"
                   f" {architecture}: `export --merge` writes the whole model")


def _targets(adapters: PetConfig, layers: Sequence[int], names: Mapping[str, str]) -> list[str]:
    """Returns the names of the adapted matrices, once for each layer; `names` are a layer's matrices."""
    return [name for layer in layers for name in adapters.targets(layer, names)]


def _layers_with_experts(config: Config) -> list[int]:
    return [layer for layer in config.decoder.moe_layers if layer < config.decoder.num_layers]


def _targets_experts(config: Config, adapters: PetConfig) -> bool:
    """Returns whether target_modules matches a name that only a router or an expert has."""
    names = [f"model.layers.{layer}.{name}" for layer in _layers_with_experts(config) for name in _EXPERT_MODULES]
    pattern = read_pattern(adapters.target_modules)
    return any(pattern.fullmatch(name) for name in names)


def _targets_in_experts(config: Config, adapters: PetConfig) -> list[str]:
    """Returns the targets among the matrices of experts, once for each MoE layer."""
    names = _targets(adapters, _layers_with_experts(config), projections(config.decoder))
    return [name for name in names if name.startswith("mlp.")]


def _plain_attention_targets(adapters: PetConfig, layers: Sequence[int], modules: Mapping[str, str]) -> list[str]:
    """Returns the alternatives of target_modules that match only matrices of plain attention, such as .*k_proj."""
    if "(" in adapters.target_modules:
        return []
    alternatives = []
    for part in adapters.target_modules.split("|"):
        alternative = adapters.model_copy(update={"target_modules": part})
        try:
            if _targets(alternative, layers, _PLAIN_ATTENTION) and not _targets(alternative, layers, modules):
                alternatives.append(part)
        except PatternError:  # a | within brackets
            return []
    return alternatives


def _names_text(modules: Mapping[str, str]) -> str:
    return one_of(_last_words(modules))


def _last_words(modules: Mapping[str, str]) -> list[str]:
    return [name.split(".")[-1] for name in (*modules, *modules.values())]


def _nearest_targets(targets: str, modules: Mapping[str, str]) -> str:
    """Returns a fix with the most similar module name for each alternative of the expression."""
    last_words = _last_words(modules)
    parts = [re.sub(r"\W+", ".", part).split(".")[-1] for part in targets.split("|")]
    # `query` resembles no name; its first letter says q_proj.
    guesses = [
        nearest(part, last_words) or next((name for name in last_words[: len(modules)] if part[:1] == name[0]), "")
        for part in parts
    ]
    names = list(dict.fromkeys(guess for guess in guesses if guess))
    fix = f"their names end in {_names_text(modules)}"
    if names:
        written = "|".join(f".*{name}" for name in names)
        fix = f"write {written}; {fix}"
    return fix
