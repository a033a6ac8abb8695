"""Collective communication; no other file communicates through MindSpore.

On a device the ranks use MindSpore's collectives. On a CPU MindSpore 2.10 has few, and some of them are silently wrong:
AllReduce sums float32 and float16 (bfloat16 wrongly), AllGather preserves the bits of float32 alone, and a group of
some of the ranks has AllReduce only. There the ranks exchange NumPy arrays over sockets (`CpuGroup`), and MindSpore's
AllGather serves once, to tell them each other's addresses.

The cells at the end are pairs of a forward and a backward pass, for models that are sharded over ranks. Each gradient
is that of the sum of all ranks' losses: the backward pass of a sum is a sum, that of a gather is a reduce-scatter. All
collectives of a compiled graph must depend on each other, one after the other: what does not, runs in any order, and
the ranks would wait for each other. On a CPU native layers exchange arrays themselves; cells run operator by operator.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, communication, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.errors import RunError
from trainer.parallel.connections import connect
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.sharding import BUCKET_BYTES, FLOAT32_BYTES, buckets, shard_range
from trainer.parallel.world import World

_LONGEST_WAIT_SECONDS = 86400  # MindSpore's own 30 s end a job whose rank 0 writes a large checkpoint
_CONNECT_SECONDS = 60
_FEWEST = 16  # numbers of a gather: larger sizes are powers of two, because MindSpore keeps a kernel for each size


class ProcessGroup(Protocol):
    """Some ranks of a job, this process among them: `CpuGroup` on a CPU, `DeviceGroup` on a device."""

    on_host: bool
    ranks: Sequence[int]  # in the job, in the order of the group
    rank: int  # this process's place in `ranks`
    size: int

    def new_subgroup(self, ranks: Sequence[int], name: str) -> ProcessGroup:
        """A group of some ranks of the job. All of them must call this; ranks with several groups in common must make
        them in the same order."""

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """[size, ...]: small arrays of the host, of the same shape and dtype on all ranks."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's data, in the order of ranks; lengths may differ."""


