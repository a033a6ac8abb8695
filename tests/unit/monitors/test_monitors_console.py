"""The output of a run: its lines, the live line on a pseudo-terminal, the log file, the closing summary, their cost."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import time
from pathlib import Path

import pytest
from monitor_helpers import EVALUATION, run_info, run_on_terminal, step_metrics
from rich.console import Console
from tolerances import SECONDS_LEFT

from trainer.errors import RunError
from trainer.monitors import formatting
from trainer.monitors.console import LineMonitor, ProgressMonitor, console_monitor, log_file_monitor
from trainer.monitors.jsonl import JsonlMonitor
from trainer.monitors.live import Eta, FaultTolerantStream, LiveState, TerminalLine
from trainer.monitors.metrics import EvalMetrics, Monitor, RunInfo, Totals

# ---- lines -----------------------------------------------------------------------------------------------------------


def test_the_line_of_mindformers_to_the_letter() -> None:
    line = formatting.mindformers_step(step_metrics(20, loss_scale=65536.0), 0.0)
    assert line == (
        "{ Epoch:[  1/  2], step:[   20/  100], loss: 5.612345, per_step_time: 123ms, lr: 5.0e-05, "
        "overflow cond: False, loss_scale: 65536.0, global_norm: 0.981 }"
    )


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"lr": 2.5641025e-08}, "lr: 2.5641025e-08,"),
        ({"lr": 0.0}, "lr: 0.0e+00,"),
        ({"lr": 1e-3}, "lr: 1.0e-03,"),
        ({"overflow": True}, "overflow cond: True,"),
        ({"global_norm": None}, "loss_scale: 1.0 }"),
        ({"global_norm": math.inf}, "global_norm: inf }"),
        ({"step": 120, "step_in_epoch": 20, "epoch": 2}, "Epoch:[  2/  2], step:[   20/  100]"),
    ],
)
def test_the_line_of_mindformers_in_other_cases(changes: dict, part: str) -> None:
    assert part in formatting.mindformers_step(step_metrics(**{"step": 20, **changes}), 0.0)


def test_the_plain_line() -> None:
    assert formatting.plain_step(step_metrics(20), 65.0) == (
        "step  20/200 | epoch 1/2 | loss 5.6123 | lr 5.00e-05 | norm 0.981 | 12.3k tokens/s | eta 1m05s"
    )
    line = formatting.plain_step(
        step_metrics(20, global_norm=None, overflow=True, loss_scale=1024.0, extra={"drop_rate.layer_0": 0.25}), 0.0
    )
    assert "norm" not in line
    assert "| scale 1024 | OVERFLOW, update skipped | drop_rate.layer_0 0.25 | 12.3k tokens/s" in line
    assert "| 12.3k tokens/s | mfu 41.5 % | eta 1m05s" in formatting.plain_step(step_metrics(20, mfu=0.415), 65.0)
    on_a_cpu = formatting.plain_step(step_metrics(20, flops_per_second=83.24e9), 65.0)
    assert "| 12.3k tokens/s | 83.2 GFLOP/s | eta" in on_a_cpu
    masked = formatting.plain_step(step_metrics(20, last_step=50, input_tokens_per_second=40_000.0), None)
    assert masked.startswith("step 20/50 |") and masked.endswith("| 40.0k tokens/s, 12.3k with loss")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (987, "987"), (999.7, "1.00k"), (1000, "1.00k"), (12345, "12.3k"), (99960, "100k"), (999_999, "1.00M"),
     (4.56e6, "4.56M"), (7.2e9, "7.20G"), (math.inf, "inf"), (math.nan, "nan")],
)
def test_counts(number: float, text: str) -> None:
    assert formatting.count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0421, "42ms"), (0.42, "0.42s"), (9.94, "9.9s"), (9.96, "10s"), (59.4, "59s"), (59.6, "1m00s"), (65, "1m05s"),
     (7620, "2h07m"), (273600, "3d04h"), (math.inf, "?"), (math.nan, "?")],
)
def test_durations(seconds: float, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(2048, "2 KiB"), (512 << 20, "512 MiB"), (1536 << 20, "1.50 GiB")])
def test_sizes(number: int, text: str) -> None:
    assert formatting.size(number) == text


# ---- when lines come -------------------------------------------------------------------------------------------------


def steps_shown(monitor: Monitor, shown: list[str], info: RunInfo, **changes) -> list[int]:
    monitor.on_start(info)
    for step in range(info.start_step + 1, info.last_step + 1):
        monitor.on_step(step_metrics(step, **changes))
    return [int(match[1]) for line in shown if (match := re.match(r"step +(\d+)/", line))]


def test_every_nth_step_and_the_first_and_last_have_a_line() -> None:
    shown: list[str] = []
    assert steps_shown(LineMonitor(shown.append, every=1), shown, run_info(last_step=3)) == [1, 2, 3]
    shown = []
    info = run_info(start_step=3, last_step=25)
    assert steps_shown(LineMonitor(shown.append, every=10), shown, info) == [4, 10, 20, 25]


def test_an_overflow_is_always_shown() -> None:
    shown: list[str] = []
    monitor = LineMonitor(shown.append, every=100)
    assert steps_shown(monitor, shown, run_info(last_step=4), overflow=True) == [1, 2, 3, 4]


def test_the_other_events_have_lines() -> None:
    shown: list[str] = []
    monitor = LineMonitor(shown.append)
    monitor.on_start(run_info(start_step=50, last_step=120, resumed_from=Path("o/step-00000050")))
    monitor.on_eval(EVALUATION)
    monitor.on_checkpoint(Path("o/checkpoints/step-00000020"), 20)
    monitor.on_note("bfloat16 computes in float32")
    monitor.close(None)
    assert shown == [
        "training: steps 51 to 120 of 200 (2 epochs of 100), continuing o/step-00000050",
        "eval at step 20: loss 2.2500, perplexity 9.488 (16.4k tokens in 1.2s)",
        "checkpoint of step 20: o/checkpoints/step-00000020",
        "note: bfloat16 computes in float32",
    ]


def test_eta_ignores_the_first_step_and_counts_to_the_last_step_of_the_run() -> None:
    eta = Eta()
    eta.add(step_metrics(1, step_seconds=100.0))
    assert eta.seconds(step_metrics(1)) is None
    for step in (2, 3, 4):
        eta.add(step_metrics(step, step_seconds=0.5))
    assert eta.seconds(step_metrics(4, last_step=52)) == pytest.approx(48 * 0.5)
    for step in range(5, 200):
        eta.add(step_metrics(step, step_seconds=2.0))
    assert eta.seconds(step_metrics(50, last_step=52)) == pytest.approx(2 * 2.0, rel=SECONDS_LEFT)
    assert eta.seconds(step_metrics(52, last_step=52)) is None and eta.seconds(step_metrics(60, last_step=52)) is None


# ---- which monitor ---------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("log_format", ["rich", "plain", "mindformers"])
def test_without_a_terminal_lines_are_plain_in_any_environment(
    log_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    stream = io.StringIO()
    monitor = console_monitor(log_format, 1, stream)
    monitor.on_start(run_info())
    monitor.on_step(step_metrics(1))
    assert "\x1b" not in stream.getvalue()
    step_line = stream.getvalue().splitlines()[1]
    assert step_line.startswith("{ Epoch:[" if log_format == "mindformers" else "step   1/200 |")


def test_on_a_terminal_only_rich_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(console_monitor("rich", 1, Terminal()), ProgressMonitor)
    assert isinstance(console_monitor("plain", 1, Terminal()), LineMonitor)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console_monitor("rich", 1, Terminal()), LineMonitor)


def test_per_print_times_reaches_the_console() -> None:
    stream = io.StringIO()
    monitor = console_monitor("plain", 50, stream)
    monitor.on_start(run_info())
    for step in range(1, 201):
        monitor.on_step(step_metrics(step))
    assert re.findall(r"^step +(\d+)", stream.getvalue(), re.MULTILINE) == ["1", "50", "100", "150", "200"]


# ---- the live line ---------------------------------------------------------------------------------------------------

_LIVE_RUN = """
import sys, time
from pathlib import Path
from monitor_helpers import EVALUATION, run_info, step_metrics
from trainer.monitors.console import console_monitor
monitor = console_monitor("rich")
monitor.on_activity("loading MindSpore")
monitor.on_start(run_info())
for step in range(1, 201):
    monitor.on_step(step_metrics(step, loss=7.0 if step < 200 else 1.25))
    if step == 100:
        monitor.on_activity("evaluating", 12, 64)
        time.sleep(0.4)
        monitor.on_activity("")
        monitor.on_eval(EVALUATION)
        monitor.on_note("scale [bold] kept")
        print("printed by a library", file=sys.stderr)
    time.sleep(0.003)
