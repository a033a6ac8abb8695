"""The training of a smoke run: the file's optimizer, wrapper and schedule for a few steps, on the available processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.config import Config
from trainer.config.checks.parallel import DATA_PARALLEL
from trainer.config.checks.problem import value_of
from trainer.config.schema.callbacks import CheckpointMonitor, ProfileMonitor
from trainer.smoke.changes import Change, Setup, change_key
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
    """Yields the changes of steps, schedule, checkpoints, parallel degrees, device and initial weights.

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
    if config.distillation is not None:
        yield from change_key(config, "loss", None, "the small model has no teacher with its vocabulary")
    yield from change_key(config, "output_dir", str(setup.folder))
    yield from change_key(config, "log_format", "plain")
    yield from change_key(config, "worker_log_dir", None)
    yield from change_key(config, "report", after=False)
    yield from change_key(config, "trackers", [], "a smoke run is not recorded")
    yield from change_key(config, "tensorboard.tensorboard_dir", None, "a smoke run is not recorded")
    yield from change_key(config, "sample_prompt", None, "a smoke run samples no text")
    yield from change_key(config, "profile", after=False)
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, ProfileMonitor):  # what it writes stays in the folder of the smoke run
            yield from change_key(config, f"callbacks.{number}.output_path", None)


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


def _steps(config: Config, setup: Setup) -> Iterator[Change]:
    runner = "runner_config"
    epochs = setup.steps  # the file's own data may have fewer rows than the steps need
    if "train_dataset" in setup.missing:
        epochs = 1
    yield from change_key(config, f"{runner}.epochs", epochs, f"{setup.steps} steps")
    yield from change_key(config, f"{runner}.stop_step", setup.steps, f"{setup.steps} steps")
    yield from change_key(config, f"{runner}.batch_size", smoke_batch_size(config), _SMALLER)
    accumulated = config.runner_config.gradient_accumulation_steps
    section = config.parallel_config
    if setup.layout.degrees.pipeline_stage > 1:
        yield from change_key(config, "parallel_config.micro_batch_num", _MICRO_BATCHES, _SMALLER)
        yield from change_key(config, f"{runner}.gradient_accumulation_steps", 1, "in a pipeline it is micro_batch_num")
    else:
        why = _SMALLER
        if micro_batches(config) > accumulated:
            why = f"in place of the {section.micro_batch_num} micro-batches of the pipeline"
        yield from change_key(config, "parallel_config.micro_batch_num", 1)
        yield from change_key(config, f"{runner}.gradient_accumulation_steps", micro_batches(config), why)
    if config.runner_config.rampup_batch_size is not None:
        rows = smoke_batch_size(config) * setup.layout.degrees.data_parallel
        yield from change_key(config, f"{runner}.rampup_batch_size", [rows, rows, rows], _SMALLER)
    yield from change_key(config, "resume_training", after=False, why="it trains first, and resumes that training")


def _schedule(config: Config, steps: int) -> Iterator[Change]:
    schedule = config.lr_schedule
    for name, most in _PHASES.items():
        if (getattr(schedule, name, None) or 0) > most:
            yield from change_key(config, f"lr_schedule.{name}", most, f"the run has {steps} steps")
    for name in ("warmup_ratio", "decay_ratio"):
        if 0 < (getattr(schedule, name, None) or 0) < 1 / steps:
            yield from change_key(config, f"lr_schedule.{name}", round(1 / steps + 0.005, 2), "one of the steps")
    yield from change_key(config, "lr_schedule.total_steps", steps, f"the run has {steps} steps")


def _checkpoints(config: Config, steps: int) -> Iterator[Change]:
    every = steps - 1
    kept = 2
    for number, callback in enumerate(config.callbacks):
        if isinstance(callback, CheckpointMonitor):
            why = "it resumes from the step before the last"
            yield from change_key(config, f"callbacks.{number}.save_checkpoint_steps", every, why)
            most = max(callback.keep_checkpoint_max, kept)
            yield from change_key(config, f"callbacks.{number}.keep_checkpoint_max", most, why)
            return
    monitor = {"type": "CheckpointMonitor", "save_checkpoint_steps": every, "keep_checkpoint_max": kept}
    yield Change(f"callbacks.{len(config.callbacks)}", None, monitor, "it saves, and resumes")


