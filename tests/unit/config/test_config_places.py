"""One setting in its several places and under its several names; the documentation's snippets as they stand there."""

from __future__ import annotations

import pytest
from config_helpers import BASE, error_of, load, notes

from trainer.config import parse_config
from trainer.config.checks.problem import ConfigErrors

ACCUMULATION = """\
# runner config
runner_config:
...
gradient_accumulation_steps: 4
...
"""
CLIPPING = """\
# wrapper cell config
runner_wrapper:
type: MFTrainOneStepCell
...
use_clip_grad: True
max_grad_norm: 1.0
...
"""


def snippet(section: str, *lines: str, indent: str = "  ") -> str:
    """Returns a section as the documentation writes it: between ellipses, and often without its indentation."""
    return "\n".join([f"{section}:", *(f"{indent}{line}" for line in ("...", *lines, "..."))]) + "\n"


MODEL_KEYS = ("expert_num: 4", "capacity_factor: 1.5", "num_layers: 8", "mtp_depth: 1")
CALLBACK = "- type: MoEDropRateCallback"
REPORTED = "callback_moe_droprate: True"
DROP_RATE = snippet("moe_config", REPORTED) + "\n" + snippet("callback", CALLBACK, *(f"  {key}" for key in MODEL_KEYS))
DROP_RATE_FLAT = snippet("moe_config", REPORTED, indent="") + snippet("callback", CALLBACK, *MODEL_KEYS, indent="")
SNIPPETS = {
    "accumulation": (ACCUMULATION, lambda c: c.runner_config.gradient_accumulation_steps == 4),
    "clipping": (CLIPPING, lambda c: (c.runner_wrapper.use_clip_grad, c.runner_wrapper.max_grad_norm) == (True, 1.0)),
    "gmm": (snippet("moe_config", "use_gmm: True"), lambda c: c.decoder.moe_config.use_gmm),
    "gmm permute": (
        snippet("moe_config", "use_gmm: True", "use_fused_ops_permute: True", indent=""),
        lambda c: c.decoder.moe_config.use_gmm and c.decoder.moe_config.use_fused_ops_permute,
    ),
    "drop rate": (DROP_RATE, lambda c: c.decoder.moe_config.callback_moe_droprate),
    "drop rate, flat": (DROP_RATE_FLAT, lambda c: c.decoder.moe_config.callback_moe_droprate),
}
for indent, form in (("  ", ""), ("", ", flat")):
    SNIPPETS |= {
        f"safe tokens{form}": (
            snippet("moe_config", "enable_gmm_safe_tokens: True", indent=indent),
            lambda c: c.decoder.moe_config.enable_gmm_safe_tokens,
        ),
        f"rope{form}": (
            snippet("model_config", "use_fused_rope: True", indent=indent), lambda c: c.decoder.use_fused_rope),
        f"swiglu{form}": (
            snippet("model_config", "use_fused_swiglu: True", indent=indent), lambda c: c.decoder.use_fused_swiglu),
    }


@pytest.mark.parametrize("name", SNIPPETS)
def test_documentation_snippets_load_verbatim(name):
    text, holds = SNIPPETS[name]
    assert holds(load(text))


@pytest.mark.parametrize("text", [DROP_RATE, DROP_RATE_FLAT])
def test_the_callback_snippet_has_all_its_values(text):
    (callback,) = load(text).callbacks
    assert callback.type == "MoEDropRateCallback"
    assert (callback.expert_num, callback.capacity_factor, callback.num_layers, callback.mtp_depth) == (4, 1.5, 8, 1)


def test_lost_indentation_is_told():
    message = notes(CLIPPING)
    assert "a.yaml:3: indent these lines: 3 keys at the top level are taken as runner_wrapper's" in message


