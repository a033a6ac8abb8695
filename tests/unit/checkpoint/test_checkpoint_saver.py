"""Saving beside the training: nothing waits but for the save before, and the guarantees are those of any save."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from config_helpers import BASE, load
from test_checkpoint_store import assert_holds, names, tensors_of
from thread_ranks import ThreadRank, on_ranks

from trainer.checkpoint import saver as saver_module
from trainer.checkpoint import state, writing
from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.saver import Saver
from trainer.checkpoint.store import read_checkpoint
from trainer.checkpoint.writing import FileShards, checkpoint_stages
from trainer.config import Config
from trainer.errors import RunError
from trainer.models.spec.shapes import all_shapes
from trainer.parallel.communicator import Communicator
from trainer.parallel.sharding import ShardedArray, full_shard_spec
from trainer.storage.tensor_file import float32_infos


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
    saver = Saver(tmp_path, Communicator(), True, lambda path, step: told.append((path.name, step)))
    assert saver.is_ready
    saver.save(stages(tmp_path, 1, gate), 1)
    assert gate.reached.wait(20) and not saver.is_ready and told == []
    gate.opened.set()
    saver.finish()
    assert told == [("step-00000001", 1)] and saver.is_ready
    assert_holds(tmp_path / "step-00000001", 1)


def saved_of(config: Config, shares_memory: bool) -> SimpleNamespace:
    """Returns what a training step gives to the saver."""
    weights = {name: np.ones(shape, np.float32) for name, shape in all_shapes(config.decoder).items()}
    optimizer = {key: np.ones(shape, np.float32) for key, shape in state.optimizer_shapes(config).items()}
    return SimpleNamespace(weights=weights, optimizer=optimizer, updates=1, shares_memory=shares_memory)


def stages_of(config: Config, saved: SimpleNamespace, folder: Path) -> writing.Stages:
    base = None if config.decoder.pet_config is None else {"load_checkpoint": "", "seed": 1, "digest": "0" * 64}
    return state.save_stages(
        folder, state.Position(step=1), saved, step_state={}, config=config, layout={}, base=base, keep_max=1,
        evaluations=EvalHistory.empty(), beside_training=True,
    )  # fmt: skip


EXPERTS = BASE.replace("    seq_length: 32\n", """    seq_length: 32
    moe_config: {expert_num: 4, num_experts_chosen: 2}
