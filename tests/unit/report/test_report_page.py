"""report.html: what is in it, that no text of a run gets out of its place, and what a real browser makes of it."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser
from monitor_helpers import run_info, step_metrics

from trainer.config import dump_config, load_config
from trainer.monitors.metrics import Totals
from trainer.report.monitor import ReportMonitor
from trainer.report.page import embeddable_json, report_data, report_html
from trainer.report.record import read_run
from trainer.report.starts import StartMonitor

REPOSITORY = Path(__file__).resolve().parents[3]
EVIL = "</script><b id=evil>x</b><!--<script>@data@"


def make_run(folder: Path, steps: int = 120, layers: int = 4, running: bool = False) -> Path:
    """Returns the folder of a run with everything that a report shows; its texts try to get out of their places."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load_config(str(REPOSITORY / "configs" / "moe_tiny.yaml"))
    (folder / "config.yaml").write_text(dump_config(config))
    for start in (0, steps // 2):
        monitor = StartMonitor(folder, "CPU", 1)
        monitor.on_start(run_info(output_dir=folder, start_step=start, last_step=steps))
        if start == 0 or not running:
            ended = Totals().summary("finished" if start else "stopped by SIGTERM", {})
            monitor.close(replace(ended, peak_rss_bytes=10**9 + steps))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "epoch": 1, "loss": 2 + 3 / step, "lr": 1e-3, "global_norm": 0.5 + 2 / step,
                      "tokens": 100, "input_tokens_per_second": 1000.0 + step, "step_seconds": 0.1,
                      "data_wait_seconds": 0.01, "peak_rss_bytes": 10**9 + step, "mfu": 0.4,
                      "aux_loss": 1.5, "z_loss": 2.5,
                      "drop_rate": [step / steps / 9] * layers, "load_imbalance": [1 + 1 / step] * layers}  # fmt: skip
            if step == 7:
                record |= {"skipped": EVIL, "loss": None}
            if step % 25 == 1 and step > 1:
                record["save_wait_seconds"] = 0.5
            print(json.dumps(record), file=file)
            if step % 20 == 0:
                print(json.dumps({"step": step, "eval_loss": 2 + 4 / step, "eval_seconds": 1.5}), file=file)
    (folder / "predictions.jsonl").write_text(json.dumps({"prompt": EVIL, "text": EVIL + "\u2028\ud800"}) + "\n")
    return folder


def page_of(folder: Path) -> str:
    return report_html(report_data(read_run(folder)))


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def test_no_text_leaves_its_place(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "<b>&@script@"))
    assert "id=evil" in page and "<b id=evil" not in page and "<!--" not in page
    assert len(re.findall("</script>", page)) == 2
    assert "<title>&lt;b&gt;&amp;@script@</title>" in page
    data = data_of(page)
    assert data["title"] == "<b>&@script@" and data["samples"][0][1] == EVIL and data["skipped"] == [[7, EVIL]]
    assert json.loads(embeddable_json({"a": "<&>"})) == {"a": "<&>"}
    page.encode()


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    folder = make_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/run-\xff")), steps=3)
    ReportMonitor(folder, pytest.fail).close(None)
    assert data_of((folder / "report.html").read_text())["step"] == 3


def test_what_the_page_holds(tmp_path: Path) -> None:
    data = report_data(read_run(make_run(tmp_path)))
    assert (data["state"], data["step"], data["resumes"], data["clip"]) == ("finished", 120, [60], 1.0)
    assert data["best"] == 5 and data["evaluations"][5][:2] == [120, 2.03333]
    first = ["lr", "global_norm", "input_tokens_per_second", "peak_rss_bytes"]
    assert data["charts"] == [*first, "mfu", "aux_loss", "z_loss"]
    assert data["curves"]["fields"]["loss"]["mean"][6] is None and len(data["curves"]["steps"]) == 120
    assert [map_["title"].split(" of")[0] for map_ in data["heat"]] == ["drop rate", "load"]
    assert data["heat"][0]["layers"] == [0, 1, 2, 3] and len(data["heat"][0]["rows"]) == 4
    assert sum(data["time"]) == pytest.approx(120 * 0.1 + 6 * 1.5 + 4 * 0.5)
    assert dict(map(tuple, data["settings"]))["model.arch.type"] == "MixtralForCausalLM"
    assert {"command", "versions", "device", "start 2"} <= {fact[0] for fact in data["facts"]}