TASK = "train_dataset: &data\n  held_out: 0.1\ntrain_dataset_task:\n  type: CausalLanguageModelDataset\n"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("runner_config:\n  epochs: 2\ngradient_accumulation_steps: 4\n",
         ["a.yaml:3: gradient_accumulation_steps: unknown key at the top", "runner_config.gradient_accum"]),
        ("runner_config:\nuse_gmm: True\n", ["a.yaml:2: use_gmm: unknown key"]),
        ("model:\n  model_config:\n    moe_config:\n      use_gmm: True\nmoe_config:\n  use_gmm: False\n",
         ["a.yaml:6: moe_config.use_gmm = false", "a.yaml:4", "remove one of the two"]),
        ("callbacks:\n  - type: MFLossMonitor\ncallback:\n  - type: CheckpointMonitor\n",
         ["a.yaml:3: callback = ", "a.yaml:1"]),
        ("model_config:\n  moe_config: {use_gmm: True}\n  moe_grouped_gemm: False\n",
         ["a.yaml:3: model_config.moe_grouped_gemm = ", "a.yaml:2"]),
        ("model_config:\n  num_layers: 3\n  num_hidden_layers: 4\n",
         ["a.yaml:3: model_config.num_hidden_layers = 4: disagrees with a.yaml:2"]),
        (TASK + "  dataset_config: {held_out: 0.2}\n",
         ["a.yaml:5: train_dataset_task.dataset_config.held_out = 0.2: disagrees with a.yaml:2"]),
        ("model_config:\n  untie_embeddings_and_output_weights: True\n  tie_word_embeddings: True\n",
         ["disagrees with tie_word_embeddings = true (a.yaml:3): it means false"]),
        ("optimizer:\n  betas: [0.9, 0.95]\n  beta1: 0.8\n", ["a.yaml:3: optimizer.beta1 = 0.8: disagrees with"]),
        ("optimizer: {beta1: 1.5}\n", ["= 1.5: must be less than 1"]),
        ("model_config:\n  rope_parameters: {rope_theta: 5e5}\n  rope_theta: 1e6\n",
         ["a.yaml:3: model_config.rope_theta = 1000000.0: disagrees with a.yaml:2"]),
        ("runner_config: 3\n", ["a.yaml:1: runner_config = 3: must be a section"]),
        ("callbacks: 3\n", ["a.yaml:1: callbacks = 3: must be a list"]),
        ("callbacks:\n  - 3\n", ["a.yaml:2: callbacks.0 = 3: must be a section"]),
        ("model: 3\nmodel_config: {num_layers: 2}\n", ["a.yaml:1: model: must be a section"]),
    ],
)
def test_what_is_in_the_wrong_place_or_twice_is_an_error(text: str, parts: list[str]):
    message = error_of(text)
    assert all(part in message for part in parts), message


def test_a_top_level_key_below_an_empty_section_stays_at_the_top():
    config = load("runner_wrapper:\ncalculate_per_token_loss: True\nrunner_config:\nseed: 7\n")
    assert config.seed == 7
    assert config.calculate_per_token_loss and not config.runner_wrapper.calculate_per_token_loss


def test_sections_have_their_other_places():
    inside = load(
        "model: {model_config: {moe_config: {use_gmm: True}, num_layers: 3}}\ncallbacks: [{type: MFLossMonitor}]\n"
    )
    outside = load("model_config: {num_layers: 3}\nmoe_config: {use_gmm: True}\ncallback: [{type: MFLossMonitor}]\n")
    assert inside == outside


def test_flat_expert_keys_complete_their_section():
    config = load("model_config: {moe_config: {use_gmm: True}, n_shared_experts: 2}\n")
    assert (config.decoder.moe_config.use_gmm, config.decoder.moe_config.shared_expert_num) == (True, 2)


def test_a_merged_model_section_is_completed_by_the_top_level():
    text = "processor: &base {model_config: {num_layers: 3}}\nmodel: {<<: *base}\nmodel_config: {num_heads: 8}\n"
    config = load(text)
    assert (config.decoder.num_layers, config.decoder.num_heads) == (3, 8)
    assert config.processor == {"model_config": {"num_layers": 3}}


