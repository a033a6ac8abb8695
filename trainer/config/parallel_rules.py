"""Several ranks: how many the degrees of a file mean in a job, what fits and what is not yet built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer.config.problems import NOWHERE, Place, Problem
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.parallel.mesh import Degrees, Misfit, misfit_of
from trainer.parallel.world import World

# What to do where a degree is asked for that nothing cuts yet.
_MEANWHILE = {
    "pipeline_stage": "set it to 1: with data_parallel alone every rank has all layers, and"
    " parallel.enable_parallel_optimizer, recompute_config.recompute and freeze save memory",
    "model_parallel": "set it to 1: with data_parallel alone every rank has whole matrices, and"
    " parallel.enable_parallel_optimizer shares the optimizer's part of the memory",
    "context_parallel": "set it to 1: a shorter seq_length, or recompute_config.recompute, saves activations",
    "expert_parallel": "set it to 1: every rank then has all experts, and parallel.enable_parallel_optimizer shares"
    " their optimizer state",
}
_DATA_PARALLEL = (0, "data_parallel")  # values of parallel_mode
_SEMI_AUTO = (1, "semi_auto_parallel")
_KIB = 1024


def degrees_of(config: Config, world: World) -> Degrees:
    """The degrees in this job: all 1 where one rank runs alone; an unset data_parallel takes the ranks that are left.

    `parallel_problems` has the mistakes.
    """
    if not _in_force(config, world):
        return Degrees()
    section = config.parallel_config
    others = Degrees(
        pipeline_stage=section.pipeline_stage,
        context_parallel=section.context_parallel,
        model_parallel=section.model_parallel,
        expert_parallel=section.expert_parallel,
    )
    data = section.data_parallel
    return others._replace(data_parallel=max(1, world.size // others.ranks) if data is None else data)


def shards_optimizer(config: Config, world: World) -> bool:
    """Whether the data-parallel ranks share the optimizer state instead of having a copy each."""
    return config.parallel.enable_parallel_optimizer and degrees_of(config, world).data_parallel > 1


def shard_threshold_bytes(config: Config) -> int:
    """Optimizer state of a smaller parameter stays whole on every rank."""
    return config.parallel.parallel_optimizer_config.parallel_optimizer_threshold * _KIB


def is_semi_auto(config: Config) -> bool:
    """Whether MindSpore's semi-automatic mode is asked for, and nothing in its place."""
    return config.parallel.parallel_mode in _SEMI_AUTO and config.parallel.parallel_fallback is None


def semi_auto_notices(config: Config) -> Iterator[str]:
    """What of the file has no effect, or another one, in semi-automatic mode."""
    steps, stages = config.runner_config.gradient_accumulation_steps, config.parallel_config.pipeline_stage
    if steps > 1 and stages > 1:
        yield (
            f"runner_config.gradient_accumulation_steps {steps}: no effect in a pipeline, whose micro-batches it would"
            f" be; parallel_config.micro_batch_num {config.parallel_config.micro_batch_num} says how many there are"
        )
    if config.recompute_config.recompute or config.recompute_config.select_recompute:
        yield "recompute_config: no effect in semi-automatic mode yet, whose graph keeps all activations"


def semi_auto_problems(config: Config) -> Iterator[Problem]:
    """What semi-automatic mode cannot do."""
    section, settings = config.parallel_config, config.decoder
    if section.micro_batch_num < section.pipeline_stage:
        key, rule = "parallel_config.micro_batch_num", f"a pipeline of {section.pipeline_stage} stages needs as many"
        yield _problem(config, key, section.micro_batch_num, rule, f"set it to {section.pipeline_stage} or more")
    micro_batches = section.micro_batch_num if section.pipeline_stage > 1 else 1
    if config.runner_config.batch_size % micro_batches:
        rule = f"must be a multiple of parallel_config.micro_batch_num {micro_batches}, which it is cut into"
        key, rows = "runner_config.batch_size", config.runner_config.batch_size
        yield _problem(config, key, rows, rule, f"set it to {-(-rows // micro_batches) * micro_batches}")
    if settings.num_layers + settings.mtp_depth < section.pipeline_stage:
        key, rule = "parallel_config.pipeline_stage", f"the model has {settings.num_layers + settings.mtp_depth} layers"
        yield _problem(config, key, section.pipeline_stage, rule, "set it to that or less")
    if settings.num_heads % section.model_parallel or settings.kv_heads % section.model_parallel:
        key = "parallel_config.model_parallel"
        rule = f"must divide the heads, {settings.num_heads} and {settings.kv_heads} of keys and values"
        yield _problem(config, key, section.model_parallel, rule, "set it to a divisor of both")
    for name in ("context_parallel", "expert_parallel"):
        if getattr(section, name) > 1:
            rule = "not yet supported in semi-automatic mode"
            yield _problem(config, f"parallel_config.{name}", getattr(section, name), rule, "set it to 1")
    yield from _not_in_one_graph(config)


def _not_in_one_graph(config: Config) -> Iterator[Problem]:
    """What a run does on the host, or between the graphs of its blocks."""
    settings, model = config.decoder, "model.model_config"
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(settings, name):
            rule = "not yet supported in semi-automatic mode, whose graph draws no masks"
            yield _problem(config, f"{model}.{name}", getattr(settings, name), rule, "set it to 0")
    if settings.pet_config is not None:
        rule, fix = "not yet supported in semi-automatic mode", "remove it, or use data parallelism (parallel_mode 0)"
        yield _problem(config, f"{model}.pet_config", settings.pet_config.pet_type, rule, fix)
    if settings.experts is not None and not settings.experts.use_gmm:
        rule, key = "experts on the host do not fit into one graph", f"{model}.moe_config.use_gmm"
        yield _problem(config, key, False, rule, "set it to True")
    if settings.experts is not None and settings.experts.balance_via_topk_bias:
        rule, key = "not yet supported in semi-automatic mode: the bias would stay", "balance_via_topk_bias"
        fix = "set it to False, and aux_loss_factor above 0"
        yield _problem(config, f"{model}.moe_config.{key}", True, rule, fix)
    if config.optimizer.type == "Muon":
        rule = "not yet supported in semi-automatic mode"
        yield _problem(config, "optimizer.type", "Muon", rule, "use AdamW or SGD")


