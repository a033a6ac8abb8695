"""What a run folder tells: curves that are thinned out, starts and their ends, checkpoints, settings."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from monitor_helpers import run_info, step_metrics

from trainer.cli.main import dispatch
from trainer.config.read.dump import flatten
from trainer.errors import RunError
from trainer.monitors.metrics import Totals
from trainer.report import curves as curves_module
from trainer.report.curves import MetricsReader, Pause, Skipped
from trainer.report.page import report_data
from trainer.report.record import RunReader, is_run_folder, read_run
from trainer.report.starts import RunStart, StartMonitor, git_commit, process_start, read_starts

REPOSITORY = Path(__file__).resolve().parents[3]


def write_lines(path: Path, *records: dict[str, object]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def steps(first: int, last: int, **extra: object) -> list[dict[str, object]]:
    return [{"step": step, "loss": float(step), "tokens": 10, "step_seconds": 0.5, **extra}
            for step in range(first, last + 1)]  # fmt: skip


# ---- curves ----------------------------------------------------------------------------------------------------------


def test_a_short_run_keeps_every_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_lines(path, *steps(1, 3), {"step": 4, "loss": None, "lr": 0.5, "epoch": 1, "overflow": True})
    with path.open("a") as file:
        file.write('{"step": 5, "torn')
    found = MetricsReader(path).read().curves
    assert found.steps == [1, 2, 3, 4] and found.tokens == [10, 20, 30, 30] and found.seconds == [0.5, 1.0, 1.5, 1.5]
    assert list(found.means("loss"))[:3] == [1.0, 2.0, 3.0] and math.isnan(found.means("loss")[3])
    # A field that begins later keeps its place.
    assert [math.isnan(value) for value in found.means("lr")] == [True] * 3 + [False]
    assert set(found.fields) == {"loss", "lr", "tokens", "step_seconds"} and not found.has_values("global_norm")


def test_a_long_run_is_thinned_and_keeps_means_and_extremes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_module, "MAX_POINTS", 8)
    path = tmp_path / "metrics.jsonl"
    count = 101
    write_lines(path, *steps(1, count))
    write_lines(path, {"step": 102, "loss": 1e9, "tokens": 10})
    found = MetricsReader(path).read().curves
    assert found.stride == 16 and found.steps == [16, 32, 48, 64, 80, 96, 102]
    assert found.tokens == [160, 320, 480, 640, 800, 960, 1020]
    loss = found.fields["loss"]
    assert list(loss.counts) == [16] * 6 + [6]
    assert list(loss.means[:2]) == pytest.approx([8.5, 24.5])
    assert (loss.lows[2], loss.highs[2]) == (33.0, 48.0)
    assert loss.highs[-1] == 1e9, "a spike is not thinned away"


def test_points_with_and_without_a_value_have_the_mean_of_those_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_module, "MAX_POINTS", 2)
    write_lines(tmp_path / "m", *({"step": step, "loss": value} for step, value in enumerate([1, None, None, None, 7])))
    loss = MetricsReader(tmp_path / "m").read().curves.fields["loss"]
    assert list(loss.counts) == [1, 1] and list(loss.means) == [1.0, 7.0]


def test_lists_over_layers_are_a_curve_for_each(tmp_path: Path) -> None:
    write_lines(tmp_path / "m", *steps(1, 2, drop_rate=[0.25, None], other=[1, 2], local_norm={"a": 1.0}))
    fields = MetricsReader(tmp_path / "m").read().curves.fields
    assert list(fields["drop_rate.0"].means) == [0.25, 0.25] and not fields["drop_rate.1"].has_values
    assert "other" not in fields and "local_norm" not in fields


def test_what_is_no_step(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_lines(
        path,
        *steps(1, 1),
        {"step": 2, "loss": 9.0, "overflow": True},
        {"step": 3, "loss": 3.0, "skipped": "norm 9 above 5", "save_wait_seconds": 0.75},
        {"step": 3, "epoch": 1, "eval_loss": 2.5, "eval_seconds": 1.5, "eval_accuracy": 0.5, "eval_margin": 0.25},
        {"step": 3, "restart": {"number": 1, "reason": "rank 1 failed"}},
        {"step": 4, "loss": 2.0},
        {"step": 4, "eval_loss": None, "eval_seconds": 1.0},
        {"step": 4, "eval_loss": 2.5, "eval_seconds": 1.0},
        {"step": 4, "save_wait_seconds": 0.25},
        {"step": 4, "something": "of a later version"},
    )
    found = MetricsReader(path).read()
    assert found.skipped == [Skipped(2, "overflow"), Skipped(3, "norm 9 above 5")]
    assert found.pauses == [
        Pause(2, "checkpoint", 0.75), Pause(3, "evaluation", 1.5), Pause(4, "evaluation", 1.0),
        Pause(4, "evaluation", 1.0), Pause(4, "checkpoint", 0.25),
    ]  # fmt: skip
    assert found.best == found.evaluations[0] and (found.best.accuracy, found.best.margin) == (0.5, 0.25)
    assert math.isnan(found.evaluations[1].loss)
    assert found.restarts == [{"number": 1, "reason": "rank 1 failed", "step": 3}]
    assert (found.first_step, found.last_step) == (1, 4)


def test_a_growing_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "m"
    reader = MetricsReader(path)
    assert reader.read().curves.steps == []
    write_lines(path, *steps(1, 2))
    assert reader.read().curves.steps == [1, 2]
    with path.open("a") as file:
        file.write('{"step": 3, ')
    assert reader.read().curves.steps == [1, 2]
    with path.open("a") as file:
        file.write('"loss": 1.0}\n')
    size = path.stat().st_size
    assert reader.read().curves.steps == [1, 2, 3]
    # What was read is not read again.
    with path.open("r+b") as file:
        file.write(b"x" * 5)
    write_lines(path, *steps(4, 4))
    assert reader.read().curves.steps == [1, 2, 3, 4]
    # A run that resumes from an earlier step cuts the file, or replaces it.
    os.truncate(path, 0)
    write_lines(path, *steps(1, 1))
    assert path.stat().st_size < size and reader.read().curves.steps == [1]
    write_lines(tmp_path / "new", *steps(1, 7))
    os.replace(tmp_path / "new", path)
    assert reader.read().curves.steps == list(range(1, 8))


# ---- starts ----------------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int = 0) -> StartMonitor:
    monitor = StartMonitor(folder, "CPU", 2)
    monitor.on_start(run_info(output_dir=folder, start_step=step, last_step=50, total_steps=100))
    return monitor


def end(monitor: StartMonitor, outcome: str) -> None:
    monitor.close(Totals().summary(outcome, {}))


@pytest.mark.parametrize(
    ("outcome", "state"), [("finished", "finished"), ("stopped early", "finished"), ("stopped by SIGTERM", "stopped")]
)
def test_the_state_of_a_run_that_ended(tmp_path: Path, outcome: str, state: str) -> None:
    monitor = begin(tmp_path)
    assert is_run_folder(tmp_path)
    assert (read_run(tmp_path).state, read_run(tmp_path).last_step) == ("running", 50)
    monitor.on_step(step_metrics(1))
    end(monitor, outcome)
    record = read_run(tmp_path)
    assert (record.state, record.outcome) == (state, outcome)
    (start,) = record.starts
    assert (start.device, start.ranks, start.end_step) == ("CPU", 2, 1)
    assert start.began <= start.ended and record.start_time is not None
    assert start.versions["mindspore"].startswith("2.") and "core" in start.processor
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]


def test_the_state_of_a_run_that_failed_or_was_killed(tmp_path: Path) -> None:
    monitor = begin(tmp_path)
    try:
        raise RunError("the loss is not finite")
    except RunError:
        monitor.close(None)
    assert read_run(tmp_path).state == "failed" and "the loss is not finite" in read_run(tmp_path).outcome
    program = f"""if True:
        import os, sys
        sys.path[:0] = ["tests/unit", "tests/unit/report"]
        from pathlib import Path
        from test_report_record import begin
        begin(Path({str(tmp_path)!r}))
        os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == -9
    record = read_run(tmp_path)
    assert len(record.starts) == 1, "a new run begins the list anew"
    assert (record.state, record.starts[0].ended) == ("failed", "") and "without a word" in record.outcome


