"""Sees what a training step computes on this rank: the observers that the step and the decoder's parts call.

Between the parts of a layer the residual stream and its gradient are summarized. On a device the stream passes through
a cell there, which returns its input, and in its backward pass the gradient as it is. Native layers also show the
arrays that they save, which are those before the sums over tensor-parallel ranks.

Legend: B sequences of T tokens, N tokens of a rank, D hidden.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor, nn
from mindspore import dtype as mstype

from trainer.arrays.memory import host_array
from trainer.arrays.passes import Variable
from trainer.models.spec.build import model_spec
from trainer.models.spec.names import layer_prefix
from trainer.trace.names import EMBEDDED, ROUTING, layer_name, saved_tensors, stream_names
from trainer.trace.record import Key, Kind, TraceWriter
from trainer.trace.sketch import Place, place_of_shard, row_ranges, whole_place

if TYPE_CHECKING:
    from trainer.models.inputs import ModelInputs, RouterStatistics, Stream
    from trainer.models.spec.model import LayerSpec
    from trainer.step.train_step import TrainStep

_FULL_DTYPES = {np.dtype(np.uint16): "bfloat16", np.dtype(np.float16): "float16"}


class SeenStream(nn.Cell):
    """x -> x; calls `see` with x, and `see_gradient` with the gradient of x. Each call needs a new cell."""

    def __init__(self, see: Callable[[Tensor], None], see_gradient: Callable[[Tensor], None]) -> None:
        super().__init__(auto_prefix=False)
        self.see = see
        self.see_gradient = see_gradient

    def construct(self, x_ND: Tensor) -> Tensor:
        """Shows x; MindSpore runs this without recording it."""
        self.see(x_ND)
        return x_ND

    def bprop(self, x_ND: Tensor, out_ND: Tensor, grad_ND: Tensor) -> tuple[Tensor]:
        """Shows the gradient, and returns it."""
        self.see_gradient(grad_ND)
        return (grad_ND,)


class TraceObserver:
    """Writes what the steps of a training compute to the folder of this rank.

    Attributes:
        step: The number of the step, from 1.
        micro_batches: The sequences of each micro-batch of this rank, by step.
    """

    def __init__(self, writer: TraceWriter, step: TrainStep) -> None:
        self.writer = writer
        self.train_step = step
        self.spec = model_spec(step.model.settings)
        self.step = 0
        self.micro_batches: list[list[list[str]]] = []
        self._passes: list[_MicroBatch] = []

    def begin_step(self) -> None:
        """Writes the weights with which the next step begins."""
        self.step += 1
        self.micro_batches.append([])
        for name, parameter in self.train_step.model.parameters_by_name.items():
            self.add_parameter("weight", name, parameter, 1.0)

    def end_step(self, losses: Mapping[str, float]) -> None:
        """Writes what the routers have chosen, and the losses and norms of the step."""
        for each in self._passes:
            each.add_choices()
        self._passes.clear()
        for name, number in losses.items():
            kind: Kind = "loss"
            if name.endswith("norm"):
                kind = "norm"
            self.writer.add(Key(self.step, kind, name), np.array([[number]], np.float32), whole_place(()))

    def micro_batch(self, number: int, batch: Any, inputs: ModelInputs, statistics: RouterStatistics) -> _MicroBatch:
        """Returns the observer of the passes of a micro-batch."""
        observer = _MicroBatch(self, batch, inputs, statistics)
        self.micro_batches[-1].append(observer.sequences)
        self._passes.append(observer)
        return observer

    def gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Writes the gradients of the step, without the loss scale."""
        for name, gradient in gradients.items():
            self.add_parameter("gradient", name, gradient, 1 / self.train_step.guards.scale)

    def add_parameter(self, kind: Kind, name: str, tensor: Tensor, factor: float) -> None:
        """Writes the shard of a parameter, or of its gradient, that this rank has."""
        array = host_array(tensor)
        place = place_of_shard(self.train_step.shard_spec(name))
        rows = sum(stop - start for start, stop in place.rows)
        matrix = array.reshape(rows, -1)
        if factor != 1:
            matrix = matrix * np.float32(factor)
        self.writer.add(Key(self.step, kind, name), matrix, place, _dtype_name(tensor))


def _dtype_name(tensor: Tensor | Variable) -> str:
    if isinstance(tensor, Variable):
        return "float32"
    return str(tensor.dtype).lower()


def _array(tensor: Tensor | Variable) -> np.ndarray:
    if isinstance(tensor, Variable):
        return tensor.asnumpy()
    return host_array(tensor)


