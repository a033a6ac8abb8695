"""Writes checkpoints as MindSpore Transformers does, from weights under Hugging Face's names.

Follows its source at commit 167a50dec750bf8ea0b03f1dabf2818c28747a5a: the layouts of mindformers/checkpoint/converter/
convert_op.py and toolkit/weight_convert/deepseekv3/convert_deepseekv3_hf_weight.py, the folders of mindformers/
checkpoint/{checkpoint,metadata,sharded_tensor,fully_parallel,utils}.py, and CheckpointMonitor of mindformers/core/
callback/callback.py. The parameters of its PyNative model are those of mindformers/pynative/transformers/.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

Arrays = dict[str, np.ndarray]
TensorMap = tuple[tuple[str, ...], ...]
"""For each axis of a tensor the names of the axes of the device matrix that shard it."""

_NAMES = {
    "model.embed_tokens.": "embedding.word_embeddings.",
    "model.norm.": "decoder.final_layernorm.",
    "lm_head.": "output_layer.",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    ".self_attn.o_proj.": ".self_attention.linear_proj.",
    ".self_attn.q_norm.": ".self_attention.q_layernorm.",
    ".self_attn.k_norm.": ".self_attention.k_layernorm.",
    ".self_attn.q_a_layernorm.": ".self_attention.q_layernorm.",
    ".mlp.gate.weight": ".mlp.router.weight",
    ".mlp.down_proj.": ".mlp.linear_fc2.",
    ".mlp.shared_experts.down_proj.": ".mlp.shared_experts.linear_fc2.",
    ".shared_head.norm.": ".final_layernorm.",
}
_GRAPH = {
    ".self_attn.q_a_proj.": ".self_attention.linear_q_down_proj.",
    ".self_attn.q_b_proj.": ".self_attention.linear_q_up_proj.",
    ".self_attn.kv_a_proj_with_mqa.": ".self_attention.linear_kv_down_proj.",
    ".self_attn.kv_b_proj.": ".self_attention.linear_kv_up_proj.",
    ".self_attn.kv_a_layernorm.": ".self_attention.kv_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".mlp.router.expert_bias",
}
_PYNATIVE = {
    ".self_attn.q_b_proj.": ".self_attention.linear_qb.",
    ".self_attn.kv_b_proj.": ".self_attention.linear_kvb.",
    ".self_attn.kv_a_layernorm.": ".self_attention.k_layernorm.",
    ".mlp.gate.e_score_correction_bias": ".mlp.expert_bias",
}


class Sizes(NamedTuple):
    """What the converters read from the model's configuration."""

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0


