"""The data of a smoke run: what is written for the file's own loader, and what is read of data that is here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from no_decoder import NO_DECODER_TEXT
from smoke_files import ALPACA, EXPERTS

from trainer.config import Config, load_config
from trainer.config.schema.root import ConfigSource
from trainer.data import build_datasets
from trainer.data.batches.mindrecord import build_mindrecord
from trainer.errors import RunError, UserError
from trainer.run.mindrecord import write_mindrecord
from trainer.smoke.execute import CONFIG
from trainer.smoke.report import outcome_lines
from trainer.smoke.run import SmokeResult, _check_result, _prepare, _setup, smoke, smoke_changes

SIZES = "num_layers: 2, hidden_size: 64, num_heads: 4, vocab_size: 1000, seq_length: 64"
MODEL = f"model: {{model_config: {{{SIZES}}}}}\nrunner_config: {{batch_size: 2}}\n"


def prepared(folder: Path, text: str, steps: int = 3) -> Config:
    """Returns the small copy of a file whose data has been written, as `smoke` runs it."""
    path = folder / "file.yaml"
    path.write_text(f"output_dir: {folder}\n{text}", encoding="utf-8")
    config = load_config(str(path), problems=[])
    setup = _setup(config, steps, 1)
    return _prepare(config, setup, smoke_changes(config, setup))


def form_of(text: str, tmp_path: Path) -> str:
    """Returns the kind of the first record that is written."""
    config = prepared(tmp_path, text)
    loader = config.train_dataset.data_loader
    file = Path(getattr(loader, "data_files", "") or loader.dataset_dir)
    assert config.train_dataset.tokenizer.type == "bytes"
    dataset, _ = build_datasets(config)
    assert dataset.num_sequences >= 3 * config.runner_config.batch_size, "the steps are not filled"
    return " ".join(json.loads(file.read_text(encoding="utf-8").splitlines()[0]))


@pytest.mark.parametrize(
    ("loader", "mode", "form"),
    [
        ("{type: JsonlDataset, dataset_dir: /nowhere/a.jsonl}", "train", "text"),
        ("{type: JsonlDataset, dataset_dir: /nowhere/a.jsonl}", "finetune", "messages"),
        ("{type: JsonlDataset, dataset_dir: /nowhere, columns: {messages: talk}}", "train", "talk"),
        ("{type: JsonlDataset, dataset_dir: /nowhere, columns: {output: answer}}", "train", "instruction input answer"),
        ("{type: HFDataLoader, path: own/data, split: train, handler: [{type: rename_column, original_column_name: q,"
         " new_column_name: prompt}]}", "train", "q completion"),
        ("{type: ADGenDataLoader, dataset_dir: /nowhere/train.json, phase: train, origin_columns: [q, a]}", "train",
         "q input a"),
        ("{type: SFTDataLoader, dataset_dir: /nowhere/a.json, dataset_name: multi-round-chat, tokenizer: {type: A},"
         " map_function_kwargs: {data_field: talk}}", "finetune", "talk"),
        ("{type: SFTDataLoader, dataset_dir: /nowhere/a.json, dataset_name: alpaca}", "train",
         "instruction input output"),
    ],
)  # fmt: skip
def test_records_have_the_form_that_the_file_reads(tmp_path, loader, mode, form):
    text = f"{MODEL}run_mode: {mode}\nload_checkpoint: ''\ntrain_dataset: {{data_loader: {loader}}}\n"
    assert form_of(text, tmp_path) == form


@pytest.mark.parametrize(
    ("loss", "keys", "columns", "form"),
    [
        ("dpo", "", "", "prompt chosen rejected"),
        ("simpo", "chat_template: alpaca, ", "", "prompt chosen rejected"),
        ("orpo", "", "instruction: q, chosen: good, rejected: bad", "q input good bad"),
        ("reward", "", "messages: talk, margin: by", "talk chosen rejected by"),
        ("kto", "", "", "prompt completion label"),
        ("kto", "chat_template: alpaca, ", "prompt: q, tools: functions", "q completion label functions"),
    ],
)
def test_a_loss_of_preferences_has_its_records(tmp_path, loss, keys, columns, form):
    loader = f"{{type: JsonlDataset, dataset_dir: /nowhere/a.jsonl, columns: {{{columns}}}}}"
    text = f"{MODEL.replace('64}', '2048}')}loss: {{type: {loss}}}\ntrain_dataset: {{{keys}data_loader: {loader}}}\n"
    assert form_of(text, tmp_path) == form


def test_named_columns_are_there(tmp_path):
    loader = "{type: JsonlDataset, dataset_dir: /nowhere/a.jsonl, columns: {weight: w, messages: m, tools: t}}"
    assert form_of(f"{MODEL}train_dataset: {{data_loader: {loader}}}\n", tmp_path) == "m w t"


def test_instructions_and_a_handler_s_tokenizer(tmp_path):
    assert form_of(ALPACA, tmp_path) == "instruction input output"


def test_text_and_held_out_documents(tmp_path):
    config = prepared(tmp_path, MODEL + "do_eval: True\ntrain_dataset: {held_out: 0.1, tokenizer: {type: huggingface, "
                      "path: /nowhere/tokenizer.json}, data_loader: {type: TextDataset, dataset_dir: /nowhere}}\n")
    train, held_out = build_datasets(config)
    assert train.num_sequences == 6 and held_out is not None and config.train_dataset.max_batches == 1


def test_megatron_files_are_blended_as_the_file_says(tmp_path):
    config = prepared(tmp_path, EXPERTS)
    dataset, _ = build_datasets(config)
    batch = dataset.batch(range(dataset.num_sequences))
    assert dataset.num_sequences == 6 and [share.weight for share in dataset.shares] == [0.3, 0.7]
    assert (batch.input_ids == 511).any() and batch.input_ids.max() < 512 and batch.input_ids.shape[1] == 128


def test_images(tmp_path):
    config = prepared(tmp_path, NO_DECODER_TEXT)
    dataset, _ = build_datasets(config)
    assert dataset.num_sequences == 3 and dataset.batch([0]).pixels.shape == (1, 784)


def test_rows_that_are_here_are_cut_where_they_have_a_loss(tmp_path):
    tokens = np.arange(600, dtype=np.int32).reshape(2, 300) % 900
    labels = np.where(np.arange(300) < 200, -100, np.roll(tokens, -1, axis=1)).astype(np.int32)
    path = tmp_path / "data.mindrecord"
    write_mindrecord(path, ({"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)))
    loader = f"train_dataset: {{data_loader: {{type: MindDataset, dataset_dir: {path}, shuffle: False}}}}\n"
    config = prepared(tmp_path, MODEL.replace("seq_length: 64", "seq_length: 300") + loader)
    dataset, _ = build_mindrecord(config, "train_dataset")
    batch = dataset.batch([0, 1, 2])
    assert (config.decoder.seq_length, config.decoder.vocab_size, dataset.num_sequences) == (128, 1000, 6)
    assert batch.input_ids[0].tolist() == list(range(136, 264)), "half a sequence before the first label, token 200"
    assert (batch.labels[0][:64] == -100).all() and batch.labels[0][64:].tolist() == list(range(201, 265))
    assert (batch.input_ids[2] == batch.input_ids[0]).all(), "the rows repeat"


def test_a_damaged_file_is_named_with_the_line_of_the_user_s_file(tmp_path):
    for name, content in (("a.idx", b"MMIDIDX"), ("a.bin", b"1234")):
        (tmp_path / name).write_bytes(content)
    path = tmp_path / "file.yaml"
    loader = f"type: BlendedMegatronDatasetDataLoader, config: {{data_path: [{tmp_path}/a]}}"
    path.write_text(f"output_dir: {tmp_path}\n{MODEL}train_dataset:\n  data_loader: {{{loader}}}\n")
    with pytest.raises(UserError, match=r"file.yaml:5: .*a.idx") as caught:
        smoke(load_config(str(path), problems=(told := [])), told, 3, 1, print, print)
    assert caught.value.exit_code == 2


def test_another_smoke_run_replaces_the_folder_and_nothing_else(tmp_path):
    loader = "train_dataset: {data_loader: {type: SyntheticDataset, num_samples: 100}}\n"
    prepared(tmp_path, MODEL + loader)
    folder = tmp_path / "smoke" / "file"
    (folder / "metrics.jsonl").write_text("old")
    prepared(tmp_path, MODEL + loader)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG]
    (folder / CONFIG).rename(folder / "mine.txt")
    with pytest.raises(Exception, match="has other files"):
        prepared(tmp_path, MODEL + loader)


@pytest.mark.parametrize(
    ("losses", "again", "evaluation", "says"),
    [
        ({1: 6.0, 2: 5.0}, 5.0, 5.5, ""),
        ({1: 6.0, 2: None}, 5.0, 5.5, "step 2 of 2 has no finite loss"),
        ({1: 6.0}, 5.0, 5.5, "step 2 of 2 has no finite loss"),
        ({1: 6.0, 2: 5.0}, 5.1, 5.5, "5.1 after resuming from step 1"),
        ({1: 6.0, 2: 5.0}, None, 5.5, "has no step 2"),
        ({1: 6.0, 2: 5.0}, 5.0, None, "the evaluation has no finite loss"),
    ],
)
def test_the_verdict(losses, again, evaluation, says):
    verdict = SmokeResult("a.yaml", "out", 1, [], [], losses=losses, resumed_loss=again, eval_loss=evaluation)
    _check_result(verdict, 2, evaluates=True)
    assert (says in verdict.problem) if says else verdict.problem == ""


def test_the_last_lines_say_which_kinds_of_parallelism_ran():
    verdict = SmokeResult("a.yaml", "out", 8, [], [], ["pipeline_stage", "data_parallel"], ["context_parallel"])
    lines = outcome_lines(verdict, ConfigSource())
    assert "parallelism: pipeline_stage, data_parallel; left out: context_parallel" in lines
    verdict.left_out = []
    assert "parallelism: pipeline_stage, data_parallel" in outcome_lines(verdict, ConfigSource())
    verdict.ranks = 1
    assert "parallelism" not in "".join(outcome_lines(verdict, ConfigSource()))


def test_a_small_copy_that_is_not_valid_is_a_failure(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text(f"output_dir: {tmp_path}\n{MODEL}")
    config = load_config(str(path), problems=[])
    setup = _setup(config, 3, 1)
    changes = [change._replace(after=0) if change.key.endswith("stop_step") else change
               for change in smoke_changes(config, setup)]
    broken = [*changes, changes[0]._replace(key="model.model_config.num_heads", after=5)]
    with pytest.raises(RunError, match="the small copy of the file is not valid"):
        _prepare(config, setup, broken)


def test_of_much_text_the_first_records_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.smoke.synthetic_data._LARGE_BYTES", 1000)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = [json.dumps({"question": f"what is {number}?", "completion": f"it is {number}"}) for number in range(900)]
    for name in ("a", "b"):
        (corpus / f"{name}.jsonl").write_text("\n".join(lines))
    sources = f"[{{path: {corpus}/a.jsonl, weight: 3}}, {{path: {corpus}/b.jsonl}}]"
    loader = f"{{type: JsonlDataset, columns: {{prompt: question}}, sources: {sources}}}"
    config = prepared(tmp_path, f"{MODEL}train_dataset: {{data_loader: {loader}}}\n")
    paths = [Path(source.path) for source in config.train_dataset.data_loader.sources]
    assert [path.parent.name for path in paths] == ["train_dataset"] * 2
    assert paths[0].read_text().splitlines() == lines[:500]
    dataset, _ = build_datasets(config)
    assert [share.weight for share in dataset.shares] == [3.0, 1.0] and dataset.num_sequences == 6
    (corpus / "a.txt").write_text("some words of a text\n" * 100)
    config = prepared(tmp_path, f"{MODEL}train_dataset: {{data_loader: {{dataset_dir: {corpus}/a.txt}}}}\n")
    assert build_datasets(config)[0].num_sequences == 6
