"""The classifier of images in semi-automatic mode on a single rank: its steps, evaluations and arrays to save are those
of explicit mode. Its graph for several ranks is in tests/ascend/test_semi_auto.py."""

from __future__ import annotations

import json

import numpy as np
import pytest
from mindspore import Tensor
from numpy_kernels import distance
from tolerances import rounding_limit

from trainer.config import Config, parse_config
from trainer.data.batches.batch import IGNORE_INDEX
from trainer.data.source.images import ImageBatch
from trainer.errors import RunError
from trainer.parallel.world import SINGLE_PROCESS, World, world_of
from trainer.run.session import open_training
from trainer.semi_auto.network import build_semi_auto
from trainer.semi_auto.training import graph_batch, open_semi_auto_training
from trainer.step.evaluate import evaluate

PIXELS, CLASSES, ROWS = 20, 5, 6
SIZES = {"pixels": PIXELS, "hidden_sizes": [12, 7], "classes": CLASSES, "initializer_range": 0.4}
DEPTH = PIXELS + 12 + 7 + CLASSES + 12  # twelve single operations: the image, biases, ReLU, log-sum-exp
OF_LOSSES, OF_GRADIENTS = rounding_limit(DEPTH, 2 * ROWS), rounding_limit(2 * DEPTH, 2 * ROWS, scale=2)


def config_of(**sections) -> Config:
    base = {
        "use_parallel": True, "parallel": {"parallel_mode": 1}, "optimizer": {"type": "SGD", "momentum": 0.9},
        "model": {"arch": {"type": "MlpClassifier"}, "classifier": SIZES},
        "train_dataset": {"data_loader": {"type": "MnistDataset"}},
        "runner_config": {"batch_size": ROWS, "gradient_accumulation_steps": 2},
        "runner_wrapper": {"use_clip_grad": True, "max_grad_norm": 0.5, "scale_sense": 256.0, "local_norm": True},
    }  # fmt: skip
    return parse_config("semi", json.dumps(base | sections))


def images(seed: int, rows: int = ROWS, padding: int = 0) -> ImageBatch:
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, rows).astype(np.int32)
    labels[rows - padding :] = IGNORE_INDEX
    return ImageBatch(draw.integers(0, 256, (rows, PIXELS), np.uint8), labels)


def test_steps_and_evaluations_are_those_of_explicit_mode() -> None:
    """With micro-batches of unequal numbers of labels, clipping, a loss scale and a shorter window at the end."""
    config = config_of(freeze={"include": ["dense_relu_sequential.0.weight"]})
    run = open_training(config, lambda update: 0.1)
    step = open_semi_auto_training(config, lambda update: 0.1, None, SINGLE_PROCESS, "CPU")
    for window in ([images(1), images(2, padding=4)], [images(3, padding=1), images(4)], [images(5)]):
        mine, right = step(window), run(window)
        assert mine.updated and (mine.tokens, mine.loss_scale) == (right.tokens, right.loss_scale)
        assert mine.loss == pytest.approx(right.loss, rel=OF_LOSSES)
        assert mine.global_norm == pytest.approx(right.global_norm, rel=OF_GRADIENTS)
        assert mine.local_norms == pytest.approx(right.local_norms, OF_GRADIENTS)
    saved, expected = step.state_dict_shard(), run.state_dict_shard()
    for found, arrays in ((saved.weights, expected.weights), (saved.optimizer, expected.optimizer)):
        assert set(found) == set(arrays)
        assert max(distance(found[name], arrays[name].array) for name in arrays) < OF_GRADIENTS
    batches = [images(6), images(7, rows=4, padding=1)]
    mine, right = (evaluate(each.model, each.build_inputs, batches, lambda: False) for each in (step, run))
    assert mine.loss == pytest.approx(right.loss, rel=OF_LOSSES)
    assert (mine.tokens, mine.accuracy) == (right.tokens, right.accuracy) and 0 < mine.accuracy < 1


def test_a_window_that_is_not_to_be_learned_from_changes_nothing() -> None:
    wrapper = {"use_skip_data_by_global_norm": True, "global_norm_spike_threshold": 1e-6, "scale_sense": 16.0}
    config = config_of(runner_wrapper=wrapper, runner_config={"batch_size": ROWS})
    step = open_semi_auto_training(config, lambda update: 0.1, None, SINGLE_PROCESS, "CPU")
    before = {name: array.copy() for name, array in step.state_dict_shard().weights.items()}
    spike = step([images(1)])
    assert not spike.updated and spike.skipped.startswith("spike: norm")
    empty = step([images(1, padding=ROWS)])
    assert (empty.updated, empty.skipped, empty.tokens) == (False, "no token with a loss", 0)
    last = [name for name in before if name.endswith(".weight")][-1]
    step.parameters.local[last].set_data(Tensor(before[last] * np.float32(np.inf)))
    overflow = step([images(1)])
    assert (overflow.updated, overflow.overflow, step.optimizer.updates) == (False, True, 0)
    for name, array in step.state_dict_shard().weights.items():
        assert name == last or np.array_equal(array, before[name]), name
    step.guards.wrapper = step.guards.wrapper.model_copy(update={"use_skip_data_by_global_norm": False})
    step.guards.loss_scale.value = 1.0
    with pytest.raises(RunError, match="first non-finite gradient: "):
        step([images(1)])


def test_the_batch_is_sharded_and_nothing_else() -> None:
    config = config_of(parallel={"parallel_mode": 1, "full_batch": False})
    found = build_semi_auto(config, world_of(8))
    first = found.loss.layers.linears[0]
    assert first.product.in_strategy == ((8, 1), (1, 1)) and first.bias_add.in_strategy == ((8, 1), (1,))
    assert found.network._dataset_strategy_config == ((8, 1),) * 3
    window = graph_batch(config, World(3, 8, 3, 8))
    assert list(window.local_rows) == [*range(18, 24), *range(66, 72)]  # the fourth rank's rows of each micro-batch
    pixels, targets, share = window.tensors([images(1, rows=96)], 0.5)
    assert (pixels.shape, targets.shape, share.shape) == ((12, PIXELS), (12, CLASSES), (12, 1))
