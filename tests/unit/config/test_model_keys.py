"""Keys of MindSpore Transformers' model section in both schemas: those without effect, and those that are refused."""

from __future__ import annotations

import pytest
from config_helpers import error_of, load, notes

SIZES = "num_layers: 4, hidden_size: 64, num_heads: 4, vocab_size: 300, seq_length: 32"
DATA = """\
training: {steps: 2}
lr_scheduler: {type: ConstantWarmUpLR}
train_dataset: {dataloader: {type: SyntheticDataset, num_samples: 8}}
"""


def older(keys: str) -> str:
    """Returns a file of the older schema with further keys of the model."""
    return f"model_config: {{{SIZES}, {keys}}}\n"


def newer(keys: str) -> str:
    """Returns a file of the newer schema with further keys of the model."""
    return f"{DATA}model: {{{SIZES}, {keys}}}\n"


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
    forced = "model: {arch: {type: LlamaForCausalLM}}\n" + older("model_type: deepseek_v4, hc_mult: 4")
    assert "a part of DeepSeek-V4: hc_mult" in error_of(forced)
