"""What every run mode sets up: the device, the kernels, the model and its inputs."""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import mindspore
import numpy as np

from trainer.checkpoint.state import load_weights
from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.parallel import parallel_degrees, shard_threshold_bytes, shards_optimizer, zero_level
from trainer.config.device_defaults import apply_device_defaults
from trainer.config.recompute import recomputed_parts
from trainer.data.batches.context import ContextShard
from trainer.device.resolve import resolve_device
from trainer.device.settings import Call, device_calls, jit_options
from trainer.device.threads import set_up_cpu_threads
from trainer.models.classifier import Classifier, ImageInputBuilder
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder
from trainer.models.spec.names import is_buffer
from trainer.ops.context import context_parallel_kernels
from trainer.ops.kernel_set import KernelSet, load_kernels
from trainer.ops.select import on_arrays, precision_of, select_kernels
from trainer.optim.freeze import frozen_names, trained_shapes
from trainer.optim.groups import ParameterGroup, parameter_groups
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.collectives import (
    all_gather_ranges,
    array_gatherer,
    gather_range,
    init_process_group,
    write_local_ranges,
)
from trainer.parallel.communicator import Communicator, check_same_values, model_parallel
from trainer.parallel.sharding import OptimizerShard
from trainer.parallel.tensor import RankModelShard, TensorParallel, TensorShardedMatrices
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.plan.division import model_layout_for
from trainer.step.pipeline import Pipeline, build_pipeline
from trainer.step.train_step import TrainStep

if TYPE_CHECKING:
    from mindspore import Parameter

    from trainer.config import Config
    from trainer.parallel.collectives import ProcessGroup

Model: TypeAlias = Decoder | Classifier


@dataclass(frozen=True)
class Session:
    """A model on its device."""

    model: Model
    build_inputs: InputBuilder | ImageInputBuilder
    communicator: Communicator
    computes_together: bool = False
    """Whether the ranks evaluate each batch together; otherwise each has batches of its own."""
    pipeline: Pipeline | None = None
    """Where the model is a stage of one."""
    device: str = "CPU"

    def whole_weights(self) -> contextlib.AbstractContextManager[None]:
        """Within it ranks that share weights (level 3 of `enable_parallel_optimizer`) have all of them; all enter it
        together. A graph of semi-automatic mode gathers its own."""
        if self.computes_together:
            return contextlib.nullcontext()
        return self.model.compute_weights.unsharded()


def open_session(
    config: Config,
    weights: Mapping[str, np.ndarray] | None = None,
    world: World = SINGLE_PROCESS,
    device: str | None = None,
    group: ProcessGroup | None = None,
) -> Session:
    """Sets up the device, finds the other ranks and builds the model.

    Args:
        weights: Checked to fit; None for those of `seed`.
        device: That of the plan; None finds out which, for notebooks.
        group: The ranks of `world`, where they have met already.

    Raises:
        UserError: The device is not there.
        RunError: The ranks do not start with the same weights.
    """
    device = device or resolve_device(config)
    set_up_device(config, device, world)
    if world.size == 1:
        communicator = Communicator()
    else:
        communicator = _communicator(config, world, group or init_process_group(world))
    config = apply_device_defaults(config, device)
    precision = precision_of(config, device, world)
    shard = _shard(config, communicator)
    pipeline = None
    choices = select_kernels(config.network, device, precision)
    native = on_arrays(config, device, world)
    kernels = load_kernels(choices, precision, host_layers=native)
    if not native and shard is not None and shard.tokens.ranks > 1:
        kernels = context_parallel_kernels(kernels, communicator.groups, shard.tokens)
    model, build_inputs = build_model(config, kernels, device, shard)
    if weights is not None:
        load_weights(model, weights)
    check_same_weights(model, communicator)
    if communicator.shards_model and communicator.groups.pp is not None:
        pipeline = build_pipeline(config, model, communicator.groups.pp, on_one_host=world.local_size == world.size)
    return Session(model, build_inputs, communicator, pipeline=pipeline, device=device)


def parameter_groups_of(config: Config) -> tuple[ParameterGroup, ...]:
    """Those of the trained parameters of the whole model."""
    return parameter_groups(trained_shapes(config), config.optimizer.weight_decay, config.optimizer.type)


def _communicator(config: Config, world: World, group: ProcessGroup) -> Communicator:
    """The ranks of a job, by what they share."""
    if not parallel_degrees(config, world).shards_model:
        return Communicator(group)
    return model_parallel(group, config.decoder, model_layout_for(config, world), ulysses_degree(config))


def _shard(config: Config, communicator: Communicator) -> RankModelShard | None:
    """What this rank has of the model; None: all of it."""
    if not communicator.shards_model:
        return None
    groups = communicator.groups
    section = config.parallel_config
    where = communicator.where
    if groups.tp is None:
        tensor = None
    else:
        tensor = TensorParallel(groups.tp, section.use_seq_parallel)
    tokens = ContextShard(where.context, section.context_parallel, ulysses_degree(config))
    return RankModelShard(
        communicator.layout, where, tensor, groups.ep, tokens, groups.tp_cp, groups.ring, groups.ulysses
    )


