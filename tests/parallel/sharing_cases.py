"""What a rank of test_sharing_levels.py trains: a tiny model whose state, gradients or weights the ranks share."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import mindspore
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from tiny_trainer import TOKENS, config_of, make_batch  # noqa: E402

from trainer.config import Config  # noqa: E402
from trainer.errors import RunError  # noqa: E402
from trainer.models import compute_weights  # noqa: E402
from trainer.models.compute_weights import ShardedWeights  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.parallel.host_group import CpuGroup  # noqa: E402
from trainer.parallel.world import SINGLE_PROCESS, World  # noqa: E402
from trainer.run import session  # noqa: E402
from trainer.step.evaluate import evaluate  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402

STEPS, RESUMED_AT = 2, 8
CLIPPED = {"runner_wrapper": {"use_clip_grad": True, "max_grad_norm": 1.0, "local_norm": True}}
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
CASES: dict[str, dict[str, Any]] = {
    # The scale is too large for the first step.
    "clipped, frozen, overflowing": {
        "model": {"num_layers": 1},
        "runner_wrapper": {"use_clip_grad": True, "max_grad_norm": 1.0, "local_norm": True,
                           "scale_sense": {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 2.0**70,
                                           "scale_factor": 2**20}},
        "freeze": {"include": ["*embed_tokens*", "*q_proj*"]},
    },
    "experts, recomputed, partly whole": {
        "model": {"mtp_depth": 1, "moe_config": EXPERTS, "tie_word_embeddings": True},
        "optimizer": {"type": "SGD", "momentum": 0.9, "nesterov": True},
        "recompute_config": {"recompute": True}, "threshold": 1,
    },
    "matrices, rows and experts": {
        "degrees": {"expert_parallel": 2, "model_parallel": 2, "use_seq_parallel": True, "data_parallel": 2},
        "model": {"n_kv_heads": 1, "use_qk_norm": True, "moe_config": EXPERTS},
        "optimizer": {"type": "Muon", "ns_steps": 2}, **CLIPPED,
    },
    "stages of matrices": {
        "degrees": {"pipeline_stage": 2, "model_parallel": 2, "use_seq_parallel": True, "data_parallel": 2,
                    "micro_batch_num": 2},
        "model": {"mtp_depth": 1, "tie_word_embeddings": True}, **CLIPPED,
    },
    "sequences": {"degrees": {"context_parallel": 2}, "model": {"embedding_size": 12}, **CLIPPED},
    "operators, partly whole": {"context": {"mode": 1}, "threshold": 1},
}  # fmt: skip


class Trained(NamedTuple):
    """What a training has computed; weights and norms by name."""

    losses: list[float]
    norms: list[float]
    overflows: list[bool]
    local_norms: Mapping[str, float]
    evaluated: float
    weights: Mapping[str, np.ndarray]
    state_sizes: Mapping[str, int]
    gradients: int  # numbers of a step's summed gradients


def config(case: str, level: str, alone: bool = False) -> Config:
    sections = dict(CASES[case])
    degrees = sections.pop("degrees", {})
    if degrees and not alone:
        sections |= {"use_parallel": True, "parallel_config": degrees}
    sharing = {"parallel_optimizer_threshold": sections.pop("threshold", 0), "optimizer_level": level or "level1"}
    parallel = {"enable_parallel_optimizer": bool(level), "parallel_optimizer_config": sharing}
    return config_of(parallel=parallel, **sections)


def open_step(config: Config, group: ProcessGroup, weights: Mapping[str, np.ndarray] | None = None) -> TrainStep:
    """Opens the step of a run, with these ranks in the place of MindSpore's."""
    world = SINGLE_PROCESS if group.size == 1 else World(group.rank, group.size, group.rank, group.size)
    ready = mock.patch.object(session, "set_up_device", lambda *_: mindspore.set_context(mode=mindspore.PYNATIVE_MODE))
    prefetch = mock.patch.object(session, "can_prefetch_weights", lambda _: True)  # although a rank has one core here
    with mock.patch.object(session, "init_process_group", lambda _: group), ready, prefetch:
        return session.open_training(config, lambda update: 0.004, weights, world, "CPU")


def window(step: int, rank: int) -> list[Any]:
    """Returns two micro-batches of a data-parallel rank, of which the second may have no label; one in later steps."""
    counts = [2 * TOKENS - 5, 0 if (rank, step) == (1, 1) else 7][: 2 if step <= STEPS else 1]
    return [make_batch(100 * step + 10 * rank + micro, count, rows=2) for micro, count in enumerate(counts)]


def data_ranks(case: str) -> int:
    degrees = CASES[case].get("degrees", {"data_parallel": 2})
    return degrees.get("data_parallel", 1)


