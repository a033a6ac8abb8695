"""Types, bounds and rules across sections: every message names place, key, value, rule and fix."""

from __future__ import annotations

import os
import re
import stat
import subprocess

import pytest
from config_helpers import BASE, error_of, failure, load, notes
from no_decoder import KIND, NO_DECODER_TEXT

from trainer.config import preflight
from trainer.device.doctor import check_disk

SIZES = "model_config: {num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 300}\n"


@pytest.mark.parametrize(
    ("pair", "rule"),
    [
        ("runner_config.gradient_accumulation_steps=0", "= 0: must be at least 1"),
        ("runner_config.gradient_accumulation_steps=-1", "= -1: must be at least 1"),
        ("runner_config.gradient_accumulation_steps=1.5", "= 1.5: must be an integer"),
        ("runner_config.gradient_accumulation_steps=four", "= 'four': must be an integer"),
        ("runner_config.gradient_accumulation_steps=True", "= true: must be an integer"),
        ("runner_config.gradient_accumulation_steps='4'", "write 4 without quotes"),
        ("runner_config.gradient_accumulation_steps=", "= '': must be an integer"),
        ("runner_config.batch_size=1_000", "write 1000 without quotes"),
        ("runner_wrapper.max_grad_norm=0", "= 0: must be greater than 0"),
        ("runner_wrapper.max_grad_norm=-1.0", "= -1.0: must be greater than 0"),
        ("runner_wrapper.max_grad_norm=.nan", "must be a finite number"),
        ("runner_wrapper.max_grad_norm=.inf", "must be a finite number"),
        ("runner_wrapper.max_grad_norm=big", "= 'big': must be a number"),
        ("runner_wrapper.max_grad_norm=True", "= true: must be a number"),
        ("runner_wrapper.use_clip_grad=yes", "write true"),
        ("runner_wrapper.use_clip_grad=1", "= 1: must be true or false"),
        ("runner_wrapper.type=TrainOneStep", "must be MFTrainOneStepCell or MFPipelineWithLossScaleCell"),
        ("optimizer.betas=[0.9, 1.0]", "= 1.0: must be less than 1.\n  Fix: write a number below 1, for example 0.9"),
        ("optimizer.betas=[-0.1, 0.9]", "= -0.1: must be at least 0"),
        ("optimizer.betas=[0.9]", "must be a list of at least 2 values"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "must be a list of at most 2 values"),
        ("optimizer.betas=0.9", "= 0.9: must be a list"),
        ("runner_wrapper.clip_type=norms", "= 'norms': must be norm or value"),
        ("runner_wrapper.clip_value=0", "= 0: must be greater than 0"),
        ("optimizer.ns_steps=0", "= 0: must be at least 1"),
        ("optimizer.ns_steps=2.5", "= 2.5: must be an integer"),
        ("optimizer.matched_adamw_rms=0", "= 0: must be greater than 0.\n  Fix: write a number above 0, for example"),
        ("optimizer.momentum=1.0", "= 1.0: must be less than 1"),
        ("optimizer.nesterov=yes", "= 'yes': must be true or false"),
        ("runner_wrapper.clip_by_group=1", "= 1: must be true or false"),
        ("optimizer.eps=0", "must be greater than 0.\n  Fix: write a number above 0, for example 1e-08; eps: "),
        ("lr_schedule.warmup_ratio=1.5", "must be at most 1.\n  Fix: write 1 or less; warmup_ratio: "),
        ("lr_schedule.learning_rate=-1", "must be at least 0.\n  Fix: write 0 or more; learning_rate: "),
        ("run_mode=evaluate", "must be train, finetune, eval, predict or chat"),
        ("run_mode=Train", "write train"),
        ("context.mode=2", "= 2: must be 0 or 1.\n  Fix: write 0 or 1; mode: "),
        ("context.mode=True", "= true: must be 0 or 1"),
        ("context.device_target=cpu", "write CPU"),
        ("resume_training=3", "= 3: must be true or false or a string"),
        ("output_dir=", "must be a string"),
        ("model_config.hidden_act=gelu", "must be silu, gelu_pytorch_tanh, relu2, swiglu or fusedswiglu"),
        ("model_config.top_p=0", "must be greater than 0"),
        ("model_config.compute_dtype=float64", "must be float32, float16 or bfloat16"),
        ("train_dataset.held_out=1", "must be less than 1.\n  Fix: write a number below 1, for example 0; held_out: "),
        ("train_dataset.data_loader.patterns=[]", "must be a list of at least 1 values"),
        ("seed=[1]", "= [1]: must be an integer"),
        ("seed=[true, {a: null}]", "= [true, {'a': null}]: must be an integer"),
        ("runner_config.batch_size=0", "Fix: write 1 or more; batch_size: "),
        ("runner_wrapper.scale_sense=0", "Fix: write a number above 0, for example 1; scale_sense: "),
        ("loss.beta=0", "Fix: write a number above 0, or leave it out; beta: "),
        ("model.arch.type=Qwen3NextForCausalLM", "Fix: use another model; unlike in a Llama, some layers have linear"),
    ],
)
def test_types_and_bounds(pair, rule):
    message = error_of(BASE, pair)
    assert rule in message
    assert message.startswith(f"flag --{pair.split('=')[0]}: ")
    assert re.search(r"\n  Fix: .+\.$", message)


