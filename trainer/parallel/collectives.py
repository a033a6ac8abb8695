"""What ranks say to each other; the only file that communicates.

MindSpore 2.10 on a CPU has few collectives, and of those some are silently wrong: AllReduce sums float32 and float16
(bfloat16 wrongly), AllGather hands on float32 alone bit by bit (integers, float16 and float64 arrive damaged). So all
that is gathered travels as the bits of float32 numbers, and all sums are of float32.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import mindspore
import numpy as np
from mindspore import Tensor, communication, ops
from mindspore import dtype as mstype

from trainer.errors import RunError
from trainer.parallel.world import World

BUCKET_BYTES = 25 << 20
"""Small tensors are summed together up to this size: a call of AllReduce takes 0.4 ms even for one number."""

_FEWEST = 16  # numbers of a gather: the next sizes are powers of two, because MindSpore keeps a kernel for each


def start(world: World) -> None:
    """Joins the ranks of a job; nothing to do for a process alone. The device must have been set.

    Raises:
        RunError: The other ranks do not answer, or MindSpore counts them in another way.
    """
    if world.size == 1:
        return
    try:
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
    in_host_memory = mindspore.get_context("device_target") == "CPU"
    sums = []
    for bucket in _buckets(tensors, bucket_bytes):
        in_float32 = [tensor if tensor.dtype == mstype.float32 else tensor.astype(mstype.float32) for tensor in bucket]
        if len(bucket) == 1:
            found = [all_reduce(in_float32[0])]
        else:
            found = (_host_bucket if in_host_memory else _device_bucket)(in_float32, all_reduce)
        sums += [
            total if total.dtype == tensor.dtype else total.astype(tensor.dtype)
            for total, tensor in zip(found, bucket, strict=True)
        ]
    return sums


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Cuts a sequence into runs of up to so many bytes in float32."""
    bucket, used = [], 0
    for tensor in tensors:
        size = 4 * tensor.size
        if bucket and used + size > bucket_bytes:
            yield bucket
            bucket, used = [], 0
        bucket.append(tensor)
        used += size
    if bucket:
        yield bucket


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


def _gather(array: np.ndarray, group: str | None = None) -> np.ndarray:
    """The bytes [ranks, array.nbytes] that each rank gave: an array of the same size everywhere, of n x 4 bytes."""
    words = array.reshape(-1).view(np.float32)
    padded = np.zeros(max(_FEWEST, 1 << (words.size - 1).bit_length()), np.float32)
    # As integers: copied as numbers, some processors would alter those bits that mean "signalling NaN".
    padded.view(np.int32)[: words.size] = words.view(np.int32)
    gathered = _operator("AllGather", _name(group))(Tensor.from_numpy(padded)).asnumpy()
    return gathered.reshape(-1, padded.size)[:, : words.size].copy().view(np.uint8)


def _name(group: str | None) -> str:
    return communication.GlobalComm.WORLD_COMM_GROUP if group is None else group


@functools.cache
def _operator(name: str, group: str, **settings: int) -> ops.Primitive:
    """An operator of MindSpore for a group; one instance serves all calls."""
    return getattr(ops, name)(group=group, **settings)
