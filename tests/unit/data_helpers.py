"""What the tests of trainer.data share: real configurations, real corpora, images, and a tokenizer made on the spot."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import yaml

from trainer.config import Config, load_config
from trainer.data.source.files import DataSource
from trainer.data.source.find import find_sources
from trainer.data.source.records import Record
from trainer.data.source.samples import Sample, to_sample
from trainer.data.tokens.token_file import TokenCache


def make_config(folder: Path, dataset_dir: Path | str = "", *, model=None, train=None, loader=None, **top) -> Config:
    """Writes a small YAML file in `folder` and loads it; token files go to `folder`/cache."""
    train_dataset = {
        "data_loader": {"type": "TextDataset", "dataset_dir": str(dataset_dir), **(loader or {})},
        "cache_dir": str(folder / "cache"),
        **(train or {}),
    }
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 300, "seq_length": 8}
    document = {
        "output_dir": str(folder / "output"),
        "model": {
            "arch": {"type": "LlamaForCausalLM"},
            "model_config": {"type": "LlamaConfig", **sizes, **(model or {})},
        },
        "train_dataset": train_dataset,
        **top,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return load_config(str(path))


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def source_of(folder: Path, dataset_dir: Path | str, kind: str = "TextDataset") -> DataSource:
    ((source, weight),) = find_sources(make_config(folder, dataset_dir, loader={"type": kind}), "train_dataset")
    assert weight == 1
    return source


def sample_of(columns: dict[str, str] | None = None, **fields: object) -> Sample | None:
    """Returns the sample of a record with these fields."""
    return to_sample(Record(fields, "data.jsonl:3", 0), columns or {})


def cache_of(folder: Path) -> TokenCache:
    return TokenCache(folder / "cache", "train_dataset.cache_dir", "run.yaml:5")


def line_of(folder: Path, word: str) -> str:
    """Returns ``run.yaml:LINE`` of the first line with `word`, as messages show it."""
    lines = (folder / "run.yaml").read_text(encoding="utf-8").splitlines()
    return f"run.yaml:{next(number for number, line in enumerate(lines, 1) if word in line)}"


def write_tokenizer(path: Path, *specials: str) -> Path:
    """Makes a byte-level ``tokenizer.json`` with the given special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 40, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the dog sat on the log\n"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def idx(magic: int, array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}i", magic, *array.shape) + array.tobytes()


def write_set(folder: Path, train: int = 12, test: int = 5, side: int = 4) -> Path:
    """Returns a set whose image number n is all n, and whose labels count from 0 to 9."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        numbers = np.arange(count).astype(np.uint8)
        images = np.broadcast_to(numbers[:, None, None], (count, side, side))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(2051, np.ascontiguousarray(images)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(2049, numbers % 10))
    return folder
