"""Adapters: what they compute, their gradients, and that the base model stays as it is.

Three routes that share no code with the adapted forward pass hold it: float64 numpy with central differences, a dense
model with the adapters merged into its matrices, and the chain rule from that model's gradients.
"""

from __future__ import annotations

import functools

import mindspore
import numpy as np
import numpy_kernels
import pytest
from drawn_masks import drawn_masks
from mindspore import Tensor, nn
from model_gradients import model_gradients
from numpy_kernels import assert_close, assert_same_bits, central_differences, distance
from product_counts import product_counts
from tiny_trainer import (
    NATIVE,
    TinyTrainer,
    check_adapters_are_merged_weights,
    config_of,
    loss_and_gradients,
    make_batch,
    make_window,
    same_bits,
    state_of,
    with_random_adapters,
)
from tolerances import decoder_limits, rounding_limit

from trainer.checkpoint.adapters import merge_adapters
from trainer.data import Batch
from trainer.models.block import Projection
from trainer.models.decoder import Decoder
from trainer.models.spec.shapes import adapter_shapes, block_names, parameter_shapes
from trainer.ops.dropout import DropoutKey, dropout_mask
from trainer.step.evaluate import evaluate

RANK, ALPHA, RATE = 3, 7.5, 0.25
ALL = ".*_proj"
# Not the same in every layer.
SOME = ".*layers.0.*(q_proj|down_proj)|.*layers.1.*(wv|w1|w2)"
# Two of four layers, and the module behind them.
SEARCHED = {"target_modules": r"layers\.[0-2]\..*linear_(qkv|fc2)", "exclude_layers": r"decoder\.layers\.1$"}
DENSE = {"qkv_has_bias": True, "mlp_has_bias": True, "use_qk_norm": True}
LIMITS = decoder_limits(config_of().decoder, rows=1)


def adapted(targets: str = ALL, dropout: float = 0.0, **section: object) -> dict:
    pet = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": dropout, "target_modules": targets}
    return {"pet_config": pet | section}


@functools.cache
def dense_model(**model: object) -> TinyTrainer:
    """Returns one model for all tests, each of which sets all its weights."""
    return TinyTrainer(compiled=False, **model)


def merged_dense(tiny: TinyTrainer) -> TinyTrainer:
    """Returns a model without adapters, and without dropout, that has them in its matrices."""
    left_out = ("pet_config", "hidden_dropout")
    dense = dense_model(**{name: value for name, value in tiny.sections["model"].items() if name not in left_out})
    dense.initial = merge_adapters(tiny.initial, tiny.model.settings)
    dense.step()  # sets the weights
    return dense


def assert_same_backward(ours: TinyTrainer, right: TinyTrainer, batch: Batch, number: int) -> None:
    """Compares loss and gradients of a micro-batch with this number."""
    loss, gradients = loss_and_gradients(ours.step(), batch, number)
    right_loss, expected = loss_and_gradients(right.step(), batch, number)
    assert loss == pytest.approx(right_loss, rel=LIMITS.loss)
    assert_close(gradients, expected, LIMITS.gradients)


# One projection


def literal(mask_NI: np.ndarray | float, scale: float, bias: bool):
    """Returns the projection in numpy; the arguments are x, W, bias, A, B."""

    def compute(x_NI, weight_OI, bias_O, a_RI, b_OR):
        out_NO = numpy_kernels.linear(x_NI, weight_OI, bias_O if bias else 0.0)
        return out_NO + scale * (x_NI * mask_NI) @ a_RI.T @ b_OR.T

    return compute


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize(("bias", "dropout"), [(False, 0.0), (True, 0.0), (False, RATE), (True, RATE)])
def test_a_projection_and_its_gradients(compiled: bool, bias: bool, dropout: float) -> None:
    settings = config_of(model={"qkv_has_bias": bias, **adapted("k_proj", dropout)}).decoder
    projection = Projection("self_attn.k_proj", settings, TinyTrainer(compiled=False).kernels)
    names = block_names(settings)
    random = np.random.default_rng(4)
    arrays = [random.normal(0, 1, shape) for shape in ((5, 16), (8, 16), (8,), (RANK, 16), (8, RANK))]
    mask = dropout_mask(DropoutKey(1, 0, 0, 0), 3, (5, 16), RATE) if dropout else 1.0
    upstream = random.normal(0, 1, (5, 8))
    tensors = [Tensor(array.astype(np.float32)) for array in arrays]

    class Outer(nn.Cell):
        def construct(self, x, weight, bias_O, a, b, mask_NI, upstream_NO):
            taken = [None] * len(names)
            for part, tensor in {"weight": weight, "bias": bias_O, "lora_A.weight": a, "lora_B.weight": b}.items():
                if f"self_attn.k_proj.{part}" in names:
                    taken[names.index(f"self_attn.k_proj.{part}")] = tensor
            if mask_NI is not None:
                taken[names.index("self_attn.k_proj.lora_dropout")] = mask_NI
            return (projection(x, tuple(taken)) * upstream_NO).sum()

    outer = Outer()
    call = mindspore.jit(outer.construct) if compiled else outer
    drop = Tensor(mask) if dropout else None
    grad = mindspore.value_and_grad(call, (0, 1, 2, 3, 4))
    value, gradients = grad(*tensors, drop, Tensor(upstream.astype(np.float32)))
    compute = literal(mask, ALPHA / RANK, bias)
    terms = compute(*arrays) * upstream
    cancelling = np.abs(terms).sum() / abs(terms.sum())
    assert distance(value.asnumpy(), terms.sum()) < rounding_limit(16, RANK, 8, 5, scale=cancelling)
    right = central_differences(compute, arrays, upstream)
    for place, (mine, exact) in enumerate(zip(gradients, right, strict=True)):
        if bias or place != 2:
            assert distance(mine.asnumpy(), exact) < rounding_limit(16, 8, RANK, 5, scale=ALPHA / RANK), place


