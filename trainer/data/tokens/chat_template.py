"""Renders conversations with chat templates, and finds the characters that carry loss.

The template is the first of these that exists:

1. ``train_dataset.chat_template``: the name of a template in `templates`, a ``.jinja`` file, or a folder with a
   template as below;
2. ``chat_template.jinja`` beside tokenizer.json;
3. ``chat_template`` in ``tokenizer_config.json``: a text, or a list of ``{name, template}``; in a list, ``tool_use``
   serves conversations with tools and ``default`` all others;
4. ChatML. A turn ends with ``<|im_end|>`` if that is one token of the tokenizer. Otherwise the assistant's turns end
   with the tokenizer's end token, and all other turns with the text ``<|im_end|>``.

The rendered text equals that of ``apply_chat_template`` in transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.checks.problem import data_error
from trainer.data.tokens import loss_spans
from trainer.data.tokens.loss_spans import Spans, TurnFormat
from trainer.data.tokens.tokenizer import Tokenizer
from trainer.data.tokens.tokenizer_files import TokenizerConfigFile, read_beside
from trainer.errors import UserError
from trainer.storage.marker import read_saved

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.data.tokens.template_engine import Compiled

ASSISTANT = "assistant"
LAST = "last"
ALL = "all"
"""Values of ``train_on``: all turns of the assistant, its last turn, or all of the text."""
TEMPLATES = Path(__file__).parent / "templates"

_VERSION = "chat-template-2"
_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_DEFAULT = "default"
_TOOL_USE = "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

# ChatML for a tokenizer that has no token for the end of a turn: the assistant's turns end with the end token.
_CHATML_WITH_EOS = """\
{%- if tools %}
    {{- raise_exception('ChatML has no form for tools') }}
{%- endif %}
{{- bos }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- raise_exception('ChatML has no form for tool calls') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- if message.role == 'assistant' %}
        {{- eos + ('' if loop.last and not add_generation_prompt else '\\n') }}
    {%- else %}
        {{- '<|im_end|>\\n' + (eos if loop.last and not add_generation_prompt else '') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


class _TemplateSource(NamedTuple):
    """The templates of a tokenizer or of the YAML."""

    texts: dict[str, str]  # by name; `_DEFAULT` always exists
    name: str  # their origin, in words
    where: str  # the file, for messages
    is_given: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens of its tokenizer.

    Attributes:
        name: Its origin, in words.
        is_given: Whether the tokenizer or the YAML has the template; otherwise it is ChatML.
        fingerprint: Changes whenever a conversation could become another text or other spans.
        notes: Sentences for the user about the template.
        turn_end: The text that ends the assistant's turns; empty if it is unknown.
        turn_end_id: The id of `turn_end` if it is one token; generation ends with it.
    """

    name: str
    where: str
    is_given: bool
    fingerprint: str
    notes: tuple[str, ...]
    turn_end: str
    turn_end_id: int | None
    _compiled: Mapping[str, Compiled]
    _forms: Mapping[str, TurnFormat]
    _variables: Mapping[str, Any]
    _end_token: str

    @property
    def as_file(self) -> str:
        """Returns the content of a chat_template.jinja for other programs.

        They do not know the variables of our ChatML, and some of them do not know generation blocks.
        """
        names = ["bos", "eos"]
        if self.is_given:
            names = []
        set_here = "".join(f"{{%- set {name} = {json.dumps(self._variables[name])} %}}" for name in names)
        source = self._compiled[_DEFAULT].source
        if Path(self.where).parent == TEMPLATES:
            source = re.sub(r"\{%- (end)?generation %\}", "", source)
        return set_here + source

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False, where: str = "",
    ) -> str:  # fmt: skip
        """Renders a conversation.

        Args:
            add_generation_prompt: Whether to append the header of a turn of the assistant.
            where: The place of the conversation in its file, for messages.

        Raises:
            UserError: The template refuses the conversation, fails, or does not end.
        """
        return self._render(_normalize_messages(messages), tools, add_generation_prompt, where)[0]

    def spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, train_on: str, where: str
    ) -> tuple[str, Spans]:
        """Renders a conversation for training.

        Returns:
            The text, and the ranges (from, to) of its characters that carry loss. If the template does not end the last
            answer, the tokenizer's end token is appended.

        Raises:
            UserError: The template refuses the conversation, fails, does not end or leaves out a turn. Or there is no
                turn of the assistant, or the assistant's turns cannot be located.
        """
        normalized = _normalize_messages(messages)
        turns = [number for number, message in enumerate(normalized) if message["role"] == "assistant"]
        trained = [turn for turn in turns if normalized[turn].get("weight") != 0]
        if train_on != ALL and not trained:
            rule = "the conversation has no turn of the assistant that carries loss, so there is nothing to learn"
            raise UserError(rule, where=where, key="messages", fix='add a message with role "assistant"')
        text, generated = self._render(normalized, tools, False, where)
        self._check_is_complete(normalized, tools, text, where)
        if train_on == ALL:
            return text, [(0, len(text))]
        if train_on == LAST:
            trained = trained[-1:]
        if self._compiled[self._kind(tools)].has_generation:
            return text, self._generated_spans(generated, turns, trained, where)
        form = self._forms[self._kind(tools)]
        try:
            spans = loss_spans.find_spans(self._renderer(tools), normalized, trained, text, form)
        except loss_spans.SpanError:
            rule = f"the chat template ({self.name}) does not show where the assistant's turns begin and end"
            fix = "use a template with {% generation %} blocks, or set train_on to last or all"
            raise UserError(rule, where=where, key="messages", fix=fix) from None
        start, end = spans[-1]
        if end == len(text) and not loss_spans.has_end(text, end, form):
            text += self._end_token
            spans[-1] = start, len(text)
        return text, spans

    def _generated_spans(
        self, generated: Sequence[tuple[int, int]], turns: list[int], trained: list[int], where: str
    ) -> Spans:
        """Returns those of all `generated` blocks of a conversation that carry loss, as ranges of characters.

        `turns` are the numbers of the assistant's messages, `trained` of those that carry loss.
        """
        if trained == turns:
            return list(generated)
        if len(generated) == len(turns):
            return [span for turn, span in zip(turns, generated, strict=True) if turn in trained]
        if trained == turns[-1:] and generated:
            return [generated[-1]]
        blocks = f"{len(generated)} generation blocks for {len(turns)} turns"
        rule = f"the chat template ({self.name}) has {blocks}, so turns without loss cannot be identified"
        fix = "write one block around each turn, or remove weight from the messages"
        raise UserError(rule, where=where, key="messages", fix=fix)

    def _kind(self, tools: Sequence[Any] | None) -> str:
        if tools is not None and _TOOL_USE in self._compiled:
            return _TOOL_USE
        return _DEFAULT

    def _renderer(self, tools: Sequence[Any] | None) -> loss_spans.Render:
        def render(messages: Sequence[dict], add_generation_prompt: bool) -> str | None:
            """Returns the text of a conversation, or None if the template refuses it."""
            try:
                return self._render(messages, tools, add_generation_prompt, "")[0]
            except _Refused:
                return None

        return render

    def _render(
        self, messages: Sequence[dict], tools: Sequence[Any] | None, add_generation_prompt: bool, where: str
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        from trainer.data.tokens import template_engine as engine  # late, as Jinja2 is needed only for conversations

        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return engine.render(self._compiled[self._kind(tools)], variables)
        except engine.Refusal as error:
            rule = f"the chat template ({self.name}) refuses the conversation: {str(error).removesuffix('.')}"
            fix = "change the conversation as it says, or set train_dataset.chat_template to another template"
            raise _Refused(rule, where=where, fix=fix) from None
        except engine.Unbounded as error:
            line = engine.line_of(error)
            conversation = "this conversation"
            if where:
                conversation += f" ({where})"
            template_where = self.where
            if line:
                template_where += f":{line}"
            rule = f"the chat template does not end on {conversation}: {error}"
            fix = "correct its loops, or set train_dataset.chat_template to another template"
            raise EndlessTemplateError(rule, where=template_where, fix=fix) from None
        except Exception as error:  # a template is a program: it can fail in any way
            line = engine.line_of(error)
            at = ""
            if line:
                at = f"line {line} of it: "
            rule = f"the chat template ({self.name}) fails on this conversation ({at}{type(error).__name__}: {error})"
            fix = "change the conversation, or set train_dataset.chat_template to another template"
            if lacking := [name for name in _SPECIAL if f"'{name}' is undefined" in str(error)]:
                rule = f"the chat template ({self.name}) needs a {lacking[0]}, which the tokenizer lacks"
                fix = "use a tokenizer that has one, or set train_dataset.chat_template to another template"
            if isinstance(error, TypeError) and _has_arguments_as_object(messages):
                fix = f"write `arguments` of the tool calls as a JSON string, which this template may want; or {fix}"
            raise _Refused(rule, where=where, fix=fix) from None

    def _check_is_complete(self, messages: Sequence[dict], tools: Sequence[Any] | None, text: str, where: str) -> None:
        """Raises an error if the template silently leaves out a part of the conversation."""
        source = self._compiled[self._kind(tools)].source
        lost = ""
        if not text:
            lost = "the whole conversation"
        elif tools and "tools" not in source:
            lost = "the tools"
        elif "tool_calls" not in source and any(message.get("tool_calls") for message in messages):
            lost = "the calls of tools"
        elif not any(name in source for name in _REASONING) and any(message.get(_REASONING[0]) for message in messages):
            lost = "the reasoning of the assistant"
        for number, message in enumerate(messages):
            content = message.get("content")
            is_prompt = message["role"] in ("system", "developer", "user")
            if is_prompt and isinstance(content, str) and content.strip() not in text:
                lost = f"the {message['role']}'s message {number}"
                break
        if lost:
            rule = f"the chat template ({self.name}) leaves out {lost}"
            fix = "set train_dataset.chat_template to a template that has a place for it, or remove it from the data"
            raise UserError(rule, where=where, fix=fix)


class EndlessTemplateError(UserError):
    """The template does not end on a conversation. Such a conversation is never skipped, since each takes long."""


class _Refused(UserError):
    """The template cannot render this conversation."""


def load_chat_template(config: Config, section: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Finds and compiles the chat template of a data set section, in the order of the module's docstring.

    Raises:
        UserError: The template that the YAML names does not exist, or a template has a syntax error. Or the token that
            ends a turn lies beyond the model's vocabulary.
    """
    template = _build(_find(config, section, tokenizer), tokenizer)
    vocab_size = config.decoder.vocab_size
    if template.turn_end_id is not None and template.turn_end_id >= vocab_size:
        rule = f"the chat template ends turns with {template.turn_end!r}, whose id {template.turn_end_id} is beyond it"
        fix = f"set it to at least {template.turn_end_id + 1}, or use another tokenizer or template"
        raise data_error(config, "model.model_config.vocab_size", rule, fix)
    return template


def chatml(tokenizer: Tokenizer) -> ChatTemplate:
    """Builds the ChatML template, for a tokenizer without a template."""
    return _build(_chatml_source(tokenizer), tokenizer)


def alpaca(tokenizer: Tokenizer) -> ChatTemplate:
    """Builds the template that writes an instruction as a training writes it that has no template."""
    path = TEMPLATES / "alpaca.jinja"
    text = "{{- bos }}{%- set eos_token = eos %}" + path.read_text(encoding="utf-8")
    return _build(_TemplateSource({_DEFAULT: text}, "Alpaca's form", str(path), False), tokenizer)


def resolve_train_on(config: Config, section: str) -> str:
    """Returns the value of ``train_on`` for a section; by default it is that of ``train_dataset``."""
    return getattr(config, section).train_on or config.train_dataset.train_on or ASSISTANT


def template_names() -> list[str]:
    """Lists the names that ``chat_template`` can have."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def _build(source: _TemplateSource, tokenizer: Tokenizer) -> ChatTemplate:
    variables = dict(tokenizer.special_tokens)
    if not source.is_given:
        variables |= {"bos": tokenizer.bos_token, "eos": tokenizer.eos_token}
    end_tokens = [tokenizer.decode([token], skip_special_tokens=False) for token in tokenizer.eos_ids]
    settings = [_VERSION, source.texts, variables, tokenizer.eos_token, end_tokens, tokenizer.added_tokens]
    template = ChatTemplate(
        name=source.name,
        where=source.where,
        is_given=source.is_given,
        fingerprint=hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        notes=(),
        turn_end="",
        turn_end_id=None,
        _compiled={kind: _compile(text, source.where) for kind, text in source.texts.items()},
        _forms={},
        _variables=variables,
        _end_token=tokenizer.eos_token,
    )
    # Short conversations show how it writes turns.
    tools_of: dict[str, list[Any]] = {_TOOL_USE: []}
    renderers = {kind: template._renderer(tools_of.get(kind)) for kind in template._compiled}
    added = tokenizer.added_tokens
    forms = {kind: loss_spans.detect_turn_format(render, added, end_tokens) for kind, render in renderers.items()}
    turn_end = forms[_DEFAULT].turn_end
    turn_end_id = None
    if turn_end:
        turn_end_id = tokenizer.token_id(turn_end)
    return replace(
        template,
        _forms=forms,
        turn_end=turn_end,
        turn_end_id=turn_end_id,
        notes=tuple(_notes(template, forms[_DEFAULT], tokenizer)),
    )


def _notes(template: ChatTemplate, form: TurnFormat, tokenizer: Tokenizer) -> list[str]:
    notes = []
    markers = dict.fromkeys(loss_spans.MARKER.findall(form.sample))
    split = ", ".join(marker for marker in markers if tokenizer.token_id(marker) is None)
    if not template.is_given:
        text = ""
        if split:
            text = f" ({split} are ordinary text for this tokenizer)"
        name = f"conversations are written as {template.name}{text}"
        notes.append(f"Neither the tokenizer nor the YAML has a chat template: {name}.")
    elif split:
        notes.append(f"Markers of the chat template are not tokens of the tokenizer but ordinary text: {split}.")
    compiled = template._compiled[_DEFAULT]
    if form.sample and not form.ends_last_turn and not compiled.has_generation:
        notes.append(
            f"The chat template leaves the last answer without an end; {tokenizer.eos_token} is added, with loss."
        )
    if any("strftime_now" in each.source for each in template._compiled.values()):
        notes.append("The chat template writes the current date; tokenized data keep the date of their making.")
    return notes


def _find(config: Config, section: str, tokenizer: Tokenizer) -> _TemplateSource:
    owner = "train_dataset"
    if getattr(config, section).chat_template:
        owner = section
    if name := getattr(config, owner).chat_template:
        return _find_named(name, f"{owner}.chat_template", config.source.where(f"{owner}.chat_template"))
    source = None
    if tokenizer.folder is not None:
        source = _find_in(tokenizer.folder)
    if source is not None:
        return source
    return _chatml_source(tokenizer)


def _chatml_source(tokenizer: Tokenizer) -> _TemplateSource:
    if tokenizer.token_id("<|im_end|>") is None:
        return _TemplateSource({_DEFAULT: _CHATML_WITH_EOS}, "ChatML", "ChatML", False)
    path = TEMPLATES / "chatml.jinja"
    return _TemplateSource({_DEFAULT: "{{- bos }}" + path.read_text(encoding="utf-8")}, "ChatML", str(path), False)


def _find_named(name: str, key: str, where: str) -> _TemplateSource:
    path = TEMPLATES / f"{name}.jinja"
    if name in template_names():
        return _TemplateSource({_DEFAULT: path.read_text(encoding="utf-8")}, name, str(path), True)
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        source = _find_in(path)
        if source is not None:
            return source
        rule = f"the folder has neither {_FILE} nor a {_CONFIG_FILE} with a chat_template"
        fix = "name another one"
        raise UserError(rule, where=where, key=key, value=name, fix=fix)
    try:
        return _TemplateSource({_DEFAULT: read_saved(path).decode("utf-8")}, str(path), str(path), True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        rule = f"it is neither the name of a chat template nor a file that can be read ({reason})"
        fix = f"set it to one of {', '.join(template_names())}, or to a .jinja file"
        raise UserError(rule, where=where, key=key, value=name, fix=fix) from None


def _find_in(folder: Path) -> _TemplateSource | None:
    """Finds the template beside a tokenizer, or returns None."""
    path = folder / _FILE
    if path.is_file():
        texts = {_DEFAULT: _read(path)}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            texts[extra.stem] = _read(extra)
        return _TemplateSource(texts, str(path), str(path), True)
    path = folder / _CONFIG_FILE
    templates = read_beside(path, TokenizerConfigFile).chat_template
    if not templates:
        return None
    if isinstance(templates, str):
        texts = {_DEFAULT: templates}
    else:
        texts = {item.name: item.template for item in templates}
    if _DEFAULT not in texts:
        rule = f"its chat_template has no template named {_DEFAULT}"
        raise UserError(rule, where=str(path), fix="name the template in train_dataset.chat_template")
    return _TemplateSource(texts, f"chat_template of {path}", str(path), True)


def _read(path: Path) -> str:
    try:
        return read_saved(path).decode("utf-8")
    except (OSError, ValueError) as error:
        rule = f"the chat template cannot be read ({getattr(error, 'strerror', None) or error})"
        raise UserError(rule, where=str(path), fix="make it a readable UTF-8 file, or remove it") from None


def _compile(source: str, where: str) -> Compiled:
    import jinja2

    from trainer.data.tokens.template_engine import compile_template

    fix = "correct the template, or set train_dataset.chat_template to another one"
    try:
        return compile_template(source)
    except jinja2.TemplateSyntaxError as error:
        inside = ""
        place = f"{where}:{error.lineno}"
        if where.endswith(".json"):
            inside = f", line {error.lineno} of the template"
            place = where
        rule = f"the chat template has a syntax error{inside}: {str(error.message).removesuffix('.')}"
        raise UserError(rule, where=place, fix=fix) from None
    except Exception as error:  # it is nested too deep, or has a constant that cannot be computed
        raise UserError(f"the chat template cannot be compiled ({error})", where=where, fix=fix) from None


def _has_arguments_as_object(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Checks whether a tool call has its arguments as an object; some templates append them to their text."""
    calls = (call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict))
    functions = (call.get("function", call) for call in calls)
    return any(isinstance(function, dict) and isinstance(function.get("arguments"), dict) for function in functions)


def _normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prepares messages as transformers does: no keys without a value, and one name for a message's reasoning."""
    normalized = []
    for message in messages:
        fields = {key: value for key, value in message.items() if value is not None}
        reasoning = next((fields[name] for name in _REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        normalized.append(fields)
    return normalized
