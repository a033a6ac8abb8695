"""Several ranks: how many the degrees of a file mean in a job, what fits and what is not yet built."""

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
from trainer.parallel.mesh import Degrees, degree_mismatch, indivisible_degree
from trainer.parallel.world import World

DATA_PARALLEL = (0, "data_parallel")  # values of parallel_mode
SEMI_AUTO = (1, "semi_auto_parallel")
_KIB = 1024


def parallel_degrees(config: Config, world: World) -> Degrees:
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


def resolve_for_job(config: Config, world: World) -> Config:
    """The configuration in this job: with the micro-batches that `global_batch_size` means, if the file has one.

    What a job of several ranks has trained one process evaluates and continues, too: checkpoints are those of one rank.
    """
    if world.size == 1 and config.use_parallel and not config.trains:
        config = config.model_copy(update={"use_parallel": None})  # a note tells what is not used then
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
    """Those of an optimizer step on a rank: in a pipeline accumulation means micro_batch_num."""
    pipelined = degrees.pipeline_stage > 1
    if pipelined:
        return config.parallel_config.micro_batch_num
    return config.runner_config.gradient_accumulation_steps


def _batch_problems(config: Config, world: World) -> Iterator[ConfigError]:
    """A step of `global_batch_size` sequences must be whole micro-batches of all ranks."""
    total = config.runner_config.global_batch_size
    rows = config.runner_config.batch_size
    ranks = parallel_degrees(config, world).data_parallel
    if total is not None and total % (rows * ranks):
        rule = f"must be a multiple of batch_size x data_parallel = {rows} x {ranks}"
        near = max(1, round(total / (rows * ranks))) * rows * ranks
        yield problem(config, "runner_config.global_batch_size", rule, f"write {near}, or change batch_size")


def shards_optimizer(config: Config, world: World) -> bool:
    """Whether the ranks with the same part of the model share the optimizer state instead of having a copy each."""
    degrees = parallel_degrees(config, world)
    return config.parallel.enable_parallel_optimizer and degrees.data_parallel * degrees.context_parallel > 1


def shard_threshold_bytes(config: Config) -> int:
    """Optimizer state of a smaller parameter stays whole on every rank."""
    return config.parallel.parallel_optimizer_config.parallel_optimizer_threshold * _KIB


def zero_level(config: Config) -> str:
    """What the ranks that share optimizer state share, as MindSpore's `AutoParallel.hsdp` names it.

    MindSpore 2.10 has replaced parallel_optimizer_comm_recompute by level3 ("replaced with zero3").
    """
    section = config.parallel.parallel_optimizer_config
    again = config.recompute_config.parallel_optimizer_comm_recompute and any(recomputed_parts(config))
    asked = {"level2": section.gradient_accumulation_shard, "level3": again}
    return max(section.optimizer_level, *(level for level, wanted in asked.items() if wanted), "")


def is_semi_auto(config: Config) -> bool:
    """Whether MindSpore's semi-automatic mode is asked for, and nothing in its place."""
    return config.parallel.parallel_mode in SEMI_AUTO and config.parallel.parallel_fallback is None


def runs_semi_auto(config: Config, world: World) -> bool:
    """Whether this job runs in MindSpore's semi-automatic mode."""
    return _in_force(config, world) and is_semi_auto(config)


def _in_force(config: Config, world: World) -> bool:
    """Whether `parallel_config` counts: an unset use_parallel follows the job."""
    if config.use_parallel is None:
        return world.size > 1
    return config.use_parallel


def parallel_problems(config: Config, world: World) -> list[ConfigError]:
    """What keeps this job from running on its ranks."""
    if world.size > 1 and config.use_parallel is False:
        fix = "remove the key or set it to True; to run alone, leave `launch` out"
        return [problem(config, "use_parallel", f"this job has {world.size} ranks", fix)]
    if world.size > 1 and config.run_mode == "chat":
        rule = f"one process holds a conversation, and this job has {world.size}"
        return [problem(config, "run_mode", rule, "start it without launch")]
    batches = list(_batch_problems(config, world))
    if not _in_force(config, world) or is_semi_auto(config):  # that mode has rules of its own
        return batches
    found = fit_problems(config, world)
    if not found:
        degrees = parallel_degrees(config, world)
        found = [*_explicit_pipeline(config, degrees), *_explicit_division(config, degrees)]
    return [*batches, *found, *(_several_ranks(config, world) if world.size > 1 else ())]


def _explicit_division(config: Config, degrees: Degrees) -> Iterator[ConfigError]:
    """What the trainer's own tensor, context and expert parallelism cannot do."""
    names = ("model_parallel", "context_parallel", "expert_parallel")
    divided = [name for name in names if getattr(degrees, name) > 1]
    if not divided:
        return
    key = f"parallel_config.{divided[0]}"
    if config.classifier is not None:
        yield problem(config, key, "a classifier has data parallelism alone", "set it to 1")
        return
    if degrees.model_parallel > 1:
        yield from tensor_problems(config, repeats_heads=True)
    yield from context_problems(config)
    yield from expert_problems(config)


def _explicit_pipeline(config: Config, degrees: Degrees) -> Iterator[ConfigError]:
    """What the trainer's own pipeline cannot do."""
    if degrees.pipeline_stage == 1:
        return
    key = "parallel_config.pipeline_stage"
    alone = "set it to 1, or add --use_parallel False to run alone"
    if config.classifier is not None:
        yield problem(config, key, "a classifier has data parallelism alone", alone)
        return
    if config.parallel.pipeline_config.pipeline_scheduler != "1f1b":
        rule = "outside semi-automatic mode there is 1f1b alone, interleaved with pp_interleave_num"
        yield problem(config, "parallel.pipeline_config.pipeline_scheduler", rule, "write 1f1b")
    yield from pipeline_problems(config)


def fit_problems(config: Config, world: World) -> list[ConfigError]:
    """Degrees whose product is not the number of ranks."""
    degrees = parallel_degrees(config, world)
    mismatch = degree_mismatch(degrees, world.size, may_change=("data_parallel",))
    if mismatch is None:
        return []
    # The ways out that a user of the command has: other degrees, another number of ranks, or no job at all.
    fix = mismatch.fix("start it with `run_trainer.py launch --nproc {ranks}`")
    alone = "to run alone, add --use_parallel False"
    left_out = "an unset data_parallel takes the ranks that are left"
    fix = f"{fix}; {alone if world.size == 1 else left_out}"
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
            rule = f"runs one rank alone, and this job has {world.size}"
        yield problem(config, "parallel.parallel_mode", rule, "set it to 0, data parallelism, or leave it out")
    if config.classifier is not None and shards_optimizer(config, world) and zero_level(config) == "level3":
        key = "parallel.parallel_optimizer_config.optimizer_level"
        yield problem(config, key, "the weights of a classifier are not divided", "write level2")
