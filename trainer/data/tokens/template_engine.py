"""Renders chat templates with Jinja2 in bounded time and size.

Filters, functions and white space are those that transformers gives to a chat template, so that the same template and
the same conversation give the same text: ``tojson`` without HTML escapes, ``raise_exception``, ``strftime_now``, loop
controls, and ``{% generation %}`` blocks, which mark what the assistant writes.

A template is a program from elsewhere. It runs in Jinja2's sandbox; every iteration of a loop and every call is
counted, and a rendering ends with `Unbounded` after `MOST_SECONDS` or `MOST_CHARACTERS` of text.

Jinja2 is imported with this module, so import it late.
"""

from __future__ import annotations

import json
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_SECONDS = 10.0
MOST_CHARACTERS = 1 << 26

# Names that no template can spell, because they hold a space.
_STATE, _BOUNDED_LOOP, _BOUNDED_TEXT = "rendering state", "bounded loop", "bounded text"
_STEPS_BETWEEN_CLOCKS = 256
_LEAST_WORKING = 0.1  # the part of `MOST_SECONDS` that a rendering must have had of a processor


class Refusal(Exception):
    """The template called ``raise_exception``; the message is the template's."""


class Unbounded(Exception):
    """The rendering took more time or characters than a conversation can need."""


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
    """
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    # Nothing is computed before the rendering, which alone is bounded: no optimizer, and a `finalize` that wants the
    # context, with which Jinja2 takes no output for a constant.
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_bounded_output
    )
    bounded = {name: _bounded_filter(name, environment.filters[name]) for name in _GROWING_FILTERS}
    environment.filters |= bounded | {"tojson": _to_json, _BOUNDED_LOOP: _bounded_loop, _BOUNDED_TEXT: _bounded_text}
    environment.globals.update(raise_exception=_refuse, strftime_now=_strftime_now)
    template = environment.from_string(source)
    return Compiled(template, source, environment.uses_generation)


def render(compiled: Compiled, variables: Mapping[str, Any]) -> Rendered:
    """Renders a template.

    Raises:
        Refusal: The template refuses the variables.
        Unbounded: It does not end in time, or its text is too long.
        Exception: Whatever else goes wrong within the template; `line_of` tells where.
    """
    state = _State()
    for chunk in compiled.template.generate({**variables, _STATE: state}):
        state.add(chunk)
    text = "".join(state.chunks)
    for start, written in state.generated:
        # A block inside a macro or a {% set %} is written later, at a place that is not known.
        if text[start : start + len(written)] != written:
            raise ValueError("a {% generation %} block inside a macro or a {% set %} block has no known position")
    return Rendered(text, tuple((start, start + len(written)) for start, written in state.generated if written))


def line_of(error: BaseException) -> int | None:
    """The line of the template in which `error` was raised."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == "<template>":
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


class _State:
    """What one rendering has written and used up."""

    def __init__(self) -> None:
        self.chunks: list[str] = []
        self.length = 0
        self.generated: list[tuple[int, str]] = []
        self._steps = 0
        self._began_seconds = time.monotonic(), time.thread_time()

    def add(self, chunk: str) -> None:
        self.step()
        self.length += len(chunk)
        self.check_length(self.length)
        self.chunks.append(chunk)

    def step(self) -> None:
        """Counts an iteration or a call; looks at the clock now and then."""
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLOCKS == 0 and self._is_late():
            raise Unbounded(f"it does not end within {MOST_SECONDS:g} seconds")

    def _is_late(self) -> bool:
        """Whether the time is over, and not because the process was stopped or starved for most of it."""
        began, began_working = self._began_seconds
        is_over = time.monotonic() - began > MOST_SECONDS
        return is_over and time.thread_time() - began_working > _LEAST_WORKING * MOST_SECONDS

    @staticmethod
    def check_length(length: int) -> None:
        if length > MOST_CHARACTERS:
            raise Unbounded(f"it writes more than {MOST_CHARACTERS:,} characters")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with every loop, call and growing string counted."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    uses_generation = False

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        return super()._generate(_Bounds(self).visit(source), *arguments, **options)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # The sandbox gives the same, but takes most of the time of a rendering to check it.
        kind = type(obj)
        if kind is dict and attribute not in _DICT_METHODS:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context, __obj, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  (as in Jinja2: kwargs are free)
        __context.parent[_STATE].step()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str):  # for example "x".ljust(10 ** 12)
            _check_growth(method.__name__, text, (*args, *kwargs.values()))
        return _bounded_text(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context, operator_: str, left: Any, right: Any) -> Any:
        if operator_ == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                    _State.check_length(len(sequence) * times)
        if operator_ == "%" and isinstance(left, str):
            _check_growth("format", left, right if isinstance(right, tuple) else (right,))
        if operator_ == "**" and isinstance(left, int) and isinstance(right, int):
            _State.check_length(left.bit_length() * abs(right))
        return _bounded_text(_BINARY[operator_](left, right))


