"""What a rank of test_expert_parallel.py computes: a layer with experts whose ranks hold some of them each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from tiny_trainer import config_of  # noqa: E402

from trainer.arrays.moe.router import RouterLabels  # noqa: E402
from trainer.arrays.moe.sublayer import CpuMoe, MoeInputs  # noqa: E402
from trainer.arrays.sublayer import SublayerCall  # noqa: E402
from trainer.arrays.tiles import Scratch  # noqa: E402
from trainer.config.schema.model import ModelConfig  # noqa: E402
from trainer.models.spec.build import model_spec  # noqa: E402
from trainer.models.spec.shapes import moe_shapes  # noqa: E402
from trainer.ops.routing import RoutingRule  # noqa: E402
from trainer.parallel.host_group import HostGroup  # noqa: E402
from trainer.parallel.sharding import range_of_rank  # noqa: E402

RANKS, TOKENS = 4, 8
_EXPERTS = {"expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 12, "aux_loss_factor": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "dropless": {"shared_expert_num": 1, "moe_shared_expert_intermediate_size": 10,
                 "model": {"mlp_down_has_bias": True}},
    "capacity": {"capacity_factor": 1.0},
    "safe tokens": {"use_gmm": True, "enable_gmm_safe_tokens": True},
    "one expert takes all": {"num_experts_chosen": 1},
    "all tokens on all ranks": {"capacity_factor": 1.0, "shared_expert_num": 1, "model": {"mlp_down_has_bias": True},
                                "moe_token_dispatcher_type": "allgather"},
}  # fmt: skip


def settings_of(name: str) -> ModelConfig:
    case = dict(CASES[name])
    return config_of(model=case.pop("model", {}) | {"moe_config": _EXPERTS | case}).decoder


def on_rank(world: HostGroup, names: list[str]) -> dict[str, list[list[np.ndarray]]]:
    """Of each case, with groups of 2 and of 4 ranks: what a rank computes."""
    pairs = world.part([world.rank // 2 * 2, world.rank // 2 * 2 + 1], "pair")
    return {name: [computed(name, world.rank, group) for group in (pairs, world)] for name in names}


def computed(name: str, rank: int, group: HostGroup | None = None) -> list[np.ndarray]:
    """Output, gradients of the input and of the weights, for the tokens of a rank and all experts or a part."""
    settings = settings_of(name)
    moe = settings.experts
    layer = CpuMoe(model_spec(settings).layers[0].mlp, moe, RoutingRule.of(moe), Scratch(), experts=group)
    own = slice(None)
    if group is not None:
        own = range_of_rank(moe.expert_num, group.rank, group.size)
    draw, weights = np.random.default_rng(11), {}
    for weight, shape in moe_shapes(settings).items():
        value = draw.normal(size=shape).astype(np.float32) * 0.5
        if weight == "mlp.gate.weight" and name == "one expert takes all":
            value[:] = 0  # all scores are equal: the first expert wins, and others have no row
        value = value[own] if weight.startswith("mlp.experts.") else value
        weights[weight] = np.ascontiguousarray(value)
    x_ND, dout_ND = np.random.default_rng(rank).normal(size=(2, TOKENS, settings.hidden_size)).astype(np.float32)
    labels = RouterLabels(np.full((1, 1), TOKENS, np.float32), np.ones((TOKENS, 1), np.float32))
    out, passed = layer.forward(SublayerCall(weights), x_ND, MoeInputs(labels, moe.capacity(TOKENS)))
    losses = np.float32(0.3), np.float32(0)
    grad, found = layer.backward(SublayerCall(weights), passed, dout_ND, *losses, weights)
    return [each.asnumpy().copy() for each in (out, grad, *(found[weight] for weight in weights))]
