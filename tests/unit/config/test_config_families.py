"""Hugging Face's model families: what their names imply, and their config.json as a model_config."""

from __future__ import annotations

import json

import pytest
from config_helpers import error_of, load, notes
from golden_files import load_model_case, model_case_names

from trainer.config import dump_config, parse_config
from trainer.config.families import FAMILIES
from trainer.config.family.dense import DENSE
from trainer.config.family.elsewhere import ELSEWHERE
from trainer.config.family.layer_norm import LAYER_NORM
from trainer.config.family.mixtures import MIXTURES
from trainer.config.hugging_face import config_json
from trainer.config.read.model_folder import model_from_config_json

SIZES = "num_layers: 4, hidden_size: 64, num_heads: 4, vocab_size: 300, seq_length: 32"


def family(kind: str, keys: str = "", more: str = "") -> str:
    """Returns a file with a model of a family, further keys of its model_config, and further sections."""
    return f"model:\n  arch: {{type: {kind}}}\n  model_config: {{{SIZES}{keys and ', '}{keys}}}\n{more}"


def qwen3_moe(keys: str = "") -> str:
    return family("Qwen3MoeForCausalLM", f"num_experts: 8, num_experts_per_tok: 2{keys and ', '}{keys}")


def test_mixtral_is_a_softmax_mixture_of_wide_experts() -> None:
    keys = "num_local_experts: 8, num_experts_per_tok: 2, intermediate_size: 96"
    decoder = load(family("MixtralForCausalLM", keys)).decoder
    moe = decoder.experts
    assert (moe.expert_num, moe.num_experts_chosen, decoder.expert_size, decoder.shared_expert_size) == (8, 2, 96, 0)
    assert (moe.score_function, moe.norm_topk_prob, moe.has_expert_bias) == ("softmax", True, False)
    assert decoder.moe_layers == (0, 1, 2, 3) and not decoder.use_qk_norm and decoder.rotary_pct == 1


def test_qwen3_moe_has_norms_on_query_and_key() -> None:
    assert load(qwen3_moe()).decoder.use_qk_norm
    assert not load(qwen3_moe("use_qk_norm: False")).decoder.use_qk_norm


def test_glm4_moe_has_a_sigmoid_router_with_a_bias_on_the_choice_and_half_of_a_head_rotated() -> None:
    text = family("Glm4MoeForCausalLM", "n_routed_experts: 8, num_experts_per_tok: 2, n_shared_experts: 1")
    decoder = load(text).decoder
    moe = decoder.experts
    assert (moe.score_function, moe.has_expert_bias, moe.group_score, moe.aux_loss_factor) == (
        "sigmoid", True, "two_best", 0,
    )  # fmt: skip
    assert (decoder.rotary_pct, decoder.qkv_has_bias, decoder.use_qk_norm) == (0.5, False, False)
    own = "n_routed_experts: 8, aux_loss_alpha: 1e-4, partial_rotary_factor: 1.0, use_gating_sigmoid: True"
    decoder = load(family("Glm4MoeForCausalLM", own)).decoder
    assert (decoder.rotary_pct, decoder.experts.aux_loss_factor, decoder.experts.scoring_func) == (1, 1e-4, None)


@pytest.mark.parametrize(
    ("kind", "keys", "windows"),
    [
        ("Gemma2ForCausalLM", "", (0, 2)),
        ("Olmo3ForCausalLM", "", (0, 1, 2)),
        ("Cohere2ForCausalLM", "", (0, 1, 2)),
        ("Cohere2ForCausalLM", ", sliding_window_pattern: 2", (0, 2)),
        ("", ", sliding_window_pattern: 2", (0, 2)),
    ],
)
def test_every_nth_layer_has_no_window_where_layer_types_is_left_out(
    kind: str, keys: str, windows: tuple[int, ...]
) -> None:
    config = load(family(kind, f"sliding_window: 8{keys}").replace("  arch: {type: }\n", ""))
    decoder = config.decoder
    assert decoder.window_layers == windows
    assert parse_config("again", dump_config(config)) == config
    if kind == "Cohere2ForCausalLM":
        assert decoder.unrotated_layers == tuple(layer for layer in range(4) if layer not in windows)


