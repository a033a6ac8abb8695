"""What a rank of test_expert_parallel.py computes: a layer with experts whose ranks hold some of them each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from tiny_trainer import config_of  # noqa: E402

from trainer.config.schema.model import ModelConfig  # noqa: E402
from trainer.models.inputs import SequenceWeights  # noqa: E402
from trainer.models.moe import MoeLayer  # noqa: E402
from trainer.models.spec.shapes import moe_shapes  # noqa: E402
from trainer.ops.kernel_set import load_kernels  # noqa: E402
from trainer.ops.precision import resolve_precision  # noqa: E402
from trainer.ops.select import select_kernels  # noqa: E402
from trainer.parallel.collectives import Group  # noqa: E402
from trainer.parallel.tensor import ModelShard  # noqa: E402

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


def on_rank(world: Group, names: list[str]) -> dict[str, list[list[np.ndarray]]]:
    """Of each case, with groups of 2 and of 4 ranks: what a rank computes."""
    pairs = world.part([world.rank // 2 * 2, world.rank // 2 * 2 + 1], "pair")
    return {name: [computed(name, world.rank, group) for group in (pairs, world)] for name in names}


def computed(name: str, rank: int, group: Group | None = None) -> list[np.ndarray]:
    """Output, gradients of the input and of the weights, for the tokens of a rank and all experts or a part."""
    settings = settings_of(name)
    kernels = load_kernels(select_kernels(settings, "CPU"), resolve_precision(settings, None, "CPU"))
    shard = None if group is None else ModelShard(None, None, experts=group)
    layer, experts = MoeLayer(settings, kernels, False, shard), settings.experts.expert_num
    own = slice(0, experts) if group is None else slice(
        group.rank * experts // group.size, (group.rank + 1) * experts // group.size)  # fmt: skip
    draw, weights = np.random.default_rng(11), []
    for weight, shape in moe_shapes(settings).items():
        value = draw.normal(size=shape).astype(np.float32) * 0.5
        if weight == "mlp.gate.weight" and name == "one expert takes all":
            value[:] = 0  # all scores are equal: the first expert wins, and others have no row
        value = value[own] if weight.startswith("mlp.experts.") else value
        weights.append(Parameter(Tensor(np.ascontiguousarray(value)), weight))
    x, dout = np.random.default_rng(rank).normal(size=(2, TOKENS, settings.hidden_size)).astype(np.float32)
    ones = Tensor(np.ones((TOKENS, 1), np.float32))
    mean = Tensor(np.full((1, TOKENS), 1 / TOKENS, np.float32))
    mean_BR = Tensor(np.full((1, TOKENS * settings.experts.num_experts_chosen), 1 / TOKENS, np.float32))
    sequence = SequenceWeights(mean, mean_BR, Tensor(np.full((1, 1), TOKENS, np.float32)), ones)
    outs = []

    def forward(x, *weights):
        out, aux_loss, _, _, _ = layer.train(x, weights, sequence, None, settings.experts.capacity(TOKENS))
        outs.append(out)
        return out, aux_loss

    gradient = ops.GradOperation(get_all=True, sens_param=True)(forward)
    gradients = gradient(Tensor(x), *weights, (Tensor(dout), Tensor(np.float32(0.3))))
    return [each.asnumpy() for each in (*outs, *gradients)]
