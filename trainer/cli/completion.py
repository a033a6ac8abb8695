"""Completion of command lines in bash, zsh and fish: commands, flags, keys of the configuration, values, file names.

The script of a shell asks this program for candidates at each press of the tabulator key. Typer's own completion knows
nothing of the flags that are keys of the configuration.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from trainer.cli.flags import FLAGS
from trainer.errors import EXIT_OK, UserError

FILES = ":files"
"""Printed instead of candidates where the name of a file or folder belongs; the shell completes it."""
_PROGRAM = "run-trainer"
_PATHS = ("FILE", "DIR", "PATH", "CHECKPOINT", "RUN")  # in placeholders of values
_PATH_ENDINGS = ("dir", "path", "file", "files", "checkpoint", "folder")  # of keys
_VALUES = {
    "--schema": (), "--to": ("1.x", "2.0"), "--dtype": ("float32", "bfloat16", "float16"), "--audit": ("ascend",),
    "--dryrun": ("ascend",), "--device_target": ("CPU", "Ascend"), "--mode": ("0", "1"),
    "--parallel_fallback": ("explicit",),
}  # fmt: skip

_BASH = """\
_run_trainer() {
    local IFS=$'\\n' current="${COMP_WORDS[COMP_CWORD]}" lines
    lines=$(@PROGRAM@ complete -- "${COMP_WORDS[@]:1:COMP_CWORD-1}" "$current" 2>/dev/null | cut -f 1)
    if [ "$lines" = ":files" ]; then
        compopt -o filenames
        COMPREPLY=($(compgen -f -- "$current"))
    else
        COMPREPLY=($lines)
        case "${COMPREPLY[0]}" in *.) compopt -o nospace ;; esac
    fi
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}
complete -F _run_trainer @NAME@
"""
_ZSH = """\
#compdef @NAME@
_run_trainer() {
    local -a lines sections
    local line
    lines=("${(@f)$(@PROGRAM@ complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ "${lines[1]}" == ":files" ]]; then
        _files
        return
    fi
    for line in $lines; do
        line=${line%%$'\\t'*}
        if [[ "$line" == *. ]]; then
            compadd -S '' -- "$line"
        else
            compadd -- "$line"
        fi
    done
}
compdef _run_trainer @NAME@
"""
_FISH = """\
function __run_trainer_complete
    set -l before (commandline -opc)[2..-1]
    set -l current (commandline -ct)
    set -l lines (@PROGRAM@ complete -- $before "$current" 2>/dev/null)
    if test "$lines[1]" = ":files"
        __fish_complete_path "$current"
    else
        string join \\n -- $lines
    end
end
complete -c @NAME@ -f -a '(__run_trainer_complete)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


class Completion(NamedTuple):
    """A word that may stand at the cursor, and its meaning."""

    word: str
    text: str = ""


def completion_script(shell: str) -> str:
    """Returns the script that turns completion on in a shell.

    Raises:
        UserError: There is none for this shell.
    """
    if shell not in SCRIPTS:
        fix = f"write one of {', '.join(SCRIPTS)}"
        raise UserError("no completion for this shell", where="argument SHELL", value=shell, fix=fix)
    program = shlex.join([sys.executable, str(Path(__file__).resolve().parents[2] / "run_trainer.py")])
    return SCRIPTS[shell].replace("@PROGRAM@", program).replace("@NAME@", _PROGRAM)


def print_candidates(group: Any, words: Sequence[str]) -> int:
    """Prints the words that may stand at the cursor, one a line, or `FILES`.

    Args:
        group: Click's group of the commands.
        words: The words of the line without the program; the last one is being written.
    """
    if words[:1] == ["--"]:
        words = words[1:]
    for candidate in candidates(group, list(words) or [""]):
        print("\t".join(filter(None, candidate)))
    return EXIT_OK


def candidates(group: Any, words: Sequence[str]) -> list[Completion]:
    """Returns the words that may stand in place of the last of `words`; that of `FILES` for a file name."""
    *before, current = words
    commands = {name: command for name, command in group.commands.items() if not command.hidden}
    name = "train"
    if before and before[0] in commands:
        name = before[0]
    elif not before and not current.startswith("-"):
        short = [Completion(each, _first_sentence(command.help)) for each, command in commands.items()]
        return _matching(short, current)
    command = commands[name]
    flag, equals, written = current.partition("=")
    if equals and flag.startswith("--"):
        proposed = _values(command, flag)
        if proposed == [Completion(FILES)]:
            return []  # the shell would complete the flag, too
        return _matching([Completion(f"{flag}={word}", text) for word, text in proposed], current)
    if current.startswith("-"):
        return _matching(_options(command, current), current)
    if before and before[-1].startswith("--") and "=" not in before[-1] and not _is_switch(command, before[-1]):
        proposed = _values(command, before[-1])
        if proposed == [Completion(FILES)]:
            return proposed
        return _matching(proposed, current)
    if name == "completion":
        return _matching([Completion(shell) for shell in SCRIPTS], current)
    return [Completion(FILES)]


def _first_sentence(text: str | None) -> str:
    return (text or "").split("\n")[0].split(". ")[0].rstrip(".")


def _matching(proposed: Sequence[Completion], current: str) -> list[Completion]:
    return [candidate for candidate in proposed if candidate.word.startswith(current)]


def _takes_keys(command: Any) -> bool:
    """Returns whether the keys of the configuration are flags of a command."""
    return command.name == "launch" or any(option.name == "config" for option in command.params)


def _options(command: Any, current: str) -> list[Completion]:
    """Returns the flags of a command. Below a section, as in ``--optimizer.``, these are its keys."""
    section = current.lstrip("-").rpartition(".")[0]
    if not section:
        proposed = [Completion("--help", "Shows the help of the command")]
        for option in command.params:
            if option.param_type_name == "option":
                text = _first_sentence(option.help)
                proposed += [Completion(word, text) for word in option.opts if word.startswith("--")]
        if command.name == "launch":
            from trainer.launch.arguments import HELP

            proposed += [Completion(f"--{name}", _first_sentence(text)) for name, (_, text) in HELP.items()]
            proposed.append(Completion("--config", "The YAML file"))
        if _takes_keys(command):
            proposed += [Completion(f"--{flag.name}", _first_sentence(flag.help)) for flag in FLAGS]
            proposed += _keys("")
        return list({candidate.word: candidate for candidate in reversed(proposed)}.values())[::-1]
    if _takes_keys(command):
        return _keys(section)
    return []


def _keys(section: str) -> list[Completion]:
    """Returns the keys of a section as flags; a section in it ends with a dot."""
    from trainer.config.read.relocate import fields_at
    from trainer.config.schema.fields import fields_by_yaml_name, shape_of, support_of
    from trainer.config.schema.root import Config

    kinds: list[Any] = [Config]
    prefix = "--"
    if section:
        kinds = [kind for field in fields_at(section) for kind in shape_of(field).kinds]
        prefix = f"--{section}."
    proposed: dict[str, Completion] = {}
    for name, field in (item for kind in kinds for item in fields_by_yaml_name(kind).items()):
        word = f"{prefix}{name}"
        shape = shape_of(field)
        if shape.kinds:
            word += "."
        if shape.is_list:
            word += "0."
        if support_of(field)[0] == "supported":
            proposed.setdefault(word, Completion(word, _first_sentence(field.description)))
    return list(proposed.values())


def _option_of(command: Any, flag: str) -> Any:
    return next((option for option in command.params if flag in option.opts), None)


def _is_switch(command: Any, flag: str) -> bool:
    """Returns whether a flag takes no value, or may stand without one."""
    option = _option_of(command, flag)
    return flag in ("--help", "--force", "--elastic") or (option is not None and option.is_flag)


def _values(command: Any, flag: str) -> list[Completion]:
    """Returns the values of a flag, `FILES` for a path, or nothing if they are unknown."""
    from trainer.config.read.relocate import fields_at

    option = _option_of(command, flag)
    if flag in _VALUES:
        return [Completion(value) for value in _VALUES[flag]]
    if option is not None or flag == "--config":
        metavar = getattr(option, "metavar", None) or "FILE"
        return [Completion(FILES)] * any(word in metavar for word in _PATHS)
    known = next((each for each in FLAGS if flag == f"--{each.name}"), None)
    key = flag.removeprefix("--")
    if known is not None:
        key = known.key
    if words := dict.fromkeys(word for field in fields_at(key) for word in _literals(field.annotation)):
        return list(map(Completion, words))
    is_path = key.rpartition(".")[2].split("_")[-1] in _PATH_ENDINGS
    if is_path or (known is not None and any(word in known.metavar for word in _PATHS)):
        return [Completion(FILES)]
    return []


def _literals(annotation: Any) -> Iterator[str]:
    """Yields the words of an annotation: those of a Literal, and True and False."""
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from (str(value) for value in get_args(annotation))
    else:
        for part in get_args(annotation):
            yield from _literals(part)
