"""The rates of a device and of its links, from which the time of a step is estimated; docs/search.md explains them.

Sources: the peak is that of an Ascend 910B3 in `trainer.ops.peak`. Nodes of 8 Ascends with a full mesh of HCCS inside,
and 200 Gbit/s of RoCE for each Ascend between nodes: "Pangu Ultra" (Yin et al. 2025, section 4.1, arXiv 2504.07866).
The bandwidths of HCCS (7 links of 28 GB/s in each direction) and of the memory (1.6 TB/s) are those that are generally
quoted; no publication of Huawei with them was at hand. The shares of the peak, the latencies and all rates of a CPU are
guesses, which `--measured` replaces.
"""

from __future__ import annotations

import os
from functools import partial
from typing import NamedTuple

from trainer.config import Config
from trainer.parallel.world import World

_TERA = 1e12
_GIGA = 1e9
_MICRO = 1e-6


class Rates(NamedTuple):
    """What a rank reaches, in FLOP/s, bytes/s and seconds.

    Attributes:
        products, experts, attention: Of the classes of operators.
        memory: Of its memory.
        layer_overhead: Of a pass of a layer, beside its operators.
        ranks_per_node: Neighbouring ranks with fast links.
        node, network: Bytes that it sends to ranks of its node, and of other nodes.
        node_latency, network_latency: Of a collective.
    """

    products: float
    experts: float
    attention: float
    memory: float
    layer_overhead: float
    ranks_per_node: int
    node: float
    node_latency: float
    network: float
    network_latency: float


DEFAULTS: dict[str, dict[str, float]] = {
    "Ascend": {
        "peak_tflops": 294.9, "products": 0.6, "experts": 0.4, "attention": 0.5, "memory_gbps": 1600.0,
        "layer_overhead": 100.0, "ranks_per_node": 8, "node_gbps": 150.0, "node_latency": 20.0, "network_gbps": 20.0,
        "network_latency": 40.0,
    },
    # All of one core, of which a rank has its share; ranks on one host exchange through sockets.
    "CPU": {
        "peak_tflops": 0.06, "products": 0.7, "experts": 0.4, "attention": 0.3, "memory_gbps": 8.0,
        "layer_overhead": 150.0, "ranks_per_node": 0, "node_gbps": 1.0, "node_latency": 150.0, "network_gbps": 0.1,
        "network_latency": 300.0,
    },
}  # fmt: skip
"""The default of each key of the section `hardware`, by device. Ranks per node 0: all are on this host."""


def device_rates(config: Config, world: World, device: str) -> Rates:
    """Returns the rates of a rank: those that the file sets, and the defaults of the device."""
    rate = partial(_rate, config, device)
    per_node = int(rate("ranks_per_node")) or world.size
    if config.hardware.ranks_per_node is None and world.local_size < world.size:
        per_node = world.local_size
    share = 1.0  # of the host's cores; ranks on a CPU also need one to send and receive
    if device == "CPU":
        share = (os.cpu_count() or 1) / per_node
    peak = rate("peak_tflops") * _TERA * share
    return Rates(
        products=rate("products") * peak,
        experts=rate("experts") * peak,
        attention=rate("attention") * peak,
        memory=rate("memory_gbps") * _GIGA * share,
        layer_overhead=rate("layer_overhead") * _MICRO / share,
        ranks_per_node=per_node,
        node=rate("node_gbps") * _GIGA * min(1.0, share),
        node_latency=rate("node_latency") * _MICRO / min(1.0, share),
        network=rate("network_gbps") * _GIGA,
        network_latency=rate("network_latency") * _MICRO,
    )


def _rate(config: Config, device: str, key: str) -> float:
    """Returns the value of a key of the section `hardware`, or the device's default."""
    value = getattr(config.hardware, key)
    if value is None:
        return DEFAULTS.get(device, DEFAULTS["Ascend"])[key]
    return value


class Factors(NamedTuple):
    """How many times as long as estimated operators, the overhead of layers, and communication take."""

    operators: float = 1.0
    overhead: float = 1.0
    links: float = 1.0

    def correct(self, rates: Rates) -> Rates:
        """Returns the rates with which estimates are so much longer."""
        return rates._replace(
            products=rates.products / self.operators,
            experts=rates.experts / self.operators,
            attention=rates.attention / self.operators,
            memory=rates.memory / self.operators,
            layer_overhead=rates.layer_overhead * self.overhead,
            node=rates.node / self.links,
            node_latency=rates.node_latency * self.links,
            network=rates.network / self.links,
            network_latency=rates.network_latency * self.links,
        )

    def section(self, config: Config, device: str) -> dict[str, float]:
        """Returns the keys of the section `hardware` that correct the rates."""
        slower = {"peak_tflops": self.operators, "memory_gbps": self.operators, "node_gbps": self.links,
                  "network_gbps": self.links}  # fmt: skip
        longer = {"layer_overhead": self.overhead, "node_latency": self.links, "network_latency": self.links}
        values = {key: _rate(config, device, key) / factor for key, factor in slower.items()}
        values |= {key: _rate(config, device, key) * factor for key, factor in longer.items()}
        return {key: float(f"{value:.4g}") for key, value in values.items()}
