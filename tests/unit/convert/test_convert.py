"""Files converted between both schemas: the plans are equal, or the keys that cannot be said are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_helpers import failure

from trainer.config import parse_config
from trainer.config.read.dump import plain_values
from trainer.convert.convert import NEWER, OLDER, Conversion, convert
from trainer.convert.facts import compare_plans
from trainer.convert.newer import different_keys
from trainer.parallel.world import SINGLE_PROCESS
from trainer.run.plan_file import plan_file, world_from_degrees

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
OLD = """\
context: {device_target: CPU}
model:
  arch: {type: Qwen3ForCausalLM}
  model_config:
    num_layers: 4
    hidden_size: 64
    num_heads: 4
    n_kv_heads: 2
    head_dim: 16
    intermediate_size: 96
    vocab_size: 300
    seq_length: 32
train_dataset:
  data_loader: {type: TextDataset, dataset_dir: stdlib}
runner_config: {batch_size: 2, max_steps: 50}
lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 1.e-3, warmup_steps: 5}
"""
MOE = OLD.replace("Qwen3F", "Qwen3MoeF").replace(
    "    seq_length: 32\n",
    "    seq_length: 32\n    moe_config: {expert_num: 4, num_experts_chosen: 2, moe_intermediate_size: 32, "
    "aux_loss_factor: 0.01, capacity_factor: 1.5, norm_topk_prob: True}\n",
)
LATENT = MOE.replace("Qwen3MoeF", "DeepseekV3F").replace("head_dim: 16", "first_k_dense_replace: 1").replace(
    "    n_kv_heads: 2\n",
    "    q_lora_rank: 16\n    kv_lora_rank: 16\n    qk_nope_head_dim: 8\n    qk_rope_head_dim: 8\n    v_head_dim: 8\n",
).replace("capacity_factor: 1.5", "n_group: 2, topk_group: 1, shared_expert_num: 1")
NEW = """\
context: {device_target: CPU}
training: {steps: 40, local_batch_size: 2, global_batch_size: 8}
lr_scheduler: {type: ConstantWarmUpLR, warmup_steps: 4}
train_dataset:
  dataloader: {type: TextDataset, dataset_dir: stdlib}
