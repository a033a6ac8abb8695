"""A step whose loss and gradients come from one graph, for MindSpore's semi-automatic mode.

A rank has a part of every weight there and gets the gradient of that part. Norm, clipping, guards and update are those
of every run, on the parts; what they ask of the whole is added up over the ranks on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import mindspore
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from trainer.data.batches.batch import Batch, padding_rows
from trainer.step.accumulate import WindowGradients, valid_tokens
from trainer.step.guards import Guards
from trainer.step.train_step import Saved, StepResult, apply_window

if TYPE_CHECKING:
    from trainer.config import RunnerWrapper
    from trainer.optim.optimizer import Optimizer
    from trainer.parallel.communicator import Communicator


@contextlib.contextmanager
def graph_mode() -> Iterator[None]:
    """Inside, a call of a cell is one graph; all else in a run is executed operator by operator."""
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    try:
        yield
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


class GradientCell(nn.Cell):
    """(batch of the loss cell) -> (loss, gradients).

    Args:
        network: The loss of a whole window.
        weights: What is trained.
        summed_aside: MindSpore adds up the gradients of the micro-batches in parameters of its own, `accu_grads.*`.
        read_aside: They are read there. Where ranks share the optimizer's state MindSpore gives this rank's part of
            them as the gradients all the same.
    """

    def __init__(
        self, network: nn.Cell, weights: Sequence[Parameter], *, summed_aside: bool, read_aside: bool
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.weights = network, ParameterTuple(weights)
        self.summed_aside, self.read_aside = summed_aside, read_aside
        self.differentiated = mindspore.value_and_grad(network, None, self.weights)
        self.sums = self.weights.clone("accu_grads", init="zeros") if summed_aside else ()

    def construct(self, input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1):
        loss, gradients = self.differentiated(input_ids_BT, labels_BT, positions_BT, segment_ids_BT, share_B1)
        if not self.summed_aside:
            return loss, gradients
        # Either way the graph must have these parameters: MindSpore looks for them by their names.
        sums = ops.depend(self.sums, gradients)
        return loss, sums if self.read_aside else ops.depend(gradients, sums)


class ShardedParameters(Protocol):
    """The parameters of a graph of which every rank has a part."""

    own: Mapping[str, Parameter]
    """Those that this rank has a part of."""

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """This rank's part of a whole array that is cut like this parameter."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of all of them, whole."""

    def whole(self, names: Iterable[str], parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Puts arrays that are cut like these parameters together, on rank 0; all ranks call it."""

    def squares(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Sums of squares of whole gradients, from those of the parts of all ranks, each part counted once."""


class Window(NamedTuple):
    """The batch of a step: micro-batches one below the other, filled up with rows that carry no loss."""

    rows: int
    length: int
    own: slice = slice(None)
    """Rows that this rank hands to the graph: all, or where `full_batch` is off those of its data-parallel part."""

    def tensors(self, micro_batches: Sequence[Batch], share: float) -> list[Tensor]:
        """The inputs of the loss cell; `share` stands on every row."""
        missing = self.rows - sum(len(batch.labels) for batch in micro_batches)
        filled = (*micro_batches, padding_rows(missing, self.length))
        arrays = [np.concatenate(parts) for parts in zip(*filled, strict=True)]
        arrays.append(np.full((self.rows, 1), share, np.float32))
        return [Tensor(np.ascontiguousarray(array[self.own])) for array in arrays]


class GraphStep:
    """`TrainStep` with loss and gradients from one graph, which tells no losses but the one that is minimised.

    Args:
        network: `GradientCell` in what MindSpore wraps it with.
        cell: The `GradientCell` itself.
        optimizer: Over this rank's parts.
        schedule: Learning rate of update number `n`, from 0.
        wrapper: The section `runner_wrapper`.
        window: Shape of the batch of a step, all micro-batches and ranks together.
        parameters: Where they are.
        sum_of_squares: Of a gradient.
        peers: All ranks.
        gives_loss: Whether this rank is one of those that the loss comes from.
        stop_at_bad_loss: As in `TrainStep`.
    """

    model = build_inputs = None  # nothing to evaluate with

    def __init__(
        self,
        network: nn.Cell,
        cell: GradientCell,
        optimizer: Optimizer,
        schedule: Callable[[int], float],
        wrapper: RunnerWrapper,
        *,
        window: Window,
        parameters: ShardedParameters,
        sum_of_squares: Callable[[Tensor], float],
        communicator: Communicator,
        gives_loss: bool = True,
        stop_at_bad_loss: bool = False,
    ) -> None:
        self.network, self.cell, self.optimizer, self.schedule = network, cell, optimizer, schedule
        self.wrapper, self.window, self.parameters, self.communicator = wrapper, window, parameters, communicator
        self.sum_of_squares, self.gives_loss = sum_of_squares, gives_loss
        self.guards = Guards(wrapper, stop_at_bad_loss)
        self.sums = {total.name.removeprefix("accu_grads."): total for total in cell.sums}

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult:
        """As `TrainStep`; all ranks are given the same micro-batches, and the graph takes what is each one's own."""
        lr, scale = self.schedule(self.optimizer.updates), self.guards.scale
        window = self.differentiate(micro_batches, scale)
        squares = {}
        if window.gradients is not None:
            found = zip(self.optimizer.parameters, map(self.sum_of_squares, window.gradients), strict=True)
            squares = self.parameters.squares(dict(found))
        result = apply_window(window, squares, lr, self.optimizer, self.wrapper, self.guards)
        for total in self.sums.values() if window.gradients is not None else ():
            ops.assign(total, ops.zeros_like(total))
        return result

    def differentiate(self, micro_batches: Sequence[Batch], scale: float) -> WindowGradients:
        """Loss of the window, and the gradients of this rank's parts times the loss scale."""
        tokens = sum(valid_tokens(batch) for batch in micro_batches)
        if tokens == 0:
            return WindowGradients(0.0, 0, 0, None)
        with graph_mode():
            loss, gradients = self.network(*self.window.tensors(micro_batches, scale / tokens))
        names = [weight.name for weight in self.cell.weights]
        by_name = self.sums if self.cell.read_aside else dict(zip(names, gradients, strict=True))
        own = [by_name[name] for name in self.optimizer.parameters]
        # In a pipeline the ranks of the last stage have the loss.
        said = [float(loss.asnumpy()), 1.0] if self.gives_loss else [0.0, 0.0]
        total, count = self.communicator.all_sum(said)
        return WindowGradients(total / count / scale, tokens, 0, own)  # a micro-batch without a loss is not left out

    def load_optimizer(self, arrays: Mapping[str, np.ndarray], updates: int) -> None:
        """As `TrainStep.load_optimizer`."""
        parts = {}
        for key in arrays:
            name = key.split(".", 1)[1]
            if name in self.parameters.own:
                parts[key] = self.parameters.part(name, arrays[key])
        self.optimizer.load_state(parts, updates)

    def to_save(self) -> Saved:
        """As `TrainStep.to_save`; rank 0 gathers all, one array after the other."""
        own = {name: each.asnumpy() for name, each in self.parameters.own.items()}
        weights = self.parameters.whole(self.parameters.shapes, own)
        state, found = self.optimizer.state_arrays(), {}
        for kind in self.optimizer.state:
            parts = {name: state[f"{kind}.{name}"] for name in self.optimizer.parameters}
            whole = self.parameters.whole(self.optimizer.group_of, parts)
            found |= {f"{kind}.{name}": array for name, array in whole.items()}
        return Saved(weights, found, self.optimizer.updates)

    def state(self) -> dict:
        """As `TrainStep.state`."""
        return self.guards.state()

    def load_state(self, state: Mapping) -> None:
        """As `TrainStep.load_state`."""
        self.guards.load_state(state)
