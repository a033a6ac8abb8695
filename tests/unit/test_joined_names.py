"""Files that name tensors otherwise or join matrices: GLM's, ChatGLM's, TeleChat2's and Qwen2-MoE's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from config_helpers import failure, load
from golden_files import load_model_case
from safetensors.numpy import save_file

from trainer.checkpoint.expert_names import to_disk
from trainer.checkpoint.joined_names import split_joined
from trainer.checkpoint.weights import fitting_weights, requested_weights
from trainer.config import parse_config
from trainer.config.schema.model import ModelConfig
from trainer.models.shapes import parameter_shapes

Weights = dict[str, np.ndarray]
HEADS, KEY_HEADS, SIZE = 4, 2, 16


def golden(name: str, folder: Path) -> tuple[Weights, ModelConfig, str]:
    """Weights by the names of the file, the settings, and the class."""
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
    """Under the names of THUDM's files, or of MindSpore Transformers' with separate matrices."""
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
    assert_same(requested_weights(config), split_joined(weights, settings))
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
    for key, value, rule in (("rmsnorm", False, "always RMSNorm"), ("pre_seq_len", 8, "train adapters instead")):
        (tmp_path / "config.json").write_text(json.dumps(described | {key: value}))
        assert rule in failure(lambda: load(f"pretrained_model_dir: {tmp_path}\n"))
    (tmp_path / "config.json").write_text(json.dumps(described | {"multi_query_attention": False}))
    assert load(f"pretrained_model_dir: {tmp_path}\n").decoder.kv_heads == 4
