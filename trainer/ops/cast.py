"""A kernel in a dtype of its own: casts around it. Automatic gradients of a cast bring gradients back to its input's
dtype, so the gradient of a float32 weight is float32 whatever the kernel computes in."""

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
    """

    def __init__(self, kernel: nn.Cell, inside: mstype.Type, outside: mstype.Type) -> None:
        super().__init__()
        self.kernel, self.inside, self.outside, self.cast = kernel, inside, outside, P.Cast()

    def construct(self, *tensors):
        return self.cast(self.kernel(*[self.cast(tensor, self.inside) for tensor in tensors]), self.outside)


def rounded(kernel: nn.Cell, inside: mstype.Type, outside: mstype.Type) -> InDtype:
    """kernel(inputs rounded to `inside`) in float32, the result rounded to `inside` and cast to `outside`.

    What a fused operator such as Ascend's RmsNorm does with half-precision inputs: its sums are float32.
    """
    return InDtype(InDtype(kernel, mstype.float32, inside), inside, outside)
