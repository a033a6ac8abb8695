"""Rules about several ranks: the degrees of parallelism in a job, whether they fit it, and what is not supported."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.checks.degrees import (
    context_problems,
    expert_problems,
    pipeline_problems,
    set_to_divisor,
    tensor_problems,
)
from trainer.config.checks.problem import ConfigError, problem
from trainer.config.recompute import recomputed_parts
from trainer.config.schema.root import Config
from trainer.models.spec.adapters import TARGETS_KEY, vocabulary_adapters
from trainer.parallel.mesh import Degrees, degree_mismatch, indivisible_degree
from trainer.parallel.world import World

DATA_PARALLEL = (0, "data_parallel")  # values of parallel_mode
SEMI_AUTO = (1, "semi_auto_parallel")
_KIB = 1024


def parallel_degrees(config: Config, world: World) -> Degrees:
    """Returns the degrees in this job: all 1 without parallelism; an unset data_parallel takes the remaining ranks.

    They may not fit the job: `parallel_problems` checks that.
    """
    if not _is_parallel(config, world):
        return Degrees()
    written = {name: getattr(config.parallel_config, name) for name in Degrees._fields}
    others = Degrees(**written | {"data_parallel": 1})
    return others._replace(data_parallel=written["data_parallel"] or max(1, world.size // others.ranks))


def resolve_for_job(config: Config, world: World) -> Config:
    """Returns the configuration of this job, with the number of micro-batches that `global_batch_size` implies.

    One process may evaluate, and predict with, what a job of several ranks has trained: use_parallel is then unset.
    """
    if world.size == 1 and config.use_parallel and not config.trains:
        config = config.model_copy(update={"use_parallel": None})  # a note names the keys that are not used
    total = config.runner_config.global_batch_size
    if total is None:
        return config
    degrees = parallel_degrees(config, world)
    steps = max(1, total // (config.runner_config.batch_size * degrees.data_parallel))
    if degrees.pipeline_stage > 1:
        section = config.parallel_config.model_copy(update={"micro_batch_num": steps})
        return config.model_copy(update={"parallel_config": section})
    runner = config.runner_config.model_copy(update={"gradient_accumulation_steps": steps})
    return config.model_copy(update={"runner_config": runner})


def micro_batches_per_step(config: Config, degrees: Degrees) -> int:
    """Returns the micro-batches of a step on one rank: micro_batch_num in a pipeline, else gradient accumulation."""
    if degrees.pipeline_stage > 1:
        return config.parallel_config.micro_batch_num
    return config.runner_config.gradient_accumulation_steps


def _batch_problems(config: Config, world: World) -> Iterator[ConfigError]:
    """Yields an error where the micro-batches of all ranks do not divide `global_batch_size`."""
    total = config.runner_config.global_batch_size
    rows = config.runner_config.batch_size
    ranks = parallel_degrees(config, world).data_parallel
    if total is not None and total % (rows * ranks):
        rule = f"must be a multiple of batch_size x data_parallel = {rows} x {ranks}"
        near = max(1, round(total / (rows * ranks))) * rows * ranks
        yield problem(config, "runner_config.global_batch_size", rule, f"write {near}, or change batch_size")
    elif config.runner_config.rampup_batch_size is not None and config.trains:
        full = rows * ranks * micro_batches_per_step(config, parallel_degrees(config, world))
        yield from _rampup_problems(config, rows * ranks, full)


def _rampup_problems(config: Config, micro_batch: int, full: int) -> Iterator[ConfigError]:
    """Yields an error if a global batch of the ramp-up cannot be made of micro-batches, or misses the full one.

    Args:
        micro_batch: Sequences of a micro-batch over all ranks.
        full: Sequences of the global batch after the ramp-up.
    """
    rampup = config.runner_config.rampup_batch_size
    assert rampup is not None
    start, increment, samples = rampup
    rule = ""
    if start > full:
        rule = f"starts with {start} sequences, more than the {full} of the full global batch"
    elif start % micro_batch:
        rule = f"starts with {start} sequences, which batch_size x data_parallel = {micro_batch} does not divide"
    elif (full - start) % increment:
        rule = f"steps of {increment} do not lead from {start} to the full global batch of {full} sequences"
    elif full - start > increment and increment % micro_batch:
        rule = f"grows by {increment} sequences, which batch_size x data_parallel = {micro_batch} does not divide"
    if rule:
        near = max(1, min(start, full) // micro_batch) * micro_batch
        steps = max(1, (full - near) // micro_batch)
        grows = next(n for n in range(min(steps, max(1, increment // micro_batch)), 0, -1) if steps % n == 0)
        fix = f"write [{near}, {grows * micro_batch}, {samples}]"
        yield problem(config, "runner_config.rampup_batch_size", rule, fix)


def shards_optimizer(config: Config, world: World) -> bool:
    """Returns whether the replicas shard the optimizer state instead of having a copy each."""
    degrees = parallel_degrees(config, world)
    return config.parallel.enable_parallel_optimizer and degrees.data_parallel * degrees.context_parallel > 1


def sharding_ranks(config: Config, degrees: Degrees) -> int:
    """Returns how many data-parallel ranks shard what `zero_level` names; the others have copies of these shards."""
    ranks = config.parallel.parallel_optimizer_config.optimizer_weight_shard_size
    if config.parallel.enable_parallel_optimizer and 0 < ranks < degrees.data_parallel:
        return ranks
    return degrees.data_parallel


def shard_threshold_bytes(config: Config) -> int:
    """Returns the size in bytes below which a parameter's optimizer state is not sharded."""
    return config.parallel.parallel_optimizer_config.parallel_optimizer_threshold * _KIB


