"""A run from its configuration to its exit code: prepare, fit, finish. Ties the rooms together.

Preparing needs no MindSpore, and nothing here imports it before that is done: mistakes in configuration, data and
checkpoints end a run within a second.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.adapters import base_record, starting_weights
from trainer.checkpoint.evaluations import EvalHistory, Evaluated
from trainer.checkpoint.hugging_face import folder_files
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.state import Position, save_stages
from trainer.checkpoint.store import prepare_folder, put_aside
from trainer.config import dump_config
from trainer.config.checks.moe import watches_drop_rate
from trainer.config.checks.parallel import in_job
from trainer.data.batches.loader import optimizer_steps
from trainer.errors import EXIT_OK, RunError
from trainer.launch import heartbeat
from trainer.monitors.console import console_monitor, log_file_monitor, no_details, worker_log_monitor
from trainer.monitors.files import claimed_folder, write_text
from trainer.monitors.jsonl import JsonlMonitor, SamplesMonitor
from trainer.monitors.metrics import Monitor, RunInfo, StepMetrics, Totals, peak_rss_bytes, routing_details
from trainer.monitors.trackers import tracker_monitors
from trainer.monitors.training_state import OPTIMIZER_NORMS, WEIGHT_NORM, StateLog, TrainingState
from trainer.monitors.wording import drop_rate_lines
from trainer.ops.select import kernel_notices, on_arrays, precision_of
from trainer.optim.freeze import trained_shapes
from trainer.optim.schedules import build_schedule
from trainer.parallel.world import World, world_from_environment
from trainer.plan.render import plan_text
from trainer.report.monitor import ReportMonitor
from trainer.report.samples import SAMPLES_FILE
from trainer.report.starts import StartMonitor
from trainer.run.evaluate import eval_run, evaluate_now
from trainer.run.generation import Sampler
from trainer.run.prepare import Prepared, held_parts, prepare
from trainer.run.stop_signals import EXIT_CODES, StopSignals

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Batch
    from trainer.profiling.window import StepProfiler
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
    config = in_job(config, world)
    heartbeat.start()
    prepared = prepare(config, world)
    config = prepared.config
    if config.run_mode in ("predict", "chat"):
        from trainer.run.chat import chat
        from trainer.run.predict import predict

        for notice in prepared.plan.notices if world.rank == 0 else ():
            print(f"note: {notice}", file=sys.stderr)
        answer = chat if config.run_mode == "chat" else predict
        return answer(config, world, prepared.plan.device)
    if config.run_mode == "eval":
        return eval_run(config, world, prepared.plan)
    return _Training(config, world, prepared).run(extra_monitors)


def votes_of(stop: StopSignals, saver: Saver) -> list[float]:
    """1 for the signal that has come to this rank and 0 for the others; then 1 if its part of a save is written."""
    return [*(float(stop.received == number) for number in EXIT_CODES), float(saver.is_ready)]


class _Training:
    """One training run: run modes train and finetune.

    Several ranks train one model: each executes this code with its own part of the data. Only rank 0 writes shared
    files. All ranks agree that the run ends before any of them acts on it.
    """

    def __init__(self, config: Config, world: World, prepared: Prepared) -> None:
        self.config, self.world, self.plan = config, world, prepared.plan
        self.data, self.layout, self.resumed = prepared.plan.data, prepared.layout, prepared.resumed
        self.folder = Path(config.output_dir).expanduser()
        self.checkpoints = self.folder / "checkpoints"
        self.saves, self.early_stop = config.checkpoint_monitor, config.early_stop
        self.totals = Totals()
        self.monitors: list[Monitor] = []
        self.records = TrainingState(config)
        self.position = self.resumed.position if self.resumed else Position()
        self.evaluations = self.resumed.evaluations if self.resumed else EvalHistory()
        self.saved_at = (self.position.step, self.evaluations.step)
        self.sampler = Sampler(config) if config.sample_prompt else None
        self.sampled_at: int | None = None  # the step
        self.stopped: signal.Signals | None = None
        self.held = contextlib.ExitStack()
        self.profiler: StepProfiler | None = None
        self.peak_flops: float | None = None  # of all devices, as far as it is known
        self.info = RunInfo(
            output_dir=self.folder,
            total_steps=self.plan.total_steps,
            last_step=self.plan.last_step,
            start_step=self.position.step,
            epochs=self.plan.epochs,
            steps_per_epoch=self.plan.steps_per_epoch,
            resumed_from=prepared.resume_from,
            restarted=heartbeat.restarted(),
            compiles=not on_arrays(config, prepared.plan.device, world),
            samples_per_step=self.plan.micro_batches * self.data.loader.global_batch_size,
            ranks=world.size,
            flops_per_step=self.plan.flops_per_row * self.plan.micro_batches * self.data.loader.global_batch_size,
        )

    def run(self, extra_monitors: Sequence[Monitor]) -> int:
        with self.held:
            return self.run_prepared(self.prepare(), extra_monitors)

    def run_prepared(self, notices: Sequence[str], extra_monitors: Sequence[Monitor]) -> int:
        summary = None
        own = monitors_of(self.config, self.folder, self.world, self.plan.device)
        self.monitors = [self.totals, *own, *extra_monitors]
        try:
            for notice in notices:
                self.tell("on_notice", notice)
            records = self.config.monitor_config
            if records.monitor_on and records.print_struct:
                names = "\n".join(trained_shapes(self.config))
                self.tell("on_notice", f"monitor_config.print_struct: no step is made; trained parameters:\n{names}")
                return EXIT_OK
            if self.ended():
                done = f"the checkpoint has done all {self.info.last_step} steps of this run"
                self.tell("on_notice", f"nothing to do: {self.stops_early() or done}")
                return EXIT_OK
            with StopSignals() as stop:
                # An exception inside MindSpore's import would end in a crash: a signal there waits until it is over.
                # A launcher says so itself, and takes what MindSpore prints meanwhile off the terminal.
                with self.activity("loading MindSpore" if self.world.size == 1 else ""):
                    self.load_engine()
                self.agree(stop)
                if self.stopped:
                    self.tell("on_notice", f"stopped by {self.stopped.name} before the first step")
                    return EXIT_CODES[self.stopped]
                for notice in self.prepare_output() if self.world.rank == 0 else ():
                    self.tell("on_notice", notice)
                self.tell("on_start", self.info)
                self.fit(stop)
            outcome = f"stopped by {self.stopped.name}" if self.stopped else "finished"
            if not self.stopped and self.position.step < self.info.last_step:
                self.tell("on_notice", self.stops_early())
                outcome = "stopped early"
            written = {"checkpoints": "checkpoints", "metrics": "metrics.jsonl", "log": "logs/rank-0.log"}
            written |= {"report": "report.html"} if self.config.report else {}
            paths = {name: self.folder / path for name, path in written.items()}
            summary = self.totals.summary(outcome, paths, self.saver.waited_seconds)
            return EXIT_CODES[self.stopped] if self.stopped else EXIT_OK
        finally:
            with contextlib.suppress(Exception):  # of a run that fails: its error counts
                if self.profiler is not None:
                    self.profiler.close()
            for monitor in self.monitors:
                monitor.close(summary)

    def prepare(self) -> list[str]:
        """Reads the weights and claims the output folder; returns what the user should know."""
        notices = [*self.plan.notices, *kernel_notices(self.plan.kernels)]
        if again := self.info.restarted:
            notices.append(f"restart {again['number']} of {again['most']} on {again['ranks']} ranks: {again['reason']}")
        # A run that resumes takes its weights from the checkpoint it resumes from.
        parts = held_parts(self.config, self.world)
        if self.resumed:
            self.weights = dict(self.resumed.weights)
            self.resumed.weights.clear()  # who prepared the run keeps them otherwise, in memory that it needs
        else:
            self.weights = starting_weights(self.config, notices.append, parts=parts, world=self.world)
        self.base = base_record(self.config, self.weights, parts) if self.config.has_adapters else None
        self.files = folder_files(self.config) if self.world.rank == 0 and self.base is None else {}
        if self.world.rank == 0:
            self.held.enter_context(claimed_folder(self.folder, self.config.source.where("output_dir")))
            prepare_folder(self.checkpoints)
        return notices + self.leave_best_behind()

    def leave_best_behind(self) -> list[str]:
        """In another output folder the best checkpoints so far are not at hand: the first evaluation is its best."""
        resumed_from = self.info.resumed_from
        if not self.evaluations.best or resumed_from.resolve().parent == self.checkpoints.resolve():
            return []
        best = self.evaluations.best[0]
        self.evaluations = replace(self.evaluations, best=())
        which = f"the best checkpoint so far (step {best.step}, eval loss {best.loss:.4f})"
        return [f"{which} stays in {resumed_from.parent}"]

    def prepare_output(self) -> list[str]:
        """Prepares the output folder once the run is sure to start; returns notes on files moved out of the way."""
        aside = put_aside(self.checkpoints) if self.info.resumed_from is None else None
        prepare_folder(self.checkpoints)
        write_text(self.folder / "config.yaml", dump_config(self.config))
        write_text(self.folder / "plan.txt", plan_text(self.plan))
        return [f"the checkpoints of an earlier training are now in {aside}"] if aside else []

    def load_engine(self) -> None:
        """Builds what computes; here MindSpore loads."""
        from trainer.run.session import Session

        backend = self.plan.backend
        schedule = build_schedule(self.config.lr_schedule, self.plan.total_steps, where=self.config.source.where)
        weights, self.weights = self.weights, None  # the model has them then
        self.step = backend.open(schedule, weights, self.plan.device)
        del weights
        step = self.step
        self.session = Session(
            step.model, step.build_inputs, step.communicator, step.computes_together, step.pipeline, self.plan.device
        )
        backend.check_layout(self.layout, self.session.communicator)
        communicator, beside = self.session.communicator, self.saves.async_save
        self.saver = Saver(self.checkpoints, communicator, beside, self.tell_saved, self.beat)
        if self.resumed:
            self.step.load_optimizer(self.resumed.optimizer, self.resumed.updates)
        if self.resumed and self.resumed.step:
            self.step.load_state(self.resumed.step)
        self.resumed = None
        self.profiler = self.open_profiler()
        if self.world.rank == 0:
            from trainer.ops.peak import peak_flops

            products = precision_of(self.config, self.plan.device, self.world).compute.dtype
            self.peak_flops = peak_flops(self.plan.device, products, self.world.size)

    def open_profiler(self) -> StepProfiler | None:
        """What profiles the steps of this rank; None where none is to be."""
        section, config = self.config.profile_monitor, self.config
        if section is None:
            return None
        if not self.info.start_step < section.stop_step or section.start_step > self.info.last_step:
            steps = f"steps {self.info.start_step + 1} to {self.info.last_step}"
            self.tell("on_notice", f"profile: this run does {steps}, none of them is profiled")
            return None
        from trainer.profiling.window import StepProfiler, distributed_arguments, is_profiled

        if not is_profiled(section, config, self.world):
            return None
        folder = Path(section.output_path or self.folder).expanduser() / "profile" / f"rank_{self.world.rank}"
        native = on_arrays(config, self.plan.device, self.world)
        notice, layout = functools.partial(self.tell, "on_notice"), distributed_arguments(config, self.world)
        return StepProfiler(section, folder, self.plan.device, native, notice, layout)

    def agree(self, stop: StopSignals, counts: Sequence[float] | None = None) -> None:
        """Finds out whether a signal has come to any rank: acting on one's own alone would leave the others waiting.

        `counts` are those of a step, in which the question travels with other numbers, so that nobody waits for it. A
        process that is alone sees a signal that came later too.
        """
        if counts is None or self.world.size == 1:
            counts = self.session.communicator.all_sum(votes_of(stop, self.saver))
        *signals, ready = counts
        self.stopped = next((number for number, count in zip(EXIT_CODES, signals, strict=True) if count), None)
        if ready == self.world.size:
            self.saver.advance()

    def fit(self, stop: StopSignals) -> None:
        """Trains to the last step, an early stop or a signal; always leaves a checkpoint of where it stopped."""
        try:
            self.train(stop)
            if self.profiler is not None:
                self.profiler.close()
            self.save()
            with self.activity("saving"):
                self.saver.finish()
        except Exception:
            # What is being written is worth waiting for; the other ranks of a job may be gone.
            if self.world.size == 1:
                with contextlib.suppress(Exception):  # it must not hide the first one
                    self.saver.finish()
            raise

    def advance_profile(self) -> None:
        """Between two steps: begins what is profiled, and ends it."""
        if self.profiler is None:
            return
        if self.profiler.is_due(self.position.step):
            with self.activity("writing the profile"):
                self.profiler.close()
        self.profiler.begin(self.position.step + 1, self.step)

    def train(self, stop: StopSignals) -> None:
        self.advance_profile()
        self.evaluate_if_due(stop)  # the run may have been stopped between a step and its evaluation
        while not self.ended() and not self.stopped:
            batches = self.data.loader.epoch(self.position.epoch, self.position.batch)
            with contextlib.closing(batches):
                for metrics, votes in self.epoch_steps(batches, stop):
                    self.beat()
                    self.tell("on_step", metrics)
                    self.agree(stop, votes)
                    self.advance_profile()
                    if not self.stopped:
                        self.evaluate_if_due(stop)
                    every = self.saves.save_checkpoint_steps
                    if every and self.position.step % every == 0:
                        self.save()
                    if self.stopped or self.ended():
                        break
        self.sample(stop)

    def ended(self) -> bool:
        return self.position.step >= self.info.last_step or bool(self.stops_early())

    def stops_early(self) -> str:
        """Why EarlyStop ends the run here; empty where it does not."""
        reason = self.evaluations.stop_reason(self.early_stop)
        return f"early stop at step {self.position.step}: {reason}" if reason else ""

    def epoch_steps(
        self, batches: Iterator[Batch], stop: StopSignals
    ) -> Iterator[tuple[StepMetrics, Sequence[float] | None]]:
        """Does the steps of what is left of the current epoch, the last, partial window included; with their votes."""
        while True:
            began = time.perf_counter()
            micro_batches = list(itertools.islice(batches, self.plan.micro_batches))
            if not micro_batches:
                return
            waited = time.perf_counter() - began
            stop.renew()
            result = self.located_step(micro_batches, stop)
            yield self.after_step(result, len(micro_batches), time.perf_counter() - began, waited), result.votes

    def located_step(self, micro_batches: list[Batch], stop: StopSignals) -> StepResult:
        """Does a step; a failure says which step it was and which micro-batches it saw."""
        profiled = contextlib.nullcontext()
        if self.profiler is not None:
            profiled = self.profiler.step(self.position.step + 1, self.step)
        try:
            with profiled:
                return self.step(micro_batches, lambda: votes_of(stop, self.saver))
        except RunError as error:
            position = self.position
            first, last = position.batch + 1, position.batch + len(micro_batches)
            where = f"step {position.step + 1} (epoch {position.epoch + 1}, micro-batches {first} to {last})"
            raise error.at(where) from error

    def after_step(self, result: StepResult, micro_batches: int, seconds: float, waited: float) -> StepMetrics:
        position, config = self.position, self.config
        sequences = micro_batches * self.data.loader.global_batch_size
        position.step += 1
        position.tokens += result.tokens
        position.batch += micro_batches
        epoch, batch = position.epoch, position.batch
        if batch >= self.data.loader.batches_per_epoch:
            position.epoch, position.batch = epoch + 1, 0
        self.tell_what_was_skipped(result)
        flops_per_second = sequences * self.plan.flops_per_row / seconds
        return StepMetrics(
            step=position.step,
            last_step=self.info.last_step,
            epoch=epoch + 1,
            epochs=self.plan.epochs,
            step_in_epoch=optimizer_steps(batch, self.plan.micro_batches),
            steps_per_epoch=self.plan.steps_per_epoch,
            loss=result.loss,
            lr=result.lr,
            global_norm=result.global_norm if math.isfinite(result.global_norm) else None,
            loss_scale=result.loss_scale,
            overflow=result.overflow,
            skipped=result.skipped,
            extra=result.losses,
            details=self.details(result),
            labels=config.network.labels_text,
            tokens=result.tokens,
            tokens_per_second=result.tokens / seconds,
            input_tokens_per_second=sequences * config.network.labels_per_sequence / seconds,
            flops_per_second=flops_per_second,
            mfu=flops_per_second / self.peak_flops if self.peak_flops else None,
            step_seconds=seconds,
            data_wait_seconds=waited,
            peak_rss_bytes=peak_rss_bytes(),
        )

    def details(self, result: StepResult) -> dict[str, object]:
        """What only metrics.jsonl keeps of a step: norms of parameters, figures of MoE layers, time spent waiting."""
        kept: dict[str, object] = {"local_norm": result.local_norms} if result.local_norms else {}
        if self.world.size > 1 and result.reduce_seconds is not None:
            kept["reduce_seconds"] = result.reduce_seconds
        if result.bubble_share is not None:
            kept["bubble_share"] = result.bubble_share
        if self.saver.waited_seconds:
            kept["save_wait_seconds"], self.saver.waited_seconds = self.saver.waited_seconds, 0.0
        kept |= self.state_norms() if self.records.is_due(self.position.step) else {}
        watched = result.router_rates is not None and watches_drop_rate(self.config)
        return kept | (routing_details(result.router_rates) if watched else {})

    def state_norms(self) -> dict[str, object]:
        """The norms of weights and optimizer state that `monitor_config` asks for; all ranks call it."""
        kinds = [kind for kind, name in OPTIMIZER_NORMS.items() if self.records.asks_for(name)]
        if not (kinds or self.records.asks_for(WEIGHT_NORM)):
            return {}
        from trainer.step.state_norms import norm_of_weights, norms_of_state

        names, communicator, saved = list(trained_shapes(self.config)), self.session.communicator, self.step.to_save()
        if self.session.computes_together and self.world.rank > 0:  # rank 0 has gathered them
            saved = saved._replace(weights={}, optimizer={})
        norms: dict[str, object] = {}
        if self.records.asks_for(WEIGHT_NORM):
            norms[WEIGHT_NORM] = norm_of_weights(saved, names, communicator)
        found = norms_of_state(saved, kinds, names, communicator) if kinds else {}
        return norms | {OPTIMIZER_NORMS[kind]: by_name for kind, by_name in found.items() if by_name}

    def tell_what_was_skipped(self, result: StepResult) -> None:
        """Overflow has a line of its own on the console, other reasons get a notice."""
        step = self.position.step
        if not result.updated and not result.overflow:
            self.tell("on_notice", f"step {step}: {result.skipped}: nothing was updated")
        elif result.empty_micro_batches:
            count = result.empty_micro_batches
            empty = "a micro-batch" if count == 1 else f"{count} micro-batches"
            self.tell("on_notice", f"step {step}: {empty} without a token that has a loss, left out")

    def evaluate_if_due(self, stop: StopSignals) -> None:
        """Evaluates after the steps that the configuration names, and saves a model that is among the best."""
        config, position, step = self.config, self.position, self.position.step
        if not config.do_eval or step == self.evaluations.step:
            return
        epoch_ended = position.batch == 0 and position.epoch > 0
        by_step = config.eval_step_interval > 0 and step % config.eval_step_interval == 0
        by_epoch = config.eval_epoch_interval > 0 and epoch_ended and position.epoch % config.eval_epoch_interval == 0
        if not (by_step or by_epoch or step >= self.info.last_step):
            return
        assert self.data.evaluation is not None, "do_eval without data is an error of the configuration"
        epoch = position.epoch if epoch_ended else position.epoch + 1
        with self.activity("evaluating"):
            metrics = evaluate_now(self.session, self.data.evaluation, stop, step, epoch, self.tell_evaluating)
        self.agree(stop)
        if metrics is None:
            return
        self.tell("on_eval", metrics)
        found = Evaluated(step, metrics.loss)
        self.evaluations = self.evaluations.after(found, self.saves.keep_best)
        # The evaluation at stop_step may be one that a run without stop_step does not make.
        if self.early_stop is not None and (by_step or by_epoch):
            self.evaluations = self.evaluations.counted(found, self.early_stop.min_delta)
        if found in self.evaluations.best:
            self.save()
        self.sample(stop)

    def sample(self, stop: StopSignals) -> None:
        """Samples text from the model, once a step; uses no random numbers of the training."""
        step = self.position.step
        if self.sampler is None or self.stopped or self.sampled_at == step:
            return
        self.sampled_at, began, texts = step, time.perf_counter(), None

        def asked_to_stop() -> bool:
            self.beat()
            return bool(stop)

        with self.activity("sampling"):
            try:
                texts = self.sampler.sample(self.session, asked_to_stop)
            except RunError as error:  # weights that are not finite, for which the training has rules of its own
                self.tell("on_notice", f"no sample of step {step}: {error}")
        if texts is not None:
            found = list(zip(self.sampler.prompts, texts, strict=True))
            self.tell("on_samples", step, found, time.perf_counter() - began)
        self.agree(stop)

    def save(self) -> None:
        """Saves a checkpoint where something has happened since the last one."""
        if self.saved_at == (self.position.step, self.evaluations.step):
            return
        with self.activity("saving"):
            self.save_now()

    def save_now(self) -> None:
        self.saver.finish()  # before memory is taken for the next one
        began = time.perf_counter()
        saved, position, communicator = self.step.to_save(), replace(self.position), self.session.communicator
        make_stages = functools.partial(
            save_stages,
            self.checkpoints,
            position,
            saved,
            step_state=self.step.state(),
            config=self.config,
            layout=self.layout,
            base=self.base,
            keep_max=self.saves.keep_checkpoint_max,
            evaluations=self.evaluations,
            files=self.files,
            rank=communicator.rank,
            ranks=communicator.size,
            beside_training=self.saves.async_save,
        )
        del saved
        self.saver.waited_seconds += time.perf_counter() - began
        self.saver.save(make_stages, position.step)
        self.saved_at = (self.position.step, self.evaluations.step)
        self.beat()

    def beat(self) -> None:
        step = self.position.step
        heartbeat.beat(step if step > self.info.start_step else None)

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Tells the monitors what the run does, which is no step."""
        self.tell("on_activity", name)
        try:
            yield
        finally:
            self.tell("on_activity", "")

    def tell_evaluating(self, done: int, batches: int) -> None:
        self.beat()
        self.tell("on_activity", "evaluating", done, batches)

    def tell_saved(self, path: Path, step: int) -> None:
        self.tell("on_checkpoint", path, step)

    def tell(self, event: str, *values: object) -> None:
        for monitor in self.monitors:
            getattr(monitor, event)(*values)


