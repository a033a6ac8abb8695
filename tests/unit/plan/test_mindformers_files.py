"""Files in the form of MindSpore Transformers', for Ascend: planned on any machine."""

from __future__ import annotations

import re

import pytest
from config_helpers import failure, load, notes
from data_helpers import write_tokenizer
from tolerances import FOUR_DECIMALS, SMALL_ARRAYS, SMALLER_ARRAYS

from trainer.config import dump_config, parse_config
from trainer.config.checks.problem import ConfigError, ConfigErrors
from trainer.config.recompute import recomputed_parts
from trainer.config.stages import stage_layers
from trainer.device import resolve
from trainer.device.doctor import AscendParts
from trainer.errors import UserError
from trainer.launch.arguments import find_script
from trainer.optim.schedules import build_schedule
from trainer.parallel.world import SINGLE_PROCESS, world_of
from trainer.plan.device.memory import fixed_bytes
from trainer.plan.plan import Plan
from trainer.plan.render import plan_sections
from trainer.run.plan_file import plan_file, world_from_degrees
from trainer.tables import sections_text

FINETUNE = """\
seed: 42
run_mode: 'finetune'
load_checkpoint: ''
auto_trans_ckpt: False
runner_config: {epochs: 2, batch_size: 1, sink_mode: True, sink_size: 1}
runner_wrapper:
  type: MFTrainOneStepCell
  scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 4096, scale_factor: 1, scale_window: 100000}
  use_clip_grad: True
optimizer: {type: AdamW, betas: [0.9, 0.95], eps: 1.e-8, weight_decay: 0.01}
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 1.e-6, lr_end: 1.e-6, warmup_ratio: 0, total_steps: -1}
train_dataset: &train
  data_loader: {type: JsonlDataset, dataset_dir: "/data/on/another/machine", shuffle: True}
  input_columns: ["input_ids", "labels"]
  drop_remainder: True
train_dataset_task: {type: CausalLanguageModelDataset, dataset_config: *train}
use_parallel: True
parallel: {parallel_mode: 1, full_batch: True, enable_parallel_optimizer: True}
parallel_config: {data_parallel: 4, model_parallel: 2, pipeline_stage: 2, use_seq_parallel: True, micro_batch_num: 16}
recompute_config: {recompute: [3, 1], select_recompute: {'feed_forward\\.mul': [4, 2]}}
callbacks: [{type: MFLossMonitor}, {type: CheckpointMonitor, prefix: own, save_checkpoint_steps: 500}]
context:
  device_target: "Ascend"
  max_device_memory: "58GB"
  ascend_config: {parallel_speed_up_json_path: "./parallel.json"}
model:
  model_config:
    type: LlamaConfig
    seq_length: 2048
    hidden_size: 1024
    num_layers: 10
    num_heads: 16
    n_kv_heads: 4
    vocab_size: 32000
    intermediate_size: 2816
    eos_token_id: 31999
    pad_token_id: 151643
    position_embedding_type: rope
    compute_dtype: "bfloat16"
    use_flash_attention: True
    offset: [1, -1]
  arch: {type: LlamaForCausalLM}
"""
TEMPLATE = """\
pretrained_model_dir: "/path/to/model"
run_mode: 'train'
use_parallel: True
parallel: {parallel_mode: 1}
parallel_config: {data_parallel: 2, model_parallel: 2, pipeline_stage: 2, micro_batch_num: 2}
train_dataset: {data_loader: {type: JsonlDataset, dataset_dir: ""}}
lr_schedule: {type: cosine, learning_rate: 1.e-6, total_steps: 100}
context: {device_target: "Ascend"}
model: {model_config: {compute_dtype: "bfloat16", offset: 0}}
"""


@pytest.fixture(autouse=True)
def no_ascend(monkeypatch):
    """Hides an Ascend of the machine that runs these tests."""
    monkeypatch.setattr(resolve, "missing_for_ascend", lambda *_: ["no card"])
    monkeypatch.setattr(resolve, "find_ascend", lambda *_: AscendParts(0, False, False))


