"""Native layers that two ranks compute together, as threads of one process, against the formulas of native_layers.py.

Each rank has its part of the weights, by the layout of a run, and with sequence parallelism its rows of the residual
stream. Together their results and gradients are those of one rank with everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy_kernels
import pytest
from native_layers import HIDDEN, KEY, VOCABULARY, Case, attention_of, mlp_of, normal
from thread_ranks import on_groups
from tolerances import SAME_ROUNDINGS, U_BFLOAT16, U_FLOAT16

from trainer.arrays.memory import narrow_weight
from trainer.arrays.numpy_operators import BFLOAT16
from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.arrays.vocabulary.embedding import CpuEmbedding
from trainer.arrays.vocabulary.head import FusedLinearCrossEntropy
from trainer.models.dropout import DropoutShards
from trainer.models.spec.build import model_spec
from trainer.models.spec.model import NormSpec
from trainer.models.spec.names import EMBEDDING
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.layout import ModelLayout, ParameterLayout, model_layout
from trainer.parallel.mesh import Degrees, MeshCoordinate
from trainer.parallel.sharding import shard_range
from trainer.parallel.tensor import RankModelShard, TensorParallel

pytestmark = pytest.mark.usefixtures("small_blocks")
RANKS = 2
LAYER = "model.layers.0."
ROWS = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole stream", "own rows"])


class RankResult(NamedTuple):
    """What one rank has of a result and of all gradients."""

    result_ND: np.ndarray
    grad_ND: np.ndarray
    gradients: dict[str, np.ndarray]


def where(rank: int) -> MeshCoordinate:
    return MeshCoordinate(0, 0, 0, rank)


def joined(layout: ModelLayout, name: str, parts: list[np.ndarray]) -> np.ndarray:
    """Returns the gradient of a whole weight from those of the ranks."""
    one: ParameterLayout = layout.parameters[LAYER + name]
    copies = RANKS // one.shards
    if "tp" in one.sums or "kv" in one.sums:  # each rank has a part of each number
        parts = [sum(parts[first : first + copies]) for first in range(0, RANKS, copies)]
    else:
        for first in range(0, RANKS, copies):
            np.testing.assert_array_equal(parts[first], parts[first + copies - 1], err_msg=name)
        parts = parts[::copies]
    return np.concatenate(parts, one.dimension) if one.shards > 1 else parts[0]


def on_two_ranks(case: Case, sequence_parallel: bool, dtype: type = np.float32) -> list[RankResult]:
    """Runs the forward and backward pass of a sublayer on each rank."""
    layout = model_layout(case.settings, Degrees(model_parallel=RANKS), sequence_parallel=sequence_parallel)

    def work(group: CpuGroup) -> RankResult:
        tensor = TensorParallel(group, sequence_parallel)
        [layer] = model_spec(case.settings).local(RANKS, group.rank).layers
        shard = RankModelShard(layout, where(group.rank), tensor)
        weights = {name: np.ascontiguousarray(layout.shard(LAYER + name, shard.coordinate).of(array))
                   for name, array in case.weights.items()}  # fmt: skip
        if dtype != np.float32:
            weights = narrowed(weights, dtype)
        inputs = SimpleNamespace(ids_N=np.zeros(len(case.x_ND)), rows=None)
        dropout = DropoutShards(case.settings, shard).layer_dropout(layer, 0, KEY, inputs)

        def call(**options: Any) -> SublayerCall:
            return SublayerCall(weights, dropout=dropout, trained=weights, **options)

        rows = tensor.residual_shard(len(case.x_ND))
        x_ND, sublayer, forward = case.x_ND[rows], case.sublayer(Scratch(), layer, tensor), call()
        result = sublayer.forward(forward, x_ND)
        sublayer.check_saved(forward.saved, len(case.x_ND), len(x_ND), dtype, sequence_parallel=sequence_parallel)
        np.testing.assert_array_equal(sublayer.forward(call(save=False), x_ND), result)
        grad, found = sublayer.backward(call(saved=forward.saved), x_ND, case.upstream_ND[rows])
        return RankResult(result.copy(), grad.copy(), arrays_of(found))

    return on_groups(RANKS, work)


def narrowed(weights: Mapping[str, np.ndarray], dtype: type) -> dict[str, np.ndarray]:
    return {name: narrow_weight(array, dtype) if array.ndim == 2 else array for name, array in weights.items()}


def together(case: Case, sequence_parallel: bool, found: list[RankResult]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the result and the gradients of one rank with everything."""
    layout = model_layout(case.settings, Degrees(model_parallel=RANKS), sequence_parallel=sequence_parallel)
    results, grads = [one.result_ND for one in found], [one.grad_ND for one in found]
    if not sequence_parallel:
        for arrays in (results, grads):
            np.testing.assert_array_equal(arrays[0], arrays[1])
    pieces = slice(None) if sequence_parallel else slice(1)
    gradients = {
        name: joined(layout, name, [one.gradients[name] for one in found]) for name in found[0].gradients
    }
    return np.concatenate(results[pieces]), {"x": np.concatenate(grads[pieces])} | gradients


