"""`smoke`: plans a training file, trains a small copy of it, saves, resumes, evaluates, and checks the losses."""

from __future__ import annotations

import math
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.config import Config, load_config, parse_config
from trainer.config.checks.parallel import resolve_for_job
from trainer.device.resolve import plans_elsewhere, resolve_device
from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, RunError, UserError
from trainer.input_files import links_out_of
from trainer.parallel.world import SINGLE_PROCESS, World, world_of
from trainer.smoke.changes import Change, Setup, changes_from, smoke_text
from trainer.smoke.data import data_changes, sections_read, vocabulary
from trainer.smoke.degrees import parallelism_kinds, possible_layouts, refusals
from trainer.smoke.execute import CONFIG, LOG, results, train_small_copy
from trainer.smoke.model import NO_SIZES, model_changes
from trainer.smoke.needs import full_run_requirements
from trainer.smoke.synthetic_data import is_large, write_first_records, write_synthetic_data, write_tokens
from trainer.smoke.training import training_changes

if TYPE_CHECKING:
    from trainer.config.checks.problem import ConfigError
    from trainer.plan.plan import Plan

FEWEST_STEPS = 2
"""A run that saves before its last step has two."""
_TOLERANCE = 1e-5
"""Of a resumed step's loss, relative to that of the training; on a CPU both are the same bits."""


@dataclass
class SmokeResult:
    """The result of a smoke run."""

    file: str
    folder: str
    ranks: int
    changes: list[Change]
    needs: list[str]
    kinds: list[str] = field(default_factory=list)  # of parallelism in the small copy
    left_out: list[str] = field(default_factory=list)  # kinds of the file that the small copy does not have
    losses: dict[int, float | None] = field(default_factory=dict)  # by step, from 1; None: not finite
    resumed_loss: float | None = None  # of the last step, done again from the checkpoint before it
    eval_loss: float | None = None
    problem: str = ""  # why it failed; empty where it passed
    exit_code: int = EXIT_OK
    seconds: float = 0.0
    peak_rss_bytes: int = 0  # of a process


def smoke(
    config: Config,
    problems: list[ConfigError],
    steps: int,
    ranks: int,
    report_progress: Callable[[str], None],
    show_changes: Callable[[list[Change]], None],
) -> SmokeResult:
    """Trains a small copy of a file, resumes it, and checks the losses.

    Args:
        config: The file's configuration as it was read.
        problems: The configuration errors that reading it collected.
        report_progress: Receives a line about each step.
        show_changes: Receives the changes of the file before the training.

    Raises:
        UserError: The file has configuration errors, as its plan reports them.
    """
    began = time.monotonic()
    if not config.trains:
        where = config.source.where("run_mode")
        raise UserError("smoke supports only run_mode train and finetune", where=where, key="run_mode",
                        value=config.run_mode, fix="smoke a file that trains, or add --run_mode train")
    plan = _plan(config, problems)
    config = _resolve_batch(config)
    setup = _setup(config, steps, ranks)
    requirements = full_run_requirements(config, plan, setup.missing)
    result = SmokeResult(config.source.path, str(setup.folder), ranks, [], requirements)
    try:
        result.changes = smoke_changes(config, setup)
        show_changes(result.changes)
        smoke_config = _prepare(config, setup, result.changes)
        result.kinds = parallelism_kinds(smoke_config, world_of(ranks))
        file_kinds = parallelism_kinds(config, _full_world(config))
        result.left_out = [kind for kind in file_kinds if kind not in result.kinds]
        try:
            train_small_copy(setup, report_progress)
        finally:  # the steps before a failure, too
            measured = results(setup.folder)
            result.losses = measured.losses
            result.eval_loss = measured.evaluation
            result.resumed_loss = measured.resumed.get(steps)
            result.peak_rss_bytes = measured.peak_rss_bytes
        _check_result(result, steps, smoke_config.do_eval)
    except RunError as error:
        result.problem = str(error)
    except UserError as error:  # wrong data, which the file names
        place = config.source.where(error.key)
        if not place:
            raise
        raise error.with_location(place) from None
    except Exception as error:  # a result, whatever the engine raises
        log = setup.folder / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc())
        first = next(iter(str(error).strip().splitlines()), "")
        result.problem = f"{type(error).__name__}: {first}\n  Log: {log}"
    if result.problem:
        result.exit_code = EXIT_RUN_FAILED
    result.seconds = time.monotonic() - began
    return result


def smoke_changes(config: Config, setup: Setup) -> list[Change]:
    """Returns all changes that the smoke run makes to a file, which has passed its plan.

    Of the file's kinds of parallelism it keeps as many as its ranks allow and the trainer supports together.
    """
    kinds = parallelism_kinds(config, _full_world(config))
    first_refusals: list[str] = []
    choices = possible_layouts(kinds, setup.ranks)
    for layout in choices:
        left_out = {}
        if setup.ranks > 1:
            for kind in (kind for kind in kinds if kind not in layout.kinds()):
                if kind in choices[0].kinds():
                    reasons = [rule for rule in first_refusals if kind in rule]
                    left_out[kind] = f"refused: {'; '.join(reasons or first_refusals)}"
                else:
                    left_out[kind] = f"--ranks {setup.ranks}: too few for it"
        changes = _changes(config, setup._replace(layout=layout, left_out=left_out))
        smoke_config = parse_config(CONFIG, smoke_text(config, changes), [], [])
        refused = list(refusals(smoke_config, setup.ranks, setup.device))
        if not refused:
            break
        first_refusals = first_refusals or refused
    return changes


