"""Pipeline parallelism in explicit mode: a stage computes its model chunks in the order of a schedule.

Several micro-batches are in flight, and their backward passes come in any order. On a CPU each forward pass of a chunk
has a tape. On a device each chunk is one cell for all micro-batches: MindSpore records a cell's forward pass under the
cell and the identity of its input, and `GradOperation` of the same cell and input then runs the backward pass of that
call only.

The minimised loss is a sum over the stages: each adds the losses of its routers, and the last one the losses of tokens.
A stage starts a backward pass from the gradient of its activations, which the next stage has sent, and from the factor
of its part of the sum.

Legend: N tokens, D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

from trainer.arrays.memory import host_array
from trainer.arrays.passes import Tape, Variable, shared_tensor
from trainer.config.stages import chunk_layers, training_schedule
from trainer.models.array_parts import ArrayParts
from trainer.models.decoder import DecoderCall
from trainer.models.generate import StageChunk
from trainer.models.inputs import LossSums, ModelInputs
from trainer.optim.freeze import trained_shapes
from trainer.parallel.layout import model_layout
from trainer.parallel.mesh import Degrees
from trainer.parallel.schedule import Action, Schedule, forward_only
from trainer.parallel.stage_link import DeviceLink, StageLink

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.models.decoder import Decoder
    from trainer.parallel.collectives import ProcessGroup

T = TypeVar("T")
Passes: TypeAlias = Generator[tuple[int, int], Tensor, T]
"""Yields the stage that sends the next tensor and its number of tokens, is sent that tensor, and returns its result."""


OnForward: TypeAlias = Callable[[int, LossSums, DecoderCall, bool], None]
"""(micro-batch, sums of losses of a chunk, its call, whether it is the last chunk of the stage) -> None"""


class ModelChunk(NamedTuple):
    """A chunk of consecutive layers of the decoder."""

    layers: Sequence[int]
    is_first: bool  # it looks up the embedding
    is_last: bool  # it has head, losses and MTP modules
    trained: Sequence[str]  # names of its trainable parameters
    reached: bool  # an earlier chunk is trainable: only then does its input need a gradient

    @property
    def trains(self) -> bool:
        """Returns whether it has a backward pass."""
        return self.reached or bool(self.trained)

    @property
    def is_empty(self) -> bool:
        """Returns whether it has nothing to compute: with `offset` a chunk may have no layer."""
        return not (self.layers or self.is_first or self.is_last)


def model_chunks(
    settings: ModelConfig, chunk_layers: Sequence[Sequence[Sequence[int]]], trained: Collection[str]
) -> list[list[ModelChunk]]:
    """Returns the chunks of each stage, [stages][chunks].

    Args:
        chunk_layers: See `trainer.config.stages.chunk_layers`.
        trained: Names of the trainable parameters.
    """
    layers = [row[chunk] for chunk in range(len(chunk_layers[0])) for row in chunk_layers]
    layout = model_layout(settings, Degrees(), stage_layers=layers)
    chunks: list[ModelChunk] = []
    reached = False
    for number, chunk in enumerate(layers):
        names = tuple(name for name, one in layout.parameters.items() if number in one.stages and name in trained)
        chunks.append(ModelChunk(chunk, number == 0, number == len(layers) - 1, names, reached))
        reached = chunks[-1].trains
    stages = len(chunk_layers)
    return [chunks[stage::stages] for stage in range(stages)]


class ChunkPass(NamedTuple):
    """A forward pass of a chunk of the decoder.

    Attributes:
        x: The input, x_ND or ids_N.
        output_ND: The residual stream for the next chunk; None after the last one.
        has_losses: Whether the chunk adds to the minimised loss.
        sums: Its losses, with None for other chunks'.
        recorded: On a CPU the tape, and the input, result and loss.
    """

    x: Tensor
    output_ND: Tensor | None
    has_losses: bool = False
    sums: LossSums = LossSums(None, None)
    recorded: tuple[Tape | None, Tensor | Variable, Variable, Variable | None] | None = None


class ArrayChunk:
    """Runs the native CPU layers of a chunk."""

    def __init__(self, model: Decoder, part: ModelChunk) -> None:
        self.model = model
        self.part = part
        self.targets = model.compute_weights.grad_targets(part.trained)

    def run_forward(self, x: Tensor, call: DecoderCall) -> ChunkPass:
        """Runs a forward pass, in a training on a tape."""
        part = self.part
        start: Tensor | Variable = x
        if call.statistics is not None and part.trains:
            call = call._replace(tape=Tape())
        if not part.is_first:
            tape = None
            if part.reached:
                tape = call.tape
            start = Variable(host_array(x), tape)
        modules = self.model.count_active_modules(call)
        end, (total, *others) = self.model.run_layers(start, part.layers, part.is_first, part.is_last, modules, call)
        output_ND = None
        if not part.is_last:
            output_ND = shared_tensor(end.asnumpy())
        return ChunkPass(x, output_ND, total is not None, LossSums(None, *others), (call.tape, start, end, total))

    def run_backward(
        self, one: ChunkPass, grad_ND: Tensor | None, factor: Tensor
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Returns the gradient of the input, if an earlier chunk is trained, and those of the weights.

        Args:
            grad_ND: The gradient of the output; None if there is none.
            factor: Factor of the minimised loss.
        """
        assert one.recorded is not None
        tape, start, end, total = one.recorded
        assert tape is not None
        if grad_ND is not None:
            end.add_gradient(host_array(grad_ND))
        if total is not None:
            total.add_gradient(host_array(factor))
        gradients = tape.backward(self.targets)
        x_grad_ND = None
        if self.part.reached:
            assert isinstance(start, Variable)
            x_grad_ND = shared_tensor(start.take_gradient())
        return x_grad_ND, gradients


