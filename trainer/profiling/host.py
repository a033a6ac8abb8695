"""What a CPU does in a step whose layers are computed on arrays, by part: seconds, bytes and operations of each.

MindSpore's profiler sees operators, and here nearly none run. So the functions of a step are measured from outside, for
as long as `Patches` are on.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.profiling.regions import BACKWARD, FORWARD, Key, Patches, Regions, Row

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.ops.peak import Ceilings
    from trainer.step.train_step import TrainStep

NOT_EXPLAINED = "not explained"
_DISPATCH = "dispatch: Python, MindSpore's autograd"
_HALF = ", bfloat16"

# Products by the weight that they take: the first pattern that its name has.
_PRODUCTS = (
    (r"\.experts\.", "experts: products"),
    (r"mlp\.gate\.weight", "router: product"),
    (r"\.[qkv]_proj\.", "q, k, v products"),
    (r"\.o_proj\.", "output projection"),
    (r"\.(gate|up)_proj\.", "gate, up products"),
    (r"\.down_proj\.", "down product"),
    (r"lm_head|embed_tokens", "head: products"),
)
# The same of copies of weights, by what the thread does.
_COPIES = (
    (r"(Head|Latent)Projections", "q, k, v products"), (r"CpuAttention.*_output_gradients", "output projection"),
)  # fmt: skip
# What threads do, by the qualified name of the function that they call: what is measured inside is not in it.
_ITEMS = (
    (r"CpuAttention.*attend", "attention: copies, mask"),
    (r"CpuAttention|(Head|Latent)Projections", "attention: entering, leaving"),
    (r"CpuMlp", "SwiGLU, residual"),
    (r"NormedInput|SublayerOutput", "norm"),
    (r"WeightGradients", "weight gradients"),
    (r"FusedLinearCrossEntropy", "head: cross entropy"),
    (r"Adam", "optimizer"),
    (r"[Ee]xperts|CpuMoe|add_rows", "experts: SwiGLU, rows"),
    (r"[Rr]outer", "router"),
)


def first_match(patterns: Sequence[tuple[str, str]], text: str) -> str | None:
    return next((name for pattern, name in patterns if re.search(pattern, text)), None)


def item_name(function: str) -> str:
    return first_match(_ITEMS, function) or function.replace(".<locals>", "")


class WeightNames:
    """Names of weights by the memory that they are in."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.ranges = sorted((_address(array), _address(array) + array.nbytes, name) for name, array in arrays.items())
        self.starts = [start for start, _, _ in self.ranges]

    def of(self, array: np.ndarray) -> str | None:
        place = bisect.bisect_right(self.starts, _address(array)) - 1
        return self.ranges[place][2] if place >= 0 and _address(array) < self.ranges[place][1] else None


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def weight_names(step: TrainStep) -> WeightNames:
    """Of the model's weights, and of their copies in the dtype of the products, which a first step makes."""
    weights = {**step.model.parameters_by_name, **step.model.compute_weights.copies}
    return WeightNames({f"{number} {name}": each.asnumpy() for number, (name, each) in enumerate(weights.items())})


def product_name(weights: WeightNames, regions: Regions, arguments: tuple) -> str:
    """Of a product of two arrays: by the weight that is one of them, or else by what the thread does."""
    half = _HALF if arguments[1].dtype.itemsize == 2 else ""
    named = next(filter(None, (weights.of(array) for array in arguments[1:3])), None)
    if named is not None:
        return (first_match(_PRODUCTS, named) or "products") + half
    if (copied := first_match(_COPIES, regions.item)) is not None:
        return copied + half
    doing = item_name(regions.item)
    if doing.startswith("attention"):
        return "attention: scores, values" + half
    return (doing if doing == "weight gradients" else f"{doing.split(':')[0]}: products") + half


def product_cost(arguments: tuple) -> tuple[float, float]:
    _, a, b, out, *accumulate = arguments
    moved = a.nbytes + b.nbytes + out.nbytes * (1 + any(accumulate))
    return moved, 2.0 * out.size * a.shape[-1]


def arrays_cost(arguments: tuple) -> tuple[float, float]:
    """Each array once."""
    return sum(array.nbytes for array in arguments if isinstance(array, np.ndarray)), 0.0


def _adamw_cost(arguments: tuple) -> tuple[float, float]:
    item, part = arguments[:2]
    return 7 * item.weight[part].nbytes, 0.0  # four are read, three written


def _squares_cost(arguments: tuple) -> tuple[float, float]:
    return 4.0 * sum(gradient.size for gradient in arguments[0]), 0.0


