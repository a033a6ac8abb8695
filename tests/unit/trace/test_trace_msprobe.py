"""Dumps of msprobe whose stages count their own layers, and what of a dump is not matched: each kind is named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.errors import UserError
from trainer.trace.compare import compare_traces
from trainer.trace.folder import Trace, read_trace
from trainer.trace.message import comparison_lines
from trainer.trace.msprobe import read_dump
from trainer.trace.record import Key, TraceWriter, write_manifest
from trainer.trace.sketch import whole_place

TOKENS, WIDTH = 4, 6
ROOT = "Cell.network.model.decoder.layers"
MODULE = "Cell.network.model.mtp.layers.0"
OUTPUT = "mlp.MLP.forward.0"


def output_of(layer: int, sequence: str) -> np.ndarray:
    """Returns what the feed-forward sublayer of a layer adds to a sequence, [T, D]."""
    seed = 10 * layer + ord(sequence)
    return np.random.default_rng(seed).standard_normal((TOKENS, WIDTH)).astype(np.float32)


def right_trace(folder: Path, sequences: Sequence[str] = ("a",), modules: int = 1) -> Trace:
    """Returns the trace of one step of three layers, of which the last ones are modules of multi-token prediction."""
    facts = {"ranks": 1, "layers": 3, "summands": 8, "compute_dtype": "float32", "learning_rates": [0.1]}
    folder.mkdir()
    write_manifest(folder, facts)
    writer = TraceWriter(folder, 0)
    for layer in range(3):
        for sequence in sequences:
            array = output_of(layer, sequence)
            writer.add(Key(1, "activation", f"model.layers.{layer}.mlp", sequence), array, whole_place(array.shape))
            key = Key(1, "activation", f"model.layers.{layer}.self_attn.o_proj.input", sequence)
            writer.add(key, array, whole_place(array.shape))
    weight = np.ones(WIDTH, np.float32)
    writer.add(Key(1, "weight", "model.norm.weight"), weight.reshape(-1, 1), whole_place(weight.shape))
    for layer in range(3 - modules, 3):
        key = Key(1, "weight", f"model.layers.{layer}.enorm.weight")
        writer.add(key, weight.reshape(-1, 1), whole_place(weight.shape))
    writer.close({"coordinate": {"pipeline": 0, "data": 0}, "micro_batches": [[list(sequences)]]})
    return read_trace(folder, "a test")


def described(array: np.ndarray) -> dict[str, Any]:
    return {
        "dtype": "Float32", "shape": list(array.shape), "Max": float(array.max()), "Min": float(array.min()),
        "Mean": float(array.mean()), "Norm": float(np.linalg.norm(array)),
    }  # fmt: skip


def forward(output: np.ndarray, **parameters: np.ndarray) -> dict[str, Any]:
    """Returns the entry of a module."""
    entry: dict[str, Any] = {"input_args": [described(output)], "output": [described(output)]}
    if parameters:
        entry["parameters"] = {name: described(array) for name, array in parameters.items()}
    return entry


def write_dump(folder: Path, ranks: Sequence[Mapping[str, Any]], step: int = 0) -> None:
    for rank, entries in enumerate(ranks):
        path = folder / f"step{step}" / f"rank{rank}"
        path.mkdir(parents=True)
        (path / "dump.json").write_text(json.dumps({"data": entries}))


def lines_of(right: Trace, dump: Path) -> list[str]:
    return comparison_lines(compare_traces(right, read_dump(dump, right)))


def by_step(layer: int, sequences: str = "a") -> np.ndarray:
    """Returns the output of a layer for a micro-batch as Megatron-LM has it, [T, B, D]."""
    return np.stack([output_of(layer, sequence) for sequence in sequences], axis=1)


def test_stages_with_layers_of_their_own_and_a_module_of_multi_token_prediction(tmp_path: Path) -> None:
    ones = np.ones(WIDTH, np.float32)
    ranks = [
        {f"{ROOT}.0.{OUTPUT}": forward(by_step(0))},
        {
            f"{ROOT}.0.{OUTPUT}": forward(by_step(1)),
            f"{MODULE}.transformer_layer.{OUTPUT}": forward(by_step(2)),
            f"{MODULE}.enorm.RMSNorm.forward.0": forward(by_step(2), weight=ones),
        },
    ]
    write_dump(tmp_path / "dump", ranks)
    right = right_trace(tmp_path / "right")
    dump = read_dump(tmp_path / "dump", right)
    comparison = compare_traces(right, dump)
    assert not comparison.differing
    assert {row.key.name for row in comparison.rows} == {
        "model.layers.0.mlp", "model.layers.1.mlp", "model.layers.2.mlp", "model.layers.2.enorm.weight",
    }  # fmt: skip
    ranks[1][f"{MODULE}.transformer_layer.{OUTPUT}"] = forward(2 * by_step(2))
    write_dump(tmp_path / "other", ranks)
    assert "layer 2, activation model.layers.2.mlp, rank 1: " in lines_of(right, tmp_path / "other")[0]


def test_global_numbers_of_layers_tell_the_stages_apart(tmp_path: Path) -> None:
    """Ranks of two stages are no replicas: both have computed the same sequence."""
    ranks = [{f"{ROOT}.{layer}.{OUTPUT}": forward(by_step(layer, "ab"))} for layer in range(2)]
    write_dump(tmp_path / "dump", ranks)
    right = right_trace(tmp_path / "right", "ab")
    comparison = compare_traces(right, read_dump(tmp_path / "dump", right))
    assert [row.layer for row in comparison.rows] == [0, 1] and not comparison.differing


def test_each_kind_that_is_not_matched_is_named(tmp_path: Path) -> None:
    matrix = np.ones((3 * WIDTH, WIDTH), np.float32)
    entries = {f"{ROOT}.{layer}.{OUTPUT}": forward(by_step(layer)) for layer in range(3)}
    for layer in range(3):
        entries[f"{ROOT}.{layer}.self_attention.linear_qkv.Linear.forward.0"] = forward(by_step(layer), weight=matrix)
        entries[f"{ROOT}.{layer}.input_layernorm.RMSNorm.forward.0"] = forward(by_step(layer))
    entries[f"{MODULE}.{OUTPUT}"] = forward(by_step(2))
    entries["Functional.add.0.forward"] = forward(by_step(0))
    write_dump(tmp_path / "dump", [entries])
    write_dump(tmp_path / "dump", [entries], step=1)
    lines = lines_of(right_trace(tmp_path / "right"), tmp_path / "dump")
    named = [line.removeprefix("not compared ") for line in lines if line.startswith("not compared")]
    assert named[0].startswith("only in the right trace: ")
    assert set(named[1:]) == {
        "model.layers.*.self_attn.linear_qkv (3); model.layers.*.self_attn.linear_qkv.weight (3): one matrix there,"
        " several in the right trace",
        "model.layers.*.input_layernorm (3): the right trace does not record this output",
        "network.model.mtp.layers.0.mlp: no module of the right trace has this name",
        "Functional.*: an API, not a module",
        "step1: the right trace ends with step 1",
    }


def test_parts_of_sequences_of_context_parallelism_are_not_taken_for_sequences(tmp_path: Path) -> None:
    """Two halves of two sequences have as many tokens as one sequence."""
    halves = by_step(0, "ab")[: TOKENS // 2]
    entries = {
        f"{ROOT}.0.self_attention.linear_proj.Linear.forward.0": forward(halves),
        f"{ROOT}.0.{OUTPUT}": forward(halves),
        "Cell.network.model.decoder.final_layernorm.RMSNorm.forward.0": forward(
            halves, weight=np.ones(WIDTH, np.float32)
        ),
    }
    write_dump(tmp_path / "dump", [entries, entries])
    lines = lines_of(right_trace(tmp_path / "right", "ab", 0), tmp_path / "dump")
    assert lines[0].startswith("same path    rounding explains every difference of 1 tensor")
    [line] = [line for line in lines if "context parallelism" in line]
    assert line == (
        "not compared model.layers.0.self_attn.o_proj.input; model.layers.0.mlp: context parallelism: a rank has 1/2 of"
        " the tokens of each sequence, and the dump does not say which"
    )
    del entries["Cell.network.model.decoder.final_layernorm.RMSNorm.forward.0"]
    write_dump(tmp_path / "other", [entries])
    with pytest.raises(UserError, match="none of its .* entries stands for .*context parallelism"):
        lines_of(right_trace(tmp_path / "again", "ab", 0), tmp_path / "other")


def test_a_damaged_dump_is_refused(tmp_path: Path) -> None:
    """A file of a tensor that ends early, entries that are no numbers or tables, and a dump without entries."""
    right = right_trace(tmp_path / "right")
    entry = forward(by_step(0))
    entry["output"][0]["data_name"] = "output.npy"
    write_dump(tmp_path / "file", [{f"{ROOT}.0.{OUTPUT}": entry}])
    folder = tmp_path / "file" / "step0" / "rank0" / "dump_tensor_data"
    folder.mkdir()
    np.save(folder / "output.npy", by_step(0))
    assert not compare_traces(right, read_dump(tmp_path / "file", right)).differing
    (folder / "output.npy").write_bytes((folder / "output.npy").read_bytes()[:-4])
    write_dump(tmp_path / "shape", [{f"{ROOT}.0.{OUTPUT}": {"output": [{"shape": ["x", WIDTH]}]}}])
    write_dump(tmp_path / "parameters", [{f"{ROOT}.0.{OUTPUT}": entry | {"parameters": [1]}}])
    for name in ("file", "shape", "parameters"):
        with pytest.raises(UserError, match="step0.*is damaged"):
            read_dump(tmp_path / name, right)
    write_dump(tmp_path / "list", [])
    (tmp_path / "list" / "step0" / "rank0").mkdir(parents=True)
    (tmp_path / "list" / "step0" / "rank0" / "dump.json").write_text('{"data": [1]}')
    with pytest.raises(UserError, match="cannot be read as a dump.json"):
        read_dump(tmp_path / "list", right)