def plan_of(text: str) -> Plan:
    told: list[ConfigError] = []
    config = parse_config("a.yaml", text, (), told)
    return plan_file(config, world_from_degrees(config, SINGLE_PROCESS), told)


def test_a_file_for_ascend_is_planned_for_its_own_job():
    plan = plan_of(FINETUNE)
    assert (plan.device, plan.ranks, plan.steps.micro_batches) == ("Ascend", 16, 16)
    assert plan.degrees == {"pipeline_stage": 2, "data_parallel": 4, "model_parallel": 2}
    assert plan.data.rows == 0
    notes = [row[0] for row in plan_sections(plan, verbose=False)[0][1]][1:]
    assert len(notes) <= 12 and notes[1].startswith("- load_checkpoint is empty")  # what changes results comes first
    assert "as in MindSpore Transformers' LlamaConfig: rms_norm_eps 1e-05, init_method_std 0.01" in notes[0]
    assert all("no effect" in note or "set with" in note or "recomputed" in note or "keys ignored" in note
               or "not read" in note for note in notes[4:]), notes  # fmt: skip
    told = "\n".join(plan.notes)
    assert "not checked, because it is not on this machine: train_dataset.data_loader /data/on/another/machine" in told
    assert "planned for another machine" in told and "starts from new weights" in told
    text = sections_text(plan_sections(plan, verbose=False))
    assert "keys ignored (--verbose says why): " in text and "not known, it is not on this" in text


def test_degrees_that_do_not_fit_the_ranks_stay_an_error():
    for text in (FINETUNE, FINETUNE.replace("model_parallel: 2,", "model_parallel: 2, expert_parallel: 2,")):
        config = load(text)
        assert "but the job has 3" in failure(lambda config=config: plan_file(config, world_of(3), []))


def test_what_is_not_built_for_ascend_is_one_note():
    plan = plan_of(FINETUNE.replace("model_parallel: 2,", "model_parallel: 2, expert_parallel: 2,"))
    assert "not supported on Ascend: parallel_config.expert_parallel = 2" in "\n".join(plan.notes)


def test_memory_is_that_of_the_rank_that_needs_most():
    memory = plan_of(FINETUNE).memory_bytes
    layers, hidden, width, vocabulary = 4, 1024, 2816, 32000
    per_layer = 2 * hidden * hidden + 2 * hidden * hidden // 4 + 3 * hidden * width
    matrices = (layers * per_layer + vocabulary * hidden) // 2  # of the last stage, which has the logits
    assert memory["gradients"] == pytest.approx(4 * matrices, rel=SMALLER_ARRAYS)
    assert memory["weights"] == pytest.approx(memory["gradients"] / 4, rel=SMALL_ARRAYS)
    assert memory["optimizer state"] == pytest.approx(2 * memory["weights"], rel=SMALLER_ARRAYS)
    whole = plan_of(FINETUNE.replace("recompute_config: {", "swap_config: {swap: False}\nmetric: {")).memory_bytes
    assert memory["total"] < whole["total"]


def test_weights_beyond_the_device_are_an_error():
    small = FINETUNE.replace('"58GB"', '"0.1GB"')
    certain = "GiB for weights, gradients and optimizer state"
    message = failure(lambda: plan_of(small))
    assert "max_device_memory = '0.1GB': a rank needs" in message and certain in message
    memory = plan_of(FINETUNE).memory_bytes
    sizes = fixed_bytes(memory), memory["total"]
    between = f"{sum(sizes) / 2 / 2**30:.4f}GB"
    close = "\n".join(plan_of(FINETUNE.replace("58GB", between)).notes)
    assert f"max_device_memory {between}: a rank needs about" in close
    assert certain in failure(lambda: plan_of(FINETUNE.replace("58GB", f"{0.99 * sizes[0] / 2**30:.4f}GB")))


