#!/usr/bin/env python3
"""Puts faults into tiny trainings and checks that `trace --against` names the layer and the rank of each.

    python scripts/check_trace.py                 20 faults, then 50 comparisons in which nothing is wrong
    python scripts/check_trace.py --only eight    those whose name has this word

It prints a line for each. Exit code 1: a fault was not found where it is, or a clean comparison gave an alarm. The
cases are those of tests/parallel/trace_cases.py; the ranks are processes of this machine. It takes two minutes on two
cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "parallel")]

from rank_job import on_rank_processes  # noqa: E402
from trace_cases import CLEAN_CASES, FAULT_CASES, Case, compare_case, folder_name, problem_of  # noqa: E402

_CASES_OF_A_JOB = 8  # MindSpore keeps memory of each model


def main() -> int:
    """Runs the cases and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has this word")
    only = parser.parse_args().only
    cases = [case for case in (*FAULT_CASES, *CLEAN_CASES) if only in folder_name(case)]
    problems = {False: 0, True: 0}
    counts = {False: 0, True: 0}
    closest = 0.0
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        write_all([*cases, *(case.right for case in cases)], folder)
        for case in cases:
            comparison = compare_case(Path(folder), case)
            problem = problem_of(case, comparison)
            is_clean = case.fault is None
            counts[is_clean] += 1
            problems[is_clean] += bool(problem)
            ratio = max(row.deviation / row.bound for row in comparison.rows)
            if is_clean:
                closest = max(closest, ratio)
            print(f"{folder_name(case):48} {problem or 'as it must be'} (largest deviation / bound {ratio:.2g})")
    print(f"faults found where they are: {counts[False] - problems[False]} of {counts[False]}")
    print(f"clean comparisons without alarm: {counts[True] - problems[True]} of {counts[True]}")
    print(f"largest deviation of a clean comparison: {closest:.2f} of its bound")
    return int(any(problems.values()))


def write_all(cases: Iterable[Case], folder: str) -> None:
    """Writes the trace of each case once: ranks of one number are one job, or several."""
    by_ranks: dict[int, dict[str, Case]] = {}
    for case in cases:
        by_ranks.setdefault(case.ranks, {})[folder_name(case)] = case
    for ranks, each in sorted(by_ranks.items()):
        given = [case.to_json() for case in each.values()]
        for start in range(0, len(given), _CASES_OF_A_JOB):
            part = given[start : start + _CASES_OF_A_JOB]
            on_rank_processes(ranks, "trace_cases:write_traces", part, folder, limit_seconds=600)


if __name__ == "__main__":
    sys.exit(main())
