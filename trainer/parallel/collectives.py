"""What ranks say to each other; the only file that communicates.

MindSpore 2.10 on a CPU has few collectives, and of those some are silently wrong: AllReduce sums float32 and float16
(bfloat16 wrongly), AllGather hands on float32 alone bit by bit (integers, float16 and float64 arrive damaged), and in a
group of some ranks there is AllReduce only. So all that is gathered travels as float32, numbers of other types as the
bits of some, and all sums are of float32.

The cells at the end are pairs of a forward and a backward pass, for models that are cut over ranks. What a rank's loss
sends back is the gradient of the sum of all ranks' losses: the gradient of a sum is a sum, that of gathering is summing
and cutting. They use the device's own operators, and on a CPU what can be said with AllReduce, AllGather and Broadcast.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, communication, nn, ops
from mindspore import dtype as mstype
from mindspore.ops import operations as P

from trainer.errors import RunError
from trainer.parallel.buckets import FLOAT32_BYTES, buckets, chunks
from trainer.parallel.optimizer_shard import part_of
from trainer.parallel.serial_init import serialized_init
from trainer.parallel.world import World

BUCKET_BYTES = 25 << 20
"""Small tensors are summed together up to this size: a call of AllReduce takes 0.4 ms even for one number."""

_LONGEST_WAIT_SECONDS = 86400  # MindSpore's own 30 s end a job whose rank 0 writes a large checkpoint
_FEWEST = 16  # numbers of a gather: the next sizes are powers of two, because MindSpore keeps a kernel for each


def start(world: World) -> None:
    """Joins the ranks of a job; nothing to do for a process alone. The device must have been set.

    Raises:
        RunError: The other ranks do not answer, or MindSpore counts them in another way.
    """
    if world.size == 1:
        return
    os.environ.setdefault("MS_CPU_COMM_OP_TIMEOUT", str(_LONGEST_WAIT_SECONDS))
    try:
        with serialized_init():
            communication.init()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(f"rank {world.rank} cannot join the {world.size} ranks of the job: {reason}") from error
    found = communication.get_rank(), communication.get_group_size()
    if found != (world.rank, world.size):
        said = f"rank {world.rank} of {world.size} by its environment is {found[0]} of {found[1]} in MindSpore"
        raise RunError(said, fix="start the job with `run_trainer.py launch`")


def make_group(name: str, ranks: Sequence[int]) -> None:
    """Makes a group of some ranks, for the argument `group` of everything below. All its ranks must call this, and
    ranks that share several groups in the same order."""
    communication.create_group(name, list(ranks))


def group_size(group: str | None = None) -> int:
    """How many ranks a group has; None for the group of all."""
    return communication.get_group_size(_name(group))


def gather_float64(values: Sequence[float]) -> list[list[float]]:
    """What each rank gave, bit by bit, in the order of ranks; all give equally many."""
    gathered = _gather(np.asarray(values, np.float64))
    return [row.view(np.float64).tolist() for row in gathered]


def gather_bytes(data: bytes) -> list[bytes]:
    """What each rank gave, in the order of ranks; each may give another length."""
    lengths = [int(row.view(np.int64)[0]) for row in _gather(np.array([len(data)], np.int64))]
    padded = np.zeros(-(-max(lengths) // 4) * 4, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = _gather(padded) if padded.size else itertools.repeat(padded)
    return [row[:length].tobytes() for row, length in zip(rows, lengths)]  # noqa: B905 (endless where all is empty)


def barrier() -> None:
    """Waits until every rank is here."""
    _operator("AllReduce", _name(None))(Tensor(np.zeros(1, np.float32))).asnumpy()


def all_reduce_in_buckets(
    tensors: Sequence[Tensor], group: str | None = None, bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Each tensor summed over all ranks of a group, the same bits on each of them; small tensors travel together.

    Args:
        tensors: Of the same shapes on every rank, in the same order. They are summed in float32 and come back in their
            own dtype.
        group: Of `make_group`; None for all ranks.
        bucket_bytes: Most bytes of tensors that travel together; a larger tensor travels alone, uncopied.
    """
    all_reduce = _operator("AllReduce", _name(group))
    sums = []
    for bucket in buckets(tensors, bucket_bytes):
        in_float32 = [tensor if tensor.dtype == mstype.float32 else tensor.astype(mstype.float32) for tensor in bucket]
        if len(bucket) == 1:
            found = [all_reduce(in_float32[0])]
        else:
            found = (_device_bucket if _has_all_operators() else _host_bucket)(in_float32, all_reduce)
        sums += [
            total if total.dtype == tensor.dtype else total.astype(tensor.dtype)
            for total, tensor in zip(found, bucket, strict=True)
        ]
    return sums


