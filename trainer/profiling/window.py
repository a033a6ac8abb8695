"""Profiles a window of steps: MindSpore's profiler, and where layers are computed on arrays also their parts.

MindSpore's files are those that MindStudio Insight opens; its trace_view.json and our kernels.json are chrome traces,
with the same clock.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.checks.parallel import parallel_degrees
from trainer.device.threads import silent
from trainer.monitors.files import write_text
from trainer.profiling.host import NOT_EXPLAINED, patch_all, profile_rows, table_of
from trainer.profiling.regions import Event, Patches, RegionTimer

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.callbacks import ProfileMonitor
    from trainer.parallel.world import World
    from trainer.step.train_step import TrainStep

TABLE_FILE = "kernels.txt"
TRACE_FILE = "kernels.json"
_TABLE_COLUMNS = 130
_MOST_EVENTS = 500_000
"""Of a trace file, some 60 MB; the table has all of them."""


def is_profiled(section: ProfileMonitor, config: Config, world: World) -> bool:
    """Whether this rank is one of those that are profiled: without a choice all are."""
    stages = 0
    if section.profile_pipeline and config.use_parallel:
        stages = config.parallel_config.pipeline_stage
    chosen = set(section.profile_rank_ids or ())
    if stages:
        chosen |= set(range(0, world.size, max(world.size // stages, 1)))
    if chosen:
        return world.rank in chosen
    return True


def distributed_arguments(config: Config, world: World) -> dict[str, Any]:
    """The degrees of parallelism by the names that MindStudio Insight reads."""
    degrees = parallel_degrees(config, world)
    section = config.parallel_config
    return {
        "tensor_model_parallel_size": degrees.model_parallel,
        "context_parallel_size": degrees.context_parallel,
        "pipeline_model_parallel_size": degrees.pipeline_stage,
        "data_parallel_size": degrees.data_parallel,
        "expert_model_parallel_size": degrees.expert_parallel,
        "sequence_parallel": section.use_seq_parallel,
        "world_size": world.size,
    }


class StepProfiler:
    """Profiles the steps from `start_step` to `stop_step` of a run.

    Args:
        folder: Where the files go.
        on_arrays: Whether layers are computed on arrays.
        tell: Takes notes.
        layout: `distributed_arguments`.
    """

    def __init__(
        self,
        section: ProfileMonitor,
        folder: Path,
        device: str,
        on_arrays: bool,
        tell: Callable[[str], None],
        layout: dict[str, Any],
    ) -> None:
        self._section = section
        self._folder = folder
        self._device = device
        self._tell = tell
        self._on_arrays = on_arrays
        self._layout = layout
        self._steps: list[int] = []  # that have been profiled
        self._of_mindspore: Any = None
        self._events: list[Event] = []
        self._regions = RegionTimer(events=self._events)
        self._patches: Patches | None = None
        self._is_done = False

    @contextlib.contextmanager
    def step(self, number: int, step: TrainStep) -> Iterator[None]:
        """Within it the step of this number is done, and profiled where it is in the window."""
        section = self._section
        if self._is_done or not section.start_step <= number <= section.stop_step:
            yield
            return
        self.begin(number, step)
        with contextlib.ExitStack() as stack:
            if self._patches is not None:
                stack.enter_context(self._patches.on())
                began = self._regions.clock()
                stack.callback(lambda: self._events.append(_step_event(number, began, self._regions.clock())))
                stack.enter_context(self._regions.region(NOT_EXPLAINED))
            if section.mstx and self._device != "CPU":
                stack.callback(_end_range, _begin_range(f"step {number}"))
            yield
        self._of_mindspore.step()
        self._steps.append(number)

    def begin(self, number: int, step: TrainStep) -> None:
        """To be called before the step of this number, whose time shall not have it: opens the profiler once."""
        if self._of_mindspore is None and not self._is_done and number >= self._section.start_step:
            self._start(step)

    def is_due(self, number: int) -> bool:
        """Whether the window ends with this step."""
        return self._of_mindspore is not None and not self._is_done and number >= self._section.stop_step

    def close(self) -> None:
        """Writes the profile, of a window that has not ended too; does nothing without one, and once it is written."""
        if self._of_mindspore is None or self._is_done:
            return
        self._is_done = True
        with silent():  # it announces its work, and draws its progress
            self._of_mindspore.stop()
        if self._patches is not None and self._steps:
            self._write_parts()
        if self._steps:
            first = self._steps[0]
            last = self._steps[-1]
            if last > first:
                which = f"steps {first} to {last}"
            else:
                which = f"step {first}"
            self._tell(f"the profile of {which} is in {self._folder}")

    def _start(self, step: TrainStep) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with silent():
            self._of_mindspore = _open_profiler(self._section, self._folder, self._device)
            self._of_mindspore.start()
            with contextlib.suppress(Exception):  # only what a tool shows about the job
                self._of_mindspore.add_metadata_json("distributed_args", json.dumps(self._layout))
        if self._device == "CPU":
            unseen = _only_on_devices(self._section)
            if unseen:
                self._tell(f"profile: {', '.join(unseen)}: MindSpore's profiler on a CPU does not have it")
        if self._on_arrays:
            self._tell(f"profile: MindSpore's profiler sees no layers that are computed on arrays; {TABLE_FILE} and"
                       f" {TRACE_FILE} have their parts")
            self._patches = patch_all(self._regions, step)

    def _write_parts(self) -> None:
        from rich.console import Console

        rows = profile_rows(self._regions.rows, len(self._steps))
        title = f"A step, mean of steps {self._steps[0]} to {self._steps[-1]}"
        console = Console(record=True, width=_TABLE_COLUMNS, file=_Nowhere(), color_system=None)
        console.print(table_of(title, rows))
        write_text(self._folder / TABLE_FILE, console.export_text())
        write_text(self._folder / TRACE_FILE, json.dumps(chrome_trace(self._events, self._folder.name)))


class _Nowhere:
    """A file that keeps nothing."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _open_profiler(section: ProfileMonitor, folder: Path, device: str) -> Any:
    from mindspore.profiler import AicoreMetrics, ProfilerActivity, ProfilerLevel, profile, tensorboard_trace_handler
    from mindspore.profiler import _ExperimentalConfig as Experimental

    ready = tensorboard_trace_handler(dir_name=str(folder))
    if device == "CPU":
        return profile(start_profile=False, on_trace_ready=ready, activities=[ProfilerActivity.CPU])
    # As in MindSpore Transformers: level 0 has no data of small collectives.
    if section.profile_communication:
        level = max(section.profiler_level, 1)
    else:
        level = section.profiler_level
    detail = Experimental(
        profiler_level=(ProfilerLevel.Level0, ProfilerLevel.Level1, ProfilerLevel.Level2)[level],
        aic_metrics=AicoreMetrics.PipeUtilization if level else AicoreMetrics.AiCoreNone,
        data_simplification=section.data_simplification,
        mstx=section.mstx,
    )
    return profile(
        start_profile=False, on_trace_ready=ready, experimental_config=detail,
        profile_memory=section.profile_memory, with_stack=section.with_stack,
    )  # fmt: skip


