"""Traces of tiny models for scripts/check_trace.py and test_trace.py: clean ones, and ones with a fault put in.

A fault is put into the weights, or into what one rank computes a layer with, so that the weights themselves stay right.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))

from pipeline_cases import LATENT, shards_of, weights_of, world_of_group  # noqa: E402
from tiny_trainer import TOKENS, config_of, join, make_batch  # noqa: E402

from trainer.arrays.attention.positions import TokenPositions, query_blocks  # noqa: E402
from trainer.arrays.passes import DTYPES, PartWeights  # noqa: E402
from trainer.config import Config  # noqa: E402
from trainer.config.recompute import RecomputeConfig  # noqa: E402
from trainer.data import Batch  # noqa: E402
from trainer.parallel.collectives import ProcessGroup  # noqa: E402
from trainer.parallel.world import SINGLE_PROCESS  # noqa: E402
from trainer.run.session import open_training  # noqa: E402
from trainer.step.train_step import TrainStep  # noqa: E402
from trainer.trace.checks import with_sublayers  # noqa: E402
from trainer.trace.compare import Comparison, compare_traces  # noqa: E402
from trainer.trace.folder import read_trace  # noqa: E402
from trainer.trace.message import row_text  # noqa: E402
from trainer.trace.record import PIECES, RANK_FILE, TraceWriter, write_manifest  # noqa: E402
from trainer.trace.run import manifest, observe_steps  # noqa: E402

ROWS = 4  # sequences of a step, of all ranks together
LAYERS = 4
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 16, "aux_loss_factor": 0.1,
           "norm_topk_prob": True}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {}, "heads": {"n_kv_heads": 4}, "window": {"sliding_window": 5}, "norms": {"use_qk_norm": True},
    "biases": {"qkv_has_bias": True}, "tied": {"tie_word_embeddings": True}, "experts": {"moe_config": EXPERTS},
    "latent": LATENT,
}  # fmt: skip
COMPARED = tuple(MODELS)
"""The models of `CLEAN_CASES`."""
MODELS["side by side"] = {
    "parallel_attn": True, "normalization": "LayerNorm", "gated_linear_unit": False, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "data": (2, {"data_parallel": 2}),
    "tensor": (2, {"model_parallel": 2}),
    "rows": (2, {"model_parallel": 2, "use_seq_parallel": True}),
    "context": (2, {"context_parallel": 2}),
    "pipeline": (2, {"pipeline_stage": 2, "micro_batch_num": 2}),
    "experts": (2, {"data_parallel": 2, "expert_parallel": 2}),
    "eight": (8, {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 2}),
    "eight in rows": (8, {"data_parallel": 2, "model_parallel": 4, "use_seq_parallel": True}),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A fault of one rank in one layer.

    Attributes:
        kind: A function of `FAULTS`.
        rank: None: all ranks.
        name: What the comparison must name first, without the layer.
        ranks: The ranks that it must name, where they are not the one rank.
    """

    kind: str
    layer: int
    rank: int | None
    name: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """A trace: model, layout, dtype, seed of weights and batch, and a fault."""

    model: str = "dense"
    layout: str = "alone"
    dtype: str = "float32"
    seed: int = 1
    steps: int = 1
    fault: Fault | None = None
    sections: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def right(self) -> Case:
        """The case with the right numbers: one rank in float32."""
        return Case(self.model, seed=self.seed, steps=self.steps)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def case_of(given: dict[str, Any]) -> Case:
    fault = given["fault"]
    if fault is not None:
        fault = Fault(**fault | {"ranks": tuple(fault["ranks"])})
    return Case(**given | {"fault": fault})


def folder_name(case: Case) -> str:
    words = [case.model, case.layout, case.dtype, str(case.seed)]
    if case.fault is not None:
        words += [case.fault.kind, str(case.fault.layer), str(case.fault.rank)]
    return "-".join(words).replace(" ", "_")


