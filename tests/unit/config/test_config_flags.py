"""Command lines: named flags, dotted flags, --options, and what they turn into."""

from __future__ import annotations

import pytest
from config_helpers import BASE, failure

from trainer.cli.flags import FLAGS, split_arguments
from trainer.config import Config, load_config
from trainer.config.read.relocate import fields_at

PEER_FLAGS = (
    "mode device_id device_target run_mode do_eval train_dataset_dir eval_dataset_dir predict_data predict_batch_size"
    " load_checkpoint auto_trans_ckpt src_strategy_path_or_dir resume_training seed use_parallel profile epochs"
    " batch_size gradient_accumulation_steps sink_mode num_samples output_dir register_path do_sample"
    " trust_remote_code modal_type adapter_id transform_process_num only_save_strategy strategy_load_checkpoint"
    " remote_save_url"
).split()
OUR_FLAGS = (
    "use_clip_grad max_grad_norm use_fused_rope use_fused_swiglu use_gmm enable_gmm_safe_tokens callback_moe_droprate"
    " learning_rate stop_step log_format device_fallback parallel_fallback model pretrained_model_dir"
    " chat tasks num_fewshot limit trackers temperature top_k top_p max_new_tokens"
).split()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Loads the base file, in a folder of its own, with a command line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)

    def load(*argv: str, text: str = "") -> Config:
        if text:
            (tmp_path / "base.yaml").write_text(text)
        arguments = split_arguments(["--config", "base.yaml", *argv])
        assert arguments.config == "base.yaml"
        return load_config(arguments.config, arguments.overrides)

    return load


def test_every_flag_of_mindformers_and_of_this_trainer_is_there():
    assert {flag.name for flag in FLAGS} == {*PEER_FLAGS, *OUR_FLAGS}
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_sets_a_key_of_the_schema_and_says_what_it_does(flag):
    for key in filter(None, (flag.key, flag.also)):
        assert fields_at(key), key
    assert flag.help.endswith(".") and flag.metavar


@pytest.mark.parametrize("argv", [["--use_clip_grad"], ["--use_clip_grad", "True"], ["--use_clip_grad=true"]])
def test_a_boolean_is_switched_on(run, argv):
    assert run(*argv).runner_wrapper.use_clip_grad is True
    assert run(*argv, "--seed", "3").seed == 3


@pytest.mark.parametrize("argv", [["--no-use_clip_grad"], ["--use_clip_grad", "False"], ["--use_clip_grad=FALSE"]])
def test_a_boolean_is_switched_off(run, argv):
    config = run(*argv, text=BASE + "runner_wrapper: {use_clip_grad: True}\n")
    assert config.runner_wrapper.use_clip_grad is False
    assert config.source.where("runner_wrapper.use_clip_grad").startswith("flag --")


def test_the_learning_rate_is_the_peak_of_the_schedule(run):
    assert run("--learning_rate", "0.3").lr_schedule.learning_rate == 0.3
    annealing = BASE + "lr_schedule: {type: CosineAnnealingLR, base_lr: 0.1, t_max: 50}\n"
    assert run("--learning_rate", "0.3", text=annealing).lr_schedule.base_lr == 0.3
    restarts = BASE + "lr_schedule: {type: CosineAnnealingWarmRestarts, learning_rate: 0.1, t_0: 50}\n"
    assert run("--learning_rate", "0.3", text=restarts).lr_schedule.base_lr == 0.3


@pytest.mark.parametrize(
    ("schedule", "key"),
    [
        ("", "learning_rate"),
        ("lr_schedule: {learning_rate: 0.1}\n", "learning_rate"),
        ("lr_schedule: {type: CosineAnnealingLR, base_lr: 0.1, t_max: 50}\n", "base_lr"),
    ],
)
def test_a_learning_rate_beside_that_of_the_optimizer_is_an_error(run, schedule: str, key: str):
    text = BASE + "optimizer: {learning_rate: 0.1}\n" + schedule
    message = failure(lambda: run("--learning_rate", "0.3", text=text))
    assert "optimizer.learning_rate = 0.1: disagrees with" in message
    assert f"lr_schedule.{key} = 0.3 (flag --learning_rate)" in message and "--optimizer.learning_rate" in message


