"""The resolved configuration as YAML: it loads again to an equal one."""

from __future__ import annotations

import pytest
from config_helpers import BASE, load
from test_config_places import SNIPPETS

from trainer.config import Override, config_notes, dump_config, parse_config, preflight

FULL = (
    BASE
    + """\
seed: 5
output_dir: "1e-4"
predict_data: ["on", "None", "0o17", "1_000", "a: b", "# c", "d\\ne", "~", "0x1f", "1e3", "é 😀", ""]
resume_training: step-00000100
moe_config: {use_gmm: True, aux_loss_types: [expert], aux_loss_factors: [0.1]}
optimizer: {type: FusedAdamW, betas: [0.9, 0.95], eps: 1e-12, learning_rate: 3e-4}
lr_schedule: {type: WarmUpStableDecayLR, decay_start_ratio: 0.8, warmup_ratio: 0.01}
runner_config: {sink_mode: True}
context: {jit_config: {jit_level: O0, more: [1, {a: b}]}}
parallel: {dataset_strategy: [[1, 1], [1, 1, 1, 1]]}
eval_dataset: {data_loader: {type: JsonlDataset, sources: [{path: b, weight: 2}], columns: {text: body}}}
train_dataset_task: {type: null}
"""
)

# The drop rate snippets describe a model of eight layers without having one, so that they contradict any complete file.
PARTS = [text for name, (text, _) in SNIPPETS.items() if "drop rate" not in name]


@pytest.mark.parametrize("text", [BASE, FULL, "seed: 1\n", *PARTS])
def test_a_dumped_configuration_loads_to_an_equal_one(text):
    config = load(text)
    again = parse_config("dumped.yaml", dump_config(config))
    assert again == config
    assert dump_config(again) == dump_config(config)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("Gemma2ForCausalLM", "attn_logit_softcapping: null, sliding_window: 8"),
        ("SmolLM3ForCausalLM", "nope_layer_interval: null"),
        ("GptOssForCausalLM", "moe_config: {expert_num: 4, swiglu_limit: null}"),
        ("Glm4MoeForCausalLM", "moe_config: {expert_num: 4, aux_loss_factor: null}"),
    ],
)
def test_a_null_instead_of_the_value_of_a_family_is_in_the_dump(kind: str, keys: str):
    config = load(f"model: {{arch: {{type: {kind}}}, model_config: {{num_layers: 2, {keys}}}}}\n")
    assert parse_config("dumped.yaml", dump_config(config)) == config


def test_overrides_are_in_the_dump():
    config = load(BASE, "runner_config.epochs=7", "model_config.rope_scaling.rope_type=yarn")
    again = parse_config("dumped.yaml", dump_config(config))
    assert again.runner_config.epochs == 7
    assert again.decoder.rope_scaling.rope_type == "yarn"


def test_the_dump_holds_what_acts_and_not_what_is_ignored():
    text = dump_config(load(BASE))
    assert "gradient_accumulation_steps: 1\n" in text
    for key in ("sink_mode", "swap", "null"):
        assert key not in text
    assert "sink_mode: true" in dump_config(load(BASE, "runner_config.sink_mode=True"))


def test_a_dump_of_a_resumed_run_says_nothing_new_in_another_run_mode():
    dumped = dump_config(load(BASE, "resume_training=True", "run_mode=eval"))
    assert config_notes(parse_config("config.yaml", dumped)) == []
    given = [Override("resume_training", "True", "flag --resume_training")]
    assert "resume_training true: not used" in "".join(config_notes(parse_config("config.yaml", dumped, given)))


def test_a_dump_runs_as_it_is_and_says_nothing_new():
    again = parse_config("dumped.yaml", dump_config(load(BASE)))
    preflight(again)
    assert config_notes(again) == []


def test_configurations_of_different_origin_are_equal_and_different_values_are_not():
    assert load("seed: 1\n") == load("# a comment\n\nseed: 1\n")
    assert load("seed: 1\n") != load("seed: 2\n")
