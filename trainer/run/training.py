"""What a training consists of, and what it does between its steps: save, evaluate, sample, profile, report.

Three values: a `Job` is known before MindSpore loads, an `Engine` computes, a `Progress` changes from step to step. The
functions below are called by the loop (`trainer.run.loop`), on all ranks together.
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
from typing import TYPE_CHECKING, Any

from trainer.checkpoint.evaluations import EvalHistory, Evaluated
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Position, ResumedCheckpoint, save_stages
from trainer.config.checks.moe import watches_drop_rate
from trainer.data.batches.loader import optimizer_steps
from trainer.device.stop_signals import EXIT_CODES, StopSignals
from trainer.errors import RunError
from trainer.launch import heartbeat
from trainer.monitors.metrics import Monitor, RunInfo, StepMetrics, peak_rss_bytes, routing_details
from trainer.monitors.training_state import OPTIMIZER_NORMS, WEIGHT_NORM, TrainingStateRecords
from trainer.ops.select import on_arrays, precision_of
from trainer.optim.freeze import trained_shapes
from trainer.optim.schedules import build_schedule
from trainer.run.evaluate import evaluate_now
from trainer.run.generation import Sampler

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.parallel.world import World
    from trainer.plan.plan import Plan
    from trainer.profiling.window import StepProfiler
    from trainer.run.session import Session
    from trainer.step.train_step import StepResult, TrainStep


@dataclass(frozen=True)
class Events:
    """Tells the monitors what happens."""

    monitors: Sequence[Monitor]

    def tell(self, event: str, *values: object) -> None:
        """Calls a hook of `Monitor` by its name."""
        for monitor in self.monitors:
            getattr(monitor, event)(*values)

    def note(self, text: str) -> None:
        self.tell("on_note", text)

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Tells what the run does, which is no step."""
        self.tell("on_activity", name)
        try:
            yield
        finally:
            self.tell("on_activity", "")


@dataclass
class Progress:
    """How far a run is.

    Attributes:
        saved_at: Step, and step of the last evaluation, of the last checkpoint.
        sampled_at: The step after which text was sampled last.
        stopped: The signal that ends the run; all ranks have agreed on it.
    """

    position: Position
    evaluations: EvalHistory
    saved_at: tuple[int, int]
    sampled_at: int | None = None
    stopped: signal.Signals | None = None


@dataclass(frozen=True)
class Job:
    """A training that is checked and planned.

    Attributes:
        layout: What a position in the training data means, see `data_layout`.
        base: The record of the base model of adapters, see `base_record`.
        files: What other programs need beside the weights, see `folder_files`.
    """

    config: Config
    world: World
    plan: Plan
    layout: dict[str, Any]
    info: RunInfo
    events: Events
    base: Mapping[str, Any] | None
    files: Mapping[str, bytes]
    records: TrainingStateRecords
    sampler: Sampler | None

    @property
    def checkpoints(self) -> Path:
        return self.info.output_dir / "checkpoints"

    def beat(self, progress: Progress) -> None:
        """Gives the launcher a sign of life."""
        step = progress.position.step
        heartbeat.beat(step if step > self.info.start_step else None)


@dataclass(frozen=True)
class Engine:
    """What computes. `peak_flops` are those of all devices; None where they are not known."""

    step: TrainStep
    session: Session
    saver: Saver
    profiler: StepProfiler | None
    peak_flops: float | None


