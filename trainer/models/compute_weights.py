"""The weights that parts of a model compute with: copies in the dtype of products, and weights sharded over ranks.

Cells cast the weights of matrix products once a step instead of at every use. Parameters (main params) and optimizer
state are float32. Where products compute in half precision, a matrix has a copy in that dtype (model params); its
gradient comes from the copy, in half precision. In float32, and for native CPU layers, there are no copies.

With weights sharded (ZeRO stage 3, Rajbhandari et al. 2020, section 5.3) a rank of a CPU keeps its range of a weight. A
parameter keeps its shape and its address, so optimizers update it as usual. The memory of other ranks' ranges goes back
to the system while nothing uses them: they are gathered before the forward and the backward pass of each native layer,
and freed after it. Where ranks have several cores, a thread gathers the weights of the next layer during a pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mindspore import Parameter, Tensor
from mindspore import dtype as mstype

if TYPE_CHECKING:
    import numpy as np

    from trainer.models.spec.model import ParameterSpec
    from trainer.parallel.sharding import OptimizerShard

_Arrays: TypeAlias = "dict[OptimizerShard, list[np.ndarray]]"
"""The memory of parameters, by the ranks that share them."""

_DONT_NEED = 4  # MADV_DONTNEED of Linux, after which the pages read as zeros and take no memory


class ModelParams:
    """The weights that a model's parts compute with, in the place of its parameters.

    Only matrices of products have copies. Rows of the embedding are looked up in float32, also where it is the matrix
    of the head. Routers compute in float32. Adapters are first multiplied by their scale, in float32.

    Args:
        parameters: All parameters of the model by name.
        dtype: Dtype of the matrix products.
        specs: The descriptions of at least these parameters.
        shared: Names of matrices that several products take. They have no copy: its gradient would be the sum over the
            products in half precision.

    Attributes:
        sharded: The sharded weights (ZeRO stage 3); None where each rank keeps full weights.
    """

    sharded: ShardedWeights | None = None

    def __init__(
        self, parameters: Mapping[str, Parameter], dtype: mstype.Type, specs: Mapping[str, ParameterSpec],
        shared: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.main_params = parameters
        self.dtype = dtype
        self.copies: dict[str, Parameter] = {}
        if dtype == mstype.float32:
            return
        for name, main in parameters.items():
            if specs[name].role == "matrix" and name not in shared:
                self.copies[name] = Parameter(main.astype(dtype), f"compute.{name}", main.requires_grad)

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Casts again the weights that an update has changed, or all of them after a load."""
        if names is None:
            names = self.copies
        for name in names:
            if name in self.copies:
                self.copies[name].copy_(self.main_params[name].astype(self.dtype))
        self.end_step()

    def shard(self, shards: Mapping[str, OptimizerShard], prefetch: bool) -> None:
        """Shards the weights with these names: from now on each rank keeps its range of them.

        Args:
            shards: By name, the ranks that share the weight, see `ShardedWeights`.
            prefetch: Whether to gather the weights of the next part while one computes.
        """
        self.sharded = ShardedWeights(list(self.main_params.values()), shards, prefetch)
        self.end_step()

    @property
    def local_ranges(self) -> dict[str, slice]:
        """Returns the range of each flattened weight that this rank keeps, by name; only of sharded weights."""
        if self.sharded is None:
            return {}
        return {name: shard.local_range(self.main_params[name].size) for name, shard in self.sharded.shards.items()}

    def end_step(self) -> None:
        """Frees the ranges of other ranks; no weight may be in use."""
        if self.sharded is not None:
            self.sharded.end_step()

    def unsharded(self, parameters: Sequence[Parameter] | None = None) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which these weights, by default all, are unsharded. All ranks enter it together."""
        if self.sharded is None:
            return contextlib.nullcontext()
        return self.sharded.unsharded(parameters)

    def get(self, name: str) -> Parameter | None:
        """Returns the weight that a product takes and has its gradient: the copy, or else the parameter."""
        return self.copies.get(name, self.main_params.get(name))

    def grad_targets(self, names: Iterable[str]) -> list[Parameter]:
        """Returns the weights to differentiate by for the gradients of these parameters."""
        return [self.get(name) for name in names]


def cast_to_float32(gradients: list[Tensor]) -> None:
    """Casts the gradients of `ModelParams.grad_targets` to float32, the dtype of the parameters, one after the other:
    only one of them exists in both dtypes."""
    for place, gradient in enumerate(gradients):
        if gradient.dtype != mstype.float32:
            gradients[place] = gradient.astype(mstype.float32)


class ShardedWeights:
    """The sharded weights of a model: this rank keeps a range of each.

    The parts of a model use their weights in the same order in each step, on all ranks. The first step records it. In
    the following steps the weights of the next part are gathered while a part computes, so that a rank has those of at
    most two parts. A step that takes another order gathers without prefetching until its end, on all ranks.

    Args:
        parameters: All parameters of the model.
        shards: By the name of each sharded parameter, the ranks that share it. Their `all_gather` takes flat arrays, in
            any thread.
        prefetch: Whether to gather the weights of the next part while one computes; equal on all ranks.
    """

    def __init__(self, parameters: Sequence[Parameter], shards: Mapping[str, OptimizerShard], prefetch: bool) -> None:
        self.parameters = {each.name: each for each in parameters if each.name in shards}
        self.shards = shards
        self.prefetch = prefetch
        self.all_complete = False
        self.order: list[Sequence[str]] = []  # in which a step uses weights
        self.done: list[Sequence[str]] = []  # in this step
        self.in_order = True  # whether this step has followed `order` so far
        self.pending: _Prefetch | None = None

    @contextlib.contextmanager
    def unsharded(self, parameters: Sequence[Parameter] | None) -> Iterator[None]:
        """Unshards these parameters, by default all, for as long as the context lasts. All ranks enter it together."""
        if self.all_complete:
            yield
        elif parameters is None:
            self._take_pending()
            _all_gather(self._arrays(self.parameters))
            self.all_complete = True
            try:
                yield
            finally:
                self.all_complete = False
                self.end_step()
        else:
            if names := [each.name for each in parameters if each.name in self.shards]:
                self.unshard(names)
            try:
                yield
            finally:
                self.reshard(names)

    def unshard(self, names: Sequence[str]) -> None:
        """Gathers the other ranks' ranges of parameters; begins to prefetch the next ones. All ranks call this."""
        if self._take_pending() != names:
            _all_gather(self._arrays(names))
        self.done.append(names)
        count = len(self.done)
        self.in_order = self.in_order and self.order[count - 1 : count] == [names]
        if self.prefetch and self.in_order and count < len(self.order):
            self.pending = _Prefetch(self.order[count], self._arrays(self.order[count]))

    def reshard(self, names: Iterable[str]) -> None:
        """Frees the other ranks' ranges of these parameters, except those that are being prefetched."""
        prefetching: Sequence[str] = ()
        if self.pending is not None:
            prefetching = self.pending.names
        for name in names:
            if name in prefetching:
                continue
            flat = self.parameters[name].asnumpy().reshape(-1)
            local_range = self.shards[name].local_range(flat.size)
            _free_pages(flat[: local_range.start])
            _free_pages(flat[local_range.stop :])

    def end_step(self) -> None:
        """Frees the other ranks' ranges of all parameters, which an update makes obsolete."""
        if self.all_complete:
            return
        self._take_pending()
        self.order = self.done or self.order
        self.done = []
        self.in_order = True
        self.reshard(self.parameters)

    def _take_pending(self) -> Sequence[str]:
        """Waits for the prefetch, if there is one, and returns the names of its parameters."""
        pending = self.pending
        self.pending = None
        if pending is None:
            return ()
        pending.wait()
        return pending.names

    def _arrays(self, names: Iterable[str]) -> _Arrays:
        """Returns the memory of these parameters as flat arrays, by the ranks that share them."""
        arrays: _Arrays = {}
        for name in names:
            arrays.setdefault(self.shards[name], []).append(self.parameters[name].asnumpy().reshape(-1))
        return arrays