monitor.close(None)
print("after the run")
"""


def test_the_live_line_on_a_terminal() -> None:
    output = run_on_terminal(_LIVE_RUN, 80)
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1, "the cursor is there again at the end"
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    drawn = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.startswith(("step ", "loading"))]
    assert 4 <= len(drawn) <= 30, "about four a second, not one a step"
    assert drawn[-1].endswith("loss 1.2500  norm 0.981  12.3k tokens/s")
    assert any(re.search("━[╸━]━*  evaluating 12/64  loss 7.0000", line) for line in drawn), "the bar must move"
    assert all(len(line) < 80 for line in drawn)
    lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n")]  # what stays of each
    assert lines[1:4] == ["eval at step 20: loss 2.2500, perplexity 9.488 (16.4k tokens in 1.2s)",
                          "note: scale [bold] kept", "printed by a library"]
    assert lines[-2:] == ["after the run", ""]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def live_line(columns: int, state: LiveState) -> str:
    console = Console(width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(state)
    return re.sub("[━╸╺]", "-", re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())).rstrip()


def live_state(info: RunInfo, **changes) -> tuple[LiveState, Clock]:
    """Returns the state after two steps of half a second since the start of `info`, and one more long pause."""
    clock = Clock()
    state = LiveState(clock)
    state.start(info)
    for step in (info.start_step + 1, info.start_step + 2):
        clock.now += 0.5
        state.add(step_metrics(step, last_step=info.last_step, step_seconds=0.5, **changes))
    return state, clock


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (10, ""),
        (20, "step 102/200"),
        (40, "step 102/200  loss 5.6123  eta 49s"),
        (60, "step 102/200  --------  loss 5.6123  eta 49s"),
        (80, "step 102/200  ------------  loss 5.6123  norm 0.981  12.3k tokens/s  eta 49s"),
        (105, "step 102/200  --------------------  loss 5.6123  norm 0.981  12.3k tokens/s  mfu 41.5 %  eta 49s"),
        (200, "step 102/200  ------------------------------  loss 5.6123  norm 0.981  aux_loss 1.02  lr 5.00e-05"
         "  12.3k tokens/s  mfu 41.5 %  eta 49s  2/100 in this run"),
    ],
)  # fmt: skip
def test_the_live_line_fits_a_terminal_of_any_width(columns: int, line: str) -> None:
    info = run_info(start_step=100, last_step=200)
    state, clock = live_state(info, mfu=0.415, extra={"aux_loss": 1.02})
    assert live_line(columns, state) == line


def test_no_number_is_ever_cut() -> None:
    state, _ = live_state(run_info(start_step=7, last_step=123456), mfu=0.5, extra={"z_loss": 0.25})
    words = set(live_line(400, state).split())
    for columns in range(1, 250):
        line = live_line(columns, state)
        assert len(line) < columns
        assert {word for word in line.split() if set(word) != {"-"}} <= words


def test_the_live_line_says_what_else_the_run_does() -> None:
    clock = Clock()
    state = LiveState(clock)
    state.set_activity("loading MindSpore")
    assert live_line(80, state) == "loading MindSpore"
    clock.now += 3.4
    assert live_line(80, state) == "loading MindSpore  3s"
    state.start(run_info(compiles=True))
    assert live_line(50, state) == "step   0/200  compiling"
    state.start(run_info(compiles=False))
    assert live_line(50, state) == "step   0/200  first step"
    state.add(step_metrics(1, global_norm=None))
    assert live_line(50, state) == "step   1/200  loss 5.6123  12.3k tokens/s"
    for batch in range(13):
        state.set_activity("evaluating", batch, 64)
        clock.now += 0.5
    assert live_line(60, state) == "step   1/200  --------  evaluating 12/64  6s  loss 5.6123"
    assert live_line(40, state) == "step   1/200  evaluating 12/64  6s"
    assert live_line(34, state) == "step   1/200  evaluating 12/64"
    state.set_activity("")
    assert "evaluating" not in live_line(200, state)


def test_eta_has_a_share_of_the_pauses_so_far() -> None:
    clock = Clock()
    eta = Eta(clock)
    for step in range(1, 12):
        eta.add(step_metrics(step, last_step=31, step_seconds=0.5))
        clock.now += 0.5 + (10.0 if step == 5 else 0.0)  # an evaluation
    assert eta.seconds(step_metrics(11, last_step=31)) == pytest.approx(20 * (0.5 + 10.0 / 10))


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_the_live_monitor_prints_the_other_events(columns: int) -> None:
    stream, state = io.StringIO(), LiveState()
    monitor = ProgressMonitor(TerminalLine(Console(file=stream, width=columns), state))
    monitor.on_step(step_metrics(7, overflow=True, loss_scale=512.0))
    monitor.on_checkpoint(Path("o/checkpoints/step-00000007"), 7)
    totals = Totals()
    totals.on_step(step_metrics(7))
    monitor.close(totals.summary("finished", {"metrics": Path(f"o/[red]/{'long' * 12}/metrics.jsonl")}))
    words = stream.getvalue().split()
    assert columns != 40 or "(loss\n  scale 512)\n" in stream.getvalue()
    assert " ".join(words[:8]) == "step 7: overflow, update skipped (loss scale 512)"
    assert f"o/[red]/{'long' * 12}/metrics.jsonl" in words, "no path is folded"
    lines = [line for line in stream.getvalue().splitlines() if "/" not in line]
    assert max(map(len, lines)) <= columns


def test_a_terminal_that_is_closed_ends_no_run() -> None:
    leader, follower = os.openpty()
    stream, state = open(follower, "w"), LiveState()  # noqa: SIM115
    line = TerminalLine(Console(file=FaultTolerantStream(stream), force_terminal=True), state)
    line.start()
    os.close(leader)
    state.start(run_info())
    line.print("nobody reads this")
    line.stop()
    with contextlib.suppress(OSError):  # closing writes what is left
        stream.close()


# ---- log file --------------------------------------------------------------------------------------------------------


def test_the_log_file_has_plain_lines_with_their_time_and_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank-0.log"
    for start_step in (0, 1):
        monitor = log_file_monitor(path)
        monitor.on_start(run_info(start_step=start_step))
        monitor.on_step(step_metrics(start_step + 1))
        assert len(path.read_text().splitlines()) == 2 * (start_step + 1)  # before it is closed
        monitor.close(None)
        monitor.close(None)
    lines = path.read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (training: steps|step +\d+/200 \| )", line) for line in lines)


def test_a_log_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(RunError, match=r"log file = .*rank-0\.log.*: the log cannot be written: "):
        log_file_monitor(tmp_path / "logs" / "rank-0.log")


def test_a_log_on_a_full_disk_ends_the_run() -> None:
    monitor = log_file_monitor(Path("/dev/full"))
    with pytest.raises(RunError, match="No space left on device"):
        monitor.on_note("x")
    monitor.close(None)


# ---- summary ---------------------------------------------------------------------------------------------------------


def test_the_summary_of_a_run() -> None:
    totals = Totals()
    totals.on_start(run_info(start_step=10))
    rates = [10.0, 1000.0, 1300.0, 1100.0]  # the first step compiles
    for step, rate in enumerate(rates, start=11):
        rates_of = {"tokens_per_second": rate, "input_tokens_per_second": 2 * rate}
        totals.on_step(step_metrics(step, **rates_of, loss=10.0 - step / 10, step_seconds=1.0 / rate))
    for step, loss in ((11, math.nan), (12, 2.5), (13, 2.0), (14, 2.2)):
        totals.on_eval(EvalMetrics(step, 1, loss, math.exp(loss), 64, 0.1))
    summary = totals.summary("stopped by SIGTERM", {"checkpoints": Path("o/checkpoints")})
    assert summary.tokens_per_second == 1100.0 and summary.tokens == 6000 and summary.steps == 4
    assert summary.best_eval.step == 13 and summary.last_eval.step == 14
    lines = formatting.summary_lines(summary)
    assert lines[0].startswith("run          stopped by SIGTERM at step 14 of 200: 4 steps in ")
    assert lines[1:4] == [
        "tokens       6.00k, 2.20k tokens/s, 1.10k with loss (median; first step 0.1s)",
        "loss         8.9000 -> 8.6000",
        "eval loss    best 2.0000 at step 13, last 2.2000 at step 14",
    ]
    assert re.fullmatch(r"peak memory  \d+ MiB|peak memory  [\d.]+ GiB", lines[4])
    assert lines[5] == "checkpoints  o/checkpoints"


def test_the_summary_of_one_step_and_of_none() -> None:
    totals = Totals()
    totals.on_start(run_info(start_step=200))
    nothing = formatting.summary_lines(totals.summary("finished", {}))
    assert nothing[0].startswith("run          finished at step 200 of 200: 0 steps") and len(nothing) == 2
    totals.on_step(step_metrics(201, tokens_per_second=7.0))
    one = totals.summary("finished", {})
    assert one.tokens_per_second == 7.0 and one.first_loss == one.last_loss == 5.612345
    assert "1 step in" in formatting.summary_lines(one)[0] and "median" not in formatting.summary_lines(one)[1]


# ---- cost ------------------------------------------------------------------------------------------------------------


def test_a_step_costs_far_less_than_a_millisecond(tmp_path: Path) -> None:
    console, state = Console(file=open(os.devnull, "w"), force_terminal=True, width=120), LiveState()  # noqa: SIM115
    live = ProgressMonitor(TerminalLine(console, state), state)
    monitors: list[Monitor] = [live, log_file_monitor(tmp_path / "log"), JsonlMonitor(tmp_path / "m.jsonl"), Totals()]
    steps = [step_metrics(step) for step in range(1, 2001)]
    for monitor in monitors:
        monitor.on_start(run_info(total_steps=2000, last_step=2000))
    # Processor time of the whole process, the drawing thread included: a busy machine does not disturb it.
    started_at = time.process_time()
    for metrics in steps:
        for monitor in monitors:
            monitor.on_step(metrics)
    mean_seconds = (time.process_time() - started_at) / len(steps)
    for monitor in monitors:
        monitor.close(None)
    assert mean_seconds < 0.3e-3
