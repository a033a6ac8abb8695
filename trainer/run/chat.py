"""Run mode chat: a conversation with a model, on a terminal or from a pipe.

On a terminal, answers are streamed, commands begin with a slash, Ctrl-C stops an answer, and Ctrl-D and ``exit`` leave.
From a pipe, each line is a message or a command, and standard output has nothing but the answers.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainer.checkpoint.adapters import PART
from trainer.checkpoint.hugging_face import chat_template_of
from trainer.checkpoint.store import find_checkpoint, missing_checkpoint, resolve_best_link
from trainer.config import Override, load_config, parse_config
from trainer.data import load_tokenizer
from trainer.device.stop_signals import StopSignals
from trainer.errors import EXIT_OK, EXIT_SIGTERM, UserError
from trainer.input_files import user_path
from trainer.run.generation import (
    context_length,
    decode_steps,
    encode_chat,
    find_eos_ids,
    make_sampling,
    open_generator,
    print_text,
)
from trainer.run.prepare import load_run_weights, print_note
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
    """The messages of a conversation.

    Attributes:
        system: The system message; empty without one.
        turns: Messages of the user and the assistant in turn.
        dropped: The number of oldest turns that the model no longer sees.
    """

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    dropped: int = 0

    def messages(self, first: int = 0) -> list[dict[str, str]]:
        """Returns the system message and the turns from number `first` on."""
        if self.system:
            return [{"role": "system", "content": self.system}, *self.turns[first:]]
        return self.turns[first:]

    def add(self, role: str, content: str) -> None:
        """Adds a turn."""
        self.turns.append({"role": role, "content": content})

    def fit(self, encode: Callable[[list[dict[str, str]]], list[int]], max_tokens: int) -> list[int]:
        """Drops the oldest questions with their answers until the rest has at most `max_tokens`; returns its tokens.

        The last question stays, however long it is.
        """
        while True:
            ids = encode(self.messages(self.dropped))
            if len(ids) <= max_tokens or self.dropped + 2 >= len(self.turns):
                return ids
            self.dropped += 2


def parse_command(line: str) -> Command | None:
    """Returns the command of a line; None for a message.

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


def checkpoint_config(
    name: str, config: str | None, overrides: Sequence[Override], run_mode: Literal["chat", "eval"]
) -> Config:
    """Returns the configuration of a chat with the model of a checkpoint, or of its evaluation.

    Args:
        name: A checkpoint of this trainer, a folder of checkpoints, the output folder that has them, a model folder of
            Hugging Face, or a safetensors file.
        config: The YAML file; None takes the config.yaml of the run that saved the checkpoint.
        overrides: Flags. temperature, top_k and top_p turn sampling on.

    Raises:
        UserError: There is no such checkpoint, there is no configuration for it, or the configuration is wrong.
    """
    where = "argument CHECKPOINT"
    path = resolve_best_link(user_path(name, where))
    if not path.exists():
        raise missing_checkpoint(path, where)
    key = "load_checkpoint"
    is_model_folder = (path / "config.json").is_file()
    if is_model_folder and config is None and not ((path / MARKER).exists() and find_run_config(path)):
        key = "pretrained_model_dir"
    elif path.is_dir() and not any(path.glob("model*.safetensors")):
        try:
            path = find_checkpoint(path)
        except UserError as error:
            raise error.with_location(where, "CHECKPOINT") from None
        if (path / f"{PART}.safetensors").exists():
            key = "adapter_id"
    user_keys = {override.key for override in overrides}
    mode_overrides = [
        Override("use_parallel", "false", run_mode),
        Override(key, str(path), where),
        Override("run_mode", run_mode, run_mode),
    ]
    if user_keys & _SAMPLING_RULES and f"{_MODEL}.do_sample" not in user_keys:
        mode_overrides.append(Override(f"{_MODEL}.do_sample", "true", "chat"))
    if key == "pretrained_model_dir":
        return parse_config(name, f"run_mode: {run_mode}\n", [*mode_overrides, *overrides])
    config_path = config or find_run_config(path)
    if config_path is None:
        fix = "give the YAML file of its training: --config FILE"
        raise UserError("there is no config.yaml of a run beside the checkpoint", where=where, value=name, fix=fix)
    return load_config(str(config_path), [*mode_overrides, *overrides])


def find_run_config(checkpoint: Path) -> Path | None:
    """Returns the config.yaml in the output folder above a checkpoint; None if there is none."""
    folder = checkpoint.absolute()
    candidates = (each / "config.yaml" for each in (folder, *folder.parents[:2]))
    return next((path for path in candidates if path.is_file()), None)


