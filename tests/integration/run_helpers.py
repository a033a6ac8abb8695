"""What the integration tests share: a tiny corpus and model, runs in this process and in processes of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fork_server import FORKED, ensure_server
from numpy_kernels import assert_same_bits

from trainer.checkpoint.store import newest_complete, read_checkpoint
from trainer.config import Config, Override, load_config
from trainer.errors import EXIT_BAD_INPUT, UserError
from trainer.storage.checksums import checksum_of_file
from trainer.storage.marker import MARKER, marker_content

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "run_trainer.py"
WORDS = "the cat sat on a mat and saw dogs run over hills while rain fell down for an hour".split()


def write_corpus(folder: Path, documents: int = 6, lines: int = 8) -> Path:
    """Returns a folder of short texts of unequal lengths: rows with document boundaries at changing places."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(7)
    for number in range(documents):
        text = "\n".join(" ".join(draw.choices(WORDS, k=6)) for _ in range(lines + number))
        (folder / f"{number}.txt").write_text(text + "\n", encoding="utf-8")
    return folder


def write_instructions(path: Path, records: int = 48) -> Path:
    """Writes JSON lines with prompts of very unequal lengths, which carry no loss."""
    draw = random.Random(5)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(records):
            prompt = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
            answer = " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))
            print(json.dumps({"instruction": prompt, "output": answer}), file=file)
    return path


def write_preferences(path: Path, records: int = 96) -> Path:
    """Writes JSON lines with a chosen and a rejected answer to each prompt; the chosen one ends with a full stop."""
    draw = random.Random(9)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(records):
            prompt = draw.choice(WORDS)
            answers = [f"{draw.choice(WORDS)} {word}" for word in draw.sample(WORDS, 2)]
            print(json.dumps({"prompt": prompt, "chosen": f" {answers[0]}.", "rejected": f" {answers[1]}"}), file=file)
    return path


def write_labelled(path: Path, records: int = 96) -> Path:
    """Writes JSON lines with an answer to each prompt and its label: those with a full stop are desirable."""
    draw = random.Random(9)
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            answer = f" {draw.choice(WORDS)} {draw.choice(WORDS)}"
            label = number % 3 > 0
            record = {"prompt": draw.choice(WORDS), "completion": answer + "." * label, "label": label}
            print(json.dumps(record), file=file)
    return path


