"""What MindSpore's front end makes of a cell, read from the file that it exports: no kernel is selected for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import mindspore
from mindspore import Tensor, nn
from mindspore.train import mind_ir_pb2

FLOAT = mind_ir_pb2.TensorProto.FLOAT


class Graph(NamedTuple):
    """An exported graph: how often it has each operator, and the shape and MindIR's dtype of every output."""

    operators: Counter[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[int]


def export(cell: nn.Cell, inputs: list[Tensor], file: Path) -> Graph:
    mindspore.export(cell, *inputs, file_name=str(file), file_format="MINDIR")
    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(file.with_suffix(".mindir").read_bytes())
    (output,) = model.graph.output
    tensors = list(output.tensor) or [value.tensors[0] for value in output.attr_info.values]
    nodes = [node.op_type for graph in (model.graph, *model.functions) for node in graph.node]
    operators = Counter(name.split(":")[-2] if ":" in name else name for name in nodes)
    return Graph(operators, [tuple(tensor.dims) for tensor in tensors], [tensor.data_type for tensor in tensors])
