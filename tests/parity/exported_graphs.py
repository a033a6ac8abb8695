"""What MindSpore's front end makes of a cell, read from the file that it exports: no kernel is selected for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import mindspore
import pytest
from mindspore import Tensor, nn, ops
from mindspore.train import mind_ir_pb2

FLOAT = mind_ir_pb2.TensorProto.FLOAT


class Graph(NamedTuple):
    """An exported graph: how often it has each operator, and the shape and MindIR's dtype of every output."""

    operators: Counter[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[int]


class Backward(nn.Cell):
    """Gradients with respect to every argument but the last, which is the gradient from above."""

    def __init__(self, kernel: nn.Cell) -> None:
        super().__init__()
        self.kernel, self.grad = kernel, ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, *args):
        return self.grad(self.kernel)(*args)


def export(cell: nn.Cell, inputs: list[Tensor], file: Path) -> Graph:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(file.parent)  # MindSpore leaves its analysis of a refused graph in the working directory
        mindspore.export(cell, *inputs, file_name=str(file), file_format="MINDIR")
    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(file.with_suffix(".mindir").read_bytes())
    (output,) = model.graph.output
    tensors = list(output.tensor) or [value.tensors[0] for value in output.attr_info.values]
    nodes = [node.op_type for graph in (model.graph, *model.functions) for node in graph.node]
    operators = Counter(name.split(":")[-2] if ":" in name else name for name in nodes)
    return Graph(operators, [tuple(tensor.dims) for tensor in tensors], [tensor.data_type for tensor in tensors])