def test_a_moved_key_of_a_merged_section_has_one_value():
    text = "processor: &base {use_gmm: False}\nmodel_config: {<<: *base, use_gmm: True}\n"
    assert load(text).decoder.moe_config.use_gmm


def test_a_merged_task_gives_its_data_set():
    config = load("processor: &base {dataset_config: {held_out: 0.1}}\ntrain_dataset_task: {<<: *base}\n")
    assert config.train_dataset.held_out == 0.1


def test_both_places_of_a_section_complete_each_other():
    config = load(
        "model: {model_config: {num_layers: 3, num_heads: 8}}\nmodel_config: {hidden_size: 128, num_heads: 8}\n"
    )
    assert (config.decoder.num_layers, config.decoder.hidden_size, config.decoder.num_heads) == (3, 128, 8)


@pytest.mark.parametrize(
    ("alias", "main", "value"),
    [
        ("num_hidden_layers", "num_layers", 3),
        ("num_attention_heads", "num_heads", 8),
        ("num_key_value_heads", "n_kv_heads", 2),
        ("ffn_hidden_size", "intermediate_size", 100),
        ("attention_bias", "qkv_has_bias", True),
        ("mlp_bias", "mlp_has_bias", True),
        ("qk_layernorm", "use_qk_norm", True),
        ("theta", "rope_theta", 500.0),
        ("apply_rope_fusion", "use_fused_rope", True),
        ("bias_swiglu_fusion", "use_fused_swiglu", True),
        ("params_dtype", "param_init_type", "float16"),
        ("layernorm_compute_dtype", "layernorm_compute_type", "float16"),
        ("mtp_num_layers", "mtp_depth", 0),
        ("num_nextn_predict_layers", "mtp_depth", 0),
    ],
)
def test_other_names_of_model_keys(alias, main, value):
    config = load(f"model_config:\n  {alias}: {value}\n")
    assert getattr(config.decoder, main) == value
    assert config.source.where(f"model.model_config.{main}") == "a.yaml:2"


@pytest.mark.parametrize(
    ("alias", "main", "value"),
    [
        ("use_fused_ops_permute", "use_fused_ops_permute", True),
        ("moe_permute_fusion", "use_fused_ops_permute", True),
        ("moe_grouped_gemm", "use_gmm", True),
        ("moe_expert_capacity_factor", "capacity_factor", 2.0),
        ("n_routed_experts", "expert_num", 1),
        ("n_shared_experts", "shared_expert_num", 1),
        ("first_k_dense_replace", "first_k_dense_replace", 1),
    ],
)
def test_other_names_of_expert_keys_in_the_section_and_flat(alias, main, value):
    for text in (f"moe_config:\n  {alias}: {value}\n", f"model:\n  model_config:\n    {alias}: {value}\n"):
        assert getattr(load(text).decoder.moe_config, main) == value


def test_two_names_with_one_value_agree():
    assert load("model_config: {num_layers: 3, num_hidden_layers: 3}\n").decoder.num_layers == 3


def test_a_data_set_inside_its_task():
    config = load(TASK + "  dataset_config: *data\n")
    assert config.train_dataset.held_out == 0.1
    alone = load("train_dataset_task:\n  type: CausalLanguageModelDataset\n  dataset_config: {held_out: 0.1}\n")
    assert alone.train_dataset.held_out == 0.1


