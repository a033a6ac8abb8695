"""TeleChat2, dense and with experts, and TeleChat3-1.8B against their published equations (golden_telechat.py).

Logits, loss and every gradient, with native layers and operator by operator; the weights have the names of the
published files and the settings are those of MindSpore Transformers' files.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from golden_decoder import MODES, GoldenDecoder, golden_decoder
from golden_files import load_model_case, model_case_names
from mindspore import Tensor
from tolerances import SEVERAL_OPERATORS

from trainer.config import parse_config


def build(name: str, mode: int = 0) -> GoldenDecoder:
    case = load_model_case(name)
    settings = parse_config(name, json.dumps({"model": case.config})).decoder
    return golden_decoder(case, settings, mode)


@MODES
@pytest.mark.parametrize("name", model_case_names("other"))
def test_logits_loss_and_gradients_equal_the_published_equations(name: str, mode: int) -> None:
    build(name, mode).check_numbers()


@pytest.mark.parametrize("name", model_case_names("other"))
def test_generation_goes_the_same_way_as_the_whole_row(name: str) -> None:
    build(name).check_generation(7, new_tokens=4)


def test_tokens_that_an_expert_drops_have_none_of_its_bias() -> None:
    """With room for one token of each expert, every other assignment adds nothing: neither product nor bias."""
    built = build("other_telechat2_experts", mode=1)
    model, inputs = built.model, built.inputs
    layer, weights = model.parts.moe, model.parts.layers[0]["experts"].weights
    x_ND = Tensor(np.random.RandomState(0).standard_normal((48, 32)).astype(np.float32))

    def added(bias: float, capacity: int | None) -> np.ndarray:
        own = list(weights)
        own[layer.down_bias] = Tensor(np.full(own[layer.down_bias].shape, bias, np.float32))
        layer.biases.drops = capacity is not None
        return (layer.train(x_ND, own, inputs.sequence_weights, None, capacity)[0] - x_ND).asnumpy()

    every, few = (added(1.0, capacity) - added(0.0, capacity) for capacity in (None, 1))
    np.testing.assert_allclose(every, 1.0, atol=SEVERAL_OPERATORS)  # the gates of a token sum to 1
    kept = np.abs(few).max(1) > 1e-6
    assert 2 <= kept.sum() <= 4  # four experts, with one token each
    assert (few[kept] <= 1 + SEVERAL_OPERATORS).all()