def _host_bucket(tensors: Sequence[Tensor], all_reduce: ops.Primitive) -> list[Tensor]:
    """The sums of several float32 tensors in host memory: each is copied once, the sums are parts of one buffer."""
    flat = np.concatenate([tensor.asnumpy().reshape(-1) for tensor in tensors])
    # A view of MindSpore's memory, which lives as long as the last tensor made from it.
    total = all_reduce(Tensor.from_numpy(flat)).asnumpy()
    ends = np.cumsum([tensor.size for tensor in tensors]).tolist()
    return [
        Tensor.from_numpy(total[end - tensor.size : end].reshape(tensor.shape))
        for tensor, end in zip(tensors, ends, strict=True)
    ]


def _device_bucket(tensors: Sequence[Tensor], all_reduce: ops.Primitive) -> list[Tensor]:
    """The sums of several float32 tensors that are in the memory of a device, and stay there."""
    total = all_reduce(ops.concat([tensor.reshape(-1) for tensor in tensors]))
    parts = ops.split(total, [tensor.size for tensor in tensors])
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def share_parts(
    tensors: Sequence[Parameter], parts: Sequence[Tensor] | None = None, chunk_bytes: int = BUCKET_BYTES
) -> None:
    """Completes, in place, tensors of which each rank has its own range (see `part_of`): the same bits on all ranks.

    Args:
        tensors: Of the same shapes on every rank, in the same order, each of at least as many numbers as there are
            ranks.
        parts: The range of this rank of each, flat; None where it stands in the tensor already.
        chunk_bytes: Most bytes that arrive at once in the host's memory.
    """
    if _has_all_operators():
        _share_on_device(tensors, parts)
    else:
        _share_on_host(tensors, parts, chunk_bytes)


