"""A decoder small enough to train in a test, with batches for it. Legend: B rows, T tokens, V vocabulary."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor
from numpy_kernels import assert_close, distance
from tolerances import decoder_limits

from trainer.config import Config, parse_config
from trainer.config.checks.qk_clip import clips_queries, measures_logits
from trainer.config.recompute import recomputed_parts
from trainer.data import IGNORE_INDEX, Batch
from trainer.data.batches.batch import concatenate, padding_batch
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder
from trainer.models.spec.shapes import adapter_shapes
from trainer.ops.kernel_set import load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import precision_of, select_kernels
from trainer.optim.freeze import frozen_names, trained_shapes
from trainer.optim.groups import parameter_groups
from trainer.optim.optimizer import Optimizer, build_optimizer
from trainer.parallel.communicator import Communicator
from trainer.step.train_step import TrainStep
from trainer.storage.quantized import FrozenMatrix

NATIVE = pytest.mark.parametrize("native", [True, False], ids=["native", "cells"])
TOKENS, VOCABULARY = 12, 19
RARE_TOKEN = VOCABULARY - 1  # `make_batch` never draws it
MODEL = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 24,
    "vocab_size": VOCABULARY, "seq_length": TOKENS, "initializer_range": 0.3,
}


def config_of(**sections: dict[str, Any]) -> Config:
    """Returns a configuration of the tiny model; `model` changes its settings, other names are sections."""
    model = {"model_config": MODEL | sections.pop("model", {})}
    return parse_config("tiny", json.dumps({"model": model} | sections))


class TinyTrainer:
    """One model, reset for every test.

    Args:
        compiled: As a CPU computes in context.mode 0, with native layers; False: operator by operator, as in mode 1.
        sections: Further sections of the configuration that the model is built by: freeze, recompute_config.
        host_layers: Whether layers are native; False with `compiled`: cells that are compiled, as on an Ascend.
        model: Changes to the settings of the model.
    """

    def __init__(
        self, compiled: bool = True, sections: dict[str, Any] | None = None, host_layers: bool | None = None,
        **model: Any,
    ) -> None:  # fmt: skip
        native = compiled if host_layers is None else host_layers
        self.sections = {"model": model, "context": {"mode": 1 - compiled}} | (sections or {})
        config = config_of(**self.sections)
        settings = config.decoder
        precision = precision_of(config, "CPU") if native == compiled else resolve_precision(settings, None, "CPU")
        self.kernels = load_kernels(select_kernels(settings, "CPU", precision), precision, host_layers=native)
        self.model = Decoder(
            settings, self.kernels, seed=5, compiled=compiled, frozen=frozen_names(config),
            recomputed=recomputed_parts(config),
        )  # fmt: skip
        self.build_inputs = InputBuilder(settings, self.kernels)
        self.initial = self.weights()

    def weights(self) -> dict[str, Any]:
        """Returns copies of all weights; those in few bytes, which never change, are no copies."""
        parameters = self.model.parameters_by_name.items()
        return {name: each.numbers if isinstance(each, FrozenMatrix) else each.asnumpy().copy()
                for name, each in parameters}  # fmt: skip

    def set_weight(self, name: str, value: Any) -> None:
        parameter = self.model.parameters_by_name[name]
        if isinstance(parameter, FrozenMatrix):
            parameter.set(value)
        else:
            parameter.set_data(Tensor(np.ascontiguousarray(value, np.float32)))

    def step(
        self,
        schedule=lambda update: 0.1,
        rank: int = 0,
        communicator: Communicator | None = None,
        **sections: dict[str, Any],
    ) -> TrainStep:
        """Returns a step over the initial weights, with a new optimizer; `sections` are of the configuration."""
        for name, value in self.initial.items():
            self.set_weight(name, value)
        config = config_of(**self.sections, **sections)
        shapes = trained_shapes(config)
        groups = parameter_groups(shapes, config.optimizer)
        trained = {name: self.model.parameters_by_name[name] for name in shapes}
        optimizer = build_optimizer(trained, groups, config.optimizer, compiled=False)
        if communicator is None:
            communicator = Communicator()
            communicator.data_rank = rank
        threshold = None
        if clips_queries(config):
            threshold = config.optimizer.qk_clip_threshold
        return TrainStep(
            self.model, optimizer, schedule, self.build_inputs, config.runner_wrapper, seed=config.seed,
            communicator=communicator, stop_at_bad_loss=config.check_for_nan_in_loss_and_grad,
            qk_clip_threshold=threshold, measures_logits=measures_logits(config),
            has_weights=config.train_dataset.has_weights,
        )  # fmt: skip


def loss_and_gradients(step: TrainStep, batch: Batch, number: int = 0) -> tuple[float, dict[str, np.ndarray]]:
    """Returns the sum of losses of micro-batch `number` and its gradients, by the names of the weights."""
    part = step.backward(batch, number, 1.0)
    return float(part.loss_sum.asnumpy()), by_name(step, part.gradients)


def by_name(step: TrainStep, gradients: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Returns gradients by the names of the trained weights."""
    return {name: each.asnumpy() for name, each in zip(step.optimizer.parameters, gradients, strict=True)}