def test_olmo3_scales_positions_only_in_layers_without_a_window() -> None:
    yarn = "{rope_type: yarn, factor: 8.0, original_max_position_embeddings: 16}"
    keys = "sliding_window: 8, rope_theta: 500000.0"
    decoder = load(family("Olmo3ForCausalLM", f"{keys}, rope_scaling: {yarn}")).decoder
    assert decoder.window_layers == (0, 1, 2) and decoder.has_window_rotary
    assert not load(family("Olmo3ForCausalLM", keys)).decoder.has_window_rotary
    kinds = f"rope_parameters: {{full_attention: {{rope_type: default, rope_theta: 7.0}}, sliding_attention: {yarn}}}"
    assert "sliding_attention.rope_type = 'yarn': not yet supported" in error_of(family("Olmo3ForCausalLM", kinds))


@pytest.mark.parametrize("kind", FAMILIES)
def test_config_json_names_the_family_where_arch_does_not(kind: str) -> None:
    experts = ", num_experts: 4, n_shared_experts: 1" if FAMILIES[kind].is_mixture else ""
    if FAMILIES[kind].experts.get("moe_mlp_has_bias"):
        experts = ", num_experts: 4"
    for named in (f"architectures: [{kind}]", f"model_type: {FAMILIES[kind].model_type}"):
        config = load(f"model_config: {{{SIZES}, num_key_value_heads: 2{experts}, {named}}}\n")
        assert config.model.arch.type == kind
        for key in FAMILIES[kind].model.keys() - {"initializer_range"}:
            assert getattr(config.decoder, key) == FAMILIES[kind].model[key]
    again = parse_config("again", dump_config(config))
    assert again == config


def test_a_family_that_is_not_known_is_an_error_unless_arch_says_what_to_take_it_as() -> None:
    text = f"model_config: {{{SIZES}, architectures: [GPTForCausalLM], model_type: gpt}}\n"
    assert "architectures = ['GPTForCausalLM']: this family is not known here" in error_of(text)
    told = notes(text + "model: {arch: {type: LlamaForCausalLM}}\n")
    assert "architectures ['GPTForCausalLM']: not a known family; the model is built as LlamaForCausalLM" in told
    assert "model_type gpt: not a known family" in told


