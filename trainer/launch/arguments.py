"""The options of `launch`, and the positional arguments of MindSpore Transformers' msrun_launcher.sh."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import UserError, working_directory
from trainer.input_files import user_path

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "run_trainer.py"

LOG_FOLDER = "msrun_log"
"""The folder of logs in the folder of a run."""

START_SECONDS = 7200.0
"""Loading a large model, compiling its first step, and waiting for the other nodes take less."""


@dataclass(frozen=True)
class LaunchOptions:
    """The options of a job. `_OPTIONS` below describes most fields.

    Attributes:
        master_port: None picks a free port, or `SHARED_PORT` with several nodes.
        start_timeout: None means `START_SECONDS`, or no limit for a script, which may not report its steps.
        force: Whether to start even if the memory estimate exceeds what is available.
        script: A Python file that every worker runs; None runs this trainer.
        arguments: The arguments of the script.
        devices: Numbers of the remaining devices, after ranks failed permanently; empty means all of the host.
    """

    worker_num: int = 8
    local_worker_num: int = 8
    master_addr: str = "127.0.0.1"
    master_port: int | None = None
    node_rank: int = 0
    log_dir: Path = Path("output") / LOG_FOLDER
    join: bool = True
    cluster_time_out: int = 7200
    start_timeout: float | None = None
    hang_timeout: float = 600.0
    max_restarts: int = 0
    elastic: bool = False
    force: bool = False
    script: Path | None = None
    arguments: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()

    @property
    def nodes(self) -> int:
        """Returns the number of nodes."""
        return max(1, self.worker_num // max(1, self.local_worker_num))

    @property
    def ranks(self) -> range:
        """Returns the ranks of this node, as msrun numbers them."""
        first = 0
        if self.nodes > 1:
            first = self.node_rank * self.local_worker_num
        return range(first, first + self.local_worker_num)

    @property
    def needs_msrun(self) -> bool:
        """Returns whether msrun starts the workers; a single worker of this trainer needs no scheduler."""
        return self.worker_num > 1 or self.script is not None

    @property
    def start_limit(self) -> float:
        """Returns the seconds from the start to the first finished step after which the job counts as hung; 0 means
        never."""
        if self.start_timeout is not None:
            return self.start_timeout
        if self.script is None:
            return START_SECONDS
        return 0.0

    @property
    def script_name(self) -> str:
        """Returns the file name of the program that the workers run."""
        if self.script is None:
            return PROGRAM.name
        return self.script.name


DEVICES_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
"""Environment variable with the numbers of the devices that the ranks of this host may use."""

_MINDFORMERS_PROGRAM = "run_mindformer.py"


def find_script(name: str) -> Path | None:
    """Returns a Python file by its path from the working directory, or else from the repository; None for this trainer.

    MindSpore Transformers' program is replaced by this trainer, which takes its flags and files; a line on stderr says
    so.
    """
    script = user_path(name, "launch", "script")
    if script.name == _MINDFORMERS_PROGRAM:
        print(f"note: {name} is taken as {PROGRAM.name}, which has its flags and reads its files", file=sys.stderr)
        return None
    for path in (script, REPOSITORY / script):
        if path.is_file():
            if path.resolve() == PROGRAM:
                return None
            return path.absolute()
    rule = f"there is no such file, neither in {working_directory()} nor in {REPOSITORY}"
    raise UserError(rule, key="script", value=name, fix="write run_trainer.py, or the path of your script")


def visible_devices() -> tuple[int, ...]:
    """Returns the device numbers of `DEVICES_VARIABLE`; empty if it is not set.

    Raises:
        UserError: It is no list of numbers.
    """
    text = os.environ.get(DEVICES_VARIABLE, "")
    words = []
    if text.strip():
        words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        rule = "must be numbers with commas between them, where a rank that is lost is left out"
        raise UserError(rule, key=DEVICES_VARIABLE, value=text, fix="write 0,1,2,3 for the range 0-3")
    return tuple(map(int, words))


def _integer(where: str, string: str) -> int:
    try:
        return int(string)
    except ValueError:
        raise UserError("must be an integer", where=where, value=string, fix="write a number such as 8") from None


def _seconds(where: str, string: str) -> float:
    try:
        seconds = float(string)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        rule = "must be a number of seconds, at least 0"
        raise UserError(rule, where=where, value=string, fix="write 600, or 0: off")
    return seconds


def _boolean(where: str, string: str) -> bool:
    if string.lower() not in ("true", "false"):
        raise UserError("must be true or false", where=where, value=string, fix="write true or false")
    return string.lower() == "true"


class _Option(NamedTuple):
    """An option with a value.

    Attributes:
        metavar: The placeholder of its value in the help.
        read: Parses its string; the first argument names the option in an error.
        field: Its field in `LaunchOptions`; empty if it has the name of the option.
    """

    metavar: str
    help: str
    read: Callable[[str, str], Any]
    field: str = ""


_OPTIONS: Mapping[str, _Option] = {
    "nproc": _Option(
        "INT", "Workers on all nodes together; default 8. Another name: --worker_num.", _integer, "worker_num"
    ),
    "local_worker_num": _Option("INT", "Workers on this node; default: all of them.", _integer),
    "master_addr": _Option("HOST", "Node 0, where the ranks meet; default 127.0.0.1.", lambda where, host: host),
    "master_port": _Option("PORT", "Its port; default: a free one on one node, 8118 on several.", _integer),
    "node_rank": _Option("INT", "Which node this is, from 0.", _integer),
    "log_dir": _Option(
        "DIR", "Folder of the logs; default msrun_log in --output_dir.", lambda where, path: user_path(path, where)
    ),
    "join": _Option("BOOL", "true: stay until the job ends. false: return at once, and leave it running.", _boolean),
    "cluster_time_out": _Option(
        "SECONDS", "How long the launchers of all nodes, then the workers, wait for each other; default 7200.", _integer
    ),
    "start_timeout": _Option(
        "SECONDS",
        "End the job when the first step takes so long from the start; default 7200, 0: never; never for a script.",
        _seconds,
    ),
    "hang_timeout": _Option(
        "SECONDS", "End the job when no step was finished for so long; default 600, 0: never.", _seconds
    ),
    "max_restarts": _Option("INT", "Most restarts of a failed job, from its newest checkpoint; default 0.", _integer),
    "script": _Option("FILE", "A Python file to run instead of run_trainer.py.", lambda where, name: find_script(name)),
}
_SWITCHES = ("elastic", "force")
OPTION_NAMES = (*_OPTIONS, *_SWITCHES)
HELP: Mapping[str, tuple[str, str]] = {name: (option.metavar, option.help) for name, option in _OPTIONS.items()}
"""By name of the option: the placeholder of its value, and what it does."""


def read_options(argv: Sequence[str]) -> LaunchOptions:
    """Takes the options of `launch` out of a command line; all other arguments are for the workers, unchanged.

    Raises:
        UserError: An option without a value, or with one that cannot be one.
    """
    strings, arguments = split_options(argv)
    options = _with_values(LaunchOptions(arguments=tuple(arguments)), strings, prefix="flag --")
    if "log_dir" in strings or options.script is not None:
        return options
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output_dir", "--output-dir", nargs="?")
    if output_dir := parser.parse_known_args(arguments)[0].output_dir:
        return replace(options, log_dir=Path(output_dir) / LOG_FOLDER)
    return options


def split_options(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the options of `launch` by name, and all other arguments in their order.

    A --force behind the word trace belongs to that command.
    """
    strings: dict[str, str] = {}
    others: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        flag, equals, string = token.partition("=")
        name = ""
        if flag.startswith("--"):
            name = flag[2:].replace("-", "_")
        if name == "worker_num":
            name = "nproc"
        if name == "force" and others[:1] == ["trace"]:
            others.append(token)
        elif name in (*_SWITCHES, "help") and not equals:
            strings[name] = "true"
        elif name in _OPTIONS:
            if not equals and not tokens:
                raise UserError("needs a value", where=f"flag {token}", fix=f"write {token} {_OPTIONS[name].metavar}")
            if not equals:
                string = tokens.pop(0)
            strings[name] = string
        else:
            others.append(token)
    return strings, others