HEADS = [
    "plain", "one group, interleaved", "partial, biases", "head norms, window", "everything", "latent",
    "latent, adapters", "latent, everything", "latent, no norms, a scale",
]  # fmt: skip
COLUMNS = ["mlp", "mlp, norm after it", "mlp, everything", "mlp, no gate, adapters with dropout"]


def case_of(name: str) -> Case:
    """Returns a case of attention, or of a feed-forward layer whose columns two ranks can share."""
    kind, _, of = name.partition(", ")
    return mlp_of(of or "plain", 10, width=8) if kind == "mlp" else attention_of(name)


@ROWS
@pytest.mark.parametrize("name", HEADS + COLUMNS)
def test_heads_and_columns_of_two_ranks(name: str, sequence_parallel: bool) -> None:
    case = case_of(name)
    result, gradients = together(case, sequence_parallel, on_two_ranks(case, sequence_parallel))
    case.check_result(result)
    case.check_gradients(gradients)


@ROWS
@pytest.mark.parametrize("name", ["head norms, window", "norm after it", "dropout of probabilities", "latent", "mlp"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16], ids=["bfloat16", "float16"])
def test_half_precision_on_two_ranks_rounds_as_on_one(name: str, dtype: type, sequence_parallel: bool) -> None:
    """A rank's heads or columns take the same rounded numbers; only sums of them are added up in another order.
    Adapters are not among the cases: where ranks share the inputs of A, each rounds its part of what B takes."""
    case = case_of(name)
    result, gradients = together(case, sequence_parallel, on_two_ranks(case, sequence_parallel, dtype))
    right, right_gradients = on_one_rank(case, dtype)
    same = SAME_ROUNDINGS * (1 if dtype == BFLOAT16 else U_FLOAT16 / U_BFLOAT16)
    assert rms(result, right) < same
    for weight, gradient in right_gradients.items():
        assert rms(gradients[weight], gradient) < same, weight


def rms(ours: np.ndarray, right: np.ndarray) -> float:
    """Returns the root mean square of the difference, relative to that of the right numbers."""
    return float(np.sqrt(np.mean((ours - right) ** 2) / np.mean(right**2)))


def on_one_rank(case: Case, dtype: type) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    case = replace(case, weights=narrowed(case.weights, dtype))
    sublayer, call = case.sublayer(), case.call()
    result = sublayer.forward(call, case.x_ND).copy()
    sublayer.check_saved(call.saved, len(result), len(result), dtype)
    grad, found = sublayer.backward(case.call(saved=call.saved), case.x_ND, case.upstream_ND)
    return result, arrays_of({"x": grad} | found)


class Vocabulary(NamedTuple):
    """An embedding and a head over the vocabulary, of which each rank has a part: 5 and 6 tokens."""

    ids_N: np.ndarray
    labels_N: np.ndarray
    valid_N1: np.ndarray
    head: Case
    embedding: Case


