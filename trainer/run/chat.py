"""run_mode chat: a conversation with a model, on a terminal or from a pipe.

On a terminal answers are streamed, commands begin with a slash, Ctrl-C stops an answer, and Ctrl-D and ``exit`` leave.
From a pipe each line is a message or a command, and standard output has the answers alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainer.checkpoint import adapters
from trainer.checkpoint.store import find_checkpoint, resolve_best_link
from trainer.config import Override, load_config, parse_config
from trainer.data import load_chat_template, load_tokenizer
from trainer.device.stop_signals import StopSignals
from trainer.errors import EXIT_OK, EXIT_SIGTERM, UserError
from trainer.input_files import user_path
from trainer.run.generation import (
    context_length,
    decoded,
    encode_chat,
    end_ids,
    open_generator,
    print_text,
    sampling_of,
)
from trainer.storage.marker import MARKER

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Tokenizer
    from trainer.models.generate import Generator, Sampling
    from trainer.parallel.world import World

COMMANDS = {
    "/reset": "forget the conversation, but not the system message",
    "/system TEXT": "set the system message; without TEXT remove it",
    "/temperature X": "sample with this temperature; 0: always the likeliest token",
    "/save FILE": "append the conversation to a file of JSON lines, in the form of training data",
    "/help": "show this",
    "/exit": "leave; exit, quit and /quit do the same",
}
_LEAVING = ("/exit", "/quit", "exit", "quit")
_PROMPT = ">>> "
_MODEL = "model.model_config"
_SAMPLING_RULES = {f"{_MODEL}.temperature", f"{_MODEL}.top_k", f"{_MODEL}.top_p"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Command(NamedTuple):
    """A line that begins with a slash, or says ``exit`` or ``quit``."""

    name: str  # with the slash
    argument: str


@dataclass
class Conversation:
    """What was said.

    Attributes:
        turns: Messages of the user and the assistant in turn.
        forgotten: How many of the first turns the model no longer sees.
    """

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    forgotten: int = 0

    def messages(self, first: int = 0) -> list[dict[str, str]]:
        """The system message and the turns from number `first`."""
        if self.system:
            system = [{"role": "system", "content": self.system}]
        else:
            system = []
        return [*system, *self.turns[first:]]

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": content})

    def fit(self, encode: Callable[[list[dict[str, str]]], list[int]], most_tokens: int) -> list[int]:
        """Forgets the oldest questions with their answers until the rest has at most `most_tokens`; returns its tokens.

        The last question is never forgotten, however long it is.
        """
        while True:
            ids = encode(self.messages(self.forgotten))
            if len(ids) <= most_tokens or self.forgotten + 2 >= len(self.turns):
                return ids
            self.forgotten += 2


def parse_command(line: str) -> Command | None:
    """The command of a line; None for a message.

    Raises:
        UserError: There is no such command, or its argument is missing or superfluous.
    """
    if line.rstrip() in _LEAVING:
        return Command("/exit", "")
    if not line.startswith("/"):
        return None
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    forms = {form.partition(" ")[0]: form.partition(" ")[2] for form in COMMANDS}
    if name not in forms:
        fix = f"use one of {', '.join(forms)}; put a space before a message that begins with a slash"
        raise UserError(f"there is no command {name}", fix=fix)
    if argument and not forms[name]:
        raise UserError(f"{name} takes no argument", value=argument, fix=f"write {name} alone")
    if forms[name] and not argument and name != "/system":
        raise UserError(f"{name} needs an argument", fix=f"write {name} {forms[name]}")
    return Command(name, argument)


def chat_config(name: str, config: str | None, overrides: Sequence[Override]) -> Config:
    """The configuration of a chat with a model.

    Args:
        name: A checkpoint of this trainer, a folder of checkpoints, the output folder that has them, a model folder of
            Hugging Face, or a safetensors file.
        config: The YAML file; None takes the config.yaml of the run that left the checkpoint.
        overrides: Flags. One of the sampling rules turns sampling on.

    Raises:
        UserError: There is no such checkpoint, or no configuration for it; or as `load_config`.
    """
    where = "argument CHECKPOINT"
    path = resolve_best_link(user_path(name, where))
    if not path.exists():
        raise UserError("there is no such checkpoint", where=where, value=name, fix="check the path")
    key = "load_checkpoint"
    is_model_folder = (path / "config.json").is_file()
    if is_model_folder and config is None and not ((path / MARKER).exists() and config_beside(path)):
        key = "pretrained_model_dir"
    elif path.is_dir() and not any(path.glob("model*.safetensors")):
        try:
            path = find_checkpoint(path)
        except UserError as error:
            raise error.with_location(where, "CHECKPOINT") from None
        if (path / f"{adapters.PART}.safetensors").exists():
            key = "adapter_id"
    asked = {override.key for override in overrides}
    given = [Override("use_parallel", "False", "chat"), Override(key, str(path), where)]
    given.append(Override("run_mode", "chat", "chat"))
    if asked & _SAMPLING_RULES and f"{_MODEL}.do_sample" not in asked:
        given.append(Override(f"{_MODEL}.do_sample", "True", "chat"))
    if key == "pretrained_model_dir":
        return parse_config(name, "run_mode: chat\n", [*given, *overrides])
    beside = config or config_beside(path)
    if beside is None:
        fix = "give the YAML file of its training: --config FILE"
        raise UserError("there is no config.yaml of a run beside the checkpoint", where=where, value=name, fix=fix)
    return load_config(str(beside), [*given, *overrides])


def config_beside(checkpoint: Path) -> Path | None:
    """The config.yaml of the run that left a checkpoint, which is in the output folder above it."""
    folder = checkpoint.absolute()
    candidates = (each / "config.yaml" for each in (folder, *folder.parents[:2]))
    return next((path for path in candidates if path.is_file()), None)


def chat(config: Config, world: World, device: str) -> int:
    """Answers messages from standard input until its end or ``exit``; returns the exit code.

    Raises:
        UserError: The tokenizer, the template or the weights do not fit; from a pipe also where a line cannot be
            answered.
        RunError: The model's output is not finite.
    """
    context = context_length(config)
    tokenizer = load_tokenizer(config)
    template = load_chat_template(config, "train_dataset", tokenizer)
    for note in template.notes:
        _tell(note)
    weights = adapters.load_initial_weights(config, _tell)
    with StopSignals() as stop:
        # An exception inside MindSpore's import would end in a crash: a signal there waits until it is over.
        generator, *_ = open_generator(config, weights, end_ids(config, tokenizer, template), world, device)
    if stop.received:
        print(f"stopped by {stop.received.name}", file=sys.stderr)
        return stop.exit_code
    encode = functools.partial(encode_chat, config, tokenizer, template)
    talk = _Chat(tokenizer, encode, generator, sampling_of(config), context, config.decoder.max_new_tokens)
    if not sys.stdin.isatty():
        return _from_pipe(talk)
    print(f"Chat with {config.load_checkpoint} ({template.name}, {context} tokens). /help lists the commands,"
          " exit or Ctrl-D leaves.", file=sys.stderr)
    return _on_terminal(talk)


def _from_pipe(talk: _Chat) -> int:
    # A line that is not UTF-8 is an error of its message, not of reading.
    sys.stdin.reconfigure(errors="surrogateescape")
    for number, line in enumerate(sys.stdin, start=1):
        try:
            stopped = talk.take(line.rstrip("\n"))
        except UserError as error:
            raise error.with_location(f"standard input:{number}") from None
        if stopped:
            print(f"stopped by {signal.Signals(stopped - 128).name}", file=sys.stderr)
            return stopped
        if talk.is_over:
            word = line.strip()
            _tell(f"{word} in line {number} ends the conversation; with a space before it, it is a message")
            break
    return EXIT_OK


def _on_terminal(talk: _Chat) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and remembers them)
    while True:
        try:
            with _signals_interrupt():
                line = input(_PROMPT if sys.stdout.isatty() else "")
        except EOFError:
            print()
            return EXIT_OK
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)", file=sys.stderr)
            continue
        try:
            stopped = talk.take(line)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        if stopped == EXIT_SIGTERM or talk.is_over:
            return stopped


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Lets signals interrupt this thread while it waits for input.

    They may be blocked in it and handed on by another thread, which does not end the waiting; and MindSpore may have
    put handlers of its own in the place of Python's.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.getsignal(number))
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Chat:
    """A conversation with its model."""

    tokenizer: Tokenizer
    encode: Callable[[list[dict[str, str]]], list[int]]
    generator: Generator
    sampling: Sampling
    context: int  # tokens of the conversation with the answer
    max_new_tokens: int | None
    conversation: Conversation = field(default_factory=Conversation)
    answers: int = 0  # each has its own random stream
    is_over: bool = False

    def take(self, line: str) -> int:
        """Carries out a command or answers a message; returns the exit code of the signal that stopped the answer.

        Raises:
            UserError: There is no such command, or no answer to this message.
        """
        command = parse_command(line)
        if command is not None:
            self.obey(command)
        elif line.strip():
            return self.reply(line.strip())
        return EXIT_OK

    def reply(self, message: str) -> int:
        """Streams the answer to a message."""
        conversation = self.conversation
        said = ""
        forgotten = conversation.forgotten
        conversation.add("user", message)
        try:
            ids = self.prompt()
        except UserError:
            conversation.turns.pop()
            conversation.forgotten = forgotten
            raise
        room = self.context - len(ids)
        tokens = []

        def steps() -> Iterator[list[int | None]]:
            most = min(room, self.max_new_tokens or room)
            for step in self.generator.stream([ids], [most], self.sampling, self.answers):
                tokens.append(step[0])
                yield step

        with StopSignals() as stop:
            for (text,) in decoded(steps(), 1, self.tokenizer, self.generator):
                print_text(text)
                said += text
                if stop:
                    break
        self.answers += 1
        print_text("\n")
        if len(tokens) == room and tokens[-1] not in self.generator.eos_ids:
            _tell(f"the answer is cut: the conversation has {self.context} tokens, as many as max_decode_length allows")
        if said.strip():
            conversation.add("assistant", said)
        else:
            conversation.turns.pop()
            _tell("the answer is empty, so the message is forgotten")
        return stop.exit_code

    def prompt(self) -> list[int]:
        """The tokens that the model continues: as much of the conversation as leaves room for an answer."""
        conversation = self.conversation
        before = self.conversation.forgotten
        room = min(self.max_new_tokens or self.context // 4, self.context // 2)
        ids = conversation.fit(self.encode, self.context - room)
        if len(ids) >= self.context:
            rule = f"the message has {len(ids)} tokens with its template, which leaves no room in {self.context}"
            raise UserError(rule, fix="shorten it, or raise model.model_config.max_decode_length")
        if conversation.forgotten > before:
            pairs = (conversation.forgotten - before) // 2
            if pairs == 1:
                what = "question with its answer no longer fits"
            else:
                what = f"{pairs} questions no longer fit"
            _tell(f"the oldest {what} into {self.context} tokens: the model does not see them any more")
        return ids

    def obey(self, command: Command) -> None:
        name, argument = command
        if name == "/exit":
            self.is_over = True
        elif name == "/reset":
            self.conversation = Conversation(self.conversation.system)
        elif name == "/system":
            self.conversation.system = argument
        elif name == "/temperature":
            self.sampling = _with_temperature(self.sampling, argument)
        elif name == "/save":
            _save(self.conversation, user_path(argument, "/save"))
        else:
            width = max(map(len, COMMANDS))
            lines = [f"{form:<{width}}  {text}" for form, text in COMMANDS.items()]
            print("\n".join([*lines, "Ctrl-C stops an answer, Ctrl-D leaves."]), file=sys.stderr)


def _with_temperature(sampling: Sampling, text: str) -> Sampling:
    try:
        temperature = float(text)
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature < math.inf:
        raise UserError("the temperature must be a number from 0", value=text, fix="write /temperature 0.7")
    if temperature == 0:
        return replace(sampling, do_sample=False)
    return replace(sampling, do_sample=True, temperature=temperature)


def _save(conversation: Conversation, path: Path) -> None:
    if not conversation.turns:
        raise UserError("there is no conversation yet", fix="write a message first")
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            print(json.dumps({"messages": conversation.messages()}, ensure_ascii=False), file=file)
    except OSError as error:
        raise UserError(f"it cannot be written: {error.strerror}", value=str(path), fix="name another file") from None
    _tell(f"the conversation is in {path}")


def _tell(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
