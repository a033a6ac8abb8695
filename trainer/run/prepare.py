"""Prepares a run without MindSpore: checks the configuration, opens the data, plans, reads the checkpoint to resume."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.config import preflight
from trainer.config.checks.adapters import cell_problems, vocabulary_device_problems
from trainer.config.checks.notes import pipeline_notes
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees, resolve_for_job, runs_semi_auto
from trainer.config.checks.preferences import loss_problems
from trainer.config.checks.problem import ConfigError, problem
from trainer.config.checks.rules import average_keys
from trainer.config.checks.unsupported import offload_problems
from trainer.config.device_defaults import apply_device_defaults
from trainer.device.resolve import resolve_device
from trainer.errors import EXIT_OK
from trainer.launch import heartbeat
from trainer.models.spec.shapes import base_dtypes
from trainer.monitors import formatting
from trainer.monitors.files import make_folder
from trainer.ops.host_library import find_onednn
from trainer.ops.select import on_arrays
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import SINGLE_PROCESS, World, world_from_environment
from trainer.plan.ascend import ascend_problems
from trainer.plan.division import model_layout_for
from trainer.plan.memory import check_host_memory, memory_estimate
from trainer.plan.plan import Plan, plan_run

if TYPE_CHECKING:
    import numpy as np

    from trainer.checkpoint.state import ResumedCheckpoint
    from trainer.checkpoint.weights import ShardSpecs
    from trainer.config import Config
    from trainer.plan.backend import ExecutionMode
    from trainer.step.train_step import TrainStep

_SILENT_SECONDS = 0.5  # tokenizing that takes longer is shown


@dataclass(frozen=True)
class PreparedRun:
    """A run that is checked, with everything that is known without MindSpore.

    Attributes:
        config: The configuration with the defaults of the device.
        layout: The meaning of a position in the training data, see `data_layout`.
        resume_from: The checkpoint that the run continues; None for a new run.
        resumed: The contents of that checkpoint.
    """

    config: Config
    plan: Plan
    layout: dict[str, Any]
    resume_from: Path | None
    resumed: ResumedCheckpoint | None


class ExplicitBackend:
    """Explicit mode: this program shards the model, and the training step sums gradients over the ranks."""

    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        degrees = parallel_degrees(config, world)
        steps = {"gradient_accumulation_steps": micro_batches_per_step(config, degrees)}
        self.data_config = config.model_copy(update={"runner_config": config.runner_config.model_copy(update=steps)})
        self.data_ranks = (world.rank, world.size)
        if degrees.ranks == world.size:  # `preflight` refuses any other job
            self.data_ranks = (Mesh(degrees).coordinate_of(world.rank).data, degrees.data_parallel)

    def execution(self, device: str) -> str:
        """Returns in words what computes the model."""
        if on_arrays(self.config, device, self.world):
            library, text = find_onednn()
            if library is None:
                return f"array engine: NumPy alone, because {text}"
            return f"array engine: NumPy and {text}"
        if self.config.run_mode in ("predict", "chat") or self.config.context.mode != 0:
            return "eager mode: operator by operator"
        return "compiled blocks: one for all layers of a kind"

    def check_device(self, device: str) -> None:
        """Raises a UserError if an Ascend or MindSpore's cells cannot run the configuration.

        `preflight` checks what native CPU layers cannot run.
        """
        for each in self._device_problems(device):
            raise each.error

    def _device_problems(self, device: str) -> Iterator[ConfigError]:
        config = self.config
        matrices = config.whole_matrix_method
        if not on_arrays(config, device, self.world):
            yield from cell_problems(config)
            if base_dtypes(config.network):
                fix = "leave it out, or run on a CPU with context.mode 0"
                yield problem(config, matrices, "is supported by the array engine of CPUs only", fix)
        if device != "CPU":
            for key in average_keys(config):
                yield problem(config, key, "is supported on a CPU only", "leave averages of weights out")
            if matrices.endswith("use_dora"):
                yield problem(config, matrices, "is supported on a CPU only", "leave it out, or run on a CPU")
            yield from vocabulary_device_problems(config)
        if device == "Ascend":
            yield from offload_problems(config)
            yield from ascend_problems(config, parallel_degrees(config, self.world))

    def problems(self) -> list[ConfigError]:
        """Returns no errors, because `preflight` checks all rules of explicit mode."""
        return []

    def notes(self) -> Iterator[str]:
        """Yields notes about the pipeline."""
        if self.config.use_parallel:
            yield from pipeline_notes(self.config)

    def open(
        self, schedule: Callable[[int], float], weights: Mapping[str, np.ndarray] | None, device: str
    ) -> TrainStep:
        """Builds the training step; imports MindSpore. See `ExecutionMode.open`."""
        from trainer.run.session import open_training

        return open_training(self.config, schedule, weights, self.world, device)

    def check_layout(self, layout: Mapping[str, Any], communicator: Any) -> None:
        """Checks nothing: each rank reads other data, and nothing must be equal on all ranks."""


def select_execution_mode(config: Config, world: World) -> ExecutionMode:
    """Returns MindSpore's semi-automatic mode if the configuration requests it, else explicit mode."""
    if runs_semi_auto(config, world):
        from trainer.semi_auto.backend import SemiAutoBackend

        return SemiAutoBackend(config, world)
    return ExplicitBackend(config, world)


