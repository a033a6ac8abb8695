"""The result of a smoke run as text and as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from trainer.config import Config, parse_config
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees
from trainer.config.schema.root import ConfigSource
from trainer.parallel.world import SINGLE_PROCESS
from trainer.smoke.changes import Change, smoke_text
from trainer.smoke.degrees import kind_name
from trainer.smoke.execute import CONFIG
from trainer.smoke.run import SmokeResult
from trainer.tables import Section

_LONGEST = 40
_SOURCE_KEYS = {
    "runner_config.stop_step": "training.steps",
    "runner_config.gradient_accumulation_steps": "training.global_batch_size",
    "parallel_config.micro_batch_num": "training.global_batch_size",
}
"""Keys here -> those of the newer schema that say the same."""
_WITHOUT_COUNTERPART = ("runner_config.epochs", "use_parallel", "parallel_config.data_parallel")
"""Keys that follow from others in the newer schema."""


def smoke_result_dict(result: SmokeResult) -> dict[str, Any]:
    """Returns the result as plain values for JSON; its field `result` is pass or fail."""
    outcome = "pass"
    if result.problem:
        outcome = "fail"
    changes = [change._asdict() for change in result.changes]
    return json.loads(json.dumps({"result": outcome, **asdict(result), "changes": changes}, default=str))


def changes_section(changes: list[Change], config: Config) -> Section:
    """Returns a table of the changes of a file; a change without a reason is not shown."""
    if config.source.source_places:
        changes = _source_changes(changes, config)
    rows = [(change.key, format_value(change.before, "not set"), format_value(change.after, "none"), change.why)
            for change in changes if change.why]
    return f"changes ({len(rows)})", [("key", "from", "to", "why"), *rows]


def _source_changes(changes: list[Change], config: Config) -> list[Change]:
    """Returns the changes with the keys and values of the newer schema, in which one key may stand for several."""
    from trainer.config.pynative.reverse import source_statements

    small = parse_config(CONFIG, smoke_text(config, changes), [], [])
    before = source_statements(config)
    after = source_statements(small)
    degrees = parallel_degrees(small, SINGLE_PROCESS)
    rows = small.runner_config.batch_size * micro_batches_per_step(small, degrees) * degrees.data_parallel
    computed = {"training.steps": small.runner_config.stop_step, "training.global_batch_size": rows}
    renamed: dict[str, Change] = {}
    for change in changes:
        key = _SOURCE_KEYS.get(change.key, config.source.name(change.key))
        if key in _WITHOUT_COUNTERPART or not change.why:
            continue
        old = change.before
        new = change.after
        written = config.source.place(change.key).value
        if key in computed:
            old = before[key].value
            new = computed[key]
        elif key in before and key in after and old is not None:
            old = before[key].value
            new = after[key].value
        elif written is not ...:
            old = written
            new = "default"
        if old != new:
            renamed.setdefault(key, Change(key, old, new, config.source.name_keys(change.why)))
    return list(renamed.values())


def format_value(value: Any, empty: str) -> str:
    """Formats a value for a cell; `empty` is shown for None and empty text."""
    if value is None or value == "":
        return empty
    text = str(value)
    if isinstance(value, bool | list | dict):
        text = json.dumps(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST - 20]}...{text[-17:]}"


def outcome_lines(result: SmokeResult, source: ConfigSource) -> list[str]:
    """Returns the last lines: pass or fail, why, and the requirements of the full run, with the keys of the file."""
    cost = f"{result.seconds:.0f} s, {result.peak_rss_bytes / (1 << 30):.1f} GiB"
    if result.ranks > 1:
        cost += f" in each of {result.ranks} processes"
    lines = []
    if not result.problem and result.resumed_loss is not None:
        last = max(result.losses)
        lines.append(f"resume check: step {last} has loss {result.resumed_loss:.4f} in both runs")
    if result.problem:
        lines.append(f"FAIL ({cost}): {result.problem}")
    else:
        lines.append(f"PASS ({cost})")
    if result.ranks > 1 and result.kinds:
        left_out = ""
        if result.left_out:
            left_out = f"; left out: {', '.join(kind_name(kind, source) for kind in result.left_out)}"
        lines.append(f"parallelism: {', '.join(kind_name(kind, source) for kind in result.kinds)}{left_out}")
    lines += [f"files: {result.folder}", "Requirements of the full run:"]
    return [*lines, *(f"  - {source.name_keys(need)}" for need in result.needs)]