def test_empty_sections_mean_their_defaults():
    config = load("runner_config:\ncallbacks:\neval_dataset:\nmodel:\n  model_config:\nmoe_config:\nlr_schedule:\n")
    assert config == parse_config("b.yaml", "seed: 1\n")


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("runner_confg: {}\n", "runner_confg", "you probably mean runner_config"),
        ("runner_config:\n  epoch: 1\n", "runner_config.epoch", "runner_config.epochs"),
        ("model:\n  archi: {}\n", "model.archi", "model.arch"),
        ("model_config:\n  num_layer: 3\n", "model_config.num_layer", "model_config.num_layers"),
        ("callbacks:\n  - type: CheckpointMonitor\n    keep_max: 3\n", "callbacks.0.keep_max", "keep_checkpoint_max"),
        ("runner_wrapper:\n  use_clip_gard: True\n", "runner_wrapper.use_clip_gard", "use_clip_grad"),
        ("lr_schedule:\n  warmup_step_: 3\n", "lr_schedule.warmup_step_", "lr_schedule.warmup_step"),
        ("lr_schedule:\n  learning_rte: 1.0\n", "lr_schedule.learning_rte", "lr_schedule.learning_rate"),
        ("lr_schedule:\n  type: ConstantWarmUpLR\n  zzz: 0.1\n", "lr_schedule.zzz", "warmup_steps, warmup_ratio"),
        ("epochs: 3\n", "epochs", "runner_config.epochs"),
        ("optimizer:\n  warmup_steps: 3\n", "optimizer.warmup_steps", "in its section: lr_schedule.warmup_steps"),
        ("model_config: {max_grad_norm: 3}\n", "model_config.max_grad_norm", "runner_wrapper.max_grad_norm"),
        ("optimizer: {lr: 3}\n", "optimizer.lr", "you probably mean optimizer.learning_rate"),  # as others say
        ("lr: 3\n", "lr", "write it in its section: lr_schedule.learning_rate"),
        ("num_train_epochs: 3\n", "num_train_epochs", "runner_config.epochs"),
        ("micro_batch_size: 3\n", "micro_batch_size", "runner_config.batch_size, "),
        ("model: {model_config: {bf16: True}}\n", "model.model_config.bf16", "model.model_config.compute_dtype"),
        ("zzz: 3\n", "zzz", "remove it"),
        ("runner_config.epochs: 3\n", "runner_config.epochs", "write its section, and the rest of its name below"),
        ("model_config: {rope_scaling.factor: 3}\n", "model_config.rope_scaling.factor", "write its section, and the"),
        ("model: {settings: {}}\n", "model.settings", "remove it"),
    ],
)
def test_unknown_keys_name_the_nearest(text, key, fix):
    message = error_of(text)
    assert f": {key}: unknown key" in message
    assert fix in message.split("Fix: ")[1]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("lr_schedule: {type: CosinWithWarmUpLR}\n", ["type = 'CosinWithWarmUpLR'", "mean CosineWithWarmUpLR."]),
        ("callbacks: [{type: LossMonitor}]\n", ["callbacks.0.type = 'LossMonitor'", "MFLossMonitor"]),
        ("callbacks: [{per_print_times: 3}]\n", ["callbacks.0: the key type is missing", "CheckpointMonitor"]),
        ("train_dataset: {data_loader: {type: TextDatset}}\n", ["TextDatset", "you probably mean TextDataset"]),
        ("callbacks: [{type: 3}]\n", ["callbacks.0.type = 3"]),
        ("grouped_lr_schedule: {default: {type: ConstantWarmUpLR}, grouped: [1]}\n", ["a.yaml:1: ", "not yet"]),
        ("grouped_lr_schedule: {default: {learning_rate: 1}}\n", ["a.yaml:1: ", "must be ConstantWarmUpLR, Linear"]),
        (
            "optimizer: {type: AdamWeightDecay}\n",
            ["optimizer.type = 'AdamWeightDecay': must be AdamW, PmaAdamW, SGD or Muon"],
        ),
        (
            "model: {arch: {type: GPT}}\n",
            ["model.arch.type = 'GPT': must be LlamaForCausalLM, Qwen2ForCausalLM, ", "write one of these"],
        ),
        ("model: {arch: {type: Qwen2Moe}}\n", ["write Qwen2MoeForCausalLM."]),
        ("model: {arch: {type: GPTForCausalLM}}\n", ["write one of these"]),  # only the ending is alike
        ("do_eval: maybe\n", ["must be true or false", "Default false"]),
    ],
)
def test_unknown_types_list_the_known_ones(text, parts):
    message = error_of(text)
    assert all(part in message for part in parts), message


