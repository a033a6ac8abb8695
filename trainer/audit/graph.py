"""Builds the graph of a training step with MindSpore's front end, and reads it from the exported file.

`mindspore.export` runs the whole front end (types, shapes, gradients, optimizations) and selects no kernels, so an
Ascend's graph can be built on any machine. Weights have only shapes and dtypes: no memory is allocated for them.

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
from trainer.models.block import Block, EmbeddingMapping, Head, MtpMerge
from trainer.models.decoder import DecoderForward
from trainer.models.inputs import InputBuilder, ModelInputs
from trainer.models.moe import MoeLayer
from trainer.models.spec.adapters import layer_targets
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import is_buffer
from trainer.models.spec.shapes import all_shapes, attention_shapes, dropped_projections, mlp_shapes
from trainer.semi_auto.graph_parts import graph_parts

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig
    from trainer.ops.kernel_set import KernelSet

_NO_ARITHMETIC = ("Constant", "MakeTuple", "TupleGetItem", "Depend", "Load", "UpdateState", "Return")


class Node(NamedTuple):
    """One operator of a graph."""

    operator: str
    inputs: tuple[str, ...]
    """The dtypes of its input tensors; the tensors of a list follow each other."""


class FunctionalDecoder(DecoderForward):
    """A decoder as one function of its inputs and weights: an exported file would contain the values of Parameters.

    The routing must be part of the graph (`use_gmm` on Ascend), because the host does nothing while a graph runs.

    Args:
        tokens: N of a micro-batch, which determines the expert capacity.
        layers: Numbers of the layers, with those of MTP modules last. Default None: all.
    """

    def __init__(
        self, settings: ModelConfig, kernels: KernelSet, tokens: int, layers: Sequence[int] | None = None
    ) -> None:
        spec = model_spec(settings)
        numbers: Sequence[int] = range(len(spec.layers))
        if layers is not None:
            numbers = layers
        modules = sum(number in spec.module_layers for number in numbers)
        super().__init__(settings, len(numbers) - modules, modules)
        self.layers = nn.CellList([_Layer(settings, kernels, layer, tokens) for layer in numbers])
        self.merges = nn.CellList([MtpMerge(settings, kernels) for _ in range(modules)])
        self.heads = nn.CellList([Head(settings, kernels) for _ in range(1 + modules)])
        self.maps = settings.maps_embedding
        self.mapping = EmbeddingMapping(kernels)
        self.gather_rows = kernels.gather_rows

    def construct(
        self,
        inputs: tuple,
        tables: tuple,
        masks: tuple,
        sequence_weights: tuple,
        mtp: tuple,
        dropped: tuple,
        weights: tuple,
    ) -> Tensor:
        """Computes the loss to minimise: a sum, which the caller divides by the number of loss tokens.

        Args:
            inputs: ids_N, labels_N, valid_N1 of `ModelInputs`.
            tables, masks: The fields `tables` and `mask` of `ModelInputs`.
            sequence_weights: The field of `ModelInputs`; empty for a dense model.
            mtp: The three tensors of `MtpInputs` for each module.
            dropped: For each layer three dropout masks or None, and the masks of its adapters.
            weights: The fields of `GraphParts`.
        """
        call = (inputs, mtp, weights, (tables, masks, sequence_weights), dropped)
        return self.losses(inputs[0], self.mtp_modules, call)[0]

    # Every call site has its own cell: see trainer/ops/__init__.py.

    def run_embedding(self, ids_N: Tensor, call: tuple) -> Tensor:
        """Looks up tokens, [N, D]."""
        weight_VE, matrix_DE = call[2][0]
        x_NE = self.gather_rows(weight_VE, ids_N)
        return self.mapping(x_NE, matrix_DE) if self.maps else x_NE

    def run_layer(self, number: int, x_ND: Tensor, call: tuple) -> tuple:
        """Runs a layer; see `_Layer` for the results."""
        _, _, weights, shared, dropped = call
        return self.layers[number](x_ND, shared, dropped[number], *weights[1][number])

    def run_merge(self, module: int, x_ND: Tensor, call: tuple) -> Tensor:
        """Computes the input of an MTP module's block, [N, D]."""
        _, mtp, weights, _, _ = call
        return self.merges[module](self.run_embedding(mtp[module][0], call), x_ND, *weights[2][module])

    def run_head(self, number: int, x_ND: Tensor, call: tuple) -> Tensor:
        """Computes the loss of the main model (0) or of MTP module `number` - 1."""
        inputs, mtp, weights, _, _ = call
        labels = inputs if number == 0 else mtp[number - 1]
        norm_D, weight_VE, mapping = weights[3][number]
        return self.heads[number](x_ND, norm_D, weight_VE, labels[1], labels[2], mapping)


