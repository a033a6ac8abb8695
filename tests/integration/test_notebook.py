"""The notebook example of docs/training.md, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from fork_server import FORKED, REPOSITORY, ensure_server


def test_the_example_trains(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (example,) = (text for text in blocks if "open_training" in text)
    program = tmp_path / "notebook.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n{example}", encoding="utf-8")
    ensure_server()
    command = [sys.executable, FORKED, program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"^loss ([\d.]+) ", done.stdout, re.M)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1