def _in_force(config: Config, world: World) -> bool:
    """Whether `parallel_config` counts: an unset use_parallel follows the job."""
    return world.size > 1 if config.use_parallel is None else config.use_parallel


def parallel_problems(config: Config, world: World) -> list[Problem]:
    """What keeps this job from running on its ranks."""
    if world.size > 1 and config.use_parallel is False:
        fix = "remove the key or set it to True; to run alone, leave `launch` out"
        return [_problem(config, "use_parallel", False, f"this job has {world.size} ranks", fix)]
    if not _in_force(config, world):
        return []
    if is_semi_auto(config):
        return [_semi_auto(config)]
    found = [*_degrees_not_yet(config)] or fit_problems(config, world)
    if world.size > 1:
        found += [*_mode(config, world), *_optimizer(config)]
    return found


def fit_problems(config: Config, world: World) -> list[Problem]:
    """Degrees whose product is not the number of ranks."""
    misfit = misfit_of(degrees_of(config, world), world.size, may_change=("data_parallel",))
    return [_misfit(config, world, misfit)] if misfit else []


def _problem(config: Config, key: str, value: Any, rule: str, fix: str) -> Problem:
    place = config.source.place(key)
    if place == NOWHERE:  # a default: the file as a whole is to blame
        place = Place(0, config.source.path)
    return Problem(place, UserError(rule, where=place.text, key=key, value=value, fix=fix))


def _degrees_not_yet(config: Config) -> Iterator[Problem]:
    for name, fix in _MEANWHILE.items():
        value = getattr(config.parallel_config, name)
        if value > 1:
            yield _problem(config, f"parallel_config.{name}", value, "not yet supported", fix)


def _misfit(config: Config, world: World, misfit: Misfit) -> Problem:
    """The ways out that a user of the command has: other degrees, another number of ranks, or no job at all."""
    key = f"parallel_config.{misfit.key}"
    fix = misfit.fix("start it with `run_trainer.py launch --nproc {ranks}`")
    alone = "to run alone, add --use_parallel False"
    left_out = "an unset data_parallel takes the ranks that are left"
    fix += f"; {alone if world.size == 1 else left_out}"
    return _problem(config, key, getattr(config.parallel_config, misfit.key), misfit.rule, fix)


def _semi_auto(config: Config) -> Problem:
    key, value = "parallel.parallel_mode", config.parallel.parallel_mode
    rule = (
        "not yet supported: MindSpore compiles semi-automatic parallelism for Ascend and GPU alone, never for a CPU,"
        " and this trainer builds its network for that mode but has no training loop around it"
    )
    fix = "add --parallel_fallback explicit for data parallelism, the trainer's own; or set it to 0, which is the same"
    return _problem(config, key, value, rule, fix)


def _mode(config: Config, world: World) -> Iterator[Problem]:
    key, value = "parallel.parallel_mode", config.parallel.parallel_mode
    if value in (*_DATA_PARALLEL, *_SEMI_AUTO):
        return
    rule = f"runs one rank alone, and this job has {world.size}" if value == "stand_alone" else "not yet supported"
    yield _problem(config, key, value, rule, "set it to 0, data parallelism, or leave it out")


def _optimizer(config: Config) -> Iterator[Problem]:
    if config.parallel.enable_parallel_optimizer and config.optimizer.type == "Muon" and config.trains:
        fix = "use optimizer.type AdamW, or set it to False: every rank then keeps Muon's whole state"
        rule = "not yet supported with optimizer.type Muon, which needs whole matrices"
        yield _problem(config, "parallel.enable_parallel_optimizer", True, rule, fix)


def parallel_notices(config: Config, world: World) -> Iterator[str]:
    """What of the file does not count in this job, and what was chosen for it."""
    if world.size > 1:
        if config.use_parallel is None:
            yield f"use_parallel: not set, taken as True: this job has {world.size} ranks"
        if config.parallel.parallel_mode in _SEMI_AUTO and config.parallel.parallel_fallback:
            yield (
                f"parallel.parallel_mode {config.parallel.parallel_mode}: data parallelism in its place, as"
                f" parallel_fallback {config.parallel.parallel_fallback} says"
            )
        return
    section, names = config.parallel_config, (*Degrees._fields, "micro_batch_num")
    used = [f"{name} {value}" for name in names if (value := getattr(section, name)) is not None and value > 1]
    if used and not config.use_parallel:
        because = "use_parallel is False" if config.use_parallel is False else "start several with `launch --nproc`"
        yield f"parallel_config ({', '.join(used)}): not used, one device runs it all: {because}"
    if config.use_parallel:
        yield "use_parallel True: this job has one rank; `run_trainer.py launch --nproc 8` starts eight"
    mode, sharded = config.parallel.parallel_mode, config.parallel.enable_parallel_optimizer
    keys = [f"parallel_mode {mode}"] * (mode not in (*_DATA_PARALLEL, "stand_alone"))
    keys += ["enable_parallel_optimizer"] * sharded
    if keys:
        yield f"parallel ({', '.join(keys)}): not used, one device runs it all"
