"""Attention, feed-forward layer, head and embedding on arrays against literal float64 formulas and their derivatives.

The derivatives are complex steps: f(x + ih) has the derivative of f as its imaginary part over h, without cancellation
(Squire and Trapp 1998). Blocks of rows, queries, logits and columns are a few numbers long here, so that small arrays
have several of each, and a shorter last one.

Limits: tolerances.py, of the longest path. As in test_kernels.py, the gradient of a softmax cancels: `scale` is 3.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import mindspore
import numpy as np
import numpy_kernels
import pytest
from mindspore import Tensor
from numpy_kernels import distance
from tiny_trainer import TinyTrainer, assert_same_bits, make_batch
from tolerances import decoder_limits, rounding_limit

from trainer.arrays import head, norms, onednn, positions, sublayers
from trainer.arrays.memory import Scratch
from trainer.config import parse_config
from trainer.config.schema.model import ModelConfig
from trainer.device.threads import HostThreads
from trainer.models.inputs import RouterStatistics
from trainer.models.spec.shapes import attention_shapes, mlp_shapes

HIDDEN, HEADS, SIZE, WIDTH, VOCABULARY = 6, 4, 4, 9, 11
RANDOM = np.random.default_rng(21)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (norms, "ROWS", 4), (sublayers, "ROWS", 4), (sublayers, "_SCORES", 1),
        (positions, "_QUERIES", 3), (positions, "_KEYS", 2),
        (head, "_LOGITS", 1), (head, "_FEWEST_ROWS", 4), (head, "_COLUMNS", 4), (head, "_ROWS", 3),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.fixture(params=["onednn", "numpy"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        hide_library(monkeypatch)
    return request.param


def hide_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "library", lambda: None)
    monkeypatch.setattr(onednn, "_OF_THREAD", threading.local())


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RANDOM.standard_normal(shape) * scale).astype(np.float32)


def settings_of(**changes: Any) -> ModelConfig:
    section = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_heads": HEADS, "n_kv_heads": 2, "head_dim": SIZE,
        "intermediate_size": WIDTH, "vocab_size": VOCABULARY, "seq_length": 16, "rms_norm_eps": 1e-3,
    }  # fmt: skip
    return parse_config("layer", json.dumps({"model": {"model_config": section | changes}})).decoder


def derivatives(
    function: Callable[..., np.ndarray], arguments: Mapping[str, np.ndarray], upstream: np.ndarray
) -> dict[str, np.ndarray]:
    """Of sum(function(**arguments) * upstream), which is analytic, with respect to each argument."""
    step, found = 1e-30, {}
    given = {name: array.astype(complex) for name, array in arguments.items()}
    for name, array in given.items():
        found[name] = np.empty(array.shape)
        for place in np.ndindex(*array.shape):
            array[place] += 1j * step
            found[name][place] = (function(**given) * upstream).sum().imag / step
            array[place] = array[place].real
    return found


class Sequences(NamedTuple):
    """Where the tokens of some sequences stand, for the layer and for the formulas."""

    segments_BT: np.ndarray
    cos_Nd: np.ndarray
    sin_Nd: np.ndarray
    positions: positions.TokenPositions

    def allowed(self, window: int | None) -> np.ndarray:
        tokens = np.arange(self.segments_BT.shape[1])
        apart_QS = tokens[:, None] - tokens[None]
        seen_QS = (apart_QS >= 0) & (apart_QS < (window or 1000))
        return seen_QS & (self.segments_BT[:, :, None] == self.segments_BT[:, None, :])


def sequences_of(settings: ModelConfig, segments: list[list[int]], window: int | None) -> Sequences:
    segments_BT = np.array(segments)
    angles = normal(segments_BT.size, settings.rotary_size // 2, scale=2).astype(np.float64)
    both = np.repeat(angles, 2, axis=1) if settings.rope_interleave else np.concatenate((angles, angles), 1)
    cos_Nd, sin_Nd = np.cos(both).astype(np.float32), np.sin(both).astype(np.float32)
    table_N1h = positions.Rotary(settings).table(cos_Nd, sin_Nd)
    placed = positions.TokenPositions(table_N1h, positions.query_blocks(segments_BT, window))
    return Sequences(segments_BT, cos_Nd, sin_Nd, placed)


def weights_of(settings: ModelConfig, shapes: Mapping[str, tuple[int, ...]], norm: str) -> dict[str, np.ndarray]:
    found = {norm: 1 + normal(HIDDEN, scale=0.3)}
    for name, shape in shapes.items():
        if len(shape) == 2:
            found[name] = normal(*shape, scale=shape[1] ** -0.5)
        else:
            found[name] = normal(*shape, scale=0.3) + ("norm" in name)
    return found


def attention_formula(
    settings: ModelConfig, sequences: Sequences, window: int | None, x: np.ndarray, **weights: np.ndarray
) -> np.ndarray:
    y = numpy_kernels.rms_norm(x, weights["input_layernorm.weight"], settings.rms_norm_eps)
    found = []
    for name in "qkv":
        prefix = f"self_attn.{name}_"
        found.append(numpy_kernels.linear(y, weights[f"{prefix}proj.weight"], weights.get(f"{prefix}proj.bias", 0.0)))
        if f"{prefix}norm.weight" in weights:
            by_head = found[-1].reshape(len(y), -1, SIZE)
            normed = numpy_kernels.rms_norm(by_head, weights[f"{prefix}norm.weight"], settings.rms_norm_eps)
            found[-1] = normed.reshape(found[-1].shape)
        if name != "v":
            tables = sequences.cos_Nd.astype(np.float64), sequences.sin_Nd.astype(np.float64)
            found[-1] = numpy_kernels.rotary(found[-1], *tables, SIZE, settings.rope_interleave)
    out = numpy_kernels.attention(*found, sequences.allowed(window), SIZE)
    bias = weights.get("self_attn.o_proj.bias", 0.0)
    return x + numpy_kernels.linear(out, weights["self_attn.o_proj.weight"], bias)


ONE, PACKED = [[0] * 7], [[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("changes", "segments", "window"),
    [
        ({}, PACKED, None),
        ({"n_kv_heads": 4}, ONE, None),
        ({"n_kv_heads": 1, "rope_interleave": True}, ONE, None),
        ({"rotary_pct": 0.5, "qkv_has_bias": True, "attn_proj_has_bias": True}, [[0] * 6], None),
        ({"use_qk_norm": True}, PACKED, 3),
        ({}, [[0] * 8], 1),
        ({}, [[0] * 8], 5),
        ({"use_qk_norm": True, "n_kv_heads": 1}, [[0], [0]], None),
    ],
    ids=["documents", "all heads", "one group, interleaved", "partial, biases", "head norms, window", "window 1",
         "window 5", "one token"],
)  # fmt: skip
def test_attention(changes: dict, segments: list, window: int | None, implementation: str) -> None:
    settings = settings_of(**changes)
    sequences = sequences_of(settings, segments, window)
    weights = weights_of(settings, attention_shapes(settings), "input_layernorm.weight")
    assert len(weights) == 5 + 4 * bool(changes.get("qkv_has_bias")) + 2 * bool(changes.get("use_qk_norm"))
    x, upstream = (normal(sequences.segments_BT.size, HIDDEN) for _ in range(2))
    attention, given = sublayers.HostAttention(settings, Scratch(8)), x.copy()

    def formula(x: np.ndarray, **weights: np.ndarray) -> np.ndarray:
        return attention_formula(settings, sequences, window, x, **weights)

    place = sequences.positions, sequences.positions.blocks
    result, saved = attention.forward(x, weights, *place)
    right = formula(x.astype(np.float64), **{name: array.astype(np.float64) for name, array in weights.items()})
    forward = 2 * HIDDEN + 4 + SIZE + 6 + 2 * sequences.segments_BT.shape[1] + HEADS * SIZE
    assert distance(result.asnumpy(), right) <= rounding_limit(forward)
    once, nothing = attention.forward(x, weights, *place, keeps=False)
    assert nothing is None
    np.testing.assert_array_equal(once.asnumpy(), result.asnumpy())
    grad, found = attention.backward(x, weights, *place, saved, upstream, weights)
    check_gradients(formula, {"x": x} | weights, upstream, {"x": grad} | found, forward + len(x))
    np.testing.assert_array_equal(x, given)


def check_gradients(
    formula: Callable[..., np.ndarray], arguments: dict[str, np.ndarray], upstream: np.ndarray,
    found: dict[str, Tensor], terms: int,
) -> None:  # fmt: skip
    right = derivatives(formula, arguments, upstream)
    assert found.keys() == right.keys()
    for name, array in found.items():
        assert distance(array.asnumpy(), right[name]) <= rounding_limit(2 * terms, scale=3), name


def mlp_of(settings: ModelConfig, scratch: Scratch) -> sublayers.HostMlp:
    return sublayers.HostMlp(settings.ffn_size, scratch, norms.RmsNorm(settings.hidden_size, settings.rms_norm_eps))


@pytest.mark.parametrize("tokens", [1, 4, 10])
@pytest.mark.parametrize("biases", [False, True], ids=["", "biases"])
def test_feed_forward_layer(tokens: int, biases: bool, implementation: str) -> None:
    settings = settings_of(mlp_has_bias=biases)
    weights = weights_of(settings, mlp_shapes(settings), "post_attention_layernorm.weight")
    assert len(weights) == 4 + 3 * biases
    x, upstream = normal(tokens, HIDDEN), normal(tokens, HIDDEN)
    mlp, given = mlp_of(settings, Scratch(8)), x.copy()

    def formula(x: np.ndarray, **weights: np.ndarray) -> np.ndarray:
        y = numpy_kernels.rms_norm(x, weights["post_attention_layernorm.weight"], settings.rms_norm_eps)
        gate, up = (
            numpy_kernels.linear(y, weights[f"mlp.{name}_proj.weight"], weights.get(f"mlp.{name}_proj.bias", 0.0))
            for name in ("gate", "up")
        )
        inner = numpy_kernels.swiglu(gate, up)
        bias = weights.get("mlp.down_proj.bias", 0.0)
        return x + numpy_kernels.linear(inner, weights["mlp.down_proj.weight"], bias)

    result, saved = mlp.forward(x, weights)
    right = formula(x.astype(np.float64), **{name: array.astype(np.float64) for name, array in weights.items()})
    forward = 2 * HIDDEN + 4 + 8 + WIDTH
    assert distance(result.asnumpy(), right) <= rounding_limit(forward)
    once, nothing = mlp.forward(x, weights, keeps=False)
    assert nothing is None
    np.testing.assert_array_equal(once.asnumpy(), result.asnumpy())
    grad, found = mlp.backward(x, weights, saved, upstream, weights)
    check_gradients(formula, {"x": x} | weights, upstream, {"x": grad} | found, forward + len(x))
    np.testing.assert_array_equal(x, given)


def test_shared_experts_have_neither_norm_nor_residual(implementation: str) -> None:
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    weights = {f"{name}_proj.weight": normal(*shape, scale=shape[1] ** -0.5) for name, shape in shapes.items()}
    x, upstream = normal(10, HIDDEN), normal(10, HIDDEN)
    mlp = sublayers.HostMlp(WIDTH, Scratch(8), prefix="")

    def formula(x: np.ndarray, **weights: np.ndarray) -> np.ndarray:
        gate, up, down = weights.values()
        inner = numpy_kernels.swiglu(numpy_kernels.linear(x, gate), numpy_kernels.linear(x, up))
        return numpy_kernels.linear(inner, down)

    result, saved = mlp.forward(x, weights)
    right = formula(x.astype(np.float64), **{name: array.astype(np.float64) for name, array in weights.items()})
    assert distance(result.asnumpy(), right) <= rounding_limit(HIDDEN + 8 + WIDTH)
    np.testing.assert_array_equal(mlp.forward(x, weights, keeps=False)[0].asnumpy(), result.asnumpy())
    grad, found = mlp.backward(x, weights, saved, upstream, weights)
    check_gradients(formula, {"x": x} | weights, upstream, {"x": grad} | found, HIDDEN + 8 + WIDTH + len(x))


def test_only_trained_weights_have_gradients() -> None:
    settings = settings_of(use_qk_norm=True, qkv_has_bias=True, mlp_has_bias=True)
    sequences = sequences_of(settings, PACKED, None)
    x, upstream = normal(14, HIDDEN), normal(14, HIDDEN)
    weights = weights_of(settings, attention_shapes(settings), "input_layernorm.weight")
    attention, place = sublayers.HostAttention(settings, Scratch(8)), (sequences.positions, sequences.positions.blocks)
    mlp_weights = weights_of(settings, mlp_shapes(settings), "post_attention_layernorm.weight")
    mlp = mlp_of(settings, Scratch(8))

    def of_attention(names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
        return attention.backward(x, weights, *place, attention.forward(x, weights, *place)[1], upstream, names)

    def of_mlp(names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
        return mlp.backward(x, mlp_weights, mlp.forward(x, mlp_weights)[1], upstream, names)

    for function, every in ((of_attention, list(weights)), (of_mlp, list(mlp_weights))):
        whole_grad, whole = function(every)
        for names in ([], *([name] for name in every)):
            grad, found = function(names)
            assert list(found) == names
            np.testing.assert_array_equal(grad.asnumpy(), whole_grad.asnumpy())
            for name in names:
                np.testing.assert_array_equal(found[name].asnumpy(), whole[name].asnumpy(), err_msg=name)


class HeadCase(NamedTuple):
    x_ND: np.ndarray
    norm_D: np.ndarray
    weight_VD: np.ndarray
    labels_N: np.ndarray
    valid_N1: np.ndarray

    def formula(self, x: np.ndarray, norm: np.ndarray, weight: np.ndarray) -> np.ndarray:
        y = numpy_kernels.rms_norm(x, norm, 1e-3)
        return numpy_kernels.cross_entropy(y, weight, self.labels_N, self.valid_N1[:, 0] > 0)

    @property
    def arguments(self) -> dict[str, np.ndarray]:
        return {"x": self.x_ND, "norm": self.norm_D, "weight": self.weight_VD}


def head_case(rows: int, valid: int) -> HeadCase:
    valid_N1 = np.zeros((rows, 1), np.float32)
    valid_N1[RANDOM.choice(rows, valid, replace=False)] = 1
    labels_N = RANDOM.integers(0, VOCABULARY, rows, dtype=np.int32) * (valid_N1[:, 0] > 0)
    norm_D = 1 + normal(HIDDEN, scale=0.3)
    return HeadCase(normal(rows, HIDDEN), norm_D, normal(VOCABULARY, HIDDEN), labels_N.astype(np.int32), valid_N1)


@pytest.mark.parametrize(("rows", "valid"), [(1, 1), (4, 3), (10, 6), (10, 10)])
def test_head(rows: int, valid: int, implementation: str) -> None:
    case = head_case(rows, valid)
    run, given = head.HostHead(HIDDEN, 1e-3), case.x_ND.copy()
    found = run(*case, ("x", "norm", "weight"))
    terms = 2 * HIDDEN + 4 + VOCABULARY + 4 + rows
    loss = case.formula(*(array.astype(np.float64) for array in case.arguments.values()))
    assert abs(found.loss - loss) <= rounding_limit(terms) * loss
    gradients = {"x": found.grad_ND, "norm": found.norm_D, "weight": found.weight_VD}
    check_gradients(case.formula, case.arguments, np.ones(()), gradients, terms)
    np.testing.assert_array_equal(case.x_ND, given)
    alone = run(*case)
    assert alone.loss == found.loss and alone[1:] == (None, None, None)


@pytest.mark.parametrize("wanted", [("x",), ("x", "norm"), ("x", "weight")], ids=" ".join)
def test_a_frozen_part_of_the_head_has_no_gradient(wanted: tuple[str, ...]) -> None:
    case, run = head_case(10, 6), head.HostHead(HIDDEN, 1e-3)
    every, some = run(*case, ("x", "norm", "weight")), run(*case, wanted)
    assert some.loss == every.loss
    for name, ours, right in zip(("x", "norm", "weight"), some[1:], every[1:], strict=True):
        assert (ours is not None) == (name in wanted)
        if name in wanted:
            np.testing.assert_array_equal(ours.asnumpy(), right.asnumpy())


def test_the_head_with_large_logits_and_without_valid_labels(implementation: str) -> None:
    case, run = head_case(10, 6), head.HostHead(HIDDEN, 1e-3)
    large = case._replace(weight_VD=case.weight_VD * np.float32(1e4))
    loss = large.formula(*(array.astype(np.float64) for array in large.arguments.values()))
    assert abs(run(*large).loss - loss) <= rounding_limit(2 * HIDDEN + 8 + VOCABULARY + 10) * loss
    found = run(*case._replace(valid_N1=np.zeros((10, 1), np.float32)), ("x", "norm", "weight"))
    assert found.loss == 0
    assert not any(array.asnumpy().any() for array in found[1:])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_the_loss(bad: float, implementation: str) -> None:
    case = head_case(10, 10)
    case.x_ND[3, 2] = bad
    found = head.HostHead(HIDDEN, 1e-3)(*case, ("x", "weight"))
    assert not np.isfinite(found.loss) and not np.isfinite(found.weight_VD.asnumpy()).all()


def test_embedding() -> None:
    weight_VD, ids_N = normal(VOCABULARY, HIDDEN), np.array([3, 0, 3, 10, 3, 0, *[7] * 11], np.int32)
    np.testing.assert_array_equal(head.embedding_rows(weight_VD, ids_N).asnumpy(), weight_VD[ids_N])
    grad_ND, right_VD = normal(len(ids_N), HIDDEN), np.zeros((VOCABULARY, HIDDEN))
    np.add.at(right_VD, ids_N, grad_ND.astype(np.float64))
    found = head.embedding_gradient(weight_VD.shape, ids_N, grad_ND).asnumpy()
    assert distance(found, right_VD) <= rounding_limit(11)


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
    pool = HostThreads(threads)
    for module in (norms, sublayers, head):
        monkeypatch.setattr(module, "host_threads", lambda: pool)
    global RANDOM
    RANDOM = np.random.default_rng(3)
    settings = settings_of(use_qk_norm=True, qkv_has_bias=True)
    sequences, scratch = sequences_of(settings, PACKED, 4), Scratch(threads)
    x, upstream = normal(14, HIDDEN), normal(14, HIDDEN)
    weights = weights_of(settings, attention_shapes(settings), "input_layernorm.weight")
    attention, place = sublayers.HostAttention(settings, scratch), (sequences.positions, sequences.positions.blocks)
    result, saved = attention.forward(x, weights, *place)
    grad, found = attention.backward(x, weights, *place, saved, upstream, weights)
    yield from {"attention": result, "of attention": grad, **found}.items()
    weights = weights_of(settings, mlp_shapes(settings), "post_attention_layernorm.weight")
    mlp = mlp_of(settings, scratch)
    result, saved = mlp.forward(x, weights)
    grad, found = mlp.backward(x, weights, saved, upstream, weights)
    yield from {"mlp": result, "of mlp": grad, **found}.items()
    found = head.HostHead(HIDDEN, 1e-3)(*head_case(10, 6), ("x", "norm", "weight"))
    yield from {"loss": Tensor(found.loss), "head x": found[1], "head norm": found[2], "head weight": found[3]}.items()


def test_the_bits_are_the_same_for_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    one = {name: array.asnumpy() for name, array in everything(1, monkeypatch)}
    for threads in (2, 3):
        for name, array in everything(threads, monkeypatch):
            np.testing.assert_array_equal(array.asnumpy(), one[name], err_msg=f"{name}, {threads} threads")


def gradients(trainer: TinyTrainer) -> dict[str, np.ndarray]:
    """Of all trained weights, and the loss."""
    inputs, trained = trainer.build_inputs(make_batch(seed=4, valid=9, rows=2)), trainer.model.trained_parameters

    def loss() -> Tensor:
        return trainer.model(inputs, statistics=RouterStatistics()).total

    value, found = mindspore.value_and_grad(loss, None, list(trained.values()))()
    arrays = (gradient.asnumpy() for gradient in found)
    return dict(zip(trained, arrays, strict=True), loss=value.asnumpy())


MODEL = {"num_layers": 3, "use_qk_norm": True, "qkv_has_bias": True, "sliding_window": 5}


@pytest.mark.parametrize("recomputed", [
    {"recompute": True}, {"select_recompute": ["mlp"]}, {"select_recompute": ["attention"]}, {"recompute": [0, 2]},
], ids=str)  # fmt: skip
def test_recomputation_changes_no_bit(recomputed: dict) -> None:
    ours = TinyTrainer(sections={"recompute_config": recomputed}, host_layers=True, **MODEL)
    assert_same_bits(gradients(ours), gradients(TinyTrainer(host_layers=True, **MODEL)))


@pytest.mark.parametrize("frozen", [
    {"layers": "0-1", "embeddings": True}, {"include": ["*norm*"]}, {"layers": "2"}, {"embeddings": True},
    {"include": ["lm_head.weight"]},
], ids=str)  # fmt: skip
def test_frozen_weights_change_no_bit_of_the_other_gradients(frozen: dict) -> None:
    ours = gradients(TinyTrainer(sections={"freeze": frozen}, host_layers=True, **MODEL))
    every = gradients(TinyTrainer(host_layers=True, **MODEL))
    assert 1 < len(ours) < len(every)
    assert_same_bits(ours, {name: every[name] for name in ours})


def test_an_evaluation_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, kept = TinyTrainer(host_layers=True, **MODEL), []
    for kind in (sublayers.HostAttention, sublayers.HostMlp):
        def forward(self, *arguments, plain=kind.forward):
            result, saved = plain(self, *arguments)
            kept.append(saved is not None)
            return result, saved

        monkeypatch.setattr(kind, "forward", forward)
    inputs = trainer.build_inputs(make_batch(seed=4, valid=9, rows=2))
    evaluated = trainer.model(inputs).tokens
    assert kept == [False] * 6
    trained = trainer.model(inputs, statistics=RouterStatistics()).tokens
    assert kept[6:] == [True] * 6
    assert evaluated.asnumpy() == trained.asnumpy() > 0


def test_a_training_without_the_library_is_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TinyTrainer(host_layers=True, **MODEL)
    batches, settings = [make_batch(seed, valid=9, rows=2) for seed in range(4)], trainer.model.settings
    limit = decoder_limits(settings, rows=2)

    def trained() -> tuple[list[float], dict[str, np.ndarray]]:
        step = trainer.step(lambda update: 0.01, optimizer={"type": "SGD"})
        return [step([batch]).loss for batch in batches], trainer.weights()

    losses, weights = trained()
    hide_library(monkeypatch)
    assert isinstance(onednn.operators(), onednn.NumpyOperators)
    plain_losses, plain_weights = trained()
    assert losses != plain_losses or any((weights[name] != plain_weights[name]).any() for name in weights)
    np.testing.assert_allclose(plain_losses, losses, rtol=len(batches) * limit.loss)
    for name, weight in weights.items():
        assert distance(plain_weights[name], weight) <= len(batches) * limit.gradients, name