def open_engine(
    job: Job, progress: Progress, weights: dict[str, Any] | None, resumed: ResumedCheckpoint | None
) -> Engine:
    """Builds what computes; here MindSpore loads. Takes the arrays out of `weights`: the model has them then."""
    from trainer.run.session import Session

    config = job.config
    plan = job.plan
    events = job.events
    schedule = build_schedule(config.lr_schedule, plan.steps.total_steps, where=config.source.where)
    step = plan.backend.open(schedule, weights, plan.device)
    if weights is not None:
        weights.clear()
    session = Session(
        step.model, step.build_inputs, step.communicator, step.computes_together, step.pipeline, plan.device
    )
    plan.backend.check_layout(job.layout, session.communicator)
    saver = Saver(
        job.checkpoints,
        session.communicator,
        config.checkpoint_monitor.async_save,
        functools.partial(events.tell, "on_checkpoint"),
        lambda: job.beat(progress),
    )
    if resumed is not None:
        step.load_optimizer(resumed.optimizer, resumed.updates)
        if resumed.step:
            step.load_state(resumed.step)
    peak = None
    if job.world.rank == 0:
        from trainer.ops.peak import peak_flops

        peak = peak_flops(plan.device, precision_of(config, plan.device, job.world).compute.dtype, job.world.size)
    return Engine(step, session, saver, open_profiler(job), peak)


def open_profiler(job: Job) -> StepProfiler | None:
    """Returns what profiles the steps of this rank; None where none is to be."""
    config = job.config
    info = job.info
    device = job.plan.device
    section = config.profile_monitor
    if section is None:
        return None
    if not info.start_step < section.stop_step or section.start_step > info.last_step:
        steps = f"steps {info.start_step + 1} to {info.last_step}"
        job.events.note(f"profile: this run does {steps}, none of them is profiled")
        return None
    from trainer.profiling.window import StepProfiler, distributed_arguments, is_profiled

    if not is_profiled(section, config, job.world):
        return None
    folder = Path(section.output_path or info.output_dir).expanduser() / "profile" / f"rank_{job.world.rank}"
    native = on_arrays(config, device, job.world)
    return StepProfiler(section, folder, device, native, job.events.note, distributed_arguments(config, job.world))


# ---- signals ----


def collect_rank_flags(stop: StopSignals, saver: Saver) -> list[float]:
    """Returns 1 for the signal that has come to this rank and 0 for the others; then 1 if its part of a save is
    written."""
    return [*(float(stop.received == number) for number in EXIT_CODES), float(saver.is_ready)]


def agree(
    job: Job, engine: Engine, progress: Progress, stop: StopSignals, counts: Sequence[float] | None = None
) -> None:
    """Finds out whether a signal has come to any rank: acting on one's own alone would leave the others waiting.

    `counts` are those of a step, in which the question travels with other numbers, so that nobody waits for it. A
    process that is alone sees a signal that came later too.
    """
    if counts is None or job.world.size == 1:
        counts = engine.session.communicator.all_reduce_exact(collect_rank_flags(stop, engine.saver))
    *signals, ready = counts
    progress.stopped = next((number for number, count in zip(EXIT_CODES, signals, strict=True) if count), None)
    if ready == job.world.size:
        engine.saver.advance()


# ---- what is done between steps ----


def early_stop(job: Job, progress: Progress) -> str:
    """Returns why EarlyStop ends the run here; empty where it does not."""
    reason = progress.evaluations.stop_reason(job.config.early_stop)
    if reason:
        return f"early stop at step {progress.position.step}: {reason}"
    return ""


def has_ended(job: Job, progress: Progress) -> bool:
    return progress.position.step >= job.info.last_step or bool(early_stop(job, progress))


def advance_profile(job: Job, engine: Engine, progress: Progress) -> None:
    """Begins what is profiled, and ends it."""
    profiler = engine.profiler
    step = progress.position.step
    if profiler is None:
        return
    if profiler.is_due(step):
        with job.events.activity("writing the profile"):
            profiler.close()
    profiler.begin(step + 1, engine.step)


