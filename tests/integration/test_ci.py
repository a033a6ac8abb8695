"""What continuous integration runs, in a scratch git repository: the steps of action.yml, the hook, several files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from fork_server import FORKED, ensure_server
from run_helpers import PROGRAM, write_config, write_corpus

ROOT = Path(PROGRAM).parent
IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b")
INVALID = "model: {model_config: {num_layer: 3}}\nrunner_config: {epochs: 1}\n"


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *IDENTITY, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Provides a repository whose last commit changes one of two training files and adds a wrong one."""
    folder = tmp_path / "repository"
    write_corpus(folder / "data")
    git(folder, "init", "-q", "-b", "main")
    write_config(folder / "same", "data")
    write_config(folder / "changed", "data")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    write_config(folder / "changed", "data", {"model.model_config.num_layers": 3})
    (folder / "wrong.yaml").write_text(INVALID)
    (folder / "notes.yaml").write_text("a: 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "two")
    return folder


def step_environment(step: dict, inputs: dict[str, str]) -> dict[str, str]:
    """Returns the environment of a step of the action, with the values of its inputs."""
    given = {}
    for name, text in step.get("env", {}).items():
        value = re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda match: inputs[match[1]], text)
        assert "${{" not in value, "this test knows inputs only"
        given[name] = value
    return given


def run_action(repository: Path, home: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """Runs the steps of action.yml that have a program, as a runner of GitHub does with a Python that is there."""
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    inputs = {name: str(each["default"]) for name, each in action["inputs"].items()} | given
    programs = [step for step in action["runs"]["steps"] if "run" in step]
    steps = [step for step in programs if "inputs.python == ''" not in step.get("if", "")]
    assert [step["name"] for step in steps] == ["Smoke"]
    environment = {**os.environ, "GITHUB_ACTION_PATH": str(ROOT), "GITHUB_STEP_SUMMARY": str(home / "page.md")}
    for step in steps:
        assert step["shell"] == "bash"
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=repository, capture_output=True, text=True,
            env=environment | step_environment(step, inputs), timeout=600,
        )  # fmt: skip
    return done


def test_the_action_smokes_what_a_pull_request_changes(repository: Path, tmp_path: Path):
    base = git(repository, "rev-parse", "HEAD~1")
    # The runner's checkout of a pull request has one commit alone.
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{repository}", str(clone)], check=True)
    done = run_action(clone, tmp_path, against=base, python=sys.executable, flags="--steps 2")
    assert done.returncode == 2, done.stderr
    results = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}
    assert results == {"changed/run.yaml": "PASS", "wrong.yaml": "INVALID"}
    cases = list(ElementTree.parse(clone / "smoke-reports" / "smoke.xml").iter("testcase"))
    assert [(case.get("name"), [each.tag for each in case]) for case in cases] == [
        ("changed/run.yaml", []), ("wrong.yaml", ["error"])]  # fmt: skip
    summary = (clone / "smoke-reports" / "smoke.md").read_text(encoding="utf-8")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == summary
    assert "| PASS | `changed/run.yaml` | changed: weights" in summary and "num_layer: unknown key" in summary
    assert sorted(path.name for path in (clone / "smoke-reports").iterdir()) == ["smoke.md", "smoke.xml"]


@pytest.mark.parametrize("depth", [["--depth=1"], []], ids=["one commit", "one branch"])
def test_a_checkout_that_has_no_other_branch_fetches_it(repository: Path, tmp_path: Path, depth: list[str]):
    """As Jenkins checks out a change, which is compared with origin/main."""
    git(repository, "checkout", "-qb", "change")
    (repository / "wrong.yaml").write_text(INVALID + "seed: 3\n")
    git(repository, "commit", "-qam", "three")
    clone = tmp_path / "clone"
    command = ["git", "clone", "-q", "--single-branch", "--branch", "change", *depth, f"file://{repository}"]
    subprocess.run([*command, str(clone)], check=True)
    done = run_action(clone, tmp_path, against="origin/main", python=sys.executable)
    assert done.returncode == 2, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["INVALID", "wrong.yaml"]]


def test_a_pull_request_without_training_files_passes(repository: Path, tmp_path: Path):
    (repository / "notes.yaml").write_text("a: 2\n")
    git(repository, "commit", "-qam", "three")
    done = run_action(repository, tmp_path, against="HEAD~1", python=sys.executable)
    assert done.returncode == 0 and "no training file" in done.stdout, done.stderr
    assert "No training file was added or changed." in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_the_hook_tries_what_differs_from_head(repository: Path):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("smoke", "python", False)
    assert re.search(hook["files"], "configs/a.yaml") and re.search(hook["files"], "b.yml")
    program, *arguments = shlex.split(hook["entry"])
    assert program == "run-trainer"
    command = [sys.executable, str(PROGRAM), *arguments]
    assert subprocess.run(command, cwd=repository, capture_output=True, text=True).returncode == 0
    (repository / "same" / "run.yaml").write_text(INVALID)
    git(repository, "add", "-A")
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.startswith("INVALID same/run.yaml"), done.stderr
    git(repository, "reset", "-q", "--hard")
    config = repository / "same" / "run.yaml"
    config.write_text(config.read_text().replace("num_layers: 2", "num_layers: 1"))
    git(repository, "add", "-A")
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("PASS    same/run.yaml"), done.stderr
    assert (repository / "output" / "smoke").is_dir()
    assert "output" not in git(repository, "status", "--porcelain"), "the next commit does not get what it wrote"


def test_several_files_and_a_folder_have_one_list_and_the_code_of_the_worst(repository: Path, tmp_path: Path):
    program = ROOT / "tests" / "parallel" / "forked_workers.py"
    command = [sys.executable, str(FORKED), str(program), "smoke", "changed", "same/run.yaml", "--json", "--steps", "2",
               "--output_dir", str(tmp_path / "out"), "--seed", "3"]  # fmt: skip
    ensure_server()
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    results = [(each["file"], each["result"]) for each in found]
    assert results == [("changed/run.yaml", "pass"), ("same/run.yaml", "pass")]
    assert all(sorted(each["losses"]) == ["1", "2"] and each["resumed_loss"] for each in found)
    folders = {Path(each["folder"]).parents[1] for each in found}
    assert len(folders) == 2 and {folder.parent for folder in folders} == {tmp_path / "out"}
    for name in ("nowhere/smoke.xml", "data"):
        refused = subprocess.run([*command, "--junit", name], cwd=repository, capture_output=True, text=True)
        assert refused.returncode in (1, 2) and refused.stderr.count("error: ") == 1 and "Fix: " in refused.stderr
        assert "Traceback" not in refused.stderr


def test_the_snippets_for_other_systems_are_valid_and_run_the_same_script():
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    github, gitlab, jenkins, hook = blocks
    workflow = yaml.safe_load(github)
    assert workflow["jobs"]["smoke"]["steps"][1]["uses"].startswith("OWNER/run_trainer@")
    job = yaml.safe_load(gitlab)["smoke"]
    assert job["script"][-1].endswith("scripts/ci_smoke.sh") and "scripts/ci_smoke.sh" in jenkins
    assert job["artifacts"]["reports"]["junit"] in jenkins
    assert yaml.safe_load(hook)["repos"][0]["hooks"] == [{"id": "smoke"}]
