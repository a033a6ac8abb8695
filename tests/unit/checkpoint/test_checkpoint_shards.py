"""Checkpoints that several ranks write together: the files of one rank, complete or not there, and no rank waits
forever. Shards that ranks of earlier versions wrote to files of their own are read.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint_store import names
from thread_ranks import ThreadRank, on_ranks

from trainer.checkpoint import writing
from trainer.checkpoint.store import (
    complete_checkpoints,
    newest_complete,
    read_checkpoint,
    shard_name,
)
from trainer.checkpoint.writing import FileShards, write_checkpoint
from trainer.errors import RunError, UserError
from trainer.parallel.sharding import Shard, ShardedArray, ShardSpec, full_shard_spec, shard_range
from trainer.parallel.world import World
from trainer.storage.marker import MARKER, marker_content
from trainer.storage.tensor_file import array_infos, create_tensor_file

WEIGHTS = {"w": np.arange(35, dtype=np.float32).reshape(5, 7), "b": np.float32([1, 2])}
STATE = {"m.w": np.random.default_rng(0).normal(size=35).astype(np.float32), "m.b": np.float32([3, 4])}


ENTRIES = {
    "model": array_infos(WEIGHTS),
    "optimizer": array_infos({"m.w": WEIGHTS["w"], "m.b": STATE["m.b"]}),
}


def parts_of(rank: int, ranks: int) -> dict[str, FileShards]:
    """Returns the shards of a rank: columns of w and a range of m.w; rank 0 also has b and m.b."""
    w, own = WEIGHTS["w"], shard_range(35, rank, ranks)
    columns = shard_range(7, rank, ranks)
    shard = Shard((0, columns.start), (5, columns.stop - columns.start))
    pieces = {
        "model": {"w": [ShardedArray(ShardSpec(w.shape, shard), shard.of(w))], "b": [whole_piece(WEIGHTS["b"])]},
        "optimizer": {
            "m.w": [ShardedArray(full_shard_spec(w.shape)._replace(flat_range=own), STATE["m.w"][own])],
            "m.b": [whole_piece(STATE["m.b"])],
        },
    }
    for of_part in pieces.values() if rank else ():
        of_part.popitem()
    return {part: FileShards(ENTRIES[part], pieces[part]) for part in pieces}


def whole_piece(array: np.ndarray) -> ShardedArray:
    return ShardedArray(full_shard_spec(array.shape), array)


def save(folder: Path, ranks: int, step: int = 1) -> list:
    """Returns the result of each rank."""

    def work(communicator: ThreadRank) -> Path:
        tensors = parts_of(communicator.rank, ranks)
        return write_checkpoint(folder, step, tensors, {"step": step}, keep_max=2, communicator=communicator)

    return on_ranks(ranks, work)


def save_shards(folder: Path, ranks: int, step: int = 1) -> list:
    """Saves as earlier versions did: each rank writes its range of m.w to its own file."""

    def work(communicator: ThreadRank) -> Path:
        shards = {"m.w": STATE["m.w"][shard_range(35, communicator.rank, ranks)]} | (
            {} if communicator.rank else {"m.b": STATE["m.b"]}
        )
        tensors = {shard_name("optimizer", communicator.rank, ranks): shards} | (
            {} if communicator.rank else {"model": WEIGHTS}
        )
        return write_checkpoint(folder, step, tensors, {"step": step}, keep_max=2, communicator=communicator)

    return on_ranks(ranks, work)


def assert_holds(path: Path) -> None:
    tensors = read_checkpoint(path).tensors
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(tensors["model"][name], array)
    assert {name: array.ravel().tolist() for name, array in tensors["optimizer"].items()} == {
        name: array.tolist() for name, array in STATE.items()
    }


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_files_are_those_of_one_rank(tmp_path: Path, ranks: int) -> None:
    paths, (alone,) = save(tmp_path, ranks), save(tmp_path / "alone", 1)
    assert paths == [tmp_path / "step-00000001"] * ranks
    assert names(paths[0]) == ["COMPLETE", "model.safetensors", "optimizer.safetensors", "state.json"]
    for name in names(alone):
        assert (paths[0] / name).read_bytes() == (alone / name).read_bytes(), name
    assert_holds(paths[0])
    for step in (2, 3):
        save(tmp_path, ranks, step)
    assert names(tmp_path) == ["alone", "step-00000002", "step-00000003"]


@pytest.mark.parametrize("writers", [1, 3])
def test_the_first_rank_of_each_host_compares_checksums(tmp_path: Path, writers: int) -> None:
    path = save(tmp_path, writers)[0]
    hosts = [World(rank, 6, rank % 3, 3) for rank in range(6)]
    assert not any(damage_found(path, world) for world in hosts)
    for file in (path / "model.safetensors", path / "optimizer.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
        assert [damage_found(path, world) for world in hosts] == [True, False, False] * 2
        file.write_bytes(content)


def test_checksums_of_parts_that_earlier_versions_wrote_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)[0]
    marker = json.loads((path / MARKER).read_text())
    del marker["checksum"]
    (path / MARKER).write_bytes(marker_content(marker | {"part_checksums": {"model.safetensors": ["0" * 32] * 2}}))
    assert_holds(path)


def damage_found(path: Path, world: World) -> bool:
    try:
        read_checkpoint(path, world=world)
    except UserError as error:
        assert "the checksum of" in str(error) and "does not match COMPLETE" in str(error)
        return True
    return False


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_shards_of_earlier_versions_are_read(tmp_path: Path, ranks: int) -> None:
    path = save_shards(tmp_path, ranks)[0]
    shards = [f"optimizer-{rank + 1:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]
    assert names(path) == ["COMPLETE", "model.safetensors", *shards, "state.json"]
    assert_holds(path)
    found = read_checkpoint(path).tensors
    for rank in range(3):  # any rank's part of them, whatever the number of ranks
        for part, (_, pieces) in parts_of(rank, 3).items():
            for name, (piece,) in pieces.items():
                read = found[part].array(name).read(piece.spec)
                assert read.shape == piece.spec.shape
                np.testing.assert_array_equal(read, piece.array)


def test_ranks_without_a_shard_only_wait(tmp_path: Path) -> None:
    tensors = {"model": WEIGHTS, "optimizer": STATE}
    paths = on_ranks(
        3,
        lambda communicator: write_checkpoint(
            tmp_path, 1, {} if communicator.rank else tensors, {}, 1, communicator=communicator
        ),
    )
    assert paths == [tmp_path / "step-00000001"] * 3
    assert names(paths[0]) == ["COMPLETE", "model.safetensors", "optimizer.safetensors", "state.json"]


def test_arrays_are_read_when_asked_for(tmp_path: Path) -> None:
    path = save_shards(tmp_path, 3)[0]
    arrays = read_checkpoint(path).tensors["optimizer"]
    assert sorted(arrays) == ["m.b", "m.w"] and len(arrays) == 2 and "m.w" in arrays
    np.testing.assert_array_equal(arrays["m.w"], STATE["m.w"])
    assert arrays["m.w"] is not arrays["m.w"]
    with pytest.raises(KeyError):
        arrays["m.x"]


# ---- failures --------------------------------------------------------------------------------------------------------


def fail_on(monkeypatch: pytest.MonkeyPatch, function: str, file_name: str, rank: int) -> None:
    """Fills the disk when a rank calls a function with a path of this name."""
    whole, whole_stages, own = getattr(writing, function), writing.run_stages, threading.local()

    def fail(path: Path, *arguments: object) -> object:
        if path.name in (file_name, f"{file_name}{TOKEN}") and own.rank == rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, *arguments)

    def run_stages(stages: writing.Stages, folder: Path, communicator: ThreadRank) -> Path:
        own.rank = communicator.rank
        return whole_stages(stages, folder, communicator)

    monkeypatch.setattr(writing.secrets, "token_hex", lambda _: TOKEN)
    monkeypatch.setattr(writing, "run_stages", run_stages)
    monkeypatch.setattr(writing, function, fail)


TOKEN = "0123abcd"
FAILURES = [
    ("_check_space", "checkpoints", 0),
    ("create_tensor_file", "model.safetensors", 0),
    ("write_shards", "model.safetensors", 0),
    ("write_shards", "optimizer.safetensors", 1),
    ("flush_to_disk", "optimizer.safetensors", 2),
    ("_read_back", "optimizer.safetensors", 1),
    ("flush_to_disk", ".tmp-step-00000002-", 0),
    ("flush_to_disk", ".tmp-COMPLETE", 0),
]


@pytest.mark.parametrize(("function", "file_name", "rank"), FAILURES)
def test_a_failure_of_one_rank_ends_the_save_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, file_name: str, rank: int
) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 3)
    with monkeypatch.context() as patch:
        fail_on(patch, function, file_name, rank)
        errors = save(folder, 3, step=2)
    assert all(isinstance(error, RunError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    message, bytes_of_all = str(errors[0]), sum(array.nbytes for array in (*WEIGHTS.values(), *STATE.values()))
    assert f"cannot be written by rank {rank}: No space left on device: it needs {bytes_of_all:,} bytes" in message
    assert "earlier checkpoints are untouched" in message and str(folder) in message and "Fix: free space" in message
    assert names(folder) == ["step-00000001"]
    assert_holds(newest_complete(folder))
    save(folder, 3, step=2)
    assert_holds(folder / "step-00000002")


@pytest.mark.parametrize("there", [False, True])
def test_a_host_that_sees_another_folder_gets_an_error(tmp_path: Path, there: bool) -> None:
    """Even where the other folder is just as an interrupted save has left it."""
    if there:
        for token in ("", "-89abcdef"):
            left = tmp_path / "elsewhere" / f".tmp-step-00000001{token}"
            left.mkdir(parents=True)
            for part, entries in ENTRIES.items():
                create_tensor_file(left / f"{part}.safetensors", entries)

    def work(communicator: ThreadRank) -> Path:
        own = tmp_path / ("shared" if communicator.rank == 0 else "elsewhere")
        return write_checkpoint(own, 1, parts_of(communicator.rank, 2), {}, 1, communicator=communicator)

    errors = on_ranks(2, work)
    expected = "by rank 1: the folder that rank 0 made is not there"
    assert all(f"{expected}; all hosts must see one output_dir" in str(e) for e in errors), errors
    assert names(tmp_path / "shared") == []


def test_ranks_that_have_not_all_numbers_save_nothing(tmp_path: Path) -> None:
    def work(communicator: ThreadRank) -> Path:
        return write_checkpoint(tmp_path, 1, parts_of(communicator.rank, 3), {}, 1, communicator=communicator)

    errors = on_ranks(2, work)
    assert {str(error) for error in errors} == {"the ranks have 88 of 148 bytes of 'model'"} and names(tmp_path) == []


# ---- reading what is not whole ---------------------------------------------------------------------------------------


def test_a_checkpoint_without_one_shard_is_incomplete(tmp_path: Path) -> None:
    good, bad = save_shards(tmp_path, 4)[0], save_shards(tmp_path, 4, step=2)[0]
    (bad / "optimizer-00003-of-00004.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        read_checkpoint(bad)
    missing = "incomplete: optimizer-00003-of-00004.safetensors, the shard of rank 2 of 4, is missing"
    assert missing in str(caught.value) and f"use {good}" in str(caught.value)
    assert read_checkpoint(bad, ("model",)).tensors.keys() == {"model"}, "the weights are all there"


def test_a_marker_that_lacks_a_shard_makes_it_incomplete(tmp_path: Path) -> None:
    path = save_shards(tmp_path, 2)[0]
    marker = json.loads((path / MARKER).read_text())
    del marker["checksum"]
    for key in ("file_bytes", "checksums"):
        del marker[key]["optimizer-00002-of-00002.safetensors"]
    (path / MARKER).write_bytes(marker_content(marker))
    with pytest.raises(UserError, match="the shard of rank 1 of 2, is not listed in COMPLETE"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([{"a": 1, "b": 1}, {"b": 1}, {"a": 1, "b": 1}], "a is in the shards of 2 of 3 ranks"),
        ([{"a": 1}, {"a": 1}, {"a": 1, "c": 1}], "some ranks saved tensors that rank 0 did not"),
    ],
)
def test_shards_that_do_not_fit_together_are_damage(tmp_path: Path, shards: list, message: str) -> None:
    def work(communicator: ThreadRank) -> Path:
        arrays = {name: np.float32([1]) for name in shards[communicator.rank]}
        return write_checkpoint(
            tmp_path, 1, {shard_name("optimizer", communicator.rank, 3): arrays}, {}, 1, communicator=communicator
        )

    (path,) = set(on_ranks(3, work))
    assert complete_checkpoints(tmp_path) == [path]
    with pytest.raises(UserError, match=f"damaged: .*{message}"):
        read_checkpoint(path)
