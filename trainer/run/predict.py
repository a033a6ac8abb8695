"""run_mode predict: prompts in, continuations out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.checkpoint.adapters import load_initial_weights
from trainer.config.checks.parallel import resolve_for_job
from trainer.data import ChatTemplate, load_chat_template, load_tokenizer
from trainer.data.source.records import Record
from trainer.data.source.samples import prompt_messages
from trainer.device.stop_signals import StopSignals
from trainer.errors import EXIT_SIGTERM, UserError
from trainer.launch import heartbeat
from trainer.monitors.files import make_folder, write_failure
from trainer.parallel.world import SINGLE_PROCESS
from trainer.run.generation import (
    context_length,
    decoded,
    encode_chat,
    encode_prompt,
    end_ids,
    open_generator,
    print_text,
    sampling_of,
)
from trainer.run.prepare import local_shard_specs, prepare_run

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Tokenizer
    from trainer.models.generate import Generator
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.world import World
    from trainer.run.generation import ModelReplica


class _Stopped(Exception):
    """A signal arrived before everything was predicted."""


class Prompt(NamedTuple):
    """A prompt as it was given, and what the model is to continue."""

    shown: str
    record: dict[str, Any]  # how predictions.jsonl names it
    messages: list[dict[str, Any]] | None  # a conversation, to be rendered with the chat template; None: `shown` itself
    tools: list[Any] | None
    where: str


def read_prompts(config: Config) -> list[Prompt]:
    """The prompts of `predict_data`: strings, or the contents of one file.

    A file whose name ends with .jsonl holds a JSON object a line, with its prompt under `prompt` or `text`, or with
    `chat` a conversation under `messages`; any other one a prompt a line.

    Raises:
        UserError: The file holds no prompt, cannot be read, or a line of it is not as above.
    """
    given = config.predict_data
    where = config.source.where("predict_data")
    if isinstance(given, str):
        texts = [given]
    else:
        texts = list(given or ())
    if len(texts) != 1 or not _is_file(texts[0]):
        return [_prompt(config, text, where) for text in texts]
    path = texts[0]
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the file of prompts cannot be read as UTF-8 text ({error})",
            where=where, key="predict_data", value=path, fix="give a text file with one prompt a line",
        ) from error  # fmt: skip
    is_json = path.endswith(".jsonl")
    prompts = [
        _prompt_of_record(config, line, f"{path}:{number}") if is_json else _prompt(config, line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        fix = "write one prompt a line"
        if is_json:
            fix = 'write {"prompt": "..."} on a line'
        raise UserError("the file holds no prompt", where=where, key="predict_data", value=path, fix=fix)
    return prompts


def _prompt(config: Config, text: str, where: str) -> Prompt:
    messages = None
    if config.chat:
        messages = [{"role": "user", "content": text}]
    return Prompt(text, {"prompt": text}, messages, None, where)


def _prompt_of_record(config: Config, line: str, where: str) -> Prompt:
    """The prompt of one line of a .jsonl file."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        for name in ("prompt", "text"):
            if name in record and isinstance(record[name], str):
                return _prompt(config, record[name], where)
        if "messages" in record and config.chat:
            messages, tools = prompt_messages(Record(record, where, len(line)))
            given = {name: record[name] for name in ("messages", "tools") if name in record}
            return Prompt(str(messages[-1]["content"] or ""), given, messages, tools, where)
        if "messages" in record:
            rule = "a prompt of messages is rendered with the chat template"
            fix = "add --chat"
            raise UserError(rule, where=where, key="predict_data", value=shortened(line), fix=fix)
    rule = "a line of a .jsonl file of prompts is a JSON object with a text under prompt (or text)"
    fix = "write "
    if isinstance(record, dict) and not {"prompt", "text"}.isdisjoint(record):
        fix = "write it as a string, as in "
    fix += '{"prompt": "Once upon a time"}'
    raise UserError(rule, where=where, key="predict_data", value=shortened(line), fix=fix)


