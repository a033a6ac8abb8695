"""The checkpoint store: arrays come back bit for bit, and a killed writer never costs a checkpoint."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.checkpoint import store, writing
from trainer.checkpoint.weights import read_weights
from trainer.config.location import SourceLocation
from trainer.config.read.model_folder import _read_json
from trainer.data.tokens.chat_template import _find_in
from trainer.data.tokens.tokenizer_files import TokenizerConfigFile, read_beside
from trainer.errors import RunError, UserError
from trainer.storage.marker import marker_content
from trainer.storage.tensor_file import CODES

REPOSITORY = Path(__file__).resolve().parents[3]


def tensors_of(step: int, elements: int = 64) -> dict[str, dict[str, np.ndarray]]:
    """Returns recognisable arrays of a step."""
    weights = np.arange(elements, dtype=np.float32) + step
    return {"model": {"w": weights, "b": np.float32([step])}, "optimizer": {"w.m": weights * 2}}


def save(folder: Path, step: int, keep_max: int = 0, on_stage: writing.OnStage | None = None) -> Path:
    return writing.write_checkpoint(folder, step, tensors_of(step), {"step": step, "epoch": 1}, keep_max, on_stage)


def assert_holds(path: Path, step: int) -> None:
    checkpoint = store.read_checkpoint(path)
    assert checkpoint.step == step and checkpoint.state == {"step": step, "epoch": 1}
    for part, arrays in tensors_of(step).items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(checkpoint.tensors[part][name], array)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(CODES))
def test_every_dtype_returns_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    raw = np.random.default_rng(0).integers(0, 256, size=(5, 3, 16), dtype=np.uint8)  # NaNs and infinities among them
    array = (raw & 1).astype(bool) if dtype == "bool" else np.frombuffer(raw.tobytes(), dtype=dtype)
    path = writing.write_checkpoint(tmp_path, 1, {"model": {"x": array}}, {}, 1)
    back = store.read_checkpoint(path).tensors["model"]["x"]
    assert back.dtype == array.dtype and back.shape == array.shape and back.tobytes() == array.tobytes()


def test_every_memory_layout_returns_its_values(tmp_path: Path) -> None:
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {
        "transposed": square.T,
        "strided": square[::2, ::2],
        "reversed": square[::-1],
        "scalar": np.float32(7.5).reshape(()),
        "empty": np.zeros((0, 4), np.float32),
        "big_endian": square.astype(">f4"),
        "unaligned": np.frombuffer(b"\0" + square.tobytes(), dtype=np.float32, offset=1),
        "name with spaces/and.dots": square,
    }
    path = writing.write_checkpoint(tmp_path, 1, {"model": arrays}, {}, 1)
    back = store.read_checkpoint(path).tensors["model"]
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].shape == array.shape, name
        np.testing.assert_array_equal(back[name], array, err_msg=name)


def test_state_returns_exactly(tmp_path: Path) -> None:
    state = {"best": 0.1 + 0.2, "rng": {"state": 2**127 + 1}, "name": "é", "none": None, "list": [1, 2.5, True]}
    assert store.read_checkpoint(writing.write_checkpoint(tmp_path, 3, {}, state, 1)).state == state


def test_the_arrays_read_can_be_changed_and_outlive_the_files(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    weights = store.read_checkpoint(path).tensors["model"]["w"]
    shutil.rmtree(path)
    weights += 1
    np.testing.assert_array_equal(weights, tensors_of(1)["model"]["w"] + 1)


def test_a_part_can_be_read_alone(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "optimizer.safetensors").unlink()
    assert store.read_checkpoint(path, ("model",)).tensors.keys() == {"model"}


def test_the_layout_on_disk(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "checkpoints", 100)
    assert path == tmp_path / "new" / "checkpoints" / "step-00000100"
    assert names(path) == ["COMPLETE", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert json.loads((path / "state.json").read_text())["step"] == 100


def test_other_files_belong_to_the_checkpoint(tmp_path: Path) -> None:
    content = {"r": 8, "target_modules": ["q_proj"]}
    path = writing.write_checkpoint(tmp_path, 3, tensors_of(3), {}, 1, other_files={"adapter_config.json": content})
    assert json.loads((path / "adapter_config.json").read_text()) == content
    marked = json.loads((path / store.MARKER).read_text())["file_bytes"]
    assert marked["adapter_config.json"] == (path / "adapter_config.json").stat().st_size
    assert store.read_checkpoint(path).state == {}


def test_an_unsupported_dtype_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="w has dtype complex128"):
        writing.write_checkpoint(tmp_path / "c", 1, {"model": {"w": np.zeros(1, np.complex128)}}, {}, 1)
    assert not (tmp_path / "c").exists()


# ---- newest, keep_max, finding ---------------------------------------------------------------------------------------


def test_keep_max_removes_the_oldest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep_max=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    for step in (5, 6, 7):
        save(tmp_path, step, keep_max=0)
    assert len(names(tmp_path)) == 5


def test_the_removal_of_a_marker_is_on_disk_before_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, flushed, flush = save(tmp_path, 1), [], writing.flush_to_disk

    def record(path: Path) -> None:
        flushed.append((path, names(path) if path == old else []))
        flush(path)

    monkeypatch.setattr(writing, "flush_to_disk", record)
    save(tmp_path, 2, keep_max=1)
    assert (old, ["model.safetensors", "optimizer.safetensors", "state.json"]) in flushed and not old.exists()


def test_newest_is_the_one_saved_last_even_when_an_earlier_run_went_further(tmp_path: Path) -> None:
    save(tmp_path, 500)
    save(tmp_path, 100, keep_max=1)
    assert store.newest_complete(tmp_path) == tmp_path / "step-00000100"
    assert names(tmp_path) == ["step-00000100"]


def test_the_same_step_saved_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    writing.write_checkpoint(tmp_path, 1, {"model": {"w": np.float32([42])}}, {}, keep_max=0)
    assert names(tmp_path) == ["step-00000001"]
    assert store.read_checkpoint(tmp_path / "step-00000001").tensors["model"]["w"] == 42


def test_incomplete_and_foreign_folders_are_not_checkpoints(tmp_path: Path) -> None:
    assert store.newest_complete(tmp_path / "missing") is None
    complete = save(tmp_path, 1)
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "COMPLETE").write_text("")
    shutil.copytree(complete, tmp_path / "step-00000009-mine")
    (tmp_path / "step-00000004").write_text("a file")
    assert store.complete_checkpoints(tmp_path) == [complete]


def test_a_save_removes_only_leftovers_of_saves(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / "COMPLETE").write_text("unreadable")
    (tmp_path / "step-00000009-mine").mkdir()
    (tmp_path / ".tmp-step-00000007").mkdir()
    save(tmp_path, 10)
    assert names(tmp_path) == ["step-00000003", "step-00000009-mine", "step-00000010"]


def test_find_checkpoint_accepts_what_a_user_may_name(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 1)
    newest = save(tmp_path / "checkpoints", 2)
    for path in (newest, tmp_path / "checkpoints", tmp_path):
        assert store.find_checkpoint(path) == newest
    renamed = newest.rename(tmp_path / "my-best-model")
    assert store.find_checkpoint(renamed) == renamed and store.read_checkpoint(renamed).step == 2


def test_find_checkpoint_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint = .*nowhere.*: there is no such checkpoint"):
        store.find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(UserError, match="checkpoint = .*the folder holds no complete checkpoint"):
        store.find_checkpoint(tmp_path)
    save(tmp_path / "run" / "checkpoints", 4)
    with pytest.raises(UserError, match="no complete checkpoint.\n  Fix: name one that is there: .*/run."):
        store.find_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="checkpoint = .*pipe.*: is a pipe, a socket or a device, not a check"):
        store.find_checkpoint(tmp_path / "pipe")


# ---- damage ----------------------------------------------------------------------------------------------------------


def remove_checksums(path: Path) -> None:
    """Makes a checkpoint as versions before checksums saved it."""
    marker = json.loads((path / "COMPLETE").read_text())
    kept = {name: marker[name] for name in ("step", "save_number", "file_bytes")}
    (path / "COMPLETE").write_text(json.dumps(kept))


def damage_marker(path: Path) -> None:
    (path / "COMPLETE").unlink()


def damage_state(path: Path) -> None:
    text = (path / "state.json").read_text()
    (path / "state.json").write_text("?" * len(text))


def truncate_model(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-10])


def corrupt_model(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(b"\xff" * len(content))


def lose_optimizer(path: Path) -> None:
    (path / "optimizer.safetensors").unlink()


@pytest.mark.parametrize(("damage", "message", "unchecked"), [
    (damage_marker, "incomplete: it has no readable COMPLETE file", ""),
    (damage_state, "damaged: the checksum of state.json does not match COMPLETE",
     "damaged: state.json cannot be read .*state.json is not valid JSON"),
    (truncate_model, r"damaged: model.safetensors has \d+ bytes, not the \d+ that were saved",
     r"damaged: model.safetensors has \d+ bytes, not the \d+ that were saved"),
    (corrupt_model, "damaged: the checksum of model.safetensors does not match COMPLETE",
     "damaged: model.safetensors cannot be read"),
    (lose_optimizer, "damaged: cannot open optimizer.safetensors: ", "damaged: cannot open optimizer.safetensors: "),
])
def test_damage_is_named_with_a_fix(tmp_path: Path, damage, message: str, unchecked: str) -> None:
    """In a checkpoint with checksums, and in one of an earlier version without."""
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage(bad)
    with pytest.raises(UserError, match=message) as caught:
        store.read_checkpoint(bad)
    assert str(bad) in str(caught.value) and f"use {good}" in str(caught.value)
    assert store.read_checkpoint(good).has_checksums
    remove_checksums(good)
    assert not store.read_checkpoint(good).has_checksums
    if unchecked:
        damage(good)
        with pytest.raises(UserError, match=unchecked):
            store.read_checkpoint(good)
    shutil.rmtree(good)
    with pytest.raises(UserError, match="start a new run"):
        store.read_checkpoint(bad)


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    draw = random.Random(1)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "COMPLETE"):
        whole = (path / name).read_bytes()
        for _ in range(100):
            changed, position = bytearray(whole), draw.randrange(len(whole))
            changed[position] ^= 1 << draw.randrange(8)
            (path / name).write_bytes(changed)
            if name == "COMPLETE" and changed.split() == whole.split():
                continue  # a space became another one
            with pytest.raises(UserError, match=f"damaged: .*{name}") as caught:
                store.read_checkpoint(path)
            assert f"use {older}" in str(caught.value) and f"--resume_training {older.name}" in str(caught.value)
            with pytest.raises(UserError) as located, store.errors_at("a.yaml:3", "load_checkpoint"):
                raise caught.value
            assert f"a.yaml:3: load_checkpoint = {str(path)!r}: the checkpoint is damaged" in str(located.value)
            assert f"Fix: use --load_checkpoint {older}, the " in str(located.value)
            assert "resume" not in str(located.value)
        (path / name).write_bytes(whole)
    assert_holds(path, 2)


def test_the_offer_is_the_next_older_checkpoint(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (3, 1, 2)]  # a run went back from step 3
    corrupt_model(paths[1])
    with pytest.raises(UserError, match=f"use {paths[0]}"):
        store.read_checkpoint(paths[1])
    shutil.rmtree(paths[0])
    with pytest.raises(UserError, match=f"use {paths[2]}"):  # none is older
        store.read_checkpoint(paths[1])


def test_a_damaged_marker_of_the_newest_is_not_passed_over(tmp_path: Path) -> None:
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    (path / "COMPLETE").write_bytes((path / "COMPLETE").read_bytes().replace(b'"step": 2', b'"step": 3'))
    with pytest.raises(UserError, match="step-00000002.*COMPLETE: it was modified") as caught:
        store.find_checkpoint(tmp_path)
    assert f"use {older}" in str(caught.value) and "or remove the damaged folder" in str(caught.value)
    save(tmp_path, 3)
    with pytest.raises(UserError, match="step-00000002.*COMPLETE: it was modified"):  # who knows when it was saved?
        store.find_checkpoint(tmp_path)
    shutil.rmtree(path)
    assert store.find_checkpoint(tmp_path).name == "step-00000003"


def test_an_abandoned_run_is_not_continued_where_markers_are_damaged(tmp_path: Path) -> None:
    folders = {step: save(tmp_path, step) for step in (100, 500, 150, 160)}  # it went back from step 500 to step 100
    for step in (160, 150):
        content = bytearray((folders[step] / "COMPLETE").read_bytes())
        content[30] ^= 1
        (folders[step] / "COMPLETE").write_bytes(content)
        with pytest.raises(UserError, match="step-00000160.*the checkpoint is damaged") as caught:
            store.find_checkpoint(tmp_path)
        newest = 150 if step == 160 else 500
        assert f"use {folders[newest]}, the newest intact one" in str(caught.value)


def test_a_file_of_a_checkpoint_is_checked_when_it_is_read_alone(tmp_path: Path) -> None:
    tokenizer = {"eos_token": "</s>"}
    files = {"config.json": {"a": 1}, "tokenizer_config.json": tokenizer, "chat_template.jinja": b"{{ bos }}"}
    path = writing.write_checkpoint(tmp_path, 1, tensors_of(1), {}, 1, other_files=files)
    place = SourceLocation(1, "a.yaml:1")
    readers = {
        "model.safetensors": lambda file: read_weights(file),
        "config.json": lambda file: _read_json(file, place, "x"),
        "tokenizer_config.json": lambda file: read_beside(file, TokenizerConfigFile),
        "chat_template.jinja": lambda file: _find_in(file.parent),
    }
    for name, read in readers.items():
        assert read(path / name)
        content = bytearray((path / name).read_bytes())
        content[-4] ^= 1
        (path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"the checksum of {name} does not match COMPLETE"):
            read(path / name)
    (path / "COMPLETE").write_text("{")
    with pytest.raises(UserError, match="the checkpoint that it belongs to is damaged: COMPLETE is not valid JSON"):
        read_weights(path / "model.safetensors")
    (path / "COMPLETE").unlink()
    assert read_weights(path / "model.safetensors").keys() == tensors_of(1)["model"].keys()


def test_a_folder_under_the_name_of_another_step_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, 2).rename(tmp_path / "step-00000009")
    with pytest.raises(UserError, match="COMPLETE says step 2, the folder's name 9"):
        store.read_checkpoint(path)
    save(tmp_path, 3)
    with pytest.raises(UserError, match="step-00000009.*says step 2(.|\n)*Fix: rename it to step-00000002, or"):
        store.find_checkpoint(tmp_path)


def test_a_renamed_checkpoint_is_named_where_it_is_passed_over(tmp_path: Path) -> None:
    older, newest = (save(tmp_path / "checkpoints", step) for step in (1, 2))
    shutil.copytree(older, older.with_name("a copy"))
    assert store.renamed_checkpoint_notes(newest) == []
    renamed = newest.rename(newest.with_name("my-best-model"))
    assert store.find_checkpoint(tmp_path) == older
    (note,) = store.renamed_checkpoint_notes(older)
    assert note.startswith(f"{renamed} was saved after step-00000001") and "--resume_training my-best-model" in note
    shutil.rmtree(older)
    shutil.rmtree(older.with_name("a copy"))
    with pytest.raises(UserError, match="but .*my-best-model(.|\n)*Fix: rename it to step-00000002, or name it"):
        store.find_checkpoint(tmp_path)


def test_two_sets_of_files_with_one_part_are_damage(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    marker = json.loads((path / "COMPLETE").read_text())
    name = "optimizer-00001-of-00001.safetensors"
    shutil.copy(path / "optimizer.safetensors", path / name)
    del marker["checksum"]
    for key in ("file_bytes", "checksums"):
        marker[key][name] = marker[key]["optimizer.safetensors"]
    (path / "COMPLETE").write_bytes(marker_content(marker))
    with pytest.raises(UserError, match=f"{name} and optimizer.safetensors both contain 'optimizer'"):
        store.read_checkpoint(path)


def test_a_missing_checkpoint_or_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such checkpoint"):
        store.read_checkpoint(tmp_path / "step-00000001")
    with pytest.raises(UserError, match="has no part 'lora', only model, optimizer"):
        store.read_checkpoint(save(tmp_path, 1), ("lora",))


# ---- death at every stage --------------------------------------------------------------------------------------------

# One process forks a writer for each stage; the writer kills itself there. argv: root, repository, step to save, and
# whether a thread of the writer saves, as beside a training.
_KILLED_WRITERS = """
import os, signal, sys
from pathlib import Path
root, step = Path(sys.argv[1]), int(sys.argv[3])
sys.path[:0] = [sys.argv[2], *(sys.argv[2] + f"/tests/unit{folder}" for folder in ("", "/checkpoint"))]
from test_checkpoint_store import save, tensors_of
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.writing import checkpoint_stages
from trainer.parallel.communicator import Communicator

