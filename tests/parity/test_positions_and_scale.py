"""Layers without rotary positions, windows of Megatron-LM and the scale of scores, against a decoder in NumPy.

Each engine is held to it: native layers, compiled cells as an Ascend has them, and operator by operator.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_decoder import check_generation
from numpy_kernels import assert_close, attention, distance, linear, rms_norm, rotary, swiglu
from tiny_trainer import TOKENS, TinyTrainer, loss_and_gradients, make_batch
from tolerances import decoder_limits

from trainer.data import Batch
from trainer.models.spec.rotary import rotary_angles

ENGINES = pytest.mark.parametrize(
    "engine", [{}, {"host_layers": False}, {"compiled": False}], ids=["native", "cells", "operators"]
)
MODELS: dict[str, tuple[dict, set[int]]] = {
    "every second": ({"nope_layer_interval": 2}, {1}),
    "first alone, normed": ({"nope_layers": [0], "use_qk_norm": True}, {0}),
    "first alone, half of a head": ({"nope_layers": [0], "rotary_pct": 0.5}, {0}),
    "every": ({"nope_layer_interval": 1}, {0, 1}),
    "none": ({"position_embedding_type": "none", "rope_theta": 100.0}, {0, 1}),
    "scale": ({"softmax_scale": 0.7}, set()),
    "window": ({"window_size": [3, 0], "window_attn_skip_freq": 3, "nope_layer_interval": 2, "num_layers": 3}, {1}),
}
"""Settings, and the layers whose heads are not rotated."""


def numpy_logits(trainer: TinyTrainer, batch: Batch, name: str) -> np.ndarray:
    """Returns the logits [B * T, V] in float64."""
    settings = trainer.model.settings
    weights = {key: value.astype(np.float64) for key, value in trainer.weights().items()}
    cos, sin = (table[:, : settings.rotary_size].astype(np.float64) for table in rotary_angles(
        settings.model_copy(update={"position_embedding_type": "rope"}), TOKENS))  # fmt: skip
    positions_N = batch.positions.reshape(-1)
    x_ND = weights["model.embed_tokens.weight"][batch.input_ids.reshape(-1)]
    rows = np.arange(TOKENS)
    same_BQS = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    for layer in range(settings.num_layers):
        of = {key.removeprefix(f"model.layers.{layer}."): value for key, value in weights.items()}
        window = 4 if name == "window" and layer < 2 else TOKENS
        allowed_BQS = same_BQS & (rows[:, None] >= rows) & (rows[:, None] - rows < window)
        y_ND = rms_norm(x_ND, of["input_layernorm.weight"], settings.rms_norm_eps)
        q_NC, k_NK, v_NK = (linear(y_ND, of[f"self_attn.{letter}_proj.weight"]) for letter in "qkv")
        if settings.use_qk_norm:
            q_NC, k_NK = (
                rms_norm(x.reshape(len(x), -1, settings.head_size), of[f"self_attn.{letter}_norm.weight"],
                         settings.rms_norm_eps).reshape(x.shape)
                for x, letter in ((q_NC, "q"), (k_NK, "k"))
            )  # fmt: skip
        if layer not in MODELS[name][1]:
            tables = cos[positions_N], sin[positions_N]
            q_NC, k_NK = (rotary(x, *tables, settings.head_size) for x in (q_NC, k_NK))
        scale = 0.7 if name == "scale" else None
        heads_NC = attention(q_NC, k_NK, v_NK, allowed_BQS, settings.head_size, scale=scale)
        x_ND = x_ND + linear(heads_NC, of["self_attn.o_proj.weight"])
        y_ND = rms_norm(x_ND, of["post_attention_layernorm.weight"], settings.rms_norm_eps)
        gate_NF, up_NF = (linear(y_ND, of[f"mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        x_ND = x_ND + linear(swiglu(gate_NF, up_NF), of["mlp.down_proj.weight"])
    return linear(rms_norm(x_ND, weights["model.norm.weight"], settings.rms_norm_eps), weights["lm_head.weight"])


@ENGINES
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_numpy(name: str, engine: dict[str, bool]) -> None:
    trainer = TinyTrainer(**engine, **MODELS[name][0])
    batch = make_batch(3, valid=9, rows=2)
    logits = trainer.model.logits(trainer.build_inputs(batch)).asnumpy()
    assert distance(logits, numpy_logits(trainer, batch, name)) < decoder_limits(trainer.model.settings, rows=2).loss


LATENT_WINDOWS = {
    "multi_latent_attention": True, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "window_rope_theta": 50.0,
}  # fmt: skip


@pytest.mark.parametrize("name", ["every second", "first alone, normed", "none", "scale", "latent windows"])
def test_gradients_of_native_layers_are_those_of_operators(name: str) -> None:
    gradients = []
    for engine in ({}, {"compiled": False}):
        model = LATENT_WINDOWS if name == "latent windows" else MODELS[name][0]
        trainer = TinyTrainer(**engine, **model)
        gradients.append(loss_and_gradients(trainer.step(), make_batch(3, valid=9, rows=2))[1])
    assert_close(*gradients, 2 * decoder_limits(trainer.model.settings, rows=2).gradients)  # both are rounded


@ENGINES
@pytest.mark.parametrize("name", ["every second", "none", "scale"])
def test_generation_goes_the_same_way_as_the_whole_row(name: str, engine: dict[str, bool]) -> None:
    trainer = TinyTrainer(**engine, **MODELS[name][0])
    check_generation(trainer.model, trainer.build_inputs, [[3, 1, 4, 1, 5]], new_tokens=5)
