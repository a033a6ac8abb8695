"""Tensors on disk, which may have other names than in memory, join matrices, or be one expert's. Needs numpy only.

=========  ====================================================  =============================================
family     on disk                                               in memory
=========  ====================================================  =============================================
any        mlp.experts.{e}.{gate,up,down}_proj.weight            mlp.experts.{gate,up,down}_proj.weight
           [F, D], [F, D], [D, F]                                [E, F, D], [E, F, D], [E, D, F]
fused      mlp.experts.gate_up_proj [E, 2F, D] and               the same
           mlp.experts.down_proj [E, D, F]
Mixtral    block_sparse_moe.experts.{e}.{w1,w3,w2}.weight,       the same,
           block_sparse_moe.gate.weight                          mlp.gate.weight
GLM, Phi3  mlp.gate_up_proj [2F, D]                              mlp.gate_proj and up_proj [F, D]
Phi3       self_attn.qkv_proj [(H + 2K) d, D]                    self_attn.q_proj, k_proj and v_proj
ChatGLM    transformer.encoder.layers.N.self_attention           model.layers.N.self_attn.q_proj, k_proj and
           .query_key_value [(H + 2K) d, D]                      v_proj [H d, D], [K d, D], [K d, D]
           transformer.encoder.layers.N.mlp.dense_h_to_4h        model.layers.N.mlp.gate_proj and up_proj
Granite    block_sparse_moe.input_linear.weight [E, 2F, D],      the same,
           block_sparse_moe.output_linear.weight [E, D, F],
           block_sparse_moe.router.layer.weight,                 mlp.gate.weight
           shared_mlp.input_linear [2S, D]                       mlp.shared_experts.gate_proj and up_proj [S, D]
Qwen2-MoE  mlp.shared_expert                                     mlp.shared_experts
ERNIE 4.5  mlp.moe_statics.e_score_correction_bias [1, E]        mlp.gate.e_score_correction_bias [E]
TeleChat2  transformer.h.N.self_attention.key_value [2K d, D]:   model.layers.N.self_attn.k_proj and v_proj
           of each head the key's rows, then the value's
=========  ====================================================  =============================================

All forms can be read, ChatGLM's also under MindSpore Transformers' names, joined or not. What is written are the names
that the classes of transformers look for: not those of ChatGLM and TeleChat2, and not the form "fused", which
transformers 5 has in memory and can write. `trainer.config.families` has the names.

H query heads, K key/value heads of d numbers, E experts, F width of an expert or feed-forward layer, S width of the
shared experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.config.families import FAMILIES
from trainer.config.family.record import ExpertNames
from trainer.parallel.sharding import Shard, ShardSpec, full_shard_spec
from trainer.storage.interleaved_experts import join_interleaved_experts, split_interleaved_experts
from trainer.storage.tensor_file import ArrayOrLazyArray, concatenate_arrays, read_shard, stack_arrays

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]

PER_EXPERT = ExpertNames()
FUSED = ExpertNames(matrices=("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj"), is_stacked=True)
_EXPERTS = ".mlp.experts."
_ROUTER = ".mlp.gate.weight"
_BIAS = f".{PER_EXPERT.bias}"
_MATRICES = tuple(f"{name}.weight" for name in PER_EXPERT.matrices)
_JOINED = {
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.kv_proj": ("self_attn.k_proj", "self_attn.v_proj"),
    "shared_mlp.input_linear": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
}
"""Matrices that files join, each above the next; in self_attn.kv_proj the heads take turns."""
_PUBLISHED = {theirs: ours for family in FAMILIES.values() for theirs, ours in family.published_names.items()}
_JOINED_PIECES = tuple(f".{joined}." for family in FAMILIES.values() for joined in family.joined_tensors)


# ---- matrices that are joined ----------------------------------------------------------------------------------------


def split_fused_tensors(weights: Mapping[str, ArrayOrLazyArray], settings: ModelConfig) -> dict[str, ArrayOrLazyArray]:
    """Returns the tensors of a file under our names, each matrix by itself; others are kept as they are."""
    weights = split_interleaved_experts(weights)
    renamed = _renamed_pieces(weights)
    is_joined = any(piece in name for name in weights for piece in _JOINED_PIECES)
    if not renamed and not is_joined and not any(name.startswith("transformer.") for name in weights):
        return dict(weights)
    tensors: dict[str, ArrayOrLazyArray] = {}
    for name, array in weights.items():
        if name == "transformer.rotary_pos_emb.inv_freq":  # computed from the configuration
            continue
        pieces = renamed
        if name.startswith("transformer."):
            pieces = _PUBLISHED | renamed
        translated = name
        for theirs, ours in pieces.items():
            translated = translated.replace(theirs, ours)
        tensors |= _split(translated, array, settings)
    return tensors


def _renamed_pieces(names: Collection[str]) -> dict[str, str]:
    """Returns the pieces of names in a file -> ours, in the order in which they are replaced.

    They are those of the family that has most of them, and all of them in this file: a name may mean another tensor in
    another family.
    """
    result: dict[str, str] = {}
    for family in FAMILIES.values():
        pieces = {theirs: ours for ours, theirs in reversed(tuple(family.tensor_names.items()))}
        if len(pieces) > len(result) and all(any(piece in name for name in names) for piece in pieces):
            result = pieces
    return result


def _split(name: str, array: ArrayOrLazyArray, settings: ModelConfig) -> Iterator[tuple[str, ArrayOrLazyArray]]:
    """Yields the matrices, or biases, in a tensor by name. A wrong size gives matrices of wrong sizes, not an error."""
    module, _, kind = name.rpartition(".")
    joined = next((joined for joined in _JOINED if module.endswith(f".{joined}")), "")
    size = settings.head_size
    queries = settings.num_heads * size
    keys = settings.kv_heads * size
    if not joined or not array.ndim:
        yield name, array
        return
    if joined == "mlp.gate_up_proj":
        parts = _cut(array, settings.ffn_size)
    elif joined == "shared_mlp.input_linear":
        parts = _cut(array, settings.shared_expert_size)
    elif joined == "self_attn.qkv_proj":
        parts = _cut(array, queries, queries + keys)
    elif array.shape[0] == 2 * keys:
        heads = _cut(array, *range(size, 2 * keys, size))
        parts = [concatenate_arrays(heads[0::2]), concatenate_arrays(heads[1::2])]
    else:
        parts = _cut(array, -(-array.shape[0] // 2))
    for matrix, part in zip(_JOINED[joined], parts, strict=True):
        yield f"{module.removesuffix(joined)}{matrix}.{kind}", part


def _cut(array: ArrayOrLazyArray, *rows: int) -> list[ArrayOrLazyArray]:
    """Cuts an array into the rows up to each of these, and the rest."""
    return [array[start:end] for start, end in zip((0, *rows), (*rows, array.shape[0]), strict=True)]


# ---- experts, which are stacked in memory ----------------------------------------------------------------------------


def find_expert_names(names: Iterable[str]) -> ExpertNames:
    """Returns how a file with these tensor names stores its experts."""
    others = {family.expert_names for family in FAMILIES.values()} - {PER_EXPERT}
    endings = {f".{form.module}.{form.router}.weight": form for form in others}
    endings.pop(_ROUTER, None)
    for form in (*others, FUSED):
        if form.bias != PER_EXPERT.bias:
            endings[f".{form.bias}"] = form
        if form.is_stacked:
            endings |= {f".{form.module}.{matrix}": form for matrix in form.matrices}
    for name in names:
        for ending, form in endings.items():
            if name.endswith(ending):
                return form
    return PER_EXPERT


class _OnDisk(NamedTuple):
    """How a file stores a parameter.

    Attributes:
        tensors: The name of the tensor that has it, or of one for each expert.
        shape: The shape of each of them.
        start: Where the parameter starts in its tensor, which may have an axis before those of the parameter; None:
            there is a tensor for each expert.
    """

    tensors: list[str]
    shape: tuple[int, ...]
    start: tuple[int, ...] | None


def _on_disk(name: str, shape: tuple[int, ...], form: ExpertNames) -> _OnDisk:
    """Returns how a file whose experts have this form stores a parameter with this name and shape in memory."""
    layer, is_expert, matrix = name.partition(_EXPERTS)
    if not is_expert:
        if form.bias_is_row and name.endswith(_BIAS):
            shape = (1, *shape)
        name = name.replace(_ROUTER, f".{form.module}.{form.router}.weight")
        return _OnDisk([name.replace(_BIAS, f".{form.bias}")], shape, (0,) * len(shape))
    if matrix in _MATRICES:
        place = _MATRICES.index(matrix)
        matrix = form.matrices[place]
        if form.is_stacked:
            experts, rows, columns = shape
            stack = (experts, rows * form.matrices.count(matrix), columns)
            start = (0, rows * form.matrices[:place].count(matrix), 0)
            return _OnDisk([f"{layer}.{form.module}.{matrix}"], stack, start)
        matrix += ".weight"
    tensors = [f"{layer}.{form.module}.experts.{expert}.{matrix}" for expert in range(shape[0])]
    return _OnDisk(tensors, shape[1:], None)


def disk_shapes(shapes: Shapes, form: ExpertNames = PER_EXPERT) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes on disk of parameters with these names and shapes in memory."""
    stored = [_on_disk(name, shape, form) for name, shape in shapes.items()]
    return {tensor: one.shape for one in stored for tensor in one.tensors}


