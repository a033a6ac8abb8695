"""`benchmark.py targets`: a figure or two of everything, each with its target, in few minutes a round.

A round of a group runs the trainer and what it is compared with one after the other; figures are medians of the rounds'
ratios, from which slow drifts of the machine cancel.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmark_groups import (
    DENSE,
    DROPOUT,
    EXPERTS,
    HALF,
    LATENT,
    LORA,
    QWEN3,
    WIDE,
    Figures,
    Group,
    Programs,
    before_line,
    peaks,
    programs,
    ratio_line,
    speeds,
    steps_line,
)
from benchmark_peers import PEER_AVX2_LIMITS, PEER_GROUPS
from benchmark_preferences import PREFERENCE_GROUPS
from benchmark_profile import needed_operations
from benchmark_tools import (
    IMPORT_ALLOWANCE_BYTES,
    ROOT,
    SETTLING_STEPS,
    Line,
    Measurement,
    RunFailed,
    conclude,
    cpu_seconds,
    mib,
    run_json,
    torch_report,
    torch_sizes,
    touch_memory,
    usable_cores,
)
from rich.console import Console

from trainer.config import load_config

_VOCABULARY = {"model.model_config.vocab_size": "32768"}
LORA_QWEN3_PEAK_OF_PEFT = 6.4e9
"""Peak memory of PEFT on PyTorch for the same training."""
BASE_DTYPE_PEAKS = {"bfloat16": 3.0e9, "int8": 2.3e9, "nf4": 2.0e9}
"""Limits of the peak memory of that training with a base in few bytes and products in bfloat16, as QLoRA's."""
VOCABULARY_PEAK_BEFORE = 2_268e6
"""Peak memory of the model with _VOCABULARY when its layers were compiled blocks, and all logits were there at once."""
_LORA_QWEN3 = LORA | QWEN3
_LARGE_MEMORY = 16 << 30  # bytes, more than full training of QWEN3 takes
_ROWS = 1, 8  # sequences that are generated together


def dense(run: Programs) -> Figures:
    evaluation = {"eval_dataset.data_loader.type": "SyntheticDataset", "eval_dataset.data_loader.num_samples": "160"}
    return {
        "trainer": run.train(evaluation, DENSE, "--do_eval"),
        "compiled": run.torch({}, DENSE, "compile"),
        "eager": run.torch({}),
        "ceiling": run_json([sys.executable, ROOT / "scripts" / "benchmark_ceiling.py"])["gflops"],
    }


def dense_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    ours, theirs, compiled = (speeds(rounds, name) for name in ("trainer", "eager", "compiled"))
    yield ratio_line("tokens/s, float32 / torch.compile", 1.3, ours, compiled, "tokens/s")
    yield ratio_line("tokens/s, float32 / PyTorch eager", 1.3, ours, theirs, "tokens/s")
    config = load_config(DENSE, [])
    per_token = needed_operations(config) / (config.runner_config.batch_size * config.decoder.seq_length) / 1e9
    reached = [per_token * speed for speed in ours]
    ceilings = [each["ceiling"] for each in rounds]
    yield ratio_line("share of the float32 product peak", 0.65, reached, ceilings, "GFLOP/s")
    peak, other = peaks(rounds, "trainer"), peaks(rounds, "eager")
    detail = f"{mib(peak)} - {mib(IMPORT_ALLOWANCE_BYTES)} / {mib(other)}"
    yield Line("peak memory less MindSpore's import / PyTorch's", (peak - IMPORT_ALLOWANCE_BYTES) / other, 1.1, False,
               detail)  # fmt: skip
    evaluated = [each["trainer"].eval_tokens_per_second for each in rounds]
    yield ratio_line("tokens/s, evaluation / training", 2.5, evaluated, ours, "tokens/s")
    first = statistics.median(each["trainer"].first_step_seconds for each in rounds)
    eager_first = statistics.median(each["eager"].first_step_seconds for each in rounds)
    yield Line("first step after the import, seconds", first, 1.5, False, f"PyTorch eager {eager_first:.1f} s")


def half(run: Programs) -> Figures:
    found: Figures = {
        "trainer": run.train(HALF), "compiled": run.torch({}, DENSE, "compile", "--dtype", "bfloat16")
    }
    if run.options.isa == "avx2":
        # Without instructions for bfloat16, float32 can be faster in PyTorch.
        found["float32"] = run.torch({}, DENSE, "compile")
    return found


