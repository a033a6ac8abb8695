"""The parts of a decoder on a CPU as cells, which MindSpore's autograd drives.

Each call of a part makes a cell with a `bprop`, which saves arrays for the backward pass. Its inputs are the trained
weights: frozen ones have no gradient. They are the parameters themselves, because the array of a view would be a copy,
and so would a gradient through a view. Nothing is compiled.

Legend: N tokens, D hidden, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from mindspore import Parameter, Tensor, nn

from trainer.arrays.memory import host_array, narrow_weight
from trainer.arrays.numpy_operators import BFLOAT16
from trainer.arrays.stored import stored_operands
from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.arrays.vocabulary.embedding import CpuEmbedding
from trainer.storage.quantized import FrozenMatrix, QuantizedArray

if TYPE_CHECKING:
    from trainer.arrays.attention.positions import TokenPositions
    from trainer.arrays.attention.sublayer import CpuAttention
    from trainer.arrays.dropout import LayerDropout
    from trainer.arrays.mlp import CpuMlp
    from trainer.arrays.moe.sublayer import CpuMoe, MoeInputs
    from trainer.arrays.tiles import Gradients
    from trainer.ops.routing import Routing

DTYPES = {"float32": np.float32, "bfloat16": BFLOAT16, "float16": np.float16}
"""The dtype of arrays that hold elements of a compute dtype."""
Results: TypeAlias = "np.ndarray | np.float32 | tuple[np.ndarray | np.float32, ...]"
"""Arrays, or losses."""


class DecoderPart(Protocol):
    """A part of a decoder. Its inputs are arrays of the tensors that have gradients, then constants of the call."""

    def forward(self, call: SublayerCall, *inputs: Any) -> Results:
        """Returns the results, and fills `call.saved` if the call saves."""

    def backward(self, call: SublayerCall, *inputs_and_grads: Any) -> tuple:
        """Returns the gradients of the inputs, and last those of the trained weights. Consumes `call.saved`."""


Unsharded: TypeAlias = "Callable[[Sequence[Parameter] | None], contextlib.AbstractContextManager[None]]"
"""Parameters -> a context in which they are unsharded."""


def keep_sharding(parameters: Sequence[Parameter] | None) -> contextlib.AbstractContextManager[None]:
    """Returns an empty context: each rank has the full parameters."""
    return contextlib.nullcontext()


class PartWeights:
    """The weights of a part.

    Args:
        named: The parameters by their names in the part.
        dtype: Dtype of the products.
        narrow: Names of the weights that products take in this dtype.
        unsharded: Returns a context in which sharded parameters are unsharded.
        centered: Names of norms whose weights are zero-centered: the part takes 1 + weight.
        by_rows: Names of large matrices that the part takes as a `StoredMatrix` if they are held in few bytes; others
            are decompressed as a whole for each pass.
        scratch: Has memory for decompressed matrices.
    """

    def __init__(
        self, named: Mapping[str, Parameter], dtype: str, narrow: Collection[str] = (),
        unsharded: Unsharded = keep_sharding, centered: Collection[str] = (), by_rows: Collection[str] = (),
        scratch: Scratch | None = None,
    ) -> None:  # fmt: skip
        self.scratch = scratch or Scratch()
        self.by_rows = frozenset(by_rows)
        self.centered = tuple(name for name in centered if name in named)
        self.named = dict(named)
        self.unsharded = unsharded
        self.dtype = DTYPES[dtype]
        self.narrow = frozenset[str]()
        if dtype != "float32":
            self.narrow = frozenset(narrow)

    @property
    def may_be_kept(self) -> bool:
        """Whether `arrays` returns no copies of matrices: those of the forward pass serve the backward pass, too."""
        return not self.narrow and not any(isinstance(weight, FrozenMatrix) for weight in self.named.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the weights by name, in the dtypes in which the part computes with them."""
        arrays: dict[str, Any] = {}
        stored: dict[str, tuple[QuantizedArray, type]] = {}
        for name, weight in self.named.items():
            dtype = np.float32
            if name in self.narrow:
                dtype = self.dtype
            if isinstance(weight, FrozenMatrix):
                stored[name] = weight.numbers, dtype
                continue
            arrays[name] = host_array(weight)
            if name in self.centered:
                arrays[name] = 1 + arrays[name]
            if dtype != np.float32:
                arrays[name] = narrow_weight(arrays[name], dtype)
        if stored:
            self.scratch.begin_part()
            arrays |= stored_operands(stored, self.by_rows, self.scratch)
        return arrays

    @property
    def trained(self) -> list[str]:
        """Returns the names of the trained weights."""
        return [name for name, weight in self.named.items() if weight.requires_grad]


