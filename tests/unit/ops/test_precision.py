"""amp_level and the dtypes of the parts: the table, what contradicts it, what a CPU falls back to, what is told."""

from __future__ import annotations

import re

import pytest
from config_helpers import BASE, error_of, load, notes

from trainer.config import Config
from trainer.ops import select
from trainer.ops.precision import Precision, resolve_precision
from trainer.ops.select import PartDtype, dtype_notes, part_dtypes, precision_of, select_kernels

KEYS = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")


def resolved(text: str, device: str = "CPU") -> Precision:
    config = load(text or "seed: 1\n")
    return resolve_precision(config.decoder, config.amp_level, device)


def dtypes(text: str, device: str = "CPU") -> list[str]:
    """Returns the dtypes in the order of KEYS, without "float"."""
    found = resolved(text, device)
    parts = (found.compute, found.norm, found.softmax, found.rotary)
    return [part.dtype.replace("bfloat16", "b16").replace("float", "") for part in parts]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("", ["32", "32", "32", "32"]),
        ("amp_level: null\n", ["32", "32", "32", "32"]),
        ("amp_level: O0\n", ["32", "32", "32", "32"]),
        ("amp_level: O1\n", ["16", "32", "32", "32"]),
        ("amp_level: auto\n", ["16", "32", "32", "32"]),
        ("amp_level: O2\n", ["16", "32", "16", "16"]),
        ("amp_level: O3\n", ["16", "16", "16", "16"]),
    ],
)
def test_levels(level: str, expected: list[str]) -> None:
    assert dtypes(level) == dtypes(level, "Ascend") == expected


@pytest.mark.parametrize("level", ["O1", "auto", "O2", "O3"])
def test_a_level_of_half_precision_is_one_of_bfloat16_where_products_are(level: str) -> None:
    narrow = dtypes(f"amp_level: {level}\n")
    text = f"amp_level: {level}\nmodel_config: {{compute_dtype: bfloat16}}\n"
    assert dtypes(text, "Ascend") == [dtype.replace("16", "b16") for dtype in narrow] != narrow
    assert dtypes(text, "CPU") == ["32"] * 4


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("level", ["", "amp_level: auto\n"])
def test_a_dtype_that_is_written_counts_without_a_level_and_wins_over_auto(key: str, level: str) -> None:
    place = KEYS.index(key)
    for dtype in ("float32", "float16"):
        found = dtypes(f"{level}model_config: {{{key}: {dtype}}}\n")
        assert found[place] == dtype.replace("float", "")
        others = dtypes(level)
        assert found[:place] + found[place + 1 :] == others[:place] + others[place + 1 :]


def test_the_reason_names_what_decided() -> None:
    found = resolved("amp_level: auto\nmodel_config: {softmax_compute_type: float16, rotary_dtype: bfloat16}\n")
    assert found.compute.why == found.norm.why == "amp_level auto"
    assert found.softmax.why == "softmax_compute_type"
    assert found.rotary == ("float32", "rotary_dtype asks for bfloat16, of which a CPU has no kernels")
    assert resolved("").compute.why == "the default"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "amp_level: O0\nmodel_config:\n  compute_dtype: bfloat16\n",
            ["a.yaml:3: model_config.compute_dtype = 'bfloat16': amp_level O0 (a.yaml:1) means float32 here"],
        ),
        ("amp_level: O1\nmodel_config: {compute_dtype: float32}\n", ["amp_level O1", "means float16 here"]),
        ("amp_level: O1\nmodel_config: {layernorm_compute_type: float16}\n", ["amp_level O1", "means float32"]),
        ("amp_level: O2\nmodel_config: {softmax_compute_type: float32}\n", ["amp_level O2", "means float16"]),
        (
            "amp_level: O3\nmodel_config: {compute_dtype: bfloat16, rotary_dtype: float16}\n",
            ["rotary_dtype = 'float16'", "means bfloat16"],
        ),
    ],
)
def test_a_dtype_that_contradicts_the_level(text: str, parts: list[str]) -> None:
    message = error_of(text)
    assert all(part in message for part in parts), message
    assert "Fix: remove one of the two, or set amp_level to auto, which keeps explicit dtypes." in message