def predict(config: Config, world: World, device: str) -> int:
    """Continues every prompt; text appears as it is made, and all of it lands in `output_dir`/predictions.jsonl.

    Several ranks share the batches of prompts; rank 0 shows and writes them all when all are done. A signal ends it
    after the next token, with its exit code; predictions.jsonl of an earlier run stays then.

    Raises:
        UserError: A prompt is empty or too long, or the weights do not fit.
        RunError: The predictions cannot be written.
    """
    with StopSignals() as stop:
        try:
            _predict(config, functools.partial(_asked_to_stop, stop), world, device)
        except _Stopped:
            name = "a signal to another rank"
            if stop.received:
                name = stop.received.name
            print(f"stopped by {name}", file=sys.stderr)
            return stop.exit_code or EXIT_SIGTERM
    return stop.exit_code


def _asked_to_stop(stop: StopSignals) -> bool:
    heartbeat.beat(0)  # asked after each token: a prediction may be long
    return bool(stop)


class _Opened(NamedTuple):
    """Prompts in tokens, the most new ones of each, and the model."""

    encoded: list[list[int]]
    limits: list[int]
    tokenizer: Tokenizer
    generator: Generator
    communicator: Communicator
    copy: ModelReplica


def _open(config: Config, prompts: Sequence[Prompt], world: World, device: str, makes_folder: bool) -> _Opened:
    tokenizer = load_tokenizer(config)
    template = None
    if config.chat:
        template = load_chat_template(config, "train_dataset", tokenizer)
    encoded = [_encode(config, tokenizer, template, prompt) for prompt in prompts]
    limits = [_most_new_tokens(config, prompt, len(ids)) for prompt, ids in zip(prompts, encoded, strict=True)]

    def tell(note: str) -> None:
        if world.rank == 0:
            print(f"note: {note}", file=sys.stderr)

    for note in template.notes if template else ():
        tell(note)
    weights = load_initial_weights(config, tell, parts=local_shard_specs(config, world), world=world)
    if makes_folder:
        make_folder(Path(config.output_dir).expanduser(), config.source.where("output_dir"))
    ends = end_ids(config, tokenizer, template)
    return _Opened(encoded, limits, tokenizer, *open_generator(config, weights, ends, world, device))


def continue_texts(config: Config, texts: Sequence[str]) -> list[str]:
    """What the model adds to each prompt, for notebooks: nothing is printed but notes, and nothing is written.

    Raises:
        UserError: As of `predict`.
        KeyboardInterrupt: SIGINT or SIGTERM came.
    """
    prepared = prepare_run(resolve_for_job(config, SINGLE_PROCESS))
    config = prepared.config
    prompts = [_prompt(prepared.config, text, "") for text in texts]
    found = ["" for _ in texts]
    with StopSignals() as stop:
        opened = _open(config, prompts, SINGLE_PROCESS, prepared.plan.device, makes_folder=False)
        sampling = sampling_of(config)
        size = config.predict_batch_size or config.decoder.batch_size
        for first in range(0, len(prompts), size):
            part = slice(first, first + size)
            steps = opened.generator.stream(opened.encoded[part], opened.limits[part], sampling, first)
            new = decoded(steps, len(opened.encoded[part]), opened.tokenizer, opened.generator)
            for pieces in new:
                if stop:
                    raise KeyboardInterrupt
                for row, piece in enumerate(pieces, start=first):
                    found[row] += piece
    return found


