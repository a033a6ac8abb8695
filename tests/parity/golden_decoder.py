"""The decoder with the weights of a golden case, held to its logits, loss and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from golden_files import AdapterCase, ModelCase
from mindspore import Tensor
from model_gradients import model_gradients
from numpy_kernels import assert_close, distance
from tolerances import decoder_limits

from trainer.checkpoint.adapters import PREFIX
from trainer.checkpoint.weights import fitting_weights
from trainer.config.schema.model import ModelConfig
from trainer.data import IGNORE_INDEX, Batch
from trainer.models.decoder import Decoder
from trainer.models.generate import Generator, Sampling
from trainer.models.inputs import InputBuilder, ModelInputs
from trainer.models.spec.shapes import adapter_shapes
from trainer.ops.kernel_set import load_kernels
from trainer.ops.select import select_kernels
from trainer.storage.quantized import FrozenMatrix

MODES = pytest.mark.parametrize("mode", [0, 1], ids=["native", "cells"])


class GoldenDecoder(NamedTuple):
    """A model with the weights of a case."""

    case: ModelCase
    model: Decoder
    build_inputs: InputBuilder

    @property
    def inputs(self) -> ModelInputs:
        case = self.case
        return self.build_inputs(Batch(case.input_ids, case.labels, case.positions, case.segment_ids))

    def check_numbers(self) -> None:
        """Logits, loss and every gradient are those of the case."""
        case, model, inputs = self.case, self.model, self.inputs
        limits = decoder_limits(model.settings, rows=len(case.input_ids))
        assert distance(model.logits(inputs).asnumpy().reshape(case.logits.shape), case.logits) < limits.loss
        loss_sum, gradients = model_gradients(model, inputs, model.parameters_by_name)
        assert distance(loss_sum, np.float32(case.loss_sum)) < limits.loss
        assert int(inputs.valid_N1.asnumpy().sum()) == case.valid_tokens
        right = fitting_weights(case.gradients, model.settings, Path(case.name))
        assert_close({name: value / case.valid_tokens for name, value in gradients.items()}, right, limits.gradients)

    def check_adapters(self, case: AdapterCase) -> None:
        """Checks that logits, loss and the gradients of all adapters are those of PEFT."""
        model, inputs = self.model, self.inputs
        limits = decoder_limits(model.settings, rows=len(case.logits))
        assert distance(model.logits(inputs).asnumpy().reshape(case.logits.shape), case.logits) < limits.loss
        loss_sum, gradients = model_gradients(model, inputs, adapter_shapes(model.settings))
        assert distance(loss_sum, np.float32(case.loss_sum)) < limits.loss
        found = {PREFIX + name: gradient / case.valid_tokens for name, gradient in gradients.items()}
        assert_close(found, case.gradients, limits.gradients)

    def check_generation(self, *prompt_tokens: int, new_tokens: int) -> None:
        """Checks the generation of the beginnings of rows, so many tokens of each."""
        prompts = [self.case.input_ids[row, :tokens].tolist() for row, tokens in enumerate(prompt_tokens)]
        check_generation(self.model, self.build_inputs, prompts, new_tokens)


def check_generation(model: Decoder, build_inputs: InputBuilder, prompts: list[list[int]], new_tokens: int) -> None:
    """Checks that each generated token is the likeliest one of the full sequence, computed without a cache."""
    generator = Generator(model, build_inputs, ())
    steps = list(generator.stream(prompts, [new_tokens] * len(prompts), Sampling()))
    for row, prompt in enumerate(prompts):
        tokens = [step[row] for step in steps]
        ids = np.array([prompt + tokens], np.int32)
        positions = np.arange(ids.size, dtype=np.int32)[None]
        whole = build_inputs(Batch(ids, np.full_like(ids, IGNORE_INDEX), positions, np.zeros_like(ids)))
        likeliest = model.logits(whole).asnumpy().argmax(-1)
        assert likeliest[len(prompt) - 1 : -1].tolist() == tokens


def golden_decoder(case: ModelCase, settings: ModelConfig, mode: int) -> GoldenDecoder:
    """Returns the model as a CPU computes it in this context.mode, with a parameter for each tensor of the case, and no
    others but those of new adapters."""
    kernels = load_kernels(select_kernels(settings, "CPU"), host_layers=mode == 0)
    model = Decoder(settings, kernels, seed=1, compiled=mode == 0)
    weights = fitting_weights(case.weights, settings, Path(case.name))
    assert {name for name in model.parameters_by_name if ".lora_" not in name} == weights.keys()
    for name, value in weights.items():
        parameter = model.parameters_by_name[name]
        if isinstance(parameter, FrozenMatrix):
            parameter.set(value)
        else:
            parameter.set_data(Tensor(value))
    model.compute_weights.refresh()
    return GoldenDecoder(case, model, InputBuilder(settings, kernels))
