"""A pipeline in explicit mode: a stage computes its chunks of the decoder in the order of a schedule.

Each chunk is one cell for all micro-batches. MindSpore keeps what a cell's forward pass has recorded under the cell and
the identity of its input, and `GradOperation` of the same cell and input then runs the backward pass of that call
alone. So several micro-batches may be under way, and their backward passes come in any order.

What is minimised is a sum over the stages: each adds the losses of its own routers, and the last one the losses of
tokens. A stage starts a backward pass from the gradient of its activations, which the next stage has sent, and from the
factor of its own part of the sum.

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

from trainer.config.stages import chunk_layers
from trainer.models.decoder import DecoderCall
from trainer.models.generate import StageChunk
from trainer.models.inputs import LossSums, ModelInputs
from trainer.optim.freeze import trained_shapes
from trainer.parallel.layout import model_layout
from trainer.parallel.mesh import Degrees
from trainer.parallel.schedule import Action, Schedule, forward_only, one_forward_one_backward
from trainer.parallel.stage_link import DeviceLink, StageLink

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.config.schema.model import ModelConfig
    from trainer.models.decoder import Decoder
    from trainer.parallel.collectives import ProcessGroup

T = TypeVar("T")
Passes: TypeAlias = Generator[tuple[int, int], Tensor, T]
"""Yields the stage that the next tensor must come from and of how many tokens it is, and is sent that tensor; returns
its result."""


Done: TypeAlias = Callable[[int, LossSums, DecoderCall, bool], None]
"""(micro-batch, sums of losses of a chunk, its call, whether it is the last chunk of the stage)"""


class ModelChunk(NamedTuple):
    """A chunk of consecutive layers of the decoder."""

    layers: Sequence[int]
    is_first: bool  # it looks up the embedding
    is_last: bool  # it has head, losses and multi-token prediction modules
    trained: Sequence[str]  # names of its parameters that are trained
    reached: bool  # whether one before it is trained: only then does its input have a gradient

    @property
    def trains(self) -> bool:
        """Whether it has a backward pass."""
        return self.reached or bool(self.trained)

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing to compute: with `offset` a chunk may have no layer."""
        return not (self.layers or self.is_first or self.is_last)


def model_chunks(
    settings: ModelConfig, chunk_layers: Sequence[Sequence[Sequence[int]]], trained: Collection[str]
) -> list[list[ModelChunk]]:
    """The chunks of each stage, [stages][chunks].

    Args:
        chunk_layers: See `trainer.config.stages.chunk_layers`.
        trained: Names of the trained parameters.
    """
    layers = [row[chunk] for chunk in range(len(chunk_layers[0])) for row in chunk_layers]
    layout = model_layout(settings, Degrees(), stage_layers=layers)
    parts = list[ModelChunk]()
    reached = False
    for number, own in enumerate(layers):
        held = layout.parameters.items()
        names = tuple(name for name, one in held if number in one.stages and name in trained)
        parts.append(ModelChunk(own, number == 0, number == len(layers) - 1, names, reached))
        reached = parts[-1].trains
    stages = len(chunk_layers)
    return [parts[stage::stages] for stage in range(stages)]


class ChunkCell(nn.Cell):
    """A chunk of the decoder: x_ND (ids_N for the first one) -> x_ND, what it adds to the minimised sum, or both.

    What else a pass needs is set before the call, because MindSpore finds a pass by the arguments of its call.
    """

    def __init__(self, model: Decoder, part: ModelChunk, trains: bool) -> None:
        super().__init__(auto_prefix=False)
        self.model = model
        self.part = part
        self.call: DecoderCall | None = None
        self.sums: LossSums | None = None
        self.set_grad(trains)

    def construct(self, x):
        part = self.part
        modules = 0 if self.call.statistics is None else self.model.mtp_modules
        x_ND, (total, *others) = self.model.run_layers(
            x, part.layers, part.is_first, part.is_last, modules, self.call
        )
        self.sums = LossSums(None, *others)
        if part.is_last:
            return total
        return x_ND if total is None else (x_ND, total)

    def pass_of(self, x: Tensor, call: DecoderCall) -> tuple[Tensor | tuple[Tensor, Tensor], LossSums]:
        """The result of a forward pass, and the sums of losses of this chunk, of which those of others are None."""
        if self.part.is_empty:
            return x, LossSums(None, None)
        self.call = call
        result = self(x)
        sums = self.sums
        self.call = self.sums = None
        return result, sums


