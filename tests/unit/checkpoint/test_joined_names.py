"""Files that name tensors otherwise or join matrices: GLM's, ChatGLM's, TeleChat2's and Qwen2-MoE's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from config_helpers import failure, load
from golden_files import load_model_case
from safetensors.numpy import save_file

from trainer.checkpoint.adapters import load_initial_weights
from trainer.checkpoint.tensor_names import split_fused_tensors, to_disk
from trainer.checkpoint.weights import fitting_weights
from trainer.config import parse_config
from trainer.config.hugging_face import config_json, saved_class
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.shapes import parameter_shapes

Weights = dict[str, np.ndarray]
HEADS, KEY_HEADS, SIZE = 4, 2, 16


def golden(name: str, folder: Path) -> tuple[Weights, ModelConfig, str]:
    """Returns weights by the names of the file, the settings, and the class."""
    case = load_model_case(name)
    (folder / "config.json").write_text(json.dumps(case.metadata["config_as_saved"]))
    config = load(f"pretrained_model_dir: {folder}\n")
    return case.weights, config.decoder, config.model.arch.type


def assert_same(found: Weights, right: Weights) -> None:
    assert found.keys() == right.keys()
    for name, array in right.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("name", ["model_glm", "model_glm4", "experts_qwen2_moe"])
def test_what_transformers_writes_is_read_and_written(name: str, tmp_path: Path) -> None:
    weights, settings, kind = golden(name, tmp_path)
    found = fitting_weights(weights, settings, Path(name))
    assert {key: array.shape for key, array in found.items()} == parameter_shapes(settings)
    assert_same(to_disk(found, kind), weights)


def as_chatglm(weights: Weights, joined: bool) -> Weights:
    """Renames weights as in THUDM's files, or as in MindSpore Transformers' with separate matrices."""
    found: Weights = {"transformer.rotary_pos_emb.inv_freq": np.ones(4, np.float32)} if joined else {}
    for name, array in weights.items():
        name = name.replace("model.layers.", "transformer.encoder.layers.").replace("self_attn.", "self_attention.")
        name = name.replace("model.norm.", "transformer.encoder.final_layernorm.").replace(".o_proj.", ".dense.")
        name = name.replace("lm_head.", "transformer.output_layer.").replace(".down_proj.", ".dense_4h_to_h.")
        embedding = "word_embeddings.weight" if joined else "embedding_weight"
        name = name.replace("model.embed_tokens.weight", f"transformer.embedding.{embedding}")
        if ".q_proj." in name and joined:
            part = name.rpartition(".")[2]
            layer = next(key for key in weights if key.endswith(f"q_proj.{part}"))
            parts = [weights[layer.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            found[name.replace("q_proj", "query_key_value")] = np.concatenate(parts)
        elif "gate_up_proj" in name and not joined:
            for side, half in zip(("left", "right"), np.split(array, 2), strict=True):
                found[name.replace("gate_up_proj", f"dense_{side}")] = half
        elif not (joined and (".k_proj." in name or ".v_proj." in name)):
            for one in "qkv":
                name = name.replace(f".{one}_proj.", f".w{one}.")
            found[name.replace("gate_up_proj", "dense_h_to_4h")] = array
    return found


@pytest.mark.parametrize("joined", [True, False])
def test_chatglms_files_hold_a_glm(joined: bool, tmp_path: Path) -> None:
    weights, settings, _ = golden("model_glm", tmp_path)
    save_file(as_chatglm(weights, joined), tmp_path / "model.safetensors")
    keys = {
        "num_layers": 1, "padded_vocab_size": 64, "hidden_size": 32, "ffn_hidden_size": 24, "kv_channels": SIZE,
        "num_attention_heads": HEADS, "multi_query_attention": True, "multi_query_group_num": KEY_HEADS,
        "layernorm_epsilon": 1e-3, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "rope_ratio": 1,
        "post_layer_norm": True, "pre_seq_len": "None", "quantization_bit": 0, "apply_query_key_layer_scaling": True,
        "type": "ChatGLM2Config",
    }  # fmt: skip
    model = {"arch": {"type": "ChatGLM2ForConditionalGeneration"}, "model_config": {**keys, "seq_length": 24}}
    config = parse_config("a", json.dumps({"model": model, "load_checkpoint": str(tmp_path), "run_mode": "finetune"}))
    assert_same(load_initial_weights(config), split_fused_tensors(weights, settings))
    ours, theirs = config.decoder, settings
    for fact in ("head_size", "rotary_size", "kv_heads", "ffn_size", "rope_base", "rope_interleave", "qkv_has_bias"):
        assert getattr(ours, fact) == getattr(theirs, fact), fact


def test_a_published_chatglm_folder_says_what_it_is(tmp_path: Path) -> None:
    described = {
        "architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 2, "padded_vocab_size": 300,
        "hidden_size": 32, "ffn_hidden_size": 40, "kv_channels": 8, "num_attention_heads": 4, "seq_length": 32768,
        "multi_query_attention": True, "multi_query_group_num": 2, "rope_ratio": 50, "add_qkv_bias": True,
        "original_rope": True, "apply_residual_connection_post_layernorm": False, "rmsnorm": True,
        "bias_dropout_fusion": True, "classifier_dropout": None, "torch_dtype": "float16", "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = load(f"pretrained_model_dir: {tmp_path}\nmodel: {{model_config: {{seq_length: 64}}}}\n")
    decoder = config.decoder
    assert config.model.arch.type == "ChatGLM2ForConditionalGeneration"
    assert (decoder.rope_base, decoder.kv_heads, decoder.head_size, decoder.rotary_size) == (500000, 2, 8, 4)
    assert (decoder.seq_length, decoder.max_positions, decoder.qkv_has_bias) == (64, 32768, True)
    for key, value, rule in (("rmsnorm", False, "always RMSNorm"), ("pre_seq_len", 8, "low-rank adapters instead")):
        (tmp_path / "config.json").write_text(json.dumps(described | {key: value}))
        assert rule in failure(lambda: load(f"pretrained_model_dir: {tmp_path}\n"))
    (tmp_path / "config.json").write_text(json.dumps(described | {"multi_query_attention": False}))
    assert load(f"pretrained_model_dir: {tmp_path}\n").decoder.kv_heads == 4


def test_telechat2s_key_value_has_each_heads_key_before_its_value() -> None:
    """Also where sizes do not fit: the message names the matrices."""
    sizes = "num_layers: 1, hidden_size: 8, num_heads: 4, n_kv_heads: 2, vocab_size: 300"
    settings = load(f"model_config: {{{sizes}}}\n").decoder
    joined = np.arange(8 * 8, dtype=np.float32).reshape(8, 8)
    name = "transformer.h.0.self_attention.key_value.weight"
    found = split_fused_tensors({name: joined}, settings)
    np.testing.assert_array_equal(found["model.layers.0.self_attn.k_proj.weight"], joined[[0, 1, 4, 5]])
    np.testing.assert_array_equal(found["model.layers.0.self_attn.v_proj.weight"], joined[[2, 3, 6, 7]])
    message = failure(lambda: fitting_weights({name: joined[:6]}, settings, Path("file")))
    assert "model.layers.0.self_attn.k_proj.weight (and 1 more) of shape [3, 8] where this model has [4, 8]" in message


def test_a_joined_tensor_without_axes_is_named() -> None:
    settings = load("model_config: {num_layers: 1, hidden_size: 8, num_heads: 4, vocab_size: 300}\n").decoder
    name = "transformer.h.0.self_attention.key_value.weight"
    message = failure(lambda: fitting_weights({name: np.zeros((), np.float32)}, settings, Path("file")))
    assert "holds model.layers.0.self_attn.kv_proj.weight, which this model does not have" in message


def test_layers_that_share_weights_may_each_have_a_copy_of_them_in_a_file() -> None:
    case = load_model_case("other_telechat3_1_8b")
    settings = parse_config("a", json.dumps({"model": case.config})).decoder
    own, other = (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2))
    assert_same(fitting_weights(case.weights | {other: case.weights[own]}, settings, Path("file")), dict(case.weights))
    message = failure(lambda: fitting_weights(case.weights | {other: case.weights[own] + 1}, settings, Path("file")))
    assert f"holds {other}, which this model does not have" in message


TELECHAT = """
model:
  arch: {type: ParallelTelechatForCausalLM, auto_register: telechat.TelechatForCausalLM}
  model_config: {type: TelechatConfig, auto_register: telechat_config.TelechatConfig, hidden_size: 64, sigma: 0.006}
