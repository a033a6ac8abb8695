"""Files that name tensors otherwise or join matrices, as the records of families say. Needs numpy only.

=========  ====================================================  =============================================
family     on disk                                               in memory
=========  ====================================================  =============================================
GLM        mlp.gate_up_proj [2F, D]                              mlp.gate_proj and up_proj [F, D]
ChatGLM    transformer.encoder.layers.N.self_attention           model.layers.N.self_attn.q_proj, k_proj and
           .query_key_value [(H + 2K) d, D]                      v_proj [H d, D], [K d, D], [K d, D]
           transformer.encoder.layers.N.mlp.dense_h_to_4h        model.layers.N.mlp.gate_proj and up_proj
Qwen2-MoE  mlp.shared_expert                                     mlp.shared_experts
TeleChat2  transformer.h.N.self_attention.key_value [2K d, D]:   model.layers.N.self_attn.k_proj and v_proj
           of each head the key's rows, then the value's
=========  ====================================================  =============================================

ChatGLM's are read under MindSpore Transformers' names too, joined or not. The forms of GLM and Qwen2-MoE are written:
transformers has classes for them. H query heads, K key/value heads of d numbers, F width of the feed-forward layer, D
hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.families import FAMILIES
from trainer.parallel.sharding import ArrayPart
from trainer.storage.tensor_file import AnyArray, concatenated

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

Weights = dict[str, AnyArray]

_JOINED = {
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.kv_proj": ("self_attn.k_proj", "self_attn.v_proj"),
}
"""Matrices that files join, each above the next; in the last one the heads take turns."""
_PUBLISHED = {theirs: ours for family in FAMILIES.values() for theirs, ours in family.published_names.items()}
_RENAMED = {theirs: ours for family in FAMILIES.values() for ours, theirs in family.tensor_names.items()}
_OTHERWISE = (*_RENAMED, *(f".{joined}." for family in FAMILIES.values() for joined in family.joined_tensors))
"""Pieces of names that only files in another form have, beside "transformer." at the beginning."""


class DiskPart(NamedTuple):
    """Where numbers of a parameter are in a tensor on disk.

    Attributes:
        name: Of the parameter.
        own: The range of the flattened array in memory.
        part: The same numbers in the tensor.
    """

    name: str
    own: slice
    part: ArrayPart


def split_joined(weights: Mapping[str, AnyArray], settings: ModelConfig) -> Weights:
    """Returns the tensors of a file under our names, each matrix by itself; others are kept as they are."""
    if not any(name.startswith("transformer.") or any(piece in name for piece in _OTHERWISE) for name in weights):
        return dict(weights)
    found: Weights = {}
    for name, array in weights.items():
        if name != "transformer.rotary_pos_emb.inv_freq":  # computed from the configuration
            found |= _split(_name_in_memory(name), array, settings)
    return found


def _name_in_memory(name: str) -> str:
    pieces = _PUBLISHED | _RENAMED if name.startswith("transformer.") else _RENAMED
    for theirs, ours in pieces.items():
        name = name.replace(theirs, ours)
    return name


def _split(name: str, array: AnyArray, settings: ModelConfig) -> Iterator[tuple[str, AnyArray]]:
    """Yields the matrices, or biases, in a tensor by name. Where sizes do not fit, so do those of the parts."""
    module, _, kind = name.rpartition(".")
    joined = next((joined for joined in _JOINED if module.endswith(f".{joined}")), "")
    if not joined:
        yield name, array
        return
    queries, keys = settings.num_heads * settings.head_size, settings.kv_heads * settings.head_size
    if joined == "mlp.gate_up_proj":
        parts = _cut(array, settings.ffn_size)
    elif joined == "self_attn.qkv_proj":
        parts = _cut(array, queries, queries + keys)
    elif array.shape[0] == 2 * keys:
        size = settings.head_size
        parts = [concatenated([array[start : start + size] for start in range(number * size, 2 * keys, 2 * size)])
                 for number in range(2)]  # fmt: skip
    else:
        parts = _cut(array, -(-array.shape[0] // 2))
    for matrix, part in zip(_JOINED[joined], parts, strict=True):
        yield f"{module.removesuffix(joined)}{matrix}.{kind}", part


def _cut(array: AnyArray, *rows: int) -> list[AnyArray]:
    """Cuts an array into the rows up to each of these, and the rest."""
    return [array[start:end] for start, end in zip((0, *rows), (*rows, array.shape[0]), strict=True)]


def place_on_disk(name: str, one: DiskPart, kind: str) -> tuple[str, DiskPart]:
    """Returns the tensor of a family's files that has these numbers, and where it has them.

    Args:
        name: A tensor under its own name, which `one` is a part of.
        kind: The class that the tensors are saved as.
    """
    if kind not in FAMILIES:
        return name, one
    for ours, theirs in FAMILIES[kind].tensor_names.items():
        name = name.replace(ours, theirs)
    module, _, suffix = name.rpartition(".")
    for joined, matrices in FAMILIES[kind].joined_tensors.items():
        for place, matrix in enumerate(matrices):
            if module.endswith(f".{matrix}"):
                part = _below(one.part, place, len(matrices))
                return f"{module.removesuffix(matrix)}{joined}.{suffix}", one._replace(part=part)
    return name, one


def _below(part: ArrayPart, place: int, count: int) -> ArrayPart:
    """Returns the same part of one of `count` matrices of a shape, each above the next."""
    rows, *others = part.whole
    shard = part.shard._replace(start=(part.shard.start[0] + place * rows, *part.shard.start[1:]))
    return ArrayPart((count * rows, *others), shard, part.flat)
