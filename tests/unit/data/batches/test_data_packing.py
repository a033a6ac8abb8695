"""Sequences packed from documents, checked against a plain loop; the held-out split; synthetic data."""

from __future__ import annotations

import numpy as np
import pytest
from data_helpers import cache_of, jsonl, source_of
from tolerances import HALF_OF_200_000

from trainer.data.batches.batch import IGNORE_INDEX
from trainer.data.batches.packing import TokenDataset
from trainer.data.batches.split import DocumentSpans, all_documents, hold_out
from trainer.data.source.synthetic import SyntheticDataset
from trainer.data.tokens.cache import find_token_file
from trainer.data.tokens.tokenizer import ByteTokenizer


def token_file_of(tmp_path, records):
    path = jsonl(tmp_path / "a.jsonl", *records)
    return find_token_file(source_of(tmp_path, path, "JsonlDataset"), ByteTokenizer(), cache_of(tmp_path))


def random_records(count: int, seed: int = 0) -> list[dict]:
    """Returns documents of very unequal length: some of one letter, some of many sequences, some with a masked
    prompt."""
    random = np.random.default_rng(seed)
    records = []
    for number in range(count):
        length = int(random.choice([1, 2, 7, 8, 30, 90]))
        text = "".join(chr(97 + letter) for letter in random.integers(0, 26, length).tolist())
        records.append({"text": text} if number % 3 else {"instruction": text, "output": text[::-1]})
    return records


def sequences_by_hand(
    token_file, spans: DocumentSpans, seq_length: int, count: int
) -> list[list[tuple[int, int, int, int]]]:
    """Returns (input, label, position, segment) of every token of every sequence, token by token."""
    stream = []
    for document, (start, length) in enumerate(zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True)):
        for offset in range(length):
            place = start + offset
            is_learnt = token_file.mask is None or bool(token_file.mask[min(place + 1, len(token_file.tokens) - 1)])
            has_label = offset + 1 < length and is_learnt
            label = int(token_file.tokens[place + 1]) if has_label else IGNORE_INDEX
            stream.append((int(token_file.tokens[place]), label, document))
    sequences = []
    for number in range(count):
        part = stream[number * seq_length : (number + 1) * seq_length]
        documents = [document for _, _, document in part]
        made = [
            (token, label, place - documents.index(document), document - documents[0])
            for place, (token, label, document) in enumerate(part)
        ]
        padding = range(seq_length - len(made))  # a segment of its own
        made += [(0, IGNORE_INDEX, place, made[-1][3] + 1) for place in padding]
        sequences.append(made)
    return sequences


def assert_sequences_equal(batch, expected) -> None:
    for array, column in zip(batch, range(4), strict=True):
        assert array.dtype == np.int32 and array.flags.c_contiguous
        assert array.tolist() == [[place[column] for place in row] for row in expected]


@pytest.mark.parametrize("keep_tail", [False, True])
@pytest.mark.parametrize("seq_length", [1, 2, 7, 8, 64, 1000])
def test_sequences_of_unequal_documents(tmp_path, seq_length, keep_tail):
    token_file = token_file_of(tmp_path, random_records(60))
    spans = all_documents(token_file.offsets)
    dataset = TokenDataset(token_file, spans, seq_length, keep_tail=keep_tail)
    assert dataset.num_tokens == token_file.meta.num_tokens and dataset.num_documents == 60
    full, left_tokens = divmod(dataset.num_tokens, seq_length)
    assert dataset.num_sequences == full + bool(keep_tail and left_tokens)
    expected = sequences_by_hand(token_file, spans, seq_length, dataset.num_sequences)
    assert_sequences_equal(dataset.batch(range(dataset.num_sequences)), expected)
    order = np.random.default_rng(1).permutation(dataset.num_sequences)[:5]
    assert_sequences_equal(dataset.batch(order), [expected[number] for number in order])


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.9])
def test_sequences_of_a_subset_of_the_documents(tmp_path, fraction):
    token_file = token_file_of(tmp_path, random_records(60))
    for spans in hold_out(all_documents(token_file.offsets), fraction, seed=3):
        dataset = TokenDataset(token_file, spans, 16, keep_tail=True)
        assert dataset.num_tokens == spans.lengths.sum()
        expected = sequences_by_hand(token_file, spans, 16, dataset.num_sequences)
        assert_sequences_equal(dataset.batch(range(dataset.num_sequences)), expected)


def test_a_small_sequence_written_out(tmp_path):
    file = token_file_of(tmp_path, [{"text": "ab"}, {"text": "cdef"}])
    dataset = TokenDataset(file, all_documents(file.offsets), 4, keep_tail=False)
    batch = dataset.batch([0, 1])
    assert batch.input_ids.tolist() == [[97, 98, 256, 99], [100, 101, 102, 256]]
    assert batch.labels.tolist() == [[98, 256, -100, 100], [101, 102, 256, -100]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


def test_only_answers_of_a_conversation_are_learnt(tmp_path):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
    ]
    file = token_file_of(tmp_path, [{"messages": messages}])
    dataset = TokenDataset(file, all_documents(file.offsets), 32, keep_tail=True)
    labels = dataset.batch(range(dataset.num_sequences)).labels
    assert labels[labels != IGNORE_INDEX].tolist() == [*b"Hello", 256, *b"Ciao", 256]


