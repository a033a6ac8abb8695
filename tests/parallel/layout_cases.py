"""What a rank of test_layouts.py trains: a tiny model of each kind, divided in each way that there is."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from pipeline_cases import LATENT, shards_of, weights_of, world_of_group  # noqa: E402
from tiny_trainer import TOKENS, config_of, join, make_batch  # noqa: E402

from trainer.config import Config  # noqa: E402
from trainer.data.batches.batch import Batch, WeightedBatch  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.run.session import open_training  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402

STEPS, ROWS = 8, 4  # sequences of a step, of all ranks together
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "aux_loss_factor": 0.3}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"tie_word_embeddings": True},
    "Mixtral": {"moe_config": EXPERTS | {"norm_topk_prob": False}},
    "DeepSeek": {  # latent attention, a dense layer before that with experts, and multi-token prediction
        "multi_latent_attention": True, "q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2, "v_head_dim": 4, "mtp_depth": 1, "moe_config": EXPERTS | {
            "shared_expert_num": 1, "use_gating_sigmoid": True, "balance_via_topk_bias": True,
            "topk_bias_update_rate": 0.01, "first_k_dense_replace": 1}},
    "MuonClip": {  # heads whose queries and keys are scaled down in each step
        **LATENT, "mtp_depth": 1},
    "averages": {},  # the weights of its result are moving averages
    "loss terms": {"label_smoothing": 0.2, "z_loss_weight": 0.01, "final_logit_softcapping": 3.0},
    "noise": {"label_smoothing": 0.2, "z_loss_weight": 0.01, "neftune_noise_alpha": 3.0},
}  # fmt: skip
SOME = {
    "averages": ("level 2", "level 3", "tensor with rows", "pipeline"),
    "loss terms": ("level 2", "pipeline", "tensor, pipeline and data"),
    "noise": ("tensor with rows", "context"),  # other micro-batches and data-parallel ranks draw other noise
}
"""The layouts of models that do not have all."""
WEIGHTED = ("loss terms", "noise")
"""Models whose records have weights."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "MuonClip": {"type": "Muon", "ns_steps": 2, "qk_clip_threshold": 0.02},
    "averages": {"type": "PmaAdamW", "fused_num": 2, "interleave_step": 2, "fused_algo": "sma", "ema_decay": 0.6},
}
CLIPPED = {"use_clip_grad": True, "max_grad_norm": 1.0}


class Layout(NamedTuple):
    """How ranks divide a model.

    Attributes:
        degrees: Of `parallel_config`.
        level: Of `enable_parallel_optimizer`; "": the ranks share nothing.
        micro_batches: Of a rank in each step.
    """

    ranks: int
    degrees: dict[str, Any]
    level: str = ""
    micro_batches: int = 1

    @property
    def data(self) -> int:
        return self.degrees.get("data_parallel", 1)

    @property
    def layers(self) -> int:
        return self.degrees.get("pipeline_stage", 1)


