"""The result of a search as tables, and as plain values for `--json`."""

from __future__ import annotations

from typing import Any

from trainer.config import Config
from trainer.config.read.dump import flatten, plain_values
from trainer.errors import value_text
from trainer.parallel.schedule import SEQUENCE_PIPELINES
from trainer.plan.search.alternatives import lost_alternatives
from trainer.plan.search.layouts import SCHEDULE, Layout
from trainer.plan.search.measured import Corrections
from trainer.plan.search.search import Candidate, LayoutSearch, SearchResult, memory_text, shown_candidates
from trainer.tables import Rows, Section

_UNSET = "not set"
BEST = "best layouts"
"""The title of the table of layouts."""
LEFT_OUT_FIRST = ("tokens/s", "sent", "offset", "bubble", "optimizer", "batches")
"""Its columns that a narrow terminal does without; `--json` has all."""


def assumptions(search: LayoutSearch, corrections: Corrections | None) -> list[str]:
    """Returns what the estimates assume, in three lines."""
    rates = search.rates
    written = [key for key, value in search.config.hardware if value is not None]
    source = "default rates, which nobody measured; see --measured"
    if written:
        source = f"default rates but for {', '.join(written)} of the file; see --measured"
    if corrections is not None:
        source = f"rates that the step times of {corrections.runs} runs have corrected"
    pipeline = "a pipeline runs 1F1B"
    if _sequence_schedule(search):
        slices = search.configs.unchanged.parallel.pipeline_config.slices
        pipeline += f", that of the file {_sequence_schedule(search)}"
        if slices > 1:
            pipeline += f" with {slices} equal slices, the later with more keys"
    return [
        f"rates: {rates.products / 1e12:.3g} TFLOP/s in products, {rates.experts / 1e12:.3g} in experts,"
        f" {rates.attention / 1e12:.3g} in attention; {rates.node / 1e9:.3g} GB/s in a node of {rates.ranks_per_node},"
        f" {rates.network / 1e9:.3g} between nodes",
        "overlap: only messages among stages and gathers of level3 overlap with computation; experts are loaded evenly;"
        f" {pipeline}",
        f"order: an estimate until somebody measures ({source}); traffic is counted as in explicit mode",
    ]


def result_sections(
    search: LayoutSearch, result: SearchResult, config: Config, corrections: Corrections | None
) -> list[Section]:
    """Returns the tables of a search."""
    best = shown_candidates(result.candidates)
    sections: list[Section] = [("search", _summary(search, result))]
    sections.append(("assumptions", [("", ""), *(("", line) for line in assumptions(search, corrections))]))
    if corrections is not None:
        sections.append(("measured", _corrections(search, corrections)))
    rows: Rows = [("", "layout", "offset", "optimizer", "recompute", "batches", "memory", "step", "bubble",
                   "sent", "tokens/s")]  # fmt: skip
    rows += [(str(number), *_row(search, each)) for number, each in enumerate(best, start=1)]
    if result.file is not None:
        rows.append(("file", *_row(search, result.file)))
    sections.append((BEST, rows))
    changes = yaml_difference(config, search.changed_config(config, best[0].layout))
    title = "what the best one changes in the file"
    if result.is_file_fastest:
        title = "what the best of the others changes in the file"
    if changes:
        sections.append((title, [("key", "file", "best"), *changes]))
    lost: Rows = [("kind", "fastest of it", "why it lost")]
    lost += [(each.name, _short(each.layout), each.reason) for each in lost_alternatives(search, best[0])]
    sections.append(("well-known alternatives", lost))
    return sections