def to_mindformers(weights: Arrays, sizes: Sizes, pynative: bool) -> Arrays:
    """Converts weights under Hugging Face's names, each expert by itself."""
    left = dict(weights)
    converted: Arrays = {}
    first_of_joined = ("q_proj.weight", "q_a_proj.weight", "gate_proj.weight")
    for name in sorted(weights, key=lambda name: not name.endswith(first_of_joined)):
        if name not in left:
            continue
        stem = name.removesuffix("q_proj.weight")
        if stem != name and f"{stem}k_proj.weight" in left:  # QKVConvertOp
            parts = [left.pop(f"{stem}{matrix}_proj.weight") for matrix in "qkv"]
            groups = [part.reshape(sizes.kv_heads, -1, part.shape[-1]) for part in parts]
            converted[f"{stem}linear_qkv.weight"] = np.concatenate(groups, 1).reshape(-1, parts[0].shape[-1])
        elif name.endswith("q_a_proj.weight") and pynative:  # MLASelfAttention
            stem = name.removesuffix("q_a_proj.weight")
            parts = [left.pop(name), left.pop(f"{stem}kv_a_proj_with_mqa.weight")]
            converted[f"{stem}linear_qkv.weight"] = np.concatenate(parts)
        elif match := re.fullmatch(r"(.*\.mlp\.experts\.)\d+\.(gate|up|down)_proj\.weight", name):  # ExpertsConvertOp
            stem = match[1]
            gate, up, down = (
                np.stack([left.pop(f"{stem}{expert}.{matrix}_proj.weight") for expert in range(sizes.experts)])
                for matrix in ("gate", "up", "down")
            )
            both = np.concatenate([gate.transpose(0, 2, 1), up.transpose(0, 2, 1)], 2)
            down = down.transpose(0, 2, 1)
            if not pynative:
                both, down = both.reshape(-1, both.shape[-1]), down.reshape(-1, down.shape[-1])
            converted[f"{stem}weight1"], converted[f"{stem}weight2"] = both, down
            if pynative:
                converted[f"{stem.removesuffix('experts.')}tokens_per_expert"] = np.zeros(sizes.experts, np.float32)
        elif name.endswith("gate_proj.weight"):  # ConcatConvertOp, interleaved
            stem = name.removesuffix("gate_proj.weight")
            parts = [left.pop(name), left.pop(f"{stem}up_proj.weight")]
            converted[f"{stem}linear_fc1.weight"] = np.stack(parts, 1).reshape(-1, parts[0].shape[-1])
        elif not name.endswith("up_proj.weight"):
            converted[name] = left.pop(name)
    renamed = {}
    for name, array in converted.items():
        for ours, theirs in (_NAMES | (_PYNATIVE if pynative else _GRAPH)).items():
            name = name.replace(ours, theirs)
        name = name.replace(".self_attn.", ".self_attention.")
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
            layer, rest = int(match[1]), match[2]
            name = f"decoder.layers.{layer}.{rest}"
            if layer >= sizes.layers:
                of_module = rest.startswith(("enorm", "hnorm", "eh_proj", "final_layernorm"))
                name = f"mtp.layers.{layer - sizes.layers}.{'' if of_module else 'transformer_layer.'}{rest}"
        renamed[name] = np.ascontiguousarray(array)
    return renamed


STATES = ("adam_m", "adam_v", "muon_m", "main_param")


def optimizer_state(weights: Arrays) -> Arrays:
    """Returns moments of AdamW that must not be taken for weights."""
    return {f"{kind}.{name}": array + 1 for kind in STATES[:2] for name, array in weights.items()}


def _parameter_of(name: str) -> str:
    """Returns the parameter that a state array is named after."""
    kind, _, parameter = name.partition(".")
    return parameter if kind in STATES else name


def tensor_parallel_map(name: str, array: np.ndarray) -> TensorMap:
    """Returns how tensor and expert parallelism shard a parameter."""
    axis = {"linear_proj": 1, "linear_fc2": 1}
    columns = ("linear_qkv", "linear_fc1", "linear_q_up_proj", "linear_kv_up_proj", "linear_qb", "linear_kvb",
               "word_embeddings", "output_layer", "weight1", "weight2")  # fmt: skip
    places = [part for part in name.split(".") if part in axis or part in columns]
    # Latent attention computes linear_qkv on every rank.
    sharded = axis.get(places[0], 0) if places and array.ndim > 1 else None
    return tuple(("tp",) if number == sharded else () for number in range(array.ndim))


def fully_sharded_map(name: str, array: np.ndarray) -> TensorMap:
    """Returns how fully sharded data parallelism shards the first axis beside tensor parallelism."""
    first, *others = tensor_parallel_map(name, array)
    return ((*first, "dp"), *others)


def _shard(array: np.ndarray, tensor_map: TensorMap, matrix: dict[str, int], rank: int) -> tuple[np.ndarray, int]:
    """Returns a rank's shard and its number, as `_rank_id_with_slice_id` of sharded_tensor.py counts."""
    index = dict(zip(matrix, np.unravel_index(rank, tuple(matrix.values())), strict=True))
    number, slices = 0, []
    for axes, size in zip(tensor_map, array.shape, strict=True):
        place = 0
        for axis in axes:
            place = place * matrix[axis] + int(index[axis])
            number = number * matrix[axis] + int(index[axis])
        local = size // math.prod(matrix[axis] for axis in axes)
        slices.append(slice(place * local, (place + 1) * local))
    return np.ascontiguousarray(array[tuple(slices)]), number


