"""The classifier against numpy in float64: losses, gradients, hits; and what the step promises of any model.

Limits: tolerances.py. The gradients of several images cancel to about half of their size: `scale` is 2.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from mindspore import Tensor
from numpy_kernels import assert_close
from tiny_trainer import loss_and_gradients
from tolerances import DEVIATION, MEAN, rounding_limit

from trainer.config import Config, parse_config
from trainer.config.schema.images import IMAGES
from trainer.data.batches.batch import IGNORE_INDEX, concatenate
from trainer.data.source.images import ImageBatch
from trainer.run.session import open_training
from trainer.step.accumulate import accumulate
from trainer.step.evaluate import evaluate
from trainer.step.train_step import TrainStep

PIXELS, CLASSES = 20, 5
DATA = {"train_dataset": {"data_loader": {"type": IMAGES}}}
SIZES = {"pixels": PIXELS, "hidden_sizes": [12, 7], "classes": CLASSES, "initializer_range": 0.4}
DEPTH = PIXELS + 12 + 7 + CLASSES + 12  # twelve single operations: the image, biases, ReLU, log-sum-exp
OF_LOSSES, OF_GRADIENTS = rounding_limit(DEPTH, 24), rounding_limit(2 * DEPTH, 24, scale=2)  # up to 24 images


def config_of(**sections) -> Config:
    model = {"arch": {"type": "MlpClassifier"}, "classifier": SIZES}
    return parse_config("tiny", json.dumps({"model": model, "optimizer": {"type": "SGD"}} | DATA | sections))


def trainer_of(config: Config) -> TrainStep:
    """Returns a step with a constant rate, over a model of its own."""
    return open_training(config, lambda update: 0.1)


def make_batch(seed: int, rows: int = 6, padding: int = 0) -> ImageBatch:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, rows).astype(np.int32)
    labels[rows - padding :] = IGNORE_INDEX
    return ImageBatch(draw.integers(0, 256, (rows, PIXELS), np.uint8), labels)


def exact(weights: dict[str, np.ndarray], batch: ImageBatch) -> tuple[float, dict[str, np.ndarray], int]:
    """Returns the sum of losses, its gradients and the number of hits, from the definition."""
    names = [f"dense_relu_sequential.{place}" for place in (0, 2, 4)]
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    layers = [(weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in names]
    valid = batch.labels != IGNORE_INDEX
    inputs = [(batch.pixels[valid] / 255.0 - 0.1307) / 0.3081]
    for weight, bias in layers:
        inputs.append(np.maximum(inputs[-1] @ weight.T + bias, 0))
    logits, labels = inputs[-2] @ layers[-1][0].T + layers[-1][1], batch.labels[valid]
    shifted = logits - logits.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    gradient, found = np.exp(logs), {}
    gradient[np.arange(len(labels)), labels] -= 1
    for name, (weight, _), x in reversed(list(zip(names, layers, inputs, strict=False))):
        found[f"{name}.weight"], found[f"{name}.bias"] = gradient.T @ x, gradient.sum(0)
        gradient = (gradient @ weight) * (x > 0)
    return -logs[np.arange(len(labels)), labels].sum(), found, int((logits.argmax(1) == labels).sum())


def weights_of(step: TrainStep) -> dict[str, np.ndarray]:
    return {name: parameter.asnumpy().copy() for name, parameter in step.model.parameters_by_name.items()}


@pytest.fixture(scope="module", params=[0, 1], ids=["compiled", "operator by operator"])
def step(request: pytest.FixtureRequest) -> TrainStep:
    return trainer_of(config_of(context={"mode": request.param}))


@pytest.mark.parametrize("padding", [0, 2])
def test_losses_and_gradients(step: TrainStep, padding: int) -> None:
    for parameter in step.model.parameters_by_name.values():  # biases that matter
        if parameter.name.endswith("bias"):
            parameter.set_data(Tensor(np.linspace(-0.5, 0.5, parameter.size, dtype=np.float32)))
    batch = make_batch(3, padding=padding)
    loss, gradients, hits = exact(weights_of(step), batch)
    loss_sum, found = loss_and_gradients(step, batch)
    assert loss_sum == pytest.approx(loss, rel=OF_LOSSES)
    assert_close(found, gradients, OF_GRADIENTS)
    sums = step.model(step.build_inputs(batch))
    assert float(sums.tokens.asnumpy()) == pytest.approx(loss, rel=OF_LOSSES)
    assert float(sums.correct.asnumpy()) == hits


def test_initial_weights_are_those_of_the_tutorial() -> None:
    config = parse_config("tutorial", json.dumps({"model": {"arch": {"type": "MlpClassifier"}}} | DATA))
    weights = weights_of(trainer_of(config))
    shapes = [(512, 784), (512,), (512, 512), (512,), (10, 512), (10,)]
    assert [array.shape for array in weights.values()] == shapes
    for name, array in weights.items():
        if name.endswith("bias"):
            assert not array.any()
        else:  # Normal(0.01), as mindspore.common.initializer says of "normal"
            assert array.std() == pytest.approx(0.01, rel=DEVIATION) and abs(array.mean()) < MEAN


def test_a_window_is_one_large_batch(step: TrainStep) -> None:
    """Four unequal micro-batches, one of them without a label, give the gradients of all their images at once."""
    window = [make_batch(seed, padding=padding) for seed, padding in enumerate((0, 4, 6, 1))]
    whole = window[0]
    for batch in window[1:]:
        whole = concatenate(whole, batch)
    parts, at_once = accumulate(window, step.backward), accumulate([whole], step.backward)
    assert parts.tokens == at_once.tokens == 13 and parts.empty == 1
    assert parts.loss == pytest.approx(at_once.loss, rel=OF_LOSSES)
    assert_close(parts.gradients, at_once.gradients, OF_GRADIENTS)


def test_the_step_is_gradient_descent_on_the_mean() -> None:
    step, batches = trainer_of(config_of()), [make_batch(1), make_batch(2)]
    before = weights_of(step)
    found = [exact(before, batch)[1] for batch in batches]
    result = step(batches)
    assert (result.tokens, result.updated) == (12, True)
    expected = {name: weight - 0.1 * (found[0][name] + found[1][name]) / 12 for name, weight in before.items()}
    assert_close(weights_of(step), expected, OF_GRADIENTS)


def test_frozen_layers_stay() -> None:
    step = trainer_of(config_of(freeze={"include": ["dense_relu_sequential.0.*"]}))
    before = weights_of(step)
    step([make_batch(1)])
    changed = {name for name, array in weights_of(step).items() if not np.array_equal(array, before[name])}
    assert changed == {name for name in before if not name.startswith("dense_relu_sequential.0.")}


def test_accuracy(step: TrainStep) -> None:
    batches = [make_batch(1), make_batch(2, padding=5)]
    weights = weights_of(step)
    found = evaluate(step.model, step.build_inputs, batches, lambda: False)
    parts = [exact(weights, batch) for batch in batches]
    assert found.tokens == 7
    assert found.accuracy == pytest.approx(sum(part[2] for part in parts) / 7)
    assert found.loss == pytest.approx(sum(part[0] for part in parts) / 7, rel=OF_LOSSES)
