"""`smoke`: plans a training file, makes a small copy of it, trains that, saves, resumes, evaluates, and judges."""

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
from trainer.config.checks.problem import ConfigErrors
from trainer.device.resolve import plans_elsewhere, resolve_device
from trainer.errors import EXIT_OK, EXIT_RUN_FAILED, RunError, UserError
from trainer.parallel.world import SINGLE_PROCESS, World, world_of
from trainer.smoke.changes import Change, Setup, smoke_text
from trainer.smoke.data import data_changes, sections_read, vocabulary
from trainer.smoke.degrees import asked_kinds, layouts, reason, refusals
from trainer.smoke.execute import CONFIG, LOG, execute, results
from trainer.smoke.model import NO_SIZES, model_changes
from trainer.smoke.needs import needs
from trainer.smoke.rows import is_large, write_first_records, write_rows, write_tokens
from trainer.smoke.training import training_changes

if TYPE_CHECKING:
    from trainer.config.checks.problem import ConfigError
    from trainer.plan.plan import Plan

FEWEST_STEPS = 2
"""A run that saves before its last step has two."""
_TOLERANCE = 1e-5
"""Of a resumed step's loss, relative to that of the training; on a CPU both are the same bits."""


@dataclass
class Verdict:
    """What came of a smoke run."""

    file: str
    folder: str
    ranks: int
    changes: list[Change]
    needs: list[str]
    kinds: list[str] = field(default_factory=list)  # of parallelism in the small copy, as `asked_kinds` names them
    left_out: list[str] = field(default_factory=list)  # those of the file that it has not
    losses: dict[int, float | None] = field(default_factory=dict)  # by step, from 1; None: not finite
    resumed_loss: float | None = None  # of the last step, done again from the checkpoint before it
    eval_loss: float | None = None
    problem: str = ""  # why it failed; empty where it passed
    exit_code: int = EXIT_OK
    seconds: float = 0.0
    peak_rss_bytes: int = 0  # of a process


def smoke(
    config: Config,
    told: list[ConfigError],
    steps: int,
    ranks: int,
    tell: Callable[[str], None],
    show: Callable[[list[Change]], None],
) -> Verdict:
    """Runs a file on a small scale.

    Args:
        config: As it was read; `told` are the problems that were found.
        tell: Is given a line about each step.
        show: Is given what was changed, before the training.

    Raises:
        UserError: The file is wrong: the messages of its plan.
    """
    began = time.monotonic()
    if not config.trains:
        where = config.source.where("run_mode")
        fix = "smoke a file that trains, or add --run_mode train"
        raise UserError("smoke is for trainings", where=where, key="run_mode", value=config.run_mode, fix=fix)
    plan = _plan(config, told)
    config = _in_own_job(config)
    setup = _setup(config, steps, ranks)
    verdict = Verdict(config.source.path, str(setup.folder), ranks, [], needs(config, plan, setup.missing))
    try:
        verdict.changes = smoke_changes(config, setup)
        show(verdict.changes)
        small = _prepare(config, setup, verdict.changes)
        verdict.kinds = asked_kinds(small, world_of(ranks))
        verdict.left_out = [kind for kind in asked_kinds(config, _own_job(config)) if kind not in verdict.kinds]
        try:
            execute(setup, tell)
        finally:  # the steps before a failure, too
            found = results(setup.folder)
            verdict.losses = found.losses
            verdict.eval_loss = found.evaluation
            verdict.resumed_loss = found.resumed.get(steps)
            verdict.peak_rss_bytes = found.peak_rss_bytes
        _judge(verdict, steps, small.do_eval)
    except RunError as error:
        verdict.problem = str(error)
    except UserError as error:  # wrong data, which the file names
        place = config.source.where(error.key)
        raise (error.with_location(place) if place else error) from None
    except Exception as error:  # a verdict, whatever the engine raises
        log = setup.folder / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(traceback.format_exc())
        first = next(iter(str(error).strip().splitlines()), "")
        verdict.problem = f"{type(error).__name__}: {first}\n  Log: {log}"
    if verdict.problem:
        verdict.exit_code = EXIT_RUN_FAILED
    else:
        verdict.exit_code = EXIT_OK
    verdict.seconds = time.monotonic() - began
    return verdict


