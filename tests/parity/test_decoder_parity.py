"""The decoder against Hugging Face: logits, loss and every gradient, float32 (limits: tolerances.py).

Both modes of running are held to it: compiled blocks (context.mode 0) and operator by operator (mode 1).
"""

from __future__ import annotations

import json

import mindspore
import numpy as np
import pytest
from golden_files import load_model_case, model_case_names, model_settings
from mindspore import Tensor
from numpy_kernels import distance
from tolerances import decoder_limits

from trainer.checkpoint.joined_names import split_joined
from trainer.config import parse_config
from trainer.data import IGNORE_INDEX, Batch
from trainer.models.decoder import Decoder
from trainer.models.generate import Generator, Sampling
from trainer.models.inputs import InputBuilder
from trainer.ops.kernel_set import load_kernels
from trainer.ops.select import select_kernels


def settings_of(case):
    text = json.dumps({"model": {"model_config": {"seq_length": 24, **model_settings(case.config)}}})
    return parse_config(case.name, text).decoder


def build(case, compiled: bool) -> tuple[Decoder, InputBuilder]:
    settings = settings_of(case)
    kernels = load_kernels(select_kernels(settings, "CPU"))
    model = Decoder(settings, kernels, seed=1, compiled=compiled)
    weights = split_joined(case.weights, settings)
    assert set(model.parameters_by_name) == set(weights)
    for name, value in weights.items():
        assert tuple(model.parameters_by_name[name].shape) == value.shape
        model.parameters_by_name[name].set_data(Tensor(value))
    return model, InputBuilder(settings, kernels)


def test_positions_that_start_again_change_the_logits_of_a_single_segment() -> None:
    """As Megatron-LM's reset_position_ids alone asks for; before and after a sequence with positions from 0 on."""
    case = load_model_case(model_case_names()[0])
    model, build_inputs = build(case, True)
    plain = np.ascontiguousarray(np.broadcast_to(np.arange(24, dtype=np.int32), case.input_ids.shape))
    again = np.where(plain < 10, plain, plain - 10)
    one = np.zeros_like(case.segment_ids)
    logits = [model.logits(build_inputs(Batch(case.input_ids, case.labels, positions, one))).asnumpy()
              for positions in (again, plain, again, plain)]
    assert np.array_equal(logits[0], logits[2]) and np.array_equal(logits[1], logits[3])
    logits = [array.reshape(*plain.shape, -1) for array in logits]
    assert np.array_equal(logits[0][:, :10], logits[1][:, :10])
    assert distance(logits[0][:, 11:], logits[1][:, 11:]) > 0.01


# Those that differ in their blocks; the others differ in the tables of rotary positions, which no block computes.
COMPILED = ("model_glm4", "model_llama", "model_llama_bias", "model_llama_packed", "model_llama_tied_linear",
            "model_qwen3_packed")


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in model_case_names()), *((name, True) for name in COMPILED)]
)
def test_logits_loss_and_gradients_equal_hugging_face(name: str, compiled: bool) -> None:
    case = load_model_case(name)
    model, build_inputs = build(case, compiled)
    limits = decoder_limits(model.settings, rows=len(case.input_ids))
    inputs = build_inputs(Batch(case.input_ids, case.labels, case.positions, case.segment_ids))
    assert distance(model.logits(inputs).asnumpy().reshape(case.logits.shape), case.logits) < limits.loss

    names = list(model.parameters_by_name)
    gradient = mindspore.value_and_grad(lambda: model(inputs).total, None, [model.parameters_by_name[n] for n in names])
    loss_sum, gradients = gradient()
    assert distance(loss_sum.asnumpy(), np.float32(case.loss_sum)) < limits.loss
    assert int(inputs.valid_N1.asnumpy().sum()) == case.valid_tokens
    right = split_joined(case.gradients, model.settings)
    for parameter, value in zip(names, gradients, strict=True):
        assert distance(value.asnumpy() / case.valid_tokens, right[parameter]) < limits.gradients, parameter


@pytest.mark.parametrize("name", ["model_glm4", "model_mistral", "model_qwen3_window"])
def test_generation_goes_the_same_way_as_the_whole_row(name: str) -> None:
    """With a cache: neighbours rotated, norms after the sublayers; a prompt that is longer than the window."""
    case = load_model_case(name)
    model, build_inputs = build(case, False)
    prompt = case.input_ids[0, :9].tolist()
    tokens = [step[0] for step in Generator(model, build_inputs, ()).stream([prompt], [5], Sampling())]
    ids = np.array([prompt + tokens], np.int32)
    batch = Batch(ids, np.full_like(ids, IGNORE_INDEX), np.arange(ids.size, dtype=np.int32)[None], np.zeros_like(ids))
    likeliest = model.logits(build_inputs(batch)).asnumpy().argmax(-1)
    assert likeliest[len(prompt) - 1 : -1].tolist() == tokens