def test_an_integer_is_a_number_but_a_number_is_no_integer():
    assert load(BASE, "optimizer.weight_decay=1").optimizer.weight_decay == 1.0
    assert "must be an integer" in error_of(BASE, "seed=1.0")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "model_config: {hidden_size: 64, num_heads: 5}\n",
            ["num_heads = 5: must divide hidden_size (64)", "use 4 heads"],
        ),
        ("model_config: {hidden_size: 12, num_heads: 4}\n", ["the head size is 3", "even number"]),
        ("model_config: {hidden_size: 2, num_heads: 4, pet_config: {}}\n", ["num_heads = 4: must divide hidden_size"]),
        ("model_config: {head_dim: 5}\n", ["a.yaml:1: model_config.head_dim = 5", "even number"]),
        (
            "model_config: {head_dim: 24, rotary_pct: 0.55}\n",
            ["rotary_pct = 0.55: gives 13 rotary dimensions of 24", "write 0.5 for 12 of them"],
        ),
        ("model_config: {head_dim: 24, rotary_pct: 0.04}\n", ["gives 0 rotary dimensions", "write 0.083334 for 2 of"]),
        ("model_config: {rotary_pct: 0.0}\n", ["rotary_pct = 0.0: must be greater than 0"]),
        ("model_config: {rotary_pct: 1.5}\n", ["rotary_pct = 1.5: must be at most 1"]),
        ("model_config: {num_heads: 4, n_kv_heads: 3}\n", ["n_kv_heads = 3: must divide num_heads (4)", "example 2"]),
        ("model_config: {num_heads: 4, n_kv_heads: 8}\n", ["n_kv_heads = 8: must divide num_heads (4)"]),
        ("model_config: {position_embedding_type: yarn}\n", ["rope_scaling is absent", "rope_type: yarn"]),
        (
            "model_config: {rope_scaling: {rope_type: llama3, low_freq_factor: 4}}\n",
            ["low_freq_factor = 4.0: must be below high_freq_factor (4.0)"],
        ),
        ("model_config: {rope_scaling: {rope_type: yarn, beta_slow: 40}}\n", ["must be at most beta_fast (32.0)"]),
        ("model_config: {rope_theta: 1.0, rope_scaling: {rope_type: yarn, factor: 4}}\n", ["rope_theta = 1.0: yarn"]),
        ("model_config: {head_dim: 4, rope_scaling: {rope_type: longrope, original_max_position_embeddings: 1,"
         " short_factor: [1, 1], long_factor: [1, 2]}}\n", ["a trained length of more than 1 token"]),
        ("model_config: {rope_scaling: {rope_type: dynamic, alpha: 1.0e300}}\n", ["alpha = 1e+300", "at most"]),
        ("model_config: {rope_scaling: {type: dynamic}}\n", ["rope_scaling.type = 'dynamic'", "with alpha only"]),
        (
            "model_config: {head_dim: 2, rope_scaling: {type: dynamic, alpha: 3}}\n",
            ["rope_scaling.type = 'dynamic'", "more than 2 rotated numbers"],
        ),
        ("model_config: {vocab_size: 300, eos_token_id: 300}\n", ["eos_token_id = 300", "0 to 299"]),
        ("model_config: {vocab_size: 300, eos_token_id: [2, -1]}\n", ["eos_token_id = [2, -1]", "0 to 299"]),
        (
            "model_config: {vocab_size: 256}\ntrain_dataset: {data_loader: {dataset_dir: stdlib}}\n",
            ["vocab_size = 256: the byte tokenizer has 257 tokens", "set it to 257 or more"],
        ),
        ("lr_schedule: {total_steps: 0}\n", ["lr_schedule.total_steps = 0", "write -1"]),
        (
            "lr_schedule: {warmup_steps: 20, total_steps: 10}\n",
            ["warmup_steps = 20: must be at most", "total_steps (10)"],
        ),
        ("lr_schedule:\n  warmup_steps: 20\n  warmup_ratio: 0.1\n", ["a.yaml:2: ", "warmup_ratio = 0.1 (a.yaml:3)"]),
        (
            "optimizer: {learning_rate: 0.1}\nlr_schedule: {learning_rate: 0.2}\n",
            ["a.yaml:1: optimizer.learning_rate = 0.1", "lr_schedule.learning_rate = 0.2 (a.yaml:2)"],
        ),
        ("train_dataset: {tokenizer: {path: x}}\n", ["the byte tokenizer uses no file", "huggingface"]),
        (
            "callbacks: [{type: MFLossMonitor}, {type: MFLossMonitor}]\n",
            ["callbacks.1.type", "already listed (a.yaml:1)"],
        ),
        ("moe_config: {num_experts_chosen: 2}\n", ["num_experts_chosen = 2: a token cannot go to more experts"]),
        ("moe_config: {expert_num: 8, topk_group: 2}\n", ["topk_group = 2: needs n_group"]),
        (
            "moe_config: {expert_num: 8, n_group: 2, topk_group: 3}\n",
            ["topk_group = 3: a token cannot go to more groups"],
        ),
        (
            "moe_config: {expert_num: 8, n_group: 4, topk_group: 1, num_experts_chosen: 3}\n",
            ["num_experts_chosen = 3: 1 groups of 2 experts have fewer"],
        ),
        ("model_config: {num_layers: 2}\nmoe_config: {moe_layer_freq: [1]}\n", ["one number for each of the 2 layers"]),
        *((f"model_config: {{num_layers: 2, {keys}}}\nmoe_config: {{expert_num: 8, moe_layer_freq: {frequency}}}\n",
           [f"moe_layer_freq = {frequency}: ", rule])
          for keys in ("pet_config: {target_modules: .*w1}", "router_aux_loss_coef: 0.1")
          for frequency, rule in (("[1]", "one number for each of the 2 layers"), ("0", "must be at least 1"))),
        ("use_skip_data_by_global_norm: True\nrunner_wrapper: {use_skip_data_by_global_norm: False}\n",
         ["a.yaml:1: use_skip_data_by_global_norm = true: disagrees with use_skip_data_by_global_norm = false (a.y"]),
        *((f"parallel_config: {{pipeline_stage: 2}}\nrecompute_config: {{recompute: [1, 1]}}\n"
           f"model_config: {{num_layers: 4, offset: {offset}}}\n", [f"3: model_config.offset = {offset}: {rule}"])
          for offset, rule in (("[0, 0, 0]", "2 stages need a list of 2 numbers"), ("[3, -3]", "a stage would have -1"),
                               ("[1, 1]", "the stages would have 6"), ("1", "the stages would have 6 layers"),
                               ("-1", "the stages would have 2 layers, and the model has 4"))),
        ("moe_config: {use_gating_sigmoid: True, scoring_func: softmax}\n", ["disagrees with use_gating_sigmoid"]),
        ("moe_config: {aux_loss_factors: [1.0]}\n", ["one factor for each of aux_loss_types (0)"]),
        (
            SIZES + "callbacks: [{type: MoEDropRateCallback, expert_num: 4}]\n",
            ["disagrees with model_config.moe_config.expert_num = 1, its default"],
        ),
        (
            "runner_wrapper: {scale_sense: {type: AdaptiveLossScaleUpdateCell}}\n",
            ["scale_sense.type = 'AdaptiveLossScaleUpdateCell': must be DynamicLossScaleUpdateCell or Fixed", "write"],
        ),
        ("runner_wrapper: {scale_sense: 1e39}\n", ["scale_sense = 1e+39: the loss scale", "float32 number (3.4e+38)"]),
        (
            "runner_wrapper: {scale_sense: {loss_scale_value: 4.0e+38}}\n",
            ["scale_sense.loss_scale_value = 4e+38: the loss scale exceeds"],
        ),
        # What is not yet built says what to do meanwhile.
        (
            "train_dataset: {data_loader: {type: SQuADDataLoader, path: a}}\n",
            ["'SQuADDataLoader': not yet", "JsonlDataset"],
        ),
        (
            "train_dataset: {data_loader: {type: BlendedMegatronDatasetDataLoader, datasets_type: BERTDataset}}\n",
            ["datasets_type = 'BERTDataset': not yet", "GPTDataset"],
        ),
        ("callbacks: [{type: EarlyStop, restore_best_weights: True}]\n", ["restore_best_weights = true: not", "best"]),
    ],
)
def test_rules_across_sections(text, parts):
    message = error_of(text)
    assert all(part in message for part in parts), message
    assert "\n  Fix: " in message