# The whole decoder


@pytest.fixture(scope="module")
def tiny() -> TinyTrainer:
    return with_random_adapters(TinyTrainer(**adapted()))


@NATIVE
@pytest.mark.parametrize(
    "model",
    [adapted(), {**adapted(SOME), **DENSE}, {**adapted(match="search", **SEARCHED), "num_layers": 4, "mtp_depth": 1}],
    ids=["all", "some", "two layers of four"],
)
def test_adapters_and_merged_weights_are_the_same_model(model: dict, native: bool) -> None:
    mine = with_random_adapters(TinyTrainer(native, **model))
    gradients = check_adapters_are_merged_weights(mine, merged_dense(mine), make_batch(1, 9), ALPHA / RANK)
    if "num_layers" in model:
        layers = {"model.layers.0", "model.layers.2", "model.layers.4"}
        assert {name[: len("model.layers.0")] for name in gradients} == layers


@NATIVE
def test_new_adapters_change_nothing(native: bool) -> None:
    plain, fresh, batch = TinyTrainer(native), TinyTrainer(native, **adapted()), make_batch(2, 7)
    assert_same_bits({name: fresh.initial[name] for name in plain.initial}, plain.initial)
    logits = [tiny.model.logits(tiny.build_inputs(batch)).asnumpy() for tiny in (plain, fresh)]
    np.testing.assert_array_equal(logits[0], logits[1])
    started = {name: value for name, value in fresh.initial.items() if name not in plain.initial}
    assert all(value.any() == ("lora_A" in name) for name, value in started.items())
    drawn = TinyTrainer(native, **adapted(lora_a_std=0.02, lora_b_std=0.02))
    assert drawn.initial.keys() == fresh.initial.keys()
    assert all(value.any() for value in drawn.initial.values() if value.ndim > 1)
    assert not np.array_equal(drawn.model.logits(drawn.build_inputs(batch)).asnumpy(), logits[0])
    others = TinyTrainer(native, **adapted("q_proj")).initial  # a seed's values do not depend on the others
    assert_same_bits({name: fresh.initial[name] for name in others}, others)


def test_only_adapters_are_trained(tiny: TinyTrainer) -> None:
    """Base weights keep their bytes, and have no part in gradient, norm, optimizer state and decay."""
    base = parameter_shapes(tiny.model.settings)
    optimizer = {"type": "AdamW", "weight_decay": 0.5}
    step = tiny.step(optimizer=optimizer, runner_wrapper={"local_norm": True})
    window = [make_batch(3, 9), make_batch(4, 5)]
    adapters = adapter_shapes(tiny.model.settings)
    assert list(step.optimizer.parameters) == list(adapters)
    for _ in range(3):
        result = step(window)
        assert result.global_norm == pytest.approx(sum(norm**2 for norm in result.local_norms.values()) ** 0.5)
        assert result.local_norms.keys() == adapters.keys()
    after = tiny.weights()
    assert_same_bits({name: after[name] for name in base}, {name: tiny.initial[name] for name in base})
    assert all(not np.array_equal(after[name], tiny.initial[name]) for name in adapters)
    assert {name.split(".", 1)[1] for name in step.optimizer.state_arrays()} == set(adapters)


def built(tiny: TinyTrainer, **how: object) -> TinyTrainer:
    """Builds the model with another decoder; alone, so that all parameters have gradients."""
    native = tiny.kernels.host_layers
    other = with_random_adapters(TinyTrainer(native, **tiny.sections["model"]))
    other.model = Decoder(tiny.model.settings, other.kernels, seed=5, compiled=native, **how)
    return other