class ChunkCell(nn.Cell):
    """A chunk of the decoder: x_ND (ids_N for the first one) -> x_ND, its summand of the minimised loss, or both.

    The other inputs of a pass are set before the call, because MindSpore finds a pass by the arguments of its call.
    """

    def __init__(self, model: Decoder, part: ModelChunk, trains: bool) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.part = part
        self.call: DecoderCall | None = None
        self.sums: LossSums | None = None
        self.gradients: Callable | None = None
        self.set_grad(trains)
        if trains:
            targets = model.compute_weights.grad_targets(part.trained)
            operation = ops.GradOperation(get_all=part.reached, get_by_list=bool(targets), sens_param=True)
            if targets:
                self.gradients = operation(self, ParameterTuple(targets))
            else:
                self.gradients = operation(self)

    def construct(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Runs the layers of a chunk; returns its result, and the losses so far if there are any."""
        part = self.part
        assert self.call is not None
        modules = self.model.count_active_modules(self.call)
        x_ND, (total, *others) = self.model.run_layers(x, part.layers, part.is_first, part.is_last, modules, self.call)
        self.sums = LossSums(None, *others)
        if part.is_last:
            return total
        return x_ND if total is None else (x_ND, total)

    def run_forward(self, x: Tensor, call: DecoderCall) -> ChunkPass:
        """Runs a forward pass, which MindSpore records in a training."""
        self.call = call
        result = self(x)
        sums = self.sums
        self.call = self.sums = None
        assert sums is not None
        if self.part.is_last:
            return ChunkPass(x, None, True, sums)
        if isinstance(result, tuple):
            return ChunkPass(x, result[0], True, sums)
        return ChunkPass(x, result, False, sums)

    def run_backward(
        self, one: ChunkPass, grad_ND: Tensor | None, factor: Tensor
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Does what `ArrayChunk.run_backward` does."""
        assert self.gradients is not None
        starts = [factor] * one.has_losses
        if grad_ND is not None:
            starts.insert(0, grad_ND)
        sens = starts[0]
        if len(starts) > 1:
            sens = tuple(starts)
        gradients = self.gradients(one.x, sens)
        if not self.part.reached:
            return None, list(gradients)
        inputs = gradients
        weights = ()
        if self.part.trained:
            inputs, weights = gradients
        if isinstance(inputs, tuple):
            inputs = inputs[0]
        return inputs, list(weights)


class Stage:
    """The chunks of one pipeline stage; the model has only their parameters."""

    def __init__(
        self, model: Decoder, parts: Sequence[ModelChunk], schedule: Callable[[int], Schedule], stage: int
    ) -> None:
        self.model = model
        self.parts = parts
        self.schedule = schedule
        self.stage = stage
        if isinstance(model.parts, ArrayParts):
            self.chunks: Sequence[ArrayChunk | ChunkCell] = [ArrayChunk(model, part) for part in parts]
            self.evaluated = self.chunks
        else:
            self.chunks = [ChunkCell(model, part, part.trains) for part in parts]
            self.evaluated = [ChunkCell(model, part, trains=False) for part in parts]

    def train(
        self, micro_batches: int, make_call: Callable[[int], DecoderCall], factor: Tensor,
        send: Callable[[int, Tensor], None], on_forward: OnForward, totals: dict[str, Tensor],
        local_gradient: Callable[[str, Tensor], Tensor],
    ) -> Passes[None]:  # fmt: skip
        """Runs all forward and backward passes of a step.

        Args:
            make_call: Number of a micro-batch -> its inputs; called once for each.
            factor: Factor of the minimised loss.
            send: See `StageLink.send`.
            on_forward: Called after each forward pass of a chunk.
            totals: Receives the sums of the gradients over the micro-batches, by the names of the parameters.
            local_gradient: (name of a parameter, its gradient) -> the part of the gradient to add up.
        """
        schedule = self.schedule(micro_batches)
        last = len(self.parts) - 1
        in_flight: dict[tuple[int, int], ChunkPass] = {}
        calls: dict[int, DecoderCall] = {}
        tokens = 0  # of a micro-batch of the step
        for action in schedule.actions[self.stage]:
            number = action.micro_batch
            chunk = action.chunk
            part = self.parts[chunk]
            message = schedule.input_message(self.stage, action)
            receiver = schedule.receiver(self.stage, action)
            if action.kind == "backward":
                if part.trains:
                    grad_ND = None
                    if message is not None:
                        grad_ND = yield message.sender, tokens
                    one = in_flight.pop((number, chunk))
                    grad_ND = self._add_gradients(chunk, one, grad_ND, factor, totals, local_gradient)
                    if part.reached and receiver is not None:
                        send(receiver, grad_ND)
                continue
            if chunk == 0:
                calls[number] = make_call(number)
                tokens = calls[number].inputs.ids_N.shape[0]
            call = calls[number]
            if chunk == last:
                del calls[number]
            x = call.inputs.ids_N
            if message is not None:
                x = yield message.sender, tokens
            one = self._run_forward(self.chunks[chunk], x, call)
            if part.trains:
                in_flight[number, chunk] = one
            on_forward(number, one.sums, call, chunk == last)
            if receiver is not None:
                send(receiver, one.output_ND)

    def evaluate(self, inputs: ModelInputs, send: Callable[[int, Tensor], None]) -> Passes[LossSums]:
        """Runs the forward passes of one micro-batch; returns its sums of losses on the last stage, None elsewhere."""
        schedule = forward_only(self.schedule(1).stages, 1, len(self.parts))
        sums = LossSums(None, None)
        for action in schedule.actions[self.stage]:
            message = schedule.input_message(self.stage, action)
            receiver = schedule.receiver(self.stage, action)
            x = inputs.ids_N
            if message is not None:
                x = yield message.sender, inputs.ids_N.shape[0]
            one = self._run_forward(self.evaluated[action.chunk], x, DecoderCall(inputs))
            sums = one.sums
            if receiver is not None:
                send(receiver, one.output_ND)
        return sums

    @staticmethod
    def _run_forward(chunk: ArrayChunk | ChunkCell, x: Tensor, call: DecoderCall) -> ChunkPass:
        if chunk.part.is_empty:
            return ChunkPass(x, x)
        return chunk.run_forward(x, call)

    def _add_gradients(
        self, chunk: int, one: ChunkPass, grad_ND: Tensor | None, factor: Tensor, totals: dict[str, Tensor],
        local_gradient: Callable[[str, Tensor], Tensor],
    ) -> Tensor | None:  # fmt: skip
        """Runs the backward pass of the forward pass with this input; returns the input's gradient, if it has one."""
        part = self.parts[chunk]
        if part.is_empty:
            return grad_ND
        x_grad_ND, gradients = self.chunks[chunk].run_backward(one, grad_ND, factor)
        for name, gradient in zip(part.trained, gradients, strict=True):
            local = local_gradient(name, gradient)
            if name in totals:
                local = ops.add(totals[name], local)
            totals[name] = local
        return x_grad_ND


@dataclass(frozen=True)
class Pipeline:
    """A stage with its links to the other stages.

    Attributes:
        group: One rank of each stage, in the order of stages.
    """

    stage: Stage
    link: StageLink | DeviceLink
    group: ProcessGroup

    def train(
        self, micro_batches: int, make_call: Callable[[int], DecoderCall], factor: Tensor, on_forward: OnForward,
        names: Sequence[str], local_gradient: Callable[[int, Tensor], Tensor],
    ) -> tuple[list[Tensor], float | None]:  # fmt: skip
        """Runs all passes of a step, see `Stage.train`.

        Args:
            names: The parameters whose gradients are returned.
            local_gradient: (index of a name, the gradient) -> the part of the gradient to add up.

        Returns:
            The gradients summed over the micro-batches, and the share of the time in which this stage waited for
            others; None on a device, for which the host does not wait.
        """
        began = time.perf_counter()
        totals = dict[str, Tensor]()
        places = {name: place for place, name in enumerate(names)}

        passes = self.stage.train(
            micro_batches, make_call, factor, self.link.send, on_forward, totals,
            lambda name, gradient: local_gradient(places[name], gradient),
        )
        _, waited = self._run(passes)
        gradients = [totals.pop(name) for name in names]
        if not self.group.on_host:
            return gradients, None
        for gradient in gradients:
            gradient.asnumpy()  # waits until it is computed
        share = waited / (time.perf_counter() - began)
        return gradients, share

    def generation_chunks(self) -> list[StageChunk]:
        """Returns the chunks of this stage on a CPU, for a `trainer.models.generate.Generator`."""
        assert isinstance(self.link, StageLink)
        schedule = self.stage.schedule(1)
        chunks = []
        for chunk, part in enumerate(self.stage.parts):
            action = Action("forward", 0, chunk)
            message = schedule.input_message(self.stage.stage, action)
            receiver = schedule.receiver(self.stage.stage, action)
            receive = None if message is None else partial(self.link.receive_array, message.sender)
            send = None if receiver is None else partial(self.link.send_array, receiver)
            chunks.append(StageChunk(part.layers, receive, send))
        return chunks

    def share_logits(self, logits_BV: np.ndarray | None) -> np.ndarray:
        """Sends the logits of the last stage to all stages of a CPU; returns them. `logits_BV` is None elsewhere."""
        assert isinstance(self.link, StageLink)
        last = self.group.size - 1
        if logits_BV is None:
            return self.link.receive_array(last)
        for stage in range(last):
            self.link.send_array(stage, logits_BV)
        return logits_BV

    def evaluate(self, inputs: ModelInputs) -> LossSums:
        """Computes a batch of an evaluation, together with all stages; returns its losses on the last stage."""
        sums, _ = self._run(self.stage.evaluate(inputs, self.link.send))
        return sums

    def _run(self, passes: Passes[T]) -> tuple[T, float]:
        """Runs the passes of this stage; returns their result and the seconds in which it waited for other stages."""
        waited = 0.0
        try:
            awaited = next(passes)
            while True:
                began = time.perf_counter()
                tensor = self.link.receive(*awaited)
                waited += time.perf_counter() - began
                awaited = passes.send(tensor)
        except StopIteration as end:
            if isinstance(self.link, DeviceLink):
                self.link.wait_for_sends()
            return end.value, waited


def build_pipeline(config: Config, model: Decoder, group: ProcessGroup, on_one_host: bool = True) -> Pipeline:
    """Connects the stages; all ranks of the job must call this.

    Args:
        model: Has the parameters of its stage.
        group: One rank of each stage.
    """
    trained = {}
    if config.trains:
        trained = trained_shapes(config)
    parts = model_chunks(config.decoder, chunk_layers(config), trained)[group.rank]
    schedule = partial(training_schedule, config, group.size)
    link: StageLink | DeviceLink
    if group.on_host:
        link = StageLink(group, on_one_host)
    else:
        shares = 1
        if model.tensor is not None and model.tensor.sequence_parallel:
            shares = model.tensor.group.size
        link = DeviceLink(group, config.decoder.pp_interleave_num, config.decoder.hidden_size, shares)
    return Pipeline(Stage(model, parts, schedule, group.rank), link, group)
