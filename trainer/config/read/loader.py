"""Loads a configuration from a YAML file and overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.config.checks.notes import mode_notes, parallel_notes, rule_notes
from trainer.config.checks.problem import ConfigError, raise_problems, rename_keys
from trainer.config.checks.rules import rule_problems
from trainer.config.checks.unsupported import ignored_notes, not_yet_problems
from trainer.config.checks.validation import validate
from trainer.config.note import Note
from trainer.config.pynative import is_newer_schema
from trainer.config.read.defaults import apply_derived_defaults
from trainer.config.read.dump import RESOLVED, SMALL_COPY
from trainer.config.read.model_folder import add_model_folder
from trainer.config.read.nodes import Table, find_entry
from trainer.config.read.overrides import Override, apply_overrides
from trainer.config.read.relocate import move_to_canonical_sections
from trainer.config.read.resolve import resolve
from trainer.config.read.teacher import read_teacher
from trainer.config.read.yaml_reader import parse_document, read_text
from trainer.config.schema.root import Config, ConfigSource
from trainer.parallel.world import SINGLE_PROCESS, World

if TYPE_CHECKING:
    from trainer.config.pynative.translate import Translation


def load_config(path: str, overrides: Sequence[Override] = (), problems: list[ConfigError] | None = None) -> Config:
    """Reads a configuration: defaults, then the file, then each override in order.

    Args:
        path: The YAML file; relative paths count from the working directory.
        overrides: Values from the command line, the strongest last.
        problems: Receives the errors instead of raising them; wrong values are then replaced by their defaults.

    Raises:
        UserError: With the place, key, value, rule and fix of every error; no value is ever changed silently.
    """
    return parse_config(path, read_text(path), overrides, problems)


def parse_config(
    name: str, text: str, overrides: Sequence[Override] = (), problems: list[ConfigError] | None = None
) -> Config:
    """Reads a configuration from the text of a file, which messages call ``name``; see `load_config`."""
    root, notes = parse_document(name, text)
    translation = None
    source_places: Mapping[str, str] = {}
    source_defaults: Mapping[str, Any] = {}
    if is_newer_schema(root):
        from trainer.config.pynative.table import SOURCE_DEFAULTS, SOURCE_PLACES

        translation, overrides = _translate(name, root, overrides)
        root = translation.root
        source_places = SOURCE_PLACES
        source_defaults = SOURCE_DEFAULTS
        notes += translation.notes
    notes += move_to_canonical_sections(root)
    errors, override_notes = apply_overrides(root, overrides)
    resolved = resolve(root, source_places)
    add_model_folder(resolved)
    teacher, teacher_problems = read_teacher(resolved, name)
    apply_derived_defaults(resolved, is_complete=text.startswith((RESOLVED, SMALL_COPY)))
    errors += [*resolved.problems, *teacher_problems]
    all_notes = tuple(notes + override_notes + resolved.notes)
    is_of_run = text.startswith(RESOLVED)
    source = ConfigSource(name, resolved.positions, all_notes, source_places, source_defaults, is_of_run)
    config, invalid = validate(resolved.data, source, has_problems=bool(errors))
    errors = [rename_keys(error, source) for error in errors + invalid]
    if config is None:
        raise_problems(errors)
    assert config is not None, "a configuration without problems is valid"
    config = config.with_source(source).with_teacher(teacher)
    broken_rules = rule_problems(config)
    if errors:
        broken_rules = _independent(broken_rules, errors)
    errors += not_yet_problems(config) + broken_rules
    if translation is not None:
        errors = [*translation.problems, *errors]
    if problems is None:
        raise_problems(errors)
    else:
        problems += errors
    return config


def _translate(name: str, root: Table, overrides: Sequence[Override]) -> tuple[Translation, Sequence[Override]]:
    """Translates a file of the newer schema with the overrides of its keys; returns the other overrides, too."""
    from trainer.config.pynative.translate import is_pynative_key, translate

    nulls = ("null", "None", "~")  # these remove any key that is written
    device = "context.device_target"  # a key of both schemas, which decides what a sharding strategy means
    source_overrides = [
        each for each in overrides
        if is_pynative_key(each.key) or each.key == device or (each.text in nulls and find_entry(root, each.key))
    ]
    # In MindSpore Transformers `--mode 1` selects the schema; here `--context.mode 1` runs operator by operator.
    others = [
        each for each in overrides
        if each not in source_overrides and (each.source, each.text) != ("flag --mode", "1")
    ]
    problems, notes = apply_overrides(root, source_overrides)
    translation = translate(name, root)
    translation.problems[:0] = problems
    translation.notes[:0] = notes
    return translation, others


def _independent(broken_rules: list[ConfigError], problems: list[ConfigError]) -> list[ConfigError]:
    """Leaves out broken rules that may only follow from another problem: a wrong value was replaced by its default."""
    known = [problem for problem in problems if not problem.is_extra]
    unsure = {problem.error.key.rpartition(".")[0] for problem in known if not problem.is_absent}
    if any(problem.is_absent for problem in known):
        unsure.add("model")
    unsure.discard("")
    unsure |= {section for section, of in (("optimizer", "lr_schedule"), ("model", "model.arch")) if of in unsure}
    return [
        rule
        for rule in broken_rules
        if rule.place.order and not any(rule.error.key.startswith(f"{section}.") for section in unsure)
    ]


def config_notes(
    config: Config, world: World = SINGLE_PROCESS, device: str | None = None, others: Sequence[str] = ()
) -> list[str]:
    """Returns the notes about a configuration: keys without effect, guesses, and differences from other trainers.

    Args:
        config: A configuration without errors.
        world: The rank of this process and the number of ranks.
        device: The device of the run. None: the one that the file names, or a CPU.
        others: Notes of later parts of the program, which name the keys of this schema.
    """
    device = device or config.context.device_target or "CPU"
    ignored = [Note(text, "ignored") for text in ignored_notes(config)]
    parallel = [Note(text, "parallel") for text in parallel_notes(config, world)]
    modes = mode_notes(config, world, device)
    notes = [*config.source.notes, *ignored, *rule_notes(config), *modes, *parallel, *others]
    return [Note(config.source.name_keys(note), getattr(note, "kind", "results")) for note in notes]
