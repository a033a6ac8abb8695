"""Rules and notes about low-rank adapters: which matrices they are for, and the files that they start from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.config.checks.problem import ConfigError, nearest, one_of, problem
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import saved_class
from trainer.config.layer_ranges import all_layers, layer_text
from trainer.config.patterns import PatternError, read_pattern
from trainer.config.schema.adapter import ModuleNames, PetConfig, ends_with
from trainer.config.schema.root import Config
from trainer.input_files import missing_path_fix, missing_path_reason
from trainer.models.spec.adapters import (
    SECTION,
    TARGETS_KEY,
    adaptable_matrices,
    adapted_matrices,
    adapter_spec,
    factors_text,
    layer_adapters,
    layer_targets,
    matrix_shapes,
    module_names,
    projections,
    pynative_layer,
    ranks_text,
    scales_by_rank,
    vocabulary_adapters,
    vocabulary_modules,
)
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import layer_prefix, sublayer_of
from trainer.models.spec.sublayers import latent_spec

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

_EXCLUDED = f"{SECTION}.exclude_layers"
_LARGEST_LAYER = 256
"""Of a pattern with a layer that the model does not have."""
_EXPERT_MODULES = (
    "mlp.gate", *(f"mlp.{part}.{name}_proj" for part in ("experts", "experts.0", "shared_experts")
                  for name in ("gate", "up", "down")),
)  # fmt: skip
_OTHER_MODULES = {
    "output_layer": "output_layer",
    "eh_proj": "eh_proj",
    "mlp.shared_experts.linear_fc1": "shared_experts",
    "mlp.shared_experts.linear_fc2": "shared_experts",
}
"""Modules of MindSpore Transformers with a matrix that can have no adapter here -> an expression for them."""


def adapter_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for expressions that are invalid or match no matrix, and for adapters without pet_config."""
    adapters = config.decoder.pet_config
    if adapters is None:
        if config.adapter_id:
            fix = "write pet_config with the lora_rank, lora_alpha and target_modules that they were trained with"
            yield problem(config, "adapter_id", f"adapters need {SECTION}, which is absent", fix)
        return
    invalid = list(_pattern_problems(config, adapters))
    if invalid:
        yield from invalid
        return
    yield from _target_problems(config, adapters)
    yield from _vocabulary_problems(config, adapters)
    yield from _method_problems(config, adapters)


def _vocabulary_problems(config: Config, adapters: PetConfig) -> Iterator[ConfigError]:
    """Yields one error for all that adapters of the embedding or the head do not support."""
    names = list(vocabulary_adapters(config.decoder))
    if not names:
        return
    lacking = []
    if config.decoder.tie_word_embeddings:
        lacking.append("tie_word_embeddings")
    if model_spec(config.decoder).mtp_modules:
        lacking.append("multi-token prediction")
    if adapters.needs_whole_matrices:
        lacking.append(adapters.needs_whole_matrices)
    if adapters.lora_dropout:
        lacking.append("lora_dropout")
    if config.optimizer.loraplus_lr_ratio != 1:
        lacking.append("optimizer.loraplus_lr_ratio")
    if lacking:
        rule = f"adapters of {' and '.join(names)} are not supported with {', '.join(lacking)}"
        yield problem(config, TARGETS_KEY, rule, "leave that out, or name matrices of layers alone")


def _method_problems(config: Config, adapters: PetConfig) -> Iterator[ConfigError]:
    """Yields errors for keys of initial values that contradict each other, and a rank that a matrix does not have."""
    if adapters.use_dora and adapters.lora_dropout:
        yield problem(config, f"{SECTION}.lora_dropout", "is not supported with use_dora", "set it to 0")
    if not adapters.changes_base:
        return
    if adapters.base_dtype != "float32":
        rule = f"must be float32 with init_lora_weights {adapters.initial}, which changes the frozen matrices"
        yield problem(config, f"{SECTION}.base_dtype", rule, "remove one of the two")
    if adapters.use_dora:
        rule = f"cannot be combined with init_lora_weights {adapters.initial}, whose checkpoints are plain LoRA"
        yield problem(config, f"{SECTION}.use_dora", rule, "remove one of the two")
    for key in ("lora_a_std", "lora_b_std"):
        if getattr(adapters, key):
            rule = f"does not apply to adapters that start with init_lora_weights {adapters.initial}"
            yield problem(config, f"{SECTION}.{key}", rule, "remove one of the two")
    shapes = matrix_shapes(config.decoder)
    for layer in config.decoder.layers:
        for name, adapter in layer_adapters(config.decoder, layer).items():
            largest = min(shapes[name])
            if adapter.rank > largest:
                rule = f"{name} has rank {largest} at most; init_lora_weights {adapters.initial} takes {adapter.rank}"
                yield problem(config, f"{SECTION}.lora_rank", rule, f"write at most {largest}")
                return


