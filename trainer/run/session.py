"""Sets up the device, the ranks, the kernels and the model, for every run mode."""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import mindspore
import numpy as np

from trainer.checkpoint.state import load_in_turn, load_weights
from trainer.checkpoint.weights import open_teacher_weights
from trainer.config.checks.degrees import ulysses_degree
from trainer.config.checks.parallel import (
    parallel_degrees,
    runs_semi_auto,
    shard_threshold_bytes,
    sharding_ranks,
    shards_optimizer,
    zero_level,
)
from trainer.config.checks.qk_clip import clips_queries, measures_logits
from trainer.config.device_defaults import apply_device_defaults
from trainer.config.recompute import recomputed_parts
from trainer.config.schema.model import ModelConfig
from trainer.config.teacher import teacher_dtypes, teacher_run
from trainer.data.batches.context import ContextShard
from trainer.device.pool import set_up_cpu_pool
from trainer.device.resolve import resolve_device
from trainer.device.settings import DeviceCall, device_calls, jit_options
from trainer.device.threads import set_up_cpu_threads
from trainer.models.classifier import Classifier, ImageInputBuilder
from trainer.models.decoder import Decoder
from trainer.models.inputs import InputBuilder
from trainer.models.spec.names import is_buffer
from trainer.models.spec.shapes import parameter_shapes
from trainer.ops.ascend.gradient_sums import sum_gradients_with_add
from trainer.ops.ascend.graph_gradients import divide_losses_with_div
from trainer.ops.context import context_parallel_kernels
from trainer.ops.kernel_set import KernelSet, load_kernels
from trainer.ops.select import on_arrays, precision_of, select_kernels
from trainer.optim.averages import WeightAverages
from trainer.optim.freeze import frozen_names, trained_shapes
from trainer.optim.groups import average_names, parameter_groups
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.collectives import (
    all_gather_ranges,
    array_gatherer,
    gather_range,
    init_process_group,
    write_local_ranges,
)
from trainer.parallel.communicator import Communicator, check_same_values, data_parallel, model_parallel
from trainer.parallel.host_group import CpuGroup
from trainer.parallel.sharding import OptimizerShard
from trainer.parallel.tensor import RankModelShard, TensorParallel, TensorShardedMatrices
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.plan.division import model_layout_for
from trainer.step.pipeline import Pipeline, build_pipeline
from trainer.step.reference import digest_of_weights
from trainer.step.teacher import Teacher
from trainer.step.train_step import TrainStep
from trainer.storage.quantized import FrozenMatrix

if TYPE_CHECKING:
    from mindspore import Parameter

    from trainer.config import Config
    from trainer.config.schema.runner import LossConfig
    from trainer.parallel.collectives import ProcessGroup

Model: TypeAlias = Decoder | Classifier


@dataclass(frozen=True)
class Session:
    """A model on its device.

    Attributes:
        computes_together: Whether all ranks evaluate each batch together; otherwise each rank has other batches.
        pipeline: The pipeline of which this rank's model is a stage; None without one.
    """

    model: Model
    build_inputs: InputBuilder | ImageInputBuilder
    communicator: Communicator
    computes_together: bool = False
    pipeline: Pipeline | None = None
    device: str = "CPU"

    @property
    def teacher(self) -> str:
        """Returns the digest of the teacher's weights; empty without a teacher."""
        if isinstance(self.build_inputs, InputBuilder) and isinstance(self.build_inputs.teach, Teacher):
            return self.build_inputs.teach.digest
        return ""

    @property
    def loss(self) -> LossConfig | None:
        """Returns the loss of answers that are compared; None if it is that of tokens or images."""
        if isinstance(self.build_inputs, InputBuilder):
            return self.build_inputs.loss
        return None

    def unsharded_weights(self) -> contextlib.AbstractContextManager[None]:
        """Unshards the weights of ZeRO stage 3 while the block lasts; all ranks enter it together.

        It does nothing in semi-automatic mode, where the graph gathers the weights.
        """
        if self.computes_together:
            return contextlib.nullcontext()
        return self.model.compute_weights.unsharded()


