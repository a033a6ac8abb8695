"""The forward and backward pass of a micro-batch: on a tape of native CPU layers, or by MindSpore's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mindspore import Parameter, ParameterTuple, Tensor, ops

from trainer.arrays.memory import host_array
from trainer.arrays.passes import Tape, Variable
from trainer.models.array_parts import ArrayParts
from trainer.models.decoder import Decoder, DecoderCall

if TYPE_CHECKING:
    from trainer.models.inputs import LossSums

Differentiation: TypeAlias = "Callable[[DecoderCall, Tensor], tuple[LossSums, list[Tensor]]]"
"""(micro-batch, factor) -> its losses, and the gradients of the minimised loss times the factor."""


def differentiation(model: Decoder, targets: Sequence[Parameter]) -> Differentiation:
    """Returns the function that computes the gradients by these weights, one for each."""
    if isinstance(model, Decoder) and isinstance(model.parts, ArrayParts):
        return ArrayDifferentiation(model, targets)
    return CellDifferentiation(model, targets)


class ArrayDifferentiation:
    """Runs native CPU layers, and their tape backward."""

    def __init__(self, model: Decoder, targets: Sequence[Parameter]) -> None:
        self.model = model
        self.targets = targets

    def __call__(self, call: DecoderCall, factor: Tensor) -> tuple[LossSums, list[Tensor]]:
        """Returns the losses of a micro-batch, and the gradients times `factor`."""
        tape = Tape()
        sums = self.model.construct(*call._replace(tape=tape))
        assert isinstance(sums.total, Variable)
        sums.total.add_gradient(host_array(factor))
        return sums, tape.backward(self.targets)


class CellDifferentiation:
    """Lets MindSpore record the cells of a model, and run their backward passes."""

    def __init__(self, model: Decoder, targets: Sequence[Parameter]) -> None:
        self.model = model
        self.call: DecoderCall | None = None
        self.sums: LossSums | None = None
        # Takes the gradient of the result: when MindSpore makes this gradient, it leaks 1.3 kB a call on a CPU.
        gradients = ops.GradOperation(get_by_list=True, sens_param=True)
        self.gradients = gradients(self._total, ParameterTuple(targets))

    def __call__(self, call: DecoderCall, factor: Tensor) -> tuple[LossSums, list[Tensor]]:
        """Returns the losses of a micro-batch, and the gradients times `factor`."""
        self.call = call
        gradients = list(self.gradients(factor))
        sums = self.sums
        self.call = None
        self.sums = None
        assert sums is not None
        return sums, gradients

    # Without arguments: MindSpore converts each argument that is not a tensor to text, arrays included.
    def _total(self) -> Tensor:
        """Returns the minimised loss of `call`, and leaves all losses in `sums`."""
        assert self.call is not None
        self.sums = self.model(self.call.inputs, self.call.dropout, self.call.statistics, self.call.observer)
        return self.sums.total
