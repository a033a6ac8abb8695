#!/usr/bin/env python3
"""Measures AdamW's update against copying weights, gradients and both moments once.

Started by `benchmark.py step`. An update is bound by memory, so the copy shows what the machine can do. Both alternate
(A B A B) in this process; prints one JSON line with the medians. The target is 1.5 times the copy, including clip
factor and decay.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_SETTLING_ROUNDS = 3


def adamw_against_copy(config_path: str = str(ROOT / "configs" / "bench_dense.yaml"), rounds: int = 30) -> dict:
    """Medians of an update of all weights of a model and of the copy, in seconds, and their ratio.

    Args:
        config_path: Gives the sizes.
        rounds: Alternating rounds of both; the first few do not count.
    """
    from mindspore import Parameter, Tensor

    from trainer.config import Override, load_config
    from trainer.models.spec.shapes import parameter_shapes
    from trainer.optim.groups import parameter_groups
    from trainer.optim.optimizer import AdamW
    from trainer.run.session import set_up_device

    config = load_config(config_path, [Override("optimizer", "{type: AdamW, weight_decay: 0.1}")])
    set_up_device(config, "CPU")
    shapes, draw = parameter_shapes(config.decoder), np.random.default_rng(0)

    def arrays() -> list[np.ndarray]:
        return [draw.standard_normal(shape).astype(np.float32) for shape in shapes.values()]

    parameters = {name: Parameter(Tensor(array), name=name) for name, array in zip(shapes, arrays(), strict=True)}
    gradients = [Tensor(array) for array in arrays()]
    optimizer = AdamW(parameters, parameter_groups(shapes, config.optimizer), config.optimizer)
    sources = [arrays() for _ in range(4)]
    targets = [[np.empty_like(array) for array in each] for each in sources]

    def copy() -> None:
        for source, target in zip(sources, targets, strict=True):
            for array, place in zip(source, target, strict=True):
                np.copyto(place, array)

    def update() -> None:
        optimizer.update(gradients, 1e-4, 0.5)

    seconds: dict[str, list[float]] = {"copy": [], "adamw": []}
    for _ in range(_SETTLING_ROUNDS + rounds):
        for name, work in (("copy", copy), ("adamw", update)):
            seconds[name].append(_seconds_of(work))
    copied, updated = (statistics.median(seconds[name][_SETTLING_ROUNDS:]) for name in ("copy", "adamw"))
    return {
        "weights": sum(array.size for array in sources[0]),
        "tensors": len(shapes),
        "copy_seconds": copied,
        "adamw_seconds": updated,
        "ratio": updated / copied,
    }


def _seconds_of(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    print(json.dumps(adamw_against_copy(*sys.argv[1:2])))