def write(folder, die):
    if sys.argv[4] == "alone":
        return save(folder, step, 2, die)
    saver = Saver(folder, Communicator(), True, lambda path, step: None)
    state = {"step": step, "epoch": 1}
    saver.save(lambda: checkpoint_stages(folder, step, tensors_of(step), state, 2, die), step)
    saver.finish()

stages = []
prepare = lambda folder: [save(folder, earlier) for earlier in (1, 2, 3)]
prepare(root / "whole")
save(root / "whole", step, 2, stages.append)
for number, stage in enumerate(stages):
    folder = root / f"{number:02d} {stage}"
    prepare(folder)
    pid = os.fork()
    if pid == 0:
        seen = []
        def die(name):
            seen.append(name)
            if len(seen) == number + 1:
                os.kill(os.getpid(), signal.SIGKILL)
        write(folder, die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, stage
print(len(stages))
"""


@pytest.mark.parametrize(
    ("step", "how"), [(4, "alone"), (3, "alone"), (4, "beside")], ids=["new step", "again", "beside a training"]
)
def test_sigkill_at_every_stage_leaves_a_complete_checkpoint(tmp_path: Path, step: int, how: str) -> None:
    """Kills a process at each stage of a save, and reads what is left."""
    command = [sys.executable, "-c", _KILLED_WRITERS, str(tmp_path), str(REPOSITORY), str(step), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    (tmp_path / "whole").rename(tmp_path / "99 whole")
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == int(result.stdout) + 1 > 12
    reached_complete = False
    for folder in folders:
        reached_complete = reached_complete or folder.name.endswith(" complete")
        newest = store.newest_complete(folder)
        assert newest is not None, folder.name
        assert_holds(newest, step if reached_complete else 3)
        if not reached_complete:
            assert_holds(folder / "step-00000002", 2)
        save(folder, 5, keep_max=2)
        left = names(folder)
        assert len(left) == 2 and left[-1] == "step-00000005", (folder.name, left)
        for name in left:
            assert_holds(folder / name, int(name[-8:]))
    assert reached_complete


# ---- a disk that is full or does not let us write --------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path):
    """Provides a real file system of 1 MiB. Needs the right to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def assert_refused_without_loss(folder: Path, tensors: dict, state: dict) -> None:
    with pytest.raises(RunError) as caught:
        writing.write_checkpoint(folder, 2, tensors, state, 1)
    message = str(caught.value)
    needed_bytes = sum(array.nbytes for part in tensors.values() for array in part.values())
    assert "No space left on device" in message and f"it needs {needed_bytes:,} bytes and " in message
    assert str(folder) in message and "earlier checkpoints are untouched" in message and "Fix: " in message
    assert names(folder) == ["step-00000001"]
    assert_holds(folder / "step-00000001", 1)


def test_a_disk_known_to_be_full_costs_no_writing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(small_disk, 1)
    monkeypatch.setattr(writing, "_write_files", lambda *args: pytest.fail("began to write"))
    assert_refused_without_loss(small_disk, tensors_of(2, elements=1 << 20), {})


@pytest.mark.parametrize(("elements", "state"), [(1 << 20, {}), (64, {"much": "x" * (2 << 20)})])
def test_full_disk_met_while_writing(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, elements: int, state: dict
) -> None:
    save(small_disk, 1)
    usage = shutil.disk_usage(small_disk)._replace(free=1 << 40)  # as if another process filled the disk meanwhile
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert_refused_without_loss(small_disk, tensors_of(2, elements), state)


def test_full_disk_while_saving_a_step_again_keeps_its_older_save(small_disk: Path) -> None:
    save(small_disk, 1)

    def fill(stage: str) -> None:
        if stage == "renamed":
            with pytest.raises(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))

    with pytest.raises(RunError, match="No space left"):
        save(small_disk, 1, on_stage=fill)
    (small_disk / "filler").unlink()
    assert names(small_disk) == ["step-00000001"]
    assert_holds(small_disk / "step-00000001", 1)


