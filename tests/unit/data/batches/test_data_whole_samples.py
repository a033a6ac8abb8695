"""Whole samples in sequences: best-fit packing, samples that are too long, and the batches made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import cache_of, jsonl, line_of, make_config, source_of

from trainer.config import Override, load_config
from trainer.data.batches.batch import IGNORE_INDEX, Batch, WeightedBatch, sum_weights
from trainer.data.batches.best_fit import best_fit, pack_one_each
from trainer.data.batches.packing import PackedDataset, TokenDataset, truncate_or_drop
from trainer.data.batches.split import DocumentSpans, all_documents
from trainer.data.datasets import build_datasets, build_eval_dataset
from trainer.data.source.find import find_sources
from trainer.data.tokens.cache import find_token_file
from trainer.data.tokens.token_file import open_token_file
from trainer.data.tokens.tokenizer import ByteTokenizer
from trainer.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[4]
JSONL = {"type": "JsonlDataset"}


# Best fit


def best_fit_one_by_one(lengths: np.ndarray, seq_length: int) -> list[int]:
    """Returns the free space of each sequence, placing sample by sample as the definition says."""
    spaces: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [(space, number) for number, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[min(fitting)[1]] -= length
        else:
            spaces.append(seq_length - length)
    return sorted(spaces)


@pytest.mark.parametrize("seed", range(60))
def test_best_fit_places_every_sample_once_as_the_definition_says(seed):
    random = np.random.default_rng(seed)
    seq_length = int(random.integers(1, 60))
    longest = int(random.integers(1, seq_length + 1))
    lengths = random.integers(1, longest + 1, int(random.integers(1, 200)))
    packed = best_fit(lengths, seq_length)
    assert sorted(packed.samples.tolist()) == list(range(len(lengths)))
    parts = np.split(packed.samples, packed.starts[1:-1])
    assert sorted(seq_length - int(lengths[part].sum()) for part in parts) == best_fit_one_by_one(lengths, seq_length)
    assert all((np.diff(part) > 0).all() for part in parts), "in the order of the file"
    first = [int(part[0]) for part in parts]
    assert first == sorted(first), "sequences in the order of their first sample"


def test_packing_written_out():
    packed = best_fit(np.array([3, 5, 2, 8, 4]), 8)
    assert np.split(packed.samples, packed.starts[1:-1])[0].tolist() == [0, 1]
    assert packed.starts.tolist() == [0, 2, 4, 5] and packed.samples.tolist() == [0, 1, 2, 4, 3]
    alone = pack_one_each(3)
    assert alone.samples.tolist() == [0, 1, 2] and alone.starts.tolist() == [0, 1, 2, 3]


def test_no_sample_is_no_sequence():
    assert best_fit(np.array([], np.int64), 8).starts.tolist() == [0]


MILLION = r"""
import re, sys, time
import numpy as np
from trainer.data.batches.best_fit import best_fit

random = np.random.default_rng(1)
seq_length = 8192
for lengths in (
    random.integers(1, seq_length // 2 + 1, 1_000_000),
    np.clip(random.lognormal(6, 1, 1_000_000).astype(np.int64), 1, seq_length),
):
    began = time.perf_counter()
    packed = best_fit(lengths, seq_length)
    seconds = time.perf_counter() - began
    used = np.add.reduceat(lengths[packed.samples], packed.starts[:-1])
    assert used.max() <= seq_length and np.bincount(packed.samples).tolist() == [1] * 1_000_000
    padding = 1 - used.mean() / seq_length
    # Not ru_maxrss, which begins with the size of the process that started this one.
    peak_kib = re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]
    print(seconds, padding, int(peak_kib) / 1024, "mindspore" in sys.modules)
