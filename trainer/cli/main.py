"""The command line. Arguments become a configuration with overrides (`flags.py`); Typer dispatches and prints the help.

Nothing here imports MindSpore: a run does, when all that can be checked without it has been.
"""

from __future__ import annotations

import atexit
import copy
import errno
import functools
import io
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trainer.cli.checkpoints import checkpoints
from trainer.cli.flags import NO_EFFECT, PANELS, Arguments, Flag, split_arguments
from trainer.cli.loading import ConfigFile, Json, Options, gc_disabled, load_file, run_config
from trainer.cli.planning import planning
from trainer.cli.reports import reports
from trainer.cli.signals import end_at_next_signal, handle_signals, is_ending
from trainer.cli.tools import tools
from trainer.device.stop_signals import receive_signals_in_a_thread
from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_SIGINT, EXIT_SIGTERM, TrainerError, UserError
from trainer.input_files import user_path
from trainer.launch import heartbeat

if TYPE_CHECKING:
    from trainer.config.checks.problem import ConfigError
    from trainer.launch.arguments import LaunchOptions
    from trainer.smoke.changes import Change

# A paragraph is one line: the terminal's width breaks it.
_HELP = (
    "Trains a language model from one YAML file, and evaluates and predicts with it.\n\n"
    "Every key of the configuration is a flag: [bold]--runner_config.epochs 3[/bold], "
    "[bold]--callbacks.0.save_checkpoint_steps 50[/bold], or [bold]--options optimizer.betas=[0.9,0.95][/bold]. "
    "Booleans: --use_clip_grad, --use_clip_grad true, --no-use_clip_grad."
)

_CONFIG_FLAGS = ("--config", "--options")  # in the help of each command, and read by `split_arguments`
_PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR,
                errno.ENXIO)  # fmt: skip

_STYLE: dict[str, Any] = {"add_completion": False, "rich_markup_mode": "rich", "pretty_exceptions_enable": False}

app = typer.Typer(help=f"{_HELP}\n\nFlags without a command train.", **_STYLE)


def program() -> None:
    """Runs `main` and ends the process at once after its exit handlers.

    Unloading MindSpore's modules and freeing what it compiled would take half a second or more, for memory that the
    system takes back anyway.
    """
    code = EXIT_RUN_FAILED  # of an exception that Python shows

    def exit_at_once() -> None:
        """Ends the process without waiting for threads and without Python's cleanup."""
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started this has closed it: a file of ours would take its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it would look for some in every installed package
    os.environ["MPLBACKEND"] = "agg"  # a notebook hands its own on, which this interpreter may not have
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells where its cache is if no home can be written
    atexit.register(exit_at_once)  # the first that is registered runs last
    try:
        main()
    except SystemExit as ending:
        if not isinstance(ending.code, str):
            code = ending.code or EXIT_OK
        raise


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command and exits with its code. An error is one message on standard error, no traceback."""
    handle_signals()
    if argv is None:
        argv = sys.argv[1:]
    try:
        code = dispatch(list(argv))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        end_at_next_signal(EXIT_SIGINT)
        print("stopped by SIGINT", file=sys.stderr)
        code = EXIT_SIGINT
    except BrokenPipeError:  # whoever read our output went away, as in `| head`: no message
        code = EXIT_RUN_FAILED
    except OSError as error:
        print(f"error: a file could not be read or written: {error}.", file=sys.stderr)
        if error.errno == errno.EMFILE:
            print("  Fix: let a process have more files open at once: `ulimit -n` of the shell.", file=sys.stderr)
        code = EXIT_RUN_FAILED
    except Exception:
        if is_ending():  # MindSpore makes an exception of its own of a signal's
            sys.exit(EXIT_SIGTERM)
        heartbeat.announce_failure(EXIT_RUN_FAILED)
        raise
    if code not in (EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM):
        heartbeat.announce_failure(code)
    try:
        sys.stdout.flush()
    except OSError as error:  # whoever read our output went away, as in `| head`, or the disk is full
        if not isinstance(error, BrokenPipeError):
            print(f"error: the output could not be written: {error}.", file=sys.stderr)
            code = code or EXIT_RUN_FAILED
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python shall not try again at its end
    end_at_next_signal(code)
    sys.exit(code)


def dispatch(argv: list[str]) -> int:
    """Runs the command that `argv` names, train by default, and returns its exit code.

    Raises:
        TrainerError: It could not do it. A path that the system does not let us use, wherever that shows, is bad input.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that a terminal's encoding lacks appear as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    for number, word in enumerate(argv, start=1):
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            rule = "is not UTF-8 text"
            raise UserError(rule, where=f"argument {number}", value=word, fix="write it as UTF-8 text") from None
    try:
        return _dispatch(argv)
    except OSError as error:
        if error.errno not in _PATH_ERRORS:
            raise
        fix = "make it readable and writable, or name another path"
        place = ""
        if error.filename is not None:
            place = f" {error.filename}"
        raise UserError(f"cannot access the path{place}: {error.strerror}", fix=fix) from None


