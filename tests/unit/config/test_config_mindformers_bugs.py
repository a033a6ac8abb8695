"""What goes wrong with configurations in MindSpore Transformers, and must not go wrong here: a test for each."""

from __future__ import annotations

import pytest
from config_helpers import BASE, error_of, failure, load

from trainer.cli.flags import split_arguments
from trainer.config import Config, load_config


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Loads the base file, in a folder of its own, with a command line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)

    def load_line(*argv: str) -> Config:
        arguments = split_arguments(["--config", "base.yaml", *argv])
        return load_config(arguments.config, arguments.overrides)

    return load_line


def test_options_true_is_true(run):
    config = run("--options", "runner_wrapper.use_clip_grad=True", "do_eval=true")
    assert config.runner_wrapper.use_clip_grad is True
    assert config.do_eval is True


@pytest.mark.parametrize(("text", "value"), [("1.0", 1.0), ("1e3", 1000.0), ("2", 2.0)])
def test_dotted_numbers_are_numbers(run, text, value):
    assert run("--optimizer.weight_decay", text).optimizer.weight_decay == value
    assert run(f"--optimizer.weight_decay={text}").optimizer.weight_decay == value


def test_dotted_none_is_null(run):
    assert (
        run("--model.model_config.n_kv_heads", "2", "--model.model_config.n_kv_heads", "None").decoder.n_kv_heads
        is None
    )


def test_a_misspelt_dotted_key_is_an_error_not_a_new_key(run):
    message = failure(lambda: run("--runner_config.epoch", "3"))
    assert message.startswith("flag --runner_config.epoch: runner_config.epoch: unknown key in runner_config.")
    assert "runner_config.epochs" in message


def test_values_holding_an_equals_sign_are_kept_whole(run):
    assert run("--output_dir=a=b=c").output_dir == "a=b=c"
    assert run("--options", "output_dir=a=b=c").output_dir == "a=b=c"
    assert run("--train_dataset.data_loader.dataset_dir=x=y").train_dataset.data_loader.dataset_dir == "x=y"


def test_lists_can_be_addressed(run):
    assert run("--callbacks.1.save_checkpoint_steps", "50").callbacks[1].save_checkpoint_steps == 50
    assert run("--optimizer.betas.1", "0.5").optimizer.betas == [0.9, 0.5]


def test_mode_1_ignores_no_other_flag(run):
    config = run("--mode", "1", "--epochs", "3", "--seed", "4", "--options", "do_eval=True")
    assert (config.context.mode, config.runner_config.epochs, config.seed, config.do_eval) == (1, 3, 4, True)


def test_a_relative_config_counts_from_the_working_directory(run, tmp_path, monkeypatch):
    below = tmp_path / "below"
    below.mkdir()
    (below / "base.yaml").write_text("seed: 77\n")
    assert run().seed == 1
    monkeypatch.chdir(below)
    assert run().seed == 77


def test_a_missing_key_is_never_none():
    config = load("seed: 1\n")
    with pytest.raises(AttributeError):
        config.runner_config.epoch  # noqa: B018
    with pytest.raises(AttributeError):
        config.no_such_section  # noqa: B018
    assert "lr_schedule.t_max: this key is required" in error_of("lr_schedule: {type: CosineAnnealingLR}\n")
