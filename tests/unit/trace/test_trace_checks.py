"""What a trace cannot observe is refused, and the message names the key."""

from __future__ import annotations

import pytest
from no_decoder import NO_DECODER_TEXT

from trainer.config import Override, parse_config
from trainer.errors import UserError
from trainer.parallel.world import SINGLE_PROCESS, World
from trainer.trace.checks import check_pattern, trace_problems

DENSE = """
model:
  arch: {type: LlamaForCausalLM}
  model_config: {num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 64, seq_length: 16}
train_dataset: {data_loader: {type: SyntheticDataset}}
runner_config: {batch_size: 1, stop_step: 2}
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 1.e-3}
"""
TWO = World(0, 2, 0, 2)


def refused(text: str, world: World, *overrides: str) -> list[str]:
    """Returns the keys that are refused."""
    config = parse_config("a.yaml", text, [Override(*each.split("=", 1), "a test") for each in overrides])
    return [each.error.key for each in trace_problems(config, world)]


def test_a_dense_model_can_be_traced() -> None:
    assert refused(DENSE, SINGLE_PROCESS) == refused(DENSE, TWO) == []


MODEL = "model.model_config"
PET = f"{MODEL}.pet_config"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["run_mode=eval"], "run_mode"),
        (["loss.type=simpo"], "loss"),
        (["resume_training=True"], "resume_training"),
        ([f"{MODEL}.hidden_dropout=0.1"], f"{MODEL}.hidden_dropout"),
        ([f"{PET}.pet_type=lora", f"{PET}.lora_dropout=0.1"], f"{PET}.lora_dropout"),
        ([f"{PET}.pet_type=lora", f"{PET}.base_dtype=nf4"], f"{PET}.base_dtype"),
        ([f"{MODEL}.neftune_noise_alpha=5"], f"{MODEL}.neftune_noise_alpha"),
    ],
)
def test_what_it_cannot_observe_is_refused(overrides: list[str], key: str) -> None:
    assert refused(DENSE, SINGLE_PROCESS, *overrides) == [key]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["use_parallel=True", "parallel.parallel_mode=1"], "parallel.parallel_mode"),
        (
            ["use_parallel=True", "parallel.enable_parallel_optimizer=True",
             "parallel.parallel_optimizer_config.optimizer_level=level2"],
            "parallel.parallel_optimizer_config.optimizer_level",
        ),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_observed_are_refused(overrides: list[str], key: str) -> None:
    assert refused(DENSE, TWO, *overrides) == [key]


def test_a_model_that_is_not_a_decoder_is_refused() -> None:
    assert refused(NO_DECODER_TEXT, SINGLE_PROCESS) == ["model.arch.type"]


@pytest.mark.parametrize("pattern", ["", "*", "model.layers.1.self_attn*", "*.o_proj.input", "model.norm.weight"])
def test_patterns_of_full_that_match(pattern: str) -> None:
    check_pattern(pattern, parse_config("a.yaml", DENSE))


@pytest.mark.parametrize(("pattern", "fix"), [
    ("self_attn", "a pattern must match the whole name: write '*self_attn'"),
    ("model.layers.1.self_atn", "you probably mean 'model.layers.*.self_attn'; the modules are model.embed_tokens, "),
    ("model.layers.7.mlp", "you probably mean 'model.layers.*.mlp'; "),
    ("zzz", "model.layers.*.mlp.up_proj, with layers 0 to 1; parameters end in .weight"),
])  # fmt: skip
def test_a_pattern_of_full_that_matches_nothing_names_what_there_is(pattern: str, fix: str) -> None:
    with pytest.raises(UserError, match="flag --full: --full = .*: matches no tensor of this model") as error:
        check_pattern(pattern, parse_config("a.yaml", DENSE))
    assert fix in error.value.fix