def _layout(tensor_map: TensorMap, matrix: dict[str, int]) -> dict[str, Any]:
    places = list(matrix)[::-1]
    axes = [[places.index(axis) for axis in one] or [-1] for one in tensor_map]
    return {
        "device_matrix": list(matrix.values()), "tensor_map": [one[0] if len(one) == 1 else one for one in axes],
        "interleaved_parallel": False, "alias_name": list(matrix), "rank_list": list(range(math.prod(matrix.values()))),
    }  # fmt: skip


def write_iteration(
    folder: Path, weights: Arrays, matrix: dict[str, int] | None = None, maps: Any = tensor_parallel_map,
    remove_redundancy: bool = False, stages: int = 1, *, state: Arrays | None = None, common: Any = None,
) -> Path:  # fmt: skip
    """Writes iteration_00000004 and the tracker file, as save_checkpoint of checkpoint.py; returns the folder of both.

    Args:
        matrix: The device matrix of a stage: the sizes of its axes by name; None: a single device.
        maps: How a parameter is sharded: (name, array) -> tensor map.
        remove_redundancy: Each shard is only in the file of one rank, see distribute_shards of fully_parallel.py.
        stages: Pipeline stages, which share the layers.
        state: The arrays of the optimizer, named after their parameters.
        common: Further keys of common.json.
    """
    state = (optimizer_state(weights) if state is None else state) | {"global_step": np.array([4], np.int64)}
    path = folder / "iteration_00000004"
    path.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    (path / "common.json").write_text(json.dumps({"epoch_num": 1, "step_num": 4, "global_step": 4} | (common or {})))
    if matrix is None:
        _save(weights, path / "checkpoint-model-0000000-0000001.safetensors")
        _save(state, path / "checkpoint-opt-0000000-0000001.safetensors")
        return folder
    size = math.prod(matrix.values())
    files: list[Arrays] = [{} for _ in range(size * stages)]
    tensors: dict[str, Any] = {}
    storage: dict[str, list[dict[str, Any]]] = {}
    everything = {"model": weights, "opt": state}
    for kind, arrays in everything.items():
        files = [{} for _ in range(size * stages)]
        for (name, array), local in itertools.product(arrays.items(), range(size)):
            rank = local + size * _stage(name, stages)
            tensor_map: TensorMap = ((),)
            if name != "global_step":
                tensor_map = maps(_parameter_of(name), array)
            shard, number = _shard(array, tensor_map, matrix, local)
            key = str((name, (number,)))
            about = tensors.setdefault(name, {
                "properties": {"dtype": "Float32", "replica_id": [0], "allow_shape_mismatch": False,
                               "allow_to_save": True},
                "global_shape": list(array.shape),
                "axis_fragmentations": [math.prod(matrix[axis] for axis in axes) for axes in tensor_map],
                "layout": _layout(tensor_map, matrix), "chunk": []})  # fmt: skip
            chunk = {"global_offset": [number], "local_shape": list(shard.shape)}
            if chunk not in about["chunk"]:
                about["chunk"].append(chunk)
            if not (remove_redundancy and key in storage):
                files[rank][name] = shard
                file = f"checkpoint-{kind}-{rank:07d}-{len(files):07d}.safetensors"
                storage.setdefault(key, []).append({"file_name": file, "storage_rank": rank, "rank_group": [rank]})
        for rank, arrays_of_rank in enumerate(files):
            _save(arrays_of_rank, path / f"checkpoint-{kind}-{rank:07d}-{len(files):07d}.safetensors")
    (path / "metadata.json").write_text(json.dumps({"state_dict_metadata": tensors, "storage_data": storage}, indent=4))
    return folder


def _stage(name: str, stages: int) -> int:
    match = re.search(r"decoder\.layers\.(\d+)", name)
    if match:
        return min(int(match[1]), stages - 1)
    return 0 if "embedding" in name else stages - 1


def _save(arrays: Arrays, file: Path) -> None:
    save_file(dict(sorted(arrays.items())), file, metadata={"format": "ms"})


