"""Freezing and recomputation from the command line: what is frozen stays, what is computed again changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from run_helpers import (
    arrays_of,
    assert_same_bits,
    column,
    config_of,
    figures,
    refusal,
    step_records,
    train,
    write_config,
)

from trainer.cli.main import dispatch
from trainer.models.spec.init import initial_value
from trainer.models.spec.shapes import parameter_shapes, parameter_specs

SECTIONS = {
    "freeze": {"include": ["embeddings", {"layers": 0}]},
    "recompute_config.recompute": True,
    "model.model_config.hidden_dropout": 0.1,
    "runner_config.gradient_accumulation_steps": 2,
}


@pytest.fixture(scope="module")
def trained(home: Path) -> Path:
    """Returns the folder of a run, with its configuration as run.yaml."""
    folder = home / "whole"
    train(write_config(folder, home / "data", SECTIONS), runner_config__stop_step=6)
    return folder


def test_frozen_weights_stay_byte_for_byte_and_have_no_state(trained: Path) -> None:
    """Correctness 19. The weights of this seed are what the run began with."""
    config = config_of(trained / "run.yaml")
    arrays, frozen = arrays_of(trained / "output"), 0
    state = {name.split(".", 1)[1] for name in arrays if name.startswith("optimizer/")}
    for name, spec in parameter_specs(config.decoder).items():
        before, is_frozen = initial_value(spec, config.decoder, config.seed), ".0." in name or "embed" in name
        assert (arrays[f"model/{name}"].tobytes() == before.tobytes()) == is_frozen, name
        assert (name in state) != is_frozen, name
        frozen += is_frozen
    assert frozen == 10 and np.isfinite(column(step_records(trained / "output"), "loss")).all()


def test_recomputing_changes_no_bit(home: Path, trained: Path) -> None:
    path = write_config(home / "kept", home / "data", SECTIONS | {"recompute_config.recompute": False})
    train(path, runner_config__stop_step=6)
    assert figures(home / "kept" / "output") == figures(trained / "output")
    assert_same_bits(arrays_of(home / "kept" / "output"), arrays_of(trained / "output"))


def test_a_run_goes_on_with_the_same_weights_frozen_and_with_no_others(home: Path, trained: Path) -> None:
    path = write_config(home / "parts", home / "data", SECTIONS)
    train(path, runner_config__stop_step=4)
    for freeze, change in (
        ("{include: embeddings}", "model.layers.0.input_layernorm.weight (and 8 more) was frozen and is trained now"),
        ("{embeddings: True, layers: 0-1}", "model.layers.1.input_layernorm.weight (and 8 more) was trained"),
    ):
        again = {"runner_config__stop_step": 6, "resume_training": True, "freeze": freeze}
        refusal(lambda: train(path, **again), "another freeze setting", change)  # noqa: B023
    # The same in other words is the same.
    same = {"freeze": "{embeddings: True, layers: [0]}", "recompute_config__recompute": False}
    train(path, runner_config__stop_step=6, resume_training=True, **same)
    assert_same_bits(arrays_of(home / "parts" / "output"), arrays_of(trained / "output"))


def test_the_plan_says_both(trained: Path, capsys: pytest.CaptureFixture) -> None:
    path = trained / "run.yaml"
    assert dispatch(["plan", "--config", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    shapes = parameter_shapes(config_of(path).decoder)
    assert plan["model"]["frozen"]["tensors"] == 10
    model = plan["model"]
    assert model["weights"] + model["frozen"]["weights"] == sum(int(np.prod(shape)) for shape in shapes.values())
    # The lower layer is frozen with all below it: there is nothing to compute again.
    assert plan["model"]["recomputed"][:2] == ["", "block"]
    assert "frozen" in (trained / "output" / "plan.txt").read_text(encoding="utf-8")
