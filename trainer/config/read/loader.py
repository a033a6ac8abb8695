"""YAML file and overrides -> Config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.checks.notes import mode_notes, parallel_notes, rule_notes
from trainer.config.checks.problem import ConfigError, raise_problems
from trainer.config.checks.rules import rule_problems
from trainer.config.checks.unsupported import ignored_notes, not_yet_problems
from trainer.config.checks.validation import validate
from trainer.config.note import Note
from trainer.config.pynative import is_newer_schema
from trainer.config.read.defaults import apply_derived_defaults
from trainer.config.read.dump import RESOLVED, dump_values
from trainer.config.read.model_folder import add_model_folder
from trainer.config.read.nodes import Table, plain
from trainer.config.read.overrides import Override, apply_overrides
from trainer.config.read.relocate import arrange, find_entry
from trainer.config.read.resolve import resolve
from trainer.config.read.yaml_reader import parse_document, read_text
from trainer.config.schema.fields import fields_by_yaml_name
from trainer.config.schema.root import Config, Source
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS, World

if TYPE_CHECKING:
    from trainer.config.pynative.translate import Translation


def load_config(
    path: str, overrides: Sequence[Override] = (), problems: list[ConfigError] | None = None
) -> Config:
    """Reads a configuration: defaults, then the file, then each override in order.

    Args:
        path: The YAML file; relative paths count from the working directory.
        overrides: Values from the command line, the strongest last.
        problems: Takes the mistakes, which are raised without it; wrong values then have their defaults.

    Raises:
        UserError: With the place, key, value, rule and fix of every mistake; nothing is ever taken silently.
    """
    return parse_config(path, read_text(path), overrides, problems)


def parse_config(
    name: str, text: str, overrides: Sequence[Override] = (), told: list[ConfigError] | None = None
) -> Config:
    """The same for the text of a file; ``name`` is what messages call it."""
    root, notes = parse_document(name, text)
    newer = None
    if is_newer_schema(root):
        newer, overrides = _translated(name, root, overrides)
        root = newer.root
        notes += newer.notes
    notes += arrange(root)
    problems, more = apply_overrides(root, overrides)
    found = resolve(root)
    add_model_folder(found)
    problems += found.problems
    if newer is not None:
        found.written = newer.written(found.written, found.positions)
    apply_derived_defaults(found)
    config, invalid = validate(found.data, found.positions, found.written, told=bool(problems))
    problems += invalid
    if config is None:
        raise_problems(problems)
    assert config is not None, "a configuration without problems is valid"
    told_so_far = tuple(notes + more + found.notes)
    config = config.with_source(
        Source(name, found.positions, told_so_far, found.written, is_of_run=text.startswith(RESOLVED))
    )
    ruled = rule_problems(config)
    problems += not_yet_problems(config) + (_independent(ruled, problems) if problems else ruled)
    if newer is not None:
        problems = [*newer.problems, *map(newer.renamed, problems)]
    if told is None:
        raise_problems(problems)
    else:
        told += problems
    return config


def _translated(
    name: str, root: Table, overrides: Sequence[Override]
) -> tuple[Translation, Sequence[Override]]:
    """The translation of a file of the newer schema, and the overrides of our keys; those of its own are applied."""
    from trainer.config.pynative.translate import is_key_there, translate

    nulls = ("null", "None", "~")  # which remove what is written, whatever it is
    there = [one for one in overrides if is_key_there(one.key) or (one.text in nulls and find_entry(root, one.key))]
    # There, `--mode 1` says which schema a file has; here it runs operator by operator, as `--context.mode 1` does.
    ours = [one for one in overrides if one not in there and (one.source, one.text) != ("flag --mode", "1")]
    problems, notes = apply_overrides(root, there)
    made = translate(name, root)
    made.problems[:0] = problems
    made.notes[:0] = notes
    return made, ours


def converted(name: str, text: str) -> tuple[str, list[str]]:
    """The translation of a file of the newer schema as YAML text, and notes.

    Raises:
        UserError: It is none, or has mistakes.
    """
    from trainer.config.pynative.translate import translate

    root, notes = parse_document(name, text)
    if not is_newer_schema(root):
        rule = "this is no file of the newer schema, with sections training and parallelism"
        raise UserError(rule, where=name, fix="use it as it is")
    parse_config(name, text)
    made = translate(name, root)
    comment = f"# The translation of {Path(name).name}.\n"
    sections = plain(made.root)
    ordered = {key: sections[key] for key in fields_by_yaml_name(Config) if key in sections}
    return dump_values(ordered, comment), notes + made.notes


def _independent(ruled: list[ConfigError], problems: list[ConfigError]) -> list[ConfigError]:
    """The broken rules that are none because of another problem: a wrong value has its default, which nobody wrote."""
    unsure = {"model" if one.is_absent else one.error.key.rpartition(".")[0] for one in problems if not one.is_extra}
    unsure -= {""}
    unsure |= {section for section, of in (("optimizer", "lr_schedule"), ("model", "model.arch")) if of in unsure}
    return [
        one for one in ruled
        if one.place.order and not any(one.error.key.startswith(f"{section}.") for section in unsure)
    ]  # fmt: skip


def config_notes(config: Config, world: World = SINGLE_PROCESS, device: str | None = None) -> list[str]:
    """What the user should know before the run: keys that change nothing, guesses, and what works differently here.

    `device` None is the one that the file names, or a CPU.
    """
    device = device or config.context.device_target or "CPU"
    ignored = [Note(text, "ignored") for text in ignored_notes(config)]
    parallel = [Note(text, "parallel") for text in parallel_notes(config, world)]
    modes = mode_notes(config, world, device)
    return [*config.source.notes, *ignored, *rule_notes(config, device), *modes, *parallel]
