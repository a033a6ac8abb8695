"""Which files a section reads: several sources, folders with splits, and the keys of an HFDataLoader."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from data_helpers import jsonl, line_of, make_config

from trainer.data.source.files import DataSource
from trainer.data.source.find import find_sources
from trainer.data.source.samples import SkippedRecords, read_samples
from trainer.errors import UserError


def save_to_disk(folder: Path, texts: list[str], split: str | None = None, files: int = 2) -> Path:
    """Writes a folder as save_to_disk of Hugging Face datasets does."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        table = pyarrow.table({"text": texts[len(texts) * number // files : len(texts) * (number + 1) // files]})
        with pyarrow.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}}))
    (folder / "cache-0123.arrow").write_bytes(b"not data")
    return folder


def save_splits(folder: Path, *splits: str) -> Path:
    """Writes a folder with several splits, each with its name as its only text."""
    for split in splits:
        save_to_disk(folder / split, [split], split, files=1)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def sources_of(folder: Path, section: str = "train_dataset", **loader: object) -> tuple[tuple[DataSource, float], ...]:
    loader = {"type": "JsonlDataset", **loader}
    extra = {} if section == "train_dataset" else {"eval_dataset": {"data_loader": loader}}
    return find_sources(make_config(folder, loader=loader, **extra), section)


def texts_of(folder: Path, section: str = "train_dataset", **loader: object) -> list[str]:
    ((source, weight),) = sources_of(folder, section, **loader)
    assert weight == 1
    return [sample.text for sample, _ in read_samples(source, SkippedRecords())]


def error_of(folder: Path, section: str = "train_dataset", **loader: object) -> str:
    with pytest.raises(UserError) as caught:
        texts_of(folder, section, **loader)
    return str(caught.value)


# Several sources


def test_several_sources_have_weights(tmp_path):
    one, two = jsonl(tmp_path / "one.jsonl", {"text": "1"}), jsonl(tmp_path / "two.jsonl", {"text": "2"})
    items = [{"path": str(one), "weight": 3}, {"path": str(two)}]
    found = sources_of(tmp_path, sources=items)
    assert [(source.name, weight) for source, weight in found] == [(str(one), 3), (str(two), 1)]
    assert find_sources(make_config(tmp_path, loader={"sources": [{"path": "stdlib"}]}), "train_dataset")[0][0].files


