"""Run mode eval with `lm_eval.tasks`: loads the tasks, runs them, prints the harness' table and writes its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data import load_tokenizer
from trainer.device.stop_signals import StopSignals
from trainer.errors import EXIT_OK, UserError
from trainer.launch import heartbeat
from trainer.monitors.files import write_text
from trainer.parallel.world import SINGLE_PROCESS
from trainer.run.prepare import load_run_weights, make_output_folder, print_note

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.plan.plan import Plan

RESULTS_FILE = "lm_eval.json"


class _Stopped(Exception):
    """A stop signal arrived."""


def run_tasks(config: Config, plan: Plan) -> int:
    """Runs the tasks, prints the table and writes `output_dir`/lm_eval.json; returns the exit code.

    Raises:
        UserError: There is no such task, its data cannot be loaded, or it asks for what the model cannot do.
        RunError: The model's output is not finite.
    """
    for note in plan.notes:
        print_note(note)
    tasks, manager = load_tasks(config)
    tokenizer = load_tokenizer(config)
    weights = load_run_weights(config, SINGLE_PROCESS, print_note)
    folder = make_output_folder(config)
    with StopSignals() as stop:
        from trainer.run.harness.language_model import TrainerLM
        from trainer.run.session import open_session

        def check_stop() -> None:
            """Raises _Stopped after a stop signal."""
            heartbeat.beat(0)
            if stop:
                raise _Stopped

        model = TrainerLM(config, open_session(config, weights, device=plan.device), tokenizer, check_stop)
        try:
            results = evaluate_tasks(config, model, tasks, manager)
        except _Stopped:
            print(f"stopped by {stop.name}: the evaluation has no result", file=sys.stderr)
            return stop.exit_code
    from lm_eval.utils import handle_non_serializable, make_table

    text = json.dumps(results, indent=1, default=handle_non_serializable, ensure_ascii=False)
    write_text(folder / RESULTS_FILE, text + "\n")
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    print(folder / RESULTS_FILE)
    return EXIT_OK


def load_tasks(config: Config) -> tuple[list[Any], Any]:
    """Returns the tasks and groups of `lm_eval.tasks` with their data, as objects of the harness; and its TaskManager.

    Raises:
        UserError: There is no such task, or it cannot be loaded.
    """
    from lm_eval.tasks import TaskManager

    key = "lm_eval.tasks"
    where = config.source.where(key)
    # The index of the harness' own tasks takes seconds.
    manager = TaskManager(include_defaults=not all(map(_is_task_file, config.tasks)))
    objects = []
    for name in config.tasks:
        if not Path(name).expanduser().is_file() and name not in manager.all_tasks:
            fix = "name a task of lm-eval (lm-eval ls tasks lists them), or a task file"
            if name.endswith((".yaml", ".yml")):
                fix = "check the path"
            raise UserError("there is no such task", where=where, key=key, value=name, fix=fix)
        try:
            loaded = manager.load([name])
        except Exception as error:  # of the file's YAML and its functions, of the data set or of the network
            rule = f"the task cannot be loaded ({type(error).__name__}: {str(error).strip()})"
            fix = "check the task file, its data set and the network"
            raise UserError(rule, where=where, key=key, value=name, fix=fix) from error
        # A group is the first of its groups, and has its tasks.
        objects += list(loaded["groups"].values())[:1] or list(loaded["tasks"].values())
    return objects, manager


def _is_task_file(name: str) -> bool:
    """Returns whether a name is the file of a single task, which refers to no other task."""
    from lm_eval.tasks._index import Kind, TaskIndex

    try:
        entry = TaskIndex.entry_from_path(Path(name))
    except Exception:  # `load_tasks` reports what is wrong with the file
        return False
    return entry is not None and entry.kind is Kind.TASK


def evaluate_tasks(config: Config, model: Any, tasks: list[Any], manager: Any) -> dict[str, Any]:
    """Returns the harness' results of a model, a `TrainerLM`, as a dictionary.

    Raises:
        UserError: The harness refuses a setting, for example more examples than a task has.
    """
    from lm_eval import simple_evaluate

    settings = config.lm_eval
    try:
        results = simple_evaluate(
            model, tasks=tasks, num_fewshot=settings.num_fewshot, batch_size=model.batch_size, limit=settings.limit,
            log_samples=False, apply_chat_template=config.chat, task_manager=manager,
        )  # fmt: skip
    except ValueError as error:
        key = "lm_eval.tasks"
        rule = f"lm-eval cannot run them: {error}"
        fix = "check the task files, and --num_fewshot"
        raise UserError(rule, where=config.source.where(key), key=key, fix=fix) from error
    assert results is not None, "one process has the results"
    return dict(results)
