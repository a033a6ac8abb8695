"""Overrides: precedence, how values parse, lists by index, anchors that follow."""

from __future__ import annotations

import pytest
from config_helpers import BASE, error_of, failure, load, notes

from trainer.cli.flags import split_arguments
from trainer.config import Override, load_config, parse_config
from trainer.errors import UserError

ANCHORED = """\
train_dataset: &data
  data_loader: {type: TextDataset, dataset_dir: a}
  held_out: &fraction 0.1
eval_dataset: *data
train_dataset_task:
  dataset_config: *data
runner_config:
  batch_size: &size 4
  epochs: 1
model_config:
  batch_size: *size
  hidden_dropout: *fraction
"""


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("optimizer.weight_decay=1.0", 1.0),
        ("optimizer.weight_decay=1e3", 1000.0),
        ("optimizer.weight_decay=1", 1),
        ("optimizer.weight_decay=.5", 0.5),
        ("optimizer.betas=[0.9, 0.95]", [0.9, 0.95]),
        ("optimizer.betas=[0.9,0.95]", [0.9, 0.95]),
        ("lr_schedule.warmup_steps=None", None),
        ("lr_schedule.warmup_steps=null", None),
        ("lr_schedule.warmup_steps=12", 12),
        ("runner_wrapper.use_clip_grad=True", True),
        ("runner_wrapper.use_clip_grad=false", False),
        ("output_dir=a=b=c", "a=b=c"),
        ("output_dir=2024", "2024"),
        ("output_dir=1e3", "1e3"),
        ("output_dir='quoted'", "quoted"),
        ("output_dir=C:/out: 1 # x", "C:/out: 1 # x"),
        ("output_dir=*star", "*star"),
        ("predict_data=True", "True"),
        ("predict_data=[a, b]", ["a", "b"]),
        ("resume_training=True", True),
        ("resume_training=step-00000100", "step-00000100"),
        ("callbacks.1.save_checkpoint_steps=50", 50),
        ("callbacks.1.keep_checkpoint_max=2", 2),
        ("model_config.num_layers=7", 7),
        ("model.model_config.num_hidden_layers=7", 7),
        ("train_dataset_task.dataset_config.held_out=0.5", 0.5),
        ("model.model_config.rope_scaling.factor=4", 4),
    ],
)
def test_values_parse_as_yaml(pair, value):
    key = pair.split("=")[0]
    config = load(BASE, pair)
    found = config
    for name in {
        "model_config.num_layers": "model.settings.num_layers",
        "model.model_config.num_hidden_layers": "model.settings.num_layers",
        "train_dataset_task.dataset_config.held_out": "train_dataset.held_out",
        "model.model_config.rope_scaling.factor": "model.settings.rope_scaling.factor",
    }.get(key, key).split("."):
        found = found[int(name)] if name.isdecimal() else getattr(found, name)
    assert found == value
    assert isinstance(found, bool) == isinstance(value, bool)


def test_later_overrides_win_and_their_source_is_known():
    config = load(BASE, "seed=3", "seed=4", "model_config.num_layers=5", "model.model_config.num_hidden_layers=6")
    assert (config.seed, config.decoder.num_layers) == (4, 6)
    assert config.source.where("model.model_config.num_layers") == "flag --model.model_config.num_hidden_layers"


def test_an_override_by_another_name_does_not_disagree_with_the_file():
    assert load("model_config: {num_hidden_layers: 3}\n", "model.model_config.num_layers=4").decoder.num_layers == 4
    flat = load("model_config: {moe_grouped_gemm: False}\n", "moe_config.use_gmm=True")
    assert flat.decoder.moe_config.use_gmm


def test_an_empty_value_is_no_default():
    """As `--seed "$SEED"` without the variable gives it."""
    text = "seed: 3\nload_checkpoint: output\nloss: {type: ipo}\n"
    for key, rule in [("loss.type", "must be dpo, ipo, "), ("seed", "an integer"), ("do_eval", "true or false")]:
        assert f"flag --{key}: {key} = '': " in (message := error_of(text, f"{key}=")) and rule in message
    message = error_of("lr_schedule: {type: ConstantWarmUpLR}\n", "lr_schedule.type=")
    assert "flag --lr_schedule.type: lr_schedule.type = '': unknown type, which must be ConstantWarmUpLR" in message
    assert load(text, "load_checkpoint=").load_checkpoint == ""  # a text
    assert load(text, "loss=").loss is None


def test_a_whole_list_or_section_can_be_given():
    config = load(BASE, "callbacks=[{type: MFLossMonitor}]", "lr_schedule={type: CosineAnnealingLR, t_max: 3}")
    assert [callback.type for callback in config.callbacks] == ["MFLossMonitor"]
    assert config.lr_schedule.t_max == 3
    assert config.source.where("lr_schedule.t_max") == "flag --lr_schedule"


