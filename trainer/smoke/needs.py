"""What a full run of the file would still need: what is not on this machine, and the devices with their memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import Config
from trainer.config.checks.parallel import parallel_degrees
from trainer.parallel.world import World

if TYPE_CHECKING:
    from trainer.plan.plan import Plan

_GIB = 1 << 30


def needs(config: Config, plan: Plan, missing: Mapping[str, str]) -> list[str]:
    """A sentence each.

    Args:
        plan: Of the file as it is.
        missing: Data sets that are not here, with their paths.
    """
    return [*_data(config, missing), *_weights(config), *_devices(config, plan), *_not_built(plan)]


def _data(config: Config, missing: Mapping[str, str]) -> list[str]:
    found = []
    for section, path in missing.items():
        kind = getattr(config, section).data_loader.type
        found.append(f"data: {section}.data_loader ({kind}): {path or 'its path is not written'}")
        tokenizer = getattr(config, section).tokenizer
        if tokenizer.path and not Path(tokenizer.path).expanduser().exists():
            found.append(f"tokenizer: {section}.tokenizer.path {tokenizer.path}")
    return found


def _weights(config: Config) -> list[str]:
    keys = ("pretrained_model_dir", "load_checkpoint", "adapter_id")
    return [f"weights: {key} {path}" for key in keys
            if (path := getattr(config, key)) and not Path(path).expanduser().exists()]


def _devices(config: Config, plan: Plan) -> list[str]:
    world = World(0, plan.ranks, 0, plan.host_ranks)
    sizes = parallel_degrees(config, world)._asdict()
    degrees = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    found = [f"devices: {plan.ranks} x {plan.device}{f' ({degrees})' if degrees else ''}"]
    if plan.memory_bytes:
        limit = config.context.max_device_memory
        total = plan.memory_bytes["total"] / _GIB
        of = "of"
        if limit and total > float(limit.removesuffix("GB")):
            of = "more than"
        text = f"memory: about {total:,.1f} GiB a rank, activations (estimated) included"
        # MindSpore's GB is 2**30 bytes.
        found.append(text + (f", {of} the {limit.removesuffix('GB')} GiB of max_device_memory" if limit else ""))
    else:
        found.append("sizes of the model: " + (config.pretrained_model_dir or "none is written in model.model_config"))
    return found


def _not_built(plan: Plan) -> list[str]:
    starts = "a run on Ascend does not start: "
    return [f"run_trainer itself: {note}" for note in plan.notes if note.startswith(starts)]
