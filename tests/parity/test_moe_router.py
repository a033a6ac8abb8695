"""The router of a training on the host against the cells that a graph has, and what it must not do.

Limit: tolerances.py, for norm, scores and softmax and back; the softmax's gradient cancels, so that `scale` is 3.
"""

from __future__ import annotations

import json
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor
from numpy_kernels import distance
from tolerances import rounding_limit

from trainer.arrays.moe.router import CpuRouter
from trainer.config import parse_config
from trainer.models.inputs import SequenceWeights
from trainer.models.moe import Gates, Router, RouterLosses
from trainer.ops import plain_moe as moe_reference
from trainer.ops.kernel_set import load_kernels
from trainer.ops.routing import Routing
from trainer.ops.select import select_kernels

ROWS, LENGTH, HIDDEN, EXPERTS, CHOSEN = 3, 5, 8, 6, 2
TOKENS = ROWS * LENGTH
LIMIT = rounding_limit(2 * (2 * HIDDEN + EXPERTS + 8), TOKENS, scale=3)


def settings_of(**moe: Any):
    section = {"expert_num": EXPERTS, "num_experts_chosen": CHOSEN, **moe}
    sizes = {"hidden_size": HIDDEN, "num_heads": 2, "seq_length": LENGTH, "moe_config": section}
    return parse_config("experts", json.dumps({"model": {"model_config": sizes}})).decoder


def sequence_weights_of(valid: np.ndarray) -> SequenceWeights:
    mean_BN = np.repeat(np.eye(ROWS, dtype=np.float32) / LENGTH, LENGTH, axis=1)
    arrays = mean_BN, np.repeat(mean_BN, CHOSEN, axis=1), valid.sum(1, keepdims=True), valid.reshape(-1, 1)
    return SequenceWeights(*(Tensor(array.astype(np.float32)) for array in arrays))


def weighted(gates_Nk: Tensor, aux_loss: Tensor, z: Tensor, weights: np.ndarray) -> Tensor:
    """A number that each of the three has a share in."""
    return (gates_Nk * Tensor(weights)).sum() + aux_loss * 0.7 + z * 0.3


