"""Opens a training in MindSpore's semi-automatic mode: device, ranks, graph and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import mindspore
import numpy as np

from trainer.config.checks.parallel import parallel_degrees
from trainer.config.device_defaults import apply_device_defaults
from trainer.optim.freeze import trained_shapes
from trainer.optim.groups import parameter_groups
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.collectives import init_process_group, make_group
from trainer.parallel.communicator import Communicator
from trainer.run.session import set_up_device
from trainer.semi_auto.evaluation import GraphEvaluator
from trainer.semi_auto.experts import GraphRouters, expert_group
from trainer.semi_auto.network import build_semi_auto
from trainer.semi_auto.rules import data_config, uses_dropout
from trainer.semi_auto.shards import ShardedParameters
from trainer.semi_auto.step import GraphBatch, GraphStep, MaskSeeds, graph_mode, local_rows

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.parallel.world import World


def open_semi_auto_training(
    config: Config,
    schedule: Callable[[int], float],
    weights: Mapping[str, np.ndarray] | None,
    world: World,
    device: str = "Ascend",
) -> GraphStep:
    """Returns the step of a training, compiled and with its initial weights.

    Args:
        schedule: Learning rate of update number `n`, from 0.
        weights: The unsharded weights of the model, which must fit; None for random weights from `seed`.
        world: This rank and the number of ranks. A single rank is not sharded, and may run on a CPU.

    Raises:
        UserError: The configuration requests a feature that this mode does not support.
        RunError: The other ranks do not answer.
    """
    set_up_device(config, device, world)
    config = apply_device_defaults(config, device)
    communicator = Communicator(init_process_group(world) if world.size > 1 else None)
    degrees = parallel_degrees(config, world)
    if degrees.expert_parallel > 1:
        make_group(*expert_group(degrees, world.rank))
    built = build_semi_auto(config, world, device)
    batch = graph_batch(config, world)
    with graph_mode():
        built.network.compile(*batch.tensors([], 0.0))
    parameters = ShardedParameters(built, config, world, communicator, _place_in_group)
    parameters.start(weights)
    shapes = trained_shapes(config)
    groups = parameter_groups(shapes, config.optimizer)
    trained = {name: parameter for name, parameter in parameters.local.items() if name in shapes}
    stages = degrees.pipeline_stage
    routers = None
    if config.decoder.moe_layers:
        sends_counts = None
        if stages > 1:
            sends_counts = world.rank % (world.size // stages) == 0
        routers = GraphRouters(config, built.loss.decoder, parameters, communicator, sends_counts)
    return GraphStep(
        built.network,
        built.step,
        build_optimizer(trained, groups, config.optimizer),
        schedule,
        config.runner_wrapper,
        batch=batch,
        parameters=parameters,
        communicator=communicator,
        model=GraphEvaluator(built.loss, config, world),
        reports_loss=world.rank // (world.size // stages) == stages - 1,
        routers=routers,
        stop_at_bad_loss=config.check_for_nan_in_loss_and_grad,
    )


def graph_batch(config: Config, world: World) -> GraphBatch:
    """Returns what makes the input of the graph for a step."""
    runner = data_config(config, world).runner_config
    micro_batches = runner.gradient_accumulation_steps
    rows = runner.batch_size * micro_batches
    seeds = None
    if uses_dropout(config.decoder):
        seeds = MaskSeeds(config.seed, micro_batches, parallel_degrees(config, world).data_parallel)
    return GraphBatch(rows, config.decoder, local_rows(config, world, rows, micro_batches), seeds)


def _place_in_group(group: str) -> tuple[int, int]:
    return mindspore.communication.get_rank(group), mindspore.communication.get_group_size(group)
