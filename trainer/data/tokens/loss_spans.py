"""Finds the characters of a rendered conversation that carry loss: the assistant's turns and the token that ends each.

A template with ``{% generation %}`` blocks marks them; most templates that ship have such blocks. For other templates,
parts of the conversation are rendered and compared. A turn starts where the complete conversation first differs from
the messages before the turn, rendered with the generation prompt. It ends after the token that ends a turn, or, in
templates that only mark the beginning of turns (GLM-4), after the token that begins the next turn. An end token of the
tokenizer that follows directly belongs to the turn: Cohere2 ends an answer with two tokens.

The assistant's header and the token that ends a turn are the same in every conversation. `detect_turn_format` reads
them once from a short conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import NamedTuple

Render = Callable[[Sequence[dict], bool], "str | None"]
"""Renders messages, with or without the generation prompt; returns None if the template refuses them."""
Spans = list[tuple[int, int]]
"""Ranges of characters: from, to."""

MARKER = re.compile(r"<[|｜][^<>\s]+[|｜]>|</?[a-z]+(?:_[a-z]+)+>|\[/?[A-Z]+(?:_[A-Z]+)*\]|</s>")
"""Matches text that looks like a special token: <|user|>, <｜User｜>, <start_of_turn>, [INST]."""

# It begins and ends with a private-use character: no text has it, and no template strips it.
_SENTINEL = "\ue0a7sentinel\ue0a7"
_QUESTION = "Wqfirst"
_ANSWER = "Xqanswer"
_NEXT_QUESTION = "Yqsecond"
_NEXT_ANSWER = "Zqreply"


class TurnFormat(NamedTuple):
    """How a template writes the assistant's turns."""

    header: str  # the text before each turn; empty if it is unknown
    prefill: str  # text after the header in the generation prompt but not in every turn, such as <think>
    turn_end: str  # the token that ends each turn; empty if it is unknown
    call_end: str  # the token that ends a turn with a tool call; empty if it is unknown
    ends_last_turn: bool  # whether the last answer of a conversation ends with such a token too
    sample: str  # a rendered conversation, from which notes are derived
    added: tuple[str, ...]  # the tokenizer's added tokens
    special: tuple[str, ...]  # the added tokens that are special
    end_tokens: tuple[str, ...]  # the tokens with which the tokenizer ends a text


class SpanError(Exception):
    """The turns of the assistant cannot be located in this conversation."""


def detect_turn_format(render: Render, added_tokens: Mapping[str, bool], end_tokens: Sequence[str]) -> TurnFormat:
    """Reads how a template writes turns from a conversation of two questions and answers.

    Args:
        added_tokens: The tokens that are matched in a text before all others -> whether each is special.
        end_tokens: The texts of the tokenizer's `eos_ids`.
    """
    special = tuple(token for token, is_special in added_tokens.items() if is_special)
    unknown = TurnFormat("", "", "", "", True, "", tuple(added_tokens), special, tuple(end_tokens))
    text = render(_conversation(_QUESTION, _ANSWER, _NEXT_QUESTION, _NEXT_ANSWER), False)
    prompt = render(_conversation(_QUESTION), True)
    first_turn = render(_conversation(_QUESTION, _ANSWER), False)
    other_turn = render(_conversation(_QUESTION, _NEXT_ANSWER), False)
    if text is None or prompt is None or first_turn is None or other_turn is None:
        return unknown._replace(sample=text or "")
    answer = text.find(_ANSWER)
    question = text.find(_NEXT_QUESTION)
    if answer < 0 or question < answer:
        return unknown._replace(sample=text)
    between = text[answer + len(_ANSWER) : question]
    turn_end = _first_token(between, unknown.added)
    if not turn_end:  # the markers of the template are ordinary text for this tokenizer
        if marker := MARKER.match(between.lstrip()):
            turn_end = marker.group()
        else:
            turn_end = (between.split() or [""])[0]
    tail = first_turn.partition(_ANSWER)[2]
    ends_last_turn = turn_end in tail or bool(_first_token(tail, special))
    rest_of_prompt = _after_question(prompt)
    common = commonprefix([rest_of_prompt, _after_question(first_turn), _after_question(other_turn)])
    # The end of the user's turn is not part of the header: a tool's result, for example, ends differently.
    header = ""
    if turn_end:
        header = common.rpartition(turn_end)[2].lstrip()
    prefill = ""
    if header:
        prefill = rest_of_prompt[len(common) :]
    form = unknown._replace(
        header=header, prefill=prefill, turn_end=turn_end, ends_last_turn=ends_last_turn, sample=text
    )
    return form._replace(call_end=_call_end(render, form))


