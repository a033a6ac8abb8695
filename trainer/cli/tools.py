"""The commands that take no configuration: they inspect a job, files or this machine."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer.device.stop_signals import receive_signals_in_a_thread
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
    schema: Annotated[str, typer.Option("--to", help="The schema to write: 1.x or 2.0.", metavar="SCHEMA")] = "1.x",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: standard output.", metavar="PATH")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Leave out what the other schema cannot say, and list it.")
    ] = False,
    proof: Annotated[
        bool, typer.Option("--proof", help="Train small copies of both files for three steps: equal losses.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option("--steps", help="To 2.0, without the data: optimizer steps.", metavar="INT")
    ] = None,
) -> int:
    """Converts a file between the schemas of MindSpore Transformers 1.x and 2.0, and compares both plans.

    2.0 is the newer schema (--mode 1), 1.x that of this trainer. Every command takes files of both as they are.

    What the other schema cannot say is an error, exit code 2. Exit code 1: --proof found different losses.
    """
    from trainer.config.read.yaml_reader import read_text
    from trainer.convert.convert import NEWER, OLDER, convert

    if schema not in (OLDER, NEWER):
        raise UserError("no such schema", where="flag --to", value=schema, fix=f"write {OLDER} or {NEWER}")
    if output is not None:
        output = user_path(output, "flag --output")
        if output.exists() and not force:
            fix = "give another --output, or add --force"
            raise UserError("is there already", where="flag --output", key=str(output), fix=fix)
    conversion = convert(file, read_text(file), schema, is_lossy=lossy, steps=steps)
    report_progress = functools.partial(print, file=sys.stderr, flush=True)
    for note in conversion.notes:
        report_progress(f"note: {note}")
    for comparison in conversion.comparisons:
        report_progress(comparison.line)
    for change in conversion.changes:
        report_progress(f"changed: {change.text}")
    if proof:
        from trainer.convert.proof import prove

        receive_signals_in_a_thread()
        report_progress(prove(conversion, report_progress))
    if output is None:
        print(conversion.text, end="")
        return EXIT_OK
    try:
        output.write_text(conversion.text, encoding="utf-8")
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
