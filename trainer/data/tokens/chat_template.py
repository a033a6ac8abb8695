"""Chat templates: from a conversation to its text, and to the characters of it that carry loss.

The template is the first of these that exists:

1. ``train_dataset.chat_template``: the name of a template in `templates`, a ``.jinja`` file, or a folder with a
   template as below;
2. ``chat_template.jinja`` beside tokenizer.json;
3. ``chat_template`` in ``tokenizer_config.json``: a text, or a list of ``{name, template}``, of which ``tool_use``
   serves conversations with tools and ``default`` the others;
4. ChatML. A turn ends with ``<|im_end|>`` if that is one token of the tokenizer; otherwise the assistant's turns end
   with the tokenizer's end token, and those of the others with the text ``<|im_end|>``.

The rendered text is what ``apply_chat_template`` of transformers gives.
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
"""Values of ``train_on``: the assistant's turns, its last one, or the whole text."""
TEMPLATES = Path(__file__).parent / "templates"

_VERSION = "chat-template-2"
_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_DEFAULT = "default"
_TOOL_USE = "tool_use"
_REASONING = ("reasoning_content", "thinking", "reasoning")

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
    """Templates as they were found."""

    texts: dict[str, str]  # by name; `_DEFAULT` is always there
    name: str  # where they come from, in words
    where: str  # the file, for messages
    is_given: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens of its tokenizer.

    Attributes:
        name: Where it comes from, in words.
        is_given: Whether the tokenizer or the YAML has it; if not, it is ChatML.
        fingerprint: Changes whenever the same conversation could become another text or other spans.
        notes: What the user should know of it.
        turn_end: The text that ends the assistant's turns; empty if that cannot be told.
        turn_end_id: Its id if it is one token; generation ends with it.
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
        """The content of a chat_template.jinja for other programs.

        They do not know the variables of our ChatML, and not all of them know generation blocks.
        """
        if self.is_given:
            names = ()
        else:
            names = ("bos", "eos")
        set_here = "".join(f"{{%- set {name} = {json.dumps(self._variables[name])} %}}" for name in names)
        source = self._compiled[_DEFAULT].source
        if Path(self.where).parent == TEMPLATES:
            source = re.sub(r"\{%- (end)?generation %\}", "", source)
        return set_here + source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        where: str = "",
    ) -> str:
        """Renders a conversation; with `add_generation_prompt` up to where the assistant goes on.

        Raises:
            UserError: The template refuses the conversation (with its reason), fails, or does not end. `where` is the
                conversation's place, for the message.
        """
        return self._render(_normalize_messages(messages), tools, add_generation_prompt, where)[0]

    def spans(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, train_on: str, where: str
    ) -> tuple[str, Spans]:
        """Renders a conversation for training.

        Returns:
            The text, and which characters (from, to) of it carry loss. An answer at the end that the template leaves
            without an end gets the tokenizer's end token.

        Raises:
            UserError: As `render`; or there is no turn of the assistant, the template leaves out a turn, or the
                assistant's turns cannot be found.
        """
        plain = _normalize_messages(messages)
        turns = [number for number, message in enumerate(plain) if message["role"] == "assistant"]
        trained = [turn for turn in turns if plain[turn].get("weight") != 0]
        if train_on != ALL and not trained:
            rule = "the conversation has no turn of the assistant that carries loss, so there is nothing to learn"
            raise UserError(rule, where=where, key="messages", fix='add a message with role "assistant"')
        text, generated = self._render(plain, tools, False, where)
        self._check_is_whole(plain, tools, text, where)
        if train_on == ALL:
            return text, [(0, len(text))]
        if train_on == LAST:
            trained = trained[-1:]
        if self._compiled[self._kind(tools)].has_generation:
            return text, self._generated_spans(generated, turns, trained, where)
        form = self._forms[self._kind(tools)]
        try:
            spans = loss_spans.find_spans(self._renderer(tools), plain, trained, text, form)
        except loss_spans.SpanError:
            rule = f"the chat template ({self.name}) does not show where the assistant's turns of this conversation are"
            fix = "use a template with {% generation %} blocks, or set train_on to last or all"
            raise UserError(rule, where=where, key="messages", fix=fix) from None
        start, end = spans[-1]
        if end == len(text) and not loss_spans.has_end(text, end, form):
            text += self._end_token
            spans[-1] = start, len(text)
        return text, spans

    def _generated_spans(self, generated: Sequence[tuple[int, int]], turns: list, trained: list, where: str) -> Spans:
        """Those of the template's generation blocks that carry loss."""
        if trained == turns:
            return list(generated)
        if len(generated) == len(turns):
            return [span for turn, span in zip(turns, generated, strict=True) if turn in trained]
        if trained == turns[-1:] and generated:
            return [generated[-1]]
        blocks = f"{len(generated)} generation blocks for {len(turns)} turns"
        rule = f"the chat template ({self.name}) has {blocks}, so that turns without loss cannot be told"
        fix = "write one block around each turn, or remove weight from the messages"
        raise UserError(rule, where=where, key="messages", fix=fix)

    def _kind(self, tools: Sequence[Any] | None) -> str:
        if tools is not None and _TOOL_USE in self._compiled:
            return _TOOL_USE
        return _DEFAULT

    def _renderer(self, tools: Sequence[Any] | None) -> loss_spans.Render:
        def render(messages: Sequence[dict], add_generation_prompt: bool) -> str | None:
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
            rule = f"the chat template does not end on this conversation{f' ({where})' if where else ''}: {error}"
            fix = "correct its loops, or set train_dataset.chat_template to another template"
            raise EndlessTemplateError(rule, where=f"{self.where}:{line}" if line else self.where, fix=fix) from None
        except Exception as error:  # a template is a program: it can fail in any way
            line = engine.line_of(error)
            at = ""
            if line:
                at = f"line {line} of it: "
            rule = f"the chat template ({self.name}) fails on this conversation ({at}{type(error).__name__}: {error})"
            fix = "change the conversation, or set train_dataset.chat_template to another template"
            if isinstance(error, TypeError) and _has_arguments_as_object(messages):
                fix = f"write `arguments` of the tool calls as a JSON string, which this template may want; or {fix}"
            raise _Refused(rule, where=where, fix=fix) from None

    def _check_is_whole(self, messages: Sequence[dict], tools: Sequence[Any] | None, text: str, where: str) -> None:
        """Refuses a conversation of which the template leaves out something without a word."""
        source = self._compiled[self._kind(tools)].source
        lost = ""
        if tools and "tools" not in source:
            lost = "the tools"
        elif "tool_calls" not in source and any(message.get("tool_calls") for message in messages):
            lost = "the calls of tools"
        elif not any(name in source for name in _REASONING) and any(message.get(_REASONING[0]) for message in messages):
            lost = "the reasoning of the assistant"
        for number, message in enumerate(messages):
            content = message.get("content")
            is_prompt = message["role"] in ("system", "developer", "user") and isinstance(content, str)
            if is_prompt and content.strip() not in text:
                lost = f"the {message['role']}'s message {number}"
                break
        if lost:
            rule = f"the chat template ({self.name}) leaves out {lost}"
            fix = "set train_dataset.chat_template to a template that has a place for it, or remove it from the data"
            raise UserError(rule, where=where, fix=fix)


