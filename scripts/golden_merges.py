#!/usr/bin/env python3
"""Makes tests/golden/merges.json: tensors that mergekit has merged.

    torch-env/bin/python scripts/golden_merges.py FOLDER            # writes the file
    torch-env/bin/python scripts/golden_merges.py FOLDER --check    # compares; exit code 1 on a difference

FOLDER is a checkout of https://github.com/arcee-ai/mergekit. The environment is that of make_golden.py with immutables
and pydantic, which mergekit imports.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import golden_merges_cases as cases  # noqa: E402  (beside the tests, which must run without torch)
from golden_distillation_cases import summary  # noqa: E402

TOLERANCE = 1e-6


def merge(case: cases.MergeCase) -> np.ndarray:
    """Returns what mergekit makes of the tensors of a case."""
    from mergekit.merge_methods.generalized_task_arithmetic import ConsensusMethod, GTATask
    from mergekit.merge_methods.linear import LinearMergeTask
    from mergekit.merge_methods.slerp import slerp
    from mergekit.sparsify import SparsificationMethod

    models = [torch.from_numpy(model) for model in cases.MODELS]
    if case.method == "slerp":
        return slerp(case.t, models[0], models[1]).numpy()
    names = [f"model {number}" for number in range(len(case.weights))]
    tensors = dict(zip(names, models, strict=False))
    weight_info = SimpleNamespace(name="tensor", is_embed=False)
    settings = {name: {"weight": weight, "density": case.density}
                for name, weight in zip(names, case.weights, strict=True)}  # fmt: skip
    # The tasks of mergekit with the arguments of the methods in its registry.
    if case.method == "linear":
        task = SimpleNamespace(tensor_parameters=settings, normalize=True, weight_info=weight_info)
        return LinearMergeTask.execute(task, tensors).numpy()
    is_ties = case.method == "ties"
    method = SimpleNamespace(consensus_method=None, sparsification_method=None)
    if is_ties:
        method = SimpleNamespace(
            consensus_method=ConsensusMethod.sum, sparsification_method=SparsificationMethod.magnitude
        )
    task = SimpleNamespace(
        method=method, base_model="base", weight_info=weight_info, tensor_parameters=SimpleNamespace(data=settings),
        int8_mask=False, normalize=is_ties, lambda_=case.scale, rescale_norm=None,
    )  # fmt: skip
    return GTATask.execute(task, {"base": torch.from_numpy(cases.BASE), **tensors}).numpy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.folder))
    merged = [summary(merge(case)) for case in cases.CASES]
    if arguments.check:
        failed = not np.allclose(merged, cases.load_results(), rtol=TOLERANCE, atol=TOLERANCE)
        print(f"{len(merged)} cases: {'different' if failed else 'equal'}")
        return int(failed)
    cases.PATH.write_text(json.dumps({"mergekit": "0.1.4, commit a6e40288", "merged": merged}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
