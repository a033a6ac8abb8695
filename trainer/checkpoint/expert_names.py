"""Names of experts' tensors: on disk each expert has its own, as in Hugging Face's files; in memory they are stacked.

===========  ===========================================================  ==========================
form         tensors                                                      shapes
===========  ===========================================================  ==========================
memory       mlp.experts.{gate,up,down}_proj.weight                       [E, F, D], ..., [E, D, F]
one by one   mlp.experts.{e}.{gate,up,down}_proj.weight                   [F, D], [F, D], [D, F]
Mixtral      block_sparse_moe.experts.{e}.{w1,w3,w2}.weight,              the same
             block_sparse_moe.gate.weight
fused        mlp.experts.gate_up_proj, mlp.experts.down_proj              [E, 2F, D], [E, D, F]
===========  ===========================================================  ==========================

Checkpoints are saved "one by one", as published files of every family but Mixtral's are; transformers finds a Mixtral's
experts under Mixtral's names only. All forms can be read; "fused" is what transformers 5 has in memory and can write.
Needs numpy only. E experts, F width of an expert, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from trainer.checkpoint.joined_names import DiskPart, place_on_disk
from trainer.config.families import FAMILIES, ExpertNames
from trainer.parallel.sharding import ArrayPart, whole_array
from trainer.storage.tensor_file import AnyArray, stacked

Shapes = Mapping[str, tuple[int, ...]]
Weights = dict[str, np.ndarray]

ONE_BY_ONE = ExpertNames()
FUSED = ExpertNames(matrices=("gate_up_proj", "gate_up_proj", "down_proj"))
_EXPERTS = "mlp.experts."
_ROUTER = "mlp.gate.weight"
_MATRICES = tuple(f"{name}.weight" for name in ONE_BY_ONE.matrices)
_GATE, _UP, _DOWN = _MATRICES
_JOINED, _DOWN_JOINED = (f"{_EXPERTS}{name}" for name in FUSED.matrices[1:])


def form_of(names: Iterable[str]) -> ExpertNames:
    """Returns the form in which a file with tensors of these names holds its experts."""
    others = {family.expert_names for family in FAMILIES.values()} - {ONE_BY_ONE}
    for name in names:
        for form in others:
            if f".{form.module}." in name:
                return form
        if name.endswith((f".{_JOINED}", f".{_DOWN_JOINED}")):
            return FUSED
    return ONE_BY_ONE


def disk_shapes(shapes: Shapes, form: ExpertNames = ONE_BY_ONE) -> dict[str, tuple[int, ...]]:
    """Names and shapes on disk of parameters with these names and shapes in memory."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if not _is_stack(name):
            found[_single_name(name, form)] = shape
        elif form == FUSED:
            joined, parts = _joined_name(name)
            found[joined] = (shape[0], parts * shape[1], shape[2])
        else:
            found |= dict.fromkeys(_expert_names(name, shape[0], form), shape[1:])
    return found


def disk_parts(parts: Mapping[str, ArrayPart], kind: str) -> dict[str, list[DiskPart]]:
    """Returns what each tensor to save has of these parts of parameters, one tensor for each expert.

    `kind` is the class that they are saved as: `model.arch.type` or another that computes the same.
    """
    form = FAMILIES[kind].expert_names if kind in FAMILIES else ONE_BY_ONE
    found: dict[str, list[DiskPart]] = {}
    for name, part in parts.items():
        if _is_stack(name):
            names = list(_expert_names(name, part.whole[0], form))
            pieces = [(names[expert], DiskPart(name, own, one)) for expert, one, own in part.items()]
        else:
            pieces = [(_single_name(name, form), DiskPart(name, slice(0, part.size), part))]
        for own_name, piece in pieces:
            name_on_disk, placed = place_on_disk(own_name, piece, kind)
            found.setdefault(name_on_disk, []).append(placed)
    return found


def to_disk(arrays: Mapping[str, np.ndarray], kind: str) -> Weights:
    """Tensors to save as in `disk_parts`, as views where they are not made of several parameters."""
    found = {}
    for name, parts in disk_parts({name: whole_array(array.shape) for name, array in arrays.items()}, kind).items():
        ordered = sorted(parts, key=lambda one: one.part.shard.start)
        flat = [arrays[one.name].reshape(-1)[one.own] for one in ordered]
        found[name] = (flat[0] if len(flat) == 1 else np.concatenate(flat)).reshape(parts[0].part.whole)
    return found


def from_disk(weights: Mapping[str, AnyArray], shapes: Shapes) -> dict[str, AnyArray]:
    """Parameters by their names in memory; `shapes` are those in memory.

    `weights` are the tensors of a file in any form, with every tensor of `disk_shapes`.
    """
    form, found = form_of(weights), {}
    for name, shape in shapes.items():
        if not _is_stack(name):
            found[name] = weights[_single_name(name, form)]
        elif form == FUSED:
            joined, parts = _joined_name(name)
            start = shape[1] if parts == 2 and name.endswith(_UP) else 0
            found[name] = weights[joined][:, start : start + shape[1]]
        else:
            found[name] = stacked([weights[one] for one in _expert_names(name, shape[0], form)])
    return found


def _is_stack(name: str) -> bool:
    return f".{_EXPERTS}" in name


def _single_name(name: str, form: ExpertNames) -> str:
    """Name on disk of a parameter that is not stacked; the router's depends on the form."""
    return name.replace("mlp.", f"{form.module}.") if name.endswith(_ROUTER) else name


def _expert_names(name: str, experts: int, form: ExpertNames) -> Iterator[str]:
    """Names on disk of the tensors of a stack, in order."""
    layer, _, projection = name.partition(_EXPERTS)
    if projection in _MATRICES:
        projection = f"{form.matrices[_MATRICES.index(projection)]}.weight"
    return (f"{layer}{form.module}.experts.{expert}.{projection}" for expert in range(experts))


def _joined_name(name: str) -> tuple[str, int]:
    """The fused tensor that contains a stack, and how many stacks it contains."""
    layer = name.partition(_EXPERTS)[0]
    return (layer + _DOWN_JOINED, 1) if name.endswith(_DOWN) else (layer + _JOINED, 2)
