"""What a rank of test_pynative_degrees.py trains: one file of the newer schema with each of its degrees."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from layout_cases import Trained, saved  # noqa: E402
from pipeline_cases import shards_of, weights_of, world_of_group  # noqa: E402
from tiny_trainer import TOKENS, VOCABULARY, make_batch  # noqa: E402

from trainer.config import Override, parse_config  # noqa: E402
from trainer.config.checks.parallel import parallel_degrees, resolve_for_job  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.run.plan_file import plan_file  # noqa: E402
from trainer.run.session import open_training  # noqa: E402

HEAD = "lm_head.weight"
STEPS, ROWS = 6, 4  # sequences of a step, each a micro-batch
FILE = f"""\
context: {{device_target: CPU}}
training: {{steps: {STEPS}, local_batch_size: 1, global_batch_size: {ROWS}}}
callbacks: [{{type: MaxLogitsMonitor}}]
optimizer: {{type: AdamW, eps: 1.e-5}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 4.e-3, warmup_steps: 0}}
train_dataset:
  dataloader: {{type: SyntheticDataset, num_samples: 24}}
model:
  model_type: qwen3_moe
  architectures: Qwen3MoeForCausalLM
  vocab_size: {VOCABULARY}
  seq_length: {TOKENS}
  hidden_size: 16
  head_dim: 4
  intermediate_size: 24
  moe_intermediate_size: 12
  num_experts: 4
  num_experts_per_tok: 2
  moe_aux_loss_coeff: 0.3
  moe_router_load_balancing_type: seq_aux_loss
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  init_method_std: 0.3
  hidden_dropout: 0.0
  compute_dtype: "float32"
  params_dtype: "float32"
"""
SMALL_SHARDS = [Override("parallel.parallel_optimizer_config.parallel_optimizer_threshold", "0", "flag")]
STAGES = "pipeline_parallel: 2"
CASES: list[tuple[str, int]] = [
    ("tensor_parallel: 2, sequence_parallel: True", 2),
    ("context_parallel: 2", 2),
    ("context_parallel: 2, context_parallel_method: ulysses", 2),
    ("expert_parallel: 2", 2),
    (f"{STAGES}, pipeline_parallel_layers_per_stage: ['0-2', '3']", 2),
    (f"{STAGES}, pipeline_parallel_interleave_num: 2, pipeline_parallel_layers_per_stage: ['0,2', '1,3']", 2),
    (f"{STAGES}, pipeline_parallel_schedule: gpipe", 2),
    ("data_parallel_shard: 2, data_parallel_shard_strategy: optim", 2),
    ("data_parallel_shard: 2, data_parallel_shard_strategy: optim_grads", 2),
    ("data_parallel_shard: 2, reshard_after_forward_policy: always", 2),
    # Two ranks shard, and the other two have the same shards.
    ("data_parallel_shard: 2, data_parallel_shard_strategy: optim, expert_parallel: 2", 4),
    ("data_parallel_shard: 2, data_parallel_shard_strategy: optim_grads", 4),
    ("data_parallel_shard: 2, reshard_after_forward_policy: always, expert_parallel: 2", 4),
    ("data_parallel_shard: 1, context_parallel: 4, context_parallel_method: hybrid, ulysses_degree_in_cp: 2", 4),
]


def all_trained(group: ProcessGroup, cases: Sequence[str]) -> list[Trained]:
    """Trains with each of these values of `parallelism`."""
    return [trained(group, keys) for keys in cases]


def trained(group: ProcessGroup, keys: str) -> Trained:
    world = world_of_group(group)
    config = resolve_for_job(parse_config("a.yaml", f"{FILE}parallelism: {{{keys}}}\n", SMALL_SHARDS), world)
    plan_file(config, world, [])
    weights = shards_of(weights_of(config), config, world)
    step = open_training(config, lambda update: 0.004, weights, world, "CPU", group)
    number = ROWS // parallel_degrees(config, world).data_parallel
    if "data_parallel_shard: 2" in keys:  # a rank updates one half of every matrix
        ranges = step.optimizer.local_ranges
        assert ranges[HEAD].stop - ranges[HEAD].start == 16 * VOCABULARY // 2
    first = step.communicator.data_rank * number
    results = []
    for place in range(STEPS):
        rows = [make_batch(10 * place + row, TOKENS - 3 * row) for row in range(ROWS)]
        results.append(step(rows[first : first + number]))
    logits = np.array([one.max_logits for one in results])
    return Trained([one.loss for one in results], [one.global_norm for one in results], saved(step), logits)
