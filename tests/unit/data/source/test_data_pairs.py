"""Pairs of answers: the forms of their records, bad records, and pairs that stay whole in a sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_helpers import jsonl, make_config

from trainer.data.batches.batch import IGNORE_INDEX, PairBatch, count_pairs
from trainer.data.batches.loader import BatchLoader
from trainer.data.datasets import build_train_dataset
from trainer.data.source.records import Record
from trainer.data.source.samples import Sample, to_sample
from trainer.data.tokens.tokenizer import load_tokenizer
from trainer.errors import UserError

USER = {"role": "user", "content": "2 + 2?"}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
EARLIER = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def pair_of(**fields: object) -> Sample:
    sample = to_sample(Record(fields, "data.jsonl:3", 0), {}, "pairs")
    assert sample is not None and sample.other is not None
    return sample


CONVERSATIONS = [
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"prompt": "2 + 2?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    {"conversations": [{"from": "human", "value": "2 + 2?"}], "chosen": {"from": "gpt", "value": "4"},
     "rejected": {"from": "gpt", "value": "5"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", CONVERSATIONS)
def test_conversations(fields: dict) -> None:
    sample = pair_of(**fields)
    assert sample.messages == [USER, GOOD] and sample.other.messages == [USER, BAD]


def test_only_the_answers_carry_loss() -> None:
    sample = pair_of(chosen=[*EARLIER, USER, GOOD], rejected=[*EARLIER, USER, BAD], system="Be brief.")
    for each, answer in ((sample, GOOD), (sample.other, BAD)):
        assert each.messages[0] == {"role": "system", "content": "Be brief."}
        assert each.messages[1:] == [EARLIER[0], EARLIER[1] | {"weight": 0}, USER, answer]


def test_texts() -> None:
    sample = pair_of(prompt="2 + 2 =", chosen=" 4", rejected=" 5")
    assert (sample.prompt, sample.text) == ("2 + 2 =", " 4")
    assert (sample.other.prompt, sample.other.text) == ("2 + 2 =", " 5")
    sample = pair_of(chosen="2 + 2 = 4", rejected="2 + 2 = 5")  # as TRL finds the prompt
    assert (sample.prompt, sample.text, sample.other.text) == ("2 + 2 =", " 4", " 5")
    sample = pair_of(instruction="Add.", input="2, 2", chosen="4", rejected="5")
    assert sample.prompt == sample.other.prompt and sample.prompt.startswith("### Instruction:\nAdd.")
    assert (sample.text, sample.other.text) == ("4", "5")


@pytest.mark.parametrize(("margin", "value"), [(None, 0.0), (1.5, 1.5), (2, 2.0)])
def test_a_margin_is_of_a_reward_model(margin: float | None, value: float) -> None:
    fields = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5", "margin": margin}
    assert pair_of(**fields).value == 0
    sample = to_sample(Record(fields, "data.jsonl:3", 0), {}, "margins")
    assert sample is not None and sample.value == value
    with pytest.raises(UserError, match="it must be a number"):
        to_sample(Record(fields | {"margin": "much"}, "data.jsonl:3", 0), {}, "margins")


def test_margins_reach_the_batches(tmp_path: Path) -> None:
    margins = [number % 3 / 4 for number in range(9)]
    fields = [{**each, "margin": margin} for each, margin in zip(records(9), margins, strict=True)]
    data = jsonl(tmp_path / "pairs.jsonl", *fields)
    loader = {"type": "JsonlDataset"}
    config = make_config(tmp_path, data, loader=loader, model={"seq_length": 48}, loss={"type": "reward"})
    dataset, _ = build_train_dataset(config)
    batch = dataset.batch(range(dataset.num_sequences))
    assert isinstance(batch, PairBatch)
    found = []
    for row in range(dataset.num_sequences):
        for number in range(2 * count_pairs(dataset.batch([row]))):
            [value] = set(batch.values[row][batch.segment_ids[row] == number].tolist())
            if number % 2:
                assert value == 0
            else:
                found.append(value)
    assert sorted(found) == sorted(margins)


BAD_RECORDS = [
    ({"prompt": "a", "completion": "b"}, "no chosen and rejected answer"),
    ({"prompt": "a", "chosen": "b"}, "no chosen and rejected answer"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
    ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "must be two strings or two lists"),
    ({"prompt": "a", "chosen": "b", "rejected": " "}, "its content is empty"),
    ({"chosen": "ab", "rejected": "abc"}, "its content is empty"),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, "it must be text"),
    ({"chosen": [USER, GOOD], "rejected": [USER, USER]}, "no turn of the assistant"),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": [{"role": "robot", "content": "x"}]}, "it must be one of"),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": 7}, "it must be a list of messages"),
]


@pytest.mark.parametrize(("fields", "rule"), BAD_RECORDS)
def test_bad_records(fields: dict, rule: str) -> None:
    with pytest.raises(UserError, match=rule) as error:
        to_sample(Record(fields, "data.jsonl:3", 0), {}, "pairs")
    assert error.value.where == "data.jsonl:3" and error.value.fix


def records(count: int) -> list[dict]:
    return [
        {"prompt": f"{number}?", "chosen": "y" * (1 + number % 5), "rejected": "n" * (1 + number % 3)}
        for number in range(count)
    ]


def config_of(folder: Path, count: int = 20, train: dict | None = None, **model: object):
    data = jsonl(folder / "pairs.jsonl", *records(count))
    sizes = {"seq_length": 48} | model
    return make_config(
        folder, data, loader={"type": "JsonlDataset"}, model=sizes, train=train, loss={"type": "dpo"}
    )


def test_a_pair_stays_whole(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    dataset, _ = build_train_dataset(config)
    assert dataset.num_documents == 40 and dataset.num_sequences < 20
    tokenizer = load_tokenizer(config, "train_dataset")
    found = []
    for number in range(dataset.num_sequences):
        batch = dataset.batch([number])
        last = int(batch.segment_ids.max())
        documents = []
        for segment in range(last + 1):
            is_document = batch.segment_ids[0] == segment
            labels = batch.labels[0][is_document]
            if (labels != IGNORE_INDEX).any():
                assert batch.positions[0][is_document].tolist() == list(range(is_document.sum()))
                text = tokenizer.decode(batch.input_ids[0][is_document].tolist())
                documents.append((text, tokenizer.decode(labels[labels != IGNORE_INDEX].tolist())))
        assert len(documents) == 2 * count_pairs(batch)
        found += zip(documents[::2], documents[1::2], strict=True)
    right = {each["prompt"] + each["chosen"]: each["prompt"] + each["rejected"] for each in records(20)}
    assert {strip(first[0]): strip(second[0]) for first, second in found} == right
    assert all(set(strip(first[1])) == {"y"} and set(strip(second[1])) == {"n"} for first, second in found)
    assert dataset.count_documents().loss_tokens == sum(len(each["chosen"] + each["rejected"]) + 2
                                                        for each in records(20))  # fmt: skip


def strip(text: str) -> str:
    """Returns a text without the name of the token that ends it."""
    return text.removesuffix("<|endoftext|>")


def test_packing_none_and_held_out_pairs(tmp_path: Path) -> None:
    dataset, held_out = build_train_dataset(config_of(tmp_path, train={"packing": "none", "held_out": 0.2}))
    assert held_out is not None
    assert dataset.num_sequences + held_out.num_sequences == 20
    for each in (dataset, held_out):
        assert [count_pairs(each.batch([number])) for number in range(each.num_sequences)] == [1] * each.num_sequences


def test_long_pairs(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "pairs.jsonl", *records(4), {"prompt": "?", "chosen": "y" * 30, "rejected": "n" * 30})

    def build(train: dict):
        config = make_config(
            tmp_path, data, loader={"type": "JsonlDataset"}, model={"seq_length": 48}, train=train, loss={"type": "dpo"}
        )
        return build_train_dataset(config)[0]

    with pytest.raises(UserError, match=r"a pair stays whole in a sequence; pair 5 of .* has 64 tokens"):
        build({})
    notes = build({"overlong": "drop"})
    assert notes.packing is not None and notes.packing.dropped == 1 and notes.num_documents == 8


def test_bad_pairs_can_be_skipped(tmp_path: Path) -> None:
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    data = jsonl(tmp_path / "pairs.jsonl", *records(3), same, *records(5)[3:])
    config = make_config(
        tmp_path, data, loader={"type": "JsonlDataset", "bad_records": "skip"}, model={"seq_length": 48},
        loss={"type": "orpo"},
    )  # fmt: skip
    dataset, _ = build_train_dataset(config)
    assert dataset.num_documents == 10
    assert dataset.packing is not None and dataset.packing.bad_records == 1


def test_the_loader_adds_the_reference_of_each_sequence(tmp_path: Path) -> None:
    dataset, _ = build_train_dataset(config_of(tmp_path))
    loader = BatchLoader(dataset, batch_size=3, shuffle=True, seed=1, drop_remainder=False, prefetch_size=1)
    loader.reference = np.arange(dataset.num_sequences * 6, dtype=np.float64).reshape(-1, 6) + 1
    seen = []
    for batch in loader.epoch(0):
        assert isinstance(batch, PairBatch) and batch.reference.shape == (3, 6)
        for row in range(3):
            number = int(batch.reference[row, 0] - 1) // 6
            if (batch.labels[row] == IGNORE_INDEX).all():
                assert not batch.reference[row].any()
                continue
            np.testing.assert_array_equal(dataset.batch([number]).input_ids[0], batch.input_ids[row])
            seen.append(number)
    assert sorted(seen) == list(range(dataset.num_sequences))


def labelled(count: int) -> list[dict]:
    """Returns records of which two consecutive ones have the same prompt."""
    return [
        {"prompt": f"{number // 2}?", "completion": "ab"[number % 2] * (1 + number % 5), "label": number % 3 == 0}
        for number in range(count)
    ]


def labelled_dataset(folder: Path, *records: dict, seq_length: int = 32, **sections: dict):
    data = jsonl(folder / "labelled.jsonl", *records)
    sizes = {"seq_length": seq_length}
    loss = {"type": "kto"}
    return build_train_dataset(
        make_config(folder, data, loader={"type": "JsonlDataset"}, model=sizes, loss=loss, **sections)
    )


def test_a_labelled_answer_has_one_to_another_prompt(tmp_path: Path) -> None:
    records = labelled(9)
    dataset, held_out = labelled_dataset(tmp_path, *records, train={"held_out": 0.3})
    assert held_out is not None
    tokenizer = load_tokenizer(config_of(tmp_path), "train_dataset")
    found = set()
    for each in (dataset, held_out):
        batch = each.batch(range(each.num_sequences))
        assert isinstance(batch, PairBatch) and batch.reference.shape[1] == 0
        for row in range(each.num_sequences):
            for first in range(0, 2 * count_pairs(each.batch([row])), 2):
                texts = []
                for number in (first, first + 1):
                    is_document = batch.segment_ids[row] == number
                    texts.append(strip(tokenizer.decode(batch.input_ids[row][is_document].tolist())))
                    assert set(batch.values[row][is_document]) <= {0.0, 1.0}
                value = batch.values[row][batch.segment_ids[row] == first]
                found.add((*texts, bool(value[0])))
    others = [2, 2, 1, 1, 3, 3, 5, 5, 7]  # the nearest earlier record with another prompt; the first takes a later one
    right = {
        (each["prompt"] + each["completion"], each["prompt"] + records[other]["completion"], each["label"])
        for each, other in zip(records, others, strict=True)
    }
    assert found == right


def test_damaged_labels_are_written_again(tmp_path: Path) -> None:
    before, _ = labelled_dataset(tmp_path, *labelled(9))
    labels = before.batch(range(before.num_sequences)).values
    [path] = tmp_path.rglob("values.bin")
    path.write_bytes(bytes(len(path.read_bytes())))
    again, _ = labelled_dataset(tmp_path, *labelled(9))
    assert labels.any()
    np.testing.assert_array_equal(again.batch(range(again.num_sequences)).values, labels)


def test_labelled_conversations(tmp_path: Path) -> None:
    records = [
        {"prompt": [*EARLIER, {"role": "user", "content": "2 + 2?"}], "completion": [GOOD], "label": True},
        {"prompt": [USER], "completion": [BAD], "label": False},
    ]
    template = tmp_path / "short.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    section = {"packing": "none", "chat_template": str(template)}
    dataset, _ = labelled_dataset(tmp_path, *records, seq_length=48, train=section)
    tokenizer = load_tokenizer(config_of(tmp_path), "train_dataset")
    texts = []
    for number in range(dataset.num_sequences):
        batch = dataset.batch([number])
        texts += [tokenizer.decode(batch.input_ids[0][batch.segment_ids[0] == place].tolist()) for place in (0, 1)]
    assert sorted(texts) == ["2 + 2? 4 ", "2 + 2? 5 ", "Hi Hello 2 + 2? 4 ", "Hi Hello 2 + 2? 5 "]


LABELLED = {"prompt": "a", "completion": "b", "label": True}
BAD_LABELLED = [
    ({"prompt": "a", "completion": "b"}, "no prompt, completion and label"),
    (LABELLED | {"label": "yes"}, "it must be true or false"),
    (LABELLED | {"label": 1}, "it must be true or false"),
    (LABELLED | {"label": 0.0}, "it must be true or false"),
    (LABELLED | {"completion": " "}, "its content is empty"),
    (LABELLED | {"prompt": [USER]}, "must be two strings or two lists"),
    (LABELLED | {"prompt": [USER], "completion": [USER]}, "no turn of the assistant"),
]


@pytest.mark.parametrize(("fields", "rule"), BAD_LABELLED)
def test_bad_labelled_records(fields: dict, rule: str) -> None:
    with pytest.raises(UserError, match=rule) as error:
        to_sample(Record(fields, "data.jsonl:3", 0), {}, "labels")
    assert error.value.where == "data.jsonl:3" and error.value.fix


def test_labelled_records_that_do_not_fit_together(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all 2 records have the same prompt"):
        labelled_dataset(tmp_path, LABELLED, LABELLED | {"completion": "c"})
    conversation = {"prompt": [USER], "completion": [GOOD], "label": True}
    with pytest.raises(UserError, match=r":1: its prompt is a list of messages, that of .*:2 text: kto joins"):
        labelled_dataset(tmp_path, conversation, LABELLED)
    with pytest.raises(UserError, match=r":1: its prompt is text, that of .*:2 a list of messages: kto joins"):
        labelled_dataset(tmp_path, LABELLED, conversation)
    with pytest.raises(UserError, match="record 2 of .* has 44 tokens with the answer to another prompt, and"):
        labelled_dataset(tmp_path, LABELLED, LABELLED | {"prompt": "?" * 20})
