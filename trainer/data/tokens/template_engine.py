"""Renders chat templates with Jinja2 in bounded time and size.

Filters, functions and white space are those that transformers gives to a chat template, so that the same template and
the same conversation give the same text: ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, loop
controls, and ``{% generation %}`` blocks, which mark what the assistant writes.

A template is a program from elsewhere. It runs in Jinja2's sandbox, which counts its calls, attributes, steps of
``range`` and pieces of text, and ends with `Unbounded` after `MAX_STEPS` of them or `MAX_CHARACTERS` of text.

Jinja2 is imported with this module, so import it late.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1 << 24
MAX_CHARACTERS = 1 << 26
_MAX_SOURCE = 1 << 20  # characters of a template

_START = "\ufdd0"
_END = "\ufdd1"
"""Around what a ``{% generation %}`` block writes. Unicode leaves both to programs: no text has them."""
_DICT_METHODS = frozenset(dir(dict))
_SAFE_ATTRIBUTES = {
    str: frozenset("startswith endswith split strip lstrip rstrip lower upper".split()),
    LoopContext: frozenset("first last index index0 length revindex revindex0 previtem nextitem".split()),
}


class Refusal(Exception):
    """The template called ``raise_exception``; the message is the template's."""


class Unbounded(Exception):
    """The rendering took more steps or characters than a conversation can need."""


class Compiled(NamedTuple):
    """A template that is ready to render."""

    template: jinja2.Template
    source: str
    has_generation: bool  # whether ``{% generation %}`` blocks mark what the assistant writes


class Rendered(NamedTuple):
    text: str
    generated: tuple[tuple[int, int], ...]  # characters from, to: the ``{% generation %}`` blocks


def compile_template(source: str) -> Compiled:
    """Compiles the text of a template.

    Raises:
        jinja2.TemplateSyntaxError: Its syntax is wrong; ``lineno`` and ``message`` say where and why.
        RecursionError: It is nested too deep.
        ValueError: It is too long.
    """
    if len(source) > _MAX_SOURCE:
        raise ValueError(f"it is longer than {_MAX_SOURCE:,} characters")
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, range=environment.counted_range)
    template = environment.from_string(source)
    return Compiled(template, source, environment.has_generation)


def render(compiled: Compiled, variables: Mapping[str, Any]) -> Rendered:
    """Renders a template.

    Raises:
        Refusal: The template refuses the variables.
        Unbounded: It does not end in time, or its text is too long.
        Exception: Whatever else goes wrong within the template; `line_of` tells where.
    """
    environment = compiled.template.environment
    environment.steps = 0
    chunks = []
    length = 0
    for chunk in compiled.template.generate(variables):
        length += len(chunk)
        environment.count(1)
        _check_length(length)
        chunks.append(chunk)
    text = "".join(chunks)
    if not compiled.has_generation:
        return Rendered(text, ())
    plain, *blocks = text.split(_START)
    spans = []
    for block in blocks:
        written, end, after = block.partition(_END)
        if not end or _END in plain + after:
            raise ValueError(f"the conversation has the character U+{ord(_START):04X} or U+{ord(_END):04X}")
        if written:
            spans.append((len(plain), len(plain) + len(written)))
        plain += written + after
    return Rendered(plain, tuple(spans))


def line_of(error: BaseException) -> int | None:
    """Returns the line of the template in which `error` was raised."""
    line = None
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which counts the steps of a rendering."""

    intercepted_binops = frozenset(("+", "*", "**"))
    has_generation = False
    steps = 0

    def count(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise Unbounded(f"it takes more than {MAX_STEPS:,} steps")

    def counted_range(self, *arguments: int) -> range:
        numbers = range(*arguments)
        self.count(len(numbers))
        return numbers

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.count(1)
        # The sandbox gives the same, but takes most of the time of a rendering to check it.
        kind = type(obj)
        if kind is dict and attribute not in _DICT_METHODS:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        value = super().getattr(obj, attribute)
        if isinstance(value, str):  # of a namespace, which a loop may double again and again
            _check_length(len(value))
        return value

    def call(__self, __context, __obj, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in Jinja2: kwargs are free)
        __self.count(1)
        for argument in args:  # for example "x".ljust(10 ** 12)
            if isinstance(argument, int):
                _check_length(abs(argument))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context, operator: str, left: Any, right: Any) -> Any:
        for sequence, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                _check_length(len(sequence) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_length(left.bit_length() * abs(right))
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, str):
            _check_length(len(value))
        return value


class _Generation(Extension):
    """The block ``{% generation %}...{% endgeneration %}``: writes its content between `_START` and `_END`."""

    tags = {"generation"}

    def parse(self, parser) -> list[nodes.Node]:
        self.environment.has_generation = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (_START, _END))
        return [start, *body, end]


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise Unbounded(f"it writes more than {MAX_CHARACTERS:,} characters")


def _refuse(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: object, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
