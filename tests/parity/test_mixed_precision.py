"""Mixed precision of cells: the model in float16 against the float32 one, each part's dtype, and float16's range.

As in context.mode 1, and compiled as on an Ascend; native layers are in test_native_half_precision.py.

LEAST, far above what float32 does to the same gradients (2e-3 u), shows that a part is in half precision at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore import dtype as mstype
from numpy_kernels import assert_same_bits, distance
from tiny_trainer import TOKENS, VOCABULARY, config_of, make_batch
from tolerances import GRADIENTS_FLOAT16, U_FLOAT16

from trainer.models.compute_weights import ModelParams, cast_to_float32
from trainer.models.decoder import Decoder
from trainer.models.generate import Generator, Sampling
from trainer.models.inputs import InputBuilder
from trainer.models.spec.model import ParameterSpec
from trainer.models.spec.names import EMBEDDING, HEAD
from trainer.ops import plain, vocabulary
from trainer.ops.ascend.optim import FusedAdamW
from trainer.ops.dropout import DropoutKey
from trainer.ops.kernel_set import InDtype, load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels
from trainer.ops.updates.adamw import AdamWItem
from trainer.parallel.gradients import GradientReducer

LEAST = U_FLOAT16 / 8
MODES = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
HALF, FULL = mstype.float16, mstype.float32
# amp_level -> dtypes of matrix products, norms, softmax, rotary
LEVELS = {"O1": (HALF, FULL, FULL, FULL), "O2": (HALF, FULL, HALF, HALF), "O3": (HALF, HALF, HALF, HALF)}
KEYS = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")
BATCH = make_batch(3, 17, rows=2)
# Every kernel there is; small weights, because larger ones make a model whose gradients hang on every bit.
OPTIONS = {"use_qk_norm": True, "qkv_has_bias": True, "initializer_range": 0.1}


class Model(NamedTuple):
    """A decoder in the dtypes of a configuration."""

    decoder: Decoder
    build_inputs: InputBuilder


def build_new(amp_level: str | None, compiled: bool, model: frozenset) -> Model:
    config = config_of(amp_level=amp_level, model=OPTIONS | dict(model))
    precision = resolve_precision(config.decoder, config.amp_level, "CPU")
    kernels = load_kernels(select_kernels(config.decoder, "CPU", precision), precision)
    return Model(Decoder(config.decoder, kernels, seed=5, compiled=compiled), InputBuilder(config.decoder, kernels))


build_once = functools.cache(build_new)


def build(amp_level: str | None = None, compiled: bool = False, **model: object) -> Model:
    """Builds a model once for all tests, because compiling takes the time."""
    return build_once(amp_level, compiled, frozenset(model.items()))


class Result(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]


def differentiate(model: Model, factor: float = 1.0, dropout: DropoutKey | None = None) -> Result:
    """Loss sum, and gradients of the sum times `factor`."""
    parameters = model.decoder.parameters_by_name

    def scaled(inputs, scale):
        loss = model.decoder(inputs, dropout).total
        return loss * scale, loss

    weights = model.decoder.compute_weights
    backward = mindspore.value_and_grad(scaled, None, weights.grad_targets(parameters), has_aux=True)
    (_, loss), found = backward(model.build_inputs(BATCH), Tensor(np.float32(factor)))
    gradients = list(found)
    cast_to_float32(gradients)
    assert loss.dtype == FULL
    return Result(float(loss.asnumpy()), dict(zip(parameters, gradients, strict=True)))


@pytest.fixture(scope="module")
def right() -> Result:
    """Returns the results of the float32 model, operator by operator."""
    return differentiate(build())


def furthest(found: Result, right: Result, factor: float = 1.0) -> float:
    """Returns the largest distance of a gradient."""
    return max(distance(found.gradients[name].asnumpy() / factor, g.asnumpy()) for name, g in right.gradients.items())


@pytest.mark.parametrize(("level", "compiled"), [*((level, False) for level in LEVELS), ("O2", True)])
def test_loss_and_gradients_of_a_level(level: str, compiled: bool, right: Result) -> None:
    model = build(level, compiled)
    found = differentiate(model)
    assert found.loss == pytest.approx(right.loss, rel=2 * U_FLOAT16)
    assert LEAST < furthest(found, right) < GRADIENTS_FLOAT16
    for name, gradient in found.gradients.items():
        assert gradient.dtype == model.decoder.parameters_by_name[name].dtype == FULL
    assert model.decoder.hidden_states(model.build_inputs(BATCH)).dtype == FULL  # the residual stream


@pytest.mark.parametrize(
    ("key", "name"), [("mtp_depth", HEAD), ("layers_group", "model.layers.0.self_attn.q_proj.weight")]
)
def test_a_matrix_that_several_products_take_has_no_copy(key: str, name: str) -> None:
    """Checks that the gradient of a head is summed over modules, and that of attention over layers, in float32."""
    for model, dtype in (({}, HALF), ({key: 2}, FULL)):
        [leaf] = build("O1", **model).decoder.compute_weights.grad_targets([name])
        assert leaf.dtype == dtype


def test_an_update_casts_the_weights_that_it_changed_and_a_load_casts_all() -> None:
    masters = {name: Parameter(Tensor(np.zeros((2, 2), np.float32)), name) for name in ("frozen", "trained")}
    weights = ModelParams(masters, HALF, {name: ParameterSpec(name, (2, 2)) for name in masters})
    for master in masters.values():
        master.set_data(Tensor(np.ones((2, 2), np.float32)))
    weights.refresh(["trained", "a bias"])
    assert {name: float(copy.asnumpy().sum()) for name, copy in weights.copies.items()} == {"frozen": 0, "trained": 4}
    weights.refresh()
    assert weights.copies["frozen"].asnumpy().sum() == 4


def test_the_fused_update_gets_gradients_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are kept in half precision. The operator has no kernel on a CPU."""
    fused, dtypes = FusedAdamW((0.9, 0.999), 1e-8), []
    monkeypatch.setattr(fused, "update", lambda *arguments: dtypes.append(arguments[4].dtype))
    whole = Parameter(Tensor(np.zeros(3, np.float32)), "w")
    gradients = [Tensor(np.ones(3, np.float32)).astype(dtype) for dtype in (FULL, HALF, mstype.bfloat16)]
    fused([AdamWItem(whole, whole, whole, gradient, 0.0) for gradient in gradients], 1e-3, 1)
    assert dtypes == [FULL] * 3


