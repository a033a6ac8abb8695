"""Reading YAML files: scalars, syntax errors, anchors and the places of keys."""

from __future__ import annotations

import os

import pytest
from config_helpers import BASE, error_of, failure, load, notes

from trainer.config import load_config
from trainer.config.read.nodes import plain
from trainer.config.read.yaml_reader import parse_document


def value_of(text: str) -> object:
    """Returns the value of ``key: text``."""
    root, _ = parse_document("a.yaml", f"key: {text}\n")
    return plain(root)["key"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("1.e-6", 1e-6),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("None", None),
        ("", None),
        ("on", "on"),
        ("yes", "yes"),
        ("No", "No"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'1'", "1"),
        ('"None"', "None"),
        ("!!str 12", "12"),
        ("!!float 3", 3.0),
        ("[1, 2.0, x]", [1, 2.0, "x"]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)


def test_nan_is_a_number():
    found = value_of(".NaN")
    assert isinstance(found, float) and found != found


@pytest.mark.parametrize(
    ("text", "line", "rule"),
    [
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("---\n", 1, "empty"),
        ("seed: 1\nrunner_config:\n\tepochs: 2\n", 3, "use spaces instead of tabs"),
        ("seed: 1\noutput_dir: *out\n", 2, "define the anchor above"),
        ("seed: 1\nseed: 2\n", 2, "a.yaml:1"),
        ("seed: 1\nseed: True\n", 2, "a.yaml:1"),
        ("model:\n  arch: {type: a}\n  arch: {type: b}\n", 3, "a.yaml:2"),
        ("- 1\n- 2\n", 1, "the file holds a list"),
        ("just words\n", 1, "a single value"),
        ("seed: 1\n---\nseed: 2\n", 3, "second document"),
        ("seed: [1, 2\n", 2, "close the bracket"),
        ("seed: {a: 2\n", 2, "close the brace"),
        ("output_dir: 'abc\n", 2, "close the quotation mark"),
        ("seed: 1\n epochs: 2\n", 2, "indentation"),
        ("model:\n  arch: 1\n batch: 2\n", 3, "indentation"),
        ("seed: 1\nepochs\n", 3, "write key: value"),
        ("seed: !!python/object:os.system 1\n", 1, "tag"),
        ("seed: !!int abc\n", 1, "tag"),
        ("1: 2\n", 1, "a key must be a name"),
        ("[a]: 2\n", 1, "a key must be a name"),
        ("processor: &x\n  a: *x\n", 2, "refers to itself"),
        ("seed: 1\n<<: 3\n", 2, "must refer to a mapping"),
        ("seed: 1\noutput_dir: a\x01b\n", 2, "U+0001"),
        ("seed: 1\nbinary: \0\n", 2, "U+0000"),
    ],
)
def test_a_mistake_in_the_yaml_names_its_line_and_a_fix(text, line, rule):
    message = error_of(text)
    assert f"a.yaml:{line}: " in message
    assert rule in message
    assert "\n  Fix: " in message


def test_a_file_that_cannot_be_read_is_one_message(tmp_path):
    assert "does not exist" in failure(lambda: load_config(str(tmp_path / "none.yaml")))
    assert "Fix: correct the path." in failure(lambda: load_config(str(tmp_path / "none.yaml")))
    assert "is a directory" in failure(lambda: load_config(str(tmp_path)))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"seed: 1\nname: \xff\xfe\n")
    assert f"{binary}:2: byte 0xff is not UTF-8 text" in failure(lambda: load_config(str(binary)))
    binary.write_bytes(b"seed: 1\nname: \0\n")
    assert f"{binary}:2: the file is binary" in failure(lambda: load_config(str(binary)))
    secret = tmp_path / "secret.yaml"
    secret.write_text("seed: 1\n")
    below = secret / "a.yaml"
    assert "cannot be read" in failure(lambda: load_config(str(below)))
    if os.geteuid() != 0:
        secret.chmod(0)
        assert "cannot be read" in failure(lambda: load_config(str(secret)))


def test_a_missing_file_is_one_message_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "relative to the working directory, which has been" in failure(lambda: load_config("none.yaml"))


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfseed: 3\r\nrunner_config:\r\n  epochs: 4\r\n")
    config = load_config(str(path))
    assert (config.seed, config.runner_config.epochs) == (3, 4)
    assert config.source.where("runner_config.epochs") == f"{path}:3"


def test_where_names_line_flag_or_nothing():
    config = load(BASE, "runner_config.epochs=3")
    assert config.source.where("model.model_config.num_layers") == "a.yaml:3"
    assert config.source.where("callbacks.1.save_checkpoint_steps") == "a.yaml:15"
    assert config.source.where("train_dataset") == "a.yaml:8"
    assert config.source.where("runner_config.epochs") == "flag --runner_config.epochs"
    assert config.source.where("runner_config.batch_size") == ""


def test_anchors_aliases_and_merge_keys():
    config = load(
        """\
train_dataset: &data
  data_loader: &loader {type: TextDataset, dataset_dir: a}
  prefetch_size: 5
  max_batches: 3
eval_dataset:
  <<: *data
  data_loader:
    <<: [*loader]
    dataset_dir: b
  max_batches: 7
runner_config: {epochs: &n 3, batch_size: *n}
"""
    )
    assert config.train_dataset.data_loader.dataset_dir == "a"
    assert config.eval_dataset.data_loader.dataset_dir == "b"
    assert config.eval_dataset.prefetch_size == 5
    assert (config.train_dataset.max_batches, config.eval_dataset.max_batches) == (3, 7)
    assert (config.runner_config.epochs, config.runner_config.batch_size) == (3, 3)


def test_a_key_that_stands_twice_with_the_same_value_is_a_note():
    text = "model_config:\n  qk_layernorm: False\n  num_layers: 2\n  qk_layernorm: false\n"
    assert load(text).decoder.num_layers == 2
    assert "model_config.qk_layernorm stands at a.yaml:2 and at a.yaml:4, with the same value" in notes(text)


def test_an_ellipsis_line_is_left_out_with_a_note():
    text = "runner_config:\n  ...\n  epochs: 3\n  ...\nseed: 5\n...\n"
    config = load(text)
    assert (config.runner_config.epochs, config.seed) == (3, 5)
    assert "a.yaml: left out the lines of only '...' (2, 4)" in notes(text)


def test_an_ellipsis_that_ends_the_document_needs_no_note():
    assert notes("seed: 5\n...\n") == ""


def test_an_ellipsis_within_text_stays():
    config = load(
        'predict_data: |\n  once\n  ...\n  twice\noutput_dir: "a\n  ...\n  b"\nrunner_config:\n  ...\n  epochs: 2\n'
    )
    assert config.predict_data == "once\n...\ntwice\n"
    assert config.output_dir == "a ... b"
    assert config.runner_config.epochs == 2


def test_lines_stay_right_behind_an_ellipsis():
    assert "a.yaml:3: runner_config.epoch:" in error_of("runner_config:\n  ...\n  epoch: 3\n")


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("configs/quikstart.yaml", "configs/quickstart.yaml"),
        ("confgs/quickstart.yaml", "configs/quickstart.yaml"),
        ("confgs/quikstart.yaml", ""),  # one name is corrected, not two
        ("configs/part-2.yaml", ""),  # another number is another file
        ("configs/prt-1.yaml", "configs/part-1.yaml"),
    ],
)
def test_a_misspelt_path_is_told_the_one_that_is_there(tmp_path, monkeypatch, name, guess):
    (tmp_path / "configs").mkdir()
    for each in ("quickstart.yaml", "part-1.yaml"):
        (tmp_path / "configs" / each).write_text(BASE)
    monkeypatch.chdir(tmp_path)
    message = failure(lambda: load_config(name))
    assert (f"Fix: you probably mean {guess}." in message) == bool(guess)
    assert ("Fix: correct the path: it is relative to" in message) != bool(guess)