EXPERTS = FINETUNE.replace("offset: [1, -1]", "offset: 0\n    moe_config: {expert_num: 8, num_experts_chosen: 2}")
UNSHARED = EXPERTS.replace("enable_parallel_optimizer: True", "enable_parallel_optimizer: False")
EXPLICIT = EXPERTS.replace("parallel_mode: 1", "parallel_mode: 0")
MULTIPLIED = {"parallel_config.expert_model_parallel": "1"}  # without it the loader multiplies expert_parallel


@pytest.mark.parametrize(
    ("text", "limit", "settings"),
    [
        (UNSHARED, "2.5GB", {"parallel_config.expert_parallel": "8"} | MULTIPLIED),  # on the same ranks
        (UNSHARED, "1.4GB",
         {"parallel_config.data_parallel": "2", "parallel_config.model_parallel": "4",
          "parallel_config.expert_parallel": "8", "parallel_config.micro_batch_num": "32"} | MULTIPLIED),
        # Explicit mode has no level 3 on an Ascend; in the other one it does not go with experts in this pipeline.
        (EXPLICIT, "1.3GB", {"parallel_config.data_parallel": "1", "parallel_config.context_parallel": "4",
                             "parallel_config.expert_parallel": "8", "parallel_config.micro_batch_num": "64"}),
        (EXPERTS, "0.8GB",
         {"parallel_config.model_parallel": "4", "parallel_config.expert_parallel": "8",
          "recompute_config.recompute": "true", "recompute_config.select_recompute": "false"} | MULTIPLIED),
        (FINETUNE.replace("use_parallel: True", ""), "2GB", {"use_parallel": "true"}),
    ],
)  # fmt: skip
def test_the_fix_for_memory_is_one_that_the_plan_accepts(text: str, limit: str, settings: dict[str, str]):
    text = text.replace("58GB", limit)
    told = failure(lambda: plan_of(text))
    assert dict(re.findall(r"([a-z_.]+) to (\w+)", told.partition("for example set")[2])) == settings
    config = load(text, *(f"{key}={value}" for key, value in settings.items()))
    plan = plan_file(config, world_from_degrees(config, SINGLE_PROCESS), [])
    assert "not supported on Ascend" not in "\n".join(plan.notes)
    assert f"each of {plan.ranks} ranks then needs {plan.memory_bytes['total'] / 2**30:.1f} GiB" in told


@pytest.mark.parametrize("limit", ["0.001GB", "0.2GB"])  # too little for weights; too little for activations
def test_a_model_for_which_no_degrees_are_enough_is_said(limit: str):
    told = failure(lambda: plan_of(FINETUNE.replace("58GB", limit)))
    assert "devices with more memory: no degrees help with up to 128 ranks" in told


def test_all_problems_are_told_at_once():
    broken = FINETUNE.replace("batch_size: 1,", "batch_sise: 1,").replace("epochs: 2", "epochs: none")
    broken = broken.replace("data_parallel: 4", "data_parallel: x").replace("use_parallel: True", "lr_scale: True")
    broken = broken.replace('"./parallel.json"}', '"./parallel.json", unknown: 1}')
    with pytest.raises(ConfigErrors) as caught:
        plan_of(broken)
    for part in ("batch_sise: unknown", "epochs = 'none'", "data_parallel = 'x'", "lr_scale = true", "MindSpore 2.10"):
        assert part in str(caught.value)
    fixes = [line for line in str(caught.value).splitlines() if line.startswith("  Fix: ")]
    assert len(fixes) == len(caught.value.errors)


def test_a_key_that_resembles_no_other_hides_no_rule():
    message = failure(lambda: plan_of(FINETUNE.replace("num_heads: 16", "num_heads: 15\n    zzz: 1")))
    assert "zzz: unknown key" in message and "must divide hidden_size" in message, message