def test_named_flags_reach_their_keys(run):
    config = run(
        *("--mode", "1", "--device_target", "CPU", "--device_id=0", "--run_mode", "finetune", "--do_eval"),
        *("--epochs", "3", "--batch_size", "4", "--gradient_accumulation_steps=5", "--stop_step", "6"),
        *("--max_grad_norm", "0.5", "--train_dataset_dir", "a", "--eval_dataset_dir", "b", "--num_samples", "7"),
        *("--load_checkpoint", "c", "--output_dir", "d", "--seed", "8", "--log_format", "plain", "--use_fused_rope"),
        *("--use_fused_swiglu", "--use_gmm", "--enable_gmm_safe_tokens", "--callback_moe_droprate", "--do_sample"),
        *("--predict_batch_size", "9", "--predict_data", "x y", "z"),
    )
    assert (config.context.mode, config.context.device_target, config.context.device_id) == (1, "CPU", 0)
    assert (config.run_mode, config.do_eval, config.load_checkpoint) == ("finetune", True, "c")
    runner = config.runner_config
    assert (runner.epochs, runner.batch_size, runner.gradient_accumulation_steps, runner.stop_step) == (3, 4, 5, 6)
    assert config.runner_wrapper.max_grad_norm == 0.5
    train, evaluation = config.train_dataset.data_loader, config.eval_dataset.data_loader
    assert (train.dataset_dir, evaluation.dataset_dir) == ("a", "b")
    assert (train.num_samples, evaluation.num_samples) == (7, 7)
    assert (config.output_dir, config.seed, config.log_format) == ("d", 8, "plain")
    assert config.decoder.use_fused_rope and config.decoder.use_fused_swiglu and config.decoder.do_sample
    moe = config.decoder.moe_config
    assert moe.use_gmm and moe.enable_gmm_safe_tokens and moe.callback_moe_droprate
    assert (config.predict_batch_size, config.predict_data) == (9, ["x y", "z"])


def test_num_samples_makes_no_eval_dataset(run):
    assert run("--num_samples", "7").eval_dataset is None


@pytest.mark.parametrize("prompt", ["1", "True", "[b", "a: b", "{", "'x", "None", "# no comment"])
def test_prompts_are_taken_as_they_are(run, prompt):
    assert run("--predict_data", prompt).predict_data == prompt
    assert run("--predict_data", prompt, prompt).predict_data == [prompt, prompt]


@pytest.mark.parametrize("words", [("wandb", "mlflow"), ("[wandb, mlflow]",), ("[]",)])
def test_trackers_are_words_or_a_list_as_in_a_file(run, words):
    expected = [] if words == ("[]",) else ["wandb", "mlflow"]
    assert run("--trackers", *words).trackers == expected


def test_resume_training_alone_with_a_name_and_off(run):
    assert run("--resume_training").resume_training is True
    assert run("--resume_training", "--seed", "2").resume_training is True
    assert run("--resume_training", "True").resume_training is True
    assert run("--resume_training", "False").resume_training is False
    assert run("--no-resume_training", text=BASE + "resume_training: True\n").resume_training is False
    assert run("--resume_training", "step-00000100").resume_training == "step-00000100"


def test_dotted_flags(run):
    config = run(
        "--runner_config.epochs", "3", "--callbacks.1.save_checkpoint_steps=50", "--optimizer.betas", "[0.9,0.95]"
    )
    assert (config.runner_config.epochs, config.callbacks[1].save_checkpoint_steps) == (3, 50)
    assert config.optimizer.betas == [0.9, 0.95]
    config = run("--model.model_config.n_kv_heads", "2", "--model.model_config.n_kv_heads", "None")
    assert config.decoder.n_kv_heads is None
    config = run("--train_dataset.data_loader.dataset_dir=x=y", "--output_dir=a=b=c", "--optimizer.betas.1", "0.5")
    assert (config.train_dataset.data_loader.dataset_dir, config.output_dir) == ("x=y", "a=b=c")
    assert config.optimizer.betas == [0.9, 0.5]
    for argv in (["--optimizer.weight_decay", "1e3"], ["--optimizer.weight_decay=1e3"]):
        assert run(*argv).optimizer.weight_decay == 1000.0


