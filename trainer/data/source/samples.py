"""Turns a record into a training sample: a conversation, a prompt with its completion, or a text.

A record has the first of these forms whose fields it has, or the one that ``columns`` maps to its columns (null counts
as absent, other fields are ignored):

- ``messages``: ``[{"role": ..., "content": ...}, ...]``, as in Hugging Face's chat data sets
- ``conversations``: ``[{"from": ..., "value": ...}, ...]`` (ShareGPT)
- ``instruction``, ``output`` and perhaps ``input`` and ``history`` (Alpaca)
- ``prompt`` and ``completion``: two strings, or two lists of messages (TRL)
- ``text``

For a loss of preferences (`DataSource.answers`) a record has the answers ``chosen`` and ``rejected`` instead:

- two strings after ``prompt`` (a string) or ``instruction`` and ``input``
- two lists of messages, or two messages, after ``prompt``, ``messages`` or ``conversations`` (lists of messages)
- without any of these, or with a string beside lists, the prompt is what both answers begin with (TRL)

A pair may have a ``margin`` for a reward model. Or a record has ``prompt``, ``completion`` and a ``label``, true for a
desirable answer (TRL); `DataSource.answers` tells. Beside its own answer, such a prompt has one that does not belong to
it: that of the nearest earlier record with another prompt, at the beginning of the data of the first such record.

A conversation may have ``tools``, and ``system`` for a system message before the others. A record has a ``weight``, the
factor on the loss of its tokens, if ``columns`` names its column.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from os.path import commonprefix
from typing import Any, NamedTuple

from trainer.config.schema.data import WEIGHT
from trainer.data.source.files import DataSource
from trainer.data.source.records import Record, raise_error, read_records
from trainer.errors import UserError

_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **{"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"},
}
"""Role in a file -> role in Hugging Face's form; the second line has the roles of ShareGPT."""
_SHOWN_CHARACTERS = 80
_FORMS_FIX = (
    "give each record `messages` (or ShareGPT's `conversations`), `instruction` and `output`, `prompt` and "
    "`completion`, or `text`, or set data_loader.columns to the names of its columns, as {messages: dialogue}"
)
_MESSAGES_FIX = "write a list of {role, content}, or of ShareGPT's {from, value}"
_ANSWERS = ("chosen", "rejected")
_PROMPTS = ("prompt", "messages", "conversations")
_PAIRS_FIX = (
    "give each record `chosen` and `rejected`, as texts or as lists of messages, with their `prompt`, or set "
    "data_loader.columns to the names of its columns"
)
_LABELS_FIX = (
    "give each record `prompt` and `completion`, as texts or as lists of messages, and `label`, true or false, or set "
    "data_loader.columns to the names of its columns"
)
_LARGEST_NUMBER = 1e6
_EMPTY = "its content is empty"
_EMPTY_FIX = "write a text, or remove the record"


class Sample(NamedTuple):
    """The training sample of one record.

    - A conversation has `messages`, and neither `prompt` nor `text`.
    - An instruction in Alpaca's form has both. `messages`, with the user's and the assistant's turn, are for a
      tokenizer with a chat template; `prompt` and `text`, in the form "### Instruction:", are for one without.
    - A prompt with its completion has no `messages`; the completion is `text`.
    - A text has only `text`.

    A message is a dictionary: `role` (system, developer, user, assistant or tool), `content` (a string; None only
    beside `tool_calls`), and the other fields of the file, such as `tool_calls`, `tool_call_id` or `name`. A message of
    the assistant with ``weight`` 0 (OpenAI's form) carries no loss. If a prompt is a list of messages, none of them
    carries loss.
    """

    messages: list[dict[str, Any]] | None
    tools: list[Any] | None
    prompt: str  # carries no loss
    text: str  # carries loss
    where: str  # "file:line" or "file: record N"
    other: Sample | None = None  # with the rejected answer, or with one that does not belong to the prompt
    value: float = 0.0  # 1 if a labelled answer is desirable, else 0; the margin of a pair; the weight of a record
    prompt_turns: int = 0  # of a labelled answer: the messages before it


