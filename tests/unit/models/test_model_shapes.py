"""What the decoder knows without MindSpore: parameter names and shapes, initial weights, rotary tables."""

from __future__ import annotations

import math
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from decoder_settings import decoder_settings
from golden_files import load_model_case, model_case_names, model_settings
from tolerances import FEW_OPERATIONS, NEAR_ZERO, SEVERAL_OPERATORS, VISIBLE

from trainer.checkpoint.tensor_names import split_fused_tensors
from trainer.config.schema.model import ModelConfig
from trainer.models.spec.init import initial_value
from trainer.models.spec.names import EMBEDDING, FINAL_NORM, HEAD
from trainer.models.spec.rotary import rotary_angles
from trainer.models.spec.shapes import attention_shapes, mlp_shapes, parameter_shapes, parameter_specs

ROOT = Path(__file__).resolve().parents[3]
SIZES = {
    "num_layers": 3, "hidden_size": 64, "num_heads": 4, "n_kv_heads": 2, "intermediate_size": 96, "vocab_size": 300,
    "seq_length": 32,
}


def settings_of(**changes) -> ModelConfig:
    return decoder_settings(**SIZES | changes)


@pytest.mark.parametrize("name", model_case_names())
def test_names_and_shapes_are_hugging_faces(name: str) -> None:
    case = load_model_case(name)
    settings = decoder_settings(**model_settings(case.config))
    assert parameter_shapes(settings) == {
        key: value.shape for key, value in split_fused_tensors(case.weights, settings).items()
    }


def test_parameters_stand_in_forward_order() -> None:
    names = list(parameter_shapes(settings_of(qkv_has_bias=True)))
    assert names[0] == EMBEDDING and names[-2:] == [FINAL_NORM, HEAD]
    layers = [int(name.split(".")[2]) for name in names if name.startswith("model.layers.")]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2}
    block = [*attention_shapes(settings_of()), *mlp_shapes(settings_of())]
    assert block == [
        "input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
        "self_attn.o_proj.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ]


def test_a_head_wider_than_its_share_of_the_hidden_size() -> None:
    shapes = attention_shapes(settings_of(head_dim=24, use_qk_norm=True))
    assert shapes["self_attn.q_proj.weight"] == (96, 64) and shapes["self_attn.o_proj.weight"] == (64, 96)
    assert shapes["self_attn.k_proj.weight"] == (48, 64) and shapes["self_attn.q_norm.weight"] == (24,)


def test_llama_2_7b_has_the_published_number_of_weights() -> None:
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "n_kv_heads": None, "intermediate_size": None}
    shapes = parameter_shapes(settings_of(**sizes, vocab_size=32000))
    assert sum(math.prod(shape) for shape in shapes.values()) == 6_738_415_616


def initial_values(settings: ModelConfig, seed: int = 1) -> dict[str, np.ndarray]:
    return {name: initial_value(spec, settings, seed) for name, spec in parameter_specs(settings).items()}


def test_initial_weights_have_their_documented_deviations() -> None:
    settings = settings_of(qkv_has_bias=True, mlp_has_bias=True, use_qk_norm=True, initializer_range=0.05)
    for name, value in initial_values(settings).items():
        assert value.dtype == np.float32
        if name.endswith(".bias"):
            assert not value.any(), name
        elif value.ndim == 1:
            assert (value == 1).all(), name
        else:
            expected = 0.05 / math.sqrt(6) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
            assert value.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * value.size)), name
            assert abs(value.mean()) < 4 * expected / math.sqrt(value.size), name


def test_rules_by_name_give_initial_weights_another_deviation() -> None:
    rules = [{"target": ".*linear_qkv", "init_method_std": 0.2}, {"target": r"model\.layers\.1\.self_attn\.q_proj",
             "init_method_std": 0.3}, {"target": "linear_fc2", "init_method_std": 9.0},
             {"target": r"decoder\.layers\.0\.mlp\.linear_fc2", "init_method_std": 0.0}]  # fmt: skip
    plain = initial_values(settings_of())
    values = initial_values(settings_of(param_init_std_rules=rules))
    expected = {"model.layers.0.self_attn.k_proj.weight": 0.2, "model.layers.1.self_attn.q_proj.weight": 0.3}
    for name, deviation in expected.items():
        np.testing.assert_allclose(values[name], plain[name] * np.float32(deviation / 0.02), rtol=FEW_OPERATIONS)
    assert not values["model.layers.0.mlp.down_proj.weight"].any()
    same = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(values[same], plain[same])


