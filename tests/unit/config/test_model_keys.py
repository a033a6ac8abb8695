"""Keys of MindSpore Transformers' model section in both schemas: those without effect, and those that are refused."""

from __future__ import annotations

import json

import pytest
from config_helpers import NEWER_DATA, error_of, load, notes

from trainer.checkpoint.state import settings_record
from trainer.config import dump_config, parse_config
from trainer.config.hugging_face import class_differences
from trainer.models.spec.rotary import rotary_angles
from trainer.models.spec.sublayers import attention_spec

SIZES = "num_layers: 4, hidden_size: 64, num_heads: 4, vocab_size: 300, seq_length: 32"


def older(keys: str) -> str:
    """Returns a file of the older schema with further keys of the model."""
    return f"model_config: {{{SIZES}, {keys}}}\n"


def newer(keys: str) -> str:
    """Returns a file of the newer schema with further keys of the model."""
    return f"{NEWER_DATA}model: {{{SIZES}, {keys}}}\n"


@pytest.mark.parametrize("schema", [older, newer])
@pytest.mark.parametrize(
    "key",
    [
        "fused_norm: False", "input_layout: TND", "sparse_mode: 2", "disable_lazy_inline: True",
        "print_separate_loss: False", "track_max_attention_logit: True", "embedding_params_dtype: bfloat16",
        "chunk_loss_num: 4", "qk_clip: True", "sandwich_norm: True",
    ],
)  # fmt: skip
def test_keys_that_change_no_number_are_a_note(schema, key: str) -> None:
    text = schema(key)
    assert f".{key.partition(':')[0]}" in notes(text)
    assert load(text).decoder.num_layers == 4


def test_a_name_of_weights_that_no_path_can_have_is_a_note() -> None:
    assert "checkpoint_name_or_path" in notes(older(f"checkpoint_name_or_path: {'x' * 300}"))


@pytest.mark.parametrize("key", ["moe_shared_expert_overlap: True", "print_expert_load: True"])
def test_keys_of_experts_that_change_no_number_are_a_note(key: str) -> None:
    assert f".{key.partition(':')[0]}" in notes(newer(f"num_experts: 4, num_experts_per_tok: 2, {key}"))


@pytest.mark.parametrize("schema", [older, newer])
@pytest.mark.parametrize(
    "key",
    [
        "use_attention_mask: False", "use_alibi_mask: True", "fp16_lm_cross_entropy: True", "model_architecture: yoco",
        "use_rope_scaling: True", "rotary_seq_len_interpolation_factor: 2.0",
        "num_experts: 4, moe_apply_probs_on_input: True", "num_experts: 4, enable_expert_relocation: True",
    ],
)  # fmt: skip
def test_keys_that_would_change_numbers_are_refused(schema, key: str) -> None:
    name = key.rpartition(", ")[2].partition(":")[0]
    message = error_of(schema(key))
    assert f".{name} = " in message and ": not yet supported.\n" in message


@pytest.mark.parametrize("schema", [older, newer])
def test_parts_of_deepseek_v4_are_one_error(schema) -> None:
    message = error_of(schema("enable_hyper_connections: True, hc_mult: 4, o_groups: 8, enable_hc_head: null"))
    rule = "not yet supported, a part of DeepSeek-V4: enable_hyper_connections, hc_mult, o_groups"
    assert f"enable_hyper_connections: {rule}" in message and "enable_hc_head" not in message
    named = error_of(schema("model_type: deepseek_v4, enable_hyper_connections: True, hc_mult: 4"))
    assert "hyper-connections, attention is compressed and sparse" in named and "hc_mult" not in named
    sparse = error_of(schema("experimental_attention_variant: dsa, dsa_indexer_topk: 64"))
    assert "a part of DeepSeek-V3.2 and V4: experimental_attention_variant, dsa_indexer_topk" in sparse
    forced = "model: {arch: {type: LlamaForCausalLM}}\n" + older("model_type: deepseek_v4, hc_mult: 4")
    assert "a part of DeepSeek-V4: hc_mult" in error_of(forced)


@pytest.mark.parametrize("schema", [older, newer])
@pytest.mark.parametrize(
    ("keys", "window", "layers"),
    [
        ("window_size: [7, 0]", 8, (0, 1, 2, 3)),
        ("window_size: [7, 0], window_attn_skip_freq: 2", 8, (2,)),
        ("window_size: [7, 0], window_attn_skip_freq: [0, 1, 0, 1]", 8, (0, 1, 3)),
        ("window_size: [7, 0], window_attn_skip_freq: 3", 8, (0, 1, 3)),
        ("window_size: [7, 0], window_attn_skip_freq: [1, 1, 0, 0]", 8, (0, 1)),
        ("window_size: [0, 0], window_attn_skip_freq: 1", 1, ()),
        ("window_size: [-1, 0], window_attn_skip_freq: 2", None, ()),
        ("window_size: [7, 0], sliding_window: 8, layer_types: null", 8, (0, 1, 2, 3)),
    ],
)
def test_a_window_of_graph_mode_is_a_sliding_window(schema, keys: str, window: int | None, layers: tuple) -> None:
    """Layer 0 is like layer 1, as in mindformers/parallel_core/training_graph/transformer/attention.py, line 149."""
    config = load(schema(keys))
    assert (config.decoder.sliding_window, config.decoder.window_layers) == (window, layers)
    assert parse_config("again", dump_config(config)) == config
    assert ("PynativeTrainer does not read it" in notes(schema(keys))) == (schema is newer)


