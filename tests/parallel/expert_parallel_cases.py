"""What a rank of test_expert_parallel.py computes: a layer with experts whose ranks hold some of them each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from mindspore import Parameter, Tensor, ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from tiny_trainer import config_of  # noqa: E402

from trainer.arrays.moe.router import RouterLabels  # noqa: E402
from trainer.arrays.moe.sublayer import CpuMoe, MoeInputs  # noqa: E402
from trainer.arrays.tiles import Scratch, SublayerCall  # noqa: E402
from trainer.config.schema.model import ModelConfig  # noqa: E402
from trainer.models.inputs import SequenceWeights  # noqa: E402
from trainer.models.moe import MoeLayer  # noqa: E402
from trainer.models.spec.build import model_spec  # noqa: E402
from trainer.models.spec.shapes import moe_shapes  # noqa: E402
from trainer.ops import dispatch  # noqa: E402
from trainer.ops.kernel_set import load_kernels  # noqa: E402
from trainer.ops.precision import resolve_precision  # noqa: E402
from trainer.ops.routing import RoutingRule  # noqa: E402
from trainer.ops.select import select_kernels  # noqa: E402
from trainer.parallel.host_group import CpuGroup  # noqa: E402
from trainer.parallel.sharding import shard_range  # noqa: E402
from trainer.parallel.tensor import RankModelShard  # noqa: E402

RANKS, TOKENS, AUX_GRADIENT = 4, 8, 0.3
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


def on_rank(world: CpuGroup, names: list[str]) -> dict[str, list[list[np.ndarray]]]:
    """Returns the results of a rank for each case, with groups of 2 and of 4 ranks, also of a device's cells if it
    has the dispatcher."""
    pairs = world.new_subgroup([world.rank // 2 * 2, world.rank // 2 * 2 + 1], "pair")
    found = {}
    for name in names:
        found[name] = [computed(name, world.rank, group) for group in (pairs, world)]
        if "moe_token_dispatcher_type" not in CASES[name]:
            found[f"cells, {name}"] = [computed_by_cells(name, world.rank, group) for group in (pairs, world)]
    return found


def computed(name: str, rank: int, group: CpuGroup | None = None) -> list[np.ndarray]:
    """Returns output and gradients of input and weights, for the tokens of a rank and all experts or a part."""
    settings = settings_of(name)
    moe = settings.experts
    layer = CpuMoe(model_spec(settings).layers[0].mlp, moe, RoutingRule.from_config(moe), Scratch(), experts=group)
    weights = weights_of(name, group)
    x_ND, dout_ND = inputs_of(name, rank)
    labels = RouterLabels(np.full((1, 1), TOKENS, np.float32), np.ones((TOKENS, 1), np.float32))
    out, passed = layer.forward(SublayerCall(weights), x_ND, MoeInputs(labels, moe.capacity(TOKENS)))
    losses = np.float32(AUX_GRADIENT), np.float32(0)
    grad, found = layer.backward(SublayerCall(weights, trained=weights), passed, dout_ND, *losses)
    return [each.copy() for each in (out, grad, *(found[weight] for weight in weights))]


def inputs_of(name: str, rank: int) -> np.ndarray:
    """Returns the tokens of a rank, and the gradient of the result."""
    return np.random.default_rng(rank).normal(size=(2, TOKENS, settings_of(name).hidden_size)).astype(np.float32)


def weights_of(name: str, group: CpuGroup | None) -> dict[str, np.ndarray]:
    settings, own = settings_of(name), slice(None)
    if group is not None:
        own = shard_range(settings.experts.expert_num, group.rank, group.size)
    draw, weights = np.random.default_rng(11), {}
    for weight, shape in moe_shapes(settings).items():
        value = draw.normal(size=shape).astype(np.float32) * 0.5
        if weight == "mlp.gate.weight" and name == "one expert takes all":
            value[:] = 0  # all scores are equal: the first expert wins, and others have no row
        value = value[own] if weight.startswith("mlp.experts.") else value
        weights[weight] = np.ascontiguousarray(value)
    return weights


def computed_by_cells(name: str, rank: int, group: CpuGroup) -> list[np.ndarray]:
    """Computes them with the cells and the dispatcher of a device, while the ranks exchange arrays in its place."""
    settings = settings_of(name)
    kernels = load_kernels(select_kernels(settings, "CPU"), resolve_precision(settings, None, "CPU"))
    layer = MoeLayer(settings, kernels, False, RankModelShard(None, None, experts=group))
    weights = [Parameter(Tensor(value), weight) for weight, value in weights_of(name, group).items()]
    x_ND, dout_ND = inputs_of(name, rank)
    ones = Tensor(np.ones((TOKENS, 1), np.float32))
    mean = Tensor(np.full((1, TOKENS), 1 / TOKENS, np.float32))
    mean_BR = Tensor(np.full((1, TOKENS * settings.experts.num_experts_chosen), 1 / TOKENS, np.float32))
    sequence = SequenceWeights(mean, mean_BR, Tensor(np.full((1, 1), TOKENS, np.float32)), ones)
    outs = []

    def forward(x, *weights):
        out, aux_loss, _, _, _ = layer.train(x, weights, sequence, None, settings.experts.capacity(TOKENS))
        outs.append(out)
        return out, aux_loss

    counts = mock.patch.object(dispatch, "exchange_counts", exchange_counts)
    with counts, mock.patch.object(dispatch, "exchange_rows", exchange_rows):
        gradient = ops.GradOperation(get_all=True, sens_param=True)(forward)
        gradients = gradient(Tensor(x_ND), *weights, (Tensor(dout_ND), Tensor(np.float32(AUX_GRADIENT))))
    return [each.asnumpy() for each in (*outs, *gradients)]


def exchange_counts(counts: Tensor, group: CpuGroup) -> np.ndarray:
    """Exchanges counts as `collectives.exchange_counts` does."""
    given = counts.asnumpy().reshape(group.size, -1)
    return np.stack([given, np.stack(group.all_to_all(list(given), [given[0].shape] * group.size))])


def exchange_rows(
    rows: Tensor, send: np.ndarray, receive: np.ndarray, group: CpuGroup, least: int | None = None
) -> Tensor:
    """Exchanges rows as `collectives.exchange_rows` does."""
    array, total = rows.asnumpy(), int(receive.sum())
    result = np.zeros((max(total, least or 0), *array.shape[1:]), array.dtype)
    group.all_to_all_into(
        np.split(array[: send.sum()], np.cumsum(send)[:-1]), np.split(result[:total], np.cumsum(receive)[:-1])
    )
    return Tensor(result)