class Stage:
    """The chunks of one stage, of a model that has their parameters."""

    def __init__(self, model: Decoder, parts: Sequence[ModelChunk], schedule: Callable[[int], Schedule], stage: int):
        self.model = model
        self.parts = parts
        self.schedule = schedule
        self.stage = stage
        self.cells = [ChunkCell(model, part, part.trains) for part in parts]
        self.evaluated = [ChunkCell(model, part, trains=False) for part in parts]
        self.gradients_of = [self._gradients_of(cell) if cell.part.trains else None for cell in self.cells]

    def _gradients_of(self, cell: ChunkCell) -> Callable:
        leaves = self.model.compute_weights.grad_targets(cell.part.trained)
        by_list = bool(leaves)
        operation = ops.GradOperation(get_all=cell.part.reached, get_by_list=by_list, sens_param=True)
        return operation(cell, ParameterTuple(leaves)) if by_list else operation(cell)

    def train(
        self,
        micro_batches: int,
        call_of: Callable[[int], DecoderCall],
        factor: Tensor,
        send: Callable[[int, Tensor], None],
        done: Done,
        totals: dict[str, Tensor],
        kept: Callable[[str, Tensor], Tensor],
    ) -> Passes[None]:
        """All forward and backward passes of a window.

        Args:
            call_of: Number of a micro-batch -> its inputs; called once for each.
            factor: Of the minimised sum.
            send: See `StageLink.send`.
            done: Called after each forward pass of a chunk.
            totals: Takes the sums of the gradients over the micro-batches, by the names of the parameters.
            kept: Name of a parameter, its gradient -> what is added up of it.
        """
        schedule = self.schedule(micro_batches)
        last = len(self.parts) - 1
        under_way: dict[tuple[int, int], tuple[Tensor, bool]] = {}
        calls: dict[int, DecoderCall] = {}
        tokens = 0  # of a micro-batch of the window
        for action in schedule.actions[self.stage]:
            number = action.micro_batch
            chunk = action.chunk
            part = self.parts[chunk]
            needed = schedule.input_message(self.stage, action)
            if action.kind == "backward":
                if part.trains:
                    x, has_own = under_way.pop((number, chunk))
                    sens = factor if needed is None else (yield needed.sender, tokens)
                    sens = (sens, factor) if has_own else sens
                    grad_ND = self._add_gradients(chunk, x, sens, totals, kept)
                    if part.reached:
                        send(schedule.receiver(self.stage, action), grad_ND)
                continue
            if chunk == 0:
                calls[number] = call_of(number)
                tokens = calls[number].inputs.ids_N.shape[0]
            call = calls.pop(number) if chunk == last else calls[number]
            x = call.inputs.ids_N if needed is None else (yield needed.sender, tokens)
            result, sums = self.cells[chunk].pass_of(x, call)
            has_own = isinstance(result, tuple)
            if part.trains:
                under_way[number, chunk] = x, has_own
            done(number, sums, call, chunk == last)
            if not part.is_last:
                send(schedule.receiver(self.stage, action), result[0] if has_own else result)

    def evaluate(self, inputs: ModelInputs, send: Callable[[int, Tensor], None]) -> Passes[LossSums]:
        """The forward passes of one micro-batch; the sums of its losses on the last stage, without them elsewhere."""
        schedule = forward_only(self.schedule(1).stages, 1, len(self.parts))
        sums = LossSums(None, None)
        for action in schedule.actions[self.stage]:
            needed = schedule.input_message(self.stage, action)
            taker = schedule.receiver(self.stage, action)
            x = inputs.ids_N if needed is None else (yield needed.sender, inputs.ids_N.shape[0])
            result, sums = self.evaluated[action.chunk].pass_of(x, DecoderCall(inputs))
            if taker is not None:
                send(taker, result)
        return sums

    def _add_gradients(
        self,
        chunk: int,
        x: Tensor,
        sens: Tensor | tuple,
        totals: dict[str, Tensor],
        kept: Callable[[str, Tensor], Tensor],
    ) -> Tensor | None:
        """The backward pass of the forward pass with this input; the gradient of the input, if it has one."""
        part = self.parts[chunk]
        grad_ND = None
        if part.is_empty:
            return sens
        found = self.gradients_of[chunk](x, sens)
        if part.reached:
            inputs, found = found if part.trained else (found, ())
            grad_ND = inputs[0] if isinstance(inputs, tuple) else inputs
        for name, whole in zip(part.trained, found, strict=True):
            gradient = kept(name, whole)
            totals[name] = ops.add(totals[name], gradient) if name in totals else gradient
        return grad_ND