def test_one_document_has_no_boundaries_and_num_samples_limits_sequences(tmp_path):
    file = token_file_of(tmp_path, [{"text": "x" * 99}])
    dataset = TokenDataset(file, all_documents(file.offsets), 10, limit=3)
    assert (dataset.num_sequences, dataset.max_token_id) == (3, 256)
    assert TokenDataset(file, all_documents(file.offsets), 10, limit=30).num_sequences == 10


@pytest.mark.parametrize("indices", [[10], [-1], [0, 99], []])
def test_numbers_out_of_range_are_an_error(tmp_path, indices):
    file = token_file_of(tmp_path, [{"text": "x" * 99}])
    for dataset in (TokenDataset(file, all_documents(file.offsets), 10), SyntheticDataset(10, 10, 300, seed=1)):
        with pytest.raises(IndexError):
            dataset.batch(indices)


# RankParams out


def spans_of(lengths) -> DocumentSpans:
    lengths = np.array(lengths, np.int64)
    return DocumentSpans(np.cumsum(lengths) - lengths, lengths)


def as_set(spans: DocumentSpans) -> set[tuple[int, int]]:
    return set(zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True))


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_about_the_fraction_of_tokens_is_held_out(fraction, seed):
    lengths = np.random.default_rng(9).pareto(1.2, 3000) * 100 + 2
    documents = spans_of(lengths.astype(np.int64))
    train, held_out = hold_out(documents, fraction, seed)
    assert as_set(train) | as_set(held_out) == as_set(documents) and not as_set(train) & as_set(held_out)
    assert (np.diff(train.starts) > 0).all() and (np.diff(held_out.starts) > 0).all(), "in the order of the file"
    actual = held_out.lengths.sum() / documents.lengths.sum()
    assert 0.95 * fraction <= actual <= fraction


def test_the_seed_decides_what_is_held_out():
    documents = spans_of(range(2, 202))
    first, again, other = (hold_out(documents, 0.2, seed)[1] for seed in (1, 1, 2))
    assert as_set(first) == as_set(again) != as_set(other)


@pytest.mark.parametrize(
    ("lengths", "fraction", "held_out"),
    [
        ([100, 30, 200], 0.01, {(100, 30)}),  # none fits: the shortest
        ([10, 10], 0.99, None),  # one of two, whichever
        ([1000, 3], 0.3, {(1000, 3)}),
    ],
)
def test_at_least_one_document_is_held_out_and_one_is_left(lengths, fraction, held_out):
    train, held = hold_out(spans_of(lengths), fraction, seed=1)
    assert len(held.lengths) >= 1 and len(train.lengths) >= 1
    assert held_out is None or as_set(held) == held_out


@pytest.mark.parametrize(("length", "tail"), [(1000, 100), (12, 2), (3, 2), (2, 1)])
def test_the_tail_of_a_single_document_is_held_out(length, tail):
    train, held_out = hold_out(spans_of([length]), 0.1, seed=1)
    assert as_set(train) == {(0, length - tail)} and as_set(held_out) == {(length - tail, tail)}


def test_the_last_training_token_does_not_learn_the_first_held_out_one(tmp_path):
    file = token_file_of(tmp_path, [{"text": "a" * 19}])
    train, held_out = hold_out(all_documents(file.offsets), 0.5, seed=1)
    batch = TokenDataset(file, train, 5).batch([0, 1])
    assert batch.labels[1].tolist() == [97, 97, 97, 97, IGNORE_INDEX]
    assert TokenDataset(file, held_out, 5).batch([1]).input_ids.tolist() == [[97, 97, 97, 97, 256]]


# Synthetic


def test_synthetic_sequences_are_a_function_of_seed_and_number():
    dataset = SyntheticDataset(1000, 32, 4096, seed=5)
    every = dataset.batch(range(1000))
    assert (dataset.batch([7, 3]).input_ids == every.input_ids[[7, 3]]).all()
    assert (SyntheticDataset(10, 32, 4096, seed=5, first=3).batch([4]).input_ids == every.input_ids[7]).all()
    assert (SyntheticDataset(1000, 32, 4096, seed=6).batch([7]).input_ids != every.input_ids[7]).any()
    assert len(np.unique(every.input_ids, axis=0)) == 1000
    assert (every.labels[:, :-1] == every.input_ids[:, 1:]).all() and (every.labels != IGNORE_INDEX).all()
    assert (every.positions == np.arange(32)).all() and not every.segment_ids.any()
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in every)


@pytest.mark.parametrize("vocab_size", [2, 7, 4096, 151_936])
def test_synthetic_tokens_are_even_over_the_vocabulary(vocab_size):
    dataset = SyntheticDataset(200, 999, vocab_size, seed=1)
    tokens = dataset.batch(range(200)).labels
    assert tokens.min() >= 0 and tokens.max() < vocab_size == dataset.max_token_id + 1
    counts = np.histogram(tokens, bins=2, range=(0, vocab_size))[0]
    lower_half = -(-vocab_size // 2) / vocab_size  # an odd vocabulary has its middle token in the upper bin
    lower_half = lower_half if vocab_size % 2 == 0 else (vocab_size // 2 + 1) / vocab_size
    assert abs(counts[0] / counts.sum() - lower_half) < HALF_OF_200_000


def test_synthetic_data_counts_its_tokens():
    assert SyntheticDataset(3, 4, 10, seed=1).num_tokens == 12
