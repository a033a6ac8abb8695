"""The programme that runs the whole suite: every file once, sums of what is said, an exit code for any failure."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_suite
from run_suite import FILES_PER_PROCESS, TOGETHER, Batch, batches, closing_line, counts, next_batch, run

JOBS, UNIT = Batch(("tests/parallel/test_a.py",), True), Batch(("tests/unit/test_b.py",), False)
LAUNCHER = Batch(("tests/parallel/test_launcher_c.py",), True, True)


def test_every_test_file_runs_once() -> None:
    files = [file for batch in batches() for file in batch.files]
    root = run_suite.TESTS.parent
    assert sorted(files) == sorted(str(path.relative_to(root)) for path in run_suite.TESTS.rglob("test_*.py"))


def test_one_process_can_import_all_test_files() -> None:
    """Their folders are no packages, so that two files of one name would be one module."""
    names = [path.name for path in run_suite.TESTS.rglob("*.py") if path.name != "conftest.py"]
    assert not {name for name in names if names.count(name) > 1}


def test_no_process_runs_more_files_than_its_memory_allows() -> None:
    for batch in batches():
        folder = batch.files[0].split("/")[1]
        assert len(batch.files) <= FILES_PER_PROCESS[folder] or batch.files in [as_paths(files) for files in TOGETHER]
        assert all(file.startswith(f"tests/{folder}/") for file in batch.files)


def test_files_that_share_a_job_share_a_process() -> None:
    every = [batch.files for batch in batches()]
    assert all(as_paths(files) in every for files in TOGETHER)


def as_paths(files: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"tests/{file}" for file in files)


def test_a_new_folder_is_run_too(tmp_path: Path) -> None:
    for name in ("unit/data/test_a.py", "new/test_b.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert batches(tmp_path) == [Batch(("tests/unit/data/test_a.py",), False), Batch(("tests/new/test_b.py",), False)]


def test_a_job_and_what_waits_run_beside_the_cores_and_in_the_end_on_them() -> None:
    every = [LAUNCHER, JOBS, UNIT]
    assert next_batch(every, 0) == UNIT and next_batch(every, None) == LAUNCHER
    assert next_batch(every, None, [UNIT, LAUNCHER]) == JOBS and next_batch(every, None, [JOBS]) == LAUNCHER
    assert next_batch(every, None, [JOBS, LAUNCHER]) is None and next_batch([UNIT], None) is None
    assert next_batch([LAUNCHER], 1, [LAUNCHER]) == LAUNCHER and next_batch([JOBS], 1, [LAUNCHER]) == JOBS
    assert next_batch([JOBS], 1, [JOBS]) == JOBS and next_batch([JOBS], 1, [JOBS, JOBS]) is None
    assert next_batch([JOBS], None, [JOBS]) is None and next_batch([], 0) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("12 passed in 3.21s", {"passed": 12}),
        ("1 failed, 2 passed, 3 skipped, 4 warnings in 3.21s", {"failed": 1, "passed": 2, "skipped": 3}),
        ("5 passed, 2 errors in 61.00s (0:01:01)", {"passed": 5, "error": 2}),
        ("no tests ran in 0.01s", {}),
    ],
)
def test_counts_of_a_closing_line(line: str, expected: dict[str, int]) -> None:
    assert counts(f"9 passed as a test says\n{line}\n") == expected


def test_the_closing_line() -> None:
    assert closing_line({"passed": 3600, "skipped": 2}, 599) == (
        "3600 passed, 0 failed, 2 skipped in 599.00s (00:09:59)"
    )


def test_a_failure_a_crash_and_a_broken_file_each_fail_the_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    programs = {
        "good": "def test_good(): pass",
        "bad": "def test_bad(): assert 1 == 2",
        "crash": "def test_crash(): import os; os._exit(3)",
        "broken": "import nothing_of_this_name",
    }
    for name, text in programs.items():
        (folder / f"test_{name}.py").write_text(text)
    found = {name: run([Batch((f"tests/unit/test_{name}.py",), False)], [0], tmp_path) for name in programs}
    assert found == {"good": 0, "bad": 1, "crash": 1, "broken": 1}
    printed = capfd.readouterr().out
    assert "assert 1 == 2" in printed and "nothing_of_this_name" in printed
    assert "1 passed, 0 failed, 0 skipped in" in printed and "0 passed, 1 failed, 0 skipped in" in printed
    assert "0 passed, 0 failed, 0 skipped, 1 error in" in printed
    assert "CPU s; the largest process used" in printed
    assert run([Batch(("tests/unit/test_good.py",), False)] * 2, [0], tmp_path) == 0
    printed = capfd.readouterr().out
    assert "[1/2] 1 passed in" in printed and "[2/2] 1 passed in" in printed
