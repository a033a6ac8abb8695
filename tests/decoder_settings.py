"""The settings of a decoder, without a file."""

from __future__ import annotations

import json
from typing import Any

from trainer.config import parse_config
from trainer.config.schema.model import ModelConfig


def decoder_settings(**model: Any) -> ModelConfig:
    """Returns what a section `model_config` with these keys says."""
    return parse_config("settings", json.dumps({"model": {"model_config": model}})).decoder
