"""Groups of `benchmark.py targets` that train a model in the trainer and in PyTorch, transformers or PEFT.

Both sides have equal sizes, batches and optimizers. They must train as many weights and begin with an equal loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmark_groups import (
    DENSE,
    DROPOUT,
    LATENT,
    LORA,
    QWEN3,
    WIDE,
    WIDE_QWEN3,
    Figures,
    Group,
    Programs,
    config_of,
    speed_line,
)
from benchmark_tools import SETTLING_STEPS, Line, Measurement, RunFailed

from trainer.optim.freeze import trained_shapes

_ONE_SEQUENCE = WIDE | {"runner_config.batch_size": "1"}
_VARIANTS = {
    "latent attention": LATENT,
    "windows of 64": {"model.model_config.sliding_window": "64"},
    "dropout": DROPOUT,
}
_LARGE_STEPS = SETTLING_STEPS + 3
WEIGHTS_TOLERANCE = 0.01
"""Relative difference of the numbers of trained weights from which two programs do not train equal models."""
LOSS_TOLERANCE = 0.02
"""Relative difference of the first losses of two programs with other random weights and tokens. Logits with a variance
v raise the loss above the logarithm of the vocabulary by v / 2, and its mean over 511 tokens deviates by sqrt(v / 511):
with v = 0.4 by 0.03 of 12. Weights of twice the standard deviation add 0.6."""


def compare(
    run: Programs, peer: Callable[..., Measurement], keys: Mapping[str, str], steps: int | None = None
) -> tuple[Measurement, Measurement]:
    """Returns a run of the trainer and one of another program with the sizes of the same configuration.

    Raises:
        RunFailed: They do not train as many weights, or do not begin with an equal loss.
    """
    steps = steps or run.options.steps
    ours = run.train(keys, steps=steps)
    theirs = peer(keys, steps=steps)
    check_equal(config_of(DENSE, keys), ours, theirs)
    return ours, theirs


def check_equal(config: Any, ours: Measurement, theirs: Measurement) -> None:
    """Raises RunFailed if the other program trains a model of another size, or begins with another loss."""
    trained = sum(math.prod(shape) for shape in trained_shapes(config).values())
    if theirs.trained is None or abs(theirs.trained - trained) > WEIGHTS_TOLERANCE * trained:
        raise RunFailed(f"the trainer trains {trained:,} weights, the other program {theirs.trained}: their speeds"
                        " cannot be compared")
    losses = ours.first_loss, theirs.first_loss
    if None in losses or not math.isclose(*losses, rel_tol=LOSS_TOLERANCE):
        raise RunFailed(f"the trainer begins with a loss of {losses[0]}, the other program with {losses[1]}: they do"
                        " not train the same")


def group_of(keys: Mapping[str, str], name: str, limit: float, program: str, steps: int | None = None) -> Group:
    """Returns the group that compares the speed of one model with that of another program.

    Args:
        name: The name of its line.
        program: The field of `Programs` with the other program.
    """
    def measure(run: Programs) -> Figures:
        ours, theirs = compare(run, getattr(run, program), keys, steps)
        return {"trainer": ours, "peer": theirs}

    def lines(rounds: Sequence[Figures]) -> Iterator[Line]:
        yield speed_line(name, limit, rounds, "trainer", "peer")

    return Group(measure, lines, needs_torch=True)


def variants(run: Programs) -> Figures:
    figures: Figures = {}
    for name, keys in _VARIANTS.items():
        figures[name], figures[f"{name}, eager"] = compare(run, run.torch, keys)
    return figures


def variants_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    for name in _VARIANTS:
        yield speed_line(f"{name} / PyTorch eager", 1.3, rounds, name, f"{name}, eager")


PEER_GROUPS = {
    "qwen3": group_of(QWEN3, "Qwen3-0.6B / transformers", 1.9, "finetune", _LARGE_STEPS),
    "qwen3_lora": group_of(LORA | QWEN3, "LoRA of Qwen3-0.6B / transformers and PEFT", 1.7, "finetune", _LARGE_STEPS),
    "wide_lora": group_of(
        LORA | WIDE_QWEN3, "LoRA of 8 layers of 512 / transformers and PEFT", 1.5, "finetune"),
    "one_sequence": group_of(
        _ONE_SEQUENCE, "8 layers of 512, one sequence of 512 / PyTorch eager", 1.4, "torch"),
    "variants": Group(variants, variants_lines, needs_torch=True),
}  # fmt: skip
PEER_AVX2_LIMITS = {
    "tokens/s, Qwen3-0.6B / transformers": 1.4, "tokens/s, LoRA of Qwen3-0.6B / transformers and PEFT": 1.4,
    "tokens/s, LoRA of 8 layers of 512 / transformers and PEFT": 1.3,
    "tokens/s, 8 layers of 512, one sequence of 512 / PyTorch eager": 1.2,
    **{f"tokens/s, {name} / PyTorch eager": 1.1 for name in _VARIANTS},
}  # fmt: skip
"""Limits with --isa avx2 that differ from those of `PEER_GROUPS`, by the name of the line."""