def run_part(
    part: DecoderPart, weights: PartWeights, inputs: Sequence[Tensor], constants: Sequence[Any] = (), save: bool = True,
    dropout: LayerDropout | None = None, max_logits: np.ndarray | None = None,
    on_saved: Callable[[Mapping[str, Any]], None] | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Runs a part and lets MindSpore differentiate it. Without `save` the backward pass recomputes it.

    Returns:
        A tensor for each result of the part: one, or a tuple of them.

    Args:
        on_saved: Called before the backward pass with the arrays that are saved for it.
    """
    cell = _PartCell(part, weights, len(inputs), constants, save, dropout, max_logits, on_saved)
    return cell(*inputs, *(weights.named[name] for name in cell.trained))


class _PartCell(nn.Cell):
    """One call of a part. MindSpore runs `construct` of a cell with a `bprop` without recording it."""

    def __init__(
        self, part: DecoderPart, weights: PartWeights, inputs: int, constants: Sequence[Any], save: bool,
        dropout: LayerDropout | None, max_logits: np.ndarray | None,
        on_saved: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:  # fmt: skip
        super().__init__(auto_prefix=False)
        self.max_logits = max_logits
        self.on_saved = on_saved
        self.part = part
        self.weights = weights
        self.trained = weights.trained
        self.inputs = inputs
        self.constants = constants
        self.save = save
        self.dropout = dropout
        self.saved: dict[str, Any] | None = None
        self.arrays: dict[str, np.ndarray] | None = None

    def construct(self, *inputs_and_trained: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Returns the results of the part; with `save`, keeps the arrays that `bprop` needs."""
        inputs = self.arguments(inputs_and_trained)
        unsharded = self.unsharded_weights()
        with unsharded:
            weights = self.weights.arrays()
            call = SublayerCall(
                weights, dropout=self.dropout, save=self.save, trained=self.trained, max_logits=self.max_logits
            )
            results = self.part.forward(call, *inputs)
        if self.save:
            self.saved = call.saved
        if isinstance(unsharded, contextlib.nullcontext) and self.weights.may_be_kept:
            self.arrays = weights
        if isinstance(results, tuple):
            return tuple(map(_tensor, results))
        return _tensor(results)

    def bprop(self, *arguments: Any) -> tuple[Tensor, ...]:
        """Returns the gradients of the inputs, then those of the trained weights."""
        *inputs_and_trained, _, result_grads = arguments
        inputs = self.arguments(inputs_and_trained)
        if not isinstance(result_grads, tuple):
            result_grads = (result_grads,)
        grads = [host_array(grad) for grad in result_grads]
        saved = self.saved
        self.saved = None
        # The gradient of a look-up needs no values of the matrix.
        unsharded = contextlib.nullcontext()
        if not isinstance(self.part, CpuEmbedding) or self.part.adapter is not None:
            unsharded = self.unsharded_weights()
        with unsharded:
            weights = self.arrays
            self.arrays = None
            if weights is None:
                weights = self.weights.arrays()
            if saved is None:
                recomputed = SublayerCall(weights, dropout=self.dropout, compute_output=False)
                self.part.forward(recomputed, *inputs)
                saved = recomputed.saved
            if self.on_saved is not None:
                self.on_saved(saved)
            call = SublayerCall(
                weights, dropout=self.dropout, saved=saved, trained=self.trained, input_gradient=self.inputs > 0
            )
            *input_gradients, weight_gradients = self.part.backward(call, *inputs, *grads)
        gradients = *input_gradients[: self.inputs], *(weight_gradients[name] for name in self.trained)
        return tuple(map(_tensor, gradients))

    def unsharded_weights(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the weights of the part are unsharded."""
        return self.weights.unsharded(list(self.weights.named.values()))

    def arguments(self, inputs_and_trained: Sequence[Tensor]) -> list[Any]:
        """Returns the arguments of the part: the inputs as arrays, then the constants."""
        return [*(host_array(x) for x in inputs_and_trained[: self.inputs]), *self.constants]


def _tensor(result: np.ndarray | np.float32) -> Tensor:
    """Returns a result as a tensor, which shares the memory of an array."""
    if isinstance(result, np.ndarray):
        return Tensor.from_numpy(np.ascontiguousarray(result))
    return Tensor(result)


@dataclass(frozen=True)
class BlockPart:
    """Both sublayers of a layer, one after the other: x_ND -> x_ND."""

    attention: CpuAttention
    mlp: CpuMlp

    def forward(self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions) -> np.ndarray:
        """Returns the residual stream after the layer."""
        first = _sublayer_call(call, compute_output=True, max_logits=call.max_logits)
        middle_ND = self.attention.forward(first, x_ND, positions)
        second = _sublayer_call(call, compute_output=call.compute_output)
        out_ND = self.mlp.forward(second, middle_ND)
        if call.save:
            call.saved |= {"attention": first.saved, "mlp": second.saved, "middle": middle_ND}
        return out_ND

    def backward(
        self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, grad_ND: np.ndarray
    ) -> tuple[np.ndarray, Gradients]:
        """Returns the gradients of x and of the trained weights."""
        middle_grad_ND, mlp_gradients = self.mlp.backward(_saved_call(call, "mlp"), call.saved.pop("middle"), grad_ND)
        # The call of the feed-forward sublayer is gone, and with it the arrays that the sublayer has saved.
        first = _saved_call(call, "attention", call.input_gradient)
        x_grad_ND, gradients = self.attention.backward(first, x_ND, positions, middle_grad_ND)
        return x_grad_ND, mlp_gradients | gradients


class ParallelBlockPart(BlockPart):
    """Both sublayers of a layer side by side, each of x_ND."""

    def forward(self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions) -> np.ndarray:
        """Returns the residual stream after the layer."""
        first = _sublayer_call(call, compute_output=call.compute_output, max_logits=call.max_logits)
        stream_ND = self.attention.forward(first, x_ND, positions)
        second = _sublayer_call(call, compute_output=call.compute_output)
        out_ND = self.mlp.forward(second, x_ND, stream_ND)
        if call.save:
            call.saved |= {"attention": first.saved, "mlp": second.saved}
        return out_ND

    def backward(
        self, call: SublayerCall, x_ND: np.ndarray, positions: TokenPositions, grad_ND: np.ndarray
    ) -> tuple[np.ndarray, Gradients]:
        """Returns the gradients of x and of the trained weights."""
        mlp_grad_ND, mlp_gradients = self.mlp.backward(_saved_call(call, "mlp"), x_ND, grad_ND)
        first = _saved_call(call, "attention", call.input_gradient)
        x_grad_ND, gradients = self.attention.backward(first, x_ND, positions, grad_ND)
        x_grad_ND += mlp_grad_ND
        for name in mlp_gradients.keys() & gradients.keys():  # of the norm that both take
            gradients[name] += mlp_gradients[name]
        return x_grad_ND, mlp_gradients | gradients


def _sublayer_call(call: SublayerCall, **options: Any) -> SublayerCall:
    """Returns the forward call of a sublayer of a layer."""
    return SublayerCall(call.weights, dropout=call.dropout, save=call.save, **options)


def _saved_call(call: SublayerCall, sublayer: str, input_gradient: bool = True) -> SublayerCall:
    """Returns the backward call of a sublayer, to which it gives the arrays that this one saved."""
    return SublayerCall(
        call.weights, dropout=call.dropout, saved=call.saved.pop(sublayer), trained=call.gradients.trained,
        input_gradient=input_gradient,
    )  # fmt: skip


class ExpertsPart:
    """The feed-forward sublayer of an MoE layer for one call: x_ND -> x_ND, auxiliary loss and z-loss.

    Attributes:
        routing, scores_NE: The routing of the first pass, which a recomputed pass repeats, and the router's scores.
    """

    def __init__(self, moe: CpuMoe, inputs: MoeInputs) -> None:
        self.moe = moe
        self.inputs = inputs
        self.routing: Routing | None = None
        self.scores_NE: np.ndarray | None = None

    def forward(self, call: SublayerCall, x_ND: np.ndarray) -> Results:
        """Returns the residual stream, and in a training the auxiliary loss and the z-loss."""
        out_ND, passed = self.moe.forward(call, x_ND, replace(self.inputs, routing=self.routing))
        self.routing = passed.routing
        if passed.routed is None:
            return out_ND
        self.scores_NE = passed.routed.scores_NE
        if call.save:
            call.saved["pass"] = passed
        return out_ND, np.float32(passed.routed.aux_loss), np.float32(passed.routed.z_loss)

    def backward(self, call: SublayerCall, x_ND: np.ndarray, *grads: np.ndarray) -> tuple[np.ndarray, Gradients]:
        """Returns the gradients of x and of the trained weights."""
        return self.moe.backward(call, call.saved.pop("pass"), *grads)
