"""What a CPU does in a step whose layers are computed on arrays, by part: seconds, bytes and operations of each.

MindSpore's profiler sees operators, and here nearly none run. So the functions of a step are measured from outside, for
as long as `Patches` are on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.profiling.regions import BACKWARD, FORWARD, Key, Patches, RegionTimer, Row

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.step.train_step import TrainStep

NOT_EXPLAINED = "not explained"
_DISPATCH = "dispatch: Python, MindSpore's autograd"
_HALF = ", bfloat16"

# Products by the name of the matrix: the first pattern that it has.
_PRODUCTS = (
    (r"\.o_proj", "output projection"),
    (r"self_attn\.", "q, k, v products"),
    (r"(gate|up)_proj", "gate, up products"),
    (r"down_proj", "down product"),
)
_SCORES = "attention: copies, mask"
_WEIGHT_GRADIENTS = "weight gradients"


def linear_name(regions: RegionTimer, arguments: tuple) -> str:
    """Names the products of a `Linear`, the first argument, by its matrix, or else by the part that it belongs to."""
    linear, _, x_nI, *_ = arguments
    for pattern, name in _PRODUCTS:
        if re.search(pattern, linear.name):
            return name + _suffix(x_nI)
    return _products_of(regions.part, x_nI)


def _products_of(part: str, array: np.ndarray) -> str:
    return f"{part.split(':')[0]}: products{_suffix(array)}"


def product_name(regions: RegionTimer, arguments: tuple) -> str:
    """Names a product of two arrays by the part that computes it."""
    part = regions.part
    if part in _PRODUCT_ROWS or part.removesuffix(_HALF).endswith(": products"):
        return part
    if part == _WEIGHT_GRADIENTS:
        return part + _suffix(arguments[1])
    if part == _SCORES:
        return "attention: scores, values" + _suffix(arguments[1])
    return _products_of(part, arguments[1])


def _suffix(array: np.ndarray) -> str:
    if array.dtype.itemsize == 2:
        return _HALF
    return ""


_PRODUCT_ROWS = frozenset(name + suffix for _, name in _PRODUCTS for suffix in ("", _HALF))


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


def patch_all(regions: RegionTimer, step: TrainStep) -> Patches:
    """Measures the functions of a step. A name that is not there any more is an AttributeError.

    Threads and operators work for the part that calls them, the innermost function that is measured.
    """
    from mindspore import Tensor

    from trainer.arrays import cells, embedding, head, measures, mlp, onednn, sublayer, tiles
    from trainer.arrays.attention import blocks, positions
    from trainer.arrays.attention import sublayer as attention
    from trainer.arrays.moe import experts, router
    from trainer.arrays.moe import sublayer as moe
    from trainer.device.threads import HostThreads
    from trainer.models import decoder
    from trainer.ops.updates import adamw

    patches = Patches()

    def measure(
        owner: Any, attribute: str, name: Any, cost: Any = None, direction: str | None = None, calls: int = 1
    ) -> None:
        patches.set(owner, attribute, lambda there: regions.wrapped(there, name, cost, direction, calls))

    patches.set(HostThreads, "run", regions.wrapped_threads)
    for owner, forward, backward, name in (
        (cells._PartCell, "construct", "bprop", _DISPATCH),
        (attention.CpuAttention, "forward", "backward", "attention: projections, residual"),
        (blocks.BlockAttention, "forward", "backward", _SCORES),
        (mlp.CpuMlp, "forward", "backward", "SwiGLU, residual"),
        (moe.CpuMoe, "forward", "backward", "experts: norm, residual"),
        (router.CpuRouter, "forward", "backward", "router"),
        (experts.CpuExperts, "forward", "backward", "experts: SwiGLU, rows"),
        (embedding.CpuEmbedding, "forward", "backward", "embedding"),
        (embedding.CpuMapping, "forward", "backward", "embedding: mapping"),
        (embedding.CpuMerge, "forward", "backward", "inputs of modules"),
        (head.FusedLinearCrossEntropy, "forward", "_gradients", "head: cross entropy"),
    ):
        measure(owner, forward, name, direction=FORWARD)
        measure(owner, backward, name, direction=BACKWARD)
    for attribute in ("forward", "apply_lora_a", "backward"):
        measure(sublayer.Linear, attribute, linear_name, calls=0)
    measure(sublayer.Linear, "add_adapter_gradients", _WEIGHT_GRADIENTS, calls=0)
    operators = type(onednn.operators())
    measure(operators, "matmul", product_name, product_cost)
    for attribute in ("softmax", "softmax_gradient"):
        measure(operators, attribute, lambda of, _: f"{of.part.split(':')[0]}: softmax", arrays_cost)
    for attribute in ("silu", "silu_gradient"):
        measure(operators, attribute, lambda of, _: of.part, arrays_cost)
    for attribute in ("scales", "__call__", "gradient"):
        measure(tiles.RmsNorm, attribute, "norm", arrays_cost)
    measure(positions.Rotary, "apply", "rotary", arrays_cost)
    measure(tiles.WeightGradients, "compute", _WEIGHT_GRADIENTS)
    measure(cells, "narrow_weight", "weights in the dtype of the products")
    measure(embedding, "embedding_rows", "embedding", arrays_cost)
    measure(embedding, "embedding_gradient", "embedding", arrays_cost)
    measure(Tensor, "asnumpy", "tensors as arrays")
    measure(measures, "squares", "norm of the gradients", _squares_cost)
    measure(adamw, "_update_block", "optimizer", _adamw_cost)
    measure(step.optimizer, "update", "optimizer")
    measure(decoder.ModelParams, "refresh", "weights in the dtype of the products")
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


def table_of(title: str, rows: Iterable[tuple[Key, Row]]) -> Table:
    from rich.table import Table

    table = Table(title=title)
    rows = list(rows)
    for name in ("part", "pass", "ms", "share", "calls", "MB", "GB/s", "GFLOP/s"):
        table.add_column(name, justify="left" if name in ("part", "pass") else "right")
    whole = sum(row.seconds for _, row in rows)
    for key, row in rows:
        speeds = [amount / row.seconds / 1e9 if row.seconds else 0.0 for amount in (row.bytes, row.operations)]
        table.add_row(
            key.name, key.direction, f"{1000 * row.seconds:.1f}", f"{row.seconds / whole:.1%}", str(row.calls),
            f"{row.bytes / 1e6:.0f}" if row.bytes else "", f"{speeds[0]:.0f}" if row.bytes else "",
            f"{speeds[1]:.0f}" if row.operations else "",
        )  # fmt: skip
    return table