@pytest.mark.parametrize(
    "text",
    [
        "model_config: {hidden_size: 64, num_heads: 5, head_dim: 16}\n",
        "model_config: {vocab_size: 100}\ntrain_dataset: {data_loader: {type: SyntheticDataset}}\n",
        "lr_schedule: {warmup_steps: 10, total_steps: 10}\n",
        "lr_schedule: {warmup_steps: 0, warmup_ratio: 0.1}\n",
        "optimizer: {learning_rate: 0.1}\nlr_schedule: {learning_rate: 0.1}\n",
        "moe_config: {capacity_factor: -1}\n",
        "runner_wrapper: {scale_sense: 1.0}\n",
        "runner_wrapper: {scale_sense: 1}\n",
        "runner_wrapper: {scale_sense: 1024}\n",
        "runner_wrapper: {scale_sense: {type: FixedLossScaleUpdateCell, loss_scale_value: 0.5}}\n",
        "runner_wrapper: {scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 4}}\n",
        "recompute_config: {recompute: False, select_recompute: False, mp_comm_recompute: True}\n",
        "parallel: {parallel_mode: 1, full_batch: True, dataset_strategy: [[1, 1]]}\n",
    ],
)
def test_what_is_right_at_the_edge_loads(text):
    load(text)


def test_a_mistake_in_a_part_that_is_not_yet_built_is_told_first():
    assert "scale_window = 0: must be at least 1" in error_of("runner_wrapper: {scale_sense: {scale_window: 0}}\n")
    assert "loss_scale: unknown key" in error_of("runner_wrapper: {scale_sense: {loss_scale: 1}}\n")
    assert "not yet" not in error_of("moe_config: {expert_num: 4, num_experts_chosen: 5}\n")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("runner_config: {sink_mode: True}\n", ["ignored: runner_config.sink_mode (a.yaml:1): ", "no data sink"]),
        ("context: {hccl_buffsize: 200}\n", ["context.hccl_buffsize (a.yaml:1)", "Ascend"]),
        ("swap_config: {swap: True}\n", ["swap_config.swap"]),
        ("tensorboard: {log_timers_to_tensorboard: true}\n", ["to_tensorboard true: not used, tensorboard_dir is"]),
        ("monitor_config: {weight_state_format: log}\n", ["weight_state_format: not used, monitor_config.mon"]),
        ("monitor_config: {local_loss_format: log}\n", ["ignored: monitor_config.local_loss_format (a.yaml:1)"]),
        (
            "monitor_config: {global_norm_spike_threshold: 3.0}\n",
            ["monitor_config.global_norm_spike_threshold 3.0: not"],
        ),
        ("callbacks: [{type: ObsMonitor}]\n", ["callbacks.0", "nothing is uploaded"]),
        ("callbacks: [{type: OnRequestExit, save_ckpt: True}]\n", ["SIGTERM and SIGINT always finish the step, save"]),
        ("context: {infer_precision_sync: True}\n", ["context.infer_precision_sync", "the same bits"]),
        ("callbacks: [{type: CheckpointMonitor, prefix: x}]\n", ["callbacks.0.prefix"]),
        (
            "parallel_config: {data_parallel: 8, model_parallel: 2}\n",
            ["parallel_config.data_parallel 8, parallel_config.model_parallel 2", "one device"],
        ),
        ("model_config: {seq_length: 64, max_position_embeddings: 32}\n", ["seq_length 64 exceeds"]),
        ("optimizer: {type: SGD, betas: [0.9, 0.95]}\n", ["optimizer.betas: not used, optimizer.type is SGD"]),
        ("optimizer: {ns_steps: 3, nesterov: true}\n", ["nesterov true, optimizer.ns_steps 3: not used, "]),
        ("optimizer: {momentum: 0.9}\n", ["optimizer.momentum 0.9: not used, optimizer.type is AdamW"]),
        (
            "eval_dataset: {data_loader: {type: SQuADDataLoader}}\n",
            ["eval_dataset.data_loader SQuADDataLoader: not read, do_eval is false"],
        ),
        (
            "run_mode: predict\ntrain_dataset: {data_loader: {type: SQuADDataLoader}}\n",
            ["train_dataset.data_loader SQuADDataLoader: not read, run_mode is predict"],
        ),
        ("moe_config: {use_gmm: True}\n", ["moe_config: no effect"]),
        ("callbacks: [{type: MoEDropRateCallback}]\n", ["no effect, the model has no experts"]),
        ("train_dataset: {batch_size: 3}\n", ["train_dataset.batch_size 3: not used"]),
        ("train_dataset: {max_batches: 3}\n", ["train_dataset.max_batches 3: not used"]),
        (
            "train_dataset: {held_out: 0.1}\neval_dataset: {held_out: 0.1}\n",
            ["train_dataset.held_out", "eval_dataset.held"],
        ),
        ("predict_data: x\n", ["predict_data: not used, run_mode is train"]),
        ("run_mode: eval\nresume_training: true\n", ["resume_training true: not used"]),
        ("run_mode: eval\nsample_prompt: x\nprofile: true\n", ["sample_prompt, profile true: not used, run_mode is e"]),
        ("run_mode: predict\ndo_eval: true\n", ["do_eval true: not used, run_mode is predict"]),
        (
            "runner_wrapper: {use_clip_grad: True, clip_type: value, max_grad_norm: 2.0, clip_by_group: True}\n",
            ["max_grad_norm 2.0, runner_wrapper.clip_by_group true: not used, runner_wrapper.clip_type is value"],
        ),
        ("runner_wrapper: {use_clip_grad: True, clip_value: 2.0}\n", ["clip_value 2.0: not used", "clip_type is norm"]),
        ("runner_wrapper: {clip_by_group: true}\n", ["clip_by_group true: not used", "use_clip_grad is false"]),
        ("runner_wrapper: {max_grad_norm: 1.0}\n", ["max_grad_norm 1.0: not used", "use_clip_grad is false"]),
        ("runner_wrapper: {use_clip_grad: False, max_grad_norm: 0.5, clip_value: 2.0}\n",
         ["max_grad_norm 0.5, runner_wrapper.clip_value 2.0: not"]),
        (
            "runner_wrapper: {global_norm_spike_threshold: 3, global_norm_spike_count_threshold: 10}\n",
            ["threshold 3.0, runner_wrapper.global_norm_spike_count_threshold 10: not", "use_skip_data_by_global_"],
        ),
        ("parallel: {parallel_optimizer_threshold: 8}\n", ["threshold 8: not used, parallel.enable_parallel_opt"]),
        ("parallel: {parallel_mode: 1}\nrecompute_config: {recompute: True, parallel_optimizer_comm_recompute: True}\n",
         ["parallel_optimizer_comm_recompute true: not used, parallel.enable_parallel_optimizer is false"]),
        ("parallel: {parallel_mode: 1}\nrecompute_config: {recompute_slice_activation: True}\n",
         ["recompute_slice_activation true: not used, nothing is recomputed"]),
        ("runner_wrapper: {accumulate_allreduce_grads_in_fp32: False}\n",
         ["accumulate_allreduce_grads_in_fp32 false: not used, matrix products and gradients are float32"]),
        (
            "runner_wrapper: {scale_sense: {type: FixedLossScaleUpdateCell, scale_factor: 4, scale_window: 10}}\n",
            ["scale_factor 4, runner_wrapper.scale_sense.scale_window 10: not used", "does not change its scale"],
        ),
        (
            "run_mode: finetune\nload_checkpoint: here/step-3\nresume_training: True\n",
            ["resume_training true: continues from the checkpoint in load_checkpoint (here/step-3)"],
        ),
        ("do_eval: True\neval_step_interval: -1\n", ["evaluates only at the end"]),
    ],
)
def test_what_changes_nothing_is_told(text, parts):
    told = notes(text)
    assert all(part in told for part in parts), told


