"""Writes tests/golden/megatron.json.gz: the samples that Megatron-LM makes of small indexed token files.

    python scripts/golden_megatron.py --megatron CHECKOUT

Needs a checkout of github.com/NVIDIA/Megatron-LM with its compiled helpers (`make -C megatron/core/datasets`, which
needs pybind11), and torch. Only the files in megatron/core/datasets run; what they import from elsewhere for logging
and remote storage is replaced, because the package as a whole needs GPUs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from megatron_cases import CASES, DOCUMENTS, documents_of  # noqa: E402  (shared with the tests)


def import_datasets(checkout: Path) -> types.SimpleNamespace:
    """Imports the modules of megatron.core.datasets, without those of megatron.core."""
    for name in ("megatron", "megatron.core", "megatron.core.datasets"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = package

    def stand_in(name: str, **members: Any) -> None:
        module = types.ModuleType(f"megatron.core.{name}")
        vars(module).update(members)
        sys.modules[module.__name__] = module

    stand_in("utils", log_single_rank=lambda *_, **__: None)
    stand_in("safe_globals", safe_numpy_load=np.load)
    stand_in("tokenizers", MegatronTokenizerBase=object)
    stand_in("msc_utils", MultiStorageClientFeature=types.SimpleNamespace(is_enabled=lambda: False),
             maybe_msc=types.SimpleNamespace(open=open))
    sys.modules["megatron.core"].mpu = None
    found = types.SimpleNamespace()
    for name in ("indexed_dataset", "gpt_dataset", "blended_megatron_dataset_builder", "utils"):
        setattr(found, name, importlib.import_module(f"megatron.core.datasets.{name}"))
    return found


def write_files(modules: types.SimpleNamespace, folder: Path) -> dict[str, str]:
    """Writes the files of all data sets with Megatron-LM's own builder; returns the hashes of their content."""
    hashes = {}
    for name, (count, vocab_size) in DOCUMENTS.items():
        dtype = modules.indexed_dataset.DType.optimal_dtype(vocab_size)
        builder = modules.indexed_dataset.IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=dtype)
        import torch

        for document in documents_of(name):
            builder.add_document(torch.tensor(document), [len(document)])
        builder.finalize(str(folder / f"{name}.idx"))
        for suffix in (".bin", ".idx"):
            hashes[name + suffix] = hashlib.sha256((folder / (name + suffix)).read_bytes()).hexdigest()
        assert count == len(documents_of(name))
    return hashes


def samples_of(modules: types.SimpleNamespace, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the samples of Megatron-LM for a case: tokens, labels, loss mask, positions and documents of each."""
    keys = dict(case["config"])
    paths = [str(folder / item) if item in DOCUMENTS else item for item in keys.pop("data_path")]
    blend = modules.utils.get_blend_from_list(paths)
    eod, pad = keys.pop("eod", -1), keys.pop("pad", -1)
    keys = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False} | keys
    tokenizer = types.SimpleNamespace(eod=eod, pad=pad, eos=eod, vocab_size=None, unique_identifiers={})
    config = modules.gpt_dataset.GPTDatasetConfig(
        random_seed=keys.pop("seed"), sequence_length=keys.pop("seq_length"), blend=blend, tokenizer=tokenizer,
        path_to_cache=None, **keys,
    )
    builder = modules.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(
        modules.gpt_dataset.GPTDataset, case["sizes"], lambda: True, config
    )
    dataset = builder.build()[("train", "valid", "test").index(case["phase"])]
    size = case["sizes"][("train", "valid", "test").index(case["phase"])]
    found: dict[str, Any] = {"size": len(dataset), "samples": []}
    for number in range(len(dataset) if size is None else min(len(dataset), size)):
        sample = dataset[number]
        row = {name: sample[name].long().tolist() for name in ("tokens", "labels", "loss_mask", "position_ids")}
        if config.reset_attention_mask:
            seen = ~sample["attention_mask"][0]  # True where a token may be seen
            row["first_seen"] = seen.long().argmax(dim=1).tolist()
            assert all(seen[t, first : t + 1].all() for t, first in enumerate(row["first_seen"]))
        found["samples"].append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", type=Path, required=True, help="a checkout of Megatron-LM")
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "golden" / "megatron.json.gz")
    arguments = parser.parse_args()
    modules = import_datasets(arguments.megatron)
    with tempfile.TemporaryDirectory() as name:
        found: dict[str, Any] = {"files": write_files(modules, Path(name)), "cases": {}}
        for case_name, case in CASES.items():
            found["cases"][case_name] = samples_of(modules, case, Path(name))
    text = json.dumps(found, separators=(",", ":"))
    arguments.output.write_bytes(gzip.compress(text.encode(), mtime=0))
    for case_name, case in found["cases"].items():
        print(f"{case_name}: {case['size']} samples, {len(case['samples'])} written")
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
