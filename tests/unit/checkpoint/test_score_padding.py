"""The padding token of an exported reward model: transformers takes the score of the last token that is another one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from data_helpers import write_tokenizer
from golden_scores_cases import write_reward_model
from safetensors.numpy import load_file, save_file

from trainer.checkpoint.hugging_face import score_padding
from trainer.config import Config, parse_config
from trainer.data import load_tokenizer
from trainer.errors import UserError
from trainer.run.export import export

VOCABULARY = 400


def config_of(folder: Path, special: dict[str, str], *tokens: str) -> Config:
    """Returns the configuration of a reward model with a tokenizer whose documents end with <end>."""
    source = folder / "source"
    write_reward_model("model_llama", source)
    path = write_tokenizer(source / "tokenizer.json", "<end>", *tokens)
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"} | special))
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | {"vocab_size": VOCABULARY}))
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = np.resize(embedding, (VOCABULARY, embedding.shape[1]))
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    sections = {
        "pretrained_model_dir": str(source), "load_checkpoint": str(source),
        "train_dataset": {"tokenizer": {"type": "huggingface", "path": str(path)}},
    }  # fmt: skip
    return parse_config("reward", json.dumps(sections))


PADDING = [
    ({"pad_token": "<pad>"}, "<pad>"),
    ({"pad_token": "<end>", "unk_token": "<unk>"}, "<unk>"),  # the padding ends a document, too
    ({"pad_token": "<end>"}, "<pad>"),  # a special token of this name
]


@pytest.mark.parametrize(("special", "token"), PADDING)
def test_the_padding_token_ends_no_answer(special: dict[str, str], token: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, special, "<unk>", "<pad>")
    tokenizer = load_tokenizer(config)
    assert [score_padding(config, tokenizer)] == tokenizer.encode(token)


def test_without_a_padding_token_there_is_no_export(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"pad_token": "<end>"})
    with pytest.raises(UserError, match=r"has no padding token[\s\S]*add pad_token to its tokenizer_config.json"):
        export(config, tmp_path / "exported", merge=False)
    assert not (tmp_path / "exported").exists()
