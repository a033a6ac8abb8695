"""`--report live`: the report of a run on loopback, which the page asks for what is new every two seconds.

Nothing is computed unless a page asks. Only this machine reaches it; from elsewhere, ``ssh -L 8000:127.0.0.1:PORT``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainer.report.page import as_json, report_html

_LOOPBACK = "127.0.0.1"
_NAMES = frozenset((_LOOPBACK, "localhost"))
_FRESH_SECONDS = 1.0  # two pages that ask within it get the same
_WATCHED_SECONDS = 5.0  # a page that has asked within it is open
_TIMES = frozenset(("written", "written_at"))
_LAST_SECONDS = 3.0  # how long the end of a run waits for an open page to get the last state


class ReportServer:
    """Serves the page, and its data as JSON, from threads that end with the process.

    Args:
        read: What the page shows now; called in one thread at a time.

    Raises:
        OSError: No port is free.
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._found: tuple[float, str, dict[str, Any]] = (-1e9, "", {})
        self._asked_at, self._told_end = -1e9, threading.Event()
        report = self

        class Handler(_Handler):
            server_of = report

        self._server = _Server((_LOOPBACK, 0), Handler)
        threading.Thread(target=self._server.serve_forever, name="report", daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://{_LOOPBACK}:{self._server.server_address[1]}/"

    def data(self) -> dict[str, Any]:
        """What is shown now, with a stamp that changes when it does."""
        with self._lock:
            self._asked_at = time.monotonic()
            if self._asked_at - self._found[0] > _FRESH_SECONDS:
                data = self._read()
                shown = as_json({name: value for name, value in data.items() if name not in _TIMES})
                self._found = time.monotonic(), shown, {**data, "stamp": str(hash(shown))}
            return self._found[2]

    def told(self, data: dict[str, Any]) -> None:
        """Called when a page has got this."""
        if data["state"] != "running":
            self._told_end.set()

    def close(self) -> None:
        """Waits a moment for an open page to get the last state, then stops."""
        with self._lock:
            self._found = (-1e9, "", {})
        if time.monotonic() - self._asked_at < _WATCHED_SECONDS:
            self._told_end.wait(_LAST_SECONDS)
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that went away, most often: the run's console is no place to say so."""


class _Handler(BaseHTTPRequestHandler):
    server_of: ReportServer
    timeout = 30

    def do_GET(self) -> None:
        # A page of another site may make a browser ask here, under a name of its own: it gets nothing.
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        where = urlsplit(self.path)
        if name not in _NAMES:
            self.send_error(403)
        elif where.path == "/":
            self._answer("text/html; charset=utf-8", report_html(self.server_of.data()))
        elif where.path == "/data.json":
            data = self.server_of.data()
            if parse_qs(where.query).get("since") == [data["stamp"]]:
                self.send_response(204)
                self.end_headers()
            else:
                self._answer("application/json", as_json(data))
                self.server_of.told(data)
        elif where.path == "/favicon.ico":  # every browser asks for one
            self.send_response(204)
            self.end_headers()
        else:
            self.send_error(404)

    def _answer(self, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        """The console is the run's."""
