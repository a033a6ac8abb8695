"""Checkpoints of divided models: the files of one rank, whoever writes them, and they resume with any other degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_job import on_rank_processes

from trainer.checkpoint.verify import verify

ONE: dict[str, Any] = {}
TENSOR = {"model_parallel": 4, "data_parallel": 1}
TENSOR_AND_DATA = {"model_parallel": 2, "data_parallel": 2, "use_seq_parallel": True}
STAGES = {"pipeline_stage": 2, "model_parallel": 2, "data_parallel": 1, "micro_batch_num": 2}
EXPERTS = {"expert_parallel": 2, "data_parallel": 4}
TENSOR_AND_EXPERTS = {"expert_parallel": 4, "model_parallel": 2, "data_parallel": 2}
CONTEXT = {"context_parallel": 2, "data_parallel": 2}
SHARED = {"data_parallel": 4, "shared": True}
TWO_STAGES = {"pipeline_stage": 2, "data_parallel": 1, "micro_batch_num": 2}
TWO_TENSOR, TWO_EXPERTS = {"model_parallel": 2, "data_parallel": 1}, {"expert_parallel": 2, "data_parallel": 2}
TWO_SHARED = {"data_parallel": 2, "shared": True}

# Of each model, what writes the initial weights, and what resumes from which of these.
WRITTEN = {
    "dense": {"tensor": TENSOR, "tensor and data": TENSOR_AND_DATA, "stages": STAGES, "shared": SHARED,
              "context": CONTEXT},
    "experts": {"experts": EXPERTS, "tensor and experts": TENSOR_AND_EXPERTS, "stages": STAGES},
    "adapters": {"tensor": TENSOR, "stages": STAGES},
}  # fmt: skip
RESUMED = {
    4: [("dense", TENSOR_AND_DATA, "one"), ("dense", SHARED, "tensor"), ("experts", STAGES, "tensor and experts"),
        ("adapters", TENSOR_AND_DATA, "one")],
    2: [("dense", TWO_TENSOR, "shared"), ("dense", TWO_SHARED, "stages"), ("dense", TWO_STAGES, "tensor and data"),
        ("experts", TWO_EXPERTS, "stages"), ("experts", TWO_TENSOR, "experts"), ("adapters", TWO_STAGES, "tensor")],
    1: [("dense", ONE, "shared"), ("dense", ONE, "tensor"), ("experts", ONE, "tensor and experts"),
        ("adapters", ONE, "stages")],
}  # fmt: skip


def files_of(folder: Path) -> dict[str, bytes]:
    (step,) = folder.glob("step-*")
    return {path.name: path.read_bytes() for path in step.iterdir()}


def test_any_degrees_write_the_files_of_one_rank_and_resume_them(tmp_path: Path) -> None:
    first = [(model, ONE, "", str(tmp_path / model / "one")) for model in WRITTEN]
    on_rank_processes(1, "checkpoint_cases:resaved", first)
    jobs = [(model, degrees, "", str(tmp_path / model / name))
            for model, layouts in WRITTEN.items() for name, degrees in layouts.items()]  # fmt: skip
    for ranks, resumed in RESUMED.items():
        jobs += [(model, degrees, str(tmp_path / model / source / "step-00000003"),
                  str(tmp_path / model / f"{ranks} ranks from {source}"))
                 for model, degrees, source in resumed]  # fmt: skip
        on_rank_processes(ranks, "checkpoint_cases:resaved", jobs)
        jobs = []
    for model in WRITTEN:
        expected = files_of(tmp_path / model / "one")
        assert {"COMPLETE", "optimizer.safetensors", "state.json"} < expected.keys()
        folders = list((tmp_path / model).iterdir())
        resumed = sum(name == model for of_ranks in RESUMED.values() for name, *_ in of_ranks)
        assert len(folders) == 1 + len(WRITTEN[model]) + resumed
        for folder in folders:
            found = files_of(folder)
            assert found.keys() == expected.keys(), folder
            assert not [name for name in found if found[name] != expected[name]], folder
        assert not verify(folders[-1])[0].problem


def test_a_rank_that_is_killed_leaves_no_checkpoint_and_the_next_save_clears_up(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 lost its connection to rank 1"):
        on_rank_processes(2, "checkpoint_cases:killed", TWO_TENSOR, str(tmp_path))
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-step-00000003-") and (left / "optimizer.safetensors").exists()
    (found,) = verify(left)
    assert "COMPLETE" in found.problem
    on_rank_processes(2, "checkpoint_cases:resaved", [("dense", TWO_TENSOR, "", str(tmp_path))])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
