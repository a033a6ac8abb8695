"""Reads documents from text files and JSON lines, in pieces of bounded size.

A document reaches the tokenizer as one or more pieces of UTF-8 text; each piece says whether its tokens carry loss.

JSON lines are rendered in the first form whose fields a line has (other fields are ignored):

- ``{"messages": [{"role": ..., "content": ...}, ...]}``: every turn as
  ``<|im_start|>ROLE\\nCONTENT<|im_end|>\\n``, except that the assistant's turn ends with the tokenizer's
  end-of-sequence token instead of ``<|im_end|>``. Only the assistant's content and that token carry loss.
- ``{"instruction": ..., "input": ..., "output": ...}`` (Alpaca; ``input`` may be absent or empty):
  ``### Instruction:\\nINSTRUCTION\\n\\n### Input:\\nINPUT\\n\\n### Response:\\nOUTPUT``. Only the output and the
  end-of-sequence token carry loss.
- ``{"text": ...}``: the text; all of it carries loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainer.data.source import files as sources
from trainer.data.source.files import Source, SourceFile
from trainer.errors import UserError

USER_TURN_END = "<|im_end|>\n"
_ROLES = ("system", "developer", "user", "assistant", "tool")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_WHITESPACE = b" \t\r\n"
_SHOWN_CHARACTERS = 80


class Piece(NamedTuple):
    """A part of a document."""

    text: bytes  # UTF-8, cut only between characters
    has_loss: bool  # whether its tokens (and the end-of-sequence token after it) carry loss
    ends_turn: bool  # an end-of-sequence token follows
    ends_document: bool  # the next piece starts another document
    source_bytes: int  # bytes of the source that this piece consumed, for progress


def read_pieces(source: Source, chunk_bytes: int) -> Iterator[Piece]:
    """Reads the whole source, a piece at a time.

    Empty documents are left out. A text file of more than `chunk_bytes` (at least 4) is split into pieces, at line ends
    if it has any.

    Raises:
        UserError: A file is not UTF-8 text (with ``stdlib`` it is skipped), or a line is not a document.
    """
    for file in source.files:
        if source.kind == sources.JSONL:
            yield from _jsonl_pieces(source, file)
            continue
        if source.kind == sources.STDLIB:
            with sources.open_file(source, file) as stream:
                content = stream.read()
            if not is_text(content):
                continue
        yield from _text_pieces(source, file, chunk_bytes)


def is_text(content: bytes) -> bool:
    """Whether `content` is UTF-8 text without NUL bytes."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _text_pieces(source: Source, file: SourceFile, chunk_bytes: int) -> Iterator[Piece]:
    """Splits one file into pieces; holds at most two chunks in memory."""
    held, held_at = b"", 0
    with sources.open_file(source, file) as stream:
        for chunk in sources.read_chunks(source, file, stream, chunk_bytes):
            held += chunk
            if len(held) <= chunk_bytes:
                continue
            cut = _split_point(held)
            _check_text(file, held[:cut], held_at)
            yield Piece(held[:cut], True, False, False, cut)
            held, held_at = held[cut:], held_at + cut
    if held:
        _check_text(file, held, held_at)
        yield Piece(held, True, True, True, len(held))


def _split_point(text: bytes) -> int:
    """Finds where to split: before the last line that does not start with white space, else before the last character.

    Tokenizers join white space across line ends but never a line end with the word after it, so a split there changes
    no token.
    """
    cut = text.rfind(b"\n", 0, len(text) - 1) + 1
    while cut > 0 and text[cut] in _WHITESPACE:
        cut = text.rfind(b"\n", 0, cut - 1) + 1
    if cut > 0:
        return cut
    cut = len(text) - 1
    while cut > max(1, len(text) - 4) and text[cut] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        cut -= 1
    return max(cut, 1)


def _check_text(file: SourceFile, text: bytes, offset_bytes: int) -> None:
    nul = text.find(b"\0")
    if nul >= 0:
        raise sources.not_text(file, offset_bytes + nul, "it looks like a binary file: a NUL byte is")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        reason = f"byte 0x{text[error.start]:02x} ({error.reason}) is"
        raise sources.not_text(file, offset_bytes + error.start, reason) from None


def _jsonl_pieces(source: Source, file: SourceFile) -> Iterator[Piece]:
    with sources.open_file(source, file) as stream:
        lines = enumerate(sources.read_lines(source, file, stream), start=1)
        for number, line in lines:
            text = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if not text.strip():
                continue
            pieces = parse_line(text, f"{file.path}:{number}")
            if pieces:
                pieces[-1] = pieces[-1]._replace(source_bytes=len(line))
                yield from pieces


