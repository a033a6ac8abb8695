"""Small configurations for an Ascend, and how a test file of this folder declares its cases."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from no_decoder import SMALL_NO_DECODER

from trainer.dryrun.process import TRAIN, Case

LEGACY_OF_GRAPH = frozenset(("Gather", "UnsortedSegmentSum"))
LEGACY_OF_STAGES = frozenset(("Assign", "AssignAdd", "StridedSlice", "TensorMove"))
"""Kernels of CANN's legacy library that dense models start in semi-automatic mode, and those that start beside them in
its pipelines and sums over micro-batches. In explicit mode there are none; docs/ascend.md says the same."""

_SWITCHES = {
    "compute_dtype": "bfloat16", "use_flash_attention": True, "use_fused_rope": True, "use_fused_swiglu": True,
}  # fmt: skip
_SIZES = {
    "num_layers": 2, "hidden_size": 128, "num_heads": 4, "n_kv_heads": 2, "head_dim": 32, "intermediate_size": 256,
    "vocab_size": 512, "seq_length": 64,
}  # fmt: skip
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
DENSE: dict[str, Any] = {
    "context": {"device_target": "Ascend"},
    "runner_config": {"batch_size": 1, "gradient_accumulation_steps": 2},
    "runner_wrapper": {"use_clip_grad": True},
    "optimizer": {"type": "AdamW", "weight_decay": 0.1},
    "model": {"arch": {"type": "Qwen3ForCausalLM"}, "model_config": _SIZES | _SWITCHES},
}
"""A Qwen3 of two layers."""
_MOE = {
    "expert_num": 8, "num_experts_chosen": 2, "moe_intermediate_size": 64, "use_gmm": True,
    "use_fused_ops_permute": True, "aux_loss_factor": 0.001,
}  # fmt: skip
EXPERTS: dict[str, Any] = DENSE | {
    "model": {"arch": {"type": "Qwen3MoeForCausalLM"}, "model_config": _SIZES | _SWITCHES | {"moe_config": _MOE}}
}
"""The same with experts in every layer."""
SEMI: dict[str, Any] = DENSE | {
    "use_parallel": True,
    "parallel": {"parallel_mode": 1, "enable_parallel_optimizer": False},
    "parallel_config": {"data_parallel": 8},
    "runner_config": {"batch_size": 1},
    "model": {"arch": {"type": "LlamaForCausalLM"}, "model_config": _SIZES | _SWITCHES},
}
"""A Llama in semi-automatic mode, for eight ranks."""


OF_IMAGES: dict[str, Any] = {name: DENSE[name] for name in ("context", "runner_config", "optimizer")} | SMALL_NO_DECODER
"""A model of images."""


class OnAscend(NamedTuple):
    """A case, and the rank of a job that it runs as. All cases of one rank share a process, unless they name others."""

    case: Case
    ranks: int = 1
    rank: int = 0
    process: str = ""


def on_ascend(
    base: Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    *,
    model: Mapping[str, Any] | None = None,
    ranks: int = 1,
    rank: int = 0,
    process: str = "",
    task: str = TRAIN,
    steps: int = 2,
    **options: Any,
) -> OnAscend:
    """Returns a case: a configuration with changes, which replace single keys however deep they lie.

    Args:
        model: Changes of `model.model_config`.
        process: Cases of other names run in other processes: MindSpore 2.10 does not shard a graph in two ways in one.
        task, steps, options: As in `trainer.dryrun.process.Case`.
    """
    changes = {**(changes or {}), **({"model": {"model_config": model}} if model else {})}
    return OnAscend(Case(json.dumps(_merged(base, changes)), task, steps, options), ranks, rank, process)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(dict(base))
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = _merged(found[key], value) if both else value
    return found