def _parallel(config: Config, setup: Setup) -> Iterator[Change]:
    """Yields the degrees of the layout, in explicit mode."""
    section = config.parallel_config
    ranks = setup.ranks
    degrees = setup.layout.degrees
    job = "one process; --ranks starts several"
    if ranks > 1:
        job = f"--ranks {ranks}"
    if config.use_parallel or ranks > 1:
        yield from change_key(config, "use_parallel", ranks > 1, job)
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
        yield from change_key(config, f"parallel_config.{name}", getattr(degrees, name), reasons.get(name, ""))
    yield from _pipeline(config, degrees.pipeline_stage)
    yield from _mode(config, setup)


def _pipeline(config: Config, stages: int) -> Iterator[Change]:
    """Yields the stages' layers in equal shares."""
    decoder = config.decoder
    model = "model.model_config"
    if isinstance(decoder.offset, list) or config.parallel_config.pipeline_stage > 1:
        why = "one stage has all layers"
        if stages > 1:
            why = "equal shares"
        yield from change_key(config, f"{model}.offset", 0, why)
    if config.parallel_config.pipeline_stage > 1:
        chunks = 1
        why = "one stage"
        if stages > 1:
            chunks = min(decoder.pp_interleave_num, CHUNKS)
            why = _SMALLER
        yield from change_key(config, f"{model}.pp_interleave_num", chunks, why)
    if stages > 1:
        key = "parallel.pipeline_config.pipeline_scheduler"
        yield from change_key(config, key, "1f1b", "explicit mode has no other one")


def _mode(config: Config, setup: Setup) -> Iterator[Change]:
    mode = config.parallel.parallel_mode
    ranks = setup.ranks
    supported = [*DATA_PARALLEL]
    if ranks == 1:
        supported.append("stand_alone")
    if mode not in supported:
        yield from change_key(config, "parallel.parallel_mode", 0, "explicit mode: the others run on an Ascend only")
    yield from change_key(config, "parallel.parallel_fallback", None)
    if ranks == 1 or not config.parallel.enable_parallel_optimizer:
        return
    key = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    yield from change_key(config, key, -1, "all data-parallel ranks, of which there are fewer")
    threshold = config.parallel.parallel_optimizer_config.parallel_optimizer_threshold
    if not setup.layout.shares:
        why = setup.left_out.get(SHARING, "")
        yield from change_key(config, "parallel.enable_parallel_optimizer", after=False, why=why)
    elif threshold > _SHARDED_KIB:
        key = "parallel.parallel_optimizer_config.parallel_optimizer_threshold"
        yield from change_key(config, key, _SHARDED_KIB, "the ranks share the state of small matrices too")


def _device(config: Config, setup: Setup) -> Iterator[Change]:
    target = config.context.device_target
    if target is not None:
        yield from change_key(config, "context.device_target", setup.device, f"this machine has no {target}")


def _weights(config: Config, is_smaller: bool) -> Iterator[Change]:
    """Yields new initial weights for a smaller model, and for weights that are not on this machine."""
    for key in ("load_checkpoint", "adapter_id", "pretrained_model_dir"):
        path = getattr(config, key)
        exists = bool(path) and Path(path).expanduser().exists()
        if not path or (exists and not is_smaller):
            continue
        if key == "pretrained_model_dir" and exists:
            why = "the folder gave sizes and tokenizer"
        elif key == "pretrained_model_dir":
            why = f"it is not here: a small {config.model.arch.type}"
        elif exists:
            why = "new weights: those have the full size"
        else:
            why = "new weights: it is not here"
        empty = None
        if key == "load_checkpoint":
            empty = ""
        yield from change_key(config, key, empty, why)
    name = "model.model_config.checkpoint_name_or_path"
    if value_of(config, name):
        yield from change_key(config, name, None)
