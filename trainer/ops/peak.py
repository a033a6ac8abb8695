"""What a device can do at most, which model FLOPs are compared with: of a CPU measured, of an Ascend published."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.arrays.memory import host_threads, parts
from trainer.arrays.onednn import BFLOAT16, operators
from trainer.device.doctor import processor_name
from trainer.ops.host_library import bfloat16_products, find_onednn

if TYPE_CHECKING:
    from trainer.parallel.world import World

CACHE = Path("~/.cache/run_trainer/peak.json")
_ROWS, _WIDTH, _BYTES = 256, 1024, 1 << 26
_SECONDS = 0.03
"""For which a run multiplies, with each dtype that counts."""
_MEASUREMENTS, _AGAIN_SECONDS = 5, 3600.0
"""The first runs on a machine measure, later ones when the last measurement is older than this: the best one counts."""

_ASCEND_PEAKS = {
    "Ascend910B1": 373.88e12, "Ascend910B2": 353.8944e12, "Ascend910B3": 294.912e12, "Ascend910B4": 245.76e12,
    "Ascend910_9362": 353.8944e12, "Ascend910_9392": 353.8944e12,
}  # fmt: skip
"""FLOP/s of products in float16 and bfloat16, by MindSpore's name of the device: its cube cores, times the 16 x 16 x 16
products and sums of a cycle, times its clock (of a 910B3 20 x 8192 x 1.8 GHz). Figures a little larger that are quoted
as well include the vector cores. Source: the published specifications, as torchtitan's plug-in for Ascend has them."""


@dataclass(frozen=True)
class Ceilings:
    """What all cores reach together: products in GFLOP/s, copying in GB/s, read and written."""

    float32: float
    bfloat16: float | None
    memory: float


def product_ceiling(dtype: type) -> float:
    """GFLOP/s of products on all threads of layers on arrays, in tiles of `_ROWS` rows; the fastest of some trials."""
    threads, size = host_threads(), _WIDTH
    rows = 16 * _ROWS * threads.threads
    x, weight, out = np.zeros((rows, size), dtype), np.zeros((size, size), dtype), np.empty((rows, size), np.float32)

    def multiply(part: slice, thread: int) -> None:
        operators().matmul(x[part], weight, out[part])

    best = min(_seconds(lambda: threads.run(parts(slice(0, rows), _ROWS), multiply)) for _ in range(8))
    return 2 * rows * size * size / best / 1e9


def thread_peak(dtype: type) -> float:
    """The same in `_SECONDS`, on a machine that may have other work: of each thread the fastest tile, by the time for
    which it had its core, and the sum of these."""
    threads, size = host_threads(), _WIDTH
    x, weight = np.zeros((_ROWS, size), dtype), np.zeros((size, size), dtype)
    out = np.empty((threads.threads, _ROWS, size), np.float32)
    best, ends = [float("inf")] * threads.threads, time.perf_counter() + _SECONDS

    def multiply(tile: int, thread: int) -> None:
        if tile < 2 * threads.threads or time.perf_counter() < ends:
            began = time.thread_time()
            operators().matmul(x, weight, out[thread])
            best[thread] = min(best[thread], time.thread_time() - began)

    threads.run(range(64 * threads.threads), multiply)
    return sum(2 * _ROWS * size * size / max(seconds, 1e-9) for seconds in best) / 1e9


def memory_ceiling() -> float:
    """GB/s, read and written, of copying between arrays that no cache holds."""
    source, target = (np.ones(_BYTES // 4, np.float32) for _ in range(2))

    def copy(part: slice, thread: int) -> None:
        target[part] = source[part]

    best = min(_seconds(lambda: host_threads().run(parts(slice(0, len(source)), 1 << 18), copy)) for _ in range(8))
    return 2 * source.nbytes / best / 1e9


def ceilings() -> Ceilings:
    return Ceilings(product_ceiling(np.float32), product_ceiling(BFLOAT16), memory_ceiling())


def best_of(found: Sequence[Ceilings]) -> Ceilings:
    """A ceiling is the best that the machine was seen to do."""
    half = [each.bfloat16 for each in found if each.bfloat16 is not None]
    return Ceilings(
        max(each.float32 for each in found), max(half, default=None), max(each.memory for each in found)
    )


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def peak_flops(device: str, dtype: str, world: World, cache: Path = CACHE) -> float | None:
    """FLOP/s that the devices of all ranks reach together in products of this dtype; None where that is not known.

    Of a CPU with bfloat16 it is the faster of float32 and bfloat16: the numbers could be multiplied in either.
    """
    if device != "CPU":
        peak = _ASCEND_PEAKS.get(_device_name()) if dtype in ("float16", "bfloat16") else None
        return peak and peak * world.size
    dtypes = {"float32": np.float32}
    if dtype == "bfloat16" and bfloat16_products() == "oneDNN":
        dtypes[dtype] = BFLOAT16
    own = max(_measured(name, each, cache) for name, each in dtypes.items())
    # Ranks of a host have cores of their own, or where these are too few share them.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    apart = max(1, min(world.local_size, (os.cpu_count() or 1) // usable))
    return own * 1e9 * apart * world.size / world.local_size


def _device_name() -> str:
    import mindspore

    try:
        return mindspore.hal.get_device_name(0)
    except Exception:  # a name that is not told is one that is not known
        return ""


def _measured(name: str, dtype: type, cache: Path) -> float:
    """GFLOP/s, the best that runs on this machine have measured so far."""
    path = cache.expanduser()
    key = f"{processor_name()}, {host_threads().threads} threads, {find_onednn().text}, {name}"
    known = _read(path)
    best, count, at = known.get(key, (0.0, 0, 0.0))
    if count < _MEASUREMENTS or time.time() - at > _AGAIN_SECONDS:
        best = max(best, thread_peak(dtype))
        with contextlib.suppress(OSError):  # a cache that cannot be written is none
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            unfinished.write_text(json.dumps({**known, key: (best, count + 1, time.time())}, indent=1) + "\n")
            os.replace(unfinished, path)
    return best


def _read(path: Path) -> dict[str, tuple[float, int, float]]:
    """What earlier runs have measured: by what was measured GFLOP/s, number of measurements, time of the last one."""

    def is_entry(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 3 and all(isinstance(each, (int, float)) for each in value)

    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {key: tuple(value) for key, value in found.items() if is_entry(value)}
    return {}