def test_a_section_that_the_file_lacks_is_made():
    config = load("seed: 1\n", "eval_dataset.data_loader.dataset_dir=b", "lr_schedule.type=LinearWithWarmUpLR")
    assert config.eval_dataset.data_loader.dataset_dir == "b"
    assert config.lr_schedule.type == "LinearWithWarmUpLR"
    assert load("eval_dataset: null\nrunner_config:\n", "eval_dataset.max_batches=3").eval_dataset.max_batches == 3


@pytest.mark.parametrize(
    ("key", "name", "item"),
    [
        ("callbacks", "save_checkpoint_steps", "{type: CheckpointMonitor, save_checkpoint_steps: 3}"),
        ("train_dataset.data_loader.sources", "path", "{path: 3}"),
    ],
)
def test_an_item_of_an_empty_list_is_told_as_it_can_be_written(key: str, name: str, item: str):
    with pytest.raises(UserError) as caught:
        parse_config("a.yaml", "seed: 1\n", [Override(f"{key}.0.{name}", "3", "flag")])
    assert caught.value.fix == f"write the list, for example --{key} '[{item}]'"


def test_an_override_only_where_its_section_is_present():
    override = Override("eval_dataset.data_loader.num_samples", "3", "flag --num_samples", only_if_present=True)
    assert parse_config("a.yaml", "seed: 1\n", [override]).eval_dataset is None
    with_section = parse_config("a.yaml", "eval_dataset: {max_batches: 1}\n", [override])
    assert with_section.eval_dataset.data_loader.num_samples == 3


@pytest.mark.parametrize(
    ("pair", "parts"),
    [
        ("runner_config.epoch=3", ["runner_config.epoch: unknown key", "runner_config.epochs"]),
        ("runner_confg.epochs=3", ["runner_confg: unknown key", "runner_config"]),
        ("runner_config.epochs=x", ["runner_config.epochs = 'x': must be an integer"]),
        ("callbacks.2.type=x", ["callbacks is a list without item '2'", "valid: 0 to 1"]),
        ("callbacks.-1.type=x", ["callbacks is a list without item '-1'", "valid: 0 to 1"]),
        ("callbacks.first.type=x", ["callbacks is a list without item 'first'"]),
        ("optimizer.betas.5=0.1", ["optimizer.betas.5"]),
        ("seed.x=1", ["seed = {'x': 1}: must be an integer"]),
        ("model.model_config.num_layers.x=1", ["model.model_config.num_layers: is a value (2), it has no key x"]),
        ("optimizer.betas=[0.9", ["optimizer.betas = '[0.9': is not a valid list"]),
        ("optimizer.betas={a", ["is not a valid list, mapping or quoted text"]),
        ("a..b=1", ["a..b: is not a dotted key"]),
        (".=1", ["is not a dotted key"]),
    ],
)
def test_a_wrong_override_names_its_flag(pair, parts):
    message = error_of(BASE, pair)
    assert f"flag --{pair.split('=')[0]}: " in message
    assert all(part in message for part in parts), message


def test_a_value_in_place_of_a_list_is_told_how_one_is_written():
    message = failure(lambda: load(BASE, "optimizer.betas=0.9"))
    assert "optimizer.betas = 0.9: must be a list" in message and "write a list, for example [0.9, 0.999];" in message


def test_a_misspelt_type_is_told_the_nearest_name_also_a_second_one():
    message = failure(lambda: load(BASE, "lr_schedule.type=cosin"))
    assert "lr_schedule.type = 'cosin': unknown type" in message and "you probably mean cosine." in message
    message = failure(lambda: load(BASE, "optimizer.type=adam"))
    assert "optimizer.type = 'adam': must be AdamW" in message and "Fix: write AdamW." in message


def test_an_index_into_an_empty_list():
    assert "valid: the list is empty" in error_of("seed: 1\n", "callbacks.0.type=MFLossMonitor")
    assert "valid: only index 0" in error_of("callbacks: [{type: MFLossMonitor}]\n", "callbacks.1.per_print_times=2")


def test_aliases_follow_an_override_of_their_anchor():
    config = load(ANCHORED, "runner_config.batch_size=8", "train_dataset.held_out=0.2")
    assert (config.runner_config.batch_size, config.decoder.batch_size) == (8, 8)
    assert (config.train_dataset.held_out, config.eval_dataset.held_out) == (0.2, 0.2)
    assert config.decoder.hidden_dropout == 0.2
    told = notes(ANCHORED, "runner_config.batch_size=8")
    assert "runner_config.batch_size is anchored, model.model_config.batch_size follows" in told


def test_keys_added_to_an_anchored_section_reach_its_aliases():
    config = load(ANCHORED, "train_dataset.data_loader.num_samples=9", "train_dataset.max_batches=2")
    assert config.eval_dataset.data_loader.num_samples == 9
    assert config.eval_dataset.max_batches == 2
    told = notes(ANCHORED, "train_dataset.data_loader.num_samples=9")
    assert "train_dataset.data_loader.num_samples is anchored, eval_dataset.data_loader.num_samples follows" in told


