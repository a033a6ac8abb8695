"""Seconds of the functions of a step, measured by wrapping them from outside.

Each second belongs to the innermost function that is measured: a row has what its functions take without what is
measured inside them. Where threads compute together, a second of one of n threads is 1 / n of a second of the step, and
so is one in which it waits for the others. So all rows together are the step.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

FORWARD = "forward"
BACKWARD = "backward"
WAITING = "waiting threads"


class Key(NamedTuple):
    """What a row is of; `direction` is empty outside of the model."""

    name: str
    direction: str = ""


@dataclass
class Row:
    """Seconds of a step, calls, bytes of the arrays that these read and write, and floating-point operations."""

    seconds: float = 0.0
    calls: int = 0
    bytes: float = 0.0
    operations: float = 0.0

    def add(self, other: Row) -> None:
        self.seconds += other.seconds
        self.calls += other.calls
        self.bytes += other.bytes
        self.operations += other.operations


class _Thread(threading.local):
    """What a thread is doing: of each function that has begun the time of what it called, and which they are."""

    def __init__(self) -> None:
        self.inside: list[float] = []
        self.names: list[str] = []
        self.running: set[int] = set()
        self.direction = ""
        self.weight = 1.0


Name = Callable[["RegionTimer", tuple], str]
"""(regions, arguments) -> the name of the row."""
Cost = Callable[[tuple], tuple[float, float]]
"""Arguments -> bytes, operations."""


class Event(NamedTuple):
    """One call: seconds of the clock, the time of what it called included."""

    key: Key
    thread: int
    began: float
    seconds: float


class RegionTimer:
    """Rows of what runs while it is on. `clock` gives seconds; with `events` each single call is kept, too."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, events: list[Event] | None = None) -> None:
        self.clock = clock
        self.now = _Thread()
        self.lock = threading.Lock()
        self.rows: dict[Key, Row] = {}
        self.events = events

    @property
    def part(self) -> str:
        """The name of the innermost region that this thread is in; empty outside of all."""
        if self.now.names:
            return self.now.names[-1]
        return ""

    def add(self, key: Key, row: Row) -> None:
        with self.lock:
            self.rows.setdefault(key, Row()).add(row)

    @contextmanager
    def region(
        self, name: str, cost: tuple[float, float] = (0.0, 0.0), direction: str | None = None, calls: int = 1
    ) -> Iterator[None]:
        now = self.now
        began = self.clock()
        now.inside.append(0.0)
        now.names.append(name)
        before = now.direction
        if direction is not None:
            now.direction = direction
        key = Key(name, now.direction)
        try:
            yield
        finally:
            now.direction = before
            now.names.pop()
            inside = now.inside.pop()
            taken = self.clock() - began
            if now.inside:
                now.inside[-1] += taken
            if self.events is not None:
                self.events.append(Event(key, threading.get_ident(), began, taken))
            self.add(key, Row((taken - inside) * now.weight, calls, *cost))

    def wrapped(
        self, function: Callable, name: str | Name, cost: Cost | None = None, direction: str | None = None,
        calls: int = 1,
    ) -> Callable:  # fmt: skip
        """The function, measured; where it calls itself, as a whole. `calls` 0: its calls are not counted."""

        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            running = self.now.running
            if id(function) in running:
                return function(*arguments, **named)
            running.add(id(function))
            try:
                if isinstance(name, str):
                    row = name
                else:
                    row = name(self, arguments)
                with self.region(row, cost(arguments) if cost else (0.0, 0.0), direction, calls):
                    return function(*arguments, **named)
            finally:
                running.discard(id(function))

        return measured

    def wrapped_threads(self, run: Callable) -> Callable:
        """`HostThreads.run`, whose items are measured in all threads, in the row of the region that calls it, as is the
        time in which a thread has none."""

        @functools.wraps(run)
        def measured(threads: Any, items: Any, function: Callable) -> None:
            items = list(items)  # making them is work of the caller; inside `run` it would count as waiting, too
            caller = self.now
            busy = [0.0] * threads.threads
            share = 1 / threads.threads
            direction = caller.direction
            name = self.part

            def one(argument: Any, thread: int) -> None:
                now = self.now
                began = self.clock()
                before = now.direction, now.weight
                now.direction = direction
                now.weight = share
                try:
                    with self.region(name):
                        function(argument, thread)
                finally:
                    now.direction, now.weight = before
                    busy[thread] += self.clock() - began

            began = self.clock()
            caller.inside.append(0.0)
            try:
                run(threads, items, one)
            finally:
                caller.inside.pop()
                taken = self.clock() - began
                if caller.inside:
                    caller.inside[-1] += taken
                self.add(Key(WAITING, direction), Row(taken - sum(busy) * share, 1))

        return measured


class Patches:
    """Attributes that have other values while it is on."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """`make` gets what is there. Of an instance, that is what its class has."""
        own = vars(owner).get(name, _ABSENT)
        self.values.append((owner, name, own, make(getattr(owner, name))))

    @contextmanager
    def on(self) -> Iterator[None]:
        for owner, name, _, value in self.values:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, own, _ in reversed(self.values):
                if own is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, own)


_ABSENT = object()