def test_sources_beside_dataset_dir_are_an_error(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", {"text": "1"})
    message = error_of(tmp_path, sources=[{"path": str(one)}], dataset_dir=str(one))
    assert "either one dataset_dir or several sources" in message and line_of(tmp_path, "dataset_dir") in message


def test_an_hf_data_loader_has_one_source(tmp_path):
    message = error_of(tmp_path, type="HFDataLoader", sources=[{"path": "a"}])
    assert "train_dataset.data_loader.sources" in message and "unknown" in message


@pytest.mark.parametrize("weight", [0, -1.5])
def test_a_weight_of_zero_or_below_is_an_error(tmp_path, weight):
    with pytest.raises(UserError) as caught:
        sources_of(tmp_path, sources=[{"path": "a", "weight": weight}])
    message = str(caught.value)
    assert f"train_dataset.data_loader.sources.0.weight = {weight}" in message and "greater than 0" in message
    assert "Fix: give a weight above 0, or remove the source" in message


def test_a_source_that_is_missing_is_named_with_its_line(tmp_path):
    one = jsonl(tmp_path / "one.jsonl", {"text": "1"})
    message = error_of(tmp_path, sources=[{"path": str(one)}, {"path": str(tmp_path / "gone")}])
    assert "train_dataset.data_loader.sources.1.path" in message and line_of(tmp_path, "gone") in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_records_are_not_taken_for_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    message = error_of(tmp_path, type="TextDataset", dataset_dir=str(tmp_path / name))
    assert "holds records" in message and "JsonlDataset" in message and line_of(tmp_path, "dataset_dir") in message


# Folders with splits


def test_a_saved_data_set_is_read_in_the_order_of_its_state(tmp_path):
    texts = [str(number) for number in range(10)]
    folder = save_to_disk(tmp_path / "saved", texts, files=3)
    assert texts_of(tmp_path, dataset_dir=str(folder)) == texts
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    assert sorted(texts_of(tmp_path, dataset_dir=str(folder))) == texts != texts_of(tmp_path, dataset_dir=str(folder))
    assert texts_of(tmp_path, "eval_dataset", dataset_dir=str(folder), split="test"), "it knows no split"


@pytest.mark.parametrize(
    ("splits", "section", "chosen"),
    [
        (("test", "train"), "train_dataset", "train"),
        (("train", "test"), "eval_dataset", "test"),
        (("train", "test", "validation"), "eval_dataset", "validation"),
        (("sft",), "train_dataset", "sft"),
    ],
)
def test_each_section_reads_its_usual_split(tmp_path, splits, section, chosen):
    folder = save_splits(tmp_path / "saved", *splits)
    assert texts_of(tmp_path, section, dataset_dir=str(folder)) == [chosen]


def test_the_split_can_be_chosen(tmp_path):
    folder = save_splits(tmp_path / "saved", "train_sft", "test_sft")
    assert texts_of(tmp_path, dataset_dir=str(folder), split="test_sft") == ["test_sft"]
    for wanted in ({}, {"split": "train"}):
        message = error_of(tmp_path, dataset_dir=str(folder), **wanted)
        assert "the splits train_sft, test_sft" in message and "data_loader.split" in message


def test_the_names_of_files_tell_their_splits(tmp_path):
    folder = tmp_path / "hub"
    (folder / "data").mkdir(parents=True)
    for name in ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"):
        jsonl(folder / f"{name}.jsonl", {"text": name})
    (folder / "dataset_infos.json").write_text("{}")
    ((source, _),) = sources_of(tmp_path, dataset_dir=str(folder))
    assert [file.path.name[:8] for file in source.files] == ["train-00"] * 2
    assert "reads the split train" in source.notes[0] and "has test" in source.notes[0]
    assert texts_of(tmp_path, "eval_dataset", dataset_dir=str(folder)) == ["data/test-00000-of-00001"]
    assert not sources_of(tmp_path, dataset_dir=str(folder / "data"), split="train")[0][0].notes


def test_files_whose_names_tell_no_split_are_training_data(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("alpaca", "contest", "latest"):
        jsonl(tmp_path / "data" / f"{name}.jsonl", {"text": name})
    assert texts_of(tmp_path, dataset_dir=str(tmp_path / "data")) == ["alpaca", "contest", "latest"]
    assert len(texts_of(tmp_path, "eval_dataset", dataset_dir=str(tmp_path / "data"))) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not JSON"),
        ("[]", "_data_files"),
        ('{"_data_files": [3]}', "_data_files"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "does not exist"),
        ('{"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "b"}]}', "flatten_indices"),
    ],
)
def test_a_damaged_description_is_an_error(tmp_path, content, words):
    folder = save_to_disk(tmp_path / "saved", ["a", "b"])
    (folder / "state.json").write_text(content)
    message = error_of(tmp_path, dataset_dir=str(folder))
    assert words in message and str(folder) in message and "Fix: " in message


# The keys of an HFDataLoader


def hub(folder: Path) -> Path:
    """Returns a folder with a file of ten records."""
    (folder / "hub").mkdir()
    jsonl(folder / "hub" / "alpaca.json", *({"text": str(number)} for number in range(10)))
    return folder / "hub"


@pytest.mark.parametrize(
    "keys",
    [
        {"path": "{hub}"},
        {"path": "{hub}/alpaca.json"},
        {"path": "json", "data_files": "{hub}/alpaca.json", "split": "train", "load_func": "load_dataset"},
        {"path": "json", "data_files": ["{hub}/*.json"]},
        {"path": "json", "data_files": {"train": "{hub}/alpaca.json", "test": "x"}},
        {"path": "{hub}", "data_files": "alpaca.json"},
        {"path": "json", "data_dir": "{hub}"},
        {"path": "elsewhere", "dataset_dir": "{hub}"},
    ],
)
def test_the_keys_of_load_dataset_name_local_files(tmp_path, keys):
    text = json.dumps(keys).replace("{hub}", str(hub(tmp_path)))
    assert texts_of(tmp_path, type="HFDataLoader", **json.loads(text)) == [str(number) for number in range(10)]


