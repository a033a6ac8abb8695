"""Gradients of MindSpore's own parallel operators, on an Ascend in one graph of the whole step."""

from __future__ import annotations

from types import SimpleNamespace

from mindspore.ops._grad_experimental import grad_comm_ops
from mindspore.ops.auto_generate import Div


def divide_losses_with_div() -> None:
    """Makes MindSpore divide the gradient of a loss among ranks with Div instead of RealDiv, which is a legacy kernel.

    No setting of MindSpore 2.10 does this. It makes the operators of these gradients when it first differentiates a
    graph, by the names in its module, so this comes before. AssignAdd stays in the sums over micro-batches: MindSpore's
    passes that overlap them with communication look for it by its name.
    """
    grad_comm_ops.P = SimpleNamespace(**vars(grad_comm_ops.P) | {"RealDiv": Div})
