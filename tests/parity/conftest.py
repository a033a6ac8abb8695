"""Parity tests compute as a run does: with the threads that a run sets up, which are several times faster."""

import threading

import pytest
from documented_operators import SORTING, grouped_product
from tiny_trainer import TinyTrainer, make_window, shared_trainer

from trainer.arrays import memory, operators, tiles
from trainer.arrays.attention import blocks, positions
from trainer.arrays.moe import experts
from trainer.arrays.vocabulary import head
from trainer.data import Batch
from trainer.device.threads import set_up_cpu_threads
from trainer.models.spec import saved
from trainer.ops.ascend import moe

# Not in a fixture: a tensor that a test file makes while it is imported starts MindSpore's threads with their defaults,
# and then everything that is compiled takes up to five times as long.
set_up_cpu_threads()


@pytest.fixture(scope="module")
def tiny() -> TinyTrainer:
    return shared_trainer()


@pytest.fixture(scope="module")
def window() -> list[Batch]:
    """Returns a window of unequal micro-batches, one of which has no label."""
    return make_window(12, 3, 0, 7)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of rows, queries, logits and columns are a few numbers long: small arrays have several of each, and a
    shorter last one."""
    for module, name, value in (
        (tiles, "ROWS", 4), (blocks, "_SCORES", 1), (positions, "_QUERIES", 3), (positions, "_KEYS", 2),
        (saved, "_LOGITS", 1), (saved, "_FEWEST_ROWS", 4), (head, "_INPUT_GRADIENT_BLOCK", 4), (head, "_COLUMNS", 4),
        (head, "_ROWS", 3),
        (experts, "_MOST_ROWS", 4), (memory, "MOST_MOVED", 3),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def operators_as_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the Ascend kernels of experts operators that a CPU lacks."""
    for name, function in SORTING.items():
        monkeypatch.setattr(moe.mint, name, function)
    monkeypatch.setattr(moe, "_grouped_product", grouped_product)


@pytest.fixture(params=["onednn", "numpy"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with MindSpore's library and without it."""
    if request.param == "numpy":
        monkeypatch.setattr(operators, "library", lambda: None)
        monkeypatch.setattr(operators, "_THREAD", threading.local())
    return request.param