def test_data_that_is_elsewhere_is_named_by_its_files():
    loader = "{type: HFDataLoader, load_func: load_dataset, path: json, data_files: /data/alpaca.json}"
    before = '{type: JsonlDataset, dataset_dir: "/data/on/another/machine", shuffle: True}'
    told = "\n".join(plan_of(FINETUNE.replace(before, loader)).notes)
    assert "not on this machine: train_dataset.data_loader /data/alpaca.json" in told


def test_data_tokenizer_and_memory_are_told_with_the_other_problems(tmp_path):
    """Both data sets, the vocabulary and the memory of a rank, whatever else is wrong, in the order of the file."""
    for name in ("train", "eval"):
        (tmp_path / f"{name}.mindrecord").write_bytes(b"no such file" * 100)
    text = FINETUNE.replace('{type: JsonlDataset, dataset_dir: "/data/on/another/machine", shuffle: True}',
                            f"{{type: MindDataset, dataset_dir: {tmp_path}/train.mindrecord}}")
    text = text.replace('"58GB"', '"0.1GB"') + f"""\
do_eval: True
eval_dataset: {{data_loader: {{type: MindDataset, dataset_dir: {tmp_path}/eval.mindrecord}}}}
"""
    for broken in (text, text.replace("epochs: 2", "epochs: 0")):
        with pytest.raises(ConfigErrors) as caught:
            plan_of(broken)
        lines = [str(error).splitlines()[0] for error in caught.value.errors]
        parts = ["epochs = 0"] * (broken != text)
        parts += ["train.mindrecord", "max_device_memory = '0.1GB'", "eval.mindrecord"]
        assert len(lines) == len(parts) and all(part in line for part, line in zip(parts, lines, strict=True)), lines


def test_a_tokenizer_that_is_here_must_fit_where_the_data_are_elsewhere(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    tokenizer = f"tokenizer: {{type: huggingface, path: {path}}}\n  data_loader: {{type: JsonlDataset"
    text = FINETUNE.replace("data_loader: {type: JsonlDataset", tokenizer).replace("vocab_size: 32000", "vocab_size: 8")
    text = text.replace("eos_token_id: 31999", "eos_token_id: 7")
    message = failure(lambda: plan_of(text))
    assert "model.model_config.vocab_size = 8: the tokenizer has" in message, message


def test_a_wrong_value_makes_no_further_problems():
    message = failure(lambda: plan_of(FINETUNE.replace("hidden_size: 1024", "hidden_size: wide")))
    assert "hidden_size = 'wide'" in message and "num_heads" not in message


def test_a_model_folder_that_is_elsewhere_leaves_the_sizes_open():
    plan = plan_of(TEMPLATE)
    assert plan.ranks == 8 and not plan.memory_bytes and plan.steps.schedule == "CosineWithWarmUpLR"
    assert "pretrained_model_dir /path/to/model" in "\n".join(plan.notes)
    assert "weights  not known" in sections_text(plan_sections(plan, verbose=False))
    assert "offset: 0" in TEMPLATE  # layers of the real model: those of the defaults are fewer
    assert plan_of(TEMPLATE.replace("offset: 0", "offset: [9, 9]")).steps == plan.steps
    here = failure(lambda: plan_of(TEMPLATE.replace('{device_target: "Ascend"}', '{device_target: "CPU"}')))
    assert "there is no such folder" in here


def test_latent_attention_of_a_model_that_is_elsewhere_has_the_released_sizes():
    text = TEMPLATE.replace("offset: 0", "multi_latent_attention: True")
    decoder = parse_config("a.yaml", text, (), []).decoder
    assert (decoder.num_layers, decoder.hidden_size, decoder.experts.expert_num) == (61, 7168, 256)


def test_a_template_without_a_model_is_planned_as_far_as_it_goes():
    template = TEMPLATE.replace('pretrained_model_dir: "/path/to/model"\n', "")
    template = template.replace('{data_loader: {type: JsonlDataset, dataset_dir: ""}}', "{data_loader: }")
    plan = plan_of(template)
    told = "\n".join(plan.notes)
    assert "the model sizes are not in the file; a run needs them, or --model FOLDER" in told
    assert "not on this machine: train_dataset.data_loader (no path is written)" in told and not plan.memory_bytes
    some = failure(lambda: plan_of(template.replace("offset: 0", "num_layers: 2")))
    assert "missing: hidden_size, num_heads, vocab_size" in some
    here = failure(lambda: plan_of(template.replace('{device_target: "Ascend"}', '{device_target: "CPU"}')))
    assert "a run needs the sizes of its model" in here
    no_section = failure(lambda: plan_of("model: []\n"))
    assert no_section.startswith("a.yaml:1: model = []: must be a section") and "sizes" not in no_section


def test_lists_count_layers_of_stages():
    config = load(FINETUNE)
    assert stage_layers(config) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert recomputed_parts(config) == ("block",) * 3 + ("mlp", "", "") + ("block", "mlp", "", "")
    parts = FINETUNE.replace("offset: [1, -1]", "offset: [[1, 0], [0, 1]]\n    pp_interleave_num: 2")
    assert stage_layers(load(parts)) == [[0, 1, 2, 5, 6], [3, 4, 7, 8, 9]]
    assert "offset = [1, 0]: the stages would have 11 layers, and the model has 10" in failure(
        lambda: load(FINETUNE.replace("offset: [1, -1]", "offset: [1, 0]"))
    )


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("polynomial", "PolynomialWithWarmUpLR"),
        ("cosine", "CosineWithWarmUpLR"),
        ("linear", "LinearWithWarmUpLR"),
        ("constant_with_warmup", "ConstantWarmUpLR"),
        ("cosine_with_restarts", "CosineWithRestartsAndWarmUpLR"),
    ],
)
def test_schedules_by_their_registered_names(name, taken):
    text = f"lr_schedule: {{type: {name}, learning_rate: 1.0e-4, lr_end: 1.0e-5}}\n"
    assert load(text).lr_schedule.type == taken