class _MicroBatch:
    """Writes what the parts of the decoder compute for one micro-batch; see `PassObserver`.

    Attributes:
        sequences: A checksum of each sequence: of its tokens, labels and segment ids.
        rows_N: Index, among the B * T tokens, of each row that this rank computes; `stream_n` those of the residual
            stream.
    """

    def __init__(self, owner: TraceObserver, batch: Any, inputs: ModelInputs, statistics: RouterStatistics) -> None:
        self.owner = owner
        self.step = owner.step
        self.statistics = statistics
        self.length = batch.input_ids.shape[1]
        self.sequences = [
            f"{zlib.crc32(np.ascontiguousarray(np.stack(rows)).data):08x}"
            for rows in zip(batch.input_ids, batch.labels, batch.segment_ids, strict=True)
        ]
        self.rows_N = np.arange(batch.input_ids.size)
        self.is_part = inputs.rows is not None
        if inputs.rows is not None:
            self.rows_N = inputs.rows
        self.tensor_parallel = owner.train_step.model.tensor
        self.stream_n = self.rows_N
        if self.tensor_parallel is not None:
            self.stream_n = self.rows_N[self.tensor_parallel.residual_shard(len(self.rows_N))]
        self.before_ND: np.ndarray | None = None

    def stream(self, layer: int, part: str, x_ND: Stream) -> Stream:
        """Returns the residual stream; writes what a part has added to it, the stream behind a layer, and gradients."""
        if part == "input":
            self.before_ND = _array(x_ND)
            if layer > 0:
                return x_ND
            names = [EMBEDDED]
        else:
            names = stream_names(self._layer(layer), layer, part)

        def see(x_ND: Stream) -> None:
            """Writes the stream, and what was added to it since it was last seen."""
            array_ND = _array(x_ND)
            dtype = _dtype_name(x_ND)
            for name in names:
                if part in ("attention", "mlp", "experts") and name != layer_name(layer):
                    assert self.before_ND is not None
                    added_ND = array_ND - self.before_ND
                    self.add("activation", name, added_ND, dtype, scale_of=array_ND)
                else:
                    self.add("activation", name, array_ND, dtype)
            self.before_ND = array_ND

        def see_gradient(grad_ND: Stream) -> None:
            """Writes the gradient of the stream, which is that of each of these outputs."""
            factor = np.float32(1 / self.owner.train_step.guards.scale)
            self.add("activation gradient", names[-1], _array(grad_ND) * factor, _dtype_name(grad_ND))

        if isinstance(x_ND, Variable):
            see(x_ND)
            x_ND.watch(lambda grad_ND: see_gradient(Variable(grad_ND)))
            return x_ND
        return SeenStream(see, see_gradient)(x_ND)

    def saved(self, layer: int, arrays: Mapping[str, Any]) -> None:
        """Writes the results of the heads, and of the gate and up projections."""
        for part in ("attention", "mlp"):
            if isinstance(arrays.get(part), dict):  # a whole block
                self.saved(layer, arrays[part])
        for key, (name, width) in saved_tensors(self._layer(layer)).items():
            if key in arrays:
                array = arrays[key]
                dtype = _FULL_DTYPES.get(array.dtype, "float32")
                self.add("activation", layer_prefix(layer) + name, array, dtype, width=width)

    def loss(self, head: int, sum_: Tensor | Variable) -> None:
        """Writes the sum of the token losses of the micro-batch; context-parallel ranks have only parts of it."""
        if self.is_part:
            return
        name = "loss_sum"
        if head:
            name = f"loss_sum.mtp_{head}"
        key = Key(self.step, "loss", name, "+".join(self.sequences))
        self.owner.writer.add(key, _array(sum_).reshape(1, 1), whole_place(()))

    def add_choices(self) -> None:
        """Writes the experts that each router has chosen, ascending for each token."""
        rows_n = self.stream_n
        if self.tensor_parallel is not None and not self.tensor_parallel.sequence_parallel:
            rows_n = self.rows_N[self.tensor_parallel.token_shard(len(self.rows_N))]
        for layer, routing, _ in self.statistics.routings:
            experts_Nk = routing[0]
            if isinstance(experts_Nk, Tensor):
                experts_Nk = experts_Nk.astype(mstype.int32).asnumpy()
            chosen_Nk = np.sort(experts_Nk.reshape(len(rows_n), -1), axis=1).astype(np.float32)
            self.add("choice", layer_prefix(layer) + ROUTING, chosen_Nk, "int32", rows_n=rows_n)

    def add(
        self, kind: Kind, name: str, array_NC: np.ndarray, dtype: str, *, width: int | None = None,
        scale_of: np.ndarray | None = None, rows_n: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Writes the rows of each sequence.

        Args:
            width: Columns of the unsharded array, of which tensor-parallel ranks have shards; None: there are no more.
            scale_of: See `Piece.scale`.
        """
        columns = slice(0, array_NC.shape[1])
        if width is not None and width != array_NC.shape[1]:
            assert self.tensor_parallel is not None
            columns = self.tensor_parallel.column_shard(width)
        if rows_n is None:
            rows_n = self.stream_n
            if width is not None:
                rows_n = self.rows_N
        shape = self.length, width or array_NC.shape[1]
        for number, sequence in enumerate(self.sequences):
            selected = np.flatnonzero(rows_n // self.length == number)
            if not len(selected):
                continue
            part = slice(int(selected[0]), int(selected[-1]) + 1)
            place = Place(shape, row_ranges(rows_n[part] % self.length), (columns.start, columns.stop))
            scale = None
            if scale_of is not None:
                scale = float(np.linalg.norm(scale_of[part].astype(np.float64)))
            self.owner.writer.add(Key(self.step, kind, name, sequence), array_NC[part], place, dtype, scale)

    def _layer(self, layer: int) -> LayerSpec:
        return self.owner.spec.layers[layer]
