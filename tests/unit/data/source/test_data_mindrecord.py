"""MindRecord files: rows are read as MindSpore's own reader reads them, and damaged files are refused."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from command_lines import answers_of
from data_helpers import jsonl, make_config
from fork_server import FORKED, ensure_server

from trainer.data import IGNORE_INDEX
from trainer.data.batches.batch import Batch
from trainer.data.datasets import build_datasets, build_eval_dataset, data_layout
from trainer.data.source.indexed import Location
from trainer.data.source.mindrecord import open_mindrecord
from trainer.errors import RunError, UserError

REPOSITORY = Path(__file__).resolve().parents[4]
HERE = Location("train_dataset.data_loader.dataset_dir", "run.yaml:4")
T, ROWS, VOCAB, PAD, EOD = 8, 20, 70_000, 1, 2


def rows_of(width: int) -> dict[str, np.ndarray]:
    """Rows with numbers of one to three bytes; the last ones of each are padding."""
    tokens = (np.arange(ROWS * width).reshape(ROWS, width) * 7919) % (VOCAB - 3) + 3
    tokens[:, 3] = EOD
    mask = np.arange(width) < width - np.arange(ROWS)[:, None] % 4
    tokens[~mask] = PAD
    labels = np.where(np.arange(width) < 2, IGNORE_INDEX, tokens)  # a prompt of two tokens
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask.astype(np.int64)}


LONG, SHORT = rows_of(T + 1), rows_of(T)
SHORT["labels"] = np.roll(SHORT["labels"], -1, axis=1)  # the next tokens
FILES = {
    "tokens": {"input_ids": LONG["input_ids"]},
    "labels": {"input_ids": LONG["input_ids"], "target_ids": LONG["labels"]},
    "masked": LONG,
    "shifted": {name: SHORT[name] for name in ("input_ids", "labels")},
    "samples": {
        **{name: SHORT[name] for name in ("input_ids", "labels")},
        "loss_mask": np.tile([0, 1] * 4, (ROWS, 1)),
        "position_ids": np.tile([0, 1, 2, 0, 1, 2, 3, 4], (ROWS, 1)),
    },
    "repeated": {"input_ids": SHORT["input_ids"], "labels": SHORT["input_ids"]},
    "bare": {"input_ids": SHORT["input_ids"]},
    "floats": {"input_ids": LONG["input_ids"], "labels": LONG["labels"].astype(np.float32)},
    "starts": {"input_ids": LONG["input_ids"], "attention_mask": np.tile([0, 0, 0, 3, 3, 5, 5, 5], (ROWS, 1))},
    "others": {"ids": LONG["input_ids"], "answers": LONG["labels"]},
}


def write_file(path: Path, types: dict[str, str], rows: list[dict], shards: int = 1) -> Path:
    """Writes a file as MindSpore does, with arrays and the column `number`."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), shard_num=shards)
    writer.set_header_size(1 << 14)
    writer.set_page_size(1 << 15)
    arrays = {key: {"type": kind, "shape": [-1]} for key, kind in types.items()}
    writer.add_schema({"number": {"type": "int64"}} | arrays)
    writer.write_raw_data([{"number": number} | row for number, row in enumerate(rows)])
    writer.commit()
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Returns the files, written by MindSpore; those in `shards` have three parts."""
    folder = tmp_path_factory.mktemp("mindrecord")
    (folder / "shards").mkdir()
    for name, columns, shards in [*((name, columns, 1) for name, columns in FILES.items()), ("shards/x", LONG, 3)]:
        types = {key: "float32" if array.dtype == np.float32 else "int32" for key, array in columns.items()}
        rows = [{key: array[row].astype(types[key]) for key, array in columns.items()} for row in range(ROWS)]
        write_file(folder / f"{name}.mindrecord", types, rows, shards)
    return folder


def config_of(folder: Path, path: Path | str, *, loader=None, model=None, train=None, **top):
    found = {"type": "MindDataset", "dataset_dir": str(path)} | (loader or {})
    sizes = {"seq_length": T, "vocab_size": VOCAB} | (model or {})
    return make_config(folder, loader=found, model=sizes, train=train, **top)


def batch_of(*arguments, **keys) -> Batch:
    dataset, _ = build_datasets(config_of(*arguments, **keys))
    return dataset.batch(range(dataset.num_sequences))


@pytest.mark.parametrize("name", [*FILES, "shards/x.mindrecord0"])
def test_arrays_are_those_that_mindspore_reads(files, name):
    from mindspore.mindrecord import FileReader

    path = files / (name if "." in name else f"{name}.mindrecord")
    found = open_mindrecord(path, HERE)
    reader = FileReader([str(path)])
    expected = list(reader.get_next())
    reader.close()
    columns = [column for column in found.arrays if found.types[column] == "int32"]
    assert len(expected) == len(found.starts) and columns
    for number, row in enumerate(expected):
        for column, array in zip(columns, found.read(number, columns), strict=True):
            assert np.array_equal(array, row[column]), (number, column)


def test_integers_of_every_size_are_read(tmp_path):
    limits = [0, -1, 127, -128, 128, -129, 32767, -32768, 32768, -32769, 2**31 - 1, -(2**31), 2**31, -(2**63)]
    rows = [np.array(limits[:count], np.int64) for count in range(1, len(limits) + 1)]
    path = write_file(tmp_path / "a.mindrecord", {"one": "int64"}, [{"one": row} for row in rows])
    found = open_mindrecord(path, HERE)
    for number, row in enumerate(rows):
        assert np.array_equal(found.read(number, ["one"])[0], row)


def test_rows_of_one_token_more_have_the_next_tokens_as_labels(tmp_path, files):
    batch = batch_of(tmp_path, files / "tokens.mindrecord")
    assert np.array_equal(batch.input_ids, LONG["input_ids"][:, :-1])
    assert np.array_equal(batch.labels, LONG["input_ids"][:, 1:])
    assert not batch.segment_ids.any() and np.array_equal(batch.positions, np.tile(np.arange(T), (ROWS, 1)))
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in batch)


def test_labels_are_shifted_with_their_row(tmp_path, files):
    batch = batch_of(tmp_path, files / "labels.mindrecord")
    assert np.array_equal(batch.labels, LONG["labels"][:, 1:]) and (batch.labels == IGNORE_INDEX).sum() == ROWS


def test_labels_of_rows_of_a_sequence_are_the_next_tokens_already(tmp_path, files):
    batch = batch_of(tmp_path, files / "shifted.mindrecord")
    assert np.array_equal(batch.input_ids, SHORT["input_ids"]) and np.array_equal(batch.labels, SHORT["labels"])


def test_padding_has_no_loss(tmp_path, files):
    plain = batch_of(tmp_path, files / "tokens.mindrecord")
    batch = batch_of(tmp_path, files / "tokens.mindrecord", model={"pad_token_id": PAD})
    is_padding = plain.input_ids == PAD
    assert is_padding.any() and np.array_equal(batch.labels, np.where(is_padding, IGNORE_INDEX, plain.labels))


def test_nothing_attends_to_what_the_mask_leaves_out(tmp_path, files):
    batch = batch_of(tmp_path, files / "masked.mindrecord")
    left_out = LONG["attention_mask"][:, :-1] == 0
    assert left_out.any() and np.array_equal(batch.segment_ids, left_out)
    assert (batch.labels[left_out] == IGNORE_INDEX).all() and not batch.input_ids[left_out].any()
    without = batch_of(tmp_path, files / "masked.mindrecord", train={"input_columns": ["input_ids", "labels"]})
    assert not without.segment_ids.any() and np.array_equal(without.labels, LONG["labels"][:, 1:])


def test_a_mask_may_say_where_documents_begin(tmp_path, files):
    batch = batch_of(tmp_path, files / "starts.mindrecord", model={"eod_reset": True})
    assert (batch.segment_ids == [0, 0, 0, 1, 1, 2, 2, 2]).all() and (batch.positions == np.arange(T)).all()
    assert np.array_equal(batch.labels, LONG["input_ids"][:, 1:])
    with pytest.raises(UserError, match="attention_mask of row 0 has other values than 0 and 1"):
        batch_of(tmp_path, files / "starts.mindrecord")


def test_a_mask_of_the_loss_and_positions_may_be_named(tmp_path, files):
    """The columns of Megatron-LM's samples, as MindSpore Transformers writes and reads them."""
    plain = batch_of(tmp_path, files / "shifted.mindrecord")
    columns = {"input_columns": ["input_ids", "labels", "loss_mask", "position_ids"]}
    found = batch_of(tmp_path, files / "samples.mindrecord", train=columns)
    np.testing.assert_array_equal(found.positions, FILES["samples"]["position_ids"])
    has_loss = FILES["samples"]["loss_mask"].astype(bool)
    np.testing.assert_array_equal(found.labels, np.where(has_loss, plain.labels, IGNORE_INDEX))
    np.testing.assert_array_equal(found.input_ids, plain.input_ids)
    assert not found.segment_ids.any() and (plain.labels != IGNORE_INDEX).sum() > (found.labels != IGNORE_INDEX).sum()
    wrong = {"input_columns": ["input_ids", "labels"], "construct_args_key": ["input_ids", "position_ids"]}
    with pytest.raises(UserError, match="labels of row 0 has positions beyond its 9 tokens"):
        batch_of(tmp_path, files / "masked.mindrecord", train=wrong)


