"""Every collective on 2 and on 4 processes of a real msrun job, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from collective_cases import (
    PAIRS,
    SHAPES,
    SHARDED,
    SUBLAYERS,
    factors_of,
    gradients_of,
    numbers_of,
    pair_gradient,
    pair_input,
    pair_output,
    shared_tensors,
    text_of,
)
from tolerances import FEW_OPERATIONS, FLOAT16_SUMS, SEVERAL_OPERATORS, SHORT_SUMS

from trainer.checkpoint.store import read_checkpoint
from trainer.parallel.sharding import shard_range

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]

Found = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, folder_of_ranks: Callable[[int], Path]) -> Found:
    """Returns the results of each rank by name; one job serves all tests."""
    folder = folder_of_ranks(request.param)
    return [dict(np.load(folder / f"rank-{rank}.npz")) for rank in range(request.param)]


def test_float64_arrive_bit_by_bit(found: Found) -> None:
    expected = np.array([numbers_of(rank) for rank in range(len(found))])
    for rank in found:
        assert rank["float64"].tobytes() == expected.tobytes()
        assert rank["no float64"].shape == (len(found), 0)


def test_bytes_of_any_length_arrive(found: Found) -> None:
    for rank in found:
        texts = [rank[f"texts {number}"].tobytes() for number in range(len(found))]
        assert texts == [text_of(number) for number in range(len(found))]
        assert all(rank[f"no texts {number}"].size == 0 for number in range(len(found)))


@pytest.mark.parametrize("way", ["one by one", "in buckets", "together"])
def test_gradients_are_summed_to_the_same_bits_on_all_ranks(found: Found, way: str) -> None:
    given = [gradients_of(rank) for rank in range(len(found))]
    for number, shape in enumerate(SHAPES):
        sums = [rank[f"{way} {number}"] for rank in found]
        assert all(each.tobytes() == sums[0].tobytes() for each in sums)
        exact = sum(gradients[number].astype(np.float64) for gradients in given)
        assert sums[0].shape == shape and sums[0].dtype == given[0][number].dtype
        accuracy = 2e-3 if number in SUBLAYERS else 1e-6
        np.testing.assert_allclose(sums[0], exact, rtol=accuracy, atol=accuracy)


@pytest.mark.parametrize("way", ["in float32", "in their dtype"])
def test_sums_during_a_backward_pass_are_those_after_it(found: Found, way: str) -> None:
    """Whole gradients, and of sharded ones each rank's own range; of two equal micro-batches. In float32 nothing of
    the sum over the ranks is rounded to the dtype of a gradient."""
    given = [gradients_of(rank) for rank in range(len(found))]
    for number, rank in enumerate(found):
        for place in range(len(SHAPES)):
            right = 2 * sum(gradients[place].astype(np.float64) for gradients in given)
            if place in SHARDED:
                right = right.reshape(-1)[shard_range(right.size, number, len(found))]
            ours, is_half = rank[f"on a device {way} {place}"], way == "in their dtype" and place in SUBLAYERS
            limit = FLOAT16_SUMS if is_half else SHORT_SUMS
            assert ours.dtype == (np.float16 if is_half else np.float32) and ours.shape == right.shape
            np.testing.assert_allclose(ours, right, limit, limit)


@pytest.mark.parametrize("way", ["together", "from parts", "on a device", "from parts on a device"])
def test_tensors_are_put_together_from_the_ranks_parts(found: Found, way: str) -> None:
    for rank in found:
        for number, whole in enumerate(shared_tensors()):
            np.testing.assert_array_equal(rank[f"shared {way} {number}"], whole)


def test_a_shared_optimizer_updates_to_the_same_bits_with_a_part_of_the_state(found: Found) -> None:
    names = [name.removeprefix("updated whole ") for name in found[0] if name.startswith("updated whole ")]
    assert len(names) == len(shared_tensors())
    large, small = 4 * (50 * 40 + 300 + 64 * 64), 4 * (7 * 5 + 9)  # bytes of one of the two arrays of state
    for rank in found:
        for name in names:
            np.testing.assert_array_equal(rank[f"updated shared {name}"], found[0][f"updated whole {name}"])
        assert rank["state bytes whole"] == 2 * (large + small)
        assert rank["state bytes shared"] == 2 * (large // len(found) + small)


def test_the_ranks_save_a_checkpoint_with_a_share_of_each(found: Found) -> None:
    state = read_checkpoint(Path(str(found[0]["folder"])) / "checkpoints" / "step-00000003").tensors["optimizer"]
    kept = {name.removeprefix("state "): array for name, array in found[0].items() if name.startswith("state exp")}
    assert state.keys() == kept.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(state[name].reshape(-1), array.reshape(-1))


def test_what_keeps_one_rank_from_saving_ends_the_save_on_all(found: Found) -> None:
    refusals = [str(rank["refusal"]) for rank in found]
    assert all("cannot be written by rank 1: the folder that rank 0 made is not there" in text for text in refusals)


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_gives_what_numpy_gives_forward_and_backward(found: Found, name: str) -> None:
    ranks = len(found)
    every_x = np.stack([pair_input(rank, ranks) for rank in range(ranks)])
    for rank, arrays in enumerate(found):
        close(arrays[f"{name} out"], pair_output(name, every_x, rank))
        close(arrays[f"{name} gradient"], pair_gradient(name, ranks, rank))


def test_experts_over_ranks_give_what_one_rank_with_all_of_them_gives(found: Found) -> None:
    for rank in found:
        for name in ("out", "y", "gates", "gate", "up", "down"):
            mine, right = rank[f"experts {name}"]
            assert np.abs(mine - right).max() < SEVERAL_OPERATORS * np.abs(right).max(), name


def test_groups_keep_to_themselves(found: Found) -> None:
    """The even ranks are one group, the odd ones another."""
    ranks = len(found)
    for rank, arrays in enumerate(found):
        members = range(rank % 2, ranks, 2)
        xs = [pair_input(each, ranks) for each in members]
        gathered_shape = (2 * ranks * len(members), 3)
        gradients = sum(factors_of(each, gathered_shape) for each in members).reshape(len(members), 2 * ranks, 3)
        close(arrays["parity AllReduce out"], sum(xs))
        np.testing.assert_array_equal(arrays["parity AllGather out"], np.concatenate(xs))
        close(arrays["parity AllGather gradient"], gradients[rank // 2])


def test_a_device_with_all_operators_gets_them(found: Found) -> None:
    """On every rank: one that left a collective out would let the others wait for ever."""
    expected = {
        "AllReduce": ["AllReduce", "AllReduce"],
        "AllGather": ["AllGather", "ReduceScatter"],
        "ReduceScatter": ["ReduceScatter", "AllGather"],
        "CopyToTensorParallel": ["", "AllReduce"],
        "ReduceFromTensorParallel": ["AllReduce", ""],
    }
    for arrays in found:
        assert {name: arrays[f"native {name}"].tolist() for name in expected} == expected


def test_float16_travels_too(found: Found) -> None:
    expected = np.concatenate([pair_input(rank, len(found)) for rank in range(len(found))]).astype(np.float16)
    assert all((arrays["half AllGather"] == expected).all() for arrays in found)


def close(ours: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(ours, right, FEW_OPERATIONS, FEW_OPERATIONS)