def chat(config: Config, world: World, device: str) -> int:
    """Answers messages from standard input until its end or ``exit``; returns the exit code.

    Raises:
        UserError: The tokenizer, the template or the weights do not fit, or a line of a pipe cannot be answered.
        RunError: The model's output is not finite.
    """
    context = context_length(config)
    tokenizer = load_tokenizer(config)
    template = chat_template_of(config, tokenizer)
    for note in template.notes:
        print_note(note)
    weights = load_run_weights(config, world, print_note)
    with StopSignals() as stop:
        # An exception inside MindSpore's import would end in a crash: a signal there waits until it is over.
        generator, _, _ = open_generator(config, weights, find_eos_ids(config, tokenizer, template), world, device)
    if stop.received:
        print(f"stopped by {stop.name}", file=sys.stderr)
        return stop.exit_code
    encode = functools.partial(encode_chat, config, tokenizer, template)
    session = _ChatSession(tokenizer, encode, generator, make_sampling(config), context, config.decoder.max_new_tokens)
    if not sys.stdin.isatty():
        return _chat_from_pipe(session)
    print(f"Chat with {config.load_checkpoint} ({template.name}, {context} tokens). /help lists the commands,"
          " exit or Ctrl-D leaves.", file=sys.stderr)
    return _chat_on_terminal(session)


def _chat_from_pipe(session: _ChatSession) -> int:
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A line that is not UTF-8 becomes an error with its line number when it is encoded.
        sys.stdin.reconfigure(errors="surrogateescape")
    for number, line in enumerate(sys.stdin, start=1):
        try:
            stopped = session.take(line.rstrip("\n"))
        except UserError as error:
            raise error.with_location(f"standard input:{number}") from None
        if stopped:
            print(f"stopped by {signal.Signals(stopped - 128).name}", file=sys.stderr)
            return stopped
        if session.is_over:
            word = line.strip()
            print_note(f"{word} in line {number} ends the conversation; with a space before it, it is a message")
            break
    return EXIT_OK


def _chat_on_terminal(session: _ChatSession) -> int:
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
            stopped = session.take(line)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        if stopped == EXIT_SIGTERM or session.is_over:
            return stopped


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Lets signals interrupt this thread while it waits for input.

    The thread may block them, so that another thread receives them, which does not end the wait. And MindSpore may have
    replaced Python's handlers.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.getsignal(number))
    before = signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _ChatSession:
    """A conversation with a model.

    Attributes:
        context: The largest number of tokens of the conversation with the answer.
        answers: The number of answers so far; each has its own random stream.
    """

    tokenizer: Tokenizer
    encode: Callable[[list[dict[str, str]]], list[int]]
    generator: Generator
    sampling: Sampling
    context: int
    max_new_tokens: int | None
    conversation: Conversation = field(default_factory=Conversation)
    answers: int = 0
    is_over: bool = False

    def take(self, line: str) -> int:
        """Carries out a command or answers a message; returns the exit code of the signal that stopped the answer.

        Raises:
            UserError: There is no such command, or no answer to this message.
        """
        command = parse_command(line)
        if command is not None:
            self.execute(command)
        elif line.strip():
            return self.reply(line.strip())
        return EXIT_OK

    def reply(self, message: str) -> int:
        """Prints the answer to a message as it is generated; returns the exit code of a signal that stopped it."""
        conversation = self.conversation
        answer = ""
        dropped = conversation.dropped
        conversation.add("user", message)
        try:
            ids = self.prompt()
        except UserError:
            conversation.turns.pop()
            conversation.dropped = dropped
            raise
        free_tokens = self.context - len(ids)
        tokens: list[int | None] = []

        def steps() -> Iterator[list[int | None]]:
            limit = min(free_tokens, self.max_new_tokens or free_tokens)
            for step in self.generator.stream([ids], [limit], self.sampling, self.answers):
                tokens.append(step[0])
                yield step

        with StopSignals() as stop:
            for (text,) in decode_steps(steps(), 1, self.tokenizer, self.generator):
                print_text(text)
                answer += text
                if stop:
                    break
        self.answers += 1
        print_text("\n")
        if len(tokens) == free_tokens and tokens[-1] not in self.generator.eos_ids:
            print_note(f"the answer was cut: the conversation has {self.context} tokens; raise max_decode_length")
        if answer.strip():
            conversation.add("assistant", answer)
        else:
            conversation.turns.pop()
            print_note("the answer is empty; the message was dropped from the conversation")
        return stop.exit_code

    def prompt(self) -> list[int]:
        """Returns the tokens that the model continues: the newest turns that leave tokens for an answer.

        Raises:
            UserError: The last message alone is too long.
        """
        conversation = self.conversation
        dropped_before = conversation.dropped
        answer_tokens = min(self.max_new_tokens or self.context // 4, self.context // 2)
        ids = conversation.fit(self.encode, self.context - answer_tokens)
        if len(ids) >= self.context:
            rule = f"the message has {len(ids)} tokens with its template, which leaves no room in {self.context}"
            raise UserError(rule, fix="shorten it, or raise model.model_config.max_decode_length")
        if questions := (conversation.dropped - dropped_before) // 2:
            dropped_text = "the oldest question and its answer were dropped"
            if questions > 1:
                dropped_text = f"the {questions} oldest questions and their answers were dropped"
            print_note(f"the conversation exceeds {self.context} tokens (max_decode_length): {dropped_text}")
        return ids

    def execute(self, command: Command) -> None:
        """Carries out a command."""
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
        raise UserError("the temperature must be a number of at least 0", value=text, fix="write /temperature 0.7")
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
        rule = f"the file cannot be written: {error.strerror}"
        raise UserError(rule, value=str(path), fix="name another file") from None
    print_note(f"the conversation was appended to {path}")
