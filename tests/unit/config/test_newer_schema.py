"""Files of MindSpore Transformers' newer schema (`--mode 1`): translated with their lines, names and defaults."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_helpers import error_of, failure, load, notes
from fork_server import FORKED, ensure_server

from trainer.config import Override, dump_config, parse_config
from trainer.config.checks.parallel import resolve_for_job
from trainer.config.checks.qk_clip import logit_interval
from trainer.config.pynative.table import ROWS
from trainer.config.read.nodes import plain
from trainer.config.read.rows import reverse
from trainer.config.read.yaml_reader import parse_document
from trainer.config.recompute import recomputed_parts
from trainer.config.schema.callbacks import CheckpointMonitor
from trainer.convert.convert import older_text
from trainer.errors import UserError
from trainer.models.spec.adapters import layer_targets
from trainer.parallel.world import SINGLE_PROCESS, world_of
from trainer.run.plan_file import plan_file, world_from_degrees

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = """\
model:
  model_type: qwen3
  architectures: Qwen3ForCausalLM
  vocab_size: 300
  seq_length: 32
  hidden_size: 64
  intermediate_size: 96
  num_hidden_layers: 4
  num_attention_heads: 4
  num_key_value_heads: 2
  rms_norm_eps: 1.e-5
  compute_dtype: "float32"
  params_dtype: "float32"
"""
SMALL = f"""\
context: {{device_target: CPU}}
training: {{steps: 6, local_batch_size: 2, global_batch_size: 8}}
lr_scheduler: {{type: ConstantWarmUpLR, warmup_steps: 0}}
train_dataset:
  dataloader: {{type: TextDataset, dataset_dir: stdlib}}
{MODEL}"""
FULL = f"""\
checkpoint:
  enable_save: True
  save_path: "out/run"
  save_max: 2
  save_interleaved_steps: 50
  no_save_optim: True
  async_save: True
  prefix: null
  load_path: ""
training:
  steps: 100
  local_batch_size: 2
  global_batch_size: 32
  max_norm: 0.5
  seed: 7
  deterministic: True
parallelism:
  data_parallel_shard: 2
  data_parallel_shard_strategy: "optim_grads_params"
  tensor_parallel: 2
  context_parallel: 1
  pipeline_parallel: 2
  pipeline_parallel_schedule: "1f1b"
  pipeline_parallel_interleave_num: 1
  pipeline_parallel_layers_per_stage: null
  sequence_parallel: True
  expert_parallel: 1
  moe_token_dispatcher_type: alltoall
optimizer:
  type: AdamW
  betas: [0.9, 0.98]
  eps: 1.e-7
  weight_decay: 0.1
lr_scheduler:
  type: CosineWithWarmUpLR
  learning_rate: 1.e-4
  warmup_ratio: 0.1
  total_steps: 5
recompute:
  mode: full
  full_recompute_layer: [0-1, 3]
recompute_comm: {{enable: False}}
swap: {{enable: False, default_prefetch: 2}}
train_dataset:
  dataloader:
    type: MindDataset
    dataset_files: "/data/on/another/machine"
    column_names: ["input_ids", "labels", "loss_mask", "position_ids"]
    shuffle: true
  drop_remainder: True
  num_parallel_workers: 4
  numa_enable: True
monitor:
  health_checkpoint: {{global_norm_skip_time: 3}}
  train_state: {{local_norm: True, device_loss: True}}
  tensorboard: {{output_dir: "tb", log_interval: 5}}
callbacks:
  - {{type: MaxLogitsMonitor, step_interval: 4}}
