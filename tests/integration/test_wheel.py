"""The wheel: it installs into an empty environment, and the command works in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from run_helpers import PROGRAM

ROOT = Path(PROGRAM).parent
pytestmark = pytest.mark.slow


def call(*words: object, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, env=environment | variables,
                          timeout=600)  # fmt: skip
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a virtual environment with the wheel. Other packages are those of this environment, by their path."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    names = call("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0")
    for name in names:
        if name and not name.startswith("tests/") and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    try:
        call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", home, source, cwd=home)
    except AssertionError as error:
        if "No matching distribution" not in str(error) and "Could not find a version" not in str(error):
            raise
        pytest.skip("setuptools cannot be downloaded")
    (wheel,) = home.glob("*.whl")
    call(sys.executable, "-m", "venv", home / "env", cwd=home)
    python = home / "env" / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)
    folder = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    (folder / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "env"


def test_the_installed_command_runs_the_shipped_files_in_an_empty_folder(environment: Path, tmp_path: Path):
    program = environment / "bin" / "run-trainer"
    place = call(environment / "bin" / "python", "-c", "import trainer; print(trainer.__file__)", cwd=tmp_path)
    assert place.startswith(str(environment)), "it is the installed package"
    assert "--config" in call(program, "--help", cwd=tmp_path)
    shipped = environment / "share" / "run-trainer"
    for name in ("configs", "docs"):
        call("cp", "-r", shipped / name, tmp_path, cwd=tmp_path)
    assert "sequences an epoch" in call(program, "plan", "--config", "configs/quickstart.yaml", cwd=tmp_path)
    assert "optimizer step" in call(program, "plan", "--config", "configs/instructions.yaml", cwd=tmp_path)
    flags = ("--config", "configs/quickstart.yaml", "--stop_step", "2", "--do_eval", "False")
    printed = call(program, *flags, cwd=tmp_path)
    assert "finished at step 2" in printed
    assert (tmp_path / "output" / "quickstart" / "report.html").is_file(), "with the files of the report"
    assert '"$defs"' in call(program, "schema", cwd=tmp_path)


def test_the_dockerfile_installs_the_same_way():
    """Its instructions are read, because a server of Docker is no part of this suite."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))
    assert re.fullmatch(r"python:3\.1[012]-slim", steps["FROM"]) and steps["ENTRYPOINT"] == '["run-trainer"]'
    assert "pip install --no-cache-dir -c /source/constraints.txt /source" in steps["RUN"]
    assert "/usr/local/share/run-trainer /opt/run-trainer" in steps["RUN"]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert ".git" in ignored and "configs" not in ignored and "trainer" not in ignored
