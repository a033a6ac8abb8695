"""Run mode predict: continues prompts with a model, or scores answers with a reward model."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.checkpoint.hugging_face import chat_template_of
from trainer.config.checks.parallel import resolve_for_job
from trainer.data import ChatTemplate, load_chat_template, load_tokenizer
from trainer.data.source.files import RECORDS, DataSource, describe_file
from trainer.data.source.records import Record, raise_error, read_records
from trainer.data.source.samples import Sample, prompt_messages, to_sample
from trainer.data.tokens.chat_template import ALL
from trainer.data.tokens.encode import encode_samples
from trainer.device.stop_signals import StopSignals
from trainer.errors import EXIT_SIGTERM, UserError
from trainer.input_files import is_special, missing_path_fix, open_file
from trainer.launch import heartbeat
from trainer.monitors.files import atomic_file, write_failure
from trainer.parallel.world import SINGLE_PROCESS
from trainer.run.generation import (
    context_length,
    decode_steps,
    encode_chat,
    encode_prompt,
    find_eos_ids,
    make_sampling,
    open_generator,
    print_text,
)
from trainer.run.prepare import load_run_weights, make_output_folder, prepare_run, print_note

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data import Tokenizer
    from trainer.models.generate import Generator, Sampling
    from trainer.parallel.communicator import Communicator
    from trainer.parallel.world import World
    from trainer.run.generation import ModelReplica


_GROUP_BYTES = 1 << 20  # of text that is encoded at once


class _Stopped(Exception):
    """A stop signal arrived before all prompts were continued."""


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        text: The text that the model continues; of a conversation the last message.
        record: The fields of predictions.jsonl that identify it.
        messages: A conversation, which the chat template renders; None for a prompt of `text` alone.
        where: Its location, for error messages.
    """

    text: str
    record: dict[str, Any]
    messages: list[dict[str, Any]] | None
    tools: list[Any] | None
    where: str


