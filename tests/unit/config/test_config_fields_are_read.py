"""Every key of the schema acts: some code reads it, or it is declared ignored or not yet supported."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import trainer
from trainer.config.schema.fields import Section, shape_of, support_of
from trainer.config.schema.root import Config

ROOT = Path(trainer.__file__).parent
DERIVED = {
    # Read through a property of its section, by the name of the property.
    "n_kv_heads": "kv_heads",
    "hidden_sizes": "sizes",
    "head_dim": "head_size",
    "profile_start_step": "profile_monitor",
    "profile_stop_step": "profile_monitor",
    "profile_output": "profile_monitor",
    "rotary_pct": "rotary_size",
    "rope_theta": "rope_base",
    "embedding_size": "maps_embedding",
    "layernorm_zero_centered_gamma": "norm_offset",
    "normalization": "centers_norms",
    "query_pre_attn_scalar": "softmax_scale",
    "logits_scaling": "logits_factor",
    "logit_scale": "logits_factor",
    "nope_without_window": "has_rotary",
    "sliding_window_pattern": "layer_types",
    "use_bias": "qkv_has_bias",
    "no_rope_layers": "unrotated_layers",
    "original_max_position_embeddings": "trained_length",
    "use_sliding_window": "has_window",
    "max_window_layers": "has_window",
    "rope_ratio": "rope_base",
    "mlp_down_has_bias": "down_has_bias",
    "use_shared_expert_gating": "has_shared_gate",
    "intermediate_size": "ffn_size",
    "multiple_of": "ffn_size",
    "ffn_dim_multiplier": "ffn_size",
    "max_position_embeddings": "max_positions",
    "moe_intermediate_size": "expert_size",
    "shared_expert_num": "shared_expert_size",
    "moe_shared_expert_intermediate_size": "shared_expert_size",
    "first_k_dense_replace": "is_moe_layer",
    "moe_layer_freq": "is_moe_layer",
    "scoring_func": "score_function",
    "use_gating_sigmoid": "score_function",
    "topk_method": "has_expert_bias",
    "aux_loss_factor": "balance_factor",
    "router_aux_loss_coef": "balance_factor",
    "capacity_factor": "capacity",
    "enable_sdrop": "drop_policy",
    "moe_token_drop_policy": "drop_policy",
}
ELSEWHERE = {
    # The loader turns it into tie_word_embeddings.
    "model.settings.untie_embeddings_and_output_weights",
    # The loader turns these into model.arch.type and moe_layer_freq; a rule and a note look at the last.
    "model.settings.architectures",
    "model.settings.model_type",
    "model.settings.net_name",
    # ... and this one into n_kv_heads.
    "model.settings.multi_query_attention",
    "model.settings.moe_config.decoder_sparse_step",
    "model.settings.moe_config.mlp_only_layers",
    "model.settings.moe_config.mlp_layer_types",
    "model.settings.moe_config.output_router_logits",
    # trainer.config.read.model_folder reads the folder, whose values become those of other keys.
    "pretrained_model_dir",
    # All its values mean the same, or there is one.
    "callbacks.monitor",
    "model.settings.hidden_act",
    # The tokenizers read eos and bos by a name that they put together.
    "model.settings.bos_token_id",
    # trainer.config.recompute says what they mean for each layer.
    "recompute_config.select_recompute",
    "recompute_config.select_recompute_exclude",
    "recompute_config.select_comm_recompute",
    # trainer.config.stages says which layers each stage of a pipeline has.
    "model.settings.offset",
    "model.settings.pp_interleave_num",
    # The rules let a job run that it is set in: they look at it together with parallel_mode.
    "parallel.parallel_fallback",
    # The rules compare them with the model.
    "callbacks.expert_num",
    "callbacks.capacity_factor",
    "callbacks.num_layers",
    "callbacks.mtp_depth",
    # The rules compare them with the balance loss that there is.
    "model.settings.moe_config.aux_loss_factors",
    "model.settings.moe_config.aux_loss_types",
    "model.settings.moe_config.moe_router_load_balancing_type",
    # trainer.config.checks.moe.watches_drop_rate: it or a callback turns the monitor on.
    "model.settings.moe_config.callback_moe_droprate",
    # trainer.config.checks.parallel: parallel_degrees, shards_optimizer, shard_threshold_bytes, zero_level; what is not
    # built is told.
    "use_parallel",
    "parallel.parallel_mode",
    "parallel.enable_parallel_optimizer",
    "parallel.parallel_optimizer_config.parallel_optimizer_threshold",
    "parallel.parallel_optimizer_config.gradient_accumulation_shard",
    "parallel.parallel_optimizer_config.optimizer_level",
    "recompute_config.parallel_optimizer_comm_recompute",
    "parallel_config.data_parallel",
    "parallel_config.model_parallel",
    "parallel_config.context_parallel",
    "parallel_config.context_parallel_algo",
    "parallel_config.ulysses_degree_in_cp",
    "parallel_config.expert_parallel",
    # The loader multiplies expert_parallel by it.
    "parallel_config.expert_model_parallel",
    "parallel_config.pipeline_stage",
    "parallel_config.micro_batch_num",
}


def sections() -> dict[type[Section], str]:
    """Returns all sections that can act, with the key that leads to them."""
    found: dict[type[Section], str] = {Config: ""}
    for kind in (queue := [Config]):
        for name, field in kind.model_fields.items():
            for below in shape_of(field).kinds:
                if below not in found and support_of(field)[0] == "supported" and below.support == "supported":
                    found[below] = f"{found[kind]}{name}."
                    queue.append(below)
    return found


@cache
def code() -> str:
    """Returns the program outside of the schema: rules across sections alone do not make a key act."""
    files = [path for path in ROOT.rglob("*.py") if "config" not in path.relative_to(ROOT).parts]
    return "\n".join(path.read_text() for path in files if path.name != "flags.py")


def acting_fields() -> list[str]:
    """Returns the keys that claim to act: ``section.field``."""
    fields = []
    for kind, path in sections().items():
        for name, field in kind.model_fields.items():
            # "type" chooses a section and a section is read by its keys: neither acts by itself.
            acts = support_of(field)[0] == "supported" and name != "type" and not shape_of(field).kinds
            if acts and f"{path}{name}" not in ELSEWHERE:
                fields.append(f"{path}{name}")
    return sorted(set(fields))


@pytest.mark.parametrize("field", acting_fields())
def test_every_field_is_read_or_declared_not_to_act(field):
    name = field.split(".")[-1]
    name = DERIVED[name] if name in DERIVED else name
    assert re.search(rf"\.{name}\b|[\"']{name}[\"']", code()), f"nothing reads {field}"
