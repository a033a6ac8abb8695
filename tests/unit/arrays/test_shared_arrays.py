"""Arrays that share a tensor's memory (`trainer.arrays.memory.shared_array`)."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint
from mindspore import dtype as mstype

from trainer.arrays.memory import shared_array

SHAPE = 512, 512  # large enough for MindSpore's pool, which gives freed memory to the next tensor


def test_writing_to_the_array_writes_to_the_tensor() -> None:
    tensor = mint.ones(SHAPE)
    array = shared_array(tensor)
    array[3, 4] = 5
    assert tensor.asnumpy()[3, 4] == 5
    assert array.shape == SHAPE and array.dtype == np.float32 and array.flags.c_contiguous


def test_the_array_keeps_the_memory_of_a_tensor_that_is_gone() -> None:
    array = shared_array(mint.ones(SHAPE) * 3)
    gc.collect()
    others = [mint.ones(SHAPE) * 7 for _ in range(20)]
    assert len(others) == 20 and (array == 3).all()


def test_the_array_keeps_the_memory_of_a_parameter_that_takes_other_values() -> None:
    parameter = Parameter(mint.ones(SHAPE) * 3, name="weight")
    array = shared_array(parameter)
    parameter.set_data(Tensor(np.full(SHAPE, 5, np.float32)))
    others = [mint.ones(SHAPE) * 7 for _ in range(20)]
    assert len(others) == 20 and (array == 3).all()
    assert (shared_array(parameter) == 5).all()


@pytest.mark.parametrize(
    "tensor", [
        Tensor(1.5, mstype.float32), Tensor(np.zeros((0, 4), np.float32)), Tensor(np.arange(6, dtype=np.int32)),
        Tensor(np.arange(6, dtype=np.float16)), Tensor(np.arange(12, dtype=np.float32).reshape(3, 4)).T,
        Tensor(np.arange(12, dtype=np.float32).reshape(3, 4))[1:],
    ], ids=["scalar", "empty", "int32", "float16", "transposed", "rows"],
)  # fmt: skip
def test_any_tensor_becomes_the_array_that_asnumpy_returns(tensor: Tensor) -> None:
    array = shared_array(tensor)
    assert array.dtype == tensor.asnumpy().dtype
    np.testing.assert_array_equal(array, tensor.asnumpy())
