"""A kill within a save costs nothing that was complete, and the next ranks resume bit for bit: check_kills.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_kills  # noqa: E402
from run_helpers import write_corpus  # noqa: E402  (the script knows where it is)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("rank processes")]
KILLS = 2  # of each layout; scripts/check_kills.py has 200 in all


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("kills") / "data")


@pytest.mark.parametrize(("name", "in_background"), [
    ("one rank", True), ("level 1", False), ("level 3", True), ("tensor with rows", True), ("experts", False),
    ("pipeline", True),
])  # fmt: skip
def test_a_rank_killed_within_a_save_costs_no_checkpoint(
    name: str, in_background: bool, data: Path, tmp_path: Path
) -> None:
    assert check_kills.check_layout(name, KILLS, tmp_path, data, 1, in_background) >= 1


def test_what_is_lost_or_differs_is_found(data: Path, tmp_path: Path) -> None:
    layout = check_kills.CASES["one rank"]
    right = check_kills.train_undisturbed(tmp_path, data, layout, in_background=False)
    checkpoints = right.output / "checkpoints"
    steps = list(right.checksums)
    assert check_kills.check_left(right.output, [], right, lag=0) == steps
    with pytest.raises(AssertionError, match="step-00000006 has other files"):
        other = {**right.checksums, 6: {**right.checksums[6], "state.json": "0"}}
        check_kills.check_left(right.output, [], right._replace(checksums=other), lag=0)
    (checkpoints / "step-00000006" / "COMPLETE").unlink()
    with pytest.raises(AssertionError, match="step 6 was done, and the newest checkpoint is of step 5"):
        check_kills.check_left(right.output, [], right, lag=0)
    with pytest.raises(AssertionError, match=r"and \[6\] were"):
        check_kills.check_left(right.output, [6], right, lag=1)
    model = checkpoints / "step-00000005" / "model.safetensors"
    content = model.read_bytes()
    model.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(AssertionError, match="step-00000005: .*checksum of model.safetensors"):
        check_kills.check_left(right.output, [], right, lag=1)


def test_kills_are_shared_out() -> None:
    assert check_kills.shares(5, ["a", "b", "c"]) == {"a": 2, "b": 2, "c": 1}
