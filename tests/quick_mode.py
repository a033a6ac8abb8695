"""The context.mode in which a tiny model is trained soonest."""

from __future__ import annotations

from trainer.config import Config
from trainer.ops.precision import resolve_precision
from trainer.ops.select import has_host_layers


def quick_mode(config: Config) -> int:
    """0 where its layers are computed on arrays, else 1: to compile its blocks costs more than the steps of a test."""
    divided = "sequences" if config.use_parallel and config.parallel_config.context_parallel > 1 else ""
    precision = resolve_precision(config.network, config.amp_level, "CPU")
    return 0 if has_host_layers(config.network, precision, "CPU", compiled=True, divided=divided) else 1