def vocabulary() -> Vocabulary:
    random, rows = np.random.default_rng(8), 10
    ids_N, labels_N = random.integers(0, VOCABULARY, (2, rows), dtype=np.int32)
    valid_N1 = (random.random((rows, 1)) < 0.7).astype(np.float32)
    weights = {"norm": 1 + normal(random, HIDDEN, scale=0.3), "weight": normal(random, VOCABULARY, HIDDEN)}

    def loss(x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        y = numpy_kernels.rms_norm(x, norm, 1e-3)
        return numpy_kernels.cross_entropy(y, weight, labels_N, valid_N1[:, 0] > 0)

    terms = 2 * HIDDEN + 4 + VOCABULARY + 8 + rows
    head = Case(normal(random, rows, HIDDEN), np.ones(()), weights, loss, terms)
    matrix = {EMBEDDING: normal(random, VOCABULARY, HIDDEN)}
    embedding = Case(None, normal(random, rows, HIDDEN), matrix, lambda **weights: weights[EMBEDDING][ids_N], rows)
    return Vocabulary(ids_N, labels_N, valid_N1, head, embedding)


def shard_of(weights: Mapping[str, np.ndarray], name: str, group: CpuGroup) -> dict[str, np.ndarray]:
    own = shard_range(VOCABULARY, group.rank, group.size)
    return {**weights, name: np.ascontiguousarray(weights[name][own])}


def arrays_of(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: one.copy() for name, one in found.items()}


@pytest.mark.parametrize("large", [1.0, 1e4])
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(2, False), (2, True), (3, False)])
def test_a_head_over_shards_of_the_vocabulary(ranks: int, sequence_parallel: bool, large: float) -> None:
    """The loss of all ranks is that of one with all logits, also where these are large."""
    given = vocabulary()
    case = given.head
    if large != 1:
        weights = case.weights | {"weight": case.weights["weight"] * np.float32(large)}
        case = Case(case.x_ND, case.upstream_ND, weights, case.formula, case.terms)

    def work(group: CpuGroup) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        tensor = TensorParallel(group, sequence_parallel)
        run = FusedLinearCrossEntropy(HIDDEN, NormSpec(1e-3), Scratch(), tensor, VOCABULARY)
        own, x_nD = shard_of(case.weights, "weight", group), case.x_ND[tensor.residual_shard(len(case.x_ND))]
        alone = run.forward(SublayerCall(own, save=False), x_nD, given.labels_N, given.valid_N1)
        call = SublayerCall(own, trained=own)
        loss = run.forward(call, x_nD, given.labels_N, given.valid_N1).copy()
        assert alone == loss
        grad, found = run.backward(call, x_nD, given.labels_N, given.valid_N1, np.float32(1))
        return loss, grad.copy(), arrays_of(found)

    losses, grads, gradients = zip(*on_groups(ranks, work), strict=True)
    assert len(set(map(float, losses))) == 1
    case.check_result(losses[0])
    if large != 1:  # where all probabilities are 0 or 1, gradients are nothing but rounding
        assert all(np.isfinite(one).all() for of_rank in gradients for one in of_rank.values())
        return
    norms = [one["norm"] for one in gradients]
    whole = {"weight": np.concatenate([one["weight"] for one in gradients])}
    if sequence_parallel:
        case.check_gradients({"x": np.concatenate(grads), "norm": sum(norms)} | whole)
    else:
        for rank in range(1, ranks):
            np.testing.assert_array_equal(norms[rank], norms[0])
            np.testing.assert_array_equal(grads[rank], grads[0])
        case.check_gradients({"x": grads[0], "norm": norms[0]} | whole)


@ROWS
def test_an_embedding_over_shards_of_the_vocabulary(sequence_parallel: bool) -> None:
    given = vocabulary()
    case = given.embedding

    def work(group: CpuGroup) -> tuple[np.ndarray, np.ndarray]:
        tensor = TensorParallel(group, sequence_parallel)
        run, own = CpuEmbedding(tensor, VOCABULARY), shard_of(case.weights, EMBEDDING, group)
        call = SublayerCall(own)
        result = run.forward(call, given.ids_N).copy()
        grad_ND = case.upstream_ND[tensor.residual_shard(len(given.ids_N))]
        return result, run.backward(call, given.ids_N, grad_ND)[0][EMBEDDING].copy()

    results, gradients = zip(*on_groups(RANKS, work), strict=True)
    if not sequence_parallel:
        np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(np.concatenate(results)[: len(given.ids_N)], case.weights[EMBEDDING][given.ids_N])
    case.check_gradients({EMBEDDING: np.concatenate(gradients)})