def test_a_file_size_limit_ends_like_any_other_failed_write(tmp_path: Path) -> None:
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RunError, match="File too large; earlier checkpoints are untouched"):
            writing.write_checkpoint(tmp_path, 2, tensors_of(2, elements=1 << 16), {}, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-00000001"]
    assert_holds(tmp_path / "step-00000001", 1)


def test_a_folder_that_may_not_be_written(small_disk: Path) -> None:
    save(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(RunError, match="Read-only file system.*\n  Fix: make the folder writable"):
        save(small_disk, 2)
    with pytest.raises(UserError, match="checkpoints cannot be written there: Read-only file system"):
        store.check_checkpoint_folder(small_disk)
    assert_holds(small_disk / "step-00000001", 1)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(UserError, match="output_dir = .*checkpoints cannot be written there: File exists"):
        store.check_checkpoint_folder(tmp_path / "checkpoints")
    with pytest.raises(RunError, match="File exists"):
        save(tmp_path / "checkpoints", 1)
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_prepare_folder_leaves_an_empty_folder(tmp_path: Path) -> None:
    store.check_checkpoint_folder(tmp_path / "a" / "b")
    assert names(tmp_path / "a" / "b") == []


def test_an_unreadable_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    save(folder, 1)
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # nothing is closed to root
    try:
        with pytest.raises(UserError, match="checkpoints cannot be read there: Permission denied"):
            store.find_checkpoint(folder)
    finally:
        os.seteuid(user)
        folder.chmod(0o755)


def test_checkpoints_of_an_earlier_training_are_put_aside_not_pruned(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert store.rename_old_checkpoints(folder) is None
    folder.mkdir()
    assert store.rename_old_checkpoints(folder) is None, "an empty folder holds nothing worth keeping"
    for number in (1, 2):
        save(folder, step=10 * number)
        assert store.rename_old_checkpoints(folder) == tmp_path / f"checkpoints-{number}"
        assert not folder.exists()
    assert_holds(tmp_path / "checkpoints-1" / store.step_folder_name(10), 10)
    assert_holds(tmp_path / "checkpoints-2" / store.step_folder_name(20), 20)