def test_a_long_run_is_a_small_file(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, steps=6_000, layers=24))
    assert len(page.encode()) < 300_000
    data = data_of(page)
    loss = data["curves"]["fields"]["loss"]
    assert data["curves"]["stride"] > 1 and loss["low"][0] < loss["mean"][0] < loss["high"][0]
    assert data["skipped_count"] == 1 and len(data["pauses"]) <= 300


def test_it_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    make_run(tmp_path, running=True)
    monitor = ReportMonitor(tmp_path, pytest.fail, interval=0.05)
    monitor.on_start(run_info(output_dir=tmp_path))
    until = time.monotonic() + 20
    while not (tmp_path / "report.html").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    assert data_of((tmp_path / "report.html").read_text())["state"] == "running"
    assert not (tmp_path / "report.png").exists(), "pictures are drawn at the end only"
    monitor.on_step(step_metrics(1))
    monitor.close(None)
    assert (tmp_path / "report.png").exists()


def test_a_page_of_a_run_that_goes_on_is_read_again(tmp_path: Path) -> None:
    refresh = '<meta http-equiv="refresh" content="30">'
    running = read_run(make_run(tmp_path, running=True))
    assert refresh in report_html(report_data(running, interval=30.0))
    assert "http-equiv=\"refresh" not in report_html(report_data(running)), "it is written at the end only"
    assert "http-equiv=\"refresh" not in report_html(report_data(read_run(make_run(tmp_path)), interval=30.0))


def test_the_library_of_the_charts_is_in_the_page_with_its_licence(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path))
    assert "uPlot (v1.6.32)" in page and "connect-src 'none'" in page
    folder = REPOSITORY / "trainer" / "report" / "page" / "uplot"
    assert "The MIT License" in (folder / "LICENSE").read_text() and "1.6.32" in (folder / "README.md").read_text()


# ---- in a browser ----------------------------------------------------------------------------------------------------


# How many pixels of each chart have a colour that is not grey.
COLOURED = """return [...document.querySelectorAll('.uplot canvas')].map(canvas => {
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0;
  for (let at = 0; at < pixels.length; at += 4) {
    if (pixels[at + 3] && Math.abs(pixels[at] - pixels[at + 2]) > 60) found++;
  }
  return found;
})"""


def shown(browser: Browser, folder: Path) -> None:
    ReportMonitor(folder, pytest.fail).close(None)
    browser.open((folder / "report.html").as_uri())
    assert browser.messages() == []


@pytest.mark.slow
def test_a_browser_draws_it(browser: Browser, tmp_path: Path) -> None:
    browser.resize(1280, 900)
    shown(browser, make_run(tmp_path / EVIL.replace("/", "_")))
    assert browser.run("return document.getElementById('evil')") is None
    assert EVIL in browser.run("return document.querySelector('.samples').textContent")
    titles = browser.run("return [...document.querySelectorAll('h2')].map(each => each.textContent)")
    for title in ("loss (nats a token)", "learning rate", "gradient norm", "tokens/s", "aux loss", "predictions",
                  "model FLOPs utilization", "where the time went", "drop rate of each layer", "the run"):  # fmt: skip
        assert title in titles, title
    text = browser.run("return document.querySelector('main').textContent")
    assert "954 MiB" in text and not re.search(r"\d [kMG]B", text)
    for part in ("clipped at 1", "1 step skipped", "resumed", "pause: evaluation", "pause: checkpoint"):
        assert part in text, part
    assert browser.run("return [...plots][0].data[1].filter(each => each !== null).length") == 119, "but step 7"
    assert browser.run("return [...plots][0].data[3].filter(each => each).length") == 6, "evaluations"
    assert min(browser.run(COLOURED)) > 100, "each canvas has a curve"
    assert len(report_data(read_run(next(tmp_path.iterdir())))["charts"]) == 7, "an odd number, two in a row"
    free = """const edges = new Map(), right = document.getElementById('charts').getBoundingClientRect().right;
        for (const card of document.querySelectorAll('#charts > .card')) {
          const box = card.getBoundingClientRect();
          edges.set(box.top, Math.max(edges.get(box.top) || 0, box.right));
        }
        return [...edges.values()].filter(edge => edge < right - 1).length"""
    assert browser.run(free) == 0, "no row is half empty"


