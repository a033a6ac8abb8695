"""Has MindSpore shard the graphs of some configurations for one rank, in a process of its own: see `front_end.py`.

    python sharded_graph_worker.py cases.json found.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from front_end import sharded_graph

from trainer.config import parse_config
from trainer.parallel.world import World


def main(cases: Path, found: Path) -> None:
    results = {}
    for name, case in json.loads(cases.read_text()).items():
        world = World(case["rank"], case["ranks"], case["rank"], case["ranks"])
        graph = sharded_graph(parse_config("semi", json.dumps(case["config"])), world)
        kinds = {f"REF::{each.name}": each.op_type for each in graph.model.primitives}
        nodes = [node for part in (graph.model.graph, *graph.model.functions) for node in part.node]
        operators = Counter(kinds[node.op_type] for node in nodes if node.op_type in kinds)
        parameters = {each.name.rpartition(":")[2]: list(each.dims) for each in graph.model.graph.parameter}
        results[name] = {"operators": operators, "parameters": parameters}
    found.write_text(json.dumps(results))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
