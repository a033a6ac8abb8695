"""Scores of reward models against those of transformers (scripts/golden_scores.py), and the folders that are exported.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from golden_files import load_model_case
from golden_scores_cases import DOCUMENTS, NAMES, load_scores, write_reward_model
from numpy_kernels import assert_same_bits, distance
from tolerances import decoder_limits

from trainer.checkpoint.adapters import load_initial_weights
from trainer.checkpoint.weights import read_weights
from trainer.config import Config, parse_config
from trainer.config.families import FAMILIES
from trainer.config.hugging_face import has_sequence_classifier
from trainer.errors import UserError
from trainer.run.export import export
from trainer.run.session import open_session
from trainer.step.score import score_documents


def config_of(folder: Path, **sections: object) -> Config:
    described = {
        "pretrained_model_dir": str(folder), "run_mode": "predict", "predict_data": "x",
        "train_dataset": {"tokenizer": {"type": "bytes"}}, "model": {"model_config": {"seq_length": 8}},
    }  # fmt: skip
    return parse_config("reward", json.dumps(described | sections))


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    write_reward_model(name, tmp_path / "source")
    config = config_of(tmp_path / "source")
    assert config.decoder.num_labels == 1
    session = open_session(config, load_initial_weights(config))
    documents = [np.array(tokens, np.uint32) for tokens in DOCUMENTS]
    limit = decoder_limits(config.decoder, rows=len(DOCUMENTS)).loss
    for batch_size in (1, 2):
        found = np.concatenate(list(score_documents(session.model, session.build_inputs, documents, batch_size)))
        assert distance(found, np.array(load_scores()[name])) < limit
    # scripts/golden_scores.py lets transformers load the folder that this writes.
    export(config, tmp_path / "exported", merge=False)
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    source = json.loads((tmp_path / "source" / "config.json").read_text())
    assert written["architectures"] == source["architectures"]
    assert (written["num_labels"], len(written["id2label"]), written["pad_token_id"]) == (1, 1, 0)
    ours, theirs = (read_weights(tmp_path / each) for each in ("exported", "source"))
    assert "score.weight" in ours
    assert_same_bits(ours, theirs)


def edit_config(folder: Path, **keys: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_each_class_has_a_case() -> None:
    kinds = {load_model_case(name).metadata["config_as_saved"]["model_type"] for name in NAMES}
    known = {family.model_type for kind, family in FAMILIES.items() if has_sequence_classifier(kind)}
    assert kinds == known


def test_a_family_without_a_class_of_transformers_is_not_exported(tmp_path: Path) -> None:
    write_reward_model("family_granite", tmp_path / "source")
    config = config_of(tmp_path / "source")
    with pytest.raises(UserError, match=r"no class for a reward model of this family \(GraniteForSequenceClassi"):
        export(config, tmp_path / "exported", merge=False)
    assert not (tmp_path / "exported").exists()
    result = export(config, tmp_path / "model.safetensors", merge=False)
    assert result.files == ("model.safetensors",)


def test_a_classifier_with_more_labels_is_refused(tmp_path: Path) -> None:
    write_reward_model("model_llama", tmp_path / "source")
    edit_config(tmp_path / "source", id2label={"0": "bad", "1": "good"})
    with pytest.raises(UserError, match="not yet supported: a classifier of sequences with 2 labels"):
        config_of(tmp_path / "source")
    edit_config(tmp_path / "source", id2label=None, label2id=None)  # the default of transformers is 2
    with pytest.raises(UserError, match="with 2 labels"):
        config_of(tmp_path / "source")
    edit_config(tmp_path / "source", num_labels=1)
    assert config_of(tmp_path / "source").decoder.num_labels == 1