""")
ADAPTERS = BASE.replace("    seq_length: 32\n", "    seq_length: 32\n    pet_config: {target_modules: q_proj}\n")


@pytest.mark.parametrize("text", [BASE, EXPERTS, ADAPTERS])
def test_a_checkpoint_has_the_weights_of_its_step_though_the_training_changes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    gate, config = Gate("made temporary folder"), load(text)
    with_gate = writing.checkpoint_stages
    monkeypatch.setattr(state, "checkpoint_stages", lambda *given, **named: with_gate(*given, on_stage=gate, **named))
    saved = saved_of(config, shares_memory=True)
    saver = Saver(tmp_path, Communicator(), True, lambda path, step: None)
    saver.save(lambda: stages_of(config, saved, tmp_path), 1)
    assert gate.reached.wait(20)
    for array in (*saved.weights.values(), *saved.optimizer.values()):
        array += 1
    gate.opened.set()
    saver.finish()
    tensors = read_checkpoint(tmp_path / "step-00000001").tensors
    written = tensors["model" if config.decoder.pet_config is None else "adapter_model"]
    assert written and all((array == 1).all() for array in (*written.values(), *tensors["optimizer"].values()))


@pytest.mark.parametrize(
    ("text", "shares_memory", "least", "most"),
    [(BASE, True, 0.99, 1.1), (EXPERTS, True, 0.99, 1.1), (ADAPTERS, True, 0, 0.1), (BASE, False, 0, 0.1)],
)
def test_only_what_is_written_and_still_shared_is_copied(
    tmp_path: Path, text: str, shares_memory: bool, least: float, most: float
) -> None:
    config = load(text.replace("vocab_size: 300", "vocab_size: 32000"))  # much more than all else that is allocated
    saved = saved_of(config, shares_memory)
    size = sum(array.nbytes for array in (*saved.weights.values(), *saved.optimizer.values()))
    tracemalloc.start()
    stages_of(config, saved, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert least * size <= peak <= most * size


@pytest.mark.parametrize("in_background", [True, False])
def test_while_it_waits_the_training_tells_that_the_writer_gets_on_and_long_for_a_disk_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    monkeypatch.setattr(saver_module, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(saver_module, "_FLUSH_SECONDS", 1e9)
    told, stuck = [], []

    def slow(stage: str) -> None:
        if stage == "wrote model":
            began = time.monotonic()
            while len(told) < 3 and time.monotonic() < began + 20:  # a slow disk
                (tmp_path / "written").write_bytes(bytes(4096))
                time.sleep(0.005)
        if stage == "wrote optimizer":  # a flush, and then a disk that never answers
            before, began = len(told), time.monotonic()
            while len(told) < before + 3 and time.monotonic() < began + 20:
                time.sleep(0.005)
            stuck.append(len(told) < before + 3)
            monkeypatch.setattr(saver_module, "_FLUSH_SECONDS", 0.0)
            time.sleep(0.05)
            before = len(told)
            time.sleep(0.2)
            stuck.append(len(told) - before)

    saver = Saver(tmp_path, Communicator(), in_background, lambda path, step: None, lambda: told.append(1))
    saver.save(stages(tmp_path, 1, slow), 1)
    saver.finish()
    assert len(told) >= 3 and stuck == [False, 0]


def test_at_most_one_is_in_flight_and_the_wait_is_counted(tmp_path: Path) -> None:
    told, gate = [], Gate("made temporary folder")
    saver = Saver(tmp_path, Communicator(), True, lambda path, step: told.append(step))
    saver.save(stages(tmp_path, 1, gate), 1)
    assert gate.reached.wait(20)
    opener = threading.Timer(0.3, gate.opened.set)
    opener.start()
    saver.save(stages(tmp_path, 2), 2)
    assert told == [1] and saver.waited_seconds >= 0.2
    saver.finish()
    assert told == [1, 2] and names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_failure_reaches_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(tmp_path, Communicator(), True, lambda path, step: None)
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
    """Returns steps of a run on this rank, as `trainer.run.loop` makes them, until a save is complete; how many
    there were."""
    rank, size = communicator.rank, communicator.size
    saver = Saver(folder, communicator, True, lambda path, step: told[rank].append(step))
    own = full_shard_spec((4 * size,))._replace(flat_range=slice(4 * rank, 4 * rank + 4))
    piece = ShardedArray(own, np.full(4, rank, np.float32))
    tensors = {"optimizer": FileShards(float32_infos({"m": own.global_shape}), {"m": [piece]})}
    tensors |= {} if rank else {"model": {"w": np.float32([1])}}
    gate = Gate("wrote state")
    if rank != 1:
        gate.opened.set()
    saver.save(lambda: checkpoint_stages(folder, 1, tensors, {}, 1, gate, rank=rank, ranks=size), 1)
    for step in range(1, 10_000):
        rank_flags = communicator.gather_bytes(b"%d" % saver.is_ready)
        if all(map(int, rank_flags)):
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
    whole = writing.write_shards

    def fail(path: Path, entries, pieces) -> int:
        if pieces["m"][0].array[0] == 1:
            raise OSError(28, "No space left on device")
        return whole(path, entries, pieces)

    monkeypatch.setattr(writing, "write_shards", fail)
    errors = on_ranks(3, lambda communicator: train_and_save(communicator, tmp_path, [[], [], []]))
    assert all(isinstance(error, RunError) and "by rank 1: No space left" in str(error) for error in errors), errors
    assert names(tmp_path) == []
