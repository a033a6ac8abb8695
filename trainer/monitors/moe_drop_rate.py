"""What the routers of a mixture of experts did in a step: dropped tokens, load and certainty of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainer.monitors.metrics import StepMetrics

if TYPE_CHECKING:
    from trainer.ops.routing import RoutingCounts

DROP_RATE, LOAD_IMBALANCE, ROUTER_ENTROPY = "drop_rate", "load_imbalance", "router_entropy"
"""Fields of metrics.jsonl, each a list with a number for each layer with experts."""


def routing_details(counts: RoutingCounts) -> dict[str, list[float]]:
    """The fields of a step, from the counts of its micro-batches.

    A drop rate is counted, assignments dropped / assignments requested, and not predicted from the router's scores. The
    load's imbalance is that of the busiest expert over the mean, 1 when all is even; the entropy of a token's scores is
    in nats, at most log(experts).
    """
    found = {DROP_RATE: counts.drop_rate, LOAD_IMBALANCE: counts.load_imbalance, ROUTER_ENTROPY: counts.entropy}
    return {name: [float(value) for value in values] for name, values in found.items()}


def drop_rate_lines(layers: Sequence[int]) -> Callable[[StepMetrics], list[str]]:
    """Makes the lines of a step, one for each layer with experts, in MindSpore Transformers' form.

    Args:
        layers: Their numbers; those of multi-token prediction modules count on after the last layer.
    """

    def lines(metrics: StepMetrics) -> list[str]:
        if DROP_RATE not in metrics.details:  # a step without a token that has a loss
            return []
        return [
            f"layer: {layer}, drop_rate: {rate:.5f}"
            for layer, rate in zip(layers, metrics.details[DROP_RATE], strict=True)
        ]

    return lines