@pytest.mark.slow
def test_a_browser_draws_rewards(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    (folder / "config.yaml").write_text(dump_config(load_config(str(REPOSITORY / "configs" / "dpo.yaml"))))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 41):
            rewards = {"chosen": step / 10, "rejected": -step / 10, "margins": step / 5, "accuracies": 0.5 + step / 100}
            record = {"step": step, "loss": 1 / step} | {f"rewards/{name}": rewards[name] for name in rewards}
            print(json.dumps(record), file=file)
            if step % 20 == 0:
                evaluated = {"eval_loss": 0.7, "eval_accuracy": step / 50, "eval_margin": step / 8}
                print(json.dumps({"step": step, "eval_seconds": 1.0} | evaluated), file=file)
    shown(browser, folder)
    titles = browser.run("return [...document.querySelectorAll('h2')].map(each => each.textContent)")
    assert titles[:4] == ["dpo loss (mean of the pairs)", "rewards", "reward margin", "reward accuracy"]
    # The columns of a plot: steps, then one for each line.
    values = browser.run("return [...plots].slice(1, 4).map(plot => plot.data.map(each => each[19]))")
    assert values == [[20, 2, -2], [20, 4, 2.5], [20, 0.7, 0.4]]
    text = browser.run("return document.querySelector('main').textContent")
    assert "chosen" in text and "rejected" in text and "accuracy40 %" in text
    assert min(browser.run(COLOURED)) > 100, "each canvas has a curve"


@pytest.mark.slow
def test_a_page_of_a_run_that_was_killed_says_that_it_is_old(browser: Browser, tmp_path: Path) -> None:
    data = report_data(read_run(make_run(tmp_path / "run", running=True)), interval=2.0)
    state = "return document.querySelector('.state').textContent"
    for age, expected in ((0, "running"), (40, "ended without a word")):
        (tmp_path / "report.html").write_text(report_html(data | {"written_at": time.time() - age}))
        browser.open((tmp_path / "report.html").as_uri())
        assert browser.run(state) == expected and browser.run("return document.title").endswith(expected)
        told = "no news since " + data["written"] in browser.run("return document.body.textContent")
        assert told == (expected != "running")
    # A page that is open reads itself again, and then knows.
    (tmp_path / "report.html").write_text(report_html(data | {"written_at": time.time() - 35}))
    browser.open((tmp_path / "report.html").as_uri())
    assert browser.run(state) == "running"
    browser.wait(state + " == 'ended without a word'")
    assert browser.messages() == []


@pytest.mark.slow
def test_hovering_shows_the_values_of_a_step(browser: Browser, tmp_path: Path) -> None:
    browser.resize(1280, 900)
    shown(browser, make_run(tmp_path / "run"))
    box = browser.run("const box = document.querySelector('.u-over').getBoundingClientRect();"
                      "return [box.left, box.top, box.width, box.height]")  # fmt: skip
    browser.move_to(box[0] + box[2] - 1, box[1] + box[3] / 2)
    legends = "return [...document.querySelectorAll('.u-legend')].map(each => each.textContent)"
    browser.wait(legends + ".every(each => each.includes('step120'))")
    text = browser.run(legends)
    assert len(text) == 8, "every chart shows the step"
    assert "train loss2.025" in text[0] and "eval loss2.0333" in text[0]
    assert "utilization40 %" in "".join(text) and "memory954 MiB" in "".join(text)
    rate = "[...document.querySelectorAll('.near')].map(each => each.textContent).join()"
    assert "pause: evaluation 1.5 s" in browser.run("return " + rate)
    browser.move_to(1, 1)
    browser.wait(legends + ".every(each => each.includes('step–'))")
    assert browser.messages() == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 375, 1600])
def test_it_fits_a_phone_and_a_screen_in_light_and_dark(browser: Browser, tmp_path: Path, width: int) -> None:
    folder, grounds = make_run(tmp_path / "run"), set()
    browser.resize(width, 800)
    for is_dark in (False, True):
        browser.dark(is_dark)
        shown(browser, folder)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        grounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    browser.dark(False)
    assert len(grounds) == 2
