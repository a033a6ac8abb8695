"""Why well-known layouts lost: each is the fastest of its kind, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.config.checks.problem import one_of
from trainer.parallel.mesh import Degrees
from trainer.plan.search.layouts import Layout, all_degrees, degrees_text
from trainer.plan.search.search import Candidate, LayoutSearch, memory_text
from trainer.plan.search.step_time import StepTime

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
    kinds: dict[str, Callable[[Degrees], bool]] = {
        "data parallel alone (ZeRO)": lambda one: one.ranks == one.data_parallel and one.expert_parallel == 1,
        f"tensor parallel over a node ({per_node})": lambda one: one.model_parallel == per_node
        and one.pipeline_stage == one.context_parallel == 1,
        "pipeline without tensor parallel": lambda one: one.pipeline_stage > 1
        and one.model_parallel == one.context_parallel == 1,
        "tensor parallel and pipeline": lambda one: min(one.model_parallel, one.pipeline_stage) > 1
        and one.context_parallel == 1,
        "no pipeline": lambda one: one.pipeline_stage == 1,
        "context parallel": lambda one: one.context_parallel > 1,
    }  # fmt: skip
    if search.config.decoder.experts is not None:
        kinds["experts of a node together"] = lambda one: one.expert_parallel == per_node
        kinds["no expert parallel"] = lambda one: one.expert_parallel == 1
    others = {name: belongs for name, belongs in kinds.items() if not belongs(best.layout.degrees)}
    return [_alternative(search, best, name, belongs) for name, belongs in others.items()]


def _alternative(search: LayoutSearch, best: Candidate, name: str, belongs: Callable[[Degrees], bool]) -> Alternative:
    """Returns the fastest layout of a kind, and why it is slower than the best one."""
    kind = [one for one in search.plain_layouts() if belongs(one.degrees)]
    if not kind:
        degrees = [one for one in all_degrees(search.config, search.world.size) if belongs(one)]
        return Alternative(name, None, None, _why_none(degrees, search.world.size, search.configs.global_batch))
    result = search.run_some(kind, _MOST_SEARCHED)
    if result.candidates:
        fastest = result.candidates[0]
        assert fastest.time is not None
        assert best.time is not None
        reason = slower_because(fastest.time, best.time)
        return Alternative(name, fastest.layout, fastest.seconds, reason)
    if result.refused:
        least = min(result.refused, key=lambda each: each.memory_bytes)
        needed = f"{memory_text(least.memory_bytes)} of {memory_text(search.limit_bytes)}"
        return Alternative(name, None, None, f"memory: {least.layout.text} needs {needed} with all that saves memory")
    (key, rule), _ = result.broken.most_common(1)[0]
    return Alternative(name, None, None, f"rule: {key.rpartition('.')[2]} {rule}")


def _why_none(degrees: Sequence[Degrees], ranks: int, batch: int) -> str:
    """Returns why no layout of a kind runs with a global batch; `degrees` are those of the kind."""
    if ranks == 1:
        return "divisibility: it takes more than one rank"
    if not degrees:
        return f"divisibility: no degrees of this kind make {ranks} ranks and divide heads, layers, tokens and experts"
    dividing = [one for one in degrees if batch % one.data_parallel == 0]
    if not dividing:
        sizes = sorted({one.data_parallel for one in degrees})
        return f"divisibility: {batch} sequences are no multiple of data_parallel {one_of(sizes)}"
    nearest = min(dividing, key=lambda one: one.data_parallel * one.pipeline_stage)
    needed = nearest.data_parallel * nearest.pipeline_stage
    stages = f"{nearest.pipeline_stage} stages need as many micro-batches"
    return f"micro-batches: {degrees_text(nearest)} needs {needed} sequences a step, not {batch}: {stages}"


def slower_because(time: StepTime, best: StepTime) -> str:
    """Returns by how much a layout is slower than the best one, and what takes most of it."""
    causes = {
        "bubble": time.waiting - best.waiting,
        "links between nodes": time.classes["network"] - best.classes["network"],
        "links in a node": time.classes["node"] - best.classes["node"],
        "computation and memory": _computed(time) - _computed(best),
    }
    cause = max(causes, key=lambda name: causes[name])
    return f"{time.seconds / best.seconds - 1:+.0%}, most of it {cause}"


def _computed(time: StepTime) -> float:
    """Returns the seconds of operators without those in which a stage waits."""
    links = ("node", "network")
    return sum(value for name, value in time.classes.items() if name not in links) - time.waiting
