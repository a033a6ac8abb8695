"""The token file and its cache: content, bounded memory, atomic writing, damage, concurrent builders."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from data_helpers import cache_of, jsonl, make_config, source_of, write_tokenizer

from trainer.data.batches.packing import TokenDataset
from trainer.data.batches.split import all_documents
from trainer.data.source import files as sources
from trainer.data.source.find import find_sources
from trainer.data.tokens import token_file as token_file_module
from trainer.data.tokens.cache import (
    CHUNK_BYTES,
    GROUP_BYTES,
    _read_stamp,
    _settings,
    _stamp_file,
    _TokenizationSettings,
    find_token_file,
)
from trainer.data.tokens.chat_template import ASSISTANT, load_chat_template
from trainer.data.tokens.token_file import open_token_file
from trainer.data.tokens.tokenizer import ByteTokenizer, load_tokenizer
from trainer.errors import RunError, UserError
from trainer.launch.job import Outcome, may_restart
from trainer.storage.checksums import PageChecks

TEXTS = {"a.txt": "first", "b.txt": "second document\nwith lines\n", "c.txt": "é" * 50}
EOS = 256


def write_corpus(folder: Path, texts=TEXTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def settle(monkeypatch):
    """Waits until the cache believes the time stamps of files written before; real file systems need more."""
    monkeypatch.setattr(sources, "STAMP_SETTLES_SECONDS", 0.1)
    return lambda: time.sleep(0.15)


def token_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").iterdir() if path.is_dir()]


def expected_tokens(texts=TEXTS) -> list[int]:
    return [token for text in texts.values() for token in [*text.encode(), EOS]]


def test_a_token_file_holds_documents_one_after_the_other(tmp_path):
    built = find_token_file(source_of(tmp_path, write_corpus(tmp_path / "corpus")), ByteTokenizer(), cache_of(tmp_path))
    assert built.tokens.tolist() == expected_tokens() and built.tokens.dtype == np.uint16
    assert built.offsets.tolist() == [0, 6, 34, 135] and built.mask is None
    assert (built.meta.num_tokens, built.meta.num_documents, built.meta.max_token_id) == (135, 3, EOS)
    assert sorted(path.name for path in built.path.iterdir()) == ["meta.json", "offsets.bin", "pages.bin", "tokens.bin"]
    assert token_files(tmp_path) == [built.path]


@pytest.mark.parametrize("group_bytes", [1, 5, 40])
@pytest.mark.parametrize("chunk_bytes", [4, 7])
def test_a_stream_in_tiny_pieces_gives_the_same_bytes(tmp_path, chunk_bytes, group_bytes):
    source = source_of(tmp_path, write_corpus(tmp_path / "corpus"))
    built = find_token_file(
        source, ByteTokenizer(), cache_of(tmp_path), chunk_bytes=chunk_bytes, group_bytes=group_bytes
    )
    assert built.tokens.tolist() == expected_tokens() and built.offsets.tolist() == [0, 6, 34, 135]


def test_a_stream_in_pieces_gives_the_same_hugging_face_tokens(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", "<s>", "</s>")
    config = make_config(tmp_path, "x", train={"tokenizer": {"type": "huggingface", "path": str(path)}})
    tokenizer = load_tokenizer(config)
    text = "the cat sat on the mat\n\n  the dog sat on the log\nthe cat\n" * 20
    source = source_of(tmp_path, write_corpus(tmp_path / "corpus", {"a.txt": text, "b.txt": "the log"}))
    built = find_token_file(source, tokenizer, cache_of(tmp_path), chunk_bytes=64, group_bytes=100)
    first = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
    second = [tokenizer.bos_id, *tokenizer.encode("the log"), tokenizer.eos_id]
    assert built.tokens.tolist() == first + second
    assert built.offsets.tolist() == [0, len(first), len(first) + len(second)]


@pytest.mark.parametrize("group_bytes", [1, 1 << 20])
def test_prompts_are_masked(tmp_path, group_bytes):
    path = jsonl(tmp_path / "a.jsonl", {"text": "plain"}, {"instruction": "Q", "output": "A"}, {"text": "more"})
    source = source_of(tmp_path, path, "JsonlDataset")
    built = find_token_file(source, ByteTokenizer(), cache_of(tmp_path), group_bytes=group_bytes)
    prompt_bytes = len("### Instruction:\nQ\n\n### Response:\n")
    assert built.mask.tolist() == [1] * 6 + [0] * prompt_bytes + [1, 1] + [1] * 5
    assert open_token_file(built.path).mask.tolist() == built.mask.tolist()


def test_an_empty_prompt_is_fine(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "", "completion": "A"})
    built = find_token_file(source_of(tmp_path, path, "JsonlDataset"), ByteTokenizer(), cache_of(tmp_path))
    assert built.tokens.tolist() == [ord("A"), EOS] and built.mask is None


CONVERSATION = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
RECORDS = [{"text": "plain"}, CONVERSATION, {"instruction": "Q", "output": "A"}, {"prompt": "Q", "completion": "A"}]


@pytest.mark.parametrize("group_bytes", [1, 1 << 20])
def test_the_kinds_of_documents_and_the_tokens_with_loss_are_counted(tmp_path, group_bytes):
    path = jsonl(tmp_path / "a.jsonl", *RECORDS)
    source = source_of(tmp_path, path, "JsonlDataset")
    meta = find_token_file(source, ByteTokenizer(), cache_of(tmp_path), group_bytes=group_bytes).meta
    assert (meta.num_documents, meta.num_conversations, meta.num_rendered) == (4, 3, 1)
    assert meta.num_loss_tokens == 6 + 2 + 2 + 2 and meta.num_skipped == 0
    built = find_token_file(source, ByteTokenizer(), cache_of(tmp_path), train_on="all", group_bytes=group_bytes)
    assert built.meta.num_loss_tokens == built.meta.num_tokens and built.meta.num_conversations == 3


def test_another_template_or_part_makes_another_token_file(tmp_path):
    source = source_of(tmp_path, jsonl(tmp_path / "a.jsonl", *RECORDS), "JsonlDataset")
    config = make_config(tmp_path, "x", train={"chat_template": "chatml"})
    template = load_chat_template(config, "train_dataset", ByteTokenizer())
    cases = [{}, {"train_on": "last"}, {"template": template}, {"template": template, "train_on": "all"}]
    paths = [find_token_file(source, ByteTokenizer(), cache_of(tmp_path), **case).path for case in cases]
    assert len(set(paths)) == len(cases)
    assert find_token_file(source, ByteTokenizer(), cache_of(tmp_path), template=template).path == paths[2]
    text = source_of(tmp_path, write_corpus(tmp_path / "corpus"))
    files = {find_token_file(text, ByteTokenizer(), cache_of(tmp_path), **case).path for case in cases}
    assert len(files) == 1, "a template does not matter to running text"


def test_conversations_that_the_template_refuses_are_skipped_on_request(tmp_path):
    system = {"messages": [{"role": "system", "content": "S"}, *CONVERSATION["messages"]]}
    path = jsonl(tmp_path / "a.jsonl", system, CONVERSATION, {"nothing": 1}, system)
    loader = {"type": "JsonlDataset", "bad_records": "skip"}
    config = make_config(tmp_path, path, train={"chat_template": "gemma"}, loader=loader)
    template = load_chat_template(config, "train_dataset", ByteTokenizer())
    ((source, _),) = find_sources(config, "train_dataset")
    told = []
    built = find_token_file(source, ByteTokenizer(), cache_of(tmp_path), template=template, note=told.append)
    assert (built.meta.num_documents, built.meta.num_skipped) == (1, 3)
    first = f"{path}:1: the chat template (gemma) refuses"
    assert told[0].startswith(f"3 bad records of {path} are skipped; the first: {first}")
    strict = source_of(tmp_path, path, "JsonlDataset")
    with pytest.raises(UserError, match="a.jsonl:1: .*System role not supported"):
        find_token_file(strict, ByteTokenizer(), cache_of(tmp_path), template=template)


def test_a_template_that_does_not_end_is_never_skipped(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", CONVERSATION)
    endless = tmp_path / "own.jinja"
    endless.write_text("{% if 'Wqfirst' not in messages[0].content %}{{ 'x' * 10 ** 12 }}{% endif %}")
    loader = {"type": "JsonlDataset", "bad_records": "skip"}
    config = make_config(tmp_path, path, train={"chat_template": str(endless)}, loader=loader)
    ((source, _),) = find_sources(config, "train_dataset")
    template = load_chat_template(config, "train_dataset", ByteTokenizer())
    with pytest.raises(UserError, match=r"own.jinja:1: .*does not end on this conversation \(.*a.jsonl:1\)"):
        find_token_file(source, ByteTokenizer(), cache_of(tmp_path), template=template)


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000
        eos_id = 69_999

    built = find_token_file(source_of(tmp_path, write_corpus(tmp_path / "corpus")), Wide(), cache_of(tmp_path))
    assert built.tokens.dtype == np.uint32 and built.meta.max_token_id == 69_999


def test_memory_stays_bounded_and_progress_is_reported(tmp_path):
    path = tmp_path / "big.txt"
    with open(path, "wb") as stream:
        for _ in range(24):
            stream.write(b"0123456789abcde\n" * (1 << 16))  # 1 MiB
    source = source_of(tmp_path, path)
    told = []
    tracemalloc.start()
    built = find_token_file(
        source, ByteTokenizer(), cache_of(tmp_path), progress=lambda *now: told.append(now), group_bytes=1 << 20
    )
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert built.meta.num_tokens == (24 << 20) + 1
    assert peak_bytes < 12 << 20
    assert told == sorted(told) and told[-1] == (24 << 20, 24 << 20) and len(told) > 10


# The cache


def noted(source, tokenizer, cache):
    """Returns the token file's name, if it is known without reading the source."""
    reading = _TokenizationSettings(tokenizer, None, ASSISTANT, CHUNK_BYTES, GROUP_BYTES)
    return _read_stamp(_stamp_file(source, _settings(source, reading), cache))


