"""The files of a data set, and the documents that are read from them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from data_helpers import cache_of, jsonl, line_of, make_config, source_of

from trainer.data.source import files as sources
from trainer.data.source.documents import TextChunk, read_text_chunks
from trainer.data.source.find import find_sources
from trainer.data.source.samples import SkippedRecords, read_samples
from trainer.data.tokens.cache import find_token_file
from trainer.data.tokens.tokenizer import ByteTokenizer
from trainer.errors import UserError


def read_all(folder: Path, dataset_dir: Path | str, chunk_bytes: int = 1024) -> list[TextChunk]:
    return list(read_text_chunks(source_of(folder, dataset_dir), chunk_bytes))


def names(source: sources.Source, root: Path) -> list[str]:
    return [file.path.relative_to(root).as_posix() for file in source.files]


def test_a_folder_is_read_recursively_in_sorted_order_by_pattern(tmp_path):
    corpus = tmp_path / "corpus"
    for name in ("b.txt", "a/z.md", "a/y.py", "a/x.rst", ".git/c.txt", ".hidden.txt", "a-b/k.txt"):
        (corpus / name).parent.mkdir(parents=True, exist_ok=True)
        (corpus / name).write_text(name)
    assert names(source_of(tmp_path, corpus), corpus) == ["a/y.py", "a/z.md", "a-b/k.txt", "b.txt"]
    config = make_config(tmp_path, corpus, loader={"patterns": ["*.rst"]})
    assert names(find_sources(config, "train_dataset")[0][0], corpus) == ["a/x.rst"]


def test_a_folder_of_json_lines_needs_no_patterns(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    jsonl(corpus / "b.jsonl", {"text": "two"})
    jsonl(corpus / "a.jsonl", {"text": "one"})
    (corpus / "readme.txt").write_text("not data")
    samples = read_samples(source_of(tmp_path, corpus, "JsonlDataset"), SkippedRecords())
    assert [sample.text for sample, _ in samples] == ["one", "two"]


def test_stdlib_is_the_source_code_of_this_python_without_tests_and_packages(tmp_path):
    source = source_of(tmp_path, "stdlib")
    assert source.files == source_of(tmp_path, "stdlib").files
    paths = [file.path for file in source.files]
    assert Path(json.__file__) in paths and Path(os.__file__) in paths
    folders = {part for path in paths for part in path.parts[:-1]}
    assert not folders & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    assert {path.suffix for path in paths} == {".py"} and len(paths) > 300


def test_stdlib_skips_files_that_are_not_text(tmp_path, monkeypatch):
    (tmp_path / "lib" / "test").mkdir(parents=True)
    (tmp_path / "lib" / "good.py").write_text("x = 1\n")
    (tmp_path / "lib" / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "lib" / "nul.py").write_bytes(b"x = '\0'\n")
    (tmp_path / "lib" / "test" / "bad.py").write_text("x = 2\n")
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    assert read_all(tmp_path, "stdlib") == [TextChunk(b"x = 1\n", True, 6)]


def test_a_python_without_its_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(UserError, match="no source files of its standard library"):
        source_of(tmp_path, "stdlib")


def test_a_folder_called_stdlib_is_reached_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib" / "a.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert [piece.text for piece in read_all(tmp_path, "./stdlib")] == [b"mine"]


@pytest.mark.parametrize("chunk_bytes", [4, 5, 7, 64])
def test_pieces_of_a_long_file_join_to_it_and_never_split_a_character(tmp_path, chunk_bytes):
    text = "first line\n  indented\n\nnäïve ünïcode 日本語 🙂🙂 no line end here at all\nlast"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces = read_all(tmp_path, tmp_path / "a.txt", chunk_bytes=chunk_bytes)
    assert b"".join(piece.text for piece in pieces).decode() == text
    for piece in pieces:
        assert piece.text.decode()
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum(piece.source_bytes for piece in pieces) == len(text.encode())


def test_a_long_file_is_split_before_lines_that_do_not_start_with_white_space(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n  three\n" * 3)
    texts = [piece.text for piece in read_all(tmp_path, tmp_path / "a.txt", chunk_bytes=14)]
    assert len(texts) > 2
    assert all(text.startswith((b"one", b"two")) for text in texts)


def test_an_empty_file_is_no_document(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("")
    (corpus / "b.txt").write_text("b")
    assert [piece.text for piece in read_all(tmp_path, corpus)] == [b"b"]


# Errors about files


@pytest.mark.parametrize("kind", ["TextDataset", "JsonlDataset"])
def test_an_unset_path_is_an_error(tmp_path, kind):
    with pytest.raises(UserError, match="train_dataset.data_loader.dataset_dir = ''.*a file or a folder") as caught:
        source_of(tmp_path, "", kind)
    assert line_of(tmp_path, "dataset_dir") in str(caught.value)


def test_a_missing_path_is_an_error(tmp_path):
    with pytest.raises(UserError, match="does not exist") as caught:
        source_of(tmp_path, tmp_path / "nowhere.txt")
    for word in (line_of(tmp_path, "dataset_dir"), "train_dataset.data_loader.dataset_dir", "nowhere.txt", "Fix: "):
        assert word in str(caught.value)


def test_a_folder_without_matching_files_is_an_error(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.csv").write_text("1,2")
    with pytest.raises(UserError, match=r"no file that matches \*\.txt, \*\.md, \*\.py") as caught:
        source_of(tmp_path, tmp_path / "corpus")
    assert "data_loader.patterns" in caught.value.fix


def test_a_broken_link_is_an_error(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(UserError, match="a link to a file that is gone"):
        source_of(tmp_path, tmp_path / "corpus")


def test_a_pipe_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a regular file nor a folder"):
        source_of(tmp_path, tmp_path / "pipe")


def test_an_impossible_name_is_an_error(tmp_path):
    with pytest.raises(UserError, match="a path has at most 4095 bytes"):
        source_of(tmp_path, "x" * 5000)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads a file that Linux refuses to read")
def test_a_file_that_fails_to_read_is_an_error(tmp_path):
    with pytest.raises(UserError, match="/proc/self/mem.*cannot be read"):
        read_all(tmp_path, "/proc/self/mem")
    with pytest.raises(UserError, match="/proc/self/mem.*cannot be read"):
        list(read_samples(source_of(tmp_path, "/proc/self/mem", "JsonlDataset"), SkippedRecords()))


def test_a_file_that_disappears_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    source = source_of(tmp_path, tmp_path / "a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        list(read_text_chunks(source, 1024))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_forbidden_folder_is_an_error(tmp_path):
    (tmp_path / "corpus").mkdir(mode=0o000)
    with pytest.raises(UserError, match="cannot be read"):
        source_of(tmp_path, tmp_path / "corpus")


@pytest.mark.parametrize("chunk_bytes", [4, 1 << 20])
@pytest.mark.parametrize(
    ("content", "line", "offset", "words"),
    [
        (b"good\nbad \xff\n", 2, 9, ["0xff", "UTF-8"]),
        (b"PK\x03\x04\n\n\0\0", 3, 6, ["binary", "NUL"]),
        (b"good\n" * 10 + b"cut \xe6\x97", 11, 54, ["0xe6", "unexpected end"]),
    ],
)
def test_a_file_that_is_not_text_is_an_error_with_its_position(tmp_path, chunk_bytes, content, line, offset, words):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_all(tmp_path, path, chunk_bytes=chunk_bytes)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ") and f"at byte {offset}" in message and "iconv" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(("kind", "content"), [("TextDataset", ""), ("JsonlDataset", '\n{"text": ""}\n')])
def test_a_data_set_without_text_is_an_error(tmp_path, kind, content):
    (tmp_path / "a.txt").write_text(content)
    source = source_of(tmp_path, tmp_path / "a.txt", kind)
    with pytest.raises(UserError, match="holds no text"):
        find_token_file(source, ByteTokenizer(), cache_of(tmp_path))
    assert list((tmp_path / "cache").glob("*")) == [], "nothing half made is left"
