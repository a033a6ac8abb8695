"""Bad input of the launcher: one message with key, value, rule and fix, before anything starts."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ports import free_port

from trainer.cli.main import dispatch
from trainer.errors import UserError
from trainer.launch.arguments import LaunchOptions
from trainer.launch.checks import check_launch
from trainer.run.prepare import build_plan

REPOSITORY = Path(__file__).resolve().parents[3]
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
GIB = 1 << 30


@pytest.fixture
def options(tmp_path: Path) -> LaunchOptions:
    """Returns a job that can run."""
    return LaunchOptions(
        worker_num=4, local_worker_num=4, log_dir=tmp_path / "logs", arguments=("--config", QUICKSTART)
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Returns a Python file of the user's own, which nobody looks into."""
    path = tmp_path / "mine.py"
    path.write_text("")
    return path


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def check(options: LaunchOptions, left_bytes: int) -> None:
    check_launch(options, build_plan, left_bytes=left_bytes)


def refusal(options: LaunchOptions, left_bytes: int = 64 * GIB) -> str:
    with pytest.raises(UserError) as caught:
        check(options, left_bytes=left_bytes)
    assert caught.value.exit_code == 2 and "\n  Fix: " in str(caught.value)
    return str(caught.value)


def test_a_job_that_can_run_is_left_alone(options: LaunchOptions, script: Path) -> None:
    for good in (
        options,
        replace(options, worker_num=1, local_worker_num=1),
        replace(options, master_addr="localhost", master_port=free_port()),
        replace(options, worker_num=8, node_rank=1, master_addr="10.255.255.1", master_port=8118),
        replace(options, script=script, arguments=("anything", "--at-all")),
        replace(options, arguments=("train", "--config", QUICKSTART, "--seed", "3")),
    ):
        check(good, left_bytes=64 * GIB)
    assert options.log_dir.is_dir()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"worker_num": 0, "local_worker_num": 0}, ["worker_num = 0: must be at least 1"]),
        ({"local_worker_num": 5}, ["local_worker_num = 5: must be from 1 to the number of all workers, 4"]),
        ({"local_worker_num": 0}, ["local_worker_num = 0"]),
        ({"local_worker_num": 3}, ["equally many workers, and 4 is not a multiple of 3", "set it to 2 or 4"]),
        ({"node_rank": 1}, ["node_rank = 1: with all workers on one node it is 0"]),
        ({"worker_num": 8, "node_rank": 2}, ["node_rank = 2: the nodes are 0 to 1"]),
        ({"node_rank": -1}, ["node_rank = -1"]),
        ({"cluster_time_out": 0}, ["cluster_time_out = 0: must be at least 1 second"]),
        ({"script": Path("/nowhere/train.py")}, ["script = '/nowhere/train.py': there is no such file"]),
        ({"max_restarts": -1}, ["max_restarts = -1: must be at least 0"]),
        ({"elastic": True, "max_restarts": 1}, ["elastic = true", "add --max_restarts 2 or more"]),
        ({"elastic": True, "max_restarts": 2, "worker_num": 8}, ["works on one node", "--max_restarts alone"]),
        ({"master_port": 0}, ["master_port = 0: must be from 1 to 65535"]),
        ({"master_port": 70_000}, ["master_port = 70000: must be from 1 to 65535", "8118"]),
        ({"master_port": -5}, ["master_port = -5"]),
        ({"master_addr": ""}, ["master_addr = '': is neither an IP address nor the name of a host"]),
        ({"master_addr": "10.0.0"}, ["master_addr = '10.0.0': is neither"]),
        ({"master_addr": "10.0.0.300"}, ["'10.0.0.300': is neither"]),
        ({"master_addr": "10.0.0.1:8118"}, ["is neither", "the port is master_port"]),
        ({"master_addr": "http://node0"}, ["is neither"]),
        ({"master_addr": "two words"}, ["is neither"]),
        ({"master_addr": "-dash"}, ["is neither"]),
        ({"master_addr": "0.0.0.0"}, ["master_addr = '0.0.0.0': is not the address of one machine", "reach node 0"]),
        ({"master_addr": "0x0"}, ["master_addr = '0x0': is not the address of one machine (0.0.0.0)"]),
        ({"master_addr": "::"}, ["is not the address of one machine"]),
        ({"master_addr": "[::]"}, ["is not the address of one machine"]),
        ({"master_addr": "::ffff:0.0.0.0"}, ["is not the address of one machine"]),
        ({"master_addr": "224.0.0.1"}, ["is not the address of one machine"]),
        ({"master_addr": "ff02::1"}, ["is not the address of one machine"]),
        ({"master_addr": "255.255.255.255"}, ["is not the address of one machine"]),
        ({"master_addr": "no-such-host.invalid"}, ["master_addr = 'no-such-host.invalid': no such host is known ("]),
        ({"master_addr": "203.0.113.7"}, ["'203.0.113.7': is no address of this machine, which is node 0"]),
    ],
)
def test_values_that_cannot_be(options: LaunchOptions, changes: dict, parts: list[str]) -> None:
    message = refusal(replace(options, **changes))
    assert all(part in message for part in ("launch: ", *parts)), message


