"""Data of every format with broken content, and paths to what is no readable file."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from fuzz import Accepted, Attempt, check

from fuzzing.configuration import TINY, _merged
from fuzzing.mutate import changed_bytes, json_bytes
from fuzzing.stored import write_tokenizer
from trainer.cli.main import dispatch
from trainer.config import parse_config
from trainer.config.schema.images import IMAGES
from trainer.data.datasets import build_train_dataset
from trainer.data.source.indexed import write_indexed
from trainer.errors import UserError

_NOBODY = 65534
_TURNS = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"},
          {"role": "assistant", "content": "Hello there."}]  # fmt: skip
_RECORDS = [
    {"text": "The cat sat on the mat."}, {"messages": _TURNS},
    {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"]]},
    {"prompt": "Once", "completion": " upon a time"},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "S"},
    {"messages": _TURNS, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
]  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% generation %}{{ m['content'] | trim }}"
    "{% endgeneration %}<|im_end|>{% endfor %}{% if add_generation_prompt %}x{% endif %}"
)


def _train(folder: Path, loader: dict[str, Any], **more: Any) -> None:
    """Builds the training data of a loader and reads all of them; their tokens must be within the vocabulary."""
    config = parse_config("a.yaml", json.dumps(_merged(TINY, {"train_dataset": {
        "data_loader": loader, "cache_dir": str(folder / "cache"), **more}})))  # fmt: skip
    data = build_train_dataset(config)[0]
    batch = data.batch(range(min(data.num_sequences, 50)))
    is_known = (batch.input_ids >= 0) & (batch.input_ids < config.decoder.vocab_size)
    check(is_known.all(), "tokens beyond the vocabulary")


def _jsonl(folder: Path) -> Attempt:
    def attempt(rng: random.Random) -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        records = [rng.choice(_RECORDS)] * 2
        lines = [json.dumps(records[0]).encode(), json_bytes(records[1], rng).replace(b"\n", b" ")]
        content = changed_bytes(b"\n".join(lines), rng) if rng.random() < 0.2 else b"\n".join(lines)
        compressed = rng.random() < 0.15
        file = folder / f"a.jsonl{'.gz' * compressed}"
        packed = gzip.compress(content)
        file.write_bytes(content if not compressed else changed_bytes(packed, rng) if rng.random() < 0.6 else packed)
        options = {"bad_records": "skip"} if rng.random() < 0.3 else {}
        _train(folder, {"type": "JsonlDataset", "dataset_dir": str(file), **options})

    return attempt


_PREFERENCES = [
    ({"prompt": "Once", "chosen": " upon a time", "rejected": " twice"}, "dpo"),
    ({"chosen": _TURNS, "rejected": [*_TURNS[:2], {"role": "assistant", "content": "No."}]}, "simpo"),
    ({"chosen": {"from": "gpt", "value": "Yes"}, "rejected": {"from": "gpt", "value": "No"},
      "conversations": [{"from": "human", "value": "Hi"}]}, "orpo"),
    ({"prompt": "Once", "completion": " upon a time", "label": True}, "kto"),
    ({"prompt": "Once", "chosen": " upon a time", "rejected": " twice", "margin": 0.5}, "reward"),
]  # fmt: skip


def _preferences(folder: Path) -> Attempt:
    """Tries records of answers that are compared: pairs, and answers with labels."""
    file = folder / "a.jsonl"

    def attempt(rng: random.Random) -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        record, loss = rng.choice(_PREFERENCES)
        other = {**record, "prompt": "Twice"} if loss == "kto" else record  # kto compares with other prompts
        lines = [json.dumps(other).encode(), json_bytes(record, rng).replace(b"\n", b" ")]
        file.write_bytes(b"\n".join(lines))
        options = {"bad_records": "skip"} if rng.random() < 0.3 else {}
        config = parse_config("a.yaml", json.dumps(_merged(TINY, {
            "loss": {"type": loss}, "model": {"model_config": {"seq_length": 256}},
            "train_dataset": {
                "cache_dir": str(folder / "cache"),
                "data_loader": {"type": "JsonlDataset", "dataset_dir": str(file), **options},
            },
        })))  # fmt: skip
        data = build_train_dataset(config)[0]
        batch = data.batch(range(data.num_sequences))
        check(all(np.isfinite(values).all() for values in batch.values), "values that are not finite")

    return attempt


def _template(folder: Path) -> Attempt:
    """Tries a chat template from elsewhere, which runs in Jinja's sandbox."""
    file, data = folder / "t.jinja", folder / "a.jsonl"
    data.write_text(json.dumps({"messages": _TURNS}) + "\n", encoding="utf-8")
    pieces = (
        "{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**10 }}", "{{ messages.__class__.__mro__ }}",
        "{{ x.y.z }}", "{% include 'a' %}", "{{ ''.__class__ }}", "{{ 1/0 }}", "{{ messages[5] }}", "{% if %}",
        "{{ raise_exception('no') }}", "{{ 9**9**9 }}", "{{ cycler.__init__.__globals__ }}",
        "{% set x = [] %}{% for i in range(99999) %}{{ x.append(x) }}{% endfor %}{{ x }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ '%1000000000d' % 1 }}",
        "{{ messages | tojson(indent=9) }}", "{{ 'x' | center(10**10) }}", "{{ strftime_now('%Y') }}",
    )  # fmt: skip

    def attempt(rng: random.Random) -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        text = _TEMPLATE
        at = rng.randrange(len(text))
        if rng.random() < 0.7:
            text = text[:at] + rng.choice(pieces) + text[at:] if rng.random() < 0.5 else rng.choice(pieces) + text
        content = text.encode() if rng.random() < 0.6 else changed_bytes(text.encode(), rng)
        file.write_bytes(content)
        _train(folder, {"type": "JsonlDataset", "dataset_dir": str(data)}, chat_template=str(file))

    return attempt