class EmptyAnswerError(UserError):
    """A record whose answer is empty. Published files have some, so it is always left out, and counted."""


@dataclass
class SkippedRecords:
    """Counts the records that were left out because they are bad, and keeps the error of the first."""

    num_skipped: int = 0
    first: UserError | None = None

    def add(self, error: UserError) -> None:
        """Counts a bad record."""
        self.num_skipped += 1
        self.first = self.first or error


def read_samples(source: DataSource, skipped: SkippedRecords) -> Iterator[tuple[Sample, int]]:
    """Reads all samples of a source, each with the bytes of the source that it consumed; empty texts are left out.

    Bad records are added to `skipped` if the source skips them, and records with an empty answer always.

    Raises:
        UserError: A record is bad and not skipped, or a file is damaged.
    """
    report = raise_error
    if source.skips_bad_records:
        report = skipped.add
    samples = _read_single_samples(source, skipped, report)
    if source.answers == "labels":
        samples = _with_mismatches(samples, source)
    return samples


def _read_single_samples(
    source: DataSource, skipped: SkippedRecords, report: Callable[[UserError], None]
) -> Iterator[tuple[Sample, int]]:
    records = (record for file in source.files for record in read_records(source, file, report))
    for record in islice(records, source.limit):
        try:
            sample = to_sample(record, source.columns, source.answers)
        except EmptyAnswerError as error:
            skipped.add(error)
            continue
        except UserError as error:
            report(error)
            continue
        if sample is not None:
            yield sample, record.source_bytes


def _with_mismatches(samples: Iterator[tuple[Sample, int]], source: DataSource) -> Iterator[tuple[Sample, int]]:
    """Gives each sample the other one with its prompt and the nearest earlier answer to another prompt.

    Raises a UserError if all samples have the same prompt, or some are texts and others conversations.
    """
    waiting: list[tuple[Sample, int]] = []  # those of the first prompt, until another one comes
    earlier: Sample | None = None
    last: Sample | None = None
    for sample, source_bytes in samples:
        if last is not None and _prompt_of(last) != _prompt_of(sample):
            earlier = last
        last = sample
        if earlier is None:
            waiting.append((sample, source_bytes))
            continue
        for first, first_bytes in waiting:
            yield first._replace(other=_mismatch(first, sample)), first_bytes
        waiting = []
        yield sample._replace(other=_mismatch(sample, earlier)), source_bytes
    if waiting:
        rule = f"all {len(waiting)} records have the same prompt, and kto compares with answers to other prompts"
        raise UserError(rule, where=source.where, key=source.key, value=source.name, fix="add records")


def _prompt_of(sample: Sample) -> object:
    if sample.messages is None:
        return sample.prompt
    return sample.messages[: sample.prompt_turns]


def _mismatch(sample: Sample, answered: Sample) -> Sample:
    """Returns the prompt of the first sample with the answer of the second."""
    if sample.messages is None and answered.messages is None:
        return sample._replace(text=answered.text)
    if sample.messages is None or answered.messages is None:
        forms = ["text", "a list of messages"]
        if sample.messages is not None:
            forms.reverse()
        rule = f"its prompt is {forms[0]}, that of {answered.where} {forms[1]}: kto joins prompts with other answers"
        raise UserError(rule, where=sample.where, fix="write all records in the same form")
    messages = sample.messages[: sample.prompt_turns] + answered.messages[answered.prompt_turns :]
    return sample._replace(messages=messages)