def _dispatch(argv: list[str]) -> int:
    group: Any = typer.main.get_command(app)  # Click's group, which may be Typer's own copy of it
    if argv[:1] == ["--help"]:
        _add_flags(group, group.commands["train"], left_out=NO_EFFECT)
        code = _run(group, ["--help"], None)
        _print_panel(NO_EFFECT)  # Typer would put it before the commands
        return code
    name = "train"
    rest = argv
    if argv and not argv[0].startswith("-"):
        name = argv[0]
        rest = argv[1:]
    if name == "complete":  # of the scripts that `completion` prints
        from trainer.cli.completion import print_candidates

        return print_candidates(group, rest)
    command = group.commands.get(name)
    if command is None:
        raise _no_such_command(name, [other for other, known in group.commands.items() if not known.hidden])
    if name == "launch":
        return _dispatch_launch(command, rest)
    if not any(option.name == "config" for option in command.params):
        return _run(command, rest, None)
    options = (option for option in command.params if option.param_type_name == "option")
    by_name = {name: option for option in options for name in option.opts if name not in _CONFIG_FLAGS}
    switches = ["--help", *(name for name, option in by_name.items() if option.is_flag)]
    values = [name for name, option in by_name.items() if not option.is_flag]
    with gc_disabled():
        arguments = split_arguments(rest, switches, values)
    if "--help" in arguments.rest:
        _add_flags(command, command)
    return _run(command, arguments.rest, arguments)


def _no_such_command(name: str, commands: list[str]) -> UserError:
    import difflib

    if name.endswith((".yaml", ".yml")):
        return UserError("the YAML file comes after --config", key=name, fix=f"write --config {name}")
    near = difflib.get_close_matches(name, commands, 1)
    fix = f"use one of {', '.join(commands)}, or flags only to train"
    if near:
        fix = f"use {near[0]}"
    return UserError("no such command", key=name, fix=fix)


def _dispatch_launch(command: Any, rest: list[str]) -> int:
    from trainer.launch.arguments import HELP, read_options, read_positional, split_options

    if rest[:1] == ["--positional"]:  # of scripts/msrun_launcher.sh
        return _run(command, [], read_positional(rest[1:], os.environ))
    if "help" not in split_options(rest)[0]:
        return _run(command, [], read_options(rest))
    template = command.params[0]
    command.params += [_option(template, name, text, metavar) for name, (metavar, text) in HELP.items()]
    return _run(command, ["--help"], None)


def _run(command: Any, args: list[str], arguments: Arguments | LaunchOptions | None) -> int:
    usage_error: Any = typer.BadParameter.__base__  # of the Click that this Typer uses, which may be a copy of its own
    name = "run_trainer.py"
    if not hasattr(command, "commands"):
        name = f"run_trainer.py {command.name}"
    if command.help:  # Rich would break its lines where the docstring does
        command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", command.help)
    try:
        # Calling the command would turn Ctrl-C into an exit code without a message.
        with command.make_context(name, list(args), obj=arguments) as context:
            code = command.invoke(context)
    except typer.Exit as end:  # after --help
        return end.exit_code
    except usage_error as error:
        says = error.format_message()
        files = [word for word in args if word.endswith((".yaml", ".yml"))]
        if files and "unexpected extra argument" in says and any("--config" in one.opts for one in command.params):
            raise _no_such_command(files[0], []) from None
        if command.name == "export" and "unexpected extra argument" in says:
            key = says.rpartition("(")[2].split(")")[0]
            fix = "write --config FILE --load_checkpoint FOLDER --output FOLDER"
            raise UserError("the weights of an export come after --load_checkpoint", key=key, fix=fix) from None
        if isinstance(error, typer.BadParameter) and error.param is not None and "valid integer" in says:
            raise UserError("must be an integer", key=error.param.opts[0], fix="write for example 8") from None
        raise UserError(says.rstrip("."), fix=f"see {name} --help") from None
    if isinstance(code, int):
        return code
    return EXIT_OK


