"""Saving beside the training: nothing waits but for the save before, and the guarantees are those of any save."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint_store import assert_holds, names, tensors_of
from thread_ranks import ThreadRank, on_ranks

from trainer.checkpoint import writing
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.store import read_checkpoint, shard_name
from trainer.checkpoint.writing import checkpoint_stages
from trainer.errors import RunError
from trainer.parallel.communicator import SingleProcess


class Gate:
    """Holds a save at one of its stages until it is opened."""

    def __init__(self, at: str) -> None:
        self.at, self.reached, self.opened = at, threading.Event(), threading.Event()

    def __call__(self, stage: str) -> None:
        if stage == self.at:
            self.reached.set()
            assert self.opened.wait(20)


def stages(folder: Path, step: int, on_stage=None, **more):
    return lambda: checkpoint_stages(folder, step, tensors_of(step), {"step": step, "epoch": 1}, 2, on_stage, **more)


def test_the_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    told, gate = [], Gate("wrote model")
    saver = Saver(tmp_path, SingleProcess(), True, lambda path, step: told.append((path.name, step)))
    assert saver.is_ready
    saver.save(stages(tmp_path, 1, gate), 1)
    assert gate.reached.wait(20) and not saver.is_ready and told == []
    gate.opened.set()
    saver.finish()
    assert told == [("step-00000001", 1)] and saver.is_ready
    assert_holds(tmp_path / "step-00000001", 1)


def test_at_most_one_is_in_flight_and_the_wait_is_counted(tmp_path: Path) -> None:
    told, gate = [], Gate("made temporary folder")
    saver = Saver(tmp_path, SingleProcess(), True, lambda path, step: told.append(step))
    saver.save(stages(tmp_path, 1, gate), 1)
    assert gate.reached.wait(20)
    opener = threading.Timer(0.3, gate.opened.set)
    opener.start()
    saver.save(stages(tmp_path, 2), 2)
    assert told == [1] and saver.waited_seconds >= 0.2
    saver.finish()
    assert told == [1, 2] and names(tmp_path) == ["step-00000001", "step-00000002"]


def test_old_checkpoints_stay_until_the_new_one_is_complete(tmp_path: Path) -> None:
    saver = Saver(tmp_path, SingleProcess(), True, lambda path, step: None)
    for step in (1, 2):
        saver.save(stages(tmp_path, step), step)
    gate = Gate("wrote marker's content")
    saver.save(stages(tmp_path, 3, gate), 3)
    assert gate.reached.wait(20)
    assert_holds(tmp_path / "step-00000001", 1)
    gate.opened.set()
    saver.finish()
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_failure_reaches_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, SingleProcess(), True, lambda path, step: None)
    saver.save(stages(tmp_path, 1), 1)
    saver.finish()
    monkeypatch.setattr(writing, "_check_space", lambda folder, size: (_ for _ in ()).throw(OSError(28, "No space")))
    saver.save(stages(tmp_path, 2), 2)
    while not saver.is_ready:
        time.sleep(0.01)
    with pytest.raises(RunError, match="No space: it needs .* bytes .* earlier checkpoints are untouched"):
        saver.advance()
    assert names(tmp_path) == ["step-00000001"]
    saver.finish()  # nothing is in flight


def train_and_save(communicator: ThreadRank, folder: Path, told: list) -> int:
    """Steps of a run on this rank, as `trainer.run.loop` makes them, until a save is complete; how many there were."""
    rank, size = communicator.rank, communicator.size
    saver = Saver(folder, communicator, True, lambda path, step: told[rank].append(step))
    tensors = {shard_name("optimizer", rank, size): {"m": np.full(4, rank, np.float32)}}
    tensors |= {} if rank else {"model": {"w": np.float32([1])}}
    gate = Gate("wrote state")
    if rank != 1:
        gate.opened.set()
    saver.save(lambda: checkpoint_stages(folder, 1, tensors, {}, 1, gate, rank=rank, ranks=size), 1)
    for step in range(1, 10_000):
        votes = communicator.gather_bytes(b"%d" % saver.is_ready)
        if all(map(int, votes)):
            saver.advance()
        if told[rank]:
            return step
        if step == 20:
            assert not told[rank] and not any(folder.glob("step-*"))
            gate.opened.set()
        time.sleep(0.001)
    raise AssertionError("the save does not end")


def test_ranks_save_beside_their_training(tmp_path: Path) -> None:
    told = [[], [], []]
    steps = on_ranks(3, lambda communicator: train_and_save(communicator, tmp_path, told))
    assert len(set(steps)) == 1 and steps[0] > 20, steps
    assert told == [[1], [1], [1]]
    np.testing.assert_array_equal(
        read_checkpoint(tmp_path / "step-00000001").tensors["optimizer"]["m"], np.repeat(np.float32([0, 1, 2]), 4)
    )


def test_a_rank_that_cannot_write_ends_the_save_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = writing.save_arrays

    def fail(path: Path, arrays) -> str:
        if path.name.startswith("optimizer-00002"):
            raise OSError(28, "No space left on device")
        return whole(path, arrays)

    monkeypatch.setattr(writing, "save_arrays", fail)
    errors = on_ranks(3, lambda communicator: train_and_save(communicator, tmp_path, [[], [], []]))
    assert all(isinstance(error, RunError) and "by rank 1: No space left" in str(error) for error in errors), errors
    assert names(tmp_path) == []
