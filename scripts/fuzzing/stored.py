"""Files that runs and other programs leave: checkpoints, weights, adapters, tokenizers, token files, model folders."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fuzz import Accepted, Attempt, check

from fuzzing.configuration import TINY, _merged
from fuzzing.mutate import changed_bytes, json_bytes
from trainer.checkpoint import adapters, state, store
from trainer.checkpoint.verify import verify
from trainer.checkpoint.weights import check_files
from trainer.checkpoint.writing import write_checkpoint
from trainer.config import Config, dump_config, parse_config
from trainer.data.datasets import build_train_dataset, data_layout, find_tokenizer
from trainer.errors import RunError, UserError
from trainer.models.spec.shapes import adapter_shapes, parameter_shapes
from trainer.optim.freeze import trained_shapes
from trainer.storage.checksums import checksum_of_bytes
from trainer.storage.marker import marker_content

_LENGTHS = (0, 1, 7, 100, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_TEXT = "the cat sat on the mat\n\x00é\U0001d518 <|im_start|>user 12345 \t" * 3


def tiny(**more: Any) -> Config:
    """Returns the tiny configuration with more sections."""
    return parse_config("a.yaml", json.dumps(_merged(TINY, more)))


def _same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], what: str) -> None:
    check(found.keys() >= expected.keys(), f"{what}: tensors are missing")
    for name, array in expected.items():
        check(np.array_equal(found[name], array), f"{what}: {name} has other values")


def _weights(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(config.seed)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def _header(content: bytes, rng: random.Random) -> bytes:
    """Returns a safetensors file with another header, or with another length of its header."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    how = rng.random()
    if how < 0.2:
        return rng.choice((*_LENGTHS, length + 1, length - 1)).to_bytes(8, "little") + header + data
    text = json_bytes(json.loads(header), rng) if how < 0.8 else changed_bytes(header, rng)
    return len(text).to_bytes(8, "little") + text + (data if rng.random() < 0.9 else data[:-1])


def _checkpoint(folder: Path) -> Attempt:
    """Tries a checkpoint with one changed file, with its old checksum or with all checksums made again."""
    config = tiny()
    layout = data_layout(config, build_train_dataset(config)[0], 1)
    shapes = trained_shapes(config)
    kinds = ("exp_avg", "exp_avg_sq")
    optimizer = {f"{kind}.{name}": np.ones(shape, np.float32) for kind in kinds for name, shape in shapes.items()}
    tensors = {"model": _weights(config, shapes), "optimizer": optimizer}
    content = {
        "position": {"step": 3, "epoch": 0, "batch": 3, "tokens": 24},
        "optimizer": {"type": "AdamW", "updates": 3},
        "data": layout,
        "settings": state.settings_record(config),
        "step": {"loss_scale": {"dynamic": False, "value": 1.0, "quiet_steps": 0, "overflows_in_a_row": 0,
                                "overflows": 0}, "spikes": 0, "spikes_in_a_row": 0},
        "evaluations": {"step": 2, "best": [{"step": 2, "loss": 1.5}], "reference": None, "without_improvement": 0},
    }  # fmt: skip
    path = write_checkpoint(folder / "whole", 3, tensors, content, 0)
    whole = {file.name: file.read_bytes() for file in path.iterdir()}
    resumed = state.read_resumed_checkpoint(path, config, layout)
    _same(resumed.weights, tensors["model"], "the checkpoint as it is")
    copy = folder / "changed" / path.name
    copy.mkdir(parents=True)

    def attempt(rng: random.Random) -> None:
        files = dict(whole)
        name = rng.choice((store.STATE, store.STATE, store.MARKER, "model.safetensors", "optimizer.safetensors"))
        is_json, keeps_checksums = not name.endswith("safetensors"), rng.random() < 0.5
        before = files[name]
        files[name] = json_bytes(json.loads(before), rng) if is_json else (
            _header(before, rng) if rng.random() < 0.5 else changed_bytes(before, rng))  # fmt: skip
        if not keeps_checksums and name != store.MARKER:
            marker = json.loads(whole[store.MARKER])
            marker.pop("checksum")
            marker["checksums"][name] = checksum_of_bytes(files[name])
            marker["file_bytes"][name] = len(files[name])
            files[store.MARKER] = marker_content(marker)
        for each, data in files.items():
            (copy / each).write_bytes(data)
        verify(copy)  # no traceback
        found = state.read_resumed_checkpoint(store.find_checkpoint(copy.parent), config, layout)
        is_same = files[name] == before or (name == store.MARKER and json.loads(files[name]) == json.loads(before))
        if keeps_checksums:
            check(is_same, f"{name} has changed, and its checksum was not looked at")
        elif is_json:
            _same(found.weights, tensors["model"], name)
            check(found.position.step == 3, f"{name}: step {found.position.step}")
        for array in (*found.weights.values(), *dict(found.optimizer).values()):
            check(np.isfinite(array).all(), f"{name}: NaN or infinity")

    return attempt


def _safetensors(folder: Path) -> Attempt:
    """Tries a weight file from elsewhere, which has no checksum, with a changed header."""
    file = folder / "model.safetensors"
    config = tiny(load_checkpoint=str(file))
    expected = _weights(config, parameter_shapes(config.decoder))
    _save(file, expected)
    whole = file.read_bytes()

    def attempt(rng: random.Random) -> None:
        file.write_bytes(_header(whole, rng))
        try:
            check_files(config)
        except UserError as error:
            with contextlib.suppress(UserError):
                adapters.load_initial_weights(config)
                raise Accepted(f"a plan refuses what a run takes: {error}") from error
            raise
        _same(adapters.load_initial_weights(config), expected, "model.safetensors")

    return attempt


