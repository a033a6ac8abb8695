"""Files of configs/pynative on the dry Ascend backend, with smaller sizes and compiled blocks as the files ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from ascend_cases import OnAscend
from fork_server import REPOSITORY

from trainer.dryrun.process import Case, Measurement

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 512, "seq_length": 64,
}  # fmt: skip
HEADS = {"num_key_value_heads": 2, "head_dim": 32}
LATENT = {"num_hidden_layers": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "moe_intermediate_size": 64}


def small_file(name: str, **model: Any) -> OnAscend:
    """Returns the case of a file with smaller sizes and two sequences a rank, as rank 3 of 4."""
    file = yaml.safe_load((REPOSITORY / "configs" / "pynative" / f"{name}.yaml").read_text(encoding="utf-8"))
    file["model"] |= SIZES | model
    file["training"]["global_batch_size"] = 8
    return OnAscend(Case(json.dumps(file)), ranks=4, rank=3)


CASES = {
    "expert_parallel": small_file("expert_parallel", **LATENT),
    "lora_layers": small_file("lora_layers", **HEADS),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_the_newer_schema_trains(bench: Callable[[str], Measurement], name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found["updated"]
    assert not found.legacy
    assert ("AllToAllV" in {each.name for each in found.collectives}) == (name == "expert_parallel")