def read_prompts(config: Config) -> list[Prompt]:
    """Returns the prompts of `predict_data`, which are strings or the contents of one file.

    A .jsonl file has a JSON object on each line, with a prompt under `prompt` or `text`. With `chat` a line may have a
    conversation under `messages` instead. Any other file has a prompt on each line.

    Raises:
        UserError: The file is not there, is not the only one, has no prompt, cannot be read, or has a line of another
            form.
    """
    where = config.source.where("predict_data")
    if isinstance(config.predict_data, str):
        texts = [config.predict_data]
    else:
        texts = list(config.predict_data or ())
    for name in filter(_names_file, texts):
        if len(texts) > 1:
            rule = "a file of prompts stands alone"
            raise UserError(rule, where=where, key="predict_data", value=name, fix="put all prompts into one file")
        if not _is_file(name):
            fix = missing_path_fix(name, "correct the path")
            raise UserError("the file does not exist", where=where, key="predict_data", value=name, fix=fix)
    if len(texts) != 1 or not _is_file(texts[0]):
        return [_prompt(config, text, where) for text in texts]
    path = texts[0]
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8") as file:
            lines = file.read().split("\n")  # JSON may have other line separators in a string
    except (OSError, UnicodeDecodeError) as error:
        rule = f"the file of prompts cannot be read as UTF-8 text ({error})"
        fix = "give a text file with one prompt a line"
        raise UserError(rule, where=where, key="predict_data", value=path, fix=fix) from error
    is_json = path.endswith(".jsonl")
    make_prompt = _prompt
    if is_json:
        make_prompt = _parse_json_prompt
    prompts = [
        make_prompt(config, line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not prompts:
        fix = "write one prompt a line"
        if is_json:
            fix = 'write {"prompt": "..."} on a line'
        raise UserError("the file has no prompt", where=where, key="predict_data", value=path, fix=fix)
    return prompts


def _names_file(text: str) -> bool:
    """Returns whether a text is the name of a file of prompts rather than a prompt, whether the file exists or not."""
    return text.endswith(".jsonl") or (text.endswith(".txt") and not any(map(str.isspace, text)))


def _prompt(config: Config, text: str, where: str) -> Prompt:
    messages = None
    if config.chat:
        messages = [{"role": "user", "content": text}]
    return Prompt(text, {"prompt": text}, messages, None, where)


def _parse_json_prompt(config: Config, line: str, where: str) -> Prompt:
    """Returns the prompt of one line of a .jsonl file."""
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
            fields = {name: record[name] for name in ("messages", "tools") if name in record}
            return Prompt(str(messages[-1]["content"] or ""), fields, messages, tools, where)
        if "messages" in record:
            rule = "a prompt of messages is rendered with the chat template"
            fix = "add --chat"
            raise UserError(rule, where=where, key="predict_data", value=_shorten(line), fix=fix)
    rule = "a line of a .jsonl file of prompts is a JSON object with a text under prompt (or text)"
    fix = "write "
    if isinstance(record, dict) and not {"prompt", "text"}.isdisjoint(record):
        fix = "write it as a string, as in "
    fix += '{"prompt": "Once upon a time"}'
    raise UserError(rule, where=where, key="predict_data", value=_shorten(line), fix=fix)


def predict(config: Config, world: World, device: str) -> int:
    """Continues or scores every prompt, writes `output_dir`/predictions.jsonl, and returns the exit code.

    One rank prints text token by token. Several replicas of the model share the batches of prompts, and rank 0 prints
    and writes them when all are done. A stop signal ends the prediction after the next token; an earlier
    predictions.jsonl stays as it is.

    Raises:
        UserError: A prompt is empty or too long, or the weights do not fit.
        RunError: The predictions cannot be written.
    """
    with StopSignals() as stop:
        try:
            run = _predict
            if config.decoder.num_labels:
                run = _score
            run(config, functools.partial(_should_stop, stop), world, device)
        except _Stopped:
            print(f"stopped by {stop.name}", file=sys.stderr)
            return stop.exit_code or EXIT_SIGTERM
    return stop.exit_code


def _should_stop(stop: StopSignals) -> bool:
    heartbeat.beat(0)  # a prediction may be long, and this is called after each token
    return bool(stop)


class _Predictor(NamedTuple):
    """The model and the encoded prompts.

    Attributes:
        limits: The largest number of new tokens of each prompt.
        batch_size: The number of prompts that the model continues at once.
    """

    encoded: list[list[int]]
    limits: list[int]
    batch_size: int
    tokenizer: Tokenizer
    sampling: Sampling
    generator: Generator
    communicator: Communicator
    replica: ModelReplica

    def stream(self, batch: slice) -> Iterator[list[str]]:
        """Yields the new text of each prompt of a batch, step by step."""
        encoded = self.encoded[batch]
        steps = self.generator.stream(encoded, self.limits[batch], self.sampling, batch.start)
        return decode_steps(steps, len(encoded), self.tokenizer, self.generator)

    def batches(self) -> list[slice]:
        """Returns the batches as ranges of the prompts."""
        starts = range(0, len(self.encoded), self.batch_size)
        return [slice(start, start + self.batch_size) for start in starts]


def _open(config: Config, prompts: Sequence[Prompt], world: World, device: str, *, makes_folder: bool) -> _Predictor:
    tokenizer = load_tokenizer(config)
    template = None
    if config.chat:
        template = chat_template_of(config, tokenizer)
    encoded = [_encode(config, tokenizer, template, prompt) for prompt in prompts]
    limits = [_max_new_tokens(config, prompt, len(ids)) for prompt, ids in zip(prompts, encoded, strict=True)]

    notes: list[str] = []
    if template is not None:
        notes += template.notes
    weights = load_run_weights(config, world, notes.append)
    if world.rank == 0:
        for note in notes:
            print_note(note)
    if makes_folder:
        make_output_folder(config)
    eos_ids = find_eos_ids(config, tokenizer, template)
    generator, communicator, replica = open_generator(config, weights, eos_ids, world, device)
    batch_size = config.predict_batch_size or config.decoder.batch_size
    sampling = make_sampling(config)
    return _Predictor(encoded, limits, batch_size, tokenizer, sampling, generator, communicator, replica)


def continue_texts(config: Config, texts: Sequence[str]) -> list[str]:
    """Returns what the model adds to each prompt, for notebooks. Prints nothing but notes, and writes no file.

    Raises:
        UserError: `predict` would refuse the prompts or the weights.
        KeyboardInterrupt: SIGINT or SIGTERM came.
    """
    prepared = prepare_run(resolve_for_job(config, SINGLE_PROCESS))
    config = prepared.config
    prompts = [_prompt(config, text, "") for text in texts]
    continuations = ["" for _ in texts]
    with StopSignals() as stop:
        predictor = _open(config, prompts, SINGLE_PROCESS, prepared.plan.device, makes_folder=False)
        for batch in predictor.batches():
            for pieces in predictor.stream(batch):
                if stop:
                    raise KeyboardInterrupt
                for row, piece in enumerate(pieces, start=batch.start):
                    continuations[row] += piece
    return continuations


def _predict(config: Config, should_stop: Callable[[], bool], world: World, device: str) -> None:
    prompts = read_prompts(config)
    folder = Path(config.output_dir).expanduser()
    predictor = _open(config, prompts, world, device, makes_folder=True)
    replica = predictor.replica

    def stream(batch: slice) -> Iterator[list[str]]:
        """Yields the text of each token; raises _Stopped on all ranks of a replica together."""
        for pieces in predictor.stream(batch):
            # The ranks of a replica stop together: one that stops alone would leave the others waiting.
            if replica.any(should_stop()):
                raise _Stopped
            yield pieces

    def continue_batch(batch: slice, write: Callable[[str], None]) -> list[dict[str, Any]]:
        """Continues a batch of prompts, writes its text, and returns its records for predictions.jsonl."""
        numbers = [f"[{number + 1}/{len(prompts)}]" for number in range(len(prompts))[batch]]
        texts = _show(prompts[batch], numbers, stream(batch), write)
        return [{**prompt.record, "text": text} for prompt, text in zip(prompts[batch], texts, strict=True)]

    if world.size > 1:
        _predict_together(predictor, continue_batch, folder)
        return
    with write_records(folder / "predictions.jsonl") as write_record:
        for batch in predictor.batches():
            for record in continue_batch(batch, print_text):
                write_record(record)


def _score(config: Config, should_stop: Callable[[], bool], world: World, device: str) -> None:
    """Prints and writes the score of each document of `predict_data`."""
    samples = list(_read_documents(config))
    tokenizer = load_tokenizer(config)
    template = load_chat_template(config, "train_dataset", tokenizer)
    pairs = [(sample, 0) for sample, _ in samples]
    documents: list[np.ndarray] = []
    for group in encode_samples(pairs, tokenizer, template, ALL, _GROUP_BYTES, raise_error):
        documents += np.split(group.tokens, group.ends[:-1])
    limit = max(config.decoder.seq_length, config.decoder.max_positions)
    for (sample, _), tokens in zip(samples, documents, strict=True):
        if len(tokens) > limit:
            rule = f"it has {len(tokens)} tokens, and the model takes {limit}"
            fix = "shorten it, or raise model.model_config.seq_length"
            raise UserError(rule, where=sample.where, key="predict_data", fix=fix)
    weights = load_run_weights(config, world, print_note)
    folder = make_output_folder(config)
    from trainer.run.session import open_session
    from trainer.step.score import score_documents

    session = open_session(config, weights, world, device)
    batch_size = config.predict_batch_size or config.decoder.batch_size
    shown = iter(enumerate(samples, start=1))
    with write_records(folder / "predictions.jsonl") as write_record:
        for scores in score_documents(session.model, session.build_inputs, documents, batch_size):
            for score, (number, (sample, fields)) in zip(scores.tolist(), shown, strict=False):
                text = sample.text
                if sample.messages is not None:
                    text = str(sample.messages[-1]["content"] or "")
                print_text(f"[{number}/{len(samples)}] {_shorten(text)!r}: {score:.6g}\n")
                write_record({**fields, "score": score})
            if should_stop():
                raise _Stopped


def _read_documents(config: Config) -> Iterator[tuple[Sample, dict[str, Any]]]:
    """Yields the documents to score, each with the fields that identify it.

    A line of a .jsonl file is a record in any form of the training data without `loss`; others are as in
    `read_prompts`.
    """
    where = config.source.where("predict_data")
    names = config.predict_data
    if isinstance(names, str):
        names = [names]
    if names is not None and len(names) == 1 and names[0].endswith(".jsonl") and _is_file(names[0]):
        path = Path(names[0])
        source = DataSource(RECORDS, names[0], "predict_data", where, (describe_file(path, "predict_data", where),))
        for record in read_records(source, source.files[0], raise_error):
            sample = to_sample(record, {})
            if sample is None:
                raise UserError("the text is empty", where=record.where, key="text", fix="write a text")
            yield sample, dict(record.fields)
        return
    for prompt in read_prompts(config):
        if not prompt.text:
            raise UserError("the text is empty", where=prompt.where, key="predict_data", fix="write a text")
        messages = prompt.messages
        text = prompt.text
        if messages is not None:
            text = ""
        yield Sample(messages, prompt.tools, "", text, prompt.where), prompt.record


def _predict_together(
    predictor: _Predictor,
    continue_batch: Callable[[slice, Callable[[str], None]], list[dict[str, Any]]],
    folder: Path,
) -> None:
    """Continues every n-th batch with each of n replicas of the model.

    Rank 0 prints and writes all of them, in the order of the prompts.
    """
    replica = predictor.replica
    communicator = predictor.communicator
    local: list[tuple[int, str, list[dict[str, Any]]]] = []
    is_stopped = False
    try:
        for batch in predictor.batches()[replica.number :: replica.replicas]:
            printed: list[str] = []
            records = continue_batch(batch, printed.append)
            if replica.is_first_rank:  # all ranks of the replica have the same tokens
                local.append((batch.start, "".join(printed), records))
    except _Stopped:
        is_stopped = True  # the other ranks wait for this one to gather
    message = json.dumps(None if is_stopped else local).encode()
    gathered = [json.loads(part) for part in communicator.gather_bytes(message)]
    if None in gathered:
        raise _Stopped
    if communicator.rank > 0:
        return
    with write_records(folder / "predictions.jsonl") as write_record:
        for _, text, records in sorted(itertools.chain.from_iterable(gathered)):
            print_text(text)
            for record in records:
                write_record(record)


@contextlib.contextmanager
def write_records(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a function that writes a record to a file of JSON lines; the file is in its place when the block ends."""
    try:
        # A prompt that is not UTF-8 has lone surrogates; as backslash escapes they are valid JSON.
        with (
            atomic_file(path) as unfinished,
            unfinished.open("w", encoding="utf-8", errors="backslashreplace", buffering=1) as file,
        ):
            yield lambda record: print(json.dumps(record, ensure_ascii=False), file=file)
    except BrokenPipeError:
        raise  # it is standard output that was closed, not the file
    except OSError as error:
        raise write_failure(path, error) from error


def _show(
    prompts: Sequence[Prompt], numbers: Sequence[str], steps: Iterable[Sequence[str]], write: Callable[[str], None]
) -> list[str]:
    """Writes the prompts of a batch with their continuations, and returns the continuations.

    A batch of one prompt is written token by token, a larger one when it is complete. Each prompt has a heading, unless
    the run has only one. An answer of a conversation begins on a new line.
    """
    texts = ["" for _ in prompts]
    starts = []
    for number, prompt in zip(numbers, prompts, strict=True):
        start = prompt.text
        if number != "[1/1]":
            start = f"{number} {_shorten(prompt.text)!r}\n{start}"
        if prompt.messages is not None:
            start += "\n"
        starts.append(start)
    is_single = len(prompts) == 1
    if is_single:
        write(starts[0])
    for pieces in steps:
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        if is_single:
            write(pieces[0])
    if is_single:
        write("\n\n")
    else:
        write("".join(f"{start}{text}\n\n" for start, text in zip(starts, texts, strict=True)))
    return texts


def _shorten(text: str) -> str:
    if len(text) > 40:
        return text[:40] + "..."
    return text


def _encode(config: Config, tokenizer: Tokenizer, template: ChatTemplate | None, prompt: Prompt) -> list[int]:
    try:
        if template is None:
            return encode_prompt(config, tokenizer, prompt.text, with_bos=True)
        return encode_chat(config, tokenizer, template, prompt.messages or (), prompt.tools, prompt.where)
    except UserError as error:
        raise error.with_location(error.where or prompt.where, error.key or "predict_data") from None


def _max_new_tokens(config: Config, prompt: Prompt, length: int) -> int:
    """Returns the largest number of tokens that may follow a prompt of `length` tokens."""
    limit = context_length(config)
    if length >= limit:
        fix = "shorten the prompt or raise model.model_config.max_decode_length"
        rule = f"a prompt of {length} tokens leaves no room for an answer in {limit}"
        raise UserError(rule, where=prompt.where, key="predict_data", value=_shorten(prompt.text), fix=fix)
    return min(limit - length, config.decoder.max_new_tokens or limit)


def _is_file(text: str) -> bool:
    """Returns whether a text is the path of a file, or of a pipe, which cannot be read."""
    try:
        return Path(text).is_file() or is_special(Path(text))
    except (OSError, ValueError):  # a path cannot be that long, or have a NUL
        return False
