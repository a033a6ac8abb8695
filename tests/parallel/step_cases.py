"""What the ranks of test_data_parallel.py train, and what one process trains to compare: the same rows in all.

A global batch has four rows; a job of N ranks gives each 4 / N of them. Valid labels are spread unevenly.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from tiny_trainer import TinyTrainer, join, make_batch  # noqa: E402

from trainer.data import IGNORE_INDEX, Batch  # noqa: E402

ROWS, STEPS, LONG = 4, 3, 20
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "aux_loss_factor": 0.3}
MODELS = {"dense": {}, "experts": {"num_layers": 1, "moe_config": EXPERTS, "mtp_depth": 1}}
ADAMW = {"type": "AdamW", "weight_decay": 0.1}
CLIP = {"use_clip_grad": True, "max_grad_norm": 0.5}
SCALE = {"scale_sense": {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 65536}}


def tiny_trainer(name: str) -> TinyTrainer:
    """Returns a trainer of one of `MODELS`."""
    return TinyTrainer(host_layers=True, **MODELS[name])


def rows_of(step: int, micro_batch: int) -> list[Batch]:
    """Returns the four rows of a global micro-batch; valid labels between none and all."""
    seed = 100 * step + 10 * micro_batch
    return [make_batch(seed + row, (12, 3, 0, 7)[(row + micro_batch) % 4]) for row in range(ROWS)]


def part_of(rows: list[Batch], rank: int, size: int) -> Batch:
    """Returns the rows of one rank as a batch."""
    own = len(rows) // size
    return join(rows[rank * own : (rank + 1) * own], own)


def window(step: int, rank: int, size: int, micro_batches: int = 2) -> list[Batch]:
    return [part_of(rows_of(step, number), rank, size) for number in range(micro_batches)]


def uneven(rank: int, size: int) -> list[Batch]:
    """Returns a last batch with rows for rank 0 only: the others have nothing but padding."""
    rows = [make_batch(7 + row, 12) for row in range(ROWS)]
    rows[ROWS // 2 :] = [row._replace(labels=np.full_like(row.labels, IGNORE_INDEX)) for row in rows[ROWS // 2 :]]
    return [part_of(rows, rank, size)]


def trained(trainer: TinyTrainer, communicator, rank: int, size: int, prefix: str) -> dict[str, np.ndarray]:
    """Numbers of some steps, and the weights at their end."""
    step = trainer.step(schedule=lambda update: 0.01, communicator=communicator, optimizer=ADAMW, runner_wrapper=CLIP)
    results = [step(window(number, rank, size)) for number in range(STEPS)] + [step(uneven(rank, size))]
    found = {
        "loss": [result.loss for result in results],
        "norm": [result.global_norm for result in results],
        "tokens": [result.tokens for result in results],
        "empty": [result.empty_micro_batches for result in results],
    }
    for name in results[0].losses:
        found[name] = [result.losses[name] for result in results]
    if results[0].routing is not None:
        found["requested"] = [result.routing.requested for result in results[:STEPS]]
    found |= trainer.weights()
    return {f"{prefix} {name}": np.array(value) for name, value in found.items()}