def test_an_override_of_an_alias_changes_that_place_alone():
    config = load(ANCHORED, "model_config.batch_size=8", "eval_dataset.data_loader.dataset_dir=b")
    assert (config.runner_config.batch_size, config.decoder.batch_size) == (4, 8)
    assert config.train_dataset.data_loader.dataset_dir == "a"
    assert config.eval_dataset.data_loader.dataset_dir == "b"


def test_an_alias_that_was_changed_alone_no_longer_follows():
    config = load(ANCHORED, "eval_dataset.held_out=0.3", "train_dataset.held_out=0.2")
    assert (config.train_dataset.held_out, config.eval_dataset.held_out) == (0.2, 0.3)


def test_an_anchor_of_another_kind_of_value_is_followed_too():
    text = "optimizer: {betas: &betas [0.9, 0.95]}\nprocessor: {a: *betas, b: &none null}\nmetric: {c: *none}\n"
    config = load(text, "optimizer.betas=[0.8, 0.9]", "processor.b={d: 1}")
    assert config.processor == {"a": [0.8, 0.9], "b": {"d": 1}}
    assert config.metric == {"c": {"d": 1}}


def test_merge_keys_follow_their_base_and_can_be_changed_alone():
    text = "train_dataset: &data {held_out: 0.1, max_batches: 1}\neval_dataset: {<<: *data, batch_size: 2}\n"
    followed = load(text, "train_dataset.held_out=0.2", "train_dataset.prefetch_size=7")
    assert (followed.eval_dataset.held_out, followed.eval_dataset.prefetch_size) == (0.2, 7)
    assert "train_dataset.held_out is anchored, eval_dataset.held_out follows" in notes(
        text, "train_dataset.held_out=0.2"
    )
    assert load(text, "eval_dataset.max_batches=null").eval_dataset.max_batches == 0
    alone = load(text, "eval_dataset.held_out=0.3")
    assert (alone.train_dataset.held_out, alone.eval_dataset.held_out) == (0.1, 0.3)


def test_a_list_that_is_an_alias_is_changed_alone():
    text = "optimizer: {betas: &betas [0.9, 0.95]}\nprocessor: {a: *betas}\n"
    config = load(text, "processor.a.0=0.5")
    assert (config.optimizer.betas, config.processor) == ([0.9, 0.95], {"a": [0.5, 0.95]})


def test_an_override_replaces_all_names_of_its_key():
    text = "model_config: {num_layers: 3, num_hidden_layers: 3}\n"
    config = load(text, "model_config.n_layers=4")
    assert config.decoder.num_layers == 4


def test_flat_expert_keys_are_overridden_in_their_section():
    text = "model_config: {moe_config: {use_gmm: False}, shared_expert_num: 1}\n"
    config = load(text, "model.model_config.moe_grouped_gemm=True")
    assert (config.decoder.moe_config.use_gmm, config.decoder.moe_config.shared_expert_num) == (True, 1)


def test_an_override_that_names_nothing_anchored_says_nothing():
    assert notes(ANCHORED, "runner_config.epochs=5") == notes(ANCHORED)
    assert notes(BASE, "callbacks.01.save_checkpoint_steps=5") == notes(BASE)


def test_the_file_is_never_changed_by_overrides(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(ANCHORED)
    load_config(str(path), [Override("runner_config.epochs", "5", "--options")])
    assert path.read_text() == ANCHORED
    assert load_config(str(path)).runner_config.epochs == 1


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--predict_data", "one 🙂"], ["one 🙂"]),
        (["--predict_data", "[a]", 'b "c"\n'], ["[a]", 'b "c"\n']),
        (["--options", "predict_data=[a, b]"], ["a", "b"]),
        (["--predict_data=[a, b]"], ["[a, b]"]),
    ],
)
def test_an_override_as_a_flag_has_the_same_value(words: list[str], values: list[str]):
    """Sweeps and smoke tests give their runs the flags that they got."""
    given = split_arguments(words).overrides
    for overrides in (given, split_arguments([each.flag for each in given]).overrides):
        prompts = parse_config("a.yaml", BASE, overrides).predict_data
        assert prompts in (values, "".join(values))


def test_options_are_named_in_messages():
    message = failure(lambda: parse_config("a.yaml", BASE, [Override("runner_config.epochs", "0", "--options")]))
    assert message.startswith("--options: runner_config.epochs = 0: must be at least 1.")


def test_null_removes_an_unknown_key_of_the_file_too():
    text = BASE + "unheard_of: 3\nrunner_config: {nobody_knows: 1, epochs: 2}\n"
    config = load(text, "unheard_of=null", "runner_config.nobody_knows=None")
    assert config.runner_config.epochs == 2
    flags = split_arguments(["--config", "a.yaml", "--unheard_of=null", "--runner_config.nobody_knows", "None"])
    assert parse_config("a.yaml", text, flags.overrides) == config
    assert "unheard_of: unknown key" in error_of(BASE, "unheard_of=null")  # the file has none
    with pytest.raises(UserError, match="unknown flag"):
        split_arguments(["--unheard_of", "3"])
