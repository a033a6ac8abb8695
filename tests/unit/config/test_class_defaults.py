"""Defaults of the classes of MindSpore Transformers, for keys that a file of either schema leaves out."""

from __future__ import annotations

import json
import math
import re
from ast import literal_eval
from typing import Any, NamedTuple

import pytest
from config_helpers import NEWER_DATA, error_of, load, notes
from tolerances import SCHEDULE

from trainer.config import dump_config, parse_config
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import class_differences
from trainer.config.schema.fields import yaml_names
from trainer.config.schema.model import ModelConfig
from trainer.config.schema.moe import MoEConfig
from trainer.config.schema.root import Config
from trainer.convert.convert import older_text
from trainer.models.spec.shapes import parameter_shapes
from trainer.models.spec.sublayers import attention_spec

SOURCE = "mindspore-ai/mindformers, commit 167a50dec750bf8ea0b03f1dabf2818c28747a5a"
FACTS = {
    "qwen2": """
        mindformers/models/qwen2/configuration_qwen2.py: 145 seq_length 4096, 146 pad_token_id 151643, 150
        add_bias_linear False, 160 vocab_size 151936, 161 hidden_size 4096, 162 intermediate_size 22016, 163
        num_hidden_layers 32, 164 num_attention_heads 32, 165 num_key_value_heads 32, 167 max_position_embeddings
        32768, 168 initializer_range 0.02, 169 rms_norm_eps 1e-06, 171 tie_word_embeddings False, 172 rope_theta
        10000.0, 178 attention_dropout 0.0
        mindformers/parallel_core/transformer_config.py: 1211 hidden_dropout 0.1
    """,
    "qwen3": """
        mindformers/models/qwen3/configuration_qwen3.py: 148 seq_length 4096, 149 pad_token_id 151643, 153
        add_bias_linear False, 164 vocab_size 151936, 165 hidden_size 4096, 166 intermediate_size 22016, 167
        num_hidden_layers 32, 168 num_attention_heads 32, 169 num_key_value_heads 32, 170 head_dim 128, 172
        max_position_embeddings 32768, 173 initializer_range 0.02, 174 rms_norm_eps 1e-06, 176 tie_word_embeddings
        False, 177 rope_theta 10000.0, 179 attention_bias False, 184 attention_dropout 0.0
        mindformers/parallel_core/transformer_config.py: 1211 hidden_dropout 0.1
    """,
    "qwen3_moe": """
        mindformers/models/qwen3_moe/configuration_qwen3_moe.py: 163 seq_length 4096, 164 pad_token_id 151643, 167
        moe_router_score_function softmax, 168 moe_router_enable_expert_bias False, 170 add_bias_linear False, 184
        vocab_size 151936, 185 hidden_size 2048, 186 intermediate_size 6144, 187 num_hidden_layers 24, 188
        num_attention_heads 32, 189 num_key_value_heads 4, 191 max_position_embeddings 32768, 192 initializer_range
        0.02, 193 rms_norm_eps 1e-06, 195 tie_word_embeddings False, 196 rope_theta 10000.0, 198 attention_bias
        False, 201 attention_dropout 0.0, 203 moe_intermediate_size 768, 204 num_experts_per_tok 8, 205 num_experts
        128, 206 norm_topk_prob False
        mindformers/parallel_core/transformer_config.py: 1211 hidden_dropout 0.1, 1828 moe_aux_loss_coeff 0.0
    """,
    "glm4": """
        mindformers/models/glm4/configuration_glm4.py: 102 seq_length 4096, 106 add_bias_linear False, 114
        vocab_size 151552, 115 hidden_size 4096, 116 intermediate_size 13696, 117 num_hidden_layers 40, 118
        num_attention_heads 32, 119 num_key_value_heads 2, 120 partial_rotary_factor 0.5, 121 head_dim 128, 123
        attention_dropout 0.0, 124 max_position_embeddings 131072, 125 initializer_range 0.02, 126 rms_norm_eps
        1.5625e-07, 128 tie_word_embeddings False, 129 rope_theta 10000.0, 130 pad_token_id 151329, 133
        attention_bias True
        mindformers/parallel_core/transformer_config.py: 1211 hidden_dropout 0.1
    """,
    "glm4_moe": """
        mindformers/models/glm4_moe/configuration_glm4_moe.py: 164 seq_length 4096, 168
        moe_router_score_function sigmoid, 169 moe_router_enable_expert_bias True, 171 add_bias_linear False, 177
        vocab_size 151552, 178 hidden_size 4096, 179 intermediate_size 10944, 180 num_hidden_layers 46, 181
        num_attention_heads 96, 182 partial_rotary_factor 0.5, 183 num_key_value_heads 8, 185
        max_position_embeddings 131072, 186 initializer_range 0.02, 187 rms_norm_eps 1e-05, 189 tie_word_embeddings
        False, 190 rope_theta 10000.0, 192 attention_bias False, 193 attention_dropout 0.0, 194
        moe_intermediate_size 1408, 195 num_experts_per_tok 8, 196 n_shared_experts 1, 197 n_routed_experts 128, 198
        routed_scaling_factor 1.0, 199 n_group 1, 200 topk_group 1, 201 first_k_dense_replace 1, 202 norm_topk_prob
        True, 203 use_qk_norm False
        mindformers/parallel_core/transformer_config.py: 1211 hidden_dropout 0.1, 1828 moe_aux_loss_coeff 0.0, 1803
        moe_router_bias_update_rate 0.001
    """,
    "telechat": """
        mindformers/models/telechat2/configuration_telechat2.py: 61 seq_length 4096, 93 vocab_size 160256, 94
        hidden_size 4096, 95 n_layer 30, 96 n_head 32, 97 layer_norm_epsilon 1e-05, 98 initializer_range 0.02, 103
        hidden_dropout 0.0, 104 attention_dropout 0.0, 105 ffn_hidden_size 12288
        mindformers/parallel_core/transformer_config.py: 662 pad_token_id 0, 682 max_position_embeddings 4096
    """,
    "telechat3": """
        mindformers/models/telechat3/configuration_telechat3.py: 110 seq_length 4096, 115
        add_bias_linear False, 139 vocab_size 131072, 140 hidden_size 4096, 141 intermediate_size 22016, 142
        num_hidden_layers 32, 143 num_attention_heads 32, 144 num_key_value_heads 32, 145 head_dim 128, 147
        max_position_embeddings 32768, 148 initializer_range 0.02, 149 rms_norm_eps 1e-06, 151 tie_word_embeddings
        False, 152 rope_theta 10000.0, 154 attention_bias False, 159 attention_dropout 0.0, 160
        num_nextn_predict_layers 0
        mindformers/parallel_core/transformer_config.py: 1211 hidden_dropout 0.1
    """,
    "deepseek_v3": """
        mindformers/models/deepseek3/configuration_deepseek_v3.py: 140 seq_length 4096, 144 hidden_dropout 0.0, 146
        moe_router_score_function sigmoid, 147 moe_router_enable_expert_bias True, 150 add_bias_linear False, 152
        multi_latent_attention True, 161 vocab_size 129280, 162 hidden_size 7168, 163 intermediate_size 18432, 164
        moe_intermediate_size 2048, 165 num_hidden_layers 61, 166 num_nextn_predict_layers 1, 167
        num_attention_heads 128, 169 n_shared_experts 1, 170 n_routed_experts 256, 172
        routed_scaling_factor 2.5, 173 kv_lora_rank 512, 174 q_lora_rank 1536, 175 qk_rope_head_dim 64, 176
        v_head_dim 128, 177 qk_nope_head_dim 128, 179 n_group 8, 180 topk_group 4, 181 num_experts_per_tok 8, 183
        first_k_dense_replace 3, 184 norm_topk_prob True, 187 max_position_embeddings 4096, 188 initializer_range
        0.02, 189 rms_norm_eps 1e-06, 194 tie_word_embeddings False, 195 rope_theta 10000.0, 197 attention_bias
        False, 198 attention_dropout 0.0
        mindformers/parallel_core/transformer_config.py: 1828 moe_aux_loss_coeff 0.0, 1803
        moe_router_bias_update_rate 0.001, 2189 pad_token_id 0
    """,
    "telechat3_moe": """
        mindformers/models/telechat3_moe/configuration_telechat3_moe.py: 133 seq_length 4096, 137 hidden_dropout
        0.0, 139 moe_router_score_function sigmoid, 140 moe_router_enable_expert_bias True, 143 add_bias_linear
        False, 152 vocab_size 131072, 153 hidden_size 2560, 154 intermediate_size 7680, 155 moe_intermediate_size
        1536, 156 num_hidden_layers 4, 157 num_nextn_predict_layers 1, 158 num_attention_heads 32, 160
        n_shared_experts 1, 161 n_routed_experts 192, 163 routed_scaling_factor 2.8, 164
        kv_lora_rank 512, 165 q_lora_rank 1536, 166 qk_rope_head_dim 64, 167 v_head_dim 128, 168 qk_nope_head_dim
        128, 170 n_group 8, 171 topk_group 4, 172 num_experts_per_tok 8, 174 first_k_dense_replace 3, 175
        norm_topk_prob True, 178 max_position_embeddings 4096, 179 initializer_range 0.02, 180 rms_norm_eps 1e-06,
        185 tie_word_embeddings False, 186 rope_theta 10000.0, 188 attention_bias False, 189 attention_dropout 0.0
        mindformers/parallel_core/transformer_config.py: 1828 moe_aux_loss_coeff 0.0, 1803
        moe_router_bias_update_rate 0.001, 2189 pad_token_id 0
    """,
    "LlamaConfig": """
        mindformers/models/llama/llama_config.py: 133 seq_length 2048, 134 hidden_size 4096, 135 num_layers 32, 136
        num_heads 32, 140 vocab_size 32000, 141 multiple_of 256, 143 rms_norm_eps 1e-05, 146 pad_token_id 0, 148
        theta 10000.0, 156 qkv_has_bias False, 158 attn_proj_has_bias False, 174 init_method_std 0.01, 184
        tie_word_embeddings False
    """,
    "ChatGLM2Config": """
        mindformers/models/glm2/glm2_config.py: 128 num_layers 28, 129 padded_vocab_size 65024, 130 hidden_size
        4096, 131 ffn_hidden_size 13696, 132 kv_channels 128, 133 num_attention_heads 32, 134 seq_length 2048, 135
        hidden_dropout 0.0, 136 attention_dropout 0.0, 137 layernorm_epsilon 1e-05, 138 rope_ratio 1, 142
        add_bias_linear False, 143 add_qkv_bias True, 146 multi_query_group_num 2, 165 pad_token_id 0, 179
        post_self_attn_layernorm False
    """,
    "TelechatConfig": """
        research/telechat2/telechat_config.py: 105 seq_length 2048, 106 hidden_size 4096, 107 num_layers 32, 108
        num_heads 32, 110 hidden_dropout_prob 0.0, 111 attention_dropout_prob 0.0, 115 vocab_size 32000, 116
        multiple_of 256, 118 rms_norm_eps 1e-05, 121 pad_token_id 0, 123 theta 10000.0, 131 qkv_has_bias False, 132
        out_proj_has_bias True, 156 sigma 0.0048
    """,
    "DeepseekV3Config": """
        research/deepseek3/deepseek3_config.py: 108 seq_length 2048, 109 hidden_size 4096, 110 num_layers 32, 111
        num_heads 32, 113 max_position_embeddings 32768, 114 intermediate_size 18432, 117 kv_lora_rank 512, 118
        q_lora_rank 1536, 119 qk_rope_head_dim 64, 120 v_head_dim 128, 121 qk_nope_head_dim 128, 122 vocab_size
        129280, 123 rms_norm_eps 1e-06, 126 pad_token_id 0, 128 theta 10000.0, 134 init_method_std 0.006, 156
        mtp_depth 0, 157 mtp_loss_factor 0.3
    """,
    "DeepseekV2Config": """
        research/deepseek3/deepseek2_config.py: 106 seq_length 2048, 107 hidden_size 4096, 108 num_layers 30, 109
        num_heads 32, 111 max_position_embeddings 4096, 112 intermediate_size 12288, 113 kv_lora_rank 512, 114
        q_lora_rank 1536, 115 qk_rope_head_dim 64, 116 v_head_dim 128, 117 qk_nope_head_dim 128, 118 vocab_size
        102400, 121 rms_norm_eps 1e-06, 124 pad_token_id 0, 129 theta 10000.0, 132 init_method_std 0.01
    """,
}
"""Files of `SOURCE`, and the line, key and value of each default, by ``model_type`` or, of an older class, ``type``."""
SMALL = "hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 4, vocab_size: 300"