def end_scheduler(config: Config) -> NoReturn:
    """Ends the process that msrun starts with the command of the ranks, to tell them each other's addresses.

    It waits until ranks on a device have ended; those on a CPU do not need it, and a single one does not.

    Raises:
        SystemExit: With exit code 0.
    """
    if world_from_environment().size > 1 and resolve_device(config) != "CPU":
        from trainer.parallel.collectives import run_scheduler

        run_scheduler()
    sys.exit(EXIT_OK)


def prepare_run(config: Config, world: World = SINGLE_PROCESS) -> PreparedRun:
    """Checks the run, opens its data, plans it, and reads the checkpoint that it resumes from.

    Text that is not in the token cache is tokenized here, with progress on a terminal.

    Args:
        config: The result of `resolve_for_job`. The run uses the configuration of the returned value instead.

    Raises:
        UserError: The run could not start.
        RunError: The token cache cannot be written, or the data changes while it is read.
    """
    device = resolve_device(config)
    config = apply_device_defaults(config, device)
    backend = select_execution_mode(config, world)
    backend.check_device(device)
    loss_errors = loss_problems(config, world, on_arrays(config, device, world))
    preflight(config, world, [*backend.problems(), *loss_errors])
    memory_bytes = memory_estimate(config, config.trains, device, world)
    local_world = SINGLE_PROCESS  # the plan of a job for other hosts has no ranks here
    if world == world_from_environment():
        local_world = world
    if device == "CPU":
        check_host_memory(config, memory_bytes, local_world.local_size)  # at least one rank must fit
    resumes = config.trains and config.resume_training
    if (config.load_checkpoint or config.adapter_id) and not resumes:  # a resumed checkpoint has the weights itself
        from trainer.checkpoint.adapters import check_starting_files

        check_starting_files(config)
    if config.teacher is not None:
        from trainer.checkpoint.weights import check_teacher_files

        check_teacher_files(config)
    if not config.trains:
        plan = plan_run(config, world, backend, device, memory_bytes, BuildProgress())
        return PreparedRun(config, plan, {}, None, None)
    resume_from = None
    if config.resume_training:  # found before the data is opened, which may take long to tokenize
        from trainer.checkpoint.mindformers.resume import read_training
        from trainer.checkpoint.state import checkpoint_to_resume, plan_resumed

        resume_from = checkpoint_to_resume(config)
    plan = plan_run(config, world, backend, device, memory_bytes, BuildProgress())
    from trainer.data.datasets import data_layout

    batches = plan.data.batches
    assert batches is not None, "the plan of a run opens its data"
    layout = data_layout(backend.data_config, batches.dataset, backend.data_ranks[1])
    if resume_from is None:
        return PreparedRun(config, plan, layout, None, None)
    resumed = read_training(resume_from, config, layout, local_shard_specs(config, world), local_world)
    return PreparedRun(config, plan_resumed(plan, resumed), layout, resume_from, resumed)


def local_shard_specs(config: Config, world: World) -> ShardSpecs | None:
    """Returns the shard of each parameter that this rank has.

    None means that the rank has all parameters unsharded, or that MindSpore shards them (semi-automatic mode).
    """
    degrees = parallel_degrees(config, world)
    if not degrees.shards_model or runs_semi_auto(config, world):
        return None
    layout = model_layout_for(config, world)
    where = Mesh(degrees).coordinate_of(world.rank)
    return {name: layout.shard_spec(name, where) for name in layout.parameters if layout.holds(name, where)}


def load_run_weights(config: Config, world: World, note: Callable[[str], None]) -> dict[str, np.ndarray] | None:
    """Returns the weights with which this rank evaluates or predicts, averages if `use_ema` asks for them; None: none.

    Raises:
        UserError: The files cannot be read, or belong to another model or base model.
    """
    from trainer.checkpoint.adapters import load_initial_weights

    parts = local_shard_specs(config, world)
    return load_initial_weights(config, note, averages=config.use_ema, parts=parts, world=world)


def make_output_folder(config: Config) -> Path:
    """Creates `output_dir` and returns it.

    Raises:
        UserError: It cannot be created.
    """
    folder = Path(config.output_dir).expanduser()
    make_folder(folder, config.source.where("output_dir"))
    return folder


def print_note(text: str) -> None:
    """Prints a note to standard error, because programs may read the standard output of a command."""
    print(f"note: {text}", file=sys.stderr)


def build_plan(config: Config, world: World = SINGLE_PROCESS) -> Plan:
    """Returns the plan of a run. Raises the errors of `prepare_run`."""
    return prepare_run(resolve_for_job(config, world), world).plan


class BuildProgress:
    """Reports the progress of tokenizing to the launcher, and to a terminal if it takes long."""

    def __init__(self) -> None:
        self._began = 0.0
        self._shown = ""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        heartbeat.beat(None)
        if not sys.stderr.isatty():
            return
        now = time.monotonic()
        self._began = self._began or now
        is_done = done_bytes >= total_bytes
        text = f"tokenizing {100 * done_bytes // max(total_bytes, 1)} % of {formatting.size(total_bytes)}"
        if text == self._shown or not (self._shown or now - self._began > _SILENT_SECONDS):
            return
        if is_done:
            text = ""  # clears the line
        self._shown = text
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