def to_sample(record: Record, columns: Mapping[str, str], answers: str = "") -> Sample | None:
    """Makes a sample from a record; None for an empty text.

    Args:
        columns: Our name of a field -> the name of the column of the file that holds it.
        answers: What the record must have, see `DataSource.answers`.

    Raises:
        UserError: The record has none of the forms, a column is missing, a field has the wrong type, content is empty,
            or a role is unknown. The turns that a conversation needs are not checked here.
    """
    fields = _Fields(record, columns)
    try:
        if answers == "labels":
            sample = _labelled(fields)
        elif answers:
            sample = _pair(fields, answers == "margins")
        else:
            sample = _make_sample(fields)
            if sample is not None and WEIGHT in columns:
                sample = sample._replace(value=_weight(fields))
        for each in (sample, sample and sample.other):
            if each is not None:
                _check_unicode(each)
        return sample
    except UnicodeEncodeError:
        rule = "the text holds half a surrogate pair (an escape \\ud800 to \\udfff without its other half)"
        fix = "write the character itself, or both halves"
        raise UserError(rule, where=record.where, fix=fix) from None


def prompt_messages(record: Record) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Reads the conversation under ``messages`` that a model is to continue, and its tools.

    Raises:
        UserError: ``messages`` is missing or has the wrong type, content is empty, or a role is unknown.
    """
    fields = _Fields(record, {})
    return _messages(fields, "messages"), _tools(fields)


class _Fields:
    """The fields of a record under our names."""

    def __init__(self, record: Record, columns: Mapping[str, str]) -> None:
        self.where = record.where
        self._columns = columns
        self._fields = record.fields
        for ours, theirs in columns.items():
            if theirs not in record.fields:
                rule = f"the record has no column {theirs!r}, which data_loader.columns names as {ours}; {self.names}"
                raise UserError(rule, where=record.where, fix="correct data_loader.columns, or complete the record")

    @property
    def names(self) -> str:
        """Lists the record's columns, for messages."""
        return f"its columns are {', '.join(map(str, self._fields)) or 'none'}"

    def num_mapped(self, names: Iterable[str]) -> int:
        """Counts the fields that `columns` maps."""
        return sum(name in self._columns for name in names)

    def key(self, name: str) -> str:
        """Returns the name in the file of one of our fields."""
        return self._columns.get(name, name)

    def get(self, name: str) -> Any:
        """Returns the value of a field; None if it is absent."""
        return self._fields.get(self.key(name))

    def has(self, *names: str) -> bool:
        """Checks whether all of these fields have a value."""
        return all(self.get(name) is not None for name in names)

    def text(self, name: str) -> str:
        """Returns a field that must be a string."""
        value = self.get(name)
        if not isinstance(value, str):
            raise _wrong(self.where, self.key(name), value, "text", "write it as a string")
        return value

    def optional_text(self, name: str) -> str:
        """Returns a field that must be a string or absent (an empty string)."""
        if self.has(name):
            return self.text(name)
        return ""


def _make_sample(fields: _Fields) -> Sample | None:
    if forms := [form for form in _FORMS if fields.has(*form)]:
        return _FORMS[max(forms, key=fields.num_mapped)](fields)
    rule = f"the record has none of the known forms; {fields.names}"
    raise UserError(rule, where=fields.where, fix=_FORMS_FIX)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _weight(fields: _Fields) -> float:
    """Returns the weight of a record in float32, which must be a number that is not negative."""
    value = fields.get(WEIGHT)
    if not _is_number(value) or not 0 <= value <= _LARGEST_NUMBER:
        fix = "correct it, or remove the record"
        raise _wrong(fields.where, fields.key(WEIGHT), value, f"a number from 0 to {_LARGEST_NUMBER:g}", fix)
    return float(value)


def _text(fields: _Fields) -> Sample | None:
    if text := fields.text("text"):
        return Sample(None, None, "", text, fields.where)
    return None


