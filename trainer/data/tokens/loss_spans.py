"""Finds the characters of a rendered conversation that carry loss: the assistant's turns and the token that ends each.

A template with ``{% generation %}`` blocks, as most that ship have, says where they are. Every other template is asked
by rendering parts of the conversation. A turn starts where the messages before it, rendered with the generation prompt,
and the whole conversation part. It ends behind the token that ends a turn, or, in templates that only mark where a turn
begins (GLM-4), behind the token that begins the next one. An end token of the tokenizer that follows directly belongs
to it: Cohere2 ends an answer with two.

What is the same for every conversation, the assistant's header and the token that ends a turn, is read from a short
conversation once, in `detect_turn_format`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import NamedTuple

Render = Callable[[Sequence[dict], bool], "str | None"]
"""Renders messages, with or without the generation prompt; None where the template refuses them."""
Spans = list[tuple[int, int]]
"""Characters from, to."""

MARKER = re.compile(r"<[|｜][^<>\s]+[|｜]>|</?[a-z]+(?:_[a-z]+)+>|\[/?[A-Z]+(?:_[A-Z]+)*\]|</s>")
"""What looks like a special token in a rendered text: <|user|>, <｜User｜>, <start_of_turn>, [INST]."""

# Private-use characters around it: no text holds them, and no template strips them.
_SENTINEL = "\ue0a7sentinel\ue0a7"
_QUESTION = "Wqfirst"
_ANSWER = "Xqanswer"
_NEXT_QUESTION = "Yqsecond"
_NEXT_ANSWER = "Zqreply"


class TurnFormat(NamedTuple):
    """How a template writes the assistant's turns."""

    header: str  # what stands before each; empty if that cannot be told
    prefill: str  # what the generation prompt has behind it, and not every turn, such as <think>
    turn_end: str  # the token that ends each; empty if that cannot be told
    call_end: str  # the one that ends a turn with the call of a tool, if that can be told
    ends_last_turn: bool  # whether the last answer of a conversation has such a token too
    sample: str  # a rendered conversation, for what else is to be known of the template
    added: tuple[str, ...]  # the tokenizer's added tokens
    special: tuple[str, ...]  # those of them that are special
    end_tokens: tuple[str, ...]  # those with which the tokenizer ends a text


class SpanError(Exception):
    """The turns of the assistant cannot be found in this conversation."""


def detect_turn_format(render: Render, added_tokens: Mapping[str, bool], end_tokens: Sequence[str]) -> TurnFormat:
    """Reads a template's form from a conversation of two questions and answers.

    Args:
        added_tokens: As in `Tokenizer`.
        end_tokens: The texts of the tokenizer's `eos_ids`.
    """
    special = tuple(token for token, is_special in added_tokens.items() if is_special)
    unknown = TurnFormat("", "", "", "", True, "", tuple(added_tokens), special, tuple(end_tokens))
    whole = render(_conversation(_QUESTION, _ANSWER, _NEXT_QUESTION, _NEXT_ANSWER), False)
    prompt = render(_conversation(_QUESTION), True)
    answers = [render(_conversation(_QUESTION, answer), False) for answer in (_ANSWER, _NEXT_ANSWER)]
    if whole is None or prompt is None or None in answers:
        return unknown._replace(sample=whole or "")
    answer = whole.find(_ANSWER)
    question = whole.find(_NEXT_QUESTION)
    if answer < 0 or question < answer:
        return unknown._replace(sample=whole)
    between = whole[answer + len(_ANSWER) : question]
    turn_end = _first_token(between, unknown.added)
    if not turn_end:  # the markers of the template are ordinary text for this tokenizer
        marker = MARKER.match(between.lstrip())
        if marker:
            turn_end = marker.group()
        else:
            turn_end = (between.split() or [""])[0]
    tail = answers[0].partition(_ANSWER)[2]
    ends_last_turn = turn_end in tail or bool(_first_token(tail, special))
    start = prompt.find(_QUESTION) + len(_QUESTION)
    header = commonprefix([prompt[start:], *(text[text.find(_QUESTION) + len(_QUESTION) :] for text in answers)])
    # What ends the user's turn before the header is no part of it: an answer to a tool's result has another one.
    own = ""
    if turn_end:
        own = header.rpartition(turn_end)[2].lstrip()
    prefill = ""
    if own:
        prefill = prompt[start + len(header) :]
    form = unknown._replace(header=own, prefill=prefill, turn_end=turn_end, ends_last_turn=ends_last_turn, sample=whole)
    return form._replace(call_end=_call_end(render, form))


def _call_end(render: Render, form: TurnFormat) -> str:
    """The token that ends a turn with the call of a tool; empty where the template has no calls."""
    for arguments in ({"x": 1}, '{"x": 1}'):  # templates differ in what they take
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": arguments}}
        question, answer, result, reply = _conversation(_QUESTION, "", "3", _ANSWER)
        answer["tool_calls"] = [call]
        result |= {"role": "tool", "tool_call_id": call["id"], "name": "f"}
        messages = [question, answer, result, reply]
        text = render(messages, False)
        if text is None:
            continue
        try:
            ((_, end),) = find_spans(render, messages, [1], text, form)
        except SpanError:
            continue
        return max((token for token in form.added if text.endswith(token, 0, end)), key=len, default="")
    return ""