def _summary(search: LayoutSearch, result: SearchResult) -> Rows:
    broken = sum(result.broken.values())
    rows: Rows = [("", "")]
    rows.append(("ranks", f"{search.world.size}, global batch of {search.configs.global_batch} sequences"))
    rows.append(("mode", search.mode()))
    rows.append(("memory", f"at most {memory_text(search.limit_bytes)} of a rank"))
    parts = [
        f"{broken:,} break a rule", f"{result.too_large:,} need too much memory",
        f"{result.slower:,} are slower even without what they send for weights",
        f"{result.dominated:,} recompute more than they need", f"{len(result.candidates):,} remain",
    ]  # fmt: skip
    rows.append(("layouts", f"{result.considered:,}: {', '.join(parts)}"))
    if result.file is not None:
        rows.append(("file", file_place(result)))
    if schedule := schedule_text(search):
        rows.append(("schedule", schedule))
    return rows


def _sequence_schedule(search: LayoutSearch) -> str:
    """Returns the sequence pipeline of the file if it is estimated; empty if the file has none."""
    unchanged = search.configs.unchanged
    name = unchanged.parallel.pipeline_config.pipeline_scheduler
    is_used = name in SEQUENCE_PIPELINES and unchanged.parallel_config.pipeline_stage > 1
    if search.other_schedule or not is_used:
        return ""
    return name


def schedule_text(search: LayoutSearch) -> str:
    """Returns what the schedule of the file needs, or that it is not estimated; empty for 1F1B and GPipe."""
    source = search.config.source
    key = source.name(SCHEDULE)
    if search.other_schedule:
        return f"the file asks for {key} {search.other_schedule}, which is not estimated: layouts here have 1f1b"
    name = _sequence_schedule(search)
    if not name:
        return ""
    text = f"the file's own layout has {name}, which is MindSpore's; the others have 1f1b"
    slices = search.configs.unchanged.parallel.pipeline_config.slices
    if slices > 1:
        text += (
            f". Its {source.name('parallel_config.seq_split_num')} {slices} is estimated as MindSpore Transformers runs"
            " it; a run of this program takes whole sequences"
        )
    return text


def file_place(result: SearchResult) -> str:
    """Returns where the layout of the file stands among those that fit, and why a run would refuse it."""
    assert result.file is not None
    text = "no layout is estimated to be faster than its own"
    if not result.is_file_fastest:
        layouts = [each.layout for each in result.candidates if each.seconds < result.file.seconds]
        faster = {(layout.degrees, layout.chunks, layout.rows) for layout in layouts}
        text = f"{len(faster)} kinds of layouts are estimated to be faster than its own"
        if len(faster) == 1:
            text = "1 kind of layout is estimated to be faster than its own"
        if result.file.memory_bytes > result.limit_bytes:
            text += f"; it needs {memory_text(result.file.memory_bytes)}"
    for error in result.file_errors[:1]:
        text += f"; a run refuses it: {error.key} {error.rule}"
    return text


def _row(search: LayoutSearch, candidate: Candidate) -> tuple[str, ...]:
    layout = candidate.layout
    time = candidate.time
    assert time is not None
    tokens = search.configs.global_batch * search.config.decoder.seq_length / time.seconds
    memory = memory_text(candidate.memory_bytes)
    if candidate.measured_bytes is not None:
        memory += " (dry run)"
    return (
        layout.text, offset_text(layout), layout.level or "none", layout.recomputed,
        f"{layout.micro_batches} x {layout.rows}", memory, _seconds_text(time.seconds), f"{search.bubble(layout):.1%}",
        memory_text(time.sent_bytes), f"{tokens:,.0f}",
    )  # fmt: skip