def test_a_plain_file_gives_no_note():
    assert notes(BASE) == ""


def test_who_names_a_checkpoint_is_not_told_that_it_is_resumed():
    """Resumes as a launcher does that starts a job again."""
    assert "resume_training" not in notes(
        "run_mode: finetune\nload_checkpoint: here\nresume_training: step-00000003\n"
    )


def test_default_values_written_out_give_no_note():
    assert notes("runner_config: {sink_mode: False}\nprofile: False\nswap_config: {swap: False}\n") == ""


def test_derived_sizes():
    decoder = load("model_config: {hidden_size: 4096, num_heads: 32}\n").decoder
    assert (decoder.kv_heads, decoder.head_size, decoder.ffn_size, decoder.max_positions) == (32, 128, 11008, 2048)
    text = (
        "model_config: {hidden_size: 8192, num_heads: 64, multiple_of: 4096, ffn_dim_multiplier: 1.3, n_kv_heads: 8}\n"
    )
    assert (load(text).decoder.ffn_size, load(text).decoder.kv_heads) == (28672, 8)
    explicit = load("model_config: {head_dim: 6, intermediate_size: 7, max_position_embeddings: 9}\n").decoder
    assert (explicit.head_size, explicit.ffn_size, explicit.max_positions) == (6, 7, 9)