def _indexed(folder: Path) -> Attempt:
    """Tries broken .bin and .idx files of Megatron-LM."""
    documents = [np.arange(10, dtype=np.uint16) + number for number in range(20)]
    write_indexed(folder / "whole", documents, 300)
    whole = {suffix: (folder / f"whole.{suffix}").read_bytes() for suffix in ("bin", "idx")}

    def attempt(rng: random.Random) -> None:
        changed = rng.choice(("bin", "idx", "idx", "idx"))
        for suffix, content in whole.items():
            new = changed_bytes(content[:200], rng) + content[200:] if suffix == changed else content
            (folder / f"a.{suffix}").write_bytes(new)
        _train(folder, {"type": "BlendedMegatronDatasetDataLoader", "dataset_dir": str(folder / "a")})

    return attempt


# What makes the path bad, by the name of the kind of object.
_OBJECTS = (
    "missing", "folder", "empty folder", "pipe", "device", "socket", "loop", "dangling", "empty", "binary", "zeros",
    "unreadable", "within unreadable", "below a file", "too long", "no user", "half a character", "read-only folder",
)  # fmt: skip
_WITHOUT_RIGHTS = ("unreadable", "within unreadable", "read-only folder")


def _make(kind: str, path: Path) -> str:
    """Puts an object at a path; returns the path to give."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind in ("folder", "empty folder", "read-only folder"):
        path.mkdir()
        if kind == "folder":
            (path / "other").write_text("x")
        path.chmod(0o555 if kind == "read-only folder" else 0o777)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind in ("loop", "dangling"):
        path.symlink_to(path if kind == "loop" else path.with_name("gone"))
    elif kind in ("empty", "binary", "zeros", "unreadable"):
        path.write_bytes({"binary": bytes(range(256)) * 20, "zeros": bytes(10_000)}.get(kind, b"x" * (kind != "empty")))
        path.chmod(0 if kind == "unreadable" else 0o666)
    elif kind == "within unreadable":
        (path.parent / "locked").mkdir()
        (path.parent / "locked" / path.name).write_text("x")
        (path.parent / "locked").chmod(0)
        return str(path.parent / "locked" / path.name)
    elif kind == "below a file":
        path.write_text("x")
        return str(path / path.name)
    given = {"too long": "n" * 300 + path.suffix, "no user": f"~nosuchuser/{path.name}",
             "half a character": os.fsdecode(b"a\xff" + path.suffix.encode())}  # fmt: skip
    return given[kind] if kind in given else str(path)


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    """Drops root's rights, to which every file is readable."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setegid(_NOBODY)
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
            os.setegid(0)


_LOADERS = {
    "TextDataset": "a.txt", "JsonlDataset": "a.jsonl", "MindDataset": "a.mindrecord", "HFDataLoader": "a.parquet",
    "BlendedMegatronDatasetDataLoader": "a", IMAGES: "images",
}  # fmt: skip
_ADAPTED = {"model": {"model_config": {"pet_config": {"target_modules": ".*q_proj"}}}}
_TEXT = {"data_loader": {"type": "TextDataset", "dataset_dir": "stdlib"}}
_CHAT = {"data_loader": {"type": "JsonlDataset"}}


_Reader: TypeAlias = tuple[str, Callable[[str], tuple[list[str], dict[str, Any]]]]


