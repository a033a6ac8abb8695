"""How a smoke run trains: the file's optimizer, wrapper and schedule for a few steps, on the processes there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config import Config
from trainer.config.checks.parallel import DATA_PARALLEL
from trainer.config.schema.callbacks import CheckpointMonitor, ProfileMonitor
from trainer.smoke.changes import Change, Setup, changed
from trainer.smoke.degrees import SHARING
from trainer.smoke.model import CHUNKS

_BATCH_SIZE = 2
_MICRO_BATCHES = 2
_SHARDED_KIB = 1
_SMALLER = "small enough for this machine"

# What remains of a phase of a schedule, in steps, so that the run goes through each.
_PHASES = {
    "warmup_steps": 1, "decay_steps": 1, "decay_start_steps": 2, "keep_steps": 1, "final_steps": 1, "t_max": 2,
    "t_0": 2,
}  # fmt: skip


def training_changes(config: Config, setup: Setup, is_smaller: bool) -> Iterator[Change]:
    """The steps, the schedule, the checkpoints, the degrees of parallelism, the device, and weights that are not here.

    The run saves before its last step and after it, so that the last one can be done again from a checkpoint.

    Args:
        is_smaller: Whether the model has other sizes than in the file.
    """
    yield from _steps(config, setup)
    yield from _schedule(config, setup.steps)
    yield from _checkpoints(config, setup.steps)
    yield from _parallel(config, setup)
    yield from _device(config, setup)
    yield from _weights(config, is_smaller)
    yield from changed(config, "output_dir", str(setup.folder))
    yield from changed(config, "log_format", "plain")
    yield from changed(config, "worker_log_dir", None)
    yield from changed(config, "report", after=False)
    yield from changed(config, "trackers", [], "a smoke run is not recorded")
    yield from changed(config, "tensorboard.tensorboard_dir", None, "a smoke run is not recorded")
    yield from changed(config, "sample_prompt", None, "a smoke run samples no text")
    yield from changed(config, "profile", after=False)
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, ProfileMonitor):  # what it writes stays in the folder of the smoke run
            yield from changed(config, f"callbacks.{number}.output_path", None)


def rows_of_a_step(config: Config, setup: Setup) -> int:
    """Sequences of an optimizer step of the smoke run, over all ranks."""
    return batch_size(config) * micro_batches(config) * setup.layout.degrees.data_parallel


def batch_size(config: Config) -> int:
    return min(config.runner_config.batch_size, _BATCH_SIZE)


def micro_batches(config: Config) -> int:
    """Micro-batches of a step: those that are accumulated, or those of a pipeline."""
    parallel = config.parallel_config
    of_pipeline = 1
    if config.use_parallel and parallel.pipeline_stage > 1:
        of_pipeline = parallel.micro_batch_num
    return min(max(config.runner_config.gradient_accumulation_steps, of_pipeline), _MICRO_BATCHES)


def _steps(config: Config, setup: Setup) -> Iterator[Change]:
    runner = "runner_config"
    # Data that is here may have fewer rows than the steps need.
    yield from changed(config, f"{runner}.epochs", 1 if "train_dataset" in setup.missing else setup.steps,
                       f"{setup.steps} steps")
    yield from changed(config, f"{runner}.stop_step", setup.steps, f"{setup.steps} steps")
    yield from changed(config, f"{runner}.batch_size", batch_size(config), _SMALLER)
    accumulated = config.runner_config.gradient_accumulation_steps
    section = config.parallel_config
    if setup.layout.degrees.pipeline_stage > 1:
        yield from changed(config, "parallel_config.micro_batch_num", _MICRO_BATCHES, _SMALLER)
        yield from changed(config, f"{runner}.gradient_accumulation_steps", 1, "in a pipeline it is micro_batch_num")
    else:
        pipelined = micro_batches(config) > accumulated
        why = _SMALLER
        if pipelined:
            why = f"in place of micro_batch_num {section.micro_batch_num} of the pipeline"
        yield from changed(config, "parallel_config.micro_batch_num", 1)
        yield from changed(config, f"{runner}.gradient_accumulation_steps", micro_batches(config), why)
    yield from changed(config, "resume_training", after=False, why="it trains first, and resumes that training")


def _schedule(config: Config, steps: int) -> Iterator[Change]:
    schedule = config.lr_schedule
    for name, most in _PHASES.items():
        if (getattr(schedule, name, None) or 0) > most:
            yield from changed(config, f"lr_schedule.{name}", most, f"the run has {steps} steps")
    for name in ("warmup_ratio", "decay_ratio"):
        if 0 < (getattr(schedule, name, None) or 0) < 1 / steps:
            yield from changed(config, f"lr_schedule.{name}", round(1 / steps + 0.005, 2), "one of the steps")
    yield from changed(config, "lr_schedule.total_steps", steps, f"the run has {steps} steps")


def _checkpoints(config: Config, steps: int) -> Iterator[Change]:
    every = steps - 1
    kept = 2
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, CheckpointMonitor):
            why = "it resumes from the step before the last"
            yield from changed(config, f"callbacks.{number}.save_checkpoint_steps", every, why)
            yield from changed(config, f"callbacks.{number}.keep_checkpoint_max",
                               max(callback.keep_checkpoint_max, kept), why)
            return
    monitor = {"type": "CheckpointMonitor", "save_checkpoint_steps": every, "keep_checkpoint_max": kept}
    yield Change(f"callbacks.{len(config.callbacks)}", None, monitor, "it saves, and resumes")


def _parallel(config: Config, setup: Setup) -> Iterator[Change]:
    """The degrees of the layout, in explicit mode."""
    section = config.parallel_config
    ranks = setup.ranks
    degrees = setup.layout.degrees
    in_force = config.use_parallel is not False
    job = "one process; --ranks starts several"
    if ranks > 1:
        job = f"--ranks {ranks}"
    if config.use_parallel or ranks > 1:
        yield from changed(config, "use_parallel", ranks > 1, job)
    shown = in_force and (ranks, section.data_parallel) != (1, None)
    yield from changed(config, "parallel_config.data_parallel", degrees.data_parallel, job if shown else "")
    for name, degree in degrees._asdict().items():
        if name != "data_parallel":
            if degree > 1:
                why = f"{job}, {degree} for each kind of parallelism"
            else:
                why = setup.left_out.get(name, job)
            yield from changed(config, f"parallel_config.{name}", degree, why if in_force else "")
    yield from _pipeline(config, degrees.pipeline_stage)
    yield from _mode(config, setup)


def _pipeline(config: Config, stages: int) -> Iterator[Change]:
    """Layers of the stages, in equal shares."""
    decoder = config.decoder
    model = "model.model_config"
    if isinstance(decoder.offset, list) or config.parallel_config.pipeline_stage > 1:
        why = "one stage has all layers"
        if stages > 1:
            why = "equal shares"
        yield from changed(config, f"{model}.offset", 0, why)
    if config.parallel_config.pipeline_stage > 1:
        if stages > 1:
            chunks = min(decoder.pp_interleave_num, CHUNKS)
            why = _SMALLER
        else:
            chunks = 1
            why = "one stage"
        yield from changed(config, f"{model}.pp_interleave_num", chunks, why)
    if stages > 1:
        key = "parallel.pipeline_config.pipeline_scheduler"
        yield from changed(config, key, "1f1b", "explicit mode has no other one")


def _mode(config: Config, setup: Setup) -> Iterator[Change]:
    mode = config.parallel.parallel_mode
    ranks = setup.ranks
    if mode not in (*DATA_PARALLEL, *(("stand_alone",) if ranks == 1 else ())):
        yield from changed(config, "parallel.parallel_mode", 0, "explicit mode: the others run on an Ascend only")
    yield from changed(config, "parallel.parallel_fallback", None)
    if ranks == 1 or not config.parallel.enable_parallel_optimizer:
        return
    threshold = config.parallel.parallel_optimizer_config.parallel_optimizer_threshold
    if not setup.layout.shares:
        why = setup.left_out.get(SHARING, "")
        yield from changed(config, "parallel.enable_parallel_optimizer", after=False, why=why)
    elif threshold > _SHARDED_KIB:
        yield from changed(config, "parallel.parallel_optimizer_config.parallel_optimizer_threshold", _SHARDED_KIB,
                           "the ranks share the state of small matrices too")


def _device(config: Config, setup: Setup) -> Iterator[Change]:
    wanted = config.context.device_target
    if wanted is not None:
        yield from changed(config, "context.device_target", setup.device, f"this machine has no {wanted}")


def _weights(config: Config, is_smaller: bool) -> Iterator[Change]:
    """A smaller model starts from new weights, and so does one whose weights are not here."""
    for key in ("load_checkpoint", "adapter_id", "pretrained_model_dir"):
        path = getattr(config, key)
        here = bool(path) and Path(path).expanduser().exists()
        if not path or (here and not is_smaller):
            continue
        why = "new weights: it is not here"
        if here:
            why = "new weights: those have the full size"
        if key == "pretrained_model_dir":
            if here:
                why = "the folder gave sizes and tokenizer"
            else:
                why = f"it is not here: a small {config.model.arch.type}"
        yield from changed(config, key, "" if key == "load_checkpoint" else None, why)
    name = "model.model_config.checkpoint_name_or_path"
    if config.decoder.checkpoint_name_or_path:
        yield from changed(config, name, None)
