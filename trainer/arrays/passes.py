"""The passes of a decoder's parts on a CPU: each runs forward, a `Tape` records it, and later it runs backward.

MindSpore's autograd takes no part: the passes of a decoder are few and large, and a list of them is all that
reverse-mode differentiation needs (Griewank and Walther 2008, Evaluating Derivatives, section 3.2). Each call into
MindSpore would take time while the threads that compute wait.

Legend: N tokens, D hidden, E experts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from mindspore import Tensor

from trainer.arrays.addresses import address
from trainer.arrays.memory import host_array, narrow_weight
from trainer.arrays.numpy_operators import BFLOAT16
from trainer.arrays.stored import stored_operands
from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.arrays.vocabulary.embedding import CpuEmbedding
from trainer.storage.quantized import FrozenMatrix, QuantizedArray

if TYPE_CHECKING:
    from mindspore import Parameter

    from trainer.arrays.attention.positions import TokenPositions
    from trainer.arrays.attention.sublayer import CpuAttention
    from trainer.arrays.dropout import LayerDropout
    from trainer.arrays.mlp import CpuMlp
    from trainer.arrays.moe.sublayer import CpuMoe, MoeInputs
    from trainer.arrays.tiles import Gradients
    from trainer.ops.routing import Routing

DTYPES = {"float32": np.float32, "bfloat16": BFLOAT16, "float16": np.float16}
"""The dtype of arrays that hold elements of a compute dtype."""
Result: TypeAlias = "np.ndarray | np.float32"
"""An array, or a loss."""
Results: TypeAlias = "Result | tuple[Result, ...]"


class Tape:
    """The passes of a forward pass, in order, and the gradients of weights that their backward passes have computed.

    Attributes:
        gradients: By the identity of the parameter.
    """

    def __init__(self) -> None:
        self.passes: list[Callable[[], None]] = []
        self.gradients: dict[int, np.ndarray] = {}

    def record(self, backward: Callable[[], None]) -> None:
        """Records a pass; `backward` takes the gradients of its results, and adds those of its inputs."""
        self.passes.append(backward)

    def backward(self, targets: Sequence[Parameter] = ()) -> list[Tensor]:
        """Runs all backward passes, the last one first, and forgets them. Returns the gradients of these parameters.

        The results that are differentiated have their gradients already (`Variable.add_gradient`).
        """
        while self.passes:
            self.passes.pop()()
        return [shared_tensor(self.take_gradient(target)) for target in targets]

    def totals(self, parameters: Mapping[str, Parameter]) -> Gradients:
        """Returns the gradients so far of those parameters that have one, by the names of the argument."""
        return {name: self.gradients[id(one)] for name, one in parameters.items() if id(one) in self.gradients}

    def add_gradient(self, parameter: Parameter, gradient: np.ndarray) -> None:
        """Adds the gradient of a parameter by one pass; parts may share the parameter."""
        total = self.gradients.setdefault(id(parameter), gradient)
        if total is not gradient:  # otherwise it is the first one, or the part has added its gradient to the total
            total += gradient

    def take_gradient(self, parameter: Parameter) -> np.ndarray:
        """Returns the gradient of a parameter, which the tape forgets; zeros if no pass has used the parameter."""
        gradient = self.gradients.pop(id(parameter), None)
        if gradient is None:
            gradient = np.zeros(parameter.shape, np.float32)
        return gradient


class Variable:
    """What a part returns and later parts take, and in a backward pass its gradient.

    Attributes:
        array: Without dimensions for a loss.
        tape: Records what is computed from it; None: it needs no gradient.
    """

    __slots__ = ("array", "gradient", "tape")

    def __init__(self, array: Result, tape: Tape | None = None) -> None:
        self.array = np.asarray(array)
        self.tape = tape
        self.gradient: np.ndarray | None = None

    def asnumpy(self) -> np.ndarray:
        """Returns the array. MindSpore's tensors, which other engines return, have a method of this name."""
        return self.array

    def add_gradient(self, gradient: np.ndarray) -> None:
        """Adds the gradient by one of the passes that take the variable, if it needs any."""
        if self.tape is None:
            return
        if self.gradient is not None:
            gradient = self.gradient + gradient
        self.gradient = gradient

    def take_gradient(self) -> np.ndarray:
        """Returns the sum of the gradients, which the variable forgets; zeros if there are none."""
        gradient = self.gradient
        self.gradient = None
        if gradient is None:
            return np.zeros_like(self.array)
        return gradient

    def watch(self, see: Callable[[np.ndarray], None]) -> None:
        """Lets the backward pass call `see` with the gradient, before any pass takes the variable."""
        if self.tape is not None:

            def show() -> None:
                """Shows the sum of the gradients, and keeps it for the pass that has computed the variable."""
                self.gradient = self.take_gradient()
                see(self.gradient)

            self.tape.record(show)

    def __mul__(self, factor: float) -> Variable:
        number = np.float32(factor)
        product = Variable(self.array * number, self.tape)
        if self.tape is not None:
            self.tape.record(lambda: self.add_gradient(product.take_gradient() * number))
        return product

    def __add__(self, other: Variable) -> Variable:
        tape = self.tape or other.tape
        total = Variable(self.array + other.array, tape)

        def backward() -> None:
            """Adds the gradient of the sum to that of both terms."""
            gradient = total.take_gradient()
            self.add_gradient(gradient)
            other.add_gradient(gradient)

        if tape is not None:
            tape.record(backward)
        return total