def evaluate_if_due(job: Job, engine: Engine, progress: Progress, stop: StopSignals) -> None:
    """Evaluates after the steps that the configuration names, and saves a model that is among the best."""
    config = job.config
    position = progress.position
    step = progress.position.step
    if progress.stopped or not config.do_eval or step == progress.evaluations.step:
        return
    epoch_ended = position.batch == 0 and position.epoch > 0
    by_step = config.eval_step_interval > 0 and step % config.eval_step_interval == 0
    by_epoch = config.eval_epoch_interval > 0 and epoch_ended and position.epoch % config.eval_epoch_interval == 0
    if not (by_step or by_epoch or step >= job.info.last_step):
        return
    data = job.plan.data.batches.evaluation
    assert data is not None, "do_eval without data is an error of the configuration"

    def on_batch(done: int, batches: int) -> None:
        job.beat(progress)
        job.events.tell("on_activity", "evaluating", done, batches)

    if epoch_ended:
        epoch = position.epoch
    else:
        epoch = position.epoch + 1
    with job.events.activity("evaluating"):
        metrics = evaluate_now(engine.session, data, stop, step, epoch, on_batch)
    agree(job, engine, progress, stop)
    if metrics is None:
        return
    job.events.tell("on_eval", metrics)
    evaluated = Evaluated(step, metrics.loss)
    progress.evaluations = progress.evaluations.with_evaluation(evaluated, config.checkpoint_monitor.keep_best)
    # The evaluation at stop_step may be one that a run without stop_step does not make.
    if config.early_stop is not None and (by_step or by_epoch):
        progress.evaluations = progress.evaluations.with_early_stop(evaluated, config.early_stop.min_delta)
    if evaluated in progress.evaluations.best:
        save(job, engine, progress)
    sample(job, engine, progress, stop)


def sample(job: Job, engine: Engine, progress: Progress, stop: StopSignals) -> None:
    """Samples text from the model, once a step; uses no random numbers of the training."""
    step = progress.position.step
    if job.sampler is None or progress.stopped or progress.sampled_at == step:
        return
    progress.sampled_at = step
    began = time.perf_counter()
    texts = None

    def asked_to_stop() -> bool:
        job.beat(progress)
        return bool(stop)

    with job.events.activity("sampling"):
        try:
            texts = job.sampler.sample(engine.session, asked_to_stop)
        except RunError as error:  # weights that are not finite, for which the training has rules of its own
            job.events.note(f"no sample of step {step}: {error}")
    if texts is not None:
        samples = list(zip(job.sampler.prompts, texts, strict=True))
        job.events.tell("on_samples", step, samples, time.perf_counter() - began)
    agree(job, engine, progress, stop)


def save(job: Job, engine: Engine, progress: Progress) -> None:
    """Saves a checkpoint where something has happened since the last one."""
    at = (progress.position.step, progress.evaluations.step)
    if progress.saved_at == at:
        return
    with job.events.activity("saving"):
        saver = engine.saver
        communicator = engine.session.communicator
        section = job.config.checkpoint_monitor
        saver.finish()  # before memory is taken for the next one
        began = time.perf_counter()
        saved = engine.step.state_dict_shard()
        make_stages = functools.partial(
            save_stages,
            job.checkpoints,
            replace(progress.position),
            saved,
            step_state=engine.step.state(),
            config=job.config,
            layout=job.layout,
            base=job.base,
            keep_max=section.keep_checkpoint_max,
            evaluations=progress.evaluations,
            files=job.files,
            rank=communicator.rank,
            ranks=communicator.size,
            beside_training=section.async_save,
        )
        del saved
        saver.waited_seconds += time.perf_counter() - began
        saver.save(make_stages, progress.position.step)
        progress.saved_at = at
        job.beat(progress)


def save_if_due(job: Job, engine: Engine, progress: Progress) -> None:
    every = job.config.checkpoint_monitor.save_checkpoint_steps
    if every and progress.position.step % every == 0:
        save(job, engine, progress)


# ---- what is told of a step ----


