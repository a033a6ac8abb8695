"""The commands that take no configuration and its flags: they look at a job, at files or at this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, UserError
from trainer.input_files import user_path

_NO_FOLDING = 10_000  # columns of a table that no terminal shows

tools = typer.Typer()

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the run, or of its logs.")]
_Json = Annotated[bool, typer.Option("--json", help="For machines.")]


@tools.command("status")
def _status(folder: _Folder, json_: _Json = False) -> int:
    """Says what a job of launch does, or how it ended."""
    from trainer.launch.command import status

    return status(user_path(folder, "argument DIR"), json_)


@tools.command("stop")
def _stop(folder: _Folder) -> int:
    """Lets a job of launch save and end."""
    from trainer.launch.command import stop

    return stop(user_path(folder, "argument DIR"))


@tools.command("verify")
def _verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, a folder of them, or a token cache.")],
    json_: _Json = False,
) -> int:
    """Checks that checkpoints and token files are what was written: checksums, and that everything makes sense.

    Exit code 0: all are whole; 1: one is damaged; 2: there is nothing to check.
    """
    from trainer.checkpoint.verify import result_dict, result_lines, verify

    found = verify(user_path(folder, "DIR"))
    if json_:
        lines = [json.dumps([result_dict(one) for one in found], indent=1)]
    else:
        lines = result_lines(found)
    print(*lines, sep="\n")
    if any(one.problem for one in found):
        return EXIT_RUN_FAILED
    return EXIT_OK


@tools.command("convert")
def _convert(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The YAML file.", show_default=False)],
    output: Annotated[Path | None, typer.Option("--output", help="Default: standard output.", metavar="PATH")] = None,
) -> int:
    """Writes a file of MindSpore Transformers' newer schema (--mode 1) with the keys of this trainer.

    Every command takes such a file as it is; notes say what has no counterpart.
    """
    from trainer.config import convert_schema
    from trainer.config.read.yaml_reader import read_text

    text, notes = convert_schema(file, read_text(file))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if output is None:
        print(text, end="")
        return EXIT_OK
    output = user_path(output, "flag --output")
    if output.exists():
        raise UserError("is there already", where="flag --output", key=str(output), fix="give another --output")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}"
        fix = "give another --output"
        raise UserError(rule, where="flag --output", key=str(output), fix=fix) from None
    print(output)
    return EXIT_OK


@tools.command("doctor")
def _doctor(
    json_: _Json = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also run a MindSpore operator; takes seconds.")] = False,
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Where a run would write.")] = Path("output"),
) -> int:
    """Checks whether this machine can train, and says how to fix what is missing."""
    from rich.console import Console

    from trainer.device.doctor import checks, exit_code, render, to_json

    found = checks(user_path(output_dir, "flag --output_dir"), deep)
    if json_:
        print(to_json(found))
    else:
        render(found, Console(width=None if sys.stdout.isatty() else _NO_FOLDING))
    return exit_code(found)


@tools.command("schema")
def _schema() -> int:
    """Prints the JSON Schema of the YAML files, for editors."""
    from trainer.config import json_schema

    print(json.dumps(json_schema(), indent=1))
    return EXIT_OK
