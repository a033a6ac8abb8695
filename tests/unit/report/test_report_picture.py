"""report.png: what is read for it, what is drawn, and that a picture never fails a run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tolerances import FEW_OPERATIONS

from trainer.report.curves import MetricsReader
from trainer.report.monitor import ReportMonitor
from trainer.report.picture import choose_panels, draw_figure, draw_report, smooth
from trainer.report.record import read_run

REPOSITORY = Path(__file__).resolve().parents[3]


def write_metrics(path: Path, steps: int, *, eval_every: int = 10, **extra: float) -> None:
    with path.open("w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step, "epoch": 1, "loss": 5.0 / step, "lr": 1e-4, "global_norm": None, "loss_scale": 1.0,
                "overflow": False, "tokens": 10, "tokens_per_second": 100.0, "input_tokens_per_second": 120.0,
                "step_seconds": 0.1, "data_wait_seconds": 0.0, "peak_rss_bytes": 1,
            }
            file.write(json.dumps({**record, **extra}) + "\n")
            if step % eval_every == 0:
                evaluation = {"step": step, "epoch": 1, "eval_loss": 6.0 / step, "eval_tokens": 5, "eval_seconds": 0.1}
                file.write(json.dumps(evaluation) + "\n")


def test_panels(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, 20, **{"drop_rate": [0.1, 0.2], "other.a": 0.1, "other.b": 0.2, "balance": 0.3})
    # No panel for a norm nobody asked for; one for each name before a dot.
    assert [(panel.title, panel.fields) for panel in choose_panels(MetricsReader(path).read().curves)] == [
        ("learning rate", ["lr"]),
        ("tokens/s", ["input_tokens_per_second"]),
        ("drop rate", ["drop_rate.0", "drop_rate.1"]),
        ("other", ["other.a", "other.b"]),
        ("balance", ["balance"]),
    ]


def picture(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)


def colours(image: np.ndarray) -> set[int]:
    """Returns the colours of a picture as 0xRRGGBB."""
    red, green, blue = np.moveaxis((image[:, :, :3] * 255).round().astype(int), 2, 0)
    return set(np.unique(red << 16 | green << 8 | blue).tolist())


TRAIN_BLUE, EVAL_ORANGE = 0x1F77B4, 0xFF7F0E


def test_the_picture(tmp_path: Path) -> None:
    metrics_path, report_path = tmp_path / "metrics.jsonl", tmp_path / "report.png"
    write_metrics(metrics_path, 9)
    assert draw_report(read_run(tmp_path), report_path) is True
    without_eval = picture(report_path)
    assert TRAIN_BLUE in colours(without_eval) and EVAL_ORANGE not in colours(without_eval)
    write_metrics(metrics_path, 30, drop_rate=0.5)
    assert draw_report(read_run(tmp_path), report_path) is True
    assert {TRAIN_BLUE, EVAL_ORANGE} <= colours(picture(report_path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl", "report.png"]


@pytest.mark.parametrize("count", [*range(10), 13, 30])
def test_panels_fill_a_landscape_page_and_stay_as_large(tmp_path: Path, count: int) -> None:
    write_metrics(tmp_path / "metrics.jsonl", 3)
    records = (tmp_path / "metrics.jsonl").read_text().splitlines()
    fields = {f"value{number}": 1.0 for number in range(count)}
    lines = [json.dumps({"step": json.loads(line)["step"], "loss": 1.0, **fields}) for line in records]
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    figure = draw_figure(read_run(tmp_path))
    assert len(figure.axes) == 1 + count
    width, height = figure.get_size_inches()
    assert 1.4 < width / height < 1.8
    boxes = [axis.get_subplotspec().get_position(figure) for axis in figure.axes]
    assert all(box.width * width > 2 and box.height * height > 0.8 for box in boxes)
    overlaps = [one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at]]
    assert not any(overlaps)
    shown = [axis for axis in figure.axes if axis.xaxis.get_tick_params()["labelbottom"]]
    assert figure.axes[0] in shown, "the steps of the loss can be read"


def test_smoothing_keeps_a_constant_and_gaps() -> None:
    values = [2.0, 2.0, float("nan"), 2.0] * 10
    found = smooth(values, 3.0)
    assert [round(value, 9) if value == value else None for value in found] == [2.0, 2.0, None, 2.0] * 10
    spike = smooth([0.0] * 20 + [1.0] + [0.0] * 20, 2.0)
    assert max(spike) == spike[20] < 0.25 and sum(spike) == pytest.approx(1.0, rel=FEW_OPERATIONS)
    assert smooth([1.0, 5.0], 0.1) == [1.0, 5.0] and len(smooth([1.0, 2.0], 9.0)) == 2


def test_a_single_step_can_be_seen(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.jsonl", 1)
    assert draw_report(read_run(tmp_path), tmp_path / "report.png")
    assert TRAIN_BLUE in colours(picture(tmp_path / "report.png"))


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "lo'])
def test_nothing_to_draw_draws_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert draw_report(read_run(tmp_path), tmp_path / "report.png") is False
    assert not (tmp_path / "report.png").exists()


def test_a_picture_that_fails_is_a_note(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.jsonl", 3)
    notes: list[str] = []
    (tmp_path / "report.png.tmp").mkdir()
    ReportMonitor(tmp_path, notes.append).close(None)
    assert len(notes) == 1 and "/report.png was not written: Is a directory" in notes[0]
    (tmp_path / "report.png.tmp").rmdir()
    ReportMonitor(tmp_path, notes.append).close(None)
    assert len(notes) == 1 and (tmp_path / "report.png").exists()


def test_the_drawing_library_is_imported_only_to_draw() -> None:
    program = """if True:
        import sys
        import trainer.report.monitor, trainer.monitors.console
        assert not {"matplotlib", "rich"} & set(sys.modules), set(sys.modules)
    """
    result = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_long_training_is_drawn_in_seconds(tmp_path: Path) -> None:
    write_metrics(tmp_path / "metrics.jsonl", 50_000)
    started_at = time.process_time()
    draw_report(read_run(tmp_path), tmp_path / "report.png")
    assert time.process_time() - started_at < 5