def _readers(folder: Path) -> dict[str, _Reader]:
    """Returns by key the file name that it reads, and a function from a path to the command with its further
    sections."""
    data = folder / "good.jsonl"
    data.write_text(json.dumps({"messages": _TURNS}) + "\n", encoding="utf-8")
    readers: dict[str, _Reader] = {
        f"dataset_dir of {kind}": (name, lambda path, kind=kind: (["data"], {"train_dataset": {
            "data_loader": {"type": kind, "dataset_dir": path}}}))
        for kind, name in _LOADERS.items()
    }  # fmt: skip
    readers |= {
        "config": ("a.yaml", lambda path: (["plan", "--config", path], {})),
        "tokenizer": ("tokenizer.json", lambda path: (
            ["plan"], {"train_dataset": {**_TEXT, "tokenizer": {"type": "huggingface", "path": path}}})),
        "tokenizer folder": ("tok/tokenizer.json", lambda path: (
            ["plan"], {"train_dataset": {**_TEXT, "tokenizer": {
                "type": "huggingface", "path": str(Path(path).parent)}}})),
        "chat_template": ("t.jinja", lambda path: (["data"], {"train_dataset": {
            "chat_template": path, "data_loader": {"type": "JsonlDataset", "dataset_dir": str(data)}}})),
        "weights": ("model.safetensors", lambda path: (["export", "--output", str(folder / "out")], {
            "load_checkpoint": path})),
        "weights of a folder": ("w/model.safetensors", lambda path: (["export", "--output", str(folder / "out")], {
            "load_checkpoint": str(Path(path).parent)})),
        "adapters": ("ad/adapter_model.safetensors", lambda path: (
            ["export", "--output", str(folder / "out"), "--merge"],
            {**_ADAPTED, "adapter_id": str(Path(path).parent)})),
        "weights of a plan": ("w.safetensors", lambda path: (["plan"], {
            "run_mode": "finetune", "load_checkpoint": path})),
        "weights of a plan's folder": ("w/model.safetensors", lambda path: (["plan"], {
            "run_mode": "finetune", "load_checkpoint": str(Path(path).parent)})),
        "adapters of a plan": ("ad/adapter_model.safetensors", lambda path: (["plan"], {
            **_ADAPTED, "adapter_id": str(Path(path).parent)})),
        "model folder": ("m/config.json", lambda path: (["plan"], {"pretrained_model_dir": str(Path(path).parent)})),
        "best": ("checkpoints/best", lambda path: (["export", "--output", str(folder / "out")], {
            "load_checkpoint": path})),
        "marker": ("c/step-00000001/COMPLETE", lambda path: (["export", "--output", str(folder / "out")], {
            "load_checkpoint": str(Path(path).parent)})),
        "output_dir": ("output", lambda path: (["plan"], {"output_dir": path})),
        "cache_dir": ("cache", lambda path: (["data"], {"train_dataset": {
            "cache_dir": path, "data_loader": {"type": "JsonlDataset", "dataset_dir": str(data)}}})),
        "convert": ("a.yaml", lambda path: (["convert", path], {})),
        "export": ("out", lambda path: (["export", "--output", path], {})),
        "job": ("job", lambda path: (["status", path], {})),
    }  # fmt: skip
    return readers


_FINE = {  # a folder that is empty, or a name that is free, may be written to
    "output_dir": ("missing", "folder", "empty folder"), "cache_dir": ("missing", "folder", "empty folder"),
    "dataset_dir of TextDataset": ("folder", "binary", "zeros", "unreadable"),
}  # fmt: skip


def _paths(folder: Path) -> Attempt:
    folder.chmod(0o777)
    readers, good = _readers(folder), folder / "good.yaml"
    write_tokenizer(folder / "tokenizer")
    pairs = [(key, kind) for key in readers for kind in _OBJECTS]

    def attempt(rng: random.Random) -> None:
        one(*rng.choice(pairs))

    def one(key: str, kind: str) -> None:
        place = folder / "made"
        place.mkdir()
        place.chmod(0o777)
        try:
            name, command = readers[key]
            words, sections = command(_make(kind, place / name))
            good.write_text(json.dumps(_merged(_merged(TINY, {"output_dir": str(folder / "output")}), sections)))
            os.chdir(folder)
            if not {"--config", "convert", "status"} & set(words):
                words += ["--config", str(good)]
            with _as_nobody() if kind in _WITHOUT_RIGHTS else contextlib.nullcontext():
                try:
                    code = dispatch(words)
                except UserError:
                    raise
                except Exception as error:
                    error.add_note(f"{key}: {kind}")
                    raise
            if kind not in _FINE.get(key, ()):
                raise Accepted(f"{key}: {kind} (exit code {code})")
        finally:
            for locked in place.rglob("locked"):
                locked.chmod(0o777)
            shutil.rmtree(place)

    for key in readers:  # imports what it needs, which nobody may not read
        with contextlib.suppress(UserError, OSError, Accepted), contextlib.redirect_stdout(io.StringIO()):
            one(key, "binary")
    return attempt


KINDS = {
    "records": _jsonl, "preferences": _preferences, "chat_template": _template, "indexed": _indexed, "paths": _paths,
}  # fmt: skip