def _share_on_host(tensors: Sequence[Parameter], parts: Sequence[Tensor] | None, chunk_bytes: int) -> None:
    rank, ranks = communication.get_rank(), group_size()
    # On a CPU these are views of MindSpore's memory, and writing to them writes to the tensor.
    flats = [tensor.asnumpy().reshape(-1) for tensor in tensors]
    ranges = [[part_of(flat.size, each, ranks) for flat in flats] for each in range(ranks)]
    if parts is not None:
        for flat, own, part in zip(flats, ranges[rank], parts, strict=True):
            flat[own] = part.asnumpy()
    most = max(sum(each.stop - each.start for each in own) for own in ranges)
    length = max(1, min(most, chunk_bytes // FLOAT32_BYTES // ranks))
    given = np.zeros(length, np.float32)
    for of_ranks in zip(*(chunks(own, length, -(-most // length)) for own in ranges), strict=True):
        for piece in of_ranks[rank]:
            given[piece.place] = flats[piece.array][piece.source]
        gathered = _operator("AllGather", _name(None))(Tensor.from_numpy(given)).asnumpy().reshape(ranks, length)
        for row, pieces in zip(gathered, of_ranks, strict=True):
            for piece in pieces:
                flats[piece.array][piece.source] = row[piece.place]


def _share_on_device(tensors: Sequence[Parameter], parts: Sequence[Tensor] | None) -> None:
    """The same without a way through the host's memory."""
    rank, ranks = communication.get_rank(), group_size()
    all_gather = _operator("AllGather", _name(None))
    for number, tensor in enumerate(tensors):
        ranges = [part_of(tensor.size, each, ranks) for each in range(ranks)]
        own = (parts[number] if parts else tensor.reshape(-1)[ranges[rank]]).astype(tensor.dtype)
        most = -(-tensor.size // ranks)
        whole = all_gather(own if own.size == most else ops.concat([own, ops.zeros(1, own.dtype)]))
        if tensor.size % ranks:
            sizes = [each.stop - each.start for each in ranges]
            whole = ops.concat([whole[at * most : at * most + size] for at, size in enumerate(sizes)])
        ops.assign(tensor, whole.reshape(tensor.shape))


def _gather(array: np.ndarray) -> np.ndarray:
    """The bytes [ranks, array.nbytes] that each rank gave: an array of the same size everywhere, of n x 4 bytes."""
    words = array.reshape(-1).view(np.float32)
    padded = np.zeros(max(_FEWEST, 1 << (words.size - 1).bit_length()), np.float32)
    # As integers: copied as numbers, some processors would alter those bits that mean "signalling NaN".
    padded.view(np.int32)[: words.size] = words.view(np.int32)
    gathered = _operator("AllGather", _name(None))(Tensor.from_numpy(padded)).asnumpy()
    return gathered.reshape(-1, padded.size)[:, : words.size].copy().view(np.uint8)


def _name(group: str | None) -> str:
    return communication.GlobalComm.WORLD_COMM_GROUP if group is None else group


@functools.cache
def _operator(name: str, group: str, **settings: int) -> ops.Primitive:
    """An operator of MindSpore for a group; one instance serves all calls."""
    return getattr(ops, name)(group=group, **settings)


class AllReduce(nn.Cell):
    """The sum over all ranks; backward, the sum of the gradients."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__()
        self.sum = _sum(group)

    def construct(self, x: Tensor) -> Tensor:
        return self.sum(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.sum(dout),)


class AllGather(nn.Cell):
    """[n, ...] of each rank, one below the other: [ranks n, ...]; backward, `ReduceScatter`."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__()
        self.gather, self.scatter = _gathered(group), _scattered_sum(group)

    def construct(self, x: Tensor) -> Tensor:
        return self.gather(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.scatter(dout),)


class ReduceScatter(nn.Cell):
    """The sum over all ranks of [ranks n, ...], of which each keeps its own n rows; backward, `AllGather`."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__()
        self.gather, self.scatter = _gathered(group), _scattered_sum(group)

    def construct(self, x: Tensor) -> Tensor:
        return self.scatter(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.gather(dout),)


class AllToAll(nn.Cell):
    """Of [ranks n, ...], the r-th n rows go to rank r, which has them in the order of ranks; backward, the same."""

    def __init__(self, group: str | None = None) -> None:
        super().__init__()
        self.exchange = _exchanged(group)

    def construct(self, x: Tensor) -> Tensor:
        return self.exchange(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.exchange(dout),)


class Broadcast(nn.Cell):
    """What the job's rank `root` has, everywhere; backward, the sum of gradients at the root and zeros elsewhere."""

    def __init__(self, root: int, group: str | None = None) -> None:
        super().__init__()
        self.spread, self.sum = _spread(root, group), _sum(group)
        self.is_root, self.depend = communication.get_rank() == root, P.Depend()

    def construct(self, x: Tensor) -> Tensor:
        return self.spread(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        total = self.sum(dout)
        # A sum that nobody used would be taken out of a compiled graph, and the other ranks would wait for it.
        return (total if self.is_root else self.depend(ops.zeros_like(x), total),)


class Send(nn.Cell):
    """Gives a tensor to another rank, which must `Receive` it; returns a zero for the loss, so that the backward pass
    comes by and takes the gradient that the other sends back.

    Args:
        to: Rank in the job.
        group: Of the two.
    """

    def __init__(self, to: int, group: str) -> None:
        super().__init__()
        self.hand_over, self.take = _hand_over(to, group), _take(to, group)

    def construct(self, x: Tensor) -> Tensor:
        self.hand_over(x)
        return ops.zeros((), mstype.float32)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.take(x.shape, x.dtype),)


class Receive(nn.Cell):
    """What another rank sends; backward, gives the gradient back to it.

    Args:
        source: Rank in the job.
        group: Of the two.
        shape, dtype: Of what comes.
    """

    def __init__(self, source: int, group: str, shape: tuple[int, ...], dtype: mstype.Type = mstype.float32) -> None:
        super().__init__()
        self.hand_over, self.take = _hand_over(source, group), _take(source, group)
        self.shape, self.dtype = shape, dtype

    def construct(self, trained: Tensor) -> Tensor:
        """`trained` is anything with respect to which gradients are taken, so that the backward pass comes by."""
        return self.take(self.shape, self.dtype)

    def bprop(self, trained: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        self.hand_over(dout)
        return (ops.zeros_like(trained),)


def _has_all_operators() -> bool:
    return mindspore.get_context("device_target") != "CPU"


def _sum(group: str | None) -> Callable[[Tensor], Tensor]:
    all_reduce = _operator("AllReduce", _name(group))
    return all_reduce if _has_all_operators() else _in_float32(all_reduce)


def _gathered(group: str | None) -> Callable[[Tensor], Tensor]:
    all_gather = _operator("AllGather", _name(group))
    if _has_all_operators():
        return all_gather
    if group is None:
        return _in_float32(all_gather)
    # On a CPU, AllReduce alone knows groups: each puts its rows among zeros.
    summed, ranks, place = _sum(group), group_size(group), communication.get_rank(group)

    def gathered(x: Tensor) -> Tensor:
        zeros = ops.zeros_like(x)
        return summed(ops.concat([x if each == place else zeros for each in range(ranks)]))

    return gathered


def _scattered_sum(group: str | None) -> Callable[[Tensor], Tensor]:
    if _has_all_operators():
        return _operator("ReduceScatter", _name(group))
    summed, ranks, rank = _sum(group), group_size(group), communication.get_rank(_name(group))
    return lambda x: _rows(summed(x), rank, ranks)


def _exchanged(group: str | None) -> Callable[[Tensor], Tensor]:
    ranks = group_size(group)
    if _has_all_operators():
        return _operator("AlltoAll", _name(group), split_count=ranks, split_dim=0, concat_dim=0)
    gathered, rank = _gathered(group), communication.get_rank(_name(group))
    # Of the rows that each rank gave, those for this one.
    return lambda x: ops.concat([_rows(rows, rank, ranks) for rows in ops.split(gathered(x), x.shape[0])])


def _spread(root: int, group: str | None) -> Callable[[Tensor], Tensor]:
    if _has_all_operators() or group is None:
        broadcast = _operator("Broadcast", _name(group), root_rank=root)
        return lambda x: broadcast((x,))[0]
    summed, is_root = _sum(group), communication.get_rank() == root
    return lambda x: summed(x if is_root else ops.zeros_like(x))


def _hand_over(to: int, group: str) -> Callable[[Tensor], object]:
    if _has_all_operators():
        return _operator("Send", group, sr_tag=0, dest_rank=_place(to, group))
    return _spread(communication.get_rank(), group)


def _take(source: int, group: str) -> Callable[[tuple[int, ...], mstype.Type], Tensor]:
    if _has_all_operators():
        place = _place(source, group)
        return lambda shape, dtype: ops.Receive(0, place, list(shape), dtype, group=group)(Tensor(0.0))
    spread = _spread(source, group)
    return lambda shape, dtype: spread(ops.zeros(shape, dtype))


def _place(rank: int, group: str) -> int:
    """Where a rank of the job stands in a group."""
    return communication.get_group_rank_from_world_rank(rank, group)


def _rows(x: Tensor, part: int, parts: int) -> Tensor:
    """One of so many equal parts of the rows."""
    return ops.split(x, x.shape[0] // parts)[part]


def _in_float32(operator: ops.Primitive) -> Callable[[Tensor], Tensor]:
    """A collective of a CPU for numbers of all floating types: right in float32 alone."""
    return lambda x: operator(x) if x.dtype == mstype.float32 else operator(x.astype(mstype.float32)).astype(x.dtype)
