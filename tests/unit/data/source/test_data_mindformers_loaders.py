"""ADGenDataLoader and SFTDataLoader of MindSpore Transformers' older schema: which samples their files become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_helpers import jsonl, make_config

from trainer.config import config_notes, preflight
from trainer.data.datasets import build_datasets
from trainer.data.source.find import find_sources
from trainer.data.source.samples import Sample, SkippedRecords, read_samples
from trainer.errors import UserError

ADVERTS = [{"content": f"type#shirt*size#{number}", "summary": f"A shirt of size {number}."} for number in range(4)]
ALPACA = [{"instruction": "Give the opposite.", "input": "hot", "output": "cold"},
          {"instruction": "Count to two.", "input": "", "output": "1, 2"}]  # fmt: skip
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]


def samples_of(folder: Path, **loader: Any) -> tuple[list[Sample], int]:
    ((source, weight),) = find_sources(make_config(folder, loader=loader), "train_dataset")
    assert weight == 1
    skipped = SkippedRecords()
    return [sample for sample, _ in read_samples(source, skipped)], skipped.num_skipped


def error_of(folder: Path, **loader: Any) -> str:
    with pytest.raises(UserError) as caught:
        preflight(make_config(folder, loader={"type": "SFTDataLoader", "dataset_dir": str(folder), **loader}))
    return str(caught.value)


def pairs(samples: list[Sample]) -> list[tuple[str, ...]]:
    return [tuple(message["content"] for message in sample.messages or ()) for sample in samples]


def test_adgen_reads_the_file_of_advertisegen_as_its_documentation_describes_it(tmp_path: Path) -> None:
    """What MindSpore Transformers drops (no JSON, a column less, empty text) is left out and counted here, too."""
    path = tmp_path / "train.json"
    bad = ["", "{no JSON", json.dumps({"content": "a"}), json.dumps({"content": "a", "summary": " "})]
    path.write_text("\n".join([*map(json.dumps, ADVERTS), *bad]) + "\n", encoding="utf-8")
    keys = {"type": "ADGenDataLoader", "dataset_dir": str(path), "phase": "train", "version": 3, "shuffle": True}
    samples, skipped = samples_of(tmp_path, origin_columns=["content", "summary"], **keys)
    assert pairs(samples) == [(each["content"], each["summary"]) for each in ADVERTS] and skipped == 3
    assert samples_of(tmp_path, **keys) == (samples, skipped), "the columns are those of AdvertiseGen by default"
    with pytest.raises(UserError, match="train.json:6: "):
        samples_of(tmp_path, bad_records="error", **keys)


def test_adgen_reads_other_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "code.json", {"PROMPT": "Add.", "ANSWER": "a + b"})
    loader = {"type": "ADGenDataLoader", "dataset_dir": str(path), "origin_columns": ["PROMPT", "ANSWER"]}
    assert pairs(samples_of(tmp_path, **loader)[0]) == [("Add.", "a + b")]
    train, _ = build_datasets(make_config(tmp_path, loader=loader))
    assert train.num_sequences == 1


@pytest.mark.parametrize(("name", "as_array"), [("a.json", True), ("a.json", False), ("a.jsonl", False)])
def test_sft_reads_alpaca_in_an_array_and_in_lines(tmp_path: Path, name: str, as_array: bool) -> None:
    path = tmp_path / name
    if as_array:
        path.write_text(json.dumps(ALPACA, indent=1))
    else:
        jsonl(path, *ALPACA)
    samples, _ = samples_of(tmp_path, type="SFTDataLoader", dataset_dir=str(path), dataset_name="alpaca",
                            file_format="json", max_length=4097, column_names=["input_ids"])  # fmt: skip
    assert pairs(samples) == [("Give the opposite.\n\nhot", "cold"), ("Count to two.", "1, 2")]


@pytest.mark.parametrize(
    ("name", "record", "kwargs", "said"),
    [
        ("multi-round-chat", {"conversations": TURNS}, {}, ["Hi", "Hello!"]),
        ("multi-round-chat-dyn", {"dialog": TURNS}, {"data_field": "dialog"}, ["Hi", "Hello!"]),
        (
            "multi-round-chat",
            {"m": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
            {"data_field": "m", "from_keyword": "role", "value_keyword": "content", "user_role_name": "user",
             "assistant_role_name": "assistant", "user_prompt": "", "ignore_token_id": -100},
            ["Hi", "Yes"],
        ),
        (
            "multi-instruct-dyn", {"q": "Add.", "x": "1 2", "a": "3"},
            {"instruction_keyword": "q", "from_keyword": "x", "value_keyword": "a"}, ["Add.\n\n1 2", "3"],
        ),
        (None, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, {}, ["a", "b"]),
    ],
)  # fmt: skip
def test_sft_reads_conversations(
    tmp_path: Path, name: str | None, record: dict, kwargs: dict, said: list[str]
) -> None:
    path = jsonl(tmp_path / "a.json", record)
    loader = {"type": "SFTDataLoader", "dataset_dir": str(path), "dataset_name": name, "map_function_kwargs": kwargs}
    preflight(make_config(tmp_path, loader=loader))
    samples, _ = samples_of(tmp_path, **loader)
    assert [message["content"] for message in samples[0].messages or ()] == said


def test_sft_reads_advertisegen_and_says_what_its_loss_covers(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", *ADVERTS)
    loader = {"type": "SFTDataLoader", "dataset_dir": str(path), "dataset_name": "advertisegen"}
    samples, _ = samples_of(tmp_path, **loader)
    assert [(sample.prompt, sample.text) for sample in samples] == [(one["content"], one["summary"]) for one in ADVERTS]
    said = "".join(config_notes(make_config(tmp_path, loader=loader)))
    assert "data_loader.dataset_name advertisegen: the loss covers the answers" in said
    assert "the loss covers" not in "".join(config_notes(make_config(tmp_path, loader=loader | {"dataset_name": None})))


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"map_function_kwargs": {"user_prompt": "Q: "}}, "turns are written as the chat template says"),
        ({"map_function_kwargs": {"from_field": "x"}}, "map_function_kwargs.from_field = 'x': unknown key"),
        ({"map_function_kwargs": {"data_field": 3}}, "must be the name of a column"),
        ({"dataset_name": "multi-round-chat", "map_function_kwargs": {"user_role_name": "me"}}, "human or user"),
        ({"dataset_name": "multi-round-chat", "map_function_kwargs": {"from_keyword": "role"}}, "from and value, or"),
        ({"dataset_name": "cola"}, "dataset_name = 'cola': must be default, alpaca, "),
        ({"file_format": "csv"}, "file_format = 'csv': must be"),
        ({"tokenizer": {"type": "LlamaTokenizer", "vocab_file": "a"}}, "the tokenizer of a loader is not read"),
    ],
)
def test_what_sft_cannot_follow_is_refused(tmp_path: Path, keys: dict, part: str) -> None:
    message = error_of(tmp_path, **keys)
    assert part in message and "Fix: " in message, message


def test_a_record_with_an_empty_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    records = [*ALPACA, {"instruction": "Be silent.", "output": " "}, {"prompt": "Say nothing.", "completion": ""}]
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    samples, skipped = samples_of(tmp_path, type="JsonlDataset", dataset_dir=str(file))
    assert (len(samples), skipped) == (2, 2)
