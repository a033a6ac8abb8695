"""Checkpoints of MindSpore Transformers as initial weights, in folders as its code writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_helpers import failure
from mindformers_checkpoints import (
    Arrays,
    Sizes,
    fully_sharded_map,
    to_mindformers,
    write_iteration,
    write_rank_folders,
)
from safetensors.numpy import load_file, save_file
from test_joined_names import as_chatglm, golden

from trainer.checkpoint.adapters import load_initial_weights
from trainer.checkpoint.mindformers.resume import read_training
from trainer.checkpoint.mindformers.strategy import SourceLayout, StrategyError, read_strategy
from trainer.checkpoint.state import Position, ResumedCheckpoint, checkpoint_to_resume
from trainer.checkpoint.tensor_names import to_disk
from trainer.checkpoint.weights import fitting_weights
from trainer.config import Config, parse_config
from trainer.models.spec.init import initial_value
from trainer.models.spec.shapes import parameter_specs
from trainer.parallel.world import World
from trainer.run.prepare import local_shard_specs

SHARED = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "vocab_size": 64,
          "seq_length": 16}  # fmt: skip
QWEN3 = SHARED | {"n_kv_heads": 2, "head_dim": 16, "use_qk_norm": True, "tie_word_embeddings": True}
DEEPSEEK = SHARED | {
    "num_layers": 3, "multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "mtp_depth": 1, "moe_config": {
        "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 8, "shared_expert_num": 1,
        "first_k_dense_replace": 1, "balance_via_topk_bias": True},
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str, Sizes]] = {
    "qwen3": (QWEN3, "Qwen3ForCausalLM", Sizes(2, 4, 2)),
    "deepseek": (DEEPSEEK, "DeepseekV3ForCausalLM", Sizes(3, 4, 4, experts=4)),
}
MATRIX = {"dp": 2, "tp": 2}


def config_of(name: str, path: Path, tensor_parallel: int = 1, changes: dict | None = None, **keys: Any) -> Config:
    model, kind, _ = MODELS[name]
    text = {"run_mode": "train", "load_checkpoint": str(path), "context": {"mode": 1}, **keys,
            "model": {"arch": {"type": kind}, "model_config": model | (changes or {})}}  # fmt: skip
    if tensor_parallel > 1:
        text |= {"use_parallel": True, "parallel_config": {"model_parallel": tensor_parallel}}
    return parse_config("a.yaml", json.dumps(text))


def weights_of(name: str) -> Arrays:
    settings = config_of(name, Path()).decoder
    draw = np.random.default_rng(3)
    weights = {key: initial_value(spec, settings, 9) for key, spec in parameter_specs(settings).items()}
    return {key: array + draw.normal(size=array.shape).astype(np.float32) for key, array in weights.items()}


def converted(name: str, pynative: bool) -> Arrays:
    _, kind, sizes = MODELS[name]
    return to_mindformers(to_disk(weights_of(name), kind), sizes, pynative)


def assert_loads(name: str, path: Path, **keys: Any) -> list[str]:
    """Compares what one rank, and each of two tensor-parallel ranks, loads; returns the notes."""
    expected, notes = weights_of(name), []
    loaded = load_initial_weights(config_of(name, path, **keys), notes.append)
    assert loaded.keys() == expected.keys()
    for key, array in loaded.items():
        np.testing.assert_array_equal(array, expected[key], key)
    for rank in range(2):
        config, world = config_of(name, path, 2, **keys), World(rank, 2, rank, 2)
        parts = local_shard_specs(config, world)
        loaded = load_initial_weights(config, parts=parts, world=World(0, 1, 0, 1))
        assert loaded.keys() == parts.keys()
        assert any(parts[key].shape != expected[key].shape for key in parts)
        for key, array in loaded.items():
            np.testing.assert_array_equal(array, parts[key].shard.of(expected[key]), key)
    return notes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "how",
    [
        {"matrix": None},
        {"matrix": MATRIX},
        {"matrix": MATRIX, "remove_redundancy": True, "stages": 2},
        {"matrix": MATRIX, "maps": fully_sharded_map},
    ],
    ids=["one device", "tensor parallel", "no redundancy, two stages", "fully sharded"],
)
def test_the_folder_of_an_iteration_loads_in_any_layout(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    folder = write_iteration(tmp_path, converted(name, pynative=True), **how)
    (note,) = assert_loads(name, folder)
    assert "iteration_00000004" in note and "no optimizer state" in note
    assert_loads(name, folder / "iteration_00000004")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "how",
    [
        {"matrix": {"dp": 1, "tp": 1}, "strategy": False},
        {"matrix": MATRIX},
        {"matrix": MATRIX, "remove_redundancy": True},
        {"matrix": MATRIX, "optimizer_parallel": True},
    ],
    ids=["one rank", "tensor parallel", "no redundancy", "optimizer parallel"],
)
def test_folders_of_ranks_load_in_any_layout(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    weights = converted(name, pynative=False)
    folder = write_rank_folders(tmp_path, weights, **how)
    older = {key: array + 1 for key, array in weights.items()}
    write_rank_folders(tmp_path, older, saved_step=2, **how)
    (note,) = assert_loads(name, folder)
    assert "epoch 1, step 4 of" in note
    assert_loads(name, tmp_path)
    assert_loads(name, folder / "rank_0")
    if (tmp_path / "strategy").exists():
        (tmp_path / "strategy").rename(tmp_path / "elsewhere")
        assert_loads(name, folder, src_strategy_path_or_dir=str(tmp_path / "elsewhere"))


def test_the_layouts_of_model_config_are_followed(tmp_path: Path) -> None:
    weights = converted("qwen3", pynative=False)
    settings = weights_of("qwen3")
    for layer in range(2):
        for joined, parts in (("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj",
                               "self_attn.v_proj")), ("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj"))):  # fmt: skip
            own = [settings[f"model.layers.{layer}.{part}.weight"] for part in parts]
            weights[f"decoder.layers.{layer}.{joined}.weight"] = np.concatenate(own)
    folder = write_iteration(tmp_path, weights, MATRIX)
    assert_loads("qwen3", folder, changes={
        "use_contiguous_weight_layout_attention": True, "use_interleaved_weight_layout_mlp": False})  # fmt: skip
    other = load_initial_weights(config_of("qwen3", folder))["model.layers.0.mlp.up_proj.weight"]
    assert not np.array_equal(other, settings["model.layers.0.mlp.up_proj.weight"])


def test_a_merged_file_and_older_names_of_llama_load(tmp_path: Path) -> None:
    save_file(converted("deepseek", pynative=False), tmp_path / "part0.safetensors")  # by mindspore.unified_safetensors
    assert_loads("deepseek", tmp_path)
    model = {"tie_word_embeddings": False, "use_qk_norm": False}
    config = config_of("qwen3", tmp_path / "llama", changes=model)
    specs = parameter_specs(config.decoder)
    expected = {key: initial_value(spec, config.decoder, 9) for key, spec in specs.items()}
    names = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
             "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
             "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "model.norm": "model.norm_out",
             "post_attention_layernorm": "ffn_norm", "embed_tokens.weight":
             "tok_embeddings.embedding_weight"}  # fmt: skip
    older = {}
    for key, array in expected.items():
        for ours, theirs in names.items():
            key = key.replace(ours, theirs)
        older[key] = array
    (tmp_path / "llama").mkdir()
    save_file(older, tmp_path / "llama" / "model.safetensors")
    loaded = load_initial_weights(config)
    for key, array in expected.items():
        np.testing.assert_array_equal(loaded[key], array, key)


def test_families_with_other_names_load_from_folders_of_ranks(tmp_path: Path) -> None:
    weights, settings, _ = golden("model_glm", tmp_path)
    expected = fitting_weights(weights, settings, Path("file"))
    path = tmp_path / "checkpoint" / "rank_0"
    path.mkdir(parents=True)
    theirs = as_chatglm(expected, joined=False)
    state = {f"adam_m.{name}": array for name, array in theirs.items()} | {"global_step": np.array([4])}
    save_file(theirs | state, path / "glm2_rank_0-1_4.safetensors")
    text = {"pretrained_model_dir": str(tmp_path), "load_checkpoint": str(path.parent), "run_mode": "train"}
    loaded = load_initial_weights(parse_config("a.yaml", json.dumps(text)))
    assert loaded.keys() == expected.keys()
    for key, array in loaded.items():
        np.testing.assert_array_equal(array, expected[key], key)


def test_extra_modules_are_left_out_with_a_note(tmp_path: Path) -> None:
    folder = write_iteration(tmp_path, converted("deepseek", pynative=True), MATRIX)
    notes: list[str] = []
    loaded = load_initial_weights(config_of("deepseek", folder, changes={"mtp_depth": 0}), notes.append)
    assert loaded.keys() == {key for key in weights_of("deepseek") if not key.startswith("model.layers.3.")}
    assert any("multi-token prediction module (layer 3)" in note for note in notes)


def edited(folder: Path, change: Any) -> Path:
    """Changes metadata.json in place."""
    path = folder / "iteration_00000004" / "metadata.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


FC1 = "decoder.layers.1.mlp.linear_fc1.weight"


def without_shard(content: dict[str, Any]) -> None:
    del content["state_dict_metadata"][FC1]["chunk"][1]


def without_place(content: dict[str, Any]) -> None:
    del content["storage_data"][str((FC1, (1,)))]


def without_tensor(content: dict[str, Any]) -> None:
    del content["state_dict_metadata"][FC1]


def with_offset(content: dict[str, Any]) -> None:
    content["state_dict_metadata"][FC1]["chunk"][1]["global_offset"] = [7]
    content["storage_data"][str((FC1, (7,)))] = content["storage_data"].pop(str((FC1, (1,))))


def with_huge_counts(content: dict[str, Any]) -> None:
    content["state_dict_metadata"][FC1]["axis_fragmentations"] = [2**40, 2**40]


def with_other_axis(content: dict[str, Any]) -> None:
    content["state_dict_metadata"][FC1]["axis_fragmentations"] = [1, 2]


@pytest.mark.parametrize(
    ("change", "changes", "parts"),
    [
        (with_other_axis, {}, ["2 shards of", FC1, "are not all of a tensor of shape [96, 32]"]),
        (with_huge_counts, {}, ["2 shards of", FC1, "are not all of a tensor of shape [96, 32]"]),
        (with_offset, {}, ["metadata.json: ", FC1, "has no shard [7]"]),
        (without_shard, {}, ["1 shards of", FC1, "are not all of a tensor of shape [96, 32]"]),
        (without_place, {}, ["says of no file that it has the shard [1] of", FC1]),
        (without_tensor, {}, ["lacks model.layers.1.mlp.gate_proj.weight (and 1 more)"]),
        (lambda content: content.pop("storage_data"), {}, ["metadata.json cannot be read", "storage_data"]),
        (lambda content: None, {"intermediate_size": 40},
         ["decoder.layers.0.mlp.linear_fc1.weight in checkpoint-model-0000000-0000004.safetensors has shape [96, 32]"
          " instead of [80, 32] (model.layers.0.mlp.gate_proj.weight and model.layers.0.mlp.up_proj.weight: pairs)"]),
        (lambda content: None, {"num_layers": 1},
         ["no parameter of this model has a place for decoder.layers.1.", "in checkpoint-model-0000000-0000004"]),
    ],
)  # fmt: skip
def test_every_weight_is_accounted_for(tmp_path: Path, change: Any, changes: dict[str, Any], parts: list[str]) -> None:
    folder = edited(write_iteration(tmp_path, converted("qwen3", pynative=True), MATRIX), change)
    message = failure(lambda: load_initial_weights(config_of("qwen3", folder, changes=changes)))
    assert all(part in message for part in [*parts, "a.yaml:1: load_checkpoint = ", "Fix: "]), message


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = write_iteration(tmp_path, converted("qwen3", pynative=True), MATRIX)
    iteration = folder / "iteration_00000004"
    (iteration / "checkpoint-model-0000001-0000004.safetensors").unlink()
    assert "checkpoint-model-0000001-0000004.safetensors" in failure(
        lambda: load_initial_weights(config_of("qwen3", folder)))  # fmt: skip
    (iteration / "metadata.json").unlink()
    assert "has no metadata.json" in failure(lambda: load_initial_weights(config_of("qwen3", folder)))
    (folder / "latest_checkpointed_iteration.txt").write_text("9")
    assert "names iteration_00000009" in failure(lambda: load_initial_weights(config_of("qwen3", folder)))
    (folder / "latest_checkpointed_iteration.txt").unlink()
    assert f"name an iteration, such as {iteration}" in failure(
        lambda: load_initial_weights(config_of("qwen3", folder)))  # fmt: skip


def test_shards_without_a_strategy_are_refused_with_the_command_that_merges_them(tmp_path: Path) -> None:
    folder = write_rank_folders(tmp_path, converted("qwen3", pynative=False), MATRIX, strategy=False)
    config = config_of("qwen3", folder)
    message = failure(lambda: load_initial_weights(config))
    command = f"unified_safetensors.py --mindspore_ckpt_dir {folder} --src_strategy_dirs {tmp_path}/strategy"
    assert "linear_fc1.weight in rank_0/model_rank_0-1_4.safetensors has shape [48, 32] instead of [96, 32]" in message
    assert command in message and "--file_suffix 1_4" in message and "src_strategy_path_or_dir" in message
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "ckpt_strategy_rank_0.ckpt").write_bytes(b"\xff" * 20)
    message = failure(lambda: load_initial_weights(config))
    assert "src_strategy_path_or_dir" in message and command in message and "not a strategy file" in message
    (tmp_path / "empty").mkdir()
    config = config_of("qwen3", folder, src_strategy_path_or_dir=str(tmp_path / "empty"))
    assert "the folder has no .ckpt file" in failure(lambda: load_initial_weights(config))


def test_ranks_without_a_common_step_are_refused(tmp_path: Path) -> None:
    folder = write_rank_folders(tmp_path, converted("qwen3", pynative=False), MATRIX)
    (folder / "rank_3" / "model_rank_3-1_4.safetensors").rename(folder / "rank_3" / "model_rank_3-1_2.safetensors")
    assert "no step that all ranks have saved" in failure(lambda: load_initial_weights(config_of("qwen3", folder)))
    shutil.rmtree(folder / "rank_0")
    assert "3 folders from 1 to 3" in failure(lambda: load_initial_weights(config_of("qwen3", folder)))


LAYOUT = {"batch_size": 2, "gradient_accumulation_steps": 2, "ranks": 1, "seq_length": 16, "shuffle": False,
          "drop_remainder": True, "rows": 12}  # fmt: skip


def resumed(folder: Path, layout: dict[str, Any] | None = None, **keys: Any) -> ResumedCheckpoint:
    config = config_of("qwen3", folder, resume_training=True, **keys)
    return read_training(checkpoint_to_resume(config), config, LAYOUT | (layout or {}))


def test_a_training_continues_with_its_moments_steps_and_data(tmp_path: Path) -> None:
    folder = write_iteration(tmp_path, converted("qwen3", pynative=True), MATRIX)
    found = resumed(folder)
    for name, array in weights_of("qwen3").items():
        np.testing.assert_array_equal(found.weights[name], array, name)
        for kind in ("exp_avg", "exp_avg_sq"):
            np.testing.assert_array_equal(found.optimizer[f"{kind}.{name}"].read(), array + 1, name)
    assert len(found.optimizer) == 2 * len(found.weights) and found.updates == 4
    # An epoch has six micro-batches, that is three steps.
    assert found.position == Position(4, 1, 2, 16 * 16)
    (note,) = found.notes
    assert "iteration_00000004" in note and "does not say with which settings" in note
    later = resumed(folder, ignore_data_skip=True).position
    assert (later.step, later.epoch, later.batch, later.data_from_step) == (4, 0, 0, 4)


def test_the_fused_optimizer_counts_from_below_zero(tmp_path: Path) -> None:
    folder = write_iteration(tmp_path, converted("qwen3", pynative=True), None)
    (file,) = folder.rglob("checkpoint-opt-*")
    save_file(load_file(file) | {"global_step": np.array([3], np.int32)}, file)
    assert resumed(folder).updates == 4
    save_file(load_file(file) | {"global_step": np.array([9], np.int32)}, file)
    assert "is at step 4, and its optimizer has done 9 updates" in failure(lambda: resumed(folder))
    for number in (np.zeros(0, np.int32), np.float32([np.nan]), np.float32([np.inf]), np.int32([-5])):
        save_file(load_file(file) | {"global_step": number}, file)
        assert "the position of its training cannot be read: " in failure(lambda: resumed(folder))


@pytest.mark.parametrize(
    ("common", "layout", "keys", "part"),
    [
        ({"consumed_samples": 20}, {}, {}, "has read 20 sequences in 4 steps, and this run takes 16 for them"),
        ({"global_batch_size": 8}, {}, {}, "has read 32 sequences in 4 steps, and this run takes 16 for them"),
        ({}, {"shuffle": True}, {}, "a random order, which is another one here"),
        ({"global_step": None}, {}, {}, "the position of its training cannot be read: common.json"),
        ({}, {}, {"optimizer": {"type": "SGD"}}, "the state of AdamW and Muon is known, and optimizer.type is SGD"),
        ({}, {}, {"optimizer": {"type": "Muon"}}, "its optimizer has no muon_m of model.layers.0."),
        ({}, {}, {"optimizer": {"type": "AdamW", "ema_decay": 0.9}}, "it has no moving averages"),
    ],
)
def test_what_cannot_continue_is_refused(
    tmp_path: Path, common: dict[str, Any], layout: dict[str, Any], keys: dict[str, Any], part: str
) -> None:
    folder = write_iteration(tmp_path, converted("qwen3", pynative=True), MATRIX, common=common)
    message = failure(lambda: resumed(folder, layout, **keys))
    assert part in message and "Fix: " in message and "resume_training" in message, message


def test_a_folder_without_an_optimizer_gives_its_weights_alone(tmp_path: Path) -> None:
    folder = write_iteration(tmp_path, converted("qwen3", pynative=True), MATRIX, state={})
    assert "its optimizer has no adam_m of" in failure(lambda: resumed(folder))
    assert_loads("qwen3", folder)


def test_the_numbers_of_optimizer_and_counters_are_not_weights(tmp_path: Path) -> None:
    folder = write_rank_folders(tmp_path, converted("qwen3", pynative=False), {"dp": 1, "tp": 1}, strategy=False)
    file = folder / "rank_0" / "model_rank_0-1_4.safetensors"
    tensors = load_file(file)
    assert {"global_step", "epoch_num", "adam_m.embedding.word_embeddings.weight"} <= tensors.keys()
    assert any(name.startswith("adam_v.decoder.") for name in tensors)
    file.unlink()
    save_file(tensors | {"decoder.layers.0.mlp.extra": np.zeros(2, np.float32)}, file)
    message = failure(lambda: load_initial_weights(config_of("qwen3", folder)))
    assert "place for decoder.layers.0.mlp.extra in rank_0/model_rank_0-1_4.safetensors" in message


def test_a_damaged_strategy_is_an_error_and_never_a_wrong_layout(tmp_path: Path) -> None:
    weights = {"decoder.a.weight": np.zeros((8, 4), np.float32), "decoder.b.weight": np.zeros(4, np.float32)}
    write_rank_folders(tmp_path, weights, MATRIX, lambda name, array: (("tp",), ())[: array.ndim])
    path = tmp_path / "strategy" / "ckpt_strategy_rank_0.ckpt"
    content = path.read_bytes()
    layout = read_strategy(path)["decoder.a.weight"]
    assert layout.place(3, (4, 4)) == ((4, 0), (8, 4))
    draw = np.random.default_rng(0)
    errors = 0
    for length in range(len(content)):  # between two messages it reads like a whole file
        path.write_bytes(content[:length])
        errors += is_refused(path)
    assert errors > len(content) // 2
    for _ in range(500):
        damaged = bytearray(content)
        damaged[draw.integers(len(damaged))] = draw.integers(256)
        path.write_bytes(bytes(damaged))
        is_refused(path)


def test_a_strategy_of_other_names_or_huge_sizes_is_an_error_too(tmp_path: Path) -> None:
    folder = write_rank_folders(tmp_path, converted("qwen3", pynative=False), MATRIX)
    parts = ["in rank_0/model_rank_0-1_4.safetensors has shape", "is not a strategy file that can be read here"]
    for old, new, part in zip((b"decoder.", b"decoder-"), (b"decoder-", b"decoder\xff"), parts, strict=True):
        for path in (tmp_path / "strategy").iterdir():
            path.write_bytes(path.read_bytes().replace(old, new))
        assert part in failure(lambda: load_initial_weights(config_of("qwen3", folder)))
    huge = SourceLayout((2**40, 2**40), ((1,), (0,)), 0)
    assert huge.place(2**40 + 3, (4, 4)) == ((4, 12), (2**42, 2**42))


def is_refused(path: Path) -> bool:
    """Returns whether a strategy file is an error; anything else than StrategyError fails the test."""
    try:
        for layout in read_strategy(path).values():
            layout.place(3, (4,) * len(layout.tensor_map))
    except StrategyError:
        return True
    return False
