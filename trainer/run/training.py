"""The parts of a training, and what it does between its steps: report, profile, evaluate, save, sample.

A `Training` is known before MindSpore loads, an `Engine` computes, and a `Progress` changes from step to step. The loop
(`trainer.run.loop`) calls the functions of this file on all ranks together.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.checkpoint.adapters import first_weights
from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Position, ResumedCheckpoint, save_stages
from trainer.config.checks.moe import watches_drop_rate
from trainer.data.batches.loader import TrainingBatches
from trainer.data.batches.step_sizes import StepSizes
from trainer.data.datasets import find_cache
from trainer.device.stop_signals import EXIT_CODES, StopSignals
from trainer.errors import RunError, UserError
from trainer.launch import heartbeat
from trainer.monitors.metrics import Monitor, RunInfo, StepMetrics, peak_rss_bytes, routing_details
from trainer.monitors.training_state import MAX_LOGIT, OPTIMIZER_NORMS, WEIGHT_NORM, TrainingStateRecords
from trainer.ops.select import on_arrays, precision_of
from trainer.optim.freeze import trained_shapes
from trainer.optim.schedules import build_schedule
from trainer.run.evaluate import evaluate_on_all_ranks
from trainer.run.generation import Sampler

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.runner import LossConfig
    from trainer.data import Batch
    from trainer.parallel.world import World
    from trainer.plan.plan import Plan
    from trainer.profiling.window import StepProfiler
    from trainer.run.session import Session
    from trainer.step.train_step import StepResult, TrainStep


@dataclass(frozen=True)
class Events:
    """Calls the hooks of all monitors."""

    monitors: Sequence[Monitor]

    def notify(self, hook: str, *values: object) -> None:
        """Calls a hook of `Monitor` by its name, on each monitor in turn."""
        for monitor in self.monitors:
            getattr(monitor, hook)(*values)

    def note(self, text: str) -> None:
        """Shows the user a note."""
        self.notify("on_note", text)

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Shows what the run does between its steps, until the block ends."""
        self.notify("on_activity", name)
        try:
            yield
        finally:
            self.notify("on_activity", "")


class StepBatch(NamedTuple):
    """The micro-batches of one optimizer step on this rank."""

    micro_batches: list[Batch]
    began: float  # when the wait for them began, by time.perf_counter
    wait_seconds: float


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        saved_at: The step of the last checkpoint, and the step of the last evaluation before it.
        sampled_at: The step after which text was sampled last.
        stopped_by: The signal that ends the run; all ranks have agreed on it.
    """

    position: Position
    evaluations: EvalHistory
    saved_at: tuple[int, int]
    sampled_at: int | None = None
    stopped_by: signal.Signals | None = None

    def next_step(self, sizes: StepSizes) -> int:
        """Returns the micro-batches of the next step, if no epoch ends in it."""
        return sizes.next_step(self.position.epoch * sizes.batches_per_epoch + self.position.batch)


@dataclass(frozen=True)
class Training:
    """A training that is checked and planned.

    Attributes:
        layout: The meaning of a position in the training data, see `data_layout`.
        base: The record of the base model of adapters, see `base_record`; None for a training of all weights.
        initial: What adapters have taken out of the base model, see `pop_initial`.
        files: Files that other programs need beside the weights, see `folder_files`.
        records: The records of `monitor_config`.
        sampler: Samples text during the training; None if the configuration has no `sample_prompt`.
    """

    config: Config
    world: World
    plan: Plan
    layout: dict[str, Any]
    info: RunInfo
    events: Events
    base: Mapping[str, Any] | None
    initial: Mapping[str, np.ndarray]
    files: Mapping[str, bytes]
    records: TrainingStateRecords
    sampler: Sampler | None

    @property
    def batches(self) -> TrainingBatches:
        """Returns the training data of this rank."""
        return require_training_batches(self.plan)

    @property
    def checkpoints(self) -> Path:
        """Returns the folder of the run's checkpoints."""
        return self.info.output_dir / "checkpoints"

    def send_heartbeat(self, progress: Progress) -> None:
        """Shows the launcher that this rank makes progress."""
        step = progress.position.step
        if step > self.info.start_step:
            heartbeat.beat(step)
        else:
            heartbeat.beat(None)


def require_training_batches(plan: Plan) -> TrainingBatches:
    """Returns the training data of a plan whose run mode trains."""
    batches = plan.data.batches
    assert isinstance(batches, TrainingBatches), "the plan of a training opens the training data"
    return batches


