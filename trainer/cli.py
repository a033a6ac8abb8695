"""The command line. Arguments become a configuration with overrides (`flags.py`); Typer dispatches and prints the help.

Nothing here imports MindSpore: only `run` does, when a run begins.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from trainer.errors import EXIT_OK, EXIT_SIGINT, TrainerError, UserError
from trainer.flags import FLAGS, Arguments, split_arguments

if TYPE_CHECKING:
    from trainer.config import Config

_COMMANDS = ("train", "plan", "doctor", "schema")
_HELP = """Trains a language model from one YAML file, and evaluates and predicts with it.

Every key of the configuration is a flag: [bold]--runner_config.epochs 3[/bold], [bold]--callbacks.0.save_checkpoint_steps 50[/bold],
or [bold]--options optimizer.betas=[0.9,0.95][/bold]. Booleans: --use_clip_grad, --use_clip_grad True, --no-use_clip_grad.

Other commands: [bold]plan[/bold] says what a run would do; [bold]doctor[/bold] checks this machine; [bold]schema[/bold] prints
the JSON Schema of the YAML files. Each has its own --help."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: runs a command and exits with its code; errors are one message on standard error, never a traceback."""
    try:
        code = dispatch(list(sys.argv[1:] if argv is None else argv))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_SIGINT
    except BrokenPipeError:  # the reader of our output went away, for example `| head`
        sys.stderr.close()
        code = EXIT_OK
    sys.stdout.flush()
    sys.exit(code)


def dispatch(argv: list[str]) -> int:
    """Runs the command that `argv` names, train by default, and returns its exit code."""
    command, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("train", argv)
    if command not in _COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, _COMMANDS, 1)
        raise UserError(
            "no such command",
            key=command,
            fix=f"use {near[0]}" if near else f"use one of {', '.join(_COMMANDS)}, or flags only to train",
        )
    if command == "doctor":
        return _invoke([command, *rest], None)
    arguments = split_arguments(rest, own_flags=("--help", "--json"))
    return _invoke([command, *arguments.rest], arguments)


def _invoke(args: list[str], arguments: Arguments | None) -> int:
    import click

    try:
        code = typer.main.get_command(_app())(args, prog_name="run_trainer.py", obj=arguments, standalone_mode=False)
    except click.ClickException as error:
        raise UserError(error.format_message().rstrip("."), fix=f"see run_trainer.py {args[0]} --help") from None
    return code if isinstance(code, int) else EXIT_OK


def _app() -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command("train", help=_HELP)(_with_flags(_train))
    app.command("plan", help="Says what a run would do, and ends. Never loads MindSpore.")(_with_flags(_plan, json_flag=True))
    app.command("doctor", help="Checks whether this machine can train, and says how to mend what is missing.")(_doctor)
    app.command("schema", help="Prints the JSON Schema of the YAML files, for editors.")(_schema)
    return app


def _train(context: typer.Context) -> int:
    from trainer.config import check_runnable
    from trainer.device import resolve_device

    config = _load(context.obj)
    # Before MindSpore loads: what can be known now is said now.
    check_runnable(config)
    resolve_device(config)
    _check_data(config)
    from trainer.run import run

    return run(config)


def _plan(context: typer.Context, json_: bool) -> int:
    from trainer.plan import build_plan, plan_dict, plan_sections

    plan = build_plan(_load(context.obj))
    if json_:
        print(json.dumps(plan_dict(plan), indent=1))
    else:
        _print_sections(plan_sections(plan))
    return EXIT_OK


def _doctor(
    json_: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also run a MindSpore operator; takes seconds.")] = False,
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Where a run would write.")] = Path("output"),
) -> int:
    from rich.console import Console

    from trainer.doctor import checks, exit_code, render, to_json

    found = checks(output_dir, deep)
    if json_:
        print(to_json(found))
    else:
        render(found, Console())
    return exit_code(found)


def _schema() -> int:
    from trainer.config import json_schema

    print(json.dumps(json_schema(), indent=1))
    return EXIT_OK


def _load(arguments: Arguments) -> Config:
    from trainer.config import load_config

    if arguments.config is None:
        raise UserError("a run needs its YAML file", key="--config", fix="write --config configs/quickstart.yaml")
    return load_config(arguments.config, arguments.overrides)


def _check_data(config: Config) -> None:
    """Looks at the data as far as that is quick, so that a wrong path ends the run before MindSpore loads."""
    if config.run_mode in ("train", "finetune"):
        from trainer.data import estimate_rows

        estimate_rows(config)
    elif config.run_mode == "predict":
        from trainer.data import load_tokenizer

        load_tokenizer(config)


def _print_sections(sections: list[tuple[str, list[tuple[str, ...]]]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, (header, *rows) in sections:
        table = Table(title=title, title_justify="left", title_style="bold", show_header=any(header), box=None, pad_edge=False)
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        console.print()


def _with_flags(command: Callable, json_flag: bool = False) -> Callable:
    """Gives a command every named flag, for its help; their values have been taken by `split_arguments` already."""

    def wrapper(context: typer.Context, **values: Any) -> int:
        return command(context, values["json_"]) if json_flag else command(context)

    def option(name: str, text: str, metavar: str, kind: Any = Optional[str]) -> inspect.Parameter:
        annotation = Annotated[kind, typer.Option(f"--{name}", help=text, metavar=metavar, show_default=False)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters.append(option("config", "The YAML file.", "FILE"))
    parameters += [option(flag.name, flag.help, "BOOL" if flag.kind == "bool" else flag.metavar) for flag in FLAGS]
    parameters.append(option("options", "Any other keys: a.b=c d.e=f.", "KEY=VALUE..."))
    if json_flag:
        kind = Annotated[bool, typer.Option("--json", help="For machines.")]
        parameters.append(inspect.Parameter("json_", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind))
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper
