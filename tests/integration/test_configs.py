"""Every file in configs/ loads, plans and trains."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import REPOSITORY, column, config_of, step_records, train
from tolerances import FRESH_LOSSES

from trainer.checkpoint.hugging_face import folder_files
from trainer.plan.render import plan_text
from trainer.run.prepare import build_plan

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
names = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    draw = [sys.executable, REPOSITORY / "scripts" / "make_digits.py", folder, "--train", "500", "--test", "250"]
    subprocess.run(draw, check=True)
    return folder


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch, digits: Path) -> None:
    """Paths in the files count from there; images are where the environment says."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("DATA_PATH", str(digits))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_there_are_configurations() -> None:
    assert REPOSITORY / "configs" / "quickstart.yaml" in CONFIGS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of Hugging Face without weights, which run mode train does not need."""
    folder = tmp_path_factory.mktemp("model")
    for name, content in folder_files(config_of(REPOSITORY / "configs" / "quickstart.yaml")).items():
        (folder / name).write_bytes(content)
    return folder


def changes_of(path: Path, model_folder: Path) -> dict[str, object]:
    """Returns the further settings that a file needs: finetune.yaml names no model."""
    return {"pretrained_model_dir": model_folder, "run_mode": "train"} if path.stem == "finetune" else {}


@names
def test_it_loads_and_plans(path: Path, cache: Path, model_folder: Path) -> None:
    config = config_of(path, train_dataset__cache_dir=cache, **changes_of(path, model_folder))
    plan = build_plan(config)
    assert plan.steps.last_step > 0 and plan.model.weights > 0
    assert f"{plan.model.weights:,}" in plan_text(plan)
    if not path.stem.startswith("mindformers"):  # those show what becomes of a file of MindSpore Transformers
        # Nothing in ours is ignored, no two keys contradict each other; adapters have no base here.
        # Evaluation drops no tokens. Conversations are written as ChatML.
        expected = {"lora": ["random base weights", "ChatML"], "moe_tiny": ["to training only"]}
        expected["finetune"] = ["max_position_embeddings", "<|im_start|>"]  # of the model folder
        wanted = expected.get(path.stem, [])
        assert len(plan.notes) == len(wanted)
        assert all(any(words in note for note in plan.notes) for words in wanted)


@pytest.mark.slow
@names
def test_it_trains(path: Path, cache: Path, tmp_path: Path, model_folder: Path) -> None:
    """Two steps of at most 2 sequences, without evaluation; all else as it stands. With all sequences of a batch this
    process would grow beyond 2 GB."""
    rows = min(config_of(path).runner_config.batch_size, 2)
    output = train(
        path,
        output_dir=tmp_path / "output",
        **changes_of(path, model_folder) | {"run_mode": "train"},
        train_dataset__cache_dir=cache,
        runner_config__stop_step=2,
        runner_config__batch_size=rows,
        do_eval=False,
        report=False,
        worker_log_dir=tmp_path / "log_output",
    )
    losses, config = column(step_records(output), "loss"), config_of(path, **changes_of(path, model_folder))
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
    outcomes = config.decoder.vocab_size if config.is_decoder else config.network.classes
    if config.loss is not None:
        outcomes = 2  # of DPO, which begins with its reference
    assert abs(losses[0] - math.log(outcomes)) < FRESH_LOSSES
