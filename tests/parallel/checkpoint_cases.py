"""What the ranks of test_divided_checkpoints.py do: write a checkpoint of a model that they divide, and resume one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from pipeline_cases import world_of_group  # noqa: E402
from tensor_parallel_cases import EVERY_KIND, VOCABULARY, spread  # noqa: E402
from tiny_trainer import config_of  # noqa: E402

from trainer.checkpoint import writing  # noqa: E402
from trainer.checkpoint.adapters import base_record  # noqa: E402
from trainer.checkpoint.evaluations import EvalHistory  # noqa: E402
from trainer.checkpoint.state import Position, optimizer_shapes, read_resumed_checkpoint, save_stages  # noqa: E402
from trainer.config import Config  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.run.prepare import local_shard_specs  # noqa: E402
from trainer.run.session import open_training  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402

MODELS: dict[str, dict[str, Any]] = {
    "dense": EVERY_KIND | {"tie_word_embeddings": True},
    "experts": {
        "num_layers": 3, "mtp_depth": 1, "moe_config": {
            "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "shared_expert_num": 1,
            "first_k_dense_replace": 1, "balance_via_topk_bias": True}},
    "adapters": {"n_kv_heads": 1, "pet_config": {"target_modules": ".*", "lora_rank": 3}},
}  # fmt: skip
DATA = {"batch_size": 1, "gradient_accumulation_steps": 1, "ranks": 1}


def config_for(model: str, degrees: dict[str, Any]) -> Config:
    """Returns a configuration; `degrees` are keys of parallel_config, "shared" shards the optimizer state."""
    section = {key: value for key, value in degrees.items() if key != "shared"}
    shared = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
    return config_of(model={"vocab_size": VOCABULARY} | MODELS[model], use_parallel=bool(degrees),
                     parallel_config=section, context={"mode": 1},
                     **({"parallel": shared} if "shared" in degrees else {}))  # fmt: skip


def resaved(group: ProcessGroup, jobs: list[tuple[str, dict[str, Any], str, str]]) -> None:
    """Writes a checkpoint for each job: of the initial weights, or of the checkpoint in another folder.

    Args:
        jobs: The model, the degrees, the folder of the checkpoint to resume ("": none), and the folder to write to.
    """
    world = world_of_group(group)
    for model, degrees, source, target in jobs:
        config = config_for(model, degrees)
        parts = local_shard_specs(config, world)
        assert (parts is None) == (degrees.keys() <= {"data_parallel", "shared"})
        resumed = read_resumed_checkpoint(Path(source), config, DATA, parts) if source else None
        step = open_training(config, lambda update: 0.1, resumed and resumed.weights, world, "CPU", group)
        if resumed is None:
            spread(step.model, config.decoder, step.model.shard)
            state = {key: np.random.default_rng(number).normal(size=shape).astype(np.float32)
                     for number, (key, shape) in enumerate(optimizer_shapes(config).items())}  # fmt: skip
            step.load_optimizer(state, 2)
        else:
            step.load_optimizer(resumed.optimizer, resumed.updates)
        save(step, config, group, Path(target))


def save(step: TrainStep, config: Config, group: ProcessGroup, folder: Path) -> None:
    base = None if config.decoder.pet_config is None else base_record(config, {}, {})
    communicator = step.communicator
    stages = save_stages(
        folder, Position(step=3, tokens=9, data_from_step=3), step.state_dict_shard(), step_state=step.state(),
        config=config, layout=DATA,
        base=base, keep_max=1, evaluations=EvalHistory.empty(), rank=communicator.rank, ranks=communicator.size,
    )  # fmt: skip
    writing.run_stages(stages, folder, communicator)


def killed(group: ProcessGroup, degrees: dict[str, Any], folder: str) -> None:
    """Kills the last rank when it has written a part of its shards."""
    whole, names = writing.write_shards, []

    def write(path: Path, entries: Any, pieces: Any) -> int:
        names.append(path.name)
        if group.rank == group.size - 1 and len(names) == 2:
            whole(path, entries, dict(list(pieces.items())[:2]))
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(path, entries, pieces)

    writing.write_shards = write
    resaved(group, [("dense", degrees, "", folder)])