def test_dotted_booleans_are_like_named_ones(run):
    assert run("--runner_wrapper.use_clip_grad").runner_wrapper.use_clip_grad is True
    assert run("--runner_wrapper.use_clip_grad", "--seed", "2").runner_wrapper.use_clip_grad is True
    assert run("--no-train_dataset.drop_remainder").train_dataset.drop_remainder is False


def test_top_level_keys_are_flags(run):
    config = run("--eval_step_interval", "7", "--no-report", "--model_config", "{num_layers: 3, num_heads: 8}")
    assert (config.eval_step_interval, config.report) == (7, False)
    assert config.decoder.num_heads == 8


def test_options_take_several_pairs(run):
    options = ["seed=3", "output_dir=a=b", "runner_config.epochs=4", "runner_wrapper.use_clip_grad=True"]
    config = run("--options", *options, "--do_eval", "--mode", "1")
    assert (config.seed, config.output_dir, config.runner_config.epochs, config.do_eval) == (3, "a=b", 4, True)
    assert config.runner_wrapper.use_clip_grad is True and config.context.mode == 1
    assert config.source.where("seed") == "--options"
    assert run("--options=seed=5").seed == 5


def test_precedence_is_file_options_named_dotted(run):
    text = BASE + "runner_config: {epochs: 2, batch_size: 2, stop_step: 2}\nseed: 2\n"
    argv = ["--runner_config.epochs", "5", "--epochs", "4", "--batch_size", "4"]
    argv += ["--options", "runner_config.epochs=3", "runner_config.batch_size=3", "runner_config.stop_step=3"]
    config = run(*argv, text=text)
    runner = config.runner_config
    assert (runner.epochs, runner.batch_size, runner.stop_step, config.seed) == (5, 4, 3, 2)
    assert runner.gradient_accumulation_steps == 1


def test_hyphens_in_named_flags_mean_underscores(run):
    assert run("--use-clip-grad").runner_wrapper.use_clip_grad is True
    assert run("--max-grad-norm", "2").runner_wrapper.max_grad_norm == 2


def test_negative_numbers_are_values(run):
    assert run("--eval_step_interval", "-1").eval_step_interval == -1
    assert "seed = -1: must be at least 0" in failure(lambda: run("--seed", "-1"))


def test_a_misspelt_dotted_key_is_an_error_not_a_new_key(run):
    message = failure(lambda: run("--runner_config.epoch", "3"))
    assert message.startswith("flag --runner_config.epoch: runner_config.epoch: unknown key in runner_config.")
    assert "runner_config.epochs" in message


def test_a_relative_config_counts_from_the_working_directory(run, tmp_path, monkeypatch):
    below = tmp_path / "below"
    below.mkdir()
    (below / "base.yaml").write_text("seed: 77\n")
    assert run().seed == 1
    monkeypatch.chdir(below)
    assert run().seed == 77


def test_a_missing_key_is_never_none(run):
    config = run()
    with pytest.raises(AttributeError):
        config.runner_config.epoch  # noqa: B018
    with pytest.raises(AttributeError):
        config.no_such_section  # noqa: B018
    schedule = "lr_schedule: {type: CosineAnnealingLR}\n"
    assert "lr_schedule.t_max: this key is required" in failure(lambda: run(text=BASE + schedule))


def test_what_belongs_to_the_caller_stays_in_order():
    arguments = split_arguments(["plan", "--config", "a.yaml", "--json", "--seed", "3"], command_flags={"--json"})
    assert arguments.rest == ["plan", "--json"]
    assert arguments.config == "a.yaml"
    assert split_arguments(["--help"]).rest == ["--help"]
    assert split_arguments([]) == (None, [], [])


