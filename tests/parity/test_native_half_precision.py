"""bfloat16 and float16 on a CPU: rounding, products, layers and head against float32 and against the emulation,
prediction."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from model_gradients import model_gradients
from numpy_kernels import distance
from tiny_trainer import TOKENS, TinyTrainer, make_batch
from tolerances import (
    GRADIENTS_BFLOAT16,
    GRADIENTS_FLOAT16,
    SAME_ROUNDINGS,
    U_BFLOAT16,
    U_FLOAT16,
    decoder_limits,
    rounding_limit,
)

from trainer.arrays import onednn, operators
from trainer.arrays.memory import narrow_weight
from trainer.arrays.numpy_operators import BFLOAT16
from trainer.data import Batch
from trainer.models.generate import Generator, Sampling
from trainer.ops import host_library
from trainer.storage.bfloat16 import as_bfloat16, as_float32

BATCH = make_batch(3, 17, rows=2)
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "shared_expert_num": 1, "capacity_factor": None}
RANDOM = np.random.default_rng(5)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes as on a processor without vector instructions for bfloat16."""
    monkeypatch.setattr(onednn, "bfloat16_products", lambda: "emulated")
    monkeypatch.setattr(onednn, "has_avx512", lambda: False)
    monkeypatch.setattr(operators, "_THREAD", threading.local())


def numbers(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def test_a_processor_without_instructions_is_seen() -> None:
    code = "from trainer.ops.host_library import *; print(bfloat16_products(), has_avx512())"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["emulated", "False"]


def test_casts_round_to_nearest_even_and_keep_what_is_no_number() -> None:
    x = numbers(40, 33)
    x[0, :6] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, np.nan, np.inf, -np.inf, 3.4e38
    x[0, 6] = np.uint32(0x7F800001).view(np.float32)  # NaN whose upper half is infinity
    narrow, wide = np.empty(x.shape, BFLOAT16), np.empty_like(x)
    operators.operators().cast(x, narrow)
    np.testing.assert_array_equal(as_float32(narrow), as_float32(as_bfloat16(x)))
    operators.operators().cast(narrow, wide)
    np.testing.assert_array_equal(wide, as_float32(narrow))
    assert wide[0, :2].tolist() == [1, 1 + 2.0**-6] and np.isnan(wide[0, [2, 6]]).all()
    np.testing.assert_array_equal(narrow_weight(x), narrow)


PRODUCTS = [
    ((5, 40), (40, 7)), ((1, 40), (40, 7)), ((5, 40), (40, 1)),
    ((3, 5, 40), (3, 40, 7)), ((3, 1, 40), (3, 40, 7)), ((3, 5, 40), (3, 40, 1)),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["oneDNN", "emulated"])
@pytest.mark.parametrize("way", ["plain", "a transposed", "b transposed", "columns"])
@pytest.mark.parametrize(("left", "right"), PRODUCTS)
def test_products(left: tuple, right: tuple, way: str, mode: str, request: pytest.FixtureRequest) -> None:
    """Of numbers in bfloat16, summed in float32, rounded once where the result is bfloat16."""
    if mode == "emulated":
        request.getfixturevalue("emulated")
    a, b = as_bfloat16(numbers(*left)), as_bfloat16(numbers(*right))
    if way == "a transposed":
        a = np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2)
    if way == "b transposed":
        b = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2)
    if way == "columns":
        a, b = (np.concatenate((one, one), -1)[..., : one.shape[-1]] for one in (a, b))
    run, wide_a, wide_b = operators.operators(), *(as_float32(one).astype(np.float64) for one in (a, b))
    right, size = wide_a @ wide_b, np.abs(wide_a) @ np.abs(wide_b)
    limit = rounding_limit(a.shape[-1]) * size
    out = np.full(right.shape, 7, np.float32)
    run.matmul(a, b, out)
    assert (np.abs(out - right) < limit).all()
    run.matmul(a, b, out, True)
    assert (np.abs(out - 2 * right) < 2 * limit).all()
    narrow = np.zeros(right.shape, BFLOAT16)
    run.matmul(a, b, narrow)
    assert (np.abs(as_float32(narrow) - right) <= limit + U_BFLOAT16 * np.abs(right)).all()
    assert np.abs(as_float32(narrow) - right).max() > U_BFLOAT16 / 16 * np.abs(right).max()


class Result(NamedTuple):
    loss: float
    gradients: dict[str, np.ndarray]


def build(dtype: str, **model: object) -> TinyTrainer:
    made = TinyTrainer(**{"initializer_range": 0.1} | model, compute_dtype=dtype)
    assert made.kernels.host_dtype == dtype
    return made


