"""Evaluates a model: between the steps of a training, and in run_mode eval."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainer.data.batches.loader import EvalBatches
from trainer.device.stop_signals import StopSignals
from trainer.errors import EXIT_OK, EXIT_SIGTERM
from trainer.launch import heartbeat
from trainer.monitors.console import console_monitor
from trainer.monitors.files import write_text
from trainer.monitors.jsonl import finite_json
from trainer.monitors.metrics import EvalMetrics, Monitor
from trainer.run.prepare import load_run_weights, make_output_folder

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Batch
    from trainer.parallel.world import World
    from trainer.plan.plan import Plan
    from trainer.run.session import Session


_BATCHES_BETWEEN_CHECKS = 32  # batches of a pipeline between two checks for a stop signal
_NOT_WRITTEN = ("step", "epoch")  # of an evaluation without a training


def evaluate_on_all_ranks(
    session: Session, data: EvalBatches, stop: StopSignals, step: int, epoch: int, on_batch: Callable[[int, int], None]
) -> EvalMetrics | None:
    """Evaluates on all ranks together and returns the metrics; None if a signal stopped the evaluation early.

    Args:
        step, epoch: They identify the evaluation in the result.
        on_batch: Called before the first batch and after each one, with the numbers of finished and of all batches.
    """
    from trainer.step.evaluate import evaluate, perplexity

    checks = itertools.count()
    pipeline = session.pipeline

    def should_stop() -> bool:
        """Returns whether to stop, as one decision of the ranks that compute a batch together."""
        # Stages of a pipeline do not wait for each other at every batch.
        if pipeline is not None and next(checks) % _BATCHES_BETWEEN_CHECKS:
            return False
        if session.computes_together or session.communicator.shards_model:
            return session.communicator.any(bool(stop))
        return bool(stop)

    model = session.model
    if pipeline is not None:
        model = pipeline.evaluate
    loader = data.loader
    # Ranks may evaluate unequal numbers of batches, so they cannot gather the weights of each.
    with contextlib.closing(loader.epoch(0)) as batches, session.unsharded_weights():
        count = min(loader.batches_per_epoch, data.max_batches or loader.batches_per_epoch)
        reported = _report_batches(itertools.islice(batches, data.max_batches), count, on_batch)
        result = evaluate(
            model, session.build_inputs, reported, should_stop, session.communicator, session.computes_together,
            session.loss,
        )  # fmt: skip
    if result is None:
        return None
    perplexity_of_tokens = None
    if session.loss is None:
        perplexity_of_tokens = perplexity(result.loss)
    return EvalMetrics(step=step, epoch=epoch, perplexity=perplexity_of_tokens, **result._asdict())


def _report_batches(batches: Iterable[Batch], count: int, on_batch: Callable[[int, int], None]) -> Iterator[Batch]:
    on_batch(0, count)
    for done, batch in enumerate(batches, start=1):
        yield batch
        on_batch(done, count)


def run_evaluation(config: Config, world: World, plan: Plan) -> int:
    """Runs mode eval: prints a line with loss and perplexity, writes `output_dir`/eval.json, returns the exit code."""
    console = console_monitor(config.log_format)
    try:
        return _run_evaluation(config, world, plan, console)
    finally:
        console.close(None)


def _run_evaluation(config: Config, world: World, plan: Plan, console: Monitor) -> int:
    for note in plan.notes:
        console.on_note(note)
    batches = plan.data.batches
    assert isinstance(batches, EvalBatches), "the plan of an evaluation opens the evaluation data"
    weights = load_run_weights(config, world, console.on_note)
    folder = make_output_folder(config)
    with StopSignals() as stop:
        # An exception inside MindSpore's import would end in a crash: a signal there waits until it is over.
        console.on_activity("loading MindSpore" if world.size == 1 else "")
        from trainer.run.session import open_session

        session = open_session(config, weights, world, plan.device)

        def on_batch(done: int, count: int) -> None:
            heartbeat.beat(0)
            console.on_activity("evaluating", done, count)

        metrics = None
        if not session.communicator.any(bool(stop)):
            metrics = evaluate_on_all_ranks(session, batches, stop, step=0, epoch=1, on_batch=on_batch)
    if metrics is None:
        console.on_note(f"stopped by {stop.name}: the evaluation has no result")
        return stop.exit_code or EXIT_SIGTERM
    if world.rank > 0:
        return EXIT_OK
    console.on_eval(metrics)
    record: dict[str, object] = {"load_checkpoint": config.load_checkpoint}
    if config.adapter_id:
        record["adapter_id"] = config.adapter_id
    record |= {name: value for name, value in asdict(metrics).items() if name not in _NOT_WRITTEN and value is not None}
    write_text(folder / "eval.json", json.dumps(finite_json(record), indent=1) + "\n")
    return EXIT_OK
