"""What ranks of test_pipeline.py train, and what one process trains to compare: the same rows in all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from step_cases import ADAMW, CLIP, EXPERTS, part_of, rows_of  # noqa: E402
from tiny_trainer import config_of  # noqa: E402

from trainer.config import Config  # noqa: E402
from trainer.config.stages import stage_layers  # noqa: E402
from trainer.models.generate import Generator, Sampling  # noqa: E402
from trainer.ops.kernel_set import load_kernels  # noqa: E402
from trainer.ops.precision import resolve_precision  # noqa: E402
from trainer.ops.select import select_kernels  # noqa: E402
from trainer.optim.freeze import trained_shapes  # noqa: E402
from trainer.optim.groups import parameter_groups  # noqa: E402
from trainer.optim.optimizer import build_optimizer  # noqa: E402
from trainer.parallel.communicator import SingleProcess, model_parallel  # noqa: E402
from trainer.parallel.host_group import HostGroup  # noqa: E402
from trainer.parallel.mesh import Degrees  # noqa: E402
from trainer.parallel.tensor import ModelShard  # noqa: E402
from trainer.run.session import build_model  # noqa: E402
from trainer.step.evaluate import evaluate  # noqa: E402
from trainer.step.pipeline import build_pipeline  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402

LORA = {"pet_type": "lora", "lora_rank": 2, "target_modules": ".*q_proj|.*down_proj"}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
BIASED = {"balance_via_topk_bias": True, "topk_bias_update_rate": 0.01, "z_loss_factor": 0.01}
OF_STEP = {"moe_router_load_balancing_type": "gbs_aux_loss"}
RECOMPUTED = {"recompute_config": {"recompute": True}}
CASES: dict[str, dict[str, Any]] = {
    # stages, chunks of a stage, micro-batches, and what of the configuration differs
    "dense": {"stages": 4, "micro_batches": 6, "compiled": True, "model": DROPOUT},
    "uneven": {"stages": 2, "chunks": 2, "micro_batches": 5, "model": {"offset": [[0, 2], [-1, 0]]},  # an empty chunk
               "sections": {"runner_wrapper": CLIP | {"clip_by_group": True, "local_norm": True}}},
    "tied": {"stages": 4, "micro_batches": 2, "model": {"tie_word_embeddings": True},
             "sections": {"freeze": {"include": ["layers: 1"]}}},
    "experts": {"stages": 4, "micro_batches": 3, "model": {"moe_config": EXPERTS | BIASED, "mtp_depth": 1},
                "sections": RECOMPUTED},
    "tied experts": {"stages": 2, "chunks": 2, "micro_batches": 2,
                     "model": {"moe_config": EXPERTS, "mtp_depth": 1, "tie_word_embeddings": True}},
    "load of the step": {"stages": 4, "micro_batches": 2, "model": {"moe_config": EXPERTS | OF_STEP}},
    "lora": {"stages": 2, "micro_batches": 2, "model": {"pet_config": LORA}},
    "frozen": {"stages": 4, "micro_batches": 2, "sections": {"freeze": {"include": ["embeddings", "layers: 0-1"]}}},
}  # fmt: skip


def config_of_case(case: dict[str, Any]) -> Config:
    model = {"num_layers": 5, "pp_interleave_num": case.get("chunks", 1), **case.get("model", {})}
    sections = {"optimizer": ADAMW, "runner_wrapper": CLIP} | case.get("sections", {})
    parallel = {"pipeline_stage": case["stages"], "micro_batch_num": case.get("micro_batches", 4)}
    sections["context"] = {"mode": 0 if case.get("compiled") else 1}
    return config_of(model=model, use_parallel=True, parallel_config=parallel, seed=5, **sections)


def step_of(config: Config, world: HostGroup | None) -> TrainStep:
    """A training step of a rank; world None: of one process alone."""
    settings, shapes = config.decoder, trained_shapes(config)
    kernels = load_kernels(select_kernels(settings, "CPU"), resolve_precision(settings, None, "CPU"))
    communicator, pipeline, shard = SingleProcess(), None, None
    if world is not None:
        stages = config.parallel_config.pipeline_stage
        degrees = Degrees(pipeline_stage=stages, data_parallel=world.size // stages)
        communicator = model_parallel(world, settings, degrees, stage_layers=stage_layers(config))
        shard = ModelShard(communicator.layout, communicator.where)
    model, build_inputs = build_model(config, kernels, shard=shard)
    of_rule = parameter_groups(shapes, config.optimizer.weight_decay, config.optimizer.type)
    trained = {name: model.parameters_by_name[name] for name in shapes if name in model.parameters_by_name}
    optimizer = build_optimizer(trained, of_rule, config.optimizer, compiled=False)
    if world is not None:
        pipeline = build_pipeline(config, model, communicator.groups.pp)
    return TrainStep(
        model, optimizer, lambda update: 0.01, build_inputs, config.runner_wrapper, communicator=communicator,
        pipeline=pipeline,
    )  # fmt: skip


def trained(
    world: HostGroup | None, name: str, steps: int, mutate: Callable[[TrainStep], None] = lambda step: None
) -> dict[str, Any]:
    """Numbers of some steps, and the weights of this rank after them."""
    case = CASES[name]
    step, size = step_of(config_of_case(case), world), 1
    mutate(step)
    if world is not None:
        size = world.size // case["stages"]
    found: dict[str, Any] = {"bubble": []}
    for number in range(steps):
        rows = [rows_of(number, micro_batch) for micro_batch in range(case.get("micro_batches", 4))]
        result = step([part_of(one, step.communicator.data_rank, size) for one in rows])
        numbers = {"loss": result.loss, "norm": result.global_norm, "tokens": result.tokens, **result.losses}
        numbers |= {f"norm of {each}": norm for each, norm in (result.local_norms or {}).items()}
        if result.routing is not None:
            numbers["requested"] = result.routing.requested
        for key, value in numbers.items():
            found.setdefault(key, []).append(value)
        found["bubble"].append(result.bubble_share)
    found["weights"] = {key: each.asnumpy().copy() for key, each in step.model.parameters_by_name.items()}
    batches, pipeline = [part_of(rows_of(steps, 0), step.communicator.data_rank, size)] * 2, step.pipeline
    evaluated = evaluate(
        step.model if pipeline is None else pipeline.evaluate, step.build_inputs, batches, lambda: False,
        step.communicator,
    )  # fmt: skip
    stages = () if pipeline is None else (pipeline.generation_chunks(), pipeline.share_logits)
    generator = Generator(step.model, step.build_inputs, [], *stages)
    texts = list(generator.stream([[1, 2, 3], [4]], [4, 6], Sampling()))
    found["new tokens"] = [-1 if token is None else token for tokens in texts for token in tokens]
    return found | {"eval loss": evaluated.loss, "eval tokens": evaluated.tokens}


def all_trained(world: HostGroup, names: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Of the cases, and of those that `MUTATIONS` break."""
    found = {name: trained(world, name, steps) for name in names}
    return found | {name: trained(world, case, 1, mutate) for name, (case, mutate) in MUTATIONS.items()}


def _forgets_tied_sum(step: TrainStep) -> None:
    step.communicator.groups = step.communicator.groups._replace(embedding=None)


def _counts_norm_twice(step: TrainStep) -> None:
    """Of the matrix that two stages have."""
    step.share = step.share._replace(factors=np.ones_like(step.share.factors))


def _forgets_routers(step: TrainStep) -> None:
    """Of the stages before the last one."""
    for cell in step.pipeline.stage.cells:
        if not cell.part.is_last:
            cell.model.aux_factor = cell.model.z_factor = 0.0


MUTATIONS = {
    "no tied sum": ("tied", _forgets_tied_sum),
    "norm counted twice": ("tied", _counts_norm_twice),
    "no losses of routers": ("experts", _forgets_routers),
}
