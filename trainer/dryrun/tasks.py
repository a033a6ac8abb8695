"""What can be tried of a configuration: a training, an evaluation, a prediction, a checkpoint, the collectives.

A task is the code of a run, called with made-up tokens. Reading a tensor of the dry backend gives zeros.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
from mindspore import Tensor

from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.state import Position, load_weights, save_checkpoint
from trainer.config.checks.parallel import micro_batches_per_step, parallel_degrees, runs_semi_auto
from trainer.data.batches.batch import Batch
from trainer.data.source.mnist import ImageBatch
from trainer.dryrun.weights import leave_weights_empty
from trainer.models.generate import Generator, Sampling
from trainer.ops import dispatch
from trainer.parallel import collectives
from trainer.parallel.sharding import as_sharded_array
from trainer.parallel.world import World
from trainer.run.session import open_session, open_training, set_up_device
from trainer.semi_auto.step import GraphStep
from trainer.semi_auto.training import open_semi_auto_training
from trainer.step.evaluate import evaluate

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.dryrun.measure import CaseRun

_RATE = 1e-3
_GATHER = collectives.DeviceGroup.all_gather


def prepare_process(config: Config, world: World) -> None:
    """Sets up the device, and answers for the ranks that are not there: each says what this one says."""
    set_up_device(config, "Ascend", world)
    leave_weights_empty()
    mindspore.runtime.launch_blocking()
    dispatch.exchange_counts = partial(_even_counts, config)
    collectives.DeviceGroup.all_gather = lambda group, array: np.stack([array] * group.size)


def _even_counts(config: Config, counts: Tensor, group: collectives.Group) -> np.ndarray:
    """As `exchange_counts`, whose counts are all zeros here, of tokens that go to all experts alike."""
    collectives.exchange_counts(counts, group)
    settings = config.decoder
    section = config.parallel_config
    tokens = config.runner_config.batch_size * settings.seq_length // section.context_parallel
    rows = tokens * settings.experts.num_experts_chosen // section.model_parallel
    return np.full((2, group.size, counts.size // group.size), rows // counts.size)


def train(run: CaseRun) -> dict[str, Any]:
    """Steps of a training; the last one is measured."""
    step = open_step(run)
    result = None

    def one(number: int) -> None:
        nonlocal result
        result = step(micro_batches_for_step(run, step, number))

    run.measured_steps(one)
    return {"updated": result.updated, "skipped": result.skipped, "parameters": parameters_of(step)}


def open_step(run: CaseRun) -> Any:
    """The step of a training, explicit or semi-automatic."""
    run.say("building the model")
    if not runs_semi_auto(run.config, run.world):
        return open_training(run.config, _schedule, None, run.world, "Ascend")
    step = open_semi_auto_training(run.config, _schedule, None, run.world, "Ascend")
    step.reports_loss = True  # other stages have it, and they are not there
    return step


def _schedule(update: int) -> float:
    return _RATE


def parameters_of(step: Any) -> int:
    """Numbers in all parameters of this rank."""
    if isinstance(step, GraphStep):
        parameters = step.parameters.local
    else:
        parameters = step.model.parameters_by_name
    return sum(parameter.size for parameter in parameters.values())


def micro_batches_for_step(run: CaseRun, step: Any, number: int) -> Sequence[Batch | ImageBatch]:
    """The micro-batches of a step."""
    runner = run.config.runner_config
    if isinstance(step, GraphStep):  # the graph of semi-automatic mode takes all at once
        return [batch_of(run, step.batch.rows, number)]
    count = micro_batches_per_step(run.config, parallel_degrees(run.config, run.world))
    return [batch_of(run, runner.batch_size, number * count + micro) for micro in range(count)]


def batch_of(run: CaseRun, rows: int, seed: int) -> Batch | ImageBatch:
    if run.config.classifier is None:
        return tokens_batch(run, rows, seed)
    settings = run.config.classifier
    stream = np.random.default_rng(seed)
    pixels = stream.integers(0, 256, (rows, settings.pixels)).astype(np.uint8)
    return ImageBatch(pixels, stream.integers(0, settings.classes, rows).astype(np.int32))


def tokens_batch(run: CaseRun, rows: int, seed: int) -> Batch:
    """Sequences of random tokens, each with as many documents of one length as the option `documents` says."""
    settings = run.config.decoder
    documents = run.options.get("documents", 1)
    length = settings.seq_length
    stream = np.random.default_rng(seed)
    ids = stream.integers(0, settings.vocab_size, (rows, length + 1)).astype(np.int32)
    places = np.arange(length, dtype=np.int32)
    size = -(-length // documents)
    positions, segments = (np.tile(row.astype(np.int32), (rows, 1)) for row in (places % size, places // size))
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), positions, segments)


def evaluation(run: CaseRun) -> dict[str, Any]:
    """Evaluates batches; each is a step."""
    graph = runs_semi_auto(run.config, run.world)
    if graph:
        session = open_step(run)
    else:
        session = open_session(run.config, None, run.world, "Ascend")
    if not graph:  # another rank may have the losses, and it is not there
        session.communicator.all_reduce_exact = lambda sums: [sums[0], max(sums[1], 1), *sums[2:]]
    rows = run.config.runner_config.batch_size * (parallel_degrees(run.config, run.world).data_parallel if graph else 1)
    found = None
    pipeline = session.pipeline
    if pipeline is None:
        model = session.model
    else:
        model = pipeline.evaluate

    def one(number: int) -> None:
        nonlocal found
        batches = [batch_of(run, rows, number)]
        found = evaluate(model, session.build_inputs, batches, lambda: False, session.communicator)

    run.measured_steps(one)
    return {"tokens": found.tokens}


def prediction(run: CaseRun) -> dict[str, Any]:
    """Continues prompts of different lengths with a key/value cache; a step is one new token of each."""
    session = open_session(run.config, None, run.world, "Ascend")
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    stream = Generator(session.model, session.build_inputs, []).stream(prompts, [run.steps] * 2, Sampling())
    found = []
    run.measured_steps(lambda number: found.append(next(stream)))
    return {"tokens": len(found)}


def checkpoint(run: CaseRun) -> dict[str, Any]:
    """Trains a step, saves, loads what was saved, and trains again."""
    step = open_step(run)
    step(micro_batches_for_step(run, step, 0))
    saved = step.state_dict_shard()
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(
            Path(folder), Position(step=1), saved, step_state=step.state(), config=run.config, layout={}, base=None,
            keep_max=1, evaluations=EvalHistory(),
        )  # fmt: skip
        names = sorted(each.name for each in path.iterdir())
    if not isinstance(step, GraphStep):
        load_weights(step.model, {name: piece.array for name, piece in saved.weights.items()})
    step.load_optimizer({key: as_sharded_array(array).array for key, array in saved.optimizer.items()}, saved.updates)
    step.load_state(step.state())
    run.measured_steps(lambda number: step(micro_batches_for_step(run, step, number + 1)))
    return {"files": names, "updates": step.optimizer.updates}


def audit(run: CaseRun) -> dict[str, Any]:
    """The audit of the configuration, with graphs compiled for an Ascend: as `--json` and as people read it."""
    from trainer.audit.report import audit_ascend, audit_dict, audit_sections

    found = audit_ascend(run.config, world=run.world)
    return {"values": audit_dict(found), "sections": audit_sections(found), "missing": list(found.missing)}


def every_collective(run: CaseRun) -> dict[str, Any]:
    """Each cell and function of `trainer.parallel.collectives`, forwards and backwards."""
    group = collectives.init_process_group(run.world)
    x_RD = Tensor(np.ones((2 * run.world.size, 8), np.float32))
    shapes = {}

    def all_of_them(number: int) -> None:
        cells = (
            collectives.AllReduce(group), collectives.AllGather(group), collectives.ReduceScatter(group),
            collectives.CopyToTensorParallel(group), collectives.ReduceFromTensorParallel(group),
        )  # fmt: skip
        for cell in cells:
            _, gradient = mindspore.value_and_grad(lambda x, cell=cell: cell(x).sum())(x_RD)
            shapes[type(cell).__name__] = gradient.shape
        shapes["gather"] = len(_GATHER(group, np.ones(2)))

    run.measured_steps(all_of_them)
    return {"shapes": shapes}
