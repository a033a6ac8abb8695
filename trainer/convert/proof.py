"""Trains small copies of a file and of its conversion, and compares their losses."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config import Config
from trainer.convert.convert import Conversion
from trainer.errors import EXIT_OK, RunError
from trainer.parallel.world import SINGLE_PROCESS
from trainer.smoke.run import SmokeResult, smoke

_STEPS = 3


def prove(conversion: Conversion, report_progress: Callable[[str], None]) -> str:
    """Trains both files for three steps with `smoke`.

    Args:
        report_progress: Receives a line about each step.

    Returns:
        A line with the losses, which are equal.

    Raises:
        RunError: A training failed, or the losses differ.
    """
    results = [_train(config, report_progress) for config in (conversion.before, conversion.after)]
    first, second = (list(result.losses.values()) for result in results)
    if first != second:
        texts = f"{results[0].file} has the losses {first}, {results[1].file} {second}"
        raise RunError(f"the two files do not train the same: {texts}")
    return f"{'losses':<15} equal: {', '.join(map(str, first))} in {_STEPS} steps of both small copies"


def _train(config: Config, report_progress: Callable[[str], None]) -> SmokeResult:
    report_progress(f"{config.source.path}: a small copy")
    result = smoke(config, [], _STEPS, SINGLE_PROCESS.size, report_progress, lambda changes: None)
    if result.exit_code != EXIT_OK:
        raise RunError(f"the small copy of {result.file} failed: {result.problem}")
    return result
