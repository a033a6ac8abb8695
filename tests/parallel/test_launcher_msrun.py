"""The trainer itself, in a job of two workers that MindSpore's own msrun starts: signals, failures, a hang."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml
from launch_helpers import LIMIT_SECONDS, PROGRAM, Launcher

from trainer.checkpoint.store import newest_complete
from trainer.errors import EXIT_HANG

pytestmark = pytest.mark.slow

CONFIG = {
    "output_dir": "output",
    "report": False,
    "model": {
        "arch": {"type": "LlamaForCausalLM"},
        "model_config": {
            "num_layers": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 32,
            "vocab_size": 64,
            "seq_length": 16,
        },
    },
    "train_dataset": {"data_loader": {"type": "SyntheticDataset", "num_samples": 100_000}},
    "runner_config": {"batch_size": 4, "epochs": 1},
    "optimizer": {"type": "AdamW"},
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 0.003},
}


def train(folder: Path, *flags: object, workers: int = 2, **environment: str) -> Launcher:
    """Launches a training that takes minutes, with its configuration named relative to the working directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    command = [sys.executable, PROGRAM, "launch", "--nproc", workers, "--log_dir", "logs", "--config", "run.yaml"]
    job = Launcher(folder, [str(word) for word in (*command, *flags)], environment)
    job.wait_until(lambda: job.process.poll() is not None or steps(job) >= 3, 180)
    return job


def steps(job: Launcher) -> int:
    path = job.folder / "output" / "metrics.jsonl"
    return path.read_text().count('"step"') if path.exists() else 0


def pid(job: Launcher, rank: int) -> int:
    state = json.loads((job.logs / "job" / "state.json").read_text())
    return state["workers"][rank]["pid"]


def test_ctrl_c_saves_though_mindspore_takes_that_signal_for_itself(tmp_path: Path) -> None:
    job = train(tmp_path)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 128 + signal.SIGINT, job.errors
    assert newest_complete(tmp_path / "output" / "checkpoints").name == f"step-{steps(job):08d}"
    assert "Traceback" not in job.log(0) + job.log(1)
    # Rank 0 was followed, without what MindSpore says about its cluster.
    assert "step     3/" in job.printed and "mindspore/ccsrc" not in job.printed


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    job = train(tmp_path)
    began = time.monotonic()
    os.kill(pid(job, 1), signal.SIGKILL)
    assert job.end() == 128 + signal.SIGKILL
    assert time.monotonic() - began < LIMIT_SECONDS
    assert "rank 1 failed first: ended by SIGKILL" in job.errors


def test_a_rank_that_stands_still_is_a_hang(tmp_path: Path) -> None:
    job = train(tmp_path, "--hang_timeout", 4)
    began = time.monotonic()
    os.kill(pid(job, 1), signal.SIGSTOP)
    assert job.end() == EXIT_HANG
    assert time.monotonic() - began < LIMIT_SECONDS + 4
    assert "most recent call first" in job.log(0)


def test_one_worker_needs_no_msrun(tmp_path: Path) -> None:
    job = train(tmp_path, "--runner_config.stop_step", 3, workers=1, RUN_TRAINER_MSRUN="absent.py")
    assert job.end() == 0
    assert "step     3/" in job.printed and not (job.logs / "job" / "msrun").exists()