@dataclass(frozen=True)
class Engine:
    """What computes a training.

    Attributes:
        profiler: None if no step of this rank is profiled.
        peak_flops: Peak FLOP/s of all devices together; None if it is unknown.
    """

    step: TrainStep
    session: Session
    saver: Saver
    profiler: StepProfiler | None
    peak_flops: float | None


def open_engine(
    training: Training, progress: Progress, weights: dict[str, Any] | None, resumed: ResumedCheckpoint | None
) -> Engine:
    """Builds the engine, which imports MindSpore.

    Args:
        weights: The weights to begin with, by name. The mapping is emptied, so that their memory becomes free.
        resumed: The checkpoint that the run continues.
    """
    from trainer.run.session import Session

    config = training.config
    plan = training.plan
    events = training.events
    schedule = build_schedule(config.lr_schedule, plan.steps.total_steps, where=config.source.where)
    step = plan.backend.open(schedule, weights, plan.device)
    if config.preferences is not None and config.preferences.needs_reference:
        _attach_references(training, progress, step, weights, resumed)
    if weights is not None:
        weights.clear()
    session = Session(
        step.model, step.build_inputs, step.communicator, step.computes_together, step.pipeline, plan.device
    )
    plan.backend.check_layout(training.layout, session.communicator)
    saver = Saver(
        training.checkpoints,
        session.communicator,
        config.checkpoint_monitor.async_save,
        functools.partial(events.notify, "on_checkpoint"),
        lambda: training.send_heartbeat(progress),
    )
    if resumed is not None:
        if config.distillation is not None:
            _check_teacher(config.distillation, config, step.teacher, resumed)
        step.load_optimizer(resumed.optimizer, resumed.updates)
        if resumed.step:
            step.load_state(resumed.step)
    peak = None
    if training.world.rank == 0:
        from trainer.ops.peak import peak_flops

        precision = precision_of(config, plan.device, training.world)
        peak = peak_flops(plan.device, precision.compute.dtype, training.world.size)
    return Engine(step, session, saver, _open_profiler(training), peak)


def _attach_references(
    training: Training, progress: Progress, step: TrainStep, weights: Mapping[str, np.ndarray] | None,
    resumed: ResumedCheckpoint | None,
) -> None:  # fmt: skip
    """Gives the batches the log-probabilities of the weights with which the training began.

    If the run continues a checkpoint, its `weights` return to the model when these log-probabilities are known. Raises
    a UserError if the first weights are not those of the checkpoint's training.
    """
    from trainer.run.session import load_in_place
    from trainer.step.reference import attach_reference, digest_of_weights

    config = training.config
    model = step.model
    if resumed is not None:
        load_in_place(model, first_weights(config, training.world))
    precision = precision_of(config, training.plan.device, training.world)
    step.first_weights = digest_of_weights(model.parameters_by_name)
    before = None
    if resumed is not None:
        before = (resumed.step or {}).get("first_weights")
    if before not in (None, step.first_weights):
        rule = "the loss compares with the weights before the training, and these are others now"
        fix = "name the weights that the training began with, and keep seed and model"
        where = config.source.where("load_checkpoint")
        raise UserError(rule, where=where, key="load_checkpoint", value=config.load_checkpoint, fix=fix)
    settings = f"{config.decoder.model_dump_json()} {precision} {step.first_weights}"
    folder = find_cache(config, "train_dataset").path
    loaders = [training.batches.loader]
    if training.batches.evaluation is not None:
        loaders.append(training.batches.evaluation.loader)

    def on_batch(done: int, batches: int) -> None:
        """Shows the progress."""
        training.send_heartbeat(progress)
        training.events.notify("on_activity", "reference log-probabilities", done, batches)

    with training.events.activity("reference log-probabilities"):
        for loader in loaders:
            attach_reference(model, step.build_inputs, loader, settings, folder, step.communicator, on_batch)
    if resumed is not None and weights is not None:
        load_in_place(model, weights)


def _check_teacher(loss: LossConfig, config: Config, teacher: str, resumed: ResumedCheckpoint) -> None:
    """Raises a UserError if the teacher of this run has other weights than that of the checkpoint's training."""
    before = (resumed.step or {}).get("teacher")
    if before in (None, teacher):
        return
    rule = f"the training had another teacher (its SHA-256 is {before[:12]}..., that of this one is {teacher[:12]}...)"
    fix = "name the teacher of that training, with its teacher_dtype, or start a new run from its weights"
    where = config.source.where("loss.teacher")
    raise UserError(rule, where=where, key="loss.teacher", value=loss.teacher, fix=fix)


