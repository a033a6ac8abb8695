#!/usr/bin/env python3
"""Checks `plan --search` against step times on CPUs, and against the layouts of MindSpore Transformers' own files.

    python scripts/check_search.py                               # 8 layouts of a tiny model on 2 and 4 ranks, after
                                                                 # runs of another model that measure the machine
    python scripts/check_search.py --files a.yaml b.yaml         # where published layouts stand among the candidates

The published files are those of https://github.com/mindspore-ai/mindformers, for example
`configs/qwen3_moe/pretrain_qwen3_30b_a3b_4k.yaml`. Exit code 1: the rank correlation of estimates and measured times is
below 0.7.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PROGRAM = ROOT / "run_trainer.py"
LEAST_CORRELATION = 0.7
_STEPS = 8
_FIRST = 3  # steps before it are warm-up

MODEL = {
    "arch": {"type": "Qwen3ForCausalLM"},
    "model_config": {"num_layers": 4, "hidden_size": 256, "num_heads": 8, "n_kv_heads": 4, "intermediate_size": 768,
                     "vocab_size": 2048, "seq_length": 256},
}  # fmt: skip
LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"data_parallel": 2}, {}),
    (2, {"data_parallel": 1, "model_parallel": 2, "use_seq_parallel": True}, {}),
    (2, {"data_parallel": 1, "pipeline_stage": 2, "micro_batch_num": 8}, {}),
    (2, {"data_parallel": 2}, {"recompute_config": {"recompute": True}}),
    (4, {"data_parallel": 4}, {}),
    (4, {"data_parallel": 1, "model_parallel": 4, "use_seq_parallel": True}, {}),
    (4, {"data_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4}, {}),
    (4, {"data_parallel": 2, "model_parallel": 2, "use_seq_parallel": True}, {}),
]

MACHINE_MODEL = {"num_layers": 6, "hidden_size": 192, "num_heads": 4, "n_kv_heads": 4, "intermediate_size": 512,
                 "vocab_size": 1024, "seq_length": 192}  # fmt: skip
"""The model whose runs measure the machine's products and links before the order of `LAYOUTS` is estimated."""
MACHINE_LAYOUTS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"data_parallel": 2}, {}),
    (2, {"data_parallel": 1, "model_parallel": 2, "use_seq_parallel": True}, {}),
    (4, {"data_parallel": 4}, {}),
    (4, {"data_parallel": 1, "model_parallel": 4, "use_seq_parallel": True}, {}),
]


def configuration(degrees: dict[str, Any], sections: dict[str, Any], output_dir: str) -> dict[str, Any]:
    """Returns the file of a layout of the tiny model with a global batch of 8 sequences."""
    pipeline = degrees.get("pipeline_stage", 1) > 1
    accumulation = 1
    if not pipeline:
        accumulation = 8 // degrees["data_parallel"]
    return {
        "output_dir": output_dir, "use_parallel": True, "parallel": {"parallel_mode": 0}, "report": False,
        "context": {"device_target": "CPU"}, "parallel_config": degrees, "model": MODEL,
        "runner_config": {"batch_size": 1, "gradient_accumulation_steps": accumulation, "stop_step": _STEPS},
        "train_dataset": {"data_loader": {"type": "SyntheticDataset", "num_samples": 400}},
    } | sections  # fmt: skip


def measure_layouts(
    folder: Path, layouts: list[tuple[int, dict[str, Any], dict[str, Any]]]
) -> list[dict[str, Any]]:  # fmt: skip
    """Trains each layout for some steps; returns its configuration, ranks and seconds of a step."""
    folder.mkdir()
    runs = []
    for number, (ranks, degrees, sections) in enumerate(layouts):
        output = folder / str(number)
        file = folder / f"{number}.yaml"
        file.write_text(json.dumps(configuration(degrees, sections, str(output))), encoding="utf-8")
        command = [sys.executable, str(PROGRAM), "launch", "--nproc", str(ranks), "--config", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        seconds = [record["step_seconds"] for record in map(json.loads, lines) if "step_seconds" in record]
        runs.append({"config": str(file), "ranks": ranks, "seconds": statistics.median(seconds[_FIRST:])})
    return runs


def check_order(folder: Path) -> bool:
    """Prints estimated and measured times of the layouts; returns whether their order agrees."""
    from trainer.plan.search.hardware import Factors
    from trainer.plan.search.measured import Measurement, estimate_run, nearest_factors, rank_correlation

    model = {"model": {"arch": MODEL["arch"], "model_config": MACHINE_MODEL}}
    machine = [(ranks, degrees, sections | model) for ranks, degrees, sections in MACHINE_LAYOUTS]
    known = [Measurement(**run) for run in measure_layouts(folder / "machine", machine)]
    factors = nearest_factors([estimate_run(run, "CPU", Factors()) for run in known], [run.seconds for run in known])
    print(f"times of the rates' defaults on this machine: {factors}")
    runs = [Measurement(**run) for run in measure_layouts(folder / "layouts", LAYOUTS)]
    estimates = [estimate_run(run, "CPU", factors).seconds for run in runs]
    print(f"{'ranks':>5}  {'estimate':>9}  {'measured':>9}  layout")
    for (ranks, degrees, sections), run, estimate in zip(LAYOUTS, runs, estimates, strict=True):
        print(f"{ranks:>5}  {estimate * 1e3:>6.0f} ms  {run.seconds * 1e3:>6.0f} ms  {degrees} {sections or ''}")
    correlation = rank_correlation(estimates, [run.seconds for run in runs])
    print(f"rank correlation {correlation:.2f}, at least {LEAST_CORRELATION} is asked for")
    return correlation >= LEAST_CORRELATION


def check_files(files: list[str], ranks: int | None) -> None:
    """Prints where the layout of each file stands among the candidates on its own ranks."""
    from trainer.config import load_config
    from trainer.parallel.world import SINGLE_PROCESS
    from trainer.run.plan_file import world_from_degrees

    for file in files:
        number = ranks or world_from_degrees(load_config(file, [], []), SINGLE_PROCESS).size
        command = [sys.executable, str(PROGRAM), "plan", "--search", "--config", file, "--ranks", str(number), "--json"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        print(f"{Path(file).name}, {number} ranks")
        if done.returncode:
            print(f"  {done.stderr.strip()}")
            continue
        found = json.loads(done.stdout)
        print(f"  best: {text_of(found['best'][0])}")
        if found["file"]:
            print(f"  file: {text_of(found['file'])}; {found['file']['place']}")
        if found["schedule"]:
            print(f"  {found['schedule']}")


def text_of(layout: dict[str, Any]) -> str:
    """Returns degrees, memory and time of a layout."""
    names = ("data_parallel", "model_parallel", "pipeline_stage", "expert_parallel", "context_parallel",
             "pp_interleave_num", "pipeline_scheduler", "seq_split_num", "optimizer_level", "recompute", "batch_size",
             "micro_batches")  # fmt: skip
    parts = " ".join(f"{name} {layout[name]}" for name in names if layout[name] not in (1, "", "1f1b"))
    return f"{layout['step_seconds']:.3g} s, {layout['memory_bytes'] / 2**30:.1f} GiB, {parts}"


def main() -> int:
    """Runs the check that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=[], help="published files")
    parser.add_argument("--ranks", type=int, help="ranks of the published files instead of their own")
    arguments = parser.parse_args()
    if arguments.files:
        check_files(arguments.files, arguments.ranks)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return int(not check_order(Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
