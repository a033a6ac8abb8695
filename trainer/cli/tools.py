"""The commands that take no configuration: they inspect a job, files or this machine."""

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
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@tools.command("status")
def _status(folder: _Folder, json_: _Json = False) -> int:
    """Shows the status of a job that was started with launch."""
    from trainer.launch.command import status

    return status(user_path(folder, "argument DIR"), json_)


@tools.command("stop")
def _stop(folder: _Folder) -> int:
    """Stops a job that was started with launch; it saves a checkpoint first."""
    from trainer.launch.command import stop

    return stop(user_path(folder, "argument DIR"))


@tools.command("verify")
def _verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint, a folder of them, or a token cache.")],
    json_: _Json = False,
) -> int:
    """Checks checkpoints and token caches: sizes, checksums and contents.

    Exit code 0: all are intact; 1: one is damaged; 2: there is nothing to check.
    """
    from trainer.checkpoint.verify import result_lines, verify, verify_result_dict

    results = verify(user_path(folder, "DIR"))
    if json_:
        print(json.dumps([verify_result_dict(result) for result in results], indent=1))
    else:
        print("\n".join(result_lines(results)))
    if any(result.problem for result in results):
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

    from trainer.device.doctor import checks, exit_code, print_checks, to_json

    results = checks(user_path(output_dir, "flag --output_dir"), deep)
    if json_:
        print(to_json(results))
    elif sys.stdout.isatty():
        print_checks(results, Console())
    else:
        print_checks(results, Console(width=_NO_FOLDING))
    return exit_code(results)


@tools.command("schema")
def _schema() -> int:
    """Prints the JSON Schema of the YAML files, for editors."""
    from trainer.config import json_schema

    print(json.dumps(json_schema(), indent=1))
    return EXIT_OK