class _Layer(nn.Cell):
    """(x_ND, (tables, masks, sequence weights), dropout masks, weights of the block, weights of the experts) -> x_ND,
    auxiliary loss, z-loss."""

    def __init__(self, settings: ModelConfig, kernels: KernelSet, layer: int, tokens: int) -> None:
        super().__init__()
        self.has_experts = settings.is_moe_layer(layer)
        part = "attention" if self.has_experts else "block"
        window = kernels.window(settings, layer)
        is_rotated = model_spec(settings).layers[layer].attention.is_rotated
        self.block = Block(settings, kernels, part, window, is_rotated=is_rotated)
        if settings.experts is not None and self.has_experts:
            self.experts = MoeLayer(settings, kernels, compiled=False)
            self.capacity = settings.experts.capacity(tokens)

    def construct(self, x_ND: Tensor, shared: tuple, dropped: tuple, block: tuple, experts: tuple) -> tuple:
        """Returns x_ND after the layer, and the auxiliary loss and the z-loss of a MoE layer."""
        tables, masks, sequence_weights = shared
        if not self.has_experts:
            x_ND = self.block(x_ND, *tables, *masks, dropped[0], dropped[1], dropped[2], *block, *dropped[3:])
            return x_ND, None, None
        x_ND = self.block(x_ND, *tables, *masks, dropped[0], dropped[1], None, *block, *dropped[3:])
        return self.experts(x_ND, experts, sequence_weights, dropped[2], self.capacity)


