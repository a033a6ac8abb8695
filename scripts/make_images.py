#!/usr/bin/env python3
"""Makes the pictures of the README from a real run: terminal.svg and report_html.png of docs/images.

    python scripts/make_images.py [flags of run_trainer.py]

Trains configs/quickstart.yaml in a pseudo-terminal of 100 columns, in a temporary folder, and draws what stands on the
screen at the end, and the upper part of its report in a browser (apt-get install chromium). It takes as long as the
training does; `--stop_step 300` shortens it.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS, LINES = 100, 40
PAGE = 1200, 1050  # pixels
_COMMAND = "python run_trainer.py --config configs/quickstart.yaml"
_CONTROL = re.compile(r"\x1b\[2K|\x1b\[\?25[lh]|\r(?!\n)|\r?\n")


def run_in_terminal(command: list[str]) -> str:
    """Runs a command in a terminal, and returns what it writes.

    Raises:
        SystemExit: The command failed.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS), LINES=str(LINES))
        os.execv(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    written = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux's end of file of a pseudo-terminal
            break
        written += part
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise SystemExit(f"{written.decode()}\nthe run failed with exit code {code}")
    return written.decode()


def screen(written: str) -> list[str]:
    """Returns the lines that remain on a terminal, with their colours; a live line is drawn from its beginning."""
    lines, start = [""], 0
    for control in _CONTROL.finditer(written):
        lines[-1] += written[start : control.start()]
        start = control.end()
        if control.group().endswith("\n"):
            lines.append("")
        elif control.group() == "\r" and start < len(written):
            following = _CONTROL.search(written, start)
            if following is None or following.start() > start or following.group() == "\x1b[2K":
                lines[-1] = ""  # what is drawn next takes its place
    lines[-1] += written[start:]
    return lines


def draw(command: str, lines: list[str], path: Path) -> None:
    """Draws a command and the lines that it left on a terminal as an SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(f"[bold green]$[/] {command}", highlight=False)
    for line in lines:
        console.print(Text.from_ansi(line.rstrip()), highlight=False)
    # Without rich's web font: the picture needs no network.
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace("Fira Code, ", "")
    console.save_svg(str(path), title="run_trainer", code_format=form)


def photograph(page: Path, path: Path) -> None:
    """Takes a picture of the upper part of a page in a browser.

    Raises:
        SystemExit: There is no browser, or it fails.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("needs a browser: apt-get install chromium")
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={PAGE[0]},{PAGE[1]}"]
    command = [browser, *flags, f"--screenshot={path}", page.absolute().as_uri()]
    if subprocess.run(command, capture_output=True).returncode or not path.exists():
        raise SystemExit(f"no picture came of {' '.join(command)}")


def shrink(source: Path, path: Path, colours: int) -> None:
    """Copies a picture with so many colours, which makes its file a third as large."""
    with Image.open(source) as image:
        image.convert("RGB").quantize(colours, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        folder = f"{parent}/quickstart"  # the title of the report
        words = [*_COMMAND.split(), *sys.argv[1:]]
        written = run_in_terminal([sys.executable, *words[1:], "--output_dir", folder])
        # The picture shows the folder that the command would use.
        lines = screen(written.replace(folder, "output/quickstart").strip())
        draw(" ".join(words), lines, IMAGES / "terminal.svg")
        photograph(Path(folder) / "report.html", Path(parent) / "page.png")
        shrink(Path(parent) / "page.png", IMAGES / "report_html.png", 256)


if __name__ == "__main__":
    main()
