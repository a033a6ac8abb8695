"""The command line. Arguments become a configuration with overrides (`flags.py`); Typer dispatches and prints the help.

Nothing here imports MindSpore: a run does, when all that can be checked without it has been.
"""

from __future__ import annotations

import _thread
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.cli.flags import FLAGS, Arguments, split_arguments
from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_SIGINT, EXIT_SIGTERM, TrainerError, UserError
from trainer.launch import heartbeat

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.launch.arguments import LaunchOptions
    from trainer.parallel.world import World

_COMMANDS = ("train", "plan", "launch", "status", "stop", "export", "doctor", "schema")
# A paragraph is one line: the terminal's width breaks it.
_HELP = "\n\n".join(
    (
        "Trains a language model from one YAML file, and evaluates and predicts with it.",
        "Every key of the configuration is a flag: [bold]--runner_config.epochs 3[/bold], "
        "[bold]--callbacks.0.save_checkpoint_steps 50[/bold], or [bold]--options optimizer.betas=[0.9,0.95][/bold]. "
        "Booleans: --use_clip_grad, --use_clip_grad True, --no-use_clip_grad.",
        "Other commands: [bold]plan[/bold] says what a run would do; [bold]launch[/bold] runs on several devices, "
        "[bold]status[/bold] and [bold]stop[/bold] look after that; [bold]export[/bold] writes a checkpoint as one "
        "Hugging Face file; [bold]doctor[/bold] checks this machine; "
        "[bold]schema[/bold] prints the JSON Schema of the YAML files. Each has its own --help.",
    )
)

_EXPORT_HELP = "\n\n".join(
    (
        "Writes the weights of --load_checkpoint as one safetensors file with Hugging Face's names. Never loads "
        "MindSpore.",
        "With [bold]--adapter DIR --merge[/bold] the adapters of a training with pet_config are folded in.",
    )
)