def _changes(config: Config, setup: Setup) -> list[Change]:
    vocab_size = vocabulary(config, setup)
    model = []
    if config.is_decoder:
        model = list(changes_from(config, model_changes(config, setup, vocab_size)))
    is_smaller = any(not change.key.endswith(NO_SIZES) for change in model)
    others = [*data_changes(config, setup, vocab_size), *training_changes(config, setup, is_smaller)]
    return list({change.key: change for change in [*model, *changes_from(config, others)]}.values())


def _full_world(config: Config) -> World:
    from trainer.run.plan_file import world_from_degrees

    return world_from_degrees(config, SINGLE_PROCESS)


def _plan(config: Config, problems: list[ConfigError]) -> Plan:
    from trainer.run.plan_file import plan_file

    # The small copy also runs if the devices have too little memory for the file: `full_run_requirements` says so.
    return plan_file(config, _full_world(config), problems, opens_data=False, checks_memory=False)


def _resolve_batch(config: Config) -> Config:
    """Returns the file with the micro-batches of its full job, and without a limit of steps."""
    config = resolve_for_job(config, _full_world(config))
    changes = {"global_batch_size": None, "max_steps": None}
    return config.model_copy(update={"runner_config": config.runner_config.model_copy(update=changes)})


def _setup(config: Config, steps: int, ranks: int) -> Setup:
    from trainer.run.plan_file import missing_data

    folder = Path(config.output_dir).expanduser().absolute() / "smoke" / (Path(config.source.path).stem or "file")
    device = "CPU"
    if not plans_elsewhere(config):
        device = resolve_device(config)
    missing = missing_data(config, sections_read(config))
    here = [section for section in sections_read(config) if section not in missing]
    large = {section for section in here
             if getattr(config, section).data_loader.reads_text and is_large(config, section)}
    return Setup(steps, ranks, folder, device, missing, frozenset(large))


def _prepare(config: Config, setup: Setup, changes: list[Change]) -> Config:
    """Writes the small configuration and the data that is not here.

    Raises:
        UserError: The folder has other files, or the data that is here cannot be read.
        RunError: The small configuration is not valid.
    """
    folder = setup.folder
    for rule in links_out_of(folder.parents[1], [folder.parent, folder]):
        raise UserError(rule, key="output_dir", value=str(folder.parents[1]), fix="give another --output_dir")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / CONFIG).is_file():
            rule = "the folder of the smoke run has other files"
            raise UserError(rule, key="output_dir", value=str(folder), fix="give another --output_dir")
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(smoke_text(config, changes), encoding="utf-8")
    except OSError as error:
        rule = f"the folder cannot be written: {error.strerror or error}"
        raise UserError(rule, key="output_dir", value=str(folder), fix="give another --output_dir") from None
    try:
        smoke_config = load_config(str(folder / CONFIG))
    except UserError as error:
        raise RunError(f"the small copy of the file is not valid: {error}") from None
    for section in sections_read(config):
        if section in setup.missing:
            write_synthetic_data(smoke_config, section)
        elif section in setup.large:
            write_first_records(config, smoke_config, section)
        elif getattr(config, section).data_loader.type == "MindDataset":
            write_tokens(smoke_config, section, *_first_rows(config, smoke_config, section))
    return smoke_config


def _first_rows(config: Config, smoke_config: Config, section: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens [R, T + 1] and labels [R, T] of the first rows of the file's own data, T of the small model.

    A row is cut from half a sequence before its first token with a loss.
    """
    from trainer.data.batches.mindrecord import build_mindrecord

    dataset, _ = build_mindrecord(config, section)
    count = getattr(smoke_config, section).data_loader.num_samples or 1
    length = smoke_config.decoder.seq_length
    batch = dataset.batch(np.arange(count) % dataset.num_sequences)
    rows = np.concatenate([batch.input_ids, np.maximum(batch.labels[:, -1:], 0)], axis=1)
    first = (batch.labels >= 0).argmax(axis=1)
    starts = np.clip(first - length // 2, 0, batch.labels.shape[1] - length)[:, None]
    tokens = np.take_along_axis(rows, starts + np.arange(length + 1), axis=1)
    return tokens, np.take_along_axis(batch.labels, starts + np.arange(length), axis=1)


def _check_result(result: SmokeResult, steps: int, evaluates: bool) -> None:
    """Sets the problem of the result if a loss is missing, not finite, or changed by resuming."""
    wrong = [step for step in range(1, steps + 1) if not _is_finite(result.losses.get(step))]
    last = result.losses.get(steps)
    again = result.resumed_loss
    if wrong:
        result.problem = f"step {wrong[0]} of {steps} has no finite loss: {result.losses.get(wrong[0])}"
    elif last is None or again is None or not math.isfinite(again):
        result.problem = f"the run that was resumed after step {steps - 1} has no step {steps}"
    elif not math.isclose(last, again, rel_tol=_TOLERANCE):
        rule = f"resuming changed the loss: step {steps} has {last} in the first run"
        result.problem = f"{rule} and {again} after resuming from step {steps - 1}"
    elif evaluates and not _is_finite(result.eval_loss):
        result.problem = f"the evaluation has no finite loss: {result.eval_loss}"


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)
