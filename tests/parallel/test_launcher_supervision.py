"""Jobs of stand-in workers under the real launcher and the real worker agents: each end is reported as it was.

Time limits are promises only where they say so; a test waits longer for what is no promise.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch_helpers import LIMIT_SECONDS, MSRUN, PROGRAM, WORKER, Launcher, call, launch

from trainer.errors import EXIT_BAD_INPUT, EXIT_HANG
from trainer.launch.msrun import MSRUN_VARIABLE

pytestmark = [pytest.mark.slow, pytest.mark.overlapping(8), pytest.mark.xdist_group(__name__)]

TRICKY = ["two words", 'double " quote', "single ' quote", "$HOME", "`id`", "größe 漢字", "a\\b", "*", "", "--flag=x y"]
SHORT, SHORTER = {"RUN_TRAINER_TIME_SCALE": "0.3"}, {"RUN_TRAINER_TIME_SCALE": "0.1"}
"""Shortens the launcher's grace periods, where a test waits for one of them to run out."""


def test_a_job_that_ends_well(tmp_path: Path) -> None:
    job = launch(tmp_path, 3, *TRICKY, forked=False, STAND_IN_SCHEDULER="yes")
    assert job.end() == 0
    lines = job.printed.splitlines()
    assert lines[-3:] == ["rank 0 did step 1", "rank 0 did step 2", "rank 0 did step 3"]  # rank 0's, nobody else's
    assert job.log(1).splitlines()[-1] == "rank 1 did step 3"
    assert len(job.errors.splitlines()) == 1 and str(job.logs) in job.errors
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(2):
        facts = job.facts(rank)
        assert facts["arguments"] == ["3", *TRICKY]
        assert facts["folder"] == str(tmp_path)
        assert (facts["RANK_ID"], facts["MS_WORKER_NUM"], facts["MS_ROLE"]) == (str(rank), "2", "MS_WORKER")
        assert facts["RUN_TRAINER_LOCAL_SIZE"] == "2"
        assert facts["path"] == os.environ["PATH"]  # not with the folder that msrun was given
        assert len(facts["cores"]) == int(facts["threads"]) == max(1, len(cores) // 2)
    if len(cores) > 1:
        assert not set(job.facts(0)["cores"]) & set(job.facts(1)["cores"])
    code, said, _ = call(tmp_path, "status", "logs")
    assert code == 0 and "finished" in said and said.count("with exit code 0 at step 3") == 2


def test_many_workers_share_few_cores(tmp_path: Path) -> None:
    job = launch(tmp_path, 1, options=("--nproc", 5))
    assert job.end() == 0
    places = [job.facts(rank)["cores"] for rank in range(5)]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= 5:
        assert all(len(place) == 1 for place in places)
        counts = [places.count([core]) for core in cores]
        assert max(counts) - min(counts) <= 1 and sum(counts) == 5


def test_a_limit_of_open_files_that_is_too_low_is_raised(tmp_path: Path) -> None:
    words = [sys.executable, PROGRAM, "launch", "--nproc", 12, "--log_dir", "logs", "--script", WORKER, 1]
    command = ["bash", "-c", 'ulimit -Sn 16; exec "$@"', "bash", *map(str, words)]
    job = Launcher(tmp_path, command, {MSRUN_VARIABLE: str(MSRUN)})
    assert job.end() == 0 and "error" not in job.errors


def test_a_worker_that_fails_at_a_signal_before_its_first_step_is_stopped(tmp_path: Path) -> None:
    """Like Python, which ends with an error when Ctrl-C interrupts its start."""
    script = tmp_path / "starting.py"
    script.write_text(
        "import sys, time\ntry:\n    print('here', flush=True)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    sys.exit(1)\n"
    )
    words = [sys.executable, PROGRAM, "launch", "--nproc", 2, "--log_dir", "logs", "--script", script]
    job = Launcher(tmp_path, list(map(str, words)), {MSRUN_VARIABLE: str(MSRUN)})
    job.wait_until(lambda: all("here" in job.log(rank) for rank in range(2)))
    job.process.send_signal(signal.SIGINT)
    assert job.end_soon() == 130
    assert "stopped by SIGINT" in job.errors and "failed first" not in job.errors


def test_the_first_failure_ends_the_job_and_is_told(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, "1@3:exit=7", STAND_IN_SCHEDULER="yes")
    job.wait_for_step(2)
    assert job.end_soon() == 7
    assert "rank 1 failed first: exit code 7" in job.errors
    assert f"Log: {job.logs}/rank-1.log" in job.errors
    assert "  | something bad happened" in job.errors
    assert "Ended because of that: rank 0 (ended by SIGTERM)" in job.errors
    assert "saved after SIGTERM" in job.log(0)  # the others have time to end as they should
    code, said, _ = call(tmp_path, "status", "logs")
    assert code == 1 and "rank 1 failed, exit code 7" in said
    assert "(failed first)" in line_of(1, said) and "(ended because of that)" in line_of(0, said)


def test_a_job_that_fails_starts_again(tmp_path: Path) -> None:
    job = launch(tmp_path, 20, "1@3:first=7", options=("--max_restarts", 2))
    assert job.end() == 0
    assert "rank 1 failed first: exit code 7" in job.errors
    assert "restart 1 of 2, from where the job began\n" in job.errors and "restart 2" not in job.errors
    assert job.printed.count("rank 0 did step 20\n") == 1 and job.printed.count("rank 0 did step 1\n") == 2
    assert "saved after SIGTERM" in (job.logs / "rank-0.1.log").read_text()
    code, said, _ = call(tmp_path, "status", "logs")
    assert code == 0 and "finished" in said and "  restarts: 1\n" in said


def test_bad_input_is_not_tried_again(tmp_path: Path) -> None:
    job = launch(tmp_path, 6, "1@3:exit=2", options=("--max_restarts", 2))
    assert job.end() == EXIT_BAD_INPUT and "restart" not in job.errors


def line_of(rank: int, said: str) -> str:
    return next(line for line in said.splitlines() if line.startswith(f"  rank {rank}:"))


def test_an_exception_in_a_worker(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, "0@2:raise")
    assert job.end() == 1
    assert "rank 0 failed first: exit code 1" in job.errors
    assert "  | ValueError: something bad happened" in job.errors


def test_a_killed_worker(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, "1@2:kill")
    assert job.end() == 128 + signal.SIGKILL
    assert "rank 1 failed first: ended by SIGKILL" in job.errors and "memory" in job.errors


def test_who_says_first_that_it_fails_failed_first(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, "1@3:announce=9", "0@20:exit=1", **SHORT)
    job.wait_for_step(2)
    assert job.end_soon() == 9  # rank 1 lingers on, and rank 0 notes the failure and ends before
    assert "rank 1 failed first: exit code 9" in job.errors


def test_who_does_not_listen_is_killed(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, "0@1:deaf", "1@3:exit=7", **SHORT)
    job.wait_for_step(2)
    assert job.end_soon() == 7
    assert "rank 0 (ended by SIGKILL)" in job.errors
    _, said, _ = call(tmp_path, "status", "logs")
    assert "exit code 137" in (line := line_of(0, said)) and "(killed by the launcher when the job was to end)" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_reaches_every_worker(tmp_path: Path, number: signal.Signals) -> None:
    job = launch(tmp_path, 1000)
    job.wait_for_step(2)
    job.process.send_signal(number)
    assert job.end() == 128 + number
    for rank in range(2):
        assert job.log(rank).endswith(f"saved after {number.name}\n")
    assert f"stopped by {number.name}" in job.errors and "error" not in job.errors


def test_a_signal_to_one_worker_names_it_and_stops_all(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000)
    job.wait_for_step(2)
    os.kill(job.facts(1)["pid"], signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM
    assert "SIGTERM, which rank 1 received: the workers finish their step and save" in job.errors
    assert all(job.log(rank).endswith("saved after SIGTERM\n") for rank in range(2))


def test_who_ignores_a_signal_is_killed_at_the_third(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, "0@1:deaf", "1@1:deaf")
    job.wait_for_step(2)
    for _ in range(3):
        job.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert job.end(8) == 128 + signal.SIGINT
    assert "Traceback" not in job.errors


def test_a_signal_before_any_worker_runs(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000)
    job.wait_until(lambda: "launching" in job.errors)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 128 + signal.SIGTERM


def test_a_killed_launcher_leaves_nobody_behind(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, "1@1:deaf", "0@1:child", **SHORT)
    job.wait_for_step(2)
    assert call(tmp_path, "status", "logs")[0] == 0
    sockets = {process.environ().get("RUN_TRAINER_LAUNCHER") for process in job.family()} - {None}
    (scratch,) = (Path(path).parent for path in sockets)
    assert scratch.is_dir()
    job.process.kill()
    job.process.wait()
    began = time.monotonic()
    job.wait_until(lambda: not job.family())
    assert time.monotonic() - began < LIMIT_SECONDS and not scratch.exists()
    assert "saved after SIGTERM" in job.log(0)
    code, said, _ = call(tmp_path, "status", "logs")
    assert code == 1 and "lost" in said
    assert call(tmp_path, "stop", "logs")[0] == 0


def test_a_killed_agent_takes_its_worker_along(tmp_path: Path) -> None:
    """And only that: msrun, which kills all agents when one dies, is gone once all of them run."""
    job = launch(tmp_path, 1000, "1@1:child")
    job.wait_for_step(2)
    assert not any("stand_in_msrun.py" in " ".join(process.cmdline()) for process in job.family())
    psutil.Process(job.facts(1)["pid"]).parent().kill()
    assert job.end() == 128 + signal.SIGKILL
    assert "rank 1 failed first" in job.errors and "saved after SIGTERM" in job.log(0)


def test_stopped_workers_and_agents_end_with_the_job(tmp_path: Path) -> None:
    """Neither acts on a word of the launcher, and a stopped agent does not report an end."""
    job = launch(tmp_path, 1000, "2@20:exit=7", options=("--nproc", 3), **SHORT)
    job.wait_for_step(2, range(3))
    psutil.Process(job.facts(0)["pid"]).parent().suspend()
    psutil.Process(job.facts(1)["pid"]).suspend()
    assert job.end_soon() == 7
    assert "rank 2 failed first" in job.errors
    assert "Ended because of that: rank 0 (ended by SIGKILL), rank 1 (ended by SIGKILL)" in job.errors


def test_a_stopped_worker_is_killed_after_a_signal_to_end(tmp_path: Path) -> None:
    """It cannot save. The other one stands for a rank that waits for it."""
    job = launch(tmp_path, 1000, "0@1:deaf", "0@4:hang", **SHORT)
    job.wait_for_step(3)
    stopped = job.facts(1)["pid"]
    psutil.Process(stopped).suspend()
    job.process.send_signal(signal.SIGINT)
    assert job.end_soon() == 128 + signal.SIGINT
    assert f"  Stopped by a signal (SIGSTOP or the like): rank 1, process {stopped}." in job.errors
    assert "failed" not in job.errors


def test_a_rank_that_holds_the_others_up_is_named_once(tmp_path: Path) -> None:
    """The other one stands for a rank that waits for it."""
    go_on = tmp_path / "go_on"
    job = launch(tmp_path, 60, f"0@6:after={go_on}", **SHORTER)
    job.wait_for_step(2)
    stopped = psutil.Process(job.facts(1)["pid"])
    stopped.suspend()
    time.sleep(2)
    go_on.touch()
    stopped.resume()
    assert job.end() == 0
    lines = [line for line in job.errors.splitlines() if line.startswith("rank 1 ")]
    text = f"rank 1 was stopped by a signal (SIGSTOP or the like, process {stopped.pid}); the others wait."
    assert lines == [text, "rank 1 is making progress again."]


def test_a_stopped_agent_is_woken_to_report_the_end(tmp_path: Path) -> None:
    job = launch(tmp_path, 20)
    job.wait_for_step(2)
    psutil.Process(job.facts(1)["pid"]).parent().suspend()
    assert job.end() == 0


def test_a_child_of_a_worker_ends_with_it(tmp_path: Path) -> None:
    job = launch(tmp_path, 2, "0@1:child", "1@1:child")
    assert job.end() == 0


def test_a_hang_is_found_and_shown(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, "0@4:hang", "1@4:deaf", "1@5:hang", options=("--hang_timeout", 2), **SHORTER)
    job.wait_for_step(3)
    began = time.monotonic()
    assert job.end() == EXIT_HANG
    assert time.monotonic() - began < LIMIT_SECONDS + 2
    assert "no step was finished for 2 s (--hang_timeout)." in job.errors
    assert "\nrank 0 is stuck after step 3; other ranks finished step 4 and are waiting.\n" in f"\n{job.errors}"
    for rank in range(2):
        assert "in wait_for_ever" in job.log(rank) and "most recent call first" in job.log(rank)


def test_a_machine_that_stands_still_is_no_hang(tmp_path: Path) -> None:
    """All processes are stopped at once, as those of a laptop that sleeps."""
    go_on = tmp_path / "go_on"
    job = launch(tmp_path, 8, f"0@5:after={go_on}", options=("--hang_timeout", 6), forked=False)
    job.wait_for_step(3)
    family = job.family()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # msrun, which the launcher ends about now
            process.suspend()
    time.sleep(9)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    go_on.touch()
    assert job.end() == 0
    assert re.search(r"the launcher could not run for \d+ s: this machine was suspended, or is overloaded", job.errors)


def test_a_slow_first_step_is_no_hang(tmp_path: Path) -> None:
    """The start has a limit of its own, which is also that of what comes before the first step."""
    given = ("--hang_timeout", 0.5, "--start_timeout", 4)
    job = launch(tmp_path, 1000, "0@1:tokenize", "0@1:hang", "1@1:hang", options=given, **SHORT)
    job.wait_until(lambda: "facts" in job.log(0) and "facts" in job.log(1))
    psutil.Process(job.facts(1)["pid"]).suspend()
    assert job.end() == EXIT_HANG
    since = "the last text that was tokenized"
    assert f"the first step was not finished within 4 s of {since} (--start_timeout)." in job.errors
    assert "  Fix: if a step may take that long, give a larger --start_timeout; 0 is no limit.\n" in job.errors
    assert "Stopped by a signal (SIGSTOP or the like): rank 1, process" in job.errors
    assert "in wait_for_ever" in job.log(0)


def test_logs_of_earlier_jobs_stay(tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        assert launch(tmp_path, steps).end() == 0
    logs = tmp_path / "logs"
    for name, steps in (("rank-0.1.log", 1), ("rank-1.2.log", 2), ("rank-0.log", 3)):
        assert (logs / name).read_text().endswith(f"did step {steps}\n")
    assert {"job", "job.1", "job.2"} <= {path.name for path in logs.iterdir()}


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, forked=False)
    job.wait_for_step(1)
    second = Launcher(tmp_path / "second", [*job.process.args, "--log_dir", str(job.logs)], {})
    assert second.end() == EXIT_BAD_INPUT
    assert f"a job is running with this folder (launcher: process {job.process.pid})" in second.errors
    job.process.terminate()
    assert job.end() == 128 + signal.SIGTERM


def test_in_the_background(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, options=("--join", False), forked=False)
    assert job.process.wait(60) == 0
    assert job.printed.startswith(f"job: {job.logs}/job\n")
    job.wait_for_step(3)
    code, said, _ = call(tmp_path, "status", "logs")
    assert code == 0 and ": runs" in said and "rank 1: running (process" in said and "at step" in said
    code, said, _ = call(tmp_path, "stop", "logs")
    assert code == 0 and "stopped by SIGTERM" in said
    assert not job.family() and "saved after SIGTERM" in job.log(1)
    code, said, _ = call(tmp_path, "status", "logs/job")
    assert code == 1 and "exit code 143" in said


def test_an_msrun_that_fails_is_shown(tmp_path: Path) -> None:
    broken = tmp_path / "broken_msrun.py"
    broken.write_text("raise SystemExit('this msrun is broken')\n")
    job = launch(tmp_path, 5, RUN_TRAINER_MSRUN=str(broken))
    assert job.end() == 1
    assert "msrun failed" in job.errors and "  | this msrun is broken" in job.errors


def test_a_signal_to_every_process_of_a_job_is_one_signal(tmp_path: Path) -> None:
    """Ends a job as batch systems do: msrun ends of the signal, agents ignore it, and the workers get it a second
    time."""
    job = launch(tmp_path, 1000)
    job.wait_for_step(2)
    for process in job.family():
        with contextlib.suppress(psutil.NoSuchProcess):  # the first signals may have ended it already
            process.terminate()
    assert job.end() == 128 + signal.SIGTERM
    assert all(job.log(rank).endswith("saved after SIGTERM\n") for rank in range(2))


def test_a_terminal_that_is_closed_ends_the_job(tmp_path: Path) -> None:
    job = launch(tmp_path, 1000, hangup=signal.SIG_DFL)
    job.wait_for_step(2)
    job.process.send_signal(signal.SIGHUP)
    assert job.end() == 128 + signal.SIGTERM
    assert all(job.log(rank).endswith("saved after SIGTERM\n") for rank in range(2))


def test_a_terminal_that_is_closed_under_nohup_does_not(tmp_path: Path) -> None:
    job = launch(tmp_path, 20, hangup=signal.SIG_IGN)  # inherited, as under nohup
    job.wait_for_step(2)
    job.process.send_signal(signal.SIGHUP)
    assert job.end() == 0


def test_odd_places(tmp_path: Path) -> None:
    """A folder for temporary files that is too deep for a socket, a log folder with spaces, signs no terminal knows."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    here = {"TMPDIR": str(deep), "LC_ALL": "C", "LANG": "C"}
    job = launch(tmp_path, 1, "größe", options=("--log_dir", "my logs ü"), forked=False, **here)
    assert job.end() == 0
    assert "did step 1" in (tmp_path / "my logs ü" / "rank-1.log").read_text()
