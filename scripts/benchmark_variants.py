#!/usr/bin/env python3
"""Cost of clipping, loss scaling, freezing and recomputation per step: all in one process, alternating.

Started by `benchmark.py step`. Every variant has its own model and the same batch; the variants alternate, so that
disturbances of the machine affect all of them. Prints one JSON line: the seconds of every step by variant.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from trainer.config import Config, Override, load_config  # noqa: E402

WARM_UP_STEPS = 2


def variant_flags(layers: int) -> dict[str, dict[str, str]]:
    """Flags by variant; the others are compared with `plain`."""
    return {
        "plain": {"runner_wrapper.use_clip_grad": "False"},
        "clipping": {"runner_wrapper.use_clip_grad": "True", "runner_wrapper.max_grad_norm": "0.001"},
        "dynamic scale": {"runner_wrapper.use_clip_grad": "False",
                          "runner_wrapper.scale_sense": "{type: DynamicLossScaleUpdateCell, loss_scale_value: 1024}"},
        "half frozen": {"runner_wrapper.use_clip_grad": "False",
                        "freeze.include": f"[embeddings, 'layers: 0-{layers // 2 - 1}']"},
        "recompute": {"runner_wrapper.use_clip_grad": "False", "recompute_config.recompute": "True"},
    }


def read_config(path: str, flags: dict[str, str]) -> Config:
    return load_config(path, [Override(key, text, "benchmark") for key, text in flags.items()])


def time_variants(path: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step by variant.

    Args:
        path: The configuration that all variants start from.
        rounds: Steps of each variant that count.
    """
    from trainer.data import build_datasets
    from trainer.run.session import open_training

    layers = load_config(path, []).decoder.num_layers
    configs = {name: read_config(path, flags) for name, flags in variant_flags(layers).items()}
    dataset, _ = build_datasets(configs["plain"])
    batch = dataset.batch(range(configs["plain"].runner_config.batch_size))
    steps = {name: open_training(config, lambda update: 1e-4) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP_STEPS + rounds):
        for name, step in steps.items():
            began = time.perf_counter()
            step([batch])
            if number >= WARM_UP_STEPS:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each variant that count")
    options = parser.parse_args()
    print(json.dumps(time_variants(options.config, options.rounds)))


if __name__ == "__main__":
    main()
