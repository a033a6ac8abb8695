"""The parts of a decoder on a CPU as cells, which MindSpore's autograd drives.

A call of a part is a cell of its own with a `bprop`, and keeps what the backward pass needs. Only weights that are
trained are its inputs: no gradient is computed of the others. They are the parameters themselves, as the array of a
view, and of a gradient that went through one, would be a copy. Nothing is compiled.

Legend: N tokens, D hidden, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

from trainer.arrays.memory import narrow_weight, on_host
from trainer.arrays.onednn import BFLOAT16
from trainer.arrays.sublayer import SublayerCall

if TYPE_CHECKING:
    from trainer.arrays.attention.positions import TokenPositions
    from trainer.arrays.attention.sublayer import CpuAttention
    from trainer.arrays.dropout import LayerDropout
    from trainer.arrays.embedding import CpuEmbedding, CpuMapping, CpuMerge
    from trainer.arrays.head import FusedLinearCrossEntropy, HeadResult
    from trainer.arrays.mlp import CpuMlp
    from trainer.arrays.moe.sublayer import CpuMoe, MoeInputs
    from trainer.arrays.tiles import Arrays, Gradients
    from trainer.ops.routing import Routing

DTYPES = {"float32": np.float32, "bfloat16": BFLOAT16, "float16": np.float16}
"""The dtype of arrays that hold numbers of a compute dtype."""
Results: TypeAlias = "Tensor | tuple[Tensor, ...]"


class ArrayPart(Protocol):
    """A part of a decoder: functions of arrays for one call."""

    def forward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, save: bool, compute_output: bool
    ) -> tuple[Results, Any]:
        """Returns the results, and what `backward` takes; without `save` None.

        Without `compute_output` nobody needs the results.
        """

    def backward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, saved: Any, grads: Sequence[np.ndarray],
        trained: Collection[str],
    ) -> tuple[list[Tensor], Gradients]:  # fmt: skip
        """Returns the gradients of the inputs and of the trained weights. `saved` is used up."""


Unsharded: TypeAlias = "Callable[[Sequence[Parameter]], contextlib.AbstractContextManager[None]]"


class PartWeights:
    """The weights of a part.

    Args:
        named: The parameters by their names in the part.
        dtype: Of the products.
        narrow: Names of the weights that products take in this dtype.
        unsharded: Within its result parameters of which ranks keep ranges are complete.
    """

    def __init__(
        self, named: Mapping[str, Parameter], dtype: str, narrow: Collection[str] = (),
        unsharded: Unsharded = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self.named = dict(named)
        self.unsharded = unsharded
        self.dtype = DTYPES[dtype]
        self.narrow = frozenset(narrow) if dtype != "float32" else frozenset()

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the weights as the part computes with them."""
        found = {name: on_host(weight) for name, weight in self.named.items()}
        return found | {name: narrow_weight(found[name], self.dtype) for name in self.narrow if name in found}

    @property
    def trained(self) -> list[str]:
        return [name for name, weight in self.named.items() if weight.requires_grad]


def run_part(part: ArrayPart, weights: PartWeights, inputs: Sequence[Tensor], save: bool) -> Results:
    """Runs a part and lets MindSpore differentiate it. Without `save` the backward pass computes it again."""
    cell = _PartCell(part, weights, len(inputs), save)
    return cell(*inputs, *(weights.named[name] for name in cell.trained))


class _PartCell(nn.Cell):
    """One call of a part. MindSpore runs `construct` of a cell with a `bprop` without recording it."""

    def __init__(self, part: ArrayPart, weights: PartWeights, inputs: int, save: bool) -> None:
        super().__init__(auto_prefix=False)
        self.part = part
        self.weights = weights
        self.trained = weights.trained
        self.inputs = inputs
        self.save = save
        self.saved: Any = None

    def construct(self, *inputs_and_trained):
        inputs = [on_host(x) for x in inputs_and_trained[: self.inputs]]
        with self._complete_weights():
            results, self.saved = self.part.forward(inputs, self.weights.arrays(), self.save, True)
        return results

    def bprop(self, *arguments):
        *inputs_and_trained, _, grads = arguments
        inputs = [on_host(x) for x in inputs_and_trained[: self.inputs]]
        grads = [on_host(grad) for grad in (grads if isinstance(grads, tuple) else (grads,))]
        saved, self.saved = self.saved, None
        # The gradient of a look-up needs no values of the matrix.
        complete = contextlib.nullcontext() if isinstance(self.part, EmbeddingPass) else self._complete_weights()
        with complete:
            weights = self.weights.arrays()
            if saved is None:
                saved = self.part.forward(inputs, weights, True, False)[1]
            of_inputs, found = self.part.backward(inputs, weights, saved, grads, self.trained)
        return *of_inputs, *(found[name] for name in self.trained)

    def _complete_weights(self) -> contextlib.AbstractContextManager[None]:
        return self.weights.unsharded(list(self.weights.named.values()))


