"""A rank of the job of test_sharded_numbers.py: MindSpore shards the graph, the rank computes it.

    python sharded_graph_job.py folder     (configurations in cases.json, batches in NAME.npz, results in NAME-RANK.npz)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from msrun_helpers import take_a_core

take_a_core()

import mindspore  # noqa: E402
import numpy as np  # noqa: E402
from front_end import ShardedGraph, sharded_graph  # noqa: E402
from mindspore import Tensor, nn  # noqa: E402

from trainer.config import parse_config  # noqa: E402
from trainer.device.threads import set_up_cpu_threads  # noqa: E402
from trainer.parallel import collectives  # noqa: E402
from trainer.parallel.communicator import Communicator  # noqa: E402
from trainer.parallel.world import RENDEZVOUS_VARIABLE, is_scheduler, world_from_environment  # noqa: E402
from trainer.semi_auto.shards import ShardedParameters  # noqa: E402
from trainer.semi_auto.training import graph_batch  # noqa: E402


def main(folder: Path) -> None:
    world = world_from_environment()
    cases = json.loads((folder / "cases.json").read_text())
    configs = {name: parse_config("semi", json.dumps(given)) for name, given in cases.items()}
    # Before the device is set: from then on MindSpore keeps its name elsewhere. The scheduler runs this script as well
    # as far as the workers' meeting, and has no graph.
    graphs = {} if is_scheduler() else {name: sharded_graph(config, world) for name, config in configs.items()}
    mindspore.set_device("CPU")
    set_up_cpu_threads()
    collectives.join_through_mindspore(world)  # for the graphs; it uses msrun's port
    os.environ[RENDEZVOUS_VARIABLE] = str(folder / "rendezvous")
    communicator = Communicator(collectives.init_process_group(world))
    known: set[str] = set()
    for name, config in configs.items():
        graph = graphs[name]
        groups = ranks_of_groups(graph)
        for data in communicator.gather_bytes(json.dumps(groups).encode()):
            for group, ranks in sorted(json.loads(data).items()):
                if world.rank in ranks and group not in known:
                    collectives.make_group(group, ranks)
                    known.add(group)
        parameters = ShardedParameters(graph.built, config, world, communicator, lambda group: (0, 1))
        parameters.start(None)
        own = graph_batch(config, world).local_rows
        batch = {each: array[own] for each, array in np.load(folder / f"{name}.npz").items()}
        loss, gradients = computed(graph, parameters, batch, folder, world.rank)
        names = [weight.name for weight in graph.built.step.weights]
        parts = dict(zip(names, gradients, strict=True))
        own = np.array([(part**2).sum(dtype=np.float64) for part in parts.values()])
        [squares] = communicator.all_reduce([parameters.squares(list(parts), own)])
        whole = parameters.gather(parts, parts)
        arrays = {f"gradient {each}": array for each, array in whole.items()}
        arrays |= {f"square {each}": np.array(value) for each, value in zip(parameters.trained, squares, strict=True)}
        np.savez(folder / f"{name}-{world.rank}.npz", loss=loss, **arrays)


def ranks_of_groups(graph: ShardedGraph) -> dict[str, list[int]]:
    """Returns the groups of some ranks that the graph communicates in; that of all gets the name that a CPU knows it
    by."""
    found = {}
    for primitive in graph.model.primitives:
        attributes = {attribute.name: attribute for attribute in primitive.attribute}
        if "group" not in attributes:
            continue
        if attributes["group"].s == b"hccl_world_group":
            attributes["group"].s = b"mccl_world_group"
        else:
            ranks = attributes["group_rank_ids"].values
            found[attributes["group"].s.decode()] = [rank.ints[0] for rank in ranks]
    return found


def computed(
    graph: ShardedGraph, parameters: ShardedParameters, batch: dict[str, np.ndarray], folder: Path, rank: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Loss and gradients of this rank's shards."""
    values = parameters.local | {name: total for name, (total, _) in parameters.sums.items()}
    for each in graph.model.graph.parameter:
        each.raw_data = values[each.name.rpartition(":")[2]].asnumpy().tobytes()
    file = folder / f"graph-{rank}.mindir"
    file.write_bytes(graph.model.SerializeToString())
    network = nn.GraphCell(mindspore.load(str(file)))
    loss, gradients = network(*map(Tensor, batch.values()))
    if graph.built.step.uses_sums:
        own = {each.name.rpartition(":")[2]: each for each in network.get_parameters()}
        gradients = [own[total.name] for total in graph.built.step.sums]
    return loss.asnumpy(), [gradient.asnumpy() for gradient in gradients]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
