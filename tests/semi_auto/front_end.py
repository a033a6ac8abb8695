"""MindSpore's front end as it works for another device, on a machine that has none.

The pass that shards a graph over ranks runs on the host and asks of the device its name, and of the ranks what groups
there are; it is refused on a CPU by that name alone. So the name is changed where MindSpore's context keeps it: its own
calls would look for the device's libraries. This knows how MindSpore 2.10 lies in memory (a `std::string` of the old
ABI in the object behind `MSContext`), and is only for processes that do nothing else.

What is not known without the device: MindSpore takes every group for one of 2048 ranks where it folds the sum of a
constant over ranks, which it does with the 1 that a gradient starts from. With data parallelism gradients come out
2048 / data_parallel times too large then, except with micro-batches, where nothing is folded.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import mindspore
from mindspore._c_expression import MSContext, ms_ctx_param
from mindspore.communication import _comm_helper
from mindspore.graph.api import _cell_graph_executor
from mindspore.ops.operations import comm_ops
from mindspore.parallel._utils import _clear_auto_parallel_context, _init_auto_parallel_context
from mindspore.train import mind_ir_pb2

from trainer.config import Config
from trainer.parallel.world import World
from trainer.semi_auto.cells import SemiAuto
from trainer.semi_auto.network import build_semi_auto
from trainer.semi_auto.training import graph_batch

_NAMES = []  # memory that MindSpore's context points to
_HEADER, _OBJECT_BYTES = 24, 1024


class ShardedGraph(NamedTuple):
    """Loss and gradients as one rank computes them."""

    built: SemiAuto
    """With the layouts of its parameters."""
    model: Any
    """The graph, as a file of MindIR holds it."""


def sharded_graph(config: Config, world: World) -> ShardedGraph:
    """Builds the network with the kernels of a CPU and has MindSpore shard it as for an Ascend.

    Args:
        config: In semi-automatic mode.
        world: The rank whose graph is wanted.
    """
    built, window = build_semi_auto(config, world, "CPU"), graph_batch(config, world)
    batch = window.tensors([], 0.0)
    network = built.network
    network._device_num, network._global_rank = world.size, world.rank
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    with another_device("Ascend", world):
        _init_auto_parallel_context(network)
        # A phase of this name stops before kernels are selected, and is a training all the same.
        key, _ = _cell_graph_executor.compile(network, *batch, phase="export.train", do_convert=False)
        model = mind_ir_pb2.ModelProto()
        model.ParseFromString(_cell_graph_executor._get_func_graph_proto(network, key, "mind_ir"))
        _clear_auto_parallel_context(network)
    return ShardedGraph(built, model)


@contextlib.contextmanager
def another_device(name: str, world: World) -> Iterator[None]:
    """Makes MindSpore take the device for another one, and groups for as large as their names say, while the block
    runs."""
    before = MSContext.get_instance().get_param(ms_ctx_param.device_target)
    changes = {
        (_comm_helper, "_HCCL_TEST_AVAILABLE"): True,
        (comm_ops, "get_group_size"): lambda group=None: group_size(str(group), world),
        (comm_ops, "get_rank"): lambda group=None: 0,
    }
    kept = {place: getattr(*place) for place in changes}
    _rename_device(before, name)
    try:
        for place, value in changes.items():
            setattr(*place, value)
        yield
    finally:
        for place, value in kept.items():
            setattr(*place, value)
        _rename_device(name, before)


def group_size(group: str, world: World) -> int:
    """Returns the size of a group, which MindSpore names by the number of its ranks and a hash."""
    size = group.partition("-")[0]
    return int(size) if size.isdecimal() else world.size


def _rename_device(before: str, name: str) -> None:
    context = MSContext.get_instance()
    start = ctypes.c_void_p.from_address(id(context) + 16).value  # the object behind the Python one
    readable = _readable()
    places = [at for at in range(start, start + _OBJECT_BYTES, 8) if _text_at(at, readable) == before.encode()]
    assert len(places) == 1, "this is not the MindSpore that this was written for"
    text = name.encode()
    memory = ctypes.create_string_buffer(_HEADER + len(text) + 1)
    _NAMES.append(memory)
    address = ctypes.addressof(memory)
    for offset, number in ((0, len(text)), (8, len(text)), (16, 1 << 20)):  # length, capacity, users
        ctypes.c_uint64.from_address(address + offset).value = number
    ctypes.memmove(address + _HEADER, text, len(text) + 1)
    ctypes.c_uint64.from_address(places[0]).value = address + _HEADER
    assert context.get_param(ms_ctx_param.device_target) == name


def _text_at(place: int, readable: list[tuple[int, int]]) -> bytes | None:
    """Returns the text that a pointer at this place points to, where it is a string."""
    pointer = ctypes.c_uint64.from_address(place).value
    if not any(first <= pointer - _HEADER and pointer + 32 < end for first, end in readable):
        return None
    length = ctypes.c_uint64.from_address(pointer - _HEADER).value
    return ctypes.string_at(pointer, length) if 0 < length < 32 else None


def _readable() -> list[tuple[int, int]]:
    """Yields first and last address of each range of memory that this process may read."""
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if line[1].startswith("r")]
