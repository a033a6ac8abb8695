"""Broken input of every kind ends in a message or is read rightly: 50 mutations of each, without MindSpore (300 and
5,000: scripts/fuzz.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
SCRIPT = REPOSITORY / "scripts/fuzz.py"
KINDS = """yaml_text yaml_values newer_values flags checkpoint safetensors adapters tokenizer token_cache model_folder
    records preferences chat_template indexed paths strangers listener messages workers""".split()


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900)


def test_no_mutation_of_any_kind_of_input_is_wrong() -> None:
    done = fuzz("--seed", "1", "--count", "50")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == KINDS
    for kind, mutations, _, refused, _, accepted, *_ in lines:
        assert mutations == "50" and int(refused) + int(accepted) == 50, kind


def test_the_script_finds_what_is_wrong() -> None:
    """A trainer that is broken: checksums are not compared, and messages cannot be made."""
    broken = (
        "import runpy, sys; sys.path[:0] = [{scripts!r}, {root!r}]; sys.argv = ['fuzz.py', {kind!r}, '--count', '40']\n"
        "import {module} as module; module.{name} = {instead}\n"
        "runpy.run_path({script!r}, run_name='__main__')\n"
    )
    cases = (
        ("checkpoint", "trainer.checkpoint.store", "_check_file", "lambda *_: None", "silently accepted"),
        ("yaml_text", "trainer.errors", "_printable", "lambda text: 1 / 0", "a traceback"),
    )
    for kind, module, name, instead, expected in cases:
        text = broken.format(scripts=str(SCRIPT.parent), root=str(REPOSITORY), kind=kind, module=module, name=name,
                             instead=instead, script=str(SCRIPT))  # fmt: skip
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
        assert done.returncode == 1 and expected in done.stdout, done.stdout + done.stderr
