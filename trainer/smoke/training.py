"""The training of a smoke run: the file's optimizer, wrapper and schedule for a few steps, on the available processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config import Config
from trainer.config.checks.parallel import DATA_PARALLEL
from trainer.config.checks.problem import value_of
from trainer.config.schema.callbacks import CheckpointMonitor, ProfileMonitor
from trainer.smoke.changes import NewValue, Setup
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


def training_changes(config: Config, setup: Setup, is_smaller: bool) -> Iterator[NewValue]:
    """Yields the changes of steps, schedule, checkpoints, parallel degrees, device and initial weights.

    The run saves before its last step and after it, so that the last one can be done again from a checkpoint.

    Args:
        is_smaller: Whether the model has other sizes than in the file.
    """
    yield from _steps(config, setup)
    yield from _schedule(config, setup.steps)
    yield from _checkpoints(config, setup.steps)
    yield from _parallel(config, setup)
    if (target := config.context.device_target) is not None:
        yield NewValue("context.device_target", setup.device, f"this machine has no {target}")
    yield from _weights(config, is_smaller)
    if config.distillation is not None:
        yield NewValue("loss", None, "the small model has no teacher with its vocabulary")
    yield NewValue("output_dir", str(setup.folder))
    yield NewValue("log_format", "plain")
    yield NewValue("worker_log_dir", None)
    yield NewValue("report", after=False)
    yield NewValue("trackers", [], "a smoke run is not recorded")
    yield NewValue("tensorboard.tensorboard_dir", None, "a smoke run is not recorded")
    yield NewValue("sample_prompt", None, "a smoke run samples no text")
    yield NewValue("profile", after=False)
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, ProfileMonitor):  # what it writes stays in the folder of the smoke run
            yield NewValue(f"callbacks.{number}.output_path", None)


def smoke_batch_size(config: Config) -> int:
    """Returns the micro-batch size of the smoke run."""
    return min(config.runner_config.batch_size, _BATCH_SIZE)


def micro_batches(config: Config) -> int:
    """Returns the micro-batches of a step, with gradient accumulation or in a pipeline."""
    parallel = config.parallel_config
    number = config.runner_config.gradient_accumulation_steps
    if config.use_parallel and parallel.pipeline_stage > 1:
        number = max(number, parallel.micro_batch_num)
    return min(number, _MICRO_BATCHES)


def _steps(config: Config, setup: Setup) -> Iterator[NewValue]:
    runner = "runner_config"
    epochs = setup.steps  # the file's own data may have fewer rows than the steps need
    if "train_dataset" in setup.missing:
        epochs = 1
    yield NewValue(f"{runner}.epochs", epochs, f"{setup.steps} steps")
    yield NewValue(f"{runner}.stop_step", setup.steps, f"{setup.steps} steps")
    yield NewValue(f"{runner}.batch_size", smoke_batch_size(config), _SMALLER)
    accumulated = config.runner_config.gradient_accumulation_steps
    section = config.parallel_config
    if setup.layout.degrees.pipeline_stage > 1:
        yield NewValue("parallel_config.micro_batch_num", _MICRO_BATCHES, _SMALLER)
        yield NewValue(f"{runner}.gradient_accumulation_steps", 1, "in a pipeline it is micro_batch_num")
    else:
        why = _SMALLER
        if micro_batches(config) > accumulated:
            why = f"in place of the {section.micro_batch_num} micro-batches of the pipeline"
        yield NewValue("parallel_config.micro_batch_num", 1)
        yield NewValue(f"{runner}.gradient_accumulation_steps", micro_batches(config), why)
    if config.runner_config.rampup_batch_size is not None:
        rows = smoke_batch_size(config) * setup.layout.degrees.data_parallel
        yield NewValue(f"{runner}.rampup_batch_size", [rows, rows, rows], _SMALLER)
    yield NewValue("resume_training", after=False, why="it trains first, and resumes that training")


def _schedule(config: Config, steps: int) -> Iterator[NewValue]:
    schedule = config.lr_schedule
    for name, most in _PHASES.items():
        if (getattr(schedule, name, None) or 0) > most:
            yield NewValue(f"lr_schedule.{name}", most, f"the run has {steps} steps")
    for name in ("warmup_ratio", "decay_ratio"):
        if 0 < (getattr(schedule, name, None) or 0) < 1 / steps:
            yield NewValue(f"lr_schedule.{name}", round(1 / steps + 0.005, 2), "one of the steps")
    yield NewValue("lr_schedule.total_steps", steps, f"the run has {steps} steps")


def _checkpoints(config: Config, steps: int) -> Iterator[NewValue]:
    every = steps - 1
    kept = 2
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, CheckpointMonitor):
            why = "it resumes from the step before the last"
            yield NewValue(f"callbacks.{number}.save_checkpoint_steps", every, why)
            most = max(callback.keep_checkpoint_max, kept)
            yield NewValue(f"callbacks.{number}.keep_checkpoint_max", most, why)
            return
    monitor = {"type": "CheckpointMonitor", "save_checkpoint_steps": every, "keep_checkpoint_max": kept}
    yield NewValue(f"callbacks.{len(config.callbacks)}", monitor, "it saves, and resumes", None)


def _parallel(config: Config, setup: Setup) -> Iterator[NewValue]:
    """Yields the degrees of the layout, in explicit mode."""
    section = config.parallel_config
    ranks = setup.ranks
    degrees = setup.layout.degrees
    job = "one process; --ranks starts several"
    if ranks > 1:
        job = f"--ranks {ranks}"
    if config.use_parallel or ranks > 1:
        yield NewValue("use_parallel", ranks > 1, job)
    reasons = {name: setup.left_out.get(name, job) for name in degrees._fields}
    for name, degree in degrees._asdict().items():
        if degree > 1:
            reasons[name] = f"{job}, {degree} for each kind of parallelism"
    reasons["data_parallel"] = job
    if ranks == 1 and section.data_parallel is None:
        reasons["data_parallel"] = ""
    if config.use_parallel is False:
        reasons = {}
    for name in ("data_parallel", *(name for name in degrees._fields if name != "data_parallel")):
        yield NewValue(f"parallel_config.{name}", getattr(degrees, name), reasons.get(name, ""))
    yield from _pipeline(config, degrees.pipeline_stage)
    yield from _mode(config, setup)


def _pipeline(config: Config, stages: int) -> Iterator[NewValue]:
    """Yields the stages' layers in equal shares."""
    decoder = config.decoder
    model = "model.model_config"
    if isinstance(decoder.offset, list) or config.parallel_config.pipeline_stage > 1:
        why = "one stage has all layers"
        if stages > 1:
            why = "equal shares"
        yield NewValue(f"{model}.offset", 0, why)
    if config.parallel_config.pipeline_stage > 1:
        chunks = 1
        why = "one stage"
        if stages > 1:
            chunks = min(decoder.pp_interleave_num, CHUNKS)
            why = _SMALLER
        yield NewValue(f"{model}.pp_interleave_num", chunks, why)
    if stages > 1:
        yield NewValue("parallel.pipeline_config.pipeline_scheduler", "1f1b", "explicit mode has no other one")


