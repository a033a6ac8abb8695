"""Completion of command lines: which words are proposed, and what real shells make of them."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import typer

from trainer.cli.completion import FILES, SCRIPTS, candidates, completion_script
from trainer.cli.main import app, dispatch
from trainer.errors import UserError

GROUP = typer.main.get_command(app)


def words_after(line: str) -> list[str]:
    """Returns the proposed words for a line whose last word is being written; a space at its end begins a new one."""
    return [candidate.word for candidate in candidates(GROUP, line.split(" "))]


def test_the_first_word_is_a_command():
    found = words_after("")
    assert {"train", "plan", "smoke", "completion"} <= set(found) and not {"complete", "smoke-worker"} & set(found)
    assert words_after("com") == ["compare", "completion"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--run_mode ", ["train", "finetune", "eval", "predict", "chat"]),
        ("plan --run_mode p", ["predict"]),
        ("plan --run_mode=p", ["--run_mode=predict"]),
        ("--optimizer.type ", ["AdamW", "PmaAdamW", "SGD", "Muon"]),
        ("--use_clip_grad ", ["true", "false"]),
        ("--callbacks.0.type Early", ["EarlyStop"]),
        ("convert a.yaml --to ", ["1.x", "2.0"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("--config ", [FILES]),
        ("plan --train_dataset_dir ", [FILES]),
        ("plan --train_dataset.tokenizer.path a", [FILES]),
        ("verify ", [FILES]),
        ("verify --json ", [FILES]),
        ("--seed ", []),
        ("plan --audit ", ["ascend"]),
        ("status --", ["--help", "--json"]),
        ("status --optimizer.", []),
    ],
)
def test_values_and_files(line: str, expected: list[str]):
    assert words_after(line) == expected


def test_flags_are_those_of_the_command_and_all_keys():
    found = words_after("plan --")
    assert {"--verbose", "--ranks", "--config", "--run_mode", "--optimizer.", "--callbacks.0."} <= {*found}
    assert len(found) == len(set(found)) and "--merge" not in found and "--merge" in words_after("export --")
    assert "--nproc" in words_after("launch --n")
    assert "--runner_config.epochs" in words_after("launch --runner_config.e")
    assert "--optimizer.betas" in words_after("--optimizer.") and words_after("--model.model_config.num_lay") == [
        "--model.model_config.num_layers"]


def test_a_shell_without_completion_is_refused():
    with pytest.raises(UserError, match="no completion for this shell(.|\n)*write one of bash, zsh, fish"):
        completion_script("tcsh")


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture) -> Path:
    """Provides the script of a shell, which must be installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    assert dispatch(["completion", request.param]) == 0
    path = tmp_path / f"completion.{request.param}"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    (tmp_path / "my file.yaml").write_text("")
    return path


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash(script: Path):
    def replies(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in ("run-trainer", *words))
        program = f"""source '{script}'; compopt() {{ echo "option ${{@: -1}}"; }}
            COMP_WORDS=({line}); COMP_CWORD={len(words)}; _run_trainer; printf '%s\\n' "${{COMPREPLY[@]}}" """
        command = ["bash", "--norc", "-c", program]
        return subprocess.run(command, cwd=script.parent, capture_output=True, text=True).stdout.splitlines()

    assert replies("plan", "--run_mode", "") == ["train", "finetune", "eval", "predict", "chat"]
    assert replies("conv") == ["convert"]
    assert replies("--config", "my") == ["option filenames", "my file.yaml"]
    assert replies("--lr_sch") == ["option nospace", "--lr_schedule."]


@pytest.mark.parametrize("script", ["fish"], indirect=True)
def test_fish(script: Path):
    def replies(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source '{script}'; complete -C '{line}'"]
        done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True)
        return [each.split("\t")[0] for each in done.stdout.splitlines()]

    assert replies("run-trainer plan --run_mode p") == ["predict"]
    assert replies("run-trainer conv") == ["convert"]
    assert replies("run-trainer --config my") == ["my file.yaml"]


@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh(script: Path):
    """Types into a real zsh and reads what it makes of the tabulator key."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(script.parent)
        os.environ["TERM"] = "dumb"
        os.execvp("zsh", ["zsh", "-f", "-i"])

    def typed(keys: str, until: str) -> None:
        os.write(terminal, keys.encode())
        screen = ""
        deadline = time.monotonic() + 60
        while not re.search(until, screen):
            assert time.monotonic() < deadline, screen
            if select.select([terminal], [], [], 1)[0]:
                screen += os.read(terminal, 65536).decode(errors="replace")

    try:
        typed(f"PS1=ready; autoload -Uz compinit && compinit -u -D && source {script} && print go''od\n", "good")
        typed("run-trainer conv\t", "convert ")
        typed("\x15run-trainer plan --run_mode p\t", "predict ")
        typed("\x15run-trainer --config my\t", r"my\\ file\.yaml")
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_each_script_runs_this_program():
    for shell in SCRIPTS:
        text = completion_script(shell)
        assert "run_trainer.py complete -- " in text and "@" not in text.replace("[@]", "").replace("(@", "")