def shared_trainer(
    compiled: bool = True, sections: dict[str, Any] | None = None, host_layers: bool | None = None, **model: Any
) -> TinyTrainer:
    """Returns the one `TinyTrainer` of this process with such a configuration. `step` gives it its initial weights
    again; a test that changes `initial` or a part of the model builds a trainer of its own."""
    used = {name: section for name, section in (sections or {}).items() if section}
    return _shared_trainer(
        compiled, json.dumps(used, sort_keys=True), host_layers, json.dumps(model, sort_keys=True)
    )


@functools.cache
def _shared_trainer(compiled: bool, sections: str, host_layers: bool | None, model: str) -> TinyTrainer:
    return TinyTrainer(compiled, json.loads(sections), host_layers, **json.loads(model))


def garbage_of(step: TrainStep, window: list[Batch]) -> int:
    """Objects that a step, after a first one, leaves to Python's collector."""
    step(window)
    gc.collect()
    gc.disable()
    try:
        step(window)
        return gc.collect()
    finally:
        gc.enable()


def with_random_adapters(tiny: TinyTrainer) -> TinyTrainer:
    """Draws A and B of all adapters: B is zero at first and would hide most mistakes."""
    random = np.random.default_rng(8)
    for name, shape in adapter_shapes(tiny.model.settings).items():
        tiny.initial[name] = random.normal(0, 0.15, shape).astype(np.float32)
        tiny.set_weight(name, tiny.initial[name])
    return tiny


def check_adapters_are_merged_weights(
    adapted: TinyTrainer, dense: TinyTrainer, batch: Batch, scale: float
) -> dict[str, np.ndarray]:
    """Compares adapters with their merged weights, which `dense` has: logits, loss and the adapters' gradients by the
    chain rule: of V = W + s B A, dA = s B^T dV and dB = s dV A^T. Returns the gradients."""
    limits = decoder_limits(dense.model.settings, rows=len(batch.labels))
    loss, gradients = loss_and_gradients(adapted.step(), batch)
    right_loss, right = loss_and_gradients(dense.step(), batch)
    logits = [one.model.logits(one.build_inputs(batch)).asnumpy() for one in (adapted, dense)]
    assert distance(*logits) < limits.loss and loss == pytest.approx(right_loss, rel=limits.loss)
    assert gradients.keys() == adapter_shapes(adapted.model.settings).keys()
    expected = {}
    for name in gradients:
        weight, kind = name.split(".lora_")
        a, b = (adapted.initial[f"{weight}.lora_{part}.weight"] for part in "AB")
        whole = right[f"{weight}.weight"]
        expected[name] = scale * (b.T @ whole if kind.startswith("A") else whole @ a.T)
    assert_close(gradients, expected, limits.gradients)
    return gradients


def make_batch(seed: int, valid: int, rows: int = 1) -> Batch:
    """Returns random rows with `valid` labels that count, scattered; segments of the first row change in its middle."""
    random = np.random.default_rng(seed)
    ids_BT = random.integers(0, RARE_TOKEN, (rows, TOKENS), dtype=np.int32)
    labels_BT = np.full((rows, TOKENS), IGNORE_INDEX, np.int32)
    places = random.choice(rows * TOKENS, valid, replace=False)
    labels_BT.reshape(-1)[places] = random.integers(0, VOCABULARY, valid)
    positions_BT = np.tile(np.arange(TOKENS, dtype=np.int32), (rows, 1))
    segments_BT = np.zeros_like(ids_BT)
    positions_BT[0, 7:] -= 7
    segments_BT[0, 7:] = 1
    return Batch(ids_BT, labels_BT, positions_BT, segments_BT)


def make_window(*valid: int) -> list[Batch]:
    """Returns micro-batches with so many labels."""
    return [make_batch(seed, count) for seed, count in enumerate(valid)]


def join(batches: list[Batch], rows: int) -> Batch:
    """Returns all rows in one batch, filled to `rows` with rows that carry no loss, so that shapes do not change."""
    whole = batches[0]
    for batch in batches[1:]:
        whole = concatenate(whole, batch)
    missing = rows - len(whole.input_ids)
    return concatenate(whole, padding_batch(missing, TOKENS)) if missing else whole


def state_of(optimizer: Optimizer, trainer: TinyTrainer) -> dict[str, np.ndarray]:
    """Returns everything that an update changes, for comparing bits."""
    return trainer.weights() | optimizer.state_arrays() | {"updates": np.array(optimizer.updates)}


def same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(array, theirs[name]) for name, array in ours.items())
