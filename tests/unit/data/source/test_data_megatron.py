"""Indexed token files of Megatron-LM: every sample is the one that Megatron-LM makes, and damaged files are refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_lines import answers_of
from data_helpers import jsonl, line_of, make_config
from fork_server import FORKED, ensure_server
from megatron_cases import CASES, DOCUMENTS, EOD, documents_of
from tolerances import EPOCH_PASSES

from trainer.data import IGNORE_INDEX
from trainer.data.datasets import build_datasets, build_eval_dataset, data_layout
from trainer.data.source.indexed import Location, open_indexed, write_indexed
from trainer.errors import RunError, UserError

REPOSITORY = Path(__file__).resolve().parents[4]
GOLDEN = json.loads(gzip.decompress((Path(__file__).parents[3] / "golden" / "megatron.json.gz").read_bytes()))
HERE = Location("train_dataset.data_loader.dataset_dir", "run.yaml:4")
LOADER = "BlendedMegatronDatasetDataLoader"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Returns the golden data sets, written by our own writer."""
    folder = tmp_path_factory.mktemp("indexed")
    for name, (_, vocab_size) in DOCUMENTS.items():
        write_indexed(folder / name, documents_of(name), vocab_size)
    return folder


def config_of(folder: Path, files: Path, *paths: str, loader=None, model=None, **keys):
    """Returns a configuration that reads `paths`, of which some are names of data sets."""
    where = [str(files / path) if path in DOCUMENTS else path for path in paths]
    settings = {"seq_length": 16} | ({"data_path": where} if where else {}) | keys
    sizes = {"seq_length": 16, "vocab_size": 70_000} | (model or {})
    return make_config(folder, loader={"type": LOADER, "config": settings} | (loader or {}), model=sizes)


def dataset_of(*arguments, **keys):
    return build_datasets(config_of(*arguments, **keys))[0]


def test_our_writer_makes_the_files_of_megatron_byte_for_byte(files):
    written = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files.iterdir()}
    assert written == GOLDEN["files"]


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_megatron(tmp_path, files, name):
    case, golden = CASES[name], GOLDEN["cases"][name]
    config = dict(case["config"])
    loader = {"sizes": case["sizes"], "phase": case["phase"]}
    dataset = dataset_of(tmp_path, files, *config.pop("data_path"), loader=loader, **config)
    assert dataset.num_sequences == len(golden["samples"]) > 3
    batch = dataset.batch(range(dataset.num_sequences))
    expected = {key: np.array([sample[key] for sample in golden["samples"]]) for key in golden["samples"][0]}
    assert np.array_equal(batch.input_ids, expected["tokens"])
    assert np.array_equal(batch.labels, np.where(expected["loss_mask"], expected["labels"], IGNORE_INDEX))
    assert np.array_equal(batch.positions, expected["position_ids"])
    first_seen = np.zeros_like(batch.positions)
    for row, segments in enumerate(batch.segment_ids):
        first_seen[row] = np.searchsorted(segments, segments)
    assert np.array_equal(first_seen, expected.get("first_seen", np.zeros_like(first_seen)))


def test_the_golden_cases_show_what_they_are_for():
    def column(name: str, key: str) -> np.ndarray:
        return np.array([sample[key] for sample in GOLDEN["cases"][name]["samples"]])

    assert column("positions start again", "position_ids")[:, 1:].min() == 0
    assert column("documents apart", "first_seen").any() and column("documents apart", "position_ids").max() == 15
    for name in ("a short last sample", "no loss on padding", "everything at the end of a document"):
        assert 0 < column(name, "loss_mask").mean() < 1, name
    alone = column("three passes, the last alone", "tokens")
    assert not np.array_equal(alone, column("three passes, the last shuffled with the others", "tokens")[: len(alone)])


def test_batches_are_read_in_any_order_and_all_numbers_are_int32(tmp_path, files):
    dataset = dataset_of(tmp_path, files, "1", "a", "2", "b", loader={"sizes": [60, 0, 0]})
    whole, some = dataset.batch(range(60)), dataset.batch([41, 3, 41])
    for all_rows, rows in zip(whole, some, strict=True):
        assert rows.dtype == np.int32 and rows.flags.c_contiguous and np.array_equal(rows, all_rows[[41, 3, 41]])
    with pytest.raises(IndexError, match="0 to 59"):
        dataset.batch([60])


def test_shares_say_what_each_file_gives_to_an_epoch(tmp_path, files):
    dataset = dataset_of(tmp_path, files, "1", "a", "3", "b", loader={"sizes": [60, 0, 0]})
    first, second = dataset.shares
    assert (first.epoch_sequences, second.epoch_sequences) == (15, 45)
    assert first.name == str(files / "a") and first.sequences == 43
    assert first.epoch_passes == pytest.approx(15 / 43, rel=EPOCH_PASSES) and second.epoch_passes > 1