@pytest.mark.parametrize(("name", "flag"), [
    ("writ", "write"), ("againts", "against"), ("trace_steps", "steps"), ("max_memory", "max_device_memory"),
    ("stop_steps", "stop_step"), ("batchsize", "batch_size"), ("outptu", "output"), ("outptu_dir", "output_dir"),
])  # fmt: skip
def test_a_mistyped_flag_of_a_command_is_named(name: str, flag: str) -> None:
    """Its own flags come before those of a run, unless one of these is nearly what is written."""
    options = ("--write", "--against", "--steps", "--output", "--max_device_memory")
    message = failure(lambda: split_arguments([f"--{name}", "1"], ("--help",), options))
    assert f"you probably mean --{flag}." in message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--use_clipgrad"], ["flag --use_clipgrad: unknown flag", "you probably mean --use_clip_grad"]),
        (["--confg", "a"], ["unknown flag", "--config"]),
        (["--num_layers", "3"], ["unknown flag", "--model.model_config.num_layers"]),
        (["--warmup_steps", "3"], ["unknown flag", "name its section: --lr_schedule.warmup_steps."]),
        (["--save_checkpoint_steps", "3"], ["callbacks.N.save_checkpoint_steps", "the place of CheckpointMonitor in"]),
        (["--use_gating_sigmoid"], ["unknown flag", "--model.model_config.moe_config.use_gating_sigmoid"]),
        (["--attention_dropuot", "0.1"], ["unknown flag", "mean --model.model_config.attention_dropout."]),
        (["--resume"], ["flag --resume: unknown flag", "you probably mean --resume_training."]),
        (["--zzzz"], ["unknown flag", "run_trainer.py --help"]),
        (["--no-zzzz"], ["unknown flag"]),
        (["--max_grad_norm"], ["flag --max_grad_norm: needs a value"]),
        (["--max_grad_norm", "--do_eval"], ["flag --max_grad_norm: needs a value"]),
        (["--predict_data"], ["flag --predict_data: needs a value"]),
        (["--options"], ["flag --options: needs a value"]),
        (["--options", "seed"], ["flag --options: 'seed' is not key=value"]),
        (["--options", "=3"], ["is not key=value"]),
        (["--config"], ["flag --config: needs a value", "configs/quickstart.yaml"]),
        (["--config", "a", "--config=b"], ["flag --config: is given twice"]),
        (["--runner_config.epochs"], ["flag --runner_config.epochs: needs a value"]),
        (["--use_clip_grad", "maybe"], ["use_clip_grad = 'maybe': must be true or false", "--no-use_clip_grad"]),
        (["--use_clip_grad", "1"], ["must be true or false"]),
        (["--no-seed"], ["only a true/false flag can be negated", "--seed VALUE"]),
        (["--no-use_clip_grad=True"], ["takes no value"]),
        (["--no-runner_config.epochs"], ["only a true/false key can be negated"]),
    ],
)
def test_a_wrong_command_line_is_one_message(argv, parts):
    message = failure(lambda: split_arguments(argv))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--register_path", "x"], ["flag --register_path: register_path = 'x': not yet supported"]),
        (["--adapter_id", "x"], ["flag --adapter_id: adapter_id = 'x'", "pet_config, which is absent"]),
        (["--modal_type", "image", "text"], ["modal_type = ['image', 'text']: not yet supported"]),
        (["--only_save_strategy"], ["only_save_strategy = true: not yet supported"]),
    ],
)
def test_flags_that_cannot_be_honoured_are_errors(run, argv, parts):
    message = failure(lambda: run(*argv))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "argv",
    [
        ["--trust_remote_code", "True"],
        ["--transform_process_num", "4"],
        ["--remote_save_url", "s3://x"],
        ["--auto_trans_ckpt"],
        ["--strategy_load_checkpoint", "x"],
        ["--sink_mode", "True"],
    ],
)
def test_flags_that_change_nothing_give_a_note(run, argv):
    from trainer.config import config_notes

    told = "\n".join(config_notes(run(*argv)))
    assert f"flag {argv[0]}" in told and "ignored: " in told
