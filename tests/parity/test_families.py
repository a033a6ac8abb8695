"""Each family against transformers; a golden file family_NAME.safetensors is all that a new one needs here."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_model import FamilyModel
from golden_decoder import MODES
from golden_files import model_case_names

FAMILIES = pytest.mark.parametrize("name", model_case_names("family"))


@FAMILIES
def test_a_folder_goes_in_and_out(name: str, tmp_path: Path) -> None:
    FamilyModel(name, tmp_path).check_weights()


@FAMILIES
def test_adapters_have_the_names_and_shapes_of_peft(name: str, tmp_path: Path) -> None:
    FamilyModel(name, tmp_path).check_modules_of_peft()


@MODES
@FAMILIES
def test_logits_loss_and_gradients_equal_hugging_face(name: str, mode: int, tmp_path: Path) -> None:
    FamilyModel(name, tmp_path).check_numbers(mode)


@FAMILIES
def test_documents_adapters_and_generation(name: str, tmp_path: Path) -> None:
    model = FamilyModel(name, tmp_path)
    model.check_documents()
    model.check_adapters()
    model.decoder().check_generation(9, new_tokens=5)
