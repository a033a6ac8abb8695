"""Recomputation of activations, and blocks without the gradients of frozen weights.

MindSpore differentiates PyNative code. A compiled function that is called there keeps all activations that its backward
pass needs, and computes the gradients of all its inputs. So

* frozen weights enter a compiled form that stops their gradients: the products that would be these gradients are dead
  code, which the compiler removes;
* a block to be recomputed is a cell with its own `bprop`, which keeps only its inputs. The `bprop` runs one compiled
  function that computes the block's activations and gradients together. Dropout masks are functions of their keys, so
  they are drawn again;
* blocks that no gradient reaches run without recording. Otherwise MindSpore would keep the activations of a compiled
  function, or the inputs of a cell with a `bprop`, until the end of the step.

Every form is compiled once, at its first use, and serves all layers. Legend: N tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import mindspore
from mindspore import Parameter, Tensor, _no_grad, nn, ops

Constants: TypeAlias = Callable[[], tuple[Sequence[Tensor | None], Sequence[Tensor | None]]]
"""Makes the arguments of a block besides its input and weights: those before the weights, and those after them."""
Compiled: TypeAlias = bool | Mapping[str, str]
"""Whether cells are compiled; a mapping gives options of `mindspore.jit`."""


class Differentiable:
    """A pure function in the forms that a run needs.

    Args:
        cell: (x_ND, *arguments) -> result.
        compiled: Compile each form (context.mode 0), or run operator by operator (mode 1); see `compile_cell`.
    """

    def __init__(self, cell: nn.Cell, compiled: Compiled) -> None:
        self.cell = cell
        self.compiled = compiled
        self.plain = compile_cell(cell, compiled)
        self._forms: dict[tuple[type[nn.Cell], tuple[int, ...]], Callable] = {}

    def stop_gradients_at(self, argnums: tuple[int, ...]) -> Callable:
        """Returns the function without gradients of the arguments `argnums`, counted after x_ND.

        Without compilation this is the function itself: MindSpore then computes only the requested gradients, and a
        kernel with its own backward pass computes all of its gradients anyway.
        """
        if not argnums or not self.compiled:
            return self.plain
        return self._form(_Stopped, argnums)

    def gradients_of(self, argnums: tuple[int, ...]) -> Callable:
        """Returns the function (x_ND, *arguments, gradient of the result) -> gradients of x_ND and of some arguments.

        These are the arguments `argnums` of the cell; the function takes them before the others.
        """
        return self._form(_Gradients, argnums)

    def _form(self, kind: type[nn.Cell], argnums: tuple[int, ...]) -> Callable:
        if (kind, argnums) not in self._forms:
            self._forms[kind, argnums] = compile_cell(kind(self.cell, argnums), self.compiled)
        return self._forms[kind, argnums]


def compile_cell(cell: nn.Cell, compiled: Compiled) -> Callable:
    """Returns `mindspore.jit` of a cell, without reference cycles, or the cell itself if `compiled` is False.

    `jit` marks each argument that carries a gradient with a reference to itself. With these cycles the activations of a
    micro-batch would live until Python's collector runs.
    """
    if not compiled:
        return cell
    options: Mapping[str, str] = {}
    if not isinstance(compiled, bool):
        options = compiled
    run = mindspore.jit(cell.construct, **options)

    def call(*arguments: Any) -> Any:
        """Runs the compiled cell, and removes the references that `jit` leaves on its arguments."""
        result = run(*arguments)
        for argument in arguments:
            if argument is not None:
                vars(argument).pop("__ms_origin_object__", None)
        return result

    return call


class LayerFunction:
    """A block or a sublayer of it with the weights of one layer: (x_ND, constants) -> x_ND.

    Args:
        function: The block or sublayer.
        weights: The weights of the layer; None in place of each weight that the function does not use.
        reached: Whether a gradient flows through it.
        recomputed: Compute its activations again in the backward pass.
    """

    def __init__(
        self, function: Differentiable, weights: Sequence[Parameter | None], *, reached: bool, recomputed: bool
    ) -> None:
        self.function = function
        self.weights = weights
        self.reached = reached
        self.keeps_activations = reached and not recomputed

    def __call__(self, x_ND: Tensor, constants: Constants) -> Tensor:
        views = [weight if weight is None else weight.view(weight.shape) for weight in self.weights]
        if not self.reached:
            before, after = constants()
            with _no_grad():
                return self.function.plain(x_ND, *before, *views, *after)
        if not self.keeps_activations:
            trained = [view for view, weight in zip(views, self.weights, strict=True) if _is_trained(weight)]
            return RecomputedCall(self, views, constants)(x_ND, *trained)
        before, after = constants()
        run = self.function.stop_gradients_at(self.argnums(len(before), trained=False))
        return run(x_ND, *before, *views, *after)

    def argnums(self, before: int, trained: bool) -> tuple[int, ...]:
        """Returns the positions of the trained weights, or of the frozen ones, after `before` other arguments."""
        used = ((argnum, weight) for argnum, weight in enumerate(self.weights) if weight is not None)
        return tuple(before + argnum for argnum, weight in used if _is_trained(weight) == trained)


def _is_trained(weight: Parameter | None) -> bool:
    return weight is not None and weight.requires_grad


class RecomputedCall(nn.Cell):
    """One call of a block or sublayer that keeps only its inputs; each call makes a new cell.

    MindSpore runs `construct` of a cell with a `bprop` without recording it.
    """

    def __init__(self, part: LayerFunction, views: Sequence[Tensor | None], constants: Constants) -> None:
        super().__init__(auto_prefix=False)
        self.part = part
        self.views = views
        self.constants = constants

    def construct(self, x_ND: Tensor, *trained: Tensor) -> Tensor:
        """Runs the part without recording it."""
        before, after = self.constants()
        return self.part.function.plain(x_ND, *before, *self.views, *after)

    def bprop(self, x_ND: Tensor, *trained_out_grad: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradients of x and of the trained weights."""
        grad_ND = trained_out_grad[-1]
        before, after = self.constants()
        argnums = self.part.argnums(len(before), trained=True)
        arguments = [*before, *self.views, *after]
        others = [argument for argnum, argument in enumerate(arguments) if argnum not in argnums]
        trained = [arguments[argnum] for argnum in argnums]
        return self.part.function.gradients_of(argnums)(x_ND, *trained, *others, grad_ND)