def test_keys_that_a_schedule_does_not_use_are_noted():
    text = "lr_schedule: {type: CosineAnnealingLR, base_lr: 1.0, t_max: 10, warmup_steps: 5, power: 2.0}\n"
    assert "this schedule does not use it" in notes(text)
    assert build_schedule(load(text).lr_schedule, 10)(0) == 1.0


def test_groups_with_one_schedule_are_a_schedule():
    one = "{type: ConstantWarmUpLR, learning_rate: 2.e-4, warmup_steps: 20}"
    grouped = "{type: ConstantWarmUpLR, params: ['embedding.*'], learning_rate: RATE, warmup_steps: 20}"
    text = f"grouped_lr_schedule: {{default: {one}, grouped: [{grouped}]}}\n"
    schedule = load(text.replace("RATE", "2.e-4")).lr_schedule
    assert (schedule.type, schedule.learning_rate, schedule.warmup_steps) == ("ConstantWarmUpLR", 2e-4, 20)
    assert "grouped_lr_schedule" in failure(lambda: load(text.replace("RATE", "1.e-4")))


def test_flat_yarn_becomes_rope_scaling():
    keys = "rotary_scaling_factor: 40, beta_fast: 32, beta_slow: 1, mscale: 1.0, mscale_all_dim: 1.0"
    scaling = load(f"model_config: {{position_embedding_type: yarn, {keys}}}\n").decoder.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.mscale, scaling.attention_factor) == ("yarn", 40, 1, None)
    # Without mscale_all_dim MindSpore Transformers divides by 1.
    alone = load("model_config: {position_embedding_type: yarn, rotary_scaling_factor: 40, mscale: 0.5}\n").decoder
    assert alone.rope_scaling.attention_factor == pytest.approx(1.1844, abs=FOUR_DECIMALS)
    unused = "model_config: {position_embedding_type: rope, rotary_scaling_factor: 40, beta_fast: 32}\n"
    assert load(unused).decoder.rope_scaling is None and "they act with position_embedding_type yarn" in notes(unused)


