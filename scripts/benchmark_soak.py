"""`benchmark.py soak`: memory, open files and threads of a process over thousands of steps.

Each case trains a tiny model, or predicts with one, in a process of its own, where what a step leaves behind is not
hidden by the memory of the model. A step of a prediction is a token. Measured is the process as the operating system
and the C library see it: private dirty memory, heap, file descriptors, threads.
Started as a program it runs one case and prints one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from benchmark_tools import Line, RunFailed, conclude, last_json, run_process  # noqa: E402

from trainer.config import Override, parse_config  # noqa: E402
from trainer.monitors.metrics import Monitor, StepMetrics  # noqa: E402

_MIB = 1 << 20
EVERY = 100  # steps between samples
TINY = {
    "run_mode": "train",
    "report": False,
    "model": {"arch": {"type": "LlamaForCausalLM"},
              "model_config": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64,
                               "vocab_size": 64, "seq_length": 16}},
    "train_dataset": {"data_loader": {"type": "SyntheticDataset", "num_samples": 64}},
    "runner_config": {"epochs": 100000, "batch_size": 2},
    "callbacks": [{"type": "MFLossMonitor", "per_print_times": 1000}],
}
_EXPERTS = ("{expert_num: 4, num_experts_chosen: 2, moe_intermediate_size: 32, use_gmm: True, aux_loss_factor: 0.01, "
            "z_loss_factor: 0.001}")
_EVALUATION = {"do_eval": "True", "eval_step_interval": str(EVERY),
               "eval_dataset": "{data_loader: {type: SyntheticDataset, num_samples: 16}}"}
_PREDICTION = {"run_mode": "predict", "predict_data": "a"}
_LATENT = {"multi_latent_attention": "True", "kv_lora_rank": "8", "qk_nope_head_dim": "8", "qk_rope_head_dim": "4",
           "v_head_dim": "8", "max_position_embeddings": "64"}
CASES: dict[str, dict[str, str]] = {
    "dense": {},
    "experts": {"model.model_config.moe_config": _EXPERTS},
    "accumulation 4": {"runner_config.gradient_accumulation_steps": "4"},
    "evaluation every 100 steps": _EVALUATION,
    "recomputation": {"recompute_config.recompute": "True"},
    "experts, recomputation": {"model.model_config.moe_config": _EXPERTS, "recompute_config.recompute": "True"},
    "adapters, dropout": {"model.model_config.pet_config": "{lora_rank: 2, lora_dropout: 0.1, "
                                                           "target_modules: '.*wq|.*wv'}"},
    "float16, dynamic loss scale": {
        "model.model_config.compute_dtype": "float16",
        "runner_wrapper.scale_sense": "{type: DynamicLossScaleUpdateCell, loss_scale_value: 1024}",
    },
    "experts, accumulation, evaluation": {
        "model.model_config.moe_config": _EXPERTS, "runner_config.gradient_accumulation_steps": "2", **_EVALUATION,
    },
    "prediction": _PREDICTION,
    "prediction, experts": {"model.model_config.moe_config": _EXPERTS, **_PREDICTION},
    "prediction, latent attention": {
        **{f"model.model_config.{key}": value for key, value in _LATENT.items()}, **_PREDICTION,
    },
}


class Sample(NamedTuple):
    """The figures of this process from the operating system and the C library."""

    step: int
    private_bytes: int  # private dirty memory: what the process has written and shares with nobody
    heap_bytes: int  # what malloc has handed out and not got back
    files: int  # open file descriptors
    threads: int


class _HeapInfo(ctypes.Structure):
    """Mirrors `struct mallinfo2` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def sample(step: int) -> Sample:
    library = ctypes.CDLL(None)
    # Memory that the compilation has freed counts as the process's until it is given back: what leaks would fill it
    # first, and be seen only later.
    library.malloc_trim(0)
    library.mallinfo2.restype = _HeapInfo
    heap = library.mallinfo2()
    fields = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return Sample(step, 1024 * int(fields["Private_Dirty:"]), heap.uordblks + heap.hblkhd, files, threads)


class SoakMonitor(Monitor):
    """Samples the process at a fixed number of steps, from the end of the warm-up on."""

    def __init__(self, warm_up: int, every: int) -> None:
        self.warm_up, self.every = warm_up, every
        self.samples: list[Sample] = []

    def on_step(self, metrics: StepMetrics) -> None:
        if metrics.step >= self.warm_up and (metrics.step - self.warm_up) % self.every == 0:
            self.samples.append(sample(metrics.step))


