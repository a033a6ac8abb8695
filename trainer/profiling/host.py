"""The profile of a CPU step with native layers: seconds, bytes and operations of each part.

MindSpore's profiler records operators, and native layers run almost none. So the functions of a step are wrapped and
timed while `Patches` are applied. This module says which functions, and the row of the table that each counts for;
`regions.py` measures.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.arrays.numpy_operators import BFLOAT16
from trainer.profiling.regions import BACKWARD, FORWARD, Patches, RegionCost, RegionKey, RegionTimer

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.step.train_step import TrainStep

NOT_EXPLAINED = "not explained"
_DISPATCH = "dispatch: Python, tape"
_DTYPES = {np.dtype(BFLOAT16): ", bfloat16", np.dtype(np.float16): ", float16"}
"""Ends of the names of products in these dtypes; those in float32 have none."""

# Rows of the table for products of matrices: the first pattern that the name of the matrix matches.
_PRODUCTS = (
    (r"\.o_proj", "output projection"),
    (r"self_attn\.", "q, k, v products"),
    (r"(gate|up)_proj", "gate, up products"),
    (r"down_proj", "down product"),
)
_SCORES = "attention: copies, mask"
_FUSED = "attention: fused"
_WEIGHT_GRADIENTS = "weight gradients"


def _linear_name(regions: RegionTimer, arguments: tuple) -> str:
    """Names the products of a `CpuLinear`, the first argument, by its matrix, or else by its part of the model."""
    linear, _, x_nI, *_ = arguments
    for pattern, name in _PRODUCTS:
        if re.search(pattern, linear.name):
            return name + _suffix(x_nI)
    return _products_of(regions.part, x_nI)


def _products_of(part: str, array: np.ndarray) -> str:
    return f"{part.split(':')[0]}: products{_suffix(array)}"


def _product_name(regions: RegionTimer, arguments: tuple) -> str:
    """Names a product of two arrays by the part that computes it."""
    part = regions.part
    if part.endswith(_NAMED_BY_MATRIX):  # within a method of a `CpuLinear`
        return part
    if part == _WEIGHT_GRADIENTS:
        return part + _suffix(arguments[1])
    if part == _SCORES:
        return "attention: scores, values" + _suffix(arguments[1])
    return _products_of(part, arguments[1])


def _suffix(array: np.ndarray) -> str:
    return _DTYPES.get(array.dtype, "")


_NAMED_BY_MATRIX = tuple(
    name + dtype for name in (*(name for _, name in _PRODUCTS), ": products") for dtype in ("", *_DTYPES.values())
)


def _product_cost(arguments: tuple) -> tuple[float, float]:
    """Counts bytes and operations of `matmul`, which also reads the result if it accumulates."""
    _, a, b, out, *accumulate = arguments
    moved = a.nbytes + b.nbytes + out.nbytes * (1 + any(accumulate))
    return moved, 2.0 * out.size * a.shape[-1]


def _attention_cost(products: int, arguments: tuple) -> tuple[float, float]:
    """Counts operations of the products that fused attention needs, each once for a visible key."""
    _, sizes, _, bias, *_ = arguments
    visible = sizes.queries * sizes.visible + int((bias == 0).sum())
    return 0.0, products * visible * sizes.heads * sizes.groups * (sizes.size + sizes.value_size)


def _arrays_cost(arguments: tuple) -> tuple[float, float]:
    """Counts the bytes of each array once."""
    return sum(array.nbytes for array in arguments if isinstance(array, np.ndarray)), 0.0


def patch_all(regions: RegionTimer, step: TrainStep) -> Patches:
    """Returns patches that time the functions of a step.

    The time of threads and operators counts for the part that calls them: the innermost timed function.

    Raises:
        AttributeError: A function that is timed does not exist any more.
    """
    from trainer.arrays import measures, memory, mlp, passes, sublayer, tiles
    from trainer.arrays.attention import blocks, positions
    from trainer.arrays.attention import sublayer as attention
    from trainer.arrays.compiled import attention as fused
    from trainer.arrays.moe import experts, router
    from trainer.arrays.moe import sublayer as moe
    from trainer.arrays.operators import operators
    from trainer.arrays.vocabulary import embedding, head
    from trainer.device.threads import HostThreads
    from trainer.models import decoder
    from trainer.optim import adamw

    patches = Patches()

    def measure(
        owner: Any, attribute: str, name: Any, cost: Any = None, direction: str | None = None, calls: int = 1
    ) -> None:
        patches.set(owner, attribute, lambda original: regions.time_function(original, name, cost, direction, calls))

    patches.set(HostThreads, "run", regions.time_threads)
    for owner, forward, backward, name in (
        (passes._PartPass, "forward", "backward", _DISPATCH),
        (attention.CpuAttention, "forward", "backward", "attention: projections, residual"),
        (blocks.BlockAttention, "forward", "backward", _SCORES),
        (mlp.CpuMlp, "forward", "backward", "SwiGLU, residual"),
        (moe.CpuMoe, "forward", "backward", "experts: norm, residual"),
        (router.CpuRouter, "forward", "backward", "router"),
        (experts.CpuExperts, "forward", "backward", "experts: SwiGLU, rows"),
        (embedding.CpuEmbedding, "forward", "backward", "embedding"),
        (embedding.CpuMapping, "forward", "backward", "embedding: mapping"),
        (embedding.CpuMerge, "forward", "backward", "inputs of modules"),
        (head.FusedLinearCrossEntropy, "forward", "_gradients", "head: cross entropy"),  # `forward` calls `_gradients`
    ):
        measure(owner, forward, name, direction=FORWARD)
        measure(owner, backward, name, direction=BACKWARD)
    for attribute in ("forward", "apply_lora_a", "backward"):
        measure(sublayer.CpuLinear, attribute, _linear_name, calls=0)
    measure(sublayer.CpuLinear, "add_adapter_gradients", _WEIGHT_GRADIENTS, calls=0)
    kind = type(operators())
    measure(kind, "matmul", _product_name, _product_cost)
    for attribute, products in (("forward", 2), ("backward", 5)):
        measure(fused.CompiledAttention, attribute, _FUSED, functools.partial(_attention_cost, products))
    for attribute in ("softmax", "softmax_gradient"):
        measure(kind, attribute, lambda timer, _: f"{timer.part.split(':')[0]}: softmax", _arrays_cost)
    for attribute in ("gated", "gated_gradient", "weighted_gated_gradient"):
        measure(kind, attribute, lambda timer, _: timer.part, _arrays_cost)
    for attribute in ("scales", "__call__", "gradient"):
        measure(tiles.CpuRmsNorm, attribute, "norm", _arrays_cost)
    measure(positions.CpuRotary, "apply", "rotary", _arrays_cost)
    measure(tiles.WeightGradients, "compute", _WEIGHT_GRADIENTS)
    measure(passes, "narrow_weight", "weights in the dtype of the products")
    measure(embedding, "embedding_rows", "embedding", _arrays_cost)
    measure(embedding, "embedding_gradient", "embedding", _arrays_cost)
    for owner in (memory, measures, adamw):
        measure(owner, "shared_array", "tensors as arrays")
    measure(measures, "squares", "norm of the gradients", lambda call: (4.0 * sum(one.size for one in call[0]), 0.0))
    measure(kind, "adamw", "optimizer", lambda call: (7 * call[1].nbytes, 0.0))  # reads four arrays, writes three
    measure(step.optimizer, "update", "optimizer")
    measure(decoder.ModelParams, "refresh", "weights in the dtype of the products")
    measure(step, "build_inputs", "data")
    measure(step, "differentiate", _DISPATCH)
    return patches


def profile_rows(totals: Mapping[RegionKey, RegionCost], steps: int) -> list[tuple[RegionKey, RegionCost]]:
    """Returns the costs of one step, the mean over `steps`. The longest are first, and the unexplained rest is last."""
    rows = {
        key: RegionCost(cost.seconds / steps, cost.calls // steps, cost.bytes / steps, cost.operations / steps)
        for key, cost in totals.items()
    }
    return sorted(rows.items(), key=lambda pair: (pair[0].name == NOT_EXPLAINED, -pair[1].seconds))


def profile_table(title: str, rows: Iterable[tuple[RegionKey, RegionCost]]) -> Table:
    """Returns the table of a profile, with time, calls, memory bandwidth and GFLOP/s of each part."""
    from rich.table import Table

    table = Table("part", "pass", title=title)
    rows = list(rows)
    for name in ("ms", "share", "calls", "MiB", "GiB/s", "GFLOP/s"):
        table.add_column(name, justify="right")
    total = sum(cost.seconds for _, cost in rows)
    for key, cost in rows:
        cells = [key.name, key.direction, f"{1000 * cost.seconds:.1f}", f"{cost.seconds / total:.1%}", str(cost.calls)]
        seconds = cost.seconds or math.inf
        if cost.bytes:
            cells += [f"{cost.bytes / (1 << 20):.0f}", f"{cost.bytes / seconds / (1 << 30):.1f}"]
        else:
            cells += ["", ""]
        if cost.operations:
            cells.append(f"{cost.operations / seconds / 1e9:.0f}")
        table.add_row(*cells)
    return table
