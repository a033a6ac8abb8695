"""The helper that compiles alike cells once: what is alike, and what is not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from compiled_cells import NotDescribedError, SharedCompilation, description
from mindspore import Parameter, Tensor, nn

from trainer.config import parse_config
from trainer.models.decoder import Block, Head
from trainer.ops.kernel_set import load_kernels
from trainer.ops.precision import resolve_precision
from trainer.ops.select import select_kernels

SIZES = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "vocab_size": 9, "seq_length": 4}


def block(kind: type[nn.Cell] = Block, part: tuple = (), **model: object) -> nn.Cell:
    settings = parse_config("cells", json.dumps({"model": {"model_config": SIZES | model}})).decoder
    precision = resolve_precision(settings, None, "CPU")
    return kind(settings, load_kernels(select_kernels(settings, "CPU"), precision), *part)


def test_blocks_of_the_same_settings_are_compiled_once() -> None:
    made: list[nn.Cell] = []
    shared = SharedCompilation(lambda cell, compiled: made.append(cell) or object())
    compile_cell = shared.compile_cell
    assert compile_cell(block(), True) is not compile_cell(block(), True)  # no decoder is being built
    made.clear()
    shared.model = "a decoder"
    first = compile_cell(block(), True)
    assert compile_cell(block(), True) is first
    assert compile_cell(block(num_layers=5, vocab_size=33), True) is first  # neither is in the block
    assert compile_cell(block(Head), True) is not first and compile_cell(block(), {"jit_level": "O1"}) is not first
    compile_cell(block(), False)
    assert len(made) == 4
    shared.model = "one that freezes others"
    assert compile_cell(block(), True) is not first


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 4}, {"n_kv_heads": 1}, {"rms_norm_eps": 1e-3}, {"qkv_has_bias": True}, {"use_qk_norm": True},
        {"mlp_has_bias": True}, {"hidden_size": 16}, {"rotary_pct": 0.5}, {"compute_dtype": "float16"},
        {"pet_config": {"lora_rank": 2, "target_modules": ".*wq"}},
        {"pet_config": {"lora_rank": 2, "lora_alpha": 4, "target_modules": ".*wq"}}, {"part": ("mlp",)},
    ],
    ids=str,
)  # fmt: skip
def test_every_difference_is_seen(changes: dict) -> None:
    assert description(block(**changes)) != description(block())


def test_scales_of_adapters_are_told_apart() -> None:
    adapters = [{"lora_rank": 2, "lora_alpha": alpha, "target_modules": ".*wq"} for alpha in (4, 8)]
    assert description(block(pet_config=adapters[0])) != description(block(pet_config=adapters[1]))


def test_what_is_not_known_is_not_shared() -> None:
    class Own(nn.Cell):
        def __init__(self, held: object) -> None:
            super().__init__()
            self.held = held

    assert description(Own(Tensor(np.ones(2, np.float32)))) == description(Own(Tensor(np.ones(2, np.float32))))
    assert description(Own(Tensor(np.ones(2, np.float32)))) != description(Own(Tensor(np.zeros(2, np.float32))))
    for held in (object(), Parameter(Tensor(np.ones(2, np.float32)), name="own"), lambda x: x):
        with pytest.raises(NotDescribedError):
            description(Own(held))
