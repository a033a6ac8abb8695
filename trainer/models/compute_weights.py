"""The weights that blocks compute with: copies in the dtype of the products, and weights that ranks keep ranges of.

Weights of matrix products are cast once a step and not at every use. Parameters and optimizer state are float32. Where
products compute in half precision, a matrix has a copy in that dtype, from which its gradient comes too: as the product
made it, in half precision. Where products compute in float32 there are no copies, and this costs nothing.

With weights sharded (ZeRO stage 3, Rajbhandari et al. 2020, section 5.3) a rank of a CPU keeps its range of a weight. A
parameter keeps its shape, and what differentiates and updates it does not change. But the memory behind the ranges of
other ranks goes back to the system while nothing uses them: they are gathered before a part of the model runs, let go
after it, and again around its backward pass. So autograd, which remembers the parameter and no copy of it, finds the
same numbers in the same place. Where ranks have several cores, a thread gathers the weights of the next part while one
computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype

if TYPE_CHECKING:
    import numpy as np

    from trainer.models.spec.model import ParameterSpec
    from trainer.parallel.sharding import OptimizerShard

Results: TypeAlias = "Tensor | tuple[Tensor | None, ...]"
_Arrays: TypeAlias = "dict[OptimizerShard, list[np.ndarray]]"
"""The memory of parameters, by the ranks that share them."""

_DONT_NEED = 4  # MADV_DONTNEED of Linux, after which the pages read as zeros and take no memory


class ComputeWeights:
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
        self.masters, self.dtype = parameters, dtype
        self.copies: dict[str, Parameter] = {}
        if dtype == mstype.float32:
            return
        for name, master in parameters.items():
            spec = specs[name]
            if spec.role == "matrix" and name not in shared and (experts or spec.sharding != "expert"):
                self.copies[name] = Parameter(master.astype(dtype), f"compute.{name}", master.requires_grad)

    def refresh(self, names: Iterable[str] | None = None) -> None:
        """Casts again the weights that an update has changed, or all of them after a load."""
        for name in self.copies if names is None else names:
            if name in self.copies:
                self.copies[name].copy_(self.masters[name].astype(self.dtype))
        self.release()

    def shard(self, shards: Mapping[str, OptimizerShard], ahead: bool) -> None:
        """From now on each rank keeps its range of the weights with these names, and of their copies. The other
        arguments are those of `ShardedWeights`."""
        by_name = {self.copies[name].name: shard for name, shard in shards.items() if name in self.copies}
        parameters = [*self.masters.values(), *self.copies.values()]
        self.sharded = ShardedWeights(parameters, {**shards, **by_name}, ahead)
        self.release()

    def around(
        self, weights: Iterable[Parameter | None], x: Tensor, run: Callable[[Tensor], Results]
    ) -> Results:
        """The results of a part of the model that uses these weights, which are there for it."""
        return run(x) if self.sharded is None else self.sharded.around(weights, x, run)

    @property
    def own_ranges(self) -> dict[str, slice]:
        """Of the weights of which this rank keeps a range, flattened."""
        if self.sharded is None:
            return {}
        shards = ((name, self.sharded.shards.get(name)) for name in self.masters)
        return {name: shard.own_range(self.masters[name].size) for name, shard in shards if shard is not None}

    def release(self) -> None:
        """Lets go of what other ranks have of the weights."""
        if self.sharded is not None:
            self.sharded.release()

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Within it all weights are whole; all ranks enter it together."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.whole()

    def get(self, name: str) -> Parameter | None:
        """What a product takes, and what its gradient comes from: the copy, or the parameter where there is none."""
        return self.copies.get(name, self.masters.get(name))

    def leaves(self, names: Iterable[str]) -> list[Parameter]:
        """What to differentiate for the gradients of these parameters."""
        return [self.get(name) for name in names]


def in_float32(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of `ComputeWeights.leaves` in the dtype of the parameters."""
    return [each if each.dtype == mstype.float32 else each.astype(mstype.float32) for each in gradients]


