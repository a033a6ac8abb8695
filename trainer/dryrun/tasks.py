"""The tasks of a dry run: training and audit.

A task calls the code of a run with random tokens. In a dry run, tensors read by the host contain zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from trainer.config import Config
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees, runs_semi_auto
from trainer.data.batches.batch import Batch
from trainer.data.source.images import ImageBatch, random_images
from trainer.dryrun.measure import CaseRun
from trainer.dryrun.weights import leave_weights_empty
from trainer.ops import dispatch
from trainer.parallel import collectives
from trainer.parallel.world import World
from trainer.run.session import open_training, set_up_device
from trainer.semi_auto.step import GraphStep
from trainer.semi_auto.training import open_semi_auto_training

_RATE = 1e-3


def prepare_process(config: Config, world: World) -> None:
    """Sets up the device, and replaces the answers of ranks that do not exist by copies of this rank's."""
    set_up_device(config, "Ascend", world)
    leave_weights_empty()
    mindspore.runtime.launch_blocking()
    device_group: Any = collectives.DeviceGroup
    device_group.all_gather = wraps(device_group.all_gather)(lambda group, array: np.stack([array] * group.size))
    dispatch.exchange_counts = partial(_even_counts, config)


def _even_counts(config: Config, counts: Tensor, group: collectives.DeviceGroup) -> np.ndarray:
    """Replaces `exchange_counts`, which gives zeros in a dry run: tokens are spread evenly over experts."""
    collectives.exchange_counts(counts, group)
    settings = config.decoder
    section = config.parallel_config
    assert settings.experts is not None
    tokens = config.runner_config.batch_size * settings.seq_length // section.context_parallel
    rows = tokens * settings.experts.num_experts_chosen // section.model_parallel
    return np.full((2, group.size, counts.size // group.size), rows // counts.size)


def training(run: CaseRun) -> dict[str, Any]:
    """Runs steps of a training."""
    step = open_step(run)
    results = []
    run.measured_steps(lambda number: results.append(step(micro_batches_for_step(run, step, number))))
    return {"updated": results[-1].updated, "skipped": results[-1].skipped, "parameters": count_parameters(step)}


def open_step(run: CaseRun) -> Any:
    """Returns the step of a training in explicit or semi-automatic mode."""
    run.say("building the model")
    if not runs_semi_auto(run.config, run.world):
        return open_training(run.config, _schedule, None, run.world, "Ascend")
    step = open_semi_auto_training(run.config, _schedule, None, run.world, "Ascend")
    step.reports_loss = True  # the stage that has the loss may not exist
    return step


def _schedule(update: int) -> float:
    return _RATE


def count_parameters(step: Any) -> int:
    """Returns the number of elements of all parameters of this rank."""
    if isinstance(step, GraphStep):
        return sum(parameter.size for parameter in step.parameters.local.values())
    return sum(parameter.size for parameter in step.model.parameters_by_name.values())


def micro_batches_for_step(run: CaseRun, step: Any, number: int) -> Sequence[Batch | ImageBatch]:
    """Returns random micro-batches for a step."""
    runner = run.config.runner_config
    if isinstance(step, GraphStep):  # the graph of semi-automatic mode takes one batch for all micro-batches
        return [random_batch(run, step.batch.rows, number)]
    count = micro_batches_per_step(run.config, parallel_degrees(run.config, run.world))
    return [random_batch(run, runner.batch_size, number * count + micro) for micro in range(count)]


def random_batch(run: CaseRun, rows: int, seed: int) -> Batch | ImageBatch:
    """Returns a batch of random tokens, or of random images for a model that reads them."""
    if run.config.is_decoder:
        return _random_tokens(run, rows, seed)
    return random_images(run.config, rows, seed)


def _random_tokens(run: CaseRun, rows: int, seed: int) -> Batch:
    """Returns random sequences, each with as many documents of equal length as the option `documents` requests."""
    settings = run.config.decoder
    documents = run.options.get("documents", 1)
    length = settings.seq_length
    stream = np.random.default_rng(seed)
    ids = stream.integers(0, settings.vocab_size, (rows, length + 1)).astype(np.int32)
    places = np.arange(length, dtype=np.int32)
    size = -(-length // documents)
    positions, segments = (np.tile(row.astype(np.int32), (rows, 1)) for row in (places % size, places // size))
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), positions, segments)


def audit(run: CaseRun) -> dict[str, Any]:
    """Audits the configuration with graphs compiled for an Ascend. Returns the audit for `--json` and as tables."""
    from trainer.audit.report import audit_ascend, audit_dict, audit_sections

    result = audit_ascend(run.config, world=run.world)
    return {"values": audit_dict(result), "sections": audit_sections(result), "missing": list(result.missing)}
