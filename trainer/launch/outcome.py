"""How a job ended: who failed first, who only ended because of that, and the launcher's exit code."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import EXIT_HANG, EXIT_OK, EXIT_RUN_FAILED
from trainer.launch.follow import last_lines


@dataclass
class End:
    """The end of one worker.

    Attributes:
        rank: Of the worker; None for another process of the job.
        exit_code: As a shell gives it: 128 + n for signal n.
        at_seconds: When it failed or ended, by the clock of its host since that started.
        by_launcher: Whether it ended after the launcher had told it to.
        why: What the system said when it could not be started.
        process: What it was when it was no worker.
    """

    rank: int | None
    exit_code: int
    at_seconds: float
    by_launcher: bool = False
    why: str = ""
    process: str = "the scheduler"

    @property
    def name(self) -> str:
        return self.process if self.rank is None else f"rank {self.rank}"


@dataclass
class Outcome:
    """The end of a job.

    Attributes:
        exit_code: Of the launcher.
        words: One sentence, without its full stop.
        first: Whoever failed first; None where nobody did.
        others: Those that ended with an error after it.
    """

    exit_code: int
    words: str
    first: End | None = None
    others: list[End] = field(default_factory=list)


def shell_code(returncode: int) -> int:
    """A process' exit code as a shell gives it."""
    return 128 - returncode if returncode < 0 else returncode


def how(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code > 128:
        try:
            return f"ended by {signal.Signals(exit_code - 128).name}"
        except ValueError:
            pass
    return f"exit code {exit_code}"


def failures(ends: Sequence[End], stopped_by: int | None) -> list[End]:
    """All that failed, the first one first; who ended as the job was told to did not fail."""
    fine = {EXIT_OK} | ({128 + stopped_by} if stopped_by else set())
    return sorted((end for end in ends if end.exit_code not in fine), key=lambda end: end.at_seconds)


def judge(ends: Sequence[End], stopped_by: int | None, hung_seconds: float | None) -> Outcome:
    """The outcome of a job from the ends of its processes.

    Args:
        ends: Of all processes that ended.
        stopped_by: The signal that the launcher received, if it did.
        hung_seconds: For how long no step was finished when the job was ended for that; None where it was not.
    """
    if hung_seconds is not None:
        return Outcome(EXIT_HANG, f"no step was finished for {hung_seconds:.0f} s")
    failed = failures(ends, stopped_by)
    own = [end for end in failed if not end.by_launcher]
    if own:
        first = own[0]
        return Outcome(first.exit_code, f"{first.name} failed", first, [end for end in failed if end is not first])
    if stopped_by is not None and (failed or any(end.exit_code for end in ends) or not ends):
        return Outcome(128 + stopped_by, f"stopped by {signal.Signals(stopped_by).name}")
    if failed:  # told to end though nobody had failed: the caller knows the reason
        return Outcome(EXIT_RUN_FAILED, "the job was ended", None, failed)
    return Outcome(EXIT_OK, "finished")


def report(outcome: Outcome, log: Path | None, duration_seconds: float) -> list[str]:
    """What the user is told about a failure: who, how, when, where to read on, and the last lines of its log."""
    if outcome.first is None:
        return [f"error: {outcome.words}."]
    first = outcome.first
    lines = [f"error: {first.name} failed first: {how(first.exit_code)}, {duration_seconds:.0f} s after the start."]
    if first.why:
        lines.append(f"  It could not be started: {first.why}")
    if first.exit_code == 128 + signal.SIGKILL:
        lines.append("  Nobody here sent that signal: often the system does, when memory is exhausted (see dmesg).")
    if log is not None:
        lines.append(f"  Log: {log}")
        tail = last_lines(log)
        if tail:
            lines.append("  Its last lines:")
            lines += [f"  | {line}" for line in tail]
    if outcome.others:
        ended = ", ".join(f"{end.name} ({how(end.exit_code)})" for end in sorted(outcome.others, key=_by_rank))
        lines.append(f"  Ended because of that: {ended}.")
    return lines


def _by_rank(end: End) -> int:
    return -1 if end.rank is None else end.rank
