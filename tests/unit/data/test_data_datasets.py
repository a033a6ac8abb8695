"""From a configuration to data sets: what is built, what is estimated, and every rule between data and model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data_helpers import jsonl, line_of, make_config, write_tokenizer

from trainer.data import BatchLoader, SyntheticDataset, build_datasets, build_eval_dataset
from trainer.data.batches.batch import IGNORE_INDEX
from trainer.data.batches.loader import training_batches
from trainer.data.datasets import batch_size
from trainer.errors import UserError
from trainer.storage.cache_folder import user_cache

JSONL = {"type": "JsonlDataset"}


def corpus_of(folder: Path, sizes=(100, 3, 50, 0, 500, 40, 41, 42, 300, 7)) -> Path:
    """Returns text files of the given sizes in bytes."""
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        (corpus / f"{number:03}.txt").write_text(chr(97 + number % 26) * size)
    return corpus


def text_of(dataset) -> bytes:
    """Returns all tokens of a data set as text; documents end in a new line."""
    ids = dataset.batch(range(dataset.num_sequences)).input_ids.reshape(-1)
    return bytes(np.where(ids == 256, 10, ids).astype(np.uint8))


def test_training_and_held_out_data_share_no_document(tmp_path):
    config = make_config(tmp_path, corpus_of(tmp_path), train={"held_out": 0.2, "drop_remainder": False})
    train, held_out = build_datasets(config)
    split_texts = [set(text_of(dataset).strip(b"\0").split()) for dataset in (train, held_out)]
    assert len(split_texts[0]) + len(split_texts[1]) == 9 and not split_texts[0] & split_texts[1]
    assert train.num_tokens + held_out.num_tokens == 100 + 3 + 50 + 500 + 40 + 41 + 42 + 300 + 7 + 9
    again, other = (
        build_datasets(make_config(tmp_path, corpus_of(tmp_path), train={"held_out": 0.2}, seed=seed))[1]
        for seed in (1, 12)
    )
    assert text_of(again) == text_of(held_out) != text_of(other)


def test_a_single_document_is_split_at_its_tail(tmp_path):
    (tmp_path / "one.txt").write_text("abcdefghij" * 100)
    train, held_out = build_datasets(make_config(tmp_path, tmp_path / "one.txt", train={"held_out": 0.1}))
    assert (train.num_tokens, held_out.num_tokens) == (901, 100)
    assert text_of(held_out).startswith(b"bcdefghija")


def test_the_micro_batches_of_a_step_are_prepared_ahead(tmp_path):
    runner = {"batch_size": 1, "gradient_accumulation_steps": 5}
    config = make_config(tmp_path, corpus_of(tmp_path), train={"held_out": 0.2}, runner_config=runner, do_eval=True)
    data = training_batches(config, (0, 1), lambda done, total: None, print)
    assert (data.loader.prefetch_size, data.evaluation.loader.prefetch_size) == (5, 2)


def test_the_default_is_no_evaluation_data(tmp_path):
    config = make_config(tmp_path, corpus_of(tmp_path))
    assert build_datasets(config)[1] is None and build_eval_dataset(config) is None


def test_eval_dataset_is_its_own_data_and_is_built_only_to_evaluate(tmp_path):
    other = jsonl(tmp_path / "eval.jsonl", {"text": "evaluate this text"}, {"text": "and that"})
    data = {"data_loader": {**JSONL, "dataset_dir": str(other)}}
    config = make_config(tmp_path, corpus_of(tmp_path), train={"held_out": 0.1}, eval_dataset=data, do_eval=True)
    train, evaluation = build_datasets(config)
    assert text_of(evaluation) == b"evaluate this text\nand t", "sequences of 8, the rest is dropped"
    assert text_of(build_eval_dataset(config)) == text_of(evaluation)
    unused = make_config(tmp_path, corpus_of(tmp_path), train={"held_out": 0.1}, eval_dataset=data)
    assert build_datasets(unused)[1] is None
    only = make_config(tmp_path, "nowhere", eval_dataset=data, run_mode="eval")
    assert text_of(build_eval_dataset(only)) == text_of(evaluation)


def test_held_out_documents_alone_can_be_built(tmp_path):
    config = make_config(tmp_path, corpus_of(tmp_path), train={"held_out": 0.2})
    assert text_of(build_eval_dataset(config)) == text_of(build_datasets(config)[1])


def test_num_samples_limits_training_data_only(tmp_path):
    train = {"held_out": 0.3}
    every = build_datasets(make_config(tmp_path, corpus_of(tmp_path), train=train))
    limited = build_datasets(make_config(tmp_path, corpus_of(tmp_path), train=train, loader={"num_samples": 4}))
    assert limited[0].num_sequences == 4 and limited[1].num_sequences == every[1].num_sequences
    assert text_of(limited[0]) == text_of(every[0])[:32]


def test_drop_remainder_decides_about_the_last_sequence(tmp_path):
    corpus = corpus_of(tmp_path, (20,))
    dropped, kept = (
        build_datasets(make_config(tmp_path, corpus, train={"drop_remainder": drop}))[0] for drop in (True, False)
    )
    assert (dropped.num_sequences, kept.num_sequences) == (2, 3)
    last = kept.batch([2])
    assert last.input_ids.tolist() == [[97, 97, 97, 97, 256, 0, 0, 0]]
    assert last.labels.tolist() == [[97, 97, 97, 256] + [IGNORE_INDEX] * 4]


def test_an_uneven_split_is_a_note(tmp_path):
    told: list[str] = []
    config = make_config(tmp_path, corpus_of(tmp_path, (400, 500)), train={"held_out": 0.1})
    build_datasets(config, note=told.append)
    assert len(told) == 1 and "44.5% of all tokens instead of held_out = 10.0%" in told[0]
    build_datasets(make_config(tmp_path, corpus_of(tmp_path), train={"held_out": 0.1}), note=told.append)
    assert len(told) == 1


def test_synthetic_sequences(tmp_path):
    loader = {"type": "SyntheticDataset", "num_samples": 50}
    train, held_out = build_datasets(make_config(tmp_path, loader=loader, train={"held_out": 0.1}))
    assert isinstance(train, SyntheticDataset) and (train.num_sequences, held_out.num_sequences) == (45, 5)
    assert train.max_token_id == 299 and not (tmp_path / "cache").exists()
    evaluation = {"data_loader": {"type": "SyntheticDataset", "num_samples": 7}}
    train, own = build_datasets(make_config(tmp_path, loader=loader, eval_dataset=evaluation, do_eval=True))
    assert (train.num_sequences, own.num_sequences) == (50, 7)
    found = np.concatenate([data.batch(range(data.num_sequences)).input_ids for data in (train, own, held_out)])
    assert len(np.unique(found, axis=0)) == 57, "eval_dataset comes after the training data"


def test_evaluation_uses_the_tokenizer_of_training(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    other = write_tokenizer(tmp_path / "other" / "tokenizer.json", "<|endoftext|>")
    (tmp_path / "eval.txt").write_text("the cat sat on the mat " * 20)
    tokenizer = {"tokenizer": {"type": "huggingface", "path": str(path)}}
    data = {"data_loader": {"type": "TextDataset", "dataset_dir": str(tmp_path / "eval.txt")}}
    arguments = {"train": tokenizer, "do_eval": True}
    for section in (data, {**data, **tokenizer}, {**data, "tokenizer": {"type": "bytes"}}):
        evaluation = build_datasets(make_config(tmp_path, corpus_of(tmp_path), eval_dataset=section, **arguments))[1]
        assert evaluation.num_tokens < 200
    section = {**data, "tokenizer": {"type": "huggingface", "path": str(other)}}
    with pytest.raises(UserError, match="eval_dataset.tokenizer.path = .*train_dataset.tokenizer is another") as caught:
        build_datasets(make_config(tmp_path, corpus_of(tmp_path), eval_dataset=section, **arguments))
    assert "run.yaml:" in str(caught.value)


def test_the_default_cache_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    config = make_config(tmp_path, corpus_of(tmp_path), train={"cache_dir": None})
    build_datasets(config)
    assert any((user_cache() / "tokens").glob("*/tokens.bin"))
    assert (tmp_path / "home").exists()


def test_without_a_home_folder_the_cache_is_in_the_output_folder(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("no folder")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = make_config(tmp_path, corpus_of(tmp_path), train={"cache_dir": None})
    config = config.model_copy(update={"output_dir": str(tmp_path / "output")})
    notes: list[str] = []
    for _ in range(2):
        build_datasets(config, note=notes.append)
    cache = tmp_path / "home" / ".cache" / "run_trainer"
    assert notes == [f"token files are in {tmp_path}/output/tokens: {cache} cannot be made (Permission denied)"] * 2
    assert len(list((tmp_path / "output" / "tokens").glob("*/tokens.bin"))) == 1
    named = make_config(tmp_path, corpus_of(tmp_path), train={"cache_dir": str(tmp_path / "mine")})
    build_datasets(named, note=pytest.fail)
    assert list((tmp_path / "mine").glob("*/tokens.bin"))


def test_batch_size_of_an_evaluation(tmp_path):
    evaluation = {"data_loader": {"type": "SyntheticDataset", "num_samples": 7}}
    config = make_config(tmp_path, "x", eval_dataset=evaluation, runner_config={"batch_size": 3})
    assert (batch_size(config, "train_dataset"), batch_size(config, "eval_dataset")) == (3, 3)
    config = make_config(tmp_path, "x", eval_dataset={**evaluation, "batch_size": 2}, runner_config={"batch_size": 3})
    assert (batch_size(config, "train_dataset"), batch_size(config, "eval_dataset")) == (3, 2)


def test_data_set_and_loader_together_see_every_token_once(tmp_path):
    config = make_config(tmp_path, corpus_of(tmp_path), train={"drop_remainder": False})
    dataset, _ = build_datasets(config)
    loader = BatchLoader(dataset, batch_size=4, shuffle=True, seed=1, drop_remainder=False, prefetch_size=2)
    labels = np.concatenate([batch.labels.reshape(-1) for batch in loader.epoch(0)])
    inputs = dataset.batch(range(dataset.num_sequences)).input_ids.reshape(-1)[: dataset.num_tokens]
    counted = np.bincount(labels[labels != IGNORE_INDEX], minlength=257)
    expected = np.bincount(inputs, minlength=257)
    # Each token is a label once, but the first of each document and the first of each row that starts inside one.
    assert counted[256] <= expected[256] == 9
    assert counted.sum() == dataset.num_tokens - 9


# Rules


def refusal(config, match: str) -> str:
    with pytest.raises(UserError, match=match) as built:
        build_datasets(config)
    assert "Fix: " in str(built.value)
    return str(built.value)


@pytest.mark.parametrize("drop_remainder", [True, False])
@pytest.mark.parametrize("size", [1, 6, 7])
def test_a_sequence_longer_than_the_data_is_an_error(tmp_path, size, drop_remainder):
    config = make_config(tmp_path, corpus_of(tmp_path, (size,)), train={"drop_remainder": drop_remainder})
    message = refusal(config, r"seq_length = 8: a sequence takes 9 tokens.* train_dataset has \d")
    assert line_of(tmp_path, "seq_length") in message and f"at most {size}" in message
    assert build_datasets(make_config(tmp_path, corpus_of(tmp_path, (8,))))[0].num_sequences == 1


def test_a_batch_larger_than_the_data_set_is_an_error(tmp_path):
    corpus, runner = corpus_of(tmp_path, (100,)), {"batch_size": 13}
    message = refusal(make_config(tmp_path, corpus, runner_config=runner), "12 sequences of 8 tokens, fewer than one")
    assert line_of(tmp_path, "batch_size") in message and "runner_config.batch_size = 13" in message
    assert "at most 12" in message and "drop_remainder" in message
    limited = make_config(tmp_path, corpus, runner_config={"batch_size": 6}, loader={"num_samples": 5})
    refusal(limited, "train_dataset has 5 sequences")
    kept = make_config(tmp_path, corpus, runner_config=runner, train={"drop_remainder": False})
    assert build_datasets(kept)[0].num_sequences == 13


def test_a_batch_larger_than_eval_dataset_is_an_error(tmp_path):
    evaluation = {"data_loader": {"type": "TextDataset", "dataset_dir": str(corpus_of(tmp_path))}, "batch_size": 10_000}
    config = make_config(tmp_path, corpus_of(tmp_path), eval_dataset=evaluation, do_eval=True)
    message = refusal(config, "eval_dataset.batch_size = 10000: eval_dataset has .* fewer than one batch")
    assert line_of(tmp_path, "batch_size: 10000") in message
    evaluation = {"data_loader": {"type": "SyntheticDataset", "num_samples": 3}}
    small = make_config(
        tmp_path, corpus_of(tmp_path), eval_dataset=evaluation, do_eval=True, runner_config={"batch_size": 4}
    )
    refusal(small, "runner_config.batch_size = 4: eval_dataset has 3 sequences")


def test_a_token_beyond_the_vocabulary_is_an_error(tmp_path):
    with pytest.raises(UserError, match="vocab_size = 256: "):
        build_datasets(make_config(tmp_path, corpus_of(tmp_path), model={"vocab_size": 256}))
    assert build_datasets(make_config(tmp_path, corpus_of(tmp_path), model={"vocab_size": 257}))[0].max_token_id == 256
    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    train = {"tokenizer": {"type": "huggingface", "path": str(path)}}
    config = make_config(tmp_path, corpus_of(tmp_path), train=train, model={"vocab_size": 200})
    message = refusal(config, r"vocab_size = 200: the tokenizer has 274 tokens, beyond the model's vocabulary of 200: ")
    assert line_of(tmp_path, "vocab_size") in message and "at least 274" in message


def test_a_tokenizer_larger_than_the_vocabulary_is_an_error_whatever_the_text_uses(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    train = {"tokenizer": {"type": "huggingface", "path": str(path)}}
    (tmp_path / "a.txt").write_text("1 2 3\n" * 10)

    def config(size: int):
        model = {"vocab_size": size, "eos_token_id": 0}
        return make_config(tmp_path, tmp_path / "a.txt", train=train, model=model)

    for size in (100, 273):
        message = refusal(config(size), f"vocab_size = {size}: the tokenizer has 274 tokens, beyond .* of {size}[.]")
        assert "Fix: set it to at least 274, or use the model's own tokenizer" in message
        assert line_of(tmp_path, "vocab_size") in message
    assert build_datasets(config(274))[0].max_token_id < 273


def test_synthetic_data_needs_a_size(tmp_path):
    config = make_config(tmp_path, loader={"type": "SyntheticDataset"})
    message = refusal(config, "train_dataset.data_loader.num_samples: SyntheticDataset needs a number")
    assert line_of(tmp_path, "SyntheticDataset") in message


def test_data_without_text_is_an_error_in_the_estimate_too(tmp_path):
    refusal(make_config(tmp_path, corpus_of(tmp_path, (0, 0))), "holds no text")
