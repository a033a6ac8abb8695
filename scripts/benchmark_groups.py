"""What the groups of `benchmark.py targets` have in common: the programs that they run, keys of their models, lines."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmark_tools import (
    ROOT,
    Line,
    Measurement,
    finetune_sizes,
    measure_report,
    paired_ratio,
    peer_report,
    run_torch,
    run_trainer,
    torch_sizes,
)

from trainer.config import Override, load_config

Figures: TypeAlias = "dict[str, Measurement | float]"
"""Of one round of a group."""

DENSE, EXPERTS = (str(ROOT / "configs" / f"bench_{name}.yaml") for name in ("dense", "moe"))
HALF = {"model.model_config.compute_dtype": "bfloat16"}
WIDE = {
    "model.model_config.num_layers": "8", "model.model_config.hidden_size": "512",
    "model.model_config.intermediate_size": "1376", "model.model_config.seq_length": "512",
    "runner_config.batch_size": "4",
}  # fmt: skip
LORA = {"model.model_config.pet_config": "{lora_rank: 8, lora_alpha: 16}"}
LATENT = {
    "model.model_config.multi_latent_attention": "True", "model.model_config.q_lora_rank": "96",
    "model.model_config.kv_lora_rank": "64", "model.model_config.qk_nope_head_dim": "32",
    "model.model_config.qk_rope_head_dim": "16", "model.model_config.v_head_dim": "32",
}  # fmt: skip
DROPOUT = {"model.model_config.hidden_dropout": "0.1", "model.model_config.attention_dropout": "0.1"}
QWEN3 = {
    "model.arch.type": "Qwen3ForCausalLM", "model.model_config.num_layers": "28",
    "model.model_config.hidden_size": "1024", "model.model_config.num_heads": "16",
    "model.model_config.n_kv_heads": "8", "model.model_config.head_dim": "128",
    "model.model_config.intermediate_size": "3072", "model.model_config.vocab_size": "151936",
    "model.model_config.seq_length": "512", "model.model_config.tie_word_embeddings": "True",
    "runner_config.batch_size": "1", "train_dataset.data_loader.num_samples": "16",
}  # fmt: skip
"""The sizes of Qwen3-0.6B."""
WIDE_QWEN3 = QWEN3 | {
    "model.model_config.num_layers": "8", "model.model_config.hidden_size": "512",
    "model.model_config.num_heads": "8", "model.model_config.n_kv_heads": "4", "model.model_config.head_dim": "64",
    "model.model_config.intermediate_size": "1536", "model.model_config.vocab_size": "8192",
    "train_dataset.data_loader.num_samples": "4096",
}  # fmt: skip
"""A small Qwen3 with a vocabulary of 8,192."""


class Programs(NamedTuple):
    """The programs that a group of benchmarks runs.

    `train(keys, configuration)` runs the trainer, and `before(keys)` the one of an earlier checkout, or nothing.
    `torch(keys, configuration, mode, *flags)` runs PyTorch with the sizes of that configuration, and
    `finetune(keys, configuration)` transformers, with PEFT if it has adapters.
    """

    train: Callable[..., Measurement]
    before: Callable[[Mapping[str, str]], Figures]
    torch: Callable[..., Measurement]
    finetune: Callable[..., Measurement]
    options: argparse.Namespace


class Group(NamedTuple):
    measure: Callable[[Programs], Figures]
    lines: Callable[[Sequence[Figures]], Iterator[Line]]
    needs_torch: bool = False


def flags(keys: Mapping[str, str]) -> list[str]:
    return [word for key, text in keys.items() for word in (f"--{key}", text)]


def config_of(path: str | Path, keys: Mapping[str, str]) -> Any:
    return load_config(str(path), [Override(key, text, "benchmark") for key, text in keys.items()])


def programs(options: argparse.Namespace, cache: str) -> Programs:
    """Returns the programs that the options name; `cache` is a folder for what torch.compile has compiled."""
    def train(keys: Mapping[str, str], path: str = DENSE, *more: str, steps: int = options.steps) -> Measurement:
        return run_trainer(options.trainer, path, steps, *flags(keys), *more)

    def before(keys: Mapping[str, str]) -> Figures:
        if options.before is None:
            return {}
        return {"before": run_trainer(options.before, DENSE, options.steps, *flags(keys))}

    def torch(
        keys: Mapping[str, str], path: str = DENSE, mode: str = "eager", *more: str, steps: int = options.steps
    ) -> Measurement:
        sizes = torch_sizes(config_of(path, keys))
        return run_torch(options.torch_python, sizes, mode, steps, options.threads, *more, cache=cache)[0]

    def finetune(keys: Mapping[str, str], path: str = DENSE, *, steps: int = options.steps) -> Measurement:
        sizes = finetune_sizes(config_of(path, keys))
        return measure_report(peer_report(
            options.torch_python, "benchmark_finetune.py", sizes, options.threads, "--steps", str(steps)))

    return Programs(train, before, torch, finetune, options)


def ratio_line(name: str, limit: float, ours: Sequence[float], theirs: Sequence[float], unit: str,
               at_least: bool = True) -> Line:  # fmt: skip
    """Returns the line with the ratio of figures of the same rounds."""
    ratio, low, high = paired_ratio(ours, theirs)
    digits = 0 if statistics.median(theirs) >= 100 else 2
    detail = f"{statistics.median(ours):.{digits}f} / {statistics.median(theirs):.{digits}f} {unit}"
    return Line(name, ratio, limit, at_least, f"{detail}, rounds {low:.2f} to {high:.2f}")


def speeds(rounds: Sequence[Figures], name: str) -> list[float]:
    return [each[name].tokens_per_second for each in rounds]


def speed_line(name: str, limit: float, rounds: Sequence[Figures], ours: str, theirs: str) -> Line:
    """Returns the line with the ratio of the speeds of two sides."""
    return ratio_line(f"tokens/s, {name}", limit, speeds(rounds, ours), speeds(rounds, theirs), "tokens/s")


def before_line(name: str, limit: float, rounds: Sequence[Figures]) -> Line:
    """Returns the line with the speed of `trainer` relative to an earlier checkout."""
    name = f"{name} / an earlier checkout"
    if "before" not in rounds[0]:
        return Line(f"tokens/s, {name}", None, limit, True, "--before names none")
    return speed_line(name, limit, rounds, "trainer", "before")


def steps_line(name: str, limit: float, rounds: Sequence[Figures], other: str) -> Line:
    """Returns the line with the step time of `trainer` relative to another model."""
    ours, theirs = ([each[side].steady_step_seconds for each in rounds] for side in ("trainer", other))
    return ratio_line(name, limit, ours, theirs, "s", at_least=False)


def peaks(rounds: Sequence[Figures], name: str) -> float:
    return statistics.median(each[name].peak_rss_bytes for each in rounds)