def parse_line(line: bytes, where: str) -> list[Piece]:
    """Turns a JSON line into the pieces of its document; `where` is ``file:line``, for messages.

    Raises:
        UserError: The line is not JSON or not an object, has no known form, or a field has the wrong type.
    """
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"JSON lines must be UTF-8 text ({error.reason})", where=where, fix=_JSON_FIX) from None
    except (json.JSONDecodeError, RecursionError) as error:
        is_syntax = isinstance(error, json.JSONDecodeError)
        reason = f"{error.msg} at column {error.colno}" if is_syntax else "nested too deep"
        raise UserError(f"this line is not JSON ({reason})", where=where, fix=_JSON_FIX) from None
    if not isinstance(record, dict):
        rule = f"a line must be a JSON object, not {type(record).__name__}"
        raise UserError(rule, where=where, value=_shorten(record), fix=_FORMS_FIX)
    try:
        return _render(record, where)
    except UnicodeEncodeError:
        rule = "the text holds half a surrogate pair (an escape \\ud800 to \\udfff without its other half)"
        raise UserError(rule, where=where, fix="write the character itself, or both halves") from None


_JSON_FIX = "write one JSON object on each line"
_FORMS_FIX = "give each line `text`, or `messages` (a list of {role, content}), or `instruction`, `input` and `output`"


def _render(record: dict, where: str) -> list[Piece]:
    if "messages" in record:
        return render_messages(record["messages"], where)
    if "instruction" in record and "output" in record:
        prompt = f"### Instruction:\n{_text_field(record, 'instruction', where)}\n\n"
        if record.get("input"):
            prompt += f"### Input:\n{_text_field(record, 'input', where)}\n\n"
        prompt += "### Response:\n"
        output = _text_field(record, "output", where)
        return [Piece(prompt.encode(), False, False, False, 0), Piece(output.encode(), True, True, True, 0)]
    if "text" in record:
        text = _text_field(record, "text", where)
        return [Piece(text.encode(), True, True, True, 0)] if text else []
    rule = f"the line has none of the known forms; its fields are {', '.join(map(str, record)) or 'none'}"
    raise UserError(rule, where=where, fix=_FORMS_FIX)


def render_prompt(messages: Sequence[dict]) -> str:
    """Renders a conversation for generation: the turns as in training, then the start of the assistant's turn."""
    turns = (f"<|im_start|>{message['role']}\n{message['content']}{USER_TURN_END}" for message in messages)
    return "".join(turns) + "<|im_start|>assistant\n"


def render_messages(messages: object, where: str) -> list[Piece]:
    """Renders a conversation; see the top of this file for the form.

    Raises:
        UserError: It is not a list of ``{role, content}`` with strings, or has no turn of the assistant.
    """
    if not isinstance(messages, list) or not messages:
        raise _wrong_field("messages", messages, "a list of {role, content}", where)
    pieces: list[Piece] = []
    prompt = ""
    for index, message in enumerate(messages):
        role, content = _turn(message, index, where)
        prompt += f"<|im_start|>{role}\n"
        if role != "assistant":
            prompt += content + USER_TURN_END
            continue
        pieces.append(Piece(prompt.encode(), False, False, False, 0))
        pieces.append(Piece(content.encode(), True, True, False, 0))
        prompt = "\n"
    if not pieces:
        rule = "the conversation has no turn of the assistant, so there is nothing to learn"
        fix = 'add a message with role "assistant", or remove the line'
        raise UserError(rule, where=where, key="messages", fix=fix)
    if messages[-1]["role"] != "assistant":
        pieces.append(Piece(prompt.encode(), False, True, False, 0))
    pieces[-1] = pieces[-1]._replace(ends_document=True)
    return pieces


def _turn(message: object, index: int, where: str) -> tuple[str, str]:
    key = f"messages.{index}"
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise _wrong_field(key, message, "an object with role and content", where)
    role = _text_field(message, "role", where, prefix=key + ".")
    if role not in _ROLES:
        raise _wrong_field(f"{key}.role", role, f"one of {', '.join(_ROLES)}", where)
    return role, _text_field(message, "content", where, prefix=key + ".")


def _text_field(record: dict, name: str, where: str, prefix: str = "") -> str:
    if not isinstance(record[name], str):
        raise _wrong_field(prefix + name, record[name], "text", where)
    return record[name]


def _wrong_field(key: str, value: object, expected: str, where: str) -> UserError:
    return UserError(f"it must be {expected}", where=where, key=key, value=_shorten(value), fix=_FORMS_FIX)


def _shorten(value: object) -> object:
    return value if len(repr(value)) <= _SHOWN_CHARACTERS else repr(value)[:_SHOWN_CHARACTERS] + "..."