def run_error(text: str, *pairs: str) -> str:
    """Returns the message of the error that says why a valid file cannot run."""
    config = load(text, *pairs)
    return failure(lambda: preflight(config))


def test_the_base_file_can_run(tmp_path):
    preflight(load(BASE, f"output_dir={tmp_path / 'new' / 'folder'}"))


def test_a_run_needs_the_sizes_of_its_model():
    message = run_error("model_config: {num_layers: 2}\n")
    assert "missing: hidden_size, num_heads, vocab_size" in message and message.startswith("a.yaml")


def test_modes_need_weights_prompts_and_data():
    for mode in ("finetune", "eval", "predict"):
        assert f"load_checkpoint = '': run_mode {mode} needs weights" in run_error(BASE, f"run_mode={mode}")
    preflight(load(BASE, "run_mode=finetune", "resume_training=True"))
    assert "run_mode predict needs prompts" in run_error(BASE, "run_mode=predict", "load_checkpoint=/")
    preflight(load(BASE, "run_mode=predict", "load_checkpoint=/", "predict_data=x"))
    assert "no evaluation data" in run_error(BASE, "do_eval=True")
    assert "no evaluation data" in run_error(BASE, "run_mode=eval", "load_checkpoint=/")
    preflight(load(BASE, "do_eval=True", "train_dataset.held_out=0.1"))