def build_model(
    config: Config,
    kernels: KernelSet,
    device: str = "CPU",
    shard: RankModelShard | None = None,
) -> tuple[Model, InputBuilder | ImageInputBuilder]:
    """The model with the weights of `seed`, and what makes its inputs; `shard` as in `Decoder`."""
    trains = config.trains
    compiled = config.context.mode == 0 and (jit_options(config, device) or True)
    if trains:
        frozen = frozen_names(config)
    else:
        frozen = ()
    if config.classifier is not None:
        model = Classifier(config.classifier, kernels, seed=config.seed, compiled=compiled, frozen=frozen)
        return model, ImageInputBuilder(config.classifier)
    if trains:
        recomputed = recomputed_parts(config)
    else:
        recomputed = ()
    model = Decoder(
        config.decoder, kernels, seed=config.seed, compiled=compiled, frozen=frozen, recomputed=recomputed, shard=shard
    )
    return model, InputBuilder(model.settings, kernels, shard)


def check_same_weights(model: Decoder, communicator: Communicator) -> None:
    """Raises a RunError that names the ranks whose weights are not those of the first rank with this part of the model.
    """
    if communicator.size == 1:
        return
    sums: dict[str, int] = {}
    part = "all"
    for name, parameter in model.parameters_by_name.items():
        if model.shard is not None:
            part = f"{name} from {model.shard.layout.shard(name, model.shard.where).start}"
        sums[part] = zlib.crc32(np.ascontiguousarray(parameter.asnumpy()), sums.get(part, 0))
    check_same_values(sums, "weights", communicator)


def open_training(
    config: Config,
    schedule: Callable[[int], float],
    weights: Mapping[str, np.ndarray] | None = None,
    world: World = SINGLE_PROCESS,
    device: str | None = None,
    group: ProcessGroup | None = None,
) -> TrainStep:
    """The model with its optimizer over the weights that are trained, ready to step; also for notebooks.

    Args:
        schedule: Learning rate of update number `n`, from 0; see `trainer.optim.schedules.build_schedule`.
        weights, device, group: As in `open_session`.

    Raises:
        UserError: The device is not there, or `freeze` names no weight.
        RunError: As in `open_session`.
    """
    session = open_session(config, weights, world, device, group)
    groups = parameter_groups_of(config)
    parameters = session.model.parameters_by_name
    trained = {name: parameters[name] for name in trained_shapes(config) if name in parameters}
    shards = {}
    if shards_optimizer(config, world):
        make_shards = partial(optimizer_shards, session.communicator, shard_threshold_bytes(config))
        if zero_level(config) == "level3":
            gatherer = partial(array_gatherer, on_one_host=world.local_size == world.size)
            prefetch = can_prefetch(session.communicator)
            session.model.compute_weights.shard(make_shards(parameters, gatherer), prefetch)
            shards = make_shards(trained, lambda group: partial(write_local_ranges, group), shards_weights=True)
        else:
            shards = make_shards(trained)
    own = session.model.shard
    if own is None or own.tensor is None:
        parts = None
    else:
        parts = TensorShardedMatrices(own)
    return TrainStep(
        session.model,
        build_optimizer(trained, groups, config.optimizer, config.context.mode == 0, shards, parts),
        schedule,
        session.build_inputs,
        config.runner_wrapper,
        seed=config.seed,
        communicator=session.communicator,
        stop_at_bad_loss=config.check_for_nan_in_loss_and_grad,
        pipeline=session.pipeline,
        shards_gradients=bool(shards) and zero_level(config) != "level1",
    )


def can_prefetch(communicator: Communicator) -> bool:
    """Whether all ranks have a core to gather weights with while another one computes."""
    return not communicator.any(len(os.sched_getaffinity(0)) == 1 if hasattr(os, "sched_getaffinity") else True)


def optimizer_shards(
    communicator: Communicator,
    threshold_bytes: int,
    parameters: Mapping[str, Parameter],
    gatherer: Callable[[ProcessGroup], Callable] | None = None,
    shards_weights: bool = False,
) -> dict[str, OptimizerShard]:
    """This rank's shards of those parameters that the ranks with the same part of them divide.

    Args:
        gatherer: Makes the `OptimizerShard.all_gather` of a group; None: `all_gather_ranges`.
    """
    made: dict[int, OptimizerShard] = {}  # one for each group: what it shares travels together
    found = {}
    for name, parameter in parameters.items():
        if is_buffer(name):
            group = None
        else:
            group = communicator.optimizer_state_group(name)
        if group is None:
            continue
        if id(group) not in made:
            if gatherer is None:
                gather = partial(all_gather_ranges, group)
            else:
                gather = gatherer(group)
            made[id(group)] = OptimizerShard(
                group.rank, group.size, threshold_bytes, gather, partial(gather_range, group), shards_weights
            )  # fmt: skip
        if made[id(group)].is_sharded(parameter.size):
            found[name] = made[id(group)]
    return found


def set_up_device(config: Config, device: str, world: World = SINGLE_PROCESS) -> None:
    """Chooses device and execution mode.

    The outer loop always runs in PyNative mode; `context.mode: 0` compiles the blocks inside it.
    """
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    if device == "CPU":
        # Once an operator has run, MindSpore refuses to be told a device, the one it is on included.
        if mindspore.get_context("device_target") != "CPU":
            mindspore.set_device("CPU")
        set_up_cpu_threads()
    else:
        mindspore.set_device(device, world.local_rank if world.size > 1 else config.context.device_id)
        _make_calls(device_calls(config, device))


@functools.cache
def _make_calls(calls: tuple[Call, ...]) -> None:
    """Makes each once a process: MindSpore refuses to be told twice."""
    for call in calls:
        call.make(mindspore)