@pytest.mark.parametrize("sizes", [[], [4, 0, 0]])
def test_a_file_without_a_full_sample_gives_none(tmp_path, files, sizes):
    for name, tokens in (("short", 5), ("long", 100)):
        write_indexed(tmp_path / name, [np.arange(tokens)], 300)
    paths = [str(tmp_path / name) for name in ("short", "long")]
    dataset = dataset_of(tmp_path, files, *paths, loader={"sizes": sizes})
    assert [share.epoch_sequences for share in dataset.shares] == [0, sizes[0] if sizes else 6]
    assert dataset.batch(range(dataset.num_sequences)).input_ids.shape == (dataset.num_sequences, 16)
    with pytest.raises(UserError, match="do not fill one sample of 16 tokens"):
        dataset_of(tmp_path, files, paths[0], paths[0], loader={"sizes": sizes})


def test_an_epoch_is_as_long_as_sizes_or_num_samples_say(tmp_path, files):
    assert dataset_of(tmp_path, files, "1", "a", loader={"sizes": [1000, 0, 0]}).num_sequences == 1000
    assert dataset_of(tmp_path, files, "a", loader={"sizes": [1000, 0, 0], "num_samples": 5}).num_sequences == 5
    assert dataset_of(tmp_path, files, "a").num_sequences == 43
    assert dataset_of(tmp_path, files, loader={"dataset_dir": str(files / "a.bin")}).num_sequences == 43


def test_evaluation_reads_the_validation_documents(tmp_path, files):
    settings = {"split": "6, 3, 1", "seq_length": 16, "data_path": [str(files / "a")]}
    loader = {"type": LOADER, "sizes": [30, 9, 4], "config": settings}
    sections = {"eval_dataset": {"data_loader": loader}, "do_eval": True}
    held = make_config(tmp_path, loader=loader, model={"seq_length": 16}, **sections)
    found = build_eval_dataset(held).batch(range(9)).input_ids
    golden = GOLDEN["cases"]["a split, validation"]["samples"]
    assert np.array_equal(found, [sample["tokens"] for sample in golden])


def test_each_part_may_have_files_of_its_own(tmp_path, files):
    keys = {"train_data_path": [str(files / "a")], "valid_data_path": [str(files / "c")]}
    train = dataset_of(tmp_path, files, **keys)
    valid = dataset_of(tmp_path, files, loader={"phase": "valid"}, **keys)
    assert [share.name for data in (train, valid) for share in data.shares] == [str(files / "a"), str(files / "c")]


def test_content_changes_with_all_that_decides_about_the_order(tmp_path, files):
    def content(*paths: str, **keys) -> str:
        config = config_of(tmp_path, files, *paths, **keys)
        dataset, _ = build_datasets(config)
        assert data_layout(config, dataset, 1)["content"] == dataset.content
        return dataset.content

    sizes = {"loader": {"sizes": [30, 0, 0]}}
    assert content("a", **sizes) == "1 indexed token files (a6cc638a9783ddd7)"  # as in earlier checkpoints
    variants = [
        content("a", **sizes), content("a"), content("b", **sizes), content("a", seed=1, **sizes),
        content("1", "a", "2", "b", **sizes), content("1", "a", "3", "b", **sizes), content("a", split="1, 1", **sizes),
        content("a", eod=EOD, eod_mask_loss=True, **sizes),
    ]  # fmt: skip
    assert len(set(variants)) == len(variants)
    documents = documents_of("a")
    documents[20] = documents[20] + 1
    write_indexed(tmp_path / "a", documents, 300)
    assert content(str(tmp_path / "a"), **sizes) != variants[0]


def test_count_documents_counts_labels_with_a_loss(tmp_path, files):
    counts = dataset_of(tmp_path, files, "a", eod=EOD, eod_mask_loss=True).count_documents()
    assert counts.lengths.tolist() == [len(document) for document in documents_of("a")]
    dataset = dataset_of(tmp_path, files, "a", eod=EOD, eod_mask_loss=True)
    assert counts.loss_tokens == (dataset.batch(range(43)).labels != IGNORE_INDEX).sum() < 43 * 16
    assert dataset_of(tmp_path, files, "a").count_documents().loss_tokens == 43 * 16


# Bad input


def damage(folder: Path, files: Path, suffix: str, change) -> str:
    """Returns a copy of a data set of which one file is changed."""
    for each in (".bin", ".idx"):
        content = (files / f"a{each}").read_bytes()
        (folder / f"a{each}").write_bytes(change(content) if each == suffix else content)
    return str(folder / "a")


