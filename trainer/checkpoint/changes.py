"""What of the configuration a checkpoint remembers, to tell a run that goes on from it what is not as it was.

None of it must stay: lowering the learning rate of a training that goes on is a good reason to resume. But a value that
changed by mistake shall not do so silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.config.schema.fields import Section, support_of

if TYPE_CHECKING:
    from trainer.config import Config

# What a step computes. Data and seed are the place in the data, which must stay: `state.data_layout`.
_SECTIONS = ("lr_schedule", "optimizer", "runner_wrapper", "model")
_KEYS = ("batch_size", "gradient_accumulation_steps", "epochs")  # of runner_config
# Of the model: how it predicts, and what says the same in other words.
_PREDICTION = frozenset(
    "batch_size do_sample max_decode_length max_new_tokens temperature top_k top_p repetition_penalty".split()
)
_UNSET = "not set"


def settings_record(config: Config) -> dict[str, Any]:
    """The values that change what a step computes, by dotted key, where they are not the defaults.

    Defaults are left out: a key that a later version adds is then no change.
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
        value, place = getattr(section, name), f"{key}.{field.alias or name}"
        if support_of(field)[0] != "honoured" or (key == "model.model_config" and name in _PREDICTION):
            continue
        if isinstance(value, Section):
            yield from _differing(value, place)
        elif name == "type" or value != field.get_default(call_default_factory=True):
            yield place, value


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Says what is not as it was: ``lr_schedule.learning_rate 0.001 -> 0.002, amp_level O2 -> not set``; or nothing.

    Args:
        before: `settings_record` of the run that made the checkpoint.
        now: That of this run.
    """
    keys = list(dict.fromkeys((*before, *now)))
    pairs = {key: tuple(_shown(values[key]) if key in values else _UNSET for values in (before, now)) for key in keys}
    # Another kind of something has other keys: that it is another kind says enough.
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
