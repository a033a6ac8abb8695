"""Writes the report of a run when it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainer.monitors.metrics import Monitor, RunSummary
from trainer.report.picture import draw_report
from trainer.report.record import read_run


class ReportMonitor(Monitor):
    """Draws report.png at the end of a run. A failure becomes a notice, because the training itself has succeeded."""

    def __init__(self, folder: Path, notice: Callable[[str], None]) -> None:
        self._folder, self._notice = folder, notice

    def close(self, summary: RunSummary | None) -> None:
        path = self._folder / "report.png"
        try:
            draw_report(read_run(self._folder), path)
        except Exception as error:  # no error of a drawing library may fail a finished run
            self._notice(f"report {path} was not drawn: {type(error).__name__}: {error}")
