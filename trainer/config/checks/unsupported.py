"""What a configuration asks for that a run cannot honour: notes for what changes nothing, errors for what would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.checks.problem import ConfigError, problem
from trainer.config.families import FAMILIES, known_class
from trainer.config.schema.fields import Section, Support, support_of
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.root import Config


class UnsupportedKey(NamedTuple):
    """A key that was set to something a run does not honour."""

    key: str
    value: Any
    support: Support
    reason: str


def find_unsupported(section: Section, path: str = "") -> Iterator[UnsupportedKey]:
    """All keys below a section whose value is not supported."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{path}{field.alias or name}"
        support, reason = support_of(field)
        if support != "supported" and not is_neutral(value, field.get_default(call_default_factory=True)):
            yield UnsupportedKey(key, value, support, reason)
        elif isinstance(value, Section):
            yield from _of_section(value, key)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, Section):
                    yield from _of_section(item, f"{key}.{number}")


def is_neutral(value: Any, default: Any) -> bool:
    """Whether a value is the default, or empty where the default says "off": others write '' or 'None' for null."""
    return value == default or (not default and value in (None, False, "", "None", [], {}))


def _of_section(section: Section, key: str) -> Iterator[UnsupportedKey]:
    # A mixture of experts with one expert is a dense model, and a note says that nothing of it acts.
    if isinstance(section, MoEConfig) and section.expert_num == 1:
        return
    if section.support != "supported":
        yield UnsupportedKey(key, section.type, section.support, section.support_reason)
    else:
        yield from find_unsupported(section, f"{key}.")


def not_yet_problems(config: Config) -> list[ConfigError]:
    """An error for every key of which only the default value is supported."""
    return [
        problem(config, finding.key, "not yet supported", finding.reason, value=finding.value)
        for finding in find_unsupported(config)
        if finding.support == "not_yet" and not _unread(config, finding.key)
    ]


def _unread(config: Config, key: str) -> str:
    """Why this run does not read a data set or weights that the file names; empty when it does."""
    trains = config.trains
    if key.endswith(".auto_register"):
        # The module and the class: their code is not loaded, the class that is built in is taken.
        name = (config.decoder if "model_config" in key else config.model.arch).auto_register.rpartition(".")[2]
        config_classes = {family.config_class for family in FAMILIES.values()} - {""}
        if known_class(name) or name in config_classes:
            return "the class is built in"
        return ""
    if key == "model.model_config.checkpoint_name_or_path":
        if config.load_checkpoint:
            return "load_checkpoint says which weights"
        absent = not Path(config.decoder.checkpoint_name_or_path or "").exists()
        if config.run_mode == "train" and absent:
            return "run_mode train starts from new weights"
        return ""
    if key == "eval_dataset.data_loader":
        if trains:
            if config.do_eval:
                return ""
            return "do_eval is False"
        if config.run_mode == "eval":
            return ""
        return f"run_mode is {config.run_mode}"
    if key == "train_dataset.data_loader" and not trains:
        if config.run_mode == "eval" and config.eval_dataset is None:
            return ""
        return f"run_mode is {config.run_mode}"
    return ""


def ignored_notes(config: Config) -> list[str]:
    """One note a reason, naming the keys that are ignored for it."""
    found: list[tuple[UnsupportedKey, str, str]] = []
    for finding in find_unsupported(config):
        unread = _unread(config, finding.key)
        if finding.support == "not_yet" and unread:
            found.append((finding._replace(reason=f"not read, {unread}"), "", f"{finding.key} {finding.value}"))
        if finding.support == "ignored":
            found.append((finding, config.source.where(finding.key), config.source.name(finding.key)))
    return ignored_texts(found)


def ignored_texts(found: Iterable[tuple[UnsupportedKey, str, str]]) -> list[str]:
    """One sentence a reason, for keys that are ignored: each with its location, if any, and name."""
    keys: dict[str, list[str]] = {}
    for finding, where, name in found:
        keys.setdefault(finding.reason, []).append(f"{name} ({where})" if where else name)
    return [f"ignored: {', '.join(names)}: {reason}" for reason, names in keys.items()]