LAYOUTS = {
    "data": Layout(2, {"data_parallel": 2}),
    "level 2": Layout(2, {"data_parallel": 2}, "level2", micro_batches=2),
    "level 3": Layout(2, {"data_parallel": 2}, "level3", micro_batches=2),
    "tensor with rows": Layout(2, {"model_parallel": 2, "use_seq_parallel": True}),
    "context": Layout(2, {"context_parallel": 2}),
    "experts": Layout(2, {"data_parallel": 2, "expert_parallel": 2}),
    "pipeline": Layout(2, {"pipeline_stage": 2, "micro_batch_num": 2}, micro_batches=2),
    "experts and data": Layout(4, {"data_parallel": 4, "expert_parallel": 2}),
    "tensor and experts": Layout(4, {"model_parallel": 2, "data_parallel": 2, "expert_parallel": 4}),
    "context and tensor": Layout(4, {"context_parallel": 2, "model_parallel": 2}),
    "tensor, pipeline and data": Layout(8, {
        "data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2}, micro_batches=2),
}  # fmt: skip


class Trained(NamedTuple):
    """What a training has computed; whole weights by name, as all ranks together would save them."""

    losses: list[float]  # of each step, with the other losses that it reports
    norms: list[float]
    weights: dict[str, np.ndarray]
    logits: np.ndarray | None = None  # the largest of each step, layer and head


def has_layout(model: str, layout: str) -> bool:
    """Returns whether a model can have a layout: only experts can be sharded over expert-parallel ranks."""
    if model in SOME:
        return layout in SOME[model]
    return "expert_parallel" not in LAYOUTS[layout].degrees or "moe_config" in MODELS[model]


def config_of_case(model: str, layout: Layout, alone: bool) -> Config:
    # AdamW divides a gradient by its size: one that is nothing but rounding would move a weight as far as any other.
    sections: dict[str, Any] = {"optimizer": {"eps": 1e-5} | OPTIMIZERS.get(model, {}), "runner_wrapper": CLIPPED}
    if not alone:
        level = {"parallel_optimizer_threshold": 0, "optimizer_level": layout.level or "level1"}
        sections |= {
            "use_parallel": True, "parallel_config": layout.degrees,
            "parallel": {"enable_parallel_optimizer": bool(layout.level), "parallel_optimizer_config": level},
        }  # fmt: skip
    if model in WEIGHTED:
        sections["train_dataset"] = {"data_loader": {"type": "JsonlDataset", "columns": {"weight": "weight"}}}
    return config_of(model=MODELS[model] | {"num_layers": layout.layers}, seed=5, **sections)


def trained(group: ProcessGroup | None, model: str, layout: Layout) -> Trained:
    """Trains with the ranks of a group; without one with one rank, with the sequences of all in one micro-batch."""
    config = config_of_case(model, layout, alone=group is None)
    world = world_of_group(group)
    weights = shards_of(weights_of(config), config, world)
    step, results = open_training(config, lambda update: 0.004, weights, world, "CPU", group), []
    data, micro_batches = (1, 1) if group is None else (layout.data, layout.micro_batches)
    size = ROWS // data // micro_batches
    first = step.communicator.data_rank * micro_batches
    for number in range(STEPS):
        # Each has labels for other numbers of its tokens.
        rows = [make_batch(10 * number + row, TOKENS - 3 * row) for row in range(ROWS)]
        parts_of_step: list[Batch | WeightedBatch] = [
            join(rows[place * size : (place + 1) * size], size) for place in range(ROWS // size)
        ]
        if model in WEIGHTED:
            parts_of_step = [weighted(batch) for batch in parts_of_step]
        results.append(step(parts_of_step[first : first + micro_batches]))
    weights_used: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if step.averages is not None:
        weights_used = step.averages.in_use(step.model.compute_weights.refresh)
    with weights_used:
        weights = saved(step)
    losses = [loss for one in results for loss in (one.loss, *one.losses.values())]
    return Trained(losses, [one.global_norm for one in results], weights)


def weighted(batch: Batch) -> WeightedBatch:
    """Gives each document of a batch a weight from 0 to 1.2 that its second token decides."""
    documents = batch.input_ids[:, 1], batch.input_ids[:, 8]
    weights_BT = np.where(batch.segment_ids == 0, documents[0][:, None], documents[1][:, None]) % 5 * np.float32(0.3)
    return WeightedBatch(*batch, weights_BT.astype(np.float32))


def saved(step: TrainStep) -> dict[str, np.ndarray]:
    """Returns the whole weights, each number from a rank that writes it to a checkpoint."""
    found: dict[str, np.ndarray] = {}
    own = {name: (each.spec, each.array.copy()) for name, each in step.state_dict_shard().weights.items()}
    for of_rank in map(pickle.loads, step.communicator.gather_bytes(pickle.dumps(own))):
        for name, (part, array) in of_rank.items():
            whole = found.setdefault(name, np.full(part.global_shape, np.nan, np.float32)).reshape(-1)
            for there, here, count in part.runs():
                whole[there : there + count] = array.reshape(-1)[here : here + count]
    return found


def all_trained(group: ProcessGroup, cases: Sequence[tuple[str, str]]) -> list[Trained]:
    """Trains each of these models and layouts."""
    return [trained(group, model, LAYOUTS[layout]) for model, layout in cases]


def all_alone(group: ProcessGroup, cases: Sequence[tuple[str, str]]) -> list[Trained]:
    """Trains each of these models with one rank; layouts of equally many layers are one training."""
    found: dict[tuple[str, int], Trained] = {}
    keys = [(model, LAYOUTS[name].layers) for model, name in cases]
    for key, (model, name) in zip(keys, cases, strict=True):
        found[key] = found.get(key) or trained(None, model, LAYOUTS[name])
    return [found[key] for key in keys]