def test_the_second_run_builds_nothing_and_reads_only_metadata(tmp_path, settle):
    corpus = write_corpus(tmp_path / "corpus")
    source, tokenizer, cache = source_of(tmp_path, corpus), ByteTokenizer(), cache_of(tmp_path)
    assert noted(source, tokenizer, cache) is None
    first = find_token_file(source, tokenizer, cache)
    assert noted(source, tokenizer, cache) is None, "files changed just now may change again unnoticed"
    written = (first.path / "tokens.bin").stat().st_mtime_ns
    settle()
    second = find_token_file(source, tokenizer, cache)
    assert (second.path, (second.path / "tokens.bin").stat().st_mtime_ns) == (first.path, written)
    assert noted(source, tokenizer, cache) == first.path.name


def test_a_copy_elsewhere_uses_the_same_token_file(tmp_path):
    cache, tokenizer = cache_of(tmp_path), ByteTokenizer()
    first = find_token_file(source_of(tmp_path, write_corpus(tmp_path / "corpus")), tokenizer, cache)
    second = find_token_file(source_of(tmp_path, write_corpus(tmp_path / "copy")), tokenizer, cache)
    assert first.path == second.path


def test_other_content_order_or_settings_make_another_token_file(tmp_path):
    cache = cache_of(tmp_path)

    def path_of(texts, tokenizer=None):
        source = source_of(tmp_path, write_corpus(tmp_path / f"corpus{len(seen)}", texts))
        return find_token_file(source, tokenizer or ByteTokenizer(), cache).path

    class Other(ByteTokenizer):
        fingerprint = "other"

    seen: set[Path] = set()
    for texts in (TEXTS, {"a.txt": "ab", "b.txt": "c"}, {"a.txt": "a", "b.txt": "bc"}, {"a.txt": "bc", "b.txt": "a"}):
        seen.add(path_of(texts))
    seen.add(path_of(TEXTS, Other()))
    assert len(seen) == 5


