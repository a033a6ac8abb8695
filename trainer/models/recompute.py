"""Blocks whose backward pass does less: it computes activations again instead of keeping them, and leaves the
gradients of frozen weights out.

MindSpore differentiates what a run calls in PyNative mode. A compiled function that it meets there keeps all that its
backward pass needs, and computes the gradients of all its inputs. So

* frozen weights enter a compiled form in which their gradient is stopped: the products that would be their gradients
  are dead code, and are removed;
* a block to be computed again is a cell with a `bprop` of its own, which keeps nothing but what enters it. That runs
  one compiled function of the block's activations and gradients together. Dropout masks are drawn again, not kept: they
  are functions of their names. Blocks that no gradient flows through run in the same kind of cell: elsewhere MindSpore
  keeps the activations of a compiled function even then.

Every form is compiled once, at its first use, and serves all layers. Legend: N tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import mindspore
from mindspore import Parameter, Tensor, nn, ops

Constants: TypeAlias = Callable[[], tuple[Sequence[Tensor | None], Sequence[Tensor | None]]]
"""Makes the arguments of a block that are neither its input nor weights: those before and those after the weights."""
Compiled: TypeAlias = bool | Mapping[str, str]
"""Whether cells are compiled; where they are, options of `mindspore.jit`, of which True is none."""


class Differentiable:
    """A pure function in the forms that a run needs.

    Args:
        cell: (x_ND, *arguments) -> result.
        compiled: Compile each form (context.mode 0), or run operator by operator (mode 1); see `compile_cell`.
    """

    def __init__(self, cell: nn.Cell, compiled: Compiled) -> None:
        self.cell, self.compiled = cell, compiled
        self.plain = compile_cell(cell, compiled)
        self._forms: dict[tuple[str, tuple[int, ...]], Callable] = {}

    def stopped_at(self, places: tuple[int, ...]) -> Callable:
        """The function without gradients of the arguments at `places`, counted after x_ND.

        Without compilation this is the function itself: then no gradients are computed but those asked for, and a
        kernel's own backward pass computes all of its gradients anyway.
        """
        if not places or not self.compiled:
            return self.plain
        return self._form("stopped", places, _Stopped)

    def gradients_at(self, places: tuple[int, ...]) -> Callable:
        """(x_ND, *arguments, gradient of the result) -> gradients of x_ND and of the arguments at `places`.

        The arguments at `places` come first.
        """
        return self._form("gradients", places, _Gradients)

    def _form(self, name: str, places: tuple[int, ...], kind: type[nn.Cell]) -> Callable:
        if (name, places) not in self._forms:
            cell = kind(self.cell, places)
            self._forms[name, places] = compile_cell(cell, self.compiled)
        return self._forms[name, places]


def compile_cell(cell: nn.Cell, compiled: Compiled) -> Callable:
    """`mindspore.jit` of a cell, with the options that `compiled` is, that leaves no garbage; or the cell itself.

    `jit` marks each argument that carries a gradient with a reference to itself. With that, the activations of a
    micro-batch would live until Python's collector comes by.
    """
    if not compiled:
        return cell
    run = mindspore.jit(cell.construct, **({} if compiled is True else compiled))

    def call(*arguments):
        result = run(*arguments)
        for argument in arguments:
            if argument is not None:
                vars(argument).pop("__ms_origin_object__", None)
        return result

    return call


class LayerPart:
    """A block, or a half of one, with the weights of one layer: (x_ND, constants) -> x_ND.

    Args:
        function: Of the block or half.
        weights: What it takes as weights, None where it takes nothing.
        reached: Whether a gradient flows through it.
        recomputed: Compute its activations again in the backward pass.
    """

    def __init__(
        self, function: Differentiable, weights: Sequence[Parameter | None], *, reached: bool, recomputed: bool
    ) -> None:
        self.function, self.weights = function, weights
        self.keeps_activations = reached and not recomputed

    def __call__(self, x_ND: Tensor, constants: Constants) -> Tensor:
        views = [weight if weight is None else weight.view(weight.shape) for weight in self.weights]
        if not self.keeps_activations:
            trained = [view for view, weight in zip(views, self.weights, strict=True) if _is_trained(weight)]
            return _KeepingNothing(self, views, constants)(x_ND, *trained)
        before, after = constants()
        run = self.function.stopped_at(self.places(len(before), trained=False))
        return run(x_ND, *before, *views, *after)

    def places(self, before: int, trained: bool) -> tuple[int, ...]:
        """Where among the arguments the trained weights stand, or the frozen ones."""
        there = ((place, weight) for place, weight in enumerate(self.weights) if weight is not None)
        return tuple(before + place for place, weight in there if _is_trained(weight) == trained)


def _is_trained(weight: Parameter | None) -> bool:
    return weight is not None and weight.requires_grad


class _KeepingNothing(nn.Cell):
    """One call of a part that keeps only what enters it. A new cell for each call: it holds what the call needs.

    MindSpore runs `construct` of a cell with a `bprop` without recording it.
    """

    def __init__(self, part: LayerPart, views: Sequence[Tensor | None], constants: Constants) -> None:
        super().__init__(auto_prefix=False)
        self.part, self.views, self.constants = part, views, constants

    def construct(self, x_ND, *trained):
        before, after = self.constants()
        return self.part.function.plain(x_ND, *before, *self.views, *after)

    def bprop(self, x_ND, *trained_out_grad):
        grad_ND = trained_out_grad[-1]
        before, after = self.constants()
        places, arguments = self.part.places(len(before), trained=True), [*before, *self.views, *after]
        others = [argument for place, argument in enumerate(arguments) if place not in places]
        trained = [arguments[place] for place in places]
        return self.part.function.gradients_at(places)(x_ND, *trained, *others, grad_ND)


class _Stopped(nn.Cell):
    """A cell without gradients of the arguments at some places."""

    def __init__(self, cell: nn.Cell, places: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.cell, self.places = cell, places

    def construct(self, x_ND, *arguments):
        stopped = ()
        for place in range(len(arguments)):
            argument = arguments[place]
            stopped += (ops.stop_gradient(argument) if place in self.places else argument,)
        return self.cell(x_ND, *stopped)


class _Gradients(nn.Cell):
    """Gradients of a cell's input and of its arguments at some places, which come first; the last one is the result's.

    The unused gradients are dead code, as in `_Stopped`.
    """

    def __init__(self, cell: nn.Cell, places: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.number = 1 + len(places)
        self.gradients = ops.GradOperation(get_all=True, sens_param=True)
        self.cell = _PlacesFirst(cell, places)

    def construct(self, *arguments_and_grad):
        return self.gradients(self.cell)(*arguments_and_grad)[: self.number]


class _PlacesFirst(nn.Cell):
    """A cell that takes the arguments at some places before the others."""

    def __init__(self, cell: nn.Cell, places: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.cell, self.places = cell, places

    def construct(self, x_ND, *arguments):
        ordered, first, other = (), 0, len(self.places)
        for place in range(len(arguments)):
            if place in self.places:
                ordered += (arguments[first],)
                first += 1
            else:
                ordered += (arguments[other],)
                other += 1
        return self.cell(x_ND, *ordered)
