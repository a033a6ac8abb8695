"""What every command does before MindSpore loads: checks, the plan with its data, and the checkpoint to resume."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.config import preflight
from trainer.config.checks.notes import pipeline_notes
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees, resolve_for_job, runs_semi_auto
from trainer.config.checks.problem import ConfigError
from trainer.config.device_defaults import apply_device_defaults
from trainer.device.resolve import resolve_device
from trainer.launch import heartbeat
from trainer.monitors import formatting
from trainer.ops.host_library import find_onednn
from trainer.ops.select import on_arrays
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import SINGLE_PROCESS, World, world_from_environment
from trainer.plan.ascend import ascend_problems
from trainer.plan.division import model_layout_for
from trainer.plan.memory import check_memory, memory_estimate
from trainer.plan.plan import Plan, plan_run

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from trainer.checkpoint.state import ResumedCheckpoint
    from trainer.checkpoint.weights import ShardSpecs
    from trainer.config import Config
    from trainer.plan.backend import ExecutionMode
    from trainer.step.train_step import TrainStep

_SILENT_SECONDS = 0.5  # of tokenizing, before it is shown


@dataclass(frozen=True)
class PreparedRun:
    """Everything a run needs that can be known without MindSpore."""

    config: Config  # with the defaults of the device
    plan: Plan
    layout: dict[str, Any]  # what a position in the training data means, see `data_layout`
    resume_from: Path | None  # the checkpoint that the run continues from, None for a fresh start
    resumed: ResumedCheckpoint | None  # its contents


class ExplicitBackend:
    """A `ExecutionMode`: layer by layer, with gradients summed over the ranks by the step."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        degrees = parallel_degrees(config, world)
        steps = {"gradient_accumulation_steps": micro_batches_per_step(config, degrees)}
        self.data_config = config.model_copy(update={"runner_config": config.runner_config.model_copy(update=steps)})
        self.data_ranks = (world.rank, world.size)
        if degrees.ranks == world.size:  # otherwise the job is refused
            self.data_ranks = (Mesh(degrees).coordinate_of(world.rank).data, degrees.data_parallel)

    def execution(self, device: str) -> str:
        if on_arrays(self.config, device, self.world):
            library, text = find_onednn()
            return f"layer by layer on arrays, {'in NumPy: ' if library is None else 'through '}{text}"
        if self.config.run_mode in ("predict", "chat") or self.config.context.mode != 0:
            return "operator by operator"
        return "blocks compiled once, run layer by layer"

    def check_device(self, device: str) -> None:
        """A CPU can do what `preflight` lets through."""
        if device == "Ascend":
            for problem in ascend_problems(self.config, parallel_degrees(self.config, self.world)):
                raise problem.error

    def problems(self) -> list[ConfigError]:
        return []  # `preflight` knows them all

    def notes(self) -> Iterator[str]:
        if self.config.use_parallel:
            yield from pipeline_notes(self.config)

    def open(
        self, schedule: Callable[[int], float], weights: Mapping[str, np.ndarray] | None, device: str
    ) -> TrainStep:
        from trainer.run.session import open_training

        return open_training(self.config, schedule, weights, self.world, device)

    def check_layout(self, layout: Mapping[str, Any], communicator: Any) -> None:
        """Each rank reads its own part of the data; nothing needs to be the same."""


def select_execution_mode(config: Config, world: World) -> ExecutionMode:
    """The backend of a job: explicit mode, or where the file asks for it MindSpore's semi-automatic mode."""
    if runs_semi_auto(config, world):
        from trainer.semi_auto.backend import SemiAutoBackend

        return SemiAutoBackend(config, world)
    return ExplicitBackend(config, world)


def prepare_run(config: Config, world: World = SINGLE_PROCESS) -> PreparedRun:
    """Checks the run, opens its data and reads the checkpoint it resumes from. `config` is that of
    `resolve_for_job`; the run reads the one in the result.

    Text that is not in the cache is tokenized into it here, with progress on a terminal.

    Raises:
        UserError: The run could not start.
        RunError: The token file cannot be written, or the data changes while it is read.
    """
    device = resolve_device(config)
    config = apply_device_defaults(config, device)
    backend = select_execution_mode(config, world)
    backend.check_device(device)
    preflight(config, world, backend.problems())
    memory_bytes = memory_estimate(config, config.trains, device, world)
    # a plan may be of a job for other hosts
    own = SINGLE_PROCESS
    if world == world_from_environment():
        own = world
    if device == "CPU":
        check_memory(config, memory_bytes, own.local_size)  # one rank must fit anywhere
    resumes = config.trains and config.resume_training
    if (config.load_checkpoint or config.adapter_id) and not resumes:  # a checkpoint that is resumed has the weights
        from trainer.checkpoint.adapters import check_starting_files

        check_starting_files(config)
    if not config.trains:
        plan = plan_run(config, world, backend, device, memory_bytes, BuildProgress())
        return PreparedRun(config, plan, {}, None, None)
    resume_from = None
    if config.resume_training:  # looked for before the data, which may take long to tokenize
        from trainer.checkpoint.state import checkpoint_to_resume, plan_resumed, read_resumed_checkpoint

        resume_from = checkpoint_to_resume(config)
    plan = plan_run(config, world, backend, device, memory_bytes, BuildProgress())
    from trainer.data.datasets import data_layout

    layout = data_layout(backend.data_config, plan.data.batches.dataset, backend.data_ranks[1])
    if resume_from is None:
        return PreparedRun(config, plan, layout, None, None)
    resumed = read_resumed_checkpoint(resume_from, config, layout, local_shard_specs(config, world), own)
    return PreparedRun(config, plan_resumed(plan, resumed), layout, resume_from, resumed)


def local_shard_specs(config: Config, world: World) -> ShardSpecs | None:
    """The part of each parameter that this rank has; None: all of all, or MindSpore decides."""
    degrees = parallel_degrees(config, world)
    if not degrees.shards_model or runs_semi_auto(config, world):
        return None
    layout = model_layout_for(config, world)
    where = Mesh(degrees).coordinate_of(world.rank)
    return {name: layout.shard_spec(name, where) for name in layout.parameters if layout.holds(name, where)}


def build_plan(config: Config, world: World = SINGLE_PROCESS) -> Plan:
    """The plan of a run; errors as of `prepare_run`."""
    return prepare_run(resolve_for_job(config, world), world).plan


class BuildProgress:
    """Tells the launcher that text is being tokenized, and shows it on a terminal where it takes long."""

    def __init__(self) -> None:
        self._began = 0.0
        self._shown = ""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        heartbeat.beat(None)
        if not sys.stderr.isatty():
            return
        now = time.monotonic()
        self._began = self._began or now
        text = f"tokenizing {100 * done_bytes // max(total_bytes, 1)} % of {formatting.size(total_bytes)}"
        ended = done_bytes >= total_bytes
        if text != self._shown and (self._shown or now - self._began > _SILENT_SECONDS):
            if ended:
                self._shown = ""
            else:
                self._shown = text
            print(f"\r\x1b[K{'' if ended else text}", end="", file=sys.stderr, flush=True)
