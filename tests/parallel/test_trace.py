"""Traces: faults are found in their layer and on their rank, clean runs give no alarm, dumps of msprobe are read.

scripts/check_trace.py has 20 faults and 50 clean comparisons; these are the cheap ones of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rank_job import on_rank_processes
from trace_cases import CLEAN_CASES, FAULT_CASES, Case, Fault, compare_case, folder_name, problem_of

from trainer.cli.main import dispatch
from trainer.errors import UserError
from trainer.launch.arguments import read_options
from trainer.trace.compare import Comparison, compare_traces, open_array
from trainer.trace.folder import Trace, read_trace
from trainer.trace.message import comparison_lines, row_text
from trainer.trace.msprobe import module_name, read_dump, scale_gradients
from trainer.trace.record import Piece

ALONE = [case for case in FAULT_CASES if case.layout == "alone"] + [
    Case(model, dtype="bfloat16", seed=1) for model in ("dense", "experts", "latent")
]
ON_TWO = [case for case in FAULT_CASES if case.ranks == 2] + [
    case for case in CLEAN_CASES if case.layout in ("context", "experts") and case.dtype == "float32"
] + [Case("side by side", "rows")]  # fmt: skip
TWO_STEPS = Case(seed=8, steps=2)
PLAIN, PLAIN_ON_TWO = Case(seed=9), Case(layout="tensor", seed=9)
SWAPPED_ON_TWO = Case(layout="tensor", seed=9, fault=Fault("swapped heads", 2, 1, "self_attn.o_proj.input"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of all cases, in one job for each number of ranks."""
    path = tmp_path_factory.mktemp("traces")
    cases = [*ALONE, *(case.right for case in (*ALONE, *ON_TWO)), TWO_STEPS, PLAIN]
    unique = {folder_name(case): case.to_json() for case in cases}
    on_rank_processes(1, "trace_cases:write_traces", list(unique.values()), str(path), "*")
    on_two = [case.to_json() for case in (*ON_TWO, PLAIN_ON_TWO, SWAPPED_ON_TWO)]
    on_rank_processes(2, "trace_cases:write_traces", on_two, str(path), "*")
    return path


@pytest.mark.parametrize("case", [*ALONE, *ON_TWO], ids=folder_name)
def test_a_fault_is_found_where_it_is_and_a_clean_run_gives_no_alarm(folder: Path, case: Case) -> None:
    assert problem_of(case, compare_case(folder, case)) == ""


def test_the_message_names_layer_tensor_rank_and_element(folder: Path) -> None:
    comparison = compare_case(folder, SWAPPED_ON_TWO)
    first = comparison_lines(comparison)[0]
    assert first.startswith(
        "first        step 1, layer 2, activation model.layers.2.self_attn.o_proj.input, rank 1: deviation "
    )
    largest = comparison.differing[0].largest
    assert largest is not None
    # Rank 1 has the second half of the columns. The element is that of the files.
    assert 16 <= largest.column < 32
    assert f"most at row {largest.row}, column {largest.column}: {largest.other:.6g}" in first
    assert [line.split()[0] for line in comparison_lines(comparison)[1:4]] == ["next"] * 3


def test_observing_changes_no_number(folder: Path) -> None:
    [plain] = on_rank_processes(1, "trace_cases:losses_without_a_trace", TWO_STEPS.to_json())
    trace = read_trace(folder / folder_name(TWO_STEPS), "trace")
    losses = [pieces[0].summary.mean for key, pieces in sorted(trace.pieces.items()) if key.name == "loss"]
    assert losses == [float(np.float32(loss)) for loss in plain]


def test_a_sequence_that_the_other_run_has_not_seen_is_an_error(folder: Path) -> None:
    right = read_trace(folder / folder_name(PLAIN), "right")
    with pytest.raises(UserError, match="no sequence of the batch is in both"):
        compare_traces(right, read_trace(folder / folder_name(TWO_STEPS), "other"))


def test_steps_with_other_sequences_are_named(folder: Path) -> None:
    right = read_trace(folder / folder_name(PLAIN), "right")
    sequence = right.micro_batches[0][0][0][0]
    right.pieces = {key: pieces for key, pieces in right.pieces.items() if key.sequence != sequence}
    comparison = compare_traces(right, read_trace(folder / folder_name(PLAIN_ON_TWO), "other"))
    assert comparison.batches[1][:3] == (3, 3, 4)
    assert len(comparison.batches[1].only_other) == 1
    assert {row.key.kind for row in comparison.rows} == {"weight", "activation"}
    assert comparison_lines(comparison)[0].startswith("batch        step 1: 3 sequences are in both traces, 3 in the")


