"""scripts/msrun_launcher.sh as users of MindSpore Transformers call it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from launch_helpers import MSRUN, REPOSITORY, WORKER, Launcher, call, python_program
from ports import free_port

from trainer.errors import EXIT_BAD_INPUT

pytestmark = [pytest.mark.slow, pytest.mark.overlapping(8), pytest.mark.xdist_group(__name__)]

SCRIPT = REPOSITORY / "scripts" / "msrun_launcher.sh"
TRICKY = [
    "two words",
    'double " quote',
    "single ' quote",
    "$HOME",
    "`touch ran`",
    "; touch ran",
    "größe 漢字",
    "a\\b",
    "*",
]


def script(folder: Path, *words: object, forked: bool = True, **more: str) -> Launcher:
    environment = {"RUN_TRAINER_MSRUN": str(MSRUN), "PYTHON": python_program(forked), **more}
    return Launcher(folder, ["bash", str(SCRIPT), *map(str, words)], environment)


def test_nothing_in_the_order_is_run_by_a_shell(tmp_path: Path) -> None:
    order = shlex.join([str(WORKER), "2", *TRICKY])
    job = script(tmp_path, order, 2, free_port(), "logs", True, 60, forked=False)
    assert job.end() == 0
    for rank in range(2):
        assert job.facts(rank)["arguments"] == ["2", *TRICKY]
    assert not (tmp_path / "ran").exists()


def test_one_argument_starts_eight_workers_in_the_background(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    worker = folder / "worker.py"
    folder.mkdir()
    worker.write_text("import os, time\nprint('rank', os.environ['RANK_ID'], flush=True)\ntime.sleep(60)\n")
    job = script(folder, "python worker.py", forked=False, MF_LOG_SUFFIX="mine")
    assert job.process.wait(60) == 0
    logs = folder / "output" / "msrun_log_mine"
    assert job.printed.startswith(f"job: {logs}/job\n")
    paths = [logs / f"rank-{rank}.log" for rank in range(8)]
    job.wait_until(lambda: all(path.exists() and path.read_text().startswith("rank") for path in paths))
    assert [path.read_text().split()[1] for path in paths] == [str(rank) for rank in range(8)]
    assert call(folder, "stop", logs)[0] == 0
    assert not job.family()


def test_two_arguments(tmp_path: Path) -> None:
    job = script(tmp_path, f"{WORKER} 2", 3)
    assert job.process.wait(60) == 0
    job.wait_until(lambda: not job.family())
    logs = tmp_path / "output" / "msrun_log"
    assert sorted(path.name for path in logs.glob("rank-*.log")) == [f"rank-{rank}.log" for rank in range(3)]
    assert call(tmp_path, "status", logs)[0] == 0


def test_the_exit_code_of_a_joined_job(tmp_path: Path) -> None:
    job = script(tmp_path, f"{WORKER} 50 1@3:exit=7", 2, free_port(), "logs", "True", 60)
    assert job.end() == 7


def test_this_trainer_is_found_from_anywhere(tmp_path: Path) -> None:
    job = script(tmp_path, "run_trainer.py plan", 2, free_port(), "logs", "True", 60)
    assert job.end() == EXIT_BAD_INPUT and "write `plan --ranks 8`" in job.errors


def test_run_mindformer_py_means_this_trainer(tmp_path: Path) -> None:
    job = script(tmp_path, "run_mindformer.py --config absent.yaml", 2, free_port(), "logs", "True", 60)
    assert job.end() == EXIT_BAD_INPUT and "run_mindformer.py is taken as run_trainer.py" in job.errors
    assert "absent.yaml: the configuration file does not exist" in job.errors


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(tmp_path: Path, flag: str) -> None:
    job = script(tmp_path, flag)
    assert job.end() == 0
    assert "WORKER_NUM MASTER_PORT LOG_DIR JOIN CLUSTER_TIME_OUT" in job.printed and "root=" not in job.printed


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["takes 1, 2, 6 or 9 arguments", "the first argument in quotes"]),
        (["run_trainer.py", "--config", "a.yaml"], ["takes 1, 2, 6 or 9 arguments"]),
        (["run_trainer.py --config 'a.yaml", 2], ["EXECUTE_ORDER", "no closing quotation"]),
        (["", 2], ["EXECUTE_ORDER", "is empty"]),
        (["no_such.py", 2], ["no_such.py", "there is no such file"]),
        (["run_trainer.py", "eight"], ["nproc", "'eight'", "must be an integer"]),
        (["run_trainer.py", 2, "port", "logs", "True", 60], ["master_port", "'port'", "must be an integer"]),
        (["run_trainer.py", 2, 8118, "logs", "Yes", 60], ["join", "'Yes'", "must be true or false"]),
    ],
)
def test_bad_input(tmp_path: Path, words: list[object], parts: list[str]) -> None:
    job = script(tmp_path, *words)
    assert job.end() == EXIT_BAD_INPUT
    assert all(part in job.errors for part in parts), job.errors
    assert "Traceback" not in job.errors
