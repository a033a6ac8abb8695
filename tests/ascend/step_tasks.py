"""What tests run on the dry backend beside the tasks of `trainer.dryrun.tasks`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import mindspore
import numpy as np
from mindspore import Tensor

from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.state import Position, load_weights, save_stages
from trainer.checkpoint.writing import run_stages
from trainer.config.checks.parallel import parallel_degrees, runs_semi_auto
from trainer.dryrun.tasks import micro_batches_for_step, open_step, random_batch, training
from trainer.models.generate import Generator, Sampling
from trainer.optim.optimizer import Optimizer
from trainer.parallel import collectives
from trainer.parallel.communicator import Communicator
from trainer.parallel.gradients import GradientReducer
from trainer.parallel.sharding import as_sharded_array
from trainer.run.session import open_session
from trainer.semi_auto.step import GraphStep
from trainer.step.evaluate import evaluate
from trainer.step.train_step import TrainStep

if TYPE_CHECKING:
    from trainer.dryrun.measure import CaseRun

__all__ = ["training"]

STARTS = "start_all_reduce", "start_reduce_scatter", "start_all_gather"


def overlapped(run: CaseRun) -> dict[str, Any]:
    """Returns a training with gradients in buckets of `bucket_bytes`.

    Returns:
        events: Of the last step, in order: ["backward", "ends"] of a micro-batch, ["gradient", its name] in the last
            micro-batch, ["start_...", bytes] and ["update", "begins"].
        sizes: Numbers in each trained parameter.
        dtypes: Of the gradients that the update gets.
    """
    events: list[list[Any]] = []
    backward, last, update = TrainStep.backward, GradientReducer.add_last, Optimizer.scaled_gradients

    def one_backward(step: TrainStep, *arguments: Any) -> Any:
        result = backward(step, *arguments)
        events.append(["backward", "ends"])
        return result

    def last_backward(reducer: GradientReducer, *arguments: Any) -> Any:
        hooks = [
            parameter.register_hook(lambda gradient, name=parameter.name: events.append(["gradient", name]) or gradient)
            for parameter in reducer.parameters
        ]
        found["sizes"] = {parameter.name: parameter.size for parameter in reducer.parameters}
        try:
            return last(reducer, *arguments)
        finally:
            for hook in hooks:
                hook.remove()

    def noted(name: str) -> mock._patch:
        original = getattr(collectives, name)

        def start(flat: Any, group: Any) -> Any:
            events.append([name, flat.size * flat.itemsize])
            return original(flat, group)

        return mock.patch.object(collectives, name, start)

    def updated(optimizer: Optimizer, *arguments: Any) -> Any:
        events.append(["update", "begins"])
        found["dtypes"] = sorted({str(gradient.dtype) for gradient in arguments[0]})
        return update(optimizer, *arguments)

    found: dict[str, Any] = {}
    with (
        mock.patch.object(collectives, "BUCKET_BYTES", run.options["bucket_bytes"]),
        mock.patch.object(TrainStep, "backward", one_backward),
        mock.patch.object(GradientReducer, "add_last", last_backward),
        mock.patch.object(Optimizer, "scaled_gradients", updated),
        noted(STARTS[0]), noted(STARTS[1]), noted(STARTS[2]),
    ):  # fmt: skip
        found |= training(run)
    last_step = events[len(events) * (run.steps - 1) // run.steps :]
    return found | {"events": last_step}


def micro_batches(run: CaseRun) -> dict[str, Any]:
    """Returns how many micro-batches a step has."""
    return {"micro_batches": run.config.runner_config.gradient_accumulation_steps}


def sharded(run: CaseRun) -> dict[str, Any]:
    """Returns a training in semi-automatic mode, and an evaluation after it where the option `evaluates` asks for one.

    Returns:
        shapes: Of this rank's part of each parameter, those that add up gradients too.
        operators: How often the last step starts each operator.
        legacy: Kernels of CANN's legacy library that the evaluation starts.
    """
    step = open_step(run)
    results, legacy = [], []
    run.measured_steps(lambda number: results.append(step(micro_batches_for_step(run, step, number))))
    shapes = {name: list(parameter.shape) for name, parameter in step.parameters.local.items()}
    shapes |= {total.name: list(total.shape) for total in step.sums.values()}
    if run.options.get("evaluates"):
        batches = [random_batch(run, parallel_degrees(run.config, run.world).data_parallel, 0)]
        of_step = run.reads, run.kernels, run.collectives
        with run.measured():
            evaluate(step.model, step.build_inputs, batches, lambda: False, step.communicator)
        legacy = list(run.legacy_kernels())
        run.reads, run.kernels, run.collectives = of_step
    return {"updated": results[-1].updated, "shapes": shapes, "operators": dict(run.kernels), "legacy": legacy}


def evaluation(run: CaseRun) -> dict[str, Any]:
    """Evaluates one batch in each step."""
    rows = run.config.runner_config.batch_size
    session: Any
    if runs_semi_auto(run.config, run.world):
        session = open_step(run)
        rows *= parallel_degrees(run.config, run.world).data_parallel
    else:
        session = open_session(run.config, None, run.world, "Ascend")
        # The rank that has the losses may not exist.
        session.communicator.all_reduce_exact = lambda sums: [sums[0], max(sums[1], 1), *sums[2:]]
    model = session.model
    if session.pipeline is not None:
        model = session.pipeline.evaluate
    results: list[Any] = []

    def evaluate_batch(number: int) -> None:
        batches: list[Any] = [random_batch(run, rows, number)]
        results.append(evaluate(model, session.build_inputs, batches, lambda: False, session.communicator))

    run.measured_steps(evaluate_batch)
    return {"tokens": results[-1].tokens}


def prediction(run: CaseRun) -> dict[str, Any]:
    """Continues prompts of different lengths with a KV cache. A step generates one token for each prompt."""
    session: Any = open_session(run.config, None, run.world, "Ascend")
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    stream = Generator(session.model, session.build_inputs, []).stream(prompts, [run.steps] * 2, Sampling())
    tokens = []
    run.measured_steps(lambda number: tokens.append(next(stream)))
    return {"tokens": len(tokens)}


def checkpoint(run: CaseRun) -> dict[str, Any]:
    """Trains a step, saves a checkpoint, loads it, and trains more steps."""
    step = open_step(run)
    step(micro_batches_for_step(run, step, 0))
    saved = step.state_dict_shard()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stages = save_stages(
            folder, Position(step=1), saved, step_state=step.state(), config=run.config, layout={}, base=None,
            keep_max=1, evaluations=EvalHistory.empty(),
        )  # fmt: skip
        names = sorted(each.name for each in run_stages(stages, folder, Communicator()).iterdir())
    if not isinstance(step, GraphStep):
        load_weights(step.model, {name: piece.array for name, piece in saved.weights.items()})
    step.load_optimizer({key: as_sharded_array(array).array for key, array in saved.optimizer.items()}, saved.updates)
    step.load_state(step.state())
    run.measured_steps(lambda number: step(micro_batches_for_step(run, step, number + 1)))
    return {"files": names, "updates": step.optimizer.updates}


def every_collective(run: CaseRun) -> dict[str, Any]:
    """Calls each cell and function of `trainer.parallel.collectives`, forward and backward."""
    group: Any = collectives.init_process_group(run.world)
    x_RD = Tensor(np.ones((2 * run.world.size, 8), np.float32))
    shapes: dict[str, Any] = {}
    gather: Any = collectives.DeviceGroup.all_gather
    gather = gather.__wrapped__  # a dry run answers in its place

    def call_all(number: int) -> None:
        cells = (
            collectives.AllReduce(group), collectives.AllGather(group), collectives.ReduceScatter(group),
            collectives.CopyToTensorParallel(group), collectives.ReduceFromTensorParallel(group),
        )  # fmt: skip
        for cell in cells:
            _, gradient = mindspore.value_and_grad(lambda x, cell=cell: cell(x).sum())(x_RD)
            shapes[type(cell).__name__] = gradient.shape
        shapes["gather"] = len(gather(group, np.ones(2)))

    run.measured_steps(call_all)
    return {"shapes": shapes}
