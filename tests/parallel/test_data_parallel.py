"""Data parallelism through the real msrun: the same numbers as one process with the same global batch.

Limits: tolerances.py for loss and norm of the first step and for evaluation. Each update of AdamW divides by the root
of the squares of gradients, so later steps are further apart: 1e-5 after three of them, 1e-4 after 20.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from step_cases import LONG, MODELS, ROWS, STEPS, TinyTrainer, tiny_trainer, trained, uneven, window
from tiny_trainer import config_of
from tolerances import LONG_RUN_LOSSES, RUN_LOSSES, RUN_NORMS, decoder_limits

from trainer.device.threads import set_up_cpu_threads
from trainer.parallel.communicator import Communicator
from trainer.step.accumulate import count_loss_tokens
from trainer.step.evaluate import evaluate

set_up_cpu_threads()  # before any tensor is made; see tests/parity/conftest.py

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

RANKS = 2
LIMITS = {name: decoder_limits(config_of(model=model).decoder, rows=2 * ROWS) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def ranks(folder_of_ranks: Callable[[int], Path]) -> list[dict[str, np.ndarray]]:
    """Results of each rank of one job, by name."""
    folder = folder_of_ranks(RANKS)
    return [dict(np.load(folder / f"steps-{rank}.npz")) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone() -> dict[str, TinyTrainer]:
    return {name: tiny_trainer(name) for name in MODELS}


@pytest.fixture(scope="module")
def right(alone: dict[str, TinyTrainer]) -> dict[str, np.ndarray]:
    """Returns the results of one process with the rows of all ranks."""
    found = {}
    for name, trainer in alone.items():
        found |= trained(trainer, Communicator(), 0, 1, name)
    return found


def distance(ours: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(ours - right).max() / np.abs(right).max())


@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_do_what_one_process_does(
    name: str, ranks: list[dict[str, np.ndarray]], alone: dict[str, TinyTrainer], right: dict[str, np.ndarray]
) -> None:
    """Bugs 1 and 6 of trainers: unequal masks over ranks, accumulation, the norm, empty micro-batches, clipping."""
    assert len(set(right[f"{name} tokens"])) > 1
    for found in ranks:
        for what in ("loss", "norm", "aux_loss", "mtp_loss"):
            if f"{name} {what}" in right:
                ours, theirs = found[f"{name} {what}"], right[f"{name} {what}"]
                limit = LIMITS[name].gradients if what == "norm" else LIMITS[name].loss
                assert distance(ours[:1], theirs[:1]) < limit, what
                assert distance(ours, theirs) < RUN_LOSSES, what
        assert (found[f"{name} tokens"] == right[f"{name} tokens"]).all()
        for weight in alone[name].initial:
            assert distance(found[f"{name} {weight}"], right[f"{name} {weight}"]) < RUN_NORMS, weight


def test_routing_is_counted_over_all_ranks(
    ranks: list[dict[str, np.ndarray]], right: dict[str, np.ndarray]
) -> None:
    requested = right["experts requested"]
    assert requested.shape[0] == STEPS and (requested > 0).any()
    for found in ranks:
        np.testing.assert_array_equal(found["experts requested"], requested)


def test_every_rank_ends_with_the_same_bits(ranks: list[dict[str, np.ndarray]]) -> None:
    for name, value in ranks[0].items():
        if name.split(" ")[0] in MODELS:
            assert value.tobytes() == ranks[1][name].tobytes(), name


def test_the_loss_after_many_steps(ranks: list[dict[str, np.ndarray]], alone: dict[str, TinyTrainer]) -> None:
    step = alone["dense"].step(schedule=lambda update: 0.003, optimizer={"type": "AdamW"})
    right = np.array([step(window(number % 5, 0, 1, 1)).loss for number in range(LONG)])
    assert right[-1] < 0.8 * right[0]
    assert distance(ranks[0]["long"][-1:], right[-1:]) < LONG_RUN_LOSSES


def test_a_rank_with_nothing_but_padding_takes_part(ranks: list[dict[str, np.ndarray]]) -> None:
    """Gives one rank no loss token: it still joins every collective, or the other ranks would wait forever."""
    assert all(count_loss_tokens(batch) == 0 for batch in uneven(RANKS - 1, RANKS))
    assert ranks[0]["dense tokens"][-1] == sum(count_loss_tokens(batch) for batch in uneven(0, 1)) > 0


def test_an_overflow_on_one_rank_is_one_on_all(ranks: list[dict[str, np.ndarray]]) -> None:
    """Checks that every rank skips the update and halves the scale once."""
    for found in ranks:
        assert found["overflow"].tolist() == [True, False, 32768.0, True]


def test_evaluation_is_over_all_ranks(ranks: list[dict[str, np.ndarray]], alone: dict[str, TinyTrainer]) -> None:
    dense = alone["dense"]
    dense.step()
    batches = [batch for number in range(2) for batch in window(number, 0, 1)]
    right = evaluate(dense.model, dense.build_inputs, batches, lambda: False)
    for found in ranks:
        assert found["eval"][0] == pytest.approx(right.loss, rel=LIMITS["dense"].loss)
        assert found["eval"][1] == right.tokens and found["interrupted"]


def test_different_weights_at_the_start_are_an_error(ranks: list[dict[str, np.ndarray]]) -> None:
    for found in ranks:
        assert "the weights of rank 1 differ from those of rank 0" in str(found["differing weights"])
        assert found["vote"].tolist() == [False, True, True]