def _mode(config: Config, setup: Setup) -> Iterator[NewValue]:
    mode = config.parallel.parallel_mode
    ranks = setup.ranks
    supported = [*DATA_PARALLEL]
    if ranks == 1:
        supported.append("stand_alone")
    if mode not in supported:
        yield NewValue("parallel.parallel_mode", 0, "explicit mode: the others run on an Ascend only")
    yield NewValue("parallel.parallel_fallback", None)
    if ranks == 1 or not config.parallel.enable_parallel_optimizer:
        return
    key = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    yield NewValue(key, -1, "all data-parallel ranks, of which there are fewer")
    threshold = config.parallel.parallel_optimizer_config.parallel_optimizer_threshold
    if not setup.layout.shares:
        yield NewValue("parallel.enable_parallel_optimizer", after=False, why=setup.left_out.get(SHARING, ""))
    elif threshold > _SHARDED_KIB:
        key = "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
        yield NewValue(key, _SHARDED_KIB, "the ranks share the state of small matrices too")


def _weights(config: Config, is_smaller: bool) -> Iterator[NewValue]:
    """Yields new initial weights for a smaller model, and for weights that are not on this machine."""
    new = ("new weights: it is not here", "new weights: those have the full size")
    sizes = (f"it is not here: a small {config.model.arch.type}", "the folder gave sizes and tokenizer")
    keys = (("load_checkpoint", "", new), ("adapter_id", None, new), ("pretrained_model_dir", None, sizes))
    for key, empty, whys in keys:
        path = getattr(config, key)
        exists = bool(path) and Path(path).expanduser().exists()
        if path and (is_smaller or not exists):
            yield NewValue(key, empty, whys[exists])
    name = "model.model_config.checkpoint_name_or_path"
    if value_of(config, name):
        yield NewValue(name, None)