def trained(group: ProcessGroup, case: str, levels: Sequence[str], steps: Sequence[int]) -> list[Trained]:
    """Returns a training for each level, of so many steps: "" shares nothing; "level3 level1" goes on with level1 after
    `RESUMED_AT` steps. A rank that is alone has the sequences of all."""
    # Who uses memory that was given back, gets what is no number.
    with mock.patch.object(compute_weights, "_free_pages", lambda flat: flat.fill(np.nan)):
        return [_trained(group, case, level.split(), count) for level, count in zip(levels, steps, strict=True)]


def all_trained(group: ProcessGroup, jobs: Mapping[str, Sequence[Any]], broken: str = "") -> dict[str, Any]:
    """Trainings by case, and those with a mistake of the case `broken`."""
    found: dict[str, Any] = {case: trained(group, case, *job) for case, job in jobs.items()}
    return found | (mistaken(group, broken) if broken else {})


def _trained(group: ProcessGroup, case: str, levels: Sequence[str], steps: int) -> Trained:
    alone = group.size == 1
    step, results = open_step(config(case, levels[0] if levels else "", alone), group), []
    own = range(data_ranks(case)) if alone else [step.communicator.data_rank]
    for number in range(steps):
        if number == RESUMED_AT and len(levels) > 1:
            step = resumed(step, config(case, levels[1]), group)
        with mock.patch.object(step.optimizer, "update", wraps=step.optimizer.update) as update:
            results.append(step([batch for rank in own for batch in window(number, rank)]))
    gradients = sum(gradient.size for gradient in update.call_args.args[0]) if update.called else 0
    batches = [make_batch(99 + rank, 9, rows=2) for rank in own]
    with step.model.compute_weights.unsharded():
        model = step.model if step.pipeline is None else step.pipeline.evaluate
        found = evaluate(model, step.build_inputs, batches, lambda: False, step.communicator)
    fields = ([getattr(result, field) for result in results] for field in ("loss", "global_norm", "overflow"))
    sizes = {name: array.size for by_name in step.optimizer.state.values() for name, array in by_name.items()}
    weights, _ = saved(step, group)
    return Trained(*fields, results[-1].local_norms or {}, found.loss, weights, sizes, gradients)


def saved(step: TrainStep, group: ProcessGroup) -> list[dict[str, np.ndarray]]:
    """Returns weights and optimizer state as all ranks together write them; each number comes from one of them."""
    own = step.state_dict_shard()
    found: list[dict[str, np.ndarray]] = [{}, {}]
    for rank_parts in group.gather_bytes(pickle.dumps((dict(own.weights), dict(own.optimizer)))):
        for whole, parts in zip(found, pickle.loads(rank_parts), strict=True):
            for key, (part, array) in parts.items():
                target = whole.setdefault(key, np.full(part.global_shape, np.nan, np.float32)).reshape(-1)
                for there, here, count in part.runs():
                    assert np.isnan(target[there : there + count]).all(), key
                    target[there : there + count] = array.reshape(-1)[here : here + count]
    return found


def resumed(step: TrainStep, config: Config, group: ProcessGroup) -> TrainStep:
    """Returns a step of this configuration that goes on where the other one is, as from a checkpoint."""
    weights, arrays = saved(step, group)
    following = open_step(config, group, weights)
    following.load_optimizer(arrays, step.optimizer.updates)
    following.load_state(step.state())
    return following


def mistaken(group: ProcessGroup, case: str) -> dict[str, Trained | str]:
    """Trainings with a mistake each; the message of an error is the result, too."""
    calls: list[str] = []
    unshard = ShardedWeights.unshard

    def own_part(group: CpuGroup, array: np.ndarray) -> np.ndarray:
        return group._ranges(array.reshape(-1))[group.rank].copy()

    def forward_alone(weights: ShardedWeights, names: Sequence[str]) -> None:
        calls.append(names[0])
        if calls.count(names[0]) % 2:
            unshard(weights, names)

    def counted_by_all(step: TrainStep, *arguments: Any) -> Any:
        contribution = step.norm_contribution
        step.norm_contribution = contribution._replace(factors=np.full_like(contribution.factors, 2))
        return call(step, *arguments)

    call = TrainStep.__call__
    mistakes = {
        "a range is not summed": ("level2", mock.patch.object(CpuGroup, "reduce_scatter_range", own_part)),
        "a norm is counted twice": ("level2", mock.patch.object(TrainStep, "__call__", counted_by_all)),
        "a weight is not gathered": ("level3", mock.patch.object(ShardedWeights, "unshard", forward_alone)),
    }
    found: dict[str, Trained | str] = {}
    for name, (level, mistake) in mistakes.items():
        with mistake:
            try:
                [found[name]] = trained(group, case, [level], [STEPS + 1])
            except RunError as error:
                found[name] = str(error)
    return found