context: {{mode: 1, device_target: "Ascend", max_device_memory: "58GB"}}
profiler: {{enable_profiling: True, start_step: 7, end_step: 8, profiler_rank: [1], profile_cpu: False}}
{MODEL}"""


def test_every_section_becomes_ours():
    config = load(FULL)
    runner, wrapper, parallel = config.runner_config, config.runner_wrapper, config.parallel_config
    assert (runner.max_steps, runner.batch_size, runner.global_batch_size, config.seed) == (100, 2, 32, 7)
    assert (wrapper.use_clip_grad, wrapper.max_grad_norm, wrapper.local_norm) == (True, 0.5, True)
    assert (parallel.model_parallel, parallel.pipeline_stage, parallel.data_parallel) == (2, 2, None)
    assert (config.use_parallel, config.parallel.parallel_mode) == (True, 0) and parallel.use_seq_parallel
    assert config.parallel.enable_parallel_optimizer and config.output_dir == "out/run"
    assert (config.optimizer.betas, config.optimizer.eps, config.optimizer.weight_decay) == ([0.9, 0.98], 1e-7, 0.1)
    schedule = config.lr_schedule
    assert (schedule.type, schedule.warmup_ratio, schedule.total_steps) == ("CosineWithWarmUpLR", 0.1, -1)
    assert [one.type for one in config.callbacks] == ["MaxLogitsMonitor", "MFLossMonitor", "CheckpointMonitor"]
    assert (config.callbacks[0].step_interval, logit_interval(config)) == (4, 4)
    lists = ("[]", "[{type: MaxLogitsReset}]", "[{type: MaxLogitsMonitor, step_interval: 3}, {type: MaxLogitsReset}]")
    assert [logit_interval(load(f"{SMALL}callbacks: {one}\n")) for one in lists] == [0, 1, 3]
    assert config.checkpoint_monitor.async_save
    window = config.profile_monitor
    assert (window.start_step, window.stop_step, window.profile_rank_ids, window.with_stack) == (7, 8, [1], True)
    tensorboard = config.tensorboard
    assert (tensorboard.tensorboard_dir, tensorboard.log_interval) == ("tb", 5)
    assert tensorboard.tensorboard_queue_size == 1000
    assert tensorboard.log_timers_to_tensorboard and tensorboard.log_loss_scale_to_tensorboard
    assert (config.checkpoint_monitor.save_checkpoint_steps, config.checkpoint_monitor.keep_checkpoint_max) == (50, 2)
    data = config.train_dataset
    assert data.input_columns == ["input_ids", "labels", "loss_mask", "position_ids"] and data.data_loader.shuffle
    ahead = SMALL.replace("train_dataset:", "train_dataset:\n  prefetch_size: 3")
    assert [load(text).train_dataset.prefetch_size for text in (ahead, SMALL)] == [3, 2]
    assert (config.decoder.num_layers, config.model.arch.type) == (4, "Qwen3ForCausalLM") and config.decoder.use_qk_norm
    assert recomputed_parts(config) == ("block", "block", "", "block")
    assert (config.context.deterministic, config.context.max_device_memory, config.context.mode) == ("ON", "58GB", 0)


def test_what_is_left_out_has_the_defaults_of_that_schema():
    config = load(SMALL)
    assert (config.seed, config.optimizer.type, config.optimizer.betas) == (42, "AdamW", [0.9, 0.95])
    assert (config.optimizer.weight_decay, config.lr_schedule.learning_rate) == (0.01, 1e-5)
    assert (config.runner_wrapper.use_clip_grad, config.runner_wrapper.max_grad_norm) == (True, 1.0)
    assert not config.train_dataset.data_loader.shuffle and config.use_parallel is None
    assert config.checkpoint_monitor == CheckpointMonitor(type="CheckpointMonitor", save_checkpoint_steps=1000)
    profiled = load(SMALL + "profiler: {enable_profiling: False, start_step: 7}\noptimizer: {type: null}\n")
    assert (profiled.profile_start_step, profiled.optimizer) == (1, config.optimizer)
    off = load(SMALL.replace("steps: 6", "max_norm: 1.e+30, steps: 6") + "checkpoint: {enable_save: False}\n")
    assert not off.runner_wrapper.use_clip_grad and off.checkpoint_monitor.save_checkpoint_steps == 0
    context = load(SMALL.replace("context: {device_target: CPU}", "context: {mode: 1}")).context
    assert (context.device_target, context.max_device_memory) == ("Ascend", "59GB")
    mindrecord = SMALL.replace("type: TextDataset, dataset_dir: stdlib", "type: MindDataset, dataset_files: x")
    assert load(mindrecord).train_dataset.input_columns == ["input_ids", "labels"]


def test_weights_are_loaded_or_a_run_is_resumed():
    resumed = load(f"checkpoint: {{load_path: some/folder}}\n{SMALL}")
    assert (resumed.load_checkpoint, resumed.resume_training) == ("some/folder", True)
    told = notes(f"checkpoint: {{load_path: some/folder}}\n{SMALL}")
    assert "checkpoint.no_load_optim false: continues" in told and "the other value starts over" in told
    weights = load(f"checkpoint: {{load_path: some/folder, no_load_optim: True}}\n{SMALL}")
    assert (weights.load_checkpoint, weights.resume_training) == ("some/folder", False)


def test_adapters_are_those_of_the_modules_that_the_expression_finds():
    def adapted(text: str) -> dict[int, list[str]]:
        decoder = load(SMALL + f"lora_config: {{{text}}}\n").decoder
        layers = {layer: layer_targets(decoder, layer) for layer in range(decoder.num_layers)}
        return {layer: [name.split(".")[-1] for name in names] for layer, names in layers.items() if names}

    qkv = ["q_proj", "k_proj", "v_proj"]
    some = "target_modules: 'layers.[0-1].*linear_qkv|layers.3.*linear_fc2', lora_rank: 4, lora_alpha: 8"
    assert adapted(some) == {0: qkv, 1: qkv, 3: ["down_proj"]}
    assert adapted("target_modules: 'linear_(qkv|proj)', exclude_layers: 'layers.[0-2]|proj'") == {3: qkv}
    pet = load(SMALL + f"lora_config: {{{some}}}\n").decoder.pet_config
    assert (pet.lora_rank, pet.lora_alpha, pet.lora_a_std, pet.lora_b_std, pet.match) == (4, 8, 0.01, 0, "search")
    pet = load(SMALL + "lora_config: {target_modules: fc2, lora_a_std: 0.5, lora_b_std: 0.25}\n").decoder.pet_config
    assert (pet.lora_a_std, pet.lora_b_std) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        ("{}", ["lora_config.target_modules: this key is required"]),
        ("{target_modules: ''}", ["lora_config.target_modules = '': this key is required"]),
        ("{lora_rank: 4}", ["lora_config.target_modules: this key is required"]),
        ("{target_modules: '('}", ["lora_config.target_modules = '(': it is not a regular"]),
        ("{target_modules: x}", ["lora_config.target_modules = 'x': matches none", "linear_qkv, linear_proj"]),
        ("{target_modules: layers.4}", ["'layers.4': matches only layers that the model does not have", "are 0 to 3"]),
        ("{target_modules: qkv, exclude_layers: decoder}", ["lora_config.exclude_layers = 'decoder': excludes every"]),
        ("{target_modules: layer}", ["'layer': matches output_layer", "Fix: write exclude_layers: 'output_layer'"]),
        ("{target_modules: qkv, lora_b_std: -1}", ["lora_config.lora_b_std = -1: must be at least 0"]),
    ],
)
def test_a_mistake_in_the_section_of_adapters_is_told_with_its_line(lora: str, parts: list[str]):
    message = error_of(f"{SMALL}lora_config: {lora}\n")
    for part in [f"a.yaml:{SMALL.count(chr(10)) + 1}: ", "Fix: ", *parts]:
        assert part in message, message


def test_modules_that_can_have_no_adapter_are_refused_and_can_be_excluded():
    experts = "num_experts: 4\n  num_experts_per_tok: 2\n  n_shared_experts: 1\n  first_k_dense_replace: 1"
    text = f"{SMALL}  {experts}\n  mtp_depth: 1\nlora_config: {{target_modules: 'linear_fc1|eh_proj'"
    message = error_of(text + "}\n")
    assert "matches mlp.shared_experts.linear_fc1, eh_proj, which can have no adapter here" in message
    assert "Fix: write exclude_layers: 'shared_experts|eh_proj'" in message
    decoder = load(text + ", exclude_layers: 'shared_experts|eh_proj'}\n").decoder
    assert [layer_targets(decoder, layer) for layer in range(5)] == [("mlp.gate_proj", "mlp.up_proj"), (), (), (), ()]


def test_keys_of_muon_that_change_nothing_and_those_that_would():
    muon = "optimizer: {type: Muon, adamw_betas: [0.9, 0.95], adamw_include: ['*output_layer*']}\n"
    config = load(SMALL + muon)
    assert (config.optimizer.betas, config.optimizer.weight_decay) == ([0.9, 0.95], 0.01)
    assert config.optimizer.adamw_include == ["*output_layer*"]
    assert config.parallel.enable_parallel_optimizer
    message = error_of(SMALL + "optimizer: {type: Muon, ns_coefficients: [[[3, -4, 2], 0]]}\n")
    assert "optimizer.ns_coefficients = [[[3, -4, 2], 0]]: must be [a, b, c]" in message
    inert = "optimizer: {type: Muon, qk_clip_enabled: False, qk_clip_threshold: 100, comm_strategy: allgather}\n"
    assert load(SMALL + inert).optimizer.type == "Muon"
    assert "comm_strategy" in notes(SMALL + inert.replace("allgather", "allgather_deredundency"))


@pytest.mark.parametrize(
    ("keys", "kind", "note"),
    [
        ("", "Muon", "Muon: MindSpore Transformers has it only for multi-head latent"),
        ("  multi_latent_attention: True\n", "Muon", ""),
        ("  kv_lora_rank: 8\n", "muon", ""),
        ("", "SGD", "SGD: MindSpore Transformers' PynativeTrainer does not have it"),
        ("", "AdamW", ""),
    ],
)
def test_an_optimizer_that_its_trainer_refuses_is_a_note(keys: str, kind: str, note: str):
    text = SMALL.replace("  model_type: qwen3\n  architectures: Qwen3ForCausalLM\n", "")
    told = notes(f"{text}{keys}optimizer: {{type: {kind}}}\n")
    assert note in told and any(part in told for part in ("has it only for", "does not have it")) == bool(note)


def test_eps_and_betas_of_muon_are_those_of_newton_schulz_and_none():
    """Checks the keys against the arguments of mindformers/pynative/optimizer/muon.py, which swallows `betas`."""
    both = load(SMALL + "optimizer: {type: Muon, betas: [0.8, 0.9], eps: 1.e-9, adamw_eps: 1.e-6}\n").optimizer
    assert (both.ns_eps, both.eps, both.betas) == (1e-9, 1e-6, [0.95, 0.95])
    defaults = load(SMALL + "optimizer: {type: Muon}\n").optimizer
    assert (defaults.ns_eps, defaults.eps, defaults.betas) == (1e-8, 1e-8, [0.95, 0.95])
    written = SMALL + "optimizer: {type: Muon, betas: [0.8, 0.9], adamw_betas: [0.7, 0.6], eps: -1.0}\n"
    assert "a.yaml:19: optimizer.eps = -1.0: must be greater than 0" in error_of(written)
    assert "betas of Muon (a.yaml:19): no effect" in notes(written.replace("-1.0", "1.e-8"))


def test_a_flag_for_the_optimizer_is_as_if_the_file_had_it():
    written = "optimizer: {type: Muon, betas: [0.8, 0.9], eps: 1.e-9}\n"
    for file, other in ((SMALL, "optimizer: {type: Muon}\n"), (SMALL + written.replace("type: Muon, ", ""), written)):
        for name in ("Muon", "muon"):
            assert load(file, f"optimizer.type={name}").optimizer == load(SMALL + other).optimizer
    betas = load(SMALL, "optimizer.type=Muon", "optimizer.adamw_betas=[0.7,0.6]").optimizer.betas
    assert betas == [0.7, 0.6]


def test_the_highest_rate_of_a_cosine_annealing_is_base_lr():
    text = SMALL.replace("ConstantWarmUpLR, warmup_steps: 0}", "CosineAnnealingLR, base_lr: 0.1, t_max: 9}")
    assert load(text).lr_schedule.base_lr == 0.1
    both = text.replace("t_max: 9", "t_max: 9, learning_rate: 3.0, total_steps: 4")
    assert load(both).lr_schedule.base_lr == 0.1
    assert "lr_scheduler.learning_rate (a.yaml:3): no effect beside base_lr" in notes(both)
    assert "lr_scheduler.total_steps (a.yaml:3): no effect" in notes(both)
    assert "grouped_lr_schedule (a.yaml:19): its trainer does not read it" in notes(
        f"{text}grouped_lr_schedule: {{default: 1}}\n"
    )


@pytest.mark.parametrize(
    ("written", "read"),
    [("True", True), ("[]", False), ("''", False), ("linear_qkv", ["linear_qkv"]), ("[qkv, '', mlp]", ["qkv", "mlp"])],
)
def test_local_norm_takes_parts_of_names(written: str, read: bool | list[str]):
    config = load(f"{SMALL}monitor: {{train_state: {{local_norm: {written}}}}}\n")
    assert config.runner_wrapper.local_norm == read


@pytest.mark.parametrize("device", ["CPU", "Ascend"])
def test_a_multi_token_module_is_the_layer_after_the_last(device: str):
    text = SMALL.replace("CPU", device) + "  mtp_num_layers: 1\nrecompute: {mode: full, full_recompute_layer: [1, 4]}\n"
    plan = plan_file(load(text), SINGLE_PROCESS, [])
    assert plan.model.recomputed == ("", "block", "", "", "block")
    assert "there is no layer 5" in error_of(text.replace("[1, 4]", "[1, 5]"))


def test_select_recomputation_names_modules():
    text = "recompute: {mode: select, select_module: {'layers.*.self_attention.*': [0-2], 'layers.*.mlp.*': [1]}}\n"
    assert recomputed_parts(load(SMALL + text)) == ("attention", "block", "attention", "")
    listed = "recompute: {mode: select, select_module: [self_attention.core_attention]}\n"
    assert recomputed_parts(load(SMALL + listed)) == ("attention",) * 4
    assert recomputed_parts(load(SMALL + "recompute: {mode: None, full_recompute_layer: [0]}\n")) == ("",) * 4


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("swap: {enable: True}\n", "swap.enable = true"),
        ("parallelism: {cpu_offload: True}\n", "parallelism.cpu_offload = true"),
    ],
)
def test_moving_data_to_the_host_is_an_error_on_an_ascend_and_a_note_on_a_cpu(text: str, key: str):
    name = key.partition(" ")[0]
    assert f"{name} (a.yaml:19): only Ascend devices have it" in notes(SMALL + text)
    config = load(SMALL.replace("CPU", "Ascend") + text)
    message = failure(lambda: plan_file(config, SINGLE_PROCESS, []))
    assert f"a.yaml:19: {key}: an Ascend does not yet move" in message and "a CPU ignores it" in message


def test_keys_without_a_counterpart_are_notes_with_their_lines():
    told = notes(FULL)
    assert "a.yaml: a file of MindSpore Transformers' newer schema" in told
    for key, line in (
        ("swap.default_prefetch", 43),
        ("train_dataset.num_parallel_workers", 51), ("monitor.train_state.device_loss", 55),
        ("monitor.health_checkpoint.global_norm_skip_time", 54), ("profiler.profile_cpu", 60),
    ):  # fmt: skip
        assert f"{key} (a.yaml:{line})" in told, key
    loader = SMALL.replace("dataset_dir: stdlib", "dataset_dir: stdlib, python_multiprocessing: True")
    assert "train_dataset.dataloader.python_multiprocessing (a.yaml:5): micro-batches are prepared" in notes(loader)
    assert "context.mode (a.yaml:1): the flag --mode says it" in notes(SMALL.replace("CPU", "CPU, mode: 0"))
    assert "checkpoint.enable_save false: a checkpoint is still saved" in notes(
        f"checkpoint: {{enable_save: False}}\n{SMALL}"
    )


@pytest.mark.parametrize(
    ("change", "into", "parts"),
    [
        ("  steps: 100", "  step: 100", ["a.yaml:11: training.step: unknown key", "training.steps"]),
        ("  steps: 100", "  steps: many", ["a.yaml:11: training.steps = 'many': must be an integer"]),
        ("  steps: 100", "  steps: 0", ["a.yaml:11: training.steps = 0: must be at least 1"]),
        ("max_norm: 0.5", "max_norm: 0", ["a.yaml:14: training.max_norm = 0: ", "by 0.", "Fix: write 1.0e+30, "]),
        ("max_norm: 0.5", "max_norm: -1.0", ["a.yaml:14: training.max_norm = -1.0: ", "reverse the gradients"]),
        ("tensor_parallel: 2", "tensor_paralel: 2", ["a.yaml:20: parallelism.tensor_paralel: unknown"]),
        ("profiler:", "profilr:", ["a.yaml:60: profilr: unknown key at the top level", "you probably mean profiler"]),
        ("hidden_size: 64", "hiden_size: 64", ["a.yaml:66: model.hiden_size: unknown key in model", "hidden_size"]),
        ("weight_decay: 0.1", "weight_decay: -1", ["a.yaml:33: optimizer.weight_decay = -1"]),
        ("learning_rate: 1.e-4", "learning_rat: 1", ["a.yaml:36: lr_scheduler.learning_rat: ", "in lr_scheduler"]),
        ("type: CosineWithWarmUpLR", "type: null", ["a.yaml:34: lr_scheduler.type: this key is required"]),
        ("num_attention_heads: 4", "num_attention_heads: 5", ["model.num_key_value_heads = 2: must divide num"]),
        ("shuffle: true", "shufle: true", ["a.yaml:49: train_dataset.dataloader.shufle: unknown key"]),
        ("seed: 7", "rampup_batch_size: [16, 4]", ["a.yaml:15: training.rampup_batch_size = [16, 4]: must be [start"]),
        ("mode: full\n", "mode: select\n  select_module: [0-3]\n", ["select_module = ['0-3']: a list must have names"]),
        ("mode: full", "mode: all", ["a.yaml:40: recompute.mode = 'all': must be None, full"]),
        ("full_recompute_layer: [0-1, 3]", "select_module: null", ["recompute.mode full needs it"]),
        ("full_recompute_layer: [0-1, 3]", "full_recompute_layer: [0-9]", ["no layer 9", "Fix: write numbers"]),
    ],
)  # fmt: skip
def test_mistakes_have_the_file_s_lines_and_names(change: str, into: str, parts: list[str]):
    assert change in FULL
    message = error_of(FULL.replace(change, into, 1))
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("text", "ranks", "parts"),
    [
        (
            SMALL.replace("type: TextDataset, dataset_dir: stdlib", "type: SyntheticDataset"), 1,
            ["a.yaml:5: train_dataset.dataloader.num_samples: ", "set train_dataset.dataloader.num_samples to"],
        ),
        (
            SMALL.replace("steps: 6", "steps: 6, deterministic: True") + "parallelism: {data_parallel_shard: -1}\n", 1,
            ["training.deterministic (a.yaml:2): only Ascend",
             "parallelism.data_parallel_shard -1: not used, the run has one device"],
        ),
        (
            SMALL + "parallelism: {pipeline_parallel: 2}\n", 1,
            ["a.yaml:19: parallelism.pipeline_parallel = 2: pipeline_parallel 2 needs 2 ranks"],
        ),
        (
            SMALL.replace("hidden_size: 64", "hidden_size: 65\n  head_dim: null"), 1,
            ["num_attention_heads = 4: must divide hidden_size"],
        ),
        (
            SMALL.replace("CPU", "Ascend") + "callbacks: [{type: MaxLogitsMonitor, step_interval: 5}]\n", 1,
            ["callbacks.0 MaxLogitsMonitor: no attention logit is recorded, only native layers on CPUs measure them"],
        ),
        (SMALL + "profiler: {profile_communication: 1}\n", 1, ["a.yaml:19: profiler.profile_communication: unknown"]),
    ],
)  # fmt: skip
def test_rules_fixes_and_notes_name_the_keys_and_values_of_the_file(text: str, ranks: int, parts: list[str]):
    try:
        message = "\n".join(plan_file(load(text), world_of(ranks), []).notes)
    except UserError as error:
        message = str(error)
    for part in parts:
        assert part in message, message
    for older in ("use_parallel true", "data_loader", "context.deterministic", "parallel_config."):
        assert older not in message


def test_keys_of_both_schemas_are_flags():
    flags = "training.steps=9 train_dataset.dataloader.shuffle=True optimizer.weight_decay=0.5"
    more = "runner_config.batch_size=1 model.num_hidden_layers=3 lr_scheduler.learning_rate=1e-3"
    config = load(SMALL, *flags.split(), *more.split())
    assert (config.runner_config.max_steps, config.runner_config.batch_size) == (9, 1)
    assert config.train_dataset.data_loader.shuffle and config.decoder.num_layers == 3
    assert (config.optimizer.weight_decay, config.lr_schedule.learning_rate) == (0.5, 1e-3)
    assert "flag --training.stepz: training.stepz: unknown key" in error_of(SMALL, "training.stepz=9")
    assert load(SMALL + "unheard_of: {a: 1}\n", "unheard_of=null") == load(SMALL)
    mode = [Override("context.mode", "1", "flag --mode")]
    assert parse_config("a.yaml", SMALL, mode).context.mode == 0  # it names the schema there
    assert load(SMALL, "context.mode=1").context.mode == 1


def test_a_step_has_the_sequences_of_the_global_batch_in_any_job():
    config = load(SMALL)
    in_jobs = [resolve_for_job(config, world_of(ranks)).runner_config for ranks in (1, 2, 4)]
    assert [runner.gradient_accumulation_steps for runner in in_jobs] == [4, 2, 1]
    staged = resolve_for_job(load(FULL), world_of(16))
    assert (staged.parallel_config.micro_batch_num, staged.runner_config.gradient_accumulation_steps) == (4, 1)
    message = failure(lambda: plan_file(config, world_of(3), []))
    assert "training.global_batch_size = 8: must be a multiple of local_batch_size x data_parallel = 2 x 3" in message
    again = parse_config("config.yaml", dump_config(resolve_for_job(config, world_of(2))))
    assert resolve_for_job(again, world_of(4)).runner_config.gradient_accumulation_steps == 1


@pytest.mark.parametrize(
    ("rampup", "ranks", "parts"),
    [
        ("[2, 4, 100]", 2, ["starts with 2 sequences, which local_batch_size x data_parallel = 4", "write [4, 4"]),
        ("[12, 4, 100]", 1, ["more than the 8 of the full global batch"]),
        ("[2, 4, 100]", 1, ["steps of 4 do not lead from 2 to the full global batch of 8", "write [2, 2, 100]"]),
        ("[2, 3, 100]", 1, ["grows by 3 sequences", "write [2, 2, 100]"]),
    ],
)
def test_a_batch_that_cannot_grow_so_is_refused(rampup: str, ranks: int, parts: list[str]):
    text = SMALL.replace("global_batch_size: 8", f"global_batch_size: 8, rampup_batch_size: {rampup}")
    message = failure(lambda: plan_file(load(text), world_of(ranks), []))
    for part in ("a.yaml:2: training.rampup_batch_size = ", *parts):
        assert part in message, message
    fix = "[" + message.partition("write [")[2].partition("]")[0] + "]"
    assert plan_file(load(text.replace(rampup, fix)), world_of(ranks), []).steps.total_steps == 6


def test_a_ramp_up_is_not_for_one_graph():
    text = SMALL.replace("steps: 6", "steps: 6, rampup_batch_size: [4, 4, 10]").replace("CPU", "Ascend")
    older = ("parallel_config.model_parallel=2", "use_parallel=True", "parallel.parallel_mode=1")
    told = "\n".join(plan_file(load(text, *older), world_of(2), []).notes)
    assert "rampup_batch_size = [4, 4, 10]: not yet supported in semi-automatic mode" in told


def test_a_run_has_the_steps_that_the_file_says():
    config = load(SMALL, "train_dataset.dataloader.num_samples=24")
    plan = plan_file(config, SINGLE_PROCESS, [])
    assert (plan.steps.steps_per_epoch, plan.steps.total_steps, plan.steps.last_step, plan.steps.epochs) == (3, 6, 6, 2)
    five = plan_file(load(SMALL, "train_dataset.dataloader.num_samples=24", "training.steps=5"), SINGLE_PROCESS, [])
    assert (five.steps.total_steps, five.steps.last_step, five.steps.epochs) == (5, 5, 2)


def test_the_plan_is_that_of_the_smallest_job_of_its_degrees():
    config = load(FULL)
    plan = plan_file(config, world_from_degrees(config, SINGLE_PROCESS), [])
    assert (plan.ranks, plan.steps.micro_batches) == (8, 8)
    assert plan.degrees == {"pipeline_stage": 2, "data_parallel": 2, "model_parallel": 2}


def test_a_model_without_sizes_is_planned_as_far_as_it_goes():
    text = SMALL.replace(MODEL, MODEL.partition("  vocab_size")[0].replace("  model_type: qwen3\n", ""))
    text = text.replace("device_target: CPU", "device_target: Ascend")
    plan = plan_file(load(text), world_from_degrees(load(text), SINGLE_PROCESS), [])
    notes = "\n".join(plan.notes)
    assert not plan.memory_bytes and "weights and memory are unknown: the model sizes are not in the file" in notes
    assert "not on this machine: model" not in notes


@pytest.mark.parametrize("text", [SMALL, FULL])
def test_the_conversion_is_the_same_configuration(text: str):
    written, told = older_text("a.yaml", text)
    assert parse_config("b.yaml", written) == load(text)
    assert "newer schema" not in notes(written) and told


def test_convert_writes_a_file_once(tmp_path):
    source, target = tmp_path / "new.yaml", tmp_path / "ours.yaml"
    source.write_text(FULL)
    ensure_server()

    def convert(*arguments: object) -> subprocess.CompletedProcess:
        command = [sys.executable, FORKED, REPOSITORY / "run_trainer.py", "convert", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = convert(source, "--output", target)
    assert done.returncode == 0 and "note: " in done.stderr, done.stderr
    assert parse_config("ours.yaml", target.read_text()) == load(FULL)
    assert "layout          equal: " in done.stderr and "losses" not in done.stderr
    forced = convert(source, "-o", target, "--force")
    assert forced.returncode == 0 and parse_config("ours.yaml", target.read_text()) == load(FULL)
    again = convert(source, "--output", target)
    assert again.returncode == 2 and "is there already" in again.stderr
    older = convert(target)
    assert older.returncode == 2 and "has the 1.x schema already" in older.stderr


def _keys(section: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in section.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _keys(value, (*path, key))


def test_rows_can_be_read_backwards():
    values = {"bool": True, "float": 0.5, "list": ["0-1", "3"], "bool|str|list": True}
    rows = [row for row in ROWS if row.transform is not None and row.transform.backward is not None]
    assert rows
    for row in rows:
        assert row.transform.backward(row.transform.forward(values[row.kind])) == values[row.kind], row
    places = reverse(ROWS)
    assert places["load_checkpoint"] == "checkpoint.load_path" and places["lr_schedule"] == "lr_scheduler"


def test_whatever_a_key_holds_is_refused_or_converted():
    root, _ = parse_document("a.yaml", FULL)
    accepted, values = 0, itertools.cycle([None, "x", {"a": 1}, []])
    for path, value in zip(_keys(plain(root)), values, strict=False):
        changed = section = plain(root)
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = value
        text = json.dumps(changed)
        try:
            config = parse_config("a.yaml", text)
        except UserError as error:
            assert "a.yaml" in str(error)
        else:
            assert parse_config("b.yaml", older_text("a.yaml", text)[0]) == config, path
            accepted += 1
    assert accepted
