"""Real runs with the real packages of wandb, MLflow and SwanLab, offline: what each keeps is what metrics.jsonl has.

They are no part of the test environment: SwanLab's versions want another protobuf than MindSpore does, and the three
bring along fifty packages. Each test runs where its package is installed (docs/output.md says how) and skips elsewhere.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from run_helpers import call, column, eval_records, step_records, write_config

pytestmark = pytest.mark.slow

Numbers = dict[str, list[tuple[int, float]]]
"""By key: steps and values in order."""
STEPS = range(1, 7)


@pytest.fixture
def output(request: pytest.FixtureRequest, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of a run of four steps that is resumed for two more, with the tracker that the test names."""
    name = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (home / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the store that needs no further package
    changes = {"trackers": [name], "do_eval": True, "runner_config.stop_step": 4}
    path = write_config(home / name, home / "data", changes)
    for more in ((), ("--resume_training", "--stop_step", STEPS[-1])):
        code, _, errors = call("--config", path, *more, cwd=home)
        assert code == 0 and "stores nothing" not in errors, errors
    return home / name / "output"


def assert_the_numbers(found: Numbers, output: Path, steps: range = STEPS) -> None:
    records = [record for record in step_records(output) if record["step"] in steps]
    assert column(records, "step") == list(steps)
    for key in ("loss", "lr", "global_norm", "tokens", "tokens_per_second", "step_seconds"):
        assert found[key] == [(record["step"], record[key]) for record in records], key
    evaluations = [record for record in eval_records(output) if record["step"] in steps]
    assert evaluations and found["eval_loss"] == [(record["step"], record["eval_loss"]) for record in evaluations]


def log_records(path: Path) -> Iterator[bytes]:
    """Yields the records of a file in LevelDB's log format, after a header of seven bytes: blocks of 32 KiB, in them
    pieces with checksum, length and kind, of which 1 is a whole record and 4 the last piece of one."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = (1 << 15) - place % (1 << 15)
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.parametrize("output", ["wandb"], indirect=True)
def test_wandb_keeps_the_numbers_and_a_resumed_run_goes_on_in_the_same_one(output: Path):
    from wandb.proto.wandb_internal_pb2 import Record

    name, found = (output / "trackers" / "wandb").read_text().strip(), defaultdict(list)
    paths = sorted((output / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [path.name for path in paths] == [f"run-{name}.wandb"] * 2
    for path in paths:
        for record in map(Record.FromString, log_records(path)):
            for item in record.history.item:
                key = item.key or ".".join(item.nested_key)
                found[key].append((record.history.step.num, json.loads(item.value_json)))
    assert_the_numbers(found, output)


@pytest.mark.parametrize("output", ["mlflow"], indirect=True)
def test_mlflow_keeps_the_numbers_and_a_resumed_run_goes_on_in_the_same_one(output: Path):
    from mlflow import MlflowClient

    client, name = MlflowClient(), (output / "trackers" / "mlflow").read_text().strip()
    run = client.get_run(name)
    assert run.info.status == "FINISHED" and run.data.params["model.model_config.hidden_size"] == "16"
    found = {key: [(each.step, each.value) for each in client.get_metric_history(name, key)]
             for key in run.data.metrics}  # fmt: skip
    assert_the_numbers(found, output)
    assert len(client.search_runs([run.info.experiment_id])) == 1


@pytest.mark.parametrize("output", ["swanlab"], indirect=True)
def test_swanlab_keeps_the_numbers_of_each_part(output: Path):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    paths = sorted((output / "swanlog").glob("run-*/run-*.swanlab"), key=lambda path: path.stat().st_mtime)
    for path, steps in zip(paths, (range(1, 5), range(5, 7)), strict=True):
        found = defaultdict(list)
        for record in map(Record.FromString, log_records(path)):
            if record.HasField("scalar"):
                found[record.scalar.key].append((record.scalar.step, record.scalar.value.number))
        assert_the_numbers(found, output, steps)
