"""Files that name tensors otherwise or join matrices. Needs numpy only.

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

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from trainer.config.families import FAMILIES
from trainer.parallel.sharding import ArrayPart
from trainer.storage.tensor_file import AnyArray, concatenated

if TYPE_CHECKING:
    from trainer.config.schema.model import ModelConfig

Weights = dict[str, AnyArray]

_PAIR, _ALL, _KEYS_AND_VALUES = "mlp.gate_up_proj", "self_attn.qkv_proj", "self_attn.kv_proj"
_GATE_AND_UP = (".mlp.gate_proj.", ".mlp.up_proj.")
_SHARED, _SHARED_HERE = ".mlp.shared_expert.", ".mlp.shared_experts."
_NAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^transformer\.embedding\.(word_embeddings\.weight|embedding_weight)$", "model.embed_tokens.weight"),
        (r"^transformer\.word_embeddings\.", "model.embed_tokens."),
        (r"^transformer\.(encoder\.layers|h)\.", "model.layers."),
        (r"^transformer\.(encoder\.final_layernorm|ln_f)\.", "model.norm."),
        (r"^transformer\.output_layer\.", "lm_head."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.self_attention\.query_key_value\.", f".{_ALL}."),
        (r"\.self_attention\.key_value\.", f".{_KEYS_AND_VALUES}."),
        (r"\.self_attention\.(?:w([qkv])|(q)uery)\.", r".self_attn.\1\2_proj."),
        (r"\.mlp\.dense_h_to_4h\.", f".{_PAIR}."),
        (r"\.mlp\.dense_left\.", ".mlp.gate_proj."),
        (r"\.mlp\.dense_right\.", ".mlp.up_proj."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.down_proj."),
        (r"\.mlp\.local_experts\.", ".mlp.experts."),
        (r"\.mlp\.router\.", ".mlp.gate."),
    )
)


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
    """The tensors of a file under our names, each matrix by itself; others are kept as they are."""
    parts = f".{_PAIR}.", _SHARED
    if not any(name.startswith("transformer.") or any(part in name for part in parts) for name in weights):
        return dict(weights)
    found: Weights = {}
    for name, array in weights.items():
        if name != "transformer.rotary_pos_emb.inv_freq":  # computed from the configuration
            found |= _split(_renamed(name), array, settings)
    return found


def join(parts: Mapping[str, Sequence[DiskPart]], family: str) -> dict[str, list[DiskPart]]:
    """What the tensors of a family's files have of parameters, from what each tensor has under its own name; `family`
    is the class that they are saved as."""
    if family == "Qwen2MoeForCausalLM":
        return {name.replace(_SHARED_HERE, _SHARED): list(found) for name, found in parts.items()}
    if family not in FAMILIES or not FAMILIES[family].joins_gate_up:
        return {name: list(found) for name, found in parts.items()}
    joined: dict[str, list[DiskPart]] = {}
    for name, found in parts.items():
        place = next((place for place, one in enumerate(_GATE_AND_UP) if one in name), None)
        if place is not None:
            name = name.replace(_GATE_AND_UP[place], ".mlp.gate_up_proj.")
            found = [one._replace(part=_below(one.part, place)) for one in found]
        joined.setdefault(name, []).extend(found)
    return joined


def _below(part: ArrayPart, place: int) -> ArrayPart:
    """The same part of one of two matrices of a shape, the first above the second."""
    rows, *others = part.whole
    shard = part.shard._replace(start=(part.shard.start[0] + place * rows, *part.shard.start[1:]))
    return ArrayPart((2 * rows, *others), shard, part.flat)


def _renamed(name: str) -> str:
    if name.startswith("transformer."):
        for pattern, ours in _NAMES:
            name = pattern.sub(ours, name)
    return name.replace(_SHARED, _SHARED_HERE)


def _split(name: str, array: AnyArray, settings: ModelConfig) -> Iterator[tuple[str, AnyArray]]:
    """The matrices, or biases, in a tensor by name. Where sizes do not fit, so do those of the parts."""
    module, _, kind = name.rpartition(".")
    layer = next((module.removesuffix(joined) for joined in (_PAIR, _ALL, _KEYS_AND_VALUES)
                  if module.endswith(f".{joined}")), "")  # fmt: skip
    queries, keys = settings.num_heads * settings.head_size, settings.kv_heads * settings.head_size
    if not layer:
        yield name, array
    elif module.endswith(_PAIR):
        yield from zip(_names(layer, "mlp", ("gate", "up"), kind), _cut(array, settings.ffn_size), strict=True)
    elif module.endswith(_ALL):
        parts = _cut(array, queries, queries + keys)
        yield from zip(_names(layer, "self_attn", "qkv", kind), parts, strict=True)
    elif array.shape[0] == 2 * keys:
        size = settings.head_size
        parts = (concatenated([array[start : start + size] for start in range(number * size, 2 * keys, 2 * size)])
                 for number in range(2))  # fmt: skip
        yield from zip(_names(layer, "self_attn", "kv", kind), parts, strict=True)
    else:
        yield from zip(_names(layer, "self_attn", "kv", kind), _cut(array, -(-array.shape[0] // 2)), strict=True)


def _cut(array: AnyArray, *rows: int) -> list[AnyArray]:
    """The rows up to each of these, and the rest."""
    return [array[start:end] for start, end in zip((0, *rows), (*rows, array.shape[0]), strict=True)]


def _names(layer: str, home: str, parts: str | tuple[str, ...], kind: str) -> list[str]:
    return [f"{layer}{home}.{part}_proj.{kind}" for part in parts]
