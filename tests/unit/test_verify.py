"""`verify` finds every kind of damage in checkpoints and token files, and never ends in a traceback."""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_helpers import cache_of, jsonl, source_of
from mutations import mutate, mutated_text

from trainer.checkpoint import store
from trainer.checkpoint.documents import AdapterDescription
from trainer.checkpoint.verify import verify
from trainer.checkpoint.writing import write_checkpoint
from trainer.cli.main import dispatch
from trainer.data.tokens.cache import find_token_file
from trainer.data.tokens.token_file import open_token_file
from trainer.data.tokens.tokenizer import ByteTokenizer
from trainer.errors import UserError
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
    return write_checkpoint(folder, step, tensors, state, 0, documents={"config.json": {"a": 1}})


def mark_again(path: Path) -> None:
    """Writes the marker anew, with the right length and checksum of every file."""
    marker = json.loads((path / "COMPLETE").read_text())
    kept = {name: marker[name] for name in ("step", "save_number")}
    lengths = {name: (path / name).stat().st_size for name in marker["file_bytes"]}
    checksums = {name: store.checksum_of_file(path / name) for name in lengths}
    (path / "COMPLETE").write_bytes(marker_content(kept | {"file_bytes": lengths, "checksums": checksums}))


def command(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    code = dispatch(["verify", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_whole_and_damaged_checkpoints_and_the_newest_to_use(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "output" / "checkpoints"
    paths = [save(folder, step) for step in (3, 4, 5)]
    (folder / "best").symlink_to(paths[1].name)
    code, printed = command(capsys, tmp_path / "output")
    assert code == 0 and printed.count("whole  ") == 3 and printed.endswith("3 checked, none damaged\n")
    assert f"{paths[0]}: step 3, 5 files, 0.0 MB" in printed
    (paths[2] / "config.json").write_text(json.dumps({"a": 2}, indent=1))  # a file for other programs
    (folder / "step-00000009").mkdir()
    code, printed = command(capsys, folder)
    assert code == 1 and f"damaged     {paths[2]}: config.json is not what was saved: its checksum is" in printed
    assert f"interrupted {folder}/step-00000009" in printed
    assert printed.endswith(f"3 checked, 1 damaged; the newest whole checkpoint is {paths[1]}\n")
    assert command(capsys, folder / "best")[0] == 0
    assert command(capsys, folder / "step-00000009")[0] == 1, "a checkpoint that is asked for by name must be whole"
    code, printed = command(capsys, paths[2], "--json")
    assert code == 1 and json.loads(printed)[0]["problem"].startswith("config.json is not")


def test_nothing_to_verify_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, rule in ((tmp_path, "holds no checkpoint"), (tmp_path / "x", "no such"), (tmp_path / "file", "not a f")):
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
    assert code == 1 and "tokens.bin is not what was written, from byte 65,536 on; remove it" in printed


# ---- a thousand mutations --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["state.json", "COMPLETE"])
def test_mutations_of_a_checkpoint_are_named(tmp_path: Path, name: str) -> None:
    path, draw, found = save(tmp_path), random.Random(3), 0
    whole = (path / name).read_text()
    for number in range(300):
        changed = mutate(draw, json.loads(whole), ["step", "model"]) if number % 2 else None
        if number % 2 and name == "COMPLETE" and isinstance(changed, dict):
            changed.pop("checksum", None)
            try:
                content = marker_content(changed) if number % 4 == 1 else json.dumps(changed).encode()
            except UnicodeEncodeError:
                continue
        else:
            content = json.dumps(changed).encode() if number % 2 else mutated_text(draw, whole)
        (path / name).write_bytes(content)
        if name == "state.json":
            mark_again(path)
        (finding,) = verify(path)  # no traceback
        found += bool(finding.problem)
        # Named: the file, or the files that the marker speaks of.
        assert not finding.problem or ".json" in finding.problem or "COMPLETE" in finding.problem or (
            ".safetensors" in finding.problem or "is missing" in finding.problem or "holds" in finding.problem
        ), finding.problem
        assert len(finding.problem) < 1000
        (path / name).write_text(whole)
        if name == "state.json":
            mark_again(path)
    assert found > 230, found
    assert not verify(path)[0].problem


def test_mutations_of_a_token_file_are_damage(tmp_path: Path) -> None:
    source = source_of(tmp_path, jsonl(tmp_path / "a.jsonl", {"prompt": "a", "completion": "b"}), "JsonlDataset")
    path, draw = find_token_file(source, ByteTokenizer(), cache_of(tmp_path)).path, random.Random(4)
    whole = (path / "meta.json").read_text()
    meta = json.loads(whole)
    for number in range(300):
        changed = mutate(draw, meta, ["mask.bin", "checksums"])
        content = json.dumps(changed).encode() if number % 2 else mutated_text(draw, whole)
        (path / "meta.json").write_bytes(content)
        opened = open_token_file(path)  # no traceback
        if opened is not None:  # what was changed is whether there are checksums
            assert opened.meta.checksums is None or opened.meta.model_dump() == meta
    (path / "meta.json").write_text(whole)
    assert open_token_file(path) is not None


def test_mutations_of_adapter_config_json_name_file_and_field() -> None:
    whole, draw = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}, random.Random(5)
    refused = 0
    for number in range(300):
        text = json.dumps(whole)
        content = json.dumps(mutate(draw, whole, ["r"])).encode() if number % 2 else mutated_text(draw, text)
        try:
            parse_json(content, AdapterDescription, "adapter_config.json")
        except JsonError as error:
            refused += 1
            assert str(error).startswith("adapter_config.json") and len(str(error)) < 500
    assert refused > 150


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
