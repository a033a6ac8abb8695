"""The files in configs/pynative: each plans without an ignored key, and a small copy trains on one and on two ranks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from fork_server import REPOSITORY
from launch_helpers import forked_python

from trainer.cli.main import dispatch

FILES = sorted((REPOSITORY / "configs" / "pynative").glob("*.yaml"))
PROGRAM = Path(__file__).with_name("forked_workers.py")
TIMEOUT_SECONDS = 120
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_there_are_files() -> None:
    assert REPOSITORY / "configs" / "pynative" / "tensor_parallel.yaml" in FILES


@each_file
def test_it_plans_and_no_key_is_ignored(path: Path, capsys: pytest.CaptureFixture) -> None:
    code = dispatch(["plan", "--config", str(path), "--verbose"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    # Monitors of attention's logits change no number.
    ignored = [line for line in printed.out.splitlines() if "ignored:" in line and "callbacks." not in line]
    assert not ignored


@each_file
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_small_copy_trains_and_resumes(path: Path, ranks: int, tmp_path: Path) -> None:
    arguments = ["smoke", "--config", path, "--ranks", ranks, "--steps", 2, "--json", "--output_dir", tmp_path]
    done = subprocess.run(
        [*forked_python(), PROGRAM, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True,
        timeout=TIMEOUT_SECONDS,
    )  # fmt: skip
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["result"], verdict["ranks"]) == (0, "pass", ranks), done.stderr
    assert verdict["resumed_loss"] == verdict["losses"]["2"]
    if ranks == 2:
        assert verdict["left_out"] == []
