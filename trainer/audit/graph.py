"""The graph that MindSpore's front end makes of a training step, read back from the file that it exports.

`mindspore.export` runs the whole front end (types, shapes, gradients, its optimizations) and selects no kernel, so an
Ascend's graph can be built on any machine. Weights are only described: none is allocated, whatever their size.

Legend: as in trainer/models/decoder.py.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mindspore
import numpy as np
from mindspore import Tensor, nn

from trainer.data.batches.batch import Batch
from trainer.models.functional import FunctionalDecoder, weight_names
from trainer.models.inputs import InputBuilder, ModelInputs
from trainer.models.shapes import all_shapes, attention_shapes, dropped_projections, is_buffer, mlp_shapes

if TYPE_CHECKING:
    from trainer.config import ModelConfig
    from trainer.ops.kernel_set import KernelSet

_NO_ARITHMETIC = ("Constant", "MakeTuple", "TupleGetItem", "Depend", "Load", "UpdateState", "Return")


class Node(NamedTuple):
    """One operator of a graph."""

    operator: str
    inputs: tuple[str, ...]
    """Dtypes of the tensors that go in, those of lists one after the other; what is no tensor is left out."""


class StepGraph(nn.Cell):
    """Loss and gradients of a training step, of flat arguments.

    Args:
        decoder: Of the layers to look at.
        structure: The arguments of the decoder with a number in the place of each tensor: its place in the arguments.
        trained: Places of the tensors whose gradients are wanted; none: the loss alone.
    """

    def __init__(self, decoder: FunctionalDecoder, structure: tuple, trained: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.forward, self.trained = _Flat(decoder, structure), trained
        self.step = mindspore.value_and_grad(self.forward, trained) if trained else self.forward

    def construct(self, *arguments):
        return self.step(*arguments)


class _Flat(nn.Cell):
    def __init__(self, decoder: FunctionalDecoder, structure: tuple) -> None:
        super().__init__(auto_prefix=False)
        self.decoder, self.structure = decoder, structure

    def construct(self, *arguments):
        filled = ()
        for group in self.structure:
            filled += (self.fill(group, arguments),)
        return self.decoder(*filled)

    def fill(self, group, arguments):
        filled = ()
        for item in group:
            if item is None:
                filled += (None,)
            elif isinstance(item, int):
                filled += (arguments[item],)
            else:
                filled += (self.fill(item, arguments),)
        return filled


def export_step(
    settings: ModelConfig, kernels: KernelSet, layers: Sequence[int], trained: frozenset[str], rows: int, length: int
) -> list[Node]:
    """The operators of a training step of a model with these layers alone.

    Args:
        settings: The model section.
        kernels: That every part is built from.
        layers: Numbers of the layers.
        trained: Names of the weights whose gradients the step computes.
        rows, length: B and T of a micro-batch.
    """
    arguments: list[Tensor] = []

    def put(item: Any) -> Any:
        if isinstance(item, Tensor):
            arguments.append(item)
            return len(arguments) - 1
        return None if item is None else tuple(map(put, item))

    inputs, shapes = _inputs(settings, kernels, rows, length), all_shapes(settings)
    structure = [put(group) for group in _input_groups(settings, inputs, layers)]
    names, first = weight_names(settings, layers, shapes), len(arguments)
    described = described_tensors({name: shapes[name] for group in names for name in group if name is not None})
    structure.append(put([[None if name is None else described[name] for name in group] for group in names]))
    flat = [name for group in names for name in group if name is not None]
    places = tuple(place for place, name in enumerate(flat, first) if name in trained)
    decoder = FunctionalDecoder(settings, kernels, rows * length, layers)
    return _exported(StepGraph(decoder, tuple(structure), places), arguments)


def trained_names(settings: ModelConfig, frozen: frozenset[str]) -> frozenset[str]:
    """The weights that gradients are computed of."""
    return frozenset(name for name in all_shapes(settings) if name not in frozen and not is_buffer(name))


def _inputs(settings: ModelConfig, kernels: KernelSet, rows: int, length: int) -> ModelInputs:
    zeros_BT = np.zeros((rows, length), np.int32)
    return InputBuilder(settings, kernels)(Batch(zeros_BT, zeros_BT, zeros_BT, zeros_BT))


def _input_groups(settings: ModelConfig, inputs: ModelInputs, layers: Sequence[int]) -> Iterator[Any]:
    """The arguments of `FunctionalDecoder` before the weights."""
    yield inputs.ids_N, inputs.labels_N, inputs.valid_N1
    yield inputs.tables
    yield inputs.mask
    yield () if inputs.shares is None else inputs.shares[:3]
    mtp = [layer - settings.num_layers for layer in layers if layer >= settings.num_layers]
    yield [tuple(inputs.mtp[module]) for module in mtp]
    yield [_dropped(settings, inputs) for _ in layers]


def _dropped(settings: ModelConfig, inputs: ModelInputs) -> list[Tensor | None]:
    tokens = inputs.ids_N.shape[0]
    rates = (settings.attention_dropout, settings.hidden_dropout, settings.hidden_dropout)
    stream = (tokens, settings.hidden_size)
    sizes = (inputs.scores_shape if rates[0] else stream, stream, stream)
    masks = [_described(size) if rate else None for size, rate in zip(sizes, rates, strict=True)]
    return masks + [_described((tokens, _width(settings, name))) for name in dropped_projections(settings)]


def described_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Float32 tensors of these shapes that take no memory: they share pages that nobody touches."""
    pages = np.zeros(max((math.prod(shape) for shape in shapes.values()), default=0), np.float32)
    return {name: Tensor.from_numpy(pages[: math.prod(shape)].reshape(shape)) for name, shape in shapes.items()}


