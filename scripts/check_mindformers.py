#!/usr/bin/env python3
"""Plans every training file of MindSpore Transformers, unedited, runs `smoke` on it, and prints what came of both.

    git clone https://github.com/mindspore-lab/mindformers /tmp/mindformers
    python scripts/check_mindformers.py /tmp/mindformers [/tmp/another_checkout ...] [--ranks 8] [-- flags]
    git clone --bare https://github.com/mindspore-ai/mindformers /tmp/mindformers.git
    python scripts/check_mindformers.py /tmp/mindformers.git

The flags are those of run_trainer.py, `--ranks` is that of `smoke`; a file is planned for the job that it describes.
A training file is a YAML file below `configs`, `research` or `tests` that trains: run_mode train or finetune, or the
section training of the newer schema. Of a bare repository the branches master, dev and 1.7 to 2.0 are read, and a file
that several of them have is checked once. Exit code 1 where a file is not accepted, does not pass, or ends in a
traceback.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PROGRAM = Path(__file__).resolve().parent.parent / "run_trainer.py"
TRAINS = re.compile(r"^run_mode: *['\"]?(train|finetune)\b|^training:", re.MULTILINE)
BRANCHES = re.compile(r"(master|dev|r?(1\.[7-9]|2\.0)\b.*)")
FOLDERS = ("configs", "research", "tests")
_MOST_NOTES = 12
_SMOKE_LIMIT_SECONDS = 300


class Result(NamedTuple):
    """The results of `plan` and `smoke` for a file."""

    file: Path
    problem: str  # the first one of the plan; empty where the file is accepted
    problems: int
    notes: int
    seconds: float
    smoke: str = ""  # pass, fail, or empty where it was not run
    smoke_problem: str = ""
    smoke_seconds: float = 0.0
    smoke_cpu_seconds: float = 0.0
    peak_gib: float = 0.0
    changes: int = 0
    kinds: str = ""  # of parallelism in the small copy
    left_out: str = ""  # those of the file that it has not


def training_files(folder: Path) -> Iterator[Path]:
    """Returns the training files of a checkout, in order."""
    for part in FOLDERS:
        for file in sorted((folder / part).rglob("*.yaml")):
            if TRAINS.search(file.read_text(encoding="utf-8")):
                yield file


def extract_branches(repository: Path, folder: Path) -> list[Path]:
    """Writes the YAML files of a bare repository to a folder, each into that of the first branch that has it."""
    known: set[str] = set()
    folders = []
    names = _git(repository, "for-each-ref", "--format=%(refname:short)", "refs/heads").split()
    branches = [name for name in names if BRANCHES.fullmatch(name)]
    for branch in sorted(branches, key=lambda name: (name != "master", name == "dev", name)):
        folders.append(folder / branch)
        for line in _git(repository, "ls-tree", "-r", branch, *FOLDERS).splitlines():
            entry, _, path = line.partition("\t")
            blob = entry.split()[2]
            if path.endswith((".yaml", ".yml")) and blob not in known:
                known.add(blob)
                target = folder / branch / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_git(repository, "cat-file", "blob", blob), encoding="utf-8")
    return folders


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", f"--git-dir={repository}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def plan(file: Path, flags: list[str]) -> Result:
    """Runs `plan` on a file."""
    start = time.monotonic()
    command = [sys.executable, str(PROGRAM), "plan", "--config", str(file), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    if done.returncode == 0:
        notes = re.split(r"^[A-Z]", done.stdout, maxsplit=2, flags=re.MULTILINE)[1].count("\n  - ")
        return Result(file, "", 0, notes, seconds)
    lines = [line.strip().removeprefix("error: ") for line in done.stderr.splitlines()]
    if "Traceback (most recent call last):" in lines:
        return Result(file, f"TRACEBACK {lines[-1]}", 1, 0, seconds)
    number = re.match(r"(\d+) problems", lines[0])
    first = lines[1 if number else 0].removeprefix(f"{file}:")
    return Result(file, first, int(number[1]) if number else 1, 0, seconds)


def smoke(planned: Result, ranks: int, flags: list[str]) -> Result:
    """Runs `smoke` on a file; on one with errors it ends at once with the first of them."""
    start, cpu = time.monotonic(), _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(PROGRAM), "smoke", "--json", "--config", str(planned.file)]
        command += ["--ranks", str(ranks), "--output_dir", folder, *flags]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SMOKE_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - start
            return planned._replace(smoke="fail", smoke_problem="it did not end", smoke_seconds=seconds)
    seconds, cpu = time.monotonic() - start, _cpu_seconds() - cpu
    try:
        verdict: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return planned._replace(smoke="fail", smoke_problem=f"exit {done.returncode}: {last}", smoke_seconds=seconds)
    if verdict["result"] == "invalid":
        return planned._replace(smoke="fail", smoke_problem="invalid", smoke_seconds=seconds)
    changes = [change for change in verdict["changes"] if change["why"]]
    return planned._replace(
        smoke=verdict["result"], smoke_problem=verdict["problem"].partition("\n")[0], smoke_seconds=seconds,
        smoke_cpu_seconds=cpu, peak_gib=verdict["peak_rss_bytes"] / (1 << 30), changes=len(changes),
        kinds=", ".join(verdict["kinds"]), left_out=", ".join(verdict["left_out"]) if ranks > 1 else "",
    )  # fmt: skip


def _cpu_seconds() -> float:
    """Returns the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shown(result: Result) -> str:
    """Returns a line about a file."""
    says = f"{result.problems}: {result.problem}" if result.problem else f"accepted, {result.notes} notes"
    line = f"{result.file}  {result.seconds:.1f} s  {says}"
    if not result.smoke:
        return line
    line += f"  smoke: {result.smoke}, {result.smoke_seconds:.0f} s ({result.smoke_cpu_seconds:.0f} s of processors)"
    line += f", {result.peak_gib:.1f} GiB"
    line += f", {result.changes} changes" + (f", {result.kinds}" if result.kinds else "")
    line += f", LEFT OUT: {result.left_out}" if result.left_out else ""
    return f"{line}  {result.smoke_problem}".rstrip()