class Fact(NamedTuple):
    """A default in the source of MindSpore Transformers."""

    file: str
    line: int
    key: str
    value: Any


def facts_of(name: str) -> list[Fact]:
    """Returns the facts of a class, in the order of `FACTS`."""
    facts = []
    file = ""
    for word in re.split(r",\s+|\s+(?=\w+/)|(?<=\.py):\s+", FACTS[name].strip()):
        if word.endswith(".py"):
            file = word
            continue
        line, key, value = word.split()
        if re.match(r"[\dTF-]", value):
            facts.append(Fact(file, int(line), key, literal_eval(value)))
        else:
            facts.append(Fact(file, int(line), key, value))
    return facts


def setting(config: Config, key: str) -> Any:
    """Returns the setting of the model under any of its names."""
    if key == "moe_router_score_function":
        return config.decoder.experts.score_function
    if key in yaml_names(ModelConfig):
        return getattr(config.decoder, yaml_names(ModelConfig)[key])
    return getattr(config.decoder.moe_config, yaml_names(MoEConfig)[key])


def newer(keys: str) -> str:
    """Returns a file of the newer schema with a model."""
    return f"{NEWER_DATA}model: {{{keys}}}\n"


def class_names() -> set[tuple[str, str]]:
    """Returns the names of all classes in the records of the families, and the keys that select them."""
    known = [source for family in FAMILIES.values() for source in family.source_classes]
    return {("model_type", source.model_type) if source.model_type else ("type", source.name) for source in known}