def _predict(config: Config, stop: Callable[[], bool], world: World, device: str) -> None:
    prompts = read_prompts(config)
    folder = Path(config.output_dir).expanduser()
    encoded, limits, tokenizer, generator, communicator, copy = _open(config, prompts, world, device, makes_folder=True)
    sampling = sampling_of(config)
    size = config.predict_batch_size or config.decoder.batch_size

    def until_stopped(steps: Iterable[Sequence[int | None]]) -> Iterator[Sequence[int | None]]:
        for tokens in steps:
            # Ranks that divide a model stop together: one alone would leave the others waiting.
            if copy.any(stop()):
                raise _Stopped
            yield tokens

    def continued(first: int, show: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """One batch of prompts."""
        part = slice(first, first + size)
        steps = until_stopped(generator.stream(encoded[part], limits[part], sampling, first))
        new = decoded(steps, len(encoded[part]), tokenizer, generator)
        numbers = [f"[{number + 1}/{len(prompts)}]" for number in range(len(prompts))[part]]
        texts = _show(prompts[part], numbers, new, show)
        yield from ({**prompt.record, "text": text} for prompt, text in zip(prompts[part], texts, strict=True))

    batches = range(0, len(prompts), size)
    if world.size > 1:
        _predict_together(batches, continued, communicator, copy, folder)
        return
    with write_records(folder / "predictions.jsonl") as record:
        for first in batches:
            for found in continued(first, print_text):
                record(found)


def _predict_together(
    batches: Sequence[int],
    continued: Callable[[int, Callable[[str], None]], Iterator[dict[str, str]]],
    communicator: Communicator,
    copy: ModelReplica,
    folder: Path,
) -> None:
    """Each of n copies of the model continues every n-th batch; rank 0 shows and writes them in the order of the
    prompts."""
    done: list[tuple[int, str, list[dict[str, str]]]] | None = []
    try:
        for first in batches[copy.number :: copy.copies]:
            shown: list[str] = []
            found = list(continued(first, shown.append))
            if copy.is_first:  # its ranks all have the same tokens
                done.append((first, "".join(shown), found))
    except _Stopped:
        done = None  # the other ranks wait in the gather
    every = [json.loads(part) for part in communicator.gather_bytes(json.dumps(done).encode())]
    if None in every:
        raise _Stopped
    if communicator.rank > 0:
        return
    with write_records(folder / "predictions.jsonl") as record:
        for _, shown, found in sorted(itertools.chain.from_iterable(every)):
            print_text(shown)
            for one in found:
                record(one)


@contextlib.contextmanager
def write_records(path: Path) -> Iterator[Callable[[dict], None]]:
    """Takes records for a file of JSON lines, which replaces an older one when all of them are written."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        # A prompt that was no UTF-8 holds lone surrogates; with a backslash they are JSON again.
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace", buffering=1) as file:
            yield lambda record: print(json.dumps(record, ensure_ascii=False), file=file)
        os.replace(unfinished, path)
    except BrokenPipeError:
        raise  # the reader of the console went away
    except OSError as error:
        raise write_failure(path, error) from error


def _show(
    prompts: Sequence[Prompt], numbers: Sequence[str], new: Iterable[Sequence[str]], write: Callable[[str], None]
) -> list[str]:
    """The texts of a batch, each written under a heading with its prompt; a run's only prompt has no heading.

    A batch of one is written token by token, a larger one when it is done. An answer begins on a line of its own.
    """
    texts = ["" for _ in prompts]
    headings = [f"{number} {shortened(prompt.shown)!r}\n" for number, prompt in zip(numbers, prompts, strict=True)]
    if numbers == ["[1/1]"]:
        headings = [""]
    starts = [
        f"{heading}{prompt.shown}{'' if prompt.messages is None else chr(10)}"
        for heading, prompt in zip(headings, prompts, strict=True)
    ]
    alone = len(prompts) == 1
    if alone:
        write(starts[0])
    for pieces in new:
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        if alone:
            write(pieces[0])
    write("\n\n" if alone else "".join(f"{start}{text}\n\n" for start, text in zip(starts, texts, strict=True)))
    return texts


def shortened(text: str) -> str:
    return text[:40] + ("..." if len(text) > 40 else "")


def _encode(config: Config, tokenizer: Tokenizer, template: ChatTemplate | None, prompt: Prompt) -> list[int]:
    try:
        if template is None:
            return encode_prompt(config, tokenizer, prompt.shown, with_bos=True)
        return encode_chat(config, tokenizer, template, prompt.messages or (), prompt.tools, prompt.where)
    except UserError as error:
        raise error.with_location(error.where or prompt.where, error.key or "predict_data") from None


def _most_new_tokens(config: Config, prompt: Prompt, length: int) -> int:
    """How many tokens may follow a prompt of `length` tokens."""
    limit = context_length(config)
    if length >= limit:
        fix = "shorten the prompt or raise model.model_config.max_decode_length"
        rule = f"a prompt of {length} tokens leaves no room for an answer in {limit}"
        raise UserError(rule, where=prompt.where, key="predict_data", value=shortened(prompt.shown), fix=fix)
    return min(limit - length, config.decoder.max_new_tokens or limit)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # a long text or one with a NUL is no path
        return False
