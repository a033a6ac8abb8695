"""What ranks of test_pipeline.py train, and what one process trains to compare: the same rows in all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from step_cases import CLIP, EXPERTS, SCALE, part_of, rows_of  # noqa: E402
from tiny_trainer import config_of  # noqa: E402

from trainer.config import Config  # noqa: E402
from trainer.models.generate import Generator, Sampling  # noqa: E402
from trainer.models.spec.init import initial_value  # noqa: E402
from trainer.models.spec.shapes import parameter_specs  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.parallel.host_group import CpuGroup  # noqa: E402
from trainer.parallel.world import SINGLE_PROCESS, World  # noqa: E402
from trainer.run.prepare import local_shard_specs  # noqa: E402
from trainer.run.session import open_training  # noqa: E402
from trainer.step.evaluate import evaluate  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402

LORA = {"pet_type": "lora", "lora_rank": 2, "target_modules": ".*layers.[0-2].*(q|down)_proj", "lora_dropout": 0.1}
"""The last chunk of the second stage has none."""
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
BIASED = {"balance_via_topk_bias": True, "topk_bias_update_rate": 0.01, "z_loss_factor": 0.01}
OF_STEP = {"moe_router_load_balancing_type": "gbs_aux_loss"}
LATENT = {"architectures": "LlamaForCausalLM", "multi_latent_attention": True, "q_lora_rank": 10, "kv_lora_rank": 6,
          "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}  # fmt: skip
SGD = {"type": "SGD", "momentum": 0.9}  # AdamW's first updates are of one size, also where a gradient is but rounding
RECOMPUTED = {"recompute_config": {"recompute": True}}
TENSOR, ROWS = {"model_parallel": 2}, {"model_parallel": 2, "use_seq_parallel": True}
BY_GROUP = {"runner_wrapper": CLIP | {"clip_by_group": True, "local_norm": True}}
SCALED = {"runner_wrapper": CLIP | SCALE}
TWO_LAYERS = {"num_layers": 2, "tie_word_embeddings": True}
STEPS, LONG = 2, 8
CASES: dict[str, dict[str, Any]] = {
    # ranks (4 by default), steps, stages, other degrees than data_parallel, chunks of a stage, micro-batches, and what
    # of the configuration differs
    "dense": {"ranks": 2, "steps": LONG, "stages": 2, "micro_batches": 2, "model": TWO_LAYERS, "sections": SCALED},
    "interleaved": {"ranks": 2, "steps": LONG, "stages": 2, "chunks": 2, "micro_batches": 2,
                    "model": {"offset": [[0, 1], [-1, 0]]}, "sections": BY_GROUP},  # an empty chunk
    "frozen, load of the step, mode 1": {
        "stages": 4, "micro_batches": 4, "model": {"moe_config": EXPERTS | OF_STEP},
        "sections": {"freeze": {"include": ["embeddings", "layers: 0-1"]}, "context": {"mode": 1}},
    },
    "tensor, tied": {"stages": 2, "degrees": TENSOR, "micro_batches": 2,
                     "model": TWO_LAYERS | {"num_layers": 3, "offset": [1, 0], "mtp_depth": 1} | DROPOUT,
                     "sections": {"freeze": {"include": ["layers: 1"]}, "runner_wrapper": CLIP | {"local_norm": True}}},
    "tensor with rows, adapters": {"stages": 2, "chunks": 2, "degrees": ROWS, "micro_batches": 2,
                                   "model": {"pet_config": LORA, "use_qk_norm": True} | DROPOUT,
                                   "sections": {"seed": 6}},  # with 5 a key is close to zero, where its norm is steep
    "tensor with rows, latent attention": {"stages": 2, "degrees": ROWS, "micro_batches": 2,
                                           "model": LATENT | DROPOUT | {"num_layers": 2}, "sections": RECOMPUTED},
    "experts of context ranks": {
        "stages": 2, "chunks": 2, "degrees": {"expert_parallel": 2, "context_parallel": 2}, "micro_batches": 3,
        "model": {"moe_config": EXPERTS | BIASED, "mtp_depth": 1, "tie_word_embeddings": True,
                  "attention_dropout": 0.1, "sliding_window": 5},
        "sections": RECOMPUTED | SCALED,
    },
    "tensor and data": {"ranks": 8, "steps": LONG, "stages": 2, "degrees": ROWS, "micro_batches": 2,
                        "model": TWO_LAYERS, "sections": SCALED},
}  # fmt: skip
SAME = {"tensor and data": "dense"}
"""Cases of which one process trains the same."""
PREDICTING = [name for name, case in CASES.items() if "degrees" not in case]


def config_of_case(name: str, **sections: Any) -> Config:
    case = CASES[name]
    model = {"num_layers": 4, "pp_interleave_num": case.get("chunks", 1), **case.get("model", {})}
    parallel = {"pipeline_stage": case["stages"], "micro_batch_num": case["micro_batches"]} | case.get("degrees", {})
    interleaves = {"pipeline_config": {"pipeline_interleave": "chunks" in case}}
    given = {"optimizer": SGD, "runner_wrapper": CLIP, "parallel_config": parallel, "parallel": interleaves, "seed": 5}
    given |= {"runner_config": {"batch_size": 4}} | case.get("sections", {}) | sections
    return config_of(model=model, **given)


def weights_of(config: Config) -> dict[str, np.ndarray]:
    """Initial weights, with values of their own for norms, biases and the adapters' B, which begin as ones and zeros.
    """
    draw, found = np.random.default_rng(4), {}
    for name, spec in parameter_specs(config.decoder).items():
        found[name] = initial_value(spec, config.decoder, config.seed)
        if spec.init in ("ones", "zeros", "lora_b"):
            found[name] = found[name] + draw.normal(0, 0.2, spec.shape).astype(np.float32)
    return found


def world_of_group(group: ProcessGroup | None) -> World:
    """Returns the place of a rank in the job of a group; without one that of a process alone."""
    if group is None:
        return SINGLE_PROCESS
    return World(group.rank, group.size, group.rank, group.size)


def shards_of(weights: dict[str, np.ndarray], config: Config, world: World) -> dict[str, np.ndarray]:
    """Returns a rank's shards of whole weights."""
    parts = local_shard_specs(config, world)
    if parts is None:
        return weights
    return {name: np.ascontiguousarray(part.shard.of(weights[name])) for name, part in parts.items()}


