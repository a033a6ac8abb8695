"""LongRoPE: the names that Phi-3's files give it, its defaults, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from config_helpers import error_of, load
from tolerances import FEW_OPERATIONS

from trainer.config import dump_config, parse_config
from trainer.config.hugging_face import config_json
from trainer.errors import UserError
from trainer.models.spec.rotary import rotary_angles
from trainer.run.generation import context_length

SHORT = [1.0, 1.4, 1.8]
LONG = [1.0, 2.5, 3.5]
PHI4_MINI = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 300, "embd_pdrop": 0.0,
    "max_position_embeddings": 1024, "original_max_position_embeddings": 256, "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}, "sliding_window": 2048,
    "attention_bias": False, "lm_head_bias": False, "interpolate_factor": 1,
}  # fmt: skip
"""The keys of Phi-4-mini's config.json, with other sizes."""


def config_of(path: Path, length: int = 128, keys: str = "", **changes: Any) -> str:
    """Returns a file with a folder whose config.json has these keys, and a seq_length."""
    (path / "config.json").write_text(json.dumps(PHI4_MINI | changes))
    return f"pretrained_model_dir: {path}\nmodel: {{model_config: {{seq_length: {length}{keys}}}}}\n"


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3s_files_describe_long_rope_under_three_names(name: str, tmp_path: Path) -> None:
    config = load(config_of(tmp_path, rope_scaling=PHI4_MINI["rope_scaling"] | {"type": name}))
    scaling = config.decoder.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("longrope", 4, 256)
    assert (config.decoder.rotary_size, config.decoder.sliding_window) == (6, 2048)
    assert parse_config("again", dump_config(config)) == config
    written = config_json(config.decoder, "Phi3ForCausalLM")
    assert written["original_max_position_embeddings"] == 256
    assert written["rope_scaling"]["long_factor"] == LONG


def test_seq_length_decides_the_factors(tmp_path: Path) -> None:
    for length, factors in ((256, SHORT), (257, LONG)):
        cos, sin = rotary_angles(load(config_of(tmp_path, length)).decoder, 2)
        angles = np.arctan2(sin[1, :3].astype(np.float64), cos[1, :3].astype(np.float64))
        np.testing.assert_allclose(angles, 10000.0 ** (-np.arange(3) / 3) / factors, rtol=FEW_OPERATIONS)


def test_a_phi3_without_scaling_has_plain_positions(tmp_path: Path) -> None:
    decoder = load(config_of(tmp_path, rope_scaling=None)).decoder
    assert (decoder.rope_scaling, decoder.trained_length) == (None, 1024)


def test_each_frequency_has_a_factor(tmp_path: Path) -> None:
    message = error_of(config_of(tmp_path, rope_scaling=PHI4_MINI["rope_scaling"] | {"long_factor": [1.0]}))
    assert "long_factor" in message and "requires 3 factors, one for each frequency of a head, not 1" in message


def test_a_context_that_has_other_factors_than_the_training_is_an_error(tmp_path: Path) -> None:
    assert context_length(load(config_of(tmp_path, keys=", max_decode_length: 256"))) == 256
    with pytest.raises(UserError, match="seq_length 128 has the short factors"):
        context_length(load(config_of(tmp_path, keys=", max_decode_length: 257")))
