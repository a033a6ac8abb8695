"""The parts of `smoke` for several files: which files it takes, how many at a time, and what its reports say."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from config_helpers import BASE

from trainer.ci.files import TrainingFile, find_training_files, is_training_file
from trainer.ci.plans import FilePlan, PlanRow, plan_with_changes
from trainer.ci.report import junit_xml, markdown
from trainer.ci.run import FileOutcome, file_folder, jobs_at_a_time, read_outcome
from trainer.errors import UserError

NEWER = "training: {steps: 3}\nmodel: {num_hidden_layers: 2}\n"


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provides a git repository, in which it also is the working directory."""
    git(tmp_path, "init", "-q", "-b", "main")
    for name, text in (("a.yaml", BASE), ("b.yaml", BASE), ("same.yaml", BASE), ("notes.yaml", "a: 1\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_which_yaml_files_are_of_a_training(tmp_path: Path):
    texts = {BASE: True, NEWER: True, "a: 1\n": False, "model: x\n": False, f"run_mode: predict\n{BASE}": False,
             "model:\n  a: [\nrunner_config: 3\n": True, f"run_mode: 'eval'\n{NEWER}": False}  # fmt: skip
    for number, (text, expected) in enumerate(texts.items()):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert is_training_file(path) is expected, text
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, text in (("metrics.jsonl", ""), ("config.yaml", BASE)):
        (tmp_path / "run" / name).write_text(text)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a.yaml").write_text(BASE)
    found = find_training_files([str(tmp_path), str(tmp_path / "0.yaml"), str(tmp_path / "2.yaml")], None)
    names = [file.path.name for file in found]
    assert names == ["0.yaml", "1.yaml", "5.yaml", "2.yaml"], "a named file is taken whatever it has, and each once"
    with pytest.raises(UserError, match="there is no such file or folder"):
        find_training_files([str(tmp_path / "no.yaml")], None)


def test_what_changed_since_the_commit_in_common(repository: Path):
    git(repository, "checkout", "-qb", "change")
    (repository / "sub").mkdir()
    (repository / "a.yaml").write_text(BASE + "seed: 3\n")
    (repository / "sub" / "new name.yml").write_text(NEWER)
    (repository / "notes.yaml").write_text("a: 2\n")
    (repository / "b.yaml").unlink()
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "two")
    git(repository, "checkout", "-q", "main")
    (repository / "same.yaml").write_text(BASE + "seed: 4\n")  # in main alone: no change of the branch
    git(repository, "commit", "-qam", "three")
    git(repository, "checkout", "-q", "change")
    found = find_training_files([], "main")
    assert found == [TrainingFile(Path("a.yaml"), BASE), TrainingFile(Path("sub/new name.yml"), None)]
    assert find_training_files(["same.yaml"], "main") == [TrainingFile(Path("same.yaml"), BASE)]
    assert find_training_files([], "HEAD") == []
    with pytest.raises(UserError, match="flag --against: --against = 'nowhere'"):
        find_training_files([], "nowhere")


@pytest.mark.parametrize(
    ("code", "printed", "expected"),
    [
        (0, '{"result": "pass"}', (0, "")),
        (1, '{"problem": "the losses differ"}', (1, "the losses differ")),
        (2, '{"problem": "no such key"}', (2, "no such key")),
        (2, "", (2, "complaint")),
        (0, "", (1, "complaint")),
        (143, '{"result": "?"}', (1, "the process ended with exit code 143")),  # no exit code of `smoke`
        (-9, "", (1, "complaint")),
    ],
)
def test_the_outcome_of_a_file(code: int, printed: str, expected: tuple[int, str]):
    texts = io.BytesIO(printed.encode()), io.BytesIO(b"error: complaint\n")
    outcome = read_outcome(TrainingFile(Path("a.yaml"), None), code, 1.5, *texts)
    assert (outcome.exit_code, outcome.problem) == expected


def test_the_difference_of_plans(repository: Path):
    old = BASE.replace("num_layers: 2", "num_layers: 1")
    assert old != BASE
    plan = plan_with_changes(TrainingFile(Path("a.yaml"), old))
    changed = {row.name for row in plan.rows if row.is_changed}
    assert "weights" in changed and not changed & {"ranks", "schedule", "data"}, plan.rows
    weights = next(row for row in plan.rows if row.name == "weights")
    assert int(weights.now.replace(",", "")) > int(weights.before.replace(",", ""))
    assert not any(row.is_changed for row in plan_with_changes(TrainingFile(Path("a.yaml"), BASE)).rows)
    assert "not valid YAML" in plan_with_changes(TrainingFile(Path("a.yaml"), "a: [")).old_problem
    (repository / "bad.yaml").write_text("zzz: 1\n")
    assert "bad.yaml:1: zzz: unknown key" in plan_with_changes(TrainingFile(Path("bad.yaml"), None)).problem


@pytest.mark.parametrize(
    ("files", "ranks", "gib", "cores", "expected"),
    [(5, 1, 64, 4, 4), (2, 1, 64, 4, 2), (5, 1, 2, 4, 2), (5, 2, 64, 4, 2), (5, 8, 64, 4, 1), (5, 1, 0, 4, 1)],
)
def test_as_many_at_a_time_as_cores_and_memory_allow(files: int, ranks: int, gib: int, cores: int, expected: int):
    assert jobs_at_a_time(files, ranks, gib << 30, cores) == expected


def test_files_of_equal_names_have_folders_of_their_own():
    names = {file_folder(Path(name)) for name in ("a/x.yaml", "b/x.yaml", "a-x.yaml", "../a/x.yaml", "a/x.yml")}
    assert len(names) == 5 and all("/" not in name and not name.startswith(".") for name in names)


def outcome(path: str, code: int, problem: str = "", old: str | None = None, **values: object) -> FileOutcome:
    return FileOutcome(TrainingFile(Path(path), old), code, problem, values, 1.5)


OUTCOMES = [
    outcome("a.yaml", 0, old="x", needs=["devices: 8 x Ascend"]),
    outcome("b|c.yaml", 1, "step 2 has no finite loss: <nan> \x07\n  Log: x"),
    outcome("d.yaml", 2, "d.yaml:1: ```zzz```: unknown key"),
]
PLANS = [
    FilePlan([PlanRow("weights", "2", "1"), PlanRow("data", "x", "x")]), FilePlan([PlanRow("weights", "5")]),
    FilePlan([], "no"),
]  # fmt: skip


def test_junit_has_a_case_for_each_file():
    root = ElementTree.fromstring(junit_xml(OUTCOMES))
    assert (root.get("tests"), root.get("failures"), root.get("errors"), root.get("time")) == ("3", "1", "1", "4.500")
    passed, failed, wrong = root.iter("testcase")
    assert passed.get("name") == "a.yaml" and list(passed) == []
    assert [failed[0].tag, failed[0].get("message")] == ["failure", "step 2 has no finite loss: <nan> ?"]
    assert wrong[0].tag == "error" and "unknown key" in (wrong[0].text or "")


def test_the_summary_shows_results_changes_and_problems():
    text = markdown(OUTCOMES, PLANS, "main")
    for line in (
        "| PASS | `a.yaml` | changed: weights | 2 s |", "| FAIL | `b\\|c.yaml` | new file | 2 s |",
        "| INVALID | `d.yaml` | no plan | 2 s |", "| **weights** | 1 | 2 |", "| data | x | x |", "| weights | 5 |",
        "````text", "- devices: 8 x Ascend",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert "No training file was added or changed." in markdown([], [], "main")
