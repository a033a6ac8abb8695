"""Defaults that depend on the device: an Ascend's are written into the configuration, a CPU has none."""

from __future__ import annotations

import json

import pytest
from config_helpers import load
from no_decoder import NO_DECODER_TEXT

from trainer.checkpoint.state import changed_settings, settings_record
from trainer.config import Config, config_notes, dump_config, parse_config
from trainer.config.device_defaults import apply_device_defaults, device_default_note, device_defaults
from trainer.device.resolve import device_notes
from trainer.errors import value_text
from trainer.ops.precision import resolve_precision
from trainer.ops.select import dtype_notes, precision_of, select_kernels

DENSE = "model: {arch: {type: LlamaForCausalLM}, model_config: {num_layers: 2%s}}\n"
EXPERTS = DENSE % ", moe_config: {expert_num: 4%s}"


def on_ascend(text: str) -> Config:
    return apply_device_defaults(load(text), "Ascend")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DENSE % "", {"compute_dtype": "bfloat16", "use_flash_attention": True}),
        (DENSE % ", compute_dtype: float32", {"use_flash_attention": True}),
        (DENSE % ", use_flash_attention: False", {"compute_dtype": "bfloat16"}),
        ("amp_level: O2\n" + DENSE % "", {"use_flash_attention": True}),
        (
            EXPERTS % "",
            {"compute_dtype": "bfloat16", "use_flash_attention": True, "moe_config.use_gmm": True},
        ),
        (EXPERTS % ", use_gmm: False", {"compute_dtype": "bfloat16", "use_flash_attention": True}),
        (EXPERTS % ", capacity_factor: 1.5", {"compute_dtype": "bfloat16", "use_flash_attention": True}),
        (NO_DECODER_TEXT, {}),
    ],
)
def test_an_ascend_has_defaults_where_nothing_is_written(text: str, expected: dict) -> None:
    config = load(text)
    assert device_defaults(config, "Ascend") == expected
    completed = apply_device_defaults(config, "Ascend")
    for key, value in expected.items():
        section = completed.decoder.moe_config if "." in key else completed.decoder
        assert getattr(section, key.split(".")[-1]) == value
    assert apply_device_defaults(completed, "Ascend") is completed
    assert apply_device_defaults(config, "CPU") is config
    said = ", ".join(f"{key} {value_text(value)}" for key, value in expected.items())
    assert device_default_note(completed, "Ascend") == (said and f"defaults of an Ascend: {said}")
    assert said in "\n".join(device_notes(completed, "Ascend"))
    assert device_default_note(config, "CPU") == ""


def test_what_a_run_saves_says_the_defaults_it_had() -> None:
    dumped = dump_config(on_ascend(EXPERTS % ""))
    again = parse_config("config.yaml", dumped)
    assert (again.decoder.compute_dtype, again.decoder.use_flash_attention) == ("bfloat16", True)
    assert again.decoder.moe_config.use_gmm and device_defaults(again, "Ascend") == {}


def test_a_resumed_run_with_other_defaults_is_told() -> None:
    """A checkpoint of a CPU, continued on an Ascend."""
    before, now = (json.loads(json.dumps(settings_record(each))) for each in (load(DENSE % ""), on_ascend(DENSE % "")))
    told = changed_settings(before, now)
    assert "model.model_config.compute_dtype" in told and "bfloat16" in told


def test_the_kernels_of_an_ascend_follow() -> None:
    config = on_ascend(EXPERTS % "")
    precision = resolve_precision(config.decoder, config.amp_level, "Ascend")
    assert precision.compute.dtype == "bfloat16"
    chosen = {each.kernel: each.chosen for each in select_kernels(config.decoder, "Ascend", precision)}
    assert (chosen["attention"], chosen["grouped_matmul"]) == ("flash_attention_score", "GroupedMatmulV4")


@pytest.mark.parametrize("moe", ["", ", use_gmm: False", ", capacity_factor: 1.5", ", enable_sdrop: True"])
def test_experts_never_compute_on_the_host_of_an_ascend(moe: str) -> None:
    config = on_ascend(EXPERTS % moe)
    product = next(each for each in select_kernels(config.decoder, "Ascend") if each.kernel == "grouped_matmul")
    assert product.fused
    assert config.decoder.experts.effective_capacity == load(EXPERTS % moe).decoder.experts.effective_capacity


def test_an_ascend_is_told_nothing_of_a_cpu() -> None:
    # In mode 1 a CPU computes blocks that have no products in bfloat16.
    config = load(DENSE % ", compute_dtype: bfloat16" + "\ncontext: {mode: 1}\n")
    for device in ("CPU", "Ascend"):
        own = dtype_notes(config, precision_of(config, device), device)
        told = "\n".join([*config_notes(config, device=device), *device_notes(config, device), *own])
        assert ("computes in float32" in told) == (device == "CPU")