def _conversation(fields: _Fields, messages: list[dict[str, Any]]) -> Sample:
    system = fields.optional_text("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Sample(messages, _tools(fields), "", "", fields.where)


def _instruction(fields: _Fields, answer: str = "output") -> Sample:
    instruction = fields.text("instruction")
    more = fields.optional_text("input")
    output = fields.text(answer)
    if not instruction and not more:
        raise _empty(fields.where, fields.key("instruction"))
    if not output.strip():
        raise EmptyAnswerError(_EMPTY, where=fields.where, key=fields.key(answer), fix=_EMPTY_FIX)
    user = "\n\n".join(part for part in (instruction, more) if part)
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
    earlier = _history(fields)
    if earlier or fields.optional_text("system"):
        return _conversation(fields, earlier + messages)
    middle = ""
    if more:
        middle = f"### Input:\n{more}\n\n"
    prompt = f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"
    return Sample(messages, None, prompt, output, fields.where)


def _history(fields: _Fields) -> list[dict[str, Any]]:
    """Returns the earlier turns of an instruction, written as a list of [instruction, output], as messages."""
    pairs = fields.get("history") or []
    is_list = isinstance(pairs, list)
    if not is_list or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        fix = "write the earlier turns as [[instruction, output], ...]"
        raise _wrong(fields.where, fields.key("history"), pairs, "a list of pairs", fix)
    roles = ("user", "assistant")
    turns = [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]
    return [_message(turn, f"{fields.key('history')}.{index // 2}", fields.where) for index, turn in enumerate(turns)]


def _completion(fields: _Fields) -> Sample:
    prompt = fields.get("prompt")
    completion = fields.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation(fields, _without_loss(_messages(fields, "prompt")) + _messages(fields, "completion"))
    if isinstance(prompt, list) or isinstance(completion, list):
        raise _mixed_forms(fields, "prompt", "completion")
    prompt = fields.text("prompt")
    completion = fields.text("completion")
    if not completion.strip():
        raise EmptyAnswerError(_EMPTY, where=fields.where, key=fields.key("completion"), fix=_EMPTY_FIX)
    return Sample(None, None, prompt, completion, fields.where)


def _without_loss(turns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages of a prompt, in which those of the assistant carry no loss."""
    weights = {"assistant": {"weight": 0}}
    return [{**turn, **weights.get(turn["role"], {})} for turn in turns]


def _mixed_forms(fields: _Fields, *names: str) -> UserError:
    rule = f"{' and '.join(map(fields.key, names))} must be two strings or two lists of messages"
    return UserError(rule, where=fields.where, fix="write both in the same form")


def _pair(fields: _Fields, may_have_margin: bool) -> Sample:
    """Returns the sample of the chosen answer, which has that of the rejected one, and their margin."""
    if not fields.has(*_ANSWERS):
        rule = f"the record has no chosen and rejected answer, which the loss compares; {fields.names}"
        raise UserError(rule, where=fields.where, fix=_PAIRS_FIX)
    values = [fields.get(name) for name in _ANSWERS]
    if values[0] == values[1]:
        rule = f"{fields.key('chosen')} and {fields.key('rejected')} are the same, so there is nothing to prefer"
        raise UserError(rule, where=fields.where, fix="remove the record, or set data_loader.bad_records to skip")
    are_texts = [isinstance(value, str) for value in values]
    if are_texts[0] != are_texts[1]:
        raise _mixed_forms(fields, *_ANSWERS)
    if are_texts[0]:
        chosen, rejected = _text_pair(fields)
    else:
        chosen, rejected = _message_pair(fields)
    margin = 0.0
    if may_have_margin and fields.has("margin"):
        margin = fields.get("margin")
        if not _is_number(margin) or not abs(margin) <= _LARGEST_NUMBER:
            rule = f"a number of at most {_LARGEST_NUMBER:g}"
            raise _wrong(fields.where, fields.key("margin"), margin, rule, "write a number, or leave it out")
    return chosen._replace(other=rejected, value=float(margin))


def _labelled(fields: _Fields) -> Sample:
    """Returns the sample of an answer with a label."""
    if not fields.has("prompt", "completion", "label"):
        rule = f"the record has no prompt, completion and label, which the loss needs; {fields.names}"
        raise UserError(rule, where=fields.where, fix=_LABELS_FIX)
    label = fields.get("label")
    if not isinstance(label, bool):
        fix = "write true for a desirable answer and false for another, without quotes"
        raise _wrong(fields.where, fields.key("label"), label, "true or false", fix)
    sample = _completion(fields)
    turns = 0
    if sample.messages is not None:
        answer = fields.get("completion")
        turns = len(sample.messages) - len(answer)
        _check_answer(fields, "completion", sample.messages[turns:])
    return sample._replace(value=float(label), prompt_turns=turns)


def _text_pair(fields: _Fields) -> tuple[Sample, Sample]:
    if fields.has("instruction"):
        return _instruction(fields, "chosen"), _instruction(fields, "rejected")
    chosen = fields.text("chosen")
    rejected = fields.text("rejected")
    if fields.has("prompt"):
        prompt = fields.text("prompt")
    else:
        prompt = commonprefix([chosen, rejected])
        if prompt.endswith(" "):  # the space belongs to the word after it, as TRL has it
            prompt = prompt[:-1]
        chosen = chosen[len(prompt) :]
        rejected = rejected[len(prompt) :]
    samples = []
    for name, answer in zip(_ANSWERS, (chosen, rejected), strict=True):
        if not answer.strip():
            raise _empty(fields.where, fields.key(name))
        samples.append(Sample(None, None, prompt, answer, fields.where))
    return samples[0], samples[1]


def _message_pair(fields: _Fields) -> tuple[Sample, Sample]:
    chosen = _answer(fields, "chosen")
    rejected = _answer(fields, "rejected")
    name = next((name for name in _PROMPTS if isinstance(fields.get(name), list)), None)
    if name is not None:
        prompt = _messages(fields, name)
    else:
        same = 0
        while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
            same += 1
        prompt = chosen[:same]
        chosen = chosen[same:]
        rejected = rejected[same:]
    samples = []
    for key, answer in zip(_ANSWERS, (chosen, rejected), strict=True):
        _check_answer(fields, key, answer)
        samples.append(_conversation(fields, _without_loss(prompt) + answer))
    return samples[0], samples[1]


def _check_answer(fields: _Fields, name: str, answer: Sequence[Mapping[str, Any]]) -> None:
    if not any(turn["role"] == "assistant" for turn in answer):
        rule = "the answer has no turn of the assistant after the prompt"
        raise UserError(rule, where=fields.where, key=fields.key(name), fix="add the turn, or remove the record")


def _answer(fields: _Fields, name: str) -> list[dict[str, Any]]:
    """Returns the messages of an answer, which may be a single one."""
    value = fields.get(name)
    if isinstance(value, dict):
        return [_message(value, fields.key(name), fields.where)]
    return _messages(fields, name)


_FORMS: dict[tuple[str, ...], Callable[[_Fields], Sample | None]] = {
    ("messages",): lambda fields: _conversation(fields, _messages(fields, "messages")),
    ("conversations",): lambda fields: _conversation(fields, _messages(fields, "conversations")),
    ("instruction", "output"): _instruction,
    ("prompt", "completion"): _completion,
    ("text",): _text,
}
"""The fields that a record of each form has, and the function that makes a sample from them."""


def _messages(fields: _Fields, name: str) -> list[dict[str, Any]]:
    key = fields.key(name)
    messages = fields.get(name)
    if not isinstance(messages, list) or not messages:
        raise _wrong(fields.where, key, messages, "a list of messages that is not empty", _MESSAGES_FIX)
    return [_message(message, f"{key}.{index}", fields.where) for index, message in enumerate(messages)]


def _message(message: object, key: str, where: str) -> dict[str, Any]:
    """Checks a message and brings it into Hugging Face's form."""
    if not isinstance(message, dict):
        raise _wrong(where, key, message, "an object with role and content", _MESSAGES_FIX)
    role_name = "role"
    content_name = "content"
    if "role" not in message and "from" in message:
        role_name = "from"
        content_name = "value"
    theirs = message.get(role_name)
    if theirs is None or (content_name not in message and "tool_calls" not in message):
        raise _wrong(where, key, message, f"an object with {role_name} and {content_name}", _MESSAGES_FIX)
    if not isinstance(theirs, str) or theirs not in _ROLES:
        expected = f"one of {', '.join(_ROLES)}"
        raise _wrong(where, f"{key}.{role_name}", theirs, expected, "correct or remove the message")
    role = _ROLES[theirs]
    content = message.get(content_name)
    written_calls = message.get("tool_calls")
    if written_calls and not isinstance(written_calls, list):
        raise _wrong(where, f"{key}.tool_calls", written_calls, "a list of calls", "write [{...}, ...]")
    rest = {name: value for name, value in message.items() if name not in (role_name, content_name)}
    if theirs == "function_call":
        calls = _tool_calls(content, f"{key}.{content_name}", where)
        return {"role": role, "content": None, "tool_calls": calls, **rest}
    content = _content(content, f"{key}.{content_name}", where, may_be_null=bool(written_calls))
    if role != "tool" and not written_calls and not (content and content.strip()):
        raise _empty(where, f"{key}.{content_name}")
    return {"role": role, "content": content, **rest}


def _content(content: object, key: str, where: str, *, may_be_null: bool) -> str | None:
    """Returns the text of a message; the parts of a list are joined."""
    if isinstance(content, str) or (content is None and may_be_null):
        return content
    if not isinstance(content, list):
        fix = _MESSAGES_FIX
        if content is None:
            fix = _EMPTY_FIX
        raise _wrong(where, key, content, "text, or a list of parts with text", fix)
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            fix = "leave out images, sound and other parts: only text can be trained"
            raise _wrong(where, f"{key}.{index}", part, 'a part {"type": "text", "text": ...}', fix)
    return "".join(part["text"] for part in content)


def _tool_calls(value: object, key: str, where: str) -> list[dict[str, Any]]:
    """Parses the calls in a turn of ShareGPT's function_call: {"name", "arguments"} in JSON, or a list of them."""
    calls = _parsed(value, key, where)
    if not isinstance(calls, list):
        calls = [calls]
    for call in calls:
        if not isinstance(call, dict) or "name" not in call:
            raise _wrong(where, key, value, 'a call {"name": ..., "arguments": ...} in JSON', "correct the call")
    return [{"type": "function", "function": call} for call in calls]


def _tools(fields: _Fields) -> list[Any] | None:
    """Returns the tools of a conversation, which are a list, or a list in JSON."""
    value = fields.get("tools")
    tools = value
    if isinstance(value, str) and value:
        tools = _parsed(value, fields.key("tools"), fields.where)
    if tools and not isinstance(tools, list):
        raise _wrong(fields.where, fields.key("tools"), value, "a list of tools", "write [{...}, ...]")
    return tools or None


def _parsed(value: object, key: str, where: str) -> Any:
    try:
        if isinstance(value, str):
            return json.loads(value)
        return value
    except (ValueError, RecursionError):
        raise _wrong(where, key, value, "JSON", "correct it, or remove the record") from None


def _check_unicode(sample: Sample) -> None:
    """Raises a UnicodeEncodeError if a string cannot be written as UTF-8."""
    sample.prompt.encode()
    sample.text.encode()
    for message in sample.messages or ():
        for value in message.values():
            if isinstance(value, str):
                value.encode()
            elif value is not None:
                json.dumps(value, ensure_ascii=False, default=str).encode()
    if sample.tools:
        json.dumps(sample.tools, ensure_ascii=False, default=str).encode()


def _empty(where: str, key: str) -> UserError:
    return UserError(_EMPTY, where=where, key=key, fix=_EMPTY_FIX)


def _wrong(where: str, key: str, value: object, expected: str, fix: str) -> UserError:
    if len(repr(value)) > _SHOWN_CHARACTERS:
        value = repr(value)[:_SHOWN_CHARACTERS] + "..."
    return UserError(f"it must be {expected}", where=where, key=key, value=value, fix=fix)