class EndlessTemplateError(UserError):
    """The template does not end on a conversation: such a conversation is never skipped, as each takes its time."""


class _Refused(UserError):
    """The template cannot render this conversation."""


def load_chat_template(config: Config, section: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Finds and compiles the chat template of a data set section; see the top of this file.

    Raises:
        UserError: The template that the YAML names does not exist, a template has a syntax error, or the token that
            ends a turn lies beyond the model's vocabulary.
    """
    template = _build(_find(config, section, tokenizer), tokenizer)
    vocab_size = config.decoder.vocab_size
    key = "model.model_config.vocab_size"
    if template.turn_end_id is not None and template.turn_end_id >= vocab_size:
        rule = f"the chat template ends turns with {template.turn_end!r}, whose id {template.turn_end_id} is beyond it"
        fix = f"set it to at least {template.turn_end_id + 1}, or use another tokenizer or template"
        raise UserError(rule, where=config.source.where(key), key=key, value=vocab_size, fix=fix)
    return template


def chatml(tokenizer: Tokenizer) -> ChatTemplate:
    """The template of a tokenizer that has none."""
    return _build(_chatml_source(tokenizer), tokenizer)


def resolve_train_on(config: Config, section: str) -> str:
    """What of a conversation carries loss in a section; see ``train_on``."""
    return getattr(config, section).train_on or config.train_dataset.train_on or ASSISTANT


def template_names() -> list[str]:
    """The names that ``chat_template`` can have."""
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
    # What short conversations show of it.
    renderers = {kind: template._renderer([] if kind == _TOOL_USE else None) for kind in template._compiled}
    added = tokenizer.added_tokens
    forms = {kind: loss_spans.detect_turn_format(render, added, end_tokens) for kind, render in renderers.items()}
    turn_end = forms[_DEFAULT].turn_end
    return replace(
        template,
        _forms=forms,
        turn_end=turn_end,
        turn_end_id=tokenizer.token_id(turn_end) if turn_end else None,
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
        name = f"conversations are written as ChatML{text}"
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
    wanted = getattr(config, owner).chat_template
    if wanted:
        return _find_named(wanted, f"{owner}.chat_template", config.source.where(f"{owner}.chat_template"))
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


def _find_named(wanted: str, key: str, where: str) -> _TemplateSource:
    named = TEMPLATES / f"{wanted}.jinja"
    if wanted in template_names():
        return _TemplateSource({_DEFAULT: named.read_text(encoding="utf-8")}, wanted, str(named), True)
    path = Path(os.path.expanduser(wanted))
    if path.is_dir():
        source = _find_in(path)
        if source is not None:
            return source
        rule = f"the folder has neither {_FILE} nor a {_CONFIG_FILE} with a chat_template"
        fix = "name another one"
        raise UserError(rule, where=where, key=key, value=wanted, fix=fix)
    try:
        return _TemplateSource({_DEFAULT: read_saved(path).decode("utf-8")}, str(path), str(path), True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        rule = f"it is neither the name of a chat template nor a file that can be read ({reason})"
        fix = f"set it to one of {', '.join(template_names())}, or to a .jinja file"
        raise UserError(rule, where=where, key=key, value=wanted, fix=fix) from None


def _find_in(folder: Path) -> _TemplateSource | None:
    """The template beside a tokenizer; None without one."""
    path = folder / _FILE
    if path.is_file():
        texts = {_DEFAULT: _read(path)}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            texts[extra.stem] = _read(extra)
        return _TemplateSource(texts, str(path), str(path), True)
    path = folder / _CONFIG_FILE
    found = read_beside(path, TokenizerConfigFile).chat_template
    if not found:
        return None
    if isinstance(found, str):
        texts = {_DEFAULT: found}
    else:
        texts = {item.name: item.template for item in found}
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
        if where.endswith(".json"):
            inside = f", line {error.lineno} of the template"
        if inside:
            place = where
        else:
            place = f"{where}:{error.lineno}"
        rule = f"the chat template has a syntax error{inside}: {str(error.message).removesuffix('.')}"
        raise UserError(rule, where=place, fix=fix) from None
    except Exception as error:  # nested too deep, or a constant that cannot be computed
        raise UserError(f"the chat template cannot be compiled ({error})", where=where, fix=fix) from None


def _has_arguments_as_object(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a call of a tool has its arguments as an object; some templates join them to their text."""
    calls = (call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict))
    functions = (call.get("function", call) for call in calls)
    return any(isinstance(function, dict) and isinstance(function.get("arguments"), dict) for function in functions)


def _normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Prepares messages as transformers does: no keys without a value, one name for a message's reasoning."""
    plain = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        reasoning = next((kept[name] for name in _REASONING if name in kept), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        plain.append(kept)
    return plain