def _in_area(of_attention: str, of_head: str) -> Callable:
    def name(regions: Regions, arguments: tuple) -> str:
        return of_head if "FusedLinearCrossEntropy" in regions.item else of_attention

    return name


def patch_all(regions: Regions, step: TrainStep, weights: WeightNames) -> Patches:
    """Measures the functions of a step. A name that is not there any more is an AttributeError."""
    from mindspore import Tensor

    from trainer.arrays import cells, embedding, head, measures, onednn, tiles
    from trainer.arrays.attention import positions
    from trainer.arrays.moe import experts, router
    from trainer.device.threads import HostThreads
    from trainer.models import decoder
    from trainer.optim import host_adamw

    patches = Patches()

    def measure(owner: Any, attribute: str, name: Any, cost: Any = None, direction: str | None = None) -> None:
        patches.set(owner, attribute, lambda there: regions.wrapped(there, name, cost, direction))

    operators = type(onednn.operators())
    measure(operators, "matmul", lambda of, arguments: product_name(weights, of, arguments), product_cost)
    softmax = _in_area("attention: softmax", "head: softmax")
    for attribute in ("softmax", "softmax_gradient"):
        measure(operators, attribute, softmax, arrays_cost)
    for attribute in ("silu", "silu_gradient"):
        measure(operators, attribute, lambda of, _: item_name(of.item), arrays_cost)
    for attribute in ("scales", "__call__", "gradient"):
        measure(tiles.RmsNorm, attribute, "norm", arrays_cost)
    measure(positions.Rotary, "apply", "rotary", arrays_cost)
    patches.set(HostThreads, "run", lambda there: regions.wrapped_threads(there, item_name))
    measure(head.FusedLinearCrossEntropy, "_gradients", _DISPATCH, direction=BACKWARD)
    measure(embedding, "embedding_rows", "embedding", arrays_cost)
    measure(embedding, "embedding_gradient", "embedding", arrays_cost)
    for owner, forward, backward, name in (
        (cells._PartCell, "construct", "bprop", _DISPATCH), (router.CpuRouter, "forward", "backward", "router"),
        (experts.CpuExperts, "forward", "backward", "experts: SwiGLU, rows"),
    ):  # fmt: skip
        measure(owner, forward, name, direction=FORWARD)
        measure(owner, backward, name, direction=BACKWARD)
    measure(Tensor, "asnumpy", "tensors as arrays")
    measure(measures, "squares", "norm of the gradients", _squares_cost)
    measure(host_adamw, "_update_block", "optimizer", _adamw_cost)
    measure(step.optimizer, "update", "optimizer")
    measure(decoder.ComputeWeights, "refresh", "weights in the dtype of the products")
    measure(step, "build_inputs", "data")
    measure(step, "gradients_of", _DISPATCH)
    return patches


def profile_rows(found: Mapping[Key, Row], steps: int) -> list[tuple[Key, Row]]:
    """Of one step, the longest first and what is not explained last."""
    rows = {
        key: Row(row.seconds / steps, row.calls // steps, row.bytes / steps, row.operations / steps)
        for key, row in found.items()
    }
    return sorted(rows.items(), key=lambda pair: (pair[0].name == NOT_EXPLAINED, -pair[1].seconds))


def table_of(title: str, rows: Iterable[tuple[Key, Row]], limits: Ceilings) -> Table:
    from rich.table import Table

    table, rows = Table(title=title), list(rows)
    for name in ("part", "pass", "ms", "share", "calls", "MB", "GB/s", "GFLOP/s", "of the ceiling"):
        table.add_column(name, justify="left" if name in ("part", "pass") else "right")
    whole = sum(row.seconds for _, row in rows)
    for key, row in rows:
        speeds = [amount / row.seconds / 1e9 if row.seconds else 0.0 for amount in (row.bytes, row.operations)]
        ceiling = limits.bfloat16 if key.name.endswith(_HALF) else limits.float32
        of = speeds[1] / ceiling if row.operations else speeds[0] / limits.memory
        table.add_row(
            key.name, key.direction, f"{1000 * row.seconds:.1f}", f"{row.seconds / whole:.1%}", str(row.calls),
            f"{row.bytes / 1e6:.0f}" if row.bytes else "", f"{speeds[0]:.0f}" if row.bytes else "",
            f"{speeds[1]:.0f}" if row.operations else "", f"{of:.2f}" if row.bytes else "",
        )  # fmt: skip
    return table
