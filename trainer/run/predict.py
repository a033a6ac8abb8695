"""run_mode predict: prompts in, continuations out."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.adapters import starting_weights
from trainer.data import load_tokenizer
from trainer.errors import EXIT_SIGTERM, UserError
from trainer.monitors.files import make_folder, write_failure
from trainer.run.stop_signals import StopSignals

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Tokenizer
    from trainer.models.generate import Generator
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.world import World


class _Stopped(Exception):
    """A signal arrived before everything was predicted."""


def read_prompts(config: Config) -> list[str]:
    """The prompts of `predict_data`: strings, or the contents of one file.

    A file whose name ends with .jsonl holds a JSON object a line, with its prompt under `prompt` or `text`; any other
    one a prompt a line.

    Raises:
        UserError: The file holds no prompt, cannot be read, or a line of it is not as above.
    """
    given = config.predict_data
    texts = [given] if isinstance(given, str) else list(given or ())
    if len(texts) != 1 or not _is_file(texts[0]):
        return texts
    path, where = texts[0], config.source.where("predict_data")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the file of prompts cannot be read as UTF-8 text ({error})",
            where=where, key="predict_data", value=path, fix="give a text file with one prompt a line",
        ) from error  # fmt: skip
    is_json = path.endswith(".jsonl")
    prompts = [
        _prompt_of_record(line, f"{path}:{number}") if is_json else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        fix = 'write {"prompt": "..."} on a line' if is_json else "write one prompt a line"
        raise UserError("the file holds no prompt", where=where, key="predict_data", value=path, fix=fix)
    return prompts


def _prompt_of_record(line: str, where: str) -> str:
    """The prompt of one line of a .jsonl file."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict):
        for name in ("prompt", "text"):
            if name in record and isinstance(record[name], str):
                return record[name]
    raise UserError(
        "a line of a .jsonl file of prompts is a JSON object with a text under prompt (or text)",
        where=where, key="predict_data", value=_shortened(line), fix='write {"prompt": "Once upon a time"}',
    )  # fmt: skip


