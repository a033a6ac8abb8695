"""What experts of semi-automatic mode compute with and a CPU lacks, made of operators that it has.

They do what MindSpore's documentation says of those of an Ascend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from mindspore import dtype as mstype
from mindspore import mint, nn, ops


def argsort(values, dim, descending, stable):
    """Sorts by counting the values before each one; equal values keep their order."""
    values = values if descending else -values
    place = ops.arange(values.shape[-1])
    earlier = place.expand_dims(0) < place.expand_dims(1)
    mine, other = values.expand_dims(-1), values.expand_dims(-2)
    before = ops.logical_or(other > mine, ops.logical_and(other == mine, earlier))
    rank = before.astype(mstype.float32).sum(-1)
    return ops.argmax((rank.expand_dims(-2) == place.astype(mstype.float32).expand_dims(-1)).astype(mstype.float32), -1)


def index_select(x, dim, index):
    return ops.gather(x, index, dim)


def scatter(x, dim, index, src):
    return ops.tensor_scatter_elements(x, index.astype(mstype.int32), src, dim)


class GroupedMatmul(nn.Cell):
    """Each expert's rows, the others set to zero, times its weight."""

    def __init__(self, fills_rows: bool = False, in_graph: bool = False) -> None:
        super().__init__(auto_prefix=False)

    def construct(self, x_RI, weight_EOI, counts_E):
        counts_E1 = counts_E.astype(mstype.float32).expand_dims(1)
        ends_E1, place_R = ops.cumsum(counts_E1, 0), ops.arange(x_RI.shape[0]).astype(mstype.float32)
        inside_ER = ops.logical_and(place_R < ends_E1, place_R >= ends_E1 - counts_E1)
        rows_ERI = x_RI.expand_dims(0) * inside_ER.astype(x_RI.dtype).expand_dims(-1)
        return ops.matmul(rows_ERI, weight_EOI.swapaxes(1, 2)).sum(0)


@contextlib.contextmanager
def operators_of_a_cpu() -> Iterator[None]:
    """Replaces operators of `mint` by these while the block runs."""
    with (
        mock.patch.object(mint, "argsort", argsort),
        mock.patch.object(mint, "index_select", index_select),
        mock.patch.object(mint, "scatter", scatter),
    ):
        yield