@pytest.mark.parametrize("key", KEYS)
def test_the_dtype_of_one_part_alone_is_felt(key: str, right: Result) -> None:
    found = differentiate(build(**{key: "float16"}))
    assert LEAST < furthest(found, right) < GRADIENTS_FLOAT16


def test_half_precision_and_dropout_on_the_attention_weights() -> None:
    drop, key = {"attention_dropout": 0.2, "hidden_dropout": 0.1}, DropoutKey(1, 0, 0, 0)
    right = differentiate(build(**drop), dropout=key)
    for level in ("O1", "O2"):
        found = differentiate(build(level, **drop), dropout=key)
        # Masks leave few terms, and in a gradient whose terms cancel, such as the key bias's, roundings do not: the
        # largest distance seen is 33 u. What dropout is in float32 is held to numpy in test_kernels.py.
        assert LEAST < furthest(found, right) < 3 * GRADIENTS_FLOAT16


def cells_of(decoder: Decoder) -> list[tuple[str, nn.Cell]]:
    """Returns the cells of blocks and head, by name."""
    return [named for whole in (decoder.parts.block, decoder.parts.head) for named in whole.cells_and_names()]


Met = dict[str, list[np.ndarray]]


PLAIN_KERNELS = (plain.__name__, vocabulary.__name__)


def met_by_kernels(model: Model, monkeypatch: pytest.MonkeyPatch) -> Met:
    """Returns the dtypes that the kernels of the model take and return, by class and argument or result."""
    met: Met = {}
    original = nn.Cell.__call__

    def watching(cell: nn.Cell, *args):
        out = original(cell, *args)
        if type(cell).__module__ in PLAIN_KERNELS:
            note(type(cell).__name__, args, out)
        return out

    def note(name: str, args: tuple, out: Tensor) -> None:
        for place, tensor in [*enumerate(args), ("out", out)]:
            if isinstance(tensor, Tensor):
                met.setdefault(f"{name}.{place}", []).append(tensor.asnumpy())

    def noting(operator: Callable, name: str) -> Callable:
        def call(*args):
            out = operator(*args)
            note(name, args, out)
            return out

        return call

    monkeypatch.setattr(nn.Cell, "__call__", watching)
    rounded = plain.Attention.round
    monkeypatch.setattr(plain.Attention, "round", lambda *args: noting(rounded, "Attention.rounded")(*args))
    for _, cell in cells_of(model.decoder):
        for name in ("logits", "mix", "sum") if type(cell).__module__ in PLAIN_KERNELS else ():
            if name in cell._primitives:
                monkeypatch.setitem(vars(cell), name, noting(getattr(cell, name), f"{type(cell).__name__}.{name}"))
    model.decoder(model.build_inputs(BATCH))
    return met


