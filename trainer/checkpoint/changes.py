"""The settings that a checkpoint records, so that a resumed run can report which of them differ.

All of them may change: to lower the learning rate is a good reason to resume. But a value that was changed by mistake
must not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.config.schema.fields import Section, support_of

if TYPE_CHECKING:
    from trainer.config import Config

# What a step computes. Data and seed belong to the position in the data, which must fit: `state.data_layout`.
_SECTIONS = ("lr_schedule", "optimizer", "runner_wrapper", "model")
_KEYS = ("batch_size", "gradient_accumulation_steps", "epochs")  # of runner_config
# Keys of the model that only matter for prediction, and batch_size, which runner_config has already.
_PREDICTION = frozenset(
    "batch_size do_sample max_decode_length max_new_tokens temperature top_k top_p repetition_penalty".split()
)
_UNSET = "not set"


def settings_record(config: Config) -> dict[str, Any]:
    """The values that change what a step computes, by dotted key, where they differ from the defaults.

    Defaults are left out, so that a key that a later version adds is not a change.
    """
    found = {"amp_level": config.amp_level} if config.amp_level is not None else {}
    runner = config.runner_config
    defaults = {name: type(runner).model_fields[name].default for name in _KEYS}
    found |= {
        f"runner_config.{name}": getattr(runner, name) for name in _KEYS if getattr(runner, name) != defaults[name]
    }
    for name in _SECTIONS:
        found |= dict(_differing(getattr(config, name), name))
    return found


def _differing(section: Section, key: str) -> Iterator[tuple[str, Any]]:
    for name, field in type(section).model_fields.items():
        value, dotted = getattr(section, name), f"{key}.{field.alias or name}"
        if support_of(field)[0] != "honoured" or (key == "model.model_config" and name in _PREDICTION):
            continue
        if isinstance(value, Section):
            yield from _differing(value, dotted)
        elif name == "type" or value != field.get_default(call_default_factory=True):
            yield dotted, value


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The differences: ``lr_schedule.learning_rate 0.001 -> 0.002, amp_level O2 -> not set``; empty without any.

    Args:
        before: `settings_record` of the run that saved the checkpoint.
        now: `settings_record` of this run.
    """
    keys = list(dict.fromkeys((*before, *now)))
    pairs = {key: tuple(_shown(values[key]) if key in values else _UNSET for values in (before, now)) for key in keys}
    # Another type has other keys: the change of the type says enough.
    kinds = {key for key, (was, is_now) in pairs.items() if key.endswith(".type") and was != is_now}
    replaced = tuple(key.removesuffix("type") for key in kinds)
    both = before.keys() & now.keys()
    return ", ".join(
        f"{key} {was} -> {is_now}"
        for key, (was, is_now) in pairs.items()
        if was != is_now and (key in both or key in kinds or not key.startswith(replaced))
    )


def _shown(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