def test_the_table_has_every_class() -> None:
    assert {name for _, name in class_names()} == set(FACTS)


@pytest.mark.parametrize(("key", "name"), sorted(class_names()))
def test_what_a_file_leaves_out_is_the_default_of_the_class_that_it_names(key: str, name: str) -> None:
    if key == "model_type":
        keys = f"model_type: {name}"
        if name == "glm4_moe":
            keys += ", head_dim: 128"  # 4,096 is no multiple of its 96 heads
        texts = [f"model_config: {{{keys}}}\n", newer(keys)]
    else:
        kinds = {known.name: kind for kind, family in FAMILIES.items() for known in family.source_classes}
        kind = kinds[name]
        experts = ""
        if kind.startswith("Deepseek"):  # without experts its class is dense, and the family has them
            experts = ", moe_config: {expert_num: 4, num_experts_chosen: 2}"
        texts = [f"model: {{arch: {{type: {kind}}}, model_config: {{{key}: {name}{experts}}}}}\n"]
    for text in texts:
        config = load(text)
        for fact in facts_of(name):
            assert setting(config, fact.key) == fact.value, fact
        assert parse_config("again", dump_config(config)) == config


def test_what_a_file_has_wins_and_a_note_lists_the_rest() -> None:
    text = newer(f"model_type: qwen3, {SMALL}, num_key_value_heads: 2, intermediate_size: 96")
    decoder = load(text).decoder
    assert (decoder.head_size, decoder.seq_length, decoder.hidden_dropout) == (128, 4096, 0.1)
    layer = 64 * 128 * (4 + 2 + 2 + 4) + 3 * 64 * 96 + 2 * 64 + 2 * 128
    assert sum(math.prod(shape) for shape in parameter_shapes(decoder).values()) == 4 * layer + 2 * 300 * 64 + 64
    told = notes(text)
    assert "a.yaml:4: not in the file, so as in MindSpore Transformers' Qwen3Config: " in told
    assert "head_dim 128, seq_length 4096, hidden_dropout 0.1" in told and "num_key_value_heads" not in told
    written = load(newer(f"model_type: qwen3, {SMALL}, num_key_value_heads: 2, head_dim: null, hidden_dropout: 0.0"))
    assert (written.decoder.head_size, written.decoder.hidden_dropout) == (16, 0.0)


