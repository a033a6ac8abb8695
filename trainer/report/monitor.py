"""Writes report.html at intervals while a run trains, and report.html and report.png at its end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from trainer.monitors.files import write_text
from trainer.monitors.metrics import Monitor, RunInfo, RunSummary
from trainer.report.page import report_data, report_html
from trainer.report.picture import draw_report
from trainer.report.record import RunReader

HTML = "report.html"
PICTURE = "report.png"


class ReportMonitor(Monitor):
    """Writes the reports. It reads the files of other monitors, so it must be closed after them.

    A thread writes report.html while the run trains, so that no step waits for it. A failure becomes a note, because
    the training itself has succeeded.

    Args:
        interval: Seconds between two reports of a running training; 0: it is written only at the end.
    """

    def __init__(self, folder: Path, note: Callable[[str], None], interval: float = 0.0) -> None:
        self._folder = folder
        self._note = note
        self._interval = interval
        self._reader = RunReader(folder)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, info: RunInfo) -> None:
        if self._interval > 0:
            self._thread = threading.Thread(target=self._write_at_intervals, name="report", daemon=True)
            self._thread.start()

    def close(self, summary: RunSummary | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._attempt(HTML, self._write_html)
        self._attempt(PICTURE, lambda: draw_report(self._reader.read(), self._folder / PICTURE))

    def _write_at_intervals(self) -> None:
        """Writes the report at once, so that a resumed run leaves none that says how it ended before, and so on."""
        while True:
            with contextlib.suppress(Exception):  # the last report, at the end of the run, notes such an error
                self._write_html()
            if self._ended.wait(self._interval):
                return

    def _attempt(self, name: str, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # a finished run must not fail by an error of a drawing library
            reason = f"{type(error).__name__}: {error}"
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.strerror:
                reason = cause.strerror
            self._note(f"{self._folder / name} was not written: {reason}")

    def _write_html(self) -> None:
        data = report_data(self._reader.read(), self._interval)
        if data["curves"]["steps"] or data["evaluations"]:
            write_text(self._folder / HTML, report_html(data))