@pytest.mark.parametrize("z_loss_factor", [0.0, 0.001])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("balancing", ["seq_aux_loss", "gbs_aux_loss"])
def test_numbers_and_gradients_are_those_of_the_cells(
    balancing: str, sigmoid: bool, norm_topk_prob: bool, z_loss_factor: float
):
    settings = settings_of(
        moe_router_load_balancing_type=balancing,
        use_gating_sigmoid=sigmoid,
        norm_topk_prob=norm_topk_prob,
        z_loss_factor=z_loss_factor,
        routed_scaling_factor=2.5,
    )
    random = np.random.default_rng(7)
    x, router = (
        Tensor(random.standard_normal(shape).astype(np.float32)) for shape in ((TOKENS, HIDDEN), (EXPERTS, HIDDEN))
    )
    weights = random.standard_normal((TOKENS, CHOSEN)).astype(np.float32)
    sequence_weights = sequence_weights_of(random.random((ROWS, LENGTH)) < 0.7)
    route, host = moe_reference.Route(EXPERTS, CHOSEN), CpuRouter(settings.experts)
    kernels = load_kernels(select_kernels(settings, "CPU"))
    ones, norm = Tensor(np.ones(HIDDEN, np.float32)), kernels.rms_norm(HIDDEN, settings.rms_norm_eps)
    cells = Router(settings, kernels), Gates(settings), RouterLosses(settings, kernels)
    said: dict[str, list[np.ndarray]] = {}
    of_step = random.random(EXPERTS)
    shares = (lambda requested_E: of_step / of_step.sum()) if balancing == "gbs_aux_loss" else None

    def of_cells(x: Tensor, router: Tensor) -> Tensor:
        _, logits, scores = cells[0](x, ones, router)
        routing = route(scores, None, None, "position")
        load = routing.experts_Nk if shares is None else Tensor(shares(None).astype(np.float32)[None])
        found = cells[1](scores, routing.experts_Nk), *cells[2](logits, scores, load, *sequence_weights)
        said["cells"] = [one.asnumpy() for one in (*found, routing.experts_Nk, scores)]
        return weighted(*found, weights)

    def on_host(x: Tensor, router: Tensor) -> Tensor:
        def decide(scores_NE: np.ndarray) -> Routing:
            return route.of_arrays(scores_NE, None, None, "position")

        found = host(norm(x, ones), router, sequence_weights.tokens_B1, sequence_weights.valid_N1, decide, shares)
        said["host"] = [*(one.asnumpy() for one in found[:3]), found.routing.experts_Nk, found.scores_NE]
        return weighted(*found[:3], weights)

    gradients = [mindspore.grad(function, (0, 1))(x, router) for function in (of_cells, on_host)]
    np.testing.assert_array_equal(said["host"][3], said["cells"][3])
    for mine, right in zip(said["host"], said["cells"], strict=True):
        assert distance(mine, right) < LIMIT
    for right, mine in zip(*gradients, strict=True):
        assert distance(mine.asnumpy(), right.asnumpy()) < LIMIT
    assert (said["host"][2] != 0) == (z_loss_factor > 0)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_scores_of_any_size_are_numbers(sigmoid: bool) -> None:
    settings = settings_of(use_gating_sigmoid=sigmoid, z_loss_factor=0.001)
    host, route = CpuRouter(settings.experts), moe_reference.Route(EXPERTS, CHOSEN)
    sequence_weights = sequence_weights_of(np.ones((ROWS, LENGTH)))

    def loss(x: Tensor, router: Tensor) -> Tensor:
        found = host(x, router, sequence_weights.tokens_B1, sequence_weights.valid_N1,
                     lambda scores: route.of_arrays(scores, None, None, "position"))  # fmt: skip
        return found.gates_Nk.sum() + found.aux_loss + found.z_loss

    x = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32) * 300
    value, gradients = mindspore.value_and_grad(loss, (0, 1))(Tensor(x), Tensor(np.ones((EXPERTS, HIDDEN), np.float32)))
    assert np.isfinite(value.asnumpy()) and all(np.isfinite(gradient.asnumpy()).all() for gradient in gradients)


def test_half_precision_enters_and_its_gradient_leaves() -> None:
    """The arithmetic is float32, and the router's weight keeps its own gradient."""
    settings, route = settings_of(), moe_reference.Route(EXPERTS, CHOSEN)
    host, random = CpuRouter(settings.experts), np.random.default_rng(2)
    sequence_weights = sequence_weights_of(np.ones((ROWS, LENGTH)))
    y = random.standard_normal((TOKENS, HIDDEN)).astype(np.float16)
    router = Tensor(random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32))

    def loss(y: Tensor, router: Tensor) -> Tensor:
        decide = lambda scores: route.of_arrays(scores, None, None, "position")  # noqa: E731
        return (host(y, router, sequence_weights.tokens_B1, sequence_weights.valid_N1, decide).gates_Nk ** 2).sum()

    found = [mindspore.grad(loss, (0, 1))(Tensor(y.astype(dtype)), router) for dtype in (np.float16, np.float32)]
    assert [gradient.dtype for gradient in found[0]] == [mindspore.float16, mindspore.float32]
    assert distance(found[0][1].asnumpy(), found[1][1].asnumpy()) == 0
    assert distance(found[0][0].asnumpy(), found[1][0].asnumpy()) < 1e-3


def test_the_cells_are_kept_for_graphs() -> None:
    """On Ascend the choice is in the graph, and so is the router."""
    settings = settings_of(use_gmm=True)
    of_device = {name: load_kernels(select_kernels(settings, name)) for name in ("CPU", "Ascend")}
    assert of_device["CPU"].cpu_router is CpuRouter and of_device["CPU"].cpu_experts is not None
    assert of_device["Ascend"].cpu_router is None and of_device["Ascend"].cpu_experts is None