def _open_profiler(training: Training) -> StepProfiler | None:
    """Returns the profiler of this rank; None if no step of it is profiled."""
    config = training.config
    info = training.info
    device = training.plan.device
    section = config.profile_monitor
    if section is None:
        return None
    if info.start_step >= section.stop_step or section.start_step > info.last_step:
        steps = f"steps {info.start_step + 1} to {info.last_step}"
        profiled = f"steps {section.start_step} to {section.stop_step}"
        training.events.note(f"profile: no step is profiled; this run does {steps}, the profile covers {profiled}")
        return None
    from trainer.profiling.window import StepProfiler, distributed_arguments, is_profiled

    if not is_profiled(section, config, training.world):
        return None
    folder = Path(section.output_path or info.output_dir).expanduser() / "profile" / f"rank_{training.world.rank}"
    native = on_arrays(config, device, training.world)
    layout = distributed_arguments(config, training.world)
    return StepProfiler(section, folder, device, native, training.events.note, layout)


# ---- what the ranks tell each other with each step ----


def collect_rank_flags(stop: StopSignals, saver: Saver) -> list[float]:
    """Returns the flags of this rank: one for each stop signal, and one for "my checkpoint shard is written"."""
    return [*(float(stop.received == number) for number in EXIT_CODES), float(saver.is_ready)]


def sync_rank_flags(
    training: Training, engine: Engine, progress: Progress, stop: StopSignals, flag_sums: Sequence[float] | None = None
) -> None:
    """Stops all ranks after a signal to any of them, and continues a save when all ranks have written their shard.

    Args:
        flag_sums: The flags, summed over all ranks by an all-reduce of the step, which thus costs no time of its own.
            None, and a job of one rank, sum them here; one rank thus sees a signal that came later, too.
    """
    if flag_sums is None or training.world.size == 1:
        flag_sums = engine.session.communicator.all_reduce_exact(collect_rank_flags(stop, engine.saver))
    *signal_counts, ready_count = flag_sums
    received = (number for number, count in zip(EXIT_CODES, signal_counts, strict=True) if count)
    progress.stopped_by = next(received, None)
    if ready_count == training.world.size:
        engine.saver.advance()


# ---- what is done between steps ----


def early_stop_reason(training: Training, progress: Progress) -> str:
    """Returns why EarlyStop ends the run after this step; empty if it does not."""
    if reason := progress.evaluations.stop_reason(training.config.early_stop):
        return f"early stop at step {progress.position.step}: {reason}"
    return ""


def is_over(training: Training, progress: Progress) -> bool:
    """Returns whether the training ends here: by a stop signal, at its last step, or by an early stop."""
    if progress.stopped_by is not None or progress.position.step >= training.info.last_step:
        return True
    return bool(early_stop_reason(training, progress))


def advance_profile(training: Training, engine: Engine, progress: Progress) -> None:
    """Starts the profiler before the first profiled step, and writes the profile after the last one."""
    profiler = engine.profiler
    step = progress.position.step
    if profiler is None:
        return
    if profiler.is_due(step):
        with training.events.activity("writing the profile"):
            profiler.close()
    profiler.begin(step + 1, engine.step)


