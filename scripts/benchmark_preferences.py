"""The group of `benchmark.py targets` that trains on preferences, in the trainer and in TRL.

A batch has 4 pairs of two documents of 256 tokens, each a byte. Both sides compute the log-probabilities of the
reference before the first step, which is not timed, and then take their steps in float32 without recomputation.
"""

from __future__ import annotations

import json
import random
import string
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmark_groups import DENSE, LORA, WIDE_QWEN3, Figures, Group, Programs, config_of, peaks, ratio_line
from benchmark_peers import check_equal
from benchmark_tools import Line, finetune_sizes, measure_report, mib, peer_report

_METHODS = "dpo", "ipo", "orpo"
_MODELS: dict[str, dict[str, str]] = {"all weights": {}, "LoRA": LORA}
_PAIRS = 4  # of a batch
_DOCUMENT = 256  # tokens of a prompt with an answer, of which the last ends the document
_PROMPT = 64


def write_records(folder: Path, pairs: int) -> None:
    """Writes pairs of random answers, and the same answers one by one for supervised training."""
    draw = random.Random(1)

    def text(length: int) -> str:
        return "".join(draw.choices(string.ascii_lowercase, k=length))

    answer = _DOCUMENT - _PROMPT - 1
    records = [{"prompt": text(_PROMPT), "chosen": text(answer), "rejected": text(answer)} for _ in range(pairs)]
    answers = [{"prompt": each["prompt"], "completion": each[name]} for each in records
               for name in ("chosen", "rejected")]  # fmt: skip
    for name, lines in (("pairs", records), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def keys_of(folder: Path, records: str) -> dict[str, str]:
    """Returns the keys of a training on these records, with two documents in each sequence."""
    return WIDE_QWEN3 | {
        "runner_config.batch_size": str(_PAIRS), "model.model_config.seq_length": str(2 * _DOCUMENT),
        "train_dataset.data_loader.type": "JsonlDataset",
        "train_dataset.data_loader.dataset_dir": str(folder / f"{records}.jsonl"),
        "train_dataset.cache_dir": str(folder / "cache"), "lr_schedule.learning_rate": "1e-6",
    }  # fmt: skip


def preferences(run: Programs) -> Figures:
    figures: Figures = {}
    options = run.options
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        write_records(folder, options.steps * _PAIRS)
        for model, adapters in _MODELS.items():
            for method in _METHODS:
                keys = keys_of(folder, "pairs") | adapters | {"loss.type": method}
                config = config_of(DENSE, keys)
                ours = run.train(keys)
                sizes = finetune_sizes(config) | {"tokens": _DOCUMENT}
                theirs = measure_report(peer_report(
                    options.torch_python, "benchmark_trl.py", sizes, options.threads, "--steps", str(options.steps),
                    "--method", method, "--pairs", str(folder / "pairs.jsonl")))  # fmt: skip
                check_equal(config, ours, theirs)
                figures[f"{method}, {model}"] = ours
                figures[f"{method}, {model}, TRL"] = theirs
        figures["supervised"] = run.train(keys_of(folder, "answers") | LORA)
    return figures


def preferences_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    for model in _MODELS:
        for method in _METHODS:
            names = f"{method}, {model}", f"{method}, {model}, TRL"
            ours, theirs = ([_PAIRS / each[name].steady_step_seconds for each in rounds] for name in names)
            yield ratio_line(f"pairs/s, {method.upper()}, {model} / TRL", 1.3, ours, theirs, "pairs/s")
    pairs, supervised = peaks(rounds, "dpo, LoRA"), peaks(rounds, "supervised")
    yield Line("peak memory, DPO with LoRA / supervised with the same tokens", pairs / supervised, 1.15, False,
               f"{mib(pairs)} / {mib(supervised)}")  # fmt: skip


PREFERENCE_GROUPS = {"preferences": Group(preferences, preferences_lines, needs_torch=True)}