def open_session(
    config: Config, weights: Mapping[str, np.ndarray] | None = None, world: World = SINGLE_PROCESS,
    device: str | None = None, group: ProcessGroup | None = None,
) -> Session:  # fmt: skip
    """Sets up the device, finds the other ranks and builds the model.

    Args:
        weights: Weights that fit the model, by name; None initializes them from `seed`.
        device: The device of the plan; None resolves it from the configuration, for notebooks.
        group: The ranks of `world`, if they are connected already.

    Raises:
        UserError: The device is missing.
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
    shard = _local_shard(config, communicator)
    choices = select_kernels(config.network, device, precision)
    native = on_arrays(config, device, world)
    kernels = load_kernels(choices, precision, host_layers=native)
    groups = communicator.groups
    if not native and groups is not None and shard is not None and shard.tokens.ranks > 1:
        kernels = context_parallel_kernels(kernels, groups, shard.tokens)
    model, build_inputs = build_model(config, kernels, device, shard)
    if isinstance(build_inputs, InputBuilder):
        build_inputs.teach = open_teacher(config, device, world)
    if weights is not None:
        load_weights(model, weights)
    check_same_weights(model, communicator)
    pipeline = None
    if groups is not None and groups.pp is not None:
        pipeline = build_pipeline(config, model, groups.pp, on_one_host=world.local_size == world.size)
    return Session(model, build_inputs, communicator, pipeline=pipeline, device=device)


def _communicator(config: Config, world: World, group: ProcessGroup) -> Communicator:
    """Returns the communicator of a job with several ranks."""
    degrees = parallel_degrees(config, world)
    sharding = sharding_ranks(config, degrees)
    if not degrees.shards_model:
        return data_parallel(group, sharding)
    return model_parallel(group, config.decoder, model_layout_for(config, world), ulysses_degree(config), sharding)


def _local_shard(config: Config, communicator: Communicator) -> RankModelShard | None:
    """Returns the shard of the model that this rank computes; None if it computes the full model."""
    groups = communicator.groups
    layout = communicator.layout
    coordinate = communicator.coordinate
    if groups is None or layout is None or coordinate is None:
        return None
    section = config.parallel_config
    tensor = None
    if groups.tp is not None:
        tensor = TensorParallel(groups.tp, section.use_seq_parallel)
    tokens = ContextShard(coordinate.context, section.context_parallel, ulysses_degree(config))
    return RankModelShard(layout, coordinate, tensor, groups.ep, tokens, groups.tp_cp, groups.ring, groups.ulysses)


def build_model(
    config: Config, kernels: KernelSet, device: str = "CPU", shard: RankModelShard | None = None,
) -> tuple[Model, InputBuilder | ImageInputBuilder]:  # fmt: skip
    """Builds the model with the weights of `seed`, and the builder of its inputs.

    Args:
        shard: The shard of the model that this rank computes; None for the full model.
    """
    compiled: bool | dict[str, str] = False
    if config.context.mode == 0:
        compiled = jit_options(config, device) or True
    frozen: Collection[str] = ()
    recomputed: Sequence[str] = ()
    if config.trains:
        frozen = frozen_names(config)
    network = config.network
    if not isinstance(network, ModelConfig):
        classifier = Classifier(network, kernels, seed=config.seed, compiled=compiled, frozen=frozen)
        return classifier, ImageInputBuilder(network)
    if config.trains:
        recomputed = recomputed_parts(config)
    decoder = Decoder(
        network, kernels, seed=config.seed, compiled=compiled, frozen=frozen, recomputed=recomputed, shard=shard
    )
    return decoder, InputBuilder(decoder.settings, kernels, shard, config.preferences)


def open_teacher(config: Config, device: str, world: World = SINGLE_PROCESS) -> Teacher | None:
    """Builds the teacher with the weights of its folder, which each rank reads; None if the run has none.

    Raises:
        UserError: The weights cannot be read, or do not fit the folder's config.json.
    """
    teacher = teacher_run(config)
    loss = config.distillation
    if teacher is None or loss is None or config.tasks:
        return None
    settings = teacher.decoder
    precision = precision_of(config, device, world)
    kernels = load_kernels(select_kernels(settings, device, precision), precision, host_layers=True)
    dtypes = teacher_dtypes(config)
    names = parameter_shapes(settings)
    decoder = Decoder(settings, kernels, seed=config.seed, frozen=names, dtypes=dtypes)
    load_in_turn(decoder, open_teacher_weights(config, world).read_in_turn(dtypes=dtypes))
    digest = digest_of_weights(decoder.parameters_by_name)
    return Teacher(decoder, InputBuilder(settings, kernels), loss, digest)


def load_in_place(model: Decoder, weights: Mapping[str, np.ndarray]) -> None:
    """Writes weights into the arrays of the parameters, which an optimizer may share."""
    for name, parameter in model.parameters_by_name.items():
        if isinstance(parameter, FrozenMatrix):
            parameter.set(weights[name])
        else:
            parameter.asnumpy()[...] = weights[name]
    model.compute_weights.refresh()


def check_same_weights(model: Decoder, communicator: Communicator) -> None:
    """Raises a RunError if two ranks with the same shard have different weights; the error names the ranks."""
    if communicator.size == 1:
        return
    checksums: dict[str, int] = {}
    shard_name = "all"
    for name, parameter in model.parameters_by_name.items():
        if model.shard is not None:
            shard_name = f"{name} from {model.shard.layout.shard(name, model.shard.coordinate).start}"
        arrays: Iterable[np.ndarray] = ()
        if isinstance(parameter, FrozenMatrix):
            arrays = parameter.numbers.arrays()
        else:
            arrays = (parameter.asnumpy(),)
        for array in arrays:
            checksums[shard_name] = zlib.crc32(np.ascontiguousarray(array).data, checksums.get(shard_name, 0))
    check_same_values(checksums, "weights", communicator)


def open_training(
    config: Config, schedule: Callable[[int], float], weights: Mapping[str, np.ndarray] | None = None,
    world: World = SINGLE_PROCESS, device: str | None = None, group: ProcessGroup | None = None,
) -> TrainStep:  # fmt: skip
    """Builds the model and the optimizer of its trainable weights, and returns the training step.

    Args:
        schedule: The learning rate of update number `n`, from 0; see `trainer.optim.schedules.build_schedule`.
        weights, device, group: See `open_session`.

    Raises:
        UserError: The device is missing, or `freeze` names no weight.
        RunError: The ranks do not start with the same weights.
    """
    session = open_session(config, weights, world, device, group)
    all_trained = trained_shapes(config)  # of the full model
    groups = parameter_groups(all_trained, config.optimizer)
    parameters = session.model.parameters_by_name
    trained = {name: parameters[name] for name in all_trained if name in parameters}
    shards = {}
    if shards_optimizer(config, world):
        make_shards = partial(optimizer_shards, session.communicator, shard_threshold_bytes(config))
        if zero_level(config) == "level3":
            gatherer = partial(array_gatherer, on_one_host=world.local_size == world.size)
            prefetch = can_prefetch_weights(session.communicator)
            session.model.compute_weights.shard(make_shards(parameters, gatherer), prefetch)
            shards = make_shards(trained, _range_writer, shards_weights=True)
        else:
            shards = make_shards(trained)
    shard = session.model.shard
    threshold = None
    if clips_queries(config):
        threshold = config.optimizer.qk_clip_threshold
    matrices = None
    if shard is not None and shard.tensor is not None:
        matrices = TensorShardedMatrices(shard)
    optimizer = build_optimizer(trained, groups, config.optimizer, config.context.mode == 0, shards, matrices)
    averages = None
    if average_names(config.optimizer):
        averages = WeightAverages(optimizer, config.optimizer)
    return TrainStep(
        session.model,
        optimizer,
        schedule,
        session.build_inputs,
        config.runner_wrapper,
        seed=config.seed,
        communicator=session.communicator,
        stop_at_bad_loss=config.check_for_nan_in_loss_and_grad,
        pipeline=session.pipeline,
        shards_gradients=bool(shards) and zero_level(config) != "level1",
        qk_clip_threshold=threshold,
        measures_logits=measures_logits(config) and on_arrays(config, session.device, world),
        averages=averages,
        loss=config.preferences,
        has_weights=config.train_dataset.has_weights,
        teacher=session.teacher,
    )


def _range_writer(group: ProcessGroup) -> Callable:
    assert isinstance(group, CpuGroup), "explicit mode shards weights on CPUs only"
    return partial(write_local_ranges, group)


def can_prefetch_weights(communicator: Communicator) -> bool:
    """Returns whether every rank has a core that can gather weights while another core computes."""
    return not communicator.any(len(os.sched_getaffinity(0)) == 1)


def optimizer_shards(
    communicator: Communicator, threshold_bytes: int, parameters: Mapping[str, Parameter],
    gatherer: Callable[[ProcessGroup], Callable] | None = None, shards_weights: bool = False,
) -> dict[str, OptimizerShard]:  # fmt: skip
    """Returns, by parameter name, how this rank shards the optimizer state with its data-parallel ranks.

    Parameters that are not sharded are missing. Parameters of the same group of ranks have the same value, because
    their shards are gathered together.

    Args:
        gatherer: Makes the `OptimizerShard.all_gather` of a group; None: `all_gather_ranges`.
    """
    by_group: dict[int, OptimizerShard] = {}
    shards = {}
    for name, parameter in parameters.items():
        if is_buffer(name):
            continue
        group = communicator.optimizer_state_group(name)
        if group is None:
            continue
        if id(group) not in by_group:
            gather = partial(all_gather_ranges, group)
            if gatherer is not None:
                gather = gatherer(group)
            by_group[id(group)] = OptimizerShard(
                group.rank, group.size, threshold_bytes, gather, partial(gather_range, group), shards_weights
            )
        if by_group[id(group)].is_sharded(parameter.size):
            shards[name] = by_group[id(group)]
    return shards


def set_up_device(config: Config, device: str, world: World = SINGLE_PROCESS) -> None:
    """Selects the device and MindSpore's execution mode.

    The outer loop always runs in eager (PyNative) mode; `context.mode: 0` compiles the blocks inside it.
    """
    mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
    if device == "CPU":
        # Once an operator has run, MindSpore refuses every call of set_device, even for the device it uses.
        if mindspore.get_context("device_target") != "CPU":
            mindspore.set_device("CPU")
        set_up_cpu_pool()
        set_up_cpu_threads()
    else:
        device_id = config.context.device_id
        if world.size > 1:
            device_id = world.local_rank
        mindspore.set_device(device, device_id)
        in_one_graph = runs_semi_auto(config, world)
        sum_gradients_with_add(in_one_graph=in_one_graph)
        if in_one_graph:
            divide_losses_with_div()
        _make_calls(device_calls(config, device))


@functools.cache
def _make_calls(calls: tuple[DeviceCall, ...]) -> None:
    """Makes each call once in a process, because MindSpore refuses a second one."""
    for call in calls:
        call.make(mindspore)
