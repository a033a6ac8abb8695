"""Why well-known layouts lost: each is the fastest of its kind, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from trainer.plan.search.layouts import Layout, Skeleton, skeletons

if TYPE_CHECKING:
    from trainer.plan.search.search import Candidate, LayoutSearch
    from trainer.plan.search.step_time import StepTime

_GIB = 1 << 30
_MOST_SEARCHED = 24


class Alternative(NamedTuple):
    """A well-known kind of layout.

    Attributes:
        layout: The fastest of its kind that fits; None if none does.
        reason: Why it is not the best.
    """

    name: str
    layout: Layout | None
    seconds: float | None
    reason: str


def lost_alternatives(search: LayoutSearch, best: Candidate) -> list[Alternative]:
    """Returns the well-known kinds of layouts to which the best one does not belong."""
    per_node = min(search.rates.ranks_per_node, search.world.size)
    kinds: dict[str, Callable[[Skeleton], bool]] = {
        "data parallel alone (ZeRO)": lambda one: one.degrees.ranks == one.degrees.data_parallel
        and one.degrees.expert_parallel == 1,
        f"tensor parallel over a node ({per_node})": lambda one: one.degrees.model_parallel == per_node
        and one.degrees.pipeline_stage == one.degrees.context_parallel == 1,
        "pipeline without tensor parallel": lambda one: one.degrees.pipeline_stage > 1
        and one.degrees.model_parallel == one.degrees.context_parallel == 1,
        "tensor parallel and pipeline": lambda one: min(one.degrees.model_parallel, one.degrees.pipeline_stage) > 1
        and one.degrees.context_parallel == 1,
        "no pipeline": lambda one: one.degrees.pipeline_stage == 1,
        "context parallel": lambda one: one.degrees.context_parallel > 1,
    }  # fmt: skip
    if search.config.decoder.experts is not None:
        kinds["experts of a node together"] = lambda one: one.degrees.expert_parallel == per_node
        kinds["no expert parallel"] = lambda one: one.degrees.expert_parallel == 1
    layout = best.layout
    of_best = Skeleton(layout.degrees, layout.shares_rows, layout.chunks, layout.rows, layout.micro_batches)
    every = list(skeletons(search.config, search.world.size, search.configs.global_batch))
    alternatives = []
    for name, belongs in kinds.items():
        if not belongs(of_best):
            alternatives.append(_alternative(search, best, name, [one for one in every if belongs(one)]))
    return alternatives


def _alternative(search: LayoutSearch, best: Candidate, name: str, kind: list[Skeleton]) -> Alternative:
    """Returns the fastest layout of a kind, and why it is slower than the best one."""
    if not kind:
        return Alternative(name, None, None, "divisibility: no degrees of this kind divide heads, ranks and the batch")
    result = search.run_some(kind, _MOST_SEARCHED)
    if result.candidates:
        fastest = result.candidates[0]
        assert fastest.time is not None
        assert best.time is not None
        reason = slower_because(fastest.time, best.time)
        return Alternative(name, fastest.layout, fastest.seconds, reason)
    if result.refused:
        least = min(result.refused, key=lambda each: each.memory_bytes)
        needed = f"{least.memory_bytes / _GIB:.1f} GiB of {search.limit_bytes / _GIB:.1f}"
        return Alternative(name, None, None, f"memory: {least.layout.text} needs {needed} with all that saves memory")
    (key, rule), _ = result.broken.most_common(1)[0]
    return Alternative(name, None, None, f"rule: {key.rpartition('.')[2]} {rule}")


def slower_because(time: StepTime, best: StepTime) -> str:
    """Returns by how much a layout is slower than the best one, and what takes most of it."""
    causes = {
        "bubble": time.bubble * time.seconds - best.bubble * best.seconds,
        "links between nodes": time.classes["network"] - best.classes["network"],
        "links in a node": time.classes["node"] - best.classes["node"],
        "computation and memory": _computed(time) - _computed(best),
    }
    cause = max(causes, key=lambda name: causes[name])
    return f"{time.seconds / best.seconds - 1:+.0%}, most of it {cause}"


def _computed(time: StepTime) -> float:
    """Returns the seconds of operators without the bubble."""
    links = ("node", "network")
    return (1 - time.bubble) * sum(value for name, value in time.classes.items() if name not in links)
