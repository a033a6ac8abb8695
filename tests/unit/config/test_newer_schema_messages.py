"""What a mistake in a file of the newer schema is answered: one problem, in the words of that schema."""

from __future__ import annotations

import pytest
from config_helpers import BASE, failure
from test_newer_schema import SMALL

from trainer.config import parse_config
from trainer.config.checks.problem import ConfigError
from trainer.parallel.world import SINGLE_PROCESS
from trainer.run.plan_file import plan_file

ADDED = SMALL.count("\n") + 1
"""The line of a key behind the small file."""


def answer(text: str) -> str:
    """Returns the whole message of `plan` about a file with mistakes."""

    def plan() -> None:
        """Plans the file without its data."""
        problems: list[ConfigError] = []
        config = parse_config("a.yaml", text, (), problems)
        plan_file(config, SINGLE_PROCESS, problems, opens_data=False)

    return failure(plan)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            "lora_config: {target_modules: [linear_qkv, linear_proj]}",
            "lora_config.target_modules = ['linear_qkv', 'linear_proj']: must be a string.\n"
            "  Fix: write 'linear_qkv|linear_proj', one regular expression.",
        ),
        (
            "lora_config: {target_modules: .*q_proj}",
            "lora_config.target_modules = '.*q_proj': matches none of the model's matrices.\n"
            "  Fix: write linear_qkv; their names end in linear_qkv, linear_proj, linear_fc1 or linear_fc2.",
        ),
        (
            "load_checkpoint: output",
            "load_checkpoint: unknown key at the top level.\n  Fix: this schema has checkpoint.load_path for it.",
        ),
        (
            "run_mode: finetune",
            "run_mode = 'finetune': a file of 2.0 always trains, from checkpoint.load_path if that names weights; other"
            " runs need the flag --run_mode.\n  Fix: leave it out.",
        ),
        (
            "optimizer: {type: AdamW, weight_decay: -1}",
            "optimizer.weight_decay = -1: must be at least 0.\n"
            "  Fix: write 0 or more; weight_decay: Decoupled weight decay, on matrices only if no rule says otherwise."
            " Default 0.01.",
        ),
        (
            "checkpoint: {save_interleaved_steps: -3}",
            "checkpoint.save_interleaved_steps = -3: must be at least 0.\n"
            "  Fix: write 0 or more; save_interleaved_steps: Optimizer steps between checkpoints; 0: only at the end."
            " Default 1000.",
        ),
        (
            "optimizer: {adamw_betas: [0.9, 0.9]}",
            "optimizer.adamw_betas = [0.9, 0.9]: only Muon has it.\n  Fix: write betas.",
        ),
        (
            "  rope_scaling.factor: 4",
            "model.rope_scaling.factor: unknown key in model.\n"
            "  Fix: write its section, and the rest of its name below.",
        ),
        (
            "optimizer: {type.x: 4}",
            "optimizer.type.x: unknown key in optimizer.\n  Fix: you probably mean optimizer.type.",
        ),
        (
            "optimizer: AdamW",
            "optimizer = 'AdamW': must be a section.\n  Fix: write optimizer: and its keys indented below.",
        ),
        (
            "callbacks: {type: MFLossMonitor}",
            "callbacks = {'type': 'MFLossMonitor'}: must be a list.\n"
            "  Fix: write a list, each item of which starts with '- '.",
        ),
    ],
)
def test_a_mistake_is_one_problem_in_the_words_of_the_file(keys: str, told: str):
    assert answer(f"{SMALL}{keys}\n") == f"a.yaml:{ADDED}: {told}"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "null: must be an integer.\n  Fix: write an integer, or leave it out: the default is 1."),
        (" '8'", "'8': must be an integer.\n  Fix: write 8 without quotes."),
        (" 8.0", "8.0: must be an integer.\n  Fix: write 8."),
        (" 7", "7: must be a multiple of local_batch_size x data_parallel = 2 x 1.\n  Fix: "),
    ],
)
def test_a_wrong_size_of_a_batch_is_one_problem(value: str, told: str):
    message = answer(SMALL.replace("global_batch_size: 8", f"global_batch_size:{value}"))
    assert message.startswith(f"a.yaml:2: training.global_batch_size = {told}"), message


@pytest.mark.parametrize("key", ["calculate_per_token_loss", "micro_batch_num", "vocab_emb_dp", "seed"])
def test_a_key_of_another_section_is_looked_for_in_this_schema_alone(key: str):
    message = answer(f"{SMALL}  {key}: 2\n")
    assert message.startswith(f"a.yaml:{ADDED}: model.{key}: unknown key in model.\n"), message
    assert not any(older in message for older in ("runner_wrapper", "parallel_config", "callbacks.N", "at the top"))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("dataloader:", "data_loader:", "a.yaml:5: train_dataset.data_loader: unknown key in train_dataset."),
        (" {type: TextDataset, dataset_dir: stdlib}", "", "a.yaml:5: train_dataset.dataloader = null: must"),
        ("CPU}", "Ascend}\nlora_config: {target_modules: x}", "a.yaml:2: lora_config.target_modules = 'x'"),
    ],
)
def test_what_follows_from_a_mistake_is_no_problem_of_its_own(old: str, new: str, told: str):
    assert answer(SMALL.replace(old, new)).startswith(told)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("recompute_config: {recompute: 9}", "recompute_config.recompute = 9: an integer counts layers from the first"),
        ("moe_config: {expert_num: 4, moe_layer_freq: [1]}", "moe_config.moe_layer_freq = [1]: a list needs"),
        ("model_config: {layer_types: [full_attention]}", "model_config.layer_types = '...': must have one entry for"),
        ("freeze: {layers: 0-9}", "freeze.layers = '0-9': there is no layer 9"),
    ],
)
def test_a_plan_of_another_machine_computes_nothing_from_a_mistake_about_layers(keys: str, told: str):
    assert told in answer(f"{BASE}context: {{device_target: Ascend}}\n{keys}\n")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"{SMALL}runner_config: {{epochs: 2, batch_size: 3}}\nparallel_config: {{model_parallel: 2}}\n",
            f"a.yaml:{ADDED}: runner_config: the file mixes the schemas 1.x and 2.0; of 1.x it has runner_config (line"
            f" {ADDED}), parallel_config (line {ADDED + 1}).\n  Fix: remove these, or write them as in 2.0"
            " (training.local_batch_size for runner_config.batch_size, parallelism.tensor_parallel for"
            " parallel_config.model_parallel); `run_trainer.py convert FILE --to 2.0` translates a whole file of 1.x.",
        ),
        (
            BASE + "runner_config: {epochs: 2}\ntraining: {steps: 3}\n",
            "a.yaml:17: training: the file mixes the schemas 1.x and 2.0; of 2.0 it has training (line 17).\n"
            "  Fix: remove these, or write them as in 1.x (runner_config.max_steps for training.steps); without these"
            " `run_trainer.py convert FILE --to 2.0` writes the file in 2.0.",
        ),
    ],
)
def test_a_file_that_mixes_both_schemas_is_one_problem(text: str, told: str):
    assert answer(text) == told
