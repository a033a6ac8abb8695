"""The result of a smoke run as text and as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from trainer.smoke.changes import Change
from trainer.smoke.run import SmokeResult
from trainer.tables import Section

_LONGEST = 40


def smoke_result_dict(result: SmokeResult) -> dict[str, Any]:
    """Returns the result as plain values for JSON; its field `result` is pass or fail."""
    outcome = "pass"
    if result.problem:
        outcome = "fail"
    changes = [change._asdict() for change in result.changes]
    return json.loads(json.dumps({"result": outcome, **asdict(result), "changes": changes}, default=str))


def changes_section(changes: list[Change]) -> Section:
    """Returns a table of the changes; a change without a reason is not shown."""
    rows = [(change.key, format_value(change.before, "not set"), format_value(change.after, "none"), change.why)
            for change in changes if change.why]
    return f"changes ({len(rows)})", [("key", "from", "to", "why"), *rows]


def format_value(value: Any, empty: str) -> str:
    """Formats a value for a cell; `empty` is shown for None and empty text."""
    if value is None or value == "":
        return empty
    text = str(value)
    if isinstance(value, list | dict):
        text = json.dumps(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST - 20]}...{text[-17:]}"


def outcome_lines(result: SmokeResult) -> list[str]:
    """Returns the last lines: pass or fail, why, and the requirements of the full run."""
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
            left_out = f"; left out: {', '.join(result.left_out)}"
        lines.append(f"parallelism: {', '.join(result.kinds)}{left_out}")
    lines += [f"files: {result.folder}", "Requirements of the full run:"]
    return [*lines, *(f"  - {need}" for need in result.needs)]
