"""Multi-head latent attention without MindSpore: keys, sizes of the class, names and shapes, plan, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from config_helpers import error_of, load, notes
from golden_files import load_model_case

from trainer.config import dump_config, parse_config
from trainer.models.spec.rotary import rotary_angles
from trainer.models.spec.shapes import adapter_shapes, attention_shapes, parameter_shapes
from trainer.models.spec.sublayers import attention_spec
from trainer.ops.precision import PartDtype, Precision
from trainer.ops.select import select_kernels
from trainer.parallel.mesh import Degrees
from trainer.plan.ascend import ascend_problems
from trainer.plan.memory import memory_estimate
from trainer.plan.render import plan_text
from trainer.run.prepare import build_plan

SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "vocab_size": 300, "seq_length": 16,
    "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
SYNTHETIC = {"data_loader": {"type": "SyntheticDataset", "num_samples": 8}}


def dense(**keys: object) -> str:
    """Returns a dense model: no family of transformers, but all that the attention needs."""
    return json.dumps({"model": {"arch": {"type": "LlamaForCausalLM"}, "model_config": SIZES | keys}})


def deepseek(keys: str = "", more: str = "") -> str:
    return f"model: {{model_config: {{architectures: DeepseekV3ForCausalLM{keys and ', '}{keys}}}}}\n{more}"


# Keys and sizes


def test_what_a_file_leaves_out_is_deepseek_v3() -> None:
    decoder = load(deepseek()).decoder
    moe = decoder.experts
    assert (decoder.num_layers, decoder.hidden_size, decoder.num_heads, decoder.vocab_size) == (61, 7168, 128, 129280)
    assert (decoder.q_lora_rank, decoder.kv_lora_rank, decoder.head_size) == (1536, 512, 192)
    assert attention_spec(decoder).value_size == 128
    assert (moe.expert_num, moe.num_experts_chosen, moe.n_group, moe.topk_group) == (256, 8, 8, 4)
    assert (moe.first_k_dense_replace, moe.routed_scaling_factor, moe.score_function) == (3, 2.5, "sigmoid")
    assert decoder.rope_interleave and decoder.mtp_depth == 1 and decoder.seq_length == 4096
    weights = sum(math.prod(shape) for shape in parameter_shapes(decoder).values())
    module = sum(math.prod(s) for n, s in parameter_shapes(decoder).items() if n.startswith("model.layers.61."))
    assert round((weights - module) / 1e9) == 671  # the number in the name of the released model


def test_sizes_of_the_class_that_do_not_fit_are_left_out() -> None:
    few = load(deepseek("num_layers: 3, n_routed_experts: 4")).decoder
    assert (few.experts.num_experts_chosen, few.experts.n_group, few.experts.first_k_dense_replace) == (1, None, None)
    some = load(deepseek("num_layers: 4, n_routed_experts: 64, q_lora_rank: null, n_group: null"))
    assert (some.decoder.experts.num_experts_chosen, some.decoder.experts.n_group) == (8, None)
    assert some.decoder.q_lora_rank is None and not some.decoder.experts.balance_via_topk_bias
    assert load(deepseek("num_layers: 4, moe_router_bias_update_rate: 0.1")).decoder.experts.balance_via_topk_bias
    assert parse_config("again", dump_config(some)).decoder == some.decoder


@pytest.mark.parametrize(
    "text", ["model_type: telechat3_moe", "architectures: [TeleChat3MoeForCausalLM]", "multi_latent_attention: True"]
)
def test_other_names_of_the_class(text: str) -> None:
    config = load(f"model_config: {{{text}, num_layers: 4}}\n")
    assert config.model.arch.type == "DeepseekV3ForCausalLM" and config.decoder.multi_latent_attention


def test_a_size_of_latent_attention_without_a_class_is_deepseek_v3() -> None:
    text = "model_config: {num_layers: 4, v_head_dim: 192, use_fused_mla: False}\n"
    decoder = load(text).decoder
    assert (decoder.multi_latent_attention, decoder.v_head_dim, decoder.q_lora_rank) == (True, 192, 1536)
    assert "model_config.v_head_dim 192 (a.yaml:1): only latent attention has it, that of DeepSeek-V3" in notes(text)
    for other in ("multi_latent_attention: False", "model_type: llama"):
        message = error_of(f"model_config: {{num_layers: 4, v_head_dim: 192, {other}}}\n")
        assert "v_head_dim = 192: requires multi_latent_attention: true" in message


def test_megatrons_names_and_transformers_sum() -> None:
    megatron = load("model_config: {multi_latent_attention: True, qk_head_dim: 32, qk_pos_emb_head_dim: 16}\n").decoder
    assert (megatron.qk_nope_head_dim, megatron.qk_rope_head_dim, megatron.head_size) == (32, 16, 48)
    both = "multi_latent_attention: True, qk_head_dim: {}, qk_nope_head_dim: 32, qk_rope_head_dim: 16"
    assert load(f"model_config: {{{both.format(48)}}}\n").decoder.qk_nope_head_dim == 32
    assert "disagrees with" in error_of(f"model_config: {{{both.format(40)}}}\n")


def test_heads_of_keys_and_their_width_have_no_effect() -> None:
    decoder = load(dense(n_kv_heads=2, head_dim=8)).decoder
    assert (decoder.kv_heads, decoder.head_size, decoder.rotary_size) == (4, 14, 8)
    assert attention_spec(decoder).value_size == 10
    assert attention_spec(decoder).cache_widths == (16, 8) and attention_spec(decoder).cache_heads == 1
    told = notes(dense(n_kv_heads=2, head_dim=9))
    assert "n_kv_heads 2: not used, multi-head latent attention has" in told and "head_dim 9: not used" in told
    assert "not used, multi" not in notes(dense(n_kv_heads=4, head_dim=8))
    grouped = load('model_config: {num_heads: 4, n_kv_heads: 2, hidden_size: 32}').decoder
    assert attention_spec(grouped).cache_widths == (16, 16)


def test_the_factor_on_the_scores_is_deepseeks() -> None:
    """0.1 mscale_all_dim ln(factor) + 1, squared; the factor on cosine and sine is that of mscale by that of the other.
    """
    yarn = {"rope_type": "yarn", "factor": 40, "mscale": 1.5, "mscale_all_dim": 0.8}
    decoder = load(dense(rope_scaling=yarn)).decoder
    scores, turned = (0.1 * weight * math.log(40) + 1 for weight in (0.8, 1.5))
    assert attention_spec(decoder).scale == pytest.approx(scores**2 / math.sqrt(14))
    assert rotary_angles(decoder, 1)[0][0] == pytest.approx([turned / scores] * 8)
    for scaling in (None, {**yarn, "mscale_all_dim": None}, {**yarn, "rope_type": "default"}):
        assert attention_spec(load(dense(rope_scaling=scaling)).decoder).scale == 14**-0.5
    usual = {key: value for key, value in json.loads(dense(rope_scaling=yarn))["model"]["model_config"].items()
             if not key.startswith(("multi", "q", "kv", "v_"))}  # fmt: skip
    assert attention_spec(load(json.dumps({"model_config": usual})).decoder).scale == 8**-0.5


def test_flat_yarn_has_megatrons_defaults_and_keeps_what_a_folder_says(tmp_path: Path) -> None:
    flat = "multi_latent_attention: True, num_layers: 4, position_embedding_type: yarn, scaling_factor: 40"
    scaling = load(f"model_config: {{{flat}}}\n").decoder.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.mscale, scaling.mscale_all_dim) == ("yarn", 40, 0.707, 0.707)
    written = load(f"model_config: {{{flat}, mscale: 1, mscale_all_dim: 1, beta_fast: 16}}\n").decoder.rope_scaling
    assert (written.mscale, written.mscale_all_dim, written.beta_fast) == (1, 1, 16)
    (tmp_path / "config.json").write_text(json.dumps(load_model_case("experts_deepseek_v3").metadata["config_json"]))
    text = "model_config: {position_embedding_type: yarn, scaling_factor: 8, beta_slow: 0.25}"
    scaling = load(f"pretrained_model_dir: {tmp_path}\n{text}\n").decoder.rope_scaling
    assert (scaling.factor, scaling.beta_slow, scaling.beta_fast, scaling.mscale) == (8, 0.25, 8, 1.5)
    assert scaling.original_max_position_embeddings == 64


def test_a_published_config_json(tmp_path: Path) -> None:
    """With the keys of DeepSeek's own code beside those that transformers reads."""
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}, "ep_size": 1,
           "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1}
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 4096}  # fmt: skip
    published = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rope_scaling": yarn, **own}
    (tmp_path / "config.json").write_text(json.dumps(published))
    text = f"pretrained_model_dir: {tmp_path}\n"
    decoder = load(text).decoder
    assert attention_spec(decoder).scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert (decoder.num_layers, decoder.experts.expert_num, decoder.mtp_depth) == (61, 256, 1)
    assert "not used, as in transformers: ep_size, moe_layer_freq, scoring_func, topk_method" in notes(text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (dense(qk_rope_head_dim=7), ["qk_rope_head_dim = 7", "rotary embedding", "even number"]),
        (dense(rotary_pct=0.5), ["rotary_pct = 0.5", "qk_rope_head_dim"]),
        (dense(post_self_attn_layernorm=True), ["post_self_attn_layernorm = true", "not yet supported"]),
        (dense(nope_without_window=True), ["nope_without_window = true", "not yet supported"]),
        (dense(pet_config={"target_modules": ".*q_b_proj|.*k_proj|.*wv"}), ["that matches .*k_proj, .*wv", "kv_b"]),
        (dense(pet_config={"target_modules": ".*key"}), ["matches none", "kv_a_proj_with_mqa"]),
        (dense(multi_latent_attention=False), ["q_lora_rank = 12", "requires multi_latent_attention: true"]),
        (dense(q_lora_rank=0), ["q_lora_rank = 0", "at least 1"]),
        (
            deepseek("num_layers: 4", "optimizer: {type: Muon, qk_clip_threshold: 9.0}\nfreeze: {layers: 0}\n"),
            ["optimizer.qk_clip_enabled = true: not yet supported with adapters or frozen weights"],
        ),
        (deepseek("num_layers: 4", "optimizer: {type: Muon}\ncontext: {mode: 1}\n"), ["supported with context.mode 1"]),
        ("optimizer: {type: Muon, qk_clip_enabled: True}\n", ["qk_clip_enabled = true: QK-clip scales the heads of"]),
        ("optimizer: {type: Muon, qk_clip_threshold: 100}\n", ["qk_clip_threshold = 100.0: QK-clip scales the head"]),
    ],
)
def test_what_is_refused(text: str, parts: list[str]) -> None:
    message = error_of(text)
    for part in parts:
        assert part in message