def _print_text(text: str) -> None:
    """Prints text as it comes; what the terminal's encoding lacks appears as an escape."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", flush=True)


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
            _predict(config, lambda: bool(stop), world, device)
        except _Stopped:
            name = stop.received.name if stop.received else "a signal to another rank"
            print(f"stopped by {name}", file=sys.stderr)
            return stop.exit_code or EXIT_SIGTERM
    return stop.exit_code


def _predict(config: Config, stop: Callable[[], bool], world: World, device: str) -> None:
    settings = config.decoder
    prompts, tokenizer = read_prompts(config), load_tokenizer(config)
    encoded = [_encode(config, tokenizer, prompt) for prompt in prompts]
    limits = [_most_new_tokens(config, prompt, len(ids)) for prompt, ids in zip(prompts, encoded, strict=True)]

    def tell(notice: str) -> None:
        if world.rank == 0:
            print(f"note: {notice}", file=sys.stderr)

    weights, folder = starting_weights(config, tell), Path(config.output_dir).expanduser()
    make_folder(folder, config.source.where("output_dir"))
    # From here on MindSpore is needed.
    from trainer.models.generate import Generator, Sampling
    from trainer.run.session import open_session

    session = open_session(config, weights, world, device)
    eos = settings.eos_token_id
    eos_ids = [tokenizer.eos_id, *([eos] if isinstance(eos, int) else eos or [])]
    generator = Generator(session.model, session.build_inputs, eos_ids)
    sampling = Sampling(
        do_sample=settings.do_sample,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        repetition_penalty=settings.repetition_penalty,
        seed=config.seed,
    )
    size = config.predict_batch_size or settings.batch_size

    def until_stopped(steps: Iterable[Sequence[int | None]]) -> Iterator[Sequence[int | None]]:
        for tokens in steps:
            if stop():
                raise _Stopped
            yield tokens

    def continued(first: int, show: Callable[[str], None]) -> Iterator[dict[str, str]]:
        """One batch of prompts."""
        part = slice(first, first + size)
        steps = until_stopped(generator.stream(encoded[part], limits[part], sampling, first))
        numbers = [f"[{number + 1}/{len(prompts)}]" for number in range(len(prompts))[part]]
        texts = _show(prompts[part], numbers, steps, tokenizer, generator, show)
        yield from ({"prompt": prompt, "text": text} for prompt, text in zip(prompts[part], texts, strict=True))

    batches = range(0, len(prompts), size)
    if world.size > 1:
        _predict_together(batches, continued, session.communicator, folder)
        return
    with write_records(folder / "predictions.jsonl") as record:
        for first in batches:
            for found in continued(first, _print_text):
                record(found)


def _predict_together(
    batches: Sequence[int],
    continued: Callable[[int, Callable[[str], None]], Iterator[dict[str, str]]],
    communicator: Communicator,
    folder: Path,
) -> None:
    """Each rank continues every n-th batch; rank 0 shows and writes them in the order of the prompts."""
    done: list[tuple[int, str, list[dict[str, str]]]] | None = []
    try:
        for first in batches[communicator.rank :: communicator.size]:
            shown: list[str] = []
            found = list(continued(first, shown.append))
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
            _print_text(shown)
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
    prompts: Sequence[str],
    numbers: Sequence[str],
    steps: Iterable[Sequence[int | None]],
    tokenizer: Tokenizer,
    generator: Generator,
    write: Callable[[str], None],
) -> list[str]:
    """The texts of a batch, each written under a heading with its prompt; a run's only prompt has no heading.

    A batch of one is written token by token, a larger one when it is done.
    """
    streams, texts = [tokenizer.stream() for _ in prompts], ["" for _ in prompts]
    headings = [f"{number} {_shortened(prompt)!r}\n" for number, prompt in zip(numbers, prompts, strict=True)]
    headings = [""] if numbers == ["[1/1]"] else headings
    alone = len(prompts) == 1

    def add(row: int, text: str) -> None:
        texts[row] += text
        if alone:
            write(text)

    if alone:
        write(headings[0] + prompts[0])
    for tokens in steps:
        for row, token in enumerate(tokens):
            if token is not None and token not in generator.eos_ids:
                add(row, streams[row].push(token))
    for row, stream in enumerate(streams):
        add(row, stream.finish())
    if alone:
        write("\n\n")
    else:
        for heading, prompt, text in zip(headings, prompts, texts, strict=True):
            write(f"{heading}{prompt}{text}\n\n")
    return texts


def _shortened(text: str) -> str:
    return text[:40] + ("..." if len(text) > 40 else "")


def _encode(config: Config, tokenizer: Tokenizer, prompt: str) -> list[int]:
    def problem(rule: str, fix: str) -> UserError:
        return UserError(rule, where=config.source.where("predict_data"), key="predict_data", value=prompt, fix=fix)

    try:
        ids = tokenizer.encode(prompt)
    except (TypeError, UnicodeError):  # lone surrogates: arguments that were not UTF-8
        raise problem("a prompt is not valid UTF-8", "write it in UTF-8") from None
    ids = [tokenizer.bos_id, *ids] if tokenizer.bos_id is not None else ids
    if not ids:
        raise problem("a prompt is empty", "give at least a character")
    vocab_size = config.decoder.vocab_size
    if max(ids) >= vocab_size:
        rule = f"a prompt has token {max(ids)}, beyond the model's vocabulary of {vocab_size}"
        raise problem(rule, "use the tokenizer that the model was trained with")
    return ids


def _most_new_tokens(config: Config, prompt: str, length: int) -> int:
    """How many tokens may follow a prompt of `length` tokens."""
    settings = config.decoder
    limit = settings.max_decode_length or settings.seq_length
    positions = max(settings.seq_length, settings.max_positions)
    if limit > positions:
        key, fix = "model.model_config.max_decode_length", f"use at most {positions}, or raise max_position_embeddings"
        rule = f"the model has positions for {positions} tokens"
        raise UserError(rule, where=config.source.where(key), key=key, value=limit, fix=fix)
    if length >= limit:
        key, fix = "predict_data", "shorten the prompt or raise model.model_config.max_decode_length"
        rule = f"a prompt of {length} tokens leaves no room for an answer in {limit}"
        raise UserError(rule, where=config.source.where(key), key=key, value=_shortened(prompt), fix=fix)
    return min(limit - length, settings.max_new_tokens or limit)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # a long text or one with a NUL is no path
        return False
