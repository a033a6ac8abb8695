"""Enumerates the layouts of a file, leaves out those that break a rule or need too much memory, and ranks the others.

Of layouts that differ in recomputation alone only the fastest that fits remains: recomputing more takes longer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.config import Config
from trainer.config.checks.parallel import runs_semi_auto
from trainer.config.checks.problem import ConfigError, raise_problems
from trainer.config.device_defaults import apply_device_defaults
from trainer.errors import UserError
from trainer.parallel.mesh import Mesh
from trainer.parallel.schedule import SEQUENCE_PIPELINES, never_waits_for_ever
from trainer.parallel.world import World
from trainer.plan.device.model_facts import model_facts
from trainer.plan.division import fullest_rank
from trainer.plan.flops import decoder_products
from trainer.plan.memory import memory_estimate
from trainer.plan.pipeline import pipeline_plan
from trainer.plan.search.hardware import Rates
from trainer.plan.search.layouts import (
    LEVELS,
    Layout,
    LayoutConfigs,
    balanced_offset,
    file_layout,
    plain_layouts,
    possible_recomputations,
)
from trainer.plan.search.step_time import StepEstimator, StepTime

BrokenRules = Callable[["Config", "World"], Sequence["ConfigError"]]
"""Returns the errors that a job would have."""


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at.

    Attributes:
        memory: Bytes of its fullest rank, by part and in total.
        time: None where it needs too much memory.
        measured_bytes: The peak of a dry run instead of the estimate; None without one.
    """

    layout: Layout
    memory: Mapping[str, int]
    time: StepTime | None = None
    measured_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        """Returns the bytes of the fullest rank: measured by a dry run, or estimated."""
        if self.measured_bytes is not None:
            return self.measured_bytes
        return self.memory["total"]

    @property
    def seconds(self) -> float:
        """Returns the estimated time of a step."""
        assert self.time is not None, "the layout fits"
        return self.time.seconds


_MOST_NEAR = 400
"""Layouts near that of a file whose memory is estimated for a message."""
SHOWN = 10
"""Number of layouts in the table."""


def memory_text(bytes_: float) -> str:
    """Returns memory for people: ``31.7 GiB``, ``412 MiB``."""
    if bytes_ < 1 << 30:
        return f"{bytes_ / (1 << 20):.0f} MiB"
    return f"{bytes_ / (1 << 30):.1f} GiB"


