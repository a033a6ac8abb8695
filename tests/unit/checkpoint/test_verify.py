"""`verify` finds every kind of damage in checkpoints and token files, and never ends in a traceback."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_helpers import cache_of, jsonl, source_of

from trainer.checkpoint import store
from trainer.checkpoint import verify as verify_module
from trainer.checkpoint.json_models import AdapterDescription, RunState
from trainer.checkpoint.verify import verify
from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.main import dispatch
from trainer.data.tokens.cache import find_token_file
from trainer.data.tokens.tokenizer import ByteTokenizer
from trainer.errors import UserError
from trainer.storage.checksums import checksum_of_file
from trainer.storage.json_files import JsonError, parse_json
from trainer.storage.marker import marker_content

STATE = {
    "position": {"step": 3, "epoch": 0, "batch": 3, "tokens": 96},
    "optimizer": {"type": "AdamW", "updates": 3},
    "step": {
        "loss_scale": {"dynamic": False, "value": 1.0, "quiet_steps": 3, "overflows_in_a_row": 0, "overflows": 0},
        "spikes": 0, "spikes_in_a_row": 0,
    },
    "settings": {"optimizer.type": "AdamW"},
    "data": {"seed": 1, "batch_size": 2, "gradient_accumulation_steps": 1, "ranks": 1, "rows": 20,
             "drop_remainder": True, "content": "x"},
    "evaluations": {"step": 3, "best": [{"step": 3, "loss": 2.5}], "reference": None, "without_improvement": 0},
    "base": {"load_checkpoint": "", "seed": 1, "digest": "0" * 64},
}  # fmt: skip


def save(folder: Path, step: int = 3, weight: float = 1.0) -> Path:
    tensors = {"model": {"w": np.float32([weight, 2])}, "optimizer": {"exp_avg.w": np.float32([1, 2])}}
    state = copy.deepcopy(STATE) | {"position": {**STATE["position"], "step": step}}
    return write_checkpoint(folder, step, tensors, state, 0, other_files={"config.json": {"a": 1}})


def mark_again(path: Path) -> None:
    """Writes the marker anew, with the right length and checksum of every file."""
    marker = json.loads((path / "COMPLETE").read_text())
    kept = {name: marker[name] for name in ("step", "save_number")}
    lengths = {name: (path / name).stat().st_size for name in marker["file_bytes"]}
    checksums = {name: checksum_of_file(path / name) for name in lengths}
    (path / "COMPLETE").write_bytes(marker_content(kept | {"file_bytes": lengths, "checksums": checksums}))


def command(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    code = dispatch(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_whole_and_damaged_checkpoints_and_the_newest_to_use(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "output" / "checkpoints"
    paths = [save(folder, step) for step in (3, 4, 5)]
    (folder / "best").symlink_to(paths[1].name)
    code, printed = command(capsys, tmp_path / "output")
    assert code == 0 and printed.count("ok      ") == 3 and printed.endswith("3 checked, none damaged\n")
    assert f"{paths[0]}: step 3, 5 files, 1 KiB" in printed
    (paths[2] / "config.json").write_text(json.dumps({"a": 2}, indent=1))  # a file for other programs
    (folder / "step-00000009").mkdir()
    code, printed = command(capsys, folder)
    assert code == 1 and f"damaged     {paths[2]}: the checksum of config.json does not match COMPLETE" in printed
    assert f"interrupted {folder}/step-00000009" in printed
    assert printed.endswith(f"3 checked, 1 damaged; the newest intact checkpoint is {paths[1]}\n")
    assert command(capsys, folder / "best")[0] == 0
    other = save(tmp_path / "output" / "more", 900)
    printed = command(capsys, tmp_path / "output")[1]
    assert printed.endswith(f"4 checked, 1 damaged; the newest intact checkpoint of each folder: {paths[1]}, {other}\n")
    assert command(capsys, folder / "step-00000009")[0] == 1, "a checkpoint that is asked for by name must be whole"
    code, printed = command(capsys, paths[2], "--json")
    assert code == 1 and json.loads(printed)[0]["problem"].startswith("the checksum of config.json")


def test_the_folder_of_a_launcher_is_no_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints")
    (tmp_path / "msrun_log" / "job").mkdir(parents=True)
    (tmp_path / "msrun_log" / "job" / "state.json").write_text("{}")
    assert [found.path for found in verify(tmp_path)] == [path]
    (path / "COMPLETE").unlink()
    copy_of_it = path.rename(tmp_path / "checkpoints" / "mine")
    assert verify(copy_of_it)[0].problem.startswith("it has no COMPLETE file")


def test_what_is_removed_meanwhile_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes a checkpoint as the retention of a running training does: the marker first, then the files."""
    paths, whole = [save(tmp_path, step) for step in (3, 4)], verify_module.check_checkpoint

    def removed(path: Path) -> store.Checkpoint:
        if path == paths[0]:
            (path / "COMPLETE").unlink()
            (path / "model.safetensors").unlink()
        return whole(path)

    monkeypatch.setattr(verify_module, "check_checkpoint", removed)
    first, second = verify(tmp_path)
    assert (first.is_interrupted, first.problem, second.problem) == (True, "", "")
    assert first.note == "it has no COMPLETE file: it was removed meanwhile"

    def removed_later(path: Path) -> store.Checkpoint:
        found = whole(path)
        shutil.rmtree(path)
        return found

    monkeypatch.setattr(verify_module, "check_checkpoint", removed_later)
    assert verify(tmp_path)[1].is_interrupted


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"exp_avg.w": np.float32([1, 2, 3])}, "exp_avg.w of shape [3], and the weight has [2]"),
        ({"exp_avg.w": np.float64([1, 2])}, "exp_avg.w in F64, not F32"),
    ],
)
def test_the_optimizer_is_compared_with_the_weights(tmp_path: Path, state: dict, problem: str) -> None:
    tensors = {"model": {"w": np.float32([1, 2])}, "optimizer": state}
    assert problem in verify(write_checkpoint(tmp_path, 3, tensors, STATE, 0))[0].problem