def config_of_case(case: Case) -> Config:
    ranks, degrees = LAYOUTS[case.layout]
    model = {"num_layers": LAYERS, "hidden_size": 32, "num_heads": 8, "n_kv_heads": 4, "intermediate_size": 48,
             "compute_dtype": case.dtype, "initializer_range": 0.15} | MODELS[case.model]  # fmt: skip
    sections = dict(case.sections)
    if ranks > 1:
        sections |= {"use_parallel": True, "parallel_config": degrees}
    return with_sublayers(config_of(model=model, seed=case.seed, **sections))


def micro_batches(case: Case, step: int, data_rank: int) -> list[Batch]:
    degrees = LAYOUTS[case.layout][1]
    size = ROWS // degrees.get("data_parallel", 1) // degrees.get("micro_batch_num", 1)
    count = degrees.get("micro_batch_num", 1)
    rows = [make_batch(1000 * case.seed + 10 * step + row, TOKENS - 3 * (row % 2)) for row in range(ROWS)]
    batches = [join(rows[place : place + size], size) for place in range(0, ROWS, size)]
    return batches[data_rank * count : (data_rank + 1) * count]


def write_traces(group: ProcessGroup | None, cases: Sequence[dict[str, Any]], folder: str, pattern: str = "") -> None:
    """Writes the trace of each case below a folder; all ranks of a group call it."""
    for given in cases:
        case = case_of(given)
        write_trace(None if case.ranks == 1 else group, case, Path(folder) / folder_name(case), pattern)


def write_trace(group: ProcessGroup | None, case: Case, folder: Path, pattern: str = "") -> None:
    config = config_of_case(case)
    world = world_of_group(group)
    weights = shards_of(weights_of(config), config, world)
    step = open_training(config, lambda update: 1e-3, weights, world, "CPU", group)
    fault = case.fault
    has_fault = fault is not None and fault.rank in (None, world.rank)
    if fault is not None and has_fault:
        FAULTS[fault.kind](step, fault.layer)
    folder.mkdir(parents=True, exist_ok=True)
    if world.rank == 0:
        write_manifest(folder, manifest(config, world, "CPU", [1e-3] * case.steps))
    batches = [micro_batches(case, number, step.communicator.data_rank) for number in range(case.steps)]
    observe_steps(step, batches, TraceWriter(folder, world.rank, pattern), world, config, lambda text: None)
    if fault is not None and has_fault and fault.kind in LOSSES:
        LOSSES[fault.kind](folder / f"rank-{world.rank}", fault.layer)


def losses_without_a_trace(group: ProcessGroup, given: dict[str, Any]) -> list[float]:
    """Returns the losses of a case on one rank that nothing observes, with layers in one piece."""
    case = case_of(given)
    config = config_of_case(case).model_copy(update={"recompute_config": RecomputeConfig()})
    step = open_training(config, lambda update: 1e-3, weights_of(config), SINGLE_PROCESS, "CPU")
    return [step(micro_batches(case, number, 0)).loss for number in range(case.steps)]


# ---- faults ----------------------------------------------------------------------------------------------------------


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def scale_weight(step: TrainStep, layer: int) -> None:
    """Scales a weight of the layer by one part in a thousand."""
    step.model.parameters_by_name[f"{_prefix(layer)}mlp.up_proj.weight"].asnumpy()[...] *= np.float32(1.001)


def lose_weight_shard(step: TrainStep, layer: int) -> None:
    """Leaves the rank's shard of a weight at zero, as one that was not loaded."""
    step.model.parameters_by_name[f"{_prefix(layer)}self_attn.o_proj.weight"].asnumpy()[...] = 0


class _OtherWeights(PartWeights):
    """The weights of a part with other arrays than those of its parameters."""

    change: Callable[[dict[str, np.ndarray]], None]

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {name: array.copy() for name, array in super().arrays().items()}
        self.change(arrays)
        return arrays


def _change_arrays(
    step: TrainStep, layer: int, part: str, change: Callable[[dict[str, np.ndarray]], None]
) -> None:
    weights = step.model.parts.layers[layer][part]
    weights.__class__ = _OtherWeights
    weights.change = change


def swap_heads(step: TrainStep, layer: int) -> None:
    """Swaps two heads of the queries."""
    size = step.model.settings.head_size

    def swap(arrays: dict[str, np.ndarray]) -> None:
        query = arrays["self_attn.q_proj.weight"]
        # Neighbours with the same key; of two groups, one head of each.
        first, second = slice(0, size), slice(len(query) - size, len(query))
        query[first], query[second] = query[second].copy(), query[first].copy()

    _change_arrays(step, layer, "attention", swap)