def cell_problems(config: Config) -> Iterator[ConfigError]:
    """Yields an error for adapters that MindSpore's cells cannot tell apart, which native CPU layers compute."""
    try:
        for name in _adapted_names(config.decoder):
            scales_by_rank(config.decoder, name)
    except ValueError as error:
        fix = "give the layers of a matrix one alpha or other ranks, or run it on a CPU with context.mode 0"
        yield problem(config, f"{SECTION}.alpha_pattern", f"not yet supported here: {error}", fix)


def vocabulary_device_problems(config: Config) -> Iterator[ConfigError]:
    """Yields an error for adapters of the embedding or the head, on a device or in semi-automatic mode."""
    names = list(vocabulary_adapters(config.decoder))
    if names:
        rule = f"adapters of {' and '.join(names)} are supported on a CPU in explicit mode only"
        yield problem(config, TARGETS_KEY, rule, "name matrices of layers alone, or run on a CPU")


def _pattern_problems(config: Config, adapters: PetConfig) -> Iterator[ConfigError]:
    patterns = {f"{SECTION}.{key}": getattr(adapters, key) for key in ("rank_pattern", "alpha_pattern")}
    expressions_of = {TARGETS_KEY: (adapters.target_modules,), _EXCLUDED: adapters.excluding, **patterns}
    for key, expressions in expressions_of.items():
        try:
            for expression in expressions:
                read_pattern(expression)
        except PatternError as error:
            names = _last_words(config.decoder, adapters)[:2]
            yield problem(config, key, str(error), f"write one such as '{_alternatives(names, adapters)}', in quotes")


def _target_problems(config: Config, adapters: PetConfig) -> Iterator[ConfigError]:
    decoder = config.decoder
    others = _targets_without_adapters(config, adapters)
    missing = _plain_attention_targets(config, adapters)
    if others and adapters.match == "search":
        excluded = "|".join((*adapters.excluding, *dict.fromkeys(_OTHER_MODULES[name] for name in others)))
        rule = f"matches {', '.join(others)}, which can have no adapter here"
        yield problem(config, TARGETS_KEY, rule, f"write exclude_layers: '{excluded}'")
    elif _adapted_names(decoder) or vocabulary_adapters(decoder):
        if missing:
            rule = f"multi-head latent attention has no module that matches {', '.join(missing)}"
            yield problem(config, TARGETS_KEY, rule, f"name others: {one_of(_last_words(decoder, adapters))}")
    elif adapters.match == "full" and (_targets_in_experts(config, adapters) or _targets_experts(config, adapters)):
        fix = "name matrices of the attention: write '.*q_proj|.*k_proj|.*v_proj|.*o_proj'"
        yield problem(config, TARGETS_KEY, "matches only weights of experts, where LoRA is not supported", fix)
    elif any(adapters.targets(names) for names in _all_matrices(decoder)):
        rule = "excludes every matrix that target_modules matches"
        yield problem(config, _EXCLUDED, rule, "name fewer layers or matrices")
    elif _matches_other_layers(decoder, adapters):
        rule = "matches only layers that the model does not have"
        yield problem(config, TARGETS_KEY, rule, f"the model's layers are {all_layers(decoder.num_layers)}")
    else:
        yield problem(config, TARGETS_KEY, "matches none of the model's matrices", _nearest_targets(decoder, adapters))


def _matches_other_layers(decoder: ModelConfig, adapters: PetConfig) -> bool:
    """Returns whether target_modules would match matrices of layers behind the last one."""
    first = adaptable_matrices(decoder, 0).values()
    for layer in range(decoder.num_layers, _LARGEST_LAYER):
        for names in first:
            moved = [tuple(name.replace(".0.", f".{layer}.", 1) for name in kind) for kind in names]
            if adapters.targets(ModuleNames(*moved)):
                return True
    return False


def adapter_file_problems(config: Config) -> Iterator[ConfigError]:
    """Yields errors for adapters whose path does not exist, and for a run without training that names no adapters."""
    path = config.adapter_id
    if path and not os.path.exists(os.path.expanduser(path)):
        fix = "name a folder with adapter_model.safetensors, or the checkpoints of a training with pet_config"
        fix = missing_path_fix(path, fix)
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
    yield from _target_notes(config, adapters)
    others = [names for _, names in _other_modules(config.decoder)]
    modules = [*_all_matrices(config.decoder), *others, *vocabulary_modules().values()]
    for expression in adapters.excluding:
        if not any(adapters.targets(names) and adapters.excludes(expression, names) for names in modules):
            yield f"{_EXCLUDED}: {expression!r} excludes nothing that target_modules matches"
    names = [name for name, _ in adapted_matrices(config.decoder)]
    for key in ("rank_pattern", "alpha_pattern"):
        for expression in getattr(adapters, key):
            if not any(ends_with(expression, name) for name in names):
                yield f"{SECTION}.{key}: {expression!r} matches none of the adapted matrices, such as {names[0]}"
    yield from _peft_notes(config)
    if not config.load_checkpoint:
        yield f"{SECTION}: load_checkpoint is not set, so the adapters are trained on random base weights"


