"""Runs that start from checkpoints of MindSpore Transformers: what MindSpore merges and converts, and evaluations with
one rank and two tensor-parallel ranks, which give the loss of the run that made the weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindformers_checkpoints import Arrays, Sizes, to_mindformers, write_iteration, write_rank_folders
from safetensors.numpy import load_file
from test_launched_training import limits_of, run

from trainer.checkpoint.adapters import load_initial_weights
from trainer.checkpoint.mindformers.training import MOMENTS
from trainer.checkpoint.tensor_names import to_disk
from trainer.errors import UserError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from run_helpers import config_of, train, write_config, write_corpus  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("test_launched_training")]

MATRIX = {"dp": 2, "tp": 2}
MODEL = "model.model_config"
QWEN3 = {"model.arch.type": "Qwen3ForCausalLM", f"{MODEL}.num_heads": 4, f"{MODEL}.n_kv_heads": 2,
         f"{MODEL}.head_dim": 8, f"{MODEL}.use_qk_norm": True, f"{MODEL}.vocab_size": 258}  # fmt: skip
DEEPSEEK = {
    "model.arch.type": "DeepseekV3ForCausalLM", f"{MODEL}.num_heads": 2, f"{MODEL}.n_kv_heads": 2,
    f"{MODEL}.vocab_size": 258, f"{MODEL}.multi_latent_attention": True, f"{MODEL}.q_lora_rank": 6,
    f"{MODEL}.kv_lora_rank": 8, f"{MODEL}.qk_nope_head_dim": 4, f"{MODEL}.qk_rope_head_dim": 4,
    f"{MODEL}.v_head_dim": 6, f"{MODEL}.mtp_depth": 1, f"{MODEL}.moe_config": {
        "expert_num": 4, "num_experts_chosen": 2, "moe_intermediate_size": 8, "shared_expert_num": 1,
        "first_k_dense_replace": 1, "balance_via_topk_bias": True},
}  # fmt: skip


def trained(folder: Path, model: dict[str, Any]) -> tuple[Path, dict[str, np.ndarray]]:
    """Trains a model; returns its configuration file and its weights under Hugging Face's names."""
    config = write_config(folder / "run", write_corpus(folder / "data"), model | {"runner_config.epochs": 1})
    output = train(config)
    (newest,) = sorted((output / "checkpoints").glob("step-*"))
    return config, load_file(newest / "model.safetensors")


def evaluated(config: Path, checkpoint: Path, output: Path) -> dict[str, Any]:
    train(config, run_mode="eval", load_checkpoint=checkpoint, output_dir=output)
    return json.loads((output / "eval.json").read_text())


@pytest.mark.parametrize("model", ["qwen3", "deepseek"])
def test_evaluations_give_the_loss_of_the_run_that_made_the_weights(tmp_path: Path, model: str) -> None:
    changes, sizes = {"qwen3": (QWEN3, Sizes(2, 4, 2)), "deepseek": (DEEPSEEK, Sizes(2, 2, 2, experts=4))}[model]
    config, weights = trained(tmp_path, changes)
    right = evaluated(config, tmp_path / "run" / "output", tmp_path / "right")
    iteration = write_iteration(tmp_path / "new", to_mindformers(weights, sizes, pynative=True), MATRIX)
    ranks = write_rank_folders(tmp_path / "old", to_mindformers(weights, sizes, pynative=False), MATRIX)
    for checkpoint in (iteration, ranks):
        assert evaluated(config, checkpoint, tmp_path / "alone")["loss"] == right["loss"]
    checkpoint = {"qwen3": iteration, "deepseek": ranks}[model]
    run(tmp_path / "job", 2, config, "--run_mode", "eval", "--load_checkpoint", checkpoint, "--output_dir",
        tmp_path / "two", "--parallel_config.model_parallel", 2, "--parallel.parallel_mode", 0)  # fmt: skip
    two = json.loads((tmp_path / "two" / "eval.json").read_text())
    assert two["tokens"] == right["tokens"]
    assert two["loss"] == pytest.approx(right["loss"], rel=limits_of(config).loss)


def losses_of(output: Path) -> dict[int, float]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def their_files(checkpoint: Path, sizes: Sizes, kind: str, pynative: bool) -> tuple[Arrays, Arrays]:
    """Returns the weights and the optimizer's state of a checkpoint under the peer's names."""
    ours = load_file(checkpoint / "optimizer.safetensors")
    state: Arrays = {}
    for here, there in MOMENTS.items():
        arrays = {name.removeprefix(f"{here}."): array for name, array in ours.items() if name.startswith(f"{here}.")}
        theirs = to_mindformers(to_disk(arrays, kind), sizes, pynative)
        state |= {f"{there}.{name}": array for name, array in theirs.items() if not name.endswith("per_expert")}
    return to_mindformers(load_file(checkpoint / "model.safetensors"), sizes, pynative), state


