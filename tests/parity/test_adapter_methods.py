"""Adapters as PEFT has them: logits, gradients and merged matrices of its golden files, and its description of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
import numpy as np
import pytest
from golden_decoder import MODES, GoldenDecoder, golden_decoder
from golden_files import AdapterCase, load_adapter_case, load_model_case, model_case_names, model_settings
from mindspore import Tensor
from numpy_kernels import distance
from tiny_trainer import config_of
from tolerances import decoder_limits, rounding_limit

from trainer.checkpoint.adapters import CONFIG_FILE, PREFIX, adapter_config, fitting_adapters, merge_adapters
from trainer.config.schema.model import ModelConfig
from trainer.errors import UserError
from trainer.models.inputs import RouterStatistics
from trainer.models.spec.shapes import adapter_shapes

NAMES = model_case_names("adapter")
CASES = pytest.mark.parametrize("name", NAMES)


def pet_config(case: AdapterCase, **changes: Any) -> dict[str, Any]:
    """Returns the `pet_config` with PEFT's settings."""
    settings = dict(case.settings)
    pet = {"lora_rank": settings.pop("r"), "target_modules": "|".join(settings.pop("target_modules"))}
    return pet | settings | changes


class Adapted(NamedTuple):
    """The settings of a golden model with adapters, and all weights."""

    settings: ModelConfig
    weights: dict[str, np.ndarray]


def adapted(case: AdapterCase, folder: Path) -> Adapted:
    """Returns the model with the adapters that PEFT saved in `folder`."""
    model = load_model_case(case.model)
    (folder / CONFIG_FILE).write_text(json.dumps(case.adapter_config))
    config = config_of(model={**model_settings(model.config), "pet_config": pet_config(case)})
    adapters = fitting_adapters(case.adapters, config, folder, "test").read()
    return Adapted(config.decoder, dict(model.weights) | adapters)


def decoder_with(case: AdapterCase, mine: Adapted, mode: int) -> GoldenDecoder:
    golden = golden_decoder(load_model_case(case.model), mine.settings, mode)
    for name in adapter_shapes(mine.settings):
        golden.model.parameters_by_name[name].set_data(Tensor(mine.weights[name]))
    golden.model.compute_weights.refresh()
    return golden


@MODES
@CASES
def test_logits_and_gradients_are_those_of_peft(name: str, mode: int, tmp_path: Path) -> None:
    case = load_adapter_case(name)
    mine = adapted(case, tmp_path)
    golden = decoder_with(case, mine, mode)
    limits = decoder_limits(mine.settings, rows=len(case.logits))
    logits = golden.model.logits(golden.inputs).asnumpy().reshape(case.logits.shape)
    assert distance(logits, case.logits) < limits.loss
    names = list(adapter_shapes(mine.settings))
    trained = [golden.model.parameters_by_name[each] for each in names]
    run = mindspore.value_and_grad(lambda: golden.model(golden.inputs, None, RouterStatistics()).total, None, trained)
    loss_sum, gradients = run()
    assert distance(loss_sum.asnumpy(), np.float32(case.loss_sum)) < limits.loss
    assert {PREFIX + each for each in names} == case.gradients.keys()
    for each, gradient in zip(names, gradients, strict=True):
        assert distance(gradient.asnumpy() / case.valid_tokens, case.gradients[PREFIX + each]) < limits.gradients, each


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


@CASES
def test_the_description_has_what_peft_writes(name: str, tmp_path: Path) -> None:
    """Every key that is written has PEFT's value, and every setting of the case is written."""
    case = load_adapter_case(name)
    theirs = case.adapter_config
    ours = adapter_config(adapted(case, tmp_path).settings, "")
    ours["target_modules"] = sorted(ours["target_modules"])
    different = {"base_model_name_or_path", "init_lora_weights"}
    assert {key: value for key, value in ours.items() if key not in different} == {
        key: theirs[key] for key in ours if key not in different
    }
    assert case.settings.keys() <= ours.keys()


@pytest.mark.parametrize(
    ("name", "changes", "rule", "fix"),
    [
        ("adapter_rslora", {"use_rslora": False}, "have use_rslora True, ", "set pet_config.use_rslora to True"),
    ],
)  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused(
    name: str, changes: dict[str, Any], rule: str, fix: str, tmp_path: Path
) -> None:
    case = load_adapter_case(name)
    adapted(case, tmp_path)
    model = model_settings(load_model_case(case.model).config)
    config = config_of(model={**model, "pet_config": pet_config(case, **changes)})
    with pytest.raises(UserError) as caught:
        fitting_adapters(case.adapters, config, tmp_path, "test")
    assert rule in str(caught.value) and fix in str(caught.value)