@dataclass(frozen=True)
class Pipeline:
    """A stage at work: what it computes in which order, and the other stages.

    Attributes:
        group: One rank of each stage.
    """

    stage: Stage
    link: StageLink | DeviceLink
    group: ProcessGroup

    def train(
        self,
        micro_batches: int,
        call_of: Callable[[int], DecoderCall],
        factor: Tensor,
        done: Done,
        names: Sequence[str],
        kept: Callable[[int, Tensor], Tensor],
    ) -> tuple[list[Tensor], float | None]:
        """The gradients of these parameters, summed over the micro-batches, and the share of the time that was spent
        waiting for other stages; None on a device, for which the host does not wait. See `Stage.train`; `kept` takes
        the place of a name in `names`."""
        began = time.perf_counter()
        totals = dict[str, Tensor]()
        places = {name: place for place, name in enumerate(names)}

        def kept_of(name: str, gradient: Tensor) -> Tensor:
            return kept(places[name], gradient)

        passes = self.stage.train(micro_batches, call_of, factor, self.link.send, done, totals, kept_of)
        _, waited = self._run(passes)
        gradients = [totals.pop(name) for name in names]
        if not self.group.on_host:
            return gradients, None
        for gradient in gradients:
            gradient.asnumpy()  # waits until it is computed
        share = waited / (time.perf_counter() - began)
        return gradients, share

    def generation_chunks(self) -> list[StageChunk]:
        """The chunks of this stage, for a `trainer.models.generate.Generator`."""
        schedule = self.stage.schedule(1)
        found = []
        for chunk, part in enumerate(self.stage.parts):
            action = Action("forward", 0, chunk)
            needed = schedule.input_message(self.stage.stage, action)
            taker = schedule.receiver(self.stage.stage, action)
            receive = None if needed is None else partial(self.link.receive_array, needed.sender)
            send = None if taker is None else partial(self.link.send_array, taker)
            found.append(StageChunk(part.layers, receive, send))
        return found

    def share_logits(self, logits_BV: np.ndarray | None) -> np.ndarray:
        """Those of the last stage, on all stages."""
        last = self.group.size - 1
        if logits_BV is None:
            return self.link.receive_array(last)
        for stage in range(last):
            self.link.send_array(stage, logits_BV)
        return logits_BV

    def evaluate(self, inputs: ModelInputs) -> LossSums:
        """A batch of an evaluation, which all stages compute together: its losses on the last stage."""
        sums, _ = self._run(self.stage.evaluate(inputs, self.link.send))
        return sums

    def _run(self, passes: Passes[T]) -> tuple[T, float]:
        found = run_passes(self.link, passes)
        if not self.group.on_host:
            self.link.wait_for_sends()
        return found


def run_passes(link: StageLink | DeviceLink, passes: Passes[T]) -> tuple[T, float]:
    """Runs the passes of this stage; returns their result and the seconds in which it waited for other stages."""
    waited = 0.0
    try:
        awaited = next(passes)
        while True:
            began = time.perf_counter()
            tensor = link.receive(*awaited)
            waited += time.perf_counter() - began
            awaited = passes.send(tensor)
    except StopIteration as end:
        return end.value, waited


def build_pipeline(config: Config, model: Decoder, group: ProcessGroup, on_one_host: bool = True) -> Pipeline:
    """Connects the stages; all ranks of the job call it.

    Args:
        model: Has the parameters of its stage.
        group: One rank of each stage.
    """
    trained = trained_shapes(config) if config.trains else {}
    parts = model_chunks(config.decoder, chunk_layers(config), trained)[group.rank]
    schedule = partial(one_forward_one_backward, group.size, chunks=config.decoder.pp_interleave_num)
    if group.on_host:
        link = StageLink(group, on_one_host)
    else:
        shares = model.tensor.group.size if model.tensor is not None and model.tensor.sequence_parallel else 1
        link = DeviceLink(group, config.decoder.pp_interleave_num, config.decoder.hidden_size, shares)
    return Pipeline(Stage(model, parts, schedule, group.rank), link, group)
