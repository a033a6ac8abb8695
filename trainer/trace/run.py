"""Runs a few training steps and writes what they compute: `trace --config`, on one rank or under launch."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import __version__
from trainer.checkpoint.adapters import load_initial_weights
from trainer.config.checks.parallel import parallel_degrees, resolve_for_job
from trainer.errors import UserError
from trainer.launch import heartbeat
from trainer.models.spec.build import model_spec
from trainer.monitors.files import make_folder
from trainer.ops.select import precision_of
from trainer.optim.schedules import build_schedule
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import World, is_scheduler, world_from_environment
from trainer.run.prepare import end_scheduler, local_shard_specs, prepare_run
from trainer.run.training import require_training_batches
from trainer.trace.checks import check_pattern, trace_problems, with_sublayers
from trainer.trace.page import PAGE
from trainer.trace.record import MANIFEST, TraceWriter, rank_folders, write_manifest

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Batch
    from trainer.plan.plan import Plan
    from trainer.step.train_step import TrainStep


def record_trace(
    config: Config, steps: int, output: Path, pattern: str, report_progress: Callable[[str], None]
) -> None:
    """Trains `steps` steps and writes their trace to `output`.

    Args:
        pattern: See `TraceWriter`.

    Raises:
        UserError: The run could not start, or cannot be traced.
    """
    if is_scheduler():
        end_scheduler(config)
    world = world_from_environment()
    config = with_sublayers(resolve_for_job(config, world))
    heartbeat.start()
    for each in trace_problems(config, world):
        raise each.error
    check_pattern(pattern, config)
    prepared = prepare_run(config, world)
    config = prepared.config
    plan = prepared.plan
    if steps > plan.steps.last_step:
        rule = f"the run has {plan.steps.last_step} steps"
        raise UserError(rule, where="flag --steps", key="--steps", value=steps, fix="write fewer")
    weights = load_initial_weights(config, report_progress, parts=local_shard_specs(config, world), world=world)
    schedule = build_schedule(config.lr_schedule, plan.steps.total_steps, where=config.source.where)
    step = plan.backend.open(schedule, weights, plan.device)
    _prepare_folder(output, step, world)
    if world.rank == 0:
        rates = [float(schedule(number)) for number in range(steps)]
        write_manifest(output, manifest(config, world, plan.device, rates))
    writer = TraceWriter(output, world.rank, pattern)
    observe_steps(step, itertools.islice(_batches(plan), steps), writer, world, config, report_progress)
    step.communicator.any(False)  # waits for all ranks: their records are complete


def _prepare_folder(output: Path, step: TrainStep, world: World) -> None:
    """Removes an earlier trace from the folder before any rank writes."""
    if world.rank == 0:
        make_folder(output, "flag --output")
        if any(output.iterdir()) and not (output / MANIFEST).is_file():
            fix = "name a new folder, or that of an earlier trace"
            rule = "has other files than those of a trace"
            raise UserError(rule, where="flag --output", value=str(output), fix=fix)
        for folder in rank_folders(output).values():
            shutil.rmtree(folder)
        (output / PAGE).unlink(missing_ok=True)
    step.communicator.any(False)  # waits for rank 0


def manifest(config: Config, world: World, device: str, rates: list[float]) -> dict[str, Any]:
    """Returns what the comparison must know about a run."""
    spec = model_spec(config.decoder)
    precision = precision_of(config, device, world)
    tokens = config.decoder.seq_length
    widest = max((max(each.shape) for each in spec.parameters().values()), default=1)
    return {
        "version": __version__,
        "model": config.model.arch.type,
        "layers": len(spec.layers),
        "summands": max(tokens, widest),
        "compute_dtype": precision.compute.dtype,
        "device": device,
        "ranks": world.size,
        "degrees": parallel_degrees(config, world)._asdict(),
        "learning_rates": rates,
    }


def _batches(plan: Plan) -> Iterator[list[Batch]]:
    """Yields the micro-batches of each step on this rank, without end."""
    loader = require_training_batches(plan).loader
    sizes = plan.steps.sizes
    for epoch in itertools.count():
        position = epoch * sizes.batches_per_epoch
        with contextlib.closing(loader.epoch(epoch, 0)) as micro_batches:
            while chosen := list(itertools.islice(micro_batches, sizes.next_step(position))):
                position += len(chosen)
                yield chosen


def observe_steps(
    step: TrainStep, batches: Iterable[Sequence[Batch]], writer: TraceWriter, world: World, config: Config,
    report_progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Trains a step for each item of `batches`, and writes what it computes."""
    from trainer.trace.observe import TraceObserver

    observer = TraceObserver(writer, step)
    step.observer = observer
    for number, micro_batches in enumerate(batches, start=1):
        observer.begin_step()
        result = step(micro_batches)
        losses = {"loss": result.loss, **result.losses, "global_norm": result.global_norm}
        observer.end_step(losses)
        heartbeat.beat(number)
        if world.rank == 0:
            report_progress(f"step {number}: loss {result.loss:.6f}, gradient norm {result.global_norm:.6f}")
    step.observer = None
    degrees = parallel_degrees(config, world)
    where: dict[str, int] = {}
    if degrees.ranks == world.size:
        where = Mesh(degrees).coordinate_of(world.rank)._asdict()
    writer.close({"coordinate": where, "micro_batches": observer.micro_batches})