def _with_values(options: LaunchOptions, strings: Mapping[str, str], prefix: str) -> LaunchOptions:
    """Returns options with values that are given as strings; `prefix` stands before a name in a message."""
    values = {
        _OPTIONS[name].field or name: _OPTIONS[name].read(f"{prefix}{name}", string)
        for name, string in strings.items()
        if name in _OPTIONS
    }
    values |= {name: True for name in _SWITCHES if name in strings}
    if "worker_num" in values:
        values.setdefault("local_worker_num", values["worker_num"])
    return replace(options, **values)


def to_arguments(options: LaunchOptions) -> list[str]:
    """Returns the command line that `read_options` reads as these options."""
    values = {name: getattr(options, option.field or name) for name, option in _OPTIONS.items()}
    flags = [f"--{name}={value}" for name, value in values.items() if value is not None]
    return [*flags, *(f"--{name}" for name in _SWITCHES if getattr(options, name)), *options.arguments]


def read_positional(words: Sequence[str], environment: Mapping[str, str]) -> LaunchOptions:
    """Reads the 1, 2, 6 or 9 positional arguments of msrun_launcher.sh.

    Args:
        words: The script or command, then the values of `names` below.
        environment: Its MF_LOG_SUFFIX is appended to the folder of the logs.

    Raises:
        UserError: Another number of arguments, impossible values, a script that does not exist.
    """
    names = {
        1: (),
        2: ("nproc",),
        6: ("nproc", "master_port", "log_dir", "join", "cluster_time_out"),
        9: (
            "nproc", "local_worker_num", "master_addr", "master_port", "node_rank", "log_dir", "join",
            "cluster_time_out",
        ),
    }  # fmt: skip
    if len(words) not in names:
        rule = "takes 1, 2, 6 or 9 arguments"
        fix = (
            'write bash scripts/msrun_launcher.sh "run_trainer.py --config FILE" [WORKER_NUM], or with 6: "..." '
            'WORKER_NUM MASTER_PORT LOG_DIR JOIN CLUSTER_TIME_OUT, or with 9: "..." WORKER_NUM LOCAL_WORKER '
            "MASTER_ADDR MASTER_PORT NODE_RANK LOG_DIR JOIN CLUSTER_TIME_OUT; the first argument in quotes"
        )
        raise UserError(rule, where="msrun_launcher.sh", key="arguments", value=len(words), fix=fix)
    order, *strings = words
    script, arguments = split_order(order)
    flags, others = split_options(arguments)  # options that only this launcher has, such as --hang_timeout
    options = LaunchOptions(join=False, script=script, arguments=tuple(others))
    options = _with_values(options, flags, prefix="flag --")
    options = _with_values(options, dict(zip(names[len(words)], strings, strict=True)), prefix="msrun_launcher.sh: ")
    if suffix := environment.get("MF_LOG_SUFFIX", ""):
        options = replace(options, log_dir=options.log_dir.with_name(f"{options.log_dir.name}_{suffix}"))
    return options


def split_order(order: str) -> tuple[Path | None, list[str]]:
    """Splits an EXECUTE_ORDER into its Python file and arguments; it is quoted as for a shell, but no shell runs it."""
    try:
        words = shlex.split(order)
    except ValueError as error:
        rule = f"cannot be split into words: {str(error).lower()}"
        fix = "close every quote"
        raise UserError(rule, where="msrun_launcher.sh", key="EXECUTE_ORDER", value=order, fix=fix) from None
    if words and words[0] in ("python", "python3"):
        words = words[1:]
    if not words:
        fix = 'write "run_trainer.py --config configs/quickstart.yaml"'
        raise UserError("is empty", where="msrun_launcher.sh", key="EXECUTE_ORDER", fix=fix)
    return find_script(words[0]), words[1:]
