#!/usr/bin/env python3
"""Compares the plan's estimate of an Ascend's memory with dry runs of MindSpore's Ascend backend, for 22 layouts.

    python scripts/check_memory.py
    python scripts/check_memory.py --only "experts, ep 4" "latent" --json memory.json

Each layout is one rank of a job: dense models, models with experts and models with latent attention, in explicit and in
semi-automatic mode, with each parallel degree, optimizer level and recomputation. It prints the estimate, the peak of
the dry run, their ratio, and the ratio of what remains without weights, gradients and optimizer state, which are
exact. One process at a time; all of them take two to five minutes on two cores. Exit code 1: a ratio is further than a
tenth from 1, or a dry run failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOLERANCE = 0.1
_GIB = 1 << 30

DENSE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 2048, "num_heads": 16, "n_kv_heads": 8, "head_dim": 128, "intermediate_size": 6144,
    "vocab_size": 32768, "seq_length": 4096,
}  # fmt: skip
"""Sizes cost nothing, because a dry run computes nothing; layers cost seconds in a graph."""
FUSED = {"use_fused_rope": True, "use_fused_swiglu": True}
EXPERTS: dict[str, Any] = DENSE | FUSED | {
    "num_layers": 3,
    "moe_config": {
        "expert_num": 16, "num_experts_chosen": 4, "moe_intermediate_size": 1024, "use_gmm": True,
        "use_fused_ops_permute": True, "aux_loss_factor": 0.001,
    },
}  # fmt: skip
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_layers": 4, "hidden_size": 2048, "num_heads": 16, "intermediate_size": 6144, "vocab_size": 32768,
    "seq_length": 4096, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "use_fused_swiglu": True,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = LATENT | {
    "num_layers": 3,
    "moe_config": {
        "expert_num": 16, "num_experts_chosen": 4, "moe_intermediate_size": 1024, "use_gmm": True,
        "shared_expert_num": 1, "first_k_dense_replace": 1, "scoring_func": "sigmoid", "norm_topk_prob": True,
        "topk_bias_update_rate": 0.001,
    },
}  # fmt: skip
ADAPTERS = {
    "num_layers": 8,
    "pet_config": {
        "pet_type": "lora", "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05,
        "target_modules": ".*layers\\.[67]\\..*(wq|wk|wv|wo)",
    },
}  # fmt: skip

TWO_CHUNKS = {"pipeline_config": {"pipeline_interleave": True}}
ALL_AGAIN = {"recompute_config": {"recompute": True}}


class Layout(NamedTuple):
    """One rank of a job.

    Attributes:
        family: The type of the model.
        model: Its `model_config`.
        ranks: Of the job.
        rank: The one that is compared.
        degrees: `parallel_config`, without the degree of data parallelism.
        sections: Further sections of the file.
        is_graph: Whether it runs in semi-automatic mode.
    """

    family: str
    model: dict[str, Any]
    ranks: int = 1
    rank: int = 0
    degrees: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    is_graph: bool = False

    @property
    def text(self) -> str:
        """Returns the file."""
        degrees = {"model_parallel": 1, "context_parallel": 1, "pipeline_stage": 1} | self.degrees
        divided = degrees["model_parallel"] * degrees["context_parallel"] * degrees["pipeline_stage"]
        file = {
            "context": {"device_target": "Ascend"},
            "use_parallel": self.ranks > 1,
            "parallel_config": degrees | {"data_parallel": self.ranks // divided},
            "runner_config": {"batch_size": 1},
            "optimizer": {"type": "AdamW"},
            "model": {"arch": {"type": self.family}, "model_config": self.model},
        } | self.sections  # fmt: skip
        parallel = {"parallel_mode": int(self.is_graph), "enable_parallel_optimizer": False}
        file["parallel"] = parallel | self.sections.get("parallel", {})
        return json.dumps(file)


def level(number: int) -> dict[str, Any]:
    """Returns the keys of `parallel` that share optimizer state, gradients and weights up to a ZeRO level."""
    return {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"optimizer_level": f"level{number}"}}


def select(part: str) -> dict[str, Any]:
    """Returns the section that recomputes a sublayer of each layer."""
    return {"recompute_config": {"select_recompute": [part]}}


def steps(number: int) -> dict[str, Any]:
    """Returns the section of several micro-batches a step."""
    return {"runner_config": {"batch_size": 1, "gradient_accumulation_steps": number}}


_QWEN = "Qwen3ForCausalLM"
_QWEN_MOE = "Qwen3MoeForCausalLM"
_DEEPSEEK = "DeepseekV3ForCausalLM"
LAYOUTS: dict[str, Layout] = {
    "dense": Layout(_QWEN, DENSE | FUSED),
    "dense, float32": Layout(_QWEN, DENSE | {"compute_dtype": "float32", "seq_length": 2048}),
    "dense, no flash attention, attention recomputed": Layout(
        _QWEN, DENSE | {"use_flash_attention": False, "seq_length": 2048}, sections=select("attention")
    ),
    "dense, tp 4 sp, all recomputed": Layout(
        _QWEN, DENSE | FUSED | {"num_layers": 8}, 4, 3, {"model_parallel": 4, "use_seq_parallel": True},
        ALL_AGAIN | {"runner_config": {"batch_size": 4}},
    ),
    "dense, tp 2 cp 2 dp 2, level2, 2 micro-batches": Layout(
        _QWEN, DENSE | FUSED, 8, 5, {"model_parallel": 2, "context_parallel": 2}, {"parallel": level(2)} | steps(2)
    ),
    "dense, cp 4, mlp recomputed": Layout(
        _QWEN, DENSE | {"seq_length": 16384}, 4, 1, {"context_parallel": 4}, select("mlp")
    ),
    "dense, pp 2 x 2 chunks, tp 2 sp": Layout(
        _QWEN, DENSE | FUSED | {"num_layers": 8, "pp_interleave_num": 2}, 4, 0,
        {"pipeline_stage": 2, "micro_batch_num": 4, "model_parallel": 2, "use_seq_parallel": True},
        {"parallel": TWO_CHUNKS},
    ),
    "dense, adapters in the last layers, 4 micro-batches": Layout(_QWEN, DENSE | FUSED | ADAPTERS, sections=steps(4)),
    "experts": Layout(_QWEN_MOE, EXPERTS),
    "experts, ep 4": Layout(_QWEN_MOE, EXPERTS, 4, 2, {"expert_parallel": 4}),
    "experts, ep 4, tp 2 sp, all recomputed": Layout(
        _QWEN_MOE, EXPERTS, 4, 1, {"expert_parallel": 4, "model_parallel": 2, "use_seq_parallel": True},
        ALL_AGAIN | {"runner_config": {"batch_size": 2}},
    ),
    "experts, pp 2, ep 2, level1, last stage": Layout(
        _QWEN_MOE, EXPERTS | {"num_layers": 4}, 4, 3, {"expert_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4},
        {"parallel": level(1)},
    ),
    "latent": Layout(_QWEN, LATENT),
    "latent, tp 4 sp, attention recomputed": Layout(
        _QWEN, LATENT, 4, 2, {"model_parallel": 4, "use_seq_parallel": True}, select("attention")
    ),
    "latent, experts, MTP, ep 2, 2 micro-batches": Layout(
        _DEEPSEEK, DEEPSEEK | {"mtp_depth": 1}, 2, 1, {"expert_parallel": 2}, steps(2)
    ),
    "graph: dense, dp 8, level1": Layout(_QWEN, DENSE | FUSED, 8, 3, {}, {"parallel": level(1)}, True),
    "graph: dense, pp 2 x 2 chunks, tp 4 sp, all recomputed": Layout(
        _QWEN, DENSE | FUSED | {"pp_interleave_num": 2}, 8, 0,
        {"pipeline_stage": 2, "micro_batch_num": 4, "model_parallel": 4, "use_seq_parallel": True},
        {"parallel": TWO_CHUNKS, "runner_config": {"batch_size": 2}} | ALL_AGAIN, True,
    ),
    "graph: dense, tp 2 dp 4, level3, mlp recomputed": Layout(
        _QWEN, DENSE, 8, 6, {"model_parallel": 2}, {"parallel": level(3)} | select("mlp"), True
    ),
    "graph: dense, pp 4": Layout(
        _QWEN, DENSE | FUSED | {"num_layers": 8}, 4, 0, {"pipeline_stage": 4, "micro_batch_num": 4}, {}, True
    ),
    "graph: dense, pp 4, dp 2, level3": Layout(
        _QWEN, DENSE | FUSED | {"num_layers": 8}, 8, 0, {"pipeline_stage": 4, "micro_batch_num": 4},
        {"parallel": level(3)}, True,
    ),
    "graph: experts, pp 2, tp 2, ep 4, last stage": Layout(
        _QWEN_MOE, EXPERTS | {"num_layers": 4}, 8, 7,
        {"pipeline_stage": 2, "micro_batch_num": 2, "model_parallel": 2, "expert_parallel": 4}, {}, True,
    ),
    "graph: latent, experts, tp 2, ep 4, level2": Layout(
        _DEEPSEEK, DEEPSEEK, 8, 2, {"model_parallel": 2, "expert_parallel": 4}, {"parallel": level(2)}, True
    ),
}  # fmt: skip


class Comparison(NamedTuple):
    """An estimate beside the dry run.

    Attributes:
        parts: Of the estimate, by name, with their total.
        peak_bytes: Of the dry run.
        seconds: Of the dry run.
    """

    parts: dict[str, int]
    peak_bytes: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Returns estimate / dry run."""
        return self.parts["total"] / self.peak_bytes

    @property
    def rest_ratio(self) -> float:
        """Returns estimate / dry run of all but weights, gradients and optimizer state."""
        from trainer.plan.device.memory import fixed_bytes

        fixed = fixed_bytes(self.parts)
        return (self.parts["total"] - fixed) / max(self.peak_bytes - fixed, 1)


