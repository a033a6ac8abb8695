"""Kernels for context parallelism on an Ascend: several ranks share the tokens of each sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer.data.batches.context import ContextShard
from trainer.ops.ascend.attention import AttentionMasks
from trainer.ops.ascend.context import GatheredAttention
from trainer.ops.kernel_set import KernelSet
from trainer.parallel.collectives import AllGather
from trainer.parallel.process_groups import ProcessGroups


def context_parallel_kernels(kernels: KernelSet, groups: ProcessGroups, shard: ContextShard) -> KernelSet:
    """Replaces the attention kernels by those of a rank that has one shard of each sequence.

    The ranks of `groups.cp` share the sequences. `attention_masks` of the result takes the documents of all T tokens of
    a sequence; all other kernels take the tokens of this rank. A ring becomes a gather (see `ascend/context.py`), and
    `trainer.plan.ascend` refuses Ulysses attention.
    """
    assert isinstance(kernels.attention, partial) and groups.cp is not None
    dtypes = {name: kernels.attention.keywords[name] for name in ("dtype", "softmax_dtype")}
    return replace(
        kernels,
        attention=partial(GatheredAttention, shard=shard, gather=partial(AllGather, groups.cp), **dtypes),
        attention_masks=partial(AttentionMasks, shard=shard),
    )
