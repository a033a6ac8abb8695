"""Attention, feed-forward layer, head and embedding of native CPU layers against literal float64 formulas and their
exact derivatives (native_layers.py), and what must change no bit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy_kernels
import pytest
from model_gradients import model_gradients
from native_layers import (
    ATTENTION,
    DROPOUT,
    HIDDEN,
    KEY,
    LATENT,
    MLPS,
    POST_NORMS,
    VOCABULARY,
    WIDTH,
    Case,
    adapters,
    attention_of,
    mlp_formula,
    mlp_of,
    normal,
    trained_subsets,
)
from numpy_kernels import assert_close, assert_same_bits, distance
from tiny_trainer import TinyTrainer, make_batch, shared_trainer
from tolerances import decoder_limits, rounding_limit

from trainer.arrays import memory, operators, tiles
from trainer.arrays.attention import sublayer as attention
from trainer.arrays.attention.sublayer import CpuAttention
from trainer.arrays.mlp import CpuMlp
from trainer.arrays.moe import experts
from trainer.arrays.numpy_operators import NUMPY_OPERATORS
from trainer.arrays.tiles import Scratch, SublayerCall
from trainer.arrays.vocabulary import head
from trainer.arrays.vocabulary.embedding import CpuEmbedding, CpuMapping, CpuMerge
from trainer.arrays.vocabulary.head import FusedLinearCrossEntropy
from trainer.arrays.vocabulary.loss_terms import LossTerms
from trainer.device.threads import HostThreads
from trainer.models.inputs import RouterStatistics
from trainer.models.spec.model import AdapterSpec, MlpSpec, NormSpec
from trainer.models.spec.names import EMBEDDING, MAPPING_IN

pytestmark = pytest.mark.usefixtures("small_blocks")


def of_sublayers(attention: Iterable[str], mlp: Iterable[tuple[str, int]]) -> pytest.MarkDecorator:
    """Parametrizes a test by cases of attention, and of feed-forward layers with so many tokens."""
    cases = {f"attention, {name}": functools.partial(attention_of, name) for name in attention}
    cases |= {f"mlp, {name}, {tokens}": functools.partial(mlp_of, name, tokens) for name, tokens in mlp}
    return pytest.mark.parametrize("make", cases.values(), ids=cases)


ALL_MLPS = [(name, 10) for name in MLPS]


@of_sublayers(ATTENTION, [("plain", 1), ("biases", 4), *ALL_MLPS])
def test_a_sublayer(make: Callable[[], Case], implementation: str) -> None:
    case = make()
    given, sublayer, call = case.x_ND.copy(), case.sublayer(), case.call()
    result = sublayer.forward(call, case.x_ND)
    case.check_result(result)
    sublayer.check_saved(call.saved, len(given), len(given))
    once = case.call(save=False)
    np.testing.assert_array_equal(sublayer.forward(once, case.x_ND), result)
    assert not once.saved
    grad, found = sublayer.backward(case.call(saved=call.saved), case.x_ND, case.upstream_ND)
    case.check_gradients({"x": grad} | found)
    np.testing.assert_array_equal(case.x_ND, given)


def test_shared_experts_have_neither_norm_nor_residual(implementation: str) -> None:
    random, spec = np.random.default_rng(1), MlpSpec(HIDDEN, WIDTH, NormSpec(1e-3))
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {f"{name}_proj.weight": normal(random, *shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
    x_ND, upstream_ND = normal(random, 10, HIDDEN), normal(random, 10, HIDDEN)
    formula = functools.partial(mlp_formula, spec, {}, prefix="", is_sublayer=False)
    case = Case(x_ND, upstream_ND, weights, formula, HIDDEN + 8 + WIDTH)
    mlp, call = CpuMlp(spec, Scratch(), prefix="", is_sublayer=False), case.call()
    result = mlp.forward(call, case.x_ND)
    case.check_result(result)
    np.testing.assert_array_equal(mlp.forward(case.call(save=False), case.x_ND), result)
    grad, found = mlp.backward(case.call(saved=call.saved), case.x_ND, case.upstream_ND)
    case.check_gradients({"x": grad} | found)


RECOMPUTED = ("plain", "norm after it", "adapters with dropout", "everything")


@of_sublayers(RECOMPUTED, [(name, 10) for name in RECOMPUTED])
def test_a_recomputed_forward_pass_keeps_the_same_without_its_result(make: Callable[[], Case]) -> None:
    """The last product has no use then, unless the norm after it has."""
    case, saved = make(), []
    for computes in (True, False):
        call = case.call(compute_output=computes)
        case.sublayer().forward(call, case.x_ND)
        saved.append(call.saved)
    assert_same_bits(*saved)


@of_sublayers(
    ["head norms, window", "everything", "latent, adapters", "latent, everything"], [("biases", 10), ("everything", 10)]
)
def test_only_trained_weights_have_gradients(make: Callable[[], Case]) -> None:
    """Each weight alone has the gradient that it has among all, and x always has its gradient."""
    case = make()
    sublayer = case.sublayer()

    def gradients(trained: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        call = case.call()
        sublayer.forward(call, case.x_ND)
        return sublayer.backward(case.call(trained, saved=call.saved), case.x_ND, case.upstream_ND)

    whole_grad, whole = gradients(list(case.weights))
    for names in trained_subsets(case.weights):
        grad, found = gradients(names)
        assert list(found) == names
        assert_same_bits(found | {"x": grad}, {name: whole[name] for name in names} | {"x": whole_grad})


class HeadResult(NamedTuple):
    """The loss, and its gradients where they were asked for."""

    loss: np.ndarray
    grad: np.ndarray | None
    weights: dict[str, np.ndarray]


def run_head(
    run: FusedLinearCrossEntropy, weights: dict[str, np.ndarray], x_ND: np.ndarray, labels_N: np.ndarray,
    valid_N1: np.ndarray, trained: tuple[str, ...] | None,
) -> HeadResult:  # fmt: skip
    call = SublayerCall(weights, save=trained is not None, trained=trained or ())
    loss = run.forward(call, x_ND, labels_N, valid_N1)
    if trained is None:
        assert not call.saved
        return HeadResult(loss, None, {})
    return HeadResult(loss, *run.backward(call, x_ND, labels_N, valid_N1, np.float32(1)))


def assert_same_head(some: HeadResult, every: HeadResult, trained: tuple[str, ...]) -> None:
    """Compares the results where these weights alone are trained with those where all are."""
    assert some.loss == every.loss
    expected = {name: every.weights[name] for name in trained}
    assert_same_bits(some.weights | {"x": some.grad}, expected | {"x": every.grad})


class HeadCase(NamedTuple):
    x_ND: np.ndarray
    weights: dict[str, np.ndarray]
    labels_N: np.ndarray
    valid_N1: np.ndarray

    def formula(self, x: np.ndarray, norm: np.ndarray, weight: np.ndarray, mapping: np.ndarray | None = None):
        z = x if mapping is None else numpy_kernels.linear(x, mapping)
        y = numpy_kernels.rms_norm(z, norm, 1e-3)
        return numpy_kernels.cross_entropy(y, weight, self.labels_N, self.valid_N1[:, 0] > 0)

    @property
    def case(self) -> Case:
        terms = 2 * HIDDEN + 4 + VOCABULARY + 4 + len(self.x_ND)
        return Case(self.x_ND, np.ones(()), self.weights, self.formula, terms + HIDDEN * ("mapping" in self.weights))

    def run(self, trained: tuple[str, ...] | None = None) -> HeadResult:
        run = FusedLinearCrossEntropy(len(self.weights["norm"]), NormSpec(1e-3), Scratch())
        return run_head(run, self.weights, self.x_ND, self.labels_N, self.valid_N1, trained)


EMBEDDED = 4  # width of an embedding that is mapped to the residual stream


def head_case(rows: int, valid: int, maps: bool = False) -> HeadCase:
    random = np.random.default_rng(rows * 100 + valid)
    valid_N1 = np.zeros((rows, 1), np.float32)
    valid_N1[random.choice(rows, valid, replace=False)] = 1
    labels_N = random.integers(0, VOCABULARY, rows, dtype=np.int32) * (valid_N1[:, 0] > 0)
    width = EMBEDDED if maps else HIDDEN
    weights = {"norm": 1 + normal(random, width, scale=0.3), "weight": normal(random, VOCABULARY, width)}
    if maps:
        weights["mapping"] = normal(random, width, HIDDEN, scale=HIDDEN**-0.5)
    return HeadCase(normal(random, rows, HIDDEN), weights, labels_N.astype(np.int32), valid_N1)


@pytest.mark.parametrize("maps", [False, True], ids=["", "mapped"])
@pytest.mark.parametrize(("rows", "valid"), [(1, 1), (4, 3), (10, 6), (10, 10)])
def test_head(rows: int, valid: int, maps: bool, implementation: str) -> None:
    own = head_case(rows, valid, maps)
    case, given = own.case, own.x_ND.copy()
    found = own.run(tuple(own.weights))
    case.check_result(found.loss)
    case.check_gradients({"x": found.grad} | found.weights)
    np.testing.assert_array_equal(own.x_ND, given)
    alone = own.run()
    assert alone.loss == found.loss and alone[1:] == (None, {})
    run = FusedLinearCrossEntropy(len(own.weights["norm"]), NormSpec(1e-3), Scratch())
    z = own.x_ND if not maps else numpy_kernels.linear(own.x_ND, own.weights["mapping"])
    logits_NV = numpy_kernels.linear(numpy_kernels.rms_norm(z, own.weights["norm"], 1e-3), own.weights["weight"])
    assert distance(run.logits(SublayerCall(own.weights), own.x_ND), logits_NV) <= rounding_limit(case.terms)


def test_the_adapter_of_the_head_adds_up_over_blocks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula has the merged matrix; 10 tokens are blocks of 4, 4 and 2. A frozen matrix changes nothing."""
    monkeypatch.setattr("trainer.arrays.vocabulary.head.logit_rows", lambda tokens, vocabulary: 4)
    own = head_case(10, 6)
    random = np.random.default_rng(3)
    weights = own.weights | {"lora_A": normal(random, 2, HIDDEN), "lora_B": normal(random, VOCABULARY, 2)}

    def formula(lora_A: np.ndarray, lora_B: np.ndarray, weight: np.ndarray, **others: np.ndarray):
        return own.formula(weight=weight + 1.5 * lora_B @ lora_A, **others)

    run = FusedLinearCrossEntropy(HIDDEN, NormSpec(1e-3), Scratch(), adapter=AdapterSpec(2, 1.5))
    arguments = run, weights, own.x_ND, own.labels_N, own.valid_N1
    every = run_head(*arguments, tuple(weights))
    case = Case(own.x_ND, np.ones(()), weights, formula, own.case.terms + 2)
    case.check_result(every.loss)
    case.check_gradients({"x": every.grad} | every.weights)
    for trained in (("lora_A", "lora_B"), ("lora_B",), ("lora_A",)):
        some = run_head(*arguments, trained)
        assert_same_head(some, every, trained)
    assert run_head(*arguments, None).loss == every.loss