def half_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    both = ("compiled", "float32")
    faster = [max(each[name].tokens_per_second for name in both if name in each) for each in rounds]
    yield ratio_line("tokens/s, bfloat16 / torch.compile with autocast", 1.15, speeds(rounds, "trainer"), faster,
                     "tokens/s")


def wide(run: Programs) -> Figures:
    steps = SETTLING_STEPS + 4
    return {"trainer": run.train(WIDE, steps=steps), "eager": run.torch(WIDE, steps=steps)}


def wide_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    ours, theirs = speeds(rounds, "trainer"), speeds(rounds, "eager")
    yield ratio_line("tokens/s, 8 layers of 512, seq 512 / PyTorch eager", 1.6, ours, theirs, "tokens/s")


def experts(run: Programs) -> Figures:
    config = load_config(EXPERTS, [])
    moe = config.decoder.experts
    width, number = moe.num_experts_chosen * config.decoder.expert_size, "model.model_config.moe_config.expert_num"
    dense_model = {"model.model_config.moe_config": "null", "model.model_config.intermediate_size": str(width)}
    return {
        "trainer": run.train({}, EXPERTS),
        "eager": run.torch({}, EXPERTS),
        "dense": run.train(dense_model, EXPERTS),
        **{f"experts {count}": run.train({number: count}, EXPERTS) for count in ("4", "64")},
    }


def experts_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    ours, theirs, dense_model = (speeds(rounds, name) for name in ("trainer", "eager", "dense"))
    yield ratio_line("tokens/s, 8 experts / PyTorch's loop over experts", 1.6, ours, theirs, "tokens/s")
    yield ratio_line("tokens/s, 8 experts / dense of equal active weights", 0.95, ours, dense_model, "tokens/s")
    many, few = ([each[f"experts {count}"].steady_step_seconds for each in rounds] for count in (64, 4))
    yield ratio_line("step, 64 / 4 experts", 1.25, many, few, "s", at_least=False)


def memory(run: Programs) -> Figures:
    return {"trainer": run.train(_VOCABULARY, steps=SETTLING_STEPS + 2)}


def memory_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    peak = peaks(rounds, "trainer")
    detail = f"{mib(peak)} / {mib(VOCABULARY_PEAK_BEFORE)}"
    yield Line("peak memory, vocabulary 32,768, against before", peak / VOCABULARY_PEAK_BEFORE, 0.6, False, detail)


def lora(run: Programs) -> Figures:
    return {"trainer": run.train(LORA), "full": run.train({}), **run.before(LORA)}


def lora_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    yield steps_line("step, LoRA / all weights trained", 0.75, rounds, "full")
    yield before_line("LoRA", 1.3, rounds)
    first = statistics.median(each["trainer"].first_step_seconds for each in rounds)
    yield Line("first step with LoRA, seconds", first, 1.0, False, "after the import")


def lora_memory(run: Programs) -> Figures:
    return {"trainer": run.train(_LORA_QWEN3, steps=SETTLING_STEPS + 2)}


def lora_memory_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    name, detail = "peak memory, LoRA of Qwen3-0.6B, GiB", "512 tokens in float32"
    yield Line(name, peaks(rounds, "trainer") / (1 << 30), LORA_QWEN3_PEAK_OF_PEFT / (1 << 30), False, detail)


def base_dtypes(run: Programs) -> Figures:
    figures: Figures = {"float32": run.train(_LORA_QWEN3, steps=SETTLING_STEPS + 3)}
    for dtype in BASE_DTYPE_PEAKS:
        keys = _LORA_QWEN3 | HALF | {"model.model_config.pet_config.base_dtype": dtype}
        figures[dtype] = run.train(keys, steps=SETTLING_STEPS + 3)
    return figures


def base_dtypes_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    for dtype, limit in BASE_DTYPE_PEAKS.items():
        yield Line(f"peak memory, LoRA of Qwen3-0.6B on {dtype}, GB", peaks(rounds, dtype) / 1e9, limit / 1e9, False,
                   f"512 tokens, products in bfloat16; float32 {peaks(rounds, 'float32') / 1e9:.2f} GB")  # fmt: skip
        ours, theirs = speeds(rounds, dtype), speeds(rounds, "float32")
        yield ratio_line(f"tokens/s, LoRA of Qwen3-0.6B on {dtype} / float32", 0.8, ours, theirs, "tokens/s")


