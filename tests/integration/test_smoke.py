"""The command `smoke` from the file to its exit code; tests/unit/smoke/test_smoke_changes.py has what it changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from smoke_files import DENSE, EXPERTS

from trainer.cli.main import dispatch, main


def write(folder: Path, text: str) -> str:
    path = folder / "theirs.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_dense_file_passes_and_the_verdict_is_json(tmp_path, capsys):
    """MindRecord data with labels and masks, an evaluation, float16, a loss scale, accumulation, recomputation. Its own
    job needs more memory than its devices have, which keeps no small copy from running."""
    text = DENSE.replace("max_device_memory: 58GB", "max_device_memory: 1GB")
    code = dispatch(["smoke", "--config", write(tmp_path, text), "--output_dir", str(tmp_path), "--json"])
    printed, progress = capsys.readouterr()
    verdict = json.loads(printed)
    assert (code, verdict["result"], verdict["problem"]) == (0, "pass", "")
    assert list(verdict["losses"]) == ["1", "2", "3"] and verdict["resumed_loss"] == verdict["losses"]["3"]
    assert 5.5 < verdict["losses"]["1"] < 7.0 and 5.5 < verdict["eval_loss"] < 7.0  # log 512 is 6.2
    changed = {change["key"]: change for change in verdict["changes"]}
    assert changed["model.model_config.num_layers"]["before"] == 28
    assert "resumed: step 3 of 3: loss" in progress
    needs = "\n".join(verdict["needs"])
    assert "data: train_dataset.data_loader (MindDataset): its path is not written" in needs
    assert "devices: 16 x Ascend (pipeline_stage 2, data_parallel 2, model_parallel 4)" in needs
    assert "GiB a rank, activations (estimated) included, more than the 1 GiB of max_device_memory" in needs
    assert 0 < verdict["peak_rss_bytes"] < 3 << 30


def test_experts_with_a_module_for_another_token_on_megatron_data(tmp_path, capsys):
    arguments = ["--steps", "2", "--output_dir", str(tmp_path)]
    code = dispatch(["smoke", "--config", write(tmp_path, EXPERTS), *arguments])
    printed = capsys.readouterr().out
    assert code == 0 and "PASS (" in printed
    assert "parallel_config.expert_parallel  " in printed and "one process; --ranks starts several" in printed
    assert "resume check: step 2 has loss" in printed


def test_a_training_that_fails_is_exit_code_1(tmp_path, capsys):
    text = EXPERTS.replace("learning_rate: 2.e-4, warmup_steps: 2000", "learning_rate: 1.e+30")
    arguments = ["--json", "--output_dir", str(tmp_path)]
    code = dispatch(["smoke", "--config", write(tmp_path, text), *arguments])
    verdict = json.loads(capsys.readouterr().out)
    assert (code, verdict["result"]) == (1, "fail") and "step 2" in verdict["problem"]
    assert verdict["needs"] and "Traceback" not in verdict["problem"]
    assert verdict["losses"]["1"] < 7.0 and verdict["peak_rss_bytes"] > 0  # as far as it came


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("run_mode: finetune", "run_mode: {", "not valid YAML"),
        ("hidden_size: 3584", "hiden_size: 3584", "you probably mean model.model_config.hidden_size"),
        ("num_heads: 28", "num_heads: 27", "must divide hidden_size"),
        ("run_mode: finetune", "run_mode: eval", "smoke supports only run_mode train and finetune"),
    ],
)
def test_a_wrong_file_is_exit_code_2_with_the_messages_of_its_plan(tmp_path, capsys, old, new, says):
    with pytest.raises(SystemExit) as ended:
        main(["smoke", "--config", write(tmp_path, DENSE.replace(old, new)), "--output_dir", str(tmp_path), "--json"])
    printed, errors = capsys.readouterr()
    assert ended.value.code == 2 and says in errors.replace("\n", " ")
    verdict = json.loads(printed)
    assert (verdict["result"], verdict["exit_code"]) == ("invalid", 2) and says in verdict["problem"]
    assert not (tmp_path / "smoke").exists()


@pytest.mark.parametrize("flag", ["--steps", "--ranks"])
def test_too_few_steps_or_ranks(tmp_path, capsys, flag):
    with pytest.raises(SystemExit) as ended:
        main(["smoke", "--config", write(tmp_path, DENSE), flag, "0"])
    assert ended.value.code == 2 and "must be at least" in capsys.readouterr().err


def test_weights_that_fit_are_trained_on(tmp_path, capsys):
    sizes = "{num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 64, seq_length: 16}"
    text = f"context: {{mode: 1}}\nmodel: {{model_config: {sizes}}}\nlr_schedule: {{learning_rate: 0.1}}\n"
    text += "train_dataset: {data_loader: {type: SyntheticDataset, num_samples: 20}}\nrunner_config: {batch_size: 1}\n"
    arguments = ["--json", "--steps", "2", "--output_dir", str(tmp_path)]
    assert dispatch(["smoke", "--config", write(tmp_path, text), *arguments]) == 0
    first = json.loads(capsys.readouterr().out)
    (tmp_path / "smoke" / "theirs").rename(tmp_path / "trained")
    weights = ["--run_mode", "finetune", "--load_checkpoint", str(tmp_path / "trained" / "checkpoints")]
    assert dispatch(["smoke", "--config", write(tmp_path, text), *arguments, *weights]) == 0
    second = json.loads(capsys.readouterr().out)
    assert "load_checkpoint" not in [change["key"] for change in second["changes"]]
    assert second["losses"]["1"] != first["losses"]["1"] and second["resumed_loss"] == second["losses"]["2"]