def test_where_layer_0_is_not_as_written_is_a_note() -> None:
    text = "window_attn_skip_freq: layer 0 is like layer 1, as in MindSpore Transformers"
    assert text in notes(older("window_size: [7, 0], window_attn_skip_freq: 2"))
    assert text in notes(older("window_size: [7, 0], window_attn_skip_freq: [0, 1, 0, 1]"))
    assert text not in notes(older("window_size: [7, 0], window_attn_skip_freq: 3"))


def test_a_run_of_an_earlier_version_resumes_with_its_windows() -> None:
    config = load(older("window_size: [7, 0], window_attn_skip_freq: 2"))
    assert dump_config(config).count("full_attention") == 3
    earlier = dump_config(config).replace("full_attention", "sliding_attention", 1)
    assert parse_config("again", earlier).decoder.window_layers == (0, 2)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ("window_size: [7, 1]", "window_size = [7, 1]: must be two numbers"),
        ("window_size: [7]", "window_size = [7]: must be two numbers"),
        ("window_size: [7, 0], sliding_window: 7", "disagrees with sliding_window = 7 (a.yaml:1): it means 8"),
        ("window_size: [-1, 0], sliding_window: 7", "disagrees with sliding_window = 7 (a.yaml:1): it means 0"),
        ("softmax_scale: 0.3, query_pre_attn_scalar: 16", "pre_attn_scalar = 16: disagrees with softmax_scale = 0.3"),
        ("nope_layers: [0], no_rope_layers: [1, 1, 1, 0]", "no_rope_layers = [1, 1, 1, 0]: disagrees with nope_lay"),
        ("no_rope_layers: [1, 0]", "no_rope_layers = '...': must have one entry for each of the 4 layers, and has 2"),
        *((f"position_embedding_type: yarn, scaling_factor: 4, rope_scaling: {{rope_type: {kind}, factor: 8}}",
           f"scaling_factor = 4: disagrees with {told} (a.yaml:1)")
          for kind, told in (("yarn", "factor = 8"), ("linear", "rope_type = linear"))),
        ("moe_config: {moe_layer_freq: 2, mlp_layer_types: [dense, sparse, sparse, sparse]}",
         "disagrees with moe_layer_freq = 2 (a.yaml:1)"),
        ("window_attn_skip_freq: 2", "requires window_size"),
        ("window_size: [7, 0], window_attn_skip_freq: [1, 0]", "must have one entry for each of the 4 layers"),
        ("softmax_scale: 0.0", "softmax_scale = 0.0"),
        ("sliding_window_pattern: 0", "sliding_window_pattern = 0: must be at least 1"),
        ("nope_layer_interval: 0", "nope_layer_interval = 0: must be at least 1"),
        ("nope_layer_interval: 2, nope_layers: [1]", "disagrees with nope_layers"),
        ("nope_layers: [4]", "there is no layer 4: the model's layers are 0 to 3"),
        ("nope_layer_interval: 2, mtp_depth: 1", "not yet supported with multi_latent_attention, and with multi-token"),
        ("position_embedding_type: learned_absolute", "position_embedding_type = 'learned_absolute'"),
    ],
)
def test_windows_scales_and_positions_that_mean_something_else_are_errors(keys: str, part: str) -> None:
    assert part in error_of(older(keys))


def test_the_scale_of_the_scores_and_the_rotated_part_of_a_head() -> None:
    decoder = load(older("softmax_scale: 0.3, rotary_percent: 0.5")).decoder
    assert attention_spec(decoder).scale == 0.3 and decoder.rotary_size == 8
    assert "another factor on the attention's scores" in class_differences(decoder, "LlamaForCausalLM")


@pytest.mark.parametrize("schema", [older, newer])
@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ("nope_layer_interval: 2", (1, 3)),
        ("nope_layer_interval: 1", (0, 1, 2, 3)),
        ("nope_layers: [0, 3]", (0, 3)),
        ("nope_layers: []", ()),
        ("position_embedding_type: none", (0, 1, 2, 3)),
    ],
)
def test_layers_without_rotary_positions(schema, keys: str, layers: tuple) -> None:
    config = load(schema(keys))
    assert config.decoder.unrotated_layers == layers
    assert parse_config("again", dump_config(config)) == config
    words = "layers without rotary positions"
    assert (words in class_differences(config.decoder, "LlamaForCausalLM")) == bool(layers)


def test_the_trained_length_of_flat_yarn() -> None:
    keys = "position_embedding_type: yarn, rotary_scaling_factor: 4, max_position_embeddings: 64"
    flat = load(older(f"{keys}, original_max_position_embeddings: 16")).decoder
    assert flat.rope_scaling.original_max_position_embeddings == 16
    assert rotary_angles(flat, 8)[1].tolist() != rotary_angles(load(older(keys)).decoder, 8)[1].tolist()


@pytest.mark.parametrize("schema", [older, newer])
def test_rules_of_initial_values_are_read_and_a_wrong_expression_is_an_error(schema) -> None:
    rules = "param_init_std_rules: [{{target: '{}', init_method_std: 0.1}}]"
    config = load(schema(rules.format(".*linear_proj.*")))
    assert config.decoder.param_init_std_rules[0].init_method_std == 0.1
    recorded = settings_record(config)["model.model_config.param_init_std_rules"]
    assert json.loads(json.dumps(recorded)) == [{"target": ".*linear_proj.*", "init_method_std": 0.1}]
    assert parse_config("again", dump_config(config)) == config
    assert "param_init_std_rules.0.target = '(a+)+b'" in error_of(schema(rules.format("(a+)+b")))
