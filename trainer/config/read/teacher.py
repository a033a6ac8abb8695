"""Reads the folder of a teacher (``loss.teacher``), which becomes a configuration of its own."""

from __future__ import annotations

from pathlib import Path

from trainer.config.checks.problem import ConfigError
from trainer.config.checks.rules import rule_problems
from trainer.config.checks.unsupported import not_yet_problems
from trainer.config.checks.validation import validate
from trainer.config.location import SourceLocation
from trainer.config.note import Note
from trainer.config.read.defaults import apply_derived_defaults
from trainer.config.read.model_folder import KEY as FOLDER
from trainer.config.read.model_folder import add_model_folder, saved_dtype
from trainer.config.read.resolve import Resolved
from trainer.config.schema.root import Config, ConfigSource

_KEY = "loss.teacher"
_DTYPE = "loss.teacher_dtype"
_MODES = ("train", "finetune", "eval")


def read_teacher(resolved: Resolved, path: str) -> tuple[Config | None, list[ConfigError]]:
    """Reads the model in the teacher's folder, and sets how it is held in memory if no key says it.

    Args:
        resolved: The values of the run, which receives notes about the folder.
        path: The file of the run, for messages.

    Returns:
        The teacher, as it would be evaluated: None if the run has none, or if its folder cannot be used. And problems.

    Raises:
        UserError: The folder has no readable config.json, or its family is not known.
    """
    loss = resolved.section("loss")
    name = loss.get("teacher")
    place = resolved.positions.get(_KEY)
    if loss.get("type") != "distillation" or resolved.data.get("run_mode", "train") not in _MODES:
        return None, []
    if not isinstance(name, str) or not name or place is None:
        return None, []
    teacher = Resolved({"run_mode": "eval", FOLDER: name}, {FOLDER: place, "run_mode": place})
    add_model_folder(teacher, _KEY)
    if teacher.problems:
        return None, teacher.problems
    if loss.get("teacher_dtype") is None:
        loss["teacher_dtype"] = "float32"
        if saved_dtype(Path(name).expanduser(), place, _KEY) == "bfloat16":
            loss["teacher_dtype"] = "bfloat16"
        resolved.positions[_DTYPE] = SourceLocation(place.order, f"{place.text} ({_KEY})")
    apply_derived_defaults(teacher)
    resolved.notes += [Note(f"{_KEY}: {note}", getattr(note, "kind", "results")) for note in teacher.notes]
    source = ConfigSource(path, teacher.positions)
    config, problems = validate(teacher.data, source)
    if config is None or problems:
        return None, problems
    config = config.with_source(source)
    return config, [*not_yet_problems(config), *rule_problems(config)]
