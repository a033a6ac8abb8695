"""Checkpoints of a model with experts: resumed bit for bit, in the names of published files, exported, loaded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from run_helpers import arrays_of, assert_resumes, assert_same_bits, config_of, refusal, step_records, train

from trainer.checkpoint.adapters import load_initial_weights
from trainer.checkpoint.store import newest_complete
from trainer.models.spec.shapes import parameter_shapes
from trainer.run.export import export

pytestmark = pytest.mark.slow

HALF = 3
EXPERTS = 4
# DeepSeek's and Glm4Moe's parts: a dense first layer, a bias that moves, groups, a shared expert, an MTP module.
CHANGES = {
    "model.arch.type": "Glm4MoeForCausalLM",
    "model.model_config.mtp_depth": 1,
    "model.model_config.moe_config": {
        "expert_num": EXPERTS,
        "num_experts_chosen": 2,
        "moe_intermediate_size": 8,
        "shared_expert_num": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "balance_via_topk_bias": True,
        "topk_bias_update_rate": 0.01,
        "capacity_factor": 1.1,
    },
    "runner_config": {"batch_size": 4, "gradient_accumulation_steps": 2, "stop_step": 2 * HALF},
    "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": HALF, "keep_checkpoint_max": 3}],
}


def test_stopped_and_resumed_equals_never_stopped(path: Path, whole: Path) -> None:
    """Compares every number and every bit of the weights, expert bias included, with an uninterrupted run."""
    assert_resumes(path, whole, HALF)


def test_experts_lie_one_by_one_and_the_optimizers_state_stacked(whole: Path) -> None:
    arrays, later = arrays_of(whole, HALF), arrays_of(whole)
    layers = (1, 2)  # layer 2 is the multi-token prediction module
    for layer in layers:
        home = f"model.layers.{layer}.mlp"
        for expert in range(EXPERTS):
            assert arrays[f"model/{home}.experts.{expert}.down_proj.weight"].shape == (16, 8)
        assert f"model/{home}.experts.down_proj.weight" not in arrays
        assert arrays[f"optimizer/exp_avg.{home}.experts.down_proj.weight"].shape == (EXPERTS, 16, 8)
        bias = f"{home}.gate.e_score_correction_bias"
        assert (arrays[f"model/{bias}"] != later[f"model/{bias}"]).any()
        assert not any(bias in name for name in arrays if name.startswith("optimizer/"))


def test_an_export_is_the_checkpoint_and_loads_again(path: Path, whole: Path, home: Path) -> None:
    checkpoint = newest_complete(whole / "checkpoints")
    config = config_of(path, load_checkpoint=checkpoint)
    found = export(config, home / "exported", merge=False)
    saved = safetensors.numpy.load_file(checkpoint / "model.safetensors")
    exported = safetensors.numpy.load_file(found.path)
    assert_same_bits(exported, saved)
    assert found.tensors == len(saved) > len(parameter_shapes(config.decoder))
    loaded = load_initial_weights(config_of(path, load_checkpoint=found.path))
    assert {name: value.shape for name, value in loaded.items()} == parameter_shapes(config.decoder)
    name = "model.layers.1.mlp.experts.up_proj.weight"
    np.testing.assert_array_equal(loaded[name][3], saved[name.replace("experts.", "experts.3.")])


def test_adapters_on_a_balanced_mixture_resume_on_the_base_that_they_were_trained_on(
    path: Path, whole: Path, home: Path
) -> None:
    """The bias of the routers is a part of the base: moved, it would be another one."""
    pet = "{target_modules: '.*wq|.*wv'}"
    base = {"load_checkpoint": whole, "model__model_config__pet_config": pet, "context__mode": 1}
    output = train(path, output_dir=home / "adapted", runner_config__stop_step=HALF, **base)
    changes = {"adapter_id": output, "resume_training": True, "output_dir": home / "adapted_on"}
    again = train(path, runner_config__stop_step=HALF + 1, **base, **changes)
    assert [record["step"] for record in step_records(again)] == [HALF + 1]


def test_a_checkpoint_without_modules_or_biases_is_trained_on(path: Path, whole: Path, home: Path) -> None:
    arrays = safetensors.numpy.load_file(newest_complete(whole / "checkpoints") / "model.safetensors")
    kept = {n: a for n, a in arrays.items() if ".layers.2." not in n and "e_score_correction_bias" not in n}
    safetensors.numpy.save_file(kept, home / "plain.safetensors")
    output = train(
        path, output_dir=home / "from_plain", load_checkpoint=home / "plain.safetensors", runner_config__stop_step=1
    )
    log = (output / "logs" / "rank-0.log").read_text()
    assert "the checkpoint has no multi-token prediction module: layer 2 (mtp_depth 1) starts from the seed" in log
    assert "balance_via_topk_bias: the checkpoint has no expert bias, which starts at 0" in log


def test_another_number_of_experts_is_refused(path: Path, whole: Path, home: Path) -> None:
    flags = {"load_checkpoint": whole, "model__model_config__moe_config__expert_num": 6}
    lacks = "lacks model.layers.1.mlp.experts.4.gate_proj.weight"
    refusal(lambda: train(path, output_dir=home / "experts_more", **flags), lacks, "load_checkpoint")