def differentiate(dtype: str, **model: object) -> Result:
    made = build(dtype, **model)
    loss, gradients = model_gradients(made.model, made.build_inputs(BATCH))
    return Result(float(loss), {name: gradient.copy() for name, gradient in gradients.items()})


LATENT = {
    "architectures": "LlamaForCausalLM", "multi_latent_attention": True, "q_lora_rank": 10, "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 7,
}  # fmt: skip
VARIANTS: dict[str, dict] = {
    "dense": {},
    "tied, window": {"tie_word_embeddings": True, "sliding_window": 4},
    "shared expert": {"moe_config": EXPERTS},
    "norms after rotary": {"use_qk_norm": True, "qk_norm_after_rotary": True},
    # What a norm makes larger rounds by as much more: fewer layers of it.
    "norms after sublayers": {"post_self_attn_layernorm": True, "post_mlp_layernorm": True, "num_layers": 1},
    "latent attention": LATENT,
    "further predictions": {"mtp_depth": 2},
    "mapped embedding": {"embedding_size": 8},
    "LayerNorm, no gate": {
        "normalization": "LayerNorm", "gated_linear_unit": False, "hidden_act": "gelu_pytorch_tanh",
        "mlp_has_bias": True,
    },
    "side by side": {
        "normalization": "LayerNorm", "norm_has_bias": False, "parallel_attn": True, "rope_interleave": True,
        "logit_scale": 0.7,
    },
    "sinks and caps": {
        "attention_sinks": True, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 5,
    },
    "GELU, zero-centered norms": {"hidden_act": "gelu_pytorch_tanh", "layernorm_zero_centered_gamma": True},
    "factors": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.6},
    "norms on outputs alone": {
        "input_norms": False, "post_self_attn_layernorm": True, "post_mlp_layernorm": True, "num_layers": 1,
    },
}
# float16 as in test_mixed_precision.py.
NARROW = {"bfloat16": (U_BFLOAT16, GRADIENTS_BFLOAT16), "float16": (U_FLOAT16, GRADIENTS_FLOAT16)}


@functools.cache
def exact(name: str) -> Result:
    return differentiate("float32", **VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", NARROW)
def test_gradients_are_those_of_float32_but_for_rounding(name: str, dtype: str) -> None:
    right, found, (u, limit) = exact(name), differentiate(dtype, **VARIANTS[name]), NARROW[dtype]
    assert found.loss != right.loss and found.loss == pytest.approx(right.loss, rel=u)
    far = {name: distance(found.gradients[name], gradient) for name, gradient in right.gradients.items()}
    assert u / 8 < max(far.values()) < limit, far


BIASES = {"use_qk_norm": True, "qkv_has_bias": True, "mlp_has_bias": True, "attn_proj_has_bias": True}


@pytest.mark.parametrize("model", [{}, BIASES], ids=["plain", "norms and biases"])
def test_the_emulation_rounds_the_same_numbers(model: dict, request: pytest.FixtureRequest) -> None:
    """On a processor without instructions for bfloat16 both are the emulation, with casts of two kinds."""
    own = differentiate("bfloat16", **model)
    request.getfixturevalue("emulated")
    found = differentiate("bfloat16", **model)
    assert found.loss == pytest.approx(own.loss, rel=SAME_ROUNDINGS)
    for name, gradient in own.gradients.items():
        difference = np.sqrt(np.mean((found.gradients[name] - gradient) ** 2) / np.mean(gradient**2))
        assert difference < SAME_ROUNDINGS, name


def test_without_the_library_there_are_no_products_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_library, "library", lambda: None)
    assert host_library.bfloat16_products() == "" and not host_library.has_avx512()


@pytest.mark.parametrize("dtype", NARROW)
def test_prediction_computes_in_float32(dtype: str) -> None:
    """Whatever the products of a training take: its logits, with a key/value cache, are those of the float32 model."""
    prompt, rows = BATCH.input_ids[1, : TOKENS - 3].tolist(), {}
    for one in ("float32", dtype):
        made = build(one)
        generator = Generator(made.model, made.build_inputs, eos_ids=[])
        cache = generator.new_cache(1, TOKENS)
        rows[one] = generator.read_prompts(cache, np.array([prompt], np.int32), np.array([len(prompt)]))
        assert len(list(generator.stream([prompt], [3], Sampling()))) == 3
    np.testing.assert_array_equal(rows[dtype], rows["float32"])
    made = build("float32")
    ids, places = np.array([prompt], np.int32), np.arange(len(prompt), dtype=np.int32)[None]
    whole = made.model.logits(made.build_inputs(Batch(ids, ids, places, np.zeros_like(ids)))).asnumpy()
    assert distance(rows[dtype], whole[-1:]) < decoder_limits(made.model.settings).loss
