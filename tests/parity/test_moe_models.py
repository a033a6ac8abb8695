"""Models with experts against Hugging Face, and multi-token prediction against DeepSeek-V3's equations in PyTorch.

Logits, losses and every gradient, each expert's by itself, in float32 (limits: tolerances.py); with native layers
(context.mode 0) and operator by operator (mode 1). The model section is Hugging Face's config.json as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import mindspore
import numpy as np
import pytest
from golden_decoder import MODES
from golden_files import ModelCase, load_model_case, model_case_names
from mindspore import Tensor
from numpy_kernels import distance
from tolerances import DecoderLimits, decoder_limits

from trainer.checkpoint.tensor_names import to_disk
from trainer.checkpoint.weights import fitting_weights
from trainer.config import parse_config
from trainer.data import IGNORE_INDEX, Batch
from trainer.models.decoder import Decoder
from trainer.models.generate import Generator, Sampling
from trainer.models.inputs import InputBuilder, RouterStatistics
from trainer.models.spec.names import is_buffer
from trainer.ops.kernel_set import load_kernels
from trainer.ops.select import select_kernels

SAFE_TOKENS = {"use_gmm": True, "enable_gmm_safe_tokens": True}


class Built(NamedTuple):
    """A model with the weights of a golden case."""

    case: ModelCase
    model: Decoder
    build_inputs: InputBuilder
    family: str

    @property
    def limits(self) -> DecoderLimits:
        return decoder_limits(self.model.settings, rows=len(self.case.input_ids))

    @property
    def batch(self) -> Batch:
        return Batch(self.case.input_ids, self.case.labels, self.case.positions, self.case.segment_ids)


def build(name: str, mode: int = 0, **changes) -> Built:
    case = load_model_case(name)
    # Hugging Face's losses have no balance loss unless asked for.
    section = {"seq_length": 24, **case.metadata["config_json"], "router_aux_loss_coef": 0.0, **changes}
    if "mtp_loss_factor" in case.metadata:
        section["mtp_loss_factor"] = case.metadata["mtp_loss_factor"]
    config = parse_config(name, json.dumps({"model_config": section}))
    settings = config.decoder
    kernels = load_kernels(select_kernels(settings, "CPU"), host_layers=mode == 0)
    model = Decoder(settings, kernels, seed=1, compiled=mode == 0)
    for parameter, value in fitting_weights(case.weights, settings, Path(name)).items():
        model.parameters_by_name[parameter].set_data(Tensor(value))
    return Built(case, model, InputBuilder(settings, kernels), config.model.arch.type)


def with_gradients(built: Built) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses (of all, of the next token, of further ones), and the gradients of all by the names on disk."""
    model, inputs = built.model, built.build_inputs(built.batch)
    names = [name for name in model.parameters_by_name if not is_buffer(name)]
    assert set(names) == {name for name, each in model.parameters_by_name.items() if each.requires_grad}

    def losses() -> tuple[Tensor, ...]:
        found = model(inputs, None, RouterStatistics())
        return tuple(loss for loss in (found.total, found.tokens, found.mtp) if loss is not None)

    run = mindspore.value_and_grad(losses, None, [model.parameters_by_name[name] for name in names], has_aux=True)
    sums, gradients = run()
    by_name = {name: value.asnumpy() for name, value in zip(names, gradients, strict=True)}
    return [float(loss.asnumpy()) for loss in sums], to_disk(by_name, built.family)


def check_gradients(found: dict[str, np.ndarray], built: Built) -> None:
    case, right = built.case, built.case.gradients
    assert found.keys() == right.keys()
    for name, value in found.items():
        if right[name].any():
            assert distance(value / case.valid_tokens, right[name]) < built.limits.gradients, name
        else:  # an expert without tokens: zeros, not what happened to lie in memory
            assert ".experts.3." in name and not value.any(), name


@MODES
@pytest.mark.parametrize("keys", [{}, SAFE_TOKENS], ids=["plain", "safe tokens"])
@pytest.mark.parametrize("name", model_case_names("experts"))
def test_logits_loss_and_gradients_equal_hugging_face(name: str, keys: dict, mode: int) -> None:
    built = build(name, mode, **keys)
    case = built.case
    logits = built.model.logits(built.build_inputs(built.batch)).asnumpy()
    assert distance(logits.reshape(case.logits.shape), case.logits) < built.limits.loss
    (total, tokens), gradients = with_gradients(built)
    assert total == tokens == pytest.approx(case.loss_sum, rel=built.limits.loss)
    check_gradients(gradients, built)


@MODES
@pytest.mark.parametrize("name", model_case_names("mtp"))
def test_mtp_modules_equal_deepseeks_equations(name: str, mode: int) -> None:
    built = build(name, mode)
    case = built.case
    logits = built.model.logits(built.build_inputs(built.batch)).asnumpy()
    assert distance(logits.reshape(case.logits.shape), case.logits) < built.limits.loss
    (total, tokens, mtp), gradients = with_gradients(built)
    assert tokens == pytest.approx(case.loss_sum, rel=built.limits.loss)
    assert mtp == pytest.approx(case.mtp_loss_sums.sum(), rel=built.limits.loss)
    factor = case.metadata["mtp_loss_factor"] / len(case.mtp_loss_sums)
    assert total == pytest.approx(case.loss_sum + factor * case.mtp_loss_sums.sum(), rel=built.limits.loss)
    check_gradients(gradients, built)


@pytest.mark.parametrize("name", ["experts_glm4_moe", "experts_mixtral", "experts_deepseek_v3"])
def test_generation_goes_the_same_way_as_the_whole_row(name: str) -> None:
    """With a cache, experts chosen for a few tokens at a time, half of a head rotated, and keys and values that no
    cache holds.
    """
    built = build(name)
    generator = Generator(built.model, built.build_inputs, eos_ids=())
    whole = build(name, mode=1)
    prompts = [built.case.input_ids[0, :7].tolist(), built.case.input_ids[1, :4].tolist()]
    steps = list(generator.stream(prompts, [5, 5], Sampling()))
    for row, prompt in enumerate(prompts):
        ids = np.array([prompt + [step[row] for step in steps]], np.int32)
        places = np.arange(ids.shape[1], dtype=np.int32)[None]
        batch = Batch(ids, np.full_like(ids, IGNORE_INDEX), places, np.zeros_like(ids))
        likeliest = whole.model.logits(whole.build_inputs(batch)).asnumpy().argmax(-1)
        assert likeliest[len(prompt) - 1 : -1].tolist() == [step[row] for step in steps]