def from_disk(weights: Mapping[str, ArrayOrLazyArray], shapes: Shapes) -> dict[str, ArrayOrLazyArray]:
    """Returns parameters by their names in memory; `shapes` are those in memory.

    `weights` are the tensors of a file in any form, with every tensor of `disk_shapes`.
    """
    form = find_expert_names(weights)
    parameters = {}
    for name, shape in shapes.items():
        tensors, shape_on_disk, start = _on_disk(name, shape, form)
        array = weights[tensors[0]]
        if start is None:
            array = stack_arrays([weights[tensor] for tensor in tensors])
        elif len(start) > len(shape):
            array = read_shard(array)[0]
        elif shape != shape_on_disk:
            array = array[Shard(start, shape).slices]
        parameters[name] = array
    return parameters


# ---- writing ---------------------------------------------------------------------------------------------------------


class DiskSlice(NamedTuple):
    """The place of some elements of a parameter in a tensor on disk.

    Attributes:
        name: The name of the parameter.
        local_range: The elements of the flattened array in memory.
        spec: The same elements in the tensor on disk.
    """

    name: str
    local_range: slice
    spec: ShardSpec


def disk_slices(parts: Mapping[str, ShardSpec], shapes: Shapes, kind: str) -> dict[str, list[DiskSlice]]:
    """Returns the slices of these shards of parameters that each tensor on disk gets, one tensor for each expert.

    Args:
        shapes: Global shapes of all parameters of the model.
        kind: The class that they are saved as: `model.arch.type` or another that computes the same.
    """
    form = PER_EXPERT
    if kind in FAMILIES:
        form = FAMILIES[kind].expert_names
    slices: dict[str, list[DiskSlice]] = {}
    for name, part in parts.items():
        tensors, shape, start = _on_disk(name, part.global_shape, form)
        if start is None:
            pieces = [(tensors[expert], DiskSlice(name, local, one)) for expert, one, local in part.items()]
        else:
            pieces = [(tensors[0], DiskSlice(name, slice(0, part.size), _spec_within(part, shape, start)))]
        for tensor, piece in pieces:
            tensor_of_class, placed = _name_in_class(tensor, piece, shapes, kind)
            slices.setdefault(tensor_of_class, []).append(placed)
    return slices