def test_what_agrees_with_the_level_is_no_contradiction() -> None:
    load("amp_level: O2\nmodel_config: {compute_dtype: bfloat16, softmax_compute_type: bfloat16}\n")
    load("amp_level: O0\nmodel_config: {compute_dtype: float32}\n")
    load("amp_level: O1\nmodel_config: {layernorm_compute_type: float32, rotary_dtype: float32}\n")


@pytest.mark.parametrize(
    ("pair", "rule"),
    [
        ("amp_level=O4", "= 'O4': must be O0, O1, O2, O3 or auto"),
        ("amp_level=o2", "write O2"),
        ("amp_level=0", "write O0"),
        ("amp_level=2", "write O2"),
        ("amp_level=True", "= 'True': must be O0"),
        ("amp_level=[O1]", "must be O0"),
        ("model_config.compute_dtype=half", "must be float32, float16 or bfloat16"),
        ("model_config.rotary_dtype=16", "must be float32, float16 or bfloat16"),
        ("model_config.softmax_compute_type=fp16", "must be float32, float16 or bfloat16"),
        ("model_config.layernorm_compute_type=float64", "must be float32, float16 or bfloat16"),
        ("model_config.param_init_type=int8", "must be float32, float16 or bfloat16"),
        ("model_config.amp_level=O1", "unknown key"),
    ],
)
def test_bad_values(pair: str, rule: str) -> None:
    message = error_of(BASE, pair)
    assert rule in message, message
    assert re.search(r"\n  Fix: .+\.$", message)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("amp_level: O1\n", ["amp_level: without a loss scale, gradients below 6e-8 underflow"]),
        ("model_config: {compute_dtype: float16}\n", ["compute_dtype: without a loss scale, gradients below 6e-8"]),
        ("model_config: {param_init_type: bfloat16}\n", ["param_init_type bfloat16: not used, parameters are float32"]),
        ("amp_level: auto\nmodel_config: {compute_dtype: float32}\n", ["amp_level auto: matrix products stay float32"]),
        ("model_config: {residual_dtype: float16}\n", ["residual_dtype", "the residual stream is always float32"]),
        ("model_config: {fp32_residual_connection: False}\n", ["the residual stream is always float32"]),
    ],
)
def test_notes(text: str, parts: list[str]) -> None:
    told = notes(text)
    assert all(part in told for part in parts), told


@pytest.mark.parametrize(
    "text",
    [
        "amp_level: O0\n",
        "model_config: {compute_dtype: float32, param_init_type: float32, rotary_dtype: float32}\n",
        "context: {device_target: Ascend}\nmodel_config: {compute_dtype: bfloat16}\n",
        "amp_level: O2\nrunner_wrapper: {scale_sense: {type: DynamicLossScaleUpdateCell}}\n",
        "amp_level: O2\nrun_mode: eval\n",
    ],
)
def test_nothing_is_told_where_all_is_as_written(text: str) -> None:
    assert notes(text) == ""


def shown(config: Config, precision: Precision) -> dict[str, PartDtype]:
    """Returns what `plan` shows of a run on a CPU."""
    return part_dtypes(config.decoder, precision, select_kernels(config.decoder, "CPU", precision))


def on_cpu(text: str) -> tuple[Precision, list[str]]:
    """Returns the dtypes of a run on a CPU, and what is told of them."""
    config = load(text)
    precision = precision_of(config, "CPU")
    return precision, list(dtype_notes(config, precision, "CPU"))


@pytest.mark.parametrize(
    ("processor", "by", "told"),
    [
        ("oneDNN", "oneDNN", ""),
        ("emulated", "emulated", "model.model_config.compute_dtype bfloat16: this processor has no instructions for"),
        ("", "", "compute_dtype asks for bfloat16, for which this MindSpore has no oneDNN 3.10"),
    ],
)
def test_who_multiplies_in_bfloat16(monkeypatch: pytest.MonkeyPatch, processor: str, by: str, told: str) -> None:
    monkeypatch.setattr(select, "bfloat16_products", lambda: processor)
    config = load("model_config: {compute_dtype: bfloat16}\n")
    precision, notes = on_cpu("model_config: {compute_dtype: bfloat16}\n")
    assert (precision.by, precision.compute.dtype) == (by, "bfloat16" if by else "float32")
    assert len(notes) == bool(told) and told in "".join(notes)
    assert shown(config, precision)["matrix products"].dtype == (f"bfloat16 ({by})" if by else "float32")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("context: {mode: 1}\n", "which a CPU does not compute with context.mode 1"),
        ("run_mode: predict\n", "and a CPU predicts in float32"),
    ],
)
def test_why_a_model_stays_in_float32(text: str, why: str) -> None:
    precision, notes = on_cpu(text + "model_config: {compute_dtype: bfloat16}\n")
    assert precision.compute == ("float32", f"compute_dtype asks for bfloat16, {why}")
    assert notes == [f"model.model_config.compute_dtype: computes in float32; {precision.compute.why}"]