"""


def test_an_older_files_telechat_is_a_telechat2_unless_net_name_says_telechat3() -> None:
    config = load(TELECHAT)
    ours = config.decoder
    assert config.model.arch.type == "TelechatForCausalLM" and ours.initializer_range == 0.006
    assert (ours.qkv_has_bias, ours.attn_proj_has_bias, ours.down_has_bias, ours.mlp_has_bias) == (0, 1, 1, 0)
    third = load(TELECHAT, "model_config.net_name=telechat3_36b", "model_config.embedding_size=1")
    assert third.model.arch.type == "TeleChat3ForCausalLM" and not third.decoder.maps_embedding
    assert (third.decoder.attn_proj_has_bias, third.decoder.down_has_bias) == (True, False)
    without = load(TELECHAT, "model_config.net_name=telechat3_36b", "model_config.out_proj_has_bias=False")
    assert not without.decoder.attn_proj_has_bias
    small = load(TELECHAT, "model_config.net_name=telechat3_1b", "model_config.embedding_size=32").decoder
    assert small.tie_word_embeddings and (small.maps_embedding, small.embedding_width) == (True, 32)
    classes = {"TeleChat3ForCausalLM": "LlamaForCausalLM", "ChatGLM2ForConditionalGeneration": "GlmForCausalLM",
               "TelechatForCausalLM": "TelechatForCausalLM"}  # fmt: skip
    for kind, saved in classes.items():
        assert saved_class(load(f"model: {{arch: {{type: {kind}}}}}\n").decoder, kind) == saved
    message = failure(lambda: load(TELECHAT.replace("telechat.TelechatFor", "mine.OwnFor")))
    assert "auto_register = 'mine.OwnForCausalLM': not yet supported" in message


@pytest.mark.parametrize("name", ["other_telechat2", "other_telechat2_experts", "other_telechat3_1_8b"])
def test_the_folder_of_a_class_that_transformers_lacks_describes_the_same_model(name: str, tmp_path: Path) -> None:
    case = load_model_case(name)
    config = parse_config("a", json.dumps({"model": case.config}))
    kind = saved_class(config.decoder, config.model.arch.type)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config.decoder, kind)))
    again = load(f"pretrained_model_dir: {tmp_path}\n")
    assert again.model.arch.type == config.model.arch.type == kind
    assert parameter_shapes(again.decoder) == parameter_shapes(config.decoder)
    assert (again.decoder.experts is None) == (config.decoder.experts is None)


def test_a_published_telechat2_folder_is_read_unless_its_positions_stretch(tmp_path: Path) -> None:
    described = {
        "architectures": ["TelechatForCausalLM"], "model_type": "telechat", "n_layer": 2, "n_head": 4, "n_inner": None,
        "hidden_size": 32, "ffn_hidden_size": 40, "num_key_value_heads": 2, "layer_norm_epsilon": 1e-5,
        "vocab_size": 300, "hidden_dropout": 0.0, "seq_length": 8192, "base_seqlen": 8192, "training_seqlen": 8192,
        "apply_residual_connection_post_layernorm": False, "flash_attn": True, "logn": False, "embed_layernorm": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    decoder = load(f"pretrained_model_dir: {tmp_path}\n").decoder
    assert (decoder.num_layers, decoder.num_heads, decoder.kv_heads, decoder.ffn_size) == (2, 4, 2, 40)
    assert (decoder.max_positions, decoder.down_has_bias, decoder.attn_proj_has_bias) == (8192, True, True)
    (tmp_path / "config.json").write_text(json.dumps(described | {"training_seqlen": 32768}))
    assert "whose base grows with the length" in failure(lambda: load(f"pretrained_model_dir: {tmp_path}\n"))