def scale_gate(step: TrainStep, layer: int) -> None:
    """Computes with a gate projection that is one part in a hundred too large."""

    def scale(arrays: dict[str, np.ndarray]) -> None:
        arrays["mlp.gate_proj.weight"] *= np.float32(1.01)

    _change_arrays(step, layer, "mlp", scale)


def narrow_sublayer(step: TrainStep, layer: int, part: str = "attention") -> None:
    """Computes a sublayer in bfloat16."""
    weights = step.model.parts.layers[layer][part]
    weights.dtype = DTYPES["bfloat16"]
    weights.narrow = frozenset(name for name in weights.named if "_proj" in name)


def _change_positions(
    step: TrainStep, layer: int, change: Callable[[TokenPositions, Any], TokenPositions]
) -> None:
    """Lets one layer take other positions."""
    run_layer = step.model.run_layer
    batches: list[Batch] = []
    build = step.build_inputs

    def build_inputs(batch: Batch) -> Any:
        batches.append(batch)
        return build(batch)

    def run(number: int, x_ND: Any, call: Any) -> Any:
        if number == layer:
            inputs = call.inputs
            changed = change(inputs.positions, batches[-1])
            call = call._replace(inputs=inputs._replace(positions=changed))
        return run_layer(number, x_ND, call)

    step.build_inputs = build_inputs
    step.model.run_layer = run


def other_rotary_base(step: TrainStep, layer: int) -> None:
    """Rotates queries and keys by the angles of another base: the second pair turns half as fast."""

    def change(positions: TokenPositions, batch: Batch) -> TokenPositions:
        rotation = positions.rotation_N1h.copy()
        rotation[:, :, 1:] = np.exp(1j * np.angle(rotation[:, :, 1:]) / 2).astype(rotation.dtype)
        return TokenPositions(rotation, positions.blocks, positions.window_blocks)

    _change_positions(step, layer, change)


def shift_mask(step: TrainStep, layer: int) -> None:
    """Begins the documents one token too late in the attention mask, or makes the window one token wider."""
    settings = step.model.settings
    shard = step.build_inputs.part.ring

    def change(positions: TokenPositions, batch: Batch) -> TokenPositions:
        if settings.window_layers:
            wider = query_blocks(batch.segment_ids, window=settings.sliding_window + 1, shard=shard)
            return TokenPositions(positions.rotation_N1h, positions.blocks, wider)
        late = np.pad(batch.segment_ids, ((0, 0), (1, 0)))[:, :-1]
        return TokenPositions(positions.rotation_N1h, query_blocks(late, shard=shard))

    _change_positions(step, layer, change)


def lose_lines(folder: Path, layer: int) -> None:
    """Removes what a rank has recorded of the heads of a layer, as if it had not seen them."""
    path = folder / PIECES
    lines = path.read_text().splitlines(keepends=True)
    sketches = np.fromfile(folder / "sketches.f64").reshape(len(lines), -1)
    kept = [json.loads(line)["name"] != f"{_prefix(layer)}self_attn.o_proj.input" for line in lines]
    path.write_text("".join(line for line, keeps in zip(lines, kept, strict=True) if keeps))
    sketches[np.array(kept)].tofile(folder / "sketches.f64")
    facts = json.loads((folder / RANK_FILE).read_text())
    (folder / RANK_FILE).write_text(json.dumps(facts | {"pieces": sum(kept)}))


def lose_rank(folder: Path, layer: int) -> None:
    """Removes the folder of a rank."""
    shutil.rmtree(folder)


def _nothing(step: TrainStep, layer: int) -> None:
    """Changes nothing in the training."""