class _Prefetch:
    """Gathers parameters in another thread, which only touches arrays: MindSpore computes in one thread.

    The thread ends with the process, also where it waits for a rank that does not answer.
    """

    def __init__(self, names: Sequence[str], arrays: _Arrays) -> None:
        self.names = names
        self.arrays = arrays
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="prefetch of weights", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Waits for the end of the thread, and raises its error: RunError where another rank has gone."""
        self.thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            _all_gather(self.arrays)
        except Exception as error:
            self.error = error


def _all_gather(arrays: _Arrays) -> None:
    """Fills in the ranges of the other ranks. All ranks call this."""
    for shard, shard_arrays in arrays.items():
        assert shard.all_gather is not None  # sharded weights have it
        shard.all_gather(shard_arrays, None)


@functools.cache
def _system() -> ctypes.CDLL | None:
    """Returns the functions of Linux; None on other systems, where weights keep their memory."""
    if sys.platform != "linux":
        return None
    system = ctypes.CDLL(None, use_errno=True)
    system.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return system


def _free_pages(flat: np.ndarray) -> None:
    """Gives the full pages of an array's memory back to the system; their contents are lost."""
    first = -(-flat.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (flat.ctypes.data + flat.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    system = _system()
    if system is not None and end > first:
        system.madvise(first, end - first, _DONT_NEED)
