"""Adapters as PEFT has them: logits, gradients and merged matrices of its golden files, and its description of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from golden_decoder import MODES, GoldenDecoder, golden_decoder
from golden_files import AdapterCase, load_adapter_case, load_model_case, model_case_names, model_settings
from mindspore import Tensor
from numpy_kernels import assert_close, assert_same_bits, distance
from tiny_trainer import config_of
from tolerances import SEVERAL_OPERATORS, rounding_limit

from trainer.checkpoint.adapter_values import (
    adapted_matrices,
    as_saved,
    decompose,
    initial_names,
    take_out,
)
from trainer.checkpoint.adapters import (
    ADAPTER_CONFIG,
    PREFIX,
    adapter_config,
    fitting_adapters,
    join_weights,
    merge_adapters,
)
from trainer.config import Config
from trainer.config.schema.model import ModelConfig
from trainer.errors import UserError
from trainer.models.spec.adapters import saved_settings
from trainer.models.spec.names import adapter_names
from trainer.models.spec.shapes import adapter_shapes
from trainer.parallel.sharding import as_sharded_array

NAMES = model_case_names("adapter")
CASES = pytest.mark.parametrize("name", NAMES)


def config_for(case: AdapterCase, **changes: Any) -> Config:
    """Returns the configuration of a training with PEFT's settings; `changes` are of `pet_config`."""
    settings = dict(case.settings)
    pet = {"lora_rank": settings.pop("r"), "target_modules": "|".join(settings.pop("target_modules"))}
    model = model_settings(load_model_case(case.model).config)
    return config_of(model=model | {"pet_config": pet | settings | changes})


class Adapted(NamedTuple):
    """The settings of a golden model with adapters, and all weights."""

    settings: ModelConfig
    weights: dict[str, np.ndarray]


def adapted(case: AdapterCase, folder: Path) -> Adapted:
    """Returns the model with the adapters that PEFT saved in `folder`."""
    model = load_model_case(case.model)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(case.adapter_config))
    config = config_for(case)
    adapters = fitting_adapters(case.adapters, config, folder).read()
    return Adapted(config.decoder, join_weights(config, dict(model.weights), adapters))


def decoder_with(case: AdapterCase, mine: Adapted, mode: int) -> GoldenDecoder:
    golden = golden_decoder(load_model_case(case.model), mine.settings, mode)
    for name, parameter in golden.model.parameters_by_name.items():
        parameter.set_data(Tensor(mine.weights[name]))
    golden.model.compute_weights.refresh()
    return golden


@MODES
@CASES
def test_logits_and_gradients_are_those_of_peft(name: str, mode: int, tmp_path: Path) -> None:
    case = load_adapter_case(name)
    mine = adapted(case, tmp_path)
    decoder_with(case, mine, mode).check_adapters(case)


@CASES
def test_merged_matrices_are_those_of_peft(name: str, tmp_path: Path) -> None:
    case = load_adapter_case(name)
    mine = adapted(case, tmp_path)
    merged = merge_adapters(mine.weights, mine.settings)
    for key, array in merged.items():
        if key in case.merged:
            assert distance(array, case.merged[key]) < rounding_limit(mine.settings.hidden_size), key
        else:
            np.testing.assert_array_equal(array, mine.weights[key])
    assert case.merged.keys() < merged.keys()


def test_the_embedding_that_peft_saves_must_be_the_base_model_s(tmp_path: Path) -> None:
    case = load_adapter_case("adapter_vocabulary")
    mine = adapted(case, tmp_path)
    config = config_for(case)
    fitting_adapters(case.adapters, config, tmp_path, base=mine.weights)
    changed = mine.weights | {"model.embed_tokens.weight": mine.weights["model.embed_tokens.weight"] + 1}
    with pytest.raises(UserError, match="has another model.embed_tokens.weight than the base model"):
        fitting_adapters(case.adapters, config, tmp_path, base=changed)