@pytest.mark.parametrize(
    ("keys", "frequency"),
    [
        ("decoder_sparse_step: 1, mlp_only_layers: []", 1),
        ("decoder_sparse_step: 2", [0, 1, 0, 1]),
        ("mlp_only_layers: [0, 3]", [0, 1, 1, 0]),
        ("decoder_sparse_step: 2, mlp_only_layers: [3]", [0, 1, 0, 0]),
        ("decoder_sparse_step: 2, moe_layer_freq: [0, 1, 0, 1]", [0, 1, 0, 1]),
    ],
)
def test_which_layers_of_qwen3_moe_are_dense(keys: str, frequency: int | list[int]) -> None:
    config = load(qwen3_moe(keys))
    assert config.decoder.experts.moe_layer_freq == frequency
    assert parse_config("again", dump_config(config)) == config


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ("moe_layer_start_index: 1", (1, 2, 3)),
        ("moe_layer_start_index: 1, moe_layer_end_index: 2", (1, 2)),
        ("moe_layer_start_index: 1, moe_layer_interval: 2", (1, 3)),
        ("moe_layer_end_index: 2, moe_layer_interval: 2", (1,)),
    ],
)
def test_which_layers_of_ernie_have_experts(keys: str, layers: tuple[int, ...]) -> None:
    config = load(family("Ernie4_5_MoeForCausalLM", f"moe_num_experts: 4, moe_k: 2, {keys}"))
    assert config.decoder.moe_layers == layers
    assert parse_config("again", dump_config(config)) == config
    described = config_json(config.decoder, "Ernie4_5_MoeForCausalLM")
    assert model_from_config_json(described).moe_layers == layers


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            family("Ernie4_5_MoeForCausalLM", "moe_num_experts: 4, moe_layer_start_index: 2, moe_layer_end_index: 1"),
            ["moe_layer_end_index = 1: leaves no layer with experts", "Fix: raise it"],
        ),
        (family("MixtralForCausalLM"), ["model.arch.type", "requires moe_config.expert_num", "write moe_config"]),
        (family("MixtralForCausalLM", "num_local_experts: 1"), ["num_local_experts = 1: Mix", "greater than 1"]),
        (
            family("LlamaForCausalLM", "architectures: [MixtralForCausalLM]"),
            ["architectures", "contradicts model.arch.type = LlamaForCausalLM", "write model.arch.type: Mixtral"],
        ),
        (family("LlamaForCausalLM", "model_type: qwen3"), ["model_type = 'qwen3': contradicts", "Qwen3ForCausalLM"]),
        (qwen3_moe("mlp_only_layers: [4]"), ["mlp_only_layers = 4: there is no such layer: they are 0 to 3"]),
        (
            qwen3_moe("decoder_sparse_step: 2, moe_layer_freq: 2"),
            ["decoder_sparse_step = 2: disagrees with moe_layer_freq = 2 (a.yaml:3): it means [0, 1, 0, 1]"],
        ),
        (qwen3_moe("decoder_sparse_step: 5"), ["leaves no layer with experts"]),
        (qwen3_moe("decoder_sparse_step: 0"), ["decoder_sparse_step = 0: must be at least 1"]),
        (qwen3_moe("mlp_only_layers: 3"), ["mlp_only_layers = 3", "list"]),
        (
            family("MixtralForCausalLM", "num_local_experts: 4, router_jitter_noise: 0.1"),
            ["router_jitter_noise = 0.1: not yet supported", "leave it 0"],
        ),
    ],
)
def test_what_a_config_json_says_against_itself(text: str, parts: list[str]) -> None:
    message = error_of(text)
    for part in parts:
        assert part in message


def test_where_hugging_face_would_train_without_the_balance_loss_is_told() -> None:
    text = qwen3_moe("output_router_logits: False, router_aux_loss_coef: 0.001")
    assert "output_router_logits false: does not switch off the auxiliary loss here" in notes(text)
    assert "here (weight 0.0005)" in notes(text)  # 0.001 * 2 experts a token / 4 layers
    for quiet in ("output_router_logits: True", "output_router_logits: False, router_aux_loss_coef: 0.0"):
        assert "output_router_logits" not in notes(qwen3_moe(quiet))


@pytest.mark.parametrize("name", [*model_case_names("experts"), *model_case_names("mtp")])
def test_a_config_json_of_transformers_5_loads_as_it_is(name: str) -> None:
    case = load_model_case(name)
    text = json.dumps({"model_config": {"seq_length": 24, **case.metadata["config_json"]}})
    decoder = parse_config(name, text).decoder
    theirs = case.config
    assert (decoder.num_layers, decoder.expert_size if decoder.experts else decoder.ffn_size) == (
        theirs["num_hidden_layers"],
        theirs["moe_intermediate_size"] if "moe_intermediate_size" in theirs else theirs["intermediate_size"],
    )
    if name == "experts_qwen3_moe":
        assert decoder.moe_layers == (0, 2) and not decoder.experts.norm_topk_prob
    if name == "experts_glm4_moe":
        moe = decoder.experts
        assert (moe.n_group, moe.topk_group, moe.routed_scaling_factor, decoder.rotary_size) == (2, 1, 1.7, 8)
        assert decoder.moe_layers == (1,) and decoder.shared_expert_size == 16
        assert decoder.qkv_has_bias and not decoder.attn_proj_has_bias and decoder.use_qk_norm
    if name == "mtp_2":
        assert decoder.mtp_depth == 2 and decoder.moe_layers == (1, 2)