@pytest.mark.parametrize("trained", [(), ("norm",), ("weight",), ("mapping",), ("norm", "mapping")], ids=" ".join)
def test_a_frozen_part_of_the_head_has_no_gradient(trained: tuple[str, ...]) -> None:
    case = head_case(10, 6, maps=True)
    every, some = case.run(tuple(case.weights)), case.run(trained)
    assert_same_head(some, every, trained)


def test_the_head_with_large_logits_and_without_valid_labels(implementation: str) -> None:
    own = head_case(10, 6)
    weights = own.weights | {"weight": own.weights["weight"] * np.float32(1e4)}
    large = own._replace(weights=weights)
    large.case.check_result(large.run().loss)
    found = own._replace(valid_N1=np.zeros((10, 1), np.float32)).run(("norm", "weight"))
    assert found.loss == 0
    assert not any(array.any() for array in (found.grad, *found.weights.values()))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_the_loss(bad: float, implementation: str) -> None:
    case = head_case(10, 10)
    case.x_ND[3, 2] = bad
    found = case.run(("weight",))
    assert not np.isfinite(found.loss) and not np.isfinite(found.weights["weight"]).all()


@pytest.mark.parametrize("cap", [None, 1.5], ids=["", "capped"])
@pytest.mark.parametrize(("smoothing", "z_weight"), [(0.2, 0.0), (0.0, 0.05), (0.3, 0.02)])
def test_the_head_with_terms_beside_cross_entropy(
    smoothing: float, z_weight: float, cap: float | None, implementation: str
) -> None:
    """Label smoothing as torch.nn.CrossEntropyLoss documents it, the z-loss of PaLM; weights of tokens, also frozen."""
    own = head_case(10, 6)
    own.valid_N1[...] *= np.linspace(0.5, 2, 10, dtype=np.float32)[:, None]

    def sums(x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        logits = numpy_kernels.rms_norm(x, norm, 1e-3) @ weight.T
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        lse = np.log(np.exp(logits).sum(-1))
        log_probs = logits - lse[:, None]
        rows = -log_probs[np.arange(len(x)), own.labels_N], -log_probs.mean(-1), lse**2
        return np.array([(own.valid_N1[:, 0] * each).sum() for each in rows])

    def formula(x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return sums(x, norm, weight) @ [1 - smoothing, smoothing, z_weight]

    case = Case(own.x_ND, np.ones(()), own.weights, formula, own.case.terms)
    run = FusedLinearCrossEntropy(HIDDEN, NormSpec(1e-3), Scratch(), cap=cap)
    arrays = own.x_ND, own.labels_N, own.valid_N1, None
    for trained in (tuple(own.weights), ("norm",)):
        call = SublayerCall(own.weights, save=True, trained=trained)
        terms = LossTerms(smoothing, z_weight, VOCABULARY)
        case.check_result(run.forward(call, *arrays, terms))
        found = [terms.cross_entropy, terms.smoothed, terms.squares]
        right = sums(own.x_ND, **own.weights)
        assert distance(np.array(found), right) <= rounding_limit(own.case.terms)
        grad, grads = run.backward(call, *arrays, terms, np.float32(1))
        if len(trained) == len(own.weights):
            case.check_gradients({"x": grad} | grads)
    evaluated = run.forward(SublayerCall(own.weights, save=False), *arrays)
    assert distance(evaluated, right[0]) <= rounding_limit(own.case.terms)


IDS = np.array([3, 0, 3, 10, 3, 0, *[7] * 11], np.int32)


def test_embedding() -> None:
    random = np.random.default_rng(2)
    weights, grad_ND = {EMBEDDING: normal(random, VOCABULARY, HIDDEN)}, normal(random, len(IDS), HIDDEN)
    run = CpuEmbedding()
    call = SublayerCall(weights)
    np.testing.assert_array_equal(run.forward(call, IDS), weights[EMBEDDING][IDS])
    right_VD = np.zeros((VOCABULARY, HIDDEN))
    np.add.at(right_VD, IDS, grad_ND.astype(np.float64))
    [found] = run.backward(call, IDS, grad_ND)
    assert distance(found[EMBEDDING], right_VD) <= rounding_limit(11)


def mapped_embedding() -> Case:
    random = np.random.default_rng(3)
    weights = {
        EMBEDDING: normal(random, VOCABULARY, EMBEDDED), MAPPING_IN: normal(random, HIDDEN, EMBEDDED, scale=0.5),
    }  # fmt: skip
    rows_ND = normal(random, len(IDS), HIDDEN)

    def formula(**weights: np.ndarray) -> np.ndarray:
        return numpy_kernels.linear(weights[EMBEDDING][IDS], weights[MAPPING_IN])

    return Case(None, rows_ND, weights, formula, EMBEDDED + len(IDS))


def run_mapped_embedding(case: Case, scratch: Scratch) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the result and the gradients of both matrices."""
    look_up, mapping = CpuEmbedding(), CpuMapping(scratch)
    call = case.call([MAPPING_IN])
    x_NE = look_up.forward(call, IDS)
    grad, found = mapping.backward(call, x_NE, case.upstream_ND)
    return mapping.forward(call, x_NE), found | look_up.backward(call, IDS, grad)[0]


def test_an_embedding_of_another_width(implementation: str) -> None:
    case = mapped_embedding()
    result, found = run_mapped_embedding(case, Scratch())
    case.check_result(result)
    case.check_gradients(found)
    x_NE = case.weights[EMBEDDING][IDS]
    assert CpuMapping(Scratch()).backward(case.call([]), x_NE, case.upstream_ND)[1] == {}


def merge_case() -> Case:
    """Returns a case in which `x` is the embedding of later tokens and the residual stream is among the weights."""
    random = np.random.default_rng(4)
    names = ("norm", "enorm.weight", "hnorm.weight")
    weights = {name: 1 + normal(random, HIDDEN, scale=0.3) for name in names}
    weights |= {
        "eh_proj.weight": normal(random, HIDDEN, 2 * HIDDEN, scale=0.3), "stream": normal(random, 10, HIDDEN),
    }  # fmt: skip

    def formula(x: np.ndarray, stream: np.ndarray, norm: np.ndarray, **weights: np.ndarray) -> np.ndarray:
        hidden = numpy_kernels.rms_norm(stream, norm, 1e-3)
        both = [
            numpy_kernels.rms_norm(x, weights["enorm.weight"], 1e-3),
            numpy_kernels.rms_norm(hidden, weights["hnorm.weight"], 1e-3),
        ]
        return numpy_kernels.linear(np.concatenate(both, 1), weights["eh_proj.weight"])

    x_ND, upstream_ND = normal(random, 10, HIDDEN), normal(random, 10, HIDDEN)
    return Case(x_ND, upstream_ND, weights, formula, 2 * (HIDDEN + 4) + 2 * HIDDEN)


def test_the_merge_of_a_further_prediction(implementation: str) -> None:
    case, run = merge_case(), CpuMerge(HIDDEN, NormSpec(1e-3), Scratch())
    weights = dict(case.weights)
    stream_ND = weights.pop("stream")
    case.check_result(run.forward(SublayerCall(weights), case.x_ND, stream_ND))

    def gradients(trained: list[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        call = SublayerCall(weights, trained=trained)
        of_x, of_stream, found = run.backward(call, case.x_ND, stream_ND, case.upstream_ND)
        return {"x": of_x, "stream": of_stream}, found

    of_inputs, found = gradients(list(weights))
    case.check_gradients(of_inputs | found)
    for names in trained_subsets(weights):
        same_inputs, alone = gradients(names)
        assert list(alone) == names
        assert_same_bits(same_inputs | alone, of_inputs | {name: found[name] for name in names})


def test_what_threads_share_inside_their_work_stays_with_each() -> None:
    """Otherwise all would wait for threads that wait, too."""
    pool, found = HostThreads(2), []

    def work(item: int, thread: int) -> None:
        pool.run(range(3), lambda inner, own: found.append((item, inner, thread == own)))

    pool.run(range(4), work)
    assert sorted(found) == [(item, inner, True) for item in range(4) for inner in range(3)]
    alone = threading.Barrier(2)
    pool.run(range(2), lambda item, thread: alone.wait(30))  # afterwards they share again


def everything(threads: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, np.ndarray]]:
    """Results and gradients of all parts, computed by so many threads."""
    pool, scratch = HostThreads(threads), Scratch()
    for module in (attention, experts, head, memory, tiles):
        monkeypatch.setattr(module, "host_threads", lambda: pool)
    names = ("head norms, window", "everything", "latent", "latent, everything")
    cases = {f"attention, {name}": attention_of(name) for name in names}
    cases |= {f"mlp, {name}": mlp_of(name, 10) for name in MLPS}
    for name, case in cases.items():
        sublayer, call = case.sublayer(scratch), case.call()
        yield name, sublayer.forward(call, case.x_ND)
        grad, found = sublayer.backward(case.call(saved=call.saved), case.x_ND, case.upstream_ND)
        yield f"of {name}", grad
        yield from ((f"{name}: {weight}", one) for weight, one in found.items())
    for maps in (False, True):
        own = head_case(10, 6, maps)
        found = own.run(tuple(own.weights))
        yield f"loss {maps}", found.loss
        yield f"head {maps}", found.grad
        yield from ((f"head {maps}: {name}", one) for name, one in found.weights.items())
    result, found = run_mapped_embedding(mapped_embedding(), scratch)
    yield "embedding", result
    yield from found.items()
    case = merge_case()
    of_x, of_stream, found = CpuMerge(HIDDEN, NormSpec(1e-3), scratch).backward(
        case.call(), case.x_ND, case.weights["stream"], case.upstream_ND
    )
    yield from ({"merge of x": of_x, "merge of the stream": of_stream} | found).items()


def test_the_bits_are_the_same_for_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    one = dict(everything(1, monkeypatch))
    for threads in (2, 3):
        assert_same_bits(dict(everything(threads, monkeypatch)), one)


def gradients(trainer: TinyTrainer) -> dict[str, np.ndarray]:
    """Returns the gradients of all trained weights, and the loss."""
    inputs = trainer.build_inputs(make_batch(seed=4, valid=9, rows=2))
    loss, found = model_gradients(trainer.model, inputs, dropout=KEY)
    return found | {"loss": loss}


MODEL = {"num_layers": 3, "use_qk_norm": True, "qkv_has_bias": True, "sliding_window": 5}
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "shared_expert_num": 1, "capacity_factor": 0.7}
MODELS: dict[str, dict] = {
    "windows": MODEL,
    "norms after sublayers, dropout": {**POST_NORMS, **DROPOUT},
    "adapters with dropout": {**adapters(0.3), **DROPOUT},
    "latent": {**LATENT, **adapters(0.3, ".*_proj.*"), **DROPOUT},
    "experts, further predictions": {"moe_config": EXPERTS, "mtp_depth": 1, **DROPOUT},
}
COMPUTED_AGAIN = [{"recompute": True}, {"select_recompute": ["mlp"]}, {"select_recompute": ["attention"]}]


CASES = [*((name, one) for name in MODELS for one in COMPUTED_AGAIN), ("windows", {"recompute": [0, 2]})]


@pytest.mark.parametrize(("model", "recomputed"), CASES, ids=str)
def test_recomputation_changes_no_bit(model: str, recomputed: dict) -> None:
    ours = shared_trainer(sections={"recompute_config": recomputed}, **MODELS[model])
    assert_same_bits(gradients(ours), gradients(shared_trainer(**MODELS[model])))


@pytest.mark.parametrize("frozen", [
    {"layers": "0-1", "embeddings": True}, {"include": ["*norm*"]}, {"layers": "2"}, {"embeddings": True},
    {"include": ["lm_head.weight"]},
], ids=str)  # fmt: skip
def test_frozen_weights_change_no_bit_of_the_other_gradients(frozen: dict) -> None:
    ours = gradients(shared_trainer(sections={"freeze": frozen}, **MODEL))
    every = gradients(shared_trainer(**MODEL))
    assert 1 < len(ours) < len(every)
    assert_same_bits(ours, {name: every[name] for name in ours})


def test_an_evaluation_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, kept = TinyTrainer(**MODEL), []
    for kind in (CpuAttention, CpuMlp):
        def forward(self, call: SublayerCall, *arguments, plain=kind.forward) -> np.ndarray:
            result = plain(self, call, *arguments)
            kept.append(bool(call.saved))
            return result

        monkeypatch.setattr(kind, "forward", forward)
    inputs = trainer.build_inputs(make_batch(seed=4, valid=9, rows=2))
    evaluated = trainer.model(inputs).tokens.asnumpy()
    assert kept == [False] * 6
    trained = trainer.model(inputs, statistics=RouterStatistics()).tokens.asnumpy()
    assert kept[6:] == [True] * 6
    assert evaluated == trained > 0


def test_a_training_without_the_library_is_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TinyTrainer(**MODEL)
    batches, settings = [make_batch(seed, valid=9, rows=2) for seed in range(4)], trainer.model.settings
    limit = decoder_limits(settings, rows=2)

    def trained() -> tuple[list[float], dict[str, np.ndarray]]:
        step = trainer.step(lambda update: 0.01, optimizer={"type": "SGD"})
        return [step([batch]).loss for batch in batches], trainer.weights()

    losses, weights = trained()
    monkeypatch.setattr(operators, "library", lambda: None)
    monkeypatch.setattr(operators, "_THREAD", threading.local())
    assert operators.operators() is NUMPY_OPERATORS
    plain_losses, plain_weights = trained()
    assert losses != plain_losses or any((weights[name] != plain_weights[name]).any() for name in weights)
    np.testing.assert_allclose(plain_losses, losses, rtol=len(batches) * limit.loss)
    assert_close(plain_weights, weights, len(batches) * limit.gradients)