_LAUNCH_HELP = "\n\n".join(
    (
        "Runs the trainer on several devices, through MindSpore's msrun, and supervises it: the first failure ends the "
        "job and is named, Ctrl-C reaches every worker, a hang is found, and no process is left.",
        "All other flags are those of a run: [bold]run_trainer.py launch --nproc 8 --config configs/a.yaml[/bold].",
    )
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: runs a command and exits with its code. An error is one message on standard error, no traceback."""
    # While a run trains it has handlers of its own; around that SIGTERM ends the process as Ctrl-C does, cleaning up.
    signal.signal(signal.SIGTERM, _terminate)
    # A script's shell starts its background jobs with SIGINT ignored: whoever sends it to this process means it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = dispatch(list(sys.argv[1:] if argv is None else argv))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_SIGINT
    except OSError as error:
        print(f"error: the system refused to read or write: {error}.", file=sys.stderr)
        code = EXIT_RUN_FAILED
    except Exception:
        heartbeat.failed(EXIT_RUN_FAILED)
        raise
    if code not in (EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM):
        heartbeat.failed(code)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output went away, as in `| head`: Python shall not try again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _terminate(number: int, frame: object) -> None:
    print("stopped by SIGTERM", file=sys.stderr)
    raise SystemExit(EXIT_SIGTERM)


def _receive_signals_in_a_thread() -> None:
    """Makes SIGINT and SIGTERM reach Python's handlers whatever MindSpore does to them.

    At every call of a compiled function MindSpore 2.10 puts a handler of its own (in C) in the place of SIGINT's, which
    sends SIGTERM to its process: Ctrl-C would look like SIGTERM. So both signals are blocked in all threads, which
    inherit that from this one, and a thread that waits for them hands them to the main thread's Python handlers.
    """
    numbers = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def forward() -> None:
        while True:
            _thread.interrupt_main(signal.sigwait(numbers))

    threading.Thread(target=forward, name="signals", daemon=True).start()


def dispatch(argv: list[str]) -> int:
    """Runs the command that `argv` names, train by default, and returns its exit code."""
    command, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("train", argv)
    if command not in _COMMANDS:
        import difflib

        if command.endswith((".yaml", ".yml")):
            raise UserError("the YAML file comes after --config", key=command, fix=f"write --config {command}")
        near = difflib.get_close_matches(command, _COMMANDS, 1)
        raise UserError(
            "no such command",
            key=command,
            fix=f"use {near[0]}" if near else f"use one of {', '.join(_COMMANDS)}, or flags only to train",
        )
    if command == "launch":
        return _dispatch_launch(rest)
    if command in ("doctor", "status", "stop"):
        return _invoke([command, *rest], None)
    if command == "export":
        arguments = split_arguments(rest, ("--help", "--merge", "--force"), own_values=("--output", "--adapter"))
    else:
        values = ("--ranks", "--local_ranks", "--audit") if command == "plan" else ()
        arguments = split_arguments(rest, own_flags=("--help", "--json"), own_values=values)
    return _invoke([command, *arguments.rest], arguments)


def _dispatch_launch(rest: list[str]) -> int:
    from trainer.launch.arguments import read_options, read_positional, split_own

    if rest[:1] == ["--positional"]:  # of scripts/msrun_launcher.sh
        return _invoke(["launch"], read_positional(rest[1:], os.environ))
    wants_help = "help" in split_own(rest)[0]
    return _invoke(["launch", "--help"] if wants_help else ["launch"], None if wants_help else read_options(rest))


def _invoke(args: list[str], arguments: Arguments | LaunchOptions | None) -> int:
    usage_error = typer.BadParameter.__base__  # of the Click that this Typer uses, which may be a copy of its own
    try:
        code = typer.main.get_command(_app())(args, prog_name="run_trainer.py", obj=arguments, standalone_mode=False)
    except usage_error as error:
        raise UserError(error.format_message().rstrip("."), fix=f"see run_trainer.py {args[0]} --help") from None
    return code if isinstance(code, int) else EXIT_OK


def _app() -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command("train", help=_HELP)(_with_flags(_train))
    plan_help = "Says what a run would do, and ends. Never loads MindSpore, but for --audit."
    audit = "ascend: build the graph of a training step for Ascend, without one, and look for its fused operators."
    counts = {
        "ranks": _count("ranks", "Plan for a job of so many ranks. Default: the job around, or one."),
        "local_ranks": _count("local_ranks", "So many of them on one host. Default: all."),
    }
    own = {"json_": _switch("json", "For machines."), "audit": _name("audit", audit), **counts}
    app.command("plan", help=plan_help)(_with_flags(_plan, **own))
    paths = {
        "output": _path("output", "The file, ending in .safetensors, or a folder for model.safetensors."),
        "adapter": _path("adapter", "The adapters: another name of --adapter_id."),
    }
    merge, force = _switch("merge", "Fold the adapters in."), _switch("force", "Replace a file that is there.")
    app.command("launch", help=_LAUNCH_HELP)(_with_launch_options())
    app.command("status", help="Says what a job of launch does, or how it ended.")(_status)
    app.command("stop", help="Lets a job of launch save and end.")(_stop)
    app.command("export", help=_EXPORT_HELP)(_with_flags(_export, **paths, merge=merge, force=force))
    app.command("doctor", help="Checks whether this machine can train, and says how to mend what is missing.")(_doctor)
    app.command("schema", help="Prints the JSON Schema of the YAML files, for editors.")(_schema)
    return app


def _train(context: typer.Context) -> int:
    config = _load(context.obj)
    _receive_signals_in_a_thread()  # before numpy and MindSpore start threads
    from trainer.run.loop import run

    return run(config)


def _plan(context: typer.Context, json_: bool, audit: str | None, ranks: int | None, local_ranks: int | None) -> int:
    from trainer.parallel.world import planned_world
    from trainer.plan.plan import plan_dict, plan_sections
    from trainer.run.prepare import build_plan

    config, world = _load(context.obj), planned_world(ranks, local_ranks)
    if audit is not None:
        return _audit(config, audit, json_, world)
    plan = build_plan(config, world)
    if json_:
        print(json.dumps(plan_dict(plan), indent=1))
    else:
        _print_sections(plan_sections(plan))
    return EXIT_OK


def _audit(config: Config, device: str, json_: bool, world: World) -> int:
    """Exit code 1 where a fused operator that the configuration asks for is missing."""
    if device.lower() != "ascend":
        rule = "there is an audit for ascend alone"
        raise UserError(rule, where="flag --audit", key="--audit", value=device, fix="write --audit ascend")
    from trainer.audit.report import audit_ascend, audit_dict, audit_sections

    found = audit_ascend(config, world=world)
    if json_:
        print(json.dumps(audit_dict(found), indent=1))
    else:
        _print_sections(audit_sections(found))
    return EXIT_RUN_FAILED if found.missing else EXIT_OK


def _export(context: typer.Context, output: str | None, adapter: str | None, merge: bool, force: bool) -> int:
    from trainer.config import Override
    from trainer.run.export import export

    if output is None:
        fix = "write --output output/model.safetensors"
        raise UserError("export needs a place to write to", key="--output", fix=fix)
    arguments: Arguments = context.obj
    if adapter is not None:
        arguments.overrides.append(Override("adapter_id", adapter, "flag --adapter"))
    print(export(_load(arguments), Path(output).expanduser(), merge=merge, force=force))
    return EXIT_OK


def _launch(context: typer.Context) -> int:
    from trainer.launch.checks import check_launch
    from trainer.launch.command import launch
    from trainer.run.prepare import build_plan

    def check(options: LaunchOptions) -> None:
        """As a run would, so that one message says what each of the workers would say after some seconds."""
        check_launch(options, build_plan)

    return launch(context.obj, check)


_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of logs of the job.")]


def _status(folder: _Folder, json_: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> int:
    from trainer.launch.command import status

    return status(folder, json_)


def _stop(folder: _Folder) -> int:
    from trainer.launch.command import stop

    return stop(folder)


def _doctor(
    json_: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Also run a MindSpore operator; takes seconds.")] = False,
    output_dir: Annotated[Path, typer.Option("--output_dir", help="Where a run would write.")] = Path("output"),
) -> int:
    from rich.console import Console

    from trainer.device.doctor import checks, exit_code, render, to_json

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


def _print_sections(sections: list[tuple[str, list[tuple[str, ...]]]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, (header, *rows) in sections:
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.show_header = any(header)
        for name in header:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        console.print()


def _switch(name: str, text: str) -> inspect.Parameter:
    """A flag of one command that is on or off."""
    return _parameter(Annotated[bool, typer.Option(f"--{name}", help=text)], default=False)


def _name(name: str, text: str) -> inspect.Parameter:
    """A flag of one command that names something."""
    return _parameter(Annotated[str | None, typer.Option(f"--{name}", help=text, metavar="NAME", show_default=False)])


def _path(name: str, text: str) -> inspect.Parameter:
    """A flag of one command that names a file or folder."""
    return _parameter(Annotated[str | None, typer.Option(f"--{name}", help=text, metavar="PATH", show_default=False)])


def _count(name: str, text: str) -> inspect.Parameter:
    """A flag of one command that counts something."""
    # Without a range, which would widen the column of every flag: `planned_world` checks it.
    option = typer.Option(f"--{name}", help=text, metavar="INT", show_default=False)
    return _parameter(Annotated[int | None, option])


def _parameter(annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter("own", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _with_launch_options() -> Callable:
    """The command `launch` with its options, for its help; their values have been taken by `read_options` already."""
    from trainer.launch.arguments import HELP

    def wrapper(context: typer.Context, **values: Any) -> int:
        return _launch(context)

    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for name, (metavar, text) in HELP.items():
        annotation = Annotated[str | None, typer.Option(f"--{name}", help=text, metavar=metavar, show_default=False)]
        parameters.append(_parameter(annotation).replace(name=name))
    parameters.append(_switch("force", "Start even where memory seems too small.").replace(name="force"))
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _with_flags(command: Callable, **own: inspect.Parameter) -> Callable:
    """Gives a command every named flag, for its help; their values have been taken by `split_arguments` already.

    Args:
        command: Takes Typer's context, and the values of its own flags.
        own: The parameters of these, by name.
    """

    def wrapper(context: typer.Context, **values: Any) -> int:
        try:
            return command(context, **{name: values[name] for name in own})
        except KeyboardInterrupt:  # Typer would end without a word
            print("stopped by SIGINT", file=sys.stderr)
            return EXIT_SIGINT

    def option(name: str, text: str, metavar: str, kind: Any = str | None) -> inspect.Parameter:
        annotation = Annotated[kind, typer.Option(f"--{name}", help=text, metavar=metavar, show_default=False)]
        return _parameter(annotation).replace(name=name)

    parameters = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters.append(option("config", "The YAML file.", "FILE"))
    parameters += [option(flag.name, flag.help, "BOOL" if flag.kind == "bool" else flag.metavar) for flag in FLAGS]
    parameters.append(option("options", "Any other keys: a.b=c d.e=f.", "KEY=VALUE"))
    parameters += [parameter.replace(name=name) for name, parameter in own.items()]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper
