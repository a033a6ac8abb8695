"""A rank of a job for test_collectives.py: does every collective once and writes down what came out. In a job of two it
also does the steps of test_data_parallel.py: most of such a job's time goes into its start."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from msrun_helpers import take_a_core

take_a_core()
sys.path.append(str(Path(__file__).parents[1] / "parity"))

import mindspore  # noqa: E402
import numpy as np  # noqa: E402
from collective_cases import (  # noqa: E402
    PAIRS,
    SHAPES,
    SHARDED,
    TWICE,
    factors_of,
    gradients_of,
    numbers_of,
    pair_input,
    shared_tensors,
    text_of,
)
from data_parallel_worker import steps_together  # noqa: E402
from expert_exchange import exchanged_experts  # noqa: E402
from exported_graphs import export  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

from trainer.checkpoint.writing import FileShards, write_checkpoint  # noqa: E402
from trainer.config import parse_config  # noqa: E402
from trainer.device.threads import set_up_cpu_threads  # noqa: E402
from trainer.errors import RunError  # noqa: E402
from trainer.optim.groups import parameter_groups, parameter_of  # noqa: E402
from trainer.optim.optimizer import build_optimizer  # noqa: E402
from trainer.parallel import collectives  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.parallel.communicator import Communicator  # noqa: E402
from trainer.parallel.gradients import GradientReducer  # noqa: E402
from trainer.parallel.sharding import OptimizerShard, ShardedArray, full_shard_spec, shard_range  # noqa: E402
from trainer.parallel.world import RENDEZVOUS_VARIABLE, world_from_environment  # noqa: E402
from trainer.step.accumulate import MicroBatch  # noqa: E402
from trainer.storage.tensor_file import float32_infos  # noqa: E402

NATIVE = {"AllReduce", "AllGather", "ReduceScatter", "AlltoAll"}


def main(folder: Path) -> None:
    world = world_from_environment()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    mindspore.set_device("CPU")
    set_up_cpu_threads()  # as a run does; without it most of the time goes into threads that poll
    on_device = collectives.join_through_mindspore(world)  # it uses msrun's port
    os.environ[RENDEZVOUS_VARIABLE] = str(folder / "rendezvous")
    communicator = Communicator(collectives.init_process_group(world))
    group = communicator.group
    if world.size == 2:
        np.savez(folder / f"steps-{world.rank}.npz", **steps_together(communicator))
    found = {"folder": np.array(str(folder)), "float64": group.all_gather(np.array(numbers_of(world.rank)))}
    found["no float64"] = group.all_gather(np.zeros(0))
    for name, text in zip(("texts", "no texts"), (text_of(world.rank), b""), strict=True):
        texts = group.gather_bytes(text)
        found |= {f"{name} {rank}": np.frombuffer(each, np.uint8) for rank, each in enumerate(texts)}
    for way, bucket_bytes in (("one by one", 0), ("in buckets", 4000), ("together", 1 << 20)):
        arrays = gradients_of(world.rank)
        sums = collectives.all_reduce_in_buckets(list(map(Tensor.from_numpy, arrays)), group, bucket_bytes)
        assert all(np.array_equal(array, each.asnumpy()) for array, each in zip(arrays, sums, strict=True)), "in place"
        found |= {f"{way} {number}": each.asnumpy() for number, each in enumerate(sums)}
    gradients = [Tensor(gradient) for gradient in gradients_of(world.rank)]
    found |= as_on_a_device(group, gradients, in_float32=True) | as_on_a_device(group, gradients, in_float32=False)
    assert all((a.asnumpy() == b).all() for a, b in zip(gradients, gradients_of(world.rank), strict=True))
    assert len(sums) == len(SHAPES)
    found |= shared(group) | pairs(group) | exchanged_experts(group)
    found |= shared_optimizer(communicator, folder)
    found |= {f"native {name}": np.array(names) for name, names in native_operators(on_device, folder).items()}
    np.savez(folder / f"rank-{world.rank}.npz", **found)


def as_on_a_device(group: ProcessGroup, gradients: list[Tensor], in_float32: bool) -> dict[str, np.ndarray]:
    """Runs two micro-batches with these gradients, which are summed during the backward pass of the second."""
    parameters = [Parameter(ops.zeros_like(each), name=f"w{number}") for number, each in enumerate(gradients)]

    def backward() -> MicroBatch:
        def loss() -> Tensor:
            factors = [(0.5, 0.5) if number in TWICE else (1.0,) for number in range(len(gradients))]
            return sum(
                factor * (parameter.view(parameter.shape) * each).astype(mindspore.float32).sum()
                for parameter, each, uses in zip(parameters, gradients, factors, strict=True)
                for factor in uses
            )

        return MicroBatch(None, {}, None, mindspore.value_and_grad(loss, None, parameters)()[1])

    is_sharded = [number in SHARDED for number in range(len(gradients))]
    groups = [{"dp_cp": group}] * len(parameters)
    reducer = GradientReducer(
        parameters, is_sharded, groups, overlaps=True, in_float32=in_float32, bucket_bytes=4000
    )
    total = [each.astype(mindspore.float32) if in_float32 else each * 1 for each in gradients]
    _, reduced = reducer.add_last(total, backward)
    way = "in float32" if in_float32 else "in their dtype"
    found = {f"on a device {way} {number}": each.asnumpy() for number, each in enumerate(reduced.gradients)}
    return found


def shared(group: ProcessGroup) -> dict[str, np.ndarray]:
    """Tensors that are whole again, after each way of gathering them."""
    found = {}
    for way in ("together", "from parts", "on a device", "from parts on a device"):
        parameters, parts = [], []
        for number, whole in enumerate(shared_tensors()):
            own, known = shard_range(whole.size, group.rank, group.size), np.full(whole.size, np.nan, np.float32)
            parts.append(Tensor(whole.reshape(-1)[own]))
            if "parts" not in way:
                known[own] = whole.reshape(-1)[own]
            parameters.append(Parameter(Tensor(known.reshape(whole.shape)), name=f"{way} {number}"))
        if "device" in way:
            collectives.gather_ranges_on_device(group, parameters, parts if "parts" in way else None)
        else:
            collectives.all_gather_ranges(group, parameters, parts if "parts" in way else None)
        found |= {f"shared {parameter.name}": parameter.asnumpy() for parameter in parameters}
    return found


def shared_optimizer(communicator: Communicator, folder: Path) -> dict[str, np.ndarray]:
    """Returns weights after updates with the whole state and with a shard of it, and the bytes of both; saves the
    shard."""
    settings = parse_config("worker", '{"optimizer": {"type": "AdamW", "weight_decay": 0.1}}').optimizer
    arrays = {f"w{number}": array for number, array in enumerate(shared_tensors())}
    groups = parameter_groups({name: array.shape for name, array in arrays.items()}, settings)
    found = {}
    gather = partial(collectives.all_gather_ranges, communicator.group)
    shard = OptimizerShard(communicator.rank, communicator.size, 1000, gather)
    for way in (None, shard):
        parameters = {name: Parameter(Tensor(array), name=name) for name, array in arrays.items()}
        shards = {name: way for name, array in arrays.items() if way and way.is_sharded(array.size)}
        optimizer = build_optimizer(parameters, groups, settings, shards=shards)
        for step in range(3):
            random = np.random.default_rng(step)
            gradients = [Tensor(random.normal(size=array.shape).astype(np.float32)) for array in arrays.values()]
            optimizer.update(gradients, 1e-2)
        name = "shared" if way else "whole"
        found |= {f"updated {name} {key}": parameter.asnumpy() for key, parameter in parameters.items()}
        found[f"state bytes {name}"] = np.array(
            sum(a.nbytes for kind in optimizer.state.values() for a in kind.values())
        )
        if way is None:
            found |= {f"state {key}": array for key, array in optimizer.state_arrays().items()}
    pieces, shapes, ranges = {}, {}, optimizer.local_ranges
    for key, array in optimizer.state_arrays().items():
        name = parameter_of(key)
        shapes[key] = arrays[name].shape
        if communicator.should_save(name, name in ranges):
            pieces[key] = [ShardedArray(full_shard_spec(shapes[key])._replace(flat_range=ranges.get(name)), array)]
    share = {"optimizer": FileShards(float32_infos(shapes), pieces)}
    write_checkpoint(folder / "checkpoints", 3, share, {}, 1, communicator=communicator)
    try:
        write_checkpoint(folder / f"what rank {communicator.rank} sees", 3, share, {}, 1, communicator=communicator)
    except RunError as error:
        found["refusal"] = np.array(str(error))
    return found


def pairs(group: ProcessGroup) -> dict[str, np.ndarray]:
    """Outputs and gradients of all pairs, by name."""
    rank, ranks = group.rank, group.size
    x, found = Tensor(pair_input(rank, ranks)), {}
    parity = group.new_subgroup(range(rank % 2, ranks, 2), "odd" if rank % 2 else "even")
    for name in PAIRS:
        found |= output_and_gradient(name, getattr(collectives, name)(group), x, rank)
    for name in ("AllReduce", "AllGather"):
        found |= output_and_gradient(f"parity {name}", getattr(collectives, name)(parity), x, rank)
    half = collectives.AllGather(group)(x.astype(mindspore.float16))
    return found | {"half AllGather": half.asnumpy()}


def output_and_gradient(name: str, cell: Callable, x: Tensor, rank: int) -> dict[str, np.ndarray]:
    """Returns the result, and the gradient of the loss with respect to the input."""

    def loss(x: Tensor) -> tuple[Tensor, Tensor]:
        out = cell(x)
        return (out * Tensor(factors_of(rank, out.shape))).sum(), out

    (_, out), gradient = mindspore.value_and_grad(loss, 0, has_aux=True)(x)
    return {f"{name} out": out.asnumpy(), f"{name} gradient": gradient.asnumpy()}


class Gradient(nn.Cell):
    """The backward pass of a cell as a graph of its own."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell, self.gradient = cell, ops.GradOperation(sens_param=True)

    def construct(self, x: Tensor, dout: Tensor) -> Tensor:
        return self.gradient(self.cell)(x, dout)


def native_operators(group: collectives.DeviceGroup, folder: Path) -> dict[str, list[str]]:
    """Returns the collectives in the graphs that a device would run, forward and backward."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    x, found = Tensor(pair_input(group.rank, group.size)), {}
    rows = {"AllGather": 2 * group.size * group.size, "ReduceScatter": 2}
    for name in PAIRS:
        dout = Tensor(factors_of(group.rank, (rows.get(name, len(x)), x.shape[1])))
        make = partial(getattr(collectives, name), group)
        forward = export(make(), [x], folder / f"{name}-{group.rank}").operators
        backward = export(Gradient(make()), [x, dout], folder / f"{name}-gradient-{group.rank}").operators
        found[name] = [" ".join(NATIVE & set(operators)) for operators in (forward, backward)]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
