"""Rank and size of a job, as a worker's environment gives them."""

from __future__ import annotations

import pytest

from trainer.errors import UserError
from trainer.parallel.world import LOCAL_SIZE_VARIABLE, SINGLE_PROCESS, World, world_from_environment, world_of

WORKER = {"MS_WORKER_NUM": "8", "RANK_ID": "5", "DEVICE_ID": "1", LOCAL_SIZE_VARIABLE: "4"}


def test_variables_of_msrun_are_read() -> None:
    assert world_from_environment(WORKER) == World(rank=5, size=8, local_rank=1, local_size=4)
    assert world_from_environment({"MS_WORKER_NUM": "2", "RANK_ID": "1"}) == World(1, 2, 1, 2)
    without = {key: value for key, value in WORKER.items() if key != "DEVICE_ID"}
    assert world_from_environment(without).local_rank == 1


def test_a_process_outside_a_job_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world_from_environment({"RANK_ID": "3", "DEVICE_ID": "2"}) == SINGLE_PROCESS == World(0, 1, 0, 1)
    monkeypatch.delenv("MS_WORKER_NUM", raising=False)
    assert world_from_environment() == SINGLE_PROCESS
    for name, value in WORKER.items():
        monkeypatch.setenv(name, value)
    assert world_from_environment().rank == 5


def test_world_of_a_plan() -> None:
    assert world_of(8) == World(0, 8, 0, 8)
    assert world_of(8, 2) == World(0, 8, 0, 2)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"RANK_ID": "8"}, ["environment: RANK_ID = '8'", "from 0 to 7", "run_trainer.py launch"]),
        ({"RANK_ID": "-1"}, ["RANK_ID = '-1': must be an integer"]),
        ({"MS_WORKER_NUM": "eight"}, ["MS_WORKER_NUM = 'eight'", "at least 1"]),
        ({"MS_WORKER_NUM": "0"}, ["MS_WORKER_NUM = '0'"]),
        ({"MS_WORKER_NUM": "9" * 5000}, ["must be an integer, at least 1"]),
        ({"DEVICE_ID": ""}, ["DEVICE_ID = ''"]),
        ({LOCAL_SIZE_VARIABLE: "9"}, ["from 1 to 8"]),
        ({"RANK_ID": None}, ["RANK_ID: is not set, but MS_WORKER_NUM says that 8 workers run", "unset"]),
    ],
)
def test_contradicting_variables_are_an_error(change: dict, parts: list[str]) -> None:
    environment = {key: value for key, value in {**WORKER, **change}.items() if value is not None}
    with pytest.raises(UserError) as caught:
        world_from_environment(environment)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