def test_the_command_compares_folders_and_draws(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right = str(folder / folder_name(PLAIN))
    assert dispatch(["trace", "--output", right, "--against", str(folder / folder_name(PLAIN_ON_TWO))]) == 0
    assert capsys.readouterr().out.startswith("same path")
    assert dispatch(["trace", "--output", right, "--against", str(folder / folder_name(SWAPPED_ON_TWO))]) == 1
    page = (Path(right) / "report.html").read_text()
    data = json.loads(page.partition('id="data">')[2].partition("<")[0])
    assert len(data["lines"]) == 4 and [layer for layer, *_ in data["lines"][1]["points"]][-2:] == [2, 3]
    assert data["rows"][0][0] and "layers.2." in data["rows"][0][1]


def test_a_trace_that_is_there_is_not_replaced(folder: Path) -> None:
    right = folder / folder_name(PLAIN)
    arguments = ["trace", "--config", "configs/quickstart.yaml", "--output", str(right)]
    with pytest.raises(UserError, match="flag --output: .* is there already(.|\n)*add --force"):
        dispatch(arguments)
    with pytest.raises(UserError, match="is there already"):
        dispatch(["launch", "--nproc", "2", "--log_dir", str(folder / "log"), *arguments])
    assert (right / "trace.json").is_file()
    assert read_options(["--nproc", "2", *arguments, "--force"]).arguments[-1] == "--force"
    assert read_options(["--nproc", "2", "--force", *arguments]).force


@pytest.mark.parametrize(("arguments", "message"), [
    (["trace", "--output", "{}"], "there is nothing to do"),
    (["trace", "--output", "{}", "--against", "{}"], "is the folder of --output"),
    (["trace", "--output", "{}/a", "--against", "{}"], "has no trace.json"),
    (["trace", "--output", "{}", "--against", "{}", "--steps", "0"], "must be at least 1"),
    (["trace", "--output", "{}/a", "--against", "{}", "--full", "*"], "flag --full: has an effect on a record alone"),
    (["trace", "--output", "{}/a", "--against", "{}", "--batch_size", "4"], "flag --batch_size: has an effect"),
])  # fmt: skip
def test_mistakes_are_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        dispatch([argument.replace("{}", str(tmp_path)) for argument in arguments])


# ---- msprobe ---------------------------------------------------------------------------------------------------------

# Names in MindSpore Transformers' newer models and in Hugging Face's, by our names without the layer.
NAMES = {
    "self_attn": ("self_attention.SelfAttention", "self_attn.LlamaAttention"),
    "self_attn.o_proj": ("self_attention.linear_proj.RowParallelLinear", "self_attn.o_proj.Linear"),
    "mlp": ("mlp.MLP", "mlp.LlamaMLP"),
    "mlp.gate_proj": ("mlp.gate_proj.Linear", "mlp.gate_proj.Linear"),
    "": ("TransformerLayer", "LlamaDecoderLayer"),
}


def write_dump(trace: Trace, dump: Path, task: str, style: int, factor: float = 1.0) -> None:
    """Writes what msprobe would have dumped of a run, in the format of its documentation.

    Args:
        style: 0: names and [T, B, D] of MindSpore Transformers' newer models; 1: those of Hugging Face, [B, T, D].
        factor: On all gradients.
    """
    for rank, steps in trace.micro_batches.items():
        folder = dump / "step0" / f"rank{rank}"
        (folder / "dump_tensor_data").mkdir(parents=True)
        data: dict[str, Any] = {"Functional.add.0.forward": {"input_args": [], "output": []}}
        writer = DumpWriter(trace, rank, folder, task, style, factor)
        for call, sequences in enumerate(steps[0]):
            for layer in range(4):
                for name in NAMES:
                    data |= writer.entries(layer, name, call, sequences)
        facts = {"task": task, "level": "L0", "framework": "mindspore", "data": data}
        (folder / "dump.json").write_text(json.dumps(facts))


class DumpWriter(NamedTuple):
    """Writes the entries of a rank, see `write_dump`."""

    trace: Trace
    rank: int
    folder: Path
    task: str
    style: int
    factor: float

    def entries(self, layer: int, name: str, call: int, sequences: list[str]) -> dict[str, Any]:
        """Returns the entries of a module for a micro-batch."""
        module = f"model.layers.{layer}.{name}".removesuffix(".")
        root = ("network.model.decoder.layers", "model.layers")[self.style]
        entry = f"Cell.{root}.{layer}.{NAMES[name][self.style]}"
        forward = f"{entry}.forward.{call}"
        if name == "self_attn.o_proj":
            weight = find(self.trace, self.rank, "weight", f"{module}.weight", "")
            assert weight is not None
            described = describe(self.folder, open_array(weight), f"{forward}.parameters.weight", self.task)
            arguments = self.tensor("activation", f"{module}.input", sequences, f"{forward}.input.0")
            return {forward: {"input_args": arguments, "output": [], "parameters": {"weight": described}}}
        output = self.tensor("activation", module, sequences, f"{forward}.output.0")
        entries: dict[str, Any] = {forward: {"input_args": [], "output": output}}
        backward = f"{entry}.backward.{call}"
        gradient = self.tensor("activation gradient", module, sequences, f"{backward}.input.0", self.factor)
        if gradient:
            entries[backward] = {"input": gradient, "output": []}
        return entries

    def tensor(self, kind: str, name: str, sequences: list[str], entry: str, factor: float = 1.0) -> list[dict]:
        """Returns the description of a tensor of a micro-batch in a list, which is empty without it."""
        pieces = [find(self.trace, self.rank, kind, name, each) for each in sequences]
        if None in pieces:
            return []
        array = np.stack([open_array(piece) for piece in pieces if piece is not None])
        if self.style == 0:
            array = array.swapaxes(0, 1)
        return [describe(self.folder, np.float32(factor) * array, entry, self.task)]


def find(trace: Trace, rank: int, kind: str, name: str, sequence: str) -> Piece | None:
    for key, pieces in trace.pieces.items():
        if (key.step, key.kind, key.name, key.sequence) == (1, kind, name, sequence):
            return next((piece for piece in pieces if piece.rank == rank), None)
    return None


def describe(folder: Path, array: np.ndarray, name: str, task: str) -> dict[str, Any]:
    described = {
        "type": "mindspore.Tensor", "dtype": "Float32", "shape": list(array.shape), "Max": float(array.max()),
        "Min": float(array.min()), "Mean": float(array.mean()), "Norm": float(np.linalg.norm(array)),
    }  # fmt: skip
    if task == "tensor":
        described["data_name"] = f"{name}.npy"
        np.save(folder / "dump_tensor_data" / f"{name}.npy", array)
    return described


def compare_dump(folder: Path, case: Case, dump: Path) -> Comparison:
    right = read_trace(folder / folder_name(case.right), "right")
    other = read_dump(dump, right)
    scale_gradients(other, right)
    return compare_traces(right, other)


@pytest.mark.parametrize("task", ["tensor", "statistics"])
@pytest.mark.parametrize("style", [0, 1])
def test_a_dump_of_msprobe_is_a_trace(folder: Path, tmp_path: Path, task: str, style: int) -> None:
    for case in (PLAIN_ON_TWO, SWAPPED_ON_TWO):
        dump = tmp_path / folder_name(case)
        write_dump(read_trace(folder / folder_name(case), "dumped"), dump, task, style, factor=8.0)
        comparison = compare_dump(folder, case, dump)
        kinds = {row.key.kind for row in comparison.rows}
        assert kinds == {"activation", "activation gradient", "weight"}
        assert comparison.other.unmatched == {"Functional.*": "an API, not a module"}
        assert {row.by_statistics for row in comparison.rows} == {task == "statistics"}
        if case is PLAIN_ON_TWO:
            assert [row_text(row) for row in comparison.differing] == []
            continue
        first = comparison.differing[0]
        assert first.key.name == "model.layers.2.self_attn.o_proj.input"
        # Norms and means of shards are joined, so statistics cannot tell which rank it is.
        assert first.ranks == ((1,) if task == "tensor" else (0, 1))


def test_a_rank_that_has_dumped_no_shard_is_named(folder: Path, tmp_path: Path) -> None:
    write_dump(read_trace(folder / folder_name(PLAIN_ON_TWO), "dumped"), tmp_path / "dump", "tensor", 1)
    path = tmp_path / "dump" / "step0" / "rank1" / "dump.json"
    facts = json.loads(path.read_text())
    facts["data"] = {name: data for name, data in facts["data"].items() if "layers.3.self_attn.o_proj" not in name}
    path.write_text(json.dumps(facts))
    first = compare_dump(folder, PLAIN_ON_TWO, tmp_path / "dump").differing[0]
    assert (first.layer, first.ranks, first.lost) == (3, (1,), "no shard of rank 1")


def test_a_dump_without_modules_is_an_error(folder: Path, tmp_path: Path) -> None:
    rank = tmp_path / "step0" / "rank0"
    rank.mkdir(parents=True)
    (rank / "dump.json").write_text(json.dumps({"data": {"Functional.relu.0.forward": {"output": []}}}))
    right = read_trace(folder / folder_name(PLAIN), "right")
    with pytest.raises(UserError, match="none of its 1 entries stands for a tensor"):
        read_dump(tmp_path, right)
    (rank / "dump.json").write_text('{"data": ')
    with pytest.raises(UserError, match="cannot be read as a dump.json"):
        read_dump(tmp_path, right)


@pytest.mark.parametrize(("path", "name"), [
    ("model.layers.3.self_attn", "model.layers.3.self_attn"),
    ("network.model.decoder.layers.3.self_attention.linear_proj", "model.layers.3.self_attn.o_proj"),
    ("model.layers.0.attention.wo", "model.layers.0.self_attn.o_proj"),
    ("model.layers.0.feed_forward.w1", "model.layers.0.mlp.gate_proj"),
    ("model.tok_embeddings", "model.embed_tokens"),
    ("module.embedding.word_embeddings", "model.embed_tokens"),
    ("decoder.final_layernorm", "model.norm"),
    ("mtp.layers.0.transformer_layer.mlp", "mtp.0.mlp"),
    ("network.mtp.layers.1.final_layernorm", "mtp.1.shared_head.norm"),
    ("mtp.layers.0.mlp", ""),
    ("optimizer", ""),
])  # fmt: skip
def test_modules_get_the_names_of_hugging_face(path: str, name: str) -> None:
    assert module_name(path) == name