def zero_level(config: Config) -> str:
    """Returns the ZeRO stage as MindSpore's `AutoParallel.hsdp` names it: level1, level2 or level3.

    MindSpore 2.10 has replaced parallel_optimizer_comm_recompute by level3 ("replaced with zero3").
    """
    section = config.parallel.parallel_optimizer_config
    if config.recompute_config.parallel_optimizer_comm_recompute and any(recomputed_parts(config)):
        return "level3"
    if section.gradient_accumulation_shard:
        return max(section.optimizer_level, "level2")
    return section.optimizer_level


def is_semi_auto(config: Config) -> bool:
    """Returns whether the file asks for MindSpore's semi-automatic mode, without a parallel_fallback."""
    return config.parallel.parallel_mode in SEMI_AUTO and config.parallel.parallel_fallback is None


def runs_semi_auto(config: Config, world: World) -> bool:
    """Returns whether this job runs in MindSpore's semi-automatic mode."""
    return _is_parallel(config, world) and is_semi_auto(config)


def _is_parallel(config: Config, world: World) -> bool:
    """Returns whether `parallel_config` is used; an unset use_parallel means that a job of several ranks uses it."""
    if config.use_parallel is None:
        return world.size > 1
    return config.use_parallel


def parallel_problems(config: Config, world: World) -> list[ConfigError]:
    """Returns the errors that keep this job from running on its ranks."""
    if world.size > 1 and config.use_parallel is False:
        fix = "remove the key or set it to true; to run one process, leave `launch` out"
        return [problem(config, "use_parallel", f"the job has {world.size} ranks", fix)]
    if world.size > 1 and config.run_mode == "chat":
        rule = f"run_mode chat runs in one process, and the job has {world.size} ranks"
        return [problem(config, "run_mode", rule, "start it without launch")]
    problems = list(_batch_problems(config, world))
    if not _is_parallel(config, world) or is_semi_auto(config):  # semi_auto/rules.py has the rules of that mode
        return problems
    mismatch = fit_problems(config, world)
    degrees = parallel_degrees(config, world)
    if mismatch:
        problems += mismatch
    elif not config.is_decoder:
        problems += [*_only_data_parallel(config, world, degrees), *_sharding_size(config, degrees)]
    else:
        problems += [*_explicit_pipeline(config, degrees), *_explicit_sharding(config, degrees)]
        problems += _sharding_size(config, degrees)
        problems += _whole_matrices(config, world, degrees)
    if world.size > 1:
        problems += _several_ranks(config, world)
    return problems