def test_a_process_with_the_number_of_a_run_that_is_gone_is_another_one(tmp_path: Path) -> None:
    begin(tmp_path)
    ((start,), _) = read_starts(tmp_path)
    assert start.is_alive and process_start(os.getpid()) == start.process_start > 0
    assert not start.model_copy(update={"process_start": start.process_start + 1}).is_alive
    assert start.model_copy(update={"host": "elsewhere"}).is_alive is None
    assert process_start(2**22 + 1) == 0


def test_the_marks_of_resuming(tmp_path: Path) -> None:
    for step in (0, 20, 40):
        end(begin(tmp_path, step), "finished")
    assert read_run(tmp_path).resumes == (20, 40)
    end(begin(tmp_path, 30), "finished")  # which cuts off what came after
    record = read_run(tmp_path)
    assert record.resumes == (20, 30) and [start.step for start in record.starts] == [0, 20, 40, 30]
    end(begin(tmp_path), "finished")
    assert read_run(tmp_path).resumes == ()


@pytest.mark.parametrize("content", ["", "{", '{"starts": [{"began": 1}]}', "[" * 100_000, '{"starts": []}'])
def test_a_damaged_run_file_is_as_none(tmp_path: Path, content: str) -> None:
    write_lines(tmp_path / "metrics.jsonl", *steps(1, 2), {"step": 2, "restart": {"number": 1}})
    (tmp_path / "run.json").write_text(content)
    record = read_run(tmp_path)
    assert (record.state, record.starts, record.resumes, record.start_time) == ("unknown", (), (2,), None)
    assert (record.step, record.last_step) == (2, 2)


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("config.yaml", b"a: [", "config.yaml:1: not valid YAML.*the run is shown without its settings"),
        ("config.yaml", b"\xff", "config.yaml:1: byte 0xff is not UTF-8 text"),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n', "metrics.jsonl:2: the line is damaged and was skipped"),
        ("metrics.jsonl", b'{"step": 1', "metrics.jsonl: ends at step 0, but the run ended at step 2"),
        ("metrics.jsonl", b'{"step": 2, "loss": 1.0}\n{"ste', "metrics.jsonl: the last line is cut short"),
        ("metrics.jsonl", None, "metrics.jsonl: cannot be read: Is a directory; the run is shown without its steps"),
    ],
)
def test_a_damaged_file_of_a_run_is_a_note_of_runs_and_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, content: bytes | None, note: str
) -> None:
    monitor = begin(tmp_path)
    for step in (1, 2):
        monitor.on_step(step_metrics(step))
    end(monitor, "finished")
    write_lines(tmp_path / "metrics.jsonl", *steps(1, 2))
    assert read_run(tmp_path).notes == ()
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    assert dispatch(["runs", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert re.search(note, printed.err) and tmp_path.name in printed.out
    assert any(re.search(note, shown) for shown in report_data(read_run(tmp_path))["notes"])


def test_a_running_run_says_that_its_metrics_cannot_be_read(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
    (tmp_path / "metrics.jsonl").mkdir()
    record = read_run(tmp_path)
    assert record.state == "running"
    [note] = record.notes
    assert note == f"{tmp_path}/metrics.jsonl: cannot be read: Is a directory; the run is shown without its steps"


def test_a_date_that_is_none(tmp_path: Path) -> None:
    begin(tmp_path)
    text = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(text.replace(read_starts(tmp_path)[0][0].began, "yesterday"))
    assert read_run(tmp_path).start_time is None


def test_the_commit_of_a_git_folder(tmp_path: Path) -> None:
    assert git_commit(tmp_path) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"], ["tag", "v1"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    (tmp_path / "below").mkdir()
    assert git_commit(tmp_path / "below") == head[:12]
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{head[:12]}-dirty"


# ---- the rest of the folder ------------------------------------------------------------------------------------------


def test_settings(tmp_path: Path) -> None:
    from trainer.config import dump_config, load_config

    config = load_config(str(REPOSITORY / "configs" / "moe_mtp.yaml"))
    (tmp_path / "config.yaml").write_text(dump_config(config))
    record = read_run(tmp_path)
    assert record.config == config and record.moe_layers == list(config.decoder.moe_layers)
    assert record.settings["optimizer.eps"] == config.optimizer.eps
    changed = record.changed()
    assert changed["callbacks.0.type"] == "MFLossMonitor" and "optimizer.eps" not in changed
    assert changed["model.arch.type"] == config.model.arch.type and "model.model_config.num_layers" in changed
    # Another version may not read it: then every key that it has is shown.
    (tmp_path / "config.yaml").write_text(dump_config(config) + "key_of_another_version: 1\n")
    record = read_run(tmp_path)
    assert record.config is None and record.changed()["key_of_another_version"] == 1
    (tmp_path / "config.yaml").write_text("a: [")
    assert read_run(tmp_path).settings == {}


def test_dotted_keys() -> None:
    nested = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": 2}, {"e": 3}], "f": [], "g": None}
    assert dict(flatten(nested)) == {"a.b": 1, "a.c": [1, 2], "d.0.e": 2, "d.1.e": 3, "f": [], "g": None}


def test_checkpoints(tmp_path: Path) -> None:
    from trainer.storage.marker import marker_content

    for number, step in enumerate((30, 10, 20)):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        marker = {"step": step, "save_number": number, "file_bytes": {"a": 5, "b": 7}}
        if step != 20:
            (folder / "COMPLETE").write_bytes(marker_content({**marker, "checksums": {"a": "0" * 32, "b": "0" * 32}}))
    (tmp_path / "checkpoints" / "best").symlink_to("step-00000010")
    write_lines(tmp_path / "metrics.jsonl", *steps(1, 10), {"step": 10, "eval_loss": 1.25})
    found = read_run(tmp_path).checkpoints
    assert [(each.step, each.size_bytes, each.eval_loss, each.is_best) for each in found] == [
        (10, 12, 1.25, True), (30, 12, None, False),
    ]  # fmt: skip
    assert found[0].path == tmp_path / "checkpoints" / "step-00000010" and found[0].saved > 0


def test_an_empty_folder(tmp_path: Path) -> None:
    record = RunReader(tmp_path).read()
    assert not is_run_folder(tmp_path)
    assert (record.state, record.step, record.checkpoints, record.changed()) == ("unknown", 0, (), {})


def test_start_is_what_is_written(tmp_path: Path) -> None:
    begin(tmp_path)
    (written,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert RunStart(**written) == read_starts(tmp_path)[0][0] and written["command"] == sys.argv


def test_pipes_in_place_of_files_keep_nobody_waiting(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "run.json", "config.yaml", "samples.jsonl", "predictions.jsonl", "plan.txt"):
        os.mkfifo(tmp_path / name)
    record = read_run(tmp_path)
    assert record.step == 0 and "metrics.jsonl: cannot be read: a pipe" in " ".join(record.notes)
    assert report_data(record)["samples"] == []