def _name_in_class(tensor: str, piece: DiskSlice, shapes: Shapes, kind: str) -> tuple[str, DiskSlice]:
    """Returns the name that a model class uses for a tensor, and the place of a slice if the class joins matrices."""
    if kind not in FAMILIES:
        return tensor, piece
    module, _, suffix = tensor.rpartition(".")
    for joined, matrices in FAMILIES[kind].joined_tensors.items():
        for place, matrix in enumerate(matrices):
            if module.endswith(f".{matrix}"):
                stem = module.removesuffix(matrix)
                rows = [shapes[f"{stem}{each}.{suffix}"][0] for each in matrices]
                shape = (sum(rows), *piece.spec.global_shape[1:])
                spec = _spec_within(piece.spec, shape, (sum(rows[:place]), *(0 for _ in shape[1:])))
                return f"{stem}{joined}.{suffix}", piece._replace(spec=spec)
    for ours, theirs in FAMILIES[kind].tensor_names.items():
        tensor = tensor.replace(ours, theirs)
    return tensor, piece


def _spec_within(part: ShardSpec, shape: tuple[int, ...], start: tuple[int, ...]) -> ShardSpec:
    """Returns the spec of a shard of an array in one of this shape, which has the array from `start` on."""
    before = len(shape) - len(part.global_shape)  # axes
    places = ((0,) * before + part.shard.start, start)
    shard = Shard(tuple(map(sum, zip(*places, strict=True))), (1,) * before + part.shard.shape)
    return ShardSpec(shape, shard, part.flat_range)


def to_disk(arrays: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Returns tensors to save as in `disk_slices`, as views where they are not made of several parameters.

    Experts of gpt-oss are joined as in its files; checkpoints have one tensor for each.
    """
    tensors = {}
    specs = {name: full_shard_spec(array.shape) for name, array in arrays.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    for name, parts in disk_slices(specs, shapes, kind).items():
        numbers = [arrays[one.name].reshape(-1)[one.local_range].reshape(one.spec.shard.shape) for one in parts]
        shape = parts[0].spec.global_shape
        if len(parts) == 1:
            tensors[name] = numbers[0].reshape(shape)
            continue
        tensors[name] = np.empty(shape, numbers[0].dtype)
        for one, array in zip(parts, numbers, strict=True):
            tensors[name][one.spec.shard.slices] = array
    if kind in FAMILIES and FAMILIES[kind].interleaves_experts:
        return join_interleaved_experts(tensors)
    return tensors
