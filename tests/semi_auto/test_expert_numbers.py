"""Experts of semi-automatic mode on a single rank against explicit mode: steps, rates and the expert bias.

The operators that a CPU lacks are replaced by others that do what their documentation says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from expert_operators import GroupedMatmul, operators_of_a_cpu
from numpy_kernels import assert_close, distance
from test_semi_auto import batch, config_of, drawn_weights, explicit
from tolerances import FEW_OPERATIONS, SEVERAL_OPERATORS

from trainer.ops.ascend import moe as moe_ascend
from trainer.parallel.world import SINGLE_PROCESS
from trainer.semi_auto import network
from trainer.semi_auto.training import open_semi_auto_training

MOE = {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 12, "aux_loss_factor": 0.01}
BALANCED = {
    "use_gating_sigmoid": True, "balance_via_topk_bias": True, "topk_bias_update_rate": 0.1, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "use_gmm": True, "shared_expert_num": 1, "z_loss_factor": 0.01,
}  # fmt: skip

LEAST_SUM = {"topk_method": "noaux_tc", "moe_norm_min": 0.5, "use_gmm": True}
"""The router of ERNIE 4.5."""


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    load = network.load_kernels

    def load_kernels(choices, precision, **options):
        found = load(choices, precision, **options)
        if options:
            return found
        return dataclasses.replace(found, route=moe_ascend.Route, grouped_matmul=GroupedMatmul)

    monkeypatch.setattr(network, "load_kernels", load_kernels)
    with operators_of_a_cpu():
        yield


@pytest.mark.parametrize("moe", [BALANCED, LEAST_SUM], ids=["balanced", "least sum"])
def test_steps_are_those_of_explicit_mode(on_a_cpu: None, moe: dict[str, Any]) -> None:
    top = {"optimizer": {"type": "SGD", "momentum": 0.0}}
    config = config_of(top, num_layers=1, moe_config=MOE | moe)
    weights = drawn_weights(config, 0.3)
    run = explicit(config, lambda update: 0.1, weights)
    step = open_semi_auto_training(config, lambda update: 0.1, weights, SINGLE_PROCESS, "CPU")
    for number in range(2):
        window = [batch(number)]
        right, mine = run(window), step(window)
        assert mine.global_norm == pytest.approx(right.global_norm, rel=FEW_OPERATIONS)
        for rate, expected in zip(mine.router_rates[1:], right.router_rates[1:], strict=True):
            np.testing.assert_allclose(rate, expected, SEVERAL_OPERATORS)
    saved, expected = step.state_dict_shard().weights, run.state_dict_shard().weights
    assert_close(saved, {name: piece.array for name, piece in expected.items()}, FEW_OPERATIONS)
    evaluated = step.model(batch(2)).tokens.asnumpy(), run.model(run.build_inputs(batch(2))).tokens.asnumpy()
    assert distance(*evaluated) < FEW_OPERATIONS
