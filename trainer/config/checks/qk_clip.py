"""Whether a training clips the queries and keys of latent attention after an update of Muon: QK-clip."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.problem import ConfigError, problem
from trainer.config.schema.freeze import FreezeConfig
from trainer.config.schema.root import Config
from trainer.models.spec.sublayers import latent_spec

QK_CLIP_FIX = "set it to False: the queries and keys are not clipped then, which is another training"


def is_written(config: Config) -> bool:
    """Returns whether the file asks for QK-clip, which is on by default."""
    source = config.source
    return bool(source.where("optimizer.qk_clip_enabled") or source.where("optimizer.qk_clip_threshold"))


def qk_clip_problems(config: Config) -> Iterator[ConfigError]:
    """Yields an error where a file asks for QK-clip and a CPU cannot do it."""
    obstacle = _obstacle(config)
    if _is_requested(config) and is_written(config) and obstacle:
        yield problem(config, "optimizer.qk_clip_enabled", f"not yet supported {obstacle}", QK_CLIP_FIX)


def _is_requested(config: Config) -> bool:
    optimizer = config.optimizer
    clips = config.trains and optimizer.type == "Muon" and optimizer.qk_clip_enabled
    return clips and latent_spec(config.decoder) is not None


def _obstacle(config: Config) -> str:
    """Returns with what QK-clip is not supported on a CPU; "" if it is."""
    if config.context.mode != 0:
        return "with context.mode 1"
    if ulysses_degree(config) > 1:
        return "where context-parallel ranks exchange heads"
    if config.has_adapters or config.freeze != FreezeConfig():
        return "with adapters or frozen weights"
    return ""


def clips_queries(config: Config, device: str) -> bool:
    """Returns whether a training clips the queries and keys of latent attention after an update of Muon."""
    return _is_requested(config) and device == "CPU" and not _obstacle(config)


def qk_clip_notes(config: Config, device: str) -> Iterator[str]:
    """Yields a note where MindSpore Transformers clips queries and keys, and this run does not."""
    if _is_requested(config) and not clips_queries(config, device):
        reason = _obstacle(config) or f"on {device}"
        yield (f"optimizer.qk_clip_enabled: attention logits above {config.optimizer.qk_clip_threshold:g} are not"
               f" clipped {reason}, and MindSpore Transformers clips them")