def test_products_in_float16_are_those_of_rounded_numbers() -> None:
    precision, notes = on_cpu("model_config: {compute_dtype: float16, layernorm_compute_type: float16}\n")
    assert (precision.by, precision.compute.dtype, precision.norm.dtype) == ("emulated", "float16", "float32")
    assert "layernorm_compute_type: computes in float32; layernorm_compute_type asks for float16; between" in notes[0]
    assert "compute_dtype float16: this processor has no instructions for it" in notes[1] and len(notes) == 2


@pytest.mark.parametrize("model", [
    "hidden_dropout: 0.1", "pet_config: {pet_type: lora, lora_rank: 2}", "post_mlp_layernorm: True",
    "embedding_size: 16", "mtp_depth: 1",
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_native_layers_multiply_every_model_in_half_precision(model: str, dtype: str) -> None:
    precision, _ = on_cpu(f"model_config: {{compute_dtype: {dtype}, {model}}}\n")
    assert precision.compute.dtype == dtype and precision.by


def test_all_but_the_products_is_float32_beside_bfloat16() -> None:
    precision, notes = on_cpu("amp_level: O3\nmodel_config: {compute_dtype: bfloat16}\n")
    others = precision.norm, precision.softmax, precision.rotary
    assert precision.by and {part.dtype for part in others} == {"float32"}
    assert "amp_level: computes in float32; amp_level O3 asks for bfloat16; between products" in notes[0]
    _, notes = on_cpu("model_config: {compute_dtype: bfloat16, softmax_compute_type: float16}\n")
    assert "softmax_compute_type: computes in float32; softmax_compute_type asks for float16" in notes[0]


def test_what_else_is_float32_beside_bfloat16() -> None:
    text = "runner_wrapper: {accumulate_allreduce_grads_in_fp32: False}\n"
    text += "model_config: {compute_dtype: bfloat16, mtp_depth: 1, moe_config: {expert_num: 4}}\n"
    precision, notes = on_cpu(text)
    assert "on a CPU gradients are float32" in notes[-1] and "on a CPU routed experts compute in float32" in notes[-2]
    assert shown(load(text), precision)["routed experts"].dtype == "float32"


def test_flash_attention_follows_the_level() -> None:
    config = load("amp_level: O2\nmodel_config: {use_flash_attention: True, num_heads: 2, hidden_size: 64}\n")
    precision = resolve_precision(config.decoder, config.amp_level, "Ascend")
    choices = select_kernels(config.decoder, "Ascend", precision)
    assert {choice.kernel: choice.fused for choice in choices}["attention"]
    assert part_dtypes(config.decoder, precision, choices)["softmax"] == ("float32", "inside flash_attention_score")
    assert not select_kernels(config.decoder, "Ascend")[2].fused  # without the level all is float32


def test_what_plan_shows_of_a_base_in_few_bytes() -> None:
    config = load("model_config: {compute_dtype: float16, pet_config: {lora_rank: 2, base_dtype: nf4}}\n")
    precision = precision_of(config, "CPU")
    assert {name: part.dtype for name, part in list(shown(config, precision).items())[:4]} == {
        "frozen matrices of layers": "nf4",
        "frozen embedding and head": "bfloat16",
        "adapters and other parameters": "float32",
        "matrix products": "float16 (emulated)",
    }


def test_what_plan_shows() -> None:
    config = load("amp_level: O2\nmodel_config: {param_init_type: float16}\n")
    precision = resolve_precision(config.decoder, config.amp_level, "CPU")
    assert shown(config, precision) == {
        "parameters": ("float32", "master weights (asked: float16)"),
        "matrix products": ("float16", "amp_level O2"),
        "norms": ("float32", "amp_level O2"),
        "softmax": ("float16", "amp_level O2"),
        "rotary tables": ("float16", "amp_level O2"),
        "residual stream, loss": ("float32", "always"),
        "gradients, optimizer state": ("float32", "always"),
    }