class ShardedWeights:
    """The weights of a model of which this rank keeps a range.

    The parts of a model use their weights in the same order in each step, on all ranks. The first step shows it; in the
    following ones the weights of the next part are under way while a part computes, so that a rank has those of two
    parts at most. Where a step takes another order, all ranks gather late again until its end.

    Args:
        parameters: What keeps a range: the parameters, and their copies in half precision.
        shards: By the names of the parameters; those of copies likewise. Their `all_gather` takes flat arrays, in any
            thread.
        ahead: Whether to gather ahead, the same on all ranks.
    """

    def __init__(
        self, parameters: Sequence[Parameter], shards: Mapping[str, OptimizerShard], ahead: bool
    ) -> None:
        self.parameters = {each.name: each for each in parameters if each.name in shards}
        self.shards, self.ahead, self.are_whole = shards, ahead, False
        self.order: list[list[str]] = []  # of a whole step
        self.gathered: list[list[str]] = []  # in this step
        self.in_order = True  # so far
        self.under_way: _Gathering | None = None

    def around(
        self, weights: Iterable[Parameter | None], x: Tensor, run: Callable[[Tensor], Results]
    ) -> Results:
        """What `run` computes of x with these weights, which are there meanwhile, forward and backward."""
        used = list({each.name: each for each in weights if each is not None and each.name in self.shards}.values())
        if self.are_whole or not used:
            return run(x)
        looks_up = not x.dtype.is_floating_point  # the backward pass of a look-up needs no values of the weight
        if not looks_up:
            x = _OnGradient(lambda: self.release(used))(x)
        self.gather(used)
        results = run(x)
        tensors = [each for each in _tuple(results) if each is not None]
        for each in tensors:
            each.asnumpy()  # waits until it is computed
        self.release(used)
        if looks_up:
            return results
        passed = _OnGradient(lambda: self.gather(used))(*tensors)
        if not isinstance(results, tuple):
            return passed
        rest = iter(_tuple(passed))
        return tuple(None if each is None else next(rest) for each in results)

    def gather(self, parameters: Sequence[Parameter]) -> None:
        """Completes the parameters with the ranges of the other ranks, which all call this, and begins with the next
        ones."""
        names = [each.name for each in parameters]
        if self.arrived() != names:
            _complete(self.arrays(names))
        self.gathered.append(names)
        done = len(self.gathered)
        self.in_order = self.in_order and self.order[done - 1 : done] == [names]
        if self.ahead and self.in_order and done < len(self.order):
            self.under_way = _Gathering(self.order[done], self.arrays(self.order[done]))

    def arrays(self, names: Iterable[str]) -> _Arrays:
        """The memory of these parameters, flat."""
        found: _Arrays = {}
        for name in names:
            found.setdefault(self.shards[name], []).append(self.parameters[name].asnumpy().reshape(-1))
        return found

    def arrived(self) -> Sequence[str]:
        """What was under way and is there now."""
        found, self.under_way = self.under_way, None
        if found is None:
            return ()
        found.wait()
        return found.names

    def release(self, parameters: Sequence[Parameter] | None = None) -> None:
        """Lets go of what other ranks have of the parameters; by default of all, at the end of a step."""
        if self.are_whole:
            return
        if parameters is None:
            self.arrived()  # after an update it is out of date
            self.order, self.gathered, self.in_order = self.gathered or self.order, [], True
        kept = () if self.under_way is None else self.under_way.names
        for parameter in self.parameters.values() if parameters is None else parameters:
            if parameter.name in kept:
                continue
            flat = parameter.asnumpy().reshape(-1)
            own = self.shards[parameter.name].own_range(flat.size)
            _give_back(flat[: own.start])
            _give_back(flat[own.stop :])

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All weights are there within; all ranks enter it together."""
        self.arrived()
        _complete(self.arrays(self.parameters))
        self.are_whole = True
        try:
            yield
        finally:
            self.are_whole = False
            self.release()


class _Gathering:
    """Completes the parameters with these names in a thread of its own, which knows their memory alone: MindSpore
    computes in one thread. It ends with the process, also where it waits for a rank that does not answer."""

    def __init__(self, names: Sequence[str], arrays: _Arrays) -> None:
        self.names, self.arrays = names, arrays
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="weights ahead", daemon=True)
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


class _OnGradient(nn.Cell):
    """The tensors themselves; backward, `act` is called when the gradients of all of them are computed."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(auto_prefix=False)
        self.act = act

    def construct(self, *tensors):
        return tensors if len(tensors) > 1 else tensors[0]

    def bprop(self, *tensors_out_grads):
        grads = _tuple(tensors_out_grads[-1])
        for grad in grads:
            grad.asnumpy()  # waits until it is computed
        self.act()
        return grads


def _tuple(results: Results) -> tuple[Tensor | None, ...]:
    return results if isinstance(results, tuple) else (results,)


@functools.cache
def _system() -> ctypes.CDLL | None:
    """The system's functions; None where memory cannot be given back: then weights take it, and are right."""
    if sys.platform != "linux":
        return None
    system = ctypes.CDLL(None, use_errno=True)
    system.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return system


def _give_back(flat: np.ndarray) -> None:
    """Gives the whole pages of an array's memory back; what stood there is lost."""
    first = -(-flat.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (flat.ctypes.data + flat.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _system() is not None and end > first:
        _system().madvise(first, end - first, _DONT_NEED)
