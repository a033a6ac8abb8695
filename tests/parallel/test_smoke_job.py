"""`smoke --ranks 2` starts two processes, which share the experts as the file says, save, and resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fork_server import FORKED, REPOSITORY, ensure_server

from trainer.cli.main import dispatch
from trainer.launch import command
from trainer.launch.msrun import MSRUN_VARIABLE

FILE = """\
use_parallel: True
parallel: {parallel_mode: 1, enable_parallel_optimizer: True}
parallel_config: {data_parallel: 8, expert_parallel: 4}
context: {mode: 1, device_target: Ascend}
runner_config: {batch_size: 1}
model:
  model_config:
    {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 64, seq_length: 16,
     moe_config: {expert_num: 4, num_experts_chosen: 2}}
train_dataset:
  data_loader: {type: BlendedMegatronDatasetDataLoader, sizes: [900, 0, 0], config: {data_path: [/nowhere/a]}}
"""


def test_two_processes_train_and_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_server()
    workers = [sys.executable, "-u", str(FORKED), str(REPOSITORY / "run_trainer.py")]
    monkeypatch.setattr(command, "trainer_command", lambda: workers)
    monkeypatch.setenv(MSRUN_VARIABLE, str(Path(__file__).with_name("forked_msrun.py")))
    (tmp_path / "file.yaml").write_text(FILE)
    arguments = ["--ranks", "2", "--steps", "2", "--json", "--output_dir", str(tmp_path)]
    code = dispatch(["smoke", "--config", str(tmp_path / "file.yaml"), *arguments])
    printed, progress = capfd.readouterr()
    verdict = json.loads(printed)
    assert (code, verdict["result"], verdict["ranks"]) == (0, "pass", 2), progress
    assert verdict["resumed_loss"] == verdict["losses"]["2"]
    changed = {change["key"]: change for change in verdict["changes"]}
    assert verdict["kinds"] == ["expert_parallel", "data_parallel", "enable_parallel_optimizer"]
    assert verdict["left_out"] == []
    degrees = {key: changed[f"parallel_config.{key}"]["after"] for key in ("data_parallel", "expert_parallel")}
    assert degrees == {"data_parallel": 2, "expert_parallel": 2}
    assert "launching 2 workers" in progress and "resumed: step 2 of 2" in progress
    step = tmp_path / "smoke" / "file" / "checkpoints" / "step-00000002"
    assert [each.name for each in step.glob("optimizer*")] == ["optimizer.safetensors"]  # which both have written
