"""The recipes of the README as they stand there, one after the other, with a smaller model and less data."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from run_helpers import REPOSITORY, assert_same_run, step_records, write_corpus
from safetensors import safe_open

from trainer.checkpoint.store import newest_complete
from trainer.cli.main import dispatch

pytestmark = pytest.mark.slow

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
_FEWER = "--report False --train_dataset.cache_dir cache"
SMALLER = {
    "--config my.yaml": "--model.model_config.num_layers 1 --model.model_config.hidden_size 16 --batch_size 2"
                        f" --model.model_config.seq_length 32 --train_dataset.data_loader.num_samples 160 {_FEWER}",
    "--model /models/Qwen3-0.6B": f"--stop_step 2 --do_eval False {_FEWER}",
    "chat output": "--max_new_tokens 4",
}  # fmt: skip
"""By a part of a command: what is added to it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a user who has written my.yaml and has the shipped files."""
    folder = tmp_path_factory.mktemp("readme")
    (text,) = re.findall(r"^```yaml\n(# my\.yaml\n.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (folder / "my.yaml").write_text(text, encoding="utf-8")
    write_corpus(folder / "docs", documents=12, lines=20)
    (folder / "configs").symlink_to(REPOSITORY / "configs")
    return folder


def run(start: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the one command of the README that begins so."""
    (line,) = {line for line in README.splitlines() if line.startswith(f"python run_trainer.py {start}")}
    more = " ".join(words for part, words in SMALLER.items() if part in line)
    words = shlex.split(f"{line} {more}".replace("/models/Qwen3-0.6B", str(newest(folder / "output" / "mine"))))
    monkeypatch.chdir(folder)
    assert dispatch(words[2:]) == 0


def newest(output: Path) -> Path | None:
    return newest_complete(output / "checkpoints")


def test_a_file_of_ones_own_is_planned_trained_stopped_resumed_and_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run("plan --config my.yaml", folder, monkeypatch)
    steps = re.search(r"steps +(\d+) an epoch x 1 = \1", capsys.readouterr().out)
    run("--config my.yaml --output_dir output/mine", folder, monkeypatch)
    whole, parts = folder / "output" / "mine", folder / "output" / "part"
    assert steps is not None and len(step_records(whole)) == int(steps[1]) > 60
    run("--config my.yaml --output_dir output/part", folder, monkeypatch)
    assert len(step_records(parts)) == 60
    run("--config output/part/config.yaml", folder, monkeypatch)
    assert_same_run(parts, whole)
    capsys.readouterr()
    assert dispatch(["compare", str(whole), str(parts), "--exact"]) == 0  # docs/runs.md
    assert dispatch(["runs", "output"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["mine", "finished"], ["part", "finished"]]  # fmt: skip
    run("--config output/mine/config.yaml --run_mode predict", folder, monkeypatch)
    assert capsys.readouterr().out.startswith("A run ") and (whole / "predictions.jsonl").is_file()


def test_a_folder_of_hugging_face_is_finetuned_talked_to_and_exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    if newest(folder / "output" / "mine") is None:
        run("--config my.yaml --output_dir output/mine", folder, monkeypatch)
    run("--config configs/finetune.yaml", folder, monkeypatch)
    (folder / "typed.txt").write_text("Hello\n")
    capsys.readouterr()
    with (folder / "typed.txt").open(encoding="utf-8") as typed:
        monkeypatch.setattr(sys, "stdin", typed)
        run("chat output/finetune", folder, monkeypatch)
    assert capsys.readouterr().out.strip()
    run("export --config output/finetune/config.yaml", folder, monkeypatch)
    exported = folder / "output" / "qwen3"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}
    with safe_open(exported / "model.safetensors", framework="numpy") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}