def test_a_reward_model_runs_no_tasks():
    pairs = ("loss={type: reward}", "run_mode=eval", "load_checkpoint=/", "lm_eval.tasks=hellaswag")
    message = run_error(BASE, *pairs)
    assert "lm_eval.tasks = 'hellaswag': asks a language model, and a reward model writes no text" in message
    assert "install" not in message


def test_callbacks_that_act_on_evaluations_need_some():
    held_out = "train_dataset.held_out=0.1"
    best = BASE.replace("type: CheckpointMonitor", "type: CheckpointMonitor\n    keep_best: 1")
    early = BASE.replace("type: MFLossMonitor", "type: EarlyStop")
    for text, key in ((best, "callbacks.1.keep_best"), (early, "callbacks.0.type")):
        message = run_error(text, held_out)
        assert key in message and "requires evaluations" in message
        preflight(load(text, held_out, "do_eval=True"))
        preflight(load(text, "run_mode=predict", "load_checkpoint=/", "predict_data=x"))
    assert "evaluates only at its end" in run_error(early, held_out, "do_eval=True", "eval_step_interval=-1")
    preflight(load(early, held_out, "do_eval=True", "eval_step_interval=-1", "eval_epoch_interval=1"))


def test_a_checkpoint_that_does_not_exist(tmp_path):
    message = run_error(BASE, f"load_checkpoint={tmp_path / 'none'}")
    assert "flag --load_checkpoint: load_checkpoint = " in message and "does not exist" in message