def test_a_default_that_does_not_fit_is_an_error_with_the_name_of_the_class() -> None:
    message = error_of(newer(f"model_type: qwen3, {SMALL}"))
    assert "a.yaml:4 (default of Qwen3Config): model.num_key_value_heads = 32: must divide num_attention" in message


def test_arch_alone_and_a_model_folder_have_no_class(tmp_path) -> None:
    own = f"model: {{arch: {{type: Qwen3ForCausalLM}}, model_config: {{{SMALL}}}}}\n"
    assert load(own).decoder.head_size == 16 and "not in the file" not in notes(own)
    described = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(described))
    folder = f"pretrained_model_dir: {tmp_path}\nmodel_config: {{model_type: qwen3}}\n"
    decoder = load(folder).decoder
    assert (decoder.seq_length, decoder.hidden_dropout) == (2048, 0.0)


def test_keys_that_the_class_drops_have_no_effect_in_the_newer_schema() -> None:
    experts = f"model_type: qwen3_moe, {SMALL}, num_experts: 8, router_aux_loss_coef: 0.1, mlp_only_layers: [1]"
    decoder = load(newer(experts)).decoder
    assert decoder.balance_factor == 0 and decoder.moe_layers == (0, 1, 2, 3)
    assert "a.yaml:4: model.router_aux_loss_coef: not used, as in MindSpore Transformers' Qwen3MoeConfig" in notes(
        newer(experts)
    )
    window = f"model_type: qwen3, {SMALL}, num_key_value_heads: 2, use_sliding_window: {{}}, sliding_window: 8"
    assert not load(newer(window.format(True))).decoder.window_layers
    assert "use_sliding_window" not in notes(newer(window.format(False)))
    older = load(f"model_config: {{{experts}}}\n").decoder  # a pasted config.json keeps its meaning
    assert older.balance_factor == pytest.approx(0.1 * 8 / 3) and older.moe_layers == (0, 2, 3)


