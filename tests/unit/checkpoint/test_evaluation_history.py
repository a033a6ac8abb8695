"""The best checkpoints and the early stop: what is kept, when a run ends, and `checkpoints/best`."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from config_helpers import error_of
from test_checkpoint_store import names

from trainer.checkpoint import store, writing
from trainer.checkpoint.evaluations import EvalHistory
from trainer.checkpoint.weights import read_weights
from trainer.config.schema.callbacks import EarlyStop
from trainer.errors import UserError
from trainer.storage.json_files import check_json


def history_of(losses: list[float], keep_best: int = 1, min_delta: float = 0.0) -> EvalHistory:
    history = EvalHistory.empty()
    for step, loss in enumerate(losses, start=1):
        history = history.with_evaluation(step, loss, keep_best).with_early_stop(step, loss, min_delta)
        history = check_json(json.loads(json.dumps(history.model_dump())), EvalHistory, "")  # as if resumed after each
    return history


def reason(history: EvalHistory, **settings: float) -> str:
    return history.stop_reason(EarlyStop(type="EarlyStop", **settings))


@pytest.mark.parametrize(
    ("losses", "keep_best", "steps"),
    [
        ([3.0, 2.0, 2.5], 1, [2]),
        ([3.0, 2.0, 2.5], 2, [2, 3]),
        ([2.0, 2.0], 1, [1]),  # of two equal ones the earlier
        ([math.nan, math.inf, 3.0], 2, [3]),
        ([2.0, math.nan], 1, [1]),
        ([2.0], 0, []),
    ],
)
def test_the_best_are_those_with_the_lowest_loss(losses: list[float], keep_best: int, steps: list[int]) -> None:
    assert [each.step for each in history_of(losses, keep_best).best] == steps


def test_the_run_ends_after_patience_evaluations_without_improvement() -> None:
    assert reason(history_of([3.0, 2.0, 2.1]), patience=2) == ""
    assert reason(history_of([3.0, 2.0, 2.1, 2.0]), patience=2) == (
        "the loss of the last 2 evaluations did not fall below 2.0000, the loss at step 2"
    )
    assert reason(history_of([3.0, 2.0, 2.1, 1.9, 2.0]), patience=2) == ""  # counts anew
    assert history_of([1.0, 2.0]).stop_reason(None) == ""


def test_an_improvement_is_larger_than_min_delta_in_one_or_several_evaluations() -> None:
    assert history_of([3.0, 2.9, 2.8], min_delta=0.25).without_improvement == 2
    assert history_of([3.0, 2.9, 2.7], min_delta=0.25).without_improvement == 0
    said = reason(history_of([3.0, 2.75], min_delta=0.25), patience=1, min_delta=0.25)
    assert said == "the loss of the last evaluation did not fall below 3.0000, the loss at step 1, by more than 0.25"


def test_a_loss_that_is_not_finite_is_no_improvement() -> None:
    assert reason(history_of([math.nan, math.nan]), patience=2) == "the loss of the last 2 evaluations was not finite"
    assert history_of([math.inf, 3.0]).without_improvement == 0


# ---- on disk ---------------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, best: int | None, keep_max: int = 1, on_stage: writing.OnStage | None = None) -> Path:
    tensors = {"model": {"w": np.float32([step])}}
    best_steps = [] if best is None else [best]
    return writing.write_checkpoint(folder, step, tensors, {}, keep_max, on_stage, best_steps=best_steps)


@pytest.fixture(params=["links", "no links"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "no links":

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "symlink", refuse)
    return tmp_path / "checkpoints"


def test_the_best_checkpoint_stays_and_has_a_name(folder: Path) -> None:
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2)):
        save(folder, step, best)
        assert store.find_checkpoint(folder / "best") == folder / f"step-{best:08d}"
        assert read_weights(folder / "best")["w"].read() == best
    assert names(folder) == ["best", "step-00000002", "step-00000004"]
    assert store.find_checkpoint(folder) == folder / "step-00000004"  # the newest, as ever
    save(folder, 5, 5)
    assert names(folder) == ["best", "step-00000005"]


def test_the_name_moves_with_the_folder_and_goes_with_the_checkpoint(folder: Path) -> None:
    save(folder, 1, 1)
    aside = store.rename_old_checkpoints(folder)
    assert store.find_checkpoint(aside / "best") == aside / "step-00000001"
    save(folder, 2, 1)  # of the earlier run
    assert names(folder) == ["step-00000002"]
    save(folder, 3, 3)
    save(folder, 4, None)
    assert names(folder) == ["step-00000004"]
    with pytest.raises(UserError, match="there is no such checkpoint"):
        store.find_checkpoint(folder / "best")


def test_a_save_that_is_killed_leaves_the_name_of_a_checkpoint_that_is_there(folder: Path) -> None:
    save(folder, 1, 1)

    class Killed(Exception):
        pass

    stages: list[str] = []
    save(folder / "other", 1, 1, on_stage=stages.append)
    for at in stages[: stages.index("done")]:

        def stop(stage: str, at: str = at) -> None:
            if stage == at:
                raise Killed

        with pytest.raises(Killed):
            save(folder, 2, 2, on_stage=stop)
        assert store.read_marker(store.find_checkpoint(folder / "best")) is not None, at
    save(folder, 2, 2)
    assert names(folder) == ["best", "other", "step-00000002"]


def test_a_folder_of_the_user_named_best_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    save(tmp_path, 1, None).rename(tmp_path / "best")
    assert store.find_checkpoint(tmp_path / "best") == tmp_path / "best"


# ---- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("callbacks: [{type: EarlyStop, mode: max}]\n", ["callbacks.0.mode"]),
        ("callbacks: [{type: EarlyStop, monitor: loss}]\n", ["callbacks.0.monitor", "write eval_loss"]),
        ("callbacks: [{type: EarlyStop, patience: 0}]\n", ["patience = 0: must be at least 1"]),
        ("callbacks: [{type: EarlyStop, threshold: -1}]\n", ["must be at least 0"]),
    ],
)
def test_what_early_stop_cannot_do(text: str, parts: list[str]) -> None:
    message = error_of(text)
    assert all(part in message for part in parts), message