def test_a_seed_gives_the_same_bits_and_no_two_parameters_share_theirs() -> None:
    first, again, other = (initial_values(settings_of(), seed) for seed in (1, 1, 2))
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        assert value.ndim == 1 or not np.array_equal(value, other[name]), name
    matrices = [value.reshape(-1)[:100].tobytes() for value in first.values() if value.ndim > 1]
    assert len(set(matrices)) == len(matrices)


def test_initial_weights_do_not_depend_on_the_rest_of_the_model() -> None:
    """A bias or a layer more changes no other parameter, but for the depth in the scale of o_proj and down_proj."""
    small, large = initial_values(settings_of()), initial_values(settings_of(qkv_has_bias=True, num_layers=5))
    for name, value in small.items():
        if not name.endswith(("o_proj.weight", "down_proj.weight")):
            np.testing.assert_array_equal(value, large[name])


def test_the_streams_of_a_deep_model_are_distinct() -> None:
    names = list(parameter_shapes(settings_of(num_layers=128)))
    assert len({zlib.crc32(name.encode()) for name in names}) == len(names)


def test_rotary_tables_by_their_formula() -> None:
    cos, sin = rotary_angles(settings_of(rope_theta=500.0), 32)
    assert cos.shape == sin.shape == (32, 16) and cos.dtype == sin.dtype == np.float32
    for position in (0, 1, 31):
        for i in range(8):
            angle = position * 500.0 ** (-2 * i / 16)
            assert cos[position, i] == cos[position, i + 8] == pytest.approx(math.cos(angle), abs=NEAR_ZERO)
            assert sin[position, i] == sin[position, i + 8] == pytest.approx(math.sin(angle), abs=NEAR_ZERO)


def test_neighbours_have_the_angle_of_their_pair() -> None:
    halves, pairs = (rotary_angles(settings_of(rotary_pct=0.5, rope_interleave=on), 9) for on in (False, True))
    for in_halves, in_pairs in zip(halves, pairs, strict=True):
        np.testing.assert_array_equal(in_pairs[:, :8], np.repeat(in_halves[:, :4], 2, axis=1))
        np.testing.assert_array_equal(in_pairs[:, 8:], in_halves[:, 8:])
    scaled = rotary_angles(settings_of(rope_theta=50.0, rope_ratio=10.0), 9)
    np.testing.assert_array_equal(scaled, rotary_angles(settings_of(rope_theta=500.0), 9))


def test_the_part_of_a_head_that_is_not_rotated_has_cosine_1_and_sine_0() -> None:
    """Compares with Hugging Face: frequencies and attention factor are those of a head of the rotated width."""
    narrow = settings_of(head_dim=12, rope_scaling=yarn(attention_factor=0.7), max_position_embeddings=256)
    partial = settings_of(rotary_pct=0.75, rope_scaling=yarn(attention_factor=0.7), max_position_embeddings=256)
    assert partial.rotary_size == 12 and partial.head_size == 16
    cos, sin = rotary_angles(partial, 40)
    assert cos.shape == sin.shape == (40, 16) and cos.dtype == sin.dtype == np.float32
    for table, whole, rest in ((cos, rotary_angles(narrow, 40)[0], 1), (sin, rotary_angles(narrow, 40)[1], 0)):
        np.testing.assert_array_equal(table[:, :12], whole)
        assert (table[:, 12:] == rest).all()


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=["none", "linear", "llama3", "yarn"],
)
def test_a_score_depends_on_the_distance_of_two_positions_only(scaling: dict | None) -> None:
    settings = settings_of(rope_scaling=scaling, max_position_embeddings=256)
    cos, sin = (table.astype(np.float64) for table in rotary_angles(settings, 256))
    query, key = np.random.default_rng(0).standard_normal((2, 16))

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        return x * cos[position] + np.concatenate([-x[8:], x[:8]]) * sin[position]

    near = [turned(query, 9 + start) @ turned(key, start) for start in (0, 1, 100, 240)]
    np.testing.assert_allclose(near, near[0], rtol=SEVERAL_OPERATORS)
    assert turned(query, 10) @ turned(key, 0) != pytest.approx(near[0], rel=VISIBLE)


