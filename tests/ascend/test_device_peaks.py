"""Device memory of explicit mode on the dry Ascend backend: no tensor of tokens x tokens or tokens x vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ascend_cases import DENSE, EXPERTS, LATENT, on_ascend
from tolerances import ATTENTION_MEMORY

from trainer.config import parse_config
from trainer.dryrun.process import Measurement
from trainer.dryrun.report import planned_bytes
from trainer.parallel.world import SINGLE_PROCESS

Bench = Callable[[str], Measurement]

TOKENS, VOCABULARY = 32768, 32768
EAGER = {"context": {"mode": 1}, "runner_config": {"gradient_accumulation_steps": 1}}
LONG = {"seq_length": TOKENS, "vocab_size": VOCABULARY, "num_layers": 1}
WINDOW = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
PLAIN = {"float32": {"compute_dtype": "float32"}, "heads of 24": {"head_dim": 24}}
CASES = {
    "32k tokens": on_ascend(DENSE, EAGER, model=LONG),
    "32k tokens in documents": on_ascend(DENSE, EAGER, model=LONG, documents=40),
    "window": on_ascend(DENSE, EAGER, model=WINDOW),
    "window over documents": on_ascend(DENSE, EAGER, model=WINDOW, documents=3),
    "dropout over documents": on_ascend(DENSE, EAGER, model=DROPOUT, documents=3),
    "dropout without flash attention": on_ascend(DENSE, EAGER, model={**DROPOUT, "use_flash_attention": False}),
    "dropout, recomputed": on_ascend(DENSE, EAGER | {"recompute_config": {"recompute": True}}, model=DROPOUT),
    "latent attention over documents": on_ascend(EXPERTS, EAGER, model=LATENT, documents=3),
    "tied embeddings, gradients in bfloat16": on_ascend(
        DENSE, {**EAGER, "runner_wrapper": {"accumulate_allreduce_grads_in_fp32": False}},
        model={"tie_word_embeddings": True},
    ),
}  # fmt: skip
ONE_BATCH = {"runner_config": {"gradient_accumulation_steps": 1}}
CASES |= {name: on_ascend(DENSE, ONE_BATCH, model=changes | {"seq_length": 1024}) for name, changes in PLAIN.items()}


@pytest.mark.parametrize("name", CASES)
def test_it_runs(bench: Bench, name: str) -> None:
    found = bench(name)
    assert found.failure is None
    assert found.found["updated"]


@pytest.mark.parametrize("name", ["32k tokens", "32k tokens in documents"])
def test_long_sequences_need_no_square_of_memory(bench: Bench, name: str) -> None:
    """A mask of tokens x tokens alone would take 1 GiB, and logits in float32 4 GiB. A layer of 128 numbers keeps about
    8 kB a token, 256 MiB; a chunk of the loss computes with some tensors of 64 MiB; the rest is small."""
    assert bench(name).peak_bytes < 1 << 30


@pytest.mark.parametrize("name", PLAIN)
def test_plain_attention_saves_no_scores_of_later_keys(bench: Bench, name: str) -> None:
    """The plan counts ten sixteenths of the probabilities: each quarter of the tokens has the keys up to its end."""
    planned = planned_bytes(parse_config(name, CASES[name].case.config), SINGLE_PROCESS)
    assert bench(name).peak_bytes == pytest.approx(planned, rel=ATTENTION_MEMORY)