def _save(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    save_file(dict(arrays), file)


def _adapters(folder: Path) -> Attempt:
    """Tries a broken folder of PEFT."""
    pet = {"model": {"model_config": {"pet_config": {"lora_rank": 2, "target_modules": ".*q_proj"}}}}
    config = tiny(adapter_id=str(folder), **pet)
    expected = _weights(config, adapter_shapes(config.decoder))
    _save(folder / "adapter_model.safetensors", {f"{adapters.PREFIX}{name}": one for name, one in expected.items()})
    described = adapters.adapter_config(config.decoder, "")
    whole = (folder / "adapter_model.safetensors").read_bytes()

    def attempt(rng: random.Random) -> None:
        text, tensors = json.dumps(described).encode(), whole
        if rng.random() < 0.7:
            text = json_bytes(described, rng)
        else:
            tensors = _header(whole, rng)
        (folder / adapters.ADAPTER_CONFIG).write_bytes(text)
        (folder / "adapter_model.safetensors").write_bytes(tensors)
        _same(adapters.load_initial_weights(config), expected, "adapters")
        read = json.loads(text)
        check((read["r"], read["lora_alpha"]) == (2, 16), f"r {read['r']}, lora_alpha {read['lora_alpha']}")

    return attempt


def write_tokenizer(path: Path) -> None:
    """Writes a byte-level tokenizer.json, and the files beside it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "th", "at"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("a", "t")]))
    split = pre_tokenizers.Split(pattern=_regex(r"\p{L}+| ?[0-9]{1,3}|\s+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    described = {"eos_token": "<|endoftext|>", "bos_token": {"content": "<|endoftext|>"}, "add_bos_token": False,
                 "additional_special_tokens": ["<|endoftext|>"],
                 "chat_template": "{{ messages[0]['content'] }}"}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}', encoding="utf-8")
    (path / "generation_config.json").write_text('{"eos_token_id": [258], "top_k": 5}', encoding="utf-8")


def _regex(text: str) -> Any:
    from tokenizers import Regex

    return Regex(text)


def _tokenizer(folder: Path) -> Attempt:
    write_tokenizer(folder)
    text = {"type": "huggingface", "path": str(folder)}
    config = tiny(train_dataset={"tokenizer": text, "data_loader": {"type": "TextDataset", "dataset_dir": "stdlib"}})
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    names = [*sorted(whole), *["tokenizer.json"] * 5]

    def attempt(rng: random.Random) -> None:
        for name, content in whole.items():
            (folder / name).write_bytes(content)
        name = rng.choice(names)
        (folder / name).write_bytes(json_bytes(json.loads(whole[name]), rng))
        tokenizer = find_tokenizer(config, "train_dataset")
        ids = np.concatenate([np.asarray(one) for one in tokenizer.encode_utf8([_TEXT.encode(), b""])])
        check(((ids >= 0) & (ids < tokenizer.vocab_size)).all(), f"{name}: ids beyond {tokenizer.vocab_size}")
        tokenizer.decode([int(one) for one in ids])

    return attempt


def _token_cache(folder: Path) -> Attempt:
    text, cache = folder / "a.txt", folder / "cache"
    text.write_text("The cat sat on the mat.\n" * 20, encoding="utf-8")
    config = tiny(train_dataset={"data_loader": {"type": "TextDataset", "dataset_dir": str(text)},
                                 "cache_dir": str(cache)})  # fmt: skip
    os.utime(text, (1e9, 1e9))
    expected = _sequences(config)
    whole = {file.relative_to(cache): file.read_bytes() for file in cache.rglob("*") if file.is_file()}

    def attempt(rng: random.Random) -> None:
        shutil.rmtree(cache, ignore_errors=True)
        for name, content in whole.items():
            (cache / name).parent.mkdir(parents=True, exist_ok=True)
            (cache / name).write_bytes(content)
        name = rng.choice(sorted(whole))
        is_json = name.suffix == ".json" and rng.random() < 0.8
        content = json_bytes(json.loads(whole[name]), rng) if is_json else changed_bytes(whole[name], rng)
        (cache / name).write_bytes(content)
        try:
            found = _sequences(config)
        except RunError as error:  # tokens are compared with their checksum when they are read, maybe after hours
            raise UserError(error.rule, fix=error.fix) from None
        check(found == expected, f"{name}: other sequences are trained on")

    return attempt


def _sequences(config: Config) -> list[bytes]:
    data = build_train_dataset(config)[0]
    batch = data.batch(range(data.num_sequences))
    return [one.tobytes() for one in batch]


def _model_folder(folder: Path) -> Attempt:
    """Tries a broken config.json or generation_config.json of a Hugging Face folder."""
    described = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32, "vocab_size": 300,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
        "eos_token_id": 1, "bos_token_id": 2, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    }  # fmt: skip
    drawn = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
    sizes = dict(TINY["model"]["model_config"])
    whole = _merged({**TINY, "model": {"model_config": {"seq_length": sizes["seq_length"]}}},
                    {"pretrained_model_dir": str(folder)})  # fmt: skip

    def attempt(rng: random.Random) -> None:
        is_first = rng.random() < 0.7
        for name, content, changes in (("config", described, is_first), ("generation_config", drawn, not is_first)):
            text = json_bytes(content, rng) if changes else json.dumps(content).encode()
            (folder / f"{name}.json").write_bytes(text)
        config = parse_config("a.yaml", json.dumps(whole))
        check(parse_config("dumped.yaml", dump_config(config)) == config, "the dumped configuration is another one")

    return attempt


KINDS = {
    "checkpoint": _checkpoint, "safetensors": _safetensors, "adapters": _adapters, "tokenizer": _tokenizer,
    "token_cache": _token_cache, "model_folder": _model_folder,
}  # fmt: skip
