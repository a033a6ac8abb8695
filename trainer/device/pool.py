"""The memory pool of MindSpore on a CPU."""

from __future__ import annotations

import functools
import mmap
import resource

import mindspore

from trainer.device.doctor import total_memory_bytes
from trainer.parallel.world import is_scheduler

_MOST_GIB = 512


@functools.cache
def set_up_cpu_pool() -> None:
    """Makes the pool one block of address space as large as the memory, before the first operator runs.

    As installed, MindSpore 2.10 takes blocks of 1 GiB from the system and gives an array the smallest free range of
    any block. Once a second block exists, an array that would fit into the first can land in pages of the second
    that nothing has touched: a LoRA step of 1.7 GiB then holds 2.6 GiB. In one block a freed range is used again.
    Pages that nothing touches take no memory.

    The setting is skipped where the system refuses to reserve that much (`ulimit -v`, strict overcommit), and in
    msrun's scheduler, which computes nothing. After the first operator it would have no effect.
    """
    size_bytes = reservable_bytes()
    if is_scheduler() or not size_bytes:
        return
    mindspore.runtime.set_memory(init_size=f"{size_bytes >> 30}GB", increase_size="1GB")


@functools.cache
def reservable_bytes() -> int:
    """Returns the size of a block of address space that has room for all arrays: the memory, in full GiB.

    Returns 0 where the system refuses to reserve that much.
    """
    size_bytes = min(total_memory_bytes() >> 30, _MOST_GIB) << 30
    if not _can_reserve(size_bytes):
        return 0
    return size_bytes


def _can_reserve(size_bytes: int) -> bool:
    """Returns whether this process may map `size_bytes` of memory that it does not touch."""
    if size_bytes == 0 or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return False
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return False
    mapping.close()
    return True