def _described(shape: tuple[int, ...]) -> Tensor:
    return described_tensors({"": shape})[""]


def _width(settings: ModelConfig, projection: str) -> int:
    """Columns of a projection's matrix."""
    return (attention_shapes(settings) | mlp_shapes(settings))[f"{projection}.weight"][1]


def _exported(cell: nn.Cell, arguments: Sequence[Tensor]) -> list[Node]:
    mode = mindspore.get_context("mode")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step"
        try:
            mindspore.export(cell, *arguments, file_name=str(file), file_format="MINDIR")
        finally:
            mindspore.set_context(mode=mode)
        return read_nodes(file.with_suffix(".mindir"))


def read_nodes(file: Path) -> list[Node]:
    """The operators in an exported file, without what only arranges values."""
    from mindspore.train import mind_ir_pb2

    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(file.read_bytes())
    graphs = (model.graph, *model.functions)
    dtype_name = mind_ir_pb2.TensorProto.DataType.Name
    known: dict[str, tuple[str, ...]] = {}
    for graph in graphs:
        for tensor in graph.parameter if graph is model.graph else ():
            known[tensor.name] = (dtype_name(tensor.data_type).lower(),)
        for value in graph.input:
            known[value.name] = tuple(dtype_name(tensor.data_type).lower() for tensor in value.tensor)
    found = []
    for graph in graphs:
        for node in graph.node:
            operator = node.op_type.split(":")[-2] if ":" in node.op_type else node.op_type
            inputs = tuple(dtype for name in node.input for dtype in known.get(name, ()))
            for name in node.output:
                known[name] = inputs if operator == "MakeTuple" else _dtypes(node, dtype_name)
            if operator not in _NO_ARITHMETIC:
                found.append(Node(operator, inputs))
    return found


def _dtypes(node: Any, dtype_name: Any) -> tuple[str, ...]:
    """Of what a node gives, where that is one tensor."""
    return tuple(
        dtype_name(tensor.data_type).lower()
        for attribute in node.attribute
        if attribute.name in ("shape", "value")
        for tensor in attribute.tensors
    )