def test_a_change_that_keeps_size_and_modification_time_is_noticed(tmp_path, settle):
    corpus = write_corpus(tmp_path / "corpus", {"a.txt": "before"})
    os.utime(corpus / "a.txt", (1, 1))
    settle()
    cache, tokenizer = cache_of(tmp_path), ByteTokenizer()
    find_token_file(source_of(tmp_path, corpus), tokenizer, cache)
    assert noted(source_of(tmp_path, corpus), tokenizer, cache) is not None
    (corpus / "a.txt").write_text("after!")
    os.utime(corpus / "a.txt", (1, 1))
    assert noted(source_of(tmp_path, corpus), tokenizer, cache) is None
    built = find_token_file(source_of(tmp_path, corpus), tokenizer, cache)
    assert bytes(built.tokens[:-1].astype(np.uint8)) == b"after!"


def test_a_file_that_changes_during_the_build_is_an_error(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    source = source_of(tmp_path, corpus)

    def change(done_bytes: int, total_bytes: int) -> None:
        (corpus / "a.txt").write_text("other")

    with pytest.raises(RunError, match=r"a\.txt: the file changed while it was read") as caught:
        find_token_file(source, ByteTokenizer(), cache_of(tmp_path), progress=change, group_bytes=1)
    assert "Fix: " in str(caught.value) and token_files(tmp_path) == []


# Tokens changed in place are not found: they carry no check sum, which would mean reading all of them at each start.
@pytest.mark.parametrize(
    ("name", "damage"),
    [(name, damage) for name in ("tokens.bin", "offsets.bin", "meta.json") for damage in ("cut", "gone", "longer")]
    + [("offsets.bin", "garbage"), ("meta.json", "garbage")],
)
def test_a_damaged_token_file_is_rebuilt_with_a_note(tmp_path, name, damage):
    source, cache = source_of(tmp_path, write_corpus(tmp_path / "corpus")), cache_of(tmp_path)
    path = find_token_file(source, ByteTokenizer(), cache).path
    content = (path / name).read_bytes()
    if damage == "gone":
        (path / name).unlink()
    else:
        damaged = {"cut": content[:-1], "longer": content + b"\0", "garbage": b"\xff" * len(content)}
        (path / name).write_bytes(damaged[damage])
    told: list[str] = []
    again = find_token_file(source, ByteTokenizer(), cache, note=told.append)
    assert again.tokens.tolist() == expected_tokens() and again.path == path
    assert len(told) == 1 and "damaged" in told[0] and str(path) in told[0]
    assert token_files(tmp_path) == [path], "the damaged one is gone"
    find_token_file(source, ByteTokenizer(), cache, note=told.append)
    assert len(told) == 1


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["offsets.bin", "pages.bin", "meta.json"])
def test_a_flipped_bit_makes_it_damaged(tmp_path, name):
    source = source_of(tmp_path, write_corpus(tmp_path / "corpus"))
    path = find_token_file(source, ByteTokenizer(), cache_of(tmp_path)).path
    written, draw = (path / name).read_bytes(), random.Random(2)
    for _ in range(100):
        position = draw.randrange(len(written))
        if name == "meta.json" and written[position : position + 1].isspace():
            continue
        flip(path / name, position, draw.randrange(8))
        assert open_token_file(path) is None, position
        (path / name).write_bytes(written)
    assert open_token_file(path) is not None