def _after_question(text: str) -> str:
    return text[text.find(_QUESTION) + len(_QUESTION) :]


def _call_end(render: Render, form: TurnFormat) -> str:
    """Finds the token that ends a turn with a tool call; empty if the template has no tool calls."""
    for arguments in ({"x": 1}, '{"x": 1}'):  # a template takes one or the other
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
    """Returns the first of the tokens in `text`, and the longest of several at the same place; empty without any."""
    if matches := [(text.find(token), -len(token), token) for token in tokens if token and token in text]:
        return min(matches)[2]
    return ""


def find_spans(render: Render, messages: Sequence[dict], turns: Sequence[int], text: str, form: TurnFormat) -> Spans:
    """Locates turns of the assistant in `text`, which is `messages` rendered.

    Args:
        turns: The numbers of the assistant's messages to locate.

    Returns:
        The spans, in order. The last one may lack an end token, see `has_end`.

    Raises:
        SpanError: A turn cannot be located.
    """
    starts = [_start(render, messages, turn, text, form) for turn in turns]
    limits = [*starts[1:], len(text)]
    spans = []
    for turn, start, limit in zip(turns, starts, limits, strict=True):
        end = _find_end(render, messages, turn, text, form, start, limit)
        if has_end(text, end, form):  # an end token of the tokenizer may follow that of the turn
            end += len(next((token for token in form.end_tokens if token and text.startswith(token, end)), ""))
        spans.append((start, end))
    return spans


def has_end(text: str, end: int, form: TurnFormat) -> bool:
    """Checks whether the turn that ends at `end` ends with a special token or the token that ends turns."""
    return text.endswith((form.turn_end or _SENTINEL, *form.special), 0, end)


def _start(render: Render, messages: Sequence[dict], turn: int, text: str, form: TurnFormat) -> int:
    """Finds the first character that the assistant writes in its turn."""
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
    """Finds the end of the message before the turn, and after it the generation prompt; None if that fails."""
    if turn == 0:
        return None
    marked = [*messages[: turn - 1], {**messages[turn - 1], "content": _SENTINEL}]
    prompt = render(marked, True)
    marked_text = render([*marked, *messages[turn:]], False)
    if prompt is None or marked_text is None:
        return None
    before, sentinel, after = marked_text.partition(_SENTINEL)
    if not sentinel or not text.startswith(before) or not text.endswith(after):
        return None
    return len(text) - len(after) + len(commonprefix([prompt.partition(_SENTINEL)[2], after]))


def _start_of_content(render: Render, messages: Sequence[dict], turn: int, text: str) -> int | None:
    """Finds the content of the turn; None if that fails."""
    marked = [*messages[:turn], {**messages[turn], "content": _SENTINEL}, *messages[turn + 1 :]]
    before, sentinel, _ = (render(marked, False) or "").partition(_SENTINEL)
    if sentinel and text.startswith(before):
        return len(before)
    return None


def _find_end(
    render: Render, messages: Sequence[dict], turn: int, text: str, form: TurnFormat, start: int, limit: int
) -> int:
    """Finds the end of the turn that starts at `start`: after the token that ends it, and at most at `limit`."""
    bound = limit
    is_known = turn == len(messages) - 1
    if not is_known:
        through_turn = render(messages[: turn + 1], False)
        if through_turn is not None and text.startswith(through_turn):
            is_known = True
            bound = min(len(through_turn), limit)
    if not is_known:
        places = [(text.find(token, start, bound), token) for token in (form.turn_end, form.call_end) if token]
        ends = [place + len(token) for place, token in places if place >= 0]
        if not ends:
            raise SpanError
        return min(ends)
    last_end = -1
    if form.turn_end:
        last_end = text.rfind(form.turn_end, start, bound)
    if last_end >= 0:
        end = last_end + len(form.turn_end)
        if rest := text[end:bound].strip():
            for token in form.special:
                rest = rest.replace(token, "")
        if not rest.strip():  # otherwise it ended only a part of the turn, such as the reasoning before the answer
            return end
    written = len(text[:bound].rstrip())
    if text.endswith(form.special, start, written):
        return written  # a tool call, for example, may end with another token
    begins = next((token for token in (form.turn_end, *form.added) if token and text.startswith(token, bound)), "")
    return bound + len(begins)