def write_rank_folders(
    folder: Path, weights: Arrays, matrix: dict[str, int], maps: Any = tensor_parallel_map, *,
    optimizer_parallel: bool = False, remove_redundancy: bool = False, strategy: bool = True, saved_step: int = 4,
    state: Arrays | None = None, counters: Any = None,
) -> Path:  # fmt: skip
    """Writes checkpoint/rank_N and strategy/, as CheckpointMonitor with use_legacy_format; returns checkpoint/.

    Args:
        optimizer_parallel: Shard each parameter further, over all ranks that have the same shard.
        state: The arrays of the optimizer, named after their parameters, and sharded as these.
        counters: Further numbers that each file has.
    """
    everything = weights | (optimizer_state(weights) if state is None else state)
    size = math.prod(matrix.values())
    saved: set[tuple[str, int]] = set()
    layouts = {name: maps(_parameter_of(name), array) for name, array in everything.items()}
    for rank in range(size):
        arrays: dict[str, Any] = {}
        for name, array in everything.items():
            shard, number = _shard(array, layouts[name], matrix, rank)
            step, count = _optimizer_shards(array, layouts[name], matrix, optimizer_parallel)
            if count:
                rows = shard.shape[0] // count
                index = rank // step % count
                shard = np.ascontiguousarray(shard[index * rows : (index + 1) * rows])
                number = number * count + index
            if not (remove_redundancy and (name, number) in saved):
                saved.add((name, number))
                arrays[name] = shard
        path = folder / "checkpoint" / f"rank_{rank}"
        path.mkdir(parents=True, exist_ok=True)
        numbers = {"epoch_num": np.array(1), "step_num": np.array(saved_step), "loss_scale": np.array(1.0, np.float32),
                   "global_step": np.array([saved_step], np.int32)} | (counters or {})  # fmt: skip
        name = f"model_rank_{rank}-1_{saved_step}.safetensors"
        _save(arrays | numbers, path / name)
        about = {"last_epoch": 1, "last_step": saved_step, "last_ckpt_file": name}
        (path / "meta.json").write_text(json.dumps(about))
        if strategy:
            target = folder / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt"
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(_strategy(weights, layouts, matrix, optimizer_parallel))
    return folder / "checkpoint"


def _optimizer_shards(
    array: np.ndarray, tensor_map: TensorMap, matrix: dict[str, int], wanted: bool
) -> tuple[int, int]:
    """Returns step and number of the ranks that share a shard along its first axis; 0, 0 if it is too small."""
    sharding = {axis for axes in tensor_map for axis in axes}
    count = math.prod(size for axis, size in matrix.items() if axis not in sharding)
    step = math.prod(matrix[axis] for axis in sharding)
    rows = array.shape[0] // math.prod(matrix[axis] for axis in tensor_map[0])
    return (step, count) if wanted and count > 1 and rows % count == 0 else (0, 0)


def _strategy(
    weights: Arrays, layouts: dict[str, TensorMap], matrix: dict[str, int], optimizer_parallel: bool
) -> bytes:
    """Returns a strategy file, written by MindSpore's own protobuf class."""
    message = _node_strategy().ParallelStrategyMap(current_stage=0)
    item = message.parallel_strategy_item.add(node_name="step")
    item.parallel_strategys.stage = 0
    for name, array in weights.items():
        layout = message.parallel_layout_item.add(param_name=name).parallel_layouts
        layout.field = 0
        shards = _optimizer_shards(array, layouts[name], matrix, optimizer_parallel)
        layout.opt_weight_shard_step, layout.opt_weight_shard_size = shards
        layout.dev_matrix.add().dim.extend(matrix.values())
        axes = _layout(layouts[name], matrix)["tensor_map"]
        assert len(axes) == array.ndim
        layout.tensor_map.add().dim.extend(axes)
        layout.param_split_shape.add()
        layout.indices_offset.add()
    return message.SerializeToString()


def _node_strategy() -> ModuleType:
    """Loads the protobuf classes of MindSpore without MindSpore."""
    (package,) = importlib.util.find_spec("mindspore").submodule_search_locations
    spec = importlib.util.spec_from_file_location("node_strategy_pb2", f"{package}/train/node_strategy_pb2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
