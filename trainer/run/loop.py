"""A run from its configuration to its exit code, and the training loop: `train_steps`.

MindSpore is imported only after the run is prepared, so that an error in the configuration, the data or a checkpoint
ends a run within a second.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.adapter_values import pop_initial
from trainer.checkpoint.adapters import base_record, load_initial_weights
from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.hugging_face import folder_files
from trainer.checkpoint.state import Position
from trainer.checkpoint.store import check_checkpoint_folder, rename_old_checkpoints
from trainer.config import dump_config
from trainer.config.checks.moe import watches_drop_rate
from trainer.config.checks.parallel import resolve_for_job
from trainer.device.stop_signals import EXIT_CODES, StopSignals
from trainer.errors import EXIT_OK, RunError
from trainer.launch import heartbeat
from trainer.monitors.console import console_monitor, log_file_monitor
from trainer.monitors.files import lock_folder, write_text
from trainer.monitors.formatting import STEP_LINES
from trainer.monitors.jsonl import JsonlMonitor
from trainer.monitors.metrics import Monitor, RunInfo, RunSummary, Totals
from trainer.monitors.services import tracker_monitors
from trainer.monitors.training_state import TrainingStateLog, TrainingStateRecords
from trainer.ops.select import kernel_notes, on_arrays
from trainer.optim.freeze import trained_shapes
from trainer.parallel.world import World, is_scheduler, world_from_environment
from trainer.plan.ascend import samples_text
from trainer.plan.render import plan_text
from trainer.report.monitor import ReportMonitor
from trainer.report.starts import StartMonitor
from trainer.run.evaluate import run_evaluation
from trainer.run.generation import Sampler
from trainer.run.prepare import PreparedRun, end_scheduler, local_shard_specs, prepare_run, print_note
from trainer.run.training import (
    Engine,
    Events,
    Progress,
    StepBatch,
    Training,
    advance_profile,
    collect_rank_flags,
    early_stop_reason,
    evaluate_if_due,
    is_over,
    open_engine,
    report_step,
    sample,
    save_checkpoint_if_new,
    save_if_due,
    sync_rank_flags,
)

if TYPE_CHECKING:
    import numpy as np

    from trainer.checkpoint.state import ResumedCheckpoint
    from trainer.config import Config
    from trainer.step.train_step import StepResult


def run(config: Config, extra_monitors: Sequence[Monitor] = ()) -> int:
    """Does what `run_mode` names and returns the exit code.

    Args:
        config: A configuration that `load_config` has checked.
        extra_monitors: They receive every event after the usual monitors, for example those of a benchmark.

    Raises:
        UserError: Bad input (exit code 2).
        RunError: The run failed (exit code 1).
    """
    if is_scheduler():
        end_scheduler(config)
    world = world_from_environment()
    config = resolve_for_job(config, world)
    heartbeat.start()
    prepared = prepare_run(config, world)
    config = prepared.config
    if config.trains:
        return run_training(world, prepared, extra_monitors)
    if config.tasks:
        from trainer.run.harness.tasks import run_tasks

        return run_tasks(config, prepared.plan)
    if config.run_mode == "eval":
        return run_evaluation(config, world, prepared.plan)
    if world.rank == 0:
        for note in prepared.plan.notes:
            print_note(note)
    if config.run_mode == "chat":
        from trainer.run.chat import chat

        return chat(config, world, prepared.plan.device)
    from trainer.run.predict import predict

    return predict(config, world, prepared.plan.device)


def run_training(world: World, prepared: PreparedRun, extra_monitors: Sequence[Monitor]) -> int:
    """Runs modes train and finetune and returns the exit code.

    Each rank of a job calls this with its own part of the data. Only rank 0 writes shared files.
    """
    config = prepared.config
    plan = prepared.plan
    resumed = prepared.resumed
    info = _run_info(world, prepared)
    notes = [*plan.notes, *kernel_notes(plan.model.kernels)]
    if restart := info.restarted:
        notes.append(
            f"restart {restart['number']} of {restart['most']} on {restart['ranks']} ranks: {restart['reason']}"
        )
    shard_specs = local_shard_specs(config, world)
    if resumed is None:
        weights = load_initial_weights(config, notes.append, parts=shard_specs, world=world)
    else:
        weights = dict(resumed.weights)
        resumed.weights.clear()  # the prepared run would keep them in memory that the training needs
    base = None
    initial = pop_initial(weights or {})
    if config.has_adapters:
        base = base_record(config, weights or {}, shard_specs)
    files: Mapping[str, bytes] = {}
    if world.rank == 0 and base is None:
        files = folder_files(config, form=prepared.layout.get("record_form"))
    sampler = None
    if samples_text(config, world, plan.device):
        sampler = Sampler(config)
    summary = None
    with contextlib.ExitStack() as stack:
        if world.rank == 0:
            stack.enter_context(lock_folder(info.output_dir, config.source.where("output_dir")))
            check_checkpoint_folder(info.output_dir / "checkpoints")
        totals = Totals()
        monitors = [totals, *make_monitors(config, info.output_dir, world, plan.device), *extra_monitors]
        training = Training(
            config=config,
            world=world,
            plan=plan,
            layout=prepared.layout,
            info=info,
            events=Events(monitors),
            base=base,
            initial=initial,
            files=files,
            records=TrainingStateRecords(config),
            sampler=sampler,
        )

        def close_monitors() -> None:
            """Closes them in their order, also if one of them fails."""
            with contextlib.ExitStack() as closing:
                for monitor in reversed(monitors):
                    closing.callback(monitor.close, summary)

        stack.callback(close_monitors)
        progress = _first_progress(training, resumed, notes)
        for note in notes:
            training.events.note(note)
        if _has_nothing_to_do(training, progress):
            return EXIT_OK
        exit_code, summary = _train(training, progress, weights, resumed, totals)
        return exit_code


def _train(
    training: Training, progress: Progress, weights: dict[str, np.ndarray] | None, resumed: ResumedCheckpoint | None,
    totals: Totals,
) -> tuple[int, RunSummary | None]:  # fmt: skip
    """Builds the engine and trains with it.

    Returns the exit code and the summary. The summary is None if a signal stops the run before its first step.
    """
    events = training.events
    info = training.info
    with StopSignals(lambda second: events.notify("on_second_signal", f"stopped by {second.name}")) as stop:
        # An exception inside MindSpore's import would end in a crash: a signal there waits until it is over.
        # Of several ranks the launcher names this activity, and takes what MindSpore prints off the terminal.
        with events.activity("loading MindSpore" if training.world.size == 1 else ""):
            engine = open_engine(training, progress, weights, resumed)
        sync_rank_flags(training, engine, progress, stop)
        if progress.stopped_by:
            events.note(f"stopped by {progress.stopped_by.name} before the first step")
            return EXIT_CODES[progress.stopped_by], None
        if training.world.rank == 0:
            _prepare_output(training)
        events.notify("on_start", info)
        train_and_save(training, engine, progress, stop)
    exit_code = EXIT_OK
    outcome = "finished"
    if progress.stopped_by:
        exit_code = EXIT_CODES[progress.stopped_by]
        outcome = f"stopped by {progress.stopped_by.name}"
    elif progress.position.step < info.last_step:
        events.note(early_stop_reason(training, progress))
        outcome = "stopped early"
    written = {"checkpoints": "checkpoints", "metrics": "metrics.jsonl", "log": "logs/rank-0.log"}
    if training.config.report:
        written["report"] = "report.html"
    paths = {name: info.output_dir / path for name, path in written.items()}
    return exit_code, totals.summary(outcome, paths, engine.saver.waited_seconds)


def train_and_save(training: Training, engine: Engine, progress: Progress, stop: StopSignals) -> None:
    """Trains, then saves a checkpoint of the last step, also after an early stop or a stop signal."""
    try:
        train_steps(training, engine, progress, stop)
        if engine.profiler is not None:
            engine.profiler.close()
        save_checkpoint_if_new(training, engine, progress)
        with training.events.activity("saving"):
            engine.saver.finish()
    except Exception:
        # A checkpoint that is being written is completed. With several ranks this could wait for ranks that are gone.
        if training.world.size == 1:
            with contextlib.suppress(Exception):  # the first error is the one to report
                engine.saver.finish()
        raise
    finally:
        if engine.profiler is not None:
            with contextlib.suppress(Exception):  # after a failed step its error is the one to report
                engine.profiler.close()


def train_steps(training: Training, engine: Engine, progress: Progress, stop: StopSignals) -> None:
    """Trains step by step until the last step, an early stop or a stop signal; does between steps what is due.

    All ranks call the functions of the loop in the same order.
    """
    advance_profile(training, engine, progress)
    # An earlier run may have stopped between a step and its evaluation.
    evaluate_if_due(training, engine, progress, stop)
    with contextlib.closing(_step_batches(training, progress)) as batches:
        while not is_over(training, progress):
            batch = next(batches)
            stop.renew()
            result = _train_step(engine, progress, batch, stop)
            report_step(training, engine, progress, batch, result)
            sync_rank_flags(training, engine, progress, stop, result.rank_flags)
            advance_profile(training, engine, progress)
            evaluate_if_due(training, engine, progress, stop)
            save_if_due(training, engine, progress)
    sample(training, engine, progress, stop)


def _step_batches(training: Training, progress: Progress) -> Generator[StepBatch, None, None]:
    """Yields the micro-batches of each step from the run's position on, epoch after epoch.

    The last step of an epoch may have fewer micro-batches than the others. `report_step` advances the position.
    """
    sizes = training.plan.steps.sizes
    while True:
        position = progress.position
        with contextlib.closing(training.batches.loader.epoch(position.epoch, position.batch)) as micro_batches:
            began = time.perf_counter()
            while step_batches := list(itertools.islice(micro_batches, progress.next_step(sizes))):
                yield StepBatch(step_batches, began, time.perf_counter() - began)
                began = time.perf_counter()


def _train_step(engine: Engine, progress: Progress, batch: StepBatch, stop: StopSignals) -> StepResult:
    """Runs one optimizer step. An error names the step, its epoch and its micro-batches."""
    position = progress.position
    profiled: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if engine.profiler is not None:
        profiled = engine.profiler.step(position.step + 1, engine.step)
    try:
        with profiled:
            return engine.step(batch.micro_batches, lambda: collect_rank_flags(stop, engine.saver))
    except RunError as error:
        first = position.batch + 1
        last = position.batch + len(batch.micro_batches)
        where = f"step {position.step + 1} (epoch {position.epoch + 1}, micro-batches {first} to {last})"
        raise error.with_location(where) from error


# ---- before the first step ----


def _run_info(world: World, prepared: PreparedRun) -> RunInfo:
    config = prepared.config
    steps = prepared.plan.steps
    start_step = 0
    if prepared.resumed:
        start_step = prepared.resumed.position.step
    return RunInfo(
        output_dir=Path(config.output_dir).expanduser(),
        total_steps=steps.total_steps,
        last_step=steps.last_step,
        start_step=start_step,
        epochs=steps.epochs,
        steps_per_epoch=steps.steps_per_epoch,
        resumed_from=prepared.resume_from,
        restarted=heartbeat.restart_info(),
        compiles=not on_arrays(config, prepared.plan.device, world),
        ranks=world.size,
    )


def _first_progress(training: Training, resumed: ResumedCheckpoint | None, notes: list[str]) -> Progress:
    """Returns the position and the evaluations with which the run begins.

    A run that resumes from another output folder does not have the best checkpoints of that folder: a note says so,
    and its first evaluation becomes its best one.
    """
    if resumed:
        position = resumed.position
        evaluations = resumed.evaluations
    else:
        position = Position()
        evaluations = EvalHistory.empty()
    resumed_from = training.info.resumed_from
    if evaluations.best and resumed_from and resumed_from.resolve().parent != training.checkpoints.resolve():
        best = evaluations.best[0]
        evaluations = evaluations.model_copy(update={"best": []})
        best_text = f"the best checkpoint so far (step {best.step}, eval loss {best.loss:.4f})"
        notes.append(f"{best_text} stays in {resumed_from.parent}")
    return Progress(position, evaluations, saved_at=(position.step, evaluations.step))


def _has_nothing_to_do(training: Training, progress: Progress) -> bool:
    """Returns whether the run does no step, after a note that says why."""
    records = training.config.monitor_config
    if records.monitor_on and records.print_struct:
        names = "\n".join(trained_shapes(training.config))
        training.events.note(f"monitor_config.print_struct: no step is done; trained parameters:\n{names}")
        return True
    if not is_over(training, progress):
        return False
    reason = early_stop_reason(training, progress)
    if not reason:
        done = f"the checkpoint is at step {progress.position.step}"
        done += f", and this run ends after step {training.info.last_step}"
        reason = f"{done}; to train on, set more epochs or a later stop_step"
    training.events.note(f"nothing to do: {reason}")
    return True


def _prepare_output(training: Training) -> None:
    """Writes config.yaml and plan.txt; renames the checkpoints of an earlier training, with a note."""
    renamed_folder = None
    if training.info.resumed_from is None:
        renamed_folder = rename_old_checkpoints(training.checkpoints)
    check_checkpoint_folder(training.checkpoints)
    write_text(training.info.output_dir / "config.yaml", dump_config(training.config))
    write_text(training.info.output_dir / "plan.txt", plan_text(training.plan))
    if renamed_folder:
        training.events.note(f"the checkpoints of an earlier training are now in {renamed_folder}")


def make_monitors(config: Config, folder: Path, world: World, device: str) -> list[Monitor]:
    """Returns the monitors of a rank: each rank has a log file; rank 0 has the console, the metrics and the report."""
    rank = world.rank
    every = next((entry.per_print_times for entry in config.callbacks if entry.type == "MFLossMonitor"), 1)
    layers: Sequence[int] = ()
    if watches_drop_rate(config):
        layers = config.decoder.moe_layers
    lines = [log_file_monitor(folder / "logs" / f"rank-{rank}.log", every, layers)]
    if config.worker_log_dir is not None:
        path = Path(config.worker_log_dir).expanduser() / f"worker_{rank}.log"
        step_line = STEP_LINES[config.log_format]
        replaces = not config.resume_training
        lines.append(log_file_monitor(path, every, layers, step_line=step_line, stamp="", replaces=replaces))
    if rank > 0:
        return [*lines]
    console = console_monitor(config.log_format, every, moe_layers=layers)
    lines.insert(0, console)
    monitors: list[Monitor] = tracker_monitors(config, Events(lines).note)  # a tracker may end with a note for `lines`
    monitors += lines
    monitors.append(JsonlMonitor(folder / "metrics.jsonl"))
    monitors.append(StartMonitor(folder, device, world.size))
    state = TrainingStateRecords(config, world.size)
    if state.has_records("log"):
        monitors += [TrainingStateLog(state, monitor.write) for monitor in lines]
    if config.report:
        # It reads the files of the other monitors, which must be closed before it.
        monitors.append(ReportMonitor(folder, console.on_note, config.report_interval))
    return monitors
