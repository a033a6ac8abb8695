"""Profiles some steps of a run with MindSpore's profiler, and times the parts of native CPU layers.

MindStudio Insight opens MindSpore's files. MindSpore's trace_view.json and kernels.json of this module are Chrome
traces with the same clock.
"""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.checks.parallel import parallel_degrees
from trainer.device.threads import silent
from trainer.monitors.files import write_text
from trainer.profiling.host import NOT_EXPLAINED, patch_all, profile_rows, profile_table
from trainer.profiling.regions import Event, Patches, RegionKey, RegionTimer

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.callbacks import ProfileMonitor
    from trainer.parallel.world import World
    from trainer.step.train_step import TrainStep

TABLE_FILE = "kernels.txt"
TRACE_FILE = "kernels.json"
_TABLE_COLUMNS = 130
_MOST_EVENTS = 500_000
"""The maximum number of events in a trace file, about 60 MB; the table includes all events."""


def is_profiled(section: ProfileMonitor, config: Config, world: World) -> bool:
    """Returns whether this rank is profiled. Without `profile_rank_ids` and `profile_pipeline` all ranks are."""
    stages = 0
    if section.profile_pipeline and config.use_parallel:
        stages = config.parallel_config.pipeline_stage
    ranks = set(section.profile_rank_ids or ())
    if stages:
        ranks |= set(range(0, world.size, max(world.size // stages, 1)))
    return not ranks or world.rank in ranks


def distributed_arguments(config: Config, world: World) -> dict[str, Any]:
    """Returns the parallel degrees with the names that MindStudio Insight reads."""
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
        folder: The folder for the files.
        has_native_layers: Whether native CPU layers compute the model.
        tell: Takes notes.
        layout: The result of `distributed_arguments`.
    """

    def __init__(
        self, section: ProfileMonitor, folder: Path, device: str, has_native_layers: bool, tell: Callable[[str], None],
        layout: dict[str, Any],
    ) -> None:  # fmt: skip
        self._section = section
        self._folder = folder
        self._device = device
        self._tell = tell
        self._has_native_layers = has_native_layers
        self._layout = layout
        self._steps: list[int] = []  # the profiled steps
        self._of_mindspore: Any = None
        self._events: list[Event] = []
        self._regions = RegionTimer(events=self._events)
        self._patches: Patches | None = None

    @contextlib.contextmanager
    def step(self, number: int, step: TrainStep) -> Iterator[None]:
        """Profiles the code inside as the step of this number, if the step is to be profiled."""
        section = self._section
        if not section.start_step <= number <= section.stop_step:
            yield
            return
        self.begin(number, step)
        with contextlib.ExitStack() as stack:
            if self._patches is not None:
                stack.enter_context(self._patches.applied())
                began = self._regions.clock()
                key = RegionKey(f"step {number}")
                stack.callback(lambda: self._events.append(
                    Event(key, threading.get_ident(), began, self._regions.clock() - began)
                ))  # fmt: skip
                stack.enter_context(self._regions.region(NOT_EXPLAINED))
            if section.mstx and self._device != "CPU":
                import mindspore

                mstx = mindspore.profiler.mstx
                stack.callback(mstx.range_end, mstx.range_start(f"step {number}", mindspore.runtime.current_stream()))
            yield
        self._of_mindspore.step()
        self._steps.append(number)

    def begin(self, number: int, step: TrainStep) -> None:
        """Opens the profiler before its first step, so that the time of the step does not include this."""
        if self._of_mindspore is None and self._section.start_step <= number <= self._section.stop_step:
            self._start(step)

    def is_due(self, number: int) -> bool:
        """Returns whether this step is the last profiled one."""
        return self._of_mindspore is not None and number >= self._section.stop_step

    def close(self) -> None:
        """Writes the profile of the steps so far, once. Does nothing if no step has been profiled."""
        profiler = self._of_mindspore
        if profiler is None:
            return
        self._of_mindspore = None
        with silent():  # the profiler prints messages and a progress bar
            profiler.stop()
        if self._patches is not None and self._steps:
            self._write_parts()
        if self._steps:
            first = self._steps[0]
            last = self._steps[-1]
            steps = f"step {first}"
            if last > first:
                steps = f"steps {first} to {last}"
            self._tell(f"the profile of {steps} is in {self._folder}")

    def _start(self, step: TrainStep) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with silent():
            self._of_mindspore = _open_profiler(self._section, self._folder, self._device)
            self._of_mindspore.start()
            with contextlib.suppress(Exception):  # only a tool's description of the job
                self._of_mindspore.add_metadata_json("distributed_args", json.dumps(self._layout))
        if self._device == "CPU":
            of_devices = ("profiler_level", "profile_communication", "profile_memory", "with_stack", "mstx")
            if ignored := [name for name in of_devices if getattr(self._section, name)]:
                self._tell(f"profile: {', '.join(ignored)}: no effect with MindSpore's profiler on a CPU")
        if self._has_native_layers:
            self._tell(f"profile: MindSpore's profiler does not record native CPU layers; see {TABLE_FILE} and"
                       f" {TRACE_FILE}")
            self._patches = patch_all(self._regions, step)

    def _write_parts(self) -> None:
        from rich.console import Console

        rows = profile_rows(self._regions.rows, len(self._steps))
        title = f"A step, mean of steps {self._steps[0]} to {self._steps[-1]}"
        console = Console(record=True, width=_TABLE_COLUMNS, file=io.StringIO(), color_system=None)
        console.print(profile_table(title, rows))
        write_text(self._folder / TABLE_FILE, console.export_text())
        write_text(self._folder / TRACE_FILE, json.dumps(chrome_trace(self._events, self._folder.name)))


def _open_profiler(section: ProfileMonitor, folder: Path, device: str) -> Any:
    from mindspore.profiler import AicoreMetrics, ProfilerActivity, ProfilerLevel, profile, tensorboard_trace_handler
    from mindspore.profiler import _ExperimentalConfig as Experimental

    ready = tensorboard_trace_handler(dir_name=str(folder))
    if device == "CPU":
        return profile(start_profile=False, on_trace_ready=ready, activities=[ProfilerActivity.CPU])
    level = section.profiler_level
    if section.profile_communication:
        level = max(level, 1)  # level 0 has no data of small collectives (MindSpore Transformers does the same)
    metrics = AicoreMetrics.AiCoreNone
    if level:
        metrics = AicoreMetrics.PipeUtilization
    detail = Experimental(
        profiler_level=(ProfilerLevel.Level0, ProfilerLevel.Level1, ProfilerLevel.Level2)[level],
        aic_metrics=metrics,
        data_simplification=section.data_simplification,
        mstx=section.mstx,
    )
    return profile(
        start_profile=False, on_trace_ready=ready, experimental_config=detail,
        profile_memory=section.profile_memory, with_stack=section.with_stack,
    )  # fmt: skip


def chrome_trace(events: Iterable[Event], name: str) -> list[dict[str, Any]]:
    """Returns events in the format of chrome://tracing, Perfetto and MindStudio Insight, in microseconds since 1970."""
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
