"""A headless Chromium through chromedriver's WebDriver protocol, without a package for it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
MISSING = "" if BROWSER and DRIVER else "needs a browser: apt-get install chromium chromium-driver"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        _ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Runs a script, as the body of a function, and returns its result."""
        return _ask("POST", f"{self._session}/execute/sync", {"script": script, "args": arguments})

    def move_to(self, x: float, y: float) -> None:
        """Moves the mouse to a place of the window."""
        move = {"type": "pointerMove", "x": round(x), "y": round(y), "origin": "viewport"}
        mouse = {"type": "pointer", "id": "mouse", "actions": [move]}
        _ask("POST", f"{self._session}/actions", {"actions": [mouse]})

    def wait(self, script: str, seconds: float = 20.0) -> Any:
        """Waits until the result of a script is true, and returns it."""
        until = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.1)
        return found

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the page, as a phone or a screen has it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._devtools("Emulation.setDeviceMetricsOverride", size)

    def dark(self, is_dark: bool) -> None:
        value = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._devtools("Emulation.setEmulatedMedia", {"features": [value]})

    def messages(self) -> list[str]:
        """Returns the messages of the console since the last call."""
        found = _ask("POST", f"{self._session}/se/log", {"type": "browser"})
        return [one["message"] for one in found]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> None:
        _ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Yields a browser with a profile of its own in `folder`."""
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        root = f"http://127.0.0.1:{line.rstrip().rstrip('.').rpartition(' ')[2]}"
        options = {"binary": BROWSER, "args": [*_FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = _ask("POST", f"{root}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{root}/session/{made['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _ask("DELETE", session)
    finally:
        driver.terminate()
        driver.wait()
        driver.stdout.close()


def _ask(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