def _seconds_text(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s"


def offset_text(layout: Layout) -> str:
    """Returns the offset of a layout as in the file; a long one by its last numbers."""
    if isinstance(layout.offset, int):
        return str(layout.offset)
    numbers = layout.offset[-1]
    shown = ",".join(map(str, numbers[-4:]))
    if len(layout.offset) > 1 or len(numbers) > 4:
        return f"[..{shown}]"
    return f"[{shown}]"


def _short(layout: Layout | None) -> str:
    if layout is None:
        return "none"
    return layout.text


def yaml_difference(before: Config, after: Config) -> list[tuple[str, str, str]]:
    """Returns key, old and new value of each key that differs, as the file names the keys."""
    old = dict(flatten(plain_values(before)))
    new = dict(flatten(plain_values(after)))
    rows = []
    for key in dict.fromkeys((*old, *new)):
        if old.get(key, _UNSET) != new.get(key, _UNSET) and not (key not in new and old[key] in (1, False, None)):
            values = [value_text(each.get(key, _UNSET)) for each in (old, new)]
            rows.append((before.source.name(key), values[0], values[1]))
    if rows and after.parallel_config.expert_model_parallel is not None:
        # Its default may follow from a changed degree, and the loader multiplies expert_parallel by it.
        key = "parallel_config.expert_model_parallel"
        written = {name for name, _, _ in rows}
        if before.source.name(key) not in written:
            rows.append((before.source.name(key), value_text(old.get(key, _UNSET)), "1"))
    return rows


def _corrections(search: LayoutSearch, corrections: Corrections) -> Rows:
    rows: Rows = [("", "")]
    rows.append(("runs", str(corrections.runs)))
    rows.append(("estimates were off by", f"{corrections.before:.0%} in the mean"))
    rows.append(("with corrected rates", f"{corrections.after:.0%}"))
    rows.append(("rank correlation before", f"{corrections.correlation:.2f}"))
    rows += [(f"hardware.{key}", f"{value:g}") for key, value in _section(search, corrections).items()]
    return rows


def _section(search: LayoutSearch, corrections: Corrections) -> dict[str, float]:
    return corrections.factors.section(search.config, search.device)


def result_dict(
    search: LayoutSearch, result: SearchResult, config: Config, corrections: Corrections | None
) -> dict[str, Any]:
    """Returns the result as plain values."""
    best = shown_candidates(result.candidates)
    changes = yaml_difference(config, search.changed_config(config, best[0].layout))
    values: dict[str, Any] = {
        "ranks": search.world.size,
        "mode": search.mode(),
        "global_batch": search.configs.global_batch,
        "limit_bytes": int(search.limit_bytes),
        "assumptions": assumptions(search, corrections),
        "considered": result.considered,
        "broken": {f"{key}: {rule}": number for (key, rule), number in result.broken.items()},
        "too_large": result.too_large,
        "other_schedule": search.other_schedule,
        "schedule": schedule_text(search),
        "best": [_candidate_dict(search, each) for each in best],
        "changes": {key: [old, new] for key, old, new in changes},
        "alternatives": [
            {"kind": each.name, "layout": _short(each.layout), "seconds": each.seconds, "reason": each.reason}
            for each in lost_alternatives(search, best[0])
        ],
        "file": None,
    }
    if result.file is not None:
        values["file"] = _candidate_dict(search, result.file) | {"place": file_place(result)}
    if corrections is not None:
        values["measured"] = {
            "runs": corrections.runs, "error_before": corrections.before, "error_after": corrections.after,
            "rank_correlation_before": corrections.correlation, "hardware": _section(search, corrections),
        }  # fmt: skip
    return values


def _candidate_dict(search: LayoutSearch, candidate: Candidate) -> dict[str, Any]:
    layout = candidate.layout
    time = candidate.time
    assert time is not None
    return {
        **layout.degrees._asdict(),
        "use_seq_parallel": layout.shares_rows,
        "pp_interleave_num": layout.chunks,
        "pipeline_scheduler": layout.schedule,
        "seq_split_num": layout.slices,
        "offset": layout.offset,
        "optimizer_level": layout.level,
        "recompute": layout.recomputed,
        "batch_size": layout.rows,
        "micro_batches": layout.micro_batches,
        "memory_bytes": candidate.memory_bytes,
        "is_dry_run": candidate.measured_bytes is not None,
        "step_seconds": time.seconds,
        "bubble": search.bubble(layout),
        "sent_bytes": time.sent_bytes,
        "tokens_per_second": search.configs.global_batch * search.config.decoder.seq_length / time.seconds,
        "seconds_by_class": dict(time.classes),
    }
