"""How a job that failed continues: from the newest checkpoint that it saved, and on which ranks."""

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


def make_restart_plan(options: LaunchOptions, config: Config | None, plan_of: PlanOf) -> RestartPlan:
    """Returns how a job continues after a failure.

    Args:
        config: The configuration of the workers; None for a script, which resumes by itself.
        plan_of: Raises UserError if a configuration does not fit a world.
    """
    if config is None or not config.trains:
        shared = options.log_dir
        if config is not None:
            shared = Path(config.output_dir)
        return RestartPlan(shared, lambda: "", lambda options, name: options, lambda options, name: None)
    folder = Path(config.output_dir).expanduser().absolute() / "checkpoints"
    before = _saved(folder)  # of an earlier training, which may have used the folder too

    def find_newest() -> str:
        """Returns the newest intact checkpoint that this job saved, or ""."""
        new = [path.name for path in _saved(folder) - before]
        for path in reversed([path for path in complete_checkpoints(folder) if path.name in new]):
            try:
                check_checkpoint(path)
                return path.name
            except UserError as error:
                print(f"note: {path} is left out: {error.rule}", file=sys.stderr)
        return ""

    key = "load_checkpoint"
    if config.has_adapters:  # load_checkpoint names the base model
        key = "adapter_id"

    def resume_from(options: LaunchOptions, name: str) -> LaunchOptions:
        """Returns the options of a job that resumes from the checkpoint; without one, the options as they are."""
        if not name:
            return options
        # The job may have begun at the first row after an earlier checkpoint; it continues where this one is.
        words = ("--resume_training", name, f"--{key}", str(folder), "--ignore_data_skip", "false")
        return _add_arguments(options, *words)

    def shrink(options: LaunchOptions, name: str) -> LaunchOptions | None:
        """Returns the options of a resumed job on fewer ranks, or None if none fits."""
        return _shrink(options, lambda smaller: resume_from(smaller, name), plan_of)

    return RestartPlan(Path(config.output_dir), find_newest, resume_from, shrink)


class _Saved(NamedTuple):
    name: str
    at_ns: int  # when its marker was written


def _saved(folder: Path) -> set[_Saved]:
    checkpoints = set()
    for path in complete_checkpoints(folder):
        with contextlib.suppress(OSError):
            checkpoints.add(_Saved(path.name, os.stat(path / MARKER).st_mtime_ns))
    return checkpoints


def _add_arguments(options: LaunchOptions, *words: str) -> LaunchOptions:
    return replace(options, arguments=(*options.arguments, *words))


def _config(options: LaunchOptions) -> Config:
    arguments = split_arguments(options.arguments)
    assert arguments.config is not None, "the job has run with it"
    return load_config(arguments.config, arguments.overrides)


def _shrink(
    options: LaunchOptions, resume: Callable[[LaunchOptions], LaunchOptions], plan_of: PlanOf
) -> LaunchOptions | None:
    """Returns the job on the largest smaller number of ranks with the same global batch; None if there is none. Prints
    why others that have it do not fit: an epoch of their steps may not be one of the steps before."""
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
        smaller = replace(_add_arguments(options, *words), worker_num=ranks, local_worker_num=ranks)
        try:
            plan_of(_config(resume(smaller)), world_of(ranks))
            return smaller
        except UserError as error:
            print(f"note: the job cannot continue with --worker_num {ranks}: {error.rule}", file=sys.stderr)
    return None