"""


def test_a_million_samples_pack_within_20_seconds_and_500_mb():
    output = subprocess.run(
        [sys.executable, "-c", MILLION], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for line in output.splitlines():
        seconds, padding, peak_mib, has_mindspore = line.split()
        assert float(seconds) < 20 and float(padding) < 0.05 and float(peak_mib) < 500 and has_mindspore == "False"
    assert len(output.splitlines()) == 2


# Samples that are too long


def spans_of(*lengths: int) -> DocumentSpans:
    return DocumentSpans(np.cumsum(lengths) - lengths, np.array(lengths))


def test_the_end_of_a_long_sample_stays():
    fitted = truncate_or_drop(spans_of(3, 10, 8, 9), 8, "truncate")
    assert fitted.spans.starts.tolist() == [0, 5, 13, 22] and fitted.spans.lengths.tolist() == [3, 8, 8, 8]
    assert (fitted.truncated, fitted.dropped) == (2, 0)
    fitted = truncate_or_drop(spans_of(3, 10, 8, 9), 8, "drop")
    assert fitted.spans.starts.tolist() == [0, 13] and fitted.spans.lengths.tolist() == [3, 8]
    assert (fitted.truncated, fitted.dropped) == (0, 2)


def long_and_short(folder: Path) -> Path:
    sample = {"instruction": "a", "output": "b"}
    return jsonl(folder / "chat.jsonl", sample, {**sample, "instruction": "long" * 30}, {**sample, "output": "c"})


def test_truncated_and_dropped_samples_are_counted_and_told(tmp_path):
    path, model = long_and_short(tmp_path), {"seq_length": 64}
    for overlong, done, counts in (
        ("truncate", "truncated: they lose", (3, 1, 0)), ("drop", "dropped", (2, 0, 1)),
    ):  # fmt: skip
        told: list[str] = []
        config = make_config(tmp_path, path, loader=JSONL, model=model, train={"overlong": overlong})
        found = build_datasets(config, note=told.append)[0].packing
        assert (found.samples, found.truncated, found.dropped) == counts and found.packing == "whole"
        assert len(told) == 1 and told[0].startswith("1 of 3 samples of ") and done in told[0]


def test_a_long_sample_can_be_an_error_with_its_number(tmp_path):
    config = make_config(
        tmp_path, long_and_short(tmp_path), loader=JSONL, model={"seq_length": 64}, train={"overlong": "error"}
    )
    with pytest.raises(UserError, match=r"overlong = 'error': sample 2 of .*chat.jsonl has \d+ tokens.* sequence 64"):
        build_datasets(config)


def test_overlong_has_no_effect_on_text_that_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("text" * 20)
    told: list[str] = []
    build_datasets(make_config(tmp_path, tmp_path / "a.txt", train={"overlong": "error"}), note=told.append)
    assert len(told) == 1 and "train_dataset.overlong = error has no effect" in told[0]


def test_random_tokens_are_not_packed(tmp_path):
    with pytest.raises(UserError, match="packing = 'none': does not apply to SyntheticDataset") as caught:
        make_config(tmp_path, loader={"type": "SyntheticDataset", "num_samples": 9}, train={"packing": "none"})
    assert line_of(tmp_path, "packing") in str(caught.value)


def test_dropping_all_samples_is_an_error(tmp_path):
    config = make_config(tmp_path, long_and_short(tmp_path), loader=JSONL, train={"overlong": "drop"})
    with pytest.raises(UserError, match="overlong = 'drop': all 3 samples .* longer than a sequence of 8") as caught:
        build_datasets(config)
    assert line_of(tmp_path, "overlong") in str(caught.value)


# Data sets


def packed_by_hand(token_file, spans: DocumentSpans, packed, seq_length: int) -> list[list[tuple[int, int, int, int]]]:
    """Returns (input, label, position, segment) of every position of every sequence."""
    sequences = []
    for samples in np.split(packed.samples, packed.starts[1:-1]):
        made = []
        for segment, sample in enumerate(samples.tolist()):
            first = int(spans.starts[sample])
            last = first + int(spans.lengths[sample]) - 1
            for place in range(first, last + 1):
                learnt = place < last and (token_file.mask is None or token_file.mask[place + 1])
                label = int(token_file.tokens[place + 1]) if learnt else IGNORE_INDEX
                made.append((int(token_file.tokens[place]), label, place - first, segment))
        padding = range(seq_length - len(made))
        made += [(0, IGNORE_INDEX, place, len(samples)) for place in padding]
        sequences.append(made)
    return sequences


@pytest.mark.parametrize("packing", ["whole", "none"])
@pytest.mark.parametrize("masked", [True, False])
def test_sequences_hold_whole_samples_and_padding(tmp_path, packing, masked):
    random = np.random.default_rng(5)
    texts = ["".join(map(chr, random.integers(97, 123, int(size)))) for size in random.integers(1, 60, 80)]
    records = [{"instruction": text, "output": text[::-1]} if masked else {"text": text} for text in texts]
    path = jsonl(tmp_path / "a.jsonl", *records)
    token_file = find_token_file(source_of(tmp_path, path, "JsonlDataset"), ByteTokenizer(), cache_of(tmp_path))
    spans = truncate_or_drop(all_documents(token_file.offsets), 128, "truncate").spans
    dataset = PackedDataset(token_file, spans, 128, packing=packing)
    packed = best_fit(spans.lengths, 128) if packing == "whole" else pack_one_each(80)
    expected = packed_by_hand(token_file, spans, packed, 128)
    assert dataset.num_sequences == len(expected) and dataset.num_documents == 80
    order = random.permutation(dataset.num_sequences)
    for indices in (order, order[:3]):
        for array, column in zip(dataset.batch(indices), range(4), strict=True):
            assert array.dtype == np.int32 and array.flags.c_contiguous
            assert array.tolist() == [[place[column] for place in expected[number]] for number in indices]
    labels = dataset.batch(order).labels
    assert dataset.packing.padding == pytest.approx(1 - spans.lengths.sum() / labels.size)
    with pytest.raises(IndexError):
        dataset.batch([dataset.num_sequences])


def test_num_samples_limits_sequences(tmp_path):
    records = [{"instruction": "a" * size, "output": "b"} for size in range(1, 40)]
    loader = {**JSONL, "num_samples": 4}
    path = jsonl(tmp_path / "a.jsonl", *records)
    every, limited = (
        build_datasets(make_config(tmp_path, path, loader=each, model={"seq_length": 128}))[0]
        for each in (JSONL, loader)
    )
    assert limited.num_sequences == limited.packing.sequences == 4 < every.num_sequences
    for left, right in zip(limited.batch(range(4)), every.batch(range(4)), strict=True):
        assert (left == right).all()
    assert limited.num_tokens == (limited.batch(range(4)).positions.size * (1 - limited.packing.padding))


@pytest.mark.parametrize(
    ("wanted", "records", "found"),
    [
        (None, [{"text": "a" * 40}], "cut"),
        (None, [{"instruction": "a", "output": "b"}] * 3, "whole"),
        ("none", [{"instruction": "a", "output": "b"}] * 3, "none"),
        ("cut", [{"instruction": "a", "output": "b"}] * 3, "cut"),
        ("whole", [{"text": "a" * 40}], "whole"),
    ],
)
def test_the_default_is_whole_for_conversations_and_cut_for_text(tmp_path, wanted, records, found):
    path = jsonl(tmp_path / "a.jsonl", *records)
    section = {"train": {"packing": wanted}} if wanted else {}
    config = make_config(tmp_path, path, loader=JSONL, model={"seq_length": 32}, **section)
    dataset, _ = build_datasets(config)
    assert dataset.packing.packing == found and isinstance(dataset, TokenDataset if found == "cut" else PackedDataset)


def test_held_out_samples_and_eval_dataset_are_packed_alike(tmp_path):
    records = [{"instruction": "a" * size, "output": "b"} for size in range(1, 40)]
    path = jsonl(tmp_path / "a.jsonl", *records)
    model = {"seq_length": 128}
    config = make_config(tmp_path, path, loader=JSONL, train={"held_out": 0.2}, model=model)
    train, held_out = build_datasets(config)
    assert train.packing.samples + held_out.packing.samples == 39
    assert held_out.packing.packing == "whole"
    own = {"data_loader": {**JSONL, "dataset_dir": str(path)}, "packing": "none"}
    config = make_config(tmp_path, path, loader=JSONL, eval_dataset=own, model=model, run_mode="eval")
    assert build_eval_dataset(config).num_sequences == 39


def test_a_single_sample_is_not_split_to_hold_out_its_end(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"instruction": "a", "output": "b" * 20})
    config = make_config(tmp_path, path, loader=JSONL, train={"held_out": 0.2}, model={"seq_length": 64})
    with pytest.raises(UserError, match="held_out = 0.2: samples are not divided, and there is only one"):
        build_datasets(config)


def test_another_packing_is_another_content(tmp_path):
    path, model = long_and_short(tmp_path), {"seq_length": 64}

    def content(**train):
        return build_datasets(make_config(tmp_path, path, loader=JSONL, model=model, train=train))[0].content

    contents = [content(), content(packing="none"), content(packing="cut"), content(overlong="drop")]
    assert len(set(contents)) == 4 and content() == contents[0]


def test_no_sample_of_the_example_of_instructions_lost_its_prompt(tmp_path):
    config = load_config(
        str(REPOSITORY / "configs/instructions.yaml"), [Override("train_dataset.cache_dir", str(tmp_path), "test")]
    )
    datasets = build_datasets(config)
    (folder,) = (path.parent for path in tmp_path.glob("*/tokens.bin"))
    token_file = open_token_file(folder)
    offsets = token_file.offsets.tolist()
    samples = {tuple(token_file.tokens[first:end].tolist()) for first, end in zip(offsets, offsets[1:], strict=False)}
    trained = cut = 0
    for dataset in datasets:
        for ids, labels, _, segments in zip(*dataset.batch(range(dataset.num_sequences)), strict=True):
            for segment in range(segments.max() + 1):
                is_here = segments == segment
                if (labels[is_here] != IGNORE_INDEX).any():
                    trained += 1
                    cut += tuple(ids[is_here].tolist()) not in samples
    assert (trained, cut) == (token_file.meta.num_documents, 0)


# Weights of records


def weighted_file(folder: Path, *others: object) -> Path:
    records = [{"text": "ab" * (1 + number % 3), "importance": number / 4} for number in range(20)]
    return jsonl(folder / "weighted.jsonl", *records, *others)


@pytest.mark.parametrize("packing", ["whole", "cut", "none"])
def test_tokens_have_the_weight_of_their_record(tmp_path: Path, packing: str) -> None:
    path = weighted_file(tmp_path)
    loader = JSONL | {"columns": {"weight": "importance"}}
    train = {"packing": packing, "drop_remainder": False, "held_out": 0.2}
    config = make_config(tmp_path, path, loader=loader, train=train)
    dataset, held_out = build_datasets(config)
    evaluated = build_eval_dataset(config)
    assert held_out is not None and evaluated is not None
    assert type(held_out.batch([0])) is type(evaluated.batch([0])) is Batch, "evaluations have no weights"
    found: dict[float, int] = {}
    for number in range(dataset.num_sequences):
        batch = dataset.batch([number])
        assert isinstance(batch, WeightedBatch) and batch.values.dtype == np.float32
        plain = make_config(tmp_path, path, loader=JSONL, train=train)
        assert all(map(np.array_equal, batch[:4], build_datasets(plain)[0].batch([number])))
        is_token = batch.input_ids > 0
        assert not batch.values[~is_token].any()
        for weight, count in zip(*np.unique(batch.values[is_token], return_counts=True), strict=True):
            found[float(weight)] = found.get(float(weight), 0) + int(count)
    lengths = {number / 4: 2 * (1 + number % 3) + 1 for number in range(20)}  # with the token that ends each
    assert found and found == {weight: lengths[weight] for weight in found}
    assert sum(found.values()) == dataset.num_tokens
    padding = dataset.padding(2)
    assert isinstance(padding, WeightedBatch) and not padding.values.any() and padding.values.shape == (2, 8)
    assert sum_weights(batch) == batch.values[batch.labels != IGNORE_INDEX].astype(np.float64).sum()


def test_records_that_all_weigh_nothing_have_weights(tmp_path: Path) -> None:
    """Their token file has no values, as that of texts has none."""
    path = jsonl(tmp_path / "nothing.jsonl", *[{"text": "ab", "importance": 0}] * 8)
    dataset, _ = build_datasets(make_config(tmp_path, path, loader=JSONL | {"columns": {"weight": "importance"}}))
    batch = dataset.batch([0])
    assert isinstance(batch, WeightedBatch) and (batch.labels != IGNORE_INDEX).any()
    assert sum_weights(batch) == 0 and batch.values.shape == batch.labels.shape


@pytest.mark.parametrize("weight", [-1, "2", None, True, 1e7, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_an_error_with_its_line(tmp_path: Path, weight: object) -> None:
    path = weighted_file(tmp_path, {"text": "abc", "importance": weight})
    with pytest.raises(UserError, match=r"weighted.jsonl:21.*importance.*must be a number from 0 to 1e\+06"):
        build_datasets(make_config(tmp_path, path, loader=JSONL | {"columns": {"weight": "importance"}}))


def test_a_damaged_file_of_weights_is_built_again(tmp_path: Path) -> None:
    source = find_sources(
        make_config(tmp_path, weighted_file(tmp_path), loader=JSONL | {"columns": {"weight": "importance"}}),
        "train_dataset",
    )[0][0]
    notes: list[str] = []
    built = find_token_file(source, ByteTokenizer(), cache_of(tmp_path))
    file = built.path / "values.bin"
    content = file.read_bytes()
    file.write_bytes(content[:-4] + b"\0\0\0\1")
    assert open_token_file(built.path) is None
    again = find_token_file(source, ByteTokenizer(), cache_of(tmp_path), note=notes.append)
    assert again.path == built.path and file.read_bytes() == content and "is damaged" in notes[0]
