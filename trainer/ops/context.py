"""The kernels of a rank of an Ascend that shares sequences with others (context parallelism)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer.data.batches.context import ContextShard
from trainer.ops.ascend.attention import AttentionMasks
from trainer.ops.ascend.context import GatheredAttention
from trainer.ops.kernel_set import KernelSet
from trainer.parallel.collectives import AllGather
from trainer.parallel.process_groups import ProcessGroups


def context_parallel_kernels(kernels: KernelSet, groups: ProcessGroups, part: ContextShard) -> KernelSet:
    """The kernels of a rank that has this part of sequences which it shares with the ranks of `groups.cp`.

    Masks of attention are then made for whole sequences: `attention_masks` takes the documents of all T tokens. All
    else takes the rank's tokens. A ring is a gather, see `ascend/context.py`, and there is no Ulysses attention:
    `trainer.plan.ascend` refuses it.
    """
    dtypes = {name: kernels.attention.keywords[name] for name in ("dtype", "softmax_dtype")}
    return replace(
        kernels,
        attention=partial(GatheredAttention, part=part, gather=partial(AllGather, groups.cp), **dtypes),
        attention_masks=partial(AttentionMasks, part=part),
    )
