"""Comparing runs by their files: settings that differ, the first number that differs, figures; listing runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser import Browser
from config_helpers import BASE, load
from monitor_helpers import run_info, step_metrics

from trainer.cli.main import dispatch
from trainer.config import dump_config
from trainer.errors import UserError
from trainer.monitors import formatting
from trainer.monitors.jsonl import JsonlMonitor
from trainer.monitors.metrics import Totals
from trainer.report.compare import FirstDifference, compare_runs, first_difference, tokens_to_loss
from trainer.report.page import report_data
from trainer.report.record import read_run
from trainer.report.starts import StartMonitor


def step(number: int, loss: float, **changes: object) -> dict[str, object]:
    fields = {"step": number, "epoch": 1, "loss": loss, "lr": 0.5, "global_norm": 1.25, "tokens": 100}
    return {**fields, "step_seconds": 2.0, "input_tokens_per_second": 50.0, "peak_rss_bytes": 3 << 20, **changes}


def evaluation(number: int, loss: float) -> dict[str, object]:
    return {"step": number, "epoch": 1, "eval_loss": loss, "eval_seconds": 1.0}


RECORDS = [step(1, 3.0), step(2, 2.5), evaluation(2, 2.25), step(3, 2.0), evaluation(3, 1.75)]


def write_run(folder: Path, records: list[dict[str, object]] = RECORDS, *pairs: str) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "config.yaml").write_text(dump_config(load(BASE, f"output_dir={folder}", *pairs)), encoding="utf-8")
    return folder


def changed(place: int, **changes: object) -> list[dict[str, object]]:
    return [record | (changes if number == place else {}) for number, record in enumerate(RECORDS)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (RECORDS, None),
        (changed(1, step_seconds=9.0, tokens_per_second=1.0), None),  # times are not compared
        (changed(1, loss=2.5000000000000004), FirstDifference(2, "loss", 2.5, 2.5000000000000004)),
        (changed(0, global_norm=None), FirstDifference(1, "global_norm", 1.25, None)),
        (changed(3, lr=0.25), FirstDifference(3, "lr", 0.5, 0.25)),
        (changed(4, eval_loss=1.5), FirstDifference(3, "eval_loss", 1.75, 1.5)),
        (RECORDS[:3], FirstDifference(3, "step", 3, None)),
        ([*RECORDS, step(4, 1.0)], FirstDifference(4, "step", None, 4)),
        ([*RECORDS, {"step": 3, "save_wait_seconds": 1.0}], None),
        (RECORDS[1:], FirstDifference(1, "step", 1, None)),
        ([], FirstDifference(1, "step", 1, None)),
        ([*RECORDS[:2], *RECORDS[3:]], FirstDifference(2, "eval_loss", 2.25, None)),  # both have step 2
        ([evaluation(0, 4.0), *RECORDS], FirstDifference(0, "eval_loss", None, 4.0)),
    ],
)
def test_the_first_difference_of_two_runs(tmp_path, records, expected):
    left, right = write_run(tmp_path / "left"), write_run(tmp_path / "right", records)
    assert first_difference(left, right) == expected


def test_settings_that_differ_are_named_with_all_values(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", RECORDS, "seed=7", "optimizer.eps=1e-6")]
    found = compare_runs(runs)
    assert found.settings == [("seed", [1, 7]), ("optimizer.eps", [1e-08, 1e-06])]
    assert found.names == ["a", "b"] and found.differences == [None]
    again = compare_runs([runs[0], write_run(tmp_path / "other" / "a")])
    assert again.settings == [] and again.names == [str(runs[0]), str(tmp_path / "other" / "a")]


def test_tokens_to_a_loss_are_those_of_evaluations_or_steps(tmp_path):
    record = read_run(write_run(tmp_path / "a"))
    assert [tokens_to_loss(record, loss) for loss in (3.0, 2.0, 1.0)] == [200, 300, None]
    steps = read_run(write_run(tmp_path / "b", [each for each in RECORDS if "loss" in each]))
    assert [tokens_to_loss(steps, loss) for loss in (3.0, 2.25, 1.0)] == [100, 300, None]


def test_exact_says_by_its_exit_code_whether_the_numbers_are_the_same(tmp_path, capsys):
    left, same = str(write_run(tmp_path / "left")), str(write_run(tmp_path / "same"))
    other = str(write_run(tmp_path / "other", changed(3, loss=2.125)))
    assert dispatch(["compare", left, same, "--exact"]) == 0
    assert "all numbers are the same" in capsys.readouterr().out
    assert dispatch(["compare", left, same, other, "--exact", "--loss", "2"]) == 1
    printed = capsys.readouterr().out
    assert "step 3: loss 2.0 in left, 2.125 in other" in printed and "no key differs" in printed
    assert re.search(r"left +unknown +3/3 +2.0000 +1.7500 at step 3 +300 +50 +3 MiB +300", printed)
    assert dispatch(["compare", left, other]) == 0
    capsys.readouterr()


def test_programs_get_numbers_that_are_not_rounded(tmp_path, capsys):
    loss = 2.123456789012345
    records = [step(1, 3.0), step(2, loss), evaluation(2, loss), step(3, None)]
    left = write_run(tmp_path / "left", records)
    right = write_run(tmp_path / "right", changed(3, loss=2.125), "optimizer.eps=1e-6")
    assert dispatch(["compare", str(left), str(right), "--loss", "2.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first_difference"]["right"] == {"step": 2, "field": "loss", "left": loss, "right": 2.5}
    assert found["settings"] == {"optimizer.eps": {"left": 1e-8, "right": 1e-6}}
    assert found["runs"][0] == {
        "run": "left", "state": "unknown", "outcome": "", "step": 3, "last_step": 3, "loss": loss, "eval_loss": loss,
        "best_eval_loss": loss, "best_eval_step": 2, "tokens": 300, "input_tokens_per_second": 50.0,
        "tokens_per_second": None, "peak_rss_bytes": 3 << 20, "began": None, "folder": str(left), "notes": [],
        "tokens_to_loss": 200,
    }  # fmt: skip
    assert dispatch(["runs", str(tmp_path), "--json"]) == 0
    listed = {run["run"]: run for run in json.loads(capsys.readouterr().out)}
    assert listed["left"] == {key: value for key, value in found["runs"][0].items() if key != "tokens_to_loss"}


def test_the_last_lines_of_a_run_its_report_and_a_comparison_tell_the_same(tmp_path, capsys, monkeypatch):
    totals = Totals()
    monitors = [totals, JsonlMonitor(tmp_path / "a" / "metrics.jsonl"), StartMonitor(tmp_path / "a", "CPU", 1)]
    for monitor in monitors:
        monitor.on_start(run_info(output_dir=tmp_path / "a"))
    for step, rate in enumerate((1.0, 900.0, 200.0, 300.0), start=1):  # the first one compiles; the median is 300
        rates = {"input_tokens_per_second": rate, "tokens_per_second": rate / 2, "step_seconds": 1500 / rate}
        for monitor in monitors:
            monitor.on_step(step_metrics(step, **rates, peak_rss_bytes=5 << 20))
    monkeypatch.setattr("trainer.monitors.metrics.peak_rss_bytes", lambda: 7 << 20)  # the last evaluation takes more
    summary = totals.summary("finished", {})
    for monitor in monitors:
        monitor.close(summary)
    rows = dict(formatting.summary_rows(summary))
    assert rows["tokens"].startswith("6.00k, 300 tokens/s, 150 with loss (median;") and rows["peak memory"] == "7 MiB"
    assert dispatch(["compare", str(tmp_path / "a"), str(write_run(tmp_path / "b"))]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"tokens  median tokens/s  peak memory\n  a .* 6.00k +300 +7 MiB *\n", printed)
    data = report_data(read_run(tmp_path / "a"))
    assert (data["input_tokens_per_second"], data["peak_bytes"]) == (300, 7 << 20)


@pytest.mark.parametrize("width", ["1", "4"])
def test_a_terminal_of_few_columns_is_no_error(tmp_path, monkeypatch, width):
    runs = [str(write_run(tmp_path / name, RECORDS, f"seed={name}")) for name in "12"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", width)
    assert dispatch(["runs", str(tmp_path)]) == dispatch(["compare", *runs]) == 0


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_cell_is_folded_in_a_narrow_terminal(tmp_path, capsys, monkeypatch, width):
    names = [f"learning_rate={rate},seed=1" for rate in ("1e-3", "3e-3")]
    for number, name in enumerate(names):
        write_run(tmp_path / name, RECORDS, f"seed={number}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments, parts in ((["runs", "."], []), (["compare", *names], ["1.7500 at step 3", "3 MiB"])):
        assert dispatch(arguments) == 0
        printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        assert max(map(len, printed.splitlines())) <= width
        for part in (*names, "unknown", "3/3", "2.0000", *parts):
            assert printed.count(part) >= 1, part
    assert dispatch(["runs", "."]) == 0
    printed = capsys.readouterr().out
    assert ("left out, the terminal is narrow: started" in printed) == (width in (60, 80))


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_word_that_is_wider_than_its_place_stays_whole(tmp_path, capsys, monkeypatch, width):
    runs = [str(write_run(tmp_path / f"learning_rate={rate},seed=1,warmup=10")) for rate in ("1e-3", "3e-3")]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    for arguments in (["runs", str(tmp_path)], ["compare", *runs]):
        assert dispatch(arguments) == 0
        printed = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        for name in (Path(run).name for run in runs):
            assert any(word.endswith(name) for word in printed.split()), name


def test_exact_says_what_differs_first(tmp_path, capsys):
    left, other = write_run(tmp_path / "left"), write_run(tmp_path / "other", changed(3, loss=2.125))
    assert dispatch(["compare", str(left), str(other), "--exact"]) == 1
    assert "FIRST DIFFERENCE\n  run    compared with left\n  other  step 3" in capsys.readouterr().out


def test_the_page_needs_nothing_else_and_shows_names_as_text(tmp_path):
    runs = [write_run(tmp_path / "<b>a&b"), write_run(tmp_path / "c", RECORDS[:1])]
    assert dispatch(["compare", *map(str, runs), "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "compare.html").read_text(encoding="utf-8")
    assert "\\u003cb\\u003ea\\u0026b" in page and "<b>" not in page and not re.search("src=|NaN", page)
    assert "default-src 'none'" in page and "connect-src 'none'" in page and page.count("</script>") == 2
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_chart_of_a_loss_names_it(tmp_path):
    runs = {name: write_run(tmp_path / name, RECORDS, f"loss={{type: {name[:3]}}}") for name in ("dpo", "dpo-2", "kto")}
    plain = write_run(tmp_path / "plain")
    for folders, title in (
        ([runs["dpo"], runs["dpo-2"]], "dpo loss (mean of the pairs)"),
        ([runs["kto"], plain], "kto loss (mean of the records) / loss (nats a token)"),
    ):
        assert dispatch(["compare", *map(str, folders), "--output", str(tmp_path / "out")]) == 0
        assert f'"title": "{title}"' in (tmp_path / "out" / "compare.html").read_text().replace('":"', '": "')


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 1280])
def test_a_browser_draws_the_curves_of_all_runs(browser: Browser, tmp_path: Path, width: int) -> None:
    name = "</script><b id=evil>x".replace("/", "_")
    longer = [*RECORDS, step(4, 1.75), step(5, None)]
    runs = [write_run(tmp_path / name), write_run(tmp_path / "longer", longer, "seed=7")]
    assert dispatch(["compare", *map(str, runs), "--output", str(tmp_path / "out")]) == 0
    browser.resize(width, 900)
    grounds = set()
    for is_dark in (True, False):
        browser.dark(is_dark)
        browser.open((tmp_path / "out" / "compare.html").as_uri())
        grounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2 and browser.run("return document.documentElement.scrollWidth") <= width
    titles = browser.run("return [...document.querySelectorAll('h2')].map(each => each.textContent)")
    charts = ["loss (nats a token)", "learning rate", "gradient norm", "tokens/s"]
    assert titles == ["runs", *charts, "configuration", "first difference"]
    text = browser.run("return document.body.textContent")
    assert browser.run("return document.getElementById('evil')") is None and name in text and "seed17" in text
    lines = "return [...plots].map(plot => plot.series.length - 1)"
    assert browser.run(lines) == [6, 2, 2, 2], "each loss smoothed too, and an evaluation for each run"
    box = browser.run("const box = document.querySelector('.u-over').getBoundingClientRect();"
                      "return [box.left, box.top, box.width, box.height]")  # fmt: skip
    browser.move_to(box[0] + box[2] - 1, box[1] + box[3] / 2)
    told = browser.wait("return document.querySelector('.u-legend').textContent.includes('step5') && "
                        "document.querySelector('.u-legend').textContent")  # fmt: skip
    assert "longer" in told
    browser.run("document.querySelector('.legend input').click()")
    assert browser.run(lines) == [3, 1, 1, 1], "a run can be hidden"
    assert browser.messages() == []


def test_runs_are_listed_a_line_each_for_a_pipe(tmp_path, capsys):
    write_run(tmp_path / "deep" / "er" / ("x" * 150))
    write_run(tmp_path / "other", RECORDS[:2])
    (tmp_path / "other" / "checkpoints" / "step-1").mkdir(parents=True)
    assert dispatch(["runs", str(tmp_path)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "step", "loss", "eval", "loss", "started", "folder"]
    assert len(rows) == 2 and all(row.split()[1] == "unknown" for row in rows)
    assert any(row.endswith("/deep/er/" + "x" * 150) and " 3/3 " in row for row in rows)
    assert dispatch(["runs", str(tmp_path), "--json"]) == 0 and len(json.loads(capsys.readouterr().out)) == 2
    assert dispatch(["runs", str(tmp_path / "other" / "checkpoints")]) == 0
    assert "no run below" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["compare", "A"], "name two runs or more"),
        (["compare", "A", "A"], "is named twice"),
        (["compare", "A", "nothing"], "there is no run in this folder"),
        (["runs", "nothing"], "is not a folder"),
        (["compare", "A", "A", "--loss", "low"], "--loss"),
    ],
)
def test_wrong_arguments_are_found(tmp_path, arguments, part):
    write_run(tmp_path / "A")
    with pytest.raises(UserError) as caught:
        dispatch([str(tmp_path / each) if each in ("A", "nothing") else each for each in arguments])
    assert part in str(caught.value)


def test_exact_needs_steps_to_compare(tmp_path):
    left, right = (str(write_run(tmp_path / name, [])) for name in ("left", "right"))
    with pytest.raises(UserError, match="has no step"):
        dispatch(["compare", left, right, "--exact"])
    assert dispatch(["compare", left, right]) == 0


def test_the_answer_is_the_same_where_nobody_reads_the_tables(tmp_path, monkeypatch):
    runs = [str(write_run(tmp_path / "left")), str(write_run(tmp_path / "right"))]
    other = str(write_run(tmp_path / "other", changed(1, loss=9.0)))

    def gone(*texts: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("trainer.tables.print_sections", gone)
    assert dispatch(["compare", *runs, "--exact"]) == 0
    assert dispatch(["compare", *runs, other, "--exact"]) == 1


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2}\n{"step": 2, "lo\n{}\n{"step": 3, "loss": 1e999, "tokens": 1e999}\n',
         [":2: 2 damaged lines were skipped, this is the first one"]),
        ("config.yaml", "seed: 1\noptimizer: [\n", [":3: not valid YAML", "shown without its settings"]),
        ("config.yaml", "seed: x\n", [":1: seed = 'x': must be an integer; its settings are shown as they are"]),
        ("config.yaml", "seed: x\nepoch: 3\n", [":1: seed = 'x'"]),
        ("config.yaml", "\0\xff", ["config.yaml:1: ", "shown without its settings"]),
        ("run.json", '{"starts": [{"began": 3}]}', ["run.json", "shown without its starts"]),
        ("run.json", "{", ["run.json is not valid JSON", "shown without its starts"]),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_note_and_the_rest_is_shown(tmp_path, capsys, name, content, parts):
    runs = [write_run(tmp_path / "left"), write_run(tmp_path / "right")]
    (runs[0] / name).write_text(content, encoding="latin-1")
    assert dispatch(["runs", str(tmp_path)]) == 0
    found = capsys.readouterr()
    assert found.out.count("unknown") == 2 and len(found.err.splitlines()) == 1
    for part in (f"note: {runs[0] / name}", *parts):
        assert part in found.err
    assert dispatch(["compare", *map(str, runs), "--output", str(tmp_path / "out"), "--json"]) == 0
    found = capsys.readouterr()
    assert json.loads(found.out)["runs"][0]["notes"] == [found.err.removeprefix("note: ").strip()]
    assert report_data(read_run(runs[0]))["notes"] == json.loads(found.out)["runs"][0]["notes"]
