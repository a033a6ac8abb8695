"""Measures in a process of its own what a backward pass needs: prints MiB above a model of one layer, as JSON.

The first layer alone has everything set up and every gradient's buffer touched, so what comes on top is what the other
layers keep. Peaks only grow within a process: the smallest is measured first.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
from model_gradients import model_gradients
from tiny_trainer import TinyTrainer

from trainer.data import Batch
from trainer.device.threads import set_up_cpu_threads

M_MMAP_THRESHOLD = -3  # malloc.h
LAYERS, ROWS, TOKENS = 16, 2, 768
SIZES = {
    "num_layers": LAYERS, "hidden_size": 128, "num_heads": 8, "n_kv_heads": 8, "intermediate_size": 344,
    "seq_length": TOKENS, "initializer_range": 0.02,
}
VARIANTS = {
    "recomputed": {"recompute_config": {"recompute": True}},
    "lower half frozen": {"freeze": {"layers": f"0-{LAYERS // 2 - 1}", "embeddings": True}},
    "kept": {},
}


def peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def main() -> None:
    # Freed memory of the libraries goes back to the system: left in gaps of the heap, it would count for the layers.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    set_up_cpu_threads()
    ids_BT = np.random.default_rng(0).integers(0, 19, (ROWS, TOKENS), dtype=np.int32)
    positions_BT = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
    batch = Batch(ids_BT, ids_BT, positions_BT, np.zeros_like(ids_BT))
    trainers = {name: TinyTrainer(sections=sections, **SIZES) for name, sections in VARIANTS.items()}

    def run(trainer: TinyTrainer, layers: slice) -> None:
        """Runs the whole backward pass through some of the layers, with zero gradients for the weights of the
        others."""
        model, parts, every = trainer.model, trainer.model.parts, trainer.model.parts.layers
        parts.layers, model.num_layers = every[layers], len(every[layers])
        inputs = trainer.build_inputs(batch)
        model_gradients(model, inputs)
        parts.layers, model.num_layers = every, len(every)

    for trainer in trainers.values():
        run(trainer, slice(LAYERS - 1, LAYERS))
    base, found = peak_mib(), {}
    for name, trainer in trainers.items():
        run(trainer, slice(0, LAYERS))
        found[name] = peak_mib() - base
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
