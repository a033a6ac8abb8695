"""What `test_step.py` and the tests of semi-automatic mode run on the dry backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from trainer.config.checks.parallel import parallel_degrees
from trainer.dryrun.tasks import micro_batches_for_step, open_step, random_batch, training
from trainer.optim.optimizer import Optimizer
from trainer.parallel import collectives
from trainer.parallel.gradients import GradientReducer
from trainer.step.evaluate import evaluate
from trainer.step.train_step import TrainStep

if TYPE_CHECKING:
    from trainer.dryrun.measure import CaseRun

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