def test_muon_clips_latent_attention_alone_and_not_on_an_ascend() -> None:
    muon = "optimizer: {type: Muon}\n"
    clipped = deepseek("num_layers: 4", muon)
    assert load(clipped).optimizer.qk_clip_enabled and not load(muon).optimizer.qk_clip_enabled
    (refused,) = ascend_problems(load(clipped), Degrees())
    assert "a.yaml:2: optimizer.qk_clip_enabled = true: an Ascend does not" in str(refused.error)
    unclipped = load(clipped.replace("Muon}", "Muon, qk_clip_enabled: False}"))
    assert not list(ascend_problems(unclipped, Degrees()))
    text = dump_config(load(muon))
    older = text.replace("qk_clip_enabled: false", "qk_clip_enabled: true")  # as an older version wrote it
    assert older != text and load(older).optimizer.qk_clip_enabled


# Names and shapes


@pytest.mark.parametrize("name", ["experts_deepseek_v3", "experts_deepseek_v3_packed"])
def test_names_and_shapes_are_transformers(name: str) -> None:
    case = load_model_case(name)
    text = json.dumps({"model_config": {"seq_length": 24, **case.metadata["config_json"]}})
    shapes = attention_shapes(parse_config(name, text).decoder)
    theirs = {key.removeprefix("model.layers.0."): array.shape for key, array in case.weights.items()}
    of_attention = {key for key in theirs if key.startswith(("self_attn.", "input_layernorm."))}
    assert shapes.keys() == of_attention
    assert all(shapes[key] == theirs[key] for key in of_attention)