@pytest.mark.parametrize(
    ("model", "optimizer", "pynative"),
    [("qwen3", "AdamW", True), ("qwen3", "AdamW", False), ("deepseek", "Muon", True), ("deepseek", "AdamW", False)],
)
def test_a_training_continues_as_if_it_had_never_stopped(
    tmp_path: Path, model: str, optimizer: str, pynative: bool
) -> None:
    changes, sizes = {"qwen3": (QWEN3, Sizes(2, 4, 2)), "deepseek": (DEEPSEEK, Sizes(2, 2, 2, experts=4))}[model]
    saved = [{"type": "MFLossMonitor"}, {"type": "CheckpointMonitor", "save_checkpoint_steps": 4}]
    changes = changes | {"optimizer": {"type": optimizer}, "runner_config.max_steps": 8, "callbacks": saved,
                         "train_dataset.data_loader.shuffle": False}  # fmt: skip
    config = write_config(tmp_path / "run", write_corpus(tmp_path / "data"), changes)
    right = train(config)
    weights, state = their_files(right / "checkpoints" / "step-00000004", sizes, changes["model.arch.type"], pynative)
    if pynative:  # weights of 16 bits, and their copies
        state |= {f"main_param.{name}": array for name, array in weights.items() if array.ndim > 1}
        rounded = {name: array.astype(np.float16 if array.ndim > 1 else np.float32) for name, array in weights.items()}
        counted = {"global_batch_size": 4, "consumed_samples": 16}
        folder = write_iteration(tmp_path / "theirs", rounded, MATRIX, state=state, common=counted)
    else:
        counters = {"global_batch_size": np.array(4)}
        folder = write_rank_folders(tmp_path / "theirs", weights, MATRIX, state=state, counters=counters)
    resumed = train(config, resume_training=True, load_checkpoint=folder, output_dir=tmp_path / "resumed")
    expected = losses_of(right)
    assert losses_of(resumed) == {step: expected[step] for step in range(5, 9)}
    for part in ("model", "optimizer"):
        file = Path("checkpoints", "step-00000008", f"{part}.safetensors")
        ours, theirs = load_file(resumed / file), load_file(right / file)
        assert ours.keys() == theirs.keys()
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name], name)
    run(tmp_path / "job", 2, config, "--resume_training", "True", "--load_checkpoint", folder, "--output_dir",
        tmp_path / "two", "--parallel_config.model_parallel", 2, "--parallel.parallel_mode", 0)  # fmt: skip
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(resumed), rel=limits_of(config).loss)


def test_what_mindspore_merges_and_converts_is_loaded(tmp_path: Path) -> None:
    import mindspore

    config = write_config(tmp_path / "run", write_corpus(tmp_path / "data"), QWEN3)
    weights = {name: np.random.default_rng(number).normal(size=array.shape).astype(np.float32)
               for number, (name, array) in enumerate(trained(tmp_path, QWEN3)[1].items())}  # fmt: skip
    theirs = to_mindformers(weights, Sizes(2, 4, 2), pynative=False)
    folder = write_rank_folders(tmp_path / "job", theirs, MATRIX, optimizer_parallel=True)
    merged = tmp_path / "job" / "merged"
    strategy = str(tmp_path / "job" / "strategy" / "ckpt_strategy_rank_0.ckpt")
    mindspore.unified_safetensors(str(folder), strategy, str(merged), file_suffix="1_4")
    assert {path.name for path in merged.iterdir()} >= {"hyper_param.safetensors", "param_name_map.json"}

    old = tmp_path / "old" / "checkpoint"
    for rank in range(2):
        path = old / f"rank_{rank}"
        path.mkdir(parents=True)
        saved = [{"name": name, "data": mindspore.Tensor(array)} for name, array in theirs.items()]
        mindspore.save_checkpoint(saved, str(path / f"model_rank_{rank}-1_4.ckpt"), append_dict={"epoch_num": 1})
    with pytest.raises(UserError, match="ckpt format") as refused:
        load_initial_weights(config_of(config, load_checkpoint=old))
    command = re.search(r"python (-c) \"(.+)\"", refused.value.fix)
    subprocess.run([sys.executable, *command.groups()], check=True, timeout=120)

    for checkpoint in (folder, merged, old.with_name("checkpoint_safetensors")):
        loaded = load_initial_weights(config_of(config, load_checkpoint=checkpoint))
        assert loaded.keys() == weights.keys()
        for name, array in loaded.items():
            np.testing.assert_array_equal(array, weights[name], name)
