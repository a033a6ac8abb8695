"""Values of the newer schema that several keys of this one decide: the table's rows name these functions."""

from __future__ import annotations

import re
from typing import Any

from trainer.config.checks.parallel import zero_level
from trainer.config.layer_ranges import layer_text
from trainer.config.pynative.degrees import LEVELS
from trainer.config.read.dump import plain_values
from trainer.config.recompute import SUBLAYERS, recomputed_parts
from trainer.config.schema.root import Config
from trainer.config.stages import chunk_layers, offset_fits
from trainer.models.spec.adapters import adaptable_matrices

_MODULES = {"attention": "layers.*.self_attention.*", "mlp": "layers.*.mlp.*"}
_ADDED = ("MFLossMonitor", "CheckpointMonitor")
"""Callbacks that every translation has: the section checkpoint describes them."""
NO_CLIPPING = 1e30
"""The ``training.max_norm`` that means no clipping."""


def max_norm(config: Config) -> float:
    """Returns the largest gradient norm."""
    if config.runner_wrapper.use_clip_grad:
        return config.runner_wrapper.max_grad_norm
    return NO_CLIPPING


def callbacks(config: Config) -> list[Any]:
    """Returns the callbacks without those that the newer schema adds."""
    return [entry for entry in plain_values(config)["callbacks"] if entry["type"] not in _ADDED]


def ulysses_degree_in_cp(config: Config) -> Any:
    """Returns how many ranks exchange heads, which only the hybrid method reads."""
    if config.parallel_config.context_parallel_algo == "hybrid_cp":
        return config.parallel_config.ulysses_degree_in_cp
    return ...


def data_parallel_shard(config: Config) -> int:
    """Returns how many data-parallel ranks shard the model: -1 for all, 1 if each has a copy."""
    if not config.parallel.enable_parallel_optimizer:
        return 1
    return config.parallel.parallel_optimizer_config.optimizer_weight_shard_size


def data_parallel_shard_strategy(config: Config) -> Any:
    """Returns what the ranks shard, if they do."""
    if not config.parallel.enable_parallel_optimizer:
        return ...
    strategies = {level: strategy for strategy, level in LEVELS.items()}
    return strategies[zero_level(config)]


def reshard_after_forward(config: Config) -> Any:
    """Returns always if weights are gathered twice in a pipeline, where that is not the default."""
    if config.parallel.enable_parallel_optimizer and zero_level(config) == "level3":
        if config.parallel_config.pipeline_stage > 1:
            return "always"
    return ...


def layers_per_stage(config: Config) -> Any:
    """Returns the layers of each pipeline stage, where the stages differ: ``["0-3,8-11", "4-7,12-15"]``."""
    if not offset_fits(config):  # without effect: the run has no stages
        return ...
    stages = chunk_layers(config)
    if len({len(layers) for chunks in stages for layers in chunks}) == 1:
        return ...
    if not all(layers for chunks in stages for layers in chunks):
        return ...  # a stage without layers has no range
    return [",".join(f"{layers[0]}-{layers[-1]}" for layers in chunks) for chunks in stages]


def target_modules(config: Config) -> Any:
    """Returns the expression for the modules that contain adapted matrices.

    A module there may be several matrices here. If only some of them are adapted, the expression has all of them.
    """
    settings = config.decoder
    adapters = settings.pet_config
    if adapters is None:
        return ...
    if adapters.match == "search":
        return adapters.target_modules
    modules: dict[str, list[str]] = {}
    chosen: dict[str, list[str]] = {}
    for layer in settings.layers:
        for names in adaptable_matrices(settings, layer).values():
            path = names.pynative[-1]
            module = path.rpartition(".")[2]
            modules.setdefault(module, []).append(path)
            if adapters.adapts(names):
                chosen.setdefault(module, []).append(path)
    expressions = []
    for module, paths in chosen.items():
        if set(paths) == set(modules[module]):
            expressions.append(module)
        else:
            expressions += [f"{re.escape(path)}$" for path in dict.fromkeys(paths)]
    return "|".join(expressions) or ...


def exclude_layers(config: Config) -> Any:
    """Returns the expression for modules without adapters, unless `target_modules` leaves them out already."""
    adapters = config.decoder.pet_config
    if adapters is None or adapters.match != "search" or not adapters.excluding:
        return ...
    return "|".join(f"(?:{expression})" for expression in adapters.excluding)


def recompute_mode(config: Config) -> Any:
    """Returns full if whole blocks are recomputed, select if parts of blocks are, and ``...`` if nothing is."""
    parts = set(recomputed_parts(config)) - {""}
    if parts - {"block"}:
        return "select"
    if parts:
        return "full"
    return ...


def full_recompute_layer(config: Config) -> Any:
    """Returns the layers whose blocks are recomputed, as ranges."""
    return _ranges(config, ("block",)) or ...


def select_module(config: Config) -> Any:
    """Returns the modules that are recomputed, each with its layers."""
    layers = {_MODULES[sublayer]: _ranges(config, ("block", sublayer)) for sublayer in SUBLAYERS}
    return {module: ranges for module, ranges in layers.items() if ranges} or ...


def _ranges(config: Config, parts: tuple[str, ...]) -> list[str | int]:
    """Returns the layers of which one of these parts is recomputed: ``["0-3", 8]``."""
    layers = [layer for layer, part in enumerate(recomputed_parts(config)) if part in parts]
    if not layers:
        return []
    ranges: list[str | int] = []
    for text in layer_text(layers).partition(" ")[2].split(", "):
        if text.isdecimal():
            ranges.append(int(text))
        else:
            ranges.append(text)
    return ranges