LOSSES = {"lost lines": lose_lines, "lost rank": lose_rank}
FAULTS: dict[str, Callable[[TrainStep, int], None]] = {
    "scaled weight": scale_weight, "lost weight": lose_weight_shard, "swapped heads": swap_heads,
    "scaled gate": scale_gate, "rotary base": other_rotary_base, "mask": shift_mask,
    "bfloat16": narrow_sublayer, "bfloat16 mlp": partial(narrow_sublayer, part="mlp"),
    "lost lines": _nothing, "lost rank": _nothing,
}  # fmt: skip
_HEADS, _GATE = "self_attn.o_proj.input", "mlp.gate_proj"
FAULT_CASES: tuple[Case, ...] = (
    Case(fault=Fault("scaled weight", 2, 0, "mlp.up_proj.weight")),
    Case(layout="tensor", fault=Fault("scaled weight", 1, 1, "mlp.up_proj.weight")),
    Case(layout="eight", fault=Fault("scaled weight", 3, 6, "mlp.up_proj.weight")),
    Case(fault=Fault("swapped heads", 1, 0, _HEADS)),
    Case(layout="tensor", fault=Fault("swapped heads", 2, 1, _HEADS)),
    Case(layout="data", fault=Fault("swapped heads", 0, 1, _HEADS)),
    Case(layout="eight", fault=Fault("swapped heads", 1, 3, _HEADS)),
    Case(layout="alone", fault=Fault("rotary base", 3, 0, _HEADS)),
    Case(layout="rows", fault=Fault("rotary base", 1, 0, _HEADS)),
    Case("norms", layout="eight in rows", fault=Fault("rotary base", 2, 5, _HEADS)),
    Case(fault=Fault("mask", 2, 0, _HEADS)),
    Case("window", layout="data", fault=Fault("mask", 1, 0, _HEADS)),
    Case(layout="context", fault=Fault("mask", 3, 0, _HEADS)),
    Case(layout="tensor", fault=Fault("lost weight", 2, 0, "self_attn.o_proj.weight")),
    Case(layout="eight in rows", fault=Fault("lost lines", 1, 6, _HEADS)),
    Case(layout="tensor", fault=Fault("lost rank", 0, 1, "")),
    Case(fault=Fault("bfloat16", 2, 0, _HEADS)),
    Case(layout="tensor", fault=Fault("bfloat16", 1, 0, _HEADS)),
    Case(layout="pipeline", fault=Fault("bfloat16 mlp", 3, 1, _GATE)),
    Case(layout="eight", fault=Fault("scaled gate", 0, 2, _GATE)),
)
"""Twenty faults: each must be found in its layer, on its rank."""
CLEAN_CASES: tuple[Case, ...] = (
    *(Case(model, dtype="bfloat16", seed=seed) for model in COMPARED for seed in (1, 2, 3)),
    *(Case(model, layout, seed=4) for model in ("dense", "norms", "window", "tied", "biases", "latent")
      for layout in ("eight", "eight in rows")),
    *(Case("dense", layout, seed=5) for layout in ("data", "tensor", "rows", "context", "pipeline")),
    *(Case("experts", layout, seed=5) for layout in ("data", "experts", "eight")),
    *(Case("dense", layout, dtype="bfloat16", seed=6) for layout in ("eight", "eight in rows", "tensor", "context")),
    Case("dense", dtype="bfloat16", seed=7, steps=3), Case("dense", "eight", seed=7, steps=3),
)  # fmt: skip
"""Fifty comparisons in which nothing is wrong: float32 with bfloat16, one rank with several."""


def compare_case(folder: Path, case: Case) -> Comparison:
    """Compares the trace of a case with that of its right one."""
    right = read_trace(folder / folder_name(case.right), "right")
    return compare_traces(right, read_trace(folder / folder_name(case), "found"))


def problem_of(case: Case, comparison: Comparison) -> str:
    """Returns why a comparison has not found what it must; "" if it has."""
    beyond = comparison.differing
    fault = case.fault
    if fault is None:
        return f"alarm: {row_text(beyond[0])}" if beyond else ""
    if fault.kind == "lost rank":
        return "" if set(comparison.other.lost) == {fault.rank} else "the lost rank is not named"
    if not beyond:
        return "nothing found"
    first = beyond[0]
    ranks = fault.ranks or (tuple(range(case.ranks)) if fault.rank is None else (fault.rank,))
    if (first.key.name, first.ranks) != (_prefix(fault.layer) + fault.name, ranks):
        return f"wrong place: {row_text(first)}"
    return ""