def frequencies(**changes) -> np.ndarray:
    """Returns the angle of position 1 for each pair: from sine and cosine, without the attention factor."""
    cos, sin = rotary_angles(settings_of(**changes), 2)
    return np.arctan2(sin[1, :8].astype(np.float64), cos[1, :8].astype(np.float64))


THETA = 500.0
PLAIN = THETA ** (-np.arange(8) / 8)


def test_linear_scaling_divides_every_frequency() -> None:
    scaled = frequencies(rope_theta=THETA, rope_scaling={"rope_type": "linear", "factor": 4.0})
    np.testing.assert_allclose(scaled, PLAIN / 4, rtol=FEW_OPERATIONS)


def test_llama3_scaling_by_wavelength() -> None:
    """Short waves are kept, long ones divided, those between blended; said one frequency at a time."""
    factor, low, high, trained = 8.0, 1.0, 4.0, 64
    expected = []
    for frequency in PLAIN:
        wavelength = 2 * math.pi / frequency
        if wavelength < trained / high:
            expected.append(frequency)
        elif wavelength > trained / low:
            expected.append(frequency / factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    section = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }
    scaled = frequencies(rope_theta=THETA, max_position_embeddings=512, rope_scaling=section)
    np.testing.assert_allclose(scaled, expected, rtol=FEW_OPERATIONS)
    changed = np.isclose(scaled, PLAIN), np.isclose(scaled, PLAIN / factor)
    assert changed[0].any() and changed[1].any() and not (changed[0] | changed[1]).all()  # all three cases occur


def yarn(**changes) -> dict:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64} | changes


def test_yarn_scaling_by_rotations_in_the_trained_length() -> None:
    """Dimensions that turn more than beta_fast times are kept, fewer than beta_slow times divided, a ramp between."""
    fast, slow = 8.0, 0.5
    bounds = [16 * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(THETA)) for turns in (fast, slow)]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), 15)
    expected = []
    for i, frequency in enumerate(PLAIN):
        divided = min(max((i - low) / (high - low), 0), 1)
        expected.append(frequency * (1 - divided) + frequency / 4 * divided)
    section = yarn(beta_fast=fast, beta_slow=slow)
    scaled = frequencies(rope_theta=THETA, max_position_embeddings=256, rope_scaling=section)
    np.testing.assert_allclose(scaled, expected, rtol=FEW_OPERATIONS)
    assert low == 0 and 0 < high < 8  # the ramp starts and ends within the head


@pytest.mark.parametrize(
    ("section", "factor"),
    [
        (yarn(), 0.1 * math.log(4) + 1),
        (yarn(attention_factor=0.7), 0.7),
        (yarn(mscale=3.0, mscale_all_dim=0.2), (0.3 * math.log(4) + 1) / (0.02 * math.log(4) + 1)),
        (yarn(mscale=3.0), 0.1 * math.log(4) + 1),
        (yarn(factor=1.0), 1.0),
    ],
    ids=["default", "given", "mscale", "mscale alone", "factor 1"],
)
def test_yarn_attention_factor(section: dict, factor: float) -> None:
    cos, sin = rotary_angles(settings_of(max_position_embeddings=256, rope_scaling=section), 200)
    np.testing.assert_allclose(np.hypot(cos, sin), factor, rtol=FEW_OPERATIONS)


def test_trained_length_defaults_to_the_longest_context() -> None:
    without = {"rope_type": "llama3", "factor": 8.0}
    sections = without | {"original_max_position_embeddings": 96}, without
    tables = [rotary_angles(settings_of(max_position_embeddings=96, rope_scaling=section), 96) for section in sections]
    np.testing.assert_array_equal(tables[0], tables[1])


def test_nothing_here_needs_mindspore() -> None:
    """`plan` counts weights and memory with these modules, and must start at once."""
    names = "models.spec.shapes models.spec.init models.spec.rotary ops.dropout step.clip optim.groups ops.select"
    modules = names.split()
    imports = "".join(f"import trainer.{module}\n" for module in modules)
    code = f"{imports}import sys\nassert 'mindspore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