def large(run: Programs) -> Figures:
    touch_memory(_LARGE_MEMORY)
    return {"trainer": run.train(QWEN3, steps=SETTLING_STEPS + 3)}


def large_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    first, later = ([getattr(each["trainer"], name) for each in rounds]
                    for name in ("first_step_seconds", "steady_step_seconds"))  # fmt: skip
    yield ratio_line("first step / a later one, Qwen3-0.6B", 1.5, first, later, "s", at_least=False)


def latent(run: Programs) -> Figures:
    return {"trainer": run.train(LATENT), "heads": run.train({}), **run.before(LATENT)}


def latent_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    yield steps_line("step, latent attention / heads of 32", 1.0, rounds, "heads")
    yield before_line("latent attention", 1.2, rounds)


def dropout(run: Programs) -> Figures:
    return {"trainer": run.train(DROPOUT), "without": run.train({}), **run.before(DROPOUT)}


def dropout_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    yield steps_line("step, dropout of sublayers and attention / none", 1.2, rounds, "without")
    yield before_line("dropout", 1.2, rounds)


def prediction(run: Programs) -> Figures:
    program, options = ROOT / "scripts" / "benchmark_generate.py", run.options
    ours = run_json([sys.executable, program, "--config", DENSE, "--rows", *map(str, _ROWS)])
    theirs = torch_report(options.torch_python, torch_sizes(load_config(DENSE, [])), "generate", options.threads,
                          "--rows", *map(str, _ROWS))  # fmt: skip
    found = {f"{side} {rows} {name}": statistics.median(seconds)
             for side, report in (("trainer", ours), ("eager", theirs))
             for rows, by_name in report.items() for name, seconds in by_name.items()}  # fmt: skip
    return found


def prediction_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    for rows, limit in zip(_ROWS, (1.7, 1.5), strict=True):
        ours, theirs = ([each[f"{side} {rows} decode"] for each in rounds] for side in ("eager", "trainer"))
        yield ratio_line(f"tokens/s, prediction of {rows} / PyTorch eager", limit, ours, theirs, "s, PyTorch / trainer")
    most, length = max(_ROWS), load_config(DENSE, []).decoder.seq_length
    # A prompt has half of the tokens of what is evaluated.
    prompt, evaluation = ([length * share / each[f"trainer {most} {name}"] * most for each in rounds]
                          for name, share in (("prompt", 0.5), ("evaluation", 1.0)))  # fmt: skip
    yield ratio_line("tokens/s, prompts / evaluation", 1.0, prompt, evaluation, "tokens/s")


def watching(run: Programs) -> Figures:
    costs = run_json([sys.executable, ROOT / "scripts" / "benchmark_watching.py"])
    step = run.train({}).steady_step_seconds
    share = (costs["own"] + costs["others"] / run.options.threads) / step + costs["report"] / 30 / run.options.threads
    return {"share": share, "step": step, **costs}


def watching_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    def middle(name: str) -> float:
        return statistics.median(each[name] for each in rounds)

    detail = (f"a step of {middle('step'):.2f} s: {middle('own') * 1e6:.0f} us, other threads "
              f"{middle('others') * 1e6:.0f} us; report.html {middle('report') * 1e3:.0f} ms every 30 s")  # fmt: skip
    yield Line("share of a step, lines, metrics, TensorBoard, report", middle("share"), 0.005, False, detail)


def start(run: Programs) -> Figures:
    program = [sys.executable, run.options.trainer]
    commands = {"help": [*program, "--help"], "plan": [*program, "plan", "--config", DENSE]}
    return {name: min(cpu_seconds(command) for _ in range(5)) for name, command in commands.items()}


def start_lines(rounds: Sequence[Figures]) -> Iterator[Line]:
    for name, limit in (("help", 0.3), ("plan", 0.5)):
        seconds = [each[name] for each in rounds]
        detail = f"best of 5 in {len(seconds)} rounds"
        yield Line(f"CPU seconds of {name}", statistics.median(seconds), limit, False, detail)


_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
         "ATEN_CPU_CAPABILITY": "avx2"}  # fmt: skip