@pytest.mark.parametrize(
    ("suffix", "change", "rule"),
    [
        (".idx", lambda content: content[:-9], "a.idx: it is truncated: "),
        (".idx", lambda content: content[:20], "a.idx: it is truncated: 20 bytes, and its header has 34"),
        (".idx", lambda content: content + bytes(3), "a.idx: it is too long"),
        (".idx", lambda content: b"TNTIDX" + content[6:], "it does not begin with MMIDIDX"),
        (".idx", lambda content: b"", "it does not begin with MMIDIDX"),
        (".idx", lambda content: content[:9] + b"\x02" + content[10:], "version 2"),
        (".idx", lambda content: content[:17] + b"\x09" + content[18:], "the code 9 is no type of tokens (1 uint8"),
        (".idx", lambda content: content[:17] + b"\x07" + content[18:], "the code 7 is no type of tokens"),
        (".idx", lambda content: content[:34] + struct.pack("<i", -4) + content[38:], "a.idx: it is damaged"),
        (".bin", lambda content: content[:-2], "a.bin: it has 1,3"),
        (".bin", lambda content: content + bytes(2), "bytes, and the index says 1,"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, files, suffix, change, rule):
    with pytest.raises(UserError) as error:
        open_indexed(damage(tmp_path, files, suffix, change), HERE)
    assert rule in str(error.value) and "run.yaml:4: train_dataset.data_loader.dataset_dir" in str(error.value)


def test_a_missing_file_is_named(tmp_path, files):
    with pytest.raises(UserError, match=r"b\.idx: there is no such file in"):
        open_indexed(str(tmp_path / "b"), HERE)
    write_indexed(tmp_path / "b", [np.arange(3)], 300)
    (tmp_path / "b.bin").unlink()
    with pytest.raises(UserError, match=r"b\.bin: there is no such file in"):
        open_indexed(str(tmp_path / "b"), HERE)


def test_files_without_tokens_are_refused(tmp_path):
    write_indexed(tmp_path / "none", [], 300)
    write_indexed(tmp_path / "empty", [np.empty(0, np.int64)], 300)
    for name, rule in (("none", "it has no document"), ("empty", "it has no token")):
        with pytest.raises(UserError, match=rule):
            open_indexed(str(tmp_path / name), HERE)


@pytest.mark.parametrize(
    ("paths", "keys", "key", "rule"),
    [
        (["a"], {"seq_length": 32}, "config.seq_length", "must equal model.model_config.seq_length (16)"),
        ([], {}, "config.data_path", "it names no files"),
        (["1", "a", "x", "b"], {}, "config.data_path", "weights and paths alternate"),
        (["1", "a", "0", "b"], {}, "config.data_path", "a weight is a number above 0"),
        (["1", "a", "1", "b"], {}, "sizes", "files with weights need a number of samples"),
        (["a"], {"loader": {"sizes": [0, 1, 0]}}, "sizes", "train_dataset reads train, and that has no samples"),
        (["a"], {"split": "x"}, "config.split", "split must list one to three numbers"),
        (["a"], {"split": "0, 1"}, "config.split", "reads train, and that has no share"),
        (["a"], {"split": "0.001, 1"}, "config.split", "train has 0 of the 40 documents of"),
        (["a"], {"reset_position_ids": True}, "config.reset_position_ids", "eod is not set"),
        (["a"], {"eod": 7, "reset_attention_mask": True, "create_attention_mask": False},
         "config.reset_attention_mask", "would have no effect"),
        (["a"], {"eod": 7, "pad": 7}, "config.pad", "it is the token eod too"),
        (["a"], {"train_data_path": ["b"]}, "config.data_path", "train_data_path names files too"),
        ([], {"valid_data_path": ["b"]}, "config.train_data_path", "only valid_data_path is set"),
        ([], {"train_data_path": "a", "split": "1"}, "config.split", "train_data_path is set"),
        (["a"], {"loader": {"dataset_dir": "b"}}, "dataset_dir", "config.data_path names files too"),
    ],
)  # fmt: skip
def test_keys_that_contradict_each_other_are_errors(tmp_path, files, paths, keys, key, rule):
    with pytest.raises(UserError) as error:
        dataset_of(tmp_path, files, *paths, **keys)
    assert f"train_dataset.data_loader.{key}" in str(error.value) and rule in str(error.value)
    assert "run.yaml:" in str(error.value)


def test_a_token_beyond_the_vocabulary_is_an_error_before_the_run(tmp_path, files):
    with pytest.raises(UserError, match="beyond the model's vocabulary"):
        dataset_of(tmp_path, files, "a", model={"vocab_size": 200})


def test_a_token_that_only_the_run_finds_ends_it(tmp_path, files, monkeypatch):
    """Large files are not read as a whole before the run."""
    monkeypatch.setattr("trainer.data.source.indexed.IndexedTokens.token_range", lambda self: (0, 0))
    dataset = dataset_of(tmp_path, files, "a", model={"vocab_size": 200})
    with pytest.raises(RunError, match=r"contains token id 2\d\d, but the model's vocabulary has 200"):
        dataset.batch(range(43))


def test_padding_tokens_may_be_negative_others_not(tmp_path):
    write_indexed(tmp_path / "n", [np.array([1, 2, -5, 4] * 10)], 70_000)
    with pytest.raises(UserError, match="the files contain token id -5"):
        dataset_of(tmp_path, tmp_path, str(tmp_path / "n"))
    batch = dataset_of(tmp_path, tmp_path, str(tmp_path / "n"), pad=-5).batch([0])
    assert batch.input_ids.min() == 0 and (batch.labels == IGNORE_INDEX).sum() == 4


def test_what_only_documents_to_tokenize_have_is_an_error(tmp_path, files):
    loader = {"type": LOADER, "config": {"data_path": [str(files / "a")]}}
    with pytest.raises(UserError, match="which has no documents"):
        make_config(tmp_path, loader=loader, train={"packing": "cut"})
    config = make_config(tmp_path, loader=loader, train={"held_out": 0.1})
    with pytest.raises(UserError, match=f"{line_of(tmp_path, 'held_out')}: train_dataset.held_out"):
        build_datasets(config)


# The writer, the commands and a run


def run(*words: str) -> subprocess.CompletedProcess:
    ensure_server()
    return subprocess.run([sys.executable, FORKED, *words], cwd=REPOSITORY, capture_output=True, text=True)


def test_make_megatron_writes_what_this_trainer_reads(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    strings = ["the cat sat on the mat. " * 3, "a dog", "and so on " * 9]
    for number, text in enumerate(strings):
        (corpus / f"{number}.txt").write_text(text)
    make_config(tmp_path, corpus)
    prefix = tmp_path / "made" / "animals"
    done = run("scripts/make_megatron.py", str(prefix), "--config", str(tmp_path / "run.yaml"))
    assert done.returncode == 0 and "animals: 3 documents, 170 tokens" in done.stdout, done.stderr
    indexed = open_indexed(str(prefix), HERE)
    assert indexed.tokens.dtype == np.uint16
    spans = zip(indexed.starts, indexed.lengths, strict=True)
    found = [indexed.tokens[start : start + size].tolist() for start, size in spans]
    assert found == [[*text.encode(), 256] for text in strings]


def test_make_megatron_refuses_what_the_files_cannot_hold(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"instruction": "say a", "output": "a"})
    make_config(tmp_path, path, loader={"type": "JsonlDataset"})
    words = "scripts/make_megatron.py", str(tmp_path / "x"), "--config", str(tmp_path / "run.yaml")
    done = run(*words)
    assert done.returncode == 2 and "make_mindrecord.py" in done.stderr and not (tmp_path / "x.bin").exists()
    assert run(*words, "--train_dataset.train_on", "all").returncode == 0


def test_data_shows_token_ids_and_plan_the_files(tmp_path, files):
    def written(name: str, *arguments, **sections) -> Path:
        config_of(tmp_path, *arguments, **sections)
        return (tmp_path / "run.yaml").rename(tmp_path / f"{name}.yaml")

    gone = files.parent / "gone"
    gone.mkdir(exist_ok=True)
    sizes = {"sizes": [60, 0, 0]}
    answers = answers_of({
        "shown": ["data", "--config", written("both", files, "1", "a", "3", "b", loader=sizes), "--json", "--rows", 2],
        "planned": ["plan", "--config", written("one", files, "a", loader=sizes)],
        "refused": ["plan", "--config", written("gone", gone, "a")],
    }, REPOSITORY)  # fmt: skip
    assert not any(answer.loaded_mindspore for answer in answers.values())
    shown, planned, refused = answers.values()
    assert shown.code == 0, shown.errors
    found = json.loads(shown.output)
    tokens = dataset_of(tmp_path, files, "1", "a", "3", "b", loader=sizes).batch([0]).input_ids[0]
    assert found["rows"][0]["segments"][0]["text"].split() == [str(token) for token in tokens]
    assert [source["epoch_sequences"] for source in found["statistics"]["sources"]] == [15, 45]
    assert planned.code == 0 and "60 sequences an epoch, 1.3" in " ".join(planned.output.split()), planned.output
    assert refused.code == 2 and "a.idx: there is no such file" in refused.errors, refused.errors
