"""Mistakes of users: each ends soon, before MindSpore loads, and its message says where, what and how to mend it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from bad_inputs import BASE, CASES, Case
from command_lines import Answer, answers_of
from decoder_settings import decoder_settings
from run_helpers import (
    PROGRAM,
    REPOSITORY,
    call,
    column,
    step_records,
    write_config,
    write_corpus,
)

from trainer.checkpoint.store import newest_complete, read_checkpoint
from trainer.checkpoint.writing import write_checkpoint
from trainer.data.source.indexed import write_indexed
from trainer.models.spec.shapes import parameter_shapes

MISTAKES = {case.name: case for case in CASES}
CPU_SECONDS = 2.0  # of the process: those of the clock depend on what else the machine does


def write_files(home: Path) -> None:
    """Writes the good data and checkpoint, and all the bad ones."""
    write_corpus(home / "data")
    (home / "binary.txt").write_bytes(b"abc\n\xff\xfe" + b"not text, " * 50)
    write_records(home)
    write_token_files(home)
    (home / "binary.yaml").write_bytes(b"seed: 1\n\x00\x80\xff\n")
    write_tokenizer(home / "tokenizer" / "tokenizer.json")
    for name, changes in {"good": {}, "wide": {"hidden_size": 24}, "shallow": {"num_layers": 1}}.items():
        write_model(home / name, changes)
    shutil.copy(newest_complete(home / "wide" / "checkpoints") / "model.safetensors", home / "wide.safetensors")
    shutil.copytree(home / "good", home / "half")
    (home / "half/checkpoints/step-00000003/COMPLETE").unlink()
    model = home / "good/checkpoints/step-00000003/model.safetensors"
    (home / "cut.safetensors").write_bytes(model.read_bytes()[:-9])
    safetensors.numpy.save_file({"lm_head.weight": np.zeros((257, 16), np.int8)}, home / "quantized.safetensors")


def write_token_files(home: Path) -> None:
    (home / "tokens").mkdir()
    write_indexed(home / "tokens" / "cut_index", [np.arange(40) for _ in range(5)], 257)
    index = home / "tokens" / "cut_index.idx"
    index.write_bytes(index.read_bytes()[:-9])
    for suffix in ("", ".db"):
        (home / "tokens" / f"text.mindrecord{suffix}").write_text("only text")


def write_records(home: Path) -> None:
    records = {
        "fieldless": [{"text": "fine"}, {"txet": "a", "id": 1}],
        "roles": [{"messages": [{"role": "bot", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}],
    }
    for name, lines in records.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = "".join(json.dumps({"text": f"number {number}"}) + "\n" for number in range(500))
    (home / "cut.jsonl.gz").write_bytes(gzip.compress(texts.encode())[:-99])


def write_model(folder: Path, changes: dict) -> None:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32, "vocab_size": 257}
    shapes = parameter_shapes(decoder_settings(**sizes | changes))
    weights = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    state = {"position": {}, "optimizer": {"type": "AdamW", "updates": 3}, "data": {}}
    write_checkpoint(folder / "checkpoints", 3, {"model": weights, "optimizer": {}}, state, keep_max=2)


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {chr(0x4E00 + number): number for number in range(400)} | {"</s>": 400}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    path.parent.mkdir()
    tokenizer.save(str(path))


def filled(text: str, home: Path) -> str:
    return text.replace("{home}", str(home))


def arguments_of(case: Case, home: Path, number: int) -> tuple[list[str], str]:
    """Returns the command line, and file with line where its mistake is."""
    if case.config:
        return ["--config", filled(case.config, home)], ""
    folder = home / f"case-{number}"
    folder.mkdir()
    assert BASE.count(case.old) == 1 or not case.old, case.name
    at = BASE.index(case.old)
    (folder / "run.yaml").write_text(filled(BASE.replace(case.old, case.new) if case.old else BASE, home))
    # The change may leave the beginning of the replaced text as it was: the mistake is where they differ.
    same = os.path.commonprefix([case.old, case.new])
    same += "\n" if case.new[len(same) :].startswith("\n") else ""
    line = (BASE[:at] + same).count("\n") + 1
    flags = [filled(flag, home) for flag in case.flags]
    return ["--config", str(folder / "run.yaml"), *flags], f"{folder}/run.yaml:{line}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def places(home: Path) -> dict[str, tuple[list[str], str]]:
    return {name: arguments_of(case, home, number) for number, (name, case) in enumerate(MISTAKES.items())}


@pytest.fixture(scope="module")
def answers(home: Path, places: dict) -> dict[str, Answer]:
    before = contents(home)
    found = answers_of({name: arguments for name, (arguments, _) in places.items()}, home)
    assert contents(home) == before  # nothing was lost, changed or left behind
    return found


def contents(home: Path) -> dict[str, bytes]:
    """Returns all folders and files but the cache of token files, which may grow."""
    paths = [path for path in home.rglob("*") if home / "cache" not in (path, *path.parents)]
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str, home: Path, places: dict, answers: dict[str, Answer]) -> None:
    code, output, errors, seconds, loaded = answers[name]
    assert code == 2, errors
    assert errors.startswith("error: ") and "Traceback" not in output + errors
    for part in MISTAKES[name].parts:
        assert filled(part, home).replace("{at}", places[name][1]) in errors, errors
    assert not loaded, "MindSpore was loaded before the mistake was found"
    assert seconds < CPU_SECONDS


def test_several_mistakes_are_told_at_once(home: Path, tmp_path: Path) -> None:
    text = BASE.replace("seed: 1", "sede: 1").replace("batch_size: 4", "batch_size: 0")
    (tmp_path / "run.yaml").write_text(filled(text, home))
    code, _, errors = call("--config", "run.yaml", cwd=tmp_path)
    assert code == 2 and errors.startswith("error: 2 problems"), errors
    assert "run.yaml:1: sede" in errors and "run.yaml:17: runner_config.batch_size = 0" in errors


# What only a run can know: exit code 1


def test_a_loss_that_is_not_a_number_ends_the_run(home: Path, tmp_path: Path) -> None:
    changes = {
        "lr_schedule.learning_rate": 1e30,
        "context": {"mode": 1},
        "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 2}],
    }
    path = write_config(tmp_path, home / "data", changes)
    code, printed, errors = call("--config", path, cwd=tmp_path)
    assert code == 1 and errors.startswith("error: ") and "Traceback" not in errors, errors
    for part in ("optimizer step 2: ", "norm nan", "the weights were not updated", "Fix: lower the learning rate"):
        assert part in errors, errors
    output = tmp_path / "output"
    assert newest_complete(output / "checkpoints") is None
    assert column(step_records(output), "step") == [1] and "finished" not in printed


def test_on_a_full_disk_the_earlier_checkpoint_stays(home: Path, tmp_path: Path) -> None:
    """A disk of 300 kB: a checkpoint of 130 kB fits, a second one beside it does not."""
    changes = {
        "output_dir": str(tmp_path / "disk" / "output"),
        "context": {"mode": 1},
        "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 3, "keep_checkpoint_max": 2}],
    }
    path = write_config(tmp_path, home / "data", changes)
    (tmp_path / "disk").mkdir()
    script = (
        f"mount -t tmpfs -o size=300k none {tmp_path}/disk || exit 77\n"
        f"{sys.executable} {PROGRAM} --config {path}; code=$?\n"
        f"cp -r {tmp_path}/disk {tmp_path}/kept; exit $code"
    )
    command = ["unshare", "--map-root-user", "--mount", "bash", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("this machine does not let us mount a small disk")
    assert done.returncode == 1, done.stderr
    for part in ("cannot be written: No space left", "earlier checkpoints are untouched", "Fix: free space"):
        assert part in done.stderr
    assert "Traceback" not in done.stderr and f"{tmp_path}/disk/output/checkpoints" in done.stderr
    kept = tmp_path / "kept" / "output"
    assert [path.name for path in (kept / "checkpoints").iterdir()] == ["step-00000003"]
    assert column(step_records(kept), "step") == list(range(1, 7))
    read_checkpoint(newest_complete(kept / "checkpoints"))


# A process that may write files of 100 bytes only: what a full disk does, without one.
SMALL_FILES = """if True:
    import resource, sys
    from pathlib import Path
    from trainer.errors import TrainerError
    from trainer.monitors.files import write_text
    from trainer.run.predict import write_records
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    def whole(path):
        write_text(path, "x" * 101)
    def lines(path):
        with write_records(path) as write:
            for number in range(9):
                write({"text": "x" * 20})
    for name, write in {"eval.json": whole, "predictions.jsonl": lines}.items():
        try:
            write(Path(name))
        except TrainerError as error:
            print(error.exit_code, error)
"""


def test_a_small_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    names = ("eval.json", "predictions.jsonl")
    for name in names:
        (tmp_path / name).write_text("of an earlier run")
    done = subprocess.run(
        [sys.executable, "-c", SMALL_FILES],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count("1 ") == 2 and done.stdout.count("the file cannot be written: File too large") == 2
    assert all(f"{name} = '{name}'" in done.stdout for name in names) and done.stdout.count("Fix: free space") == 2
    assert all((tmp_path / name).read_text() == "of an earlier run" for name in names), done.stderr