def settings(folder: Path, data: Path | str) -> dict[str, Any]:
    """Returns a configuration that trains in a second: 2 layers, hidden 16, rows of 16 bytes."""
    return {
        "output_dir": str(folder / "output"),
        "report": False,
        "model": {
            "arch": {"type": "LlamaForCausalLM"},
            "model_config": {
                "num_layers": 2,
                "hidden_size": 16,
                "num_heads": 2,
                "n_kv_heads": 1,
                "intermediate_size": 32,
                "vocab_size": 257,
                "seq_length": 16,
                "max_position_embeddings": 64,
            },
        },
        "train_dataset": {
            "cache_dir": str(folder / "cache"),
            "data_loader": {"type": "TextDataset", "dataset_dir": str(data)},
            "held_out": 0.2,
        },
        "runner_config": {"batch_size": 4, "epochs": 2},
        "optimizer": {"type": "AdamW", "weight_decay": 0.1},
        "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 0.003},
    }


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` with dotted keys set, for example ``{"runner_config.epochs": 3}``."""
    merged = json.loads(json.dumps(base))
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = merged
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return merged


def write_config(folder: Path, data: Path | str, changes: Mapping[str, Any] | None = None) -> Path:
    """Writes `folder`/run.yaml: `settings` with dotted keys changed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(merge(settings(folder, data), changes or {}), sort_keys=False), encoding="utf-8")
    return path


def config_of(path: Path, **flags: object) -> Config:
    """Loads a file with top-level or, with ``__`` for the dot, dotted keys set as flags do."""
    pairs = [(name.replace("__", "."), str(value)) for name, value in flags.items()]
    return load_config(str(path), [Override(key, text, f"flag --{key}") for key, text in pairs])


def train(path: Path, **flags: object) -> Path:
    """Runs a configuration in this process; returns its output folder."""
    from trainer.run.loop import run

    config = config_of(path, **flags)
    assert run(config) == 0
    return Path(config.output_dir)


def train_and_read(path: Path, **flags: object) -> tuple[Path, str]:
    """Trains, and also returns what the run printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return train(path, **flags), printed.getvalue()


def evaluate(path: Path, output: Path, **flags: object) -> dict[str, Any]:
    """Runs an evaluation in this process; returns the contents of eval.json."""
    train(path, output_dir=output, run_mode="eval", **flags)
    return json.loads((output / "eval.json").read_text(encoding="utf-8"))


def predict(path: Path, **flags: object) -> list[dict[str, Any]]:
    """Runs a prediction in this process; returns the records of predictions.jsonl."""
    return _records(train(path, run_mode="predict", **flags) / "predictions.jsonl")


def start_and_wait(path: Path, steps: int) -> tuple[subprocess.Popen, Path]:
    """Starts a training of `write_config`; returns it and its output folder when so many steps are written down."""
    output = path.parent / "output"
    process = start("--config", path, cwd=path.parents[1])
    wait_until(lambda: steps_done(output) >= steps, process)
    return process, output


def kill_after(path: Path, steps: int) -> Path:
    """Starts a training and kills it when so many steps are written down; returns its output folder."""
    process, output = start_and_wait(path, steps)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    return output


def refusal(action: Callable[[], object], *parts: str) -> str:
    """Checks that an action ends in a user's error with exit code 2, whose message has these parts and a fix; returns
    the message."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert caught.value.exit_code == EXIT_BAD_INPUT
    for part in (*parts, "Fix: "):
        assert part in message, message
    return message


# What a run left


def step_records(output: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [record for record in _records(output / name) if "loss" in record]


def eval_records(output: Path) -> list[dict[str, Any]]:
    return [record for record in _records(output / "metrics.jsonl") if "eval_loss" in record]


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def column(records: list[dict[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in records]


def figures(output: Path, name: str = "metrics.jsonl") -> list[tuple]:
    """Returns the numbers that must have the same bits in two equal runs."""
    names = ("step", "epoch", "loss", "lr", "global_norm", "tokens", "loss_scale")
    return [tuple(record[key] for key in names) for record in step_records(output, name)]


def arrays_of(output: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """Returns weights and optimizer state of a checkpoint, the newest by default, by part and name."""
    folder = output / "checkpoints"
    path = newest_complete(folder) if step is None else folder / f"step-{step:08d}"
    tensors = read_checkpoint(path).tensors
    return {f"{part}/{name}": array for part, arrays in tensors.items() for name, array in arrays.items()}


def assert_same_run(output: Path, right: Path) -> None:
    """Compares every number of the steps, and every bit of the last checkpoint."""
    assert figures(output) == figures(right)
    assert_same_bits(arrays_of(output), arrays_of(right))


def assert_resumes(
    path: Path, whole: Path, stop_step: int, first: Mapping[str, object] | None = None, **flags: object
) -> Path:
    """Trains to `stop_step`, resumes, and compares with the run `whole`, which never stopped; returns the folder.

    `first` are flags of the first part alone.
    """
    output = whole.with_name(f"{whole.name}-halves")
    train(path, output_dir=output, **{**flags, **(first or {}), "runner_config__stop_step": stop_step})
    train(path, output_dir=output, resume_training=True, **flags)
    assert_same_run(output, whole)
    return output


def mark_again(checkpoint: Path, with_checksums: bool = True) -> None:
    """Writes the marker of a checkpoint whose files were changed: everything in it is right.

    Without checksums it is that of an earlier version.
    """
    marker = json.loads((checkpoint / MARKER).read_text())
    kept = {name: marker[name] for name in ("step", "save_number")}
    lengths = {name: (checkpoint / name).stat().st_size for name in marker["file_bytes"]}
    if with_checksums:
        checksums = {name: checksum_of_file(checkpoint / name) for name in lengths}
        content = marker_content(kept | {"file_bytes": lengths, "checksums": checksums})
    else:
        content = json.dumps(kept | {"file_bytes": lengths}).encode()
    (checkpoint / MARKER).write_bytes(content)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# Processes


def start(
    *arguments: object, cwd: Path, sigint: signal.Handlers = signal.SIG_DFL, has_imported: bool = True
) -> subprocess.Popen:
    """Starts the program as a user does: with Ctrl-C working, even where the tests run in a shell's background.

    With `sigint` SIG_IGN it starts as a background job of a script does. `has_imported`: in a process that has imported
    MindSpore already (fork_server.py); False: in one that imports it as a user's does.
    """
    if has_imported:
        ensure_server()
    return subprocess.Popen(
        [sys.executable, *([str(FORKED)] if has_imported else []), str(PROGRAM), *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        preexec_fn=lambda: signal.signal(signal.SIGINT, sigint),
    )


def finish(process: subprocess.Popen, timeout_seconds: float = 60) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error; never leaves the process running."""
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
    finally:
        process.kill()
    return process.returncode, output, errors


def call(*arguments: object, cwd: Path, has_imported: bool = True) -> tuple[int, str, str]:
    return finish(start(*arguments, cwd=cwd, has_imported=has_imported))


def wait_until(holds: Callable[[], bool], process: subprocess.Popen, timeout_seconds: float = 60) -> None:
    """Waits for what a process will do; fails with its output when it ends or takes too long."""
    deadline = time.monotonic() + timeout_seconds
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"it did not happen: {finish(process, 5)}")
        time.sleep(0.01)


def steps_done(output: Path) -> int:
    """Returns steps that a running training has written down."""
    path = output / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count('"loss"') if path.exists() else 0
