"""The config.json of published models: the class that it is, and the number of weights that transformers counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from config_helpers import load

from trainer.models.spec.shapes import parameter_shapes

YI = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_scaling": None,
    "vocab_size": 64000,
}  # fmt: skip
"""Yi-1.5-9B."""
KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "first_k_dense_replace": 1,
    "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "topk_group": 1, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip
"""Kimi-K2, whose yarn has no ramp."""
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 1,
    "hidden_size": 2048, "intermediate_size": 11264, "kv_lora_rank": 512, "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "num_nextn_predict_layers": 0, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
"""Moonlight-16B-A3B, whose queries have no latent vector."""
DEEPSEEK_LITE = {
    **MOONLIGHT, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "intermediate_size": 10944,
    "topk_method": "greedy", "norm_topk_prob": False, "vocab_size": 102400,
}  # fmt: skip
"""DeepSeek-V2-Lite."""
GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_size": 5120,
    "partial_rotary_factor": 0.5, "intermediate_size": 12288, "model_type": "glm4_moe", "moe_intermediate_size": 1536,
    "num_attention_heads": 96, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 0,
    "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
"""GLM-4.6 without its module for a further token, which transformers leaves out."""

OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "vocab_size": 100278,
}  # fmt: skip
"""Olmo-3-7B, whose yarn is that of layers without a window only."""
OLMOE = {
    "architectures": ["OlmoeForCausalLM"], "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
    "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "vocab_size": 50304,
}  # fmt: skip
"""OLMoE-1B-7B."""
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
    "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
"""Gemma-2-2B."""
STARCODER2 = {
    "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "embedding_dropout": 0.0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "intermediate_size": 12288,
    "max_position_embeddings": 16384, "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24,
    "num_hidden_layers": 30, "num_key_value_heads": 2, "rope_theta": 999999.4420358813, "sliding_window": 4096,
    "use_bias": True, "mlp_type": "default", "vocab_size": 49152,
}  # fmt: skip
"""Starcoder2-3B."""
COHERE2 = {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "attention_bias": False, "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
    "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rope_theta": 50000,
    "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False, "vocab_size": 256000,
}  # fmt: skip
"""Command R7B."""
COHERE = {
    "architectures": ["CohereForCausalLM"], "model_type": "cohere", "attention_bias": False, "hidden_size": 8192,
    "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192,
    "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64, "rope_theta": 8000000.0,
    "vocab_size": 256000,
}  # fmt: skip
"""Command R."""
STABLELM = {
    "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "attention_dropout": 0.0,
    "hidden_act": "silu", "hidden_dropout": 0.0, "hidden_size": 2048, "intermediate_size": 5632,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 24,
    "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000,
    "use_qkv_bias": True, "vocab_size": 100352,
}  # fmt: skip
"""StableLM-2-1.6B."""
EXAONE = {
    "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 27392, "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
    "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "rope_theta": 1000000,
    "sliding_window": 4096, "sliding_window_pattern": "LLLG", "vocab_size": 102400,
}  # fmt: skip
"""EXAONE-4.0-32B."""
GRANITE_MOE = {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0, "hidden_size": 1024, "intermediate_size": 512, "logits_scaling": 6.0,
    "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "residual_multiplier": 0.22, "tie_word_embeddings": True, "vocab_size": 49155,
}  # fmt: skip
"""Granite-3.0-1B-A400M."""
ERNIE_MOE = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560,
    "intermediate_size": 12288, "moe_capacity": [64, 64, 64], "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1, "rope_theta": 500000, "use_bias": False, "vocab_size": 103424,
}  # fmt: skip
"""ERNIE-4.5-21B-A3B, whose module for a further token transformers leaves out."""
ARCEE = {
    "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "head_dim": 128, "hidden_size": 2560,
    "intermediate_size": 18432, "max_position_embeddings": 65536, "num_attention_heads": 20, "num_hidden_layers": 36,
    "num_key_value_heads": 4, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
    },
    "rope_theta": 10000.0, "vocab_size": 128004,
}  # fmt: skip
"""AFM-4.5B."""
NEMOTRON = {
    "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "head_dim": 128, "hidden_size": 3072,
    "intermediate_size": 9216, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5, "vocab_size": 256000,
}  # fmt: skip
"""Minitron-4B."""
JAIS = {
    "architectures": ["Jais2ForCausalLM"], "model_type": "jais2", "hidden_size": 3328, "intermediate_size": 26624,
    "num_attention_heads": 26, "num_hidden_layers": 32, "num_key_value_heads": 26, "vocab_size": 150272,
}  # fmt: skip
"""Jais-2-8B."""
HELIUM = {
    "architectures": ["HeliumForCausalLM"], "model_type": "helium", "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rope_theta": 20000.0, "tie_word_embeddings": True, "vocab_size": 64000,
}  # fmt: skip
"""Helium-1-2B."""
GLM_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "first_k_dense_replace": 1,
    "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
"""GLM-4.7-Flash without its module for a further token, which transformers leaves out."""
HUNYUAN = {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "attention_head_dim": 128,
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_experts": 1, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rope_scaling": {
        "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0, "tie_word_embeddings": True, "use_qk_norm": True, "vocab_size": 128167,
}  # fmt: skip
"""Hunyuan-7B."""


@pytest.mark.parametrize(
    ("described", "kind", "weights"),
    [
        (YI, "LlamaForCausalLM", 8_829_407_232),
        (KIMI, "DeepseekV3ForCausalLM", 1_026_408_209_408),
        (MOONLIGHT, "DeepseekV3ForCausalLM", 15_960_108_544),
        (DEEPSEEK_LITE, "DeepseekV2ForCausalLM", 15_706_484_224),
        (GLM, "Glm4MoeForCausalLM", 352_797_814_784),
        (OLMO3, "Olmo3ForCausalLM", 7_298_011_136),
        (OLMOE, "OlmoeForCausalLM", 6_919_161_856),
        (GEMMA2, "Gemma2ForCausalLM", 2_614_341_888),
        (GRANITE_MOE, "GraniteMoeForCausalLM", 1_334_628_352),
        (ERNIE_MOE, "Ernie4_5_MoeForCausalLM", 21_825_436_160),
        (HUNYUAN, "HunYuanDenseV1ForCausalLM", 7_504_568_320),
        (STARCODER2, "Starcoder2ForCausalLM", 3_030_371_328),
        (COHERE2, "Cohere2ForCausalLM", 8_028_033_024),
        (COHERE, "CohereForCausalLM", 34_980_831_232),
        (EXAONE, "Exaone4ForCausalLM", 32_003_216_384),
        (HELIUM, "HeliumForCausalLM", 1_892_796_416),
        (ARCEE, "ArceeForCausalLM", 4_619_184_640),
        (NEMOTRON, "NemotronForCausalLM", 4_190_509_056),
        (JAIS, "Jais2ForCausalLM", 8_090_401_280),
        (GLM_FLASH, "Glm4MoeLiteForCausalLM", 29_943_390_976),
        (STABLELM, "StableLmForCausalLM", 1_644_515_328),
    ],
    ids=["Yi", "Kimi", "Moonlight", "DeepSeek-V2-Lite", "GLM", "OLMo-3", "OLMoE", "Gemma-2", "GraniteMoE", "ERNIE-4.5",
         "Hunyuan", "Starcoder2", "Command R7B", "Command R", "EXAONE-4", "Helium",
         "Arcee", "Nemotron", "Jais 2", "GLM-4.7-Flash", "StableLM-2"],
)
def test_a_published_folder_has_as_many_weights_as_in_transformers(
    tmp_path: Path, described: dict[str, Any], kind: str, weights: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = load(f"pretrained_model_dir: {tmp_path}\n")
    assert config.model.arch.type == kind
    shapes = parameter_shapes(config.decoder)
    counted = sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith("correction_bias"))
    assert counted == weights
