"""Models with experts against Hugging Face, and multi-token prediction against DeepSeek-V3's equations in PyTorch.

Logits, losses and every gradient, each expert's by itself, in float32 (limits: tolerances.py); with native layers
(context.mode 0) and operator by operator (mode 1). The model section is Hugging Face's config.json as it is.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from golden_decoder import MODES, GoldenDecoder, golden_decoder
from golden_files import ModelCase, load_model_case, model_case_names
from model_gradients import losses_and_gradients
from numpy_kernels import distance
from tolerances import decoder_limits

from trainer.checkpoint.tensor_names import to_disk
from trainer.config import parse_config
from trainer.models.spec.names import is_buffer

SAFE_TOKENS = {"use_gmm": True, "enable_gmm_safe_tokens": True}


def build(name: str, mode: int = 0, **changes) -> tuple[GoldenDecoder, str]:
    """Returns the model, and its family."""
    case = load_model_case(name)
    # Hugging Face's losses have no balance loss unless asked for.
    section = {"seq_length": 24, **case.metadata["config_json"], "router_aux_loss_coef": 0.0, **changes}
    if "mtp_loss_factor" in case.metadata:
        section["mtp_loss_factor"] = case.metadata["mtp_loss_factor"]
    config = parse_config(name, json.dumps({"model_config": section}))
    return golden_decoder(case, config.decoder, mode), config.model.arch.type


def check(name: str, mode: int, **changes) -> tuple[ModelCase, list[float], float]:
    """Compares logits and gradients; returns the losses (of all, of the next token, of further ones) and a limit."""
    built, family = build(name, mode, **changes)
    case, limits = built.case, decoder_limits(built.model.settings, rows=len(built.case.input_ids))
    logits = built.model.logits(built.inputs).asnumpy()
    assert distance(logits.reshape(case.logits.shape), case.logits) < limits.loss
    losses, gradients = with_gradients(built, family)
    assert gradients.keys() == case.gradients.keys()
    for key, value in gradients.items():
        right = case.gradients[key]
        if right.any():
            assert distance(value / case.valid_tokens, right) < limits.gradients, key
        else:  # an expert without tokens: zeros, not what happened to lie in memory
            assert ".experts.3." in key and not value.any(), key
    return case, losses, limits.loss


def with_gradients(built: GoldenDecoder, family: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses (of all, of the next token, of further ones), and the gradients of all by the names on disk."""
    model, inputs = built.model, built.inputs
    names = [name for name in model.parameters_by_name if not is_buffer(name)]
    assert set(names) == {name for name, each in model.parameters_by_name.items() if each.requires_grad}
    sums, by_name = losses_and_gradients(model, inputs, names)
    losses = [float(loss.asnumpy()) for loss in (sums.total, sums.tokens, sums.mtp) if loss is not None]
    return losses, to_disk(by_name, family)


@MODES
@pytest.mark.parametrize("keys", [{}, SAFE_TOKENS], ids=["plain", "safe tokens"])
@pytest.mark.parametrize("name", model_case_names("experts"))
def test_logits_loss_and_gradients_equal_hugging_face(name: str, keys: dict, mode: int) -> None:
    case, (total, tokens), limit = check(name, mode, **keys)
    assert total == tokens == pytest.approx(case.loss_sum, rel=limit)


@MODES
@pytest.mark.parametrize("name", model_case_names("mtp"))
def test_mtp_modules_equal_deepseeks_equations(name: str, mode: int) -> None:
    case, (total, tokens, mtp), limit = check(name, mode)
    assert tokens == pytest.approx(case.loss_sum, rel=limit)
    assert mtp == pytest.approx(case.mtp_loss_sums.sum(), rel=limit)
    factor = case.metadata["mtp_loss_factor"] / len(case.mtp_loss_sums)
    assert total == pytest.approx(case.loss_sum + factor * case.mtp_loss_sums.sum(), rel=limit)


@pytest.mark.parametrize("name", ["experts_glm4_moe", "experts_mixtral", "experts_deepseek_v3"])
def test_generation_goes_the_same_way_as_the_whole_row(name: str) -> None:
    """With a cache, experts chosen for a few tokens at a time, half of a head rotated, and keys and values that no
    cache holds.
    """
    build(name)[0].check_generation(7, 4, new_tokens=5)
