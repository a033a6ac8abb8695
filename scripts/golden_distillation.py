#!/usr/bin/env python3
"""Makes tests/golden/distillation.json: what PyTorch computes of golden models that teach each other.

    torch-env/bin/python scripts/golden_distillation.py            # writes the file
    torch-env/bin/python scripts/golden_distillation.py --check    # compares; exit code 1 on a difference

The environment is that of make_golden.py. The loss is written with functions of PyTorch alone: a cross entropy, and
torch.nn.functional.kl_div of the logits over the temperature, both means over the tokens that have a label.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden_models import IGNORE_INDEX, forward
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import golden_distillation_cases as cases  # noqa: E402  (beside the tests, which must run without torch)

TOLERANCE = 1e-5


def load_model(name: str, folder: Path) -> tuple[torch.nn.Module, Any]:
    """Returns a golden model of transformers, and its case."""
    case = cases.write_model(name, folder / name)
    how = {"output_loading_info": True, "attn_implementation": "eager", "dtype": torch.float32}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder / name, **how)
    problems = {kind: sorted(names) for kind, names in info.items() if names}
    if problems:
        raise SystemExit(f"{name}: {problems}")
    return model.eval(), case


def compute(case: cases.DistillationCase, folder: Path) -> dict[str, Any]:
    """Returns the numbers of a case."""
    student, own = load_model(case.student, folder)
    teacher, _ = load_model(case.teacher, folder)
    batch = {name: getattr(own, name) for name in ("input_ids", "labels", "positions", "segment_ids")}
    labels = torch.from_numpy(own.labels).long().flatten()
    counts = labels != IGNORE_INDEX
    logits = forward(student, batch).flatten(0, 1)[counts]
    with torch.no_grad():
        taught = forward(teacher, batch).flatten(0, 1)[counts]
    loss = functional.cross_entropy(logits, labels[counts])
    log_probabilities = functional.log_softmax(logits / case.temperature, -1)
    target = functional.log_softmax(taught / case.temperature, -1)
    kl = functional.kl_div(log_probabilities, target, reduction="batchmean", log_target=True)
    total = (1 - case.alpha) * loss + case.alpha * case.temperature**2 * kl
    total.backward()
    gradients = {name: cases.summary(weight.grad.numpy()) for name, weight in student.named_parameters()}
    if case.temperature**2 * kl < 0.1 or min(norm for norm, _ in gradients.values()) < 1e-3:
        raise SystemExit(f"{case}: nothing to learn (kl {float(kl):.2g})")
    numbers = {"loss": loss, "kl": kl, "total": total}
    return {name: float(value.detach()) for name, value in numbers.items()} | {"gradients": gradients}


def flatten(result: dict[str, Any]) -> np.ndarray:
    """Returns all numbers of a case."""
    return np.array([result["loss"], result["kl"], result["total"], *sum(result["gradients"].values(), [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = [compute(case, Path(folder)) for case in cases.CASES]
    if arguments.check:
        pairs = zip(results, cases.load_results(), strict=True)
        failed = sum(not np.allclose(flatten(ours), flatten(known), rtol=TOLERANCE, atol=TOLERANCE)
                     for ours, known in pairs)  # fmt: skip
        print(f"{len(results)} cases, {failed} differences")
        return int(failed > 0)
    content = {"transformers": transformers.__version__, "torch": torch.__version__, "cases": results}
    cases.PATH.write_text(json.dumps(content) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
