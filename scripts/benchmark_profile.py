"""`benchmark.py profile`: where the time of a training step goes, against what this machine can do at most."""

from __future__ import annotations

import argparse
import bisect
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from benchmark_regions import BACKWARD, FORWARD, Key, Patches, Regions, Row
from benchmark_tools import ROOT, Line, conclude
from rich.console import Console
from rich.table import Table

from trainer.config import Config, Override, load_config
from trainer.plan.flops import flops_per_sequence

if TYPE_CHECKING:
    from trainer.ops.peak import Ceilings
    from trainer.step.train_step import TrainStep

WARM_UP_STEPS = 3
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
_COPIES = ((r"HostAttention.*enter", "q, k, v products"), (r"HostAttention.*leave", "output projection"))
# What threads do, by the qualified name of the function that they call: what is measured inside is not in it.
_ITEMS = (
    (r"HostAttention.*attend", "attention: copies, mask"),
    (r"HostAttention", "attention: entering, leaving"),
    (r"HostMlp", "SwiGLU, residual"),
    (r"WeightGradients", "weight gradients"),
    (r"HostHead", "head: cross entropy"),
    (r"Adam", "optimizer"),
    (r"[Ee]xperts|add_rows", "experts: SwiGLU, rows"),
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
        return of_head if "HostHead" in regions.item else of_attention

    return name


def patch_all(regions: Regions, step: TrainStep, weights: WeightNames) -> Patches:
    """Measures the functions of a step. A name that is not there any more is an AttributeError."""
    from mindspore import Tensor

    from trainer.device.threads import HostThreads
    from trainer.models import decoder
    from trainer.ops.cpu import decoder_parts, experts, head, layer, measures, onednn, router
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
        measure(layer.RmsNorm, attribute, "norm", arrays_cost)
    measure(layer.Rotary, "turn", "rotary", arrays_cost)
    patches.set(HostThreads, "run", lambda there: regions.wrapped_threads(there, item_name))
    measure(head.HostHead, "_gradients", _DISPATCH, direction=BACKWARD)
    measure(decoder_parts, "embedding_rows", "embedding", arrays_cost)
    measure(decoder_parts, "embedding_gradient", "embedding", arrays_cost)
    for cell, name in (
        (decoder_parts._LayerCall, _DISPATCH), (decoder_parts._HeadCall, _DISPATCH), (router._RouterCall, "router"),
        (experts._ExpertsCall, "experts: SwiGLU, rows"), (decoder_parts.HostEmbedding, _DISPATCH),
    ):  # fmt: skip
        measure(cell, "construct", name, direction=FORWARD)
        measure(cell, "bprop", name, direction=BACKWARD)
    measure(Tensor, "asnumpy", "tensors as arrays")
    measure(measures, "squares", "norm of the gradients", _squares_cost)
    measure(host_adamw, "_update_block", "optimizer", _adamw_cost)
    measure(step.optimizer, "update", "optimizer")
    measure(decoder.ComputeWeights, "refresh", "weights in the dtype of the products")
    measure(step, "build_inputs", "data")
    measure(step, "gradients_of", _DISPATCH)
    return patches


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def needed_operations(config: Config) -> float:
    """Floating-point operations of the products that a step needs."""
    runner = config.runner_config
    return flops_per_sequence(config) * runner.batch_size * runner.gradient_accumulation_steps


class Profile:
    """Steps of a training, by turns as they are and measured."""

    def __init__(self, config: Config) -> None:
        from trainer.data import build_datasets
        from trainer.run.session import open_training

        self.step, self.dataset = open_training(config, lambda update: 1e-4), build_datasets(config)[0]
        self.rows, self.window = config.runner_config.batch_size, config.runner_config.gradient_accumulation_steps
        self.regions, self.taken = Regions(), 0
        for _ in range(WARM_UP_STEPS):
            self.plain()
        # Not before: their memory is that of the first step on.
        weights = {**self.step.model.parameters_by_name, **self.step.model.compute_weights.copies}
        arrays = {f"{number} {name}": each.asnumpy() for number, (name, each) in enumerate(weights.items())}
        self.patches = patch_all(self.regions, self.step, WeightNames(arrays))

    def batches(self) -> list:
        first = self.taken
        self.taken += self.rows * self.window
        numbers = [number % self.dataset.num_sequences for number in range(first, self.taken)]
        return [self.dataset.batch(numbers[start : start + self.rows]) for start in range(0, len(numbers), self.rows)]

    def plain(self) -> float:
        return _seconds(lambda: self.step(self.batches()))

    def measured(self) -> float:
        def run() -> None:
            with self.regions.region(NOT_EXPLAINED):
                with self.regions.region("data"):
                    batches = self.batches()
                self.step(batches)

        with self.patches.on():
            return _seconds(run)


def profile_rows(rows: Mapping[Key, Row], steps: int) -> list[tuple[Key, Row]]:
    """Of one step, the longest first and what is not explained last."""
    for row in rows.values():
        row.seconds, row.bytes, row.operations = row.seconds / steps, row.bytes / steps, row.operations / steps
        row.calls //= steps
    return sorted(rows.items(), key=lambda pair: (pair[0].name == NOT_EXPLAINED, -pair[1].seconds))


def render_rows(title: str, rows: Iterable[tuple[Key, Row]], limits: Ceilings, console: Console) -> None:
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
    console.print(table)


def profile(options: argparse.Namespace, console: Console) -> int:
    from trainer.ops.peak import best_of, ceilings

    path = options.config or str(ROOT / "configs" / f"bench_{options.model}.yaml")
    config = load_config(path, [Override(*pair.split("=", 1), "flag --set") for pair in options.set])
    measured = Profile(config)
    limits, plain, profiled = [ceilings()], [], []
    for _ in range(options.rounds):
        plain.append(measured.plain())
        profiled.append(measured.measured())
        limits.append(ceilings())
    limits = best_of(limits)
    rows = profile_rows(measured.regions.rows, options.rounds)
    whole, step = sum(row.seconds for _, row in rows), statistics.median(plain)
    half = "" if limits.bfloat16 is None else f"bfloat16 {limits.bfloat16:.0f} GFLOP/s, "
    console.print(f"ceilings: products float32 {limits.float32:.0f} GFLOP/s, {half}memory {limits.memory:.0f} GB/s")
    render_rows(f"A step of {Path(path).name}, mean of {options.rounds}", rows, limits, console)
    needed = needed_operations(config)
    explained = 1 - sum(row.seconds for key, row in rows if key.name == NOT_EXPLAINED) / whole
    reached, peak = needed / step / 1e9, limits.float32
    lines = [
        Line("share of the step that is explained", explained, 0.95, True, f"of {1000 * whole:.0f} ms"),
        Line("share of the float32 product peak", reached / peak, 0.7, True,
             f"{reached:.0f} / {peak:.0f} GFLOP/s: {needed / 1e9:.0f} GFLOP in {1000 * step:.0f} ms", False),
        Line("step, measured / plain", statistics.median(profiled) / step, 1.05, False,
             f"{1000 * statistics.median(profiled):.0f} / {1000 * step:.0f} ms", False),
    ]  # fmt: skip
    return conclude(
        "profile", f"Profile of {Path(path).name}", lines, console, ceilings=asdict(limits), step_seconds=plain,
        measured_seconds=profiled, needed_operations=needed,
        rows=[{**key._asdict(), **asdict(row)} for key, row in rows],
    )  # fmt: skip


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("profile", help="where the time of a step goes")
    command.add_argument("--model", choices=("dense", "moe"), default="dense", help="configs/bench_MODEL.yaml")
    command.add_argument("--config", help="another file in its place")
    command.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of the configuration")
    command.add_argument("--rounds", type=int, default=10, help="steps as they are and measured, by turns")