def report_step(
    job: Job, engine: Engine, progress: Progress, result: StepResult, micro_batches: int, seconds: float, waited: float
) -> None:
    """Counts a step of so many micro-batches, seconds in all and seconds of waiting for data; tells the monitors."""
    position = progress.position
    plan = job.plan.steps
    loader = job.plan.data.batches.loader
    sequences = micro_batches * loader.global_batch_size
    position.step += 1
    position.tokens += result.tokens
    position.batch += micro_batches
    epoch = position.epoch
    batch = position.batch
    if batch >= loader.batches_per_epoch:
        position.epoch = epoch + 1
        position.batch = 0
    job.beat(progress)
    _note_skipped(job, position.step, result)
    flops_per_second = sequences * plan.flops_per_row / seconds
    job.events.tell("on_step", StepMetrics(
        step=position.step,
        last_step=job.info.last_step,
        epoch=epoch + 1,
        epochs=plan.epochs,
        step_in_epoch=optimizer_steps(batch, plan.micro_batches),
        steps_per_epoch=plan.steps_per_epoch,
        loss=result.loss,
        lr=result.lr,
        global_norm=result.global_norm if math.isfinite(result.global_norm) else None,
        loss_scale=result.loss_scale,
        overflow=result.overflow,
        skipped=result.skipped,
        extra=result.losses,
        details=_details(job, engine, position.step, result),
        labels=job.config.network.labels_text,
        tokens=result.tokens,
        tokens_per_second=result.tokens / seconds,
        input_tokens_per_second=sequences * job.config.network.labels_per_sequence / seconds,
        flops_per_second=flops_per_second,
        mfu=flops_per_second / engine.peak_flops if engine.peak_flops else None,
        step_seconds=seconds,
        data_wait_seconds=waited,
        peak_rss_bytes=peak_rss_bytes(),
    ))  # fmt: skip


def _note_skipped(job: Job, step: int, result: StepResult) -> None:
    """Notes what a step left out. Overflow has a line of its own on the console."""
    if not result.updated and not result.overflow:
        job.events.note(f"step {step}: {result.skipped}: nothing was updated")
    elif result.empty_micro_batches:
        count = result.empty_micro_batches
        if count == 1:
            empty = "a micro-batch"
        else:
            empty = f"{count} micro-batches"
        job.events.note(f"step {step}: {empty} without a token that has a loss, left out")


def _details(job: Job, engine: Engine, step: int, result: StepResult) -> dict[str, object]:
    """Returns what only metrics.jsonl keeps of a step: norms of parameters, figures of MoE layers, time of waiting."""
    if result.local_norms:
        details: dict[str, object] = {"local_norm": result.local_norms}
    else:
        details = {}
    if job.world.size > 1 and result.reduce_seconds is not None:
        details["reduce_seconds"] = result.reduce_seconds
    if result.bubble_share is not None:
        details["bubble_share"] = result.bubble_share
    if engine.saver.waited_seconds:
        details["save_wait_seconds"] = engine.saver.waited_seconds
        engine.saver.waited_seconds = 0.0
    details |= _state_norms(job, engine, step)
    if result.router_rates is not None and watches_drop_rate(job.config):
        details |= routing_details(result.router_rates)
    return details


def _state_norms(job: Job, engine: Engine, step: int) -> dict[str, object]:
    """Returns the norms of weights and optimizer state that `monitor_config` asks for; all ranks call it."""
    if not job.records.is_due(step):
        return {}
    records = job.records
    kinds = [kind for kind, name in OPTIMIZER_NORMS.items() if records.asks_for(name)]
    if not (kinds or records.asks_for(WEIGHT_NORM)):
        return {}
    from trainer.step.state_norms import norm_of_weights, norms_of_state

    names = list(trained_shapes(job.config))
    communicator = engine.session.communicator
    saved = engine.step.state_dict_shard()
    if engine.session.computes_together and job.world.rank > 0:  # rank 0 has gathered them
        saved = saved._replace(weights={}, optimizer={})
    norms: dict[str, object] = {}
    if records.asks_for(WEIGHT_NORM):
        norms[WEIGHT_NORM] = norm_of_weights(saved, names, communicator)
    if kinds:
        by_kind = norms_of_state(saved, kinds, names, communicator)
    else:
        by_kind = {}
    return norms | {OPTIMIZER_NORMS[kind]: by_name for kind, by_name in by_kind.items() if by_name}