def evaluate_if_due(training: Training, engine: Engine, progress: Progress, stop: StopSignals) -> None:
    """Evaluates after the steps that the configuration names; saves a checkpoint if it is among the best ones."""
    config = training.config
    position = progress.position
    step = position.step
    if progress.stopped_by or not config.do_eval or step == progress.evaluations.step:
        return
    epoch_ended = position.batch == 0 and position.epoch > 0
    by_step = config.eval_step_interval > 0 and step % config.eval_step_interval == 0
    by_epoch = config.eval_epoch_interval > 0 and epoch_ended and position.epoch % config.eval_epoch_interval == 0
    if not (by_step or by_epoch or step >= training.info.last_step):
        return
    data = training.batches.evaluation
    assert data is not None, "do_eval without data is a configuration error"

    def on_batch(done: int, batches: int) -> None:
        training.send_heartbeat(progress)
        training.events.notify("on_activity", "evaluating", done, batches)

    epoch = position.epoch + 1
    if epoch_ended:
        epoch = position.epoch
    weights: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if config.use_ema and engine.step.averages is not None:
        weights = engine.step.averages.in_use(engine.step.model.compute_weights.refresh)
    with training.events.activity("evaluating"), weights:
        metrics = evaluate_on_all_ranks(engine.session, data, stop, step, epoch, on_batch)
    sync_rank_flags(training, engine, progress, stop)
    if metrics is None:
        return
    training.events.notify("on_eval", metrics)
    evaluations = progress.evaluations.with_evaluation(step, metrics.loss, config.checkpoint_monitor.keep_best)
    # A run without stop_step may not evaluate at that step, so EarlyStop does not count it.
    if config.early_stop is not None and (by_step or by_epoch):
        evaluations = evaluations.with_early_stop(step, metrics.loss, config.early_stop.min_delta)
    progress.evaluations = evaluations
    if any(each.step == step for each in evaluations.best):
        save_checkpoint_if_new(training, engine, progress)
    sample(training, engine, progress, stop)


def sample(training: Training, engine: Engine, progress: Progress, stop: StopSignals) -> None:
    """Samples text from the model, at most once after each step, without random numbers of the training."""
    step = progress.position.step
    if training.sampler is None or progress.stopped_by or progress.sampled_at == step:
        return
    progress.sampled_at = step
    began = time.perf_counter()
    texts = None

    def should_stop() -> bool:
        training.send_heartbeat(progress)
        return bool(stop)

    with training.events.activity("sampling"):
        try:
            texts = training.sampler.sample(engine.session, should_stop)
        except RunError as error:  # the weights are not finite: whether the training goes on is decided elsewhere
            training.events.note(f"step {step}: could not sample text: {error}")
    if texts is not None:
        samples = list(zip(training.sampler.prompts, texts, strict=True))
        training.events.notify("on_samples", step, samples, time.perf_counter() - began)
    sync_rank_flags(training, engine, progress, stop)


def save_checkpoint_if_new(training: Training, engine: Engine, progress: Progress) -> None:
    """Saves a checkpoint, unless the last one has the same step and evaluation."""
    saved_at = (progress.position.step, progress.evaluations.step)
    if progress.saved_at == saved_at:
        return
    with training.events.activity("saving"):
        saver = engine.saver
        communicator = engine.session.communicator
        section = training.config.checkpoint_monitor
        saver.finish()  # frees the memory of an earlier save first
        began = time.perf_counter()
        saved = engine.step.state_dict_shard()
        make_stages = functools.partial(
            save_stages,
            training.checkpoints,
            replace(progress.position),
            saved,
            step_state=engine.step.state(),
            config=training.config,
            layout=training.layout,
            base=training.base,
            initial=training.initial,
            keep_max=section.keep_checkpoint_max,
            evaluations=progress.evaluations,
            files=training.files,
            rank=communicator.rank,
            ranks=communicator.size,
            beside_training=section.async_save,
        )
        del saved
        saver.waited_seconds += time.perf_counter() - began
        saver.save(make_stages, progress.position.step)
        progress.saved_at = saved_at
        training.send_heartbeat(progress)


def save_if_due(training: Training, engine: Engine, progress: Progress) -> None:
    """Saves a checkpoint every `save_checkpoint_steps` steps."""
    every = training.config.checkpoint_monitor.save_checkpoint_steps
    if every and progress.position.step % every == 0:
        save_checkpoint_if_new(training, engine, progress)


# ---- what is reported of a step ----