class Growth(NamedTuple):
    """The differences between the first sample and the last one."""

    steps: int
    bytes_a_step: float
    heap_bytes_a_step: float
    files: int
    threads: int


def growth(samples: Sequence[Sequence[int]]) -> Growth:
    first, last = Sample(*samples[0]), Sample(*samples[-1])
    steps = last.step - first.step
    return Growth(steps, (last.private_bytes - first.private_bytes) / steps,
                  (last.heap_bytes - first.heap_bytes) / steps, last.files - first.files, last.threads - first.threads)


def soak_lines(name: str, found: Growth) -> list[Line]:
    detail = (f"{found.bytes_a_step * found.steps / _MIB:.2f} MiB in {found.steps} steps; the heap "
              f"{1000 * found.heap_bytes_a_step / _MIB:.3f} MiB per 1,000 steps")
    more = f"{found.files:+d} files, {found.threads:+d} threads"
    return [Line(f"{name}: MiB per 1,000 steps", 1000 * found.bytes_a_step / _MIB, 1, False, detail),
            Line(f"{name}: more files or threads", max(found.files, found.threads), 0, False, more)]


def train(flags: Mapping[str, str], steps: int, warm_up: int, every: int = EVERY) -> list[Sample]:
    """Trains the tiny model in this process."""
    from trainer.run.loop import run

    monitor = SoakMonitor(warm_up, every)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        own = {"output_dir": folder, "runner_config.stop_step": str(warm_up + steps), **flags}
        run(parse_config("soak", json.dumps(TINY), [Override(key, text, "soak") for key, text in own.items()]),
            [monitor])
    return monitor.samples


def predict(flags: Mapping[str, str], tokens: int, warm_up: int, every: int = EVERY) -> list[Sample]:
    """Predicts with the tiny model in this process: ten tokens after each pair of prompts, whose lengths change."""
    from trainer.models.generate import Generator, Sampling
    from trainer.run.session import open_session

    overrides = [Override(key, text, "soak") for key, text in flags.items()]
    session = open_session(parse_config("soak", json.dumps(TINY), overrides))
    generator, samples, done = Generator(session.model, session.build_inputs, []), [], 0
    while done <= warm_up + tokens:
        if done >= warm_up and (done - warm_up) % every == 0:
            samples.append(sample(done))
        prompts = [[1] * (1 + done // 10 % 5), [2] * (1 + done // 50 % 5)]
        done += sum(1 for _ in generator.stream(prompts, [10, 10], Sampling(do_sample=True)))
    return samples


def soak(options: argparse.Namespace, console: Any) -> int:
    lines, runs = [], {}
    unknown = set(options.cases) - CASES.keys()
    if unknown:
        raise RunFailed(f"no case {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    for name in options.cases or CASES:
        console.print(f"{name}: {options.warm_up} and {options.steps} steps")
        text = run_process([sys.executable, __file__, "--flags", json.dumps(CASES[name]),
                            "--steps", str(options.steps), "--warm_up", str(options.warm_up)])
        runs[name] = last_json(text)["samples"]
        lines += soak_lines(name, growth(runs[name]))
    return conclude("soak", "Growth of a process", lines, console, runs=runs)


def add_command(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("soak", help="memory, files and threads of a process over thousands of steps")
    command.add_argument("--steps", type=int, default=3000, help="steps after the warm-up")
    command.add_argument("--warm_up", type=int, default=300, help="steps that do not count")
    command.add_argument("--cases", nargs="*", default=[], help="some of the cases by name; default: all")
    command.set_defaults(rounds=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flags", type=json.loads, required=True)
    parser.add_argument("--then", type=json.loads, nargs="*", default=[], help="predictions after it")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm_up", type=int, required=True)
    parser.add_argument("--every", type=int, default=EVERY, help="steps between samples")
    options = parser.parse_args()
    counts = options.steps, options.warm_up, options.every
    run = predict if options.flags.get("run_mode") == "predict" else train
    samples = run(options.flags, *counts)
    print(json.dumps({"samples": samples, "then": [predict(flags, *counts) for flags in options.then]}))


if __name__ == "__main__":
    main()
