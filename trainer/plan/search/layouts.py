"""The layouts of a file on some ranks: degrees, offsets, interleaving, sharding, recomputation, micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer.config import Config
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees, resolve_for_job, zero_level
from trainer.config.recompute import SUBLAYERS
from trainer.config.stages import chunk_sizes, offset_rows
from trainer.parallel.mesh import Degrees, divisors
from trainer.parallel.schedule import SEQUENCE_PIPELINES
from trainer.parallel.world import World

LEVELS = ("", "level1", "level2", "level3")
"""Optimizer levels; empty: no rank shards optimizer state."""
RECOMPUTATIONS = ("none", "attention", "mlp", "1/4", "1/2", "3/4", "full")
"""What the backward pass computes again: a sublayer of each layer, or that part of the layers of each model chunk."""
UNCHANGED = "unchanged"
"""The recomputation of a layout that leaves it as it is."""
SCHEDULE = "parallel.pipeline_config.pipeline_scheduler"
_1F1B = "1f1b"
_MOST_CHUNKS = 4
_MOST_ROWS = 8
"""Sequences of a micro-batch."""

Offset = int | tuple[tuple[int, ...], ...]


class Layout(NamedTuple):
    """How a file runs on some ranks.

    Attributes:
        shares_rows: use_seq_parallel.
        chunks: Model chunks of a stage.
        rows: Sequences of a micro-batch.
        micro_batches: Of a step, on a rank.
        offset: As in the file: 0, or a row of numbers for each chunk.
        level: Of `LEVELS`.
        recomputed: Of `RECOMPUTATIONS`.
        schedule: As pipeline_scheduler; all layouts but that of the file have 1F1B.
        slices: Of a sequence, see `PipelineConfig.slices`.
    """

    degrees: Degrees
    shares_rows: bool
    chunks: int
    rows: int
    micro_batches: int
    offset: Offset = 0
    level: str = ""
    recomputed: str = "none"
    schedule: str = _1F1B
    slices: int = 1

    @property
    def text(self) -> str:
        """Returns the degrees in short: ``dp 8 tp 4 pp 2 ep 8``."""
        parts = [degrees_text(self.degrees)]
        if self.chunks > 1:
            parts.append(f"x {self.chunks} chunks")
        if self.shares_rows:
            parts.append("sp")
        if self.schedule != _1F1B:
            parts.append(self.schedule)
        if self.slices > 1:
            parts.append(f"x {self.slices} slices")
        return " ".join(parts)


def degrees_text(degrees: Degrees) -> str:
    """Returns degrees in short: ``dp 8 tp 4 pp 2 ep 8``."""
    names = {
        "data_parallel": "dp", "model_parallel": "tp", "context_parallel": "cp", "pipeline_stage": "pp",
        "expert_parallel": "ep",
    }  # fmt: skip
    sizes = degrees._asdict()
    return " ".join(f"{short} {sizes[name]}" for name, short in names.items() if sizes[name] > 1 or short == "dp")


def possible_recomputations(config: Config) -> tuple[str, ...]:
    """Returns those of `RECOMPUTATIONS` that a model can have: no sublayer alone where both stand side by side."""
    if not config.decoder.parallel_attn:
        return RECOMPUTATIONS
    return tuple(each for each in RECOMPUTATIONS if each not in SUBLAYERS)


@dataclass
class LayoutConfigs:
    """Makes the configuration of each layout of a file; sections that layouts share are made once.

    Attributes:
        config: The file, with `use_parallel` and without what a layout sets.
        global_batch: Sequences of a step over all ranks.
        unchanged: The file as it is, for its own ranks.
    """

    config: Config
    global_batch: int
    unchanged: Config
    _sections: dict[object, Any] = field(default_factory=dict)

    @classmethod
    def from_file(cls, config: Config, job: World) -> LayoutConfigs:
        """Returns the configurations of a file, whose global batch is that of `job`."""
        config = resolve_for_job(config, job)
        degrees = parallel_degrees(config, job)
        order = config.parallel.pipeline_config.with_slices(_slices(config, degrees))
        parallel = config.parallel.model_copy(update={"pipeline_config": order})
        unchanged = config.model_copy(update={"parallel": parallel})
        runner = config.runner_config
        batch = runner.global_batch_size
        if batch is None:
            batch = runner.batch_size * degrees.data_parallel * micro_batches_per_step(config, degrees)
        recompute = config.recompute_config.model_copy(update={"parallel_optimizer_comm_recompute": False})
        sharding = config.parallel.parallel_optimizer_config.model_copy(
            update={"gradient_accumulation_shard": False, "optimizer_weight_shard_size": -1}
        )
        parallel = config.parallel.model_copy(update={"parallel_optimizer_config": sharding})
        section = config.parallel_config
        if section.expert_model_parallel is not None:  # the loader multiplies expert_parallel by it
            section = section.model_copy(update={"expert_model_parallel": 1})
        return cls(
            config.model_copy(update={
                "use_parallel": True, "recompute": False, "recompute_config": recompute, "parallel": parallel,
                "parallel_config": section,
            }),
            batch,
            unchanged,
        )  # fmt: skip

    def make(self, layout: Layout) -> Config:
        """Returns the configuration of a layout."""
        config = self.config
        degrees = layout.degrees
        settings = {**degrees._asdict(), "use_seq_parallel": layout.shares_rows, "micro_batch_num": 1}
        steps = layout.micro_batches
        if degrees.pipeline_stage > 1:
            settings["micro_batch_num"] = steps
            steps = 1
        runner = {"batch_size": layout.rows, "gradient_accumulation_steps": steps}
        return config.model_copy(update={
            "parallel_config": config.parallel_config.model_copy(update=settings),
            "runner_config": config.runner_config.model_copy(update=runner),
            "recompute": layout.recomputed == UNCHANGED and self.unchanged.recompute,
            "parallel": self._once(
                ("parallel", layout.level, layout.chunks, layout.schedule, layout.slices), self._parallel, layout
            ),
            "recompute_config": self._once(
                ("recompute", layout.recomputed, degrees.pipeline_stage, layout.chunks, layout.offset),
                self._recompute, layout,
            ),
            "model": self._once(("model", layout.chunks, layout.offset), self._model, layout),
        })  # fmt: skip

    def _once(self, key: object, make: Any, layout: Layout) -> Any:
        if key not in self._sections:
            self._sections[key] = make(layout)
        return self._sections[key]

    def _parallel(self, layout: Layout) -> Any:
        section = self.config.parallel
        changes: dict[str, Any] = {"enable_parallel_optimizer": bool(layout.level)}
        if layout.level:
            sharding = section.parallel_optimizer_config.model_copy(update={"optimizer_level": layout.level})
            changes["parallel_optimizer_config"] = sharding
        interleaves = layout.chunks > 1 or layout.schedule != _1F1B
        order = {"pipeline_interleave": interleaves, "pipeline_scheduler": layout.schedule}
        changes["pipeline_config"] = section.pipeline_config.model_copy(update=order).with_slices(layout.slices)
        return section.model_copy(update=changes)

    def _recompute(self, layout: Layout) -> Any:
        if layout.recomputed == UNCHANGED:
            return self.unchanged.recompute_config
        changes: dict[str, Any] = {"recompute": False, "select_recompute": False, "select_recompute_exclude": False}
        if layout.recomputed in ("attention", "mlp"):
            changes["select_recompute"] = [layout.recomputed]
        elif layout.recomputed == "full":
            changes["recompute"] = True
        elif layout.recomputed != "none":
            changes["recompute"] = self._part_of_layers(layout)
        return self.config.recompute_config.model_copy(update=changes)

    def _part_of_layers(self, layout: Layout) -> Any:
        """Returns how many leading layers of each stage are computed again, as the file writes it."""
        numerator, denominator = map(int, layout.recomputed.split("/"))
        stages = layout.degrees.pipeline_stage

        def part(size: int) -> int:
            """Returns the part of a number of layers, rounded up."""
            return -(-size * numerator // denominator)

        if stages == 1:
            return part(self.config.decoder.num_layers)
        section = self.config.parallel_config.model_copy(update={"pipeline_stage": stages})
        model = self._once(("model", layout.chunks, layout.offset), self._model, layout)
        sizes = chunk_sizes(self.config.model_copy(update={"parallel_config": section, "model": model}))
        rows = [[part(size) for size in row] for row in sizes]
        if len(rows) == 1:
            return rows[0]
        return rows

    def _model(self, layout: Layout) -> Any:
        offset: Any = layout.offset
        if not isinstance(offset, int):
            offset = [list(row) for row in offset]
            if len(offset) == 1:
                offset = offset[0]
        settings = self.config.decoder.model_copy(update={"pp_interleave_num": layout.chunks, "offset": offset})
        return self.config.model.model_copy(update={"settings": settings})


def _slices(config: Config, degrees: Degrees) -> int:
    """Returns into how many slices the pipeline of a file cuts sequences, if MindSpore Transformers runs it."""
    if degrees.pipeline_stage == 1 or config.parallel.pipeline_config.pipeline_scheduler not in SEQUENCE_PIPELINES:
        return 1
    slices: int = config.parallel_config.seq_split_num  # type: ignore[attr-defined]
    return slices


def file_layout(config: Config, job: World) -> Layout:
    """Returns the layout that a file describes; what it recomputes is "unchanged"."""
    degrees = parallel_degrees(config, job)
    order = config.parallel.pipeline_config
    schedule = _1F1B
    if degrees.pipeline_stage > 1:
        schedule = order.pipeline_scheduler
    level = ""
    if config.parallel.enable_parallel_optimizer:
        level = zero_level(config)
    offset: Any = config.decoder.offset
    if not isinstance(offset, int):
        offset = tuple(tuple(row) for row in offset_rows(offset))
    return Layout(
        degrees, config.parallel_config.use_seq_parallel, config.decoder.pp_interleave_num,
        config.runner_config.batch_size, micro_batches_per_step(config, degrees), offset, level, UNCHANGED, schedule,
        order.slices,
    )  # fmt: skip


def plain_layouts(config: Config, ranks: int, global_batch: int) -> Iterator[Layout]:
    """Yields all combinations of degrees, interleaving and micro-batches whose products are the ranks and the batch.

    They have no offset, shard no optimizer state and recompute nothing: rules about divisibility do not depend on that.
    """
    for degrees in all_degrees(config, ranks):
        yield from _layouts_of_degrees(degrees, config.decoder.num_layers, global_batch)


def all_degrees(config: Config, ranks: int) -> Iterator[Degrees]:
    """Yields the degrees whose product is the number of ranks and that divide the model."""
    settings = config.decoder
    experts = 1
    if settings.experts is not None:
        experts = settings.experts.expert_num
    for stages in divisors(ranks):
        if stages > settings.num_layers:
            continue
        for tensor in divisors(ranks // stages):
            if settings.num_heads % tensor:
                continue
            for context in divisors(ranks // stages // tensor):
                if settings.seq_length % context:
                    continue
                data = ranks // stages // tensor // context
                for expert in divisors(math.gcd(experts, ranks // stages)):
                    yield Degrees(stages, data, context, tensor, expert)


def _layouts_of_degrees(degrees: Degrees, layers: int, global_batch: int) -> Iterator[Layout]:
    stages = degrees.pipeline_stage
    chunks = [1]
    if stages > 1:
        chunks = [each for each in (1, 2, _MOST_CHUNKS) if each * stages <= layers]
    shares = [False]
    if degrees.model_parallel > 1:
        shares = [False, True]
    if global_batch % degrees.data_parallel:
        return
    of_rank = global_batch // degrees.data_parallel
    for rows in divisors(of_rank):
        if rows > _MOST_ROWS or of_rank // rows < stages > 1:
            continue
        for shares_rows in shares:
            for each in chunks:
                yield Layout(degrees, shares_rows, each, rows, of_rank // rows)


def balanced_offset(costs: Sequence[float], head: float, stages: int, chunks: int) -> Offset:
    """Returns the offset with which the parts of the model take most equal times: the sum of their squares is least.

    Args:
        costs: The time of each layer.
        head: The time of what the last part has besides: head, loss and multi-token prediction.
    """
    parts = stages * chunks
    layers = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = [[math.inf] * (layers + 1) for _ in range(parts + 1)]
    begins = [[0] * (layers + 1) for _ in range(parts + 1)]
    best[0][0] = 0.0
    for part in range(1, parts + 1):
        more = 0.0
        if part == parts:
            more = head
        for end in range(part, layers - (parts - part) + 1):
            for begin in range(part - 1, end):
                value = best[part - 1][begin] + (sums[end] - sums[begin] + more) ** 2
                if value < best[part][end]:
                    best[part][end] = value
                    begins[part][end] = begin
    sizes = []
    end = layers
    for part in range(parts, 0, -1):
        sizes.append(end - begins[part][end])
        end = begins[part][end]
    sizes.reverse()
    share = layers // parts
    rows = [sizes[number * stages : (number + 1) * stages] for number in range(chunks)]
    if sizes == [share + (number >= parts - layers % parts) for number in range(parts)]:
        return 0
    return tuple(tuple(size - share for size in row) for row in rows)
