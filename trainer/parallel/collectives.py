"""Collective communication; no other file communicates.

MindSpore 2.10 has few collectives on a CPU, and some of them are silently wrong: AllReduce sums float32 and float16
(bfloat16 wrongly), AllGather preserves the bits of float32 alone (integers, float16 and float64 arrive damaged), and a
group of some of the ranks has AllReduce only. So everything that is gathered travels as float32 or as bits in a float32
array, and all sums are in float32.

The cells at the end are pairs of a forward and a backward pass, for models that are sharded over ranks. Each gradient
is that of the sum of all ranks' losses: the backward pass of a sum is a sum, that of a gather is a reduce-scatter. The
cells use the device's own operators, and on a CPU what AllReduce, AllGather and Broadcast can express.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, communication, mint, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.errors import RunError
from trainer.parallel.sharding import FLOAT32_BYTES, buckets, chunks, range_of_rank
from trainer.parallel.world import World

BUCKET_BYTES = 25 << 20
"""Small tensors are summed together up to this size: an AllReduce takes 0.4 ms even for one number."""

_LONGEST_WAIT_SECONDS = 86400  # MindSpore's own 30 s end a job whose rank 0 writes a large checkpoint
_FEWEST = 16  # numbers of a gather: larger sizes are powers of two, because MindSpore keeps a kernel for each size


def start(world: World) -> None:
    """Joins the ranks of a job; does nothing for a single process. The device must be set before.

    Raises:
        RunError: The other ranks do not answer, or MindSpore numbers them differently.
    """
    if world.size == 1:
        return
    os.environ.setdefault("MS_CPU_COMM_OP_TIMEOUT", str(_LONGEST_WAIT_SECONDS))
    try:
        with _serialized_init():
            communication.init()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"rank {world.rank} cannot join the {world.size} ranks of the job: {reason}") from error
    found = communication.get_rank(), communication.get_group_size()
    if found != (world.rank, world.size):
        rule = f"rank {world.rank} of {world.size} by its environment is {found[0]} of {found[1]} in MindSpore"
        raise RunError(rule, fix="start the job with `run_trainer.py launch`")


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
    cores, policy, threads = os.sched_getaffinity(0), os.sched_getscheduler(0), set(os.listdir("/proc/self/task"))
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
    """Makes a group of some ranks, for the argument `group` of the functions below.

    All its ranks must call this; ranks with several groups in common must make them in the same order.
    """
    communication.create_group(name, list(ranks))


def group_size(group: str | None = None) -> int:
    """Number of ranks in a group; None: all ranks."""
    return communication.get_group_size(_name(group))


def gather_float64(values: Sequence[float]) -> list[list[float]]:
    """Every rank's values, bit by bit, in the order of ranks; all ranks pass equally many."""
    gathered = _gather(np.asarray(values, np.float64))
    return [row.view(np.float64).tolist() for row in gathered]


def gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's data, in the order of ranks; lengths may differ."""
    lengths = [int(row.view(np.int64)[0]) for row in _gather(np.array([len(data)], np.int64))]
    padded = np.zeros(-(-max(lengths) // 4) * 4, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _gather(padded) if padded.size else itertools.repeat(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths)]  # noqa: B905 (endless where all is empty)


def barrier() -> None:
    """Waits until every rank has called it."""
    _operator("AllReduce", _name(None))(Tensor(np.zeros(1, np.float32))).asnumpy()


def all_reduce_in_buckets(
    tensors: Sequence[Tensor], group: str | None = None, bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Sums each tensor over all ranks of a group, with the same bits on every rank; small tensors travel together.

    Args:
        tensors: The same shapes in the same order on every rank. They are summed in float32 and returned in their own
            dtype.
        group: From `make_group`; None for all ranks.
        bucket_bytes: Limit for tensors that travel together; a larger tensor travels alone, without a copy.
    """
    all_reduce = _operator("AllReduce", _name(group))
    sums = []
    for bucket in buckets(tensors, bucket_bytes):
        in_float32 = [tensor if tensor.dtype == mstype.float32 else tensor.astype(mstype.float32) for tensor in bucket]
        found = [all_reduce(in_float32[0])] if len(bucket) == 1 else _host_bucket(in_float32, all_reduce)
        sums += [
            total if total.dtype == tensor.dtype else total.astype(tensor.dtype)
            for total, tensor in zip(found, bucket, strict=True)
        ]
    return sums


def _host_bucket(tensors: Sequence[Tensor], all_reduce: ops.Primitive) -> list[Tensor]:
    """Sums float32 tensors in host memory: each is copied once, the sums are views of one buffer."""
    flat = np.concatenate([tensor.asnumpy().reshape(-1) for tensor in tensors])
    # A view of MindSpore's memory, which lives as long as the last tensor that is made from it.
    total = all_reduce(Tensor.from_numpy(flat)).asnumpy()
    ends = np.cumsum([tensor.size for tensor in tensors]).tolist()
    return [
        Tensor.from_numpy(total[end - tensor.size : end].reshape(tensor.shape))
        for tensor, end in zip(tensors, ends, strict=True)
    ]


class Started(NamedTuple):
    """A collective under way: its result, which must not be used before `wait`."""

    result: Tensor
    handle: Any = None  # None: it is done

    def wait(self) -> Tensor:
        """The result. What is dispatched after this call waits for it on the device; the host does not."""
        if self.handle is not None:
            self.handle.wait()
        return self.result


def start_all_reduce(flat: Tensor) -> Started:
    """Begins to sum a float32 tensor over all ranks; on a device in place, while other operators run."""
    if not has_all_operators():
        return Started(_sum(None)(flat))
    return Started(flat, ops.communication.all_reduce(flat, async_op=True))


def start_reduce_scatter(rows: Tensor) -> Started:
    """Begins to sum [ranks, n] over all ranks, of which each rank gets its own row: [n]."""
    if not has_all_operators():
        return Started(_reduce_scatter(None)(rows).reshape(-1))
    own = mint.empty(rows.shape[1], dtype=rows.dtype)
    return Started(own, ops.communication.reduce_scatter_tensor(own, rows.reshape(-1), async_op=True))


def start_all_gather(own: Tensor) -> Started:
    """Begins to gather [n] of every rank: [ranks n]."""
    if not has_all_operators():
        return Started(_all_gather(None)(own))
    whole = mint.empty(own.size * group_size(), dtype=own.dtype)
    return Started(whole, ops.communication.all_gather_into_tensor(whole, own, async_op=True))


def sum_on_device(values: Sequence[Tensor | np.ndarray | float]) -> list[Tensor]:
    """Each value summed over all ranks, in float32; they travel together, and the host does not wait."""
    tensors = [value if isinstance(value, Tensor) else Tensor(np.asarray(value, np.float32)) for value in values]
    flat = ops.concat([tensor.reshape(-1).astype(mstype.float32) for tensor in tensors])
    parts = ops.split(start_all_reduce(flat).wait(), [tensor.size for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def all_gather_ranges(
    tensors: Sequence[Parameter], own: Sequence[Tensor] | None = None, chunk_bytes: int = BUCKET_BYTES
) -> None:
    """Completes tensors in place, each rank contributing its own range (`range_of_rank`): the same bits on all ranks.

    Args:
        tensors: The same shapes in the same order on every rank, each with at least as many numbers as there are ranks.
        own: This rank's range of each tensor, flat; None where the tensor contains it already.
        chunk_bytes: Limit of what arrives at once in host memory.
    """
    if has_all_operators():
        _all_gather_on_device(tensors, own)
        return
    rank, ranks = communication.get_rank(), group_size()
    # On a CPU these are views of MindSpore's memory, and writing to them writes to the tensor.
    flats = [tensor.asnumpy().reshape(-1) for tensor in tensors]
    ranges = [[range_of_rank(flat.size, each, ranks) for flat in flats] for each in range(ranks)]
    if own is not None:
        for flat, place, tensor in zip(flats, ranges[rank], own, strict=True):
            flat[place] = tensor.asnumpy()
    most = max(sum(each.stop - each.start for each in of_rank) for of_rank in ranges)
    length = max(1, min(most, chunk_bytes // FLOAT32_BYTES // ranks))
    given = np.zeros(length, np.float32)
    for of_ranks in zip(*(chunks(of_rank, length, -(-most // length)) for of_rank in ranges), strict=True):
        for piece in of_ranks[rank]:
            given[piece.target] = flats[piece.array][piece.source]
        gathered = _operator("AllGather", _name(None))(Tensor.from_numpy(given)).asnumpy().reshape(ranks, length)
        for row, pieces in zip(gathered, of_ranks, strict=True):
            for piece in pieces:
                flats[piece.array][piece.source] = row[piece.target]


def _all_gather_on_device(tensors: Sequence[Parameter], own: Sequence[Tensor] | None) -> None:
    """In buckets: while one is put into its place the next one travels."""
    rank, ranks = communication.get_rank(), group_size()
    given = [tensor.reshape(-1)[range_of_rank(tensor.size, rank, ranks)] for tensor in tensors] if own is None else own
    pairs, under_way = iter(zip(tensors, given, strict=True)), None
    for bucket in buckets(tensors, BUCKET_BYTES):
        parts = [_filled(part, tensor.size, ranks) for tensor, part in itertools.islice(pairs, len(bucket))]
        started = start_all_gather(parts[0] if len(parts) == 1 else ops.concat(parts))
        if under_way:
            _assign_gathered(*under_way)
        under_way = bucket, started
    if under_way:
        _assign_gathered(*under_way)


def _assign_gathered(tensors: Sequence[Parameter], gathered: Started) -> None:
    ranks = group_size()
    lengths = [-(-tensor.size // ranks) for tensor in tensors]
    columns = ops.split(gathered.wait().reshape(ranks, -1), lengths, axis=1)
    for tensor, rows in zip(tensors, columns, strict=True):
        tensor.copy_(whole_of_rows(rows, tensor.size).reshape(tensor.shape))


def _filled(part: Tensor, numbers: int, ranks: int) -> Tensor:
    """A rank's range of so many numbers, as long as the longest of any rank."""
    missing = -(-numbers // ranks) - part.size
    return ops.concat([part, ops.zeros(missing, part.dtype)]) if missing else part


def rows_of_whole(tensor: Tensor, ranks: int) -> Tensor:
    """A flattened tensor as rows [ranks, n], the range of a rank in each; shorter ranges end with zeros."""
    flat = tensor.reshape(-1)
    if flat.size % ranks == 0:
        return flat.reshape(ranks, -1)
    ranges = [range_of_rank(flat.size, rank, ranks) for rank in range(ranks)]
    return ops.stack([_filled(flat[each], flat.size, ranks) for each in ranges])


def own_range(row: Tensor, numbers: int) -> Tensor:
    """This rank's range of so many numbers from its row of `rows_of_whole`."""
    own = range_of_rank(numbers, communication.get_rank(), group_size())
    return row[: own.stop - own.start] if own.stop - own.start < row.size else row


def whole_of_rows(rows: Tensor, numbers: int) -> Tensor:
    """The flattened tensor of so many numbers that `rows_of_whole` made rows of."""
    ranks = rows.shape[0]
    if numbers % ranks == 0:
        return rows.reshape(-1)
    ranges = [range_of_rank(numbers, rank, ranks) for rank in range(ranks)]
    return ops.concat([rows[rank][: each.stop - each.start] for rank, each in enumerate(ranges)])


def _gather(array: np.ndarray) -> np.ndarray:
    """Every rank's bytes [ranks, array.nbytes]; the array has the same size on all ranks, a multiple of 4 bytes."""
    words = array.reshape(-1).view(np.float32)
    padded = np.zeros(max(_FEWEST, 1 << (words.size - 1).bit_length()), np.float32)
    # As integers: when copied as float32, some processors change the bits that mean "signalling NaN".
    padded.view(np.int32)[: words.size] = words.view(np.int32)
    gathered = _operator("AllGather", _name(None))(Tensor.from_numpy(padded)).asnumpy()
    return gathered.reshape(-1, padded.size)[:, : words.size].copy().view(np.uint8)


def _name(group: str | None) -> str:
    return communication.GlobalComm.WORLD_COMM_GROUP if group is None else group


@functools.cache
def _operator(name: str, group: str, **settings: int) -> ops.Primitive:
    """MindSpore's operator for a group; all calls use one instance."""
    return getattr(ops, name)(group=group, **settings)


class _Pair(nn.Cell):
    """Applies one function forward and another one to the gradient."""

    def __init__(self, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward, self.backward = forward, backward

    def construct(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.backward(dout),)


class AllReduce(_Pair):
    """The sum over all ranks; backward, the sum of the gradients."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__(_sum(group), _sum(group))


class AllGather(_Pair):
    """[n, ...] of each rank, concatenated to [ranks n, ...]; backward, `ReduceScatter`."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__(_all_gather(group), _reduce_scatter(group))


class ReduceScatter(_Pair):
    """The sum over all ranks of [ranks n, ...], of which each rank keeps its own n rows; backward, `AllGather`."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__(_reduce_scatter(group), _all_gather(group))


class AllToAll(_Pair):
    """Sends the r-th n rows of [ranks n, ...] to rank r, which gets them in the order of ranks; backward, the same."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__(_all_to_all(group), _all_to_all(group))


class Broadcast(nn.Cell):
    """The tensor of the job's rank `root` on every rank; backward, the summed gradient at the root, zeros elsewhere."""

    def __init__(self, root: int, group: str | None = None) -> None:
        super().__init__()
        self.spread, self.sum = _broadcast(root, group), _sum(group)
        self.is_root, self.depend = communication.get_rank() == root, P.Depend()

    def construct(self, x: Tensor) -> Tensor:
        return self.spread(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        total = self.sum(dout)
        # A compiled graph would drop an unused sum, and the other ranks would wait for it.
        return (total if self.is_root else self.depend(ops.zeros(x.shape, x.dtype), total),)


class Send(nn.Cell):
    """Sends a tensor to rank `to` of the job, which must `Receive` it; `group` holds both ranks.

    Returns a zero to add to the loss, so that the backward pass reaches this cell and receives the gradient.
    """

    def __init__(self, to: int, group: str) -> None:
        super().__init__()
        self.send, self.receive = _send(to, group), _receive(to, group)

    def construct(self, x: Tensor) -> Tensor:
        self.send(x)
        return ops.zeros((), mstype.float32)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.receive(x.shape, x.dtype),)


class Receive(nn.Cell):
    """Receives a tensor from rank `source` of the job; backward, sends the gradient to it. `group` holds both ranks."""

    def __init__(self, source: int, group: str, shape: tuple[int, ...], dtype: mstype.Type = mstype.float32) -> None:
        super().__init__()
        self.send, self.receive = _send(source, group), _receive(source, group)
        self.shape, self.dtype = shape, dtype

    def construct(self, trained: Tensor) -> Tensor:
        """`trained` is any tensor that needs a gradient, so that the backward pass reaches this cell."""
        return self.receive(self.shape, self.dtype)

    def bprop(self, trained: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        self.send(dout)
        return (ops.zeros_like(trained),)


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


def _sum(group: str | None) -> Callable[[Tensor], Tensor]:
    all_reduce = _operator("AllReduce", _name(group))
    return all_reduce if has_all_operators() else _in_float32(all_reduce)


def _all_gather(group: str | None) -> Callable[[Tensor], Tensor]:
    all_gather = _operator("AllGather", _name(group))
    if has_all_operators():
        return all_gather
    if group is None:
        return _in_float32(all_gather)
    # On a CPU a group has AllReduce only: each rank puts its rows among zeros.
    summed, ranks, rank = _sum(group), group_size(group), communication.get_rank(group)

    def gathered(x: Tensor) -> Tensor:
        zeros = ops.zeros_like(x)
        return summed(ops.concat([x if each == rank else zeros for each in range(ranks)]))

    return gathered


def _reduce_scatter(group: str | None) -> Callable[[Tensor], Tensor]:
    if has_all_operators():
        return _operator("ReduceScatter", _name(group))
    summed, ranks, rank = _sum(group), group_size(group), communication.get_rank(_name(group))
    return lambda x: _rows(summed(x), rank, ranks)


def _all_to_all(group: str | None) -> Callable[[Tensor], Tensor]:
    ranks = group_size(group)
    if has_all_operators():
        return _operator("AlltoAll", _name(group), split_count=ranks, split_dim=0, concat_dim=0)
    gathered, rank = _all_gather(group), communication.get_rank(_name(group))
    # This rank's part of what each rank has sent.
    return lambda x: ops.concat([_rows(rows, rank, ranks) for rows in ops.split(gathered(x), x.shape[0])])


def _broadcast(root: int, group: str | None) -> Callable[[Tensor], Tensor]:
    if has_all_operators() or group is None:
        broadcast = _operator("Broadcast", _name(group), root_rank=root)
        return lambda x: broadcast((x,))[0]
    summed, is_root = _sum(group), communication.get_rank() == root
    return lambda x: summed(x if is_root else ops.zeros_like(x))


def _send(to: int, group: str) -> Callable[[Tensor], object]:
    if has_all_operators():
        rank = communication.get_group_rank_from_world_rank(to, group)
        return _operator("Send", group, sr_tag=0, dest_rank=rank)
    return _broadcast(communication.get_rank(), group)


def _receive(source: int, group: str) -> Callable[[tuple[int, ...], mstype.Type], Tensor]:
    if has_all_operators():
        rank = communication.get_group_rank_from_world_rank(source, group)
        return lambda shape, dtype: ops.Receive(0, rank, list(shape), dtype, group=group)(Tensor(0.0))
    spread = _broadcast(source, group)
    return lambda shape, dtype: spread(ops.zeros(shape, dtype))


def _rows(x: Tensor, part: int, parts: int) -> Tensor:
    """One of `parts` equal parts of the rows."""
    return ops.split(x, x.shape[0] // parts)[part]


def _in_float32(operator: ops.Primitive) -> Callable[[Tensor], Tensor]:
    """A CPU collective for all floating-point types, computed in float32, the only one for which it is right."""
    return lambda x: operator(x) if x.dtype == mstype.float32 else operator(x.astype(mstype.float32)).astype(x.dtype)