def _add_flags(command: Any, template_of: Any, left_out: str = "") -> None:
    """Shows the flags of the configuration, whose values `split_arguments` takes, in a command's help."""
    template, options = (option for option in template_of.params if option.name in ("config", "options"))
    if command is not template_of:
        command.params += [template, options]
    for panel, flags in PANELS.items():
        if panel != left_out:
            command.params += [_option(template, flag.name, flag.help, _metavar(flag), panel) for flag in flags]


def _metavar(flag: Flag) -> str:
    if flag.kind == "bool":
        return "BOOL"
    return flag.metavar


def _print_panel(title: str) -> None:
    """Prints one panel of flags in Typer's style."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for flag in PANELS[title]:
        table.add_row(f"[bold cyan]--{flag.name}[/]", f"[bold yellow]{_metavar(flag)}[/]", flag.help)
    Console().print(Panel(table, title=title, title_align="left", border_style="dim"))


def _option(template: Any, name: str, text: str, metavar: str, panel: str | None = None) -> Any:
    """Returns a changed copy of one of Typer's options, which Typer makes only from a function's signature."""
    option = copy.copy(template)
    vars(option).update(
        name=name, opts=[f"--{name}"], help=text, metavar=metavar, rich_help_panel=panel, expose_value=False
    )
    return option


@app.command("train", help=_HELP)
def _train(context: typer.Context, config: ConfigFile = None, options: Options = None) -> int:
    return run_config(load_file(context.obj))


app.registered_commands += [*checkpoints.registered_commands, *planning.registered_commands]


@app.command("smoke")
def _smoke(
    context: typer.Context,
    files: Annotated[list[str] | None, Argument(metavar="[FILE|DIR]...", help="Several files.")] = None,
    config: ConfigFile = None,
    options: Options = None,
    ranks: Annotated[int, Option(help="Processes to train on.", metavar="INT")] = 1,
    steps: Annotated[int, Option(help="Optimizer steps.", metavar="INT")] = 3,
    json_: Json = False,
    against: Annotated[
        str | None, Option(help="Compare plans with a git revision; no file: what changed.", metavar="REV")
    ] = None,
    junit: Annotated[Path | None, Option(help="Write JUnit XML.", metavar="FILE")] = None,
    summary: Annotated[Path | None, Option(help="Write a summary in Markdown.", metavar="FILE")] = None,
) -> int:
    """Tries training files on any machine: a small copy trains, saves, resumes and evaluates.

    It shrinks the model, replaces data and weights that are not here, and says what it changed. It ends with pass or
    fail: exit code 0, 1, or 2 where the file itself is wrong; of several files the worst.
    """
    from trainer.smoke.report import changes_section, outcome_lines, smoke_result_dict
    from trainer.smoke.run import FEWEST_STEPS, smoke
    from trainer.tables import print_sections

    for key, value, least in (("--ranks", ranks, 1), ("--steps", steps, FEWEST_STEPS)):
        if value < least:
            fix = f"write {key} {least} or more"
            raise UserError(f"must be at least {least}", where=f"flag {key}", key=key, value=value, fix=fix)
    if files or against is not None or junit is not None or summary is not None:
        from trainer.ci.command import smoke_all

        reports_ = {"junit": junit, "summary": summary}
        return smoke_all(context.obj, files or [], against, reports_, ranks, steps, json_)
    if ranks == 1:  # a launcher has handlers of its own, and the processes it starts would inherit blocked signals
        receive_signals_in_a_thread()
    problems: list[ConfigError] = []
    output = sys.stdout
    if json_:
        output = sys.stderr
    report_progress = functools.partial(print, file=output, flush=True)

    def show_changes(changes: list[Change]) -> None:
        if not json_:
            print_sections([changes_section(changes, loaded)])

    try:
        loaded = load_file(context.obj, problems)
        result = smoke(loaded, problems, steps, ranks, report_progress, show_changes)
    except UserError as error:
        if json_:
            invalid = {"result": "invalid", "file": context.obj.config, "problem": str(error), "exit_code": 2}
            print(json.dumps(invalid, indent=1))
        raise
    if json_:
        print(json.dumps(smoke_result_dict(result), indent=1))
    else:
        print("\n".join(outcome_lines(result, loaded.source)))
    return result.exit_code


@app.command("data")
def _data(
    context: typer.Context, config: ConfigFile = None, options: Options = None,
    rows: Annotated[int, Option(help="Sequences to show.", metavar="INT")] = 3, json_: Json = False,
) -> int:  # fmt: skip
    """Shows what will be trained on: the first sequences as text, and statistics. Never loads MindSpore."""
    from trainer.run.preview import print_preview

    return print_preview(load_file(context.obj), rows, json_)


@app.command("sweep")
def _sweep(
    context: typer.Context,
    grid: Annotated[
        list[str] | None, Option(help="A key and values; every combination is one run.", metavar="KEY=V,V")
    ] = None,
    config: ConfigFile = None,
    options: Options = None,
    jobs: Annotated[int | None, Option(help="Runs at a time; default: cores.", metavar="INT")] = None,
) -> int:
    """Trains with every combination of some settings: runs side by side, then a comparison of all.

    Each is an ordinary run in a folder of its own below --output_dir. Called again, the sweep goes on where it was
    stopped. Exit code 1: a run failed.
    """
    from trainer.sweep.command import sweep

    return sweep(context.obj, grid or [], jobs)


@app.command("launch")
def _launch(
    context: typer.Context,
    force: Annotated[
        bool, Option("--force", help="Start even if the memory estimate exceeds what is available.")
    ] = False,
    elastic: Annotated[
        bool, Option("--elastic", help="With --max_restarts: continue on fewer ranks if one fails permanently.")
    ] = False,
) -> int:
    """Runs the trainer on several devices, through MindSpore's msrun, and supervises it.

    The first failure ends the job and is named, Ctrl-C reaches every worker, a hang is found, and no process is left.

    All other flags are those of a run: [bold]run_trainer.py launch --nproc 8 --config configs/a.yaml[/bold].
    """
    from trainer.launch.checks import check_launch
    from trainer.launch.command import launch
    from trainer.run.prepare import build_plan

    return launch(context.obj, *check_launch(context.obj, build_plan))


@app.command("export")
def _export(
    context: typer.Context,
    config: ConfigFile = None,
    options: Options = None,
    output: Annotated[str | None, Option(help="The folder, or a .safetensors file.", metavar="PATH")] = None,
    adapter: Annotated[str | None, Option(help="The adapters: --adapter_id.", metavar="PATH")] = None,
    merge: Annotated[bool, Option("--merge", help="Merge the adapters into the weights.")] = False,
    check: Annotated[
        bool, Option("--check", help="--merge: compare logits before and after it; loads MindSpore.")
    ] = False,
    force: Annotated[bool, Option("--force", help="Replace a file that is there.")] = False,
    dtype: Annotated[str, Option(help="float32, bfloat16 or float16.", metavar="NAME")] = "float32",
    shard_size: Annotated[str, Option("--shard_size", help="Size of a weight file.", metavar="SIZE")] = "5GB",
) -> int:
    """Writes the weights of --load_checkpoint as a folder that Hugging Face's transformers loads.

    The folder has config.json, the tokenizer and model.safetensors, or several files of --shard_size. An output that
    ends in .safetensors is a file of the weights alone.

    With [bold]--adapter DIR --merge[/bold] the adapters of a training are merged in.

    Loads MindSpore for [bold]--check[/bold] alone.
    """
    from trainer.checkpoint.hugging_face import DTYPES, parse_size
    from trainer.config import Override
    from trainer.run.export import export

    if output is None:
        fix = "write --output output/model.safetensors"
        raise UserError("export needs a place to write to", key="--output", fix=fix)
    arguments: Arguments = context.obj
    if adapter is not None:
        arguments.overrides.append(Override("adapter_id", adapter, "flag --adapter"))
    if dtype not in DTYPES:
        raise UserError("no such dtype", key="--dtype", value=dtype, fix=f"write one of {', '.join(DTYPES)}")
    if check and not merge:
        rule = "needs --merge: it compares a model with adapters before and after their merge"
        raise UserError(rule, key="--check", fix="add --adapter output/lora --merge, or leave it out")
    size = parse_size(shard_size)
    config_ = load_file(arguments)
    path = user_path(output, "flag --output")
    print(export(config_, path, merge=merge, force=force, dtype=dtype, shard_bytes=size))
    if check:
        from trainer.convert.check_merge import check_merge

        print(check_merge(config_, path))
    return EXIT_OK


app.registered_commands += [*reports.registered_commands, *tools.registered_commands]
