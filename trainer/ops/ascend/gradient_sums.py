"""Sums of the gradients of a value that a graph uses several times, on an Ascend."""

from __future__ import annotations

from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.graph._parse import standard_method
from mindspore.ops import operations as P
from mindspore.ops.composite.multitype_ops import add_impl

_ADD = P.Add()
_WITHOUT_GRADIENT = (mstype.bool_, mstype.uint8, mstype.int32, mstype.int64)


def sum_gradients_with_add(*, in_one_graph: bool) -> None:
    """Makes MindSpore add up gradients with Add instead of AddN, which is a legacy kernel on an Ascend.

    No setting of MindSpore 2.10 does this. It looks up the function `hyper_add` by its name when it differentiates, and
    keeps it from the first time on, so this comes before.

    Args:
        in_one_graph: Whether MindSpore differentiates one graph of the whole step. There it removes zeros from an AddN,
            but not from an Add. So the gradients of several results of one operator stay with AddN: each is a sum of
            zeros and one gradient, of which no kernel is left. In a compiled block MindSpore removes no zeros.
    """
    sums = ops.MultitypeFuncGraph("add_backward")
    for types, add in add_impl._add_backward.entries:
        if add is add_impl._add_addn:
            add = _add_tensors
        sums.register(*types)(add)
    standard_method.hyper_add = ops.HyperMap(sums)
    if in_one_graph:
        sums.register("Tuple", "Tuple")(_add_tuples)
        standard_method.hyper_add = sums


def _add_tensors(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype in _WITHOUT_GRADIENT:
        return x  # zeros, and Add takes no masks
    return _ADD(x, y)


def _add_tuples(x: tuple, y: tuple) -> tuple:
    return add_impl.hyper_add(x, y)