@pytest.mark.parametrize(
    ("kind", "key", "on_output"),
    [
        ("", "attention_bias", True),
        ("LlamaForCausalLM", "attention_bias", True),
        ("Qwen3ForCausalLM", "attention_bias", True),
        ("Qwen3MoeForCausalLM", "attention_bias", True),
        ("Glm4MoeForCausalLM", "attention_bias", False),
        ("Qwen2ForCausalLM", "attention_bias", False),
        ("LlamaForCausalLM", "qkv_has_bias", False),
        ("LlamaForCausalLM", "add_qkv_bias", False),
    ],
)
def test_attention_bias_means_what_it_means_to_hugging_faces_class(kind: str, key: str, on_output: bool) -> None:
    """Where its o_proj has one too, a model from scratch would be another one without."""
    experts = "moe_config: {expert_num: 4}\n" if "Moe" in kind else ""
    text = f"model_config: {{{key}: True}}\n{experts}" + (f"model: {{arch: {{type: {kind}}}}}\n" if kind else "")
    config = load(text)
    assert config.decoder.qkv_has_bias
    assert config.decoder.attn_proj_has_bias is on_output
    assert parse_config("dumped.yaml", dump_config(config)).decoder == config.decoder
    assert not load(text.replace("True", "True, attn_proj_has_bias: False", 1)).decoder.attn_proj_has_bias
    assert not load(text.replace("True", "False", 1)).decoder.attn_proj_has_bias


def test_megatrons_key_means_biases_in_every_matrix() -> None:
    decoder = load("model_config: {add_bias_linear: True, add_qkv_bias: False}\n").decoder
    assert decoder.qkv_has_bias and decoder.attn_proj_has_bias and decoder.mlp_has_bias
    decoder = load("model_config: {mlp_has_bias: True}\n").decoder
    assert not decoder.qkv_has_bias and not decoder.attn_proj_has_bias
    decoder = load("model_config: {add_bias_linear: False, add_qkv_bias: True}\n").decoder
    assert decoder.qkv_has_bias and not decoder.mlp_has_bias


def test_a_record_is_in_the_first_file_that_it_fits() -> None:
    for name, family in FAMILIES.items():
        is_layer_norm = family.model.get("normalization") == "LayerNorm"
        fits = (not family.in_transformers, family.is_mixture, is_layer_norm, True)
        files = (ELSEWHERE, MIXTURES, LAYER_NORM, DENSE)
        assert [name in file for file in files].index(True) == fits.index(True), name
    assert len(FAMILIES) == sum(map(len, (ELSEWHERE, MIXTURES, LAYER_NORM, DENSE)))


def test_mlp_layer_types_say_which_layers_have_experts() -> None:
    keys = (
        "q_lora_rank: 12, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 8, v_head_dim: 8,"
        " moe_config: {expert_num: 8, num_experts_chosen: 2, moe_intermediate_size: 8"
    )
    kind = "Glm4MoeLiteForCausalLM"
    assert load(family(kind, f"{keys}}}")).decoder.moe_layers == (1, 2, 3)
    types = "mlp_layer_types: [sparse, dense, dense, sparse]"
    assert load(family(kind, f"{keys}, {types}}}")).decoder.moe_layers == (0, 3)
    message = error_of(family(kind, f"{keys}, mlp_layer_types: [dense, sparse]}}"))
    assert "mlp_layer_types" in message and "must have one entry for each of the 4 layers, and has 2" in message


def test_rotary_positions_of_exaone_depend_on_its_window() -> None:
    assert load(family("Exaone4ForCausalLM")).decoder.unrotated_layers == ()
    assert load(family("Exaone4ForCausalLM", "sliding_window: 8")).decoder.unrotated_layers == (3,)
