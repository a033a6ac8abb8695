"""Keys that a run does not support: a note for a key without effect, an error for a key that would change results."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from trainer.config.checks.problem import ConfigError, problem, value_of
from trainer.config.families import FAMILIES, known_class
from trainer.config.schema.fields import Section, Support, support_of
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.root import Config
from trainer.errors import value_text


class UnsupportedKey(NamedTuple):
    """A key whose value is not supported."""

    key: str
    value: Any
    support: Support
    reason: str


def find_unsupported(section: Section, path: str = "") -> Iterator[UnsupportedKey]:
    """Yields all keys below a section whose value is not supported; `path` is the section's key with a dot."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{path}{field.alias or name}"
        support, reason = support_of(field)
        if support != "supported" and not is_neutral(value, field.get_default(call_default_factory=True)):
            yield UnsupportedKey(key, value, support, reason)
        elif isinstance(value, Section):
            yield from _find_in_section(value, key)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, Section):
                    yield from _find_in_section(item, f"{key}.{number}")


def is_neutral(value: Any, default: Any) -> bool:
    """Returns whether a value is the default, or means "off" as the default does: '' or 'None' instead of null."""
    return value == default or (not default and value in (None, False, "", "None", [], {}))


def _find_in_section(section: Section, key: str) -> Iterator[UnsupportedKey]:
    # A mixture with one expert is a dense model, and another note says that moe_config has no effect.
    if isinstance(section, MoEConfig) and section.expert_num == 1:
        return
    if section.support != "supported":
        yield UnsupportedKey(key, getattr(section, "type", None), section.support, section.support_reason)
    else:
        yield from find_unsupported(section, f"{key}.")


def not_yet_problems(config: Config) -> list[ConfigError]:
    """Returns an error for every unsupported key that would change the results."""
    return [
        problem(config, unsupported.key, "not yet supported", unsupported.reason, value=unsupported.value)
        for unsupported in find_unsupported(config)
        if unsupported.support == "not_yet" and not _unread_reason(config, unsupported)
    ]


def offload_problems(config: Config) -> Iterator[ConfigError]:
    """Yields an error for each key that asks an Ascend to move data to the memory of its host."""
    moved = {"swap_config.swap": "activations", "context.memory_offload": "weights and their states"}
    for key, what in moved.items():
        if value_of(config, key) in (True, "ON"):
            rule = f"an Ascend does not yet move {what} to the memory of its host"
            fix = "leave it out, and recompute layers or shard over more ranks if memory is short; a CPU ignores it"
            yield problem(config, key, rule, fix)


def _unread_reason(config: Config, unsupported: UnsupportedKey) -> str:
    """Returns why this run does not read the code, data set or weights that a key names; empty if it reads them."""
    key = unsupported.key
    trains = config.trains
    if key.endswith(".auto_register"):
        # The key names a module and a class. Its code is never loaded: a class of this trainer replaces it.
        name = unsupported.value.rpartition(".")[2]
        config_classes = (known.name for family in FAMILIES.values() for known in family.source_classes)
        if known_class(name) or name in config_classes:
            return "the class is built in"
    if key == "model.model_config.checkpoint_name_or_path":
        if config.load_checkpoint:
            return "load_checkpoint names the weights"
        if config.run_mode == "train" and not os.path.exists(unsupported.value or ""):
            return "run_mode train starts from new weights"
    if key == "eval_dataset.data_loader":
        if trains:
            if config.do_eval:
                return ""
            return "do_eval is false"
        if config.run_mode == "eval":
            return ""
        return f"run_mode is {config.run_mode}"
    if key == "train_dataset.data_loader" and not trains:
        if config.run_mode != "eval" or config.eval_dataset is not None:
            return f"run_mode is {config.run_mode}"
    return ""


def ignored_notes(config: Config) -> list[str]:
    """Returns one note for each reason, with the keys that are ignored for it."""
    ignored: list[tuple[UnsupportedKey, str, str]] = []
    for unsupported in find_unsupported(config):
        key = unsupported.key
        unread_reason = _unread_reason(config, unsupported)
        if unsupported.support == "not_yet" and unread_reason:
            unread = unsupported._replace(reason=f"not read, {unread_reason}")
            ignored.append((unread, "", f"{key} {value_text(unsupported.value)}"))
        if unsupported.support == "ignored":
            ignored.append((unsupported, config.source.where(key), config.source.name(key)))
    return ignored_texts(ignored)


def ignored_texts(ignored: Iterable[tuple[UnsupportedKey, str, str]]) -> list[str]:
    """Returns one sentence for each reason; every ignored key comes with its location, or "", and its name."""
    keys: dict[str, list[str]] = {}
    for unsupported, where, name in ignored:
        if where:
            name = f"{name} ({where})"
        keys.setdefault(unsupported.reason, []).append(name)
    return [f"ignored: {', '.join(names)}: {reason}" for reason, names in keys.items()]
