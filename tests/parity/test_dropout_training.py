"""Dropout in training: masks are named by seed, rank, step, micro-batch and site, and are replayed bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from drawn_masks import drawn_masks
from numpy_kernels import assert_close, assert_same_bits
from tiny_trainer import (
    MODEL,
    NATIVE,
    TOKENS,
    TinyTrainer,
    config_of,
    loss_and_gradients,
    make_batch,
    same_bits,
    shared_trainer,
    state_of,
)
from tolerances import FEW_OPERATIONS, decoder_limits

from trainer.arrays.dropout import DropoutSite, draw_noise
from trainer.data import Batch
from trainer.models.spec.build import NOISE_SITE
from trainer.ops.dropout import DropoutKey
from trainer.step.evaluate import evaluate
from trainer.step.train_step import TrainStep

LAYERS, SITES = 2, 3
RATES = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
LIMITS = decoder_limits(config_of().decoder)


@pytest.fixture(scope="module")
def tiny() -> TinyTrainer:
    return shared_trainer(**RATES)


def train(tiny: TinyTrainer, window: list[Batch], seed: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of three steps and everything they left behind."""
    optimizer = {"type": "AdamW", "weight_decay": 0.1}
    step = tiny.step(lambda update: 0.01, optimizer=optimizer, seed=seed)
    return [step(window).loss for _ in range(3)], state_of(step.optimizer, tiny)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tiny: TinyTrainer, window: list[Batch]) -> None:
    losses, state = train(tiny, window, seed=3)
    again, same_state = train(tiny, window, seed=3)
    assert again == losses
    assert_same_bits(same_state, state)
    other_losses, other_state = train(tiny, window, seed=4)
    assert other_losses[0] != losses[0]
    assert not same_bits(other_state, state)


def loss_of(step: TrainStep, batch: Batch, number: int, updates: int = 0) -> float:
    step.optimizer.updates = updates
    return loss_and_gradients(step, batch, number)[0]


def test_step_micro_batch_and_rank_each_change_the_masks(tiny: TinyTrainer, window: list[Batch]) -> None:
    step, batch = tiny.step(), window[0]
    first = loss_of(step, batch, 0)
    assert loss_of(step, batch, 0) == first
    others = {
        "micro-batch": loss_of(step, batch, 1),
        "step": loss_of(step, batch, 0, updates=1),
        "rank": loss_of(tiny.step(rank=1), batch, 0),
        "seed": loss_of(tiny.step(seed=2), batch, 0),
    }
    assert len({first, *others.values()}) == 5, others


@NATIVE
def test_every_mask_of_a_run_has_its_own_name(
    native: bool, window: list[Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps of three micro-batches with a loss, two layers of three places: no two masks share key and site."""
    drawn = drawn_masks(monkeypatch)
    step = shared_trainer(native, **RATES).step(seed=9, rank=0)
    for _ in range(2):
        step(window)
    expected = sorted(itertools.product((0, 1), (0, 1, 3), range(LAYERS * SITES)))
    names = sorted((mask.key.step, mask.key.micro_batch, mask.site) for mask in drawn)
    # Native layers draw again what the backward pass needs.
    assert (sorted(set(names)) if native else names) == expected
    assert {(mask.key.seed, mask.key.rank) for mask in drawn} == {(9, 0)}


def test_native_layers_drop_what_cells_drop(tiny: TinyTrainer, window: list[Batch]) -> None:
    cells = shared_trainer(compiled=False, **RATES)
    for number in (0, 1):
        assert_same_backward(*(loss_and_gradients(one.step(), window[0], number) for one in (tiny, cells)))


def assert_same_backward(ours: tuple[float, dict], right: tuple[float, dict]) -> None:
    assert ours[0] == pytest.approx(right[0], rel=LIMITS.loss)
    assert_close(ours[1], right[1], LIMITS.gradients)


def test_evaluation_drops_nothing(tiny: TinyTrainer, window: list[Batch]) -> None:
    tiny.step()
    loss = evaluate(tiny.model, tiny.build_inputs, window, stop=lambda: False)[0]
    without = shared_trainer(compiled=False)
    without.step()
    right = evaluate(without.model, without.build_inputs, window, stop=lambda: False)[0]
    assert loss == pytest.approx(right, rel=LIMITS.loss)


@NATIVE
@pytest.mark.parametrize("key", RATES)
def test_each_rate_alone_changes_the_loss(window: list[Batch], key: str, native: bool) -> None:
    plain, dropping = shared_trainer(native), shared_trainer(native, **{key: RATES[key]})
    assert_same_bits(dropping.initial, plain.initial)
    assert loss_of(dropping.step(), window[0], 0) != loss_of(plain.step(), window[0], 0)


NOISE = {"neftune_noise_alpha": 5.0}


def test_noise_on_embeddings_is_what_other_embeddings_would_be() -> None:
    """Where each token comes once, noise on its embedding is another row of the matrix (Jain et al. 2024, section 2).

    The noise is uniform in +-alpha / sqrt(L d) with the L tokens of its document, 7 and 5 in this batch.
    """
    noisy, plain = shared_trainer(**NOISE), shared_trainer()
    batch = make_batch(0, TOKENS)._replace(input_ids=np.arange(TOKENS, dtype=np.int32)[None])
    width = MODEL["hidden_size"]
    key = DropoutKey(3, 1, 2, 4)
    step = noisy.step(rank=1, seed=3)
    step.optimizer.updates = 2
    ours = loss_and_gradients(step, batch, 4)
    random = np.random.Philox(key=[3, 0xD0 + (1 << 8)], counter=[0, 2, 4, NOISE_SITE])
    uniform = np.random.Generator(random).random((TOKENS, width), np.float32) * 2 - 1
    limits = 5 / np.sqrt(np.repeat([7, 5], [7, 5]) * width)
    exact = uniform * limits[:, None]
    drawn = draw_noise(key, DropoutSite(NOISE_SITE, 0.0, width), limits.astype(np.float32))
    np.testing.assert_allclose(drawn, exact, rtol=FEW_OPERATIONS)
    assert -limits.max() <= drawn.min() < -0.9 * limits.max() and 0.9 * limits.max() < drawn.max() <= limits.max()
    other = plain.step()
    embedding = plain.initial["model.embed_tokens.weight"].copy()
    embedding[:TOKENS] += exact.astype(np.float32)
    plain.set_weight("model.embed_tokens.weight", embedding)
    assert_same_backward(ours, loss_and_gradients(other, batch))


def test_noise_is_drawn_in_training_only_and_again_with_the_same_key(window: list[Batch]) -> None:
    noisy, plain = shared_trainer(**NOISE), shared_trainer()
    step = noisy.step()
    first = loss_of(step, window[0], 0)
    assert loss_of(step, window[0], 0) == first
    assert len({first, loss_of(step, window[0], 1), loss_of(step, window[0], 0, updates=1)}) == 3
    plain.step()
    losses = [evaluate(each.model, each.build_inputs, window, stop=lambda: False).loss for each in (noisy, plain)]
    assert losses[0] == losses[1]
