"""A run from its configuration to its exit code: prepare, fit, finish. Ties the rooms together.

Preparing needs no MindSpore, and nothing here imports it before that is done: mistakes in configuration, data and
checkpoints end a run within a second.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.adapters import base_record, load_initial_weights
from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.hugging_face import folder_files
from trainer.checkpoint.state import Position
from trainer.checkpoint.store import prepare_folder, rename_old_checkpoints
from trainer.config import dump_config
from trainer.config.checks.moe import watches_drop_rate
from trainer.config.checks.parallel import resolve_for_job
from trainer.device.stop_signals import EXIT_CODES, StopSignals
from trainer.errors import EXIT_OK, RunError
from trainer.launch import heartbeat
from trainer.monitors.console import console_monitor, log_file_monitor, no_details, worker_log_monitor
from trainer.monitors.files import lock_folder, write_text
from trainer.monitors.formatting import drop_rate_lines
from trainer.monitors.jsonl import JsonlMonitor, SamplesMonitor
from trainer.monitors.metrics import Monitor, RunInfo, RunSummary, Totals
from trainer.monitors.services import tracker_monitors
from trainer.monitors.training_state import TrainingStateLog, TrainingStateRecords
from trainer.ops.select import kernel_notes, on_arrays
from trainer.optim.freeze import trained_shapes
from trainer.parallel.world import World, world_from_environment
from trainer.plan.render import plan_text
from trainer.report.monitor import ReportMonitor
from trainer.report.samples import SAMPLES_FILE
from trainer.report.starts import StartMonitor
from trainer.run.evaluate import eval_run
from trainer.run.generation import Sampler
from trainer.run.prepare import PreparedRun, local_shard_specs, prepare_run
from trainer.run.training import (
    Engine,
    Events,
    Job,
    Progress,
    advance_profile,
    agree,
    collect_rank_flags,
    early_stop,
    evaluate_if_due,
    has_ended,
    open_engine,
    report_step,
    sample,
    save,
    save_if_due,
)

if TYPE_CHECKING:
    from trainer.checkpoint.state import ResumedCheckpoint
    from trainer.config import Config
    from trainer.data import Batch
    from trainer.step.train_step import StepResult


def run(config: Config, extra_monitors: Sequence[Monitor] = ()) -> int:
    """Does what `run_mode` says and returns the exit code.

    Args:
        config: Checked by `load_config`.
        extra_monitors: Told of everything beside the usual monitors, for example by a benchmark.

    Raises:
        UserError: Bad input (exit code 2).
        RunError: The run failed (exit code 1).
    """
    world = world_from_environment()
    config = resolve_for_job(config, world)
    heartbeat.start()
    prepared = prepare_run(config, world)
    config = prepared.config
    if config.run_mode in ("predict", "chat"):
        from trainer.run.chat import chat
        from trainer.run.predict import predict

        for note in prepared.plan.notes if world.rank == 0 else ():
            print(f"note: {note}", file=sys.stderr)
        answer = predict
        if config.run_mode == "chat":
            answer = chat
        return answer(config, world, prepared.plan.device)
    if config.run_mode == "eval":
        return eval_run(config, world, prepared.plan)
    return _train(world, prepared, extra_monitors)


def _train(world: World, prepared: PreparedRun, extra_monitors: Sequence[Monitor]) -> int:
    """Run modes train and finetune. Several ranks train one model: each executes this with its own part of the data.
    Only rank 0 writes shared files."""
    config = prepared.config
    plan = prepared.plan
    resumed = prepared.resumed
    info = _run_info(world, prepared)
    notes = [*plan.notes, *kernel_notes(plan.model.kernels)]
    if again := info.restarted:
        notes.append(f"restart {again['number']} of {again['most']} on {again['ranks']} ranks: {again['reason']}")
    parts = local_shard_specs(config, world)
    if resumed is None:
        weights = load_initial_weights(config, notes.append, parts=parts, world=world)
    else:  # it takes its weights from the checkpoint that it resumes from
        weights = dict(resumed.weights)
        resumed.weights.clear()  # who prepared the run keeps them otherwise, in memory that it needs
    base = None
    if config.has_adapters:
        base = base_record(config, weights, parts)
    if world.rank == 0 and base is None:
        files = folder_files(config)
    else:
        files = {}
    sampler = None
    if config.sample_prompt:
        sampler = Sampler(config)
    with contextlib.ExitStack() as claimed:
        if world.rank == 0:
            claimed.enter_context(lock_folder(info.output_dir, config.source.where("output_dir")))
            prepare_folder(info.output_dir / "checkpoints")
        totals = Totals()
        monitors = [totals, *make_monitors(config, info.output_dir, world, plan.device), *extra_monitors]
        job = Job(config, world, plan, prepared.layout, info, Events(monitors), base, files,
                  TrainingStateRecords(config), sampler)  # fmt: skip
        progress = _first_progress(job, resumed, notes)
        summary = None
        try:
            for note in notes:
                job.events.note(note)
            if _has_nothing_to_do(job, progress):
                return EXIT_OK
            exit_code, summary = _train_job(job, progress, weights, resumed, totals)
            return exit_code
        finally:
            for monitor in monitors:
                monitor.close(summary)


def _train_job(
    job: Job, progress: Progress, weights: dict | None, resumed: ResumedCheckpoint | None, totals: Totals
) -> tuple[int, RunSummary | None]:
    """Trains; returns the exit code and the summary, which a run that was stopped before its first step has not."""
    events = job.events
    info = job.info
    with StopSignals() as stop:
        # An exception inside MindSpore's import would end in a crash: a signal there waits until it is over.
        # A launcher says so itself, and takes what MindSpore prints meanwhile off the terminal.
        with events.activity("loading MindSpore" if job.world.size == 1 else ""):
            engine = open_engine(job, progress, weights, resumed)
        agree(job, engine, progress, stop)
        if progress.stopped:
            events.note(f"stopped by {progress.stopped.name} before the first step")
            return EXIT_CODES[progress.stopped], None
        if job.world.rank == 0:
            _prepare_output(job)
        events.tell("on_start", info)
        fit(job, engine, progress, stop)
    outcome = "finished"
    if progress.stopped:
        outcome = f"stopped by {progress.stopped.name}"
    if not progress.stopped and progress.position.step < info.last_step:
        events.note(early_stop(job, progress))
        outcome = "stopped early"
    written = {"checkpoints": "checkpoints", "metrics": "metrics.jsonl", "log": "logs/rank-0.log"}
    if job.config.report:
        written["report"] = "report.html"
    paths = {name: info.output_dir / path for name, path in written.items()}
    exit_code = EXIT_OK
    if progress.stopped:
        exit_code = EXIT_CODES[progress.stopped]
    return exit_code, totals.summary(outcome, paths, engine.saver.waited_seconds)


def fit(job: Job, engine: Engine, progress: Progress, stop: StopSignals) -> None:
    """Trains to the last step, an early stop or a signal; always leaves a checkpoint of where it stopped."""
    try:
        train(job, engine, progress, stop)
        if engine.profiler is not None:
            engine.profiler.close()
        save(job, engine, progress)
        with job.events.activity("saving"):
            engine.saver.finish()
    except Exception:
        # What is being written is worth waiting for; the other ranks of a job may be gone.
        if job.world.size == 1:
            with contextlib.suppress(Exception):  # it must not hide the first one
                engine.saver.finish()
        raise
    finally:
        if engine.profiler is not None:
            with contextlib.suppress(Exception):  # of a run that fails: its error counts
                engine.profiler.close()


def train(job: Job, engine: Engine, progress: Progress, stop: StopSignals) -> None:
    """Does step after step, and between them what is due."""
    advance_profile(job, engine, progress)
    evaluate_if_due(job, engine, progress, stop)  # the run may have been stopped between a step and its evaluation
    while not has_ended(job, progress) and not progress.stopped:
        batches = job.plan.data.batches.loader.epoch(progress.position.epoch, progress.position.batch)
        with contextlib.closing(batches):
            for micro_batches, began, waited in _windows(batches, job.plan.steps.micro_batches):
                stop.renew()
                result = _located_step(engine, progress, micro_batches, stop)
                seconds = time.perf_counter() - began
                report_step(job, engine, progress, result, len(micro_batches), seconds, waited)
                agree(job, engine, progress, stop, result.rank_flags)
                advance_profile(job, engine, progress)
                evaluate_if_due(job, engine, progress, stop)
                save_if_due(job, engine, progress)
                if progress.stopped or has_ended(job, progress):
                    break
    sample(job, engine, progress, stop)


def _windows(batches: Iterator[Batch], size: int) -> Iterator[tuple[list[Batch], float, float]]:
    """Yields the micro-batches of each step, a last, partial window included; when the wait for them began, and its
    seconds."""
    while True:
        began = time.perf_counter()
        micro_batches = list(itertools.islice(batches, size))
        if not micro_batches:
            return
        yield micro_batches, began, time.perf_counter() - began


def _located_step(engine: Engine, progress: Progress, micro_batches: list[Batch], stop: StopSignals) -> StepResult:
    """Does a step; a failure says which step it was and which micro-batches it saw."""
    position = progress.position
    profiled = contextlib.nullcontext()
    if engine.profiler is not None:
        profiled = engine.profiler.step(position.step + 1, engine.step)
    try:
        with profiled:
            return engine.step(micro_batches, lambda: collect_rank_flags(stop, engine.saver))
    except RunError as error:
        first = position.batch + 1
        last = position.batch + len(micro_batches)
        where = f"step {position.step + 1} (epoch {position.epoch + 1}, micro-batches {first} to {last})"
        raise error.with_location(where) from error


# ---- before the first step ----


def _run_info(world: World, prepared: PreparedRun) -> RunInfo:
    config = prepared.config
    plan = prepared.plan
    resumed = prepared.resumed
    samples = plan.steps.micro_batches * plan.data.batches.loader.global_batch_size
    return RunInfo(
        output_dir=Path(config.output_dir).expanduser(),
        total_steps=plan.steps.total_steps,
        last_step=plan.steps.last_step,
        start_step=resumed.position.step if resumed else 0,
        epochs=plan.steps.epochs,
        steps_per_epoch=plan.steps.steps_per_epoch,
        resumed_from=prepared.resume_from,
        restarted=heartbeat.restarted(),
        compiles=not on_arrays(config, plan.device, world),
        samples_per_step=samples,
        ranks=world.size,
        flops_per_step=plan.steps.flops_per_row * samples,
    )


def _first_progress(job: Job, resumed: ResumedCheckpoint | None, notes: list[str]) -> Progress:
    """Returns where the run begins. In another output folder the best checkpoints so far are not at hand: the first
    evaluation is its best."""
    if resumed:
        position = resumed.position
        evaluations = resumed.evaluations
    else:
        position = Position()
        evaluations = EvalHistory()
    resumed_from = job.info.resumed_from
    if evaluations.best and resumed_from.resolve().parent != job.checkpoints.resolve():
        best = evaluations.best[0]
        evaluations = replace(evaluations, best=())
        which = f"the best checkpoint so far (step {best.step}, eval loss {best.loss:.4f})"
        notes.append(f"{which} stays in {resumed_from.parent}")
    return Progress(position, evaluations, saved_at=(position.step, evaluations.step))


def _has_nothing_to_do(job: Job, progress: Progress) -> bool:
    """Checks whether no step is to be made, and says so."""
    records = job.config.monitor_config
    if records.monitor_on and records.print_struct:
        names = "\n".join(trained_shapes(job.config))
        job.events.note(f"monitor_config.print_struct: no step is made; trained parameters:\n{names}")
        return True
    if not has_ended(job, progress):
        return False
    done = f"the checkpoint has done all {job.info.last_step} steps of this run"
    job.events.note(f"nothing to do: {early_stop(job, progress) or done}")
    return True


def _prepare_output(job: Job) -> None:
    """Prepares the output folder once the run is sure to start; notes what is moved out of the way."""
    aside = None
    if job.info.resumed_from is None:
        aside = rename_old_checkpoints(job.checkpoints)
    prepare_folder(job.checkpoints)
    write_text(job.info.output_dir / "config.yaml", dump_config(job.config))
    write_text(job.info.output_dir / "plan.txt", plan_text(job.plan))
    if aside:
        job.events.note(f"the checkpoints of an earlier training are now in {aside}")


def make_monitors(config: Config, folder: Path, world: World, device: str) -> list[Monitor]:
    """Returns the monitors of a rank: each has a log file; rank 0 has the console, the metrics and the report."""
    rank = world.rank
    every = next((entry.per_print_times for entry in config.callbacks if entry.type == "MFLossMonitor"), 1)
    details = no_details
    if watches_drop_rate(config):
        details = drop_rate_lines(config.decoder.moe_layers)
    logs = [log_file_monitor(folder / "logs" / f"rank-{rank}.log", every, details)]
    if config.worker_log_dir is not None:
        path = Path(config.worker_log_dir).expanduser() / f"worker_{rank}.log"
        logs.append(worker_log_monitor(path, config.log_format, every, details, anew=not config.resume_training))
    if rank > 0:
        return logs
    console = console_monitor(config.log_format, every, details=details)
    lines = [console, *logs]
    # Trackers before the lines, which show a last note.
    monitors = [*tracker_monitors(config, Events(lines).note), *lines, JsonlMonitor(folder / "metrics.jsonl")]
    monitors.append(SamplesMonitor(folder / SAMPLES_FILE))
    monitors.append(StartMonitor(folder, device, world.size))
    state = TrainingStateRecords(config)
    if state.goes_to("log"):
        monitors += [TrainingStateLog(state, monitor.write_line) for monitor in lines]
    if config.report:
        # After those whose files it reads are closed.
        monitors.append(ReportMonitor(folder, console.on_note, config.report_interval))
    return monitors