def test_an_output_dir_that_is_a_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file, not a folder" in run_error(BASE, f"output_dir={file}")
    assert f"{file} is a file" in run_error(BASE, f"output_dir={file / 'below'}")


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK], ids=["pipe", "socket"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "logs/rank-0.log", "checkpoints", "trackers/wandb"])
def test_a_pipe_in_an_output_dir_is_not_waited_for(tmp_path, name, kind):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mknod(tmp_path / name, kind | 0o600)
    message = run_error(BASE, f"output_dir={tmp_path}")
    assert f"output_dir = '{tmp_path}': {name} in it is a pipe, a socket or a device, not a file" in message


def test_a_pipe_among_the_logs_of_the_workers_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "worker_1.log")
    message = run_error(BASE, f"worker_log_dir={tmp_path}")
    assert f"worker_log_dir = '{tmp_path}': worker_1.log in it is a pipe" in message


def test_a_read_only_disk_is_named(tmp_path):
    """As one without permission; needs the right to mount, which continuous integration may lack."""
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        message = run_error(BASE, f"output_dir={tmp_path / 'run'}")
        assert f"cannot be created in {tmp_path}: Read-only file system" in message
        assert f"output_dir = '{tmp_path}': cannot be written: Read-only file system" in run_error(
            BASE, f"output_dir={tmp_path}")
        assert check_disk(tmp_path / "run").found == f"{tmp_path} is not writable: Read-only file system"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("change", "prompt", "rule"),
    [
        ("", "[]", "sample_prompt = []: a prompt is empty"),
        ("", "''", "sample_prompt = '': a prompt is empty"),
        ("TextDataset->SyntheticDataset", "a", "sample_prompt = 'a': requires train_dataset.tokenizer"),
        ("TextDataset->MindDataset", "a", "sample_prompt = 'a': requires train_dataset.tokenizer"),
    ],
)
def test_text_is_sampled_only_where_there_is_a_tokenizer(change, prompt, rule):
    text = BASE.replace(*change.split("->")) if change else BASE
    message = failure(lambda: preflight(load(text, f"sample_prompt={prompt}")))
    assert rule in message and "Fix: " in message


def test_where_text_can_be_sampled():
    preflight(load(BASE, "sample_prompt=[a, b]"))
    tokens = BASE.replace("TextDataset", "SyntheticDataset")
    for tokenizer in ("bytes", "huggingface"):
        preflight(load(tokens, "sample_prompt=a", f"train_dataset.tokenizer.type={tokenizer}"))
    preflight(load(tokens))


def test_another_model_samples_no_text():
    message = error_of(f"{NO_DECODER_TEXT}sample_prompt: a\n")
    assert f"a.yaml:3: sample_prompt = '...': does not apply to {KIND}" in message
