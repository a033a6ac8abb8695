"""Renders chat templates with Jinja2 in bounded time and memory.

Filters, functions and white space are the same as in transformers, so that a template and a conversation give the same
text: ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, loop controls, and ``{% generation %}``
blocks, which mark the text of the assistant.

A template is a program from elsewhere. It runs in Jinja2's sandbox, which counts its calls, attributes, steps of
``range`` and pieces of text. It ends with `Unbounded` after `MAX_STEPS` of them, `MAX_CHARACTERS` of text or
`MAX_MEMORY_BYTES` of memory. The last limit stops a single operation that asks for gigabytes, such as
``'%999999999999d' % 1``, before it gets them.

Jinja2 is imported with this module, so import it late.
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1 << 24
MAX_CHARACTERS = 1 << 26
MAX_MEMORY_BYTES = 1 << 30  # beyond what the process has before
_MAX_BITS = 1 << 16  # of an integer: the time of a product grows with the square of its length
_MAX_SOURCE = 1 << 20  # characters of a template

_START = "\ufdd0"
_END = "\ufdd1"
"""The marks around the text of a ``{% generation %}`` block. Unicode reserves both for programs: no text has them."""
_DICT_METHODS = frozenset(dir(dict))
_SAFE_ATTRIBUTES = {
    str: frozenset("startswith endswith split strip lstrip rstrip lower upper".split()),
    LoopContext: frozenset("first last index index0 length revindex revindex0 previtem nextitem".split()),
}


class Refusal(Exception):
    """The template called ``raise_exception``; the message is the template's."""


class Unbounded(Exception):
    """The rendering took more steps, characters or memory than a conversation can need."""


class Compiled(NamedTuple):
    """A template that is ready to render."""

    template: jinja2.Template
    environment: _Environment
    source: str
    has_generation: bool  # whether ``{% generation %}`` blocks mark the text of the assistant


class Rendered(NamedTuple):
    """The text of a conversation."""

    text: str
    generated: tuple[tuple[int, int], ...]  # characters from, to: the ``{% generation %}`` blocks


def compile_template(source: str) -> Compiled:
    """Compiles the text of a template.

    Raises:
        jinja2.TemplateSyntaxError: Its syntax is wrong; ``lineno`` and ``message`` say where and why.
        RecursionError: It is nested too deep.
        Unbounded: Computing its constants takes too much memory.
        ValueError: It is too long.
    """
    if len(source) > _MAX_SOURCE:
        raise ValueError(f"it is longer than {_MAX_SOURCE:,} characters")
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now, range=environment.counted_range)
    with _bounded_memory():  # Jinja2 computes constant expressions here
        template = environment.from_string(source)
    return Compiled(template, environment, source, environment.has_generation)


def render(compiled: Compiled, variables: Mapping[str, Any]) -> Rendered:
    """Renders a template.

    Raises:
        Refusal: The template refuses the variables.
        Unbounded: It does not end in time, or takes too much memory, or its text is too long.
        Exception: Any other error of the template; `line_of` returns its line.
    """
    with _bounded_memory():
        return _render(compiled, variables)


def _render(compiled: Compiled, variables: Mapping[str, Any]) -> Rendered:
    environment = compiled.environment
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


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """Limits the memory that the process may add within the context; raises `Unbounded` if it needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        used_pages = int(file.read().split()[0])
    limit = used_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError as error:
        reason = f"it takes more than {MAX_MEMORY_BYTES >> 20:,} MiB of memory"
        raise Unbounded(reason).with_traceback(error.__traceback__) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
    """The sandbox; it counts the steps of a rendering."""

    intercepted_binops = frozenset(("+", "*", "**"))
    has_generation = False
    steps = 0

    def count(self, steps: int) -> None:
        """Adds steps; raises `Unbounded` if there are too many."""
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise Unbounded(f"it takes more than {MAX_STEPS:,} steps")

    def counted_range(self, *arguments: int) -> range:
        """Replaces ``range``: its numbers count as steps."""
        numbers = range(*arguments)
        self.count(len(numbers))
        return numbers

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns an attribute or key as the sandbox does; counts the access and checks the length of texts."""
        self.count(1)
        # A shortcut: the checks of the sandbox would take most of the time of a rendering.
        kind = type(obj)
        if kind is dict and attribute not in _DICT_METHODS:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        value = super().getattr(obj, attribute)
        if isinstance(value, str):  # a variable of a namespace, which a loop may double again and again
            _check_length(len(value))
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Calls a function as the sandbox does; counts the call and refuses huge integer arguments."""
        __self.count(1)
        for argument in args:  # for example "x".ljust(10 ** 12)
            if isinstance(argument, int):
                _check_length(abs(argument))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a binary operation, and refuses results that would be too large."""
        for sequence, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                _check_length(len(sequence) * times)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(operator, left, right)
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, str):
            _check_length(len(value))
        return value


class _Generation(Extension):
    """The block ``{% generation %}...{% endgeneration %}``, which writes its content between `_START` and `_END`."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parses `{% generation %}` to `{% endgeneration %}`, and puts marks around the text."""
        assert isinstance(self.environment, _Environment)
        self.environment.has_generation = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (nodes.Output([nodes.TemplateData(mark)]).set_lineno(line) for mark in (_START, _END))
        return [start, *body, end]


def _check_length(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise Unbounded(f"it writes more than {MAX_CHARACTERS:,} characters")


def _check_bits(operator: str, left: int, right: int) -> None:
    bits = max(left.bit_length(), right.bit_length())
    if operator == "*":
        bits = left.bit_length() + right.bit_length()
    elif operator == "**":
        bits = left.bit_length() * abs(right)
    if bits > _MAX_BITS:
        raise Unbounded(f"it computes an integer of more than {_MAX_BITS:,} bits")


def _refuse(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
