"""TeleChat2, dense and with experts, and TeleChat3-1.8B against their published equations (golden_telechat.py).

Logits, loss and every gradient, operator by operator and with compiled pieces; the weights have the names of the
published files and the settings are those of MindSpore Transformers' files.
"""

from __future__ import annotations

import json
from pathlib import Path

import mindspore
import numpy as np
import pytest
from golden_files import ModelCase, load_model_case, model_case_names
from mindspore import Tensor
from numpy_kernels import distance
from tolerances import decoder_limits

from trainer.checkpoint.weights import fitting_weights
from trainer.config import parse_config
from trainer.data import IGNORE_INDEX, Batch
from trainer.models.decoder import Decoder
from trainer.models.generate import Generator, Sampling
from trainer.models.inputs import InputBuilder
from trainer.models.moe import RouterStatistics
from trainer.ops.kernel_set import load_kernels
from trainer.ops.select import select_kernels


def build(case: ModelCase, compiled: bool) -> tuple[Decoder, InputBuilder]:
    settings = parse_config(case.name, json.dumps({"model": case.config})).decoder
    kernels = load_kernels(select_kernels(settings, "CPU"))
    model = Decoder(settings, kernels, seed=1, compiled=compiled)
    weights = fitting_weights(case.weights, settings, Path(case.name))
    assert model.parameters_by_name.keys() == weights.keys()
    for name, value in weights.items():
        model.parameters_by_name[name].set_data(Tensor(value))
    return model, InputBuilder(settings, kernels)


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in model_case_names("other")), ("other_telechat3_1_8b", True)]
)
def test_logits_loss_and_gradients_equal_the_published_equations(name: str, compiled: bool) -> None:
    case = load_model_case(name)
    model, build_inputs = build(case, compiled)
    limits = decoder_limits(model.settings, rows=len(case.input_ids))
    inputs = build_inputs(Batch(case.input_ids, case.labels, case.positions, case.segment_ids))
    assert distance(model.logits(inputs).asnumpy().reshape(case.logits.shape), case.logits) < limits.loss

    names = list(model.parameters_by_name)
    gradient = mindspore.value_and_grad(
        lambda: model(inputs, None, RouterStatistics()).total, None, [model.parameters_by_name[one] for one in names]
    )
    loss_sum, gradients = gradient()
    assert distance(loss_sum.asnumpy(), np.float32(case.loss_sum)) < limits.loss
    right = fitting_weights(case.gradients, model.settings, Path(name))
    for parameter, value in zip(names, gradients, strict=True):
        assert distance(value.asnumpy() / case.valid_tokens, right[parameter]) < limits.gradients, parameter


@pytest.mark.parametrize("name", model_case_names("other"))
def test_generation_goes_the_same_way_as_the_whole_row(name: str) -> None:
    case = load_model_case(name)
    model, build_inputs = build(case, compiled=False)
    prompt = case.input_ids[0, :7].tolist()
    tokens = [step[0] for step in Generator(model, build_inputs, ()).stream([prompt], [4], Sampling())]
    ids = np.array([prompt + tokens], np.int32)
    batch = Batch(ids, np.full_like(ids, IGNORE_INDEX), np.arange(ids.size, dtype=np.int32)[None], np.zeros_like(ids))
    likeliest = model.logits(build_inputs(batch)).asnumpy().argmax(-1)
    assert likeliest[len(prompt) - 1 : -1].tolist() == tokens


def test_tokens_that_an_expert_drops_have_none_of_its_bias() -> None:
    """With room for one token of each expert, every other assignment adds nothing: neither product nor bias."""
    case = load_model_case("other_telechat2_experts")
    model, build_inputs = build(case, compiled=False)
    inputs = build_inputs(Batch(case.input_ids, case.labels, case.positions, case.segment_ids))
    layer, weights = model.moe, model.layers[0]["experts"].weights
    x_ND = Tensor(np.random.RandomState(0).standard_normal((48, 32)).astype(np.float32))

    def added(bias: float, capacity: int | None) -> np.ndarray:
        own = list(weights)
        own[layer.down_bias] = Tensor(np.full(own[layer.down_bias].shape, bias, np.float32))
        layer.biases.drops = capacity is not None
        return (layer.train(x_ND, own, inputs.sequence_weights, None, capacity)[0] - x_ND).asnumpy()

    every, few = (added(1.0, capacity) - added(0.0, capacity) for capacity in (None, 1))
    np.testing.assert_allclose(every, 1.0, atol=1e-5)  # the gates of a token sum to 1
    kept = np.abs(few).max(1) > 1e-6
    assert 2 <= kept.sum() <= 4  # four experts, with one token each
    assert (few[kept] <= 1 + 1e-5).all()