def shared_tensor(array: np.ndarray) -> Tensor:
    """Returns an array as a tensor, which shares its memory if the array is contiguous."""
    return Tensor.from_numpy(np.ascontiguousarray(array))


class DecoderPart(Protocol):
    """A part of a decoder. Its inputs are arrays that may have gradients, then constants of the call."""

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

    Attributes:
        trained: The names of the trained weights.
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
        self.trained = [name for name, weight in self.named.items() if weight.requires_grad]
        self.unsharded = unsharded
        self.dtype = DTYPES[dtype]
        self.narrow = frozenset[str]()
        if dtype != "float32":
            self.narrow = frozenset(narrow)
        self._shared: dict[str, np.ndarray] = {}

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
            arrays[name] = self._array(name, weight)
            if name in self.centered:
                arrays[name] = 1 + arrays[name]
            if dtype != np.float32:
                arrays[name] = narrow_weight(arrays[name], dtype)
        if stored:
            self.scratch.begin_part()
            arrays |= stored_operands(stored, self.by_rows, self.scratch)
        return arrays

    def _array(self, name: str, weight: Parameter) -> np.ndarray:
        """Returns a parameter as an array, which is made again only after the parameter has got other memory.

        The array keeps its memory alive, so that other memory has another address.
        """
        array = self._shared.get(name)
        if array is None or address(array) != weight.data_ptr():
            array = host_array(weight)
            self._shared[name] = array
        return array


def run_part(
    part: DecoderPart, weights: PartWeights, inputs: Sequence[Variable], constants: Sequence[Any] = (), *,
    tape: Tape | None, save: bool = True, dropout: LayerDropout | None = None, max_logits: np.ndarray | None = None,
    on_saved: Callable[[Mapping[str, Any]], None] | None = None,
) -> list[Variable]:  # fmt: skip
    """Runs a part and returns its results. Without `save` the backward pass recomputes it.

    Args:
        tape: Records the pass, if it needs gradients; None: there is no backward pass.
        on_saved: Called before the backward pass with the arrays that are saved for it.
    """
    one = _PartPass(part, weights, inputs, constants, save, dropout, max_logits, on_saved)
    results = one.forward()
    if not isinstance(results, tuple):
        results = (results,)
    if not (weights.trained or one.input_gradient):
        tape = None
    variables = [Variable(result, tape) for result in results]
    if tape is not None:
        one.results = variables
        tape.record(functools.partial(one.backward, tape))
    return variables


class _PartPass:
    """A pass of a part. It keeps what its backward pass needs."""

    def __init__(
        self, part: DecoderPart, weights: PartWeights, inputs: Sequence[Variable], constants: Sequence[Any], save: bool,
        dropout: LayerDropout | None, max_logits: np.ndarray | None,
        on_saved: Callable[[Mapping[str, Any]], None] | None,
    ) -> None:  # fmt: skip
        self.part = part
        self.weights = weights
        self.inputs = inputs
        self.input_gradient = any(x.tape is not None for x in inputs)
        self.constants = constants
        self.save = save
        self.dropout = dropout
        self.max_logits = max_logits
        self.on_saved = on_saved
        self.saved: dict[str, Any] | None = None
        self.arrays: dict[str, np.ndarray] | None = None
        self.results: list[Variable] = []

    def forward(self) -> Results:
        """Returns the results of the part; with `save`, keeps the arrays that `backward` needs."""
        unsharded = self.unsharded_weights()
        with unsharded:
            weights = self.weights.arrays()
            call = SublayerCall(
                weights, dropout=self.dropout, save=self.save, trained=self.weights.trained, max_logits=self.max_logits
            )
            results = self.part.forward(call, *self.arguments())
        if self.save:
            self.saved = call.saved
        if isinstance(unsharded, contextlib.nullcontext) and self.weights.may_be_kept:
            self.arrays = weights
        return results

    def backward(self, tape: Tape) -> None:
        """Adds the gradients of the inputs and of the trained weights."""
        grads = [result.take_gradient() for result in self.results]
        self.results = []  # the backward pass needs no results: their memory is free
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
                self.part.forward(recomputed, *self.arguments())
                saved = recomputed.saved
            if self.on_saved is not None:
                self.on_saved(saved)
            call = SublayerCall(
                weights, dropout=self.dropout, saved=saved, trained=self.weights.trained,
                input_gradient=self.input_gradient,
            )  # fmt: skip
            call.gradients.totals = tape.totals(self.weights.named)
            *input_gradients, weight_gradients = self.part.backward(call, *self.arguments(), *grads)
        for x, gradient in zip(self.inputs, input_gradients, strict=True):
            x.add_gradient(gradient)
        for name in self.weights.trained:
            tape.add_gradient(self.weights.named[name], weight_gradients[name])

    def unsharded_weights(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the weights of the part are unsharded."""
        return self.weights.unsharded(list(self.weights.named.values()))

    def arguments(self) -> list[Any]:
        """Returns the arguments of the part: the inputs as arrays, then the constants."""
        return [*(x.array for x in self.inputs), *self.constants]


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