def test_types_have_other_spellings():
    text = "callbacks: [{type: CheckpointMointor}]\noptimizer: {type: FusedAdamW}\n"
    config = load(text)
    assert (config.callbacks[0].type, config.optimizer.type) == ("CheckpointMonitor", "AdamW")
    assert "a.yaml:2: optimizer.type FusedAdamW is taken as AdamW" in notes(text)


def test_sections_told_apart_by_type_have_a_default_type():
    config = load("lr_schedule: {learning_rate: 0.1}\ntrain_dataset: {data_loader: {dataset_dir: a}}\n")
    assert config.lr_schedule.type == "CosineWithWarmUpLR"
    assert config.train_dataset.data_loader.type == "TextDataset"


def test_all_problems_are_shown_in_the_order_of_the_file():
    text = BASE + "runner_config:\n  batch_size: four\n  epoch: 3\nseed: -1\nlr_schedule:\n  type: Cosine\n"
    message = error_of(text, "eval_step_interval=x", "rum_mode=eval")
    lines = [line for line in message.splitlines() if not line.startswith("  Fix")]
    assert [line.split(": ")[0] for line in lines[1:]] == [
        "a.yaml:17", "a.yaml:18", "a.yaml:19", "a.yaml:21", "flag --eval_step_interval", "flag --rum_mode",
    ]  # fmt: skip
    assert lines[0] == "6 problems in the configuration."


def test_the_first_twenty_problems_are_shown():
    text = "".join(f"zzz{number}: 1\n" for number in range(2000))
    with pytest.raises(ConfigErrors) as caught:
        load(text, "yyy=1")
    found, left = caught.value, "\n... and 1981 more, in a.yaml, flag --yyy."
    assert str(found).startswith("2001 problems") and str(found).endswith(left)
    assert str(found).count("unknown key") == str(found).count("Fix: ") == 20
    assert str(found.full).count("unknown key") == str(found.full).count("Fix: ") == 2001
    assert {error.exit_code for error in (found, found.full)} == {2}


def test_an_architecture_implies_what_its_name_says():
    assert load("model: {arch: {type: Qwen2ForCausalLM}}\n").decoder.qkv_has_bias
    assert load("model: {arch: {type: Qwen3ForCausalLM}}\n").decoder.use_qk_norm
    explicit = load("model: {arch: {type: Qwen3ForCausalLM}, model_config: {qk_layernorm: False}}\n")
    assert not explicit.decoder.use_qk_norm
    assert not load("model: {arch: {type: LlamaForCausalLM}}\n").decoder.use_qk_norm


def test_the_optimizers_learning_rate_reaches_the_schedule():
    constant = load("optimizer: {learning_rate: 0.01}\n")
    assert (constant.lr_schedule.type, constant.lr_schedule.learning_rate) == ("ConstantWarmUpLR", 0.01)
    peak = load("optimizer: {learning_rate: 0.01}\nlr_schedule: {warmup_steps: 3}\n")
    assert (peak.lr_schedule.type, peak.lr_schedule.learning_rate) == ("CosineWithWarmUpLR", 0.01)
    assert load("optimizer: {learning_rate: 0.01}\nlr_schedule:\n").lr_schedule == constant.lr_schedule
    message = error_of("optimizer: {learning_rate: 0.01}\nlr_schedule: {type: Cosine}\n")
    assert message.startswith("a.yaml:2: lr_schedule.type = 'Cosine': unknown type")
    assert peak.source.where("lr_schedule.learning_rate") == "a.yaml:1 (optimizer.learning_rate)"
    wave = load("optimizer: {learning_rate: 0.01}\nlr_schedule: {type: CosineAnnealingLR, t_max: 5}\n")
    assert wave.lr_schedule.base_lr == 0.01