def test_adapters_are_named_as_in_peft() -> None:
    section = {"target_modules": ".*q_b_proj|.*linear_kv_up_proj|.*o_proj", "lora_rank": 2}
    decoder = load(dense(pet_config=section)).decoder
    assert adapter_shapes(decoder)["model.layers.1.self_attn.kv_b_proj.lora_B.weight"] == (64, 2)
    first = [name for name in adapter_shapes(decoder) if ".layers.0." in name and ".lora_A." in name]
    assert [name.split(".")[-3] for name in first] == ["q_b_proj", "kv_b_proj", "o_proj"]
    plain = load(dense(q_lora_rank=None, pet_config={"target_modules": "q_proj|kv_a_proj_with_mqa"})).decoder
    assert {name.split(".")[-3] for name in adapter_shapes(plain)} == {"q_proj", "kv_a_proj_with_mqa"}


# Kernels and ranks


def test_which_kernels_ascend_gets() -> None:
    bfloat16 = PartDtype("bfloat16", "asked")
    precision = Precision(bfloat16, bfloat16, bfloat16, bfloat16)

    def chosen(**keys: object) -> dict[str, str]:
        flags = {"use_flash_attention": True, "use_fused_rope": True, "qk_nope_head_dim": 8, "v_head_dim": 16, **keys}
        found = select_kernels(load(dense(**flags)).decoder, "Ascend", precision)
        return {choice.kernel: choice.why if not choice.fused else "" for choice in found}

    assert chosen()["attention"] == "" and chosen()["rotary_embedding"] == ""
    assert "no wider than the queries, here 24 and 16" in chosen(v_head_dim=24)["attention"]
    assert "a multiple of 16 up to 512, here 18" in chosen(qk_nope_head_dim=10)["attention"]
    assert "neighbouring numbers" in chosen(rope_interleave=True)["rotary_embedding"]


def test_the_plan_counts_the_cache_of_the_latent_vectors() -> None:
    """16 + 8 numbers instead of 4 heads of 14 + 10, for 3 prompts of 16 tokens in 2 layers."""
    predict = json.loads(dense(batch_size=3)) | {"run_mode": "predict"}
    estimates = [
        memory_estimate(parse_config("a.yaml", json.dumps(predict)), trains=False, device="CPU"),
        memory_estimate(load('{run_mode: predict, model_config: {num_layers: 2, hidden_size: 32, seq_length: 16, '
                             'num_heads: 4, n_kv_heads: 2, batch_size: 3}}'), trains=False, device="CPU"),
    ]  # fmt: skip
    cached = [estimate["cache of a full context"] for estimate in estimates]
    assert cached == [3 * 16 * 2 * (16 + 8) * 4, 3 * 16 * 2 * (16 + 16) * 4]
    plan = build_plan(parse_config("a.yaml", json.dumps(json.loads(dense()) | {"train_dataset": SYNTHETIC})))
    attention = (
        "multi-head latent: queries from 12 numbers, keys and values from 16; prediction caches 24 numbers a token and"
        " layer"
    )
    assert attention in plan_text(plan) and "cache of a full context" not in plan.memory_bytes
