"""A pass of prediction in NumPy, as on a CPU, and with MindSpore's tensors, as on a device: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor
from numpy_kernels import distance
from tiny_trainer import VOCABULARY, TinyTrainer
from tolerances import U_FLOAT16, decoder_limits

from trainer.arrays import tiles
from trainer.arrays.attention import cache as kv_cache
from trainer.models import array_parts, generate
from trainer.models.array_parts import ArrayParts
from trainer.models.cell_parts import CellParts
from trainer.models.generate import Generator

pytestmark = pytest.mark.slow

LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 7,
    "rope_interleave": True,
}  # fmt: skip
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12}
MODELS = {
    "grouped heads, biases, norms": {
        "use_qk_norm": True, "qkv_has_bias": True, "mlp_has_bias": True, "attn_proj_has_bias": True,
        "post_self_attn_layernorm": True, "rotary_pct": 0.5, "tie_word_embeddings": True,
    },
    "a key head for each query head": {"n_kv_heads": 4},
    "window in one layer": {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1},
    "adapters": {"pet_config": {"lora_rank": 3, "lora_alpha": 7.5, "target_modules": ".*q_proj.*|.*down_proj.*"}},
    "latent attention with adapters": LATENT | {
        "q_lora_rank": 10, "pet_config": {"lora_rank": 3, "target_modules": ".*kv_b_proj.*|.*o_proj.*"},
    },
    "latent attention with experts": LATENT | {"moe_config": EXPERTS},
    "experts with bias, groups and a gate of shared experts": {
        "mlp_has_bias": False, "mlp_down_has_bias": True, "first_k_dense_replace": 1,
        "moe_config": EXPERTS | {
            "shared_expert_num": 1, "use_shared_expert_gating": True, "use_gating_sigmoid": True, "n_group": 2,
            "topk_group": 1, "routed_scaling_factor": 1.5, "balance_via_topk_bias": True,
        },
    },
    "an embedding of another width": {"embedding_size": 12},
    "float16": {"compute_dtype": "float16", "layernorm_compute_type": "float16", "softmax_compute_type": "float16",
                "rotary_dtype": "float16"},
    "float16 experts": {"compute_dtype": "float16", "moe_config": EXPERTS},
}  # fmt: skip
LENGTHS, LONGEST, NEW = np.array([9, 2, 5]), 9, 3


def with_large_weights(made: TinyTrainer) -> TinyTrainer:
    """Draws weights far from zero, biases and adapters too, so that a mistake shows."""
    draw = np.random.default_rng(3)
    for parameter in made.model.parameters_by_name.values():
        noise = draw.standard_normal(parameter.shape).astype(np.float32)
        parameter.set_data(Tensor(parameter.asnumpy() + 0.1 * noise))
    made.model.compute_weights.refresh()
    return made


def logits_of(made: TinyTrainer, kind: type) -> np.ndarray:
    """Returns the logits after the prompts, and after each of some more tokens: [1 + NEW, B, V]."""
    draw = np.random.default_rng(4)
    generator = Generator(made.model, made.build_inputs, ())
    assert isinstance(generator.parts, kind)
    cache = generator.new_cache(len(LENGTHS), LONGEST + NEW)
    ids_BQ, more_BQ = (draw.integers(0, VOCABULARY, (len(LENGTHS), size)).astype(np.int32) for size in (LONGEST, NEW))
    found = [generator.read_prompts(cache, ids_BQ, LENGTHS)]
    for number in range(NEW):
        found.append(generator.forward(cache, more_BQ[:, number : number + 1], LENGTHS + number, 0 * LENGTHS))
    return np.array(found)


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_on_arrays_gives_the_numbers_of_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts as a whole; and in pieces, which end within and after a prompt, with threads that share every product."""
    made = with_large_weights(TinyTrainer(**MODELS[name]))
    whole = logits_of(made, ArrayParts)
    with monkeypatch.context() as patch:
        patch.setattr(generate, "_MAX_PROMPT_TOKENS", 4)
        for module in (tiles, kv_cache, array_parts):
            patch.setattr(module, "_SHARED_WORK", 0)
        patch.setattr(tiles, "_SHARED_COLUMNS", 1)
        pieces = logits_of(made, ArrayParts)
    right = logits_of(with_large_weights(TinyTrainer(compiled=False, **MODELS[name])), CellParts)
    assert right.std() > 0.1
    limit = 12 * U_FLOAT16 if "float16" in name else decoder_limits(made.model.settings, rows=3).loss
    assert distance(whole, right) < limit and distance(pieces, right) < limit
