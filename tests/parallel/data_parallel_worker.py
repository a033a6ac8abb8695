"""What a rank of the job of two does for test_data_parallel.py: it trains its part of each batch."""

from __future__ import annotations

import dataclasses

import mindspore
import numpy as np
from step_cases import LONG, MODELS, SCALE, TinyTrainer, tiny_trainer, trained, window

from trainer.errors import RunError
from trainer.models.spec.names import EMBEDDING
from trainer.parallel.communicator import Communicator
from trainer.run.session import check_same_weights
from trainer.step.evaluate import evaluate


def steps_together(communicator: Communicator) -> dict[str, np.ndarray]:
    """Results of this rank, by name."""
    trainers = {name: tiny_trainer(name) for name in MODELS}
    found = {}
    for name, trainer in trainers.items():
        found |= trained(trainer, communicator, communicator.rank, communicator.size, name)
    dense = trainers["dense"]
    found |= (
        long_training(dense, communicator) | overflow_of_one_rank(dense, communicator) | evaluated(dense, communicator)
    )
    return found | {"differing weights": message_about_weights(dense, communicator), "vote": rank_flags(communicator)}


def long_training(trainer: TinyTrainer, communicator: Communicator) -> dict[str, np.ndarray]:
    step = trainer.step(schedule=lambda update: 0.003, communicator=communicator, optimizer={"type": "AdamW"})
    losses = [step(window(number % 5, communicator.rank, communicator.size, 1)).loss for number in range(LONG)]
    return {"long": np.array(losses)}


def overflow_of_one_rank(trainer: TinyTrainer, communicator: Communicator) -> dict[str, np.ndarray]:
    """Returns a gradient that is infinite on the last rank only."""
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


def evaluated(trainer: TinyTrainer, communicator: Communicator) -> dict[str, np.ndarray]:
    trainer.step()
    batches = [batch for number in range(2) for batch in window(number, communicator.rank, communicator.size)]
    result = evaluate(trainer.model, trainer.build_inputs, batches, lambda: False, communicator)
    interrupted = evaluate(trainer.model, trainer.build_inputs, batches, lambda: communicator.rank == 1, communicator)
    return {"eval": np.array([result.loss, result.tokens]), "interrupted": np.array(interrupted is None)}


def message_about_weights(trainer: TinyTrainer, communicator: Communicator) -> np.ndarray:
    trainer.step()
    check_same_weights(trainer.model, communicator)
    if communicator.rank == 1:
        trainer.set_weight(EMBEDDING, trainer.initial[EMBEDDING] + np.float32(1e-6))
    try:
        check_same_weights(trainer.model, communicator)
    except RunError as error:
        return np.array(str(error))
    return np.array("nothing")


def rank_flags(communicator: Communicator) -> np.ndarray:
    return np.array([communicator.any(False), communicator.any(communicator.rank == 1), communicator.any(True)])