class _Stopped(nn.Cell):
    """A cell without gradients of the arguments `argnums`."""

    def __init__(self, cell: nn.Cell, argnums: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.argnums = argnums

    def construct(self, x_ND: Tensor, *arguments: Tensor) -> Tensor:
        stopped: tuple[Tensor, ...] = ()
        for argnum in range(len(arguments)):
            argument = arguments[argnum]
            if argnum in self.argnums:
                argument = ops.stop_gradient(argument)
            stopped += (argument,)
        return self.cell(x_ND, *stopped)


class _Gradients(nn.Cell):
    """Gradients of a cell's input and of its arguments `argnums`, which come first; the last is the result's gradient.

    The gradients of other arguments are dead code, which the compiler removes.
    """

    def __init__(self, cell: nn.Cell, argnums: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.number = 1 + len(argnums)
        self.gradients = ops.GradOperation(get_all=True, sens_param=True)
        self.cell = _ReorderedArguments(cell, argnums)

    def construct(self, *arguments_and_grad: Tensor) -> tuple[Tensor, ...]:
        return self.gradients(self.cell)(*arguments_and_grad)[: self.number]


class _ReorderedArguments(nn.Cell):
    """A cell that takes the arguments `argnums` before the others."""

    def __init__(self, cell: nn.Cell, argnums: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.argnums = argnums

    def construct(self, x_ND: Tensor, *arguments: Tensor) -> Tensor:
        ordered: tuple[Tensor, ...] = ()
        first = 0
        other = len(self.argnums)
        for argnum in range(len(arguments)):
            if argnum in self.argnums:
                ordered += (arguments[first],)
                first += 1
            else:
                ordered += (arguments[other],)
                other += 1
        return self.cell(x_ND, *ordered)
