"""The commands beside a run: they inspect a job, files, what a training computes, or this machine."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Argument, Option

from trainer.cli.loading import ConfigFile, Json, Options, load_file
from trainer.device.stop_signals import receive_signals_in_a_thread
from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, UserError
from trainer.input_files import require_new, user_path, write_output
from trainer.parallel.world import world_from_environment

if TYPE_CHECKING:
    from trainer.cli.flags import Arguments
    from trainer.convert.merge import Method

_NO_FOLDING = 10_000  # columns of a table that no terminal shows
_FLOAT32_LIMIT = 2.0**128  # weights of this size or more are infinite in float32

tools = typer.Typer()

_Folder = Annotated[Path, Argument(metavar="DIR", help="The folder of the run, or of its logs.")]


@tools.command("status")
def _status(folder: _Folder, json_: Json = False) -> int:
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
    folder: Annotated[Path, Argument(metavar="DIR", help="A checkpoint, a folder of them, or a token cache.")],
    json_: Json = False,
) -> int:
    """Checks checkpoints and token caches: sizes, checksums and contents.

    Exit code 0: all are intact; 1: one is damaged; 2: there is nothing to check.
    """
    from trainer.checkpoint.verify import result_lines, verify

    results = verify(user_path(folder, "DIR"))
    if json_:
        print(json.dumps([result._asdict() | {"path": str(result.path)} for result in results], indent=1))
    else:
        print("\n".join(result_lines(results)))
    if any(result.problem for result in results):
        return EXIT_RUN_FAILED
    return EXIT_OK


@tools.command("convert")
def _convert(
    file: Annotated[str, Argument(metavar="FILE", help="The YAML file.", show_default=False)],
    schema: Annotated[str, Option("--to", help="The schema to write: 1.x or 2.0.", metavar="SCHEMA")] = "1.x",
    output: Annotated[Path | None, Option("--output", "-o", help="Default: standard output.", metavar="PATH")] = None,
    force: Annotated[bool, Option("--force", help="Replace a file that is there.")] = False,
    lossy: Annotated[bool, Option("--lossy", help="Leave out what the other schema cannot say, and list it.")] = False,
    proof: Annotated[
        bool, Option("--proof", help="Train small copies of both files for three steps: equal losses.")
    ] = False,
    steps: Annotated[int | None, Option(help="To 2.0, without the data: optimizer steps.", metavar="INT")] = None,
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
        require_new(output, "--output", force)
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
    else:
        write_output(output, conversion.text, "--output")
        print(output)
    return EXIT_OK


@tools.command("merge")
def _merge(
    models: Annotated[list[Path], Argument(metavar="MODEL...", help="Folders or files of weights.")],
    output: Annotated[Path, Option("--output", "-o", help="The folder to write.", metavar="DIR")],
    method: Annotated[str, Option(help="linear (mean), slerp, task_arithmetic or ties.", metavar="METHOD")] = "linear",
    weight: Annotated[
        list[float] | None, Option(help="Once for each model. linear divides by their sum. Default: 1.", metavar="X")
    ] = None,
    base: Annotated[
        Path | None, Option(help="task_arithmetic, ties: the model before training.", metavar="DIR")
    ] = None,
    t: Annotated[float, Option(help="slerp: 0 is the first model, 1 the second.", min=0, max=1)] = 0.5,
    scale: Annotated[float, Option(help="task_arithmetic, ties: factor on the merged difference.")] = 1.0,
    density: Annotated[float, Option(help="ties: share of each difference that is kept.", min=0, max=1)] = 0.2,
    dtype: Annotated[str, Option(help="float32, bfloat16 or float16.", metavar="DTYPE")] = "float32",
    force: Annotated[bool, Option("--force", help="Replace files that are there.")] = False,
) -> int:
    """Merges the weights of several models of one size into a folder for transformers and this trainer.

    A model is a checkpoint, a folder of checkpoints (the newest one), or a folder of Hugging Face.
    """
    from trainer.checkpoint.hugging_face import DTYPES
    from trainer.convert.merge import METHODS, MergeOptions, merge

    if method not in METHODS:
        raise UserError("no such method", where="flag --method", value=method, fix=f"write {', '.join(METHODS)}")
    if dtype not in DTYPES:
        raise UserError("no such dtype", where="flag --dtype", value=dtype, fix=f"write {', '.join(DTYPES)}")
    for flag, value in (("--scale", scale), *(("--weight", each) for each in weight or ())):
        if not abs(value) < _FLOAT32_LIMIT:
            raise UserError("must be a finite number", where=f"flag {flag}", value=value, fix=f"write {flag} 0.5")
    if base is not None:
        base = user_path(base, "flag --base")
    options = MergeOptions(
        tuple(user_path(model, "argument MODEL") for model in models), user_path(output, "flag --output"),
        cast("Method", method), base, tuple(weight or ()), t, scale, density, dtype, force,
    )  # fmt: skip
    print(merge(options))
    return EXIT_OK


@tools.command("trace")
def _trace(
    context: typer.Context, output: Annotated[Path, Option(help="The folder of the trace.", metavar="DIR")],
    config: ConfigFile = None, options: Options = None,
    steps: Annotated[int, Option(help="Optimizer steps to record.", metavar="INT")] = 1,
    full: Annotated[str, Option(help="Also write tensors of these names, with * and ?.", metavar="PATTERN")] = "",
    against: Annotated[Path | None, Option(help="Compare with this trace, or msprobe's dump.", metavar="DIR")] = None,
    force: Annotated[bool, Option("--force", help="Replace a trace that is there.")] = False,
) -> int:  # fmt: skip
    """Records what each layer computes in training steps, on each rank; compares it with another record.

    With --config it trains and writes --output; under launch each rank writes its shards. With --against another folder
    is compared with --output, which has the right numbers: the first layer, tensor and rank that differ by more than
    rounding explains are named.

    Exit code 1: the records differ, or some are missing.
    """
    arguments: Arguments = context.obj
    folder = user_path(output, "flag --output")
    report_progress = functools.partial(print, file=sys.stderr, flush=True)
    write = functools.partial(print, flush=True)
    if steps < 1:
        raise UserError("must be at least 1", where="flag --steps", key="--steps", value=steps, fix="write --steps 1")
    if arguments.config is None:
        _require_effect(arguments, against, full, force)
    other = None
    if against is not None:
        from trainer.trace.report import check_folders

        other = user_path(against, "flag --against")
        check_folders(folder, other)
    if arguments.config is not None:
        is_first_rank = world_from_environment().rank == 0
        if is_first_rank:  # the others may look when it has begun to write
            require_new(folder, "--output", force)
        from trainer.trace.run import record_trace

        receive_signals_in_a_thread()
        record_trace(load_file(arguments), steps, folder, full, report_progress)
        if not is_first_rank:
            return EXIT_OK
    from trainer.trace.report import compare_folders, recording_lines

    if arguments.config is not None:
        for line in recording_lines(folder, full):
            write(line)
    if other is None:
        write("next         run_trainer.py trace --output RIGHT --against OTHER compares two such folders")
        return EXIT_OK
    return compare_folders(folder, other, write)


def _require_effect(arguments: Arguments, against: Path | None, full: str, force: bool) -> None:
    """Checks that the flags of a command without a configuration have an effect.

    Raises:
        UserError: They have none.
    """
    if against is None:
        fix = "write --config FILE to record a trace, or --against DIR to compare two"
        raise UserError("there is nothing to do", key="trace", fix=fix)
    flags = [each.source for each in arguments.overrides]
    flags += ["flag --full"] * bool(full) + ["flag --force"] * force
    if flags:
        fix = "add --config FILE, or leave it out to compare two traces"
        raise UserError("has an effect on a record alone", where=flags[0], fix=fix)


@tools.command("smoke-worker", hidden=True)
def _smoke_worker(folder: Path, steps: int) -> int:
    """Runs one process of `smoke --ranks`."""
    receive_signals_in_a_thread()
    from trainer.smoke.execute import train_and_resume

    return train_and_resume(folder, steps, functools.partial(print, file=sys.stdout, flush=True))


@tools.command("doctor")
def _doctor(
    json_: Json = False,
    deep: Annotated[bool, Option("--deep", help="Also run a MindSpore operator; takes seconds.")] = False,
    output_dir: Annotated[Path, Option("--output_dir", help="Where a run would write.")] = Path("output"),
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
    """Prints the JSON Schema of the YAML files of both schemas, for editors; docs/schema.json has it."""
    from trainer.config.pynative.json_schema import file_schema

    print(json.dumps(file_schema(), indent=1))
    return EXIT_OK


@tools.command("completion")
def _completion(shell: Annotated[str, Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> int:
    """Prints the script that turns on completion of commands, flags, values and file names in a shell."""
    from trainer.cli.completion import completion_script

    print(completion_script(shell), end="")
    return EXIT_OK