def _conversation(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]


def _first_token(text: str, tokens: Sequence[str]) -> str:
    """The token that stands first in `text`, the longest of several at the same place; empty if there is none."""
    found = [(text.find(token), -len(token), token) for token in tokens if token and token in text]
    if found:
        return min(found)[2]
    return ""


def find_spans(render: Render, messages: Sequence[dict], wanted: Sequence[int], text: str, form: TurnFormat) -> Spans:
    """Finds turns of the assistant in `text`, which is `messages` rendered.

    Args:
        wanted: The numbers of the assistant's messages to find.

    Returns:
        The spans, in order. Whether the last ends with the token that ends a turn, `has_end` tells.

    Raises:
        SpanError: A turn cannot be found.
    """
    starts = [_start(render, messages, turn, text, form) for turn in wanted]
    limits = [*starts[1:], len(text)]
    spans = []
    for turn, start, limit in zip(wanted, starts, limits, strict=True):
        end = _end(render, messages, turn, text, form, start, limit)
        spans.append((start, end + len(_end_token_at(text, end, form))))
    return spans


def _end_token_at(text: str, at: int, form: TurnFormat) -> str:
    """The end token that follows the token that ends a turn; empty without one."""
    if not has_end(text, at, form):
        return ""
    return next((token for token in form.end_tokens if token and text.startswith(token, at)), "")


def has_end(text: str, end: int, form: TurnFormat) -> bool:
    """Whether the turn that ends at `end` ends with a token."""
    return text.endswith((form.turn_end or _SENTINEL, *form.special), 0, end)


def _start(render: Render, messages: Sequence[dict], turn: int, text: str, form: TurnFormat) -> int:
    """The first character that the assistant writes in its turn."""
    if turn == 0 and form.header in text:  # no template says what is before the first message
        start = text.index(form.header) + len(form.header)
        if text.startswith(form.prefill, start):
            return start + len(form.prefill)
        return start
    prompt = render(messages[:turn], True)
    if prompt is not None and text.startswith(prompt):
        return len(prompt)
    before = render(messages[:turn], False)
    if prompt is not None and before is not None and text.startswith(before):
        header = ""
        if prompt.startswith(before):
            header = prompt[len(before) :]
        if form.header and header.startswith(form.header) and text.startswith(form.header, len(before)):
            return len(before) + len(form.header)
        return len(before) + len(commonprefix([header, text[len(before) :]]))
    # The template writes the messages before this one differently when it follows.
    for find in (_start_after_message, _start_of_content):
        start = find(render, messages, turn, text)
        if start is not None:
            return start
    raise SpanError


def _start_after_message(render: Render, messages: Sequence[dict], turn: int, text: str) -> int | None:
    """Finds the end of the message before the turn, and behind it the generation prompt; None if that fails."""
    if turn == 0:
        return None
    marked = [*messages[: turn - 1], {**messages[turn - 1], "content": _SENTINEL}]
    prompt = render(marked, True)
    whole = render([*marked, *messages[turn:]], False)
    if prompt is None or whole is None:
        return None
    before, found, after = whole.partition(_SENTINEL)
    if not found or not text.startswith(before) or not text.endswith(after):
        return None
    return len(text) - len(after) + len(commonprefix([prompt.partition(_SENTINEL)[2], after]))


def _start_of_content(render: Render, messages: Sequence[dict], turn: int, text: str) -> int | None:
    """Finds the content of the turn; None if that fails."""
    whole = render([*messages[:turn], {**messages[turn], "content": _SENTINEL}, *messages[turn + 1 :]], False)
    before, found, _ = (whole or "").partition(_SENTINEL)
    if found and text.startswith(before):
        return len(before)
    return None


def _end(
    render: Render, messages: Sequence[dict], turn: int, text: str, form: TurnFormat, start: int, limit: int
) -> int:
    """Where the turn that starts at `start` ends: behind the token that ends it, and at most at `limit`."""
    bound = limit
    is_known = turn == len(messages) - 1
    if not is_known:
        upto = render(messages[: turn + 1], False)
        if is_known := upto is not None and text.startswith(upto):
            bound = min(len(upto), limit)
    if not is_known:
        ends = [token for token in (form.turn_end, form.call_end) if token]
        found = [at + len(token) for token in ends if (at := text.find(token, start, bound)) >= 0]
        if not found:
            raise SpanError
        return min(found)
    if form.turn_end and (at := text.rfind(form.turn_end, start, bound)) >= 0:
        at += len(form.turn_end)
        rest = text[at:bound].strip()
        for token in form.special if rest else ():
            rest = rest.replace(token, "")
        if not rest.strip():  # otherwise it ended only a part of the turn, such as the thinking before the answer
            return at
    written = len(text[:bound].rstrip())
    if text.endswith(form.special, start, written):
        return written  # a call of a tool, for example, may end with a token of its own
    begins = next((token for token in (form.turn_end, *form.added) if token and text.startswith(token, bound)), "")
    return bound + len(begins)
