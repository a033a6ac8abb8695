"""The plan's estimate of device memory against peaks that MindSpore's Ascend backend had in its dry run (2.10.0)."""

from __future__ import annotations

import json

import pytest
from tolerances import DRY_RUN_EXPERTS_MEMORY, DRY_RUN_MEMORY, DRY_RUN_SMALL_MEMORY, PLANNED_MEMORY

from trainer.config import Override, load_config, parse_config
from trainer.config.device_defaults import apply_device_defaults
from trainer.parallel.world import World
from trainer.plan.device import graph
from trainer.plan.memory import memory_estimate

SWITCHES = {
    "compute_dtype": "bfloat16", "use_flash_attention": True, "use_fused_rope": True, "use_fused_swiglu": True,
}  # fmt: skip
QWEN3 = {
    "hidden_size": 1024, "num_heads": 16, "n_kv_heads": 8, "head_dim": 128, "intermediate_size": 3072,
    "seq_length": 4096, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = {"hidden_size": 1024, "num_heads": 8, "n_kv_heads": 8, "intermediate_size": 2816, "seq_length": 2048}
SHARED = {
    "use_parallel": True, "parallel": {"parallel_mode": 1, "enable_parallel_optimizer": True},
    "parallel_config": {"data_parallel": 8},
}  # fmt: skip
TENSOR_PARALLEL = SHARED | {"parallel_config": {"data_parallel": 2, "model_parallel": 4}}
PIPELINE = {
    "use_parallel": True, "parallel": {"parallel_mode": 1, "enable_parallel_optimizer": False},
    "parallel_config": {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4},
}  # fmt: skip
MOE = {
    "expert_num": 16, "num_experts_chosen": 4, "moe_intermediate_size": 512, "use_gmm": True,
    "use_fused_ops_permute": True, "aux_loss_factor": 0.001,
}  # fmt: skip
EXPERTS = {
    "hidden_size": 1024, "num_heads": 8, "n_kv_heads": 8, "intermediate_size": 2048, "seq_length": 256, "num_layers": 4,
    "vocab_size": 1024, "moe_config": {"expert_num": 32, "num_experts_chosen": 2, "use_gmm": True},
}  # fmt: skip
WHOLE_EXPERTS = SHARED | {"parallel_config": {"data_parallel": 2, "model_parallel": 2, "use_seq_parallel": True}}
LEVEL3 = {"parallel": SHARED["parallel"] | {"parallel_optimizer_config": {"optimizer_level": "level3"}}}
TWO_MICRO_BATCHES = {"runner_config": {"batch_size": 1, "gradient_accumulation_steps": 2}}
FOUR_MICRO_BATCHES = {"runner_config": {"batch_size": 1, "gradient_accumulation_steps": 4}}
FROZEN_EXPERTS = {"freeze": {"include": ["*experts*"]}}


def estimate(family: str, model: dict, ranks: int, sections: dict, stage: int | None = None) -> dict[str, int]:
    model = {"arch": {"type": family}, "model_config": {**model, **SWITCHES}}
    config = {"context": {"device_target": "Ascend"}, "optimizer": {"type": "AdamW"}, "model": model} | sections
    return memory_estimate(parse_config("memory", json.dumps(config)), True, "Ascend", World(0, ranks, 0, 1), stage)


@pytest.mark.parametrize(
    ("model", "ranks", "sections", "measured_mb"),
    [
        (QWEN3 | {"num_layers": 28, "vocab_size": 151936}, 1, {}, 16627),
        (QWEN3 | {"num_layers": 6, "vocab_size": 1024}, 1, {}, 3258),
        (QWEN3 | {"num_layers": 2, "vocab_size": 1024}, 1, {}, 1386),
        (QWEN3 | {"num_layers": 4, "vocab_size": 1024}, 1, {"recompute_config": {"recompute": True}}, 1454),
        (QWEN3 | {"num_layers": 4, "vocab_size": 1024}, 1, TWO_MICRO_BATCHES, 2578),
        (QWEN3 | {"num_layers": 3, "vocab_size": 1024, "moe_config": MOE}, 1, {}, 2925),
        (QWEN3 | {"num_layers": 5, "vocab_size": 1024, "moe_config": MOE}, 1, {}, 4556),
        (QWEN3 | {"num_layers": 3, "vocab_size": 1024, "moe_config": MOE, "seq_length": 2048}, 1, {}, 2137),
        (LLAMA | {"num_layers": 6, "vocab_size": 1024}, 8, SHARED, 800),
        (LLAMA | {"num_layers": 6, "vocab_size": 1024}, 8, SHARED | {"recompute_config": {"recompute": True}}, 568),
        (LLAMA | {"num_layers": 4, "vocab_size": 65536}, 8, TENSOR_PARALLEL, 919),
        (LLAMA | {"num_layers": 8, "vocab_size": 32768}, 8, PIPELINE, 1432),
        (LLAMA | {"num_layers": 2, "vocab_size": 1024}, 8, SHARED, 310),
        (LLAMA | {"num_layers": 2, "vocab_size": 65536}, 8, SHARED, 2217),
    ],
)
def test_it_is_near_the_peak_of_the_dry_run(model: dict, ranks: int, sections: dict, measured_mb: float) -> None:
    family = "LlamaForCausalLM" if ranks > 1 else "Qwen3MoeForCausalLM" if "moe_config" in model else "Qwen3ForCausalLM"
    found = estimate(family, model, ranks, {"runner_config": {"batch_size": 1}} | sections)
    assert found["total"] / 1e6 == pytest.approx(measured_mb, rel=DRY_RUN_MEMORY)
    assert found["total"] == sum(size for name, size in found.items() if name != "total")


@pytest.mark.parametrize(
    ("sections", "measured_gib"),
    [
        ({}, 6.16), (LEVEL3 | {"recompute_config": {"recompute": True}}, 6.16),
        (TWO_MICRO_BATCHES, 8.64), (TWO_MICRO_BATCHES | LEVEL3, 5.23), (LEVEL3, 4.83), (FOUR_MICRO_BATCHES, 11.64),
        (FROZEN_EXPERTS, 2.38), (FROZEN_EXPERTS | TWO_MICRO_BATCHES, 4.13),
        (LEVEL3 | {"parallel_config": {"model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2}}, 5.39),
        ({"parallel_config": {"model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 8}}, 6.87),
        ({"parallel_config": {"model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4},
          "recompute_config": {"recompute": True}}, 6.09),
    ],
)  # fmt: skip
def test_experts_that_ranks_of_a_tensor_group_have_are_shared_among_these_too(sections: dict, measured_gib: float):
    """The dry run gathers them from data- and tensor-parallel ranks together.

    Below level3 each micro-batch has copies in half precision; in a pipeline those under way have them, beside what is
    gathered in float32. With one micro-batch all gradients wait until the end of the backward pass, but at level3 those
    of two layers, unless feed-forward layers are recomputed.
    """
    found = estimate("MixtralForCausalLM", EXPERTS, 4, {"runner_config": {"batch_size": 1}} | WHOLE_EXPERTS | sections)
    assert found["total"] / (1 << 30) == pytest.approx(measured_gib, rel=DRY_RUN_EXPERTS_MEMORY)
    assert found["weights"] < 0.26 * 824321024 * 4


def test_gradients_of_several_micro_batches_stay_beside_the_activations() -> None:
    model = QWEN3 | {"num_layers": 6, "vocab_size": 1024}
    one, two = (
        estimate("Qwen3ForCausalLM", model, 1, {"runner_config": {"gradient_accumulation_steps": steps}})
        for steps in (1, 2)
    )
    assert one["gradients"] == two["gradients"]
    assert two["total"] - one["total"] == one["gradients"]


def test_long_sequences_grow_with_their_tokens_alone() -> None:
    model = QWEN3 | {"num_layers": 4, "vocab_size": 32000}
    kept = []
    for length in (8192, 16384, 32768):
        found = estimate("Qwen3ForCausalLM", model | {"seq_length": length}, 1, {"runner_config": {"batch_size": 1}})
        kept.append(found["activations"])
    # Not quite a line: the peak moves from the loss to the backward pass of the last layer.
    assert kept[2] - kept[1] == pytest.approx(2 * (kept[1] - kept[0]), rel=PLANNED_MEMORY)


@pytest.mark.parametrize(
    ("name", "measured_mib"),
    [("bench_dense", 290.8), ("bench_moe", 429.6), ("instructions", 82.3), ("mindformers_llama", 15.1),
     ("moe_dropless", 332.2), ("moe_mtp", 392.9), ("moe_tiny", 338.8),
     ("quickstart", 247.3), ("qwen3_tiny", 52.2), ("lora", 90.1)],
)  # fmt: skip
def test_shipped_configurations_of_small_models(name: str, measured_mib: float) -> None:
    config = load_config(f"configs/{name}.yaml", [Override("context.device_target", "Ascend", "flag")])
    found = memory_estimate(apply_device_defaults(config, "Ascend"), True, "Ascend")
    assert found["total"] / (1 << 20) == pytest.approx(measured_mib, rel=DRY_RUN_SMALL_MEMORY)


WIDE = {
    "num_layers": 8, "hidden_size": 2048, "num_heads": 16, "n_kv_heads": 8, "head_dim": 128, "intermediate_size": 6144,
    "vocab_size": 32768, "seq_length": 4096,
}  # fmt: skip


@pytest.mark.parametrize(
    ("level", "recompute", "measured_gib"),
    [
        ("", {}, 6.20), ("level1", {}, 4.70), ("level3", {}, 5.00), ("", {"select_recompute": ["attention"]}, 5.47),
        ("", {"recompute": True}, 3.42), ("", {"select_recompute": ["mlp"]}, 5.59),
    ],
)  # fmt: skip
def test_each_micro_batch_under_way_has_copies_of_its_matrices(level: str, recompute: dict, measured_gib: float):
    """The first of 4 stages; below level3 ranks that share weights gather them once for all. Where one sublayer is
    recomputed, each micro-batch has its matrices in float32."""
    sharing = {"optimizer_level": level or "level1"}
    parallel = {"parallel_mode": 1, "enable_parallel_optimizer": bool(level), "parallel_optimizer_config": sharing}
    ranks = 4 * (1 + bool(level))
    found = estimate("Qwen3ForCausalLM", WIDE, ranks, {
        "runner_config": {"batch_size": 1}, "use_parallel": True, "parallel": parallel, "recompute_config": recompute,
        "parallel_config": {"pipeline_stage": 4, "micro_batch_num": 4, "data_parallel": ranks // 4},
    }, stage=0)  # fmt: skip
    assert found["total"] / (1 << 30) == pytest.approx(measured_gib, rel=DRY_RUN_EXPERTS_MEMORY)


@pytest.mark.parametrize(
    ("scheduler", "stages", "micro_batches", "chunks", "slices", "of_first", "of_last"),
    [
        ("seqpipe", 2, 4, 2, 1, 663.9, 1406.4), ("seqpipe", 2, 5, 2, 2, 696.2, None),
        ("seqpipe", 4, 6, 1, 4, 476.7, None), ("seqvpp", 4, 4, 2, 2, 748.8, None),
        ("seqsmartvpp", 4, 4, 2, 2, 664.9, None),
    ],
)  # fmt: skip
def test_slices_under_way_are_near_the_dry_run(
    monkeypatch: pytest.MonkeyPatch, scheduler: str, stages: int, micro_batches: int, chunks: int, slices: int,
    of_first: float, of_last: float | None,
) -> None:  # fmt: skip
    """MiB of dry runs in which MindSpore cut the sequences of this trainer's network, which has no caches of keys.

    With slices the last stage was measured only with an earlier cross entropy, which kept more."""
    monkeypatch.setattr(graph, "_cache_bytes", lambda *_: graph._CacheBytes(0, 0, 0))
    model = WIDE | SWITCHES | {
        "num_layers": stages * chunks, "pp_interleave_num": chunks, "seq_length": 2048, "hidden_size": 512,
        "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 1536,
    }  # fmt: skip
    order = {"pipeline_interleave": True, "pipeline_scheduler": scheduler}
    config = parse_config("memory", json.dumps({
        "context": {"device_target": "Ascend"}, "optimizer": {"type": "AdamW"}, "runner_config": {"batch_size": 1},
        "use_parallel": True, "parallel": {"parallel_mode": 1, "pipeline_config": order},
        "parallel_config": {"pipeline_stage": stages, "micro_batch_num": micro_batches},
        "model": {"arch": {"type": "Qwen3ForCausalLM"}, "model_config": model},
    }))  # fmt: skip
    section = config.parallel.pipeline_config.with_slices(slices)
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"pipeline_config": section})})
    measured = {0: of_first}
    if of_last is not None:
        measured[stages - 1] = of_last
    for stage, measured_mib in measured.items():
        found = memory_estimate(config, True, "Ascend", World(0, stages, 0, 1), stage)
        assert found["total"] / (1 << 20) == pytest.approx(measured_mib, rel=DRY_RUN_EXPERTS_MEMORY)
