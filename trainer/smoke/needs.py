"""The requirements of a full run of the file: what is not on this machine, and the devices with their memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import Config
from trainer.config.checks.parallel import parallel_degrees
from trainer.parallel.world import World
from trainer.plan.device.memory import device_limit_bytes

if TYPE_CHECKING:
    from trainer.plan.plan import Plan

_GIB = 1 << 30


def full_run_requirements(config: Config, plan: Plan, missing: Mapping[str, str]) -> list[str]:
    """Returns the requirements of the full run, one sentence each.

    Args:
        plan: The plan of the unchanged file.
        missing: Data set sections whose data is not on this machine, with their paths.
    """
    not_built = [f"run_trainer itself: {note}" for note in plan.notes if note.startswith("not supported on Ascend: ")]
    return [*_data(config, missing), *_weights(config), *_devices(config, plan), *not_built]


def _data(config: Config, missing: Mapping[str, str]) -> list[str]:
    requirements = []
    for section, path in missing.items():
        kind = getattr(config, section).data_loader.type
        requirements.append(f"data: {section}.data_loader ({kind}): {path or 'its path is not written'}")
        tokenizer = getattr(config, section).tokenizer
        if tokenizer.path and not Path(tokenizer.path).expanduser().exists():
            requirements.append(f"tokenizer: {section}.tokenizer.path {tokenizer.path}")
    return requirements


def _weights(config: Config) -> list[str]:
    paths = {key: getattr(config, key) for key in ("pretrained_model_dir", "load_checkpoint", "adapter_id")}
    if config.distillation is not None:
        paths["loss.teacher"] = config.distillation.teacher
    return [f"weights: {key} {path}" for key, path in paths.items() if path and not Path(path).expanduser().exists()]


def _devices(config: Config, plan: Plan) -> list[str]:
    world = World(rank=0, size=plan.ranks, local_rank=0, local_size=plan.host_ranks)
    sizes = parallel_degrees(config, world)._asdict()
    degrees = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    devices = f"devices: {plan.ranks} x {plan.device}"
    if degrees:
        devices += f" ({degrees})"
    if not plan.memory_bytes:
        model = config.pretrained_model_dir or "none is written in model.model_config"
        return [devices, f"sizes of the model: {model}"]
    total = plan.memory_bytes["total"]
    memory = f"memory: about {total / _GIB:,.1f} GiB a rank, activations (estimated) included"
    limit = device_limit_bytes(config)
    if limit is not None:
        relation = "of"
        if total > limit:
            relation = "more than"
        memory += f", {relation} the {limit / _GIB:g} GiB of max_device_memory"
    return [devices, memory]
