"""A verdict as text and as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from trainer.plan.render import Section
from trainer.smoke.changes import Change
from trainer.smoke.run import Verdict

_LONGEST = 40


def verdict_dict(verdict: Verdict) -> dict[str, Any]:
    """For machines: `result` is pass or fail."""
    result = {"result": "fail" if verdict.problem else "pass", **asdict(verdict)}
    result["changes"] = [change._asdict() for change in verdict.changes]
    return json.loads(json.dumps(result, default=str))


def changes_section(changes: list[Change]) -> Section:
    """The table of what was changed; what has no reason is where the run writes."""
    rows = [(change.key, shown(change.before, "not set"), shown(change.after, "none"), change.why)
            for change in changes if change.why]
    return f"changes ({len(rows)})", [("key", "from", "to", "why"), *rows]


def shown(value: Any, empty: str) -> str:
    """A value in a cell; `empty` stands for none."""
    if value is None or value == "":
        return empty
    if isinstance(value, list | dict):
        text = json.dumps(value)
    else:
        text = str(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST - 20]}...{text[-17:]}"


def outcome_lines(verdict: Verdict) -> list[str]:
    """The last lines: pass or fail, why, and what a full run would still need."""
    cost = f"{verdict.seconds:.0f} s, {verdict.peak_rss_bytes / (1 << 30):.1f} GiB"
    cost += f" in each of {verdict.ranks} processes" if verdict.ranks > 1 else ""
    lines = []
    if not verdict.problem and verdict.resumed_loss is not None:
        last = max(verdict.losses)
        lines.append(f"resumed after step {last - 1}: step {last} has the loss {verdict.resumed_loss:.4f} again")
    if verdict.problem:
        lines += [f"FAIL ({cost}): {verdict.problem}"]
    else:
        lines += [f"PASS ({cost})"]
    if verdict.ranks > 1 and verdict.kinds:
        left_out = ""
        if verdict.left_out:
            left_out = f"; left out: {', '.join(verdict.left_out)}"
        lines.append(f"parallelism: {', '.join(verdict.kinds)}{left_out}")
    lines += [f"files: {verdict.folder}", "A full run still needs:"]
    return [*lines, *(f"  - {need}" for need in verdict.needs)]
