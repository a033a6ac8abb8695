"""Evaluations: while a training runs, and run_mode eval."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.adapters import load_initial_weights
from trainer.data.batches.loader import EvalBatches
from trainer.device.stop_signals import StopSignals
from trainer.errors import EXIT_OK, EXIT_SIGTERM
from trainer.launch import heartbeat
from trainer.monitors.console import console_monitor
from trainer.monitors.files import make_folder, write_text
from trainer.monitors.metrics import EvalMetrics, Monitor
from trainer.run.prepare import local_shard_specs

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Batch
    from trainer.parallel.world import World
    from trainer.plan.plan import Plan
    from trainer.run.session import Session


_BATCHES_ON_THE_WAY = 32  # of an evaluation in a pipeline: so many may wait for a stage


def evaluate_now(
    session: Session, data: EvalBatches, stop: StopSignals, step: int, epoch: int, on_batch: Callable[[int, int], None]
) -> EvalMetrics | None:
    """Evaluates on all ranks together; None when a signal cut it short, which then says nothing. `on_batch` is called
    before the first batch and after each, with the number of those that are done and of all."""
    from trainer.step.evaluate import evaluate, perplexity

    asked = itertools.count()
    pipeline = session.pipeline

    def asked_to_stop() -> bool:
        # Where ranks compute a batch together none may stop alone. Stages of a pipeline do not wait for each other at
        # every batch.
        if pipeline is not None and next(asked) % _BATCHES_ON_THE_WAY:
            return False
        together = session.computes_together or session.communicator.shards_model
        if together:
            return session.communicator.any(bool(stop))
        return bool(stop)

    batches = data.loader.epoch(0)
    # Ranks may evaluate unequal numbers of batches, so they cannot gather the weights of each.
    with contextlib.closing(batches), session.whole_weights():
        count = min(data.loader.batches_per_epoch, data.max_batches or data.loader.batches_per_epoch)
        some = _each_told(itertools.islice(batches, data.max_batches), count, on_batch)
        found = evaluate(
            session.model if pipeline is None else pipeline.evaluate,
            session.build_inputs,
            some,
            asked_to_stop,
            session.communicator,
            session.computes_together,
        )
    if found is None:
        return None
    return EvalMetrics(step, epoch, found.loss, perplexity(found.loss), found.tokens, found.seconds, found.accuracy)


def _each_told(batches: Iterable[Batch], count: int, on_batch: Callable[[int, int], None]) -> Iterator[Batch]:
    on_batch(0, count)
    for done, batch in enumerate(batches, start=1):
        yield batch
        on_batch(done, count)


def eval_run(config: Config, world: World, plan: Plan) -> int:
    """Run mode eval: one line with loss and perplexity, and the same in `output_dir`/eval.json."""
    console = console_monitor(config.log_format)
    try:
        return _eval_run(config, world, plan, console)
    finally:
        console.close(None)


def _eval_run(config: Config, world: World, plan: Plan, console: Monitor) -> int:
    for note in plan.notes:
        console.on_note(note)
    weights = load_initial_weights(config, console.on_note, parts=local_shard_specs(config, world), world=world)
    folder = Path(config.output_dir).expanduser()
    make_folder(folder, config.source.where("output_dir"))
    with StopSignals() as stop:
        # An exception inside MindSpore's import would end in a crash: a signal there waits until it is over.
        console.on_activity("loading MindSpore" if world.size == 1 else "")
        from trainer.run.session import open_session

        session = open_session(config, weights, world, plan.device)
        stopped = session.communicator.any(bool(stop))

        def tell(done: int, batches: int) -> None:
            heartbeat.beat(0)
            console.on_activity("evaluating", done, batches)

        if stopped:
            metrics = None
        else:
            metrics = evaluate_now(session, plan.data.batches, stop, 0, 1, tell)
    if metrics is None:
        name = "a signal to another rank"
        if stop:
            name = stop.received.name
        console.on_note(f"stopped by {name}: the evaluation has no result")
        return stop.exit_code or EXIT_SIGTERM
    if world.rank > 0:
        return EXIT_OK
    console.on_eval(metrics)
    found = {name: getattr(metrics, name) for name in ("loss", "perplexity", "tokens", "seconds")}
    # JSON has no infinity and no NaN.
    found = {name: value if math.isfinite(value) else None for name, value in found.items()}
    found |= {} if metrics.accuracy is None else {"accuracy": metrics.accuracy}
    if config.adapter_id:
        adapters = {"adapter_id": config.adapter_id}
    else:
        adapters = {}
    text = json.dumps({"load_checkpoint": config.load_checkpoint, **adapters, **found}, indent=1)
    write_text(folder / "eval.json", text + "\n")
    return EXIT_OK
