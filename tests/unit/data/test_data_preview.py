"""The command `data`: what will be trained on, as text, with colours and as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from data_helpers import jsonl, make_config
from monitor_helpers import run_on_terminal
from no_decoder import KIND, NO_DECODER_TEXT

from trainer.cli.main import dispatch
from trainer.data.datasets import build_datasets
from trainer.data.tokens.tokenizer import ByteTokenizer
from trainer.errors import UserError
from trainer.run.preview import preview, split_segments

REPOSITORY = Path(__file__).resolve().parents[3]
RECORDS = [{"instruction": "say " + "a" * size, "output": "A" * size} for size in range(1, 30)]


def config_of(folder: Path, **sections):
    path = jsonl(folder / "a.jsonl", *RECORDS)
    return make_config(folder, path, loader={"type": "JsonlDataset"}, model={"seq_length": 128}, **sections)


def run_data(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    code = "import sys; from trainer.cli.main import dispatch; code = dispatch(['data', *sys.argv[1:]]); "
    code += "print('mindspore' in sys.modules, file=sys.stderr); sys.exit(code)"
    words = [sys.executable, "-c", code, "--config", str(folder / "run.yaml"), *flags]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)


def test_json_holds_the_first_sequences_in_the_order_of_training(tmp_path):
    from trainer.data import BatchLoader

    config = config_of(tmp_path)
    done = run_data(tmp_path, "--json", "--rows", "2")
    assert done.returncode == 0 and done.stderr == "False\n", "without notes and without MindSpore"
    found = json.loads(done.stdout)
    assert list(found) == ["rows", "statistics"] and len(found["rows"]) == 2
    dataset, _ = build_datasets(config)
    loader = BatchLoader(dataset, batch_size=2, shuffle=True, seed=config.seed, drop_remainder=True, prefetch_size=1)
    batches = loader.epoch(0)
    batch = next(batches)
    batches.close()
    for row in (0, 1):
        segments = found["rows"][row]["segments"]
        assert all(list(segment) == ["tokens", "labels", "text", "trained_text"] for segment in segments)
        for name, array in (("tokens", batch.input_ids), ("labels", batch.labels)):
            joined = sum((segment[name] for segment in segments), [])
            assert joined == array[row][: len(joined)].tolist()
        assert all(label == -100 for label in batch.labels[row][len(joined) :])
        for segment in segments:
            letters = re.search(r"say (a+)", segment["text"])[1]
            assert segment["trained_text"].startswith(letters.upper()) and segment["labels"][-1] == -100


def test_statistics_count_what_is_there(tmp_path):
    found = preview(config_of(tmp_path), 0, []).statistics
    dataset, _ = build_datasets(config_of(tmp_path))
    batch = dataset.batch(range(dataset.num_sequences))
    assert found.loss_tokens == int((batch.labels != -100).sum())
    assert (found.samples, found.sequences, found.tokens) == (29, dataset.num_sequences, dataset.num_tokens)
    assert found.padding == pytest.approx(1 - found.tokens / batch.labels.size)
    assert (found.truncated, found.dropped, found.packing) == (0, 0, "whole")
    assert list(found.lengths) == ["p0", "p10", "p25", "p50", "p75", "p90", "p99", "p100"]
    lengths = sorted(found.lengths.values())
    assert lengths == list(found.lengths.values()) and lengths[-1] - lengths[0] == 2 * 28
    assert found.tokenizing_tokens_per_second > 0


def test_lengths_are_those_before_truncation(tmp_path):
    config = config_of(tmp_path)
    short = make_config(tmp_path, tmp_path / "a.jsonl", loader={"type": "JsonlDataset"}, model={"seq_length": 64})
    told: list[str] = []
    found = preview(short, 0, told).statistics
    assert found.lengths == preview(config, 0, []).statistics.lengths and found.truncated > 0
    assert len(told) == 1 and "longer than a sequence" in told[0]


@pytest.mark.parametrize("packing", ["cut", "none", "whole"])
def test_labels_of_every_packing_are_counted(tmp_path, packing):
    """Without the documents that a last, incomplete sequence of a cut stream leaves out."""
    config = config_of(tmp_path, train={"packing": packing, "drop_remainder": False})
    dataset, _ = build_datasets(config)
    labels = dataset.batch(range(dataset.num_sequences)).labels
    assert dataset.count_documents().loss_tokens == int((labels != -100).sum())


def test_the_shares_of_several_sources(tmp_path):
    sources = [
        {"path": str(jsonl(tmp_path / f"{n}.jsonl", *RECORDS)), "weight": weight} for n, weight in enumerate((3, 1))
    ]
    loader = {"type": "JsonlDataset", "dataset_dir": "", "sources": sources}
    make_config(tmp_path, loader=loader, model={"seq_length": 128})
    found = json.loads(run_data(tmp_path, "--json").stdout)
    weights = [share["weight"] for share in found["statistics"]["sources"]]
    assert (weights, found["statistics"]["samples"], len(found["rows"])) == ([3, 1], 58, 3)
    assert "0.jsonl: weight 3, " in run_data(tmp_path, "--rows", "0").stdout


def test_text_is_counted_too(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 100)
    found = preview(make_config(tmp_path, tmp_path / "a.txt"), 1, [])
    assert (found.statistics.tokens, found.statistics.loss_tokens, found.statistics.packing) == (201, 200, "cut")
    (segment,) = found.rows[0]
    assert len(segment.tokens) == 8 and segment.labels[:-1] == segment.tokens[1:]


PAIR = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
LABELLED = [{"prompt": f"{number}?", "completion": "yn"[number], "label": not number} for number in (0, 1)]


@pytest.mark.parametrize(
    ("kind", "records", "names"),
    [
        ("dpo", [PAIR], [{"= 4": "chosen", "= 5": "rejected"}]),
        ("kto", LABELLED, [{"0?y": "desirable", "0?n": "answer to another prompt"},
                           {"1?n": "undesirable", "1?y": "answer to another prompt"}]),
    ],
)  # fmt: skip
def test_answers_have_names(tmp_path, kind, records, names):
    path = jsonl(tmp_path / "a.jsonl", *records)
    train = {"packing": "none"}
    make_config(
        tmp_path, path, loader={"type": "JsonlDataset"}, model={"seq_length": 64}, train=train, loss={"type": kind}
    )
    found = json.loads(run_data(tmp_path, "--json").stdout)
    shown = [{each["text"].removesuffix("<|endoftext|>")[-3:]: each["answer"] for each in row["segments"]}
             for row in found["rows"]]  # fmt: skip
    assert sorted(shown, key=str) == sorted(names, key=str)
    assert found["statistics"]["samples"] == len(records), "each is two documents"
    printed = run_data(tmp_path).stdout
    for row in names:
        for place, name in enumerate(row.values(), start=1):
            assert f"document {place} of 2, {name}: " in printed


@pytest.mark.parametrize("packing", ["whole", "cut"])
def test_weights_of_records_are_summed_up(tmp_path, packing):
    weights = [0.5, 0, 2, 0]
    path = jsonl(tmp_path / "a.jsonl", *({**each, "w": weight} for each, weight in zip(RECORDS, weights, strict=False)))
    loader = {"type": "JsonlDataset", "columns": {"weight": "w"}}
    config = make_config(tmp_path, path, loader=loader, model={"seq_length": 64}, train={"packing": packing})
    found = preview(config, 0, []).statistics
    assert asdict(found)["weights"] == {"least": 0.0, "most": 2.0, "mean": 0.625, "zeros": 2, "records": 4}
    told = " ".join(run_data(tmp_path, "--rows", "0").stdout.split())
    assert "record weights 0 to 2, mean 0.625; 2 of 4 records have 0" in told
    both = {**loader, "dataset_dir": "", "sources": [{"path": str(path), "weight": 1}] * 2}
    blended = preview(make_config(tmp_path, loader=both, model={"seq_length": 64}, train={"packing": packing}), 0, [])
    assert blended.statistics.weights == replace(found.weights, zeros=4, records=8)
    assert preview(config_of(tmp_path), 0, []).statistics.weights is None


def test_padding_is_no_segment(tmp_path):
    dataset, _ = build_datasets(config_of(tmp_path, train={"packing": "none"}))
    batch = dataset.batch([0])
    (segment,) = split_segments(batch, 0, ByteTokenizer())
    assert len(segment.tokens) == int((batch.segment_ids[0] == 0).sum()) < 128


def test_tokens_with_a_loss_are_marked_in_a_pipe_and_coloured_on_a_terminal(tmp_path):
    config = config_of(tmp_path)
    found = preview(config, 1, [])
    done = run_data(tmp_path, "--rows", "1")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    for segment in found.rows[0]:
        assert f"«{segment.trained_text}»" in done.stdout
    for word in ("samples", "with loss", "sequences", "truncated", "dropped", "tokenizing", "p50", "####"):
        assert word in done.stdout
    program = "import sys; sys.argv[0] = 'run_trainer.py'; from trainer.cli.main import dispatch; "
    program += f"dispatch(['data', '--config', {str(tmp_path / 'run.yaml')!r}, '--rows', '1'])"
    shown = run_on_terminal(program, 100)
    trained = found.rows[0][0].trained_text.splitlines()[0]
    assert re.search(r"\x1b\[1;32m" + re.escape(trained), shown) and "«" not in shown


def test_text_of_the_data_does_not_control_the_terminal(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "\x1b[2J", "completion": "\x07 yes"}, *RECORDS[:3])
    make_config(tmp_path, path, loader={"type": "JsonlDataset", "shuffle": False}, model={"seq_length": 128})
    done = run_data(tmp_path, "--rows", "1")
    assert "\\x1b[2J" in done.stdout and "\\x07 yes" in done.stdout and not {"\x1b", "\x07"} & set(done.stdout)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rows", "-1"), "--rows = -1: must be at least 0"),
        (("--rows", "x"), "--rows: must be an integer"),
        (("--train_dataset_dir", "/nowhere"), "dataset_dir = '/nowhere': "),
        (("--run_mode", "eval"), "run_mode = 'eval': there is no evaluation data"),
        (("--nonsense", "1"), "nonsense"),
    ],
)
def test_bad_input_is_one_message(tmp_path, flags, words, capsys):
    config_of(tmp_path)
    with pytest.raises(UserError) as caught:
        dispatch(["data", "--config", str(tmp_path / "run.yaml"), *flags])
    assert words in str(caught.value) and capsys.readouterr().out == ""


def test_images_have_no_tokens(tmp_path):
    (tmp_path / "run.yaml").write_text(NO_DECODER_TEXT)
    with pytest.raises(UserError, match=f"model.arch.type = {KIND!r}: images have no tokens to show"):
        dispatch(["data", "--config", str(tmp_path / "run.yaml")])


def test_an_evaluation_shows_what_it_reads(tmp_path):
    config = config_of(tmp_path, train={"held_out": 0.2}, run_mode="eval")
    held_out = preview(config, 1, [])
    trained = preview(config_of(tmp_path, train={"held_out": 0.2}), 1, [])
    assert held_out.statistics.samples + trained.statistics.samples == 29
    assert held_out.statistics.samples < trained.statistics.samples