def smoke_changes(config: Config, setup: Setup) -> list[Change]:
    """All that the smoke run of a file changes; the file has passed its plan. Of the kinds of parallelism in the file
    it keeps as many as its ranks can have and the trainer has together."""
    asked = asked_kinds(config, _own_job(config))
    refused = list[str]()
    few = f"--ranks {setup.ranks}: too few for it"
    choices = layouts(asked, setup.ranks)
    for layout in choices:
        if setup.ranks > 1:
            missing = [kind for kind in asked if kind not in layout.kinds()]
        else:
            missing = ()
        left_out = {kind: reason(kind, refused) if kind in choices[0].kinds() else few for kind in missing}
        changes = _changes(config, setup._replace(layout=layout, left_out=left_out))
        small = parse_config(CONFIG, smoke_text(config, changes), [], [])
        found = list(refusals(small, setup.ranks, setup.device))
        if not found:
            break
        refused = refused or found
    return changes


def _changes(config: Config, setup: Setup) -> list[Change]:
    vocab_size = vocabulary(config, setup)
    if config.classifier is None:
        model = list(model_changes(config, setup, vocab_size))
    else:
        model = []
    is_smaller = any(not change.key.endswith(NO_SIZES) for change in model)
    changes = [*model, *data_changes(config, setup, vocab_size), *training_changes(config, setup, is_smaller)]
    return list({change.key: change for change in changes}.values())


def _own_job(config: Config) -> World:
    from trainer.run.plan_file import world_from_degrees

    return world_from_degrees(config, SINGLE_PROCESS)


def _plan(config: Config, told: list[ConfigError]) -> Plan:
    from trainer.run.plan_file import plan_file

    try:
        # A job that its devices have too little memory for has a small copy that runs; `needs` tells of the memory.
        return plan_file(config, _own_job(config), told, opens_data=False, checks_memory=False)
    except ConfigErrors as problems:
        raise problems.short from None


def _in_own_job(config: Config) -> Config:
    """The file with the micro-batches of its own job, and an end that `steps` can say."""
    config = resolve_for_job(config, _own_job(config))
    changes = {"global_batch_size": None, "max_steps": None}
    return config.model_copy(update={"runner_config": config.runner_config.model_copy(update=changes)})


def _setup(config: Config, steps: int, ranks: int) -> Setup:
    from trainer.run.plan_file import missing_data

    folder = Path(config.output_dir).expanduser().absolute() / "smoke" / (Path(config.source.path).stem or "file")
    if plans_elsewhere(config):
        device = "CPU"
    else:
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
        small = load_config(str(folder / CONFIG))
    except UserError as error:
        raise RunError(f"the small copy of the file is not valid: {error}") from None
    for section in sections_read(config):
        if section in setup.missing:
            write_rows(small, section)
        elif section in setup.large:
            write_first_records(config, small, section)
        elif getattr(config, section).data_loader.type == "MindDataset":
            write_tokens(small, section, *_first_rows(config, small, section))
    return small


def _first_rows(config: Config, small: Config, section: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [R, T + 1] and labels [R, T] of the first rows of the file's own data, T of the small model.

    A row is cut from half a sequence before its first token with a loss.
    """
    from trainer.data.batches.mindrecord import build_mindrecord

    dataset, _ = build_mindrecord(config, section)
    wanted = getattr(small, section).data_loader.num_samples or 1
    length = small.decoder.seq_length
    batch = dataset.batch(np.arange(wanted) % dataset.num_sequences)
    rows = np.concatenate([batch.input_ids, np.maximum(batch.labels[:, -1:], 0)], axis=1)
    first = (batch.labels >= 0).argmax(axis=1)
    starts = np.clip(first - length // 2, 0, batch.labels.shape[1] - length)[:, None]
    tokens = np.take_along_axis(rows, starts + np.arange(length + 1), axis=1)
    return tokens, np.take_along_axis(batch.labels, starts + np.arange(length), axis=1)


def _judge(verdict: Verdict, steps: int, evaluates: bool) -> None:
    """Writes why the run failed, if it did."""
    wrong = [step for step in range(1, steps + 1) if not _is_finite(verdict.losses.get(step))]
    last = verdict.losses.get(steps)
    again = verdict.resumed_loss
    if wrong:
        verdict.problem = f"step {wrong[0]} of {steps} has no finite loss: {verdict.losses.get(wrong[0])}"
    elif not _is_finite(again):
        verdict.problem = f"the run that was resumed after step {steps - 1} has no step {steps}"
    elif not math.isclose(last, again, rel_tol=_TOLERANCE):
        verdict.problem = f"step {steps} has the loss {last}, and resumed from step {steps - 1} it has {again}"
    elif evaluates and not _is_finite(verdict.eval_loss):
        verdict.problem = f"the evaluation has no finite loss: {verdict.eval_loss}"


def _is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)
