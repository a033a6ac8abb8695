"""Semi-automatic mode on the dry Ascend backend, sharded in each way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from ascend_cases import (
    LEGACY_OF_GRAPH,
    LEGACY_OF_STAGES,
    SEMI,
    OnAscend,
    on_ascend,
)
from tolerances import PLANNED_MEMORY, SMALL_NUMBERS_BYTES

from trainer.config import parse_config
from trainer.dryrun.process import Measurement
from trainer.dryrun.report import planned_bytes
from trainer.models.spec.shapes import all_shapes
from trainer.parallel.world import World

Bench = Callable[[str], Measurement]

RANKS, SHAPES = 8, "tests.ascend.step_tasks:sharded"
DEGREES = {
    "data 8": {"data_parallel": 8},
    "tensor 2": {"data_parallel": 4, "model_parallel": 2},
    "pipeline 2": {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2},
}
SHARED = {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"parallel_optimizer_threshold": 0}}
# Nothing is computed, so large sizes cost nothing: with small ones the allocator's alignment would count.
SIZES = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 2048, "vocab_size": 16384, "seq_length": 1024}
ONE = {"num_layers": 1}  # of each layer the graph costs seconds
FUSED = {"use_qk_norm": True, "tie_word_embeddings": True, "mtp_depth": 1, **ONE}
PLAIN = {
    "compute_dtype": "float32", "use_flash_attention": False, "use_fused_rope": False, "use_fused_swiglu": False,
    "qkv_has_bias": True, "mlp_down_has_bias": True, "rope_interleave": True, "rotary_pct": 0.5,
    "post_self_attn_layernorm": True, "post_mlp_layernorm": True, "hidden_dropout": 0.1, "attention_dropout": 0.1,
    "pet_config": {"lora_rank": 8, "lora_dropout": 0.1, "target_modules": ".*(q|o|up|down)_proj"}, **ONE,
    "embedding_size": 64,
}  # fmt: skip


def sharded(
    degrees: str,
    parallel: dict[str, Any],
    model: dict[str, Any],
    rank: int = 0,
    level: str = "O0",
    top: dict[str, Any] | None = None,
    **options: Any,
) -> OnAscend:
    """Returns a case that says the shapes of its parameters and its operators. The dtype and the attention are the
    defaults of an Ascend."""
    context = {"jit_config": {"jit_level": level}}
    top = (top or {}) | {"parallel_config": DEGREES[degrees], "parallel": parallel, "context": context}
    process = f"{degrees if 'pipeline' in degrees else ''}{bool(parallel.get('enable_parallel_optimizer'))}"
    model = {"compute_dtype": None, "use_flash_attention": None} | model
    return on_ascend(SEMI, top, model=model, ranks=RANKS, rank=rank, process=process, task=SHAPES, **options)


CASES = {
    "tensor 2": sharded("tensor 2", {"full_batch": False}, FUSED),
    "tensor 2, plain kernels and adapters": sharded("tensor 2", {}, PLAIN),
    "tensor 2, hsdp": sharded("tensor 2", SHARED, ONE, level="O1"),
    "pipeline 2, first stage": sharded("pipeline 2", {}, SIZES),
    "pipeline 2, hsdp, last stage": sharded("pipeline 2", SHARED, SIZES, rank=7),
}
TWO = {"runner_config": {"batch_size": 1, "gradient_accumulation_steps": 2}}
CASES["accumulation"] = sharded("data 8", {}, ONE, top=TWO, evaluates=True)
ADAPTERS = {"pet_config": {"lora_rank": 4, "target_modules": ".*q_proj"}}  # the embedding is frozen
CASES["accumulation of adapters"] = sharded("data 8", {}, ONE | ADAPTERS, top=TWO)


@pytest.mark.parametrize("name", CASES)
def test_it_runs(bench: Bench, name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found.get("updated", True)
    sums_up = "pipeline" in name or "accumulation" in name
    allowed = LEGACY_OF_GRAPH | LEGACY_OF_STAGES if sums_up else LEGACY_OF_GRAPH
    assert found.legacy.keys() | set(found.found.get("legacy", ())) <= allowed


def test_the_host_reads_one_small_tensor_a_step(bench: Bench) -> None:
    found = bench("tensor 2")
    assert [count for count, _ in found.host_reads.values()] == [1], found.host_reads
    assert found.host_bytes < 100_000


def weights_of(name: str) -> dict[str, list[int]]:
    """Returns the shapes of whole weights."""
    config = parse_config(name, CASES[name].case.config)
    return {weight: list(shape) for weight, shape in all_shapes(config.decoder).items()}


def shard_of(shape: list[int], name: str) -> list[int]:
    """Returns the shape of a shard on one of two tensor-parallel ranks, as in Megatron-LM."""
    rows = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "q_proj.bias",
            "k_proj.bias", "v_proj.bias", "embed_tokens.weight", "lm_head.weight")  # fmt: skip
    # Of the two matrices of an adapter B is sharded along the outputs like its projection, A along the inputs.
    rows += ("q_proj.lora_B.weight", "up_proj.lora_B.weight")
    columns = ("o_proj.weight", "down_proj.weight", "o_proj.lora_A.weight", "down_proj.lora_A.weight")
    if name.endswith(rows):
        return [shape[0] // 2, *shape[1:]]
    return [shape[0], shape[1] // 2] if name.endswith(columns) else shape


def names_of(found: Measurement) -> set[str]:
    """Returns the names of its collectives."""
    return {each.name for each in found.collectives}


@pytest.mark.parametrize("name", ["accumulation", "tensor 2", "tensor 2, plain kernels and adapters"])
def test_ranks_have_shards_and_redistribute_nothing(bench: Bench, name: str) -> None:
    shards = weights_of(name)
    if "tensor" in name:
        shards = {weight: shard_of(shape, weight) for weight, shape in shards.items()}
    shapes = bench(name).found["shapes"]
    assert {weight: shape for weight, shape in shapes.items() if not weight.startswith("accu_grads.")} == shards
    assert names_of(bench(name)) == {"AllReduce"}


def test_each_gradient_is_summed_once(bench: Bench) -> None:
    """Counts sums over the data-parallel ranks, or over all ranks where tensor parallelism does not shard the
    parameter."""
    calls = (each for each in bench("tensor 2").collectives if len(each.ranks) >= 4)
    sums = Counter(each.bytes for each in calls)
    gradients = Counter(4 * math.prod(shape) for shape in bench("tensor 2").found["shapes"].values())
    assert not gradients - sums
    losses = 2  # of the model, and of its module
    assert (sums - gradients).total() == losses + 1  # and what the host reads


def test_fused_operators_and_their_gradients_stay(bench: Bench) -> None:
    operators, blocks = Counter(bench("tensor 2").found["operators"]), 2  # of the layer and of the module
    per_block = {"RotaryPositionEmbedding": 2, "FlashAttentionScore": 1, "Swiglu": 1}
    for operator, count in per_block.items():
        assert operators[operator] == operators[f"{operator}Grad"] == count * blocks, operator
    # Before the head, and in the module three more; that of the stream is computed once for head and module.
    assert operators["RmsNorm"] + operators["AddRmsNorm"] == operators["RmsNormGrad"] - 1 == 4 * blocks + 4
    assert not set(per_block) & set(bench("tensor 2, plain kernels and adapters").found["operators"])


def test_ranks_that_share_optimizer_state_have_a_shard_of_every_shard(bench: Bench) -> None:
    found, weights = bench("tensor 2, hsdp"), weights_of("tensor 2, hsdp")
    shapes = found.found["shapes"]
    for weight, shape in weights.items():
        first, *rest = shard_of(shape, weight)
        # What tensor parallelism does not shard is on all ranks, so all of them share its state.
        sharing = RANKS if [first, *rest] == shape else DEGREES["tensor 2"]["data_parallel"]
        assert shapes[weight] == [first // sharing, *rest], weight
    calls = Counter(each.name for each in found.collectives)
    assert calls["AllGather"] == calls["ReduceScatter"] == len(weights)


def test_gradients_of_micro_batches_are_summed_before_ranks_sum_them(bench: Bench) -> None:
    """Where ranks share them: test_semi_auto_settings.py."""
    whole = bench("accumulation")
    shapes = whole.found["shapes"]
    weights = {name: shape for name, shape in shapes.items() if not name.startswith("accu_grads.")}
    assert {f"accu_grads.{weight}" for weight in weights} < set(shapes)
    numbers = sum(map(math.prod, weights.values()))
    summed = sum(each.bytes for each in whole.collectives if each.name == "AllReduce")
    assert summed == pytest.approx(4 * numbers, abs=SMALL_NUMBERS_BYTES)  # and some numbers beside them


def test_tensor_parallelism_communicates_in_the_default_of_an_ascend(bench: Bench) -> None:
    assert "bfloat16" in {each.dtype for each in bench("tensor 2").collectives}


def test_stages_share_out_the_layers_and_hand_micro_batches_on(bench: Bench) -> None:
    first, last = bench("pipeline 2, first stage"), bench("pipeline 2, hsdp, last stage")
    names = [{name for name in each.found["shapes"] if "accu" not in name} for each in (first, last)]
    assert names[0] | names[1] == set(weights_of("pipeline 2, first stage")) and not names[0] & names[1]
    assert {name.split(".")[2] for name in names[0] if ".layers." in name} == {"0"} and "lm_head.weight" in names[1]
    assert names_of(first) == {"AllReduce", "Send", "Receive"}, "nothing is redistributed"
    for found, other in ((first, 4), (last, 3)):
        moves = [each for each in found.collectives if each.name in ("Send", "Receive")]
        assert moves and all(other in each.ranks for each in moves)
    sent, received = ([each.bytes for each in first.collectives if each.name == name] for name in ("Send", "Receive"))
    assert len(sent) == len(received) == DEGREES["pipeline 2"]["micro_batch_num"]
    assert sent == [each.bytes for each in last.collectives if each.name == "Receive"]
    assert received == [each.bytes for each in last.collectives if each.name == "Send"]


@pytest.mark.parametrize("name", [name for name in CASES if "pipeline" in name])
def test_the_plan_estimates_the_memory_of_a_stage(bench: Bench, name: str) -> None:
    case, ranks, rank, _ = CASES[name]
    planned = planned_bytes(parse_config(name, case.config), World(rank, ranks, 0, 1))
    assert planned == pytest.approx(bench(name).peak_bytes, rel=PLANNED_MEMORY)
