"""How a job that failed goes on: from the newest checkpoint that it saved, and on which ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint.store import MARKER, check_checkpoint, complete_checkpoints
from trainer.cli.flags import split_arguments
from trainer.config import Config, load_config
from trainer.errors import UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.job import RestartPlan
from trainer.parallel.world import World, world_of

PlanOf = Callable[[Config, World], object]


def continuation(options: LaunchOptions, config: Config | None, plan_of: PlanOf) -> RestartPlan:
    """How this job would go on.

    Args:
        config: None for a script, which does itself what is to be done.
        plan_of: Raises UserError where a configuration does not fit a world.
    """
    if config is None or not config.trains:
        if config is None:
            shared = options.log_dir
        else:
            shared = Path(config.output_dir)
        return RestartPlan(shared, lambda: "", lambda given, name: given, lambda given, name: None)
    folder = Path(config.output_dir).expanduser().absolute() / "checkpoints"
    before = _saved(folder)  # of an earlier training, which may have used the folder too

    def newest() -> str:
        new = [path.name for path in _saved(folder) - before]
        for path in reversed([path for path in complete_checkpoints(folder) if path.name in new]):
            try:
                check_checkpoint(path)
                return path.name
            except UserError as error:
                print(f"note: {path} is left out: {error.rule}", file=sys.stderr)
        return ""

    # that is the base model's then
    key = "load_checkpoint"
    if config.has_adapters:
        key = "adapter_id"

    def resumed(given: LaunchOptions, name: str) -> LaunchOptions:
        if not name:
            return given
        # The job may have begun at the first row after an earlier checkpoint; it goes on where this one is.
        return _with(given, "--resume_training", name, f"--{key}", str(folder), "--ignore_data_skip", "False")

    def fewer(given: LaunchOptions, name: str) -> LaunchOptions | None:
        return _fewer(given, lambda smaller: resumed(smaller, name), plan_of)

    return RestartPlan(Path(config.output_dir), newest, resumed, fewer)


class _Saved(NamedTuple):
    name: str
    at_ns: int  # when its marker was written


def _saved(folder: Path) -> set[_Saved]:
    found = set()
    for path in complete_checkpoints(folder):
        with contextlib.suppress(OSError):
            found.add(_Saved(path.name, os.stat(path / MARKER).st_mtime_ns))
    return found


def _with(options: LaunchOptions, *words: str) -> LaunchOptions:
    return replace(options, arguments=(*options.arguments, *words))


def _config(options: LaunchOptions) -> Config:
    arguments = split_arguments(options.arguments)
    assert arguments.config is not None, "the job has run with it"
    return load_config(arguments.config, arguments.overrides)


def _fewer(
    options: LaunchOptions, resumed: Callable[[LaunchOptions], LaunchOptions], plan_of: PlanOf
) -> LaunchOptions | None:
    """The job on the largest smaller number of ranks whose steps take the same sequences; None where there is none."""
    config = _config(options)
    micro_batches = config.runner_config.gradient_accumulation_steps * options.worker_num
    for ranks in range(options.worker_num - 1, 0, -1):
        words: list[str] = []
        if config.runner_config.global_batch_size is None:
            if micro_batches % ranks:
                continue
            words += ["--gradient_accumulation_steps", str(micro_batches // ranks)]
        if config.parallel_config.data_parallel is not None:
            words += ["--parallel_config.data_parallel", str(ranks)]
        smaller = replace(_with(options, *words), worker_num=ranks, local_worker_num=ranks)
        with contextlib.suppress(UserError):
            plan_of(_config(resumed(smaller)), world_of(ranks))
            return smaller
    return None