def shown_candidates(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the best layouts, one of those that differ in offset, optimizer level or sequence parallelism alone."""
    best: dict[object, Candidate] = {}
    for each in sorted(candidates, key=lambda one: one.seconds):
        layout = each.layout
        best.setdefault((layout.degrees, layout.chunks, layout.rows), each)
    return list(best.values())[:SHOWN]


@dataclass
class SearchResult:
    """The result of a search.

    Attributes:
        candidates: Layouts that fit, the fastest first.
        refused: The layouts that need too much memory, each with the least recomputation that was tried.
        broken: Number of layouts by the key and rule that they break.
        considered: Number of layouts.
        dominated: Number of those that recompute more than needed.
        too_large: Number of those that need too much memory.
        slower: Number of those whose passes alone take longer than the worst layout that is shown.
        file: The layout of the file, if it is for so many ranks and its schedule has an estimate.
        file_errors: Why a run would refuse it.
        worst_shown: The time of the last of the layouts that are shown; infinite while there are fewer.
    """

    configs: LayoutConfigs
    world: World
    limit_bytes: float
    candidates: list[Candidate] = field(default_factory=list)
    refused: list[Candidate] = field(default_factory=list)
    broken: Counter[tuple[str, str]] = field(default_factory=Counter)
    considered: int = 0
    dominated: int = 0
    too_large: int = 0
    slower: int = 0
    file: Candidate | None = None
    file_errors: list[UserError] = field(default_factory=list)
    worst_shown: float = math.inf
    _shown: list[Candidate] = field(default_factory=list)

    @property
    def is_file_fastest(self) -> bool:
        """Returns whether the layout of the file fits, and no other one is estimated to be faster."""
        if self.file is None or self.file.memory_bytes > self.limit_bytes:
            return False
        return all(self.file.seconds <= each.seconds for each in self.candidates)

    def add(self, candidate: Candidate) -> None:
        """Adds a layout that fits."""
        self.candidates.append(candidate)
        if candidate.seconds < self.worst_shown:
            self._shown = shown_candidates([*self._shown, candidate])
            if len(self._shown) == SHOWN:
                self.worst_shown = self._shown[-1].seconds


@dataclass
class LayoutSearch:
    """Searches the layouts of one file.

    Args:
        config: The file, with the defaults of its device.
        world: The ranks to run on.
        job: The ranks that the file is written for, which gives its global batch.
        limit_bytes: The memory of a rank.
        broken_rules: Finds the errors of a job.
    """

    config: Config
    world: World
    job: World
    device: str
    limit_bytes: float
    rates: Rates
    broken_rules: BrokenRules

    def __post_init__(self) -> None:
        self.config = apply_device_defaults(self.config, self.device)
        self.configs = LayoutConfigs.from_file(self.config, self.job)
        self.facts = model_facts(self.config, trains=True)
        self.estimator = StepEstimator(self.config, self.device, self.facts, self.rates)
        layers, ends = decoder_products(self.config)
        self._costs = [sum(each.flops for each in layer) for layer in layers]  # of a token
        self._head_cost = sum(each.flops for each in ends)
        self._recomputations = possible_recomputations(self.config)

    def run(self) -> SearchResult:
        """Returns the ranked layouts.

        The layouts are visited by a lower bound of their time, that of their passes without recomputation, until no
        other one can be among the best.
        """
        result = self.run_some(self.plain_layouts())
        unchanged = self.configs.unchanged
        if self.world.size == self.job.size and not self.other_schedule:
            result.file = self.assess(file_layout(unchanged, self.world), unchanged)
            result.file_errors = [each.error for each in self.broken_rules(unchanged, self.world)]
        return result

    def plain_layouts(self) -> Iterator[Layout]:
        """Yields the layouts without offset, sharding of states and recomputation."""
        return plain_layouts(self.config, self.world.size, self.configs.global_batch)

    def run_some(self, chosen: Iterable[Layout], most: int | None = None) -> SearchResult:
        """Returns the ranked layouts of some plain ones, at most `most` of them with an offset."""
        result = SearchResult(self.configs, self.world, self.limit_bytes)
        groups: list[tuple[float, int, Layout]] = []
        for plain in chosen:
            rule = self._rule_of_degrees(plain)
            for layout in self._with_offsets(plain):
                count = len(self._recomputations) * len(self._levels(plain))
                result.considered += count
                if rule is not None:
                    result.broken[rule] += count
                    continue
                bound = self.estimator.passes(self.configs.make(layout), self.world).seconds
                groups.append((bound, len(groups), layout))
        groups.sort()
        for bound, _, layout in groups[:most]:
            if bound >= result.worst_shown:
                result.slower += len(self._recomputations) * len(self._levels(layout))
                continue
            self._search_levels(layout, result)
        result.candidates.sort(key=lambda each: each.seconds)
        return result

    def _levels(self, layout: Layout) -> Sequence[str]:
        if layout.degrees.data_parallel * layout.degrees.context_parallel == 1:
            return LEVELS[:1]
        return LEVELS

    def _search_levels(self, layout: Layout, result: SearchResult) -> None:
        """Adds the best layout of each optimizer level."""
        for level in self._levels(layout):
            layouts = [layout._replace(level=level, recomputed=choice) for choice in self._recomputations]
            rules = [self._first_rule(layout) for layout in (layouts[0], layouts[-1])]
            if rules[0] is not None:
                result.broken[rules[0]] += len(layouts)
                continue
            if rules[1] is not None:  # some rules are about recomputed blocks
                kept = [layout for layout in layouts if layout.recomputed in ("none", "attention", "mlp")]
                result.broken[rules[1]] += len(layouts) - len(kept)
                layouts = kept
            self._search_recomputations(layouts, result)

    def _search_recomputations(self, layouts: Sequence[Layout], result: SearchResult) -> None:
        """Adds the fastest that fits of layouts which differ in recomputation alone, the least work first."""
        least, *others = layouts
        config = self.configs.make(least)
        memory = self._memory(config)
        if memory["total"] <= self.limit_bytes:
            result.dominated += len(others)
            result.add(self.assess(least, config, memory))
            return
        smallest = self._memory(self.configs.make(layouts[-1]))
        if smallest["total"] > self.limit_bytes:
            result.too_large += len(layouts)
            result.refused.append(Candidate(layouts[-1], smallest))
            return
        result.too_large += 1
        others.sort(key=lambda layout: self.estimator.passes(self.configs.make(layout), self.world).seconds)
        for number, layout in enumerate(others):
            config = self.configs.make(layout)
            memory = self._memory(config)
            if memory["total"] <= self.limit_bytes:
                result.dominated += len(others) - number - 1
                result.add(self.assess(layout, config, memory))
                return
            result.too_large += 1

    def _memory(self, config: Config, stage: int | None = None) -> Mapping[str, int]:
        return memory_estimate(config, True, self.device, self.world, stage, self.facts)

    def nearest(self) -> Candidate | None:
        """Returns the layout that fits and differs least from that of the file, of equally near ones the fastest.

        Only degrees, sequence parallelism and optimizer level change: they shard what always needs memory.
        """
        layout = file_layout(self.configs.unchanged, self.job)
        distances: list[tuple[int, int, Layout]] = []
        for plain in self.plain_layouts():
            if (plain.chunks, plain.rows) != (layout.chunks, layout.rows):
                continue
            if plain.degrees.pipeline_stage == layout.degrees.pipeline_stage:
                plain = plain._replace(offset=layout.offset)
            if plain.degrees.pipeline_stage > 1:
                plain = plain._replace(schedule=layout.schedule)
            for level in self._levels(plain):
                for choice in dict.fromkeys((layout.recomputed, "full")):
                    other = plain._replace(level=level, recomputed=choice)
                    distances.append((_distance(layout, other), len(distances), other))
        distances.sort()
        fits: list[Candidate] = []
        least = 0
        for distance, _, other in distances[:_MOST_NEAR]:
            if fits and distance > least:
                break
            least = distance
            if self._first_rule(other) is not None:
                continue
            config = self.configs.make(other)
            memory = self._memory(config)
            if memory["total"] <= self.limit_bytes:
                fits.append(self.assess(other, config, memory))
        return min(fits, key=lambda each: each.seconds, default=None)

    def bubble(self, layout: Layout) -> float:
        """Returns the share of a step in which stages of a layout wait, as `plan` shows it; 0 without a pipeline."""
        pipeline = pipeline_plan(self.configs.make(layout), layout.degrees.pipeline_stage)
        if pipeline is None:
            return 0.0
        return pipeline.bubble_share

    def changed_config(self, config: Config, layout: Layout) -> Config:
        """Returns the file with a layout: as `make` of its configurations, without the defaults of the device."""
        return LayoutConfigs.from_file(config, self.job).make(layout)

    def fullest_rank(self, candidate: Candidate) -> int:
        """Returns the rank that needs most memory."""
        config = self.configs.make(candidate.layout)
        degrees = candidate.layout.degrees
        needed = [self._memory(config, stage)["total"] for stage in range(degrees.pipeline_stage)]
        return Mesh(degrees).rank_at(fullest_rank(degrees, needed.index(max(needed))))

    @property
    def other_schedule(self) -> str:
        """Returns the schedule of the file's pipeline if its time is not estimated; empty if it is, or without one.

        GPipe takes as long as 1F1B, see `trainer.parallel.schedule`. Sequence pipelines are MindSpore's alone.
        """
        unchanged = self.configs.unchanged
        order = unchanged.parallel.pipeline_config
        stages = unchanged.parallel_config.pipeline_stage
        name = order.pipeline_scheduler
        is_known = name in ("1f1b", "gpipe")
        if name in SEQUENCE_PIPELINES:
            is_known = runs_semi_auto(unchanged, self.job) and never_waits_for_ever(name, stages, order.slices)
        if is_known or stages == 1:
            return ""
        return name

    def mode(self) -> str:
        """Returns the mode in which the layouts run."""
        if runs_semi_auto(self.configs.config, self.world):
            return "semi-automatic mode, as in the file (parallel_mode 1)"
        return "explicit mode, as in the file (parallel_mode 0)"

    def nothing_fits(self, result: SearchResult) -> UserError:
        """Returns the error of a search that found no layout.

        Raises:
            UserError: The file has keys with which no layout runs, on no number of ranks.
        """
        raise_problems(self._errors_of_all())
        key = "context.max_device_memory"
        if result.refused:
            least = min(result.refused, key=lambda each: each.memory_bytes)
            ranks = f"{self.world.size} ranks"
            if self.world.size == 1:
                ranks = "a single rank"
            smallest = f"{least.layout.text}, optimizer {least.layout.level or 'none'}, all layers recomputed"
            rule = (
                f"no layout on {ranks} fits into {memory_text(self.limit_bytes)}; the smallest ({smallest}) needs"
                f" {memory_text(least.memory_bytes)} of a rank"
            )
            file = result.file
            if file is not None and file.memory_bytes <= self.limit_bytes:
                rule += f"; that of the file itself ({file.layout.text}) needs {memory_text(file.memory_bytes)}"
            return UserError(rule, where="flag --search", key=key, fix="use more ranks, or devices with more memory")
        rule = f"no layout divides the model and its global batch of {self.configs.global_batch} on these ranks"
        if result.broken:
            (broken, text), _ = result.broken.most_common(1)[0]
            rule += f"; most often {broken}: {text}"
        fix = "use another number of ranks, or another runner_config.global_batch_size"
        return UserError(rule, where="flag --ranks", key="--ranks", value=self.world.size, fix=fix)

    def assess(self, layout: Layout, config: Config, memory: Mapping[str, int] | None = None) -> Candidate:
        """Returns memory and time of a layout, whose configuration is `config`."""
        memory = memory or self._memory(config)
        return Candidate(layout, memory, self.estimator.estimate(config, self.world, memory))

    def _rule_of_degrees(self, plain: Layout) -> tuple[str, str] | None:
        """Returns a rule that the degrees break with any layout; None if they may break none."""
        simplest = plain._replace(shares_rows=False, chunks=1)
        rule = self.facts.once(("broken", simplest), lambda: self._first_rule(simplest))
        if rule is None or rule[0].startswith("model."):  # another offset may heal it
            return None
        return rule

    def _first_rule(self, layout: Layout) -> tuple[str, str] | None:
        errors = self.broken_rules(self.configs.make(layout), self.world)
        return min(((each.error.key, each.error.rule) for each in errors), default=None)

    def _errors_of_all(self) -> list[ConfigError]:
        """Returns the errors that every layout has: about keys that no layout changes."""
        common: dict[str, ConfigError] | None = None
        for plain in self.plain_layouts():
            simplest = self.configs.make(plain._replace(shares_rows=False, chunks=1))
            errors = {str(each.error): each for each in self.broken_rules(simplest, self.world)}
            if common is None:
                common = errors
            common = {text: error for text, error in common.items() if text in errors}
            if not common:
                break
        return list((common or {}).values())

    def _with_offsets(self, plain: Layout) -> Iterator[Layout]:
        """Yields a layout with equal shares of a pipeline's stages, and with the shares that take equal times."""
        yield plain
        stages = plain.degrees.pipeline_stage
        if stages == 1:
            return
        number = self.config.decoder.num_layers
        last = self._head_cost + sum(self._costs[number:])
        key = "balanced", stages, plain.chunks
        offset = self.facts.once(key, lambda: balanced_offset(self._costs[:number], last, stages, plain.chunks))
        if offset:
            yield plain._replace(offset=offset)


def _distance(first: Layout, second: Layout) -> int:
    """Returns in how many settings two layouts differ; data_parallel and micro-batches follow from the others."""
    pairs = list(zip(first.degrees, second.degrees, strict=True))
    del pairs[1]  # data_parallel
    changed = sum(one != other for one, other in pairs)
    others = ("shares_rows", "chunks", "offset", "level", "recomputed", "rows")
    return changed + sum(getattr(first, name) != getattr(second, name) for name in others)