def adapters_text(decoder: ModelConfig) -> str:
    """Returns the adapted matrices as text, with their layers where these are not all; empty without adapters."""
    adapter = adapter_spec(decoder)
    if adapter is None:
        return ""
    layers_by_name: dict[str, list[int]] = {}
    for layer in decoder.layers:
        for name in layer_targets(decoder, layer):
            layers_by_name.setdefault(_last_word(name), []).append(layer)
    phrases: dict[str, str] = {}
    for name, layers in layers_by_name.items():
        where = ""
        if len(layers) < len(decoder.layers):
            where = f" of {layer_text(layers)}"
        phrases[where] = f"{phrases.get(where, '')} {name}"
    outer = "".join(f" {_last_word(name)}" for name in vocabulary_adapters(decoder))
    if outer:
        phrases[""] = phrases.get("", "") + outer
    text = ";".join(names + where for where, names in phrases.items())
    options = ""
    settings = decoder.pet_config
    assert settings is not None
    if adapter.dropout:
        options = f", dropout {adapter.dropout:g}"
    if settings.changes_base:
        options += f", starts by {settings.initial}"
    for matrix, deviation in (("A", settings.lora_a_std), ("B", settings.lora_b_std)):
        if deviation:
            options += f", {matrix} starts with standard deviation {deviation:g}"
    if settings.base_dtype != "float32":
        options += f", frozen matrices in {settings.base_dtype}"
    method = ""
    if settings.use_rslora:
        method = " (rsLoRA)"
    if settings.use_dora:
        options += ", with magnitudes (DoRA)"
    return f"rank {ranks_text(decoder)}, times {factors_text(decoder)}{method}{options}, on{text}"


def _target_notes(config: Config, adapters: PetConfig) -> Iterator[str]:
    """Yields notes about targets that have no adapters, or several instead of one."""
    if adapters.match == "search":
        yield from _separate_adapters_notes(config)
        return
    names = ", ".join(dict.fromkeys(name.split(".")[-1] for name in _targets_in_experts(config, adapters)))
    if names:
        yield f"{TARGETS_KEY}: {names} of MoE layers get no adapters: LoRA on experts is not supported"
    elif _targets_experts(config, adapters):
        yield f"{TARGETS_KEY}: routers and experts get no adapters: LoRA on them is not supported"
    others = [name for name in _targets_without_adapters(config, adapters) if "experts" not in name]
    if others:
        yield f"{TARGETS_KEY}: {', '.join(others)} can have no adapter here"


def _separate_adapters_notes(config: Config) -> Iterator[str]:
    """Yields a note for each module of PyNative mode that is several matrices here."""
    by_module: dict[str, list[str]] = {}
    for name in _adapted_names(config.decoder):
        module = _last_word(module_names(config.decoder, 0, name).pynative[0])
        by_module.setdefault(module, []).append(_last_word(name))
    for module, names in by_module.items():
        if len(names) > 1:
            yield f"{TARGETS_KEY}: {module} is {', '.join(names)} here, each with an adapter of its own"


def _peft_notes(config: Config) -> Iterator[str]:
    """Yields notes about adapted matrices that are fused in transformers' class, or that PEFT takes for experts."""
    decoder = config.decoder
    architecture = saved_class(decoder, config.model.arch.type)
    if not architecture:
        return
    for matrices in FAMILIES[architecture].joined_tensors.values():
        if not set(_adapted_names(decoder)).isdisjoint(matrices):
            names = " and ".join(name.split(".")[-1] for name in matrices)
            yield (f"{TARGETS_KEY}: PEFT cannot load adapters of {names}, which are one matrix in transformers'"
                   f" {architecture}: `export --merge` writes the whole model")
    dense = [name.split(".")[-1] for name in _adapted_names(decoder) if sublayer_of(name) == "mlp"]
    if dense and decoder.moe_layers:
        yield (f"{TARGETS_KEY}: PEFT 0.21 cannot load adapters of {', '.join(dense)}, which it takes for matrices of"
               " experts in a model with experts: `export --merge` writes the whole model")


def _adapted_names(decoder: ModelConfig) -> list[str]:
    """Returns the names, within their layers, of the matrices that have an adapter in some layer."""
    return list(dict.fromkeys(name for layer in decoder.layers for name in layer_targets(decoder, layer)))


def _all_matrices(decoder: ModelConfig) -> Iterator[ModuleNames]:
    for layer in decoder.layers:
        yield from adaptable_matrices(decoder, layer).values()