def test_the_description_of_adapters_is_read(tmp_path: Path) -> None:
    weights = np.float32([1, 2])
    tensors = {"adapter_model": {"base_model.model.w": weights}, "optimizer": {"exp_avg.w": weights}}
    for rank, problem in ((8, ""), (0, "adapter_config.json: r")):
        files = {"adapter_config.json": {"r": rank, "lora_alpha": 16}}
        path = write_checkpoint(tmp_path, 3, tensors, STATE, 0, other_files=files)
        found = verify(path)[0].problem
        assert found.startswith(problem) and bool(found) == bool(problem)


@pytest.mark.parametrize(
    ("position", "updates", "problem"),
    [
        ({"step": 16, "epoch": 0, "batch": 1, "tokens": 0}, 16, "position.tokens is 0, and optimizer.updates 16"),
        ({"step": 3, "epoch": 0, "batch": 4, "tokens": 9}, 3, "mean 4 steps, and position.step is 3"),
        ({"step": 12, "epoch": 1, "batch": 3, "tokens": 9}, 3, "mean 13 steps, and position.step is 12"),
        ({"step": 16, "epoch": 0, "batch": 1, "tokens": 9, "data_from_step": 0}, 3, "mean 1 steps, and position.step"),
        ({"step": 16, "epoch": 0, "batch": 1, "tokens": 9, "data_from_step": 15}, 3, ""),
        ({"step": 16, "epoch": 1, "batch": 6, "tokens": 9, "data_from_step": 0}, 3, ""),
        ({"step": 16, "epoch": 0, "batch": 1, "tokens": 9}, 3, ""),  # of an earlier version, with --ignore_data_skip
    ],
)
def test_a_position_agrees_with_itself(position: dict, updates: int, problem: str) -> None:
    """20 rows in micro-batches of 2: ten steps an epoch."""
    state = STATE | {"position": position, "optimizer": {"type": "AdamW", "updates": updates}}
    try:
        parse_json(json.dumps(state).encode(), RunState, "state.json")
        assert not problem
    except JsonError as error:
        assert problem and problem in str(error)


def test_a_key_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path)
    text = (path / "state.json").read_text().replace('"batch": 3', '"batch": 3, "batch": 2')
    (path / "state.json").write_text(text)
    mark_again(path)
    assert "state.json is not valid JSON: the key 'batch' stands twice" in verify(path)[0].problem
    assert parse_json(b'{"r": 4, "r": 8, "lora_alpha": 1}', AdapterDescription, "adapter_config.json").r == 8


def test_nothing_to_verify_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, rule in ((tmp_path, "no checkpoint or"), (tmp_path / "x", "no such"), (tmp_path / "file", "not a f")):
        with pytest.raises(UserError, match=rule):
            dispatch(["verify", str(path)])


def test_checkpoints_without_checksums_and_with_nan(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = save(tmp_path, weight=np.nan)
    assert verify(path)[0].problem == "w has NaN or infinity"
    path = save(tmp_path)
    marker = json.loads((path / "COMPLETE").read_text())
    del marker["checksums"], marker["checksum"]
    (path / "COMPLETE").write_text(json.dumps(marker))
    code, printed = command(capsys, path)
    assert code == 0 and "saved without checksums: only lengths were checked" in printed


def test_a_token_cache(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = source_of(tmp_path, jsonl(tmp_path / "a.jsonl", {"text": "x" * 70_000}), "JsonlDataset")
    path = find_token_file(source, ByteTokenizer(), cache_of(tmp_path)).path
    code, printed = command(capsys, path.parent)
    assert code == 0 and f"{path}: 70,001 tokens of" in printed
    content = bytearray((path / "tokens.bin").read_bytes())
    content[100_000] ^= 1
    (path / "tokens.bin").write_bytes(content)
    code, printed = command(capsys, path)
    assert code == 1 and "tokens.bin differs from what was written, from byte 65,536 on; remove it" in printed


def test_folders_that_are_files_and_files_that_are_folders(tmp_path: Path) -> None:
    path = save(tmp_path)
    for name in ("model.safetensors", "state.json", "COMPLETE"):
        (path / name).rename(tmp_path / "aside")
        (path / name).mkdir()
        assert name in verify(path)[0].problem
        (path / name).rmdir()
        (tmp_path / "aside").rename(path / name)
    shutil.rmtree(path)
    path.write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        verify(path)
