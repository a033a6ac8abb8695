"""Which kinds of parallelism explicit mode does not support on an Ascend."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import Config
from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.parallel import parallel_degrees, runs_semi_auto, zero_level
from trainer.config.checks.problem import ConfigError, problem
from trainer.config.checks.qk_clip import clips_queries, unsupported_clip
from trainer.config.device_defaults import apply_device_defaults
from trainer.config.schema.moe import MoEConfig
from trainer.models.spec.build import model_spec
from trainer.models.spec.sublayers import latent_spec
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels
from trainer.parallel.mesh import Degrees
from trainer.parallel.world import World

_MODEL = "model.model_config"


def samples_text(config: Config, world: World, device: str) -> bool:
    """Returns whether a training continues `sample_prompt`; without it the weights are the same."""
    if not config.trains or not config.sample_prompt or runs_semi_auto(config, world):
        return False
    return device != "Ascend" or not _divided(parallel_degrees(config, world))


def sample_notes(config: Config, world: World, device: str) -> Iterator[str]:
    """Yields a note if the ranks of an Ascend do not continue `sample_prompt`."""
    divided = _divided(parallel_degrees(config, world))
    is_asked = config.trains and config.sample_prompt and not runs_semi_auto(config, world)
    if is_asked and device == "Ascend" and divided:
        yield (f"sample_prompt: not used, ranks of an Ascend that divide a model ({divided[0]}) generate no text; add"
               " --run_mode predict --use_parallel false to generate from the checkpoints")


def _divided(degrees: Degrees) -> list[str]:
    """Returns the kinds of parallelism that divide a model."""
    return [name for name, size in degrees._asdict().items() if size > 1 and name != "data_parallel"]


def ascend_problems(config: Config, degrees: Degrees) -> Iterator[ConfigError]:
    """Yields the configuration errors of a job with these parallel degrees in explicit mode on an Ascend."""
    divided = _divided(degrees)
    if divided and config.run_mode in ("predict", "chat"):
        fix = "set it to 1, or add --use_parallel false to run alone"
        yield problem(config, f"parallel_config.{divided[0]}", "prediction shards a model on CPUs only", fix)
    if degrees.pipeline_stage > 1:
        yield from _pipeline_problems(config, degrees)
    if config.decoder.experts is not None:
        yield from _expert_problems(config, config.decoder.experts, degrees)
    shares = config.parallel.enable_parallel_optimizer and degrees.data_parallel * degrees.context_parallel > 1
    if config.trains and shares and zero_level(config) == "level3":
        key = "parallel.parallel_optimizer_config.optimizer_level"
        rule = "level3 (parallel_optimizer_comm_recompute means it, too) runs on CPUs or in semi-automatic mode"
        yield problem(config, key, rule, "write level2, or set parallel.parallel_mode to 1")
    if clips_queries(config):
        yield unsupported_clip(config, "an Ascend does not measure attention logits yet")
    if degrees.context_parallel > 1:
        yield from _context_problems(apply_device_defaults(config, "Ascend"))


def _pipeline_problems(config: Config, degrees: Degrees) -> Iterator[ConfigError]:
    spec = model_spec(config.decoder)
    shares = config.trains and config.parallel.enable_parallel_optimizer
    copies = spec.tied or spec.mtp_modules
    if shares and copies and degrees.data_parallel * degrees.context_parallel > 1:
        rule = "not yet supported on an Ascend with an embedding that two stages of a pipeline have"
        key = "parallel.enable_parallel_optimizer"
        fix = "set it to false"
        if config.source.name(key) != key:  # data_parallel_shard of the newer schema is a number
            fix = "set it to 1"
        yield problem(config, key, rule, fix)


def _expert_problems(config: Config, moe: MoEConfig, degrees: Degrees) -> Iterator[ConfigError]:
    if degrees.expert_parallel > 1 and moe.moe_token_dispatcher_type == "allgather":
        key = f"{_MODEL}.moe_config.moe_token_dispatcher_type"
        rule = "not yet supported on an Ascend"
        yield problem(config, key, rule, "write alltoall")
    if degrees.model_parallel * degrees.context_parallel > 1 and moe.effective_capacity is not None:
        rule = "not yet supported where ranks of an Ascend share the tokens of a sequence"
        yield problem(config, f"{_MODEL}.moe_config.capacity_factor", rule, "set it to -1: no bound")


def _context_problems(config: Config) -> Iterator[ConfigError]:
    """Yields what context parallelism does not support on an Ascend, where ranks gather keys and values and run
    flash_attention_score."""
    key = "parallel_config.context_parallel"
    settings = config.decoder
    if ulysses_degree(config) > 1:
        where = "parallel_config.context_parallel_algo"
        fix = "leave it out, or set context.device_target to CPU"
        rule = "on an Ascend the ranks gather keys and values; on CPUs alone they exchange heads"
        yield problem(config, where, rule, fix)
    if settings.attention_dropout:
        rule = "not yet supported with context_parallel on an Ascend"
        fix = "set it to 0, or context_parallel to 1"
        yield problem(config, f"{_MODEL}.attention_dropout", rule, fix)
    if latent_spec(settings) is not None:
        rule = "on an Ascend ranks do not share the tokens of a sequence with latent attention (MLA), on CPUs they do"
        yield problem(config, key, rule, "set it to 1")
    precision = resolve_precision(settings, config.amp_level, "Ascend")
    attention = next(one for one in select_kernels(settings, "Ascend", precision) if one.kernel == "attention")
    if not attention.fused:
        rule = f"on an Ascend it needs flash_attention_score, and {attention.why}"
        yield problem(config, key, rule, "set use_flash_attention to true, or context_parallel to 1")