def test_the_expert_bias_of_deepseek_is_on_with_a_rate_unless_the_file_switches_it_off() -> None:
    text = "model_type: deepseek_v3, qk_layernorm: True, num_hidden_layers: 4{}"
    moe = load(newer(text.format(""))).decoder.experts
    assert moe.has_expert_bias and moe.topk_bias_update_rate == 0.001
    off = load(newer(text.format(", moe_router_enable_expert_bias: False"))).decoder.experts
    assert not off.has_expert_bias and off.topk_bias_update_rate == 0


LATENT = f"model_type: deepseek_v3, {SMALL}, qk_nope_head_dim: 12, qk_rope_head_dim: 4, mtp_num_layers: 0"


@pytest.mark.parametrize(
    ("keys", "normed", "factor"),
    [
        ("", False, 0.1 * 0.707 * math.log(40) + 1),
        (", qk_layernorm: False, rotary_scaling_factor: 10, mscale: 2", False, 0.2 * math.log(10) + 1),
        (", qk_layernorm: True, rotary_scaling_factor: 1", True, 1),
        (", position_embedding_type: yarn", False, 0.1 * 0.707 * math.log(40) + 1),
        (", position_embedding_type: yarn, rotary_scaling_factor: 40", False, 0.1 * 0.707 * math.log(40) + 1),
        (", rope_scaling: {type: yarn, factor: 8}", False, 0.1 * 0.707 * math.log(8) + 1),
        (", rope_scaling: {type: yarn, factor: 8, mscale: 1, mscale_all_dim: 1}", False, 0.1 * math.log(8) + 1),
    ],
)  # fmt: skip
def test_norms_and_scale_of_latent_attention_are_those_of_the_class(keys: str, normed: bool, factor: float) -> None:
    """mindformers/pynative/transformers/multi_latent_attention.py, line 181, and gpt_layer_specs.py, line 166."""
    text = newer(LATENT + keys)
    config = load(text)
    spec = attention_spec(config.decoder)
    assert spec.scale == pytest.approx(factor**2 / 4, rel=SCHEDULE)
    assert any("_a_layernorm" in name for name in parameter_shapes(config.decoder)) == normed
    assert ("a.yaml:4: the file has no qk_layernorm, so" in notes(text)) == ("qk_layernorm" not in keys)
    assert parse_config("again", dump_config(config)) == config
    assert parse_config("older", older_text("a.yaml", text)[0]).decoder == config.decoder
    assert bool(class_differences(config.decoder, "DeepseekV3ForCausalLM")) == (not normed)


