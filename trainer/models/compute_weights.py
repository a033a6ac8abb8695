"""The weights that parts of a model compute with: copies in the dtype of products, and weights sharded over ranks.

Cells cast the weights of matrix products once a step and not at every use. Parameters and optimizer state are float32.
Where products compute in half precision, a matrix has a copy in that dtype, from which its gradient comes too: as the
product made it, in half precision. Where products compute in float32 there are no copies, and this costs nothing.
Native CPU layers have no copies.

With weights sharded (ZeRO stage 3, Rajbhandari et al. 2020, section 5.3) a rank of a CPU keeps its range of a weight. A
parameter keeps its shape and its place, and what updates it does not change. But the memory behind the ranges of other
ranks goes back to the system while nothing uses them: they are gathered before the forward and the backward pass of
each native layer, and freed after it. Where ranks have several cores, a thread gathers the weights of the next part
while one computes.
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
    """What a model's parts take in the place of its parameters.

    Only matrices of products have copies. Rows of the embedding are looked up in float32, also where it is the matrix
    of the head. Routers compute in float32. Adapters are multiplied by their factor first, which is float32.

    Args:
        parameters: All parameters of the model by name.
        dtype: Dtype of the matrix products.
        specs: The descriptions of at least these parameters.
        experts: Whether the products of experts take copies.
        shared: Names of matrices that several products take. They have no copy: its gradient would be the sum over the
            products in half precision.

    Attributes:
        sharded: Where ranks keep ranges of the weights.
    """

    sharded: ShardedWeights | None = None

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        dtype: mstype.Type,
        specs: Mapping[str, ParameterSpec],
        *,
        experts: bool = False,
        shared: Collection[str] = (),
    ) -> None:
        self.main_params = parameters
        self.dtype = dtype
        self.copies: dict[str, Parameter] = {}
        if dtype == mstype.float32:
            return
        for name, main in parameters.items():
            spec = specs[name]
            if spec.role == "matrix" and name not in shared and (experts or spec.sharding != "expert"):
                self.copies[name] = Parameter(main.astype(dtype), f"compute.{name}", main.requires_grad)

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Casts again the weights that an update has changed, or all of them after a load."""
        for name in self.copies if names is None else names:
            if name in self.copies:
                self.copies[name].copy_(self.main_params[name].astype(self.dtype))
        self.end_step()

    def shard(self, shards: Mapping[str, OptimizerShard], prefetch: bool) -> None:
        """From now on each rank keeps its range of the weights with these names. The arguments are those of
        `ShardedWeights`."""
        self.sharded = ShardedWeights(list(self.main_params.values()), shards, prefetch)
        self.end_step()

    @property
    def local_ranges(self) -> dict[str, slice]:
        """Of the weights of which this rank keeps a range, flattened."""
        if self.sharded is None:
            return {}
        return {name: shard.local_range(self.main_params[name].size) for name, shard in self.sharded.shards.items()}

    def end_step(self) -> None:
        """Frees what other ranks have of the weights, of which none is in use."""
        if self.sharded is not None:
            self.sharded.end_step()

    def unsharded(self, parameters: Sequence[Parameter] | None = None) -> contextlib.AbstractContextManager[None]:
        """Within it these weights are complete, by default all of them; all ranks enter it together."""
        if self.sharded is None:
            return contextlib.nullcontext()
        return self.sharded.unsharded(parameters)

    def get(self, name: str) -> Parameter | None:
        """What a product takes, and what its gradient comes from: the copy, or the parameter where there is none."""
        return self.copies.get(name, self.main_params.get(name))

    def grad_targets(self, names: Iterable[str]) -> list[Parameter]:
        """What to differentiate for the gradients of these parameters."""
        return [self.get(name) for name in names]


