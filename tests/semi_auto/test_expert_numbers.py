"""Experts of semi-automatic mode on a single rank against explicit mode: steps, rates and the expert bias.

The operators that a CPU lacks are replaced by others that do what their documentation says.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from mindspore import dtype as mstype
from mindspore import mint, nn, ops
from numpy_kernels import distance
from test_semi_auto import batch, config_of

from trainer.models.shapes import all_shapes
from trainer.ops.ascend import moe as moe_ascend
from trainer.parallel.world import SINGLE_PROCESS
from trainer.run.session import open_training
from trainer.semi_auto import kernels as plain_kernels
from trainer.semi_auto import network
from trainer.semi_auto.training import open_semi_auto_training

MOE = {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 12, "aux_loss_factor": 0.01}
BALANCED = {
    "use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.1, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "use_gmm": True, "shared_expert_num": 1, "z_loss_factor": 0.01,
}  # fmt: skip


def argsort(values, dim, descending, stable):
    """By counting what stands before each value: equal ones keep their order."""
    values = values if descending else -values
    place = ops.arange(values.shape[-1])
    earlier = place.expand_dims(0) < place.expand_dims(1)
    mine, other = values.expand_dims(-1), values.expand_dims(-2)
    before = ops.logical_or(other > mine, ops.logical_and(other == mine, earlier))
    rank = before.astype(mstype.float32).sum(-1)
    return ops.argmax((rank.expand_dims(-2) == place.astype(mstype.float32).expand_dims(-1)).astype(mstype.float32), -1)


def index_select(x, dim, index):
    return ops.gather(x, index, dim)


def scatter(x, dim, index, src):
    return ops.tensor_scatter_elements(x, index.astype(mstype.int32), src, dim)


class GroupedMatmul(nn.Cell):
    """Each expert's rows, the others set to zero, times its weight."""

    def __init__(self, fills_rows: bool = False) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x_RI, weight_EOI, counts_E):
        counts_E = counts_E.astype(mstype.float32)
        ends_E, place_R = ops.cumsum(counts_E, 0), ops.arange(x_RI.shape[0]).astype(mstype.float32)
        out_RO = 0
        for expert in range(weight_EOI.shape[0]):
            inside_R = ops.logical_and(place_R < ends_E[expert], place_R >= ends_E[expert] - counts_E[expert])
            out_RO += ops.matmul(x_RI * inside_R.astype(x_RI.dtype).expand_dims(-1), weight_EOI[expert].T)
        return out_RO


@pytest.fixture
def operators_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mint, "argsort", argsort)
    monkeypatch.setattr(mint, "index_select", index_select)
    monkeypatch.setattr(mint, "scatter", scatter)
    load = network.load_kernels

    def load_kernels(choices, precision, *modules, **options):
        found = load(choices, precision, *modules, **options)
        if modules:
            return found
        own = {"route": moe_ascend.Route, "grouped_matmul": GroupedMatmul, "swiglu": plain_kernels.SwiGLU}
        return dataclasses.replace(found, **own)

    monkeypatch.setattr(network, "load_kernels", load_kernels)


def test_steps_are_those_of_explicit_mode(operators_of_a_cpu: None) -> None:
    top = {"optimizer": {"type": "SGD", "momentum": 0.0}}
    config = config_of(top, num_layers=1, moe_config=MOE | BALANCED)
    random = np.random.default_rng(1)
    shapes = all_shapes(config.decoder)
    weights = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    run = open_training(config, lambda update: 0.1, weights)
    step = open_semi_auto_training(config, lambda update: 0.1, weights, SINGLE_PROCESS, "CPU")
    for number in range(2):
        window = [batch(number)]
        right, mine = run(window), step(window)
        assert mine.global_norm == pytest.approx(right.global_norm, rel=1e-6)
        for rate, expected in zip(mine.router_rates[1:], right.router_rates[1:], strict=True):
            np.testing.assert_allclose(rate, expected, 1e-5)
    saved, expected = step.to_save().weights, run.to_save().weights
    assert max(distance(saved[name], expected[name]) for name in expected) < 1e-6
    evaluated = step.model(batch(2)).tokens.asnumpy(), run.model(run.build_inputs(batch(2))).tokens.asnumpy()
    assert distance(*evaluated) < 1e-6
