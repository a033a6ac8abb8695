"""Multi-head latent attention in training and over its cache, with native layers and operator by operator;
test_moe_models.py holds it to Hugging Face.
"""

from __future__ import annotations

import numpy as np
import pytest
from numpy_kernels import assert_close, assert_same_bits
from tiny_trainer import (
    NATIVE,
    TOKENS,
    TinyTrainer,
    check_adapters_are_merged_weights,
    loss_and_gradients,
    make_batch,
    make_window,
    state_of,
    with_random_adapters,
)
from tolerances import decoder_limits

from trainer.checkpoint.adapters import merge_adapters
from trainer.data import Batch
from trainer.models.generate import Generator

LATENT = {
    "architectures": "LlamaForCausalLM", "multi_latent_attention": True, "q_lora_rank": 10, "kv_lora_rank": 8,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 7, "rope_interleave": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 8, "mscale": 1, "mscale_all_dim": 0.5},
}  # fmt: skip
ADAPTERS = {"pet_config": {"lora_rank": 3, "lora_alpha": 7.5, "target_modules": ".*_proj.*"}}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.3}


def tiny(sections: dict | None = None, native: bool = True, **model: object) -> TinyTrainer:
    return TinyTrainer(native, sections, **LATENT | model)


@pytest.fixture(scope="module", params=[True, False], ids=["native", "cells"])
def adapted(request: pytest.FixtureRequest) -> TinyTrainer:
    return with_random_adapters(tiny(native=request.param, **ADAPTERS))


def check_cache(made: TinyTrainer) -> None:
    """Compares the logits after each token, whether it comes with the prompt or by itself, with those of the row."""
    ids_BT = make_batch(1, 9, rows=2).input_ids
    positions_BT = np.tile(np.arange(TOKENS, dtype=np.int32), (2, 1))
    whole = made.build_inputs(Batch(ids_BT, ids_BT, positions_BT, np.zeros_like(ids_BT)))
    right_BTV = made.model.logits(whole).asnumpy().reshape(2, TOKENS, -1)
    limit = decoder_limits(made.model.settings, rows=2).loss
    generator = Generator(made.model, made.build_inputs, eos_ids=())
    cache = generator.new_cache(2, TOKENS)
    assert [store.shape[-1] for store in cache.layers[0]] == [8, 2]  # and not 4 heads of 6 + 7 numbers
    first = 5
    found = [generator.forward(cache, ids_BT[:, :first], np.zeros(2, int), np.full(2, first - 1))]
    for place in range(first, TOKENS):
        found.append(generator.forward(cache, ids_BT[:, place : place + 1], np.full(2, place), np.zeros(2, int)))
    assert_close(found, right_BTV.swapaxes(0, 1)[first - 1 :], limit)


def test_a_cache_of_latent_vectors_gives_the_numbers_of_the_whole_row(adapted: TinyTrainer) -> None:
    check_cache(adapted)


def test_adapters_and_merged_weights_are_the_same_model(adapted: TinyTrainer) -> None:
    dense = tiny(native=adapted.kernels.host_layers)
    dense.initial = merge_adapters(adapted.initial, adapted.model.settings)
    gradients = check_adapters_are_merged_weights(adapted, dense, make_batch(1, 9, rows=2), scale=2.5)
    names = {name.split(".")[4] for name in gradients if ".self_attn." in name}
    assert names == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


@NATIVE
def test_recomputation_with_dropout_gives_the_same_bits(native: bool) -> None:
    window = make_window(12, 3)
    states = []
    for recompute in ({}, {"recompute": True}, {"select_recompute": ["attention"]}):
        trainer = tiny({"recompute_config": recompute}, native, **DROPOUT)
        step = trainer.step(lambda update: 0.01, optimizer={"type": "AdamW", "weight_decay": 0.1})
        losses = [step(window).loss for _ in range(2)]
        states.append(state_of(step.optimizer, trainer) | {"losses": np.array(losses)})
    for state in states[1:]:
        assert_same_bits(state, states[0])


def test_cells_without_norms_have_the_numbers_of_native_layers() -> None:
    """Native layers are held to NumPy in test_native_layers.py."""
    batch = make_batch(1, 9, rows=2)
    found = []
    for native in (True, False):
        trainer = tiny(native=native, use_qk_norm=False, softmax_scale=0.4)
        check_cache(trainer)
        gradients = loss_and_gradients(trainer.step(), batch)[1]
        found.append(gradients | {"logits": trainer.model.logits(trainer.build_inputs(batch)).asnumpy()})
    assert not any("_a_layernorm" in name for name in found[0])
    assert_close(found[1], found[0], 2 * decoder_limits(trainer.model.settings, rows=2).gradients)  # both are rounded


def test_it_learns_by_muon_with_frozen_norms() -> None:
    """Every other parameter moves, and a window is learned by heart."""
    trainer = tiny({"freeze": {"include": "*layernorm*"}}, q_lora_rank=None)
    step = trainer.step(lambda update: 0.02, optimizer={"type": "Muon", "qk_clip_enabled": False})
    window = [make_batch(3, 10)]
    losses = [step(window).loss for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    after = trainer.weights()
    for name, value in trainer.initial.items():
        assert np.array_equal(value, after[name]) == ("layernorm" in name), name