def test_latent_attention_of_another_class_has_its_own_sizes() -> None:
    keys = f"model_type: qwen3, {SMALL}, num_key_value_heads: 4, multi_latent_attention: True"
    factor = 0.1 * 0.707 * math.log(40) + 1
    assert attention_spec(load(newer(keys)).decoder).scale == pytest.approx(factor**2 / math.sqrt(128 + 64))


@pytest.mark.parametrize(("keys", "told"), [
    (LATENT.replace("qk_nope_head_dim: 12", "qk_nope_head_dim: -40"), "model.qk_nope_head_dim = -40: must be at least"),
    (LATENT + ", mscale: 1e200", "softmax_scale"),
    (LATENT + ", qk_layernorm: null", "a.yaml:4: model.qk_layernorm = null: must be true or false"),
])  # fmt: skip
def test_a_scale_that_cannot_be_computed_is_an_error_in_words(keys: str, told: str) -> None:
    assert told in error_of(newer(keys))


def test_a_published_config_json_and_a_model_without_a_class_have_deepseeks_norms_and_scale() -> None:
    keys = f"{SMALL}, multi_latent_attention: True, qk_nope_head_dim: 12, qk_rope_head_dim: 4"
    published = f"model_config: {{{LATENT}}}\n"
    for text in (f"model_config: {{{keys}}}\n", newer(keys), published):
        spec = attention_spec(load(text).decoder)
        assert spec.scale == 1 / 4 and spec.latent.normed
    assert "DeepseekV3Config has no norms on latent vectors" in notes(published)
    assert "by default 1.59; here it does not: write softmax_scale" in notes(published)
    written = published.replace("12,", "12, qk_layernorm: False, softmax_scale: 0.3,")
    spec = attention_spec(load(written).decoder)
    assert (spec.scale, spec.latent.normed) == (0.3, False)
    assert "here it" not in notes(written)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ("rope_scaling: {type: yarn, factor: 8, mscale: 1}", "mscale = 1: is not mscale_all_dim 0.707"),
        ("position_embedding_type: yarn, scaling_factor: 8, mscale_all_dim: 1", "mscale = 0.707: is not mscale_all"),
    ],
)
def test_scales_that_the_class_has_otherwise_are_errors(keys: str, part: str) -> None:
    assert part in error_of(newer(f"{LATENT}, {keys}"))


def test_a_loss_of_the_tokens_of_a_rank_is_that_of_a_sequence_if_they_are_one() -> None:
    text = newer(f"model_type: qwen3_moe, {SMALL}, num_experts: 8, moe_aux_loss_coeff: 0.01")
    assert load(text).decoder.experts.moe_router_load_balancing_type == "sub_seq_aux_loss"
    two = text.replace("steps: 2", "steps: 2, local_batch_size: 2, global_batch_size: 2")
    rule = "(default of Qwen3MoeConfig): model.moe_router_load_balancing_type = 'sub_seq_aux_loss': not yet supported"
    assert rule in error_of(two)
    load(two.replace("0.01", "0.0, moe_router_load_balancing_type: sub_seq_aux_loss"))
    load(two.replace("0.01", "0.01, moe_router_load_balancing_type: seq_aux_loss"))