def _whole_matrices(config: Config, world: World, degrees: Degrees) -> Iterator[ConfigError]:
    """Yields errors for adapters of embedding and head, or computed from whole matrices, if ranks shard these."""
    key = config.whole_matrix_method
    sharded = degrees.shards_model or (shards_optimizer(config, world) and zero_level(config) == "level3")
    outer = list(vocabulary_adapters(config.decoder))
    if outer and sharded:
        rule = f"adapters of {' and '.join(outer)} are supported with data parallelism only"
        fix = "name matrices of layers alone, or use data_parallel alone and optimizer_level level2"
        yield problem(config, TARGETS_KEY, rule, fix)
    if key and sharded:
        rule = "is supported with data parallelism only, where every rank has all weights"
        yield problem(config, key, rule, "leave it out, or use data_parallel alone and optimizer_level level2")


def _only_data_parallel(config: Config, world: World, degrees: Degrees) -> Iterator[ConfigError]:
    """Yields errors about another model than a decoder, of which each rank has all weights."""
    for name, degree in degrees._asdict().items():
        if degree > 1 and name != "data_parallel":
            rule = f"{config.model.arch.type} supports data parallelism only"
            yield problem(config, f"parallel_config.{name}", rule, "set it to 1")
    if shards_optimizer(config, world) and zero_level(config) == "level3":
        key = "parallel.parallel_optimizer_config.optimizer_level"
        yield problem(config, key, f"the weights of {config.model.arch.type} cannot be sharded", "write level2")


def _explicit_sharding(config: Config, degrees: Degrees) -> Iterator[ConfigError]:
    """Yields errors about tensor, context and expert parallelism in explicit mode."""
    if degrees.model_parallel > 1:
        yield from tensor_problems(config, repeats_heads=True)
    yield from context_problems(config)
    yield from expert_problems(config)


def _sharding_size(config: Config, degrees: Degrees) -> Iterator[ConfigError]:
    """Yields errors where the number of ranks that shard optimizer state does not fit the other degrees."""
    key = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    size = config.parallel.parallel_optimizer_config.optimizer_weight_shard_size
    replicas = degrees.data_parallel
    if not config.parallel.enable_parallel_optimizer or size == -1:
        return
    if not size or replicas % size:
        yield problem(config, key, f"must divide data_parallel {replicas}", f"{set_to_divisor(replicas)}, or to -1")
        return
    ranks = size * degrees.context_parallel * degrees.model_parallel
    if ranks % degrees.expert_parallel:
        rule = f"expert_parallel {degrees.expert_parallel} must divide the {ranks} ranks that shard weights together"
        yield problem(config, key, rule, "set it to -1, for all data-parallel ranks")


def _explicit_pipeline(config: Config, degrees: Degrees) -> Iterator[ConfigError]:
    """Yields errors about pipeline parallelism in explicit mode."""
    if degrees.pipeline_stage == 1:
        return
    if config.parallel.pipeline_config.pipeline_scheduler not in ("1f1b", "gpipe"):
        rule = "explicit mode supports 1f1b and gpipe only"
        yield problem(config, "parallel.pipeline_config.pipeline_scheduler", rule, "write 1f1b")
    yield from pipeline_problems(config)


def fit_problems(config: Config, world: World) -> list[ConfigError]:
    """Returns an error if the product of the degrees is not the number of ranks; an empty list if it is."""
    degrees = parallel_degrees(config, world)
    mismatch = degree_mismatch(degrees, world.size, may_change=("data_parallel",))
    if mismatch is None:
        return []
    # A user of the command can change the degrees or the number of ranks, or run one process.
    fix = mismatch.fix("start it with `run_trainer.py launch --nproc {ranks}`")
    if world.size == 1:
        fix += "; to run one process, add --use_parallel false"
    elif not config.source.source_places:  # the newer schema has no such key
        fix += "; an unset data_parallel takes the remaining ranks"
    key = mismatch.key
    if key != "expert_parallel" and config.parallel_config.data_parallel is None:  # the others do not fit
        key, ranks = indivisible_degree(degrees, world.size)
        if ranks > 1:
            fix = f"{set_to_divisor(ranks)}, or {fix}"
    return [problem(config, f"parallel_config.{key}", mismatch.rule, fix)]


def _several_ranks(config: Config, world: World) -> Iterator[ConfigError]:
    mode = config.parallel.parallel_mode
    if mode not in (*DATA_PARALLEL, *SEMI_AUTO):
        rule = "not yet supported"
        if mode == "stand_alone":
            rule = f"runs one rank, and the job has {world.size}"
        yield problem(config, "parallel.parallel_mode", rule, "set it to 0, data parallelism, or leave it out")
