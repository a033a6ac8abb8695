"""Ranks that share the state of an optimizer: the same bits as one that has all of it.

The ranks are optimizers of one process here, each with weights of its own; `Ranks` hands on what they have updated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest
from adamw_operator import adamw_as_documented
from mindspore import Parameter, Tensor
from numpy_kernels import assert_same_bits

from trainer.config import parse_config
from trainer.optim.groups import parameter_groups
from trainer.optim.optimizer import AdamW, Optimizer, build_optimizer
from trainer.parallel.sharding import OptimizerShard, shard_range

SHAPES = {"embedding": (61, 9), "norm": (17,), "matrix": (40, 33), "large": (300, 700), "bias": (2,)}
THRESHOLD_BYTES = 4 * 500  # norm and bias stay whole
SHARED = ("embedding", "matrix", "large")
KINDS = ("AdamW", "SGD", "nesterov", "AdamW by operators")
EACH = pytest.mark.parametrize("kind", KINDS)

Arrays = dict[str, np.ndarray]


def build(kind: str, weights: Mapping[str, np.ndarray], shard: OptimizerShard | None = None) -> Optimizer:
    section = {"weight_decay": 0.1, "type": "AdamW" if "AdamW" in kind else "SGD"}
    section |= {} if "AdamW" in kind else {"momentum": 0.9, "nesterov": kind == "nesterov"}
    settings = parse_config(kind, json.dumps({"optimizer": section})).optimizer
    parameters = {name: Parameter(Tensor(array.copy()), name=name) for name, array in weights.items()}
    groups = parameter_groups(SHAPES, settings)
    shards = {} if shard is None else {name: shard for name in SHAPES if shard.is_sharded(parameters[name].size)}
    if kind == "AdamW by operators":
        optimizer = AdamW(parameters, groups, settings, device="Ascend", shards=shards)
        optimizer.apply.update = adamw_as_documented
        return optimizer
    return build_optimizer(parameters, groups, settings, shards=shards)


def weights_of(optimizer: Optimizer) -> Arrays:
    return {name: parameter.asnumpy() for name, parameter in optimizer.parameters.items()}


class Ranks:
    """Optimizers of several ranks that shard their state."""

    def __init__(self, kind: str, weights: Mapping[str, np.ndarray], ranks: int) -> None:
        self.given: dict[int, tuple[Sequence[Parameter], Sequence[Tensor] | None]] = {}
        self.optimizers = [
            build(kind, weights, OptimizerShard(rank, ranks, THRESHOLD_BYTES, partial(self.all_gather, rank)))
            for rank in range(ranks)
        ]

    def all_gather(self, rank: int, parameters: Sequence[Parameter], parts: Sequence[Tensor] | None) -> None:
        assert rank not in self.given
        self.given[rank] = (parameters, parts)

    def update(self, gradients: Sequence[Tensor], lr: float, scale: Sequence[float] | float = 1.0) -> None:
        for optimizer in self.optimizers:
            optimizer.update(gradients, lr, scale)
        for number, name in enumerate(SHARED):
            wholes = [self.given[rank][0][number] for rank in range(len(self.optimizers))]
            assert all(parameter.name == name for parameter in wholes)
            ranges = [shard_range(wholes[0].size, rank, len(wholes)) for rank in range(len(wholes))]
            parts = [
                whole.asnumpy().reshape(-1)[own]
                if self.given[rank][1] is None
                else self.given[rank][1][number].asnumpy()
                for rank, (whole, own) in enumerate(zip(wholes, ranges, strict=True))
            ]
            for parameter in wholes:
                parameter.set_data(Tensor(np.concatenate(parts).reshape(parameter.shape)))
        self.given.clear()

    def state(self) -> Arrays:
        """Returns the states of all ranks put together."""
        states = [optimizer.state_arrays() for optimizer in self.optimizers]
        return {
            name: np.concatenate([state[name].reshape(-1) for state in states])
            if name.split(".")[1] in self.optimizers[0].local_ranges else states[0][name]
            for name in states[0]
        }  # fmt: skip


def start(seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(step: int) -> list[Tensor]:
    return [Tensor(array) for array in start(step + 1).values()]


@EACH
@pytest.mark.parametrize("ranks", [2, 5])
def test_sharing_changes_no_bit(kind: str, ranks: int) -> None:
    alone, shared = build(kind, start()), Ranks(kind, start(), ranks)
    scales = [0.5, 1.0, 0.25, 0.5, 1.0]  # of one group of parameters clipped, for example
    for step in range(4):
        scale = scales if step == 2 else 0.5 if step == 1 else 1.0
        alone.update(gradients(step), 1e-2, scale)
        shared.update(gradients(step), 1e-2, scale)
        for optimizer in shared.optimizers:
            assert_same_bits(optimizer.parameters, alone.parameters)
    assert_same_bits(shared.state(), alone.state_arrays())


@EACH
def test_a_rank_keeps_its_part_of_the_large_and_all_of_the_rest(kind: str) -> None:
    shared = Ranks(kind, start(), 4)
    kinds = list(shared.optimizers[0].state)
    for rank, optimizer in enumerate(shared.optimizers):
        for state in kinds:
            sizes = {name: array.size for name, array in optimizer.state[state].items()}
            for name, size in sizes.items():
                own = shard_range(int(np.prod(SHAPES[name])), rank, 4)
                assert size == (own.stop - own.start if name in SHARED else np.prod(SHAPES[name])), name
        assert optimizer.state_arrays().keys() == {f"{state}.{name}" for state in kinds for name in SHAPES}


@EACH
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4), (4, 1)])
def test_the_state_of_so_many_ranks_goes_on_with_others(kind: str, before: int, after: int) -> None:
    alone = build(kind, start())
    first = Ranks(kind, start(), before)
    for step in range(3):
        alone.update(gradients(step), 1e-2)
        first.update(gradients(step), 1e-2)
    then = Ranks(kind, weights_of(first.optimizers[0]), after)
    for optimizer in then.optimizers:
        own = {key: array.reshape(-1)[optimizer.local_ranges.get(key.split(".")[1], slice(None))]
               for key, array in first.state().items()}  # fmt: skip
        optimizer.load_state(own, 3)
    for step in range(3, 5):
        alone.update(gradients(step), 1e-2)
        then.update(gradients(step), 1e-2)
    assert_same_bits(then.optimizers[-1].parameters, alone.parameters)
    assert_same_bits(then.state(), alone.state_arrays())


@EACH
def test_weights_that_are_set_from_outside_are_those_that_move(kind: str) -> None:
    """An update works on what the parameter holds now, also where it keeps a copy of its range."""
    alone, shared = build(kind, start()), Ranks(kind, start(), 2)
    for step in range(2):
        for optimizer in (alone, *shared.optimizers):
            for name, array in start(50 + step).items():
                optimizer.parameters[name].set_data(Tensor(array))
        alone.update(gradients(step), 1e-2)
        shared.update(gradients(step), 1e-2)
    assert_same_bits(shared.optimizers[1].parameters, alone.parameters)