_DICT_METHODS = frozenset(dir(dict))
_SAFE_ATTRIBUTES = {
    str: frozenset("startswith endswith split strip lstrip rstrip lower upper".split()),
    LoopContext: frozenset("first last index index0 length revindex revindex0 previtem nextitem".split()),
}
_BINARY = {"+": operator.add, "*": operator.mul, "**": operator.pow, "%": operator.mod}
_GROWING_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice", "wordwrap")
_NUMBER = re.compile(r"\d{7,}", re.ASCII)


class _Bounds(NodeTransformer):
    """Rewrites a template's syntax tree so that its loops and the text that it puts together are counted."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, _BOUNDED_LOOP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(node, _BOUNDED_TEXT)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = self._filtered(node.filter, _BOUNDED_TEXT, node.lineno)
        return node

    def _filtered(self, node: nodes.Node | None, name: str, line: int | None = None) -> nodes.Filter:
        filtered = nodes.Filter(node, name, [], [], None, None, lineno=line or node.lineno)
        filtered.set_environment(self._environment)
        return filtered


class _Generation(Extension):
    """The block ``{% generation %}...{% endgeneration %}``: writes its content and records where that is."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.CallBlock:
        self.environment.uses_generation = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("record", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def record(self, context, caller) -> str:
        written = caller()
        state = context.parent[_STATE]
        state.generated.append((state.length, written))
        return written


@jinja2.pass_context
def _bounded_loop(context, items: Iterable[Any]) -> Iterator[Any]:
    state = context.parent[_STATE]
    for item in items:
        state.step()
        yield item


def _bounded_text(value: Any) -> Any:
    if isinstance(value, str):
        _State.check_length(len(value))
    return value


@jinja2.pass_context
def _bounded_output(context, value: Any) -> Any:
    """What is about to be written as text: a list that holds itself often is short, and its text is not."""
    _check_text_of(value)
    return value


def _bounded_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja2 whose result may be much longer than what it is given."""

    @jinja2.pass_eval_context
    def bounded(eval_context, value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_growth(name, value, (*args, *kwargs.values()))
        needs = getattr(filter_, "jinja_pass_arg", None)
        before = {None: (), jinja2.utils._PassArg.eval_context: (eval_context,)}.get(needs, (eval_context.environment,))
        return _bounded_text(filter_(*before, value, *args, **kwargs))

    return bounded


def _check_growth(function: str, text: Any, arguments: Sequence[Any]) -> None:
    """Refuses arguments with which a method of text or a filter gives a very long one: widths, counts, numbers in a
    format, and texts that are put in at many places.

    Raises:
        Unbounded: The result could be longer than `MOST_CHARACTERS`.
    """
    for argument in arguments:
        _State.check_length(abs(argument) if isinstance(argument, int) else 0)
    length = len(text) if isinstance(text, (str, list, tuple)) else 0
    if function in ("format", "format_map") and isinstance(text, str):
        for number in _NUMBER.findall(text):
            _State.check_length(int(number[:20]))
    elif function == "replace" and isinstance(text, str) and [*map(type, arguments[:2])] == [str, str]:
        _State.check_length(length + text.count(arguments[0]) * len(arguments[1]))
    elif function in ("indent", "join", "wordwrap"):
        for argument in arguments:
            _State.check_length(length * len(argument) if isinstance(argument, (str, list, tuple)) else 0)


def _check_text_of(value: Any) -> None:
    """Refuses a value whose text is too long to write, before it is made."""
    lengths: dict[int, int] = {}  # by identity: a list that is in another one a million times is counted once

    def length(found: Any) -> int:
        if isinstance(found, str):
            return len(found)
        if not isinstance(found, (list, tuple, dict)):
            return 1
        if id(found) not in lengths:
            parts = (*found, *found.values()) if isinstance(found, dict) else found
            lengths[id(found)] = sum(map(length, parts))
        return lengths[id(found)]

    if not isinstance(value, str):
        _State.check_length(length(value))


def _refuse(message: object) -> None:
    raise Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: object, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    _check_text_of(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