def test_muon_has_the_defaults_of_mindspore_transformers():
    muon = load("optimizer: {type: Muon}\n").optimizer
    assert (muon.momentum, muon.nesterov, muon.betas, muon.weight_decay) == (0.95, True, [0.95, 0.95], 0.1)
    assert (muon.ns_steps, muon.matched_adamw_rms, muon.eps) == (5, 0.2, 1e-8)
    text = "optimizer: {type: muon, adamw_betas: [0.9, 0.9], adamw_eps: 1e-6, nesterov: False, weight_decay: 0.0}\n"
    own = load(text).optimizer
    assert (own.betas, own.eps, own.nesterov, own.weight_decay) == ([0.9, 0.9], 1e-6, False, 0.0)
    assert load("optimizer: {type: Muon, matched_adamw_rms: null}\n").optimizer.matched_adamw_rms is None


def test_untied_embeddings_are_the_opposite_of_tied_ones():
    assert load("model_config: {untie_embeddings_and_output_weights: False}\n").decoder.tie_word_embeddings


# What Hugging Face's config.json and other optimizers write


def test_rope_parameters_of_transformers_5():
    text = "model_config:\n  rope_parameters: {rope_type: yarn, rope_theta: 5e5, factor: 4.0}\n"
    decoder = load(text).decoder
    assert (decoder.rope_theta, decoder.rope_scaling.rope_type, decoder.rope_scaling.factor) == (5e5, "yarn", 4.0)
    assert load("model_config: {rope_parameters: {rope_theta: 7}}\n").decoder.rope_theta == 7
    plain = load("model_config: {rope_parameters: {rope_type: default, rope_theta: 1e6, partial_rotary_factor: 1.0}}\n")
    assert (plain.decoder.rope_theta, plain.decoder.rope_scaling.rope_type) == (1e6, "default")
    flagged = load(text, "model.model_config.rope_parameters.factor=8", "model_config.rope_parameters.rope_theta=9.0")
    assert (flagged.decoder.rope_scaling.factor, flagged.decoder.rope_theta) == (8, 9.0)
    partial = load("model_config: {head_dim: 16, rope_parameters: {partial_rotary_factor: 0.5}}\n").decoder
    assert (partial.rotary_pct, partial.rotary_size) == (0.5, 8)


def test_a_sliding_window_that_contradicts_itself():
    off = "model_config: {num_layers: 2, sliding_window: 4096, use_sliding_window: False, layer_types: "
    assert load(off + "[full_attention, full_attention]}\n").decoder.window_layers == ()
    for text, part in (
        ("use_sliding_window: True", "use_sliding_window = true: requires sliding_window"),
        ("num_layers: 2, layer_types: [full_attention, sliding_attention]", "contains sliding_attention, but there is"),
        ("num_layers: 3, layer_types: [full_attention]", "must have one entry for each of the 3 layers, and has 1"),
        ("layer_types: [linear_attention]", "must be full_attention or sliding_attention"),
        ("use_mrope: True", "use_mrope = true: not yet supported"),
    ):
        assert part in error_of(f"model_config: {{{text}}}\n")
    mixture = "model: {arch: {type: Qwen3MoeForCausalLM}}\nmodel_config: {expert_num: 4, sliding_window: 8, "
    assert "has the window in other layers than Qwen2" in error_of(mixture + "use_sliding_window: True}\n")


def test_the_dtype_of_a_hugging_face_file_is_told():
    for name in ("dtype", "torch_dtype"):
        assert f"ignored: model_config.{name}" in notes(f"model_config: {{{name}: bfloat16}}\n")


def test_beta1_and_beta2_are_the_betas():
    assert load("optimizer: {beta1: 0.8, beta2: 0.95}\n").optimizer.betas == [0.8, 0.95]
    assert load("optimizer: {beta2: 0.95}\n").optimizer.betas == [0.9, 0.95]
    assert load("optimizer: {beta1: 0.8, beta2: 0.95, betas: [0.8, 0.95]}\n").optimizer.betas == [0.8, 0.95]
    assert load("seed: 1\n", "optimizer.beta1=0.7").optimizer.betas == [0.7, 0.999]
    assert load("optimizer: {type: Muon, beta1: 0.9}\n").optimizer.betas == [0.9, 0.95]
    assert load("optimizer: {type: Muon}\n", "optimizer.betas.1=0.9").optimizer.betas == [0.95, 0.9]
