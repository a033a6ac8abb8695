"""Families of which transformers lacks the class: their code is published with their weights."""

from __future__ import annotations

from trainer.config.family.common import ALL, CORE, DROPPED_LAYERS
from trainer.config.family.dense import GLM
from trainer.config.family.record import Family, SourceClass

ELSEWHERE = {
    "ChatGLM2ForConditionalGeneration": Family(
        "chatglm",
        {
            "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28,
            "num_attention_heads": 32, "kv_channels": 128, "seq_length": 2048, "layernorm_epsilon": 1e-5,
            "hidden_dropout": 0.0, "attention_dropout": 0.0, "rope_ratio": 1.0, "add_bias_linear": False,
            "add_qkv_bias": False, "multi_query_attention": False, "multi_query_group_num": 1,
            "tie_word_embeddings": False,
        },
        GLM.model,
        renamed_keys={"seq_length": "max_position_embeddings"},  # in other families the length of training sequences
        in_transformers=False, saved_as="GlmForCausalLM",
        source_classes=(
            SourceClass(
                "ChatGLM2Config", "",
                {
                    "padded_vocab_size": 65024, "num_layers": 28, "ffn_hidden_size": 13696, "kv_channels": 128,
                    "multi_query_group_num": 2, "layernorm_epsilon": 1e-5, "pad_token_id": 0,
                },
            ),
        ),
        other_names=("ChatGLMModel", "ChatGLMForConditionalGeneration", "glm2"),
        published_names={  # also those of MindSpore Transformers' files, fused or not
            "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "transformer.embedding.embedding_weight": "model.embed_tokens.weight",
            "transformer.encoder.layers.": "model.layers.",
            "transformer.encoder.final_layernorm.": "model.norm.", "transformer.output_layer.": "lm_head.",
            ".self_attention.query_key_value.": ".self_attn.qkv_proj.", ".self_attention.dense.": ".self_attn.o_proj.",
            **{f".self_attention.w{letter}.": f".self_attn.{letter}_proj." for letter in "qkv"},
            ".mlp.dense_h_to_4h.": ".mlp.gate_up_proj.", ".mlp.dense_4h_to_h.": ".mlp.down_proj.",
            ".mlp.dense_left.": ".mlp.gate_proj.", ".mlp.dense_right.": ".mlp.up_proj.",
        },
    ),
    "TelechatForCausalLM": Family(
        "telechat",
        ALL | {
            "vocab_size": 131072, "num_key_value_heads": None, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "hidden_dropout": 0.0, "out_proj_has_bias": True, "mlp_down_has_bias": True,
        },
        {"attn_proj_has_bias": True, "mlp_down_has_bias": True, "initializer_range": 0.0048},
        optional_experts=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        renamed_keys={"seq_length": "max_position_embeddings"},
        in_transformers=False,
        source_classes=(
            SourceClass("TelechatConfig", "", {"rms_norm_eps": 1e-5, "pad_token_id": 0}),
            SourceClass(
                "Telechat2Config", "telechat",
                CORE | {
                    "vocab_size": 160256, "num_hidden_layers": 30, "intermediate_size": 12288,
                    "max_position_embeddings": 4096, "hidden_dropout": 0.0, "initializer_range": 0.02,
                    "pad_token_id": 0,
                },
                DROPPED_LAYERS,
            ),
        ),
        other_names=("ParallelTelechatForCausalLM", "Telechat2ForCausalLM"),
        published_names={
            "transformer.word_embeddings.": "model.embed_tokens.", "transformer.h.": "model.layers.",
            "transformer.ln_f.": "model.norm.", ".self_attention.query.": ".self_attn.q_proj.",
            ".self_attention.key_value.": ".self_attn.kv_proj.", ".self_attention.dense.": ".self_attn.o_proj.",
            ".mlp.local_experts.": ".mlp.experts.", ".mlp.router.": ".mlp.gate.",
        },
    ),
    "TeleChat3ForCausalLM": Family(
        "telechat3",
        ALL | {
            "vocab_size": 131072, "head_dim": 128, "attention_bias": False, "num_nextn_predict_layers": 0,
            "out_proj_has_bias": False, "embedding_size": None, "layers_group": 1,
        },
        in_transformers=False, other_names=("Telechat3ForCausalLM",),
        source_classes=(SourceClass("TeleChat3Config", "telechat3", CORE, DROPPED_LAYERS),),
    ),
}  # fmt: skip