def test_more_workers_than_files_may_be_open_are_refused(
    options: LaunchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The soft limit counts for nothing: the launcher raises it."""
    limits = (10, 40)
    monkeypatch.setattr("trainer.launch.checks.resource.getrlimit", lambda kind: limits)
    message = refusal(replace(options, worker_num=16, local_worker_num=8))
    assert "local_worker_num = 8: the launcher of so many workers has 42 files and sockets open" in message
    assert "this system allows 40" in message and "start 6 workers or fewer on a node" in message
    check(options, left_bytes=64 * GIB)
    limits = (10, resource.RLIM_INFINITY)
    check(replace(options, worker_num=16, local_worker_num=8), left_bytes=64 * GIB)


@pytest.mark.parametrize("devices", ["0-3", "0,,1", "0,x"])
def test_devices_that_are_no_numbers_are_refused_where_they_matter(
    options: LaunchOptions, monkeypatch: pytest.MonkeyPatch, devices: str
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", devices)
    with pytest.raises(UserError, match="ASCEND_RT_VISIBLE_DEVICES = .*must be numbers with commas"):
        check(replace(options, max_restarts=2, elastic=True), left_bytes=64 * GIB)
    check(options, left_bytes=64 * GIB)


def test_a_port_in_use_is_refused_where_the_scheduler_will_listen(options: LaunchOptions, busy_port: int) -> None:
    assert f"master_port = {busy_port}: is in use on this machine" in refusal(replace(options, master_port=busy_port))
    check(replace(options, worker_num=8, node_rank=1, master_port=busy_port), left_bytes=64 * GIB)


def test_the_folder_of_the_logs_must_be_writable(options: LaunchOptions, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written to (" in refusal(replace(options, log_dir=tmp_path / "file"))
    assert "log_dir = " in refusal(replace(options, log_dir=tmp_path / "file" / "below"))
    assert "cannot be written to (" in refusal(replace(options, log_dir=Path("/proc/logs")))


def test_the_logs_of_the_run_are_not_in_the_way_of_those_of_the_launcher(
    options: LaunchOptions, tmp_path: Path
) -> None:
    both = replace(options, arguments=(*options.arguments, "--output_dir", str(tmp_path)))
    assert "is where the run itself keeps its logs" in refusal(both)
    check(replace(both, log_dir=tmp_path / "msrun"), left_bytes=64 * GIB)


def test_more_workers_than_memory_allows_are_refused(options: LaunchOptions, script: Path) -> None:
    message = refusal(options, left_bytes=GIB)
    assert "nproc = 4: 4 workers on this host need about 2,6" in message and "and 1,024 MiB are left" in message
    assert "start 1, or spread them over more nodes" in message and "--force" in message
    assert "Fix: a smaller runner_config.batch_size" in refusal(options, left_bytes=GIB // 2)
    check(replace(options, force=True), left_bytes=GIB)
    check(replace(options, script=script), left_bytes=GIB)
    sublayers = replace(options, local_worker_num=2)
    check(sublayers, left_bytes=2 * GIB)  # memory is that of a host
    assert "2 workers on this host" in refusal(sublayers, left_bytes=GIB)


def test_sharing_the_optimizer_state_lets_more_workers_in(options: LaunchOptions) -> None:
    large = ("--config", str(REPOSITORY / "configs" / "bench_dense.yaml"), "--batch_size", "1")
    whole = replace(options, arguments=(*large, "--model.model_config.num_layers", "48"))
    shared = replace(whole, arguments=(*whole.arguments, "--parallel.enable_parallel_optimizer"))
    message = refusal(whole, left_bytes=9 * GIB // 2)
    assert "4 workers" in message
    check(shared, left_bytes=9 * GIB // 2)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["--config: a run needs its YAML file"]),
        (("--config", "/nowhere.yaml"), ["/nowhere.yaml"]),
        (("--config", QUICKSTART, "--epoch", "3"), ["--epoch"]),
        (("--config", QUICKSTART, "--nporc", "2"), ["--nporc: unknown flag", "you probably mean --nproc"]),
        ((QUICKSTART,), ["the YAML file comes after --config", f"write --config {QUICKSTART}"]),
        (("--config", QUICKSTART, "--use_parallel", "False"), ["use_parallel = false: the job has 4 ranks"]),
        (("--config", QUICKSTART, "--parallel_config.context_parallel", "2",
          "--parallel_config.context_parallel_algo", "hybrid_cp", "--parallel_config.ulysses_degree_in_cp", "3"),
         ["ulysses_degree_in_cp", "must divide context_parallel 2"]),
        (("--config", QUICKSTART, "--parallel_config.data_parallel", "3"), ["needs 3 ranks, but the job has 4"]),
        (("--config", QUICKSTART, "--device_target", "Ascend"), ["no usable Ascend", "no CANN libraries"]),
        (("plan", "--config", QUICKSTART), ["launch: plan: only trainings", "plan --ranks 8"]),
        (("export", "--config", QUICKSTART), ["launch: export: only trainings", "leave `launch` out"]),
    ],
)
def test_what_would_end_every_worker_at_once_is_found_before(
    options: LaunchOptions, arguments: tuple[str, ...], parts: list[str]
) -> None:
    message = refusal(replace(options, arguments=arguments))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--train_dataset_dir", "/nowhere"], "train_dataset.data_loader.dataset_dir = '/nowhere': the path does not"),
        (["--resume_training"], "there is nothing to resume"),
    ],
)
def test_data_and_checkpoint_are_looked_for_by_the_launcher(tmp_path: Path, flags: list[str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        own = ["--nproc", "2", "--log_dir", str(tmp_path / "logs"), "--output_dir", str(tmp_path / "run")]
        dispatch(["launch", *own, "--config", QUICKSTART, *flags])
    assert part in str(caught.value)
    assert not list((tmp_path / "logs").iterdir()), "no job was begun"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["run_trainer.py --config CONFIG", "eight"], "must be an integer"),
        (["nowhere.py", "2"], "script = 'nowhere.py': there is no such file"),
        (["run_trainer.py --config nowhere.yaml", "2"], "nowhere.yaml"),
        (["run_trainer.py --config CONFIG", "2", "65536", "logs", "True", "60"], "master_port = 65536: must be from 1"),
        (
            ["run_trainer.py --config CONFIG", "4", "2", "127.0.0.1", "8118", "2", "logs", "True", "60"],
            "node_rank = 2: the nodes are 0 to 1",
        ),
        (["run_trainer.py --config CONFIG", "2", "8118"], "takes 1, 2, 6 or 9 arguments"),
    ],
)
def test_the_script_ends_with_exit_code_2_before_anything_starts(words: list[str], part: str, tmp_path: Path) -> None:
    words = [word.replace("CONFIG", QUICKSTART) for word in words]
    done = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "msrun_launcher.sh"), *words],
        cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and part in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.rglob("job*"))