@dataclass(frozen=True)
class LayerPass:
    """Attention and feed-forward sublayer, or one of them, for one call: x_ND -> x_ND."""

    attention: CpuAttention | None
    mlp: CpuMlp | None
    positions: TokenPositions
    dropout: LayerDropout | None = None

    def forward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, save: bool, compute_output: bool
    ) -> tuple[Tensor, Any]:
        [x_ND] = inputs
        middle_ND = x_ND
        saved: list[Any] = [None, None, None]
        if self.attention is not None:
            needs_output = compute_output or self.mlp is not None
            call = SublayerCall(weights, dropout=self.dropout, save=save, compute_output=needs_output)
            result = self.attention.forward(call, x_ND, self.positions)
            middle_ND = result.asnumpy()
            saved[1] = call.saved
        if self.mlp is not None:
            call = SublayerCall(weights, dropout=self.dropout, save=save, compute_output=compute_output)
            result = self.mlp.forward(call, middle_ND)
            saved[2] = call.saved
        saved[0] = middle_ND
        return result, saved if save else None

    def backward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, saved: Any, grads: Sequence[np.ndarray],
        trained: Collection[str],
    ) -> tuple[list[Tensor], Gradients]:  # fmt: skip
        [x_ND], [grad_ND] = inputs, grads
        middle_ND, of_attention, of_mlp = saved
        found: Gradients = {}
        if self.mlp is not None:
            call = SublayerCall(weights, dropout=self.dropout, saved=of_mlp, trained=trained)
            result, found = self.mlp.backward(call, middle_ND, grad_ND)
            grad_ND = result.asnumpy()
        if self.attention is not None:
            call = SublayerCall(weights, dropout=self.dropout, saved=of_attention, trained=trained)
            result, more = self.attention.backward(call, x_ND, self.positions, grad_ND)
            found |= more
        return [result], found


class ExpertsPass:
    """The sublayer with experts for one call: x_ND -> x_ND, auxiliary and z loss.

    Attributes:
        routing, scores_NE: What the router decided; a pass that is computed again repeats it.
    """

    def __init__(self, moe: CpuMoe, inputs: MoeInputs, dropout: LayerDropout | None) -> None:
        self.moe = moe
        self.inputs = inputs
        self.dropout = dropout
        self.routing: Routing | None = None
        self.scores_NE: np.ndarray | None = None

    def forward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, save: bool, compute_output: bool
    ) -> tuple[Results, Any]:
        call = SublayerCall(weights, dropout=self.dropout, save=save)
        result, passed = self.moe.forward(call, inputs[0], replace(self.inputs, routing=self.routing))
        self.routing = passed.routing
        if passed.routed is None:
            return result, None
        self.scores_NE = passed.routed.scores_NE
        losses = [Tensor(loss, mstype.float32) for loss in (passed.routed.aux_loss, passed.routed.z_loss)]
        return (result, *losses), passed if save else None

    def backward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, saved: Any, grads: Sequence[np.ndarray],
        trained: Collection[str],
    ) -> tuple[list[Tensor], Gradients]:  # fmt: skip
        call = SublayerCall(weights, dropout=self.dropout)
        result, found = self.moe.backward(call, saved, *grads, trained)
        return [result], found


@dataclass(frozen=True)
class EmbeddingPass:
    """The look-up of tokens for one call: nothing -> x_NE."""

    embedding: CpuEmbedding
    ids_N: np.ndarray

    def forward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, save: bool, compute_output: bool
    ) -> tuple[Tensor, Any]:
        return self.embedding.forward(weights, self.ids_N), True

    def backward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, saved: Any, grads: Sequence[np.ndarray],
        trained: Collection[str],
    ) -> tuple[list[Tensor], Gradients]:  # fmt: skip
        return [], self.embedding.backward(weights, self.ids_N, grads[0])


@dataclass(frozen=True)
class MappingPass:
    """The mapping of embeddings of another width: x_NE -> x_ND."""

    mapping: CpuMapping

    def forward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, save: bool, compute_output: bool
    ) -> tuple[Tensor, Any]:
        return self.mapping.forward(weights, inputs[0]), True

    def backward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, saved: Any, grads: Sequence[np.ndarray],
        trained: Collection[str],
    ) -> tuple[list[Tensor], Gradients]:  # fmt: skip
        result, found = self.mapping.backward(weights, inputs[0], grads[0], trained)
        return [result], found


@dataclass(frozen=True)
class MergePass:
    """The merge of an MTP module for one call: embedded_ND, x_ND -> x_ND."""

    merge: CpuMerge

    def forward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, save: bool, compute_output: bool
    ) -> tuple[Tensor, Any]:
        return self.merge.forward(weights, *inputs), True

    def backward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, saved: Any, grads: Sequence[np.ndarray],
        trained: Collection[str],
    ) -> tuple[list[Tensor], Gradients]:  # fmt: skip
        *of_inputs, found = self.merge.backward(weights, *inputs, grads[0], trained)
        return of_inputs, found


@dataclass(frozen=True)
class HeadPass:
    """The head for one call: x_ND -> sum of token losses. The gradients are those of the forward pass."""

    head: FusedLinearCrossEntropy
    labels_N: np.ndarray
    valid_N1: np.ndarray
    trained: Collection[str]

    def forward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, save: bool, compute_output: bool
    ) -> tuple[Tensor, Any]:
        wanted = self.trained if save else None
        result = self.head(weights, inputs[0], self.labels_N, self.valid_N1, wanted)
        return Tensor(result.loss), result if save else None

    def backward(
        self, inputs: Sequence[np.ndarray], weights: Arrays, saved: HeadResult, grads: Sequence[np.ndarray],
        trained: Collection[str],
    ) -> tuple[list[Tensor], Gradients]:  # fmt: skip
        for gradient in (saved.grad, *saved.weights.values()):
            gradient.asnumpy()[...] *= grads[0]
        return [saved.grad], saved.weights
