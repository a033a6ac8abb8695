"""Trackers get everything, in order, beside the training; what fails is told once. TensorBoard's files and tags."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from config_helpers import BASE, error_of, load
from event_files import read_events

from trainer.config.checks.rules import preflight
from trainer.errors import EXIT_SIGTERM, RunError, UserError
from trainer.monitors.metrics import EvalMetrics, RunInfo, StepMetrics, Totals
from trainer.monitors.services import Mlflow, SwanLab, Wandb, tracker_monitors
from trainer.monitors.tracking import Tracker, TrackerMonitor, flat_numbers
from trainer.monitors.training_state import TrainingStateRecords

PAUSE = (9, {"sample_seconds": 0.25})
PACKAGES = ("wandb", "mlflow", "swanlab", "tensorboardX")


def metrics(step: int, **changes: object) -> StepMetrics:
    values = {
        "step": step, "last_step": 9, "epoch": 1, "epochs": 2, "step_in_epoch": step, "steps_per_epoch": 9, "loss": 1.5,
        "lr": 0.25, "global_norm": 2.0, "loss_scale": 1024.0, "overflow": False, "tokens": 100,
        "tokens_per_second": 50.0, "input_tokens_per_second": 60.0, "step_seconds": 2.0, "data_wait_seconds": 0.5,
        "peak_rss_bytes": 7, "samples": 8, "samples_seen": 8 * step, "flops_per_second": 4e12,
    }  # fmt: skip
    return StepMetrics(**{**values, **changes})


class Recorder(Tracker):
    """Writes down what it is told; may fail or wait at a step."""

    def __init__(self, fails_at: int = 0, waits: threading.Event | None = None) -> None:
        self.told, self.fails_at, self.waits = [], fails_at, waits

    def start(self, info: RunInfo) -> None:
        self.told.append("start")

    def step(self, metrics: StepMetrics) -> None:
        if metrics.step == self.fails_at:
            raise ConnectionError("the service\nis away")
        if self.waits is not None:
            self.waits.wait()
        self.told.append(metrics.step)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.told.append(numbers.get("eval_loss", (step, numbers)))

    def flush(self) -> None:
        self.told.append("flush")

    def close(self, outcome: str) -> None:
        self.told.append(outcome)


def run_info(folder: Path, **changes: object) -> RunInfo:
    return RunInfo(folder, 9, 9, ranks=2, **changes)


def tell(monitor: TrackerMonitor, folder: Path, steps: range) -> None:
    monitor.on_start(run_info(folder))
    for step in steps:
        monitor.on_step(metrics(step))
    monitor.on_eval(EvalMetrics(9, 1, 1.25, 3.5, 10, 0.5))
    monitor.on_samples(9, [("a", "b")], 0.25)
    monitor.close(None)


def test_a_tracker_is_told_of_everything_in_order(tmp_path):
    recorder, notes = Recorder(), []
    tell(TrackerMonitor("it", lambda: recorder, notes.append), tmp_path, range(1, 10))
    assert recorder.told == ["start", *range(1, 10), 1.25, PAUSE, "failed"] and notes == []
    recorder = Recorder()
    tell(TrackerMonitor("it", lambda: recorder, notes.append, every=4), tmp_path, range(1, 10))
    assert recorder.told == ["start", 1, 4, 8, 9, 1.25, PAUSE, "failed"]


def test_a_tracker_that_fails_is_told_once_and_nothing_else_fails(tmp_path):
    recorder, notes = Recorder(fails_at=3), []
    tell(TrackerMonitor("it", lambda: recorder, notes.append), tmp_path, range(1, 10))
    assert recorder.told == ["start", 1, 2]
    assert notes == ["it stores nothing of this run from here on: ConnectionError: the service is away"]

    def make() -> Tracker:
        raise SystemExit("no account")

    notes.clear()
    tell(TrackerMonitor("it", make, notes.append), tmp_path, range(1, 10))
    assert notes == ["it stores nothing of this run from here on: SystemExit: no account"]


def test_a_tracker_that_hangs_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.monitors.tracking._END_SECONDS", 0.2)
    monkeypatch.setattr("trainer.monitors.tracking._MAX_WAITING", 4)
    waits, notes = threading.Event(), []
    monitor = TrackerMonitor("it", lambda: Recorder(waits=waits), notes.append)
    tell(monitor, tmp_path, range(1, 10))
    waits.set()
    assert notes[0] == "it stores nothing of this run from here on: did not end within 0 s"
    assert "records were dropped" in notes[1]


def test_numbers_are_flat_and_finite():
    record = {"loss": 1, "lr": float("nan"), "flag": True, "drop_rate": [0.5, 0.25], "local_norm": {"a.b": 2.0}}
    flat = {"loss": 1.0, "flag": 1.0, "local_norm/a.b": 2.0, "drop_rate/layer_1": 0.5, "drop_rate/layer_3": 0.25}
    assert flat_numbers(record, [1, 3]) == flat


SIGNALLED = SystemExit(EXIT_SIGTERM)


@pytest.mark.parametrize(
    ("summary", "error", "outcome", "state"),
    [
        (Totals().summary("finished", {}), None, "finished", "finished"),
        (Totals().summary("stopped early", {}), None, "stopped early", "finished"),
        (Totals().summary("stopped by SIGTERM", {}), None, "stopped by SIGTERM", "stopped"),
        (None, KeyboardInterrupt(), "stopped by SIGINT", "stopped"),
        (None, SIGNALLED, "stopped by SIGTERM", "stopped"),
        (None, RunError("the disk\nis full"), "failed: the disk is full.", "failed"),
        (None, MemoryError("much"), "failed: MemoryError: much", "failed"),
    ],
)
def test_services_are_told_how_a_run_ended(tmp_path, summary, error, outcome, state):
    config, told = load(BASE), {}

    class Service:
        def finish(self, state: object = None, **named: object) -> None:
            told["it"] = (state, named)

        def set_terminated(self, run: str, status: str) -> None:
            told["it"] = status

    recorder = Recorder()
    monitor = TrackerMonitor("it", lambda: recorder, pytest.fail)
    monitor.on_start(run_info(tmp_path))
    try:
        if error is not None:
            raise error
    except BaseException:
        monitor.close(summary)
    else:
        monitor.close(summary)
    assert recorder.told[-1] == outcome
    expected = {
        Wandb: (None, {"exit_code": {"finished": 0, "stopped": 255, "failed": 1}[state]}),
        Mlflow: {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[state],
        SwanLab: {"finished": ("success", {}), "stopped": ("aborted", {"error": outcome}),
                  "failed": ("crashed", {"error": outcome})}[state],
    }  # fmt: skip
    for kind, ending in expected.items():
        tracker = kind(config)
        tracker.run = tracker.client = Service()
        tracker.close(outcome)
        assert told["it"] == ending, kind.name


def test_mlflow_gets_no_more_than_a_thousand_numbers_in_a_request():
    sent = []
    tracker = Mlflow(load(BASE))
    tracker.run, tracker.metric = "id", lambda name, value, now, step: (name, value, step)
    tracker.client = SimpleNamespace(log_batch=lambda run, metrics: sent.append(metrics))
    tracker.log({f"local_norm/{number}": float(number) for number in range(2300)}, 7)
    assert [len(metrics) for metrics in sent] == [1000, 1000, 300] and sent[2][-1] == ("local_norm/2299", 2299.0, 7)


class Log(Tracker):
    """Keeps the numbers that it is given."""

    def __init__(self) -> None:
        self.numbers: dict[int, dict[str, float]] = {}

    def start(self, info: RunInfo) -> None:
        pass

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.numbers[step] = numbers

    def close(self, outcome: str) -> None:
        pass


def test_what_is_logged_of_a_step_an_evaluation_and_a_pause(tmp_path):
    log = Log()
    monitor = TrackerMonitor("it", lambda: log, pytest.fail)
    monitor.on_start(run_info(tmp_path))
    monitor.on_step(metrics(3))
    monitor.on_eval(EvalMetrics(9, 1, 1.25, 3.5, 10, 0.5))
    monitor.on_samples(10, [], 0.25)
    monitor.close(None)
    assert "step" not in log.numbers[3] and log.numbers[3]["loss"] == 1.5
    assert log.numbers[9]["eval_loss"] == 1.25 and "epoch" not in log.numbers[9]
    assert log.numbers[10] == {"sample_seconds": 0.25}


FILE = """
tensorboard: {{tensorboard_dir: {folder}, log_timers_to_tensorboard: True, log_loss_scale_to_tensorboard: True}}
monitor_config:
  monitor_on: True
  step_interval: 2
  target: ['layers\\.[01]\\.']
  local_norm_format: tensorboard
  weight_state_format: [log, tensorboard]
  throughput_baseline: 4