def monitors_of(config: Config, folder: Path, world: World, device: str) -> list[Monitor]:
    """Every rank has a log file; rank 0 has the console, the metrics and the report."""
    rank = world.rank
    every = next((entry.per_print_times for entry in config.callbacks if entry.type == "MFLossMonitor"), 1)
    layers = config.decoder.moe_layers
    details = drop_rate_lines(layers) if watches_drop_rate(config) else no_details
    logs = [log_file_monitor(folder / "logs" / f"rank-{rank}.log", every, details)]
    if config.worker_log_dir is not None:
        path = Path(config.worker_log_dir).expanduser() / f"worker_{rank}.log"
        logs.append(worker_log_monitor(path, config.log_format, every, details, anew=not config.resume_training))
    if rank > 0:
        return logs
    console = console_monitor(config.log_format, every, details=details)
    lines = [console, *logs]

    def notice(text: str) -> None:
        for monitor in lines:
            monitor.on_notice(text)

    # Trackers before the lines, which show a last notice.
    monitors = [*tracker_monitors(config, notice), *lines, JsonlMonitor(folder / "metrics.jsonl")]
    monitors.append(SamplesMonitor(folder / SAMPLES_FILE))
    monitors.append(StartMonitor(folder, device, world.size))
    state = TrainingState(config)
    if state.goes_to("log"):
        monitors += [StateLog(state, monitor.write_line) for monitor in lines]
    if config.report:
        # After those whose files it reads are closed.
        live = config.report == "live"
        monitors.append(ReportMonitor(folder, console.on_notice, config.report_interval, live))
    return monitors
