"""Runs command lines one after the other in one process: an interpreter of its own costs each half a CPU second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
_RUNNER = """if True:
    import contextlib, io, json, sys, time
    from trainer.cli.main import main
    answers = {}
    for name, arguments in json.load(sys.stdin).items():
        output, errors, began, code = io.StringIO(), io.StringIO(), time.process_time(), 0
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                main(arguments)
            except SystemExit as end:
                code = end.code or 0
            except BaseException as error:
                code = f"{type(error).__name__}: {error}"
        seconds = time.process_time() - began
        answers[name] = [code, output.getvalue(), errors.getvalue(), seconds, "mindspore" in sys.modules]
        for module in [module for module in sys.modules if module.split(".")[0] == "mindspore"]:
            del sys.modules[module]
    json.dump(answers, sys.stdout)
"""


class Answer(NamedTuple):
    """What became of a command line."""

    code: int | str  # that it exits with, or an exception that a user would see
    output: str
    errors: str
    cpu_seconds: float
    loaded_mindspore: bool


def answers_of(lines: Mapping[str, Sequence[object]], cwd: Path, **environment: str) -> dict[str, Answer]:
    """Returns the answers by the names of the command lines, which are arguments of the program."""
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps({name: [*map(str, arguments)] for name, arguments in lines.items()}),
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return {name: Answer(*answer) for name, answer in json.loads(done.stdout).items()}
