"""What a trace cannot observe, or could not compare: one message each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from trainer.config import Config
from trainer.config.checks.model import decoder_problems
from trainer.config.checks.parallel import runs_semi_auto, shards_optimizer, zero_level
from trainer.config.checks.problem import ConfigError, problem
from trainer.config.patterns import wider_pattern
from trainer.config.recompute import RecomputeConfig
from trainer.errors import UserError
from trainer.models.spec.adapters import SECTION, adapter_spec, base_dtype
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import LAYERS
from trainer.parallel.world import World
from trainer.trace.names import module_names


def trace_problems(config: Config, world: World) -> Iterator[ConfigError]:
    """Yields what keeps a configuration from being traced."""
    if not config.trains:
        yield problem(config, "run_mode", "a trace observes training steps", "write train")
        return
    yield from decoder_problems(config, "trace")
    if config.loss is not None:
        yield problem(config, "loss", "a trace observes the loss of tokens", "leave it out")
    if config.resume_training:
        fix = "leave it out: load_checkpoint gives the weights"
        yield problem(config, "resume_training", "a trace begins with the first step", fix)
    if runs_semi_auto(config, world):
        rule = "semi-automatic mode computes a step in one graph, where nothing can be observed"
        yield problem(config, "parallel.parallel_mode", rule, "write DATA_PARALLEL for the trace")
    if shards_optimizer(config, world) and zero_level(config) != "level1":
        key = "parallel.parallel_optimizer_config.optimizer_level"
        rule = "ranks have ranges of gradients, which a trace does not know"
        yield problem(config, key, rule, "write level1, which computes the same numbers")
    rates = {f"model.model_config.{name}": getattr(config.decoder, name) for name in _DROPOUT}
    adapter = adapter_spec(config.decoder)
    if adapter is not None:
        rates[f"{SECTION}.lora_dropout"] = adapter.dropout
    for key, rate in rates.items():
        if rate:
            rule = "ranks draw other masks than one rank does, so that nothing would be equal"
            yield problem(config, key, rule, "write 0 for the trace")
    if base_dtype(config.decoder) is not None:
        rule = "a trace shows the weights that a checkpoint has, not those that memory holds in fewer bytes"
        yield problem(config, f"{SECTION}.base_dtype", rule, "leave it out for the trace")
    if config.decoder.neftune_noise_alpha is not None:
        rule = "ranks draw other noise than one rank does, so that nothing would be equal"
        yield problem(config, "model.model_config.neftune_noise_alpha", rule, "leave it out for the trace")


_LAYER = re.compile(rf"^{re.escape(LAYERS)}\d+")
_DROPOUT = ("hidden_dropout", "attention_dropout")


def with_sublayers(config: Config) -> Config:
    """Returns a configuration whose layers compute their sublayers one by one, so that each can be seen.

    It recomputes the feed-forward sublayers, which changes no number. Sublayers side by side stay one part.
    """
    recomputed = RecomputeConfig()
    if not config.decoder.parallel_attn:
        recomputed = RecomputeConfig(select_recompute=["mlp"])
    return config.model_copy(update={"recompute_config": recomputed, "recompute": False})


def check_pattern(pattern: str, config: Config) -> None:
    """Checks that the pattern of `--full` matches a tensor of the model, so that a run writes what it is asked for.

    Raises:
        UserError: It matches none; the message has the names.
    """
    spec = model_spec(config.decoder)
    modules = module_names(spec)
    names = [*modules, *spec.parameters()]
    if not pattern or any(fnmatchcase(name, pattern) for name in names):
        return
    kinds = list(dict.fromkeys(map(_any_layer_name, modules)))
    fix = f"the modules are {', '.join(kinds)}, with layers 0 to {len(spec.layers) - 1}; parameters end in .weight"
    near = get_close_matches(_any_layer_name(pattern), [*kinds, *map(_any_layer_name, names)], n=1)
    if wider := wider_pattern(pattern, names):
        fix = f"a pattern must match the whole name: write '{wider}'"
    elif near:
        fix = f"you probably mean '{near[0]}'; {fix}"
    raise UserError("matches no tensor of this model", where="flag --full", key="--full", value=pattern, fix=fix)


def _any_layer_name(name: str) -> str:
    return _LAYER.sub(f"{LAYERS}*", name)
