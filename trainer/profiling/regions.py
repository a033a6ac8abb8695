"""Times the functions of a step by wrapping them.

Each second counts for the innermost timed function: the time of a function excludes that of timed functions which it
calls. If n threads compute together, a second of one thread counts as 1 / n of a second of the step, also while it
waits for the others. So the sum of all rows is the time of the step.
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


class RegionKey(NamedTuple):
    """The name of a part, and its direction: FORWARD, BACKWARD, or empty outside of the model."""

    name: str
    direction: str = ""


@dataclass
class RegionCost:
    """Seconds and calls of a part, bytes of the arrays that it reads and writes, and its floating-point operations."""

    seconds: float = 0.0
    calls: int = 0
    bytes: float = 0.0
    operations: float = 0.0

    def add(self, other: RegionCost) -> None:
        """Adds another cost to this one."""
        self.seconds += other.seconds
        self.calls += other.calls
        self.bytes += other.bytes
        self.operations += other.operations


class _Thread(threading.local):
    """The state of a thread: for each active region its name and the time of the regions inside it."""

    def __init__(self) -> None:
        self.inside: list[float] = []
        self.names: list[str] = []
        self.running: set[int] = set()
        self.direction = ""
        self.weight = 1.0


Name = Callable[["RegionTimer", tuple], str]
"""(timer, arguments) -> the name of the part."""
Cost = Callable[[tuple], tuple[float, float]]
"""(arguments) -> bytes, operations."""


class Event(NamedTuple):
    """One call. `seconds` includes the time of the functions that it calls."""

    key: RegionKey
    thread: int
    began: float
    seconds: float


class RegionTimer:
    """Sums the costs of regions of code.

    Args:
        clock: Returns seconds.
        events: Takes each single call. Default None: only sums are kept.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, events: list[Event] | None = None) -> None:
        self.clock = clock
        self.now = _Thread()
        self.lock = threading.Lock()
        self.rows: dict[RegionKey, RegionCost] = {}
        self.events = events

    @property
    def part(self) -> str:
        """Returns the name of the innermost region of this thread; empty outside of all regions."""
        if self.now.names:
            return self.now.names[-1]
        return ""

    def add(self, key: RegionKey, cost: RegionCost) -> None:
        """Adds a cost to that of a part."""
        with self.lock:
            self.rows.setdefault(key, RegionCost()).add(cost)

    @contextmanager
    def region(
        self, name: str, cost: tuple[float, float] = (0.0, 0.0), direction: str | None = None, calls: int = 1
    ) -> Iterator[None]:
        """Times the code inside as a region of this name, with the bytes and operations of `cost`."""
        now = self.now
        began = self.clock()
        now.inside.append(0.0)
        now.names.append(name)
        before = now.direction
        if direction is not None:
            now.direction = direction
        key = RegionKey(name, now.direction)
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
            self.add(key, RegionCost((taken - inside) * now.weight, calls, *cost))

    def time_function(
        self, function: Callable, name: str | Name, cost: Cost | None = None, direction: str | None = None,
        calls: int = 1,
    ) -> Callable:  # fmt: skip
        """Returns the function with timing; recursive calls count as one.

        Args:
            name: The name of the part, or a function that returns it.
            cost: Returns bytes and operations of a call. Default None: zero.
            calls: How many calls a call counts as; 0 if another function counts them.
        """

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            """Times a call of the function, except one that it makes of itself."""
            running = self.now.running
            if id(function) in running:
                return function(*arguments, **named)
            running.add(id(function))
            try:
                part = name if isinstance(name, str) else name(self, arguments)
                amounts = (0.0, 0.0)
                if cost is not None:
                    amounts = cost(arguments)
                with self.region(part, amounts, direction, calls):
                    return function(*arguments, **named)
            finally:
                running.discard(id(function))

        return timed

    def time_threads(self, run: Callable) -> Callable:
        """Returns `HostThreads.run` with timing of its items in all threads.

        The time of items counts for the region that calls it. The time in which a thread has no item counts as WAITING.
        """

        @functools.wraps(run)
        def timed(threads: Any, items: Any, function: Callable, *size: Callable) -> None:
            """Times the items on each thread, and counts idle threads as waiting."""
            items = list(items)  # making them is work of the caller; inside `run` it would count as waiting, too
            caller = self.now
            busy = [0.0] * threads.threads
            share = 1 / threads.threads
            direction = caller.direction
            name = self.part

            def run_item(argument: Any, thread: int) -> None:
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
                run(threads, items, run_item, *size)
            finally:
                caller.inside.pop()
                taken = self.clock() - began
                if caller.inside:
                    caller.inside[-1] += taken
                self.add(RegionKey(WAITING, direction), RegionCost(taken - sum(busy) * share, 1))

        return timed


class Patches:
    """Replaces attributes of objects while `applied`."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Registers a replacement: the result of `make` for the present value, of the object or its class."""
        previous = vars(owner).get(name, _ABSENT)
        self.values.append((owner, name, previous, make(getattr(owner, name))))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replaces the attributes inside the block."""
        for owner, name, _, value in self.values:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, previous, _ in reversed(self.values):
                if previous is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, previous)


_ABSENT = object()