def trained(
    group: CpuGroup | None, name: str, steps: int, mutate: Callable[[TrainStep], None] = lambda step: None
) -> dict[str, Any]:
    """Numbers of some steps, and the weights of this rank after them; without a group those of one process alone."""
    world, config = world_of_group(group), config_of_case(name, use_parallel=group is not None)
    parts = local_shard_specs(config, world)
    step = open_training(config, lambda update: 0.1, shards_of(weights_of(config), config, world), world, "CPU", group)
    mutate(step)
    communicator, size = step.communicator, 1
    if group is not None:
        size = communicator.layout.degrees.data_parallel
    found: dict[str, Any] = {"bubble": []}
    for number in range(steps):
        rows = [rows_of(number, micro_batch) for micro_batch in range(CASES[name]["micro_batches"])]
        result = step([part_of(one, communicator.data_rank, size) for one in rows])
        numbers = {"loss": result.loss, "norm": result.global_norm, "tokens": result.tokens, **result.losses}
        numbers |= {f"norm of {each}": norm for each, norm in (result.local_norms or {}).items()}
        if result.routing is not None:
            numbers["requested"] = result.routing.requested
        for key, value in numbers.items():
            found.setdefault(key, []).append(value)
        found["bubble"].append(result.bubble_share)
    batches, pipeline = [part_of(rows_of(steps, 0), communicator.data_rank, size)] * 2, step.pipeline
    model = step.model if pipeline is None else pipeline.evaluate
    evaluated = evaluate(model, step.build_inputs, batches, lambda: False, communicator)
    found |= {"eval loss": evaluated.loss, "eval tokens": evaluated.tokens}
    if name in PREDICTING:
        stages = () if pipeline is None else (pipeline.generation_chunks(), pipeline.share_logits)
        generator = Generator(step.model, step.build_inputs, [], *stages, native=True)
        texts = list(generator.stream([[1, 2, 3], [4]], [4, 6], Sampling()))
        found["new tokens"] = [-1 if token is None else token for tokens in texts for token in tokens]
    found["weights"] = {}
    for key, parameter in step.model.parameters_by_name.items():
        found["weights"][key] = () if parts is None else parts[key].shard.slices, parameter.asnumpy().copy()
    return found


def all_trained(group: CpuGroup, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Trains these cases, and each with each of its `MUTATIONS`."""
    found = {}
    for name in names:
        found[name] = trained(group, name, steps_of(name))
        for mistake, mutate in MUTATIONS.get(name, {}).items():
            found[mistake] = trained(group, name, 1, mutate)
    return found


def steps_of(name: str) -> int:
    return CASES[name].get("steps", STEPS)


def _forgets_sum(step: TrainStep, kind: str) -> None:
    for groups in step.reducer.groups:
        groups.pop(kind, None)


def _counts_norm_twice(step: TrainStep) -> None:
    """Counts twice in the norm what two stages or two ranks of a stage have."""
    step.norm_contribution = step.norm_contribution._replace(factors=np.ones_like(step.norm_contribution.factors))


def _forgets_routers(step: TrainStep) -> None:
    """Leaves out the router losses of the stages before the last one."""
    for chunk in step.pipeline.stage.chunks:
        if not chunk.part.is_last:
            chunk.model.aux_factor = chunk.model.z_factor = 0.0


MUTATIONS: dict[str, dict[str, Callable[[TrainStep], None]]] = {
    "tensor, tied": {"no tied sum": partial(_forgets_sum, kind="embedding"), "norm counted twice": _counts_norm_twice},
    "tensor with rows, latent attention": {"no tensor sum": partial(_forgets_sum, kind="tp")},
    "experts of context ranks": {"no losses of routers": _forgets_routers},
}
