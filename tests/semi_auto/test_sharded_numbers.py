"""The graphs that MindSpore makes for each rank, computed by a process each: together they must give the loss and the
gradients of a single rank.

The graphs come from MindSpore's own parallel pass, as for an Ascend; only their kernels and collectives are a CPU's. A
CPU has no maximum over ranks, so the vocabulary has a size that is not sharded.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor
from msrun_helpers import run_job
from numpy_kernels import distance
from tolerances import LARGEST, decoder_limits

from trainer.config import Config, parse_config
from trainer.data import Batch
from trainer.parallel.world import SINGLE_PROCESS, world_of
from trainer.semi_auto.step import graph_mode
from trainer.semi_auto.training import graph_batch, open_semi_auto_training

pytestmark = pytest.mark.slow

TOKENS, VOCABULARY = 8, 33
MODEL = {
    "num_layers": 1, "hidden_size": 32, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 48,
    "vocab_size": VOCABULARY, "seq_length": TOKENS, "qkv_has_bias": True,
}  # fmt: skip
# Every rank compiles its graph, so the larger one is for two ranks.
CASES: dict[str, dict[str, Any]] = {
    "one batch": {
        "parallel_config": {"model_parallel": 2}, "runner_config": {"batch_size": 4},
        "recompute_config": {"recompute": True},
        "model": {"model_config": MODEL | {
            "architectures": "LlamaForCausalLM", "multi_latent_attention": True, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
            "mtp_depth": 1, "tie_word_embeddings": True,
        }},
    },
    # All rows on every rank: of its own ones MindSpore makes micro-batches by an AllGather, which a CPU's groups lack.
    "micro-batches": {
        "parallel_config": {"data_parallel": 2, "model_parallel": 2},
        "runner_config": {"batch_size": 2, "gradient_accumulation_steps": 2},
        "model": {"model_config": MODEL | {
            "use_qk_norm": True, "qk_norm_after_rotary": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
            "logits_scaling": 0.4, "layernorm_zero_centered_gamma": True, "hidden_act": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.8,
        }},
    },
}
RANKS = {case: math.prod(changes["parallel_config"].values()) for case, changes in CASES.items()}


def config_of(case: str, **changes: Any) -> dict[str, Any]:
    return {"use_parallel": True, "parallel": {"parallel_mode": 1}} | CASES[case] | changes


def batch_of(rows: int) -> Batch:
    random = np.random.default_rng(rows)
    ids = random.integers(0, VOCABULARY, (rows, TOKENS + 1)).astype(np.int32)
    segments, positions = np.zeros((rows, TOKENS), np.int32), np.tile(np.arange(TOKENS, dtype=np.int32), (rows, 1))
    segments[1, 3:], positions[1, 3:] = 1, np.arange(TOKENS - 3)
    labels = ids[:, 1:].copy()
    labels[1, 2], labels[rows - 1, 1:] = -100, -100
    return Batch(ids[:, :-1].copy(), labels, positions, segments)


def inputs_of(config: Config, ranks: int) -> dict[str, np.ndarray]:
    """Returns the inputs of the loss cell for all ranks."""
    batch = batch_of(graph_batch(config, world_of(ranks)).rows)
    share = np.full((len(batch.labels), 1), 1 / (batch.labels != -100).sum(), np.float32)
    return dict(zip(("ids", "labels", "positions", "segments", "share"), (*batch, share), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_shards_give_the_same_numbers_as_the_whole(tmp_path: Path, case: str) -> None:
    (tmp_path / "cases.json").write_text(json.dumps({case: config_of(case)}))
    inputs = inputs_of(parse_config("semi", json.dumps(config_of(case))), RANKS[case])
    np.savez(tmp_path / f"{case}.npz", **inputs)
    job = Path(__file__).with_name("sharded_graph_job.py")
    run_job(job, tmp_path, workers=RANKS[case], folder=tmp_path / "logs", limit_seconds=300)
    found = [dict(np.load(tmp_path / f"{case}-{rank}.npz")) for rank in range(RANKS[case])]
    one = {"parallel_config": {}, "runner_config": {"batch_size": len(inputs["ids"])}}
    config = parse_config("semi", json.dumps(config_of(case, **one)))
    step = open_semi_auto_training(config, lambda update: 0.0, None, SINGLE_PROCESS, "CPU")
    with graph_mode():
        loss, gradients = step.network(*map(Tensor, inputs.values()))
    limits = decoder_limits(config.decoder, rows=len(inputs["ids"]))
    of_squares = min(2 * limits.gradients, LARGEST)  # a square has twice the relative error
    assert all(distance(each["loss"], loss.asnumpy()) < limits.loss for each in found)
    for weight, gradient in zip(step.cell.weights, gradients, strict=True):
        right = gradient.asnumpy()
        assert distance(found[0][f"gradient {weight.name}"], right) < limits.gradients, weight.name
        square = float((right.astype(np.float64) ** 2).sum())
        for each in found:
            assert abs(float(each[f"square {weight.name}"]) - square) <= of_squares * square, weight.name