def cast_to_float32(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of `ModelParams.grad_targets` in the dtype of the parameters."""
    return [each if each.dtype == mstype.float32 else each.astype(mstype.float32) for each in gradients]


class ShardedWeights:
    """The weights of a model of which this rank keeps a range.

    The parts of a model use their weights in the same order in each step, on all ranks. The first step shows it; in the
    following ones the weights of the next part are under way while a part computes, so that a rank has those of two
    parts at most. Where a step takes another order, all ranks gather late again until its end.

    Args:
        parameters: Those of the model.
        shards: By the names of the parameters of which a rank keeps a range. Their `all_gather` takes flat arrays, in
            any thread.
        prefetch: Whether to gather the weights of the next part while one computes, the same on all ranks.
    """

    def __init__(
        self, parameters: Sequence[Parameter], shards: Mapping[str, OptimizerShard], prefetch: bool
    ) -> None:
        self.parameters = {each.name: each for each in parameters if each.name in shards}
        self.shards = shards
        self.prefetch = prefetch
        self.all_complete = False
        self.order: list[list[str]] = []  # of a whole step
        self.done: list[list[str]] = []  # in this step
        self.in_order = True  # so far
        self.pending: _Prefetch | None = None

    @contextlib.contextmanager
    def unsharded(self, parameters: Sequence[Parameter] | None) -> Iterator[None]:
        """Within it these parameters are complete, by default all; all ranks enter it together."""
        if self.all_complete:
            yield
        elif parameters is None:
            self._take_pending()
            _complete(self._arrays(self.parameters))
            self.all_complete = True
            try:
                yield
            finally:
                self.all_complete = False
                self.end_step()
        else:
            names = [each.name for each in parameters if each.name in self.shards]
            if names:
                self.unshard(names)
            try:
                yield
            finally:
                self.reshard(names)

    def unshard(self, names: Sequence[str]) -> None:
        """Completes parameters with the ranges of the other ranks, which all call this, and begins with the next ones.
        """
        if self._take_pending() != names:
            _complete(self._arrays(names))
        self.done.append(names)
        count = len(self.done)
        self.in_order = self.in_order and self.order[count - 1 : count] == [names]
        if self.prefetch and self.in_order and count < len(self.order):
            self.pending = _Prefetch(self.order[count], self._arrays(self.order[count]))

    def reshard(self, names: Iterable[str]) -> None:
        """Frees what other ranks have of these parameters, but for what is being gathered."""
        if self.pending is None:
            coming = ()
        else:
            coming = self.pending.names
        for name in names:
            if name in coming:
                continue
            flat = self.parameters[name].asnumpy().reshape(-1)
            own = self.shards[name].local_range(flat.size)
            _free_pages(flat[: own.start])
            _free_pages(flat[own.stop :])

    def end_step(self) -> None:
        """Frees what other ranks have of all parameters: after an update it is out of date."""
        if self.all_complete:
            return
        self._take_pending()
        self.order = self.done or self.order
        self.done = []
        self.in_order = True
        self.reshard(self.parameters)

    def _take_pending(self) -> Sequence[str]:
        """Waits for what is being gathered, and returns its names."""
        pending = self.pending
        self.pending = None
        if pending is None:
            return ()
        pending.wait()
        return pending.names

    def _arrays(self, names: Iterable[str]) -> _Arrays:
        """The memory of these parameters, flat."""
        found: _Arrays = {}
        for name in names:
            found.setdefault(self.shards[name], []).append(self.parameters[name].asnumpy().reshape(-1))
        return found


class _Prefetch:
    """Completes the parameters with these names in a thread of its own, which knows their memory alone: MindSpore
    computes in one thread. It ends with the process, also where it waits for a rank that does not answer."""

    def __init__(self, names: Sequence[str], arrays: _Arrays) -> None:
        self.names = names
        self.arrays = arrays
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="prefetch of weights", daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Raises the RunError of a rank that another one has left."""
        self.thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            _complete(self.arrays)
        except Exception as error:
            self.error = error


def _complete(arrays: _Arrays) -> None:
    """Fills in the ranges of the other ranks, which all call this."""
    for shard, of_shard in arrays.items():
        shard.all_gather(of_shard, None)


@functools.cache
def _system() -> ctypes.CDLL | None:
    """The system's functions; None where memory cannot be given back: then weights take it, and are right."""
    if sys.platform != "linux":
        return None
    system = ctypes.CDLL(None, use_errno=True)
    system.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return system


def _free_pages(flat: np.ndarray) -> None:
    """Gives the pages that lie in an array's memory back to the system; what stood there is lost."""
    first = -(-flat.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (flat.ctypes.data + flat.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _system() is not None and end > first:
        _system().madvise(first, end - first, _DONT_NEED)
