"""What MindSpore's own parallel pass makes of the network for a rank of 8: its shard of each weight, and its
collectives. Nothing may be redistributed: every operator is sharded like its inputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fork_server import FORKED, ensure_server

from trainer.config import parse_config
from trainer.models.shapes import all_shapes

pytestmark = pytest.mark.slow

RANKS, LAYERS = 8, 2
ONE = {"num_layers": 1}  # where no case needs the border between two layers: MindSpore's pass takes seconds a layer
SIZES = {
    "num_layers": LAYERS, "hidden_size": 32, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 48,
    "vocab_size": 32, "seq_length": 8, "qkv_has_bias": True,
}  # fmt: skip
FUSED = {
    "use_fused_rope": True, "use_flash_attention": True, "use_fused_swiglu": True, "compute_dtype": "bfloat16",
    "head_dim": 16,
}  # fmt: skip
GLM = {"rope_interleave": True, "rotary_pct": 0.5, "post_self_attn_layernorm": True, "post_mlp_layernorm": True,
       "mlp_down_has_bias": True}  # fmt: skip
TENSOR = {"data_parallel": 4, "model_parallel": 2}
PIPELINE = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2}
SHARED = {
    "parallel_mode": 1, "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"parallel_optimizer_threshold": 0},
}  # fmt: skip
TWO = {"batch_size": 2, "gradient_accumulation_steps": 2}
REDISTRIBUTING = ("AllGather", "AlltoAll", "AllToAll", "ReduceScatter", "Split")


def case(rank: int = 0, sizes: dict | None = None, **top: Any) -> dict[str, Any]:
    base = {"use_parallel": True, "parallel": {"parallel_mode": 1}, "runner_config": {"batch_size": 2}}
    return {"rank": rank, "ranks": RANKS, "config": base | {"model": {"model_config": SIZES | (sizes or {})}} | top}


CASES = {
    "data": case(sizes=ONE, parallel={"parallel_mode": 1, "full_batch": False}),
    "tensor": case(parallel_config=TENSOR, sizes=GLM | ONE),
    "adapters": case(parallel_config=TENSOR, sizes=ONE | {"pet_config": {"target_modules": ".*(q|o|up|down)_proj"}}),
    "fused": case(parallel_config=TENSOR, sizes=FUSED | {"use_qk_norm": True, "tie_word_embeddings": True}),
    "mtp": case(parallel_config=TENSOR, sizes=FUSED | ONE | {"mtp_depth": 1}, runner_config={"batch_size": 1}),
    "micro-batches": case(sizes=ONE, runner_config=TWO),
    "shared state": case(sizes=ONE, parallel=SHARED, parallel_config=TENSOR, runner_config=TWO),
    "first stage": case(parallel_config=PIPELINE),
    "last stage": case(4, parallel_config=PIPELINE),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Operators and parameters of each case."""
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "cases.json").write_text(json.dumps(CASES))
    here = Path(__file__).resolve()
    ensure_server()
    paths = os.environ | {"PYTHONPATH": str(here.parents[2])}
    worker = here.with_name("sharded_graph_worker.py")
    command = [sys.executable, FORKED, worker, folder / "cases.json", folder / "found.json"]
    done = subprocess.run(command, env=paths, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[:4000]
    return json.loads((folder / "found.json").read_text())


def weights_of(name: str) -> dict[str, list[int]]:
    config = parse_config("semi", json.dumps(CASES[name]["config"]))
    return {weight: list(shape) for weight, shape in all_shapes(config.decoder).items()}


def without(operators: dict[str, int], *kinds: str) -> bool:
    return not set(kinds) & set(operators)


def test_data_parallel_ranks_have_whole_weights_and_sum_each_gradient_once(found: dict[str, Any]) -> None:
    operators, weights = found["data"]["operators"], weights_of("data")
    assert found["data"]["parameters"] == weights
    assert operators["AllReduce"] == len(weights) + 1  # and the loss
    assert without(operators, *REDISTRIBUTING)


def sharded_like_megatron(shape: list[int], name: str) -> list[int]:
    """Of two tensor-parallel ranks."""
    rows = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "q_proj.bias",
            "k_proj.bias", "v_proj.bias", "embed_tokens.weight", "lm_head.weight")  # fmt: skip
    # Of the two matrices of an adapter B is sharded along the outputs like its projection, A along the inputs.
    rows += ("q_proj.lora_B.weight", "up_proj.lora_B.weight")
    columns = ("o_proj.weight", "down_proj.weight", "o_proj.lora_A.weight", "down_proj.lora_A.weight")
    if name.endswith(rows):
        return [shape[0] // 2, *shape[1:]]
    return [shape[0], shape[1] // 2] if name.endswith(columns) else shape


@pytest.mark.parametrize("name", ["tensor", "adapters", "fused", "mtp"])
def test_tensor_parallel_ranks_have_shards_and_redistribute_nothing(found: dict[str, Any], name: str) -> None:
    expected = {weight: sharded_like_megatron(shape, weight) for weight, shape in weights_of(name).items()}
    parameters = found[name]["parameters"]
    assert {weight: shape for weight, shape in parameters.items() if not weight.startswith("accu_")} == expected
    assert without(found[name]["operators"], *REDISTRIBUTING)


def test_fused_operators_and_their_gradients_stay(found: dict[str, Any]) -> None:
    operators = found["fused"]["operators"]
    per_layer = {"RotaryPositionEmbedding": 2, "FlashAttentionScore": 1, "Swiglu": 1}
    for operator, count in per_layer.items():
        assert operators[operator] == operators[f"{operator}Grad"] == count * LAYERS, operator
    assert operators["RmsNorm"] == operators["RmsNormGrad"] == 4 * LAYERS + 1
    assert without(found["tensor"]["operators"], *per_layer)


def test_gradients_of_micro_batches_are_added_up_here_and_summed_over_ranks_once(found: dict[str, Any]) -> None:
    result, weights = found["micro-batches"], weights_of("micro-batches")
    assert {f"accu_grads.{weight}" for weight in weights} < set(result["parameters"])
    assert result["operators"]["AssignAdd"] == 2 * len(weights)
    # Each gradient once, the loss of each of the two micro-batches, and the 1 that a gradient starts from.
    assert result["operators"]["AllReduce"] == len(weights) + 3


def test_ranks_that_share_optimizer_state_have_a_shard_of_every_shard(found: dict[str, Any]) -> None:
    result, weights = found["shared state"], weights_of("shared state")
    for weight, shape in weights.items():
        first, *rest = sharded_like_megatron(shape, weight)
        # What tensor parallelism does not shard is on all ranks, so all of them share its state.
        sharing = RANKS if [first, *rest] == shape else TENSOR["data_parallel"]
        assert result["parameters"][weight] == [first // sharing, *rest], weight
    assert result["operators"]["AllGather"] == result["operators"]["ReduceScatter"] == len(weights)


def test_stages_share_out_the_layers_and_hand_micro_batches_on(found: dict[str, Any]) -> None:
    first, last = ({n for n in found[f"{which} stage"]["parameters"] if "accu" not in n} for which in ("first", "last"))
    assert first | last == set(weights_of("first stage")) and not first & last
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0"} and "lm_head.weight" in last
    for which in ("first stage", "last stage"):
        operators = found[which]["operators"]
        assert operators["Send"] == operators["Receive"] == PIPELINE["micro_batch_num"]
        assert without(operators, *REDISTRIBUTING)
