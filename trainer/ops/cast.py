"""A kernel in a dtype of its own: casts around it.

The automatic gradient of a cast brings a gradient back to the dtype of the cast's input, so the gradient of a float32
weight is float32 whatever the kernel computes in.
"""

from __future__ import annotations

from mindspore import dtype as mstype
from mindspore import nn
from mindspore.ops import operations as P


class InDtype(nn.Cell):
    """kernel(inputs as `inside`) as `outside`.

    Args:
        kernel: Takes tensors only.
        inside: Dtype of the kernel's inputs.
        outside: Dtype of the result.
        first: Cast only the first input: the others are what they should be already.
    """

    def __init__(self, kernel: nn.Cell, inside: mstype.Type, outside: mstype.Type, *, first: bool = False) -> None:
        super().__init__()
        self.kernel, self.inside, self.outside, self.first, self.cast = kernel, inside, outside, first, P.Cast()

    def construct(self, *tensors):
        if self.first:
            result = self.kernel(self.cast(tensors[0], self.inside), *tensors[1:])
        else:
            result = self.kernel(*[self.cast(tensor, self.inside) for tensor in tensors])
        return self.cast(result, self.outside)

    def shard_over(self, *degrees: int, **named: int) -> None:
        """Shards the kernel, where it is one of semi-automatic mode. Casts follow their inputs."""
        self.kernel.shard_over(*degrees, **named)


def rounded(kernel: nn.Cell, inside: mstype.Type, outside: mstype.Type, *, first: bool = False) -> nn.Cell:
    """kernel(inputs rounded to `inside`) in float32, the result rounded to `inside` and cast to `outside`.

    What a fused operator does with half-precision inputs: its arithmetic is float32. On a CPU it is also the faster
    way by far: there element-wise operators take 20 to 30 times as long in float16 as in float32, a cast 3 times.
    """
    return InDtype(InDtype(kernel, mstype.float32, inside, first=first), inside, outside, first=first)
