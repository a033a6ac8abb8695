"""Records of every format and compression, and what is said of damaged files."""

from __future__ import annotations

import gzip
import json
import re
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from data_helpers import make_config, source_of
from pyarrow import parquet
from tolerances import RECORD_BYTES

from trainer.data.source.documents import read_text_chunks
from trainer.data.source.find import find_sources
from trainer.data.source.records import Record, read_records
from trainer.data.source.samples import SkippedRecords, read_samples
from trainer.errors import UserError

ROWS = [{"text": f"täxt {number} " + "x" * (number % 7), "id": number} for number in range(1000)]
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


def write(path: Path, rows: list[dict]) -> Path:
    """Writes records in the format and compression that the suffix says."""
    name = path.name
    if ".parquet" in name:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=300)
    elif ".arrow" in name:
        table = pyarrow.Table.from_pylist(rows)
        new = pyarrow.ipc.new_file if "file" in name else pyarrow.ipc.new_stream
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    else:
        lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"
        content = (json.dumps(rows, ensure_ascii=False, indent=1) if ".json." in f"{name}." else lines).encode()
        path.write_bytes(compress(name, content))
    return path


def compress(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    return pyarrow.compress(content, "zstd", asbytes=True) if name.endswith(".zst") else content


def read(folder: Path, path: Path) -> list[Record]:
    source = source_of(folder, path, "JsonlDataset")
    return [record for file in source.files for record in read_records(source, file)]


def error_of(folder: Path, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, path)
    assert "Fix: " in str(caught.value)
    return str(caught.value)


NAMES = [
    "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.JSONL", "a.ndjson", "a.json", "a.json.gz", "a.json.zst", "a.parquet",
    "stream.arrow", "file.arrow",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_records(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    records = read(tmp_path, path)
    assert [record.fields for record in records] == ROWS
    is_lines = "json" in name.lower() and ".json." not in f"{name}."
    assert records[6].where == (f"{path}:7" if is_lines else f"{path}: record 7")
    size_bytes = path.stat().st_size
    assert sum(record.source_bytes for record in records) == pytest.approx(size_bytes, rel=RECORD_BYTES)


def test_a_json_file_may_hold_an_object_on_each_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf\n{"text": "one"}\r\n\r\n  \n{"text": "two"}')
    records = read(tmp_path, path)
    assert [(record.fields["text"], record.where) for record in records] == [("one", f"{path}:2"), ("two", f"{path}:5")]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst", "a.json"])
def test_a_file_that_disappears_is_an_error(tmp_path, name):
    source = source_of(tmp_path, write(tmp_path / name, ROWS), "JsonlDataset")
    (tmp_path / name).unlink()
    with pytest.raises(UserError, match="cannot be read .*[Nn]o such file"):
        list(read_records(source, source.files[0]))


def test_a_json_array_may_be_empty_and_start_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf [ ] \n")
    assert read(tmp_path, tmp_path / "a.json") == []
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf\n\t[{"a": "]}"},\r\n{"b": ["\\"", 1e5]}]')
    assert [record.fields for record in read(tmp_path, tmp_path / "a.json")] == [{"a": "]}"}, {"b": ['"', 1e5]}]


def test_a_json_array_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "a.json"
    with open(path, "w") as stream:
        row = json.dumps({"text": "é\\n" * 5000})
        stream.write("[" + ",\n".join([row] * 600) + "]")
    source = source_of(tmp_path, path, "JsonlDataset")
    tracemalloc.start()
    count = sum(1 for _ in read_records(source, source.files[0]))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 600 and peak_bytes < path.stat().st_size / 2 > 10 << 20


def test_a_record_may_be_longer_than_a_chunk(tmp_path):
    rows = [{"text": "long " * 1_000_000}, {"text": "short"}, {"text": "y" * 3_000_000}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert [record.fields for record in read(tmp_path, tmp_path / "a.json")] == rows


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow"])
def test_fields_that_only_other_rows_have_are_absent(tmp_path, name):
    rows = [{"messages": [USER, ASSISTANT], "tools": None}, {"messages": [USER, CALL], "tools": [{"name": "add"}]}]
    records = read(tmp_path, write(tmp_path / name, rows))
    assert records[0].fields == rows[0] and records[1].fields["messages"] == rows[1]["messages"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', ["not JSON", "column"]),
        (b'{"text": "caf\xe9"}', ["UTF-8"]),
        (b'["text"]', ["JSON object", "list"]),
        (b"[" * 100_000, ["nested too deep"]),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    message = error_of(tmp_path, path)
    assert message.startswith(f"{path}:3: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("content", "record", "words"),
    [
        (b'[{"text": "a"}, {"text": "b"', 2, ["cut short"]),
        (b'[{"text": "a"}, {"text": "b', 2, ["cut short"]),
        (b'[{"text": "a"}', 1, ["cut short"]),
        (b'[{"text": "a"},', 2, ["cut short"]),
        (b"[", 1, ["cut short"]),
        (b'[{"text": "a"} {"text": "b"}]', 1, ["comma"]),
        (b'[{"text": "a"},]', 2, ["not JSON"]),
        (b'[{"text": "a"}]\n[{"text": "b"}]', 2, ["more after the end"]),
        (b'[{"text": "a"}, "b"]', 2, ["JSON object", "str 'b'"]),
        (b'[{"text": "a"}, {text: 1}, ' + b" " * 99 + b"]", 2, ["not JSON", "property name"]),
        (b'[{"text": "a"}, {"text": "caf\xe9"}]', 2, ["UTF-8"]),
        (b'[{"text": "a"}, ' + b"[" * 100_000, 2, ["nested too deep"]),
        (b'[{"text": "a"}, {"id": ' + b"1" * 5000 + b"}]", 2, ["not JSON", "thousands of digits"]),
    ],
)
def test_a_bad_array_is_named_with_file_and_record(tmp_path, content, record, words):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    message = error_of(tmp_path, path)
    assert message.startswith(f"{path}: record {record}: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.json.gz", "a.parquet", "stream.arrow", "file.arrow"])
def test_a_file_that_is_cut_short_is_named_with_its_record(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    message = error_of(tmp_path, path)
    assert re.match(re.escape(str(path)) + r"(:\d+|: record \d+): ", message) and "cut short" in message


def test_an_arrow_stream_that_lacks_its_last_batches_is_not_taken_for_whole(tmp_path):
    path = write(tmp_path / "stream.arrow", ROWS)
    with pyarrow.memory_map(str(path)) as stream:
        reader = pyarrow.ipc.open_stream(stream)
        reader.read_next_batch()
        end = stream.tell()
    path.write_bytes(path.read_bytes()[:end])
    assert "cut short" in error_of(tmp_path, path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.json.zst", "a.parquet", "a.arrow"])
def test_a_file_of_another_kind_than_its_suffix_is_an_error(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"text": "not compressed"}\n')
    message = error_of(tmp_path, tmp_path / name)
    assert name in message and "damaged or cut short" in message


def test_text_that_is_not_utf8_in_a_column_is_named_with_its_record(tmp_path):
    texts = pyarrow.array([b"fine"] * 300 + [b"caf\xe9"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    message = error_of(tmp_path, tmp_path / "a.parquet")
    assert message.startswith(f"{tmp_path / 'a.parquet'}: record 301: ") and "UTF-8" in message


@pytest.mark.parametrize(
    "times",
    [
        pyarrow.array([1_234_567_891], pyarrow.timestamp("ns")),
        pyarrow.array([10**15], pyarrow.timestamp("s", tz="Europe/Nowhere")),
        pyarrow.array([10**7], pyarrow.date32()),
    ],
)
def test_times_that_python_cannot_hold_are_null(tmp_path, times):
    parquet.write_table(pyarrow.table({"text": ["a"], "time": times}), tmp_path / "a.parquet")
    assert [record.fields for record in read(tmp_path, tmp_path / "a.parquet")] == [{"text": "a", "time": None}]


def test_columns_that_cannot_be_read_are_errors(tmp_path):
    repeated = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    times = pyarrow.array([[1_234_567_891]], pyarrow.list_(pyarrow.timestamp("ns")))
    for table, rule in ((repeated, "two columns named text"), (pyarrow.table({"times": times}), "Nanosecond")):
        parquet.write_table(table, tmp_path / "a.parquet")
        assert rule in error_of(tmp_path, tmp_path / "a.parquet")


def test_compression_around_parquet_is_an_error(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    assert "decompress it" in error_of(tmp_path, tmp_path / "a.parquet.gz")


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "a.jsonl.zst"])
def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch, name):
    path = write(tmp_path / name, ROWS[:3])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = error_of(tmp_path, path)
    assert str(path) in message and "pip install 'run-trainer[arrow]'" in message


def test_compressed_text_files_are_texts(tmp_path):
    (tmp_path / "corpus").mkdir()
    content = b"one line\n" * 2000
    for name in ("a.txt", "b.txt.gz", "c.md.zst"):
        (tmp_path / "corpus" / name).write_bytes(compress(name, content))
    source = source_of(tmp_path, tmp_path / "corpus")
    pieces = list(read_text_chunks(source, 4096))
    assert b"".join(piece.text for piece in pieces) == content * 3
    assert sum(piece.ends_document for piece in pieces) == 3
    assert sum(piece.source_bytes for piece in pieces) == source.size_bytes
    (tmp_path / "bad.txt.gz").write_bytes(gzip.compress(b"one\nbad \xff\n"))
    with pytest.raises(UserError, match=r"bad\.txt\.gz:2: .*at byte 8"):
        list(read_text_chunks(source_of(tmp_path, tmp_path / "bad.txt.gz"), 4096))


BAD = [{"text": "one"}, {"txet": 1}, {"text": "two"}, ["text"], {"text": 3}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_bad_records_are_skipped_and_counted_where_the_file_says_so(tmp_path, name):
    path = write(tmp_path / name, BAD)
    loader = {"type": "JsonlDataset", "bad_records": "skip"}
    ((source, _),) = find_sources(make_config(tmp_path, path, loader=loader), "train_dataset")
    skipped = SkippedRecords()
    assert [sample.text for sample, _ in read_samples(source, skipped)] == ["one", "two"]
    assert skipped.num_skipped == 3 and "txet" in str(skipped.first)
    with pytest.raises(UserError, match="txet"):
        list(read_samples(source_of(tmp_path, path, "JsonlDataset"), SkippedRecords()))


def test_a_damaged_file_is_never_skipped(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", ROWS)
    path.write_bytes(path.read_bytes()[:-100])
    loader = {"type": "JsonlDataset", "bad_records": "skip"}
    ((source, _),) = find_sources(make_config(tmp_path, path, loader=loader), "train_dataset")
    with pytest.raises(UserError, match="cut short"):
        list(read_samples(source, SkippedRecords()))