def summary(results: list[Result], runs: bool) -> str:
    """Counts the files that are accepted and pass, with time and memory."""
    accepted = [result for result in results if not result.problem]
    most = max((result.notes for result in accepted), default=0)
    seconds = max((result.seconds for result in results), default=0.0)
    says = f"{len(accepted)} of {len(results)} accepted; at most {most} notes and {seconds:.1f} s a file"
    if runs and results:
        passed = sum(result.smoke == "pass" for result in results)
        times = [result.smoke_seconds for result in results]
        peak = max(result.peak_gib for result in results)
        says += f"\n{passed} of {len(results)} pass; median {statistics.median(times):.0f} s, at most "
        says += f"{max(times):.0f} s and {peak:.1f} GiB a file"
        processors = [result.smoke_cpu_seconds for result in results]
        says += f"; {statistics.median(processors):.0f} s of processors, at most {max(processors):.0f} s"
        lacking = sum(bool(result.left_out) for result in results)
        says += f"\n{lacking} small copies lack a kind of parallelism of their file" if lacking else ""
    return says


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a checkout or bare repository")
    parser.add_argument("--ranks", type=int, default=1, help="processes that each smoke run trains on")
    parser.add_argument("--plan", action="store_true", help="plan alone")
    parser.add_argument("--json", action="store_true", help="for machines")
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    results = []
    scratch = Path(tempfile.mkdtemp())
    folders = []
    for folder in options.folders:
        if (folder / "objects").is_dir():
            folders += extract_branches(folder, scratch)
        else:
            folders.append(folder)
    for file in (file for folder in folders for file in training_files(folder)):
        result = plan(file, flags)
        results.append(result if options.plan else smoke(result, options.ranks, flags))
        print(shown(results[-1]), flush=True, file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(json.dumps([{**result._asdict(), "file": str(result.file)} for result in results], indent=1))
    print(summary(results, not options.plan), file=sys.stderr)
    fine = all(not result.problem and (options.plan or result.smoke == "pass") for result in results)
    return 0 if fine and all(result.notes <= _MOST_NOTES for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