"""Environment of both sides, in which their libraries compute as on a processor without AVX-512."""
AVX2_LIMITS = {
    "tokens/s, float32 / torch.compile": 1.15, "tokens/s, float32 / PyTorch eager": 1.15,
    "tokens/s, bfloat16 / torch.compile with autocast": 1.0,
    "tokens/s, 8 layers of 512, seq 512 / PyTorch eager": 1.3,
    "tokens/s, 8 experts / PyTorch's loop over experts": 1.3, "tokens/s, prediction of 1 / PyTorch eager": 1.5,
    "tokens/s, prediction of 8 / PyTorch eager": 1.3, "share of the float32 product peak": 0.6,
    **PEER_AVX2_LIMITS,
}  # fmt: skip
"""Limits with --isa avx2 that differ from those of `GROUPS`, by the name of the line."""

GROUPS = {
    "dense": Group(dense, dense_lines, needs_torch=True), "bfloat16": Group(half, half_lines, needs_torch=True),
    "wide": Group(wide, wide_lines, needs_torch=True), "experts": Group(experts, experts_lines, needs_torch=True),
    "lora": Group(lora, lora_lines), "lora_memory": Group(lora_memory, lora_memory_lines),
    "base_dtypes": Group(base_dtypes, base_dtypes_lines),
    "large": Group(large, large_lines), "latent": Group(latent, latent_lines), "dropout": Group(dropout, dropout_lines),
    "memory": Group(memory, memory_lines), "prediction": Group(prediction, prediction_lines, needs_torch=True),
    "start": Group(start, start_lines), "watching": Group(watching, watching_lines),
    **PEER_GROUPS, **PREFERENCE_GROUPS,
}  # fmt: skip


_VERSIONS = """
import importlib.metadata, json
names = {"torch", "transformers", "peft", "trl"}
found = {each.name: each.version for each in importlib.metadata.distributions() if each.name in names}
print(json.dumps(found))
"""


def targets(options: argparse.Namespace, console: Console) -> int:
    rounds: dict[str, list[Figures]] = {name: [] for name in options.only}
    limits: Mapping[str, float] = {}
    if options.isa == "avx2":
        os.environ.update(_AVX2)
        limits = AVX2_LIMITS
    machine: dict[str, str] = {}
    if any(GROUPS[name].needs_torch for name in options.only):
        if options.torch_python is None:
            raise RunFailed("these groups compare with PyTorch: give --torch_python, or others with --only")
        machine = _versions(options.torch_python)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
        run = programs(options, cache)
        for number in range(1, options.rounds + 1):
            for name, found in rounds.items():
                console.print(f"round {number} of {options.rounds}: {name}")
                found.append(GROUPS[name].measure(run))
    lines = [line for name, found in rounds.items() for line in GROUPS[name].lines(found)]
    lines = [replace(line, limit=limits.get(line.name, line.limit)) for line in lines]
    return conclude(
        "targets", "Figures and their targets", lines, console,
        machine=machine | {"isa": options.isa},
        rounds={name: [_plain(figures) for figures in found] for name, found in rounds.items()},
    )  # fmt: skip


def _plain(figures: Figures) -> dict[str, Any]:
    return {name: asdict(value) if isinstance(value, Measurement) else value for name, value in figures.items()}


def _versions(python: str) -> dict[str, str]:
    """Returns the versions of the packages that the other programs need, of those that the environment has."""
    return run_json([python, "-c", _VERSIONS])


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("targets", help="a figure or two of everything, against its target")
    command.add_argument("--torch_python", help="the Python of an environment with torch, for groups that need one;"
                         " some also need transformers, peft and trl")
    command.add_argument("--trainer", type=Path, default=ROOT / "run_trainer.py", help="the program to measure")
    command.add_argument("--before", type=Path, help="that of an earlier checkout, for groups that compare with one")
    command.add_argument("--rounds", type=int, default=1, help="alternating runs of each side")
    command.add_argument("--steps", type=int, default=12,
                         help=f"steps a run; the first {1 + SETTLING_STEPS} are not counted")
    command.add_argument("--threads", type=int, default=usable_cores(), help="threads of PyTorch")
    command.add_argument("--isa", choices=["native", "avx2"], default="native",
                         help="avx2: both sides compute as on a processor without AVX-512, with limits for it")
    command.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="groups of figures")
