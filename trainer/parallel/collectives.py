"""Collective communication; no other file communicates through MindSpore.

On a device the ranks use MindSpore's collectives. On a CPU MindSpore 2.10 has few, and some of them are silently wrong:
AllReduce sums float32 and float16 (bfloat16 wrongly), AllGather preserves the bits of float32 alone, and a group of
some of the ranks has AllReduce only. There the ranks exchange NumPy arrays over sockets (`CpuGroup`), and MindSpore's
communication takes no part.

The cells at the end pair a collective with its backward pass, for models that are sharded over ranks. Gradients are
those of the sum of all ranks' losses: the backward pass of an all-reduce is an all-reduce, that of an all-gather is a
reduce-scatter. In a compiled graph each collective must depend on the one before it: otherwise they run in any order,
and the ranks wait for each other forever. On a CPU native layers exchange arrays themselves; cells run in eager mode.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, communication, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.errors import EXIT_OK, RunError
from trainer.parallel.connections import Rendezvous, connect
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.sharding import BUCKET_BYTES, FLOAT32_BYTES, buckets, shard_range
from trainer.parallel.world import World, is_scheduler, longest_join_seconds, rendezvous_address

_CONNECT_SECONDS = 60
_FEWEST = 16  # numbers of a gather: larger sizes are powers of two, because MindSpore keeps a kernel for each size


class DeviceGroup:
    """Some ranks of a job, among them this process, for MindSpore's collectives, which know the group by its name.

    Attributes:
        ranks: Their numbers in the job, in the order of the group.
        rank: Index of this process in `ranks`.
        size: Number of ranks.
    """

    on_host: Literal[False] = False

    def __init__(self, ranks: Sequence[int], rank: int, name: str) -> None:
        self.ranks = tuple(ranks)
        self.name = name
        self.rank = self.ranks.index(rank)
        self.size = len(self.ranks)

    def new_subgroup(self, ranks: Sequence[int], name: str) -> DeviceGroup:
        """Makes a group of some ranks of the job, see `make_group`."""
        make_group(name, ranks)
        return DeviceGroup(ranks, self.ranks[self.rank], name)

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Gathers a small array of the host, of the same shape and dtype on all ranks: [size, ...].

        Its bits travel in a float32 array.
        """
        data = array.tobytes()
        padded = np.zeros(max(_FEWEST, 1 << (-(-len(data) // FLOAT32_BYTES) - 1).bit_length()), np.float32)
        # As integers: when copied as float32, some processors change the bits that mean "signalling NaN".
        padded.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        gathered = _operator("AllGather", self.name)(Tensor.from_numpy(padded)).asnumpy()
        rows = np.ascontiguousarray(gathered.reshape(self.size, -1)).view(np.uint8)[:, : len(data)]
        return np.ascontiguousarray(rows).reshape(-1).view(array.dtype).reshape(self.size, *array.shape)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Gathers the bytes of every rank, in the order of ranks; lengths may differ."""
        lengths = self.all_gather(np.array([len(data)], np.int64)).reshape(-1).tolist()
        if not max(lengths):
            return [b""] * self.size
        padded = np.zeros(max(lengths), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self.all_gather(padded)
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


ProcessGroup: TypeAlias = CpuGroup | DeviceGroup
"""Some ranks of a job, among them this process. `on_host` tells a CPU's group from a device's."""


def init_process_group(world: World) -> ProcessGroup:
    """Joins the ranks of a job and returns the group of all of them. The device must be set before.

    Raises:
        RunError: The other ranks do not answer, or MindSpore numbers them differently.
        SystemExit: This process is the scheduler that msrun starts, and the ranks do not need it.
    """
    if has_all_operators():
        return join_through_mindspore(world)
    if is_scheduler():
        sys.exit(EXIT_OK)
    on_one_host = world.local_size == world.size
    join_seconds = longest_join_seconds()
    with contextlib.closing(Rendezvous(world.rank, world.size, rendezvous_address(), join_seconds)) as rendezvous:
        connections = connect(world.rank, world.size, rendezvous.share, on_one_host, _CONNECT_SECONDS)
    return CpuGroup(connections, range(world.size))


def join_through_mindspore(world: World) -> DeviceGroup:
    """Joins the ranks of a job through MindSpore's scheduler, for MindSpore's own collectives.

    Raises:
        RunError: The other ranks do not answer, or MindSpore numbers them differently.
    """
    try:
        if not communication.GlobalComm.INITED:  # a second time MindSpore forgets which groups this rank is in
            with _serialized_init():
                communication.init()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"rank {world.rank} cannot join the {world.size} ranks of the job: {reason}") from error
    rank = communication.get_rank()
    size = communication.get_group_size()
    if (rank, size) != (world.rank, world.size):
        rule = f"the environment says rank {world.rank} of {world.size}, and MindSpore says rank {rank} of {size}"
        raise RunError(rule, fix="start the job with `run_trainer.py launch`")
    return DeviceGroup(range(world.size), world.rank, communication.GlobalComm.WORLD_COMM_GROUP)


def run_scheduler() -> None:
    """Tells the ranks of a job each other's addresses, until the last of them has ended."""
    communication.init()


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
    """Makes a group of some ranks, which MindSpore's operators know by its name.

    All of these ranks must call this function; ranks with several groups in common must make them in the same order.
    """
    communication.create_group(name, list(ranks))


def all_reduce_in_buckets(
    tensors: Sequence[Tensor], group: CpuGroup, bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Sums each tensor over all ranks of a CPU's group, with the same bits on every rank.

    The sums take the memory of the tensors. Small tensors travel together.

    Args:
        tensors: The same shapes in the same order on every rank. The sums are computed in float32 and returned in the
            dtype of each tensor.
        bucket_bytes: Limit for tensors that travel together; a larger tensor travels alone, without a copy.
    """
    sums: list[Tensor] = []
    for bucket in buckets(tensors, bucket_bytes):
        arrays = [tensor.asnumpy() for tensor in bucket]
        flats = [array.reshape(-1).astype(np.float32, copy=False) for array in arrays]
        joined = flats[0]
        if len(flats) > 1:
            joined = np.concatenate(flats)
        group.all_reduce_into(joined, joined)
        ends = np.cumsum([tensor.size for tensor in bucket]).tolist()
        for tensor, array, end in zip(bucket, arrays, ends, strict=True):
            if not np.shares_memory(array, joined):
                array[...] = joined[end - array.size : end].reshape(array.shape)
            total = Tensor.from_numpy(array)
            if total.dtype != tensor.dtype:
                total = total.astype(tensor.dtype)
            sums.append(total)
    return sums


def reduce_scatter_range(tensor: Tensor, group: CpuGroup) -> Tensor:
    """Returns this rank's range (`shard_range`) of the sum over all ranks of a CPU's group: flat, in float32."""
    array = tensor.asnumpy().astype(np.float32, copy=False)
    return Tensor.from_numpy(group.reduce_scatter_range(array))


def all_reduce(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Sums each tensor over all ranks of a group, with the same bits on every rank; its memory may be overwritten."""
    if group.on_host:
        return all_reduce_in_buckets(tensors, group)
    return [start_all_reduce(each.reshape(-1), group).wait().reshape(each.shape) for each in tensors]


class PendingResult(NamedTuple):
    """A collective that was started, and its result, which must not be used before `wait`."""

    result: Tensor
    handle: Any = None  # None: the collective is done

    def wait(self) -> Tensor:
        """Returns the result. Operators dispatched after this call wait for it on the device; the host does not."""
        if self.handle is not None:
            self.handle.wait()
        return self.result


def start_all_reduce(flat: Tensor, group: ProcessGroup) -> PendingResult:
    """Starts an all-reduce of a flat float32 tensor; a device sums in place, while other operators run."""
    if group.on_host:
        return PendingResult(_on_host(group.all_reduce)(flat))
    return PendingResult(flat, ops.communication.all_reduce(flat, group=group.name, async_op=True))


def start_reduce_scatter(rows: Tensor, group: ProcessGroup) -> PendingResult:
    """Starts a reduce-scatter of [ranks, n]: each rank gets one row, [n], of the sum over all ranks."""
    if group.on_host:
        return PendingResult(_on_host(group.reduce_scatter)(rows).reshape(-1))
    row = mint.empty(rows.shape[1], dtype=rows.dtype)
    handle = ops.communication.reduce_scatter_tensor(row, rows.reshape(-1), group=group.name, async_op=True)
    return PendingResult(row, handle)


def start_all_gather(local: Tensor, group: ProcessGroup) -> PendingResult:
    """Starts an all-gather of [n] of every rank: [ranks n]."""
    if group.on_host:
        return PendingResult(_on_host(group.all_gather)(local).reshape(-1))
    gathered = mint.empty(local.size * group.size, dtype=local.dtype)
    handle = ops.communication.all_gather_into_tensor(gathered, local, group=group.name, async_op=True)
    return PendingResult(gathered, handle)


def start_send(x: Tensor, group: DeviceGroup, to: int) -> PendingResult:
    """Starts to send a tensor to the device of the group's rank `to`."""
    return PendingResult(x, ops.communication.isend(x, group.ranks[to], group=group.name))


def start_receive(shape: tuple[int, ...], group: DeviceGroup, source: int) -> PendingResult:
    """Starts to receive a float32 tensor from the device of the group's rank `source`."""
    received = mint.empty(shape, dtype=mstype.float32)
    return PendingResult(received, ops.communication.irecv(received, group.ranks[source], group=group.name))


def sum_on_device(values: Sequence[Tensor | np.ndarray | float], group: ProcessGroup) -> list[Tensor]:
    """Sums each value over all ranks, in float32; the values travel together, and the host does not wait."""
    tensors = [value if isinstance(value, Tensor) else Tensor(np.asarray(value, np.float32)) for value in values]
    flat = ops.concat([tensor.reshape(-1).astype(mstype.float32) for tensor in tensors])
    parts = ops.split(start_all_reduce(flat, group).wait(), [tensor.size for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def all_gather_ranges(
    group: ProcessGroup, tensors: Sequence[Parameter], local: Sequence[Tensor] | None = None
) -> None:
    """Completes tensors in place: each rank contributes its range (`shard_range`), and all ranks get the same bits.

    Args:
        tensors: The same shapes in the same order on every rank, each with at least as many numbers as there are ranks.
        local: This rank's range of each tensor, flat; None: the tensors contain these ranges already.
    """
    if not group.on_host:
        gather_ranges_on_device(group, tensors, local)
        return
    write_local_ranges(group, tensors, local)
    group.complete_ranges([tensor.asnumpy().reshape(-1) for tensor in tensors])


def write_local_ranges(group: CpuGroup, tensors: Sequence[Parameter], local: Sequence[Tensor] | None) -> None:
    """Writes this rank's ranges into tensors in place, without a gather of the other ranks' ranges.

    Args:
        local: This rank's range of each tensor, flat; None: the tensors contain these ranges already.
    """
    if local is None:
        return
    for tensor, values in zip(tensors, local, strict=True):
        # This is a view of MindSpore's memory, and writing to it writes to the tensor.
        flat = tensor.asnumpy().reshape(-1)
        flat[shard_range(flat.size, group.rank, group.size)] = values.asnumpy()


def array_gatherer(
    group: CpuGroup, on_one_host: bool
) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray] | None], None]:
    """Returns an `all_gather_ranges` for flat arrays that contain this rank's ranges.

    It has its own connections, so that any thread may call it while other threads communicate.
    """
    clone = group.clone_connections(on_one_host)
    return lambda arrays, local: clone.complete_ranges(arrays)


def gather_range(group: ProcessGroup, local: Tensor, numbers: int) -> Tensor:
    """Gathers a flat float32 tensor of `numbers` elements; `local` is this rank's range of it (`shard_range`)."""
    if not group.on_host:
        gathered = start_all_gather(_padded(local, numbers, group.size), group).wait()
        return unshard_rows(gathered.reshape(group.size, -1), numbers)
    flat = np.empty(numbers, np.float32)
    flat[shard_range(numbers, group.rank, group.size)] = local.asnumpy()
    group.complete_ranges([flat])
    return Tensor.from_numpy(flat)


def gather_shards(group: ProcessGroup, local: Tensor) -> list[Tensor]:
    """Gathers a tensor of every rank, in the order of ranks; all have the same shape."""
    if group.on_host:
        return [Tensor.from_numpy(row) for row in group.all_gather(local.asnumpy())]
    rows = start_all_gather(local.reshape(-1), group).wait().reshape(group.size, -1)
    return [row.reshape(local.shape) for row in ops.unbind(rows)]


def gather_ranges_on_device(
    group: ProcessGroup, tensors: Sequence[Parameter], local: Sequence[Tensor] | None
) -> None:
    """Does `all_gather_ranges` in buckets: while one bucket is copied into its tensors, the next one travels."""
    rank = group.rank
    ranks = group.size
    if local is None:
        local = [tensor.reshape(-1)[shard_range(tensor.size, rank, ranks)] for tensor in tensors]
    pairs = iter(zip(tensors, local, strict=True))
    pending: tuple[list[Parameter], PendingResult] | None = None
    for bucket in buckets(tensors, BUCKET_BYTES):
        ranges = [_padded(values, tensor.size, ranks) for tensor, values in itertools.islice(pairs, len(bucket))]
        flat = ranges[0]
        if len(ranges) > 1:
            flat = ops.concat(ranges)
        started = start_all_gather(flat, group)
        if pending:
            _assign_gathered(*pending, ranks)
        pending = bucket, started
    if pending:
        _assign_gathered(*pending, ranks)


def _assign_gathered(tensors: Sequence[Parameter], gathered: PendingResult, ranks: int) -> None:
    lengths = [-(-tensor.size // ranks) for tensor in tensors]
    columns = ops.split(gathered.wait().reshape(ranks, -1), lengths, axis=1)
    for tensor, rows in zip(tensors, columns, strict=True):
        tensor.copy_(unshard_rows(rows, tensor.size).reshape(tensor.shape))


def _padded(values: Tensor, numbers: int, ranks: int) -> Tensor:
    """Pads a rank's range of a tensor of `numbers` elements with zeros to the length of the longest range."""
    missing = -(-numbers // ranks) - values.size
    if not missing:
        return values
    return ops.concat([values, ops.zeros(missing, values.dtype)])


def shard_rows(tensor: Tensor, ranks: int) -> Tensor:
    """Reshapes a tensor to rows [ranks, n], the range of one rank in each; shorter ranges end with zeros."""
    flat = tensor.reshape(-1)
    if flat.size % ranks == 0:
        return flat.reshape(ranks, -1)
    ranges = [shard_range(flat.size, rank, ranks) for rank in range(ranks)]
    return ops.stack([_padded(flat[each], flat.size, ranks) for each in ranges])


def local_range(row: Tensor, numbers: int, group: ProcessGroup) -> Tensor:
    """Returns this rank's range of a tensor of `numbers` elements from its row of `shard_rows`."""
    rank_range = shard_range(numbers, group.rank, group.size)
    length = rank_range.stop - rank_range.start
    if length == row.size:
        return row
    return row[:length]


def unshard_rows(rows: Tensor, numbers: int) -> Tensor:
    """Returns the flattened tensor of `numbers` elements from all rows of `shard_rows`."""
    ranks = rows.shape[0]
    if numbers % ranks == 0:
        return rows.reshape(-1)
    ranges = [shard_range(numbers, rank, ranks) for rank in range(ranks)]
    return ops.concat([rows[rank][: each.stop - each.start] for rank, each in enumerate(ranges)])


@functools.cache
def _operator(name: str, group: str, **settings: int) -> ops.Primitive:
    """Returns MindSpore's operator for a group; all calls use one instance."""
    return getattr(ops, name)(group=group, **settings)


class _Pair(nn.Cell):
    """A cell that applies one function in the forward pass and another one to the gradient."""

    def __init__(self, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = forward
        self.backward = backward

    def construct(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.backward(dout),)


class AllReduce(_Pair):
    """Sum over all ranks; backward: sum of the gradients over all ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_all_reduce(group), _all_reduce(group))


class CopyToTensorParallel(_Pair):
    """The tensor itself, which is the same on all ranks; backward: sum of the gradients over all ranks.

    Megatron-LM's f (Shoeybi et al. 2019, section 3).
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_identity, _all_reduce(group))


class ReduceFromTensorParallel(_Pair):
    """Sum over all ranks; backward: the gradient itself, which is the same on all ranks. Megatron-LM's g."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_all_reduce(group), _identity)


class AllGather(_Pair):
    """Concatenation of [n, ...] of each rank to [ranks n, ...]; backward: `ReduceScatter`."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_all_gather(group), _reduce_scatter(group))


class ReduceScatter(_Pair):
    """Sum over all ranks of [ranks n, ...], of which each rank gets n rows; backward: `AllGather`."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_reduce_scatter(group), _all_gather(group))


class ScatterToSequenceParallel(_Pair):
    """This rank's n rows of [ranks n, ...], which is the same on all ranks; backward: the gradients of all rows."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_local_rows(group), _all_gather(group))


class GatherFromSequenceParallel(_Pair):
    """Concatenation of [n, ...] of each rank, for use in the same way on all ranks; backward: this rank's rows."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(_all_gather(group), _local_rows(group))


def exchange_counts(counts: Tensor, group: DeviceGroup) -> np.ndarray:
    """Sends part r of a vector of integers to the group's rank r, for each rank r; the host waits for the device once.

    Returns:
        The numbers sent to each rank, and those received from each rank: [2, ranks, n].
    """
    sent = counts.astype(mstype.int32)
    received = mint.empty(sent.size, dtype=sent.dtype)
    ops.communication.all_to_all_single(received, sent, group=group.name)
    return ops.concat((sent, received)).asnumpy().reshape(2, group.size, -1)


def exchange_rows(
    rows: Tensor, send: np.ndarray, receive: np.ndarray, group: DeviceGroup, least: int | None = None
) -> Tensor:
    """Sends rows of [n, width] to the ranks of a group, in the order of ranks, and returns the received rows.

    Args:
        send: Number of rows for each rank; rows after all of these are not sent.
        receive: Number of rows from each rank.
        least: Minimum number of rows of the result, which zeros fill up; None: only the received rows.
    """
    total = int(receive.sum())
    count = int(send.sum())
    received = mint.empty((total, *rows.shape[1:]), dtype=rows.dtype)
    if 0 < count < rows.shape[0]:
        rows = mint.narrow(rows, 0, 0, count)
    ops.communication.all_to_all_single(received, rows, receive.tolist(), send.tolist(), group=group.name)
    missing = (least or 0) - total
    if missing <= 0:
        return received
    return ops.concat((received, ops.zeros((missing, *rows.shape[1:]), rows.dtype)))


def all_to_all(x: Tensor, group: str, ranks: int) -> Tensor:
    """Sends row r of [ranks, ...] to rank r of a group and returns the received rows in the order of ranks; for graphs.
    """
    return P.AlltoAll(ranks, 0, 0, group)(x)


def all_to_all_rows(rows: Tensor, send: Tensor, receive: Tensor, group: str) -> Tensor:
    """Exchanges rows [n, width] within a group, with a gradient; for graphs on an Ascend.

    Args:
        rows: The rows to send, in the order of their ranks.
        send: Number of rows for each rank, int64 in the host's memory; a tuple where it is known beforehand.
        receive: Number of rows from each rank, likewise.
    """
    width = rows.shape[1]
    return P.AlltoAllV(group=group, block_size=width)(rows.reshape(-1), send, receive).reshape(-1, width)


def has_all_operators() -> bool:
    """Returns whether MindSpore has all collectives for this device, for all dtypes; a CPU has only a few."""
    return mindspore.get_context("device_target") != "CPU"


def _identity(x: Tensor) -> Tensor:
    return x


def _local_rows(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    rank = group.rank
    ranks = group.size

    def local_rows(x: Tensor) -> Tensor:
        number = x.shape[0] // ranks
        return x[rank * number : (rank + 1) * number]

    return local_rows


def _on_host(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensor], Tensor]:
    """Makes a function of NumPy arrays one of tensors; it cannot be compiled."""
    return lambda x: Tensor.from_numpy(function(x.asnumpy()))


def _all_reduce(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    if group.on_host:
        return _on_host(group.all_reduce)
    return _operator("AllReduce", group.name)


def _all_gather(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    if group.on_host:
        return _on_host(group.all_gather_rows)
    return _operator("AllGather", group.name)


def _reduce_scatter(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    if group.on_host:
        return _on_host(group.reduce_scatter)
    return _operator("ReduceScatter", group.name)
