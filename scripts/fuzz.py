#!/usr/bin/env python3
"""Gives the trainer broken input of every kind, and looks for tracebacks, hangs, large memory and silent acceptance.

    python scripts/fuzz.py                            300 mutations of each kind, from seed 1
    python scripts/fuzz.py --full --seed 7            5,000 of each
    python scripts/fuzz.py yaml_text --case 123       one mutation, with the whole traceback

A mutation is right where the trainer refuses it, in one message with a fix and exit code 2, or accepts it and what it
read is what the file says: each kind checks that in its own way. All mutations run in this process, which never loads
MindSpore; each has a limit of processor time, of time, and of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from trainer.errors import EXIT_BAD_INPUT, TrainerError  # noqa: E402

_CPU_SECONDS, _SECONDS = 5.0, 60.0  # of one mutation; the second is for what waits
_MEMORY_BYTES = 3 << 30  # beyond what the process has at the start
_LONGEST_MESSAGE = 30_000
_SHOWN = 5

Attempt = Callable[[random.Random], None]
"""Makes a mutation and gives it to the trainer: raises the trainer's error, or `Accepted` where that is wrong."""


class Accepted(Exception):
    """Says that wrong input was accepted, or other input than what was written."""


class _Hang(BaseException):
    """Says that a mutation took too long; no `except Exception` on the way catches it."""


class Finding(NamedTuple):
    """A mutation that the trainer handles wrongly."""

    kind: str
    number: int
    what: str
    detail: str


def kinds() -> dict[str, Callable[[Path], Attempt]]:
    """Returns, for each kind of input, the function that prepares its mutations in a folder."""
    from fuzzing import arguments, configuration, inputs, messages, stored

    found: dict[str, Callable[[Path], Attempt]] = {}
    for group in (configuration, arguments, stored, inputs, messages):
        found |= group.KINDS
    return found


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise _Hang("".join(traceback.format_stack(frame)[-3:]))  # type: ignore[arg-type]

    before = [(number, signal.signal(number, late)) for number in (signal.SIGALRM, signal.SIGVTALRM)]
    faulthandler.dump_traceback_later(2 * _SECONDS, exit=True)  # of a library that does not come back
    signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in before:
            signal.signal(number, handler)


def _judge(attempt: Attempt, rng: random.Random) -> tuple[str, str]:
    """Runs a mutation; returns whether it was refused, accepted or handled wrongly, and what to show of it."""
    shown = io.StringIO()
    try:
        with _limits(), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            attempt(rng)
    except TrainerError as error:
        message = str(error)
        if error.exit_code != EXIT_BAD_INPUT:
            return f"exit code {error.exit_code} for bad input", message
        if "Fix: " not in message and "problems in the configuration" not in message:
            return "an error without a fix", message
        if len(message) > _LONGEST_MESSAGE:
            return f"a message of {len(message):,} characters", message[:1000]
        if any(not one.isprintable() and one not in "\n\t" for one in message):
            return "control characters in a message", repr(message)
        return "refused", message
    except Accepted as error:
        return "silently accepted", str(error)
    except _Hang as error:
        return "a hang", str(error)
    except MemoryError:
        return f"more than {_MEMORY_BYTES >> 30} GiB", traceback.format_exc()
    except BaseException:  # noqa: BLE001  # a library may raise more than an Exception
        return "a traceback", traceback.format_exc()
    if "Traceback (most recent call last)" in shown.getvalue():
        return "a printed traceback", shown.getvalue()
    return "accepted", ""


def run_kind(name: str, make: Callable[[Path], Attempt], seed: int, numbers: range) -> tuple[list[Finding], str]:
    """Runs mutations of a kind; returns what they found, and a line about them.

    They run in a child, and where a library ends that one, the rest in another.
    """
    findings, counts, seconds, rest = [], {"refused": 0, "accepted": 0}, 0.0, numbers
    while rest:
        number, ended = rest.start, False
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            reports = list(_in_child(name, make, seed, rest, Path(folder)))
        for line in reports:
            number, what, detail, seconds_now = json.loads(line)
            if what == "end":
                ended, seconds = True, seconds + seconds_now
            elif what in counts:
                counts[what] += 1
            elif what != "begins":
                findings.append(Finding(name, number, what, detail))
        if not ended:
            findings.append(Finding(name, number, "the end of the process", "a library ended it; run this case alone"))
        rest = rest[:0] if ended else range(number + 1, rest.stop)
    line = f"{name:18} {len(numbers):6,} mutations  {counts['refused']:6,} refused  {counts['accepted']:6,} accepted"
    return findings, f"{line}  {len(findings):4,} wrong  {seconds:6.1f} s"


def _in_child(
    name: str, make: Callable[[Path], Attempt], seed: int, numbers: range, folder: Path
) -> Iterator[str]:
    """Yields the reports of a child process: a line when each mutation begins, and one with its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as reports:
            attempt = make(folder)
            for number in numbers:
                print(json.dumps((number, "begins", "", 0)), file=reports, flush=True)
                what, detail = _judge(attempt, random.Random(f"{seed}:{name}:{number}"))
                print(json.dumps((number, what, detail, 0)), file=reports, flush=True)
                if len(numbers) == 1:
                    print(f"{what}\n{detail}")
            if "mindspore" in sys.modules:
                print(json.dumps((0, "MindSpore was loaded", "", 0)), file=reports)
            print(json.dumps((0, "end", "", time.process_time())), file=reports)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as reports:
        yield from reports
    os.waitpid(child, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = kinds()
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"default: all of {', '.join(every)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300, help="mutations of each kind")
    parser.add_argument("--full", action="store_true", help="5,000 of each kind")
    parser.add_argument("--case", type=int, help="this mutation alone")
    wanted = parser.parse_args()
    if unknown := set(wanted.kinds) - set(every):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    numbers = range(5000 if wanted.full else wanted.count)
    if wanted.case is not None:
        numbers = range(wanted.case, wanted.case + 1)
    warnings.simplefilter("ignore")
    os.environ.pop("DATA_PATH", None)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, resource.RLIM_INFINITY))
    findings: list[Finding] = []
    for name, make in every.items():
        if not wanted.kinds or name in wanted.kinds:
            found, line = run_kind(name, make, wanted.seed, numbers)
            findings += found
            print(line, flush=True)
            for one in found[:_SHOWN]:
                last = "\n    ".join(one.detail.strip().splitlines()[-6:])
                print(f"  {one.kind} --case {one.number} --seed {wanted.seed}: {one.what}\n    {last[:1500]}")
    return 1 if findings else 0


def check(condition: Any, text: str) -> None:
    """Raises `Accepted` where a condition does not hold."""
    if not condition:
        raise Accepted(text)


if __name__ == "__main__":
    sys.modules.setdefault("fuzz", sys.modules["__main__"])
    sys.exit(main())