"""


def test_event_files_have_the_tags_of_mindspore_transformers(tmp_path):
    config, notes = load(FILE.format(folder=tmp_path)), []
    assert config.runner_wrapper.local_norm  # as it is recorded
    (monitor,) = tracker_monitors(config, notes.append)
    norms = {"layers.0.q": 0.5, "layers.2.q": 0.25}
    monitor.on_start(run_info(tmp_path))
    monitor.on_step(metrics(1, extra={"aux_loss": 1.25, "mtp_loss": 3.0}, details={"local_norm": norms}))
    monitor.on_step(metrics(2, global_norm=None, details={"local_norm": norms, "weight_norm": 9.0}))
    monitor.on_eval(EvalMetrics(2, 1, 1.25, 3.5, 10, 0.5))
    monitor.on_samples(2, [("a", "b")], 0.25)
    monitor.close(None)
    assert notes == []
    (path,) = (tmp_path / "rank_0").iterdir()
    found = read_events(path)
    assert found.scalars["loss"] == [(1, 1.5), (2, 1.5)] and found.scalars["loss vs samples"] == [(8, 1.5), (16, 1.5)]
    assert found.scalars["grad-norm"] == [(1, 2.0)]
    last = {tag: values[-1] for tag, values in found.scalars.items() if not tag.endswith(" vs samples")}
    assert last == {
        "learning-rate": (2, 0.25), "batch-size": (2, 8.0), "loss": (2, 1.5), "grad-norm": (1, 2.0),
        "loss-scale": (2, 1024.0), "iteration-time": (2, 2000.0), "throughput": (2, 2.0),
        "tokens-per-second": (2, 60.0), "model-flops-throughput-per-npu": (2, 2.0),
        "B-samples-per-day": (2, pytest.approx(4 * 86400 / 1e9)), "data-wait-time": (2, 500.0), "lm-loss": (1, 1.5),
        "load-balancing-loss": (1, 1.25), "mtp-loss": (1, 3.0), "local_norm/layers.0.q": (2, 0.5),
        "weight_norm": (2, 9.0), "sample-seconds": (2, 0.25),
        "throughput_linearity": (2, 0.5), "eval-loss": (2, 1.25), "eval-perplexity": (2, 3.5), "eval-tokens": (2, 10.0),
        "eval-seconds": (2, 0.5),
    }  # fmt: skip
    assert "monitor_on: true" in found.texts["monitor_config/text_summary"] and found.texts["seed/text_summary"] == "1"


def test_a_resumed_run_keeps_what_older_files_have_and_a_new_one_hides_it(tmp_path):
    config = load(f"tensorboard: {{tensorboard_dir: {tmp_path}}}\n")
    for start_step in (0, 3):
        (monitor,) = tracker_monitors(config, pytest.fail)
        monitor.on_start(run_info(tmp_path, start_step=start_step))
        monitor.close(None)
        path = max((tmp_path / "rank_0").iterdir(), key=lambda file: file.stat().st_ctime_ns)
        assert read_events(path).restarts == ([0] if start_step == 0 else [])
        path.unlink()


def test_a_folder_that_cannot_be_made_is_told_and_the_run_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    notes = []
    (monitor,) = tracker_monitors(load(f"tensorboard: {{tensorboard_dir: {tmp_path}/file/x}}\n"), notes.append)
    tell(monitor, tmp_path, range(1, 4))
    assert len(notes) == 1 and "TensorBoard stores nothing of this run from here on: NotADirectoryError" in notes[0]


def test_without_a_folder_for_tensorboard_its_records_are_printed():
    config = load("monitor_config: {monitor_on: True, weight_state_format: tensorboard, invert: True}\n")
    state = TrainingStateRecords(config)
    told = metrics(1, details={"weight_norm": 2.0, "local_norm": {"a": 1.0}})
    assert state.values(told, "log") == {"weight_norm": 2.0} and state.values(told, "tensorboard") == {}
    assert not state.is_selected("a")
    off = TrainingStateRecords(load("monitor_config: {weight_state_format: log, throughput_baseline: 1}\n"))
    assert not (off.has_records("log") or off.is_due(1) or off.is_requested("weight_norm"))


def test_the_threshold_of_spikes_may_stand_in_monitor_config():
    text = "use_skip_data_by_global_norm: True\nmonitor_config: {global_norm_spike_threshold: 3.5}\n"
    assert load(text).runner_wrapper.global_norm_spike_threshold == 3.5


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("trackers: [wandb, neptune]\n", "trackers.1 = 'neptune'"),
        ("trackers: tensorboard\n", "trackers = 'tensorboard'"),
        ("monitor_config: {local_norm_format: file}\n", "monitor_config.local_norm_format = 'file'"),
        ("monitor_config: {target: ['(']}\n", "monitor_config.target.0 = '(': it is not a regular expression"),
        ("monitor_config: {step_interval: 0}\n", "must be at least 1"),
        ("tensorboard: {tensorboard_queue_size: 0}\n", "must be at least 1"),
    ],
)
def test_wrong_values_are_found(text, part):
    assert part in error_of(text)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_missing_package_is_found_before_the_run(package, monkeypatch, tmp_path):
    monkeypatch.setattr("trainer.config.checks.rules.find_spec", lambda name: None if name == package else object())
    of_tensorboard = f"tensorboard: {{tensorboard_dir: {tmp_path}}}\n"
    text = f"{BASE}{of_tensorboard}trackers: [wandb, mlflow, swanlab]\n"
    rule = f"needs the package {package}, which is not installed"
    with pytest.raises(UserError, match=f"{rule}(.|\n)*pip install {package}"):
        preflight(load(text))
    alone = of_tensorboard if package != "tensorboardX" else "trackers: [wandb, mlflow, swanlab]\n"
    preflight(load(BASE + alone))  # imported only when asked for