def _other_modules(decoder: ModelConfig) -> Iterator[tuple[str, ModuleNames]]:
    """Yields the last words and full names of the modules of `_OTHER_MODULES` that the model has."""
    modules: list[tuple[str, str]] = []
    if "lm_head" not in vocabulary_adapters(decoder):
        modules.append(("output_layer", "output_layer"))
    for layer in decoder.layers:
        prefix = pynative_layer(decoder, layer)
        if layer >= decoder.num_layers:
            modules.append(("eh_proj", f"{prefix.removesuffix('transformer_layer.')}eh_proj"))
        if decoder.is_moe_layer(layer) and decoder.shared_expert_size:
            modules += [(name, f"{prefix}{name}") for name in _OTHER_MODULES if "experts" in name]
    for short, name in modules:
        yield short, ModuleNames((), (f"model.{name}", name))


def _targets_without_adapters(config: Config, adapters: PetConfig) -> list[str]:
    """Returns the matched modules of MindSpore Transformers that are matrices, but can have no adapter here."""
    return list(dict.fromkeys(short for short, names in _other_modules(config.decoder) if adapters.adapts(names)))


def _targets_experts(config: Config, adapters: PetConfig) -> bool:
    """Returns whether target_modules matches a name that only a router or an expert has."""
    names = tuple(layer_prefix(layer) + name for layer in config.decoder.moe_layers for name in _EXPERT_MODULES)
    pattern = read_pattern(adapters.target_modules)
    return any(pattern.fullmatch(name) for name in names)


def _targets_in_experts(config: Config, adapters: PetConfig) -> list[str]:
    """Returns the targets among the matrices of experts, once for each MoE layer."""
    decoder = config.decoder
    names = [name for name in projections(decoder) if sublayer_of(name) == "mlp"]
    return [
        name
        for layer in decoder.moe_layers
        for name in names
        if adapters.adapts(module_names(decoder, layer, name))
    ]


def _plain_attention_targets(config: Config, adapters: PetConfig) -> list[str]:
    """Returns the alternatives of target_modules that match only matrices of plain attention, such as .*k_proj."""
    decoder = config.decoder
    if latent_spec(decoder) is None or adapters.match == "search" or "(" in adapters.target_modules:
        return []
    prefixes = [layer_prefix(layer) for layer in decoder.layers]
    plain = [
        ModuleNames((f"{prefix}self_attn.{letter}_proj", f"{prefix}attention.w{letter}"), ())
        for prefix in prefixes
        for letter in "qkv"
    ]
    matrices = list(_all_matrices(decoder))
    alternatives = []
    for part in adapters.target_modules.split("|"):
        alternative = adapters.model_copy(update={"target_modules": part})
        try:
            if any(map(alternative.targets, plain)) and not any(map(alternative.targets, matrices)):
                alternatives.append(part)
        except PatternError:  # a | within brackets
            return []
    return alternatives


def _last_words(decoder: ModelConfig, adapters: PetConfig) -> list[str]:
    """Returns the last parts of the names of the matrices that can have an adapter."""
    matrices = [module_names(decoder, 0, name) for name in projections(decoder)]
    if adapters.match == "search":
        names = [matrix.pynative[0] for matrix in matrices]
    else:
        names = [matrix.others[0] for matrix in matrices] + [matrix.others[1] for matrix in matrices]
    return list(dict.fromkeys(map(_last_word, names)))


def _last_word(name: str) -> str:
    return name.rpartition(".")[2]


def _alternatives(names: list[str], adapters: PetConfig) -> str:
    """Returns an expression for matrices with one of these last words."""
    if adapters.match == "search":
        return "|".join(names)
    return "|".join(f".*{name}" for name in names)


def _nearest_targets(decoder: ModelConfig, adapters: PetConfig) -> str:
    """Returns a fix with the most similar module name for each alternative of the expression."""
    words = _last_words(decoder, adapters)
    written = re.split(r"[|,\s]+", adapters.target_modules)  # a list of names is what other programs take
    parts = [re.sub(r"\W+", ".", part).split(".")[-1] for part in written]
    known: dict[str, str] = {}
    if adapters.match == "search":
        modules = [module_names(decoder, 0, name) for name in projections(decoder)]
        known = {_last_word(other): _last_word(names.pynative[0]) for names in modules for other in names.others}
    # `query` resembles no name; its first letter says q_proj.
    matrices = words[: len(projections(decoder))]
    guesses = [
        known.get(part) or nearest(part, words) or next((name for name in matrices if part[:1] == name[0]), "")
        for part in parts
    ]
    names = list(dict.fromkeys(guess for guess in guesses if guess))
    fix = f"their names end in {one_of(words)}"
    if names:
        fix = f"write {_alternatives(names, adapters)}; {fix}"
    return fix