class DeviceGroup:
    """A `ProcessGroup` for MindSpore's collectives, which know it by its name."""

    on_host = False

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)

    def new_subgroup(self, ranks: Sequence[int], name: str) -> DeviceGroup:
        make_group(name, ranks)
        return DeviceGroup(ranks, self.ranks[self.rank], name)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Travels as bits in a float32 array."""
        given = array.tobytes()
        padded = np.zeros(max(_FEWEST, 1 << (-(-len(given) // FLOAT32_BYTES) - 1).bit_length()), np.float32)
        # As integers: when copied as float32, some processors change the bits that mean "signalling NaN".
        padded.view(np.uint8)[: len(given)] = np.frombuffer(given, np.uint8)
        gathered = _operator("AllGather", self.name)(Tensor.from_numpy(padded)).asnumpy()
        rows = np.ascontiguousarray(gathered.reshape(self.size, -1)).view(np.uint8)[:, : len(given)]
        return np.ascontiguousarray(rows).reshape(-1).view(array.dtype).reshape(self.size, *array.shape)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self.all_gather(np.array([len(data)], np.int64)).reshape(-1).tolist()
        if not max(lengths):
            return [b""] * self.size
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self.all_gather(padded)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def init_process_group(world: World) -> ProcessGroup:
    """Joins the ranks of a job and returns the group of all of them. The device must be set before.

    Raises:
        RunError: The other ranks do not answer, or MindSpore numbers them differently.
    """
    os.environ.setdefault("MS_CPU_COMM_OP_TIMEOUT", str(_LONGEST_WAIT_SECONDS))
    try:
        if not communication.GlobalComm.INITED:  # a second time MindSpore forgets which groups this rank is in
            with _serialized_init():
                communication.init()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"rank {world.rank} cannot join the {world.size} ranks of the job: {reason}") from error
    found = communication.get_rank(), communication.get_group_size()
    if found != (world.rank, world.size):
        rule = f"rank {world.rank} of {world.size} by its environment is {found[0]} of {found[1]} in MindSpore"
        raise RunError(rule, fix="start the job with `run_trainer.py launch`")
    ranks = DeviceGroup(range(world.size), world.rank, communication.GlobalComm.WORLD_COMM_GROUP)
    if has_all_operators():
        return ranks
    on_one_host = world.local_size == world.size
    return CpuGroup(connect(world.rank, world.size, ranks.gather_bytes, on_one_host, _CONNECT_SECONDS), ranks.ranks)


@contextlib.contextmanager
def _serialized_init() -> Iterator[None]:
    """Runs this thread on one core, with a scheduling policy under which waking threads do not preempt it.

    MindSpore 2.10 joins a job by connecting twice. When the thread that sees a connection is faster than the one that
    makes it, the connection counts as failed, and MindSpore starts again half a second later. On two busy cores that
    took 10 to 40 seconds, and takes 5 this way.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    policy = os.sched_getscheduler(0)
    threads = set(os.listdir("/proc/self/task"))
    rank = int(os.environ.get("DEVICE_ID", "0"))
    with contextlib.suppress(OSError):  # a container may forbid it: joining then takes longer
        os.sched_setaffinity(0, {sorted(cores)[rank % len(cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        for thread in (0, *map(int, set(os.listdir("/proc/self/task")) - threads)):
            with contextlib.suppress(OSError):  # it has ended, or was never changed
                os.sched_setaffinity(thread, cores)
                os.sched_setscheduler(thread, policy, os.sched_param(0))


def make_group(name: str, ranks: Sequence[int]) -> None:
    """Makes a group of some ranks that MindSpore's operators know by its name, as `ProcessGroup.new_subgroup` says."""
    communication.create_group(name, list(ranks))


def all_reduce_in_buckets(
    tensors: Sequence[Tensor], group: CpuGroup, bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Sums each tensor over all ranks of a CPU's group: the same bits on every rank. Small tensors travel together.

    Args:
        tensors: The same shapes in the same order on every rank. They are summed in float32 and returned in their own
            dtype.
        bucket_bytes: Limit for tensors that travel together; a larger tensor travels alone, without a copy.
    """
    sums: list[Tensor] = []
    for bucket in buckets(tensors, bucket_bytes):
        flats = [tensor.asnumpy().reshape(-1).astype(np.float32, copy=False) for tensor in bucket]
        total = group.all_reduce(flats[0] if len(flats) == 1 else np.concatenate(flats))
        ends = np.cumsum([tensor.size for tensor in bucket]).tolist()
        for tensor, end in zip(bucket, ends, strict=True):
            part = Tensor.from_numpy(total[end - tensor.size : end].reshape(tensor.shape))
            sums.append(part if part.dtype == tensor.dtype else part.astype(tensor.dtype))
    return sums


def reduce_scatter_range(tensor: Tensor, group: CpuGroup) -> Tensor:
    """This rank's range (`shard_range`) of the sum over all ranks of a CPU's group, flat and in float32."""
    array = tensor.asnumpy().astype(np.float32, copy=False)
    return Tensor.from_numpy(group.reduce_scatter_range(array))


def all_reduce(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Sums each tensor over all ranks of a group, with the same bits on every rank."""
    if group.on_host:
        return all_reduce_in_buckets(tensors, group)
    return [start_all_reduce(each.reshape(-1), group).wait().reshape(each.shape) for each in tensors]


class PendingResult(NamedTuple):
    """A collective under way: its result, which must not be used before `wait`."""

    result: Tensor
    handle: Any = None  # None: it is done

    def wait(self) -> Tensor:
        """The result. What is dispatched after this call waits for it on the device; the host does not."""
        if self.handle is not None:
            self.handle.wait()
        return self.result


def start_all_reduce(flat: Tensor, group: ProcessGroup) -> PendingResult:
    """Begins to sum a float32 tensor over all ranks; on a device in place, while other operators run."""
    if group.on_host:
        return PendingResult(_on_host(group.all_reduce)(flat))
    return PendingResult(flat, ops.communication.all_reduce(flat, group=group.name, async_op=True))


def start_reduce_scatter(rows: Tensor, group: ProcessGroup) -> PendingResult:
    """Begins to sum [ranks, n] over all ranks, of which each rank gets its own row: [n]."""
    if group.on_host:
        return PendingResult(_on_host(group.reduce_scatter)(rows).reshape(-1))
    own = mint.empty(rows.shape[1], dtype=rows.dtype)
    handle = ops.communication.reduce_scatter_tensor(own, rows.reshape(-1), group=group.name, async_op=True)
    return PendingResult(own, handle)


def start_all_gather(own: Tensor, group: ProcessGroup) -> PendingResult:
    """Begins to gather [n] of every rank: [ranks n]."""
    if group.on_host:
        return PendingResult(_on_host(group.all_gather)(own).reshape(-1))
    whole = mint.empty(own.size * group.size, dtype=own.dtype)
    return PendingResult(whole, ops.communication.all_gather_into_tensor(whole, own, group=group.name, async_op=True))


def start_send(x: Tensor, group: ProcessGroup, to: int) -> PendingResult:
    """Begins to send a tensor to the device of the group's rank `to`."""
    return PendingResult(x, ops.communication.isend(x, group.ranks[to], group=group.name))


def start_receive(shape: tuple[int, ...], group: ProcessGroup, source: int) -> PendingResult:
    """Begins to receive a float32 tensor from the device of the group's rank `source`."""
    came = mint.empty(shape, dtype=mstype.float32)
    return PendingResult(came, ops.communication.irecv(came, group.ranks[source], group=group.name))


def sum_on_device(values: Sequence[Tensor | np.ndarray | float], group: ProcessGroup) -> list[Tensor]:
    """Each value summed over all ranks, in float32; they travel together, and the host does not wait."""
    tensors = [value if isinstance(value, Tensor) else Tensor(np.asarray(value, np.float32)) for value in values]
    flat = ops.concat([tensor.reshape(-1).astype(mstype.float32) for tensor in tensors])
    parts = ops.split(start_all_reduce(flat, group).wait(), [tensor.size for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def all_gather_ranges(
    group: ProcessGroup, tensors: Sequence[Parameter], own: Sequence[Tensor] | None = None
) -> None:
    """Completes tensors in place, each rank contributing its own range (`shard_range`): the same bits on all ranks.

    Args:
        tensors: The same shapes in the same order on every rank, each with at least as many numbers as there are ranks.
        own: This rank's range of each tensor, flat; None where the tensor contains it already.
    """
    if not group.on_host:
        gather_ranges_on_device(group, tensors, own)
        return
    write_local_ranges(group, tensors, own)
    group.complete_ranges([tensor.asnumpy().reshape(-1) for tensor in tensors])


def write_local_ranges(group: CpuGroup, tensors: Sequence[Parameter], own: Sequence[Tensor] | None) -> None:
    """The part of `all_gather_ranges` that concerns this rank's ranges: where no rank needs the others now."""
    for tensor, part in zip(tensors, own, strict=True) if own is not None else ():
        # This is a view of MindSpore's memory, and writing to it writes to the tensor.
        flat = tensor.asnumpy().reshape(-1)
        flat[shard_range(flat.size, group.rank, group.size)] = part.asnumpy()


def array_gatherer(
    group: CpuGroup, on_one_host: bool
) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray] | None], None]:
    """`all_gather_ranges` for flat arrays, which contain this rank's ranges, on connections of its own: for any thread.
    """
    beside = group.clone_connections(on_one_host)
    return lambda arrays, own: beside.complete_ranges(arrays)


def gather_range(group: ProcessGroup, own: Tensor, numbers: int) -> Tensor:
    """A flat float32 tensor of so many numbers, of which each rank has its range (`shard_range`)."""
    if not group.on_host:
        gathered = start_all_gather(_filled(own, numbers, group.size), group).wait()
        return unshard_rows(gathered.reshape(group.size, -1), numbers)
    flat = np.empty(numbers, np.float32)
    flat[shard_range(numbers, group.rank, group.size)] = own.asnumpy()
    group.complete_ranges([flat])
    return Tensor.from_numpy(flat)


def gather_shards(group: ProcessGroup, own: Tensor) -> list[Tensor]:
    """What each rank has, tensors of one shape."""
    if group.on_host:
        return [Tensor.from_numpy(row) for row in group.all_gather(own.asnumpy())]
    rows = start_all_gather(own.reshape(-1), group).wait().reshape(group.size, -1)
    return [row.reshape(own.shape) for row in ops.unbind(rows)]


def gather_ranges_on_device(group: ProcessGroup, tensors: Sequence[Parameter], own: Sequence[Tensor] | None) -> None:
    """As `all_gather_ranges`, in buckets: while one is put into its place the next one travels."""
    rank = group.rank
    ranks = group.size
    given = [tensor.reshape(-1)[shard_range(tensor.size, rank, ranks)] for tensor in tensors] if own is None else own
    pairs = iter(zip(tensors, given, strict=True))
    under_way = None
    for bucket in buckets(tensors, BUCKET_BYTES):
        parts = [_filled(part, tensor.size, ranks) for tensor, part in itertools.islice(pairs, len(bucket))]
        started = start_all_gather(parts[0] if len(parts) == 1 else ops.concat(parts), group)
        if under_way:
            _assign_gathered(*under_way, ranks)
        under_way = bucket, started
    if under_way:
        _assign_gathered(*under_way, ranks)


def _assign_gathered(tensors: Sequence[Parameter], gathered: PendingResult, ranks: int) -> None:
    lengths = [-(-tensor.size // ranks) for tensor in tensors]
    columns = ops.split(gathered.wait().reshape(ranks, -1), lengths, axis=1)
    for tensor, rows in zip(tensors, columns, strict=True):
        tensor.copy_(unshard_rows(rows, tensor.size).reshape(tensor.shape))


def _filled(part: Tensor, numbers: int, ranks: int) -> Tensor:
    """A rank's range of so many numbers, as long as the longest of any rank."""
    missing = -(-numbers // ranks) - part.size
    return ops.concat([part, ops.zeros(missing, part.dtype)]) if missing else part


def shard_rows(tensor: Tensor, ranks: int) -> Tensor:
    """A flattened tensor as rows [ranks, n], the range of a rank in each; shorter ranges end with zeros."""
    flat = tensor.reshape(-1)
    if flat.size % ranks == 0:
        return flat.reshape(ranks, -1)
    ranges = [shard_range(flat.size, rank, ranks) for rank in range(ranks)]
    return ops.stack([_filled(flat[each], flat.size, ranks) for each in ranges])


def local_range(row: Tensor, numbers: int, group: ProcessGroup) -> Tensor:
    """This rank's range of so many numbers from its row of `shard_rows`."""
    own = shard_range(numbers, group.rank, group.size)
    return row[: own.stop - own.start] if own.stop - own.start < row.size else row


def unshard_rows(rows: Tensor, numbers: int) -> Tensor:
    """The flattened tensor of so many numbers that `shard_rows` made rows of."""
    ranks = rows.shape[0]
    if numbers % ranks == 0:
        return rows.reshape(-1)
    ranges = [shard_range(numbers, rank, ranks) for rank in range(ranks)]
    return ops.concat([rows[rank][: each.stop - each.start] for rank, each in enumerate(ranges)])


@functools.cache
def _operator(name: str, group: str, **settings: int) -> ops.Primitive:
    """MindSpore's operator for a group; all calls use one instance."""
    return getattr(ops, name)(group=group, **settings)


class _Pair(nn.Cell):
    """Applies one function forward and another one to the gradient."""

    def __init__(self, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = forward
        self.backward = backward

    def construct(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.backward(dout),)


class AllReduce(_Pair):
    """The sum over all ranks; backward, the sum of the gradients."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_all_reduce(group), _all_reduce(group))


class CopyToTensorParallel(_Pair):
    """The tensor itself, which is the same on all ranks; backward, the sum of the gradients. Megatron-LM's f (Shoeybi
    et al. 2019, section 3)."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_identity, _all_reduce(group))


class ReduceFromTensorParallel(_Pair):
    """The sum over all ranks; backward, the gradient itself, which is the same on all ranks. Megatron-LM's g."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_all_reduce(group), _identity)


class AllGather(_Pair):
    """[n, ...] of each rank, concatenated to [ranks n, ...]; backward, `ReduceScatter`."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_all_gather(group), _reduce_scatter(group))


class ReduceScatter(_Pair):
    """The sum over all ranks of [ranks n, ...], of which each rank keeps its own n rows; backward, `AllGather`."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_reduce_scatter(group), _all_gather(group))


class ScatterToSequenceParallel(_Pair):
    """[ranks n, ...], the same on all ranks: each takes its own n rows; backward, the gradients of all rows."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_own_rows(group), _all_gather(group))


class GatherFromSequenceParallel(_Pair):
    """[n, ...] of each rank, concatenated for what is the same on all ranks; backward, the gradient of its own rows."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_all_gather(group), _own_rows(group))


def exchange_counts(counts: Tensor, group: DeviceGroup) -> np.ndarray:
    """Sends the r-th part of a vector of integers to the group's rank r: what went to each rank, and what came from
    each, [2, ranks, n]. The host waits for the device once."""
    given = counts.astype(mstype.int32)
    came = mint.empty(given.size, dtype=given.dtype)
    ops.communication.all_to_all_single(came, given, group=group.name)
    return ops.concat((given, came)).asnumpy().reshape(2, group.size, -1)


def exchange_rows(
    rows: Tensor, send: np.ndarray, receive: np.ndarray, group: DeviceGroup, least: int | None = None
) -> Tensor:
    """Sends rows of [n, width] to the ranks of a group, those for the first rank first, and returns what comes.

    Args:
        send: How many rows go to each rank; rows after all of them stay here.
        receive: How many come from each.
        least: Rows of the result, zeros after what comes; None: just what comes.
    """
    total = int(receive.sum())
    sent = int(send.sum())
    came = mint.empty((total, *rows.shape[1:]), dtype=rows.dtype)
    given = mint.narrow(rows, 0, 0, sent) if 0 < sent < rows.shape[0] else rows
    ops.communication.all_to_all_single(came, given, receive.tolist(), send.tolist(), group=group.name)
    missing = (least or 0) - total
    return ops.concat((came, ops.zeros((missing, *rows.shape[1:]), rows.dtype))) if missing > 0 else came


def all_to_all(x: Tensor, group: str, ranks: int) -> Tensor:
    """In a graph: sends row r of [ranks, ...] to rank r of a group, which gets them in the order of ranks."""
    return P.AlltoAll(ranks, 0, 0, group)(x)


def all_to_all_rows(rows: Tensor, send: Tensor, receive: Tensor, group: str) -> Tensor:
    """In a graph on an Ascend: exchanges rows [n, width] within a group, with a gradient.

    Args:
        rows: Those for the first rank of the group first.
        send: How many of them go to each rank, int64 in the host's memory; a tuple where it is known beforehand.
        receive: How many rows come from each rank, likewise.
    """
    width = rows.shape[1]
    return P.AlltoAllV(group=group, block_size=width)(rows.reshape(-1), send, receive).reshape(-1, width)


def has_all_operators() -> bool:
    """Whether the device has every collective, and sums all dtypes; a CPU has a few of them."""
    return mindspore.get_context("device_target") != "CPU"


def _identity(x: Tensor) -> Tensor:
    return x


def _own_rows(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    rank = group.rank
    ranks = group.size

    def own_rows(x: Tensor) -> Tensor:
        number = x.shape[0] // ranks
        return x[rank * number : (rank + 1) * number]

    return own_rows


def _on_host(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Tensor]:
    """A function of NumPy arrays as one of tensors, not within compiled code."""
    return lambda x: Tensor.from_numpy(function(x.asnumpy()))


def _all_reduce(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    return _on_host(group.all_reduce) if group.on_host else _operator("AllReduce", group.name)


def _all_gather(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    return _on_host(group.all_gather_rows) if group.on_host else _operator("AllGather", group.name)


def _reduce_scatter(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    return _on_host(group.reduce_scatter) if group.on_host else _operator("ReduceScatter", group.name)