def planned_parts(name: str, layout: Layout) -> dict[str, int]:
    """Returns the bytes of the rank by part, as `plan` estimates them."""
    from trainer.config import parse_config
    from trainer.dryrun.report import planned_parts as parts_of_rank
    from trainer.parallel.world import World

    return parts_of_rank(parse_config(name, layout.text), World(layout.rank, layout.ranks, 0, 1))


def compare(name: str, layout: Layout) -> Comparison | str:
    """Plans a layout and runs it dry; returns why the dry run failed instead of a comparison, if it did."""
    from trainer.dryrun.process import Case, run_cases

    parts = planned_parts(name, layout)
    [measured] = run_cases({name: Case(layout.text)}, layout.ranks, layout.rank).values()
    if measured.failure is not None:
        return measured.failure.message
    return Comparison(parts, measured.peak_bytes, measured.seconds)


def main() -> int:
    """Compares the layouts that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="layouts, by their names")
    parser.add_argument("--json", type=Path, help="a file for all figures, in bytes and by part")
    arguments = parser.parse_args()
    is_near = True
    results: list[dict[str, Any]] = []
    print(f"{'estimate':>9} {'dry run':>9} {'ratio':>6} {'rest':>6} {'seconds':>8}  layout")
    for name in arguments.only:
        found = compare(name, LAYOUTS[name])
        if isinstance(found, str):
            is_near = False
            results.append({"layout": name, "failure": found})
            print(f"failed: {name}: {found}", flush=True)
            continue
        is_near &= abs(found.ratio - 1) <= TOLERANCE
        results.append({"layout": name, **found._asdict(), "ratio": found.ratio, "rest_ratio": found.rest_ratio})
        planned = found.parts["total"] / _GIB
        print(
            f"{planned:>9.2f} {found.peak_bytes / _GIB:>9.2f} {found.ratio:>6.3f} {found.rest_ratio:>6.3f}"
            f" {found.seconds:>8.1f}  {name}", flush=True,
        )  # fmt: skip
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(not is_near)


if __name__ == "__main__":
    sys.exit(main())