def test_documents_are_kept_apart_at_the_end_token(tmp_path, files):
    for keys in ({"train": {"eod_reset": True, "eod_token_id": EOD}},
                 {"train": {"eod_reset": True}, "model": {"eos_token_id": [EOD]}}):
        batch = batch_of(tmp_path, files / "tokens.mindrecord", **keys)
        assert batch.segment_ids[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
        assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(UserError, match="train_dataset.eod_reset = true: documents are separated at the token"):
        batch_of(tmp_path, files / "tokens.mindrecord", train={"eod_reset": True})


def test_columns_may_have_other_names(tmp_path, files):
    train = {"input_columns": ["ids", "answers"], "construct_args_key": ["input_ids", "labels"]}
    batch = batch_of(tmp_path, files / "others.mindrecord", train=train)
    assert np.array_equal(batch.input_ids, LONG["input_ids"][:, :-1])
    assert np.array_equal(batch.labels, LONG["labels"][:, 1:])


def test_a_file_stands_for_its_parts_and_a_list_for_itself(tmp_path, files):
    def tokens(**loader) -> list[list[int]]:
        return batch_of(tmp_path, "", loader=loader).input_ids.tolist()

    names = [str(files / f"shards/x.mindrecord{number}") for number in range(3)]
    whole = tokens(dataset_dir=names[1])
    assert whole == tokens(dataset_dir=str(files / "shards")) == tokens(dataset_files=names[0])
    assert sorted(whole) == sorted((LONG["input_ids"] * LONG["attention_mask"])[:, :-1].tolist())
    parts = [tokens(dataset_files=[name]) for name in names]
    assert whole == parts[0] + parts[1] + parts[2]
    assert tokens(dataset_files=names[::-1]) == parts[2] + parts[1] + parts[0]


def test_rows_are_held_out_and_limited(tmp_path, files):
    path = files / "tokens.mindrecord"
    train, held_out = build_datasets(config_of(tmp_path, path, train={"held_out": 0.25}, do_eval=True))
    assert (train.num_sequences, held_out.num_sequences) == (15, 5)
    both = [row for data in (train, held_out) for row in data.batch(range(data.num_sequences)).input_ids.tolist()]
    assert sorted(both) == sorted(LONG["input_ids"][:, :-1].tolist())
    limited = batch_of(tmp_path, path, loader={"num_samples": 3})
    assert np.array_equal(limited.input_ids, LONG["input_ids"][:3, :-1])
    loader = {"type": "MindDataset", "dataset_dir": str(files / "labels.mindrecord")}
    config = config_of(tmp_path, path, eval_dataset={"data_loader": loader}, do_eval=True)
    assert build_eval_dataset(config).num_sequences == ROWS


def test_content_changes_with_all_that_decides_about_the_rows(tmp_path, files):
    def content(name: str = "tokens", **keys) -> str:
        config = config_of(tmp_path, files / f"{name}.mindrecord", **keys)
        dataset, _ = build_datasets(config)
        assert data_layout(config, dataset, 1)["content"] == dataset.content
        return dataset.content

    # As in earlier checkpoints, whose files did not have the class's pad_token_id.
    assert content(model={"pad_token_id": None}) == "1 MindRecord files (03804573df81535b)"
    found = [content(), content("labels"), content("labels", train={"input_columns": ["input_ids"]}),
             content(model={"pad_token_id": PAD}), content(train={"eod_reset": True, "eod_token_id": EOD}),
             content(train={"held_out": 0.2})]
    assert len(set(found)) == len(found)


# Bad input


def copied(files: Path, folder: Path, suffix: str = "", change=None) -> Path:
    """Returns a copy of a file and its index, of which one is changed."""
    for each in ("", ".db"):
        content = (files / f"tokens.mindrecord{each}").read_bytes()
        (folder / f"tokens.mindrecord{each}").write_bytes(change(content) if change and each == suffix else content)
    return folder / "tokens.mindrecord"


@pytest.mark.parametrize(
    ("suffix", "change", "rule"),
    [
        ("", lambda content: b"", "tokens.mindrecord: its header is not that of a MindRecord file"),
        ("", lambda content: content[:100], "tokens.mindrecord: its header is not that of a MindRecord file"),
        ("", lambda content: content[: (1 << 14) + 40], "tokens.mindrecord: it is truncated: 16,424 bytes"),
        ("", lambda content: content.replace(b'"version":"3.0"', b'"version":"9.0"'), "it has version 9.0"),
        ("", lambda content: content[: 1 << 14] + bytes(len(content) - (1 << 14)), "the .db is of another file"),
        ("", lambda content: content.replace(b'["input_ids"]', b'["input_idz"]'), "its header is not that of a Mind"),
        (".db", lambda content: b"no database", "tokens.mindrecord.db: it is not the index of a MindRecord file"),
        (".db", lambda content: b"", "tokens.mindrecord.db: it is not the index of a MindRecord file"),
        (".db", lambda content: content[:4096], "tokens.mindrecord.db: it is not the index of a MindRecord file"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, files, suffix, change, rule):
    with pytest.raises(UserError) as error:
        open_mindrecord(copied(files, tmp_path, suffix, change), HERE)
    assert rule in str(error.value) and "run.yaml:4: train_dataset.data_loader.dataset_dir" in str(error.value)


def test_a_missing_file_is_named(tmp_path, files):
    path = copied(files, tmp_path)
    path.with_name("tokens.mindrecord.db").unlink()
    with pytest.raises(UserError, match=r"tokens\.mindrecord\.db: there is no such file in .*\n.*copy the \.db beside"):
        open_mindrecord(path, HERE)
    path.unlink()
    with pytest.raises(UserError, match=r"tokens\.mindrecord: there is no such file in"):
        open_mindrecord(path, HERE)


def test_an_index_without_rows_is_refused(tmp_path, files):
    path = copied(files, tmp_path)
    with closing(sqlite3.connect(f"{path}.db")) as database:
        database.execute("DELETE FROM INDEXES")
        database.commit()
    with pytest.raises(UserError, match="it has no row"):
        open_mindrecord(path, HERE)


@pytest.mark.parametrize(
    ("name", "keys", "key", "rule"),
    [
        ("tokens", {"train": {"input_columns": ["input_ids", "labels"]}}, "train_dataset.input_columns",
         "tokens.mindrecord has no column labels: its columns are input_ids, number"),
        ("tokens", {"train": {"input_columns": ["labels"]}}, "train_dataset.input_columns", "does not name input_ids"),
        ("tokens", {"train": {"input_columns": ["input_ids", "number"]}}, "train_dataset.input_columns",
         "number is none of the columns that are read"),
        ("tokens", {"train": {"input_columns": ["input_ids", "lables"]}}, "Fix: you probably mean labels",
         "lables is none of the columns"),
        ("tokens", {"train": {"input_columns": ["number"], "construct_args_key": ["input_ids"]}},
         "train_dataset.input_columns", "column number of tokens.mindrecord holds int64, not arrays"),
        ("labels", {"train": {"input_columns": ["input_ids", "input_ids"]}}, "train_dataset.input_columns", "are both"),
        ("floats", {}, "train_dataset.input_columns", "column labels of floats.mindrecord holds float32"),
        ("others", {}, "dataset_dir", "others.mindrecord has no column input_ids"),
        ("bare", {}, "model.model_config.seq_length", "rows of bare.mindrecord have 8 tokens, and a sequence needs 9"),
        ("tokens", {"model": {"seq_length": 4}}, "model.model_config.seq_length",
         "rows of tokens.mindrecord have 9 tokens, and a sequence needs 5"),
        ("repeated", {}, "dataset_dir", "are the input tokens themselves, not the next ones"),
        ("tokens", {"model": {"vocab_size": 100}}, "dataset_dir", "but the model's vocabulary has 100"),
        ("tokens", {"loader": {"dataset_dir": ""}}, "dataset_dir", "needs a file or a folder"),
        ("tokens", {"loader": {"dataset_files": ["a"]}}, "dataset_files", "dataset_dir names files too"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path, files, name, keys, key, rule):
    with pytest.raises(UserError) as error:
        batch_of(tmp_path, files / f"{name}.mindrecord", **keys)
    assert rule in str(error.value) and key in str(error.value) and "run.yaml:" in str(error.value)


def test_a_folder_without_files_is_named(tmp_path):
    with pytest.raises(UserError, match="no file whose name ends with mindrecord"):
        batch_of(tmp_path, tmp_path)


def test_a_row_of_another_length_ends_the_run(tmp_path):
    rows = [{"input_ids": np.arange(T + 1 - (row == 77), dtype=np.int32)} for row in range(200)]
    path = write_file(tmp_path / "a.mindrecord", {"input_ids": "int32"}, rows)
    dataset, _ = build_datasets(config_of(tmp_path, path))
    with pytest.raises(RunError, match=r"a\.mindrecord: row 77 has 8 elements in input_ids, other rows 9"):
        dataset.batch([76, 77])


# The writer and the commands


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True)


def test_make_mindrecord_writes_what_this_trainer_reads(tmp_path):
    records = [{"instruction": "say " + "a" * size, "output": "A" * size} for size in range(1, 9)]
    path = jsonl(tmp_path / "a.jsonl", *records)
    config = make_config(tmp_path, path, loader={"type": "JsonlDataset"}, model={"seq_length": 128})
    expected, _ = build_datasets(config)
    out = tmp_path / "made" / "a.mindrecord"
    ensure_server()
    done = run(str(FORKED), "scripts/make_mindrecord.py", str(out), "--config", str(tmp_path / "run.yaml"))
    assert done.returncode == 0 and f"{expected.num_sequences} rows of 128 tokens" in done.stdout, done.stderr
    batch = batch_of(tmp_path, out, model={"seq_length": 128})
    for own, other in zip(batch[:2], expected.batch(range(expected.num_sequences))[:2], strict=True):
        assert np.array_equal(own, other)


def test_data_and_plan_read_the_rows_without_mindspore(tmp_path, files):
    def written(name: str, *arguments, **sections) -> Path:
        config_of(tmp_path, *arguments, **sections)
        return (tmp_path / "run.yaml").rename(tmp_path / f"{name}.yaml")

    labels = written("labels", files / "labels.mindrecord", loader={"shuffle": False})
    columns = written("columns", files / "tokens.mindrecord", train={"input_columns": ["input_ids", "labels"]})
    gone = written("gone", tmp_path / "gone.mindrecord")
    lines = {"data": ["data", "--config", labels, "--json", "--rows", 1]}
    lines |= {path.stem: ["plan", "--config", path] for path in (labels, columns, gone)}
    answers = answers_of(lines, REPOSITORY)
    assert not any(answer.loaded_mindspore for answer in answers.values())
    data, planned, missing, refused = answers.values()
    assert data.code == 0, data.errors
    found = json.loads(data.output)
    assert found["rows"][0]["segments"][0]["tokens"] == LONG["input_ids"][0, :-1].tolist()
    assert found["statistics"]["sequences"] == ROWS and found["statistics"]["loss_tokens"] == ROWS * (T - 1)
    assert planned.code == 0, planned.errors
    assert missing.code == 2 and "tokens.mindrecord has no column labels" in missing.errors, missing.errors
    assert refused.code == 2 and "gone.mindrecord: there is no such file" in refused.errors, refused.errors
