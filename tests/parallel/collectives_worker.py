"""A rank of the job of test_collectives.py: does every collective once and writes down what came out."""

from __future__ import annotations

import sys
from pathlib import Path

from msrun_helpers import take_a_core

take_a_core()

import mindspore  # noqa: E402
import numpy as np  # noqa: E402
from collective_cases import ON_DEVICE, SHAPES, gradients_of, numbers_of, text_of  # noqa: E402
from mindspore import Tensor  # noqa: E402

from trainer.parallel import collectives  # noqa: E402
from trainer.parallel.world import world_from_environment  # noqa: E402


def main(folder: Path) -> None:
    world = world_from_environment()
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    mindspore.set_device("CPU")
    collectives.start(world)
    found = {"float64": np.array(collectives.gather_float64(numbers_of(world.rank)))}
    found["no float64"] = np.array(collectives.gather_float64([]))
    for name, text in zip(("texts", "no texts"), (text_of(world.rank), b""), strict=True):
        texts = collectives.gather_bytes(text)
        found |= {f"{name} {rank}": np.frombuffer(each, np.uint8) for rank, each in enumerate(texts)}
    gradients = [Tensor(gradient) for gradient in gradients_of(world.rank)]
    for way, bucket_bytes in (("one by one", 0), ("in buckets", 4000), ("together", 1 << 20)):
        sums = collectives.all_reduce_in_buckets(gradients, bucket_bytes=bucket_bytes)
        found |= {f"{way} {number}": each.asnumpy() for number, each in enumerate(sums)}
    all_reduce = collectives._operator("AllReduce", collectives._name(None))
    on_device = collectives._device_bucket([gradients[number] for number in ON_DEVICE], all_reduce)
    found |= {f"as on a device {number}": each.asnumpy() for number, each in enumerate(on_device)}
    assert all((a.asnumpy() == b).all() for a, b in zip(gradients, gradients_of(world.rank), strict=True))
    assert len(sums) == len(SHAPES)
    collectives.barrier()
    np.savez(folder / f"rank-{world.rank}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
