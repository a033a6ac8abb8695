"""Writes what became of the files: JUnit XML for a server, and Markdown for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from trainer.ci.plans import FilePlan
from trainer.ci.run import FileOutcome

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONGEST = 60_000  # characters of a problem; GitHub takes a summary of 1 MiB


def junit_xml(outcomes: Sequence[FileOutcome]) -> str:
    """Returns JUnit XML with a test case for each file: a failure, or an error if the file itself is wrong."""
    failures = sum(outcome.verdict == "FAIL" for outcome in outcomes)
    errors = sum(outcome.verdict == "INVALID" for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    counts = {"tests": len(outcomes), "failures": failures, "errors": errors, "time": f"{seconds:.3f}"}
    attributes = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", attributes)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "run_trainer smoke", **attributes})
    for outcome in outcomes:
        path = _plain(str(outcome.file.path))
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "smoke", "name": path, "file": path, "time": f"{outcome.seconds:.3f}"}
        )
        if outcome.problem:
            kind = "failure"
            if outcome.verdict == "INVALID":
                kind = "error"
            text = _plain(outcome.problem)
            element = ElementTree.SubElement(case, kind, {"message": text.splitlines()[0], "type": outcome.verdict})
            element.text = text
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _plain(text: str) -> str:
    """Returns a text without characters that XML cannot have."""
    return _NOT_XML.sub("?", text)


def markdown(outcomes: Sequence[FileOutcome], plans: Sequence[FilePlan], against: str | None) -> str:
    """Returns the summary: a row for each file, then the plan of each with its changes, and what is wrong."""
    if not outcomes:
        return "# Training files\n\nNo training file was added or changed.\n"
    rows = [(outcome.verdict, f"`{_cell(str(outcome.file.path))}`", _changes_text(outcome, plan, against),
             f"{outcome.seconds:.0f} s") for outcome, plan in zip(outcomes, plans, strict=True)]  # fmt: skip
    lines = ["# Training files", "", *_table(("result", "file", "plan", "time"), rows)]
    for outcome, plan in zip(outcomes, plans, strict=True):
        lines += ["", f"## {_cell(str(outcome.file.path))}", ""]
        if outcome.problem:
            lines += [*_fenced(outcome.problem), ""]
        lines += _plan_lines(plan, has_old=outcome.file.old_text is not None)
        needs = outcome.values.get("needs") or ()
        if needs:
            lines += ["", "The full run needs:", "", *(f"- {_cell(str(need))}" for need in needs)]
    return "\n".join(lines) + "\n"


def _changes_text(outcome: FileOutcome, plan: FilePlan, against: str | None) -> str:
    if plan.problem:
        return "no plan"
    if against is None:
        return ""
    if outcome.file.old_text is None:
        return "new file"
    changed = [row.name for row in plan.rows if row.is_changed]
    if plan.old_problem:
        return "the old version had no plan"
    if changed:
        return f"changed: {', '.join(changed)}"
    return "unchanged"


def _plan_lines(plan: FilePlan, has_old: bool) -> list[str]:
    if plan.problem:
        return []
    if not has_old or plan.old_problem:
        lines = _table(("plan", ""), [(row.name, _cell(row.now)) for row in plan.rows])
        if plan.old_problem:
            lines += ["", f"The old version has no plan: {_cell(plan.old_problem)}"]
        return lines
    rows = []
    for row in plan.rows:
        name = row.name
        if row.is_changed:
            name = f"**{row.name}**"
        rows.append((name, _cell(row.before), _cell(row.now)))
    return _table(("plan", "before", "now"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _cell(text: str) -> str:
    """Returns a text that neither ends a cell of a table nor becomes markup."""
    text = re.sub(r"([\\|`*<>\[\]])", r"\\\1", text)
    return " ".join(text.split())


def _fenced(text: str) -> list[str]:
    """Returns a text as a code block, whose fence is longer than any in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}text", text[:_LONGEST], fence]
