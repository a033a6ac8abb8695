"""Model FLOPs against the literal formulas of papers, and the peak that they are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from no_decoder import NO_DECODER_TEXT

from trainer.config import Override, parse_config
from trainer.plan.flops import flops_per_sequence, keys_seen
from trainer.plan.pipeline import pipeline_plan

REPOSITORY = Path(__file__).resolve().parents[3]
L, H, HEADS, KV, D, FFN, V, T = 3, 64, 4, 2, 16, 96, 128, 32
DENSE = f"""
model:
  arch: {{type: LlamaForCausalLM}}
  model_config: {{num_layers: {L}, hidden_size: {H}, num_heads: {HEADS}, n_kv_heads: {KV}, intermediate_size: {FFN},
                 vocab_size: {V}, seq_length: {T}}}
train_dataset: {{data_loader: {{type: SyntheticDataset, num_samples: 7}}}}
"""
PROJECTIONS = H * (HEADS * D + 2 * KV * D) + HEADS * D * H
LAYER = PROJECTIONS + 3 * H * FFN
PAIRS = (T + 1) / 2  # keys that a query sees, mean
ATTENTION = 2 * HEADS * D * PAIRS  # numbers of queries and keys, and of scores and values, that are multiplied


def flops(**keys: object) -> float:
    """Returns the operations per token."""
    overrides = [Override(name.replace("__", "."), str(value)) for name, value in keys.items()]
    return flops_per_sequence(parse_config("a.yaml", DENSE, overrides)) / T


def test_a_dense_decoder_takes_6_n_and_attention() -> None:
    found = flops()
    assert found == 6 * (L * LAYER + V * H) + L * 6 * ATTENTION
    # PaLM, appendix B: 6 N + 12 L H Q T, of which the half that a causal mask leaves, and the diagonal.
    palm = 12 * L * HEADS * D * T
    assert found == 6 * (L * LAYER + V * H) + palm / 2 * (T + 1) / T
    assert flops(model__model_config__tie_word_embeddings=True) == found  # the head is the embedding
    assert flops(run_mode="eval", eval_dataset="{data_loader: {type: SyntheticDataset, num_samples: 7}}") == found / 3


def test_recomputation_is_not_counted() -> None:
    assert flops(recompute_config__recompute=True) == flops()


@pytest.mark.parametrize(("recomputed", "again"), [
    (None, 0), ("attention", 2 * (PROJECTIONS + ATTENTION)), ("mlp", 2 * 3 * H * FFN),
])  # fmt: skip
def test_stages_of_a_pipeline_have_their_model_flops_and_what_they_recompute(
    recomputed: str | None, again: float
) -> None:
    """Each of three stages has a layer, and the last one the head."""
    keys: dict[str, object] = {"use_parallel": True, "parallel_config.pipeline_stage": L}
    if recomputed is not None:
        keys["recompute_config.select_recompute"] = [recomputed]
    config = parse_config("a.yaml", DENSE, [Override(key, str(value)) for key, value in keys.items()])
    plan = pipeline_plan(config, L)
    assert plan is not None
    layer = 6 * (LAYER + ATTENTION) + again
    total = L * layer + 6 * V * H
    shares = [layer / total, layer / total, (layer + 6 * V * H) / total]
    assert [stage.share for stage in plan.stages] == pytest.approx(shares)


def test_a_window_is_seen_as_far_as_it_reaches() -> None:
    windowed = flops(model__model_config__sliding_window=8)
    pairs = sum(min(query + 1, 8) for query in range(T)) / T
    assert windowed == pytest.approx(6 * (L * LAYER + V * H) + L * 6 * 2 * HEADS * D * pairs)
    assert keys_seen(T, None) == keys_seen(T, T + 1) == sum(range(1, T + 1)) / T


def test_experts_count_with_those_that_are_chosen() -> None:
    moe = "{expert_num: 8, num_experts_chosen: 2, shared_expert_num: 1, moe_intermediate_size: 48}"
    layer = PROJECTIONS + 8 * H + 2 * 3 * H * 48 + 3 * H * 48
    assert flops(model__model_config__moe_config=moe) == 6 * (L * layer + V * H) + L * 6 * ATTENTION


def test_each_multi_token_module_is_a_layer_with_a_merge_and_a_head() -> None:
    one = 6 * (LAYER + 2 * H * H + V * H) + 6 * ATTENTION
    assert flops(model__model_config__mtp_depth=2) == pytest.approx(flops() + 2 * one)


def test_latent_attention_has_keys_and_values_of_unequal_width() -> None:
    keys = "multi_latent_attention: True, q_lora_rank: 24, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4"
    text = DENSE.replace(f"n_kv_heads: {KV}", f"{keys}, v_head_dim: 12")
    found = flops_per_sequence(parse_config("a.yaml", text, [])) / T
    queries, keys = H * 24 + 24 * HEADS * 12, H * (16 + 4) + 16 * HEADS * (8 + 12)
    layer = queries + keys + HEADS * 12 * H + 3 * H * FFN
    assert found == pytest.approx(6 * (L * layer + V * H) + L * 6 * HEADS * (12 + 12) * PAIRS)


def test_what_is_frozen_has_no_gradient() -> None:
    every = flops()
    # The gradient of the weights is left out, that of what goes through them is not: the embedding below is trained.
    mlp = flops(freeze__include='["*.mlp.*"]')
    assert mlp == every - 2 * L * 3 * H * FFN
    # Below the first trained layer there is no backward pass.
    upper = flops(freeze__include='["model.embed_tokens.*", "layers: 0-1"]')
    assert upper == pytest.approx(every - 4 * 2 * LAYER - 4 * 2 * ATTENTION)


def test_adapters_leave_the_gradients_of_the_weights_below_them_out() -> None:
    found = flops(model__model_config__pet_config='{pet_type: lora, lora_rank: 4, target_modules: ".*q_proj"}')
    assert found == pytest.approx(4 * (L * LAYER + V * H) + L * 6 * (4 * H + HEADS * D * 4) + L * 6 * ATTENTION)


def test_images_need_no_gradient() -> None:
    config = parse_config("a.yaml", NO_DECODER_TEXT)
    weights = [outputs * inputs for outputs, inputs in config.network.linears.values()]
    assert flops_per_sequence(config) == 6 * sum(weights) - 2 * weights[0]
    *_, last = config.network.linears
    frozen = parse_config("a.yaml", f"{NO_DECODER_TEXT}freeze: {{include: ['*'], exclude: ['{last}.*']}}")
    assert flops_per_sequence(frozen) == 2 * sum(weights) + 2 * weights[-1]


def test_a_head_that_is_trained_alone_sends_no_gradient_back() -> None:
    forward = flops(run_mode="eval", eval_dataset="{data_loader: {type: SyntheticDataset, num_samples: 7}}")
    assert flops(freeze="{include: ['*'], exclude: [lm_head.weight]}") == forward + 2 * V * H
    norm_too = "{include: ['*'], exclude: [lm_head.weight, model.norm.weight]}"
    assert flops(freeze=norm_too) == forward + 4 * V * H


# ---- the peak --------------------------------------------------------------------------------------------------------


def test_an_ascend_has_its_published_peak_and_an_unknown_device_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.ops import peak

    monkeypatch.setattr(peak, "_device_name", lambda: "Ascend910B3")
    assert peak.peak_flops("Ascend", "bfloat16", 8) == pytest.approx(8 * 20 * 8192 * 1.8e9)
    assert peak.peak_flops("Ascend", "float32", 8) is None and peak.peak_flops("CPU", "bfloat16", 8) is None
    monkeypatch.setattr(peak, "_device_name", lambda: "Ascend990")
    assert peak.peak_flops("Ascend", "bfloat16", 8) is None