def report_step(training: Training, engine: Engine, progress: Progress, batch: StepBatch, result: StepResult) -> None:
    """Advances the position of the run by a step that has just ended, and reports the step to the monitors."""
    seconds = time.perf_counter() - batch.began
    steps = training.plan.steps
    loader = training.batches.loader
    position = progress.position
    sequences = len(batch.micro_batches) * loader.global_batch_size
    position.step += 1
    position.tokens += result.tokens
    position.batch += len(batch.micro_batches)
    epoch = position.epoch
    batch_in_epoch = position.batch
    if batch_in_epoch >= loader.batches_per_epoch:
        position.epoch = epoch + 1
        position.batch = 0
    training.send_heartbeat(progress)
    _note_skipped(training, position.step, result)
    first_batch = epoch * loader.batches_per_epoch
    steps_before = steps.sizes.steps_until(first_batch)
    flops_per_second = sequences * steps.flops_per_row / seconds
    mfu = None
    if engine.peak_flops:
        mfu = flops_per_second / engine.peak_flops
    global_norm = None
    if math.isfinite(result.global_norm):
        global_norm = result.global_norm
    metrics = StepMetrics(
        step=position.step,
        last_step=training.info.last_step,
        epoch=epoch + 1,
        epochs=steps.epochs,
        step_in_epoch=steps.sizes.steps_until(first_batch + batch_in_epoch) - steps_before,
        steps_per_epoch=steps.sizes.steps_until(first_batch + loader.batches_per_epoch) - steps_before,
        loss=result.loss,
        lr=result.lr,
        global_norm=global_norm,
        loss_scale=result.loss_scale,
        overflow=result.overflow,
        skipped=result.skipped,
        extra=result.losses,
        details=_details(training, engine, position.step, sequences, result),
        labels=training.config.network.labels_text,
        tokens=result.tokens,
        samples=sequences,
        samples_seen=(steps.sizes.done_before + first_batch + batch_in_epoch) * loader.global_batch_size,
        tokens_per_second=result.tokens / seconds,
        input_tokens_per_second=sequences * training.config.network.labels_per_sequence / seconds,
        flops_per_second=flops_per_second,
        mfu=mfu,
        step_seconds=seconds,
        data_wait_seconds=batch.wait_seconds,
        peak_rss_bytes=peak_rss_bytes(),
    )
    training.events.notify("on_step", metrics)


def _note_skipped(training: Training, step: int, result: StepResult) -> None:
    """Notes what a step left out. The console has its own line for an overflow."""
    if not result.updated and not result.overflow:
        training.events.note(f"step {step}: update skipped, {result.skipped}")
    elif result.empty_micro_batches == 1:
        training.events.note(f"step {step}: one micro-batch has no loss, all of its labels are masked")
    elif result.empty_micro_batches:
        count = result.empty_micro_batches
        training.events.note(f"step {step}: {count} micro-batches have no loss, all of their labels are masked")


def _details(training: Training, engine: Engine, step: int, sequences: int, result: StepResult) -> dict[str, object]:
    """Returns the fields that only metrics.jsonl has: a growing batch, norms, rates of routers, waiting times."""
    details: dict[str, object] = {}
    if training.plan.steps.sizes.rampup is not None:
        details["global_batch_size"] = sequences
    if result.max_logits is not None and training.records.records_logits(step):
        logits_L = result.max_logits.max(1)
        details[MAX_LOGIT] = np.where(np.isfinite(logits_L), logits_L, np.array(None)).tolist()
    if result.clipped_heads is not None:
        details["clipped_heads"] = result.clipped_heads
    if result.local_norms:
        details["local_norm"] = result.local_norms
    if training.world.size > 1 and result.reduce_seconds is not None:
        details["reduce_seconds"] = result.reduce_seconds
    if result.bubble_share is not None:
        details["bubble_share"] = result.bubble_share
    if engine.saver.waited_seconds:
        details["save_wait_seconds"] = engine.saver.waited_seconds
        engine.saver.waited_seconds = 0.0
    details |= _state_norms(training, engine, step)
    if result.router_rates is not None and watches_drop_rate(training.config):
        details |= routing_details(result.router_rates)
    return details


def _state_norms(training: Training, engine: Engine, step: int) -> dict[str, object]:
    """Returns the norms of weights and optimizer state that `monitor_config` requests; all ranks call it together."""
    if not training.records.is_due(step):
        return {}
    records = training.records
    kinds = [kind for kind, name in OPTIMIZER_NORMS.items() if records.is_requested(name)]
    if not (kinds or records.is_requested(WEIGHT_NORM)):
        return {}
    from trainer.step.state_norms import norm_of_weights, norms_of_state

    names = list(trained_shapes(training.config))
    communicator = engine.session.communicator
    saved = engine.step.state_dict_shard()
    if engine.session.computes_together and training.world.rank > 0:  # rank 0 has gathered them
        saved = saved._replace(weights={}, optimizer={})
    norms: dict[str, object] = {}
    if records.is_requested(WEIGHT_NORM):
        norms[WEIGHT_NORM] = norm_of_weights(saved, names, communicator)
    if kinds:
        for kind, by_name in norms_of_state(saved, kinds, names, communicator).items():
            if by_name:
                norms[OPTIMIZER_NORMS[kind]] = by_name
    return norms