@pytest.mark.parametrize("name", [name for name in NAMES if load_adapter_case(name).start])
def test_initial_values_are_those_of_peft(name: str, tmp_path: Path) -> None:
    """The product B0 A0, which does not depend on the signs of singular vectors, and the conversion there and back."""
    case = load_adapter_case(name)
    mine = adapted(case, tmp_path)
    base = dict(load_model_case(case.model).weights)
    saved = decompose(base, mine.settings, seed=1)
    start = take_out(base | saved, mine.settings)
    for matrix, adapter in adapted_matrices(mine.settings):
        a, b = adapter_names(matrix)
        right = case.start[PREFIX + b] @ case.start[PREFIX + a]
        exact = np.linalg.svd(base[f"{matrix}.weight"].astype(np.float64))[1]
        condition = 1.0  # rounding turns singular vectors, more where the next singular value is near
        if "pissa" in name:
            condition = exact[0] / (exact[adapter.rank - 1] - exact[adapter.rank])
        assert distance(start[b] @ start[a], right) < condition * rounding_limit(*right.shape, 10), matrix
        if "olora" in name:
            assert distance(start[a], case.start[PREFIX + a]) < rounding_limit(*right.shape, 10)
        else:
            length = np.linalg.norm(start[a].astype(np.float64), axis=1) ** 2
            assert distance(length * adapter.scale, exact[: adapter.rank]) < rounding_limit(*right.shape, 10)
        assert_same_bits([start[name] for name in initial_names(matrix)], [start[a], start[b]])
    merged = merge_adapters(start, mine.settings)  # at the start the model is the base model
    hidden_limit = rounding_limit(mine.settings.hidden_size)
    assert_close(*({key: each[key] for key in case.merged} for each in (merged, base)), hidden_limit)
    shapes = adapter_shapes(mine.settings)
    there = as_saved({each: as_sharded_array(mine.weights[each]) for each in shapes}, mine.weights)
    assert_same_bits({each: there[each.removeprefix(PREFIX)].array for each in case.adapters}, case.adapters)


def test_subspace_iteration_comes_close_to_the_decomposition() -> None:
    case = load_adapter_case("adapter_pissa")
    base = dict(load_model_case(case.model).weights)
    distances = []
    for method in ("pissa", "pissa_niter_1", "pissa_niter_4", "pissa_niter_64"):
        config = config_for(case, init_lora_weights=method)
        start = take_out(base | decompose(base, config.decoder, seed=1), config.decoder)
        left = [np.linalg.norm(start[key].astype(np.float64)) for key in case.merged]
        distances.append(sum(left))
    exact, one, four, many = distances
    assert exact < four < one and many < exact * (1 + SEVERAL_OPERATORS)
    first, again, other = (decompose(base, config.decoder, seed) for seed in (1, 1, 2))
    assert_same_bits(again, first)
    assert not all(np.array_equal(array, first[key]) for key, array in other.items())


@CASES
def test_the_description_has_what_peft_writes(name: str, tmp_path: Path) -> None:
    """Every key that is written has PEFT's value, and every setting of the case is written."""
    case = load_adapter_case(name)
    theirs = case.adapter_config
    ours = adapter_config(saved_settings(adapted(case, tmp_path).settings), "")
    ours["target_modules"] = sorted(ours["target_modules"])
    different = {"base_model_name_or_path"}
    assert {key: value for key, value in ours.items() if key not in different} == {
        key: theirs[key] for key in ours if key not in different
    }
    assert case.settings.keys() <= ours.keys()


@pytest.mark.parametrize(
    ("name", "changes", "rule", "fix"),
    [
        (
            "adapter_pissa", {"init_lora_weights": True}, "have lora_rank 6, model.model_config.pet_config says 3",
            "set pet_config.lora_rank to 6",
        ),
        ("adapter_rslora", {"init_lora_weights": "olora"}, "have lora_rank 3, those of this", "saved with 6"),
        ("adapter_rslora", {"use_rslora": False}, "have use_rslora true, ", "set pet_config.use_rslora to true"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused(
    name: str, changes: dict[str, Any], rule: str, fix: str, tmp_path: Path
) -> None:
    case = load_adapter_case(name)
    adapted(case, tmp_path)
    with pytest.raises(UserError) as caught:
        fitting_adapters(case.adapters, config_for(case, **changes), tmp_path)
    assert rule in str(caught.value) and fix in str(caught.value)