def _only_on_devices(section: ProfileMonitor) -> list[str]:
    """The keys that are set and act on devices alone."""
    flags = "profile_communication profile_memory with_stack mstx".split()
    found = [name for name in flags if getattr(section, name)]
    return [*(["profiler_level"] if section.profiler_level else []), *found]


def _begin_range(name: str) -> Any:
    import mindspore

    return mindspore.profiler.mstx.range_start(name, mindspore.runtime.current_stream())


def _end_range(number: Any) -> None:
    import mindspore

    mindspore.profiler.mstx.range_end(number)


def _step_event(number: int, began: float, ended: float) -> Event:
    from trainer.profiling.regions import Key

    return Event(Key(f"step {number}"), threading.get_ident(), began, ended - began)


def chrome_trace(events: Iterable[Event], name: str) -> list[dict[str, Any]]:
    """Events in the format of chrome://tracing, Perfetto and MindStudio Insight, in microseconds since 1970."""
    offset = time.time() - time.perf_counter()
    shown = [event for event in events if event.key.name != NOT_EXPLAINED]
    shown = sorted(shown, key=lambda event: event.began)[:_MOST_EVENTS]
    numbers: dict[int, int] = {}
    for event in shown:
        numbers.setdefault(event.thread, len(numbers))
    process = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": f"{name}: parts of a step"}}]
    threads = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": f"thread {number}"}}
        for number in numbers.values()
    ]
    return [*process, *threads, *(
        {
            "ph": "X", "name": event.key.name, "cat": event.key.direction or "step", "pid": 0,
            "tid": numbers[event.thread], "ts": round(1e6 * (event.began + offset), 3),
            "dur": round(1e6 * event.seconds, 3),
        }
        for event in shown
    )]  # fmt: skip