model:
  architectures: Qwen3ForCausalLM
  vocab_size: 300
  seq_length: 32
  head_dim: 16
  hidden_size: 64
  intermediate_size: 96
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
"""


def of_model(text: str, line: str) -> str:
    """Adds a line to the section of the model of an older file."""
    return text.replace("    vocab_size", f"    {line}\n    vocab_size")


def converted(text: str, schema: str, is_lossy: bool = False) -> Conversion:
    return convert("a.yaml", text, schema, is_lossy=is_lossy)


OLD_FILES = {
    "defaults": OLD,
    "experts": MOE,
    "latent": LATENT,
    "epochs": OLD.replace("max_steps: 50", "epochs: 2").replace("stdlib", "stdlib, num_samples: 40"),
    "stop": OLD.replace("s: 50", "s: 50, stop_step: 20").replace("steps: 5}", "steps: 5, total_steps: 20}"),
    "clip": OLD + "runner_wrapper: {use_clip_grad: True, max_grad_norm: 0.5}\n",
    "accumulation": OLD.replace("batch_size: 2", "batch_size: 2, gradient_accumulation_steps: 4"),
    "adamw": OLD + "optimizer: {type: AdamW, betas: [0.8, 0.9], eps: 1.e-6, weight_decay: 0.1}\n",
    "muon": OLD + "optimizer: {type: Muon, betas: [0.9, 0.99], eps: 1.e-7, momentum: 0.9, ns_steps: 6}\n",
    "recompute": OLD + "recompute_config: {recompute: 3}\n",
    "select": OLD + "recompute_config: {recompute: [0], select_recompute: {attention: [2-3]}}\n",
    "saving": OLD + "callbacks: [{type: CheckpointMonitor, save_checkpoint_steps: 7, keep_checkpoint_max: 2,"
    " async_save: True}]\noutput_dir: out/a\nseed: 3\n",
    "lora": of_model(OLD, "pet_config: {lora_rank: 4, lora_a_std: 0.02, target_modules: '.*wq|.*wk|.*wv|.*wo'}"),
    "lora_layers": of_model(OLD, "pet_config: {lora_a_std: 0.02, target_modules: '.*layers.[12].*o_proj|.*down_proj'}"),
    "tensor": OLD
    + "use_parallel: True\nparallel_config: {model_parallel: 2, data_parallel: 2, use_seq_parallel: True}\n",
    "zero": OLD + "use_parallel: True\nparallel_config: {data_parallel: 2}\n"
    "parallel: {enable_parallel_optimizer: True, parallel_optimizer_config: {optimizer_level: level2}}\n",
    "context": OLD + "use_parallel: True\n"
    "parallel_config: {context_parallel: 2, context_parallel_algo: ulysses_cp, data_parallel: 1}\n",
    "stages": of_model(OLD, "offset: [1, -1]")
    + "use_parallel: True\nparallel_config: {pipeline_stage: 2, micro_batch_num: 4, data_parallel: 1}\n",
    "expert_parallel": MOE.replace("capacity_factor: 1.5, ", "")
    + "use_parallel: True\nparallel_config: {data_parallel: 2, expert_parallel: 2}\n",
    "semi_auto": OLD.replace("CPU", "Ascend") + "use_parallel: True\nparallel: {parallel_mode: 1}\n"
    "parallel_config: {data_parallel: 2, model_parallel: 2, use_seq_parallel: True, micro_batch_num: 2}\n",
    "columns": OLD.replace("CPU", "Ascend").replace(
        "type: TextDataset, dataset_dir: stdlib}", "type: MindDataset, dataset_dir: /not/here}\n"
        "  input_columns: [input_ids, target_ids]\n  construct_args_key: [input_ids, labels]"
    ),
    "rampup": OLD.replace("max_steps", "global_batch_size: 8, rampup_batch_size: [2, 2, 16], max_steps"),
    "tensorboard": OLD
    + "tensorboard: {tensorboard_dir: events, log_interval: 3}\nprofile: True\nprofile_stop_step: 4\n",
}  # fmt: skip
NEW_FILES = {
    "defaults": NEW,
    "muon": NEW + "optimizer: {type: Muon, adamw_betas: [0.9, 0.99], adamw_eps: 1.e-7, eps: 1.e-6}\n",
    "recompute": NEW + "recompute: {mode: select, select_module: {'layers.*.mlp.*': [0-2]}}\n",
    "lora": NEW + "lora_config: {target_modules: 'layers.[01].*linear_(qkv|proj)', lora_rank: 4}\n",
    "saving": NEW + "checkpoint: {enable_save: False, save_path: out/b, load_path: some/folder}\n",
    "degrees": NEW + "parallelism: {tensor_parallel: 2, sequence_parallel: True, pipeline_parallel: 2,"
    " pipeline_parallel_layers_per_stage: [0-2, 3-3]}\n",
    "interleaved": NEW + "parallelism: {pipeline_parallel: 2, pipeline_parallel_interleave_num: 2}\n",
    "context": NEW + "parallelism: {context_parallel: 4, context_parallel_method: hybrid, ulysses_degree_in_cp: 2}\n",
    "shards": NEW + "parallelism: {tensor_parallel: 2, sequence_parallel: True, data_parallel_shard_strategy: optim}\n",
    "monitor": NEW + "monitor: {train_state: {local_norm: True}, tensorboard: {output_dir: tb}}\n",
    "unclipped": NEW.replace("steps: 40", "steps: 40, max_norm: 1.e+30, seed: 5, deterministic: True"),
}  # fmt: skip


def assert_equal(conversion: Conversion) -> None:
    """Checks that nothing differs, and that the text is read as what was compared."""
    assert [one.line for one in conversion.comparisons if not one.is_equal] == []
    assert len(conversion.comparisons) == 10 and not conversion.changes
    assert parse_config("again.yaml", conversion.text) == conversion.after


@pytest.mark.parametrize("name", OLD_FILES)
def test_an_older_file_becomes_a_newer_one_and_an_older_one_again(name: str):
    newer = converted(OLD_FILES[name], NEWER)
    assert_equal(newer)
    older = converted(newer.text, OLDER)
    assert_equal(older)
    assert_equal(converted(older.text, NEWER))


@pytest.mark.parametrize("name", NEW_FILES)
def test_a_newer_file_becomes_an_older_one_and_a_newer_one_again(name: str):
    older = converted(NEW_FILES[name], OLDER)
    assert_equal(older)
    again = converted(older.text, NEWER)
    assert_equal(again)
    differing = {key for key in different_keys(older.before, again.after) if key.partition(".")[0] not in _NOTATION}
    assert differing <= {"model.model_config.pet_config.target_modules", "model.model_config.offset"}, again.text


_NOTATION = ("recompute_config", "use_parallel", "callbacks", "parallel_config")
"""Sections that can say the same in several ways, which the facts compare."""


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_each_shipped_file_is_converted_or_refused_with_its_keys(file: Path):
    text = file.read_text(encoding="utf-8").replace("pretrained_model_dir", "#")
    if file.stem.startswith("bench"):
        newer = convert(str(file), text, NEWER)
        assert_equal(newer)
        assert_equal(converted(newer.text, OLDER))
        return
    message = failure(lambda: convert(str(file), text, NEWER))
    assert f"{file}:" in message and "Fix:" in message
    keys = ("held_out", "do_eval", "scale_sense", "model.arch.type", "load_checkpoint")
    assert any(key in message for key in keys), message


@pytest.mark.parametrize("file", sorted((CONFIGS / "pynative").glob("*.yaml")), ids=lambda file: file.stem)
def test_each_shipped_file_of_the_newer_schema_is_converted_and_back(file: Path):
    older = convert(str(file), file.read_text(encoding="utf-8"), OLDER)
    assert_equal(older)
    assert_equal(converted(older.text, NEWER))


@pytest.mark.parametrize(
    ("text", "key", "shown"),
    [
        (OLD + "runner_wrapper: {scale_sense: 1024.0}\n", "runner_wrapper.scale_sense = 1024.0", "would be 1.0"),
        (OLD + "runner_wrapper: {use_clip_grad: True, clip_type: value}\n", "wrapper.clip_type = 'value'", "'norm'"),
        (OLD + "do_eval: True\neval_dataset: {data_loader: {dataset_dir: stdlib}}\n", "do_eval = true", "be false"),
        (OLD + "freeze: {include: ['*embed*']}\n", "freeze.include", "would be"),
        (OLD.replace("steps: 5}", "steps: 5, total_steps: 99}"), "lr_schedule.total_steps = 99", "(learning rate)"),
        (OLD.replace("max_steps: 50", "max_steps: 50, stop_step: 9"), "runner_config.stop_step = 9", "would be 50"),
        (OLD.replace("stdlib}", "stdlib}\n  packing: whole"), "train_dataset.packing = 'whole'", "would be null"),
        (of_model(OLD, "pet_config: {lora_a_std: 0.1, target_modules: '.*q_proj'}"),
         "pet_config.target_modules = '.*q_proj'", "12 matrices"),
        (of_model(OLD, "pet_config: {target_modules: '.*o_proj'}"),
         "lora_a_std = null", "would be 0.01"),
        (OLD + "parallel: {pipeline_config: {pipeline_scheduler: seqpipe}}\nuse_parallel: True\n"
         "parallel_config: {data_parallel: 2}\n", "pipeline_scheduler = 'seqpipe'", "refuses it: must be 1f1b"),
        (OLD + "run_mode: predict\n", "run_mode = 'predict'", "trainings alone"),
        (OLD.replace("max_steps: 50", "epochs: 2").replace("CPU", "Ascend").replace("stdlib", "/not/here"),
         "runner_config.epochs = 2", "--steps"),
    ],
)  # fmt: skip
def test_what_the_newer_schema_cannot_say_is_an_error_with_its_line(text: str, key: str, shown: str):
    message = failure(lambda: converted(text, NEWER))
    assert "a.yaml" in message and key in message and shown in message, message


def test_a_lossy_conversion_lists_what_it_changes():
    text = OLD + "runner_wrapper: {scale_sense: 1024.0}\nignore_data_skip: True\n"
    conversion = converted(text, NEWER, is_lossy=True)
    assert {change.key for change in conversion.changes} == {"runner_wrapper.scale_sense", "ignore_data_skip"}
    assert "Changed: runner_wrapper.scale_sense 1024.0 becomes 1.0" in conversion.text
    assert conversion.comparisons[-1].line.startswith("other keys      DIFFERS")
    assert conversion.after.runner_wrapper.scale_sense == 1.0


def test_a_file_says_where_it_comes_from_and_what_its_keys_mean():
    text = OLD_FILES["epochs"] + "output_dir: out/a\ntensorboard: {tensorboard_dir: tb}\n"
    conversion = converted(text, NEWER)
    head = " ".join(line.lstrip("# ") for line in conversion.text.splitlines() if line.startswith("#"))
    assert head.startswith("a.yaml in the schema of MindSpore Transformers 2.0")
    assert "training.steps 40: runner_config.epochs 2" in head
    assert "training.global_batch_size 2: batch_size 2 x 1" in head
    assert "optimizer.betas" in head.partition("their defaults differ:")[2]
    assert "checkpoint.save_path: the folder" in head
    assert "betas: [0.9, 0.999]" in conversion.text and "max_norm: 1.0e+30" in conversion.text
    assert "log_timers_to_tensorboard false becomes true" in "\n".join(conversion.notes)
    assert "# training.steps 20: runner_config.stop_step" in converted(OLD_FILES["stop"], NEWER).text
    assert "# The translation of a.yaml" in converted(NEW, OLDER).text


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weights", "hidden_size: 32"),
        ("batch", "batch_size: 4"),
        ("steps", "max_steps: 60"),
        ("learning rate", "warmup_steps: 6"),
        ("recomputation", "recompute: 1"),
        ("checkpoints", "save_checkpoint_steps: 8"),
        ("checkpoints", "async_save: true"),
        ("optimizer", "eps: 1.e-7"),
        ("adapters", "lora_rank: 4"),
        ("adapters", "lora_alpha: 4"),
        ("layout", "model_parallel: 2"),
    ],
)
def test_each_fact_notices_a_difference(name: str, change: str):
    text = of_model(OLD, "pet_config: {lora_rank: 8, lora_alpha: 8}") + (
        "recompute_config: {recompute: 2}\noptimizer: {type: AdamW, eps: 1.e-8}\nuse_parallel: True\n"
        "callbacks: [{type: CheckpointMonitor, save_checkpoint_steps: 9, async_save: false}]\n"
        "parallel_config: {model_parallel: 1, data_parallel: 2}\n"
    )
    key, _, value = change.partition(": ")
    changed = re.sub(rf"\b{key}: [^,}}\n]+", f"{key}: {value}", text, count=1)
    plans = []
    for written in (text, changed):
        config = parse_config("a.yaml", written)
        world = world_from_degrees(config, SINGLE_PROCESS)
        plans.append(plan_file(config, world, [], opens_data=False, checks_memory=False))
    differing = [comparison for comparison in compare_plans(*plans, 50) if not comparison.is_equal]
    assert name in [comparison.name for comparison in differing]
    assert all("DIFFERS" in each.line and each.before != each.after for each in differing)


def test_a_file_in_the_schema_already_has_nothing_to_convert():
    for text, schema, other in ((OLD, OLDER, NEWER), (NEW, NEWER, OLDER)):
        message = failure(lambda text=text, schema=schema: converted(text, schema))
        assert f"has the {schema} schema already" in message and f"--to {other}" in message


def test_steps_stand_for_data_that_is_not_here():
    text = OLD.replace("max_steps: 50", "epochs: 2").replace("CPU", "Ascend").replace("stdlib", "/not/here")
    conversion = convert("a.yaml", text, NEWER, steps=77)
    assert_equal(conversion)
    assert conversion.after.runner_config.max_steps == 77
    assert plain_values(conversion.after)["context"]["device_target"] == "Ascend"