def test_a_balance_loss_in_lists_is_that_of_the_experts():
    text = "moe_config: {expert_num: 4, aux_loss_types: [expert], aux_loss_factors: [0.01]}\n"
    assert load(text).decoder.balance_factor == 0.01


def test_ids_outside_the_vocabulary_matter_where_they_act():
    sizes = "model_config: {vocab_size: 300, eos_token_id: 900, pad_token_id: 151643}\n"
    load(sizes + "train_dataset: {data_loader: {type: SyntheticDataset}}\n")
    assert "eos_token_id = 900" in failure(lambda: load(sizes))


def test_weights_that_a_training_from_new_ones_names_are_noted():
    text = "model_config: {checkpoint_name_or_path: own_7b, extend_method: 'None', scaling_factor: {factor: 16.0}}\n"
    assert "not read, run_mode train starts from new weights" in notes(text)
    assert "use load_checkpoint" in failure(lambda: load("run_mode: finetune\n" + text))


def test_a_null_removes_a_key_of_the_file():
    assert load("optimiser: {type: Adam}\nseed: 3\n", "optimiser=null").seed == 3
    assert load("seed: 3\n", "seed=null").seed == 1
    assert load("lr_schedule: {type: ConstantWarmUpLR, lr_last: 1}\n", "lr_schedule.lr_last=null").seed == 1
    assert load("optimizer: {type: Muon}\n", "optimizer.matched_adamw_rms=null").optimizer.matched_adamw_rms is None
    with pytest.raises(UserError, match="unknown key"):
        load("seed: 3\n", "optimiser=null")


def test_the_names_of_the_other_program(capsys):
    assert find_script("run_mindformer.py") is None
    assert "run_mindformer.py is taken as run_trainer.py" in capsys.readouterr().err
    assert load("run_mode: predict_with_train_model\n").run_mode == "predict"
    assert load("output_dir: ''\n").output_dir == "./output"
    assert load("parallel: {parallel_mode: MANUAL_PARALLEL}\n").parallel.parallel_mode == 0


@pytest.mark.parametrize(
    ("degrees", "more", "ranks"),
    [
        ("data_parallel: 2, model_parallel: 4, expert_parallel: 2", "", 8),
        ("data_parallel: 1, model_parallel: 8", "", 8),
        ("data_parallel: 4, model_parallel: 4, expert_parallel: 4", "", 8),  # of 8 experts
        ("data_parallel: 2, model_parallel: 4, expert_parallel: 2", "use_legacy: False\n", 2),
        ("data_parallel: 2, model_parallel: 4, expert_parallel: 2, expert_model_parallel: 1", "", 2),
        ("data_parallel: 2, model_parallel: 4, expert_parallel: 2, expert_model_parallel: 2", "use_legacy: False\n", 4),
    ],
)
def test_experts_that_are_sharded_there_are_spread_over_as_many_ranks(degrees: str, more: str, ranks: int):
    """The experts of Mixtral's files would not fit otherwise."""
    text = f"""{more}parallel: {{parallel_mode: 1}}
parallel_config: {{{degrees}}}
model: {{arch: {{type: LlamaForCausalLM}}, model_config: {{num_layers: 2, num_heads: 8}}}}
moe_config: {{expert_num: 8, num_experts_chosen: 2}}
"""
    config = load(text)
    assert "expert_parallel = 0: must be at least 1" in failure(lambda: load(text, "parallel_config.expert_parallel=0"))
    assert config.parallel_config.expert_parallel == ranks
    says_so = "also shards each expert over" in notes(text)
    assert says_so == (f"expert_parallel: {ranks}" not in degrees)
    assert parse_config("again", dump_config(config)).parallel_config == config.parallel_config