def test_the_keys_of_load_from_disk_name_a_saved_folder(tmp_path):
    folder = save_to_disk(tmp_path / "saved", ["a", "b"])
    keys = {"load_func": "load_from_disk", "dataset_path": str(folder)}
    loader = {"type": "HFDataLoader", **keys}
    config = make_config(tmp_path, train={"data_loader": loader})
    ((source, _),) = find_sources(config, "train_dataset")
    assert [sample.text for sample, _ in read_samples(source, SkippedRecords())] == ["a", "b"]


def test_handlers_take_records_and_rename_columns(tmp_path):
    jsonl(tmp_path / "a.jsonl", *({"query": f"q{number}", "output": "o"} for number in range(10)))
    handler = [
        {"type": "take", "n": 2},
        {"type": "rename_column", "original_column_name": "query", "new_column_name": "instruction"},
        {"type": "AlpacaInstructDataHandler", "seq_length": 64, "tokenizer": {"padding_side": "right"}},
        {"type": "PackingHandler", "seq_length": 64, "pack_strategy": "pack"},
    ]
    ((source, _),) = sources_of(tmp_path, type="HFDataLoader", path=str(tmp_path / "a.jsonl"), handler=handler)
    samples = [sample for sample, _ in read_samples(source, SkippedRecords())]
    assert [sample.messages[0]["content"] for sample in samples] == ["q0", "q1"]
    assert [note.split(":")[0].split()[-1] for note in source.notes] == ["AlpacaInstructDataHandler"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"path": "llm-wizard/alpaca-gpt4-data"}, ["path = 'llm-wizard/alpaca-gpt4-data'", "nothing is downloaded"]),
        ({}, ["needs a file or a folder"]),
        ({"path": "json"}, ["needs a file or a folder", "data_files"]),
        ({"path": "csv", "data_files": "a.csv"}, ["csv files cannot be read"]),
        ({"path": "json", "data_files": "{hub}/*.parquet"}, ["no file matches /", "hub/*.parquet"]),
        ({"path": "json", "data_files": {"test": "a"}}, ["no files for the split train"]),
        ({"path": "{hub}", "split": "train[:10%]"}, ["has the split train, and not train[:10%]"]),
        ({"path": "json", "data_files": "{hub}/alpaca.json", "split": "train[:10%]"}, ["split = 'train[:10%]'"]),
        ({"path": "{hub}/alpaca.json", "split": "test"}, ["split = 'test'", "read whole"]),
        ({"path": "{hub}", "handler": [{"type": "flatten"}]}, ["handler.0 = 'flatten'", "none of the steps"]),
        ({"path": "{hub}", "handler": {"take": 5}}, ["handler.take = 5", "must be a section"]),
        ({"path": "{hub}", "handler": {"rename_column": {"original_column_name": "a", "new_column_name": []}}},
         ["handler.0 = 'rename_column'", "needs original_column_name and new"]),
        ({"path": "{hub}", "handler": {"shuffle": {"seed": 1}}}, ["handler.0 = 'shuffle'", "none of the steps"]),
        ({"path": "{hub}", "handler": [{"type": "tak", "n": 3}]}, ["handler.0 = 'tak'", "you probably mean take; or"]),
        ({"path": "{hub}", "handler": [{"type": "take", "n": 0}]}, ["handler.0 = 'take'", "needs n, a whole number"]),
        ({"path": "jsn", "data_files": "a.json"}, ["path = 'jsn'", "neither a folder nor a", "you probably mean json"]),
        ({"path": "{hub}", "handler": [{"type": "PackingHandler", "pack_strategy": "truncate"}]}, ["packing to cut"]),
        (
            {
                "path": "{hub}",
                "handler": [{"type": "AlpacaInstructDataHandler", "tokenizer": {"pretrained_model_dir": "q"}}],
            },
            ["handler.0.tokenizer = 'q'", "train_dataset.tokenizer"],
        ),
    ],
)  # fmt: skip
def test_what_is_not_local_or_not_built_is_an_error(tmp_path, keys, words):
    text = json.dumps(keys).replace("{hub}", str(hub(tmp_path)))
    message = error_of(tmp_path, type="HFDataLoader", **json.loads(text))
    assert "run.yaml:" in message and "Fix: " in message
    for word in words:
        assert word in message
