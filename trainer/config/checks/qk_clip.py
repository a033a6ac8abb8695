"""Whether a training measures attention logits, and clips the queries and keys of latent attention: QK-clip."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.checks.problem import ConfigError, problem
from trainer.config.note import Note
from trainer.config.schema.callbacks import MaxLogitsMonitor
from trainer.config.schema.freeze import FreezeConfig
from trainer.config.schema.root import Config
from trainer.models.spec.sublayers import latent_spec

_ENABLED = "optimizer.qk_clip_enabled"
_FORMAT = "max_attention_logit_format"
_FIX = "set it to false: the queries and keys are not clipped then, which is another training"


def clips_queries(config: Config) -> bool:
    """Returns whether a training clips the queries and keys of latent attention after an update of Muon."""
    return _is_enabled(config) and latent_spec(config.decoder) is not None


def _is_enabled(config: Config) -> bool:
    return config.trains and config.optimizer.type == "Muon" and config.optimizer.qk_clip_enabled


def qk_clip_problems(config: Config) -> Iterator[ConfigError]:
    """Yields an error where QK-clip, which is on by default, has nothing to clip or is not supported on any device."""
    if _is_enabled(config) and not clips_queries(config) and not config.source.is_of_run:
        key = _ENABLED
        if not config.source.where(key):
            key = "optimizer.qk_clip_threshold"
        rule = "QK-clip scales the heads of multi-head latent attention (MLA) alone"
        yield problem(config, key, rule, "leave it out, or set qk_clip_enabled to false")
    if not clips_queries(config):
        return
    if config.context.mode != 0:
        yield unsupported_clip(config, "not yet supported with context.mode 1")
    elif config.has_adapters or config.freeze != FreezeConfig():
        yield unsupported_clip(config, "not yet supported with adapters or frozen weights")


def unsupported_clip(config: Config, rule: str) -> ConfigError:
    """Returns the error of a training that cannot clip; `rule` says why."""
    return problem(config, _ENABLED, rule, _FIX, because="optimizer.type")


def logit_interval(config: Config) -> int:
    """Returns the steps between records of the largest attention logits; 0: no callback and no QK-clip asks for them.

    In MindSpore Transformers QK-clip adds a MaxLogitsMonitor, of which MaxLogitsReset is the former name. Of several
    the first records: it resets what the others would read.
    """
    monitors = (callback for callback in config.callbacks if isinstance(callback, MaxLogitsMonitor))
    monitor = next(monitors, None)
    if monitor is not None:
        return monitor.step_interval
    return int(clips_queries(config))


def measures_logits(config: Config) -> bool:
    """Returns whether a training measures the largest attention logits, where its layers can."""
    is_monitored = bool(config.monitor_config.destinations(_FORMAT))
    return config.trains and (is_monitored or logit_interval(config) > 0)


def logit_notes(config: Config) -> Iterator[Note]:
    """Yields a note about what asks for the largest attention logits, for layers that cannot measure them."""
    names = [f"callbacks.{number} {callback.type}" for number, callback in enumerate(config.callbacks)
             if isinstance(callback, MaxLogitsMonitor)]  # fmt: skip
    if config.monitor_config.destinations(_FORMAT):
        names.append(f"monitor_config.{_FORMAT}")
    if names:
        text = "no attention logit is recorded, only native layers on CPUs measure them"
        yield Note(f"{', '.join(names)}: {text}", "ignored")