def test_no_gradient_of_the_base_is_computed(tiny: TinyTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters' gradients are those among all gradients, and one product less for each matrix makes them. Of the
    first layer's input there is no gradient either: by q, k, v and their adapters."""
    whole, batch, count = built(tiny), make_batch(5, 8), product_counts(monkeypatch)
    whole.step()
    inputs, parameters = whole.build_inputs(batch), whole.model.parameters_by_name

    def all_of() -> dict[str, np.ndarray]:
        return model_gradients(whole.model, inputs, parameters)[1]

    everything = all_of()
    step = tiny.step()
    mine = loss_and_gradients(step, batch)[1]
    assert mine.keys() == adapter_shapes(tiny.model.settings).keys()
    assert_same_bits(mine, {name: everything[name] for name in mine})
    matrices = 7 * tiny.model.settings.num_layers + 1  # with the head
    first_input = 6
    assert count(all_of) - count(lambda: step.backward(batch, 0, 1.0)) == matrices + first_input


@pytest.mark.parametrize("how", ["all trained", "computed again"])
@pytest.mark.parametrize("name", ["dropping", "cells_dropping"])
def test_the_bits_do_not_depend_on_what_else_is_computed(name: str, how: str, request: pytest.FixtureRequest) -> None:
    mine = request.getfixturevalue(name)
    settings, batch = mine.model.settings, make_batch(6, 9)
    if how == "all trained":
        other = built(mine)
    else:
        base = frozenset(parameter_shapes(settings))
        other = built(mine, frozen=base, recomputed=("attention", "mlp"))
    loss, gradients = loss_and_gradients(mine.step(), batch, 1)
    same_loss, same = loss_and_gradients(other.step(), batch, 1)
    assert same_loss == loss
    assert_same_bits(same, gradients)


def test_a_block_that_is_computed_again_has_the_same_gradients() -> None:
    """Those of native layers, and of the cells that an Ascend compiles, against those operator by operator."""
    model, batch = {**adapted(ALL, RATE), "hidden_dropout": 0.1, "num_layers": 1}, make_batch(6, 9)
    cells = with_random_adapters(TinyTrainer(compiled=False, **model))
    for host_layers in (True, False):
        sections = {"recompute_config": {"recompute": True}}
        again = with_random_adapters(TinyTrainer(sections=sections, host_layers=host_layers, **model))
        for number in (0, 1):  # a mask baked in at compilation would be right for the first only
            assert_same_backward(again, cells, batch, number)


# Dropout


@pytest.fixture(scope="module")
def dropping() -> TinyTrainer:
    return with_random_adapters(TinyTrainer(**adapted(SOME, RATE), hidden_dropout=0.1))


@pytest.fixture(scope="module")
def cells_dropping() -> TinyTrainer:
    return with_random_adapters(TinyTrainer(compiled=False, **adapted(SOME, RATE), hidden_dropout=0.1))


def test_dropout_repeats_and_native_layers_drop_what_cells_drop(
    dropping: TinyTrainer, cells_dropping: TinyTrainer
) -> None:
    window = make_window(6, 6, 6)

    def train(seed: int) -> tuple[list[float], dict]:
        step = dropping.step(seed=seed)
        return [step(window).loss for _ in range(2)], state_of(step.optimizer, dropping)

    losses, state = train(3)
    again, same = train(3)
    assert again == losses
    assert_same_bits(same, state)
    assert not same_bits(train(4)[1], state)
    for number in (0, 1):
        assert_same_backward(dropping, cells_dropping, window[0], number)


@pytest.mark.parametrize("name", ["dropping", "cells_dropping"])
def test_every_adapter_has_a_mask_of_its_own(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, drawn = request.getfixturevalue(name), drawn_masks(monkeypatch)
    loss_and_gradients(tiny.step(), make_batch(1, 4))
    # Two layers with three other sites each, then seven for each layer, in forward order.
    adapters = sorted({(mask.site, mask.shape) for mask in drawn if mask.rate == RATE})
    assert adapters == [(6, (12, 16)), (12, (12, 24)), (15, (12, 16)), (17, (12, 16)), (19, (12, 24))]
    assert len({mask.site for mask in drawn}) == len(adapters) + 4
    if not tiny.kernels.host_layers:  # native layers draw again what the backward pass needs
        assert len(drawn) == len(adapters) + 4
        assert [(mask.site, mask.shape) for mask in drawn if mask.rate == RATE] == adapters


@pytest.mark.parametrize("name", ["dropping", "cells_dropping"])
def test_evaluation_drops_nothing(name: str, request: pytest.FixtureRequest) -> None:
    mine = request.getfixturevalue(name)
    mine.step()
    batches, dense = [make_batch(1, 6)], merged_dense(mine)
    losses = [evaluate(one.model, one.build_inputs, batches, stop=lambda: False)[0] for one in (mine, dense)]
    assert losses[0] == pytest.approx(losses[1], rel=LIMITS.loss)
