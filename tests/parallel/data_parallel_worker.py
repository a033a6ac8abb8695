"""A rank of the job of test_data_parallel.py: trains its part of each batch and writes down what came out."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from msrun_helpers import take_a_core

take_a_core()

import mindspore  # noqa: E402
import numpy as np  # noqa: E402
from step_cases import LONG, MODELS, SCALE, TinyTrainer, trained, window  # noqa: E402

from trainer.errors import RunError  # noqa: E402
from trainer.models.shapes import EMBEDDING  # noqa: E402
from trainer.parallel.communicator import ProcessGroup  # noqa: E402
from trainer.parallel.world import world_from_environment  # noqa: E402
from trainer.run.session import check_same_weights  # noqa: E402
from trainer.step.evaluate import evaluate  # noqa: E402


def main(folder: Path) -> None:
    world = world_from_environment()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    mindspore.set_device("CPU")
    communicator = ProcessGroup(world)
    trainers = {name: TinyTrainer(**model) for name, model in MODELS.items()}
    found = {}
    for name, trainer in trainers.items():
        found |= trained(trainer, communicator, world.rank, world.size, name)
    dense = trainers["dense"]
    found |= (
        long_training(dense, communicator) | overflow_of_one_rank(dense, communicator) | evaluated(dense, communicator)
    )
    found |= {"differing weights": message_about_weights(dense, communicator), "vote": votes(communicator)}
    np.savez(folder / f"rank-{world.rank}.npz", **found)


def long_training(trainer: TinyTrainer, communicator: ProcessGroup) -> dict[str, np.ndarray]:
    step = trainer.step(schedule=lambda update: 0.003, communicator=communicator, optimizer={"type": "AdamW"})
    losses = [step(window(number % 5, communicator.rank, communicator.size, 1)).loss for number in range(LONG)]
    return {"long": np.array(losses)}


def overflow_of_one_rank(trainer: TinyTrainer, communicator: ProcessGroup) -> dict[str, np.ndarray]:
    """A gradient that is infinite on the last rank only."""
    step = trainer.step(communicator=communicator, runner_wrapper=SCALE)
    before, backward = trainer.weights(), step.backward

    def overflowing(*arguments):
        part = backward(*arguments)
        if communicator.rank == communicator.size - 1:
            infinite = part.gradients[0] * mindspore.Tensor(np.float32(np.inf))
            return dataclasses.replace(part, gradients=[infinite, *part.gradients[1:]])
        return part

    step.backward = overflowing
    result = step(window(0, communicator.rank, communicator.size, 1))
    same = all(np.array_equal(value, before[name]) for name, value in trainer.weights().items())
    return {"overflow": np.array([result.overflow, result.updated, step.guards.loss_scale.value, same])}


def evaluated(trainer: TinyTrainer, communicator: ProcessGroup) -> dict[str, np.ndarray]:
    trainer.step()
    batches = [batch for number in range(2) for batch in window(number, communicator.rank, communicator.size)]
    result = evaluate(trainer.model, trainer.build_inputs, batches, lambda: False, communicator)
    interrupted = evaluate(trainer.model, trainer.build_inputs, batches, lambda: communicator.rank == 1, communicator)
    return {"eval": np.array([result.loss, result.tokens]), "interrupted": np.array(interrupted is None)}


def message_about_weights(trainer: TinyTrainer, communicator: ProcessGroup) -> np.ndarray:
    trainer.step()
    check_same_weights(trainer.model, communicator)
    if communicator.rank == 1:
        trainer.set_weight(EMBEDDING, trainer.initial[EMBEDDING] + np.float32(1e-6))
    try:
        check_same_weights(trainer.model, communicator)
    except RunError as error:
        return np.array(str(error))
    return np.array("nothing")


def votes(communicator: ProcessGroup) -> np.ndarray:
    return np.array([communicator.any(False), communicator.any(communicator.rank == 1), communicator.any(True)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
