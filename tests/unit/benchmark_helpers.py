"""Programs that only pretend to train, and figures of runs, for tests of the benchmarks."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from benchmark_tools import Measurement  # noqa: E402

CONFIG = """
runner_config: {batch_size: 8}
model:
  arch: {type: LlamaForCausalLM}
  model_config: {type: LlamaConfig, num_layers: 4, hidden_size: 256, num_heads: 8, intermediate_size: 688,
                 vocab_size: 4096, seq_length: 256}
train_dataset: {data_loader: {type: SyntheticDataset}}
"""

# Steps take 0.5 s each after a first one of 3.5 s; more layers take longer to compile, more micro-batches more memory.
TRAINER = """
import json, sys
from pathlib import Path
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
layers = int(flags.get("--model.model_config.num_layers", 4))
memory = {memory} + 1000000 * int(flags.get("--gradient_accumulation_steps", 1))
with open(Path(flags["--output_dir"]) / "metrics.jsonl", "w") as file:
    for step in range(int(flags["--runner_config.stop_step"])):
        seconds = 3.4 + layers / 40 if step == 0 else 0.5
        line = {{"step": step + 1, "loss": 8.4, "step_seconds": seconds, "tokens": 2048, "peak_rss_bytes": memory}}
        file.write(json.dumps(line) + "\\n")
    file.write(json.dumps({{"step": step + 1, "eval_loss": 1.0}}) + "\\n")
"""
TORCH = """#!/bin/sh
case $1 in -c) echo '{{"torch": "2.0"}}'; exit;; esac
case "$*" in *compile*) seconds=0.4;; *) seconds={seconds};; esac
echo "a library says something"
echo '{{"step_seconds": [1.0, 9.0, 9.0, '$seconds', '$seconds'], "tokens_per_step": 2048, "peak_rss_bytes": 800000000,
"matmul_gflops": 90.0, "torch": "2.0", "python": "3.11", "first_loss": {loss}, "trained": {trained}}}' | tr -d '\\n'
echo
"""


def run(first: float = 3.5, steady: float = 0.5, peak: int = 1_000_000_000) -> Measurement:
    return Measurement(first, steady, 2048 / steady, peak)


def programs(
    folder: Path, *, torch_seconds: float = 0.5, memory: int = 900_000_000, loss: float = 8.4, trained: int = 0
) -> list[str]:
    """Writes a trainer and a Python with torch that only pretend, and returns the flags that use them."""
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "trainer.py").write_text(TRAINER.format(memory=memory))
    python = folder / "torch_python"
    python.write_text(TORCH.format(seconds=torch_seconds, loss=loss, trained=trained))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return ["dense", "--config", str(folder / "config.yaml"), "--trainer", str(folder / "trainer.py"),
            "--torch_python", str(python), "--rounds", "2", "--steps", "5", "--no_bare"]