PRODUCTS = ("Linear.0", "Linear.1", "Linear.out", "Linear.2", "Attention.0", "Attention.1", "Attention.2",
            "Attention.out", "Attention.mix.0", "CrossEntropy.logits.0", "CrossEntropy.logits.1")  # fmt: skip
IN_FLOAT32 = ("RmsNorm.0", "RmsNorm.1", "Rotary.0", "SwiGLU.0", "Attention.3", "CrossEntropy.sum.0",
              "CrossEntropy.out")  # fmt: skip


@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_every_kernel_of_the_model_meets_its_dtype(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, norm, softmax, rotary = LEVELS[level] if level in LEVELS else (FULL,) * 4
    met = met_by_kernels(build(level), monkeypatch)
    dtypes = {name: {array.dtype.name for array in arrays} for name, arrays in met.items()}
    assert {name: dtypes[name] for name in PRODUCTS} == dict.fromkeys(PRODUCTS, {str(compute).lower()})
    assert {name: dtypes[name] for name in IN_FLOAT32} == dict.fromkeys(IN_FLOAT32, {"float32"})
    # The arithmetic of these is float32, but what they take is rounded to their dtype.
    rounded = {"RmsNorm.0": norm, "Attention.rounded.out": softmax, "SwiGLU.0": compute, "Rotary.0": compute,
               "Rotary.1": rotary, "Rotary.2": rotary}  # fmt: skip
    for name, dtype in rounded.items():
        are_half = all(np.array_equal(array, array.astype(np.float16)) for array in met[name])
        assert are_half == (dtype == HALF), name


def test_range_of_the_residual_stream_and_the_norms() -> None:
    """float16 ends at 65504: the stream goes beyond it, norms in float32 follow, norms in float16 (O3) do not."""
    losses = {}
    for level in (None, "O1", "O2", "O3"):
        model = build_new(level, False, frozenset())  # its weights change
        embedding = model.decoder.parameters_by_name[EMBEDDING]
        embedding.set_data(Tensor(embedding.asnumpy() * np.float32(3e5)))
        losses[level] = float(model.decoder(model.build_inputs(BATCH)).tokens.asnumpy())
    assert losses["O1"] == pytest.approx(losses[None], rel=2 * U_FLOAT16)
    assert losses["O2"] == pytest.approx(losses[None], rel=2 * U_FLOAT16)
    assert not np.isfinite(losses["O3"])


def test_sum_of_losses_is_beyond_float16() -> None:
    tokens, width = 5000, 4
    x_ND, weight_VD = np.full((tokens, width), 5, np.float32), np.eye(VOCABULARY, width, dtype=np.float32) * 4
    labels, valid = Tensor(np.full(tokens, 7, np.int32)), Tensor(np.ones((tokens, 1), np.float32))
    losses = [
        float(vocabulary.CrossEntropy(VOCABULARY, dtype)(Tensor(x_ND), Tensor(weight_VD), labels, valid).asnumpy())
        for dtype in (FULL, HALF)
    ]
    assert losses[0] > 65504
    assert losses[1] == pytest.approx(losses[0], rel=U_FLOAT16)


@MODES
def test_small_gradients_are_lost_without_a_loss_scale_and_kept_with_one(compiled: bool, right: Result) -> None:
    """float16 has nothing between 0 and 2^-24. The factor stands for a large window: the loss is divided by its tokens.

    The scale has to be in every product of the backward pass, from the logits on: it would be of no use to gradients
    that have been rounded to zero before.
    """
    tokens, scale = 2.0**24, 65536.0
    model = build("O2", compiled)
    lost, kept = differentiate(model, 1 / tokens), differentiate(model, scale / tokens)
    assert lost.loss == kept.loss  # the loss itself is not scaled
    far = [distance(lost.gradients[name].asnumpy() * tokens, g.asnumpy()) for name, g in right.gradients.items()]
    assert np.median(far) > 0.5
    zeros = np.mean([np.mean(g.asnumpy() == 0) for g in lost.gradients.values()])
    assert zeros > 0.5
    assert furthest(kept, right, scale / tokens) < GRADIENTS_FLOAT16


@pytest.mark.parametrize(("factor", "kept"), [(1.0, False), (65536.0, True)])
def test_the_loss_scale_reaches_the_gradients_of_unlikely_tokens(factor: float, kept: bool) -> None:
    """Where the scale came after probabilities of 2e-9 had been rounded to float16, these tokens would not learn."""
    x_ND, weight_VD = np.array([[1, 0]], np.float32), np.array([[0, 0], [-20, 0], [-1, 0]], np.float32)
    labels, valid = Tensor(np.array([2], np.int32)), Tensor(np.ones((1, 1), np.float32))
    cell = vocabulary.CrossEntropy(3, HALF)
    gradient = mindspore.grad(lambda weight: cell(Tensor(x_ND), weight, labels, valid) * Tensor(np.float32(factor)))
    p = np.exp(-20) / (1 + np.exp(-20) + np.exp(-1))
    found = gradient(Tensor(weight_VD)).asnumpy()[1, 0]
    assert found == pytest.approx(p * factor if kept else 0.0, rel=2 * U_FLOAT16, abs=0.0)


def test_a_scale_that_is_too_large_overflows_and_shows(right: Result) -> None:
    found = differentiate(build("O1"), 2.0**20)
    assert np.isfinite(found.loss)
    assert not all(np.isfinite(gradient.asnumpy()).all() for gradient in found.gradients.values())


@pytest.mark.parametrize("level", [None, "O0"])
def test_in_float32_there_is_no_cast(level: str | None) -> None:
    """The kernels are those without a wrapper, so the graph is what it would be without this feature."""
    decoder = build(level).decoder
    assert not [name for name, cell in cells_of(decoder) if isinstance(cell, InDtype)]
    assert decoder.parts.head.cross_entropy.dtype == FULL


def test_bfloat16_without_native_layers_is_float32_bit_for_bit() -> None:
    right = differentiate(build())
    found = differentiate(build("O3", compute_dtype="bfloat16"))
    assert found.loss == right.loss
    assert_same_bits(found.gradients, right.gradients)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_generation_computes_in_the_same_dtypes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of prediction on a device, with keys and values cached in half precision, against those of the whole
    row."""
    model, single = build(level), build()
    generator = Generator(model.decoder, model.build_inputs, eos_ids=[])
    rows: list[np.ndarray] = []
    caches: set[mstype.Type] = set()
    forward: Callable = generator.forward

    def watching(cache, *args):
        rows.append(forward(cache, *args)[0])
        caches.update(store.dtype for layer in cache.layers for store in layer)
        return rows[-1][None]

    monkeypatch.setattr(generator, "forward", watching)
    prompt = BATCH.input_ids[1, : TOKENS - 3].tolist()
    chosen = [tokens[0] for tokens in generator.stream([prompt], [3], Sampling())]
    assert caches == {HALF}
    ids = np.array([[*prompt, *chosen]], np.int32)
    batch = BATCH._replace(
        input_ids=ids, labels=ids, positions=np.arange(TOKENS, dtype=np.int32)[None], segment_ids=np.zeros_like(ids)
    )
    whole, exact = (m.decoder.logits(m.build_inputs(batch)) for m in (model, single))
    assert whole.dtype == FULL
    used = slice(len(prompt) - 1, TOKENS - 1)
    assert distance(np.array(rows), whole.asnumpy()[used]) < 8 * U_FLOAT16
    assert LEAST < distance(np.array(rows), exact.asnumpy()[used]) < GRADIENTS_FLOAT16


@pytest.mark.parametrize("in_float32", [True, False])
def test_a_pipeline_adds_up_micro_batches_in_the_dtype_of_the_sums(in_float32: bool) -> None:
    reducer = GradientReducer(in_float32=in_float32)
    assert reducer.local_gradient(0, Tensor(np.ones(3), HALF)).dtype == (FULL if in_float32 else HALF)
