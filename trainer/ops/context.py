"""The kernels of a rank that shares sequences with others (context parallelism), in the place of those of one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trainer.data.batches.context import SequencePart
from trainer.ops.ascend.context import GatheredAttention, GatheredMasks
from trainer.ops.cpu.context import RingAttention, RingMasks, UlyssesAttention, draw_ring_mask, own_heads
from trainer.ops.kernel_set import KernelSet
from trainer.parallel.collectives import AllGather
from trainer.parallel.process_groups import ProcessGroups


def over_context(kernels: KernelSet, groups: ProcessGroups, part: SequencePart, compiled: bool = True) -> KernelSet:
    """The kernels of a rank that has this part of sequences which it shares with the ranks of `groups.cp`.

    Masks and dropout masks of attention are then made for whole sequences: `attention_masks` takes the documents of all
    T tokens. All else takes the rank's tokens. On an Ascend a ring is a gather, see `ascend/context.py`, and there is
    no Ulysses attention: `trainer.plan.ascend` refuses it.
    """
    dtypes = {name: kernels.attention.keywords[name] for name in ("dtype", "softmax_dtype")}
    if not groups.cp.on_host:
        assert part.ulysses == 1
        return replace(
            kernels,
            attention=partial(GatheredAttention, part=part, gather=partial(AllGather, groups.cp, compiled), **dtypes),
            attention_masks=partial(GatheredMasks, part=part),
        )
    if groups.ring is not None:
        kernels = replace(
            kernels,
            attention=partial(RingAttention, part=part.ring, group=groups.ring, compiled=compiled, **dtypes),
            attention_masks=partial(RingMasks, part=part.ring),
            draw_attention_mask=partial(draw_ring_mask, kernels.draw_attention_mask, part.ring),
        )
    if groups.ulysses is not None:
        masks, ranks = kernels.attention_masks, groups.ulysses.size
        kernels = replace(
            kernels,
            attention=partial(UlyssesAttention, attention=kernels.attention, group=groups.ulysses, compiled=compiled),
            attention_masks=lambda settings: masks(own_heads(settings, ranks)),
        )
    return kernels
