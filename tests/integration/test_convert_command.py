"""The command `convert --proof`: both files train the same losses, or nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import write_corpus

from trainer.cli.main import dispatch
from trainer.config import parse_config
from trainer.convert.convert import NEWER, convert
from trainer.convert.proof import prove
from trainer.errors import RunError, UserError

OLD = """\
context: {{device_target: CPU}}
output_dir: {folder}/run
report: False
model:
  arch: {{type: Qwen3ForCausalLM}}
  model_config: {{num_layers: 2, hidden_size: 32, num_heads: 2, n_kv_heads: 1, head_dim: 16, intermediate_size: 48,
                 vocab_size: 257, seq_length: 16, hidden_dropout: 0.1}}
train_dataset: {{data_loader: {{type: TextDataset, dataset_dir: {folder}/corpus}}}}
runner_config: {{batch_size: 2, max_steps: 20, gradient_accumulation_steps: 2}}
lr_schedule: {{type: CosineWithWarmUpLR, learning_rate: 1.e-2, warmup_steps: 1}}
"""


@pytest.fixture
def older(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus", documents=40)
    path = tmp_path / "old.yaml"
    path.write_text(OLD.format(folder=tmp_path), encoding="utf-8")
    return path


def test_both_files_train_the_same_losses_both_ways(older, tmp_path, capsys):
    newer = tmp_path / "new.yaml"
    assert dispatch(["convert", str(older), "--to", "2.0", "-o", str(newer), "--proof"]) == 0
    printed, progress = capsys.readouterr()
    assert printed.strip() == str(newer)
    assert progress.count("step 3 of 3: loss") == 4  # two trainings, each resumed
    (line,) = (line for line in progress.splitlines() if line.startswith("losses "))
    assert "equal: " in line and line.count(", ") == 2
    assert dispatch(["convert", str(newer), "--output", str(tmp_path / "back.yaml"), "--proof"]) == 0
    assert line in capsys.readouterr().err


def test_other_losses_are_an_error_and_nothing_is_written(older, tmp_path):
    conversion = convert(str(older), older.read_text(), NEWER)
    other = parse_config("other.yaml", conversion.text.replace("seed: 1", "seed: 2"))
    with pytest.raises(RunError, match="do not train the same"):
        prove(conversion._replace(after=other), lambda line: None)
    older.write_text(older.read_text() + "runner_wrapper: {scale_sense: 1024.0}\n")
    with pytest.raises(UserError, match="scale_sense"):
        dispatch(["convert", str(older), "--to", "2.0", "-o", str(tmp_path / "new.yaml"), "--proof"])
    assert not (tmp_path / "new.yaml").exists()
