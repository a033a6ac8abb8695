"""A run from its configuration to its exit code: set up, fit, finish. Ties the rooms together."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.state import Position, checkpoint_to_resume, data_layout, resume, save
from trainer.checkpoint.store import prepare_folder
from trainer.config import check_runnable, config_notices, dump_config
from trainer.data import BatchLoader, batch_size, build_datasets, build_eval_dataset
from trainer.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, UserError
from trainer.models.shapes import parameter_shapes
from trainer.monitors.console import console_monitor, log_file_monitor
from trainer.monitors.jsonl import JsonlMonitor
from trainer.monitors.metrics import EvalMetrics, Monitor, RunInfo, StepMetrics, peak_rss_bytes
from trainer.monitors.report import ReportMonitor
from trainer.monitors.summary import Totals
from trainer.optim.groups import parameter_groups
from trainer.optim.optimizer import build_optimizer
from trainer.optim.schedules import build_schedule
from trainer.plan import build_plan, plan_text
from trainer.predict import predict
from trainer.session import Session, open_session
from trainer.step.evaluate import evaluate, perplexity
from trainer.step.train_step import StepResult, TrainStep

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Batch, RowDataset

_PROGRESS_BYTES = 64 << 20  # a token file smaller than this is built too fast for a progress line


def run(config: Config, extra_monitors: Sequence[Monitor] = ()) -> int:
    """Does what `run_mode` says and returns the exit code.

    Args:
        config: Checked by `load_config`.
        extra_monitors: Told of everything beside the usual monitors, for example by a benchmark.

    Raises:
        UserError: Bad input (exit code 2).
        RunError: The run failed (exit code 1).
    """
    check_runnable(config)
    if config.run_mode == "predict":
        predict(config, lambda text: print(text, end="", flush=True))
        return EXIT_OK
    if config.run_mode == "eval":
        return _eval_run(config)
    return _Training(config, extra_monitors).run()


class StopSignals:
    """Remembers SIGINT and SIGTERM instead of dying of them; a second one of the same kind acts at once."""

    _CODES = {signal.SIGINT: EXIT_SIGINT, signal.SIGTERM: EXIT_SIGTERM}

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict = {}

    def __enter__(self) -> StopSignals:
        for number in self._CODES:
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: object) -> None:
        self.received = signal.Signals(number)
        signal.signal(number, self._before[number])

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def exit_code(self) -> int:
        return self._CODES[self.received] if self.received else EXIT_OK


@dataclass(frozen=True)
class _Data:
    """The batches of a run."""

    rows: RowDataset
    loader: BatchLoader
    eval_loader: BatchLoader | None
    max_eval_batches: int | None


class _Training:
    """One training run: run modes train and finetune."""

    def __init__(self, config: Config, extra_monitors: Sequence[Monitor]) -> None:
        self.config = config
        self.folder = Path(config.output_dir)
        self.totals = Totals()
        self.monitors: list[Monitor] = [self.totals, *_monitors(config, self.folder), *extra_monitors]
        self.checkpoints = self.folder / "checkpoints"
        self.save_every, self.keep_max = _checkpoint_settings(config)

    def run(self) -> int:
        config, summary = self.config, None
        resume_from = checkpoint_to_resume(config) if config.resume_training else None
        prepare_folder(self.checkpoints)
        try:
            with StopSignals() as stop:
                self.set_up(resume_from)
                self.fit(stop)
                outcome = f"stopped by {stop.received.name}" if stop.received else "finished"
                summary = self.totals.summary(outcome, self.places())
            return stop.exit_code
        finally:
            for monitor in self.monitors:
                monitor.close(summary)

    def set_up(self, resume_from: Path | None) -> None:
        config = self.config
        plan = build_plan(config)
        (self.folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        (self.folder / "plan.txt").write_text(plan_text(plan), encoding="utf-8")
        for notice in config_notices(config):
            self.tell("on_notice", notice)
        self.data = _build_data(config, lambda text: self.tell("on_notice", text))
        window = config.runner_config.gradient_accumulation_steps
        self.steps_per_epoch = -(-self.data.loader.batches_per_epoch // window)
        total_steps = self.steps_per_epoch * config.runner_config.epochs
        self.last_step = min(total_steps, config.runner_config.stop_step or total_steps)
        schedule = build_schedule(config.lr_schedule, total_steps, where=config.source.where)
        self.session = open_session(config)
        model = self.session.model
        groups = parameter_groups(parameter_shapes(config.decoder), config.optimizer.weight_decay)
        self.optimizer = build_optimizer(model.parameters_by_name, groups, config.optimizer)
        self.layout = data_layout(config, self.data.rows.num_rows)
        self.position = Position()
        if resume_from is not None:
            self.position = resume(resume_from, model, self.optimizer, self.layout, config.ignore_data_skip)
        self.step = TrainStep(model, self.optimizer, schedule, self.session.build_inputs, config)
        self.info = RunInfo(
            output_dir=self.folder,
            total_steps=total_steps,
            last_step=self.last_step,
            start_step=self.position.step,
            epochs=config.runner_config.epochs,
            steps_per_epoch=self.steps_per_epoch,
            resumed_from=resume_from,
        )
        self.tell("on_start", self.info)

    def fit(self, stop: StopSignals) -> None:
        """Trains to the last step or the first signal; always leaves a checkpoint of where it stopped."""
        saved_at = evaluated_at = self.position.step
        while self.position.step < self.last_step and not stop:
            batches = self.data.loader.epoch(self.position.epoch, self.position.batch)
            with contextlib.closing(batches):
                for metrics in self.epoch_steps(batches):
                    self.tell("on_step", metrics)
                    ended = self.position.step >= self.last_step
                    if not stop and self.evaluates(metrics, ended):
                        self.evaluate(stop)
                        evaluated_at = self.position.step
                    if self.save_every and self.position.step % self.save_every == 0:
                        self.save()
                        saved_at = self.position.step
                    if stop or ended:
                        break
        if self.config.do_eval and not stop and evaluated_at != self.position.step:
            self.evaluate(stop)
        if saved_at != self.position.step:
            self.save()

    def epoch_steps(self, batches: Iterator[Batch]) -> Iterator[StepMetrics]:
        """Does the steps of what is left of the current epoch, the last, partial window included."""
        window = self.config.runner_config.gradient_accumulation_steps
        while True:
            began = time.perf_counter()
            micro_batches = list(itertools.islice(batches, window))
            if not micro_batches:
                return
            result = self.step(micro_batches)
            yield self.after_step(result, len(micro_batches), time.perf_counter() - began)

    def after_step(self, result: StepResult, micro_batches: int, seconds: float) -> StepMetrics:
        position, config = self.position, self.config
        epoch, position.step = position.epoch, position.step + 1
        position.tokens += result.tokens
        position.batch += micro_batches
        if position.batch >= self.data.loader.batches_per_epoch:
            position.epoch, position.batch = position.epoch + 1, 0
        if not result.updated:
            self.tell("on_notice", f"step {position.step} had no token with a loss: nothing was updated")
        return StepMetrics(
            step=position.step,
            total_steps=self.info.total_steps,
            epoch=epoch + 1,
            epochs=config.runner_config.epochs,
            step_in_epoch=position.step - epoch * self.steps_per_epoch,
            steps_per_epoch=self.steps_per_epoch,
            loss=result.loss,
            lr=result.lr,
            global_norm=result.global_norm,
            loss_scale=1.0,
            overflow=False,
            tokens=result.tokens,
            tokens_per_second=result.tokens / seconds,
            step_seconds=seconds,
            peak_rss_bytes=peak_rss_bytes(),
        )

    def evaluates(self, metrics: StepMetrics, ended: bool) -> bool:
        config = self.config
        if not config.do_eval:
            return False
        by_step = config.eval_step_interval > 0 and metrics.step % config.eval_step_interval == 0
        epoch_ended = metrics.step_in_epoch == self.steps_per_epoch
        by_epoch = config.eval_epoch_interval > 0 and epoch_ended and metrics.epoch % config.eval_epoch_interval == 0
        return by_step or by_epoch or ended

    def evaluate(self, stop: StopSignals) -> None:
        loss, tokens, seconds = _evaluate(self.session, self.data, stop)
        if not stop:  # an evaluation that a signal cut short says nothing
            epoch = max(1, -(-self.position.step // self.steps_per_epoch))
            metrics = EvalMetrics(self.position.step, epoch, loss, perplexity(loss), tokens, seconds)
            self.tell("on_eval", metrics)

    def save(self) -> None:
        model = self.session.model
        path = save(self.checkpoints, self.position, model, self.optimizer, self.layout, self.keep_max)
        self.tell("on_checkpoint", path, self.position.step)

    def tell(self, event: str, *values: object) -> None:
        for monitor in self.monitors:
            getattr(monitor, event)(*values)

    def places(self) -> dict[str, Path]:
        names = {"checkpoints": "checkpoints", "metrics": "metrics.jsonl", "log": "logs/rank-0.log"}
        if self.config.report:
            names["report"] = "report.png"
        return {name: self.folder / place for name, place in names.items()}


def _monitors(config: Config, folder: Path) -> list[Monitor]:
    every = next((entry.per_print_times for entry in config.callbacks if entry.type == "MFLossMonitor"), 1)
    console = console_monitor(config.log_format, every)
    monitors = [console, log_file_monitor(folder / "logs" / "rank-0.log", every), JsonlMonitor(folder / "metrics.jsonl")]
    if config.report:
        # After the metrics file, which it reads, is closed.
        monitors.append(ReportMonitor(folder / "metrics.jsonl", folder / "report.png", console.on_notice))
    return monitors


def _checkpoint_settings(config: Config) -> tuple[int, int]:
    """Steps between checkpoints (0: only at the end) and how many to keep."""
    for entry in config.callbacks:
        if entry.type == "CheckpointMonitor":
            return entry.save_checkpoint_steps, entry.keep_checkpoint_max
    return 0, 5


def _build_data(config: Config, notice: Callable[[str], None]) -> _Data:
    train, held_out = build_datasets(config, _show_build, notice)
    loader = _loader(config, "train_dataset", train, shuffle=config.train_dataset.data_loader.shuffle)
    if not config.do_eval:
        return _Data(train, loader, None, None)
    return _Data(train, loader, *_eval_loader(config, held_out))


def _eval_loader(config: Config, rows: RowDataset | None) -> tuple[BatchLoader, int | None]:
    if rows is None:
        raise UserError(
            "there is nothing to evaluate on",
            where=config.source.where("do_eval"),
            key="do_eval",
            value=True,
            fix="add an eval_dataset section, or train_dataset.held_out: 0.02",
        )
    section = "eval_dataset" if config.eval_dataset is not None else "train_dataset"
    return _loader(config, section, rows, shuffle=False, whole=True), getattr(config, section).max_batches or None


def _loader(config: Config, section: str, rows: RowDataset, shuffle: bool, whole: bool = False) -> BatchLoader:
    settings = getattr(config, section)
    return BatchLoader(
        rows,
        batch_size=batch_size(config, section),
        shuffle=shuffle,
        seed=config.seed,
        drop_remainder=settings.drop_remainder and not whole,
        prefetch_size=settings.prefetch_size,
    )


def _show_build(done_bytes: int, total_bytes: int) -> None:
    """A line on a terminal while a large token file is built."""
    if total_bytes >= _PROGRESS_BYTES and sys.stderr.isatty():
        end = "\n" if done_bytes >= total_bytes else ""
        print(f"\rtokenizing: {100 * done_bytes // total_bytes} % of {total_bytes >> 20} MiB", end=end, file=sys.stderr)


def _evaluate(session: Session, data: _Data, stop: StopSignals) -> tuple[float, int, float]:
    assert data.eval_loader is not None
    batches = data.eval_loader.epoch(0)
    with contextlib.closing(batches):
        return evaluate(
            session.model, session.build_inputs, itertools.islice(batches, data.max_eval_batches), lambda: bool(stop)
        )


def _eval_run(config: Config) -> int:
    """Run mode eval: one line with loss and perplexity, and the same in `output_dir`/eval.json."""
    import json

    console = console_monitor("plain" if config.log_format == "rich" else config.log_format)
    for notice in config_notices(config):
        console.on_notice(notice)
    loader, max_batches = _eval_loader(config, build_eval_dataset(config, _show_build, console.on_notice))
    session = open_session(config)
    with StopSignals() as stop:
        loss, tokens, seconds = _evaluate(session, _Data(None, None, loader, max_batches), stop)
    if stop:
        return stop.exit_code
    console.on_eval(EvalMetrics(0, 1, loss, perplexity(loss), tokens, seconds))
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    found = {"loss": loss, "perplexity": perplexity(loss), "tokens": tokens, "seconds": seconds}
    (folder / "eval.json").write_text(json.dumps({"load_checkpoint": config.load_checkpoint, **found}, indent=1) + "\n")
    return EXIT_OK
