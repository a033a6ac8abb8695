"""The router of native layers against the cells that a graph has, and what it must not do.

Limit: tolerances.py, for norm, scores and softmax and back; the softmax's gradient cancels, so that `scale` is 3.
"""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from decoder_settings import decoder_settings
from mindspore import Tensor
from numpy_kernels import assert_close
from tolerances import rounding_limit

from trainer.arrays.moe.router import CpuRouter, RouterLabels
from trainer.arrays.tiles import CpuRmsNorm
from trainer.config.schema.model import ModelConfig
from trainer.models.inputs import SequenceWeights
from trainer.models.moe import Gates, Router, RouterLosses
from trainer.models.spec.model import NormSpec
from trainer.ops import plain_moe
from trainer.ops.kernel_set import load_kernels
from trainer.ops.routing import Routing, RoutingRule, route
from trainer.ops.select import select_kernels

ROWS, LENGTH, HIDDEN, EXPERTS, CHOSEN = 3, 5, 8, 6, 2
TOKENS = ROWS * LENGTH
LIMIT = rounding_limit(2 * (2 * HIDDEN + EXPERTS + 8), TOKENS, scale=3)


def settings_of(**moe: Any) -> ModelConfig:
    section = {"expert_num": EXPERTS, "num_experts_chosen": CHOSEN, **moe}
    return decoder_settings(hidden_size=HIDDEN, num_heads=2, seq_length=LENGTH, moe_config=section)


def sequence_weights_of(valid: np.ndarray) -> SequenceWeights:
    mean_BN = np.repeat(np.eye(ROWS, dtype=np.float32) / LENGTH, LENGTH, axis=1)
    arrays = mean_BN, np.repeat(mean_BN, CHOSEN, axis=1), valid.sum(1, keepdims=True), valid.reshape(-1, 1)
    return SequenceWeights(*(Tensor(array.astype(np.float32)) for array in arrays))


def labels_of(weights: SequenceWeights) -> RouterLabels:
    return RouterLabels(weights.tokens_B1.asnumpy(), weights.valid_N1.asnumpy())


def decide(scores_NE: np.ndarray) -> Routing:
    return route(RoutingRule(EXPERTS, CHOSEN), scores_NE)


def weighted(gates_Nk: Tensor, aux_loss: Tensor, z: Tensor, weights: np.ndarray) -> Tensor:
    """Returns a number that each of the three has a share in."""
    return (gates_Nk * Tensor(weights)).sum() + aux_loss * 0.7 + z * 0.3


@pytest.mark.parametrize("z_loss_factor", [0.0, 0.001])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("balancing", ["seq_aux_loss", "gbs_aux_loss"])
def test_numbers_and_gradients_are_those_of_the_cells(
    balancing: str, sigmoid: bool, norm_topk_prob: bool, z_loss_factor: float
):
    settings = settings_of(
        moe_router_load_balancing_type=balancing, use_gating_sigmoid=sigmoid, norm_topk_prob=norm_topk_prob,
        z_loss_factor=z_loss_factor, routed_scaling_factor=2.5,
    )  # fmt: skip
    random = np.random.default_rng(7)
    x, router = (
        Tensor(random.standard_normal(shape).astype(np.float32)) for shape in ((TOKENS, HIDDEN), (EXPERTS, HIDDEN))
    )
    weights = random.standard_normal((TOKENS, CHOSEN)).astype(np.float32)
    sequence_weights = sequence_weights_of(random.random((ROWS, LENGTH)) < 0.7)
    route_cell = plain_moe.Route(RoutingRule(EXPERTS, CHOSEN))
    kernels = load_kernels(select_kernels(settings, "CPU"))
    ones = np.ones(HIDDEN, np.float32)
    cells = Router(settings, kernels), Gates(settings), RouterLosses(settings, kernels)
    said: dict[str, list[np.ndarray]] = {}
    of_step = random.random(EXPERTS)
    shares = (lambda requested_E: of_step / of_step.sum()) if balancing == "gbs_aux_loss" else None

    def of_cells(x: Tensor, router: Tensor) -> Tensor:
        _, logits, scores = cells[0](x, Tensor(ones), router)
        routing = route_cell(scores, None, None, "position")
        load = routing.experts_Nk if shares is None else Tensor(shares(None).astype(np.float32)[None])
        found = cells[1](scores, routing.experts_Nk), *cells[2](logits, scores, load, *sequence_weights)
        said["cells"] = [one.asnumpy() for one in (*found, routing.experts_Nk, scores)]
        return weighted(*found, weights)

    def natively(x: np.ndarray, router: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the gradients of x, through the norm, and of the router."""
        norm, native = CpuRmsNorm(NormSpec(settings.rms_norm_eps)), CpuRouter(settings.experts)
        labels = labels_of(sequence_weights)
        y, scale = np.empty_like(x), norm.scales(x)
        norm(x, ones, scale, y)
        found = native.forward(y, router, labels, decide, shares)
        losses = np.float32(found.aux_loss), np.float32(found.z_loss)
        said["host"] = [found.gates_Nk, *losses, found.routing.experts_Nk, found.scores_NE]
        grad = np.zeros_like(x)
        of_logits = native.backward(router, labels, found, weights, np.float32(0.7), np.float32(0.3), grad)
        of_router = of_logits.T @ y
        norm.gradient(x, ones, scale, grad, np.empty_like(x))
        return grad, of_router

    right = mindspore.grad(of_cells, (0, 1))(x, router)
    gradients = natively(x.asnumpy(), router.asnumpy())
    np.testing.assert_array_equal(said["host"][3], said["cells"][3])
    assert_close(said["host"], said["cells"], LIMIT)
    assert_close(gradients, right, LIMIT)
    assert (said["host"][2] != 0) == (z_loss_factor > 0)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_scores_of_any_size_are_numbers(sigmoid: bool) -> None:
    settings = settings_of(use_gating_sigmoid=sigmoid, z_loss_factor=0.001)
    native, labels = CpuRouter(settings.experts), labels_of(sequence_weights_of(np.ones((ROWS, LENGTH))))
    y = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32) * 300
    router, grad = np.ones((EXPERTS, HIDDEN), np.float32), np.zeros_like(y)
    found = native.forward(y, router, labels, decide)
    one = np.float32(1)
    of_logits = native.backward(router, labels, found, np.ones((TOKENS, CHOSEN), np.float32), one, one, grad)
    of_router = of_logits.T @ y
    for array in (found.gates_Nk, found.aux_loss, found.z_loss, grad, of_router):
        assert np.isfinite(array).all()
    gates, routing = native.choose(y, router, decide)
    np.testing.assert_array_equal(gates, found.gates_Nk)
    np.testing.assert_array_equal(routing.experts_Nk, found.routing.experts_Nk)
