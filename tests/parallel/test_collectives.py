"""Every collective on 2 and on 4 processes of a real msrun job, against NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from collective_cases import HALVES, ON_DEVICE, SHAPES, gradients_of, numbers_of, text_of
from msrun_helpers import run_job

pytestmark = pytest.mark.slow

Found = list[dict[str, np.ndarray]]


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What came out on each rank, by name; one job for all tests."""
    folder = tmp_path_factory.mktemp(f"collectives-{request.param}")
    worker = Path(__file__).with_name("collectives_worker.py")
    run_job(worker, folder, workers=request.param, folder=folder / "logs")
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
        accuracy = 2e-3 if number in HALVES else 1e-6
        np.testing.assert_allclose(sums[0], exact, rtol=accuracy, atol=accuracy)


def test_buckets_in_the_memory_of_a_device_sum_alike(found: Found) -> None:
    for rank in found:
        for place, number in enumerate(ON_DEVICE):
            np.testing.assert_allclose(rank[f"as on a device {place}"], rank[f"together {number}"], 1e-6, 1e-6)