def test_a_damaged_page_of_tokens_is_found_when_it_is_read(tmp_path):
    conversation = {"messages": [{"role": "user", "content": "Q" * 300}, {"role": "assistant", "content": "A" * 300}]}
    path = jsonl(tmp_path / "a.jsonl", *[conversation] * 400)
    built = find_token_file(source_of(tmp_path, path, "JsonlDataset"), ByteTokenizer(), cache_of(tmp_path))
    page_tokens = PageChecks.PAGE_BYTES // 2
    assert built.meta.num_tokens > 3 * page_tokens and built.mask is not None
    every = np.arange(0, built.meta.num_tokens - 8, 8), np.full((built.meta.num_tokens - 1) // 8, 8)
    built.check(*every)
    flip(built.path / "tokens.bin", 2 * page_tokens * 2 + 5)
    built.check(*every)  # each page was checked once, as memory is later
    opened = open_token_file(built.path)
    first = np.arange(0, 2 * page_tokens, 8)
    opened.check(first, np.full(len(first), 8))
    with pytest.raises(UserError, match="tokens.bin differs from what was written, from byte 131,072 on") as caught:
        opened.check(*every)
    assert str(built.path) in str(caught.value) and "remove this folder" in str(caught.value)
    assert not may_restart(Outcome(caught.value.exit_code, "rank 0 failed"))
    dataset = TokenDataset(opened, all_documents(opened.offsets), 256)
    with pytest.raises(UserError, match="tokens.bin differs from what was written"):
        dataset.batch(range(dataset.num_sequences))
    flip(built.path / "mask.bin", 7)
    with pytest.raises(UserError, match="mask.bin differs from what was written, from byte 0 on"):
        open_token_file(built.path).check(np.array([0]), np.array([100]))


def test_a_file_in_the_place_of_a_token_file_is_replaced(tmp_path):
    source, cache = source_of(tmp_path, write_corpus(tmp_path / "corpus")), cache_of(tmp_path)
    path = find_token_file(source, ByteTokenizer(), cache).path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    path.write_text("in the way")
    assert find_token_file(source, ByteTokenizer(), cache).tokens.tolist() == expected_tokens()


def test_leftovers_of_killed_builds_are_removed_after_an_hour(tmp_path):
    cache = tmp_path / "cache"
    old, new = cache / ".building-1-old", cache / ".building-2-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "tokens.bin").write_bytes(b"half")
    an_hour_ago = time.time() - 3700
    os.utime(old / "tokens.bin", (an_hour_ago, an_hour_ago))
    os.utime(old, (an_hour_ago, an_hour_ago))
    find_token_file(source_of(tmp_path, write_corpus(tmp_path / "corpus")), ByteTokenizer(), cache_of(tmp_path))
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("in_the_way", ["cache", "parent"])
def test_a_cache_that_cannot_be_written_is_an_error(tmp_path, in_the_way, settle):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" if in_the_way == "cache" else tmp_path / "file" / "cache"
    cache = cache_of(tmp_path)._replace(path=folder)
    source = source_of(tmp_path, write_corpus(tmp_path / "corpus"))
    settle()  # a stamp is written too
    with pytest.raises(UserError, match="run.yaml:5: train_dataset.cache_dir = .*cannot be written") as caught:
        find_token_file(source, ByteTokenizer(), cache)
    assert "set train_dataset.cache_dir" in caught.value.fix


def fail_to_sync(monkeypatch, code: int) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(token_file_module.os, "fsync", fsync)


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    fail_to_sync(monkeypatch, errno.ENOSPC)
    with pytest.raises(RunError, match=r"disk is full: the token file needs about \d+ bytes, \d+ are free") as caught:
        find_token_file(source_of(tmp_path, write_corpus(tmp_path / "corpus")), ByteTokenizer(), cache_of(tmp_path))
    assert str(tmp_path / "cache") in str(caught.value) and "Fix: free some space" in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_disk_that_is_full_while_writing_is_an_error(tmp_path, monkeypatch):
    real_open = open

    def open_full(path, mode="r", **kwargs):
        return real_open("/dev/full" if str(path).endswith("tokens.bin") and "w" in mode else path, mode, **kwargs)

    monkeypatch.setattr(token_file_module, "open", open_full, raising=False)
    source = source_of(tmp_path, write_corpus(tmp_path / "corpus", {"a.txt": "x" * 100_000}))
    with pytest.raises(RunError, match="disk is full"):
        find_token_file(source, ByteTokenizer(), cache_of(tmp_path))


def test_a_failing_disk_is_an_error(tmp_path, monkeypatch):
    fail_to_sync(monkeypatch, errno.EIO)
    with pytest.raises(RunError, match="could not be written") as caught:
        find_token_file(source_of(tmp_path, write_corpus(tmp_path / "corpus")), ByteTokenizer(), cache_of(tmp_path))
    assert "train_dataset.cache_dir" in str(caught.value)


def test_a_cache_that_another_process_empties_is_an_error(tmp_path, monkeypatch):
    real_rename = os.rename

    def rename_and_remove(source, target):
        real_rename(source, target)
        (Path(target) / "meta.json").unlink()

    monkeypatch.setattr(token_file_module.os, "rename", rename_and_remove)
    with pytest.raises(RunError, match="damaged or removed right after it was written"):
        find_token_file(source_of(tmp_path, write_corpus(tmp_path / "corpus")), ByteTokenizer(), cache_of(tmp_path))


# Several processes

BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from data_helpers import cache_of, source_of
from trainer.data.tokens.cache import find_token_file
from trainer.data.tokens.tokenizer import ByteTokenizer
folder = Path(sys.argv[1])
source = source_of(folder, folder / "corpus")
print("ready", flush=True)
def progress(done_bytes, total_bytes):
    print(done_bytes, flush=True)
find_token_file(source, ByteTokenizer(), cache_of(folder), progress=progress, chunk_bytes=4096, group_bytes=4096)
print("done", flush=True)
"""


def start_build(folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILD, str(folder), str(Path(__file__).parents[2])]
    root = Path(__file__).parents[4]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)


@pytest.mark.parametrize("lines_before_kill", [1, 2, 40, 75])
def test_a_killed_build_leaves_nothing_that_looks_like_a_token_file(tmp_path, lines_before_kill):
    write_corpus(tmp_path / "corpus", {"a.txt": "0123456789abcde\n" * 20_000})
    with start_build(tmp_path) as process:
        for _ in range(lines_before_kill):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = [path for path in (tmp_path / "cache").glob("*") if not path.name.startswith(".") and path.is_dir()]
    assert all(open_token_file(path) is not None for path in finished)
    source = source_of(tmp_path, tmp_path / "corpus")
    built = find_token_file(source, ByteTokenizer(), cache_of(tmp_path), chunk_bytes=4096)
    assert built.meta.num_tokens == 320_001


def build_in_process(source, cache, barrier, results) -> None:
    barrier.wait(timeout=60)
    built = find_token_file(source, ByteTokenizer(), cache, chunk_bytes=4096, group_bytes=4096)
    results.put((str(built.path), int(built.tokens.astype(np.int64).sum())))


@pytest.mark.parametrize("damaged", [False, True])
def test_concurrent_builders_all_succeed_and_share_one_file(tmp_path, damaged):
    write_corpus(tmp_path / "corpus", {"a.txt": "0123456789abcde\n" * 20_000})
    source, cache = source_of(tmp_path, tmp_path / "corpus"), cache_of(tmp_path)
    if damaged:
        path = find_token_file(source, ByteTokenizer(), cache, chunk_bytes=4096).path
        (path / "tokens.bin").write_bytes(b"")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=build_in_process, args=(source, cache, barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert len(set(found)) == 1
    assert [str(path) for path in token_files(tmp_path)] == [found[0][0]], "nobody left a temporary folder"
    assert json.loads((Path(found[0][0]) / "meta.json").read_text())["num_tokens"] == 320_001


def test_a_builder_that_comes_late_keeps_what_replaced_the_damaged_file(tmp_path):
    """It has seen the damaged file, and another builder has replaced that before it removes it."""
    write_corpus(tmp_path / "corpus", {"a.txt": "0123456789abcde\n" * 20})
    path = find_token_file(source_of(tmp_path, tmp_path / "corpus"), ByteTokenizer(), cache_of(tmp_path)).path
    token_file_module._discard(path)
    assert open_token_file(path) is not None
    assert [str(one) for one in token_files(tmp_path)] == [str(path)]