class StepGraph(nn.Cell):
    """Computes loss and gradients of a training step from flat arguments.

    Args:
        structure: The arguments of the decoder, with each tensor replaced by its number among the flat arguments.
        trained: The numbers of the tensors whose gradients are computed; if empty, only the loss is computed.
    """

    def __init__(self, decoder: FunctionalDecoder, structure: tuple, trained: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.forward = _Flat(decoder, structure)
        self.trained = trained
        self.step = mindspore.value_and_grad(self.forward, trained) if trained else self.forward

    def construct(self, *arguments: Tensor) -> Tensor:
        return self.step(*arguments)


class _Flat(nn.Cell):
    """Calls the decoder with flat arguments."""

    def __init__(self, decoder: FunctionalDecoder, structure: tuple) -> None:
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.structure = structure

    def construct(self, *arguments: Tensor) -> Tensor:
        filled = ()
        for group in self.structure:
            filled += (self.fill(group, arguments),)
        return self.decoder(*filled)

    def fill(self, group: tuple, arguments: tuple[Tensor, ...]) -> tuple:
        """Replaces numbers in a structure by the arguments."""
        filled = ()
        for item in group:
            if item is None:
                filled += (None,)
            elif isinstance(item, int):
                filled += (arguments[item],)
            else:
                filled += (self.fill(item, arguments),)
        return filled


def flat_arguments(
    settings: ModelConfig, kernels: KernelSet, inputs: ModelInputs, layers: Sequence[int], weights: Mapping[str, Tensor]
) -> tuple[list[Tensor], tuple, dict[int, str]]:
    """Returns the arguments of a `StepGraph`, their structure, and for the number of each weight its name."""
    arguments: list[Tensor] = []
    argnums: dict[str, int] = {}

    def put(item: Any) -> Any:
        """Returns the structure of `item`, with the place of each tensor in `arguments`."""
        if isinstance(item, Tensor):
            arguments.append(item)
            return len(arguments) - 1
        if item is None:
            return None
        return tuple(map(put, item))

    structure = [put(group) for group in _input_groups(settings, kernels, inputs, layers)]

    def argnum_of(name: str) -> int | None:
        if name in weights and name not in argnums:
            argnums[name] = put(weights[name])
        return argnums.get(name)

    structure.append(_as_tuples(graph_parts(settings, argnum_of, layers)))
    return arguments, tuple(structure), {argnum: name for name, argnum in argnums.items()}


def _as_tuples(parts: Any) -> Any:
    """Converts named tuples to tuples, which a graph can take."""
    if isinstance(parts, tuple):
        return tuple(map(_as_tuples, parts))
    return parts


def export_step(
    settings: ModelConfig, kernels: KernelSet, layers: Sequence[int], trained: frozenset[str], rows: int, length: int
) -> list[Node]:
    """Returns the operators of a training step of a model that has only these layers.

    Args:
        trained: The names of the weights whose gradients the step computes.
        rows, length: The number of sequences of a micro-batch, and of tokens of a sequence.
    """
    settings = settings.model_copy(update={"seq_length": length})  # the kernels of an Ascend rely on it
    zeros_BT = np.zeros((rows, length), np.int32)
    shapes = all_shapes(settings)
    inputs = InputBuilder(settings, kernels)(Batch(zeros_BT, zeros_BT, zeros_BT, zeros_BT))
    arguments, structure, names = flat_arguments(settings, kernels, inputs, layers, described_tensors(shapes))
    argnums = tuple(argnum for argnum, name in names.items() if name in trained)
    step = StepGraph(FunctionalDecoder(settings, kernels, rows * length, layers), structure, argnums)
    mode = mindspore.get_context("mode")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step"
        try:
            mindspore.export(step, *arguments, file_name=str(file), file_format="MINDIR")
        finally:
            mindspore.set_context(mode=mode)
        return read_nodes(file.with_suffix(".mindir"))


def trained_names(settings: ModelConfig, frozen: frozenset[str]) -> frozenset[str]:
    """Returns the weights whose gradients a step computes."""
    return frozenset(name for name in all_shapes(settings) if name not in frozen and not is_buffer(name))


def _input_groups(
    settings: ModelConfig, kernels: KernelSet, inputs: ModelInputs, layers: Sequence[int]
) -> Iterator[Any]:
    """Yields the arguments of `FunctionalDecoder` before the weights."""
    yield inputs.ids_N, inputs.labels_N, inputs.valid_N1
    yield inputs.tables
    yield inputs.mask
    yield inputs.sequence_weights or ()
    mtp = [layer - settings.num_layers for layer in layers if layer >= settings.num_layers]
    yield [tuple(inputs.mtp[module]) for module in mtp]
    yield [_dropout_masks(settings, kernels, inputs, layer) for layer in layers]


def _dropout_masks(settings: ModelConfig, kernels: KernelSet, inputs: ModelInputs, layer: int) -> list[Tensor | None]:
    """Returns the dropout masks of a layer: scores, attention, MLP and adapters; None where nothing is dropped."""
    tokens = inputs.ids_N.shape[0]
    stream = None
    if settings.hidden_dropout:
        stream = kernels.mask_form((tokens, settings.hidden_size))
    scores = None
    if settings.attention_dropout:
        scores = kernels.mask_form(inputs.scores_shape, of_scores=True)
    columns = attention_shapes(settings) | mlp_shapes(settings)
    forms = [scores, stream, stream]
    targets = layer_targets(settings, layer)
    for name in dropped_projections(settings):
        form = None
        if name in targets:
            form = kernels.mask_form((tokens, columns[f"{name}.weight"][1]))
        forms.append(form)
    masks = []
    for form in forms:
        if form is None:
            masks.append(None)
        else:
            masks.append(described_tensors({"": form[0]}, form[1])[""])
    return masks


def described_tensors(shapes: Mapping[str, tuple[int, ...]], dtype: str = "float32") -> dict[str, Tensor]:
    """Returns tensors of these shapes that take no memory: they share pages that are never written."""
    pages = np.zeros(max((math.prod(shape) for shape in shapes.values()), default=0), dtype)
    return {name: Tensor.from_numpy(pages[: math.prod(shape)].reshape(shape)) for name, shape in shapes.items()}


def read_nodes(file: Path) -> list[Node]:
    """Returns the operators in an exported file, without those that only pass on values."""
    from mindspore.train import mind_ir_pb2

    model = mind_ir_pb2.ModelProto()
    model.ParseFromString(file.read_bytes())
    graphs = (model.graph, *model.functions)
    dtype_name = mind_ir_pb2.TensorProto.DataType.Name
    dtypes: dict[str, tuple[str, ...]] = {}
    for tensor in model.graph.parameter:
        dtypes[tensor.name] = (dtype_name(tensor.data_type).lower(),)
    for graph in graphs:
        for value in graph.input:
            dtypes[value.name] = tuple(dtype_name(tensor.data_type).lower() for tensor in value.tensor)
    nodes = []
    for graph in graphs:
        for node in graph.node:
            operator = node.op_type
            if ":" in operator:
                operator = operator.split(":")[-2]
            inputs = tuple(dtype for name in node.input for dtype in dtypes.get(name, ()))
            outputs = inputs
            if operator != "MakeTuple":
                outputs = _output_dtype(node, dtype_name)
            for name in node.output:
                dtypes[name] = outputs
            if operator not in _NO_ARITHMETIC:
                nodes.append(Node(operator, inputs))
    return nodes


def _output_dtype(node: Any, dtype_name: Any) -> tuple[str, ...]:
    """Returns the dtype of a node's output if it is one tensor, else nothing."""
    return tuple(
        dtype_name(tensor.data_type).lower()
        for attribute in node.attribute
        if attribute.name in ("shape", "value")
        for tensor in attribute.tensors
    )
